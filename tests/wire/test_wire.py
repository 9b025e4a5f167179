"""Quantized messages: fewer bytes, replicas that agree, losses that stay close, clear errors."""

from __future__ import annotations

from functools import cache

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import onefold
from onefold import Wire
from onefold.wire_config import PRESETS
from tests.support.models import Model, next_token_loss, token_batches
from tests.support.ranks import run_ranks, seeded
from tests.support.rows import again_but, worlds_in_turn
from tests.support.training import Job, assert_same_bits, run_job
from tests.wire.test_axes import run_axes

WIRES = [
    Wire(weights="int8"),
    Wire(gradients="int8"),
    Wire(gradients="int4+h"),
    Wire(weights="int8+h", gradients="int4"),
    PRESETS["zero++"],
]
DIFFERENCES = [Wire(weights="int4-diff"), Wire(weights="int8-diff", gradients="int8")]
SECONDARIES = [False, "weights", "gradients"]


def job(wire, **changes):
    options = {"wire": wire, **changes.pop("options", {})}
    rows = 24 if changes.get("accumulate", 1) > 1 else 12
    return Job(Model, token_batches(rows=rows), next_token_loss, options=options, **changes)


@cache
def exact(world_size, stage):
    """What one axis trains to with exact messages and clipping."""
    return run_job(job(None, clip=0.1), world_size, stage)


@cache
def exact_on_axes(accumulate):
    """What two nodes of two ranks train to with exact messages."""
    return run_axes(job(None, accumulate=accumulate), (2, 2), 3)


def close(got, wanted, within):
    """Losses are near those of exact messages, and not the same."""
    assert not torch.equal(got.losses, wanted.losses)
    torch.testing.assert_close(got.losses, wanted.losses, rtol=within, atol=0)


@again_but(
    "Wire(weights='exact', gradients='int8', secondary=None, feedback=False)-3",
    "Wire(weights='int8', gradients=('int8+h', 'int4+h'), secondary=None, feedback=False)-1",
)
@worlds_in_turn
@pytest.mark.parametrize("stage", [1, 3])
@pytest.mark.parametrize("wire", WIRES, ids=str)
def test_quantized_messages_train_nearly_as_exact_ones(wire, stage):
    """Every wire at every stage, on two and three ranks in turn."""
    world_size = 2 + (WIRES.index(wire) + stage) % 2
    close(run_job(job(wire, clip=0.1), world_size, stage), exact(world_size, stage), 0.02)


@again_but("Wire(weights='int8-diff', gradients='int8', secondary=None, feedback=False)-1")
@pytest.mark.parametrize("stage", [1])
@pytest.mark.parametrize("wire", DIFFERENCES, ids=str)
def test_differences_train_nearly_as_exact_messages(wire, stage):
    close(run_job(job(wire, clip=0.1), 3, stage), exact(3, stage), 0.01)


@again_but(
    "False-Wire(weights='exact', gradients='int4+h', secondary=None, feedback=False)",
    "False-Wire(weights='int4-diff', gradients='exact', secondary=None, feedback=False)",
    "weights-Wire(weights='exact', gradients='int8', secondary=None, feedback=False)",
    "weights-Wire(weights='int8', gradients=('int8+h', 'int4+h'), secondary=None, feedback=False)",
    "gradients-Wire(weights='int8', gradients='exact', secondary=None, feedback=False)",
    "gradients-Wire(weights='int8+h', gradients='int4', secondary=None, feedback=False)",
    "gradients-Wire(weights='int8-diff', gradients='int8', secondary=None, feedback=False)",
)
@pytest.mark.parametrize("wire", [*WIRES, *DIFFERENCES], ids=str)
@pytest.mark.parametrize("secondary", SECONDARIES)
def test_quantized_hops_train_nearly_as_exact_ones(wire, secondary):
    """Every wire at every placement, with one and two micro-batches in turn."""
    if secondary is False and wire.weights_between.endswith("-diff"):
        pytest.skip("no replica to send differences to: refused")
    accumulate = 1 + ([*WIRES, *DIFFERENCES].index(wire) + SECONDARIES.index(secondary)) % 2
    wire = Wire(wire.weights, wire.gradients, secondary)
    got = run_axes(job(wire, accumulate=accumulate), (2, 2), 3)
    close(got, exact_on_axes(accumulate), 0.02)


@again_but("3")
@pytest.mark.parametrize("stage", [1, 3])
def test_nodes_that_are_replicas_stay_the_same_under_a_quantized_wire(stage):
    """`run_axes` compares all ranks bit for bit."""
    wire = Wire(gradients=("exact", "int8"), secondary="optimizer")
    close(run_axes(job(wire), (2, 2), stage), run_axes(job(None), (2, 2), stage), 0.02)


def test_a_run_with_quantized_messages_repeats_itself_bit_for_bit():
    work = job(PRESETS["zero++"], options={"precision": "bf16"})
    assert_same_bits(run_axes(work, (2, 2), 3), run_axes(work, (2, 2), 3))


def test_what_differences_round_off_comes_with_the_next_message():
    """Weights that do not change any more are soon exact, to what the compute dtype can hold."""

    def body(rank):
        module = seeded(Model)
        onefold.shard(module, stage=2, wire=Wire(weights="int4-diff"))
        seen = []
        for step in range(6):
            with torch.no_grad():
                for p in module.parameters():
                    p.mul_(1.1 if step == 1 else 1.0)  # an edit, so that it is gathered again
                module(token_batches()[0])
            seen.append(_whole_error(module))
        assert seen[0] == 0, "the first message is exact"
        assert seen[1] > 1e-4
        assert seen[-1] < seen[1] / 100

    run_ranks(2, body)


def _whole_error(module):
    """The largest distance of a weight that computes from the weight that rests."""
    from onefold.engine.registry import engine_of

    worst = 0.0
    for unit in engine_of(module).units:
        rank = unit.context.rank
        for p in unit.parameters:
            start, stop = p.slot.pieces[rank]
            full = unit.unsharded.tensor[p.slot.full_offset + start : p.slot.full_offset + stop]
            if full.numel():
                worst = max(worst, (full - p.local.reshape(-1)).abs().max().item())
    return worst


def test_weights_are_given_out_as_they_rest_whatever_the_wire():
    def body(rank):
        module = seeded(Model)
        wanted = {n: p.detach().clone() for n, p in module.named_parameters()}
        onefold.shard(module, stage=3, wire=Wire(weights="int4"))
        with torch.no_grad():
            module(token_batches()[0])
        with onefold.unsharded(module):
            for name, p in module.named_parameters():
                assert torch.equal(p, wanted[name]), name

    run_ranks(2, body)


@pytest.mark.filterwarnings("ignore:step 2 is skipped")
@pytest.mark.parametrize("bad", [float("inf"), float("nan")])
@pytest.mark.parametrize("shape", [None, (2, 2)])
@pytest.mark.parametrize("wire", [Wire(gradients="int8"), PRESETS["zero++"]], ids=str)
def test_gradients_that_are_not_finite_skip_the_step_on_every_rank(wire, shape, bad):
    """One rank alone has one bad element; no rank steps, and the next step is taken."""

    def body(rank):
        module = nn.Sequential(nn.Linear(8, 64), nn.Linear(64, 8))
        mesh = None if shape is None else init_device_mesh("cpu", shape)
        optimizer = torch.optim.AdamW(module.parameters(), lr=1e-2)
        onefold.shard(module, optimizer, mesh=mesh, wire=wire)
        x = torch.randn(4, 8)
        moved = []
        for step in range(3):
            before = [p.to_local().clone() for p in module.parameters()]
            loss = module(x).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            after = [p.to_local() for p in module.parameters()]
            assert all(torch.isfinite(p).all() for p in after)
            moved.append(any(not torch.equal(a, b) for a, b in zip(before, after, strict=True)))
            x = torch.randn(4, 8)
            if step == 0 and rank == 1:
                x[0, 0] = bad
        assert onefold.report(module).skipped == 1
        return moved

    world_size = 3 if shape is None else 4
    assert all(moved == [True, False, True] for moved in run_ranks(world_size, body))


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"wire": "zero+"}, ["zero++"]),
        ({"wire": 3}, ["Wire"]),
        ({"stage": 0, "wire": Wire(gradients="int8")}, ["stage 0", "stage=1"]),
        ({"wire": Wire(secondary="weights")}, ["two axes", "mesh="]),
        ({"wire": Wire(weights="int8-diff")}, ["stage=2"]),
        ({"wire": Wire(gradients="int8"),
          "offload": onefold.Offload(optimizer="cpu", step_in_backward=True)}, ["backward"]),
    ],
)  # fmt: skip
def test_what_would_mean_nothing_is_refused_with_a_reason(options, words):
    def body(rank):
        with pytest.raises(onefold.ConfigError) as caught:
            onefold.shard(seeded(Model), **options)
        return str(caught.value)

    for message in run_ranks(2, body):
        assert all(word in message for word in [*words, "hint:"]), message


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"weights": "int3"}, ["Wire.weights", "int8"]),
        ({"gradients": "int8-diff"}, ["Wire.gradients"]),
        ({"gradients": ("int8", "int4", "int4")}, ["two"]),
        ({"weights": ("int8-diff", "exact")}, ["between nodes"]),
        ({"secondary": "weight"}, ["did you mean 'weights'"]),
    ],
)
def test_words_that_no_wire_has_are_refused(fields, words):
    with pytest.raises(onefold.ConfigError) as caught:
        Wire(**fields)
    assert all(word in str(caught.value) for word in words), caught.value


def test_ranks_with_different_wires_are_told_which_field_differs():
    def body(rank):
        wire = Wire(gradients="int8" if rank else "int4")
        with pytest.raises(onefold.ConfigError, match=r"Wire.gradients='int[48]'"):
            onefold.shard(seeded(Model), wire=wire)

    run_ranks(3, body)


def test_ranks_with_different_meshes_are_told():
    def body(rank):
        shape = (2, 2)
        mesh = init_device_mesh("cpu", shape)
        with pytest.raises(onefold.ConfigError, match="one axis"):
            onefold.shard(seeded(Model), mesh=mesh if rank else None)

    run_ranks(4, body)


def test_empty_and_tiny_parameters_travel_quantized():
    class Odd(nn.Module):
        def __init__(self):
            super().__init__()
            self.empty = nn.Parameter(torch.empty(0, 3))
            self.tiny = nn.Parameter(torch.ones(1, 1))
            self.scalar = nn.Parameter(torch.tensor(2.0))
            self.line = nn.Linear(5, 3)

        def forward(self, x):
            return (self.line(x) * self.tiny * self.scalar).sum() + self.empty.sum()

    def body(rank):
        module = Odd()
        optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
        onefold.shard(module, optimizer, wire=PRESETS["zero++"])
        for _ in range(2):
            module(torch.ones(2, 5)).backward()
            optimizer.step()
            optimizer.zero_grad()
        dist.barrier()

    run_ranks(3, body)


@pytest.mark.parametrize("stage", [1, 3])
def test_complex_parameters_travel_exactly_beside_quantized_ones(stage):
    """Their gradients are those of an exact wire, bit for bit."""

    class Filtered(nn.Module):
        def __init__(self):
            super().__init__()
            self.line = nn.Linear(8, 8)
            self.filter = nn.Parameter(torch.randn(5, 3, dtype=torch.complex64))

        def forward(self, x):
            return torch.fft.irfft(torch.fft.rfft(self.line(x)) * self.filter.sum(1))

    def body(rank, wire):
        module = seeded(Filtered)
        onefold.shard(module, torch.optim.SGD(module.parameters(), lr=0.1), stage=stage, wire=wire)
        module(torch.full((2, 8), rank + 1.0)).square().mean().backward()
        return module.filter.grad.full_tensor()

    exact, quantized = (run_ranks(3, body, w)[0] for w in (None, Wire(gradients="int8")))
    assert torch.equal(exact, quantized)
    run_ranks(3, body, "recommended")
