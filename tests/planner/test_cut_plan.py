"""Plans of stacked experts: the planner cuts as the engine does, to the byte."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

import onefold
from onefold.config import stage_of
from onefold.layout.cut import cut_of
from onefold.planner.memory import forecast
from onefold.planner.trace import trace
from onefold.recipe import Recipe
from onefold.recording.report import Report
from onefold.wire_config import Wire, resolve_wire, wire_of
from tests.support.planned import most_of
from tests.support.ranks import run_ranks, seeded
from tests.support.rows import again_but, worlds_in_turn

SIZES = {"small": (48, 24), "packed": (96, 96), "shared": (192, 384), "apart": (768, 768)}
"""Rows and columns of an expert, by how its slabs travel over 3 ranks."""


class Experts(nn.Module):
    """Two stacked tensors of 8 experts, and a vector."""

    def __init__(self, rows: int, columns: int) -> None:
        super().__init__()
        self.up = nn.Parameter(torch.randn(8, rows, columns) / columns**0.5)
        self.bias = nn.Parameter(torch.zeros(rows))

    def forward(self, x: Tensor) -> Tensor:
        return torch.einsum("td,ehd->teh", x, self.up) + self.bias


def loss_of(outputs: Any) -> Tensor:
    return outputs.float().square().mean()


def run(rank: int, size: tuple[int, int], stage: int, wire: Any, shape: Any) -> Report:
    module = seeded(Experts, *size)
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-3)
    mesh = init_device_mesh("cpu", shape) if shape else None
    onefold.shard(module, optimizer, stage=stage, mesh=mesh, wire=wire)
    for _ in range(2):
        loss_of(module(torch.ones(4, size[1]))).backward()
        optimizer.step()
        optimizer.zero_grad()
    return onefold.report(module)


@again_but(
    "0-None-None-small", "3-None-None-shared", "3-wire3-None-shared", "3-zero++-shape4-packed",
    "3-wire5-shape5-small", "3-wire5-shape5-apart",
)  # fmt: skip
@worlds_in_turn
@pytest.mark.parametrize("name", SIZES)
@pytest.mark.parametrize(
    ("stage", "wire", "shape"),
    [
        (0, None, None), (1, None, None), (3, None, None), (3, Wire("int8", "int8"), None),
        (3, "zero++", (2, 3)), (3, Wire(secondary="optimizer"), (2, 3)),
    ],
)  # fmt: skip
def test_bytes_of_stacked_experts_are_those_of_the_plan(name, stage, wire, shape):
    size, world_size = SIZES[name], 6 if shape else 3
    has_axes = shape is not None
    recipe = Recipe(
        stage=stage_of(stage), world_size=world_size, has_axes=has_axes,
        local_world_size=shape[1] if shape else world_size,
    )  # fmt: skip
    fit = resolve_wire(wire_of(wire), recipe.stage, recipe.offload, has_axes=has_axes, adapts=False)
    recipe = replace(recipe, wire=fit)
    found = forecast(
        trace(Experts(*size), (torch.ones(4, size[1]),), precision=recipe.precision, loss=loss_of),
        recipe,
    )
    report = run_ranks(world_size, run, size, stage, wire, shape)[0]
    sent = {k: t.sent_nbytes for k, t in report.last_step.items() if k != "control"}
    assert {k: n for k, n in sent.items() if n} == found.sent
    for kind in ("weight", "optimizer", "secondary"):
        wanted = sum(n for (each, _), n in found.resting.items() if each == kind)
        assert report.nbytes(kind) == wanted, kind
    held = {
        kind: sum(usage.peak for usage in tiers.values()) for kind, tiers in report.memory.items()
    }
    for kind in ("unsharded", "grad"):
        assert held.get(kind, 0) == most_of(found, kind), kind
    for kind in ("partial_grad", "wire"):
        assert 0.5 * most_of(found, kind) <= held.get(kind, 0) <= most_of(found, kind), kind
    assert report.differing() == {}, report.verdict


def test_thousands_of_cuts_are_decided_in_a_blink():
    shapes = [(8, 4096, 14336), (160, 1536, 5120), (50_257, 12_288), (12_288, 49_152), (12_288,)]
    cut_of.cache_clear()
    start = time.perf_counter()
    for _ in range(1000):
        for shape in shapes:
            cut_of(shape, 1024)
    assert time.perf_counter() - start < 2
