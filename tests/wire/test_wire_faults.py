"""What goes wrong on a quantized or two-hop wire is an error, or mended: nothing stale is used."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import onefold
from onefold import Wire
from onefold.engine.registry import engine_of
from onefold.wire_config import PRESETS
from tests.support.ranks import run_ranks, seeded
from tests.support.rows import again_but, worlds_in_turn


def net() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 64), nn.Linear(64, 8))


def two_by_two():
    return init_device_mesh("cpu", (2, 2))


@pytest.mark.filterwarnings("ignore:step 1 is skipped")
@pytest.mark.parametrize(
    ("stage", "secondary"), [(3, None), (3, "weights"), (3, False), (2, None), (3, "optimizer")]
)
def test_a_bad_row_that_some_ranks_alone_would_sum_skips_the_step_on_all(stage, secondary):
    """Exact inside the node, quantized between: ranks of one place see what is not finite."""

    def body(rank):
        module = seeded(lambda: nn.Linear(8, 64))
        optimizer = torch.optim.SGD(module.parameters(), lr=1e-2)
        wire = Wire(gradients=("exact", "int8"), secondary=secondary)
        onefold.shard(module, optimizer, stage=stage, mesh=two_by_two(), wire=wire)
        before = [p.to_local().clone() for p in module.parameters()]
        y = module(torch.randn(4, 8))
        bad = y[:, 0].sum() * float("inf") if rank == 1 else 0.0
        (y.square().mean() + bad).backward()
        optimizer.step()
        after = [p.to_local() for p in module.parameters()]
        moved = not all(torch.equal(a, b) for a, b in zip(before, after, strict=True))
        return moved, onefold.report(module).skipped

    assert run_ranks(4, body) == [(False, 1)] * 4


@pytest.mark.filterwarnings("ignore:step 2 is skipped")
def test_one_bad_step_is_skipped_alone_where_gradients_are_zeroed_in_place():
    def body(rank):
        module = seeded(net)
        optimizer = torch.optim.SGD(module.parameters(), lr=1e-2)
        onefold.shard(module, optimizer, wire=Wire(gradients="int8"))
        skipped = []
        for step in range(4):
            x = torch.randn(4, 8)
            if step == 1:
                x[0, 0] = float("nan")
            module(x).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=False)
            skipped.append(onefold.report(module).skipped)
        return skipped

    assert run_ranks(2, body) == [[0, 1, 1, 1]] * 2


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_edited_weights_are_what_quantized_messages_send(dtype):
    """In bf16 there are masters, which follow edits before they are sent."""

    def body(rank):
        module = seeded(net).to(dtype)
        onefold.shard(module, wire=Wire(weights="int8"))
        x = torch.ones(2, 8, dtype=dtype)
        with torch.no_grad():
            assert module(x).abs().max() > 0
            with onefold.unsharded(module, writeback=True):
                for p in module.parameters():
                    p.zero_()
            assert module(x).abs().max() == 0
            for p in module.parameters():
                p.fill_(1.0)
            assert (module(x) > 100).all()

    run_ranks(2, body)


WAYS = [
    {"stage": 2},
    {"stage": 2, "wire": Wire(weights="int8-diff")},
    {"stage": 3, "wire": Wire(weights="int8")},
    {"stage": 3, "mesh": True},
    {"stage": 3, "mesh": True, "wire": PRESETS["recommended"]},
    {"stage": 2, "mesh": True},
]


class Failing:
    """A transport whose next gather runs out of memory: when it is asked for, or at its end."""

    def __init__(self, inner, when):
        self.inner, self.when = inner, when

    def __getattr__(self, name):
        return getattr(self.inner, name)

    def gather(self, full, cut, label, own=None):
        when, self.when = self.when, None
        if when == "begun":
            raise MemoryError("made up")
        ticket = self.inner.gather(full, cut, label, own)
        return ticket.then(_raise) if when == "ended" else ticket


def _raise():
    raise MemoryError("made up")


@pytest.mark.parametrize("way", WAYS, ids=str)
@pytest.mark.parametrize("when", ["begun", "ended"])
def test_a_gather_that_fails_leaves_nothing_to_compute_with(way, when):
    """On all ranks at once, caught: the next batch is gathered anew."""

    def body(rank):
        module = seeded(net)
        x = torch.linspace(-1, 1, 16).view(2, 8)
        wanted = module(x).detach()
        optimizer = torch.optim.SGD(module.parameters(), lr=0.0)
        options = {**way, "mesh": two_by_two() if way.get("mesh") else None}
        onefold.shard(module, optimizer, **options)
        module(x).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        gather = engine_of(module).units[0].gather
        gather._transport = Failing(gather._transport, when)
        with pytest.raises(MemoryError):
            module(x)
        for _ in range(2):
            torch.testing.assert_close(module(x).detach(), wanted, rtol=0.02, atol=0.02)

    run_ranks(4, body)


class Starved(Failing):
    """A transport whose next reduction wants more memory than the device has."""

    def reduce_scatter(self, reduction):
        when, self.when = self.when, None
        if when == "begun":
            _starve()
        ticket = self.inner.reduce_scatter(reduction)
        return ticket.then(_starve) if when == "ended" else ticket


def _starve():
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 KiB. made up")


@again_but("begun-3", "ended-2")
@worlds_in_turn
@pytest.mark.parametrize("stage", [0, 2, 3])
@pytest.mark.parametrize("when", ["begun", "ended"])
def test_a_backward_without_memory_says_what_is_held_and_may_be_repeated(stage, when):
    """On all ranks at once, caught: the step then has the bits of one that did not fail."""

    def body(rank, fails):
        module = seeded(net)
        optimizer = torch.optim.AdamW(module.parameters(), lr=0.1)
        onefold.shard(module, optimizer, stage=stage)
        x = torch.linspace(-1, 1, 16).view(2, 8) * (rank + 1)
        if fails:
            reduction = engine_of(module).units[-1].gradient.reduction
            reduction._first.transport = Starved(reduction._first.transport, when)
            with pytest.raises(torch.OutOfMemoryError) as error:
                module(x).square().sum().backward()
            (note,) = error.value.__notes__
            assert "onefold holds, besides activations, " in note
            assert "\nhint: " in note
            optimizer.zero_grad()
        module(x).square().sum().backward()
        optimizer.step()
        with onefold.unsharded(module):
            return [p.detach().clone() for p in module.parameters()]

    calm, torn = run_ranks(3, body, False), run_ranks(3, body, True)
    for a, b in zip(calm, torn, strict=True):
        assert all(map(torch.equal, a, b))


def test_a_module_that_runs_on_one_rank_inside_unsharded_asks_nothing_of_the_others():
    def body(rank):
        module = seeded(net)
        optimizer = torch.optim.SGD(module.parameters(), lr=1.0)
        onefold.shard(module, optimizer, stage=3, mesh=two_by_two())
        module(torch.ones(1, 8)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        with onefold.unsharded(module), torch.no_grad():
            traffic = engine_of(module).ledger.traffic
            before = sum(each.calls for each in traffic.values())
            if rank == 0:
                module(torch.ones(1, 8))
            return sum(each.calls for each in traffic.values()) - before

    assert run_ranks(4, body) == [0] * 4


def test_integer_parameters_travel_as_they_are_beside_quantized_weights():
    class Counting(nn.Module):
        def __init__(self):
            super().__init__()
            self.line = nn.Linear(8, 8)
            self.table = nn.Parameter(torch.arange(64).view(8, 8), requires_grad=False)

        def forward(self, x):
            return self.line(x) + self.table.sum()

    def body(rank):
        module = seeded(Counting)
        x = torch.ones(2, 8)
        wanted = module(x).detach()
        onefold.shard(module, wire=PRESETS["zero++"])
        torch.testing.assert_close(module(x).detach(), wanted, rtol=1e-3, atol=0)

    run_ranks(3, body)


@pytest.mark.parametrize("wire", [*PRESETS, Wire(secondary="weights"), Wire(weights="int4-diff")])
def test_every_wire_works_in_a_world_of_one(wire):
    module = net()
    onefold.shard(module, wire=wire)
    module(torch.ones(1, 8)).sum().backward()


@worlds_in_turn
@pytest.mark.parametrize("wire", PRESETS)
@pytest.mark.parametrize("stage", [1, 3])
def test_every_named_wire_works_on_one_axis(wire, stage):
    def body(rank):
        module = seeded(net)
        onefold.shard(module, stage=stage, wire=wire)
        module(torch.ones(1, 8)).sum().backward()

    run_ranks(2, body)
