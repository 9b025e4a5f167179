"""The documented script, started as torchrun starts it: messages of the device go by simccl."""

from __future__ import annotations

import os
import runpy
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from onefold.wire.roll_call import PATIENCE_S
from tests.sim import building, device
from tests.sim.ranks import run_sim
from tests.support.ports import free_port

pytestmark = [
    pytest.mark.process,
    pytest.mark.skipif(building.missing() is not None, reason=f"needs {building.missing()}"),
]

SCRIPT = Path(__file__).parents[2] / "examples" / "train_sharded.py"
LATE_S = PATIENCE_S + 1.0
"""Longer than ranks wait before they ask one another where they are."""


def late(rank: int, port: int) -> tuple[str, float, int]:
    """The script; rank 1 is late in its fifth step."""
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    draw, drawn = torch.randint, []

    def slowly(*args, **kwargs):
        drawn.append(args)
        if rank == 1 and len(drawn) == 5:
            time.sleep(LATE_S)
        return draw(*args, **kwargs)

    torch.randint = slowly
    ended = runpy.run_path(str(SCRIPT))
    waits = sum(times for wait, times in device.host_waits().items() if "limit" in wait)
    return dist.get_backend_config(), float(ended["loss"]), waits


def test_the_documented_script_runs_though_a_rank_is_late():
    for backends, loss, waits in run_sim(2, late, free_port(), backend=None):
        assert backends == device.BACKENDS
        assert loss < 3.0  # of 5.5
        assert waits == 0, "a wait with a limit blocks the host, and ends NCCL's communicator"
