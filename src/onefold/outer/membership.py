"""Which islands take part now, and the connections between their ranks."""

from __future__ import annotations

import time
from typing import Any

import torch

from onefold.errors import WireError, expected
from onefold.layout.cut import Cut, cut_of
from onefold.outer.connections import IslandLinks
from onefold.outer.journal import Hello, Journal, JournalRecord, Vote, raise_problem
from onefold.outer.meeting import IslandPlace, first, wait_for
from onefold.outer.message import ParcelMessage
from onefold.outer.parcels import ShareRows, parcels_of
from onefold.outer.share import Share
from onefold.wire.codec import Codec
from onefold.wire.collectives import Group

GRACE_S = 5.0
"""Seconds beyond the timeout in which islands that gave up together still hear of each other."""

JOIN_TIMEOUTS = 30
"""An island that joins waits for the others' next round, at most so many timeouts."""


class Membership:
    """This island among the others: joins them, votes with them, links its ranks to theirs."""

    def __init__(
        self, group: Group, place: IslandPlace, shares: list[Share], codec: Codec | None,
        timeout: float,
    ) -> None:  # fmt: skip
        self.group, self.timeout = group, timeout
        self.island, self.num_islands = place.island, place.num_islands
        self._station, self._shares, self._codec = place.station, shares, codec
        self._journal = Journal(place.station.store, place.island, place.num_islands)
        self._left: list[IslandLinks] = []  # whose messages gloo has not given up yet
        self._messages: dict[tuple[int, bool], list[ParcelMessage]] = {}
        self.record: JournalRecord
        self.links: IslandLinks
        self.weights: list[int] = []  # ranks of each island that takes part
        self._layouts: list[dict[str, Any]] = []

    @property
    def position(self) -> int:
        """This island's position among those that take part."""
        return self.record.members.index(self.island)

    def meet(self, hello: Hello) -> JournalRecord:
        """Ask to take part, and wait for a record that has this island. A collective."""
        journal, start = self._journal, time.monotonic()

        def limit() -> None:
            waited = time.monotonic() - start
            if journal.is_running() and waited < JOIN_TIMEOUTS * self.timeout:
                return
            if waited > self.timeout:
                raise WireError(_not_met(journal, waited))

        first(self.group, lambda: journal.arrive(hello))
        self._enter(wait_for(self.group, journal.look_for_place, limit))
        return self.record

    def verdict(self, deadline: float, failure: str, step: int, work: str) -> JournalRecord:
        """Vote on an attempt, and wait for what all islands hold of it. A collective.

        `failure` says what this rank missed, "" if nothing.
        """
        failures = self.group.gather(failure)
        why = next((f"rank {rank}: {each}" for rank, each in enumerate(failures) if each), "")
        record, journal = self.record, self._journal
        first(self.group, lambda: journal.vote(record, Vote(not why, step, work, why)))
        late = max(deadline, time.monotonic()) + min(GRACE_S, self.timeout)
        found = wait_for(self.group, lambda: journal.look_for_verdict(record, late))
        raise_problem(found)
        if self.island in found.members:
            self._enter(found)
        return found

    def _enter(self, record: JournalRecord) -> None:
        is_new = not self._layouts or record.epoch != self.record.epoch
        self.record = record
        if not is_new:
            return
        if self._layouts:
            self._left = [links for links in (*self._left, self.links) if links.is_busy]
        members, journal = record.members, self._journal
        self._layouts = first(self.group, lambda: [journal.hello_of(k).layout for k in members])
        self.weights = [layout["ranks"] for layout in self._layouts]
        place = (self.position, len(members))
        self.links = IslandLinks(self._station, f"epoch/{record.epoch}", place, self.timeout)
        self._messages.clear()

    def connect(self) -> None:
        """Connect this rank with the ranks of other islands that share rows with it."""
        units = range(len(self._shares))
        self.links.connect(m.owners for index in units for m in self.messages(index, exact=True))

    def announce(self, step: int, work: str) -> None:
        """Compare with the other islands what is about to be sent. A collective.

        Raises `WireError` if another island sends other values; the vote then names both.
        """
        record, journal = self.record, self._journal
        text = f"{work} at step {step}"
        problem = first(self.group, lambda: journal.announce(record, text))
        if problem:
            raise WireError(problem)

    def has_failed(self) -> bool:
        """True if another island has given up the attempt that is under way."""
        return self._journal.has_failed(self.record)

    def messages(self, index: int, *, exact: bool) -> list[ParcelMessage]:
        """The messages of one unit's rows, as islands are cut now."""
        key = index, exact
        if key not in self._messages:
            share = self._shares[index]
            cuts = [[self._cut(rows, index, one) for one in self._layouts] for rows in share.rows]
            parcels = parcels_of(share.rows, cuts, self.position, self.group.rank)
            codec = None if exact else self._codec
            self._messages[key] = [ParcelMessage(each, share.dtype, codec) for each in parcels]
        return self._messages[key]

    def _cut(self, rows: ShareRows, index: int, layout: dict[str, Any]) -> Cut:
        """How an island cuts a parameter of one unit."""
        shares = None if layout["shares"] is None else tuple(layout["shares"])
        by_rows = layout["by_rows"][index]
        return cut_of(rows.cut.shape, layout["ranks"], shares, by_rows=by_rows)

    def note(self, text: str) -> None:
        """Leave a text about this attempt for the other islands. A collective."""
        key = f"meta/{self.record.index}"
        first(self.group, lambda: self._journal.note(key, text))

    def read_note(self, deadline: float) -> str:
        """The text that an island left about this attempt. A collective."""

        def limit() -> None:
            if time.monotonic() > deadline:
                got = "no answer within the timeout"
                hint = "the transfer is repeated"
                raise WireError("the state of a running island", got, hint=hint)

        key = f"meta/{self.record.index}"
        return wait_for(self.group, lambda: self._journal.look_for(key), limit)


def _not_met(journal: Journal, waited: float) -> str:
    if journal.is_running():
        got = f"no round of theirs in {waited:.0f} s"
        hint = "the other islands have ended, or are stopped; use another name for a new run"
        return expected("running islands to let this one join", got, hint=hint)
    missing = ", ".join(map(str, journal.missing()))
    hint = "start every island; onefold.islands(timeout=) says how many seconds they wait"
    return expected(f"all islands within {waited:.0f} s", f"none of island {missing}", hint=hint)


def layout_of(group: Group, shares: list[Share]) -> dict[str, Any]:
    """How this island cuts its units, for the others."""
    context = shares[0].unit.context
    by_rows = [context.routes.hops is not None or share.unit.is_tiled for share in shares]
    return {"ranks": group.world_size, "shares": context.shares, "by_rows": by_rows}


def model_of(shares: list[Share]) -> list[str]:
    """A line for each parameter that islands exchange."""
    return [
        f"{parameter.fqn} {list(parameter.slot.shape)} of {_short(share.dtype)} in unit "
        f"{share.unit.name}"
        for share in shares
        for parameter in share.parameters
    ]


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
