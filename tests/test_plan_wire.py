"""Two axes and coded wires: what a plan tells of them is what engines then send and hold."""

from __future__ import annotations

from contextlib import nullcontext
from functools import cache
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

import onefold
from onefold import Wire
from onefold.config import Offload, Precision, placements_of, precision_of
from onefold.layout.units import plan_units
from onefold.planner.auto import ACTIVATIONS_SHARE
from onefold.planner.estimate import estimated
from onefold.planner.memory import Forecast, forecast
from onefold.planner.setup import Setup
from onefold.planner.sizes import told
from onefold.planner.trace import Trace, trace, without_values
from onefold.wiring import PRESETS, check_wire, fitted
from tests.ranks import run_ranks, seeded

WIDTH, ODD = 128, 37


class Net(nn.Module):
    """Matrices that are alike and one that no number of ranks divides; a scalar, frozen rows."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.odd = nn.Linear(WIDTH, ODD)
        self.scale = nn.Parameter(torch.tensor(1.0))
        self.frozen = nn.Parameter(torch.ones(5, ODD), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return (self.odd(x) * self.scale)[:5] + self.frozen


NAMES = {
    "two hops": Wire(secondary=False),
    "hpZ": Wire(secondary="weights"),
    "all coded": Wire(weights=("int8", "int8"), gradients=("fp8", "int8")),
    "coded replicas": Wire(("int8", "exact"), ("exact", "int8"), secondary="optimizer"),
    **{name: wire for name, wire in PRESETS.items() if name != "exact"},
}
CASES = [
    (stage, name)
    for stage, name in product((1, 2, 3), NAMES)
    if stage == 3 or not (name in ("two hops", "hpZ") or (stage == 1) == name.startswith("z"))
]


def loss_of(outputs: Any) -> Tensor:
    return outputs.float().square().mean()


def inputs() -> tuple[Tensor, ...]:
    return (torch.ones(5, WIDTH),)


@cache
def traced(precision: Precision) -> Trace:
    return trace(Net(), inputs(), precision=precision, loss=loss_of)


def wire_at(stage: int, name: str) -> Wire:
    placements = placements_of(stage)
    wire = NAMES[name]
    wire = fitted(wire, placements, has_axes=True) if name in PRESETS else wire
    check_wire(wire, placements, Offload(), has_axes=True)
    return wire


def setup_of(shape: tuple[int, int], stage: int, name: str, **others: Any) -> Setup:
    return Setup(
        stage=stage, world_size=shape[0] * shape[1], neighbours=shape[1],
        wire=wire_at(stage, name), **others,
    )  # fmt: skip


def run(rank: int, shape: tuple[int, int], setup: Setup, name: str) -> onefold.Report:
    """What rank 0 holds and sends in its second step."""
    module = seeded(Net)
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-3)
    mesh = init_device_mesh("cpu", shape)
    wire = name if name in PRESETS else NAMES[name]
    onefold.shard(
        module, optimizer, stage=setup.stage, mesh=mesh, wire=wire, precision=setup.precision
    )
    for _ in range(2):
        for micro in range(setup.accumulate):
            is_last = micro + 1 == setup.accumulate
            with nullcontext() if is_last else onefold.accumulate(module):
                loss_of(module(*inputs())).backward()
        optimizer.step()
        optimizer.zero_grad()
    return onefold.report(module)


def held(report: onefold.Report, kind: str) -> int:
    return sum(usage.peak for usage in report.memory.get(kind, {}).values())


def resting(found: Forecast, kind: str) -> int:
    return sum(n for (each, _), n in found.resting.items() if each == kind)


@pytest.mark.parametrize(
    ("shape", "precision", "accumulate"), [((2, 2), "bf16", 2), ((2, 3), None, 1)]
)
@pytest.mark.parametrize(("stage", "name"), CASES)
def test_bytes_held_and_sent_are_those_of_the_plan(stage, name, shape, precision, accumulate):
    chosen = precision_of(precision)
    setup = setup_of(shape, stage, name, precision=chosen, accumulate=accumulate)
    report = run_ranks(shape[0] * shape[1], run, shape, setup, name)[0]
    found = forecast(traced(chosen), setup)
    sent = {k: t.sent_nbytes for k, t in report.last_step.items() if k != "control"}
    assert {k: n for k, n in sent.items() if n} == found.sent
    for kind in ("weight", "master", "optimizer", "secondary"):
        assert report.nbytes(kind) == resting(found, kind), kind
    for kind in ("secondary", "unsharded", "grad"):
        assert held(report, kind) == found.most_of(kind), kind
    for kind in ("partial_grad", "wire"):  # at their most, were links slow
        assert 0.5 * found.most_of(kind) <= held(report, kind) <= found.most_of(kind), kind
    assert report.differing() == {}, report.verdict


def test_an_open_stage_counts_the_states_of_a_replica_on_the_ranks_of_its_node(monkeypatch):
    """On 2 x 2 ranks half of them, not a quarter; and passes over stages without such a wire."""

    def needs(stage: int, name: str) -> int:
        setup = setup_of((2, 2), stage, name)
        return forecast(estimated(plans, 0, Precision()), setup).memory_nbytes

    plans = plan_units(without_values(Net()))
    needs_flat = forecast(
        estimated(plans, 0, Precision()), Setup(stage=3, world_size=4)
    ).memory_nbytes

    def body(rank: int, name: str) -> tuple[int, str]:
        module = seeded(Net)
        optimizer = torch.optim.AdamW(module.parameters(), lr=1e-3)
        mesh = init_device_mesh("cpu", (2, 2))
        onefold.shard(module, optimizer, stage="auto", mesh=mesh, wire=name)
        report = onefold.report(module)
        return report.stage, report.offload

    for name, stage in (("replicas", 1), ("replicas", 3), ("hybrid", 3), ("recommended", 1)):
        free = int(4 * (needs(stage, name) + 1) / (1 - ACTIVATIONS_SHARE)) + 8
        monkeypatch.setattr("onefold.planner.auto.free_host_nbytes", lambda free=free: free)
        for got, why in run_ranks(4, body, name):
            assert got == stage, name
            assert f"stage {stage} holds {told(needs(stage, name))} of" in why
    assert needs(3, "replicas") > needs_flat
