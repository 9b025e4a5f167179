"""Checkpoints move between any two meshes of eight ranks, and one process, bit for bit."""

from __future__ import annotations

import warnings
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import onefold
from onefold.engine.registry import engine_of
from tests.composed import ALONE, Axes, Named, Place, Places, Run, gpt, whole
from tests.ranks import run_processes

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
    onefold.save(folder / name, run.part, run.optimizer, pipeline=run.place.named.get("pp"))
    if not dist.is_initialized() or dist.get_rank() == 0:
        torch.save(state, folder / f"{name}.pt")


def state_of(run: Run) -> Named:
    """Whole weights, masters, moments and step counts of all stages, by name."""
    found = {f"weight {name}": value for name, value in run.weights().items()}
    for unit in engine_of(run.part).units:
        for each in unit.parameters:
            found[f"master {each.fqn}"] = whole(each.wrap(each.stepped))
    for name, parameter in run.part.named_parameters():
        for key, value in run.optimizer.state[parameter].items():
            found[f"{key} {name}"] = whole(value)
    if "pp" not in run.place.named:
        return found
    stages: list[Named] = [{} for _ in range(run.place.axes.pp)]
    dist.all_gather_object(stages, found, group=run.place.named["pp"].get_group())
    return {name: value for each in stages for name, value in each.items()}


def load_others(place: Place, stage: int, folder: Path, own: str) -> None:
    for other in (*MESHES, ONE):
        if other == own:
            continue
        run = begin(place, stage, seed=1)
        onefold.load(folder / other, run.part, run.optimizer, pipeline=place.named.get("pp"))
        found, wanted = state_of(run), torch.load(folder / f"{other}.pt")
        assert found.keys() == wanted.keys()
        for name, value in wanted.items():
            assert bits(found[name]) == bits(value), f"{name}: from {other} to {own}"


def bits(tensor: torch.Tensor) -> tuple[torch.dtype, torch.Size, bytes]:
    flat = tensor.contiguous().view(-1).view(torch.uint8)
    return tensor.dtype, tensor.shape, flat.numpy().tobytes()


def move(_: int, folder: str) -> None:
    warnings.simplefilter("error")
    places = Places()
    for name, (axes, stage) in MESHES.items():
        train_and_save(begin(places.of(axes), stage), Path(folder), name)
    for name, (axes, stage) in MESHES.items():
        load_others(places.of(axes), stage, Path(folder), name)


def test_weights_masters_moments_and_steps_move_between_any_two(tmp_path):
    train_and_save(begin(ALONE, 1), tmp_path, ONE)
    run_processes(8, move, str(tmp_path), start_method="forkserver")
    load_others(ALONE, 1, tmp_path, ONE)
    state = torch.load(tmp_path / f"{ONE}.pt")
    dtypes = {name.partition(" ")[0]: value.dtype for name, value in state.items()}
    assert dtypes == {"weight": torch.bfloat16} | dict.fromkeys(
        ("master", "exp_avg", "exp_avg_sq", "step"), torch.float32
    )
