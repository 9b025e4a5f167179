"""A steady step walks no list that is as long as the world."""

from __future__ import annotations

import gc
import json
import sys
from pathlib import Path
from types import FrameType

import host_overhead
import torch
import torch.distributed as dist

import onefold
from onefold import Wire
from tests.support.fresh import run_scripts

ROOT = Path(__file__).parents[2]
FEW, MANY = 64, 1024
CASES = [
    (3, "even", None),
    (3, "uneven", None),
    (0, "uneven", None),
    (3, "even", Wire(weights="int8", gradients="int4")),
    (2, "uneven", Wire(weights="int8", gradients="int4", feedback=True)),
]


def calls_of(num_ranks: int, stage: int, rows: str, wire: Wire | None) -> int:
    """Calls of Python and of C in a steady forward and backward of rank 0 of imagined ranks."""
    host_overhead.begin(num_ranks)
    module = host_overhead.Stack(2, 3, host_overhead.rows_of(rows, num_ranks))
    onefold.shard(module, stage=stage, wire=wire)
    count = 0

    def note(frame: FrameType, event: str, what: object) -> None:
        nonlocal count
        count += event in ("call", "c_call")

    def step() -> None:
        module(torch.ones(1, 8)).sum().backward()
        module.zero_grad()

    for _ in range(3):
        step()
    gc.collect()
    gc.disable()
    sys.setprofile(note)
    step()
    sys.setprofile(None)
    gc.enable()
    dist.destroy_process_group()
    return count


def main() -> None:
    """Print the calls on few and on many ranks, for each case."""
    print(json.dumps([[calls_of(ranks, *case) for ranks in (FEW, MANY)] for case in CASES]))


def test_a_steady_step_makes_no_more_calls_on_1024_ranks_than_on_64():
    """Imagined ranks: their group does nothing, and what a quantized message holds is left to
    chance, which costs some calls more or less.
    """
    script = (
        f"import sys\nsys.path[:0] = [{str(ROOT)!r}, {str(ROOT / 'benchmarks')!r}]\n"
        "from tests.engine.test_many_ranks import main\nmain()"
    )
    (run,) = run_scripts([script])
    assert run.returncode == 0, run.stderr
    for case, (few, many) in zip(CASES, json.loads(run.stdout), strict=True):
        assert 1000 < many <= 1.03 * few, (case, few, many)
