"""Sharding a module reads its tree a few times, and a step makes few Python calls for each unit."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

import onefold
from onefold.config import Precision
from tests.support.calls import OWN, CallCounter
from tests.support.programs.blocks import Chain
from tests.support.ranks import run_processes, run_ranks, seeded
from tests.support.rows import again_but

MOST_PASSES = 4
MOST_WITH_FROZEN = 5  # units are planned again once frozen weights are quantized


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 8), nn.Linear(8, 4)
        self.register_buffer("scale", torch.ones(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.second(self.first(x)) * self.scale


def model() -> nn.Sequential:
    return nn.Sequential(
        nn.Linear(4, 4), nn.ModuleList([Block() for _ in range(4)]), nn.Linear(4, 4)
    )


@pytest.mark.parametrize("choices", [{"stage": 1}, {}, {"precision": Precision(frozen="int8")}])
def test_shard_passes_over_the_module_tree_at_most_four_times(choices, monkeypatch):
    """A walk over a block counts as a part of a pass; `modules` and `parameters` walk, too."""
    visits: Counter[int] = Counter()
    original: Any = nn.Module.named_modules

    def counted(self: nn.Module, memo: Any = None, *args: Any, **kwargs: Any) -> Iterator[Any]:
        for entry in original(self, memo, *args, **kwargs):
            visits[threading.get_ident()] += memo is None  # else it is a part of a walk
            yield entry

    def body(rank: int) -> None:
        module = seeded(model)
        module[0].requires_grad_(False)
        optimizer = torch.optim.AdamW([p for p in module.parameters() if p.requires_grad])
        num_modules = len(list(module.modules()))
        visits[threading.get_ident()] = 0
        onefold.shard(module, optimizer, **choices)
        most = MOST_WITH_FROZEN if choices.get("precision") else MOST_PASSES
        assert 1 <= visits[threading.get_ident()] / num_modules <= most

    monkeypatch.setattr(nn.Module, "named_modules", counted)
    run_ranks(3, body)


def stack(num_units: int, num_layers: int) -> nn.Module:
    """Blocks in a row, each a unit of two parameters a layer."""
    layers = lambda: [nn.Linear(4, 4) for _ in range(num_layers)]
    return Chain(*(nn.Sequential(*layers()) for _ in range(num_units)))


@again_but("3-1-450", "2-6-430")
@pytest.mark.parametrize(
    ("stage", "num_layers", "most"), [(3, 1, 450), (3, 6, 575), (2, 1, 310), (2, 6, 430)]
)
def test_forward_and_backward_make_few_python_calls_for_a_unit(stage, num_layers, most):
    """Calls do not depend on the load of the machine, as times do."""

    def calls(num_units: int) -> int:
        def body(rank: int) -> int:
            module = onefold.shard(seeded(stack, num_units, num_layers), stage=stage)

            def train() -> None:
                module(torch.ones(2, 4)).sum().backward()

            for _ in range(3):
                train()
                module.zero_grad()
            return CallCounter().of(train).num_within(OWN)

        return int(run_ranks(3, body)[0])

    assert (calls(8) - calls(4)) / 4 <= most


def _visit(rank: int, stage: int) -> None:
    module = seeded(stack, 4, 3)
    optimizer = torch.optim.AdamW(module.parameters())
    onefold.shard(module, optimizer, stage=stage)

    def step() -> None:
        module(torch.full((2, 4), float(rank))).sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    counter = CallCounter(every_thread=True)
    for _ in range(3):
        step()
    assert counter.of(step).summary()["own files"] <= 42


@pytest.mark.process
@pytest.mark.parametrize("stage", [0, 2, 3])
def test_a_step_visits_at_most_42_files(stage):
    run_processes(2, _visit, stage)


@pytest.mark.parametrize("stage", [0, 1, 3])
def test_zero_grad_reads_and_clears_each_gradient_by_one_call(stage):
    def body(rank: int) -> tuple[int, int]:
        module = seeded(stack, 3, 4)
        optimizer = torch.optim.AdamW(module.parameters())
        onefold.shard(module, optimizer, stage=stage)
        counts: list[int] = []
        for clear in (optimizer.zero_grad, module.zero_grad):
            module(torch.ones(2, 4)).sum().backward()
            counts.append(CallCounter().of(clear).num_within(OWN))
            assert all(parameter.grad is None for parameter in module.parameters())
        return counts[0], counts[1]

    num_parameters = 3 * 4 * 2
    for of_optimizer, of_module in run_ranks(2, body):
        assert of_optimizer <= 2 * num_parameters
        assert of_module <= 3 * num_parameters


def test_shard_and_the_first_step_make_few_python_calls_for_a_parameter():
    """Also torch's: an optimizer was asked once for each parameter what its steps do."""

    def calls(num_layers: int) -> list[int]:
        def body(rank: int) -> list[int]:
            module = seeded(stack, 2, num_layers)
            optimizer = torch.optim.AdamW(module.parameters())

            def train() -> None:
                module(torch.ones(2, 4)).sum().backward()
                optimizer.step()

            works = (lambda: onefold.shard(module, optimizer), train)
            return [CallCounter().of(work).num_within() for work in works]

        return run_ranks(3, body)[0]

    calls(1)  # what is asked once a process
    for few, many, most in zip(calls(2), calls(6), (420, 160), strict=True):
        assert (many - few) / (2 * 2 * 4) <= most
