"""What a CUDA graph cannot hold is refused by name, and what a replay changes is seen.

The flag that a stream is captured is set by hand: a CPU has no graphs. tests/sim/test_sim_capture
shows that a step repeats.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import nn

import onefold
from onefold.engine.registry import engine_of
from onefold.tier import accelerator
from tests.support.ranks import run_ranks, seeded


class Spared(nn.Module):
    """A layer, and one that some forwards use."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.spare = nn.Linear(8, 8), nn.Linear(8, 8)
        self.uses_all = True

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.layer(x)
        return self.spare(x) if self.uses_all else x


def sharded(**options: Any) -> tuple[nn.Module, torch.optim.Optimizer]:
    module = seeded(Spared)
    optimizer = torch.optim.AdamW(module.parameters(), lr=0.1)
    onefold.shard(module, optimizer, **options)
    engine_of(module).may_capture = True  # of a CPU nothing is
    return module, optimizer


def step(module: nn.Module, optimizer: torch.optim.Optimizer, scaler: Any = None) -> None:
    loss = module(torch.ones(2, 8)).float().sum()
    (loss if scaler is None else scaler.scale(loss)).backward()
    optimizer.step() if scaler is None else scaler.step(optimizer)
    optimizer.zero_grad()


@contextmanager
def captured(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    with monkeypatch.context() as patch:
        patch.setattr(accelerator, "is_capturing", lambda: True)
        yield


OBSTACLES = [
    ({"offload": onefold.Offload(parameters="cpu")}, "offload to cpu"),
    ({"offload": onefold.Offload(optimizer="cpu")}, "offload to cpu"),
    ({"offload": onefold.Offload(activations="cpu")}, "offload to cpu"),
]


@pytest.mark.parametrize(("options", "word"), OBSTACLES)
def test_a_capture_with_offload_is_refused(options, word, monkeypatch):
    module, optimizer = sharded(**options)
    step(module, optimizer)
    with captured(monkeypatch), pytest.raises(onefold.ConfigError, match=word):
        step(module, optimizer)
    step(module, optimizer)


def test_a_capture_of_several_ranks_is_refused_on_each(monkeypatch):
    def body(rank: int) -> None:
        module, optimizer = sharded()
        step(module, optimizer)
        if rank == 0:
            monkeypatch.setattr(accelerator, "is_capturing", lambda: True)
        torch.distributed.barrier()
        with pytest.raises(onefold.ConfigError, match="3 ranks"):
            step(module, optimizer)

    run_ranks(3, body)


def test_a_capture_of_the_first_step_is_refused(monkeypatch):
    """A replay would make its moments again, as zeros."""
    module, optimizer = sharded()
    with captured(monkeypatch):
        with pytest.raises(onefold.ConfigError, match="the first step"):
            step(module, optimizer)
        with torch.no_grad():  # an evaluation has none
            module(torch.ones(2, 8))


def test_a_capture_with_a_dynamic_loss_scale_is_refused(monkeypatch):
    module, optimizer = sharded()
    step(module, optimizer)
    with captured(monkeypatch):
        with pytest.raises(onefold.ConfigError, match="dynamic loss scale"):
            step(module, optimizer, onefold.GradScaler("cpu"))
        step(module, optimizer, onefold.GradScaler("cpu", enabled=False))
        optimizer.found_inf = torch.zeros(1)  # as torch's own leaves it at a fused step
        with pytest.raises(onefold.ConfigError, match="dynamic loss scale"):
            step(module, optimizer)


def test_a_capture_with_unused_parameters_is_refused_and_names_one(monkeypatch):
    module, optimizer = sharded()
    step(module, optimizer)
    module.uses_all = False
    with captured(monkeypatch), pytest.raises(onefold.ConfigError, match=r"'spare\.\w+' without"):
        step(module, optimizer)
    module.uses_all = True
    optimizer.zero_grad()
    step(module, optimizer)


def test_a_capture_of_what_is_recorded_is_refused(monkeypatch):
    module, optimizer = sharded()
    step(module, optimizer)
    with (
        captured(monkeypatch),
        onefold.record(module),
        pytest.raises(onefold.ConfigError, match="a recording"),
    ):
        step(module, optimizer)


@pytest.mark.parametrize("precision", [None, "bf16"])
@pytest.mark.parametrize("stage", [0, 2, 3])
def test_evaluations_after_a_capture_see_what_replays_have_changed(stage, precision, monkeypatch):
    module, optimizer = sharded(stage=stage, precision=precision)
    step(module, optimizer)
    with captured(monkeypatch):
        step(module, optimizer)
    with torch.no_grad():
        before = module(torch.ones(2, 8)).clone()
        for unit in engine_of(module).units:  # as a replay does: no version counter moves
            with torch.autograd._unsafe_preserve_version_counter(unit.weight.tensor):
                unit.weight.tensor.mul_(2)
        assert not torch.equal(module(torch.ones(2, 8)), before)


@pytest.mark.parametrize("precision", [None, "bf16"])
def test_a_captured_step_is_the_step_that_it_was(precision, monkeypatch):
    (module, optimizer), (other, others) = (sharded(precision=precision) for _ in range(2))
    for number in range(4):
        step(other, others)
        if number % 2:
            with captured(monkeypatch):
                step(module, optimizer)
        else:
            step(module, optimizer)
    for mine, theirs in zip(module.parameters(), other.parameters(), strict=True):
        assert torch.equal(mine, theirs)
