"""Checkpoints have all experts as one tensor, so the expert axis may change between runs."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import onefold
from tests.support import experts
from tests.support.experts import Axis
from tests.support.ranks import run_ranks
from tests.support.rows import again_but

SAVED = Axis(2, 2, 3, dtype=torch.float32)
OTHERS = [(1, 4, 3), (4, 1, 2), (1, 2, 1), (3, 1, 3), (1, 3, 0), (2, 2, 0), (1, 1, 3)]


def state_of(model: Any, optimizer: Any) -> dict[str, Tensor]:
    """Weights and moments, all experts."""
    names = {parameter: name for name, parameter in model.named_parameters()}
    found = {name: experts.whole(parameter.detach()) for parameter, name in names.items()}
    for parameter, state in optimizer.state.items():
        for key, value in state.items():
            found[f"{names[parameter]}.{key}"] = experts.whole(value)
    return found


def steps(model: Any, optimizer: Any, rank: int, axis: Axis, first: int, last: int) -> None:
    for step in range(first, last):
        rows = experts.rows_of(rank, axis.world_size, step, axis.dtype)
        experts.loss_of(model, rows).backward()
        optimizer.step()
        optimizer.zero_grad()


@pytest.fixture(scope="module")
def saved(tmp_path_factory) -> tuple[Path, dict[str, Tensor], dict[str, Tensor]]:
    """A checkpoint after two steps, its state, and the state after two steps more."""
    folder = tmp_path_factory.mktemp("experts")

    def body(rank: int) -> Any:
        model, optimizer = experts.sharded(SAVED)
        steps(model, optimizer, rank, SAVED, 0, 2)
        onefold.save(folder / "step", model, optimizer)
        onefold.save_pretrained(model, folder / "export")
        now = state_of(model, optimizer)
        steps(model, optimizer, rank, SAVED, 2, 4)
        return folder, now, state_of(model, optimizer)

    return run_ranks(SAVED.world_size, body)[0]


def assert_same(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> None:
    assert found.keys() == wanted.keys()
    for name, value in wanted.items():
        assert torch.equal(found[name], value), name


@again_but("(1, 4, 3)", "(3, 1, 3)", "(1, 1, 3)")
@pytest.mark.parametrize("shape", OTHERS, ids=str)
def test_a_checkpoint_loads_at_any_other_split_bit_for_bit(saved, shape):
    folder, wanted, _ = saved
    axis = replace(SAVED, replicas=shape[0], experts=shape[1], stage=shape[2])

    def body(rank: int) -> dict[str, Tensor]:
        model, optimizer = experts.sharded(axis)
        steps(model, optimizer, rank, axis, 0, 1)  # others
        onefold.load(folder / "step", model, optimizer)
        return state_of(model, optimizer)

    for found in run_ranks(axis.world_size, body):
        assert_same(found, wanted)


def test_a_run_that_is_resumed_goes_on_as_if_it_had_not_stopped(saved):
    folder, _, wanted = saved

    def body(rank: int) -> dict[str, Tensor]:
        model, optimizer = experts.sharded(SAVED)
        onefold.load(folder / "step", model, optimizer)
        steps(model, optimizer, rank, SAVED, 2, 4)
        return state_of(model, optimizer)

    assert_same(run_ranks(4, body)[0], wanted)


def test_one_process_without_an_expert_axis_loads_it(saved):
    folder, wanted, _ = saved
    model = experts.build(torch.float32)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    onefold.shard(model, optimizer)
    onefold.load(folder / "step", model, optimizer)
    assert_same(state_of(model, optimizer), wanted)


def test_a_checkpoint_of_listed_experts_loads_with_and_without_an_axis(tmp_path):
    axis = replace(SAVED, experts=3, replicas=1, is_listed=True)

    def save(rank: int) -> dict[str, Tensor]:
        model, optimizer = experts.sharded(axis)
        steps(model, optimizer, rank, axis, 0, 1)
        onefold.save(tmp_path / "axis", model, optimizer)
        return state_of(model, optimizer)

    wanted = run_ranks(3, save)[0]
    model = experts.build(torch.float32, is_listed=True)
    experts.spread(model, None)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    onefold.shard(model, optimizer)
    onefold.load(tmp_path / "axis", model, optimizer)
    assert_same(state_of(model, optimizer), wanted)
    onefold.save(tmp_path / "alone", model, optimizer)

    def load(rank: int) -> dict[str, Tensor]:
        model, optimizer = experts.sharded(axis)
        onefold.load(tmp_path / "alone", model, optimizer)
        return state_of(model, optimizer)

    assert_same(run_ranks(3, load)[0], wanted)


def test_exports_and_state_dicts_have_all_experts(saved):
    folder, wanted, _ = saved
    axis = replace(SAVED, replicas=1, experts=3)

    def body(rank: int) -> dict[str, Tensor]:
        model, _ = experts.sharded(axis)
        onefold.load_pretrained(model, folder / "export")
        return onefold.full_state_dict(model, rank0_only=False)

    for found in run_ranks(axis.world_size, body):
        assert_same(found, {name: wanted[name] for name in found})


@again_but("3")
@pytest.mark.parametrize("stage", [0, 1, 3])
def test_gradients_are_clipped_by_the_norm_of_one_process(stage):
    axis = Axis(2, 2, stage)

    def body(rank: int) -> tuple[Tensor, dict[str, Tensor]]:
        model, _ = experts.sharded(axis)
        experts.loss_of(model, experts.rows_of(rank, axis.world_size)).backward()
        norm = onefold.clip_grad_norm_(model, 0.5)
        return norm, {n: experts.whole(p.grad) for n, p in model.named_parameters()}

    wanted = experts.plain_gradients(axis)
    norm = torch.stack([grad.norm() for grad in wanted.values()]).norm()
    for found, gradients in run_ranks(axis.world_size, body):
        torch.testing.assert_close(found, norm, rtol=1e-12, atol=0)
        clipped = {name: grad * (0.5 / (norm + 1e-6)) for name, grad in wanted.items()}
        assert experts.error(gradients, clipped) < 1e-12
