"""Messages of a device: one launch for each, whatever regions it has, and few for its sums."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

from onefold.compat import NAMES
from onefold.compose.routes import Links
from onefold.errors import WireError
from onefold.layout.ledger import Ledger
from onefold.layout.message_plan import SHARE_NBYTES
from onefold.layout.rows import Layout
from onefold.wire.collectives import Group
from onefold.wire.exchange import Exchange
from onefold.wire.message_cut import MessageLayout
from onefold.wire.transport import Composed, Reduction
from tests.support.ranks import run_processes, run_ranks

DEVICE = torch.device("meta")  # has shapes and no values, as a device whose kernels run later
LARGE = SHARE_NBYTES // 4 + 1
SHAPES = [("large", (LARGE, 3)), ("small", (5,)), ("uneven", (7, 3)), ("other", (LARGE, 2))]


class Work(dist.Work):
    def wait(self, timeout=None):
        return True

    def is_completed(self):
        return True


class Recorded(dist.ProcessGroup):
    """Rank 0 of some, whose backend begins several collectives as one."""

    def __init__(self, size):
        super().__init__(0, size)
        self.calls = []
        self.supports_coalescing = True
        self.fails = False

    def _get_backend(self, device):
        return self

    def _start_coalescing(self, device):
        self.calls.append("start")

    def _end_coalescing(self, device):
        self.calls.append("end")
        return Work()

    def _begin(self, *_, **__):
        if self.fails:
            raise RuntimeError("out of memory")
        self.calls.append("collective")
        return Work()


for name in (NAMES.all_gather, NAMES.all_to_all):
    setattr(Recorded, name, Recorded._begin)


@pytest.fixture(params=[2, 3, 8])
def recorded(request, monkeypatch):
    handle = Recorded(request.param)
    monkeypatch.setattr(dist, "broadcast", handle._begin)
    monkeypatch.setattr(dist, "get_backend_config", lambda handle: "cpu:gloo,cuda:nccl")
    return Group(0, request.param, handle), handle.calls


def gathered(group, layout):
    return MessageLayout(layout.slots, [slot.full_offset for slot in layout.slots], group, 4)


def reduced(group, layout):
    return MessageLayout(layout.slots, None, group, 4)


def test_each_message_of_a_unit_is_begun_by_one_launch(recorded):
    group, calls = recorded
    assert group.coalesces(torch.device("cuda", 0))
    assert not group.coalesces(torch.device("cpu"))
    layout = Layout.build(SHAPES, group.world_size)
    transport = Composed(Exchange(group, Ledger(), native=True, coalesces=True))
    ticket = transport.gather(
        torch.empty(layout.full_numel, device=DEVICE), gathered(group, layout), "gather"
    )
    assert len(ticket.works) == 1
    ticket.wait()
    partials = [torch.empty(slot.numel, device=DEVICE) for slot in layout.slots]
    out = [torch.empty(slot.piece_numel(0), device=DEVICE) for slot in layout.slots]
    ticket = transport.reduce_scatter(
        Reduction(partials, reduced(group, layout), out, [True] * 4, "reduce")
    )
    assert len(ticket.works) == 1
    ticket.wait()
    assert calls.count("start") == calls.count("end") == 2
    assert calls.count("collective") > 4


def test_a_message_that_cannot_begin_leaves_no_open_launch(recorded):
    """As where memory is short: the step is repeated on the same communicator."""
    group, calls = recorded
    layout = Layout.build(SHAPES, group.world_size)
    transport = Composed(Exchange(group, Ledger(), coalesces=True))
    group.handle.fails = True
    with pytest.raises(WireError, match="out of memory"):
        transport.gather(torch.empty(layout.full_numel, device=DEVICE), gathered(group, layout), "")
    assert calls == ["start", "end"]


class Launches(TorchDispatchMode):
    """Counts the operations on tensors that are not views."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if not (function.is_view or "empty" in function.name()):
            self.names.append(function.name())
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize(("dtype", "launches"), [(torch.float32, 8 + 1), (torch.bfloat16, 16)])
def test_a_unit_is_summed_by_a_launch_for_each_rank_not_for_each_region(dtype, launches):
    """One more scales; parts narrower than the sum are widened by a launch before."""
    transport: Any = Composed(Exchange(Group(0, 8, None), Ledger()))
    parts = [[torch.empty(numel, device=DEVICE, dtype=dtype) for _ in range(8)]
             for numel in (5, 9, 3)]  # fmt: skip
    means = [(of, torch.empty(len(of[0]), device=DEVICE), True) for of in parts]
    with Launches() as counted:
        transport._mean_in_rank_order(means)
    assert len(counted.names) == launches


@pytest.mark.parametrize("count", [1, 2, 3, 8])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("target", [torch.float32, torch.bfloat16])
def test_the_sums_of_a_device_have_the_bits_of_the_cpu(count, dtype, target):
    torch.manual_seed(0)
    transport: Any = Composed(Exchange(Group(0, count, None), Ledger()))
    found = []
    parts = [[torch.randn(numel).to(dtype) for _ in range(count)] for numel in (70_001, 3)]
    for by_launches in (False, True):
        means = [(of, torch.ones(len(of[0]), dtype=target), fresh)
                 for of, fresh in zip(parts, (True, False), strict=True)]  # fmt: skip
        if by_launches:
            widens = dtype is torch.bfloat16
            transport._mean_by_launches(means, torch.float32 if widens else dtype, widens=widens)
        else:
            transport._mean_in_rank_order(means)
        found.append([mean for _, mean, _ in means])
    for a, b in zip(*found, strict=True):
        assert torch.equal(a, b)


def looped(rank):
    """A rank alone sends to itself, through the whole transport."""
    group, layout = Group.from_handle(dist.group.WORLD), Layout.build(SHAPES, 1)
    links = Links(torch.device("cpu"), Ledger(), torch.float32, loops=True)
    transport = links.transport(group)
    assert isinstance(transport.inner, Composed)
    full = torch.randn(layout.full_numel)
    before = full.clone()
    transport.gather(full, gathered(group, layout), "gather").wait()
    assert torch.equal(full, before)
    partials = [torch.randn(slot.numel, dtype=torch.bfloat16) for slot in layout.slots]
    out = [torch.ones(slot.numel) for slot in layout.slots]
    fresh = [True, False, True, False]
    transport.reduce_scatter(
        Reduction(partials, reduced(group, layout), out, fresh, "reduce")
    ).wait()
    for partial, mean, is_fresh in zip(partials, out, fresh, strict=True):
        assert torch.equal(mean, partial.float() + (not is_fresh))


def test_a_rank_alone_may_send_to_itself():
    run_ranks(1, looped)


@pytest.mark.process
def test_a_rank_alone_may_send_to_itself_over_gloo():
    run_processes(1, looped)
