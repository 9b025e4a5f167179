"""Released pages are handed to the next buffer of their length, and views stay where they are."""

from __future__ import annotations

import sys

import pytest
import torch

from onefold.tier.device import (
    MAX_SPARE,
    PAGES_NBYTES,
    START_NBYTES,
    DeviceStore,
    PagePool,
    Pages,
    mover,
)

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="pages move on Linux only")
NUMEL = PAGES_NBYTES  # four times the least, in fp32


def pages_of(count):
    move = mover()
    assert move is not None
    moved = []

    def counted(source, target, nbytes):
        moved.append((source, target))
        return move(source, target, nbytes)

    pool = PagePool(counted)
    return [Pages(NUMEL, torch.float32, pool) for _ in range(count)], moved


def test_a_buffer_that_comes_back_first_has_its_own_pages():
    (pages,), moved = pages_of(1)
    pages.tensor.fill_(3.0)
    pages.release()
    pages.restore()
    assert not moved
    assert pages.tensor[-1] == 3.0


def test_released_pages_move_to_the_next_buffer_and_addresses_stay():
    (first, second), moved = pages_of(2)
    first.tensor.fill_(3.0)
    view = first.tensor[5:]
    first.release()
    second.restore()
    assert moved == [(first.address, second.address)]
    apart = START_NBYTES // first.tensor.itemsize  # buffers begin at different places of a page
    assert torch.all(second.tensor[:-apart] == 3.0)
    assert torch.all(view == 0.0)  # the system gives a page of zeros to whoever reads
    second.tensor.fill_(4.0)
    second.release()
    first.restore()
    assert torch.all(view[apart:] == 4.0)


def test_no_more_pages_are_kept_than_are_whole_at_once():
    buffers, _ = pages_of(MAX_SPARE + 1)
    for pages in buffers:
        pages.tensor.fill_(1.0)
        pages.release()
    kept = [bool(pages.tensor[0] == 1.0) for pages in buffers]
    assert kept == [False] + [True] * MAX_SPARE


def test_a_mapping_outlives_its_owner_as_long_as_a_view_does():
    (pages,), _ = pages_of(1)
    view = pages.tensor[:4]
    del pages
    view.fill_(2.0)
    assert view.sum() == 8.0


def test_small_buffers_come_from_the_heap_and_keep_their_storage():
    allocation = DeviceStore(torch.device("cpu")).allocate(8, torch.float32)
    assert not isinstance(allocation, Pages)
    view = allocation.tensor[2:]
    allocation.release()
    allocation.restore()
    assert view.fill_(1.0).sum() == 6.0


@pytest.mark.parametrize("is_read_into", [False, True])
def test_a_buffer_without_elements_needs_no_pages(is_read_into):
    """A streamed table reads no rows where no token asks for one."""
    store = DeviceStore(torch.device("cpu"), is_read_into=is_read_into)
    assert store.allocate(0, torch.float32).tensor.shape == (0,)
