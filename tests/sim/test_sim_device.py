"""The simulated device itself: what it must find, it finds, and what is right passes."""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.sim import building
from tests.sim import device as sim
from tests.sim.ranks import run_sim
from tests.sim.training import device

pytestmark = [
    pytest.mark.process,
    pytest.mark.skipif(building.missing() is not None, reason=f"needs {building.missing()}"),
]

LATE = {"max_us": 2000, "share": 1.0}
"""Every kernel is late by up to 2 ms."""


def on_another_stream(*, waits: bool) -> torch.Tensor:
    """A tensor that one stream writes and another doubles."""
    ones, other = torch.ones(1000, device=device()), torch.Stream(device())
    if waits:
        other.wait_stream(torch.accelerator.current_stream())
    with other:
        twice = ones * 2
    torch.accelerator.current_stream().wait_stream(other)
    return twice


def race() -> str:
    on_another_stream(waits=False)
    with pytest.raises(sim.Race) as error:
        sim.check()
    sim.native.reset()
    return str(error.value)


def order() -> bool:
    twice = on_another_stream(waits=True)
    sim.check()
    return bool((twice == 2).all())


def freed() -> bool:
    """A tensor whose memory was freed, and comes back, holds NaN."""
    ones = torch.ones(1000, device=device())
    storage, nbytes = ones.untyped_storage(), ones.nbytes
    storage.resize_(0)
    storage.resize_(nbytes)
    return bool(ones.isnan().all())


def early_read() -> tuple[bool, bool]:
    """Page-locked memory on the host before the copy's event, and after it."""
    host = torch.zeros(1000).pin_memory()
    host.copy_(torch.ones(1000, device=device()), non_blocking=True)
    event = torch.Event(device())
    event.record()
    before = bool(host.isnan().any() or (host == 0).any())
    event.synchronize()
    return before, bool((host == 1).all())


def overwritten(*, waits: bool) -> str:
    """The race of a host that writes into page-locked memory from which a copy has begun."""
    host = torch.ones(1000).pin_memory()
    device_ones = host.to(device(), non_blocking=True)
    event = torch.Event(device())
    event.record()
    if waits:
        event.synchronize()
    host[10:20].zero_()
    host[30:].zero_()  # found once
    found = sim.native.races()
    sim.native.reset()
    assert bool((device_ones == 1).all()) or not waits
    return sim._race(*found[0]) if len(found) == 1 else ""


def overwrites() -> tuple[str, str]:
    return overwritten(waits=False), overwritten(waits=True)


def taken_from_the_host() -> tuple[bool, int]:
    """Whether the device got memory of the host that a kernel had read, and the races in it."""
    sim.native.reset()
    ones, other = torch.ones(8, device=device()), torch.Stream(device())
    other.wait_stream(torch.accelerator.current_stream())
    numel = 1 << 24  # glibc takes so large a block from the system, and gives it back at once
    host = torch.empty(numel + (1 << 13))
    scalar = host[numel // 2].fill_(1.0)
    at = scalar.data_ptr()
    with other:
        products = ones * scalar
    storage = host.untyped_storage()
    del host, scalar
    while torch._C._storage_Use_Count(storage._cdata) > 1:
        time.sleep(0.001)  # until the kernel has ended; to wait for it would order it
    del storage
    taken = torch.zeros(numel, device=device())
    is_in = taken.data_ptr() <= at < taken.data_ptr() + taken.nbytes
    races = len(sim.native.races())
    sim.native.reset()
    return is_in and products.numel() == 8, races


def waits() -> list[str]:
    """What made the host wait: an item, a copy from pageable memory, a copy to the host."""
    sim.native.reset()
    ones = torch.ones(8, device=device())
    ones.sum().item()
    torch.zeros(8).to(device(), non_blocking=True)
    ones.cpu()
    return sorted(wait.split(" at ")[0] for wait in sim.host_waits())


def draws() -> tuple[bool, bool]:
    """Equal seeds draw alike, and one draw after another does not."""
    drawn = []
    for _ in range(2):
        torch.manual_seed(3)
        drawn.append([torch.rand(16, device=device()).cpu() for _ in range(2)])
    (first, then), again = drawn
    return torch.equal(first, again[0]), torch.equal(first, then)


def memory() -> str:
    with pytest.raises(torch.OutOfMemoryError) as error:
        torch.empty(1 << 40, dtype=torch.uint8, device=device())
    return str(error.value)


def alone(rank: int) -> dict[str, Any]:
    found = [
        race, order, freed, early_read, overwrites, taken_from_the_host, waits, draws, memory,
    ]  # fmt: skip
    return {each.__name__: each() for each in found}


@pytest.fixture(scope="module")
def found() -> dict[str, Any]:
    return run_sim(1, alone, backend=None, checks_races=False, memory=1 << 30, **LATE)[0]


def test_a_race_names_both_operations_and_lines(found):
    assert "nothing orders" in found["race"]
    assert found["race"].count("test_sim_device.py") >= 2
    assert "aten::mul" in found["race"]
    assert found["order"], "with a wait there is none"


def test_freed_memory_is_nan(found):
    assert found["freed"]


def test_memory_that_the_device_takes_from_the_host_has_no_accesses_yet(found):
    assert found["taken_from_the_host"] == (True, 0)


def test_the_host_reads_no_value_before_it_has_waited(found):
    assert found["early_read"] == (True, True)


def test_a_host_that_writes_where_a_copy_still_reads_is_in_a_race(found):
    early, late = found["overwrites"]
    assert "copy to device, which reads on stream" in early
    assert "a write, which writes on the host" in early
    assert early.count("test_sim_device.py") >= 2
    assert not late, "after a wait there is none"


def test_host_waits_are_counted_by_kind(found):
    assert found["waits"] == ["copy to device of pageable memory", "copy to host", "item"]


def test_generators_repeat_by_seed(found):
    assert found["draws"] == (True, False)


def test_memory_ends_in_torchs_error(found):
    assert "memory" in found["memory"]


# messages


def refused(rank: int, begin: Callable[[int, Any], Any]) -> str:
    """The words with which a group of its own ends; a rank that sees none waits for the device."""
    group = dist.new_group(backend=sim.BACKENDS, timeout=timedelta(seconds=20))
    try:
        work = begin(rank, group)
        work.wait()
        torch.accelerator.synchronize()
        dist.all_reduce(torch.ones(2, device=device()), group=group)
    except (RuntimeError, ValueError) as error:
        return str(error)
    return ""


def other_kind(rank: int, group: Any) -> Any:
    tensor = torch.ones(4, device=device())
    if rank == 0:
        return dist.all_reduce(tensor, group=group, async_op=True)
    return dist.broadcast(tensor, 0, group=group, async_op=True)


def other_size(rank: int, group: Any) -> Any:
    return dist.all_reduce(torch.ones(4 + rank, device=device()), group=group, async_op=True)


def unequal_pieces(rank: int, group: Any) -> Any:
    own, out = torch.ones(4, device=device()), torch.ones(9, device=device())
    return group._get_backend(device())._allgather_base(out, own)


def not_contiguous(rank: int, group: Any) -> Any:
    tensor = torch.ones(4, 4, device=device()).t()
    return group._get_backend(device()).allreduce([tensor])


def a_limit(rank: int, group: Any) -> Any:
    """Rank 1 comes later than rank 0 is ready to wait."""
    tensor = torch.ones(4, device=device())
    if rank == 1:
        dist.barrier()
    work = group._get_backend(device()).allreduce([tensor])
    try:
        work.wait(timedelta(milliseconds=200))
    finally:
        if rank == 0:
            dist.barrier()
    return work


def together(rank: int) -> dict[str, str]:
    kinds = [other_kind, other_size, unequal_pieces, not_contiguous, a_limit]
    return {each.__name__: refused(rank, each) for each in kinds}


def test_what_nccl_hangs_in_or_mixes_is_an_error():
    ranks = run_sim(2, together, checks_races=False)
    for said in ranks:
        assert "ranks differ" in said["other_kind"]
        assert "all_reduce of 4" in said["other_kind"]
        assert "broadcast of 4" in said["other_kind"]
        assert "all_reduce of 5" in said["other_size"]
        assert "wants 2 equal pieces" in said["unequal_pieces"]
        assert "contiguous" in said["not_contiguous"]
    assert "aborted" in ranks[0]["a_limit"]
