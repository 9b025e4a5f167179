"""Messages of many ranks: equal chunks, whose number of collectives and tables no rank adds to.

Quantized ones have the bits of few ranks' messages, padding is counted apart.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import replace
from threading import Lock

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import onefold
from onefold import Wire
from onefold.layout import message_plan
from onefold.layout.ledger import Ledger
from onefold.layout.message_plan import MOST_PADDING, MessagePlan
from onefold.layout.messages import QuantizedMessages, flags_of
from onefold.layout.ranges import Ranges
from onefold.layout.rows import Layout, Slot
from onefold.planner import message_counts
from onefold.wire.codec import codec_of
from onefold.wire.collectives import Group
from onefold.wire.exchange import Exchange
from onefold.wire.message_cut import MessageLayout
from onefold.wire.quantized import Quantized
from onefold.wire.transport import Composed, Reduction, SendRows
from tests.support.ranks import run_ranks, seeded

SHAPES = [(), (1,), (0,), (3, 0), (5,), (7, 3), (2, 2, 2), (64, 9), (8, 700), (300, 299)]
PATCHED = Lock()
"""Ranks are threads: while one takes its ranks for few, no other lays out a message."""
shape_lists = st.lists(st.sampled_from(SHAPES), min_size=1, max_size=5)


class Ranks:
    """Ranks as a plan sees them."""

    is_nccl = packs = False

    def __init__(self, world_size, rank):
        self.world_size, self.rank = world_size, rank


@pytest.fixture
def no_few(monkeypatch):
    """Two ranks are many."""
    monkeypatch.setattr(message_plan, "FEW_RANKS", 1)
    monkeypatch.setattr(message_plan, "PACK_NBYTES", 4096)


def regions_of(shapes, world_size, *, has_flags=True):
    layout = Layout.build([(str(i), shape) for i, shape in enumerate(shapes)], world_size)
    slots = [slab for slabs in layout.slabs() for slab in slabs]
    flags = [flags_of(world_size)] * has_flags
    offsets = [slot.full_offset for slot in slots] + [layout.full_numel] * has_flags
    kept = [
        (slot, offset) for slot, offset in zip([*slots, *flags], offsets, strict=True)
        if not slot.replicated
    ]  # fmt: skip
    return [slot for slot, _ in kept], [offset for _, offset in kept], layout


def gather(rank, world_size, shapes):
    slots, offsets, layout = regions_of(shapes, world_size)
    group, ledger = Group.from_handle(dist.group.WORLD), Ledger()
    cut = MessageLayout(slots, offsets, group, 4)
    assert cut.is_wide
    truth = torch.arange(layout.full_numel + world_size).float()
    full = torch.full_like(truth, -1.0)
    for span in cut.spans:
        full[slice(*span[rank])] = truth[slice(*span[rank])]
    ticket = Composed(Exchange(group, ledger)).gather(full, cut, "gather")
    works = len(ticket.works)
    ticket.wait()
    for span in cut.spans:
        whole = slice(span[0][0], span[-1][1])
        assert torch.equal(full[whole], truth[whole])
    assert works == len(cut.large) + len(cut.counted) + bool(cut.medium)
    return {name: traffic.sent_nbytes for name, traffic in ledger.traffic.items()}, cut


@settings(max_examples=20)
@given(shape_lists, st.integers(2, 7))
def test_a_gather_of_many_ranks_fills_every_region_by_one_message(shapes, world_size):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(message_plan, "FEW_RANKS", 1)
        patch.setattr(message_plan, "PACK_NBYTES", 4096)
        for rank, (sent, cut) in enumerate(run_ranks(world_size, gather, world_size, shapes)):
            rows = sum(p.length(rank) for p in cut.pieces[:-1])
            assert sent.get("gather", 0) == 4 * (world_size - 1) * rows
            assert sent.get("control", 0) == 4 * (world_size - 1)
            assert sent.get("gather padding", 0) == 4 * cut.gather_padding


def both_cuts(slots, offsets, group, itemsize):
    """The layout of a message as that of many ranks, and as that of few."""
    with PATCHED:
        wide = MessageLayout(slots, offsets, group, itemsize)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(message_plan, "FEW_RANKS", 16)
            few = MessageLayout(slots, offsets, group, itemsize)
    assert (wide.is_wide, few.is_wide) == (True, False)
    return wide, few


def reduce(rank, world_size, shapes, dtype, fresh):
    """The means of a reduction, beside those of one without padding."""
    slots, _, _ = regions_of(shapes, world_size, has_flags=False)
    slots = [*slots, Slot("", (), 0, Ranges.alike(len(slots), world_size))]
    generator = torch.Generator().manual_seed(rank)
    partials = [torch.randn(slot.pieces[-1][1], generator=generator).to(dtype) for slot in slots]
    group, means = Group.from_handle(dist.group.WORLD), []
    for cut in both_cuts(slots, None, group, dtype.itemsize):
        ledger = Ledger()
        out = [torch.full((slot.pieces.length(rank),), 0.5) for slot in slots]
        reduction = Reduction(partials, cut, out, [fresh] * len(out), "reduce")
        Composed(Exchange(group, ledger)).reduce_scatter(reduction).wait()
        means.append(out)
        if cut.is_wide:
            padding = ledger.traffic.get("reduce_scatter padding")
            sent = 0 if padding is None else padding.sent_nbytes
            assert sent == dtype.itemsize * cut.reduce_padding
    for one, other in zip(*means, strict=True):
        assert torch.equal(one, other)


@settings(max_examples=20)
@given(
    shape_lists, st.integers(2, 7), st.sampled_from([torch.float32, torch.bfloat16]), st.booleans()
)
def test_means_of_many_ranks_have_the_bits_of_those_of_few(shapes, world_size, dtype, fresh):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(message_plan, "FEW_RANKS", 1)
        patch.setattr(message_plan, "PACK_NBYTES", 4096)
        run_ranks(world_size, reduce, world_size, shapes, dtype, fresh)


def quantized(rank, world_size, shapes, word, dtype):
    """A gather, one of differences, and two reductions with feedback: of many ranks and of few."""
    slots, offsets, layout = regions_of(shapes, world_size)
    state = regions_of(shapes, world_size, has_flags=False)[0]
    state = [*state, Slot("", (), 0, Ranges.alike(len(state), world_size))]
    group, found, sent = Group.from_handle(dist.group.WORLD), [], []
    cuts = both_cuts(slots, offsets, group, dtype.itemsize)
    for cut, reduced in zip(cuts, both_cuts(state, None, group, dtype.itemsize), strict=True):
        ledger, source = Ledger(), torch.Generator().manual_seed(rank)
        transport = Quantized(Composed(Exchange(group, ledger)), codec_of(word, group=32))
        full = torch.full((layout.full_numel + world_size,), 0.25, dtype=dtype)
        own = []
        for span in cut.spans:
            full[slice(*span[rank])] = torch.randn(span.length(rank), generator=source).to(dtype)
            own.append(torch.randn(span.length(rank), generator=source))
        for has_base in (False, True):
            rows = SendRows([None if i % 2 else one for i, one in enumerate(own)], has_base)
            transport.gather(full, cut, "gather", rows).wait()
            found.append(full.clone())
        rests, out = {}, [torch.full((slot.pieces.length(rank),), 0.5) for slot in state]

        def feedback(region, numel, rests=rests):
            return rests.setdefault(region, torch.zeros(numel))

        for fresh in (True, False):
            partials = [torch.randn(s.pieces[-1][1], generator=source).to(dtype) for s in state]
            reduction = Reduction(partials, reduced, out, [fresh] * len(out), "reduce", feedback)
            transport.reduce_scatter(reduction).wait()
        found += [*out, *(rests[region] for region in sorted(rests))]
        traffic = {name: one.sent_nbytes for name, one in ledger.traffic.items()}
        sent.append({name: nbytes for name, nbytes in traffic.items() if "padding" not in name})
    half = len(found) // 2
    for one, other in zip(found[:half], found[half:], strict=True):
        assert torch.equal(one, other)
    assert sent[0] == sent[1]


@settings(max_examples=30)
@given(
    shape_lists, st.integers(2, 7), st.sampled_from(["int8", "int4", "int8+h", "int4+h"]),
    st.sampled_from([torch.float32, torch.bfloat16, torch.float64]),
)  # fmt: skip
def test_quantized_messages_of_many_ranks_have_the_bits_of_those_of_few(
    shapes, world_size, word, dtype
):
    """Shapes with fewer rows than ranks, of one element and of none are among them."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(message_plan, "FEW_RANKS", 1)
        patch.setattr(message_plan, "PACK_NBYTES", 4096)
        run_ranks(world_size, quantized, world_size, shapes, word, dtype)


def found_in(section):
    """The parts of all ranks, of this one and of the others."""
    return section.parts, section.own, section.others


@settings(max_examples=300)
@given(
    st.lists(st.lists(st.integers(1, 5000), max_size=3).map(tuple), min_size=1, max_size=4),
    st.integers(17, 16_384), st.sampled_from(["int8", "int4"]), st.data(),
)  # fmt: skip
def test_of_quantized_messages_nothing_is_kept_that_is_as_long_as_the_world(
    shapes, world_size, word, data
):
    """And the bytes that a rank sends are the closed form, with padding."""
    rank, codec = data.draw(st.integers(0, world_size - 1)), codec_of(word)
    slots, offsets, _ = regions_of(shapes, world_size)
    plan = MessagePlan(slots, offsets, Ranks(world_size, rank), 4)
    table = {pieces: Counter(pieces.lengths) for pieces in set(plan.pieces)}
    lengths = [table[pieces] for pieces in plan.pieces]  # how many ranks have so many elements
    mine = [pieces.length(rank) for pieces in plan.pieces]

    def room(region, numel):
        nbytes = codec.nbytes(numel) if plan.is_matrix[region] else 4 * numel
        return -(-nbytes // 16) * 16

    rooms = [sum(room(i, n) * ranks for n, ranks in of.items()) for i, of in enumerate(lengths)]
    own, whole = sum(map(room, range(len(slots)), mine)), sum(rooms)
    chunk = sum(room(i, max(of)) for i, of in enumerate(lengths) if i not in plan.counted)
    counted, apart = (
        sum(room(i, mine[i]) for i in plan.counted),
        sum(rooms[i] for i in plan.counted),
    )
    for is_reduced, rows in ((False, plan.spans), (True, plan.pieces)):
        messages = QuantizedMessages(plan, rows, codec.nbytes, 4, is_reduced=is_reduced)
        assert messages.nbytes == chunk * world_size + apart
        assert messages.gather_nbytes == own * (world_size - 1)
        assert messages.gather_padding == (chunk + counted - own) * (world_size - 1)
        assert messages.reduce_nbytes == whole - own
        assert messages.reduce_padding == messages.nbytes - chunk - counted - (whole - own)
        assert messages.received_nbytes == (chunk + counted) * world_size
        for section in messages.sections:
            assert max(map(len, [*found_in(section), section.sizes])) <= 3 * len(slots)
        parts_of = [defaultdict(list) for _ in range(3)]
        for section in messages.sections:
            for by_region, parts in zip(parts_of, found_in(section), strict=True):
                for part in parts:
                    by_region[part.region].append(part.ranks)
        for region, of in enumerate(lengths):
            of_all, of_own, of_others = (by_region[region] for by_region in parts_of)
            holders = world_size - of[0]
            assert of_own == [range(rank, rank + 1)] * (rank < holders)
            for ranges in (of_all, sorted([*of_own, *of_others], key=min)):
                ends = [0, *(ranks.stop for ranks in ranges)]
                assert [ranks.start for ranks in ranges] == ends[:-1]
                assert ends[-1] == holders
        for kept in (vars(messages), *map(vars, messages.sections)):
            for name, value in kept.items():
                if isinstance(value, list | tuple | dict):
                    assert len(value) <= 3 * len(slots), name


@settings(max_examples=300)
@given(
    st.lists(st.lists(st.integers(1, 5000), max_size=3).map(tuple), min_size=1, max_size=4),
    st.integers(17, 16_384), st.data(),
)  # fmt: skip
def test_sent_bytes_are_the_closed_form_with_padding_and_no_list_is_as_long_as_the_world(
    shapes, world_size, data
):
    rank = data.draw(st.integers(0, world_size - 1))
    slots, offsets, _ = regions_of(shapes, world_size)
    plan = MessagePlan(slots, offsets, Ranks(world_size, rank), 4)
    lengths = {i: [a.length(r) for r in range(world_size)] for i, a in enumerate(plan.pieces)}
    state, padded = lengths.keys() - {len(slots) - 1}, plan.medium
    others = world_size - 1
    assert plan.gather_numel == others * sum(lengths[i][rank] for i in state)
    assert plan.reduce_numel == sum(sum(lengths[i]) - lengths[i][rank] for i in state)
    room = sum(max(lengths[i]) for i in padded)
    assert plan.chunk_numel == room
    assert plan.gather_padding == others * (room - sum(lengths[i][rank] for i in padded))
    sent = sum(sum(lengths[i]) - lengths[i][rank] for i in padded)
    assert plan.reduce_padding == others * room - sent
    large = [i for i in padded if max(lengths[i]) * 4 >= message_plan.PACK_NBYTES]
    whole = sum(sum(lengths[i]) for i in padded)
    assert not large or room * world_size <= (1 + MOST_PADDING) * whole
    for name, value in vars(plan).items():
        if isinstance(value, list | tuple | dict):
            assert len(value) <= max(3, len(slots)), name


def trained(rank, stage, units, precision, wire=None, shape=None, shares=None):
    """Weights, traffic and prediction after two steps of a model whose rows do not divide.

    On a mesh of two axes if there is a `shape`; cut by `shares`, if there are any.
    """
    module = seeded(lambda: nn.Sequential(nn.Linear(67, 129), nn.LayerNorm(129), nn.Linear(129, 5)))
    optimizer = torch.optim.AdamW(module.parameters(), lr=0.1)
    mesh = (
        None if shape is None else init_device_mesh("cpu", shape, mesh_dim_names=("node", "rank"))
    )
    onefold.shard(module, optimizer, stage=stage, precision=precision, wire=wire, mesh=mesh,
                  shares=shares, units=[module] if units == 1 else list(module))  # fmt: skip
    generator = torch.Generator().manual_seed(rank)
    for _ in range(2):
        module(torch.randn(2, 67, generator=generator)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    report = onefold.report(module)
    sent = {name: (t.sent_nbytes, t.calls) for name, t in report.last_step.items()}
    with onefold.unsharded(module):
        weights = [p.detach().clone() for p in module.parameters()]
    return weights, sent, report


WIRES = [
    (stage, precision, None) for stage in (0, 1, 2, 3) for precision in (None, "bf16")
] + [
    (3, None, Wire(weights="int8", gradients="int4", feedback=True)),
    (2, "bf16", Wire(weights="int8-diff", gradients="int8")),
    (1, None, Wire(weights="int4+h", gradients="int4+h")),
]  # fmt: skip


def as_many(monkeypatch, world_size, *how):
    """The runs of ranks that are few, and of as many ranks that are taken for many."""
    few = run_ranks(world_size, trained, *how)
    with monkeypatch.context() as patch:
        patch.setattr(message_plan, "FEW_RANKS", 1)
        message_counts._messages_of.cache_clear()
        many = run_ranks(world_size, trained, *how)
    message_counts._messages_of.cache_clear()
    return zip(few, many, strict=True)


@pytest.mark.parametrize(("stage", "precision", "wire"), WIRES)
def test_a_run_has_the_bits_of_one_of_few_ranks_and_its_padding_is_counted_apart(
    stage, precision, wire, monkeypatch
):
    for world_size in (2, 3, 5):
        runs = as_many(monkeypatch, world_size, stage, 1, precision, wire)
        for (weights, sent, _), (others, more, report) in runs:
            assert all(map(torch.equal, weights, others))
            assert {name: n for name, n in more.items() if "padding" not in name} == sent
            assert report.differing() == {}


QUANTIZED = Wire(weights="int8", gradients="int4", feedback=True)
INSIDE = replace(QUANTIZED, weights=("int8", "exact"), secondary="optimizer")
UNEVEN = [
    *((shape, None, stage, wire) for shape in ((2, 3), (3, 2)) for stage, wire in [
        (3, None), (3, Wire(secondary="weights")), (2, QUANTIZED), (3, QUANTIZED), (3, INSIDE),
        (3, replace(QUANTIZED, secondary="weights")), (1, Wire("int8-diff", gradients="int8")),
        (3, Wire("int4+h", gradients="int4+h", secondary="gradients")),
    ]),
    *((None, shares, stage, wire) for shares in ((3, 0, 1), (1, 2, 0, 4, 1)) for stage, wire in [
        (1, None), (2, None), (3, None), (2, QUANTIZED), (3, QUANTIZED),
        (1, Wire("int8-diff", gradients="int8")),
    ]),
]  # fmt: skip


@pytest.mark.parametrize(("shape", "shares", "stage", "wire"), UNEVEN)
def test_uneven_rows_on_two_axes_and_ranks_of_weight_0_change_no_bit_among_many(
    shape, shares, stage, wire, monkeypatch
):
    world_size = len(shares) if shape is None else shape[0] * shape[1]
    runs = as_many(monkeypatch, world_size, stage, 1, None, wire, shape, shares)
    for (weights, sent, _), (others, more, report) in runs:
        assert all(map(torch.equal, weights, others))
        assert {name: n for name, n in more.items() if "padding" not in name} == sent
        assert report.differing() == {}
