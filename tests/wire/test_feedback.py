"""Error feedback: what quantized gradients round off comes with the next step, or not at all."""

from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import onefold
from onefold import Wire
from tests.support.ranks import run_ranks, seeded
from tests.support.rows import again_but

INT4 = 1.004 / 14 / (1 - 1.004 / 14)
"""The most that a message of int4 owes of values up to 1: half a scale of a seventh of the largest,
what it owed before included (docs/measurements/codecs.md)."""


def net() -> nn.Module:
    return nn.Sequential(nn.Linear(16, 40), nn.Tanh(), nn.Linear(40, 24))


class Case:
    """A module on one rank whose weights stay (a rate of 0), beside a plain copy of it."""

    def __init__(self, rank, wire, shape, stage=3, build=net):
        self.world_size = dist.get_world_size()
        nodes = 2 if wire.secondary == "optimizer" else 1  # as replicas
        self.parts, self.part = self.world_size // nodes, rank % (self.world_size // nodes)
        self.plain, self.module = seeded(build), seeded(build)
        self.optimizer = torch.optim.AdamW(self.module.parameters(), lr=0.0)
        mesh = None if shape is None else init_device_mesh("cpu", shape)
        onefold.shard(
            self.module, self.optimizer, stage=stage, mesh=mesh, wire=wire, units=[self.module]
        )
        self.largest = 0.0
        self.forget()

    def forget(self):
        """Sum anew from here."""
        self.got = [torch.zeros_like(p.to_local()) for p in self.module.parameters()]
        self.wanted = [torch.zeros_like(p, dtype=torch.float64) for p in self.plain.parameters()]

    def backward(self, xs, scale=1.0):
        """Micro-batches, and their gradients on this rank from the plain copy."""
        for index, x in enumerate(xs):
            is_last = index + 1 == len(xs)
            with nullcontext() if is_last else onefold.accumulate(self.module):
                (self.module(x).square().mean() * scale).backward()
            (self.plain(x).square().mean() * scale).backward()

    def step(self, *xs, clip=None):
        """One step, noted in the sums; their largest error in the largest of what is quantized."""
        self.backward(xs)
        for index, p in enumerate(self.plain.parameters()):
            if p.grad is not None:
                self.wanted[index] += p.grad / self.world_size
                self.largest = max(self.largest, p.grad.abs().max().item() * (p.dim() > 1))
        self.plain.zero_grad()
        for total, p in zip(self.got, self.module.parameters(), strict=True):
            total += 0 if p.grad is None else p.grad.to_local()
        if clip is not None:
            torch.nn.utils.clip_grad_norm_(self.module.parameters(), clip)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return self.error()

    def error(self):
        told = [*(total.clone() for total in self.wanted), torch.tensor(0.0)]
        worst, largest = 0.0, torch.tensor(self.largest)
        for total in told[:-1]:
            dist.all_reduce(total)
        dist.all_reduce(largest, dist.ReduceOp.MAX)
        for got, total in zip(self.got, told, strict=False):
            rows = torch.chunk(total, self.parts)
            worst = max(worst, (got - rows[self.part]).abs().max().item())
        return worst / max(largest.item(), 1e-30)

    @property
    def owed(self):
        """Bytes that are kept."""
        return onefold.report(self.module).nbytes("feedback")


def batch(rank, index=0):
    return torch.randn(4, 16, generator=torch.Generator().manual_seed(100 * index + rank))


SECOND = Wire(gradients=("exact", "int4"), secondary="optimizer", feedback=True)
WAYS = {
    "stage 3": (2, None, 3, Wire(gradients="int4", feedback=True), 1),
    "stage 2": (3, None, 2, Wire(gradients="int4", feedback=True), 1),
    "nodes": (4, (2, 2), 3, Wire(gradients=("int8", "int4"), feedback=True), 1.1),
    "secondary": (4, (2, 2), 3, SECOND, 2.1),
}


@again_but("1-stage 2", "2-stage 3", "2-nodes", "2-secondary")
@pytest.mark.parametrize(("world_size", "shape", "stage", "wire", "hops"), WAYS.values(), ids=WAYS)
@pytest.mark.parametrize("micros", [1, 2])
def test_what_was_read_sums_to_all_gradients_but_for_one_rounding(
    world_size, shape, stage, wire, hops, micros
):
    """However many steps there are, clipped or not; without feedback each step adds its own."""

    def body(rank):
        case = Case(rank, wire, shape, stage)
        plain = Wire(wire.weights, wire.gradients, wire.secondary)
        without = Case(rank, plain, shape, stage)
        xs = [batch(rank, micro) for micro in range(micros)]
        for step in range(16):
            assert case.step(*xs, clip=0.01 if step % 2 else None) < hops * micros * INT4
            worst = without.step(*xs)
        return worst > 2 * hops * INT4

    assert any(run_ranks(world_size, body))


def frozen():
    module = net()
    module[0].weight.requires_grad = False
    return module


@pytest.mark.parametrize(("world_size", "shape", "stage", "wire", "hops"), WAYS.values(), ids=WAYS)
def test_what_is_kept_is_what_is_sent_in_fp32_and_was_predicted(
    world_size, shape, stage, wire, hops
):
    """Own rows are not sent; vectors are not quantized; frozen weights have no gradients."""

    def body(rank):
        case = Case(rank, wire, shape, stage, frozen)
        case.step(batch(rank))
        case.step(batch(rank))
        numel = 24 * 40
        inside = numel - numel // 2 if wire.gradients_inside != "exact" else 0
        between = numel // 2 - numel // 4
        if shape is None:
            kept = numel - numel // world_size
        elif wire.secondary == "optimizer":
            kept = numel // 2  # half of them in sums, half in means
        else:
            kept = inside + between
        assert case.owed == 4 * kept
        report = onefold.report(case.module)
        assert report.predicted["feedback"] == 4 * kept
        assert "feedback" not in report.differing(), report.verdict

    run_ranks(world_size, body)


@again_but("shape1")
@pytest.mark.filterwarnings("ignore:step 3 is skipped")
@pytest.mark.parametrize("shape", [None, (2, 2)])
def test_a_step_that_is_skipped_leaves_nothing_to_send(shape):
    """What is left of gradients some of which were not finite may be as large as anything."""

    def body(rank):
        case = Case(rank, Wire(gradients="int4", feedback=True), shape)
        for _ in range(2):
            case.step(batch(rank))
        bad = batch(rank)
        bad[0, 0] = float("nan") if rank == 1 else 1e15
        case.step(bad)
        assert onefold.report(case.module).skipped == 1
        assert case.owed == 0
        case.forget()
        case.largest = 0.0
        assert max(case.step(batch(rank)) for _ in range(6)) < INT4

    run_ranks(2 if shape is None else 4, body)


@again_but("None-1", "shape1-2")
@pytest.mark.parametrize("micros", [1, 2])
@pytest.mark.parametrize("shape", [None, (2, 2)])
def test_gradients_that_are_cleared_without_a_step_take_what_they_owe_with_them(shape, micros):
    def body(rank):
        case = Case(rank, Wire(gradients="int4", feedback=True), shape)
        case.step(batch(rank))
        case.backward([batch(rank)] * micros, scale=1e6)
        case.optimizer.zero_grad()
        case.plain.zero_grad()
        assert case.owed == 0
        case.forget()
        assert max(case.step(batch(rank)) for _ in range(6)) < INT4

    run_ranks(2 if shape is None else 4, body)


class Branches(nn.Module):
    """`route` says which of two layers a rank uses."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(16, 24), nn.Linear(16, 24)])
        self.route = 0

    def forward(self, x):
        return self.layers[self.route](x)


@again_but("shape1")
@pytest.mark.parametrize("shape", [None, (2, 2)])
def test_what_is_owed_of_a_parameter_waits_until_this_rank_uses_it_again(shape):
    """Read by somebody or by nobody: zeros of ranks that did not use it carry nothing."""

    def body(rank):
        case = Case(rank, Wire(gradients="int4", feedback=True), shape, build=Branches)
        for step in range(24):
            route = (step // 4) % 2 if step % 2 else rank % 2
            case.module.route = case.plain.route = route
            assert case.step(batch(rank)) < INT4 / 2  # two send, each its half of the mean

    run_ranks(2 if shape is None else 4, body)


def test_a_loaded_checkpoint_owes_nothing(tmp_path):
    def body(rank):
        case = Case(rank, Wire(gradients="int4", feedback=True), None)
        case.step(batch(rank))
        assert case.owed > 0
        onefold.save(tmp_path / "saved", case.module, case.optimizer)
        onefold.load(tmp_path / "saved", case.module, case.optimizer)
        assert case.owed == 0

    run_ranks(2, body)


@pytest.mark.parametrize("fields", [{}, {"weights": "int8"}, {"gradients": ("exact", "exact")}])
def test_feedback_of_exact_gradients_is_refused(fields):
    with pytest.raises(onefold.ConfigError, match=r"quantized gradients for Wire\.feedback"):
        Wire(feedback=True, **fields)
