"""Waiting for other ranks with patience: a wait that takes long says where every rank is."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Hashable, Sequence
from datetime import timedelta
from typing import Any
from weakref import WeakValueDictionary
from zlib import crc32

import torch
import torch.distributed as dist

from onefold.errors import OnefoldError, WireError
from onefold.wire.lanes import AGREEMENT, ALL_GATHER, MAX, Lane, Lanes
from onefold.wire.roll_call import PATIENCE_S, RollCall, Waiting, time_is_up
from onefold.wire.ticket import Ticket, Waitable

_PATIENCE = timedelta(seconds=PATIENCE_S)
_LOOK = timedelta(seconds=0.25)
_PLACE_NBYTES = 400  # of a text that says where a rank is


class Peers:
    """The other ranks of a group: lanes to them, and how long to wait for them.

    `timeout` was asked for, or None; `time_limit` returns the seconds after which a rank gives up.
    """

    def __init__(
        self,
        lanes: Lanes,
        roll_call: RollCall,
        timeout: timedelta | None,
        time_limit: Callable[[], float],
    ) -> None:
        self.lanes = lanes
        self.roll_call = roll_call
        self.timeout = timeout
        self._time_limit = time_limit
        self._failure: OnefoldError | None = None  # ranks are apart since: no later wait can help

    def track(self, works: Sequence[dist.Work], label: str) -> list[Waitable]:
        """The works of one message, as one that waits with patience."""
        return [Message(self, works, self.lanes.now, label)]

    def agree(self, message: Hashable, label: str) -> None:
        """Meet the other ranks unless all expect `message`, whose first work begins next.

        A walk that repeats costs nothing. `message` is the same value on every rank. Raises
        `WireError` if ranks begin different messages, or one begins the expected one and waits.
        """
        lane = self.lanes.now
        if lane.expects(message):
            return
        facts = repr((lane.name, lane.issued, message))  # ranks may be ahead by expected messages
        digest = crc32(facts.encode())
        most = torch.tensor([digest, ~digest], device="cpu")
        agreeing = self.lanes.all[AGREEMENT]
        work = agreeing.all_reduce(most, MAX)
        Ticket([Message(self, [work], agreeing, label)], label=label).wait()
        if most[0] != ~most[1]:
            here = Message(self, [], lane, label).waiting
            place = f"{self.roll_call.place_of(here)}, after {lane.issued} messages"
            line = bytearray(place.encode()[:_PLACE_NBYTES].ljust(_PLACE_NBYTES))
            text = torch.frombuffer(line, dtype=torch.uint8)
            places = [
                bytes(row).decode(errors="ignore") for row in self._exchange_labels(text, label)
            ]
            table = "\n".join(map(str.rstrip, places))
            self._failure = WireError(self.roll_call.no_rank_can_go_on(table))
            raise self._failure

    def _exchange_labels(self, own: torch.Tensor, label: str) -> list[Any]:
        """The rows of all ranks, on the lane of agreements."""
        lane = self.lanes.all[AGREEMENT]
        everyone = own.new_empty(self.lanes.size, len(own))
        work = lane.begin()._allgather_base(everyone.view(-1), own, ALL_GATHER)
        Ticket([Message(self, [work], lane, label)], label=label).wait()
        return everyone.tolist()

    def wait(self, work: dist.Work, message: Message) -> None:
        """Wait for one work.

        Raises the error of a rank that has failed in this call, or `WireError` if ranks wait for
        one another, or time is up.
        """
        begun, roll_call = time.monotonic(), self.roll_call
        limit = _LOOK if self._failure is not None or roll_call.is_in_call else _PATIENCE
        try:
            while not _is_over(work, limit):
                limit = _LOOK
                # that of this call, if there is one, and not of a call before
                self._failure = self._trouble(message, time.monotonic() - begun) or self._failure
                if self._failure is not None:
                    raise self._failure
        except RuntimeError as error:
            if isinstance(error, OnefoldError):
                raise
            self._failure = self.broken(self._wanted(message), error)
            raise self._failure from None  # the text of gloo says no more
        finally:
            roll_call.wait_for(None)

    def broken(self, wanted: str, error: RuntimeError) -> OnefoldError:
        """The error for a connection that `error` has ended: it names the ranks that are gone."""
        roll_call = self.roll_call
        if failure := roll_call.read_failure():
            return failure.error()
        if verdict := roll_call.read_verdict():
            return WireError(roll_call.no_rank_can_go_on(verdict))
        gone, words = roll_call.find_gone(), roll_call.table
        before = f"; before that, ranks were here:\n{words}" if words else ""
        hint = "look for the first error of that rank; else it was killed, perhaps for its memory, "
        hint += "left the training loop early, or called other collectives"
        return WireError(wanted, (gone or str(error).splitlines()[0]) + before, hint=hint)

    def _trouble(self, message: Message, waited_s: float) -> OnefoldError | None:
        """The reason not to wait on; after some seconds other ranks learn what this one awaits."""
        roll_call = self.roll_call
        if roll_call.failure is not None:
            return roll_call.failure.error()
        if waited_s >= PATIENCE_S:
            roll_call.wait_for(message.waiting)
        if roll_call.verdict is not None:
            return WireError(roll_call.no_rank_can_go_on(roll_call.verdict))
        if roll_call.gone is not None:
            return self.broken(self._wanted(message), RuntimeError(roll_call.gone))
        if waited_s > self._time_limit():
            wanted = self._wanted(message)
            return WireError(time_is_up(wanted, self._time_limit(), roll_call.table))
        return None

    def _wanted(self, message: Message) -> str:
        """What this rank waits for, and the call or phase that it belongs to."""
        return f"{self.roll_call.doing(message.waiting)} to complete"


def _is_over(work: dist.Work, limit: timedelta) -> bool:
    """Wait at most `limit`; False if the work is not complete then. Raises the work's own error."""
    try:
        work.wait(limit)
    except RuntimeError:
        if not work.is_completed():
            return False
        work.wait(limit)  # complete by now, perhaps since the limit: raises an error of its own
    return True


def works_of(work: Waitable) -> Sequence[dist.Work]:
    """The works of torch in one that a ticket waits for."""
    if isinstance(work, Message):
        return work.works
    return [work] if isinstance(work, dist.Work) else []


class Message:
    """The works of one message, begun on one lane."""

    __slots__ = ("_failure", "_lane", "_number", "_peers", "_phase", "label", "works")

    def __init__(self, peers: Peers, works: Sequence[dist.Work], lane: Lane, label: str) -> None:
        self._peers, self.works, self.label = peers, works, label
        self._failure: Exception | None = None
        self._lane, self._number, self._phase = lane.name, lane.issued, peers.lanes.phase

    def wait(self) -> None:
        """See `Waitable.wait`. A wait that failed fails again at once."""
        if self._failure is not None:
            raise self._failure
        try:
            for work in self.works:
                self._peers.wait(work, self)
        except Exception as error:
            self._failure = error
            raise

    def is_completed(self) -> bool:
        return all(work.is_completed() for work in self.works)

    @property
    def waiting(self) -> Waiting:
        """Where this rank is, for the other ranks."""
        return Waiting(self.label, self._phase, self._lane, self._number, threading.get_ident())


_PEERS = WeakValueDictionary[int, Peers]()  # by id of a mesh, which DTensors pickle


def introduce(mesh: Any, peers: Peers) -> None:
    """Let `in_words` find the peers of a mesh."""
    _PEERS[id(mesh)] = peers


def in_words(mesh: Any, error: RuntimeError) -> Exception:
    """The error for a collective of torch over `mesh` that `error`, its own text, has ended."""
    peers = _PEERS.get(id(mesh))
    if peers is None or isinstance(error, OnefoldError) or "gloo" not in str(error):
        return error
    return peers.broken("a collective of torch to complete", error)
