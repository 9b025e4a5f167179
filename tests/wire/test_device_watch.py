"""Messages of a device are watched from a thread: the host waits for none of them with a limit."""

from __future__ import annotations

import gc
import threading
from functools import partial
from types import SimpleNamespace
from typing import Any
from weakref import ref

import pytest
import torch

from onefold.errors import WireError
from onefold.layout.ledger import Ledger
from onefold.wire import watching
from onefold.wire.collectives import Group
from onefold.wire.exchange import Exchange
from onefold.wire.lanes import PhaseNow
from onefold.wire.roll_call import PATIENCE_S, RollCall
from onefold.wire.transport import Composed
from onefold.wire.watching import DeviceWatch
from onefold.wire.wrapped import Streamed

LIMIT_S = 60.0


class MadeUp:
    """A clock, a roll call and a backend; the messages and what the thread does are real."""

    def __init__(self, monkeypatch):
        self.now, self.waiting, self.has_ended = 0.0, [], False
        self.backend: Any = SimpleNamespace(error=lambda: "", end=self.end)
        self.roll_call: Any = SimpleNamespace(
            verdict=None, table="  rank 1: evaluate.py:7", wait_for=self.waiting.append,
            last_words=lambda: "  rank 1: train.py:3",
            no_rank_can_go_on=partial(RollCall.no_rank_can_go_on, SimpleNamespace(_rank=0)),
        )  # fmt: skip
        self.phase = PhaseNow("backward")
        self.watch = DeviceWatch(
            self.backend, self.roll_call, self.phase, "onefold/1", lambda: LIMIT_S
        )
        monkeypatch.setattr(watching.time, "monotonic", lambda: self.now)
        monkeypatch.setattr(watching.threading, "Thread", lambda **_: SimpleNamespace(start=int))

    def end(self):
        self.has_ended = True

    def queue(self, label="reduce_scatter of unit 'blocks.1'"):
        mark = SimpleNamespace(is_over=False)
        mark.query = lambda: mark.is_over
        self.watch.note(mark, label, torch.device("cpu"))
        return mark

    def look(self, after):
        self.now += after
        self.watch.look()


@pytest.fixture
def made_up(monkeypatch):
    return MadeUp(monkeypatch)


def test_messages_that_arrive_in_time_are_forgotten(made_up):
    marks = [made_up.queue() for _ in range(3)]
    for mark in marks:
        mark.is_over = True
        made_up.look(after=PATIENCE_S - 0.1)
    made_up.look(after=10 * LIMIT_S)
    made_up.watch.check()
    assert made_up.waiting == []


def test_a_message_that_is_late_tells_the_others_its_unit_and_phase(made_up):
    """The time counts from when all messages before it had arrived."""
    first, second = made_up.queue("gather of unit 'blocks.0'"), made_up.queue()
    made_up.look(after=0.5)
    first.is_over = True
    made_up.look(after=PATIENCE_S)
    assert made_up.waiting == []
    made_up.look(after=PATIENCE_S)
    (told,) = made_up.waiting
    assert (told.label, told.phase) == ("reduce_scatter of unit 'blocks.1'", "backward")
    assert (told.lane, told.number) == ("onefold/1/device", 2)
    assert told.thread == threading.get_ident()
    second.is_over = True
    made_up.look(after=0.5)
    assert made_up.waiting[1:] == [None]


def test_a_rank_that_is_ten_seconds_late_ends_nothing(made_up):
    mark = made_up.queue()
    for _ in range(20):
        made_up.look(after=0.5)
    mark.is_over = True
    made_up.look(after=0.5)
    made_up.watch.check()
    assert not made_up.has_ended


def test_at_the_limit_the_error_names_the_unit_and_where_ranks_are(made_up, capfd):
    made_up.queue()
    made_up.look(after=0)
    made_up.look(after=LIMIT_S + 1)
    with pytest.raises(WireError) as caught:
        made_up.watch.check()
    assert "reduce_scatter of unit 'blocks.1' to complete on the device within 60 s" in str(
        caught.value
    )
    assert "rank 1: evaluate.py:7" in str(caught.value)
    assert "timeout=" in str(caught.value)
    assert made_up.has_ended  # else a host that waits for the device would never raise it
    assert "blocks.1" in capfd.readouterr().err


def test_ranks_that_wait_for_one_another_end_before_the_limit(made_up):
    made_up.queue()
    made_up.look(after=0)
    made_up.roll_call.verdict = "  rank 0: gather of unit 'blocks.2'"
    made_up.look(after=PATIENCE_S)
    with pytest.raises(WireError, match=r"all ranks in the same collective[^$]*blocks.2"):
        made_up.watch.check()
    assert made_up.has_ended


def test_an_error_of_the_backend_is_named_with_the_unit_it_meets(made_up):
    made_up.queue()
    made_up.backend.error = lambda: "REMOTE_ERROR"
    made_up.look(after=0)
    with pytest.raises(WireError, match=r"unit 'blocks.1' to complete[^$]*REMOTE_ERROR[^$]*rank"):
        made_up.watch.check()


def test_no_message_begins_after_a_failure(made_up, monkeypatch):
    made_up.watch.failure = WireError("gone")
    inner = Composed(Exchange(Group(0, 2, None, watch=made_up.watch), Ledger()))
    monkeypatch.setattr("onefold.wire.wrapped.accelerator.new", lambda device: None)
    streamed = Streamed(inner, torch.device("meta"))
    with pytest.raises(WireError, match="gone"):
        streamed.gather(torch.empty(2), SimpleNamespace(name="blocks.0"), "gather")  # type: ignore[arg-type]


def test_the_thread_ends_with_its_watch(monkeypatch):
    monkeypatch.setattr(watching, "POLL_S", 0.01)
    others = set(threading.enumerate())  # of earlier tests, which may end meanwhile
    backend: Any = SimpleNamespace(error=str, end=lambda: None)
    watch = DeviceWatch(backend, SimpleNamespace(), PhaseNow(), "", lambda: LIMIT_S)  # type: ignore[arg-type]
    looked = threading.Event()
    mark: Any = SimpleNamespace(query=lambda: looked.set() or True)
    watch.note(mark, "", torch.device("cpu"))
    assert looked.wait(10)
    (thread,) = set(threading.enumerate()) - others
    alive = ref(watch)
    del watch
    gc.collect()
    thread.join(10)
    assert alive() is None
    assert set(threading.enumerate()) <= others
