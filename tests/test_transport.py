"""Transports move exactly the pieces, and sum in rank order."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st

from onefold.layout.rows import Layout
from onefold.ledger import Ledger
from onefold.wire.collectives import Group
from onefold.wire.transport import PACK_NBYTES, Composed, Region
from tests.ranks import run_processes, run_ranks

LARGE = (PACK_NBYTES // 4 + 3, 2)
shape_lists = st.lists(
    st.sampled_from([(), (1,), (0,), (3, 0), (5,), (7, 3), (2, 2, 2), LARGE]), min_size=1, max_size=5
)


def regions_of(shapes, world_size, fill):
    layout = Layout.build([(str(i), shape) for i, shape in enumerate(shapes)], world_size)
    flat = fill(layout.full_numel)
    return [
        Region(flat[slot.full_offset : slot.full_offset + slot.numel], slot.pieces)
        for slot in layout.slots
    ]


def gather(rank, world_size, shapes, native):
    truth = [r.whole for r in regions_of(shapes, world_size, lambda n: torch.arange(n).float())]
    mine = regions_of(shapes, world_size, lambda n: torch.full((n,), -1.0))
    for region, whole in zip(mine, truth, strict=True):
        start, stop = region.pieces[rank]
        region.whole[start:stop] = whole[start:stop]
    transport = Composed(Group.of(dist.group.WORLD), Ledger(), native=native)
    transport.gather(mine, "gather").wait()
    for region, whole in zip(mine, truth, strict=True):
        assert torch.equal(region.whole, whole)


def reduce(rank, world_size, shapes, dtype, fresh):
    def noise(of_rank):
        generator = torch.Generator().manual_seed(of_rank)
        return lambda n: torch.randn(n, generator=generator).to(dtype)

    all_ranks = [regions_of(shapes, world_size, noise(r)) for r in range(world_size)]
    mine = all_ranks[rank]
    out = [torch.full((region.piece_numel(rank),), 0.5) for region in mine]
    transport = Composed(Group.of(dist.group.WORLD), Ledger())
    transport.reduce_scatter(mine, out, [fresh] * len(mine), "reduce").wait()
    for index, region in enumerate(mine):
        start, stop = region.pieces[rank]
        total = all_ranks[0][index].whole[start:stop].float()
        for other in all_ranks[1:]:
            total = total + other[index].whole[start:stop].float()
        mean = total * (1.0 / world_size)
        assert torch.equal(out[index], mean if fresh else mean + 0.5)


@settings(max_examples=20, deadline=None)
@given(shape_lists, st.integers(2, 4), st.booleans())
def test_a_gather_fills_every_region_from_its_owners(shapes, world_size, native):
    shapes = [shape for shape in shapes if shape] or [(5,)]
    run_ranks(world_size, gather, world_size, shapes, native)


@settings(max_examples=20, deadline=None)
@given(shape_lists, st.integers(2, 4), st.sampled_from([torch.float32, torch.bfloat16]), st.booleans())
def test_a_reduction_is_the_fp32_mean_in_rank_order(shapes, world_size, dtype, fresh):
    run_ranks(world_size, reduce, world_size, shapes, dtype, fresh)


def _over_gloo(rank):
    shapes = [(), (1,), (5,), (7, 3), LARGE]
    gather(rank, 3, shapes[1:], False)
    reduce(rank, 3, shapes, torch.bfloat16, True)
    reduce(rank, 3, shapes, torch.float32, False)


@pytest.mark.process
def test_gloo_processes_move_the_same_bits_as_threads():
    run_processes(3, _over_gloo)
