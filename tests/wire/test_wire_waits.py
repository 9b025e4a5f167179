"""Messages of a device are waited for on its stream: no limit, which blocks the host and aborts."""

from __future__ import annotations

import re
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

import onefold
from onefold.compat import NAMES
from onefold.errors import WireError
from onefold.layout.ledger import Ledger
from onefold.layout.message_plan import SHARE_NBYTES
from onefold.layout.rows import Layout
from onefold.wire.collectives import Group
from onefold.wire.exchange import Exchange
from onefold.wire.lanes import Lane, Lanes, PhaseNow
from onefold.wire.message_cut import MessageLayout
from onefold.wire.peers import Message, Peers
from onefold.wire.roll_call import PATIENCE_S
from onefold.wire.ticket import Ticket
from onefold.wire.transport import Composed, Reduction

DEVICE = torch.device("meta")  # has shapes and no values, as a device whose kernels run later


class RecordedWork(dist.Work):
    """Keeps the limit of each wait; complete only once it was waited for."""

    def __init__(self):
        super().__init__()
        self.limits = list[timedelta | None]()

    def wait(self, timeout=None):
        self.limits.append(timeout)
        return True

    def is_completed(self):
        return bool(self.limits)


class RecordedGroup(dist.ProcessGroup):
    """Rank 0 of three, whose collectives are recorded works."""

    def __init__(self):
        super().__init__(0, 3)
        self.works = list[RecordedWork]()

    def begin(self, *_, **__):
        self.works.append(RecordedWork())
        return self.works[-1]


for name in (NAMES.all_gather, NAMES.all_to_all):
    setattr(RecordedGroup, name, RecordedGroup.begin)


@pytest.fixture
def recorded(monkeypatch):
    """A group that has met: its peers would wait with patience."""
    handle = RecordedGroup()
    for name in ("broadcast", NAMES.reduce_scatter):
        monkeypatch.setattr(dist, name, handle.begin)
    monkeypatch.setattr(dist, "get_backend_config", lambda handle: "cpu:gloo,cuda:nccl")
    lanes = Lanes(PhaseNow(), {"call": Lane("call", None)}, 3)
    roll_call: Any = SimpleNamespace(
        is_in_call=False,
        wait_for=lambda waiting: None,
        read_failure=dict,
        last_words=str,
        find_gone=str,
        read_verdict=str,
        doing=lambda waiting: waiting.label,
        table="",
    )
    return Group(0, 3, handle, Peers(lanes, roll_call, None, lambda: 60.0)), handle.works


COLLECTIVES = {
    "broadcast": lambda group, out: group.broadcast(out, 1),
    "all_gather": lambda group, out: group.all_gather(out, out[:2]),
    "reduce_scatter": lambda group, out: group.reduce_scatter(out[:2], out),
    "all_to_all": lambda group, out: group.all_to_all(out, out, [2, 2, 2], [2, 2, 2]),
}


@pytest.mark.parametrize("collective", COLLECTIVES.values(), ids=COLLECTIVES)
def test_a_message_of_a_device_is_waited_for_without_a_limit(collective, recorded):
    group, works = recorded
    begun = collective(group, torch.empty(6, device=DEVICE))
    ticket = Ticket(group.track([begun], "a message"))
    assert not ticket.done
    ticket.wait()
    assert [work.limits for work in works] == [[None]]
    assert begun.is_completed()


def test_a_message_of_the_cpu_is_waited_for_with_patience(recorded):
    """Its limit is that after which ranks ask one another where they are."""
    group, works = recorded
    Ticket(group.track([group.reduce_scatter(torch.empty(2), torch.empty(6))], "a message")).wait()
    assert [work.limits for work in works] == [[timedelta(seconds=PATIENCE_S)]]


class LateWork(dist.Work):
    """Completes between the end of the first limit and the question whether it is complete."""

    def __init__(self, failure: str | None):
        super().__init__()
        self.waits, self.failure = 0, failure

    def wait(self, timeout=None):
        self.waits += 1
        if self.waits == 1:
            raise RuntimeError("Operation timed out!")
        if self.failure is not None:
            raise RuntimeError(self.failure)
        return True

    def is_completed(self):
        return self.waits > 0


def test_a_message_that_completes_as_a_limit_ends_has_not_failed(recorded):
    group, _ = recorded
    work = LateWork(None)
    Ticket([Message(group.peers, [work], Lane("call", None), "a message")]).wait()
    assert work.waits == 2


def test_a_message_that_fails_as_a_limit_ends_raises_its_own_error(recorded):
    group, _ = recorded
    with pytest.raises(WireError, match="connection reset"):
        Ticket(
            [Message(group.peers, [LateWork("connection reset")], Lane("call", None), "a message")]
        ).wait()


def test_gathers_and_reductions_of_a_units_regions_set_no_limit(recorded):
    group, works = recorded
    shapes = [("large", (SHARE_NBYTES // 4 + 1, 3)), ("small", (5,)), ("even", (3, 2))]
    layout = Layout.build(shapes, 3)
    cut = MessageLayout(layout.slots, [slot.full_offset for slot in layout.slots], group, 4)
    transport = Composed(Exchange(group, Ledger()))
    transport.gather(torch.empty(layout.full_numel, device=DEVICE), cut, "gather").wait()
    gathers = len(works)
    partials = [torch.empty(slot.numel, device=DEVICE) for slot in layout.slots]
    out = [torch.empty(slot.piece_numel(0), device=DEVICE) for slot in layout.slots]
    transport.reduce_scatter(Reduction(partials, cut, out, [True] * 3, "reduce")).wait()
    assert 0 < gathers < len(works)
    assert all(work.limits == [None] for work in works)


def test_only_waits_on_gloo_have_a_limit():
    """`Peers` gets messages of the CPU alone."""
    source = Path(onefold.__file__).parent
    limited = {
        str(path.relative_to(source))
        for path in source.rglob("*.py")
        if re.search(r"\bwork\w*\.wait\([^)]", path.read_text())
    }
    assert limited == {"wire/peers.py"}
