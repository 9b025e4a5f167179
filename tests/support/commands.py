"""Commands for tests, run in a fork of this process: it has imported what they would import first.

So are the ranks that a command's launcher starts: they spend on their work what fresh ones spend on
imports, three seconds of a core each. Process numbers, parents, sessions, environments and signals
are those of fresh ones, which a few tests start all the same.
"""

from __future__ import annotations

import ctypes
import faulthandler
import logging
import os
import pickle
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
from importlib import import_module
from pathlib import Path
from typing import IO, Any

import torch
import torch.distributed.launcher.api  # with torch, most of a command's start
from torch.distributed.elastic.multiprocessing import api as elastic
from torch.distributed.elastic.multiprocessing.subprocess_handler import SubprocessHandler

from tests.support.forking import HANG_S, await_ended_threads, spare_collector

POLL_S = 0.02

WARM = ("onefold.app.train.loop", "onefold.app.generate.run", "torch.distributed.pipelining")
"""What ranks of commands import, two seconds of a core each."""

PR_SET_CHILD_SUBREAPER = 36
"""Of prctl(2): who is orphaned below this process becomes its child."""


def onefold(
    *arguments: str, cwd: Path | None = None, timeout_s: float = HANG_S, out: int | None = None
) -> subprocess.CompletedProcess[str]:
    """`onefold *arguments`, up to its end."""
    return begin(*arguments, cwd=cwd, timeout_s=timeout_s, out=out).end()


def begin(
    *arguments: str, cwd: Path | None = None, timeout_s: float = HANG_S, out: int | None = None
) -> Command:
    """`onefold *arguments`, which goes on beside the test; `out` is its stdout, else a file."""
    body = partial(_main, arguments)
    return Command(body, ["onefold", *arguments], cwd, timeout_s, forks_ranks=True, out=out)


def _main(arguments: Sequence[str]) -> Any:
    from onefold.app.cli.main import main

    return main(list(arguments))


def torchrun(
    *arguments: str,
    ranks: int = 2,
    cwd: Path | None = None,
    timeout_s: float = HANG_S,
    forks_ranks: bool = True,
) -> subprocess.CompletedProcess[str]:
    """`torchrun` on `ranks` local ranks, one thread each, up to its end."""
    argv = ["torchrun", "--standalone", f"--nproc-per-node={ranks}", *arguments]

    def body() -> None:
        from torch.distributed.run import main

        os.environ["OMP_NUM_THREADS"] = "1"
        main(argv[1:])

    return Command(body, argv, cwd, timeout_s, forks_ranks=forks_ranks).end()


def script(path: Path, *, timeout_s: float = HANG_S) -> subprocess.CompletedProcess[str]:
    """`python path` on one thread, up to its end."""
    argv = [sys.executable, str(path)]

    def body() -> None:
        _run_python(argv)

    return Command(body, argv, None, timeout_s, forks_ranks=False).end()


def fork(be: Callable[[], None]) -> int:
    """Fork this process; the new one calls `be`, which does not return. Returns its number."""
    sys.stdout.flush()
    sys.stderr.flush()
    await_ended_threads()
    pid = os.fork()
    if pid == 0:
        be()
    return pid


class Forked:
    """A child of this process: what torch's launcher asks of a `subprocess.Popen`."""

    def __init__(self, pid: int, args: Sequence[str]) -> None:
        self.pid, self.args = pid, args
        self.returncode: int | None = None

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
        for name in WARM if forks_ranks else ():
            import_module(name)

        def be() -> None:
            signal.setitimer(signal.ITIMER_REAL, timeout_s)
            if cwd is not None:
                os.chdir(cwd)
                sys.path.insert(0, str(cwd))  # as `python -m` has it
            if forks_ranks and not torch.cuda.is_available():  # no process shares a GPU by forking
                elastic.get_subprocess_handler = partial(ForkedRank, RankMaker())
            sys.argv = argv
            _be(body, self._out.fileno() if out is None else out, self._err.fileno())

        super().__init__(fork(be), argv)

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


class RankMaker:
    """A process of one thread that forks the ranks of this one, a launcher's that has none yet.

    By the time that a launcher starts its ranks it has threads, of torch's store and of the
    rendezvous. What these hold at that moment, the resolver's lock for one, a rank that is forked
    from the launcher itself never gets: on a busy machine about one launch in a few hundred hung.
    """

    def __init__(self) -> None:
        ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
        self._asks, asked = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        if os.fork() == 0:
            self._asks.close()
            os.setsid()  # the launcher's signals are not its own
            try:
                while _fork_rank(asked):
                    pass
            finally:
                os._exit(0)
        asked.close()

    def fork(self, args: Sequence[str], env: dict[str, str], out: int, err: int) -> int:
        """Return the number of a rank, a child of this process, that runs `python *args`."""
        asked = pickle.dumps((args, env, os.getcwd()))
        socket.send_fds(self._asks, [asked], [out, err])
        return int(self._asks.recv(16))


def _fork_rank(asked: socket.socket) -> bool:
    """Fork what `RankMaker.fork` asks for; False once the launcher has ended."""
    message, files, _, _ = socket.recv_fds(asked, 1 << 20, 2)
    if not message:
        return False
    read, write = os.pipe()
    if os.fork() == 0:  # ends at once, so that the rank becomes the launcher's child
        parent = os.getpid()
        rank = os.fork()
        if rank:
            os.write(write, str(rank).encode())
            os._exit(0)
        for file in (asked.detach(), read, write):
            os.close(file)
        while os.getppid() == parent:
            time.sleep(POLL_S)
        _be_rank(*pickle.loads(message), *files)
    os.wait()
    asked.send(os.read(read, 16))
    for file in (*files, read, write):
        os.close(file)
    return True


def _be_rank(args: Sequence[str], env: dict[str, str], cwd: str, out: int, err: int) -> None:
    os.setsid()
    os.chdir(cwd)
    os.environ.clear()
    os.environ.update(env)
    torch.set_num_threads(int(env["OMP_NUM_THREADS"]))
    logging.disable(logging.NOTSET)
    if "-P" in args and cwd in sys.path:
        sys.path.remove(cwd)
    _be(lambda: _run_python(args), out, err)


class ForkedRank(SubprocessHandler):
    """A rank that is no fresh process."""

    def __init__(self, maker: RankMaker, *args: Any, **kwargs: Any) -> None:
        self._maker = maker
        super().__init__(*args, **kwargs)

    def _popen(self, args: tuple[str, ...], env: dict[str, str]) -> Any:
        out = 1 if self._stdout is None else self._stdout.fileno()
        err = 2 if self._stderr is None else self._stderr.fileno()
        return Forked(self._maker.fork(args, env, out, err), args)


def _run_python(args: Sequence[str]) -> dict[str, Any]:
    """What `python [-uP] script ...` or `python [-uP] -m module ...` runs. Returns its globals."""
    at = next(i for i, word in enumerate(args) if i and (word == "-m" or word[0] != "-"))
    if args[at] == "-m":
        sys.argv = list(args[at + 1 :])
        return runpy.run_module(args[at + 1], run_name="__main__", alter_sys=True)
    sys.argv = list(args[at:])
    sys.path.insert(0, str(Path(args[at]).parent))
    return runpy.run_path(args[at], run_name="__main__")


def forget_accelerate() -> None:
    """Let Accelerate join as in a new process: an earlier test may have joined as a single one."""
    if module := sys.modules.get("accelerate.state"):
        for state in ("AcceleratorState", "GradientState", "PartialState"):
            getattr(module, state)._reset_state()


def _be(body: Callable[[], Any], out: int, err: int) -> None:
    """Be a process that calls `body`: with signals, output and warnings of one that just began."""
    code: Any = 1
    spare_collector()
    forget_accelerate()
    try:
        for number in signal.valid_signals():
            if callable(signal.getsignal(number)):
                signal.signal(number, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        os.dup2(out, 1)
        os.dup2(err, 2)
        sys.stdout, sys.stderr = (os.fdopen(number, "w", closefd=False) for number in (1, 2))
        faulthandler.register(signal.SIGALRM, sys.stderr, chain=True)  # says where it hangs
        warnings.resetwarnings()
        warnings.simplefilter("ignore", DeprecationWarning)
        # What a script leaves lives until `os._exit`. The reducer of a DDP, freed as the last to
        # hold its group of gloo, joins the group's threads with Python's lock, which one of them
        # may wait for (torch 2.13.0): now and then a rank of a plain script hung at its end.
        left = body()
        code = left if isinstance(left, int) else 0
    except SystemExit as end:
        code = end.code or 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code if isinstance(code, int) else 1)
