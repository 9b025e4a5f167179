"""Ranges: what each rank has of a dimension, as arithmetic says it."""

from __future__ import annotations

import sys
from itertools import pairwise

import torch
from hypothesis import example, given
from hypothesis import strategies as st

from onefold.layout.ranges import Ranges

extents = st.integers(0, 40)
worlds = st.integers(1, 7)
shares = st.lists(st.integers(0, 5), min_size=1, max_size=5).filter(any).map(tuple)


@st.composite
def any_ranges(draw):
    """Ranges of any kind, of some ranks, of elements rather than indices, counted from anywhere."""
    extent, world_size = draw(extents), draw(worlds)
    ranges = draw(
        st.sampled_from(
            [Ranges.over(extent, world_size), Ranges.alike(extent, world_size)]
        ) | shares.map(lambda weights: Ranges.over(extent, len(weights), weights))
    )  # fmt: skip
    first, step = draw(st.integers(0, 3)), draw(st.integers(1, 3))
    return ranges[first::step].scaled(draw(st.integers(0, 5))).moved(draw(st.integers(-9, 9)))


@given(any_ranges())
@example(Ranges.over(2, 3, (1, 0, 1))[::2])
def test_a_range_by_number_is_that_of_the_list(ranges):
    listed = list(ranges)
    assert [ranges[number] for number in range(len(ranges))] == listed
    assert ranges.lengths == [stop - start for start, stop in listed]
    assert ranges.numel == sum(ranges.lengths)
    assert tuple(ranges[1::2]) == tuple(listed[1::2])
    if listed:
        assert ranges[-1] == listed[-1]
        assert ranges.length(0) == ranges.lengths[0]
    assert ranges.most == max(ranges.lengths, default=0)
    lie_together = all(end == begin for (_, end), (begin, _) in pairwise(listed))
    is_equal = len(set(ranges.lengths)) == 1 and (lie_together or ranges.lengths[0] == 0)
    assert ranges.common == (ranges.lengths[0] if is_equal else 0)


@given(any_ranges().filter(lambda ranges: len(ranges) and not ranges.prefix))
def test_a_stack_has_the_ranges_as_rows(ranges):
    start, longest, stride, full, short = ranges.stack
    rows = [(start + stride * row, start + stride * row + longest) for row in range(full)]
    held = [each for each in ranges if each[0] < each[1]]
    assert [row for row in rows if longest] == held[:full]
    assert [stop - start for start, stop in held[full:]] == [short] * (short > 0)


@given(any_ranges(), st.integers(0, 9))
def test_joined_ranges_lie_end_to_end_and_are_as_long(ranges, start):
    joined = ranges.joined(start)
    assert joined.lengths == ranges.lengths
    assert all(end == begin for (_, end), (begin, _) in pairwise(joined))
    assert not joined or joined[0][0] == start


@given(extents, worlds)
def test_even_ranges_are_those_of_torch_chunk(extent, world_size):
    chunks = [len(chunk) for chunk in torch.arange(extent).chunk(world_size)] if extent else []
    ranges = Ranges.over(extent, world_size)
    assert ranges.lengths == chunks + [0] * (world_size - len(chunks))
    assert ranges.has_empty == (0 in ranges.lengths)


@given(extents, shares)
def test_weighted_ranges_are_within_one_of_each_share_and_rounded_down_where_they_end(
    extent, weights
):
    ranges = Ranges.over(extent, len(weights), weights)
    assert sum(ranges.lengths) == extent
    assert ranges.has_empty == (0 in ranges.lengths)
    for rank, (length, weight) in enumerate(zip(ranges.lengths, weights, strict=True)):
        assert abs(length - extent * weight / sum(weights)) < 1
        assert weight or not length
        assert ranges[rank][1] == extent * sum(weights[: rank + 1]) // sum(weights)


def test_equal_weights_that_divide_cut_as_no_weights_do():
    assert list(Ranges.over(12, 3, (2, 2, 2))) == list(Ranges.over(12, 3))


def test_ranges_of_16384_ranks_take_no_more_memory_than_those_of_two():
    def nbytes(ranges):
        fields = [getattr(ranges, name) for name in ranges.__slots__]
        return sys.getsizeof(ranges) + sum(map(sys.getsizeof, fields))

    for few, many in (
        (Ranges.over(9, 2), Ranges.over(1, 16384)),
        (Ranges.over(9, 2)[1::2].joined(3), Ranges.over(99_999, 16384)[5::8].joined(3)),
    ):
        assert nbytes(many) <= nbytes(few) + 16
