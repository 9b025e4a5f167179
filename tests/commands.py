"""Commands for tests, run in a fork of this process: it has imported what they would import first.

What a command starts itself, its ranks above all, starts as anywhere.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import traceback
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch.distributed.launcher.api  # noqa: F401 - with torch, most of a command's start

LIMIT_S = 60


def onefold(
    *arguments: str, cwd: Path | None = None, timeout_s: float = LIMIT_S
) -> subprocess.CompletedProcess[str]:
    """`onefold *arguments`, up to its end."""

    def body() -> Any:
        from onefold.cli.main import main

        return main(list(arguments))

    return forked(body, ["onefold", *arguments], cwd=cwd, timeout_s=timeout_s)


def torchrun(
    *arguments: str, ranks: int = 2, cwd: Path | None = None, timeout_s: float = LIMIT_S
) -> subprocess.CompletedProcess[str]:
    """`torchrun` on `ranks` local ranks, one thread each, up to its end."""
    argv = ["torchrun", "--standalone", f"--nproc-per-node={ranks}", *arguments]

    def body() -> None:
        from torch.distributed.run import main

        os.environ["OMP_NUM_THREADS"] = "1"
        main(argv[1:])

    return forked(body, argv, cwd=cwd, timeout_s=timeout_s)


def forked(
    body: Callable[[], Any], argv: list[str], *, cwd: Path | None, timeout_s: float
) -> subprocess.CompletedProcess[str]:
    """A process that is `body`, with this command line: what it wrote, and its exit code."""
    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as err:
        pid = os.fork()
        if pid == 0:
            _be(body, argv, cwd, out.fileno(), err.fileno(), timeout_s)
        _, status = os.waitpid(pid, 0)
        code = os.waitstatus_to_exitcode(status)
        out.seek(0)
        err.seek(0)
        if code == -signal.SIGALRM:
            raise TimeoutError(f"{argv} still runs after {timeout_s} s:\n{err.read()}")
        return subprocess.CompletedProcess(argv, code, out.read(), err.read())


def _be(
    body: Callable[[], Any], argv: list[str], cwd: Path | None, out: int, err: int, timeout_s: float
) -> None:
    code: Any = 1
    try:
        signal.setitimer(signal.ITIMER_REAL, 0)  # the test's own limit is the parent's
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.setitimer(signal.ITIMER_REAL, timeout_s)
        os.dup2(out, 1)
        os.dup2(err, 2)
        sys.stdout, sys.stderr = os.fdopen(1, "w"), os.fdopen(2, "w")
        warnings.resetwarnings()
        warnings.simplefilter("ignore", DeprecationWarning)
        sys.argv = argv
        if cwd is not None:
            os.chdir(cwd)
            sys.path.insert(0, str(cwd))  # as `python -m` has it
        code = body() or 0
    except SystemExit as end:
        code = end.code or 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code if isinstance(code, int) else 1)
