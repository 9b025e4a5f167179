"""Commands for tests, run in a fork of this process: it has imported what they would import first.

So are the ranks that a command's launcher starts, forks of the launcher: they spend on their work
what fresh ones spend on imports, three seconds of a core each. Process numbers, parents, sessions,
environments and signals are those of fresh ones, which a few tests start all the same.
"""

from __future__ import annotations

import faulthandler
import gc
import logging
import os
import runpy
import signal
import socket
import subprocess
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Sequence
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import IO, Any

import torch
import torch.distributed.launcher.api  # with torch, most of a command's start
from torch.distributed.elastic.multiprocessing import api as elastic
from torch.distributed.elastic.multiprocessing.subprocess_handler import SubprocessHandler

from tests.support.forking import HANG_S, await_ended_threads

POLL_S = 0.02

MAX_FORKED = 2
"""Ranks that are forks of their launcher. It has threads that resolve names by the time that it
forks the third one: on a busy machine such a rank found their lock taken, and never made a store
(three times in about forty runs of four ranks)."""


def onefold(
    *arguments: str, cwd: Path | None = None, timeout_s: float = HANG_S, out: int | None = None
) -> subprocess.CompletedProcess[str]:
    """`onefold *arguments`, up to its end; more ranks than may be forked need no launcher."""
    ranks = _num_ranks(arguments)
    if ranks > MAX_FORKED and out is None and arguments[0] in ("train", "check"):
        body = partial(_main, arguments)
        return _without_launcher(body, ["onefold", *arguments], ranks, cwd, timeout_s)
    return begin(*arguments, cwd=cwd, timeout_s=timeout_s, out=out).end()


def begin(
    *arguments: str, cwd: Path | None = None, timeout_s: float = HANG_S, out: int | None = None
) -> Command:
    """`onefold *arguments`, which goes on beside the test; `out` is its stdout, else a file."""

    body = partial(_main, arguments)
    forks = _num_ranks(arguments) <= MAX_FORKED
    return Command(body, ["onefold", *arguments], cwd, timeout_s, forks_ranks=forks, out=out)


def _main(arguments: Sequence[str]) -> Any:
    from onefold.app.cli.main import main

    return main(list(arguments))


def _num_ranks(arguments: Sequence[str]) -> int:
    """The value of --ranks; 2 without one."""
    given = dict(pairwise(arguments)).get("--ranks", "2")
    return int(given) if given.isdecimal() else 2


def torchrun(
    *arguments: str,
    ranks: int = 2,
    cwd: Path | None = None,
    timeout_s: float = HANG_S,
    forks_ranks: bool = True,
) -> subprocess.CompletedProcess[str]:
    """`torchrun` on `ranks` local ranks, one thread each, up to its end."""
    if forks_ranks and ranks > MAX_FORKED and arguments[0] != "-m":
        argv = [sys.executable, *arguments]
        return _without_launcher(partial(_run_python, argv), argv, ranks, cwd, timeout_s)
    argv = ["torchrun", "--standalone", f"--nproc-per-node={ranks}", *arguments]

    def body() -> None:
        from torch.distributed.run import main

        os.environ["OMP_NUM_THREADS"] = "1"
        main(argv[1:])

    forks = forks_ranks and ranks <= MAX_FORKED
    return Command(body, argv, cwd, timeout_s, forks_ranks=forks).end()


def _without_launcher(
    run: Callable[[], Any], argv: list[str], ranks: int, cwd: Path | None, timeout_s: float
) -> subprocess.CompletedProcess[str]:
    """Forks of this process, which has no such threads, with the variables that torchrun sets."""
    port = free_port()
    both = {"WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": ranks, "MASTER_PORT": port}

    def body(rank: int) -> Any:
        own = {"RANK": rank, "LOCAL_RANK": rank, **both}
        os.environ |= {name: str(value) for name, value in own.items()}
        os.environ |= {"MASTER_ADDR": "127.0.0.1", "OMP_NUM_THREADS": "1"}
        torch.set_num_threads(1)
        return run()

    begun = [
        Command(partial(body, rank), argv, cwd, timeout_s, forks_ranks=False)
        for rank in range(ranks)
    ]
    while None in (codes := [command.poll() for command in begun]) and not any(codes):
        time.sleep(POLL_S)
    for command in begun:
        if command.poll() is None:  # another rank has failed
            os.kill(command.pid, signal.SIGTERM)
    ended = [command.end() for command in begun]
    code = next(filter(None, codes), 0)
    out, err = "".join(each.stdout for each in ended), "".join(each.stderr for each in ended)
    return subprocess.CompletedProcess(argv, code, out, err)


def free_port() -> int:
    """A port that no process listens on."""
    with socket.socket() as held:
        held.bind(("localhost", 0))
        return int(held.getsockname()[1])


def script(path: Path, *, timeout_s: float = HANG_S) -> subprocess.CompletedProcess[str]:
    """`python path` on one thread, up to its end."""
    argv = [sys.executable, str(path)]

    def body() -> None:
        _run_python(argv)

    return Command(body, argv, None, timeout_s, forks_ranks=False).end()


class Forked:
    """A process that this one forked: what torch's launcher asks of a `subprocess.Popen`."""

    def __init__(self, be: Callable[[], None], args: Sequence[str]) -> None:
        self.args = args
        self.returncode: int | None = None
        sys.stdout.flush()
        sys.stderr.flush()
        await_ended_threads()
        self.pid = os.fork()
        if self.pid == 0:
            be()

    def poll(self) -> int | None:
        if self.returncode is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                self.returncode = os.waitstatus_to_exitcode(status)
        return self.returncode

    def wait(self, timeout: float) -> int:
        deadline = time.monotonic() + timeout
        while (code := self.poll()) is None:
            if time.monotonic() > deadline:
                raise subprocess.TimeoutExpired(self.args, timeout)
            time.sleep(POLL_S)
        return code


class Command(Forked):
    """A process with the command line `argv` that calls `body`; the system ends it in time."""

    def __init__(
        self, body: Callable[[], Any], argv: list[str], cwd: Path | None, timeout_s: float, *,
        forks_ranks: bool, out: int | None = None,
    ) -> None:  # fmt: skip
        self._out: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115 - closed in `end`
        self._err: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115
        self._timeout_s = timeout_s

        def be() -> None:
            signal.setitimer(signal.ITIMER_REAL, timeout_s)
            if forks_ranks and not torch.cuda.is_available():  # no process shares a GPU by forking
                elastic.get_subprocess_handler = ForkedRank
            if cwd is not None:
                os.chdir(cwd)
                sys.path.insert(0, str(cwd))  # as `python -m` has it
            sys.argv = argv
            _be(body, self._out.fileno() if out is None else out, self._err.fileno())

        super().__init__(be, argv)

    @property
    def out(self) -> str:
        """What it has written to stdout so far."""
        return _content(self._out)

    def until(self, has_told: Callable[[str], bool]) -> None:
        """Wait for what it writes to stdout."""
        while not has_told(self.out):
            assert self.poll() is None, _content(self._err)
            time.sleep(POLL_S)

    def end(self) -> subprocess.CompletedProcess[str]:
        """What it wrote, and its exit code, once it has ended."""
        self.wait(self._timeout_s + HANG_S)
        assert self.returncode is not None
        out, err = self.out, _content(self._err)
        self._out.close()
        self._err.close()
        if self.returncode == -signal.SIGALRM:
            raise TimeoutError(f"{self.args} still runs after {self._timeout_s} s:\n{err}")
        return subprocess.CompletedProcess(self.args, self.returncode, out, err)


def _content(file: IO[bytes]) -> str:
    """All of a file whose position is another process's to move."""
    return os.pread(file.fileno(), os.fstat(file.fileno()).st_size, 0).decode()


class ForkedRank(SubprocessHandler):
    """A rank that is a fork of its launcher."""

    def _popen(self, args: tuple[str, ...], env: dict[str, str]) -> Any:
        def be() -> None:
            os.setsid()
            os.environ.clear()
            os.environ.update(env)
            torch.set_num_threads(int(env["OMP_NUM_THREADS"]))
            logging.disable(logging.NOTSET)
            if "-P" in args and os.getcwd() in sys.path:
                sys.path.remove(os.getcwd())
            out = 1 if self._stdout is None else self._stdout.fileno()
            err = 2 if self._stderr is None else self._stderr.fileno()
            _be(lambda: _run_python(args), out, err)

        return Forked(be, args)


def _run_python(args: Sequence[str]) -> None:
    """What `python [-uP] script ...` or `python [-uP] -m module ...` runs."""
    at = next(i for i, word in enumerate(args) if i and (word == "-m" or word[0] != "-"))
    if args[at] == "-m":
        sys.argv = list(args[at + 1 :])
        runpy.run_module(args[at + 1], run_name="__main__", alter_sys=True)
    else:
        sys.argv = list(args[at:])
        sys.path.insert(0, str(Path(args[at]).parent))
        runpy.run_path(args[at], run_name="__main__")


def _be(body: Callable[[], Any], out: int, err: int) -> None:
    """Be a process that calls `body`: with signals, output and warnings of one that just began."""
    code: Any = 1
    gc.freeze()  # see tests/support/ranks.py
    try:
        for number in signal.valid_signals():
            if callable(signal.getsignal(number)):
                signal.signal(number, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        os.dup2(out, 1)
        os.dup2(err, 2)
        sys.stdout, sys.stderr = os.fdopen(1, "w"), os.fdopen(2, "w")
        faulthandler.register(signal.SIGALRM, sys.stderr, chain=True)  # says where it hangs
        warnings.resetwarnings()
        warnings.simplefilter("ignore", DeprecationWarning)
        code = body() or 0
    except SystemExit as end:
        code = end.code or 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code if isinstance(code, int) else 1)
