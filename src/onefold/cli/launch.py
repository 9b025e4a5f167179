"""Local ranks through torch's own elastic launcher.

Each rank is the same command line again, with RANK in its environment.
"""

from __future__ import annotations

import logging
import os
import signal
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Sequence

from onefold.cli.failures import LAUNCHER, leave_line, tell
from onefold.errors import ConfigError, expected

GRACE_S = 5
"""Ranks that have not ended so long after they were told to are killed."""


def world_size_of(ranks: int | None) -> int:
    """The world that the launcher made, which `--ranks` may repeat but not contradict."""
    world_size = int(os.environ.get("WORLD_SIZE", "1"))
    if ranks not in (None, world_size):
        raise ConfigError(
            expected(
                f"--ranks to be {world_size}, as this process was launched",
                ranks,
                hint="leave --ranks out under torchrun",
            )
        )
    return world_size


def default_ranks() -> int:
    """One for each GPU; two where there is none."""
    import torch

    return torch.cuda.device_count() if torch.cuda.is_available() else 2


def launch(argv: Sequence[str], ranks: int) -> int:
    """Run `onefold *argv` on `ranks` local ranks; the exit code.

    An interrupt ends the ranks and is raised as `KeyboardInterrupt`.
    """
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    logging.disable(logging.CRITICAL)  # the launcher's own lines; failures are told below
    os.environ.update(_environment(ranks))
    signal.signal(signal.SIGINT, signal.default_int_handler)
    prog = f"onefold {argv[0]}"
    with tempfile.TemporaryDirectory(prefix="onefold_") as folder:
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
            signals_to_handle="SIGTERM,SIGHUP,SIGQUIT",  # and SIGINT as Python has it
        )
        try:
            elastic_launch(config, sys.executable)("-P", "-m", "onefold", *argv)
        except ChildFailedError as error:
            exits = {rank: failure.exitcode for rank, failure in error.failures.items()}
            return tell(prog, folder, exits)
        except SignalException as error:
            leave_line()
            print(f"{prog}: ended by {error.sigval.name}", file=sys.stderr)
            return 128 + error.sigval
        except KeyboardInterrupt:  # the launcher has ended the ranks on its way out
            leave_line()
            raise
    return 0


def _environment(ranks: int) -> dict[str, str]:
    """What ranks inherit: their share of the cores, the loopback link, no chatter."""
    from onefold.training.machine import usable_cores

    wanted = {
        "OMP_NUM_THREADS": str(max(1, usable_cores() // ranks)),
        "TORCH_CPP_LOG_LEVEL": "ERROR",
        "CUBLAS_WORKSPACE_CONFIG": ":4096:8",  # repeatable sums on a GPU, where asked for
    }
    loopback = [name for _, name in socket.if_nameindex() if name in ("lo", "lo0")]
    if loopback:
        wanted["GLOO_SOCKET_IFNAME"] = loopback[0]
    unset = {name: value for name, value in wanted.items() if name not in os.environ}
    return {**unset, LAUNCHER: str(os.getpid())}


def end_with_launcher() -> None:
    """Have this rank end when the launcher that started it is gone, however that was."""
    launcher = os.environ.get(LAUNCHER)
    if launcher is None:
        return

    def watch() -> None:
        while os.getppid() == int(launcher):
            time.sleep(1)
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()
