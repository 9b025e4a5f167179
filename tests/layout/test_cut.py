"""Cuts: which rank holds which piece of a parameter."""

from __future__ import annotations

from itertools import accumulate
from math import prod

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from onefold.layout.cut import MAX_IMBALANCE, cut_of, imbalance_of
from onefold.layout.messages import GatherPlan
from onefold.layout.ranges import Ranges
from onefold.layout.rows import Layout

shares = st.lists(st.integers(0, 5), min_size=1, max_size=5).filter(any).map(tuple)
shapes = st.lists(st.integers(0, 24), max_size=4).map(tuple)
large = st.tuples(st.integers(1, 12), st.integers(16, 40), st.integers(16, 40), st.integers(1, 9))


@given(st.one_of(shapes, large), st.integers(1, 6), st.one_of(st.none(), shares))
def test_pieces_cover_a_parameter_once_and_are_boxes_of_it(shape, world_size, weights):
    world_size = len(weights) if weights else world_size
    cut = cut_of(shape, world_size, weights)
    whole = torch.arange(prod(shape)).view(shape)
    seen = []
    for rank in range(world_size):
        own = cut.own_view(whole, rank)
        assert tuple(own.shape) == cut.piece_shape(rank)
        assert own.numel() == cut.piece_numel(rank)
        spans = [i for start, stop in cut.spans(rank) for i in range(start, stop)]
        assert own.reshape(-1).tolist() == spans
        offsets, sizes = cut.box(rank)
        index = tuple(slice(at, at + size) for at, size in zip(offsets, sizes, strict=True))
        assert torch.equal(whole[index], own)
        seen += spans
    assert sorted(seen) == list(range(prod(shape))) * (1 if shape else world_size)


@given(large, st.integers(2, 6))
def test_slabs_lie_where_spans_do(shape, world_size):
    layout = Layout.build([("first", (3,)), ("second", shape)], world_size)
    (_, slot), (_, slabs) = layout.slots, layout.slabs()
    for rank in range(world_size):
        spans = slot.cut.spans(rank)
        starts = [slab.full_offset - slot.full_offset + slab.pieces[rank][0] for slab in slabs]
        assert starts == [start for start, _ in spans]
        plan = GatherPlan.on_one_axis(layout, rank, 0)
        ends, own = [0, *accumulate(plan.shard)], spans[0][1] - spans[0][0]
        places = list(zip(ends[1::2], ends[2::2], strict=False))[1:]  # the first is of "first"
        begin = layout.starts(rank)[1]
        assert places == [(begin + i * own, begin + (i + 1) * own) for i in range(len(slabs))]


@given(large, st.integers(1, 64))
def test_rows_are_cut_as_torch_chunks_wherever_they_are_balanced(shape, world_size):
    cut = cut_of(shape, world_size)
    if imbalance_of(shape[0], world_size) <= MAX_IMBALANCE:
        assert cut.dim == 0
    else:
        assert imbalance_of(shape[cut.dim], world_size) <= imbalance_of(shape[0], world_size)
    assert cut.ranges == Ranges.over(shape[cut.dim], world_size)


@pytest.mark.parametrize("weights", [None, (1, 3) * 32])
@pytest.mark.parametrize("shape", [(8, 128, 64), (8, 4096, 14336), (32, 2880, 5760)])
def test_stacked_experts_leave_no_rank_above_its_share(shape, weights):
    world_size = 64
    cut = cut_of(shape, world_size, weights)
    fair = [prod(shape) * w / sum(weights or (64,)) for w in weights or (1,) * 64]
    held = [cut.piece_numel(rank) for rank in range(world_size)]
    assert sum(held) == prod(shape)
    limit = MAX_IMBALANCE if weights is None or shape[1] > 1000 else 1.6
    assert max(h / f for h, f in zip(held, fair, strict=True)) <= limit
    by_rows = cut_of(shape, world_size, by_rows=True)
    assert max(by_rows.piece_numel(rank) for rank in range(world_size)) > 1.5 * prod(shape) / 64


@pytest.mark.parametrize("shape", [(), (7,), (65_536,), (8, 16), (8, 8, 16)])
def test_vectors_and_small_parameters_are_cut_by_rows(shape):
    assert cut_of(shape, 3).dim == 0
