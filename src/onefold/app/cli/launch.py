"""Launch local ranks through torch's own elastic launcher.

Each rank is the same command line again, with RANK in its environment.
"""

from __future__ import annotations

import json
import logging
import os
import signal
import sys
import tempfile
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from onefold.app.cli.failures import LAUNCHER, leave_line, print_failure
from onefold.errors import ConfigError
from onefold.wire import launcher

if TYPE_CHECKING:
    from onefold.wire.world import World

T = TypeVar("T")

PIDS = "ONEFOLD_PIDS"
"""Environment variable with the folder to which ranks write their process numbers."""

GRACE_S = 5
"""Seconds between a request to end and the kill."""


def world_size_of(ranks: int | None) -> int:
    """Return the launcher's world size, which `--ranks` may repeat but not contradict."""
    world_size = launcher.world_size()
    if ranks not in (None, world_size):
        wanted = f"--ranks to be {world_size}, as this process was launched"
        raise ConfigError(wanted, ranks, hint="leave --ranks out under torchrun")
    return world_size


def default_ranks() -> int:
    """Return one rank for each GPU, or two without a GPU."""
    import torch

    return torch.accelerator.device_count() or 2


def launch(argv: Sequence[str], ranks: int, *, passes_stops_on: bool = False) -> int:
    """Run `onefold *argv` on `ranks` local ranks; return the exit code.

    An interrupt ends the ranks and raises `KeyboardInterrupt`. With `passes_stops_on` the first
    SIGINT or SIGTERM only goes to the ranks, which save and end by themselves.
    """
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

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
            shutdown_timeout=GRACE_S,
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
    from onefold.wire.local_ranks import end_with

    pid = os.environ.get(LAUNCHER)
    if pid is None:
        return
    if PIDS in os.environ:
        Path(os.environ[PIDS], f"rank.{os.getpid()}").touch()
    end_with(int(pid))


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
    """Join the other ranks and measure. Return the result if this rank is the one to print it.

    Ranks of `measure_in_ranks` use CPUs alone, and rank 0 writes the result for the launcher. Under
    torchrun, rank 0 prints.
    """
    end_with_launcher()
    from onefold.wire.world import joined

    path = os.environ.get(RESULT)
    with joined(use_gpus=path is None) as world:
        found = measure(world)
    if world.rank > 0:
        return None
    if path is None:
        return found
    Path(path).write_text(json.dumps(found))
    return None
