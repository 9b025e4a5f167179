"""Launch local ranks through torch's own elastic launcher, and report the failure of one.

Each rank is the same command line again, with RANK in its environment. Ranks of our launcher print
no errors. Each writes its error to the file that torch's elastic agent names, and the launcher
prints the error that caused the others.
"""

from __future__ import annotations

import json
import logging
import os
import signal
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from onefold.app.cli.arguments import one_line
from onefold.errors import ConfigError, OnefoldError, WireError
from onefold.wire import launcher

if TYPE_CHECKING:
    from onefold.wire.world import World

T = TypeVar("T")

LAUNCHER = "ONEFOLD_LAUNCHER_PID"
"""Environment variable with the process number of our launcher."""

PIDS = "ONEFOLD_PIDS"
"""Environment variable with the folder to which ranks write their process numbers."""

GRACE_S = 5
"""Seconds between a request to end and the kill; 30 on torch 2.11, which fixes them."""


def is_rank() -> bool:
    """True in a process that a launcher started: ours, or any that sets torch's variables."""
    return "RANK" in os.environ or os.environ.get("WORLD_SIZE", "") not in ("", "1")


def world_size_of(ranks: int | None) -> int:
    """Return the launcher's world size, which `--ranks` may repeat but not contradict."""
    world_size = launcher.world_size()
    if ranks not in (None, world_size):
        wanted = f"--ranks to be {world_size}, as this process was launched"
        raise ConfigError(wanted, ranks, hint="leave --ranks out under torchrun")
    return world_size


def default_ranks(on_cpu: int = 2) -> int:
    """Return one rank for each GPU, or `on_cpu` without a GPU."""
    from onefold.tier import accelerator

    return accelerator.count() or on_cpu


def launch(argv: Sequence[str], ranks: int, *, passes_stops_on: bool = False) -> int:
    """Run `onefold *argv` on `ranks` local ranks; return the exit code.

    An interrupt ends the ranks and raises `KeyboardInterrupt`. With `passes_stops_on` the first
    SIGINT or SIGTERM only goes to the ranks, which save and end by themselves.
    """
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    from onefold.compat import known_fields

    logging.disable(logging.CRITICAL)  # `print_failure` prints failures, not torch's launcher
    os.environ.update(_environment(ranks))
    prog = f"onefold {argv[0]}"
    with tempfile.TemporaryDirectory(prefix="onefold_") as folder:
        os.environ[PIDS] = folder
        stops = _PassOn(folder)
        signal.signal(signal.SIGINT, stops if passes_stops_on else signal.default_int_handler)
        if passes_stops_on:
            signal.signal(signal.SIGTERM, stops)
        config = LaunchConfig(
            min_nodes=1,
            max_nodes=1,
            nproc_per_node=ranks,
            run_id="onefold",
            rdzv_backend="c10d",
            rdzv_endpoint="127.0.0.1:0",
            local_addr="127.0.0.1",
            max_restarts=0,
            logs_specs=DefaultLogsSpecs(log_dir=folder),
            **known_fields(LaunchConfig, shutdown_timeout=GRACE_S),
            signals_to_handle="SIGHUP,SIGQUIT" if passes_stops_on else "SIGTERM,SIGHUP,SIGQUIT",
        )
        try:
            elastic_launch(config, sys.executable)("-P", "-m", "onefold", *argv)
        except ChildFailedError as error:
            exits = {rank: failure.exitcode for rank, failure in error.failures.items()}
            if stops.passed_on and -stops.passed_on in exits.values():  # before it could save
                return _ended(prog, signal.Signals(stops.passed_on))
            return print_failure(prog, folder, exits)
        except SignalException as error:
            return _ended(prog, error.sigval)
        except KeyboardInterrupt:  # the launcher has ended the ranks
            leave_line()
            raise
    return 0


def _ended(prog: str, by: signal.Signals) -> int:
    leave_line()
    print(f"{prog}: ended by {by.name}", file=sys.stderr)
    return 128 + by


class _PassOn:
    """A signal handler: the first request to stop goes to the ranks, the second ends them."""

    def __init__(self, folder: str) -> None:
        self._folder = folder
        self.passed_on = 0  # the signal's number

    def __call__(self, number: int, _: object) -> None:
        from torch.distributed.elastic.multiprocessing import SignalException

        pids = [int(path.suffix[1:]) for path in Path(self._folder).glob("rank.*")]
        if self.passed_on or not pids:  # no ranks: nothing to save
            sys.unraisablehook = lambda _: None  # torch's launcher is interrupted anywhere
            raise SignalException("a request to stop", signal.Signals(number))
        self.passed_on = number
        for pid in pids:
            with suppress(ProcessLookupError):
                os.kill(pid, number)


def _environment(ranks: int) -> dict[str, str]:
    """Return the environment of ranks: their share of the cores, the loopback link, no warnings."""
    from onefold.tier.host import usable_cores
    from onefold.wire.interfaces import loopback

    wanted = {
        **loopback(),
        "OMP_NUM_THREADS": str(max(1, usable_cores() // ranks)),
        "TORCH_CPP_LOG_LEVEL": "ERROR",
        "CUBLAS_WORKSPACE_CONFIG": ":4096:8",  # repeatable sums on a GPU, where asked for
    }
    unset = {name: value for name, value in wanted.items() if name not in os.environ}
    return {**unset, LAUNCHER: str(os.getpid())}


def end_with_launcher() -> None:
    """End this rank when the launcher that started it has ended.

    Writes the process number for the launcher, which passes signals on.
    """
    pid = os.environ.get(LAUNCHER)
    if pid is None:
        return
    if PIDS in os.environ:
        Path(os.environ[PIDS], f"rank.{os.getpid()}").touch()
    _end_with(int(pid))


def _end_with(pid: int) -> None:
    """End this process once its parent `pid` is gone."""

    def watch() -> None:
        while os.getppid() == pid:
            time.sleep(1)
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


RESULT = "ONEFOLD_RESULT"
"""Environment variable with the file to which rank 0 of a measurement writes its result."""


def measure_in_ranks(argv: Sequence[str], ranks: int) -> tuple[int, Any]:
    """Launch `onefold *argv`; return its exit code and the result of rank 0, None without one."""
    with tempfile.TemporaryDirectory(prefix="onefold_") as folder:
        path = Path(folder, "result.json")
        os.environ[RESULT] = str(path)
        code = launch(argv, ranks)
        return code, json.loads(path.read_text()) if path.exists() else None


def measure_as_rank(measure: Callable[[World], T]) -> T | None:
    """Join the other ranks and measure. Return the result if this rank is to print it.

    Ranks of `measure_in_ranks` use CPUs alone, and rank 0 writes the result for the launcher. Under
    torchrun, rank 0 prints.
    """
    end_with_launcher()
    from onefold.wire.world import joined

    path = os.environ.get(RESULT)
    with joined(use_gpus=path is None) as world:
        result = measure(world)
    if world.rank == 0 and path is not None:
        Path(path).write_text(json.dumps(result))
    return result if world.rank == 0 and path is None else None


# failures


@dataclass(frozen=True, slots=True)
class RankFailure:
    """The failure of a rank. `is_echo`: a failed peer caused it."""

    rank: int
    code: int
    line: str  # empty: the rank has printed it
    trace: str  # of errors that are not ours
    is_echo: bool


def record_failure(error: BaseException | None, code: int) -> bool:
    """Write a rank's failure for our launcher; return False if another one started the rank.

    Without an error, the command has printed its findings, as a failed check.
    """
    path = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if "RANK" not in os.environ or LAUNCHER not in os.environ or not path:
        return False
    is_ours = error is None or isinstance(error, OnefoldError)
    line = "" if error is None else one_line(error)
    failure = RankFailure(
        rank=int(os.environ["RANK"]),
        code=code,
        line=line if is_ours else f"{type(error).__name__}: {line}",
        trace="" if is_ours else "".join(traceback.format_exception(error)),
        is_echo=isinstance(error, WireError) or "gloo" in str(error) or "NCCL" in str(error),
    )
    now = {"timestamp": str(int(time.time())), "py_callstack": failure.trace}
    message = {"message": failure.line, "extraInfo": now}  # torch's format
    draft = Path(f"{path}.draft")  # the launcher may end this rank, and read, at any moment
    draft.write_text(json.dumps({"message": message, "onefold": asdict(failure)}))
    draft.replace(path)
    return True


def print_failure(prog: str, folder: str, exit_codes: dict[int, int]) -> int:
    """Print the failure that caused the others; return its exit code.

    `folder` holds the ranks' files. `exit_codes` are negative where a signal ended the rank.
    """
    killed = {
        rank: -code for rank, code in exit_codes.items() if code < 0 and -code != signal.SIGTERM
    }
    files = (json.loads(path.read_text()) for path in Path(folder).rglob("error.json"))
    failures = [RankFailure(**file["onefold"]) for file in files if "onefold" in file]
    failures.sort(key=lambda failure: (failure.is_echo, -failure.code, failure.rank))
    if failures and not (failures[0].is_echo and killed):
        first = failures[0]
        if not first.line:
            return first.code
        leave_line()
        where = "" if first.code == 2 else f"rank {first.rank}: "  # bad input is bad on all ranks
        print(f"{first.trace}{prog}: {where}{first.line}", file=sys.stderr)
        return first.code
    leave_line()
    rank, code = next(iter((killed or exit_codes).items()))
    ending = f"by {signal.Signals(code).name}" if killed else f"with exit code {code}"
    hint = " (hint: the system may be out of memory)" if code == signal.SIGKILL else ""
    print(f"{prog}: expected every rank to finish, rank {rank} ended {ending}{hint}",
          file=sys.stderr)  # fmt: skip
    return 1


def leave_line() -> None:
    """Show the cursor again, below the progress bar of a killed rank."""
    if sys.stderr.isatty():
        print("\x1b[?25h", file=sys.stderr)
