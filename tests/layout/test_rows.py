"""The layout of a unit: pure integers."""

from __future__ import annotations

from math import prod

import torch
from hypothesis import given
from hypothesis import strategies as st

from onefold.layout.ranges import Ranges
from onefold.layout.rows import ALIGN_NUMEL, PIECE_NUMEL, Layout

shapes = st.lists(st.lists(st.integers(0, 9), max_size=3).map(tuple), min_size=1, max_size=6)
worlds = st.integers(1, 7)


def layout_of(shape_list, world_size):
    return Layout.build([(f"p{i}", shape) for i, shape in enumerate(shape_list)], world_size)


@given(shapes, worlds)
def test_pieces_cover_every_parameter_once_or_replicate_it(shape_list, world_size):
    for slot in layout_of(shape_list, world_size).slots:
        if slot.replicated:
            assert set(slot.pieces) == {(0, 1)}
            continue
        elements = [i for start, stop in slot.pieces for i in range(start, stop)]
        assert elements == list(range(prod(slot.shape)))


@given(st.integers(0, 40), worlds)
def test_rows_are_cut_where_torch_chunk_cuts(num_rows, world_size):
    chunks = [len(chunk) for chunk in torch.arange(num_rows).chunk(world_size)]
    chunks += [0] * (world_size - len(chunks))
    lengths = Ranges.over(num_rows, world_size).lengths
    assert lengths == (chunks if num_rows else [0] * world_size)


@given(shapes, worlds)
def test_regions_and_pieces_are_aligned_and_do_not_overlap(shape_list, world_size):
    layout = layout_of(shape_list, world_size)
    full_end = 0
    ends = [0] * world_size
    for index, slot in enumerate(layout.slots):
        assert slot.full_offset % ALIGN_NUMEL == 0
        assert slot.full_offset >= full_end
        full_end = slot.full_offset + slot.numel
        for rank in range(world_size):
            start = layout.starts(rank)[index]
            assert start % PIECE_NUMEL == 0
            assert start >= ends[rank]
            ends[rank] = start + slot.piece_numel(rank)
    assert full_end <= layout.full_numel
    assert all(end <= layout.shard_numel(rank) for rank, end in enumerate(ends))


@given(shapes, worlds)
def test_piece_shapes_hold_the_pieces(shape_list, world_size):
    for slot in layout_of(shape_list, world_size).slots:
        for rank in range(world_size):
            assert prod(slot.cut.piece_shape(rank)) == slot.piece_numel(rank)
            assert slot.cut.piece_shape(rank)[1:] == slot.shape[1:]


@given(shapes)
def test_a_shard_in_a_world_of_one_is_the_full_buffer(shape_list):
    layout = layout_of(shape_list, 1)
    assert layout.shard_numel(0) == layout.full_numel
    assert layout.starts(0)[:-1] == tuple(slot.full_offset for slot in layout.slots)


@given(shapes, worlds)
def test_spans_are_multiples_of_the_piece_alignment(shape_list, world_size):
    layout = layout_of(shape_list, world_size)
    for rank in range(world_size):
        start, stop = layout.span(0, len(layout.slots) - 1, rank)
        assert (start, stop) == (0, layout.shard_numel(rank))
        assert (stop - start) % PIECE_NUMEL == 0
