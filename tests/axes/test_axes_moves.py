"""Checkpoints move between any two meshes of eight ranks, and one process, bit for bit."""

from __future__ import annotations

import warnings
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import onefold
from tests.support import composed
from tests.support.composed import ALONE, Axes, Named, Place, Places, Run, gpt
from tests.support.ranks import run_processes

pytestmark = pytest.mark.process
MESHES = {
    "dp 8": (Axes(dp=8), 3),
    "dp 2 x tp 2 x pp 2": (Axes(dp=2, tp=2, pp=2), 3),
    "dp 4 x tp 2": (Axes(dp=4, tp=2), 2),
}
ONE = "one process"
STEPS = 2


def begin(place: Place, stage: int, seed: int = 0) -> Run:
    return Run(place, stage, gpt(torch.bfloat16, seed))


def train_and_save(run: Run, folder: Path, name: str) -> None:
    for step in range(STEPS):
        run.backward(step)
        run.update()
    state = state_of(run)
    onefold.save(folder / name, run.part, run.optimizer)
    if not dist.is_initialized() or dist.get_rank() == 0:
        torch.save(state, folder / f"{name}.pt")


def state_of(run: Run) -> Named:
    found = composed.state_of(run.part, run.optimizer)
    return composed.of_all(found, run.place.named["pp"]) if "pp" in run.place.named else found


def load_from_the_one_before(place: Place, stage: int, folder: Path, own: str) -> None:
    """Meshes are a ring, so that each is read once and reads once."""
    ring = [*MESHES, ONE]
    other = ring[ring.index(own) - 1]
    run = begin(place, stage, seed=1)
    onefold.load(folder / other, run.part, run.optimizer)
    wanted = torch.load(folder / f"{other}.pt")
    composed.check_bits(state_of(run), wanted, f"from {other} to {own}")


def move(_: int, folder: str) -> None:
    warnings.simplefilter("error")
    places = Places()
    for name, (axes, stage) in MESHES.items():
        train_and_save(begin(places.of(axes), stage), Path(folder), name)
    for name, (axes, stage) in MESHES.items():
        load_from_the_one_before(places.of(axes), stage, Path(folder), name)


def test_weights_masters_moments_and_steps_move_between_any_two(tmp_path):
    train_and_save(begin(ALONE, 1), tmp_path, ONE)
    run_processes(8, move, str(tmp_path), start_method="forkserver")
    load_from_the_one_before(ALONE, 1, tmp_path, ONE)
    state = torch.load(tmp_path / f"{ONE}.pt")
    dtypes = {name.rpartition(" ")[2]: value.dtype for name, value in state.items()}
    assert dtypes == {"weight": torch.bfloat16} | dict.fromkeys(
        ("master", "exp_avg", "exp_avg_sq", "step"), torch.float32
    )
