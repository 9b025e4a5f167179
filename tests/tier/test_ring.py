"""Unsharded weights of a device lie in a ring: the same addresses in every step.

The ring works on any memory of torch's allocator, so these tests run it on the CPU's.
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import nullcontext
from dataclasses import replace

import pytest
import torch
import torch._inductor.utils  # threads may not import it at once
from torch import Tensor, nn
from torch._C._profiler import _EventType

import onefold
from onefold.compat import NAMES
from onefold.engine.driving import Action, Verb
from onefold.engine.registry import engine_of
from onefold.tier import accelerator, device
from onefold.tier.device import DeviceStore, InRing, Ring
from tests.support.caching_allocator import CachingAllocator
from tests.support.models import Model, next_token_loss, token_batches
from tests.support.ranks import run_ranks, seeded
from tests.support.rows import again_but

CPU = torch.device("cpu")


def skip_without_exchange() -> None:
    if not NAMES.swap:
        pytest.skip("storages of this torch cannot exchange their bytes: torch 2.11")


def use_ring(monkeypatch: pytest.MonkeyPatch, has_ring: bool) -> None:
    """Make buffers as on an accelerator: with a ring, or as torch without its private call."""
    if has_ring:
        skip_without_exchange()
    monkeypatch.setattr(device, "mover", lambda: None)
    monkeypatch.setattr(accelerator, "current", lambda device: None)
    init = DeviceStore.__init__

    def made(self, *args, **kwargs):
        init(self, *args, **kwargs)
        self._ring = Ring(CPU) if has_ring else None

    monkeypatch.setattr(DeviceStore, "__init__", made)


class Addresses:
    """Notes where each unit is unsharded."""

    def __init__(self, module: nn.Module) -> None:
        engine = engine_of(module)
        self.units, self._do = engine.units, engine.executor.do
        self.seen: list[tuple[str, int]] = []
        engine.executor.__dict__["do"] = self._noting

    def _noting(self, actions: Iterable[Action]) -> None:
        for action in actions:
            self._do([action])
            if action[0] is Verb.SHOW:
                unit = self.units[action[1]]
                self.seen.append((unit.name, unit.unsharded.tensor.data_ptr()))

    def take(self) -> list[tuple[str, int]]:
        seen, self.seen = self.seen, []
        return seen


def train(rank: int, *, stage: int = 3, depth: int = 5) -> tuple[Tensor, list[object]]:
    module = seeded(Model, depth)
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-2)
    onefold.shard(module, optimizer, stage=stage)
    addresses, steps, losses = Addresses(module), list[object](), []
    for batch in token_batches() * 2:
        loss = next_token_loss(module, batch)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        steps.append(addresses.take())
        losses.append(loss.detach())
    with torch.no_grad():
        next_token_loss(module, token_batches()[0])
    return torch.stack(losses), steps


@again_but("3")
@pytest.mark.parametrize("world_size", [2, 3])
def test_unsharded_weights_have_the_same_addresses_and_bits_in_every_step(world_size, monkeypatch):
    use_ring(monkeypatch, False)
    wanted = run_ranks(world_size, train)
    monkeypatch.undo()
    use_ring(monkeypatch, True)
    for (losses, steps), (plain, _) in zip(run_ranks(world_size, train), wanted, strict=True):
        assert torch.equal(losses, plain)
        assert len(steps[1]) > 10
        assert all(step == steps[1] for step in steps[2:])
        units = {name for name, _ in steps[1]}
        assert len({address for _, address in steps[1]}) < len(units)  # they share memory


@pytest.mark.parametrize("swap", ["_swap_data_ptr_", ""])
def test_a_device_has_a_ring_where_storages_can_exchange_their_bytes(swap, monkeypatch):
    monkeypatch.setattr(device, "NAMES", replace(NAMES, swap=swap))
    store = DeviceStore(torch.device("meta"))
    assert (store._ring is not None) == bool(swap)


def test_slots_that_nobody_needs_are_freed_and_a_large_one_serves_no_small_buffer(monkeypatch):
    skip_without_exchange()
    monkeypatch.setattr(accelerator, "current", lambda device: None)
    ring = Ring(CPU)
    buffers = [InRing(numel, torch.float32, CPU, ring) for numel in (1000,) * 6 + (100,)]
    for buffer in buffers:
        buffer.release()
        buffer.restore()
    for buffer in buffers[:6]:
        buffer.tensor.fill_(1.0)
        buffer.release()
    assert len(ring._free) == device.MAX_SLOTS
    assert sum(slot.spare.nbytes() for slot in ring._free) == device.MAX_SLOTS * 4000
    assert [buffer.tensor.untyped_storage().nbytes() for buffer in buffers[:6]] == [0] * 6
    small = InRing(100, torch.float32, CPU, ring)
    small.release()
    small.restore()
    assert small.tensor.untyped_storage().nbytes() == 400
    buffers[0].restore()  # its slot is gone: it takes another
    assert buffers[0].tensor.untyped_storage().nbytes() == 4000
    assert torch.equal(buffers[0].tensor, torch.ones(1000))


# reserved memory


class Decoder(nn.Module):
    """Blocks between tables whose size is another."""

    def __init__(self, vocab: int, width: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocab, width)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))
            for _ in range(8)
        )
        self.head = nn.Linear(width, vocab, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = x + block(x)
        return self.head(x)


def traced(rank: int, vocab: int, width: int) -> list[tuple[int, int]]:
    """Every allocation of a run, and the end of it, as (address, bytes)."""
    activities = [torch.profiler.ProfilerActivity.CPU]
    profile = torch.profiler.profile(activities=activities, profile_memory=True, acc_events=True)
    module = seeded(Decoder, vocab, width)  # in CPU memory
    with nullcontext() if rank else profile:  # one thread of a process at a time
        optimizer = torch.optim.AdamW(module.parameters(), lr=1e-3)
        onefold.shard(module, optimizer, stage=3)
        for _ in range(3):
            tokens = torch.randint(0, vocab, (2, 64))
            next_token_loss(module, tokens).backward()
            optimizer.step()
            optimizer.zero_grad()
    if rank:
        return []
    found, events = [], list(profile.profiler.kineto_results.experimental_event_tree())
    while events:
        event = events.pop()
        events += event.children
        if event.tag == _EventType.Allocation:
            fields = event.extra_fields
            found.append((event.start_time_ns, fields.ptr, fields.alloc_size))
    return [(address, nbytes) for _, address, nbytes in sorted(found)]


def played(trace: list[tuple[int, int]], times: int) -> CachingAllocator:
    allocator, blocks = CachingAllocator(), dict[int, int]()
    for address, nbytes in trace:
        if nbytes > 0:
            blocks[address] = allocator.allocate(nbytes * times)
        elif address in blocks:
            allocator.free(blocks.pop(address))
    return allocator


@again_but("large tables")
@pytest.mark.parametrize("vocab", [512, 4096], ids=["small tables", "large tables"])
def test_a_ring_reserves_its_free_slots_more_at_most(vocab, monkeypatch):
    """Sizes are 64 times those of the run, as of a model of billions of parameters."""
    unused = {}
    for has_ring in (True, False):
        with monkeypatch.context() as patch:
            use_ring(patch, has_ring)
            allocator = played(run_ranks(2, traced, vocab, 128)[0], 64)
        # each relative to its own peak: messages land earlier in one run than in the other
        unused[has_ring] = allocator.reserved - allocator.peak
        print(f"\n{has_ring}: {allocator.reserved:,} reserved, {allocator.peak:,} allocated")
    largest = 4 * 128 * max(vocab, 8 * 128) * 64
    assert unused[True] <= unused[False] + device.MAX_SLOTS * largest
