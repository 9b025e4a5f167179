"""Transports move exactly the pieces, and sum in rank order."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st

from onefold.layout.ledger import Kind, Ledger
from onefold.layout.message_plan import PACK_NBYTES, SHARE_NBYTES
from onefold.layout.rows import Layout, round_up
from onefold.wire.codec import codec_of
from onefold.wire.collectives import Group
from onefold.wire.exchange import Exchange
from onefold.wire.message_cut import MessageLayout
from onefold.wire.quantized import Quantized
from onefold.wire.transport import Composed, Reduction
from tests.support.ranks import run_processes, run_ranks

MEDIUM = (PACK_NBYTES // 4 + 3, 2)
LARGE = (SHARE_NBYTES // 8 + 3, 2)
shape_lists = st.lists(
    st.sampled_from([(), (1,), (0,), (3, 0), (5,), (7, 3), (2, 2, 2), MEDIUM, LARGE]),
    min_size=1,
    max_size=5,
)


def gather(rank, world_size, shapes, native):
    layout = Layout.build([(str(i), shape) for i, shape in enumerate(shapes)], world_size)
    group = Group.from_handle(dist.group.WORLD)
    cut = MessageLayout(layout.slots, [slot.full_offset for slot in layout.slots], group, 4)
    truth = torch.arange(layout.full_numel).float()
    full = torch.full_like(truth, -1.0)
    for slot in layout.slots:
        start, stop = (slot.full_offset + bound for bound in slot.pieces[rank])
        full[start:stop] = truth[start:stop]
    Composed(Exchange(group, Ledger(), native=native)).gather(full, cut, "gather").wait()
    for slot in layout.slots:
        region = slice(slot.full_offset, slot.full_offset + slot.numel)
        assert torch.equal(full[region], truth[region])


def reduce(rank, world_size, shapes, dtype, fresh):
    layout = Layout.build([(str(i), shape) for i, shape in enumerate(shapes)], world_size)
    generator = torch.Generator().manual_seed(0)
    all_ranks = [
        [torch.randn(slot.numel, generator=generator).to(dtype) for slot in layout.slots]
        for _ in range(world_size)
    ]
    out = [torch.full((slot.piece_numel(rank),), 0.5) for slot in layout.slots]
    group = Group.from_handle(dist.group.WORLD)
    cut = MessageLayout(layout.slots, None, group, dtype.itemsize)
    transport = Composed(Exchange(group, Ledger()))
    reduction = Reduction(all_ranks[rank], cut, out, [fresh] * len(out), "reduce")
    transport.reduce_scatter(reduction).wait()
    for index, slot in enumerate(layout.slots):
        start, stop = slot.pieces[rank]
        total = all_ranks[0][index][start:stop].float()
        for other in all_ranks[1:]:
            total = total + other[index][start:stop].float()
        mean = total * (1.0 / world_size)
        assert torch.equal(out[index], mean if fresh else mean + 0.5)


@settings(max_examples=20)
@given(shape_lists, st.integers(2, 4), st.booleans())
def test_a_gather_fills_every_region_from_its_owners(shapes, world_size, native):
    shapes = [shape for shape in shapes if shape] or [(5,)]
    run_ranks(world_size, gather, world_size, shapes, native)


@settings(max_examples=20)
@given(
    shape_lists, st.integers(2, 4), st.sampled_from([torch.float32, torch.bfloat16]), st.booleans()
)
def test_a_reduction_is_the_fp32_mean_in_rank_order(shapes, world_size, dtype, fresh):
    run_ranks(world_size, reduce, world_size, shapes, dtype, fresh)


def counted(rank, world_size, shapes):
    """Collectives of one gather, and what its packed message held meanwhile."""
    layout = Layout.build([(str(i), shape) for i, shape in enumerate(shapes)], world_size)
    group, ledger = Group.from_handle(dist.group.WORLD), Ledger()
    cut = MessageLayout(layout.slots, [slot.full_offset for slot in layout.slots], group, 4)
    transport, full = Composed(Exchange(group, ledger)), torch.empty(layout.full_numel)
    for _ in range(2):
        ticket = transport.gather(full, cut, "gather")
        works = len(ticket.works)
        ticket.wait()
    wire = ledger.usage.get((Kind.WIRE, "device"))
    if wire is None:
        return works, 0
    assert wire.now == wire.peak, "kept for the next gather"
    transport.rest()
    assert wire.now == 0
    return works, wire.peak


@pytest.mark.parametrize(("shapes", "regions_apart", "nbytes"), [
    ([(5,), (7, 3)], 0, 0),  # element by element: too little to count
    ([(5,), MEDIUM, MEDIUM], 0, 4 * (5 + 4 * MEDIUM[0])),
    ([LARGE, MEDIUM], 1, 4 * 2 * MEDIUM[0]),
    ([LARGE, (5,)], 1, 0),
])  # fmt: skip
def test_regions_share_one_message_unless_they_are_large(shapes, regions_apart, nbytes):
    found = run_ranks(2, counted, 2, shapes)
    is_small = nbytes == 0  # and one all-gather, or a broadcast of each rank where pieces differ
    for works, held in found:
        assert held == nbytes
        assert works - 2 * regions_apart in ((1, 2) if is_small else (2,))


def _over_gloo(rank):
    shapes = [(), (1,), (5,), (7, 3), MEDIUM, LARGE, MEDIUM]
    gather(rank, 3, shapes[1:], False)
    reduce(rank, 3, shapes, torch.bfloat16, True)
    reduce(rank, 3, shapes, torch.float32, False)


@pytest.mark.process
def test_gloo_processes_move_the_same_bits_as_threads():
    run_processes(3, _over_gloo)


def quantized(rank, world_size):
    """One reduction of a matrix and a vector; what it sent, held, and what came of it."""
    layout = Layout.build([("matrix", (48, 64)), ("vector", (33,))], world_size)
    group, ledger = Group.from_handle(dist.group.WORLD), Ledger()
    transport = Quantized(Composed(Exchange(group, ledger)), codec_of("int8"))
    partials = [torch.full((slot.numel,), float(rank)) for slot in layout.slots]
    out = [torch.empty(slot.piece_numel(rank)) for slot in layout.slots]
    cut = MessageLayout(layout.slots, None, group, 4)
    transport.reduce_scatter(Reduction(partials, cut, out, [True, True], "reduce")).wait()
    parcels = [
        round_up(codec_of("int8").nbytes(matrix), 16) + round_up(4 * vector, 16)
        for matrix, vector in zip(*([s.piece_numel(r) for r in range(world_size)]
                                    for s in layout.slots), strict=True)
    ]  # fmt: skip
    sent = sum(parcels) - parcels[rank]
    assert ledger.traffic["reduce_scatter"].sent_nbytes == sent
    wire = ledger.usage[Kind.WIRE, "device"]
    assert wire.peak == sent + (world_size - 1) * parcels[rank]
    transport.rest()
    assert wire.now == 0
    for each in out:
        torch.testing.assert_close(
            each, torch.full_like(each, (world_size - 1) / 2), rtol=4e-3, atol=0
        )


@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_a_quantized_reduction_holds_what_it_sends_and_what_it_receives_and_no_copy(world_size):
    run_ranks(world_size, quantized, world_size)
