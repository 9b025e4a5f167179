"""Ranks as processes, each with a simulated device of its own."""

from __future__ import annotations

import faulthandler
import os
import pickle
import sys
import tempfile
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from tests.sim import building, device
from tests.support.forking import HANG_S, spare_collector
from tests.support.ranks import HANGS_AFTER, WARM


def run_sim(
    world_size: int,
    body: Callable[..., Any],
    *args: Any,
    backend: str | None = device.BACKENDS,
    checks_races: bool = True,
    **options: Any,
) -> list[Any]:
    """Call the module-level `body(rank, *args)` on ranks with a device each; results in rank order.

    Args:
        args: they travel by pickle.
        backend: of the process group; None starts none.
        checks_races: raise `Race` if the device has found one, on any rank.
        options: of the device, as `configure` takes them.
    """
    library = building.built()
    options.setdefault("devices", world_size)
    # a process that is forked from this one would count devices as autograd does here: none
    mp.set_forkserver_preload(list(WARM))
    with tempfile.TemporaryDirectory() as folder:
        arguments = (world_size, folder, library, backend, checks_races, options, body, args)
        mp.start_processes(_process, arguments, nprocs=world_size, start_method="forkserver")
        return [pickle.loads(Path(folder, str(rank)).read_bytes()) for rank in range(world_size)]


def _process(
    rank: int, world_size: int, folder: str, library: Path, backend: str | None,
    checks_races: bool, options: dict[str, Any], body: Callable[..., Any], args: Any,
) -> None:  # fmt: skip
    spare_collector()
    os.environ |= {"OMP_NUM_THREADS": "1", "LOCAL_RANK": str(rank)}
    torch.set_num_threads(1)
    native = device.load(library, **options)
    native.use(rank)
    faulthandler.dump_traceback_later(HANGS_AFTER * HANG_S, file=sys.__stderr__)
    if backend is not None:
        dist.init_process_group(
            backend, f"file://{folder}/store", timedelta(seconds=HANG_S), rank=rank,
            world_size=world_size,
        )  # fmt: skip
    result = body(rank, *args)
    if checks_races:
        device.check()
    Path(folder, str(rank)).write_bytes(pickle.dumps(result))
    if backend is not None:
        dist.barrier()
    faulthandler.cancel_dump_traceback_later()
    sys.stdout.flush()
    os._exit(0)  # streams are threads that do not end
