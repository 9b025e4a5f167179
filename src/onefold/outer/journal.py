"""The journal of islands: one list of records in a store that all islands reach.

    record i   who takes part, and which attempt they make next: a round, or a transfer of state to
               islands that join
    votes  i   one of each island: did all of its ranks receive everything?
    record i+1 the verdict on attempt i, written once (compare-and-set): the same for all islands

Whoever first knows the votes, or whose deadline passes, writes the verdict. An island that did not
vote in time is not in the next record. It asks to join and waits for a record that has it. Rank 0
of an island speaks for it.
"""

import json
import time
import uuid
import zlib
from base64 import b64decode, b64encode
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any, TypeVar

from torch.distributed.distributed_c10d import Store

from onefold.errors import ConfigError, StateError, WireError, expected

T = TypeVar("T")

MAX_TRIES = 3
"""Attempts of one round among islands that all answer, before it is dropped."""

MOST_HELLO_NBYTES = 1 << 26
"""What an introduction may grow to: a line for each of half a million parameters."""

KEPT_RECORDS = 64
"""Records behind the last one that stay in the store."""


@dataclass(frozen=True, slots=True)
class Vote:
    """One island's answer to an attempt."""

    is_complete: bool
    step: int
    work: str  # what was exchanged: the same on all islands
    why: str = ""


@dataclass(frozen=True, slots=True)
class JournalRecord:
    """One record. `epoch` numbers the memberships: islands connect anew where it changes.

    `adopters`: members that take over the state of `source` next, with their incarnations.
    `is_committed`: the attempt before was complete everywhere. `is_dropped`: it was given up.
    """

    index: int
    members: tuple[int, ...]
    epoch: int
    step: int = 0
    source: int = 0
    joined: tuple[tuple[int, str], ...] = ()
    adopters: tuple[int, ...] = ()
    is_committed: bool = False
    is_dropped: bool = False
    tries: int = 0
    problem: str = ""


@dataclass(frozen=True, slots=True)
class Hello:
    """One island as it introduces itself.

    `facts` must be the same on all islands; `layout` says how it cuts its units.
    """

    facts: dict[str, Any]
    layout: dict[str, Any]
    step: int = 0
    incarnation: str = ""


def _dumps(value: Vote | JournalRecord | Hello) -> str:
    """A value as text for the store; compressed, as a `Hello` has a line for each parameter."""
    return b64encode(zlib.compress(json.dumps(asdict(value)).encode())).decode()


def _loads(kind: type[T], text: str | bytes) -> T:
    """The value of a text, which another program may have written."""
    try:
        fields = json.loads(zlib.decompressobj().decompress(b64decode(text), MOST_HELLO_NBYTES))
        return kind(**{k: tuple(v) if isinstance(v, list) else v for k, v in fields.items()})
    except (AttributeError, RecursionError, TypeError, ValueError, zlib.error) as error:
        wanted = f"{kind.__name__} of at most {MOST_HELLO_NBYTES} bytes in the islands' store"
        hint = "another program writes to this store; start it with a secret"
        raise WireError(wanted, f"{type(error).__name__}: {str(error)[:100]}", hint=hint) from error


class Journal:
    """One island's view of the journal."""

    def __init__(self, store: Store, island: int, num_islands: int) -> None:
        self._store, self.island, self.num_islands = store, island, num_islands
        self._tail = -1

    # joining

    def arrive(self, hello: Hello) -> Hello:
        """Introduce this island and ask to take part; return the introduction as others read it."""
        hello = replace(hello, incarnation=uuid.uuid4().hex)
        self._store.set(f"hello/{self.island}", _dumps(hello))
        self._store.set(f"wants/{self.island}", hello.incarnation)
        if self._store.check(["tail"]):
            self._tail = int(self._store.get("tail")) - 1
        return hello

    def look_for_place(self, hello: Hello) -> JournalRecord | None:
        """The record that has the island of `arrive`, once there is one; None so far."""
        while (record := self._read(self._tail + 1)) is not None:
            self._tail = record.index
            if dict(record.joined).get(self.island) == hello.incarnation:
                self._check_facts(hello, record.members)
                self._store.set(f"wants/{self.island}", "")
                return record
        refusal = self.look_for(f"refused/{hello.incarnation}")
        if refusal is not None:
            raise ConfigError(refusal)
        everyone = range(self.num_islands)
        wants = {k: name for k in everyone if (name := self._wants(k))}
        if len(wants) < self.num_islands:
            return None
        self._check_facts(hello, everyone)
        steps = {k: self.hello_of(k).step for k in everyone}
        source = max(everyone, key=lambda k: (steps[k], -k))
        first = JournalRecord(
            index=self._tail + 1, members=tuple(everyone), epoch=self._tail + 1,
            step=steps[source], source=source, joined=tuple(wants.items()),
            adopters=tuple(
                k for k in everyone if k != source and (steps[k] == 0 or steps[k] < steps[source])
            ),
        )  # fmt: skip
        self._write(first)
        return None  # the next look finds it, or the record of another island

    def missing(self) -> list[int]:
        """The islands that do not ask to take part."""
        return [k for k in range(self.num_islands) if not self._wants(k)]

    def is_running(self) -> bool:
        """True if islands have met before."""
        return self._store.check(["tail"])

    def hello_of(self, island: int) -> Hello:
        """How an island has introduced itself."""
        return _loads(Hello, self._store.get(f"hello/{island}"))

    def _wants(self, island: int) -> str:
        return self.look_for(f"wants/{island}") or ""

    def _check_facts(self, hello: Hello, islands: Iterable[int]) -> None:
        for island in islands:
            difference = first_difference(self.hello_of(island), hello, island, self.island)
            if difference:
                raise ConfigError(difference)

    # attempts

    def announce(self, record: JournalRecord, work: str) -> str:
        """Say what this island is about to send; return what another one sends instead, or "".

        Of two islands that differ the later one knows, and sends nothing: gloo ends the process
        where sizes of messages differ.
        """
        self._store.set(f"begins/{record.index}/{self.island}", work)
        for island in record.members:
            other = self.look_for(f"begins/{record.index}/{island}")
            if other is not None and other != work:
                return f"island {island} sends {other}"
        return ""

    def has_failed(self, record: JournalRecord) -> bool:
        """True if another island has given up the attempt, or all have a verdict. On any rank."""
        votes = self._votes(record).items()
        is_over = any(not vote.is_complete for island, vote in votes if island != self.island)
        return is_over or self._store.check([f"record/{record.index + 1}"])

    def _votes(self, record: JournalRecord) -> dict[int, Vote]:
        texts = {k: self.look_for(f"vote/{record.index}/{k}") for k in record.members}
        return {k: _loads(Vote, text) for k, text in texts.items() if text}

    def vote(self, record: JournalRecord, vote: Vote) -> None:
        """Answer the attempt that follows a record."""
        self._store.set(f"vote/{record.index}/{self.island}", _dumps(vote))

    def look_for_verdict(self, record: JournalRecord, deadline: float) -> JournalRecord | None:
        """The next record, once every member has voted, or asks to join, or time is up."""
        index = record.index + 1
        after = self._read(index)
        if after is None:
            votes = self._votes(record)
            gone = [k for k in record.members if k not in votes and self._wants(k)]
            if len(votes) + len(gone) < len(record.members) and time.monotonic() < deadline:
                return None
            verdict = decide(record, votes)
            if verdict.is_committed and not record.adopters:
                verdict = self._with_joiners(verdict)
            after = self._write(verdict)
        self._tail = after.index
        return after

    def _with_joiners(self, verdict: JournalRecord) -> JournalRecord:
        """The verdict, with islands that ask to join and fit."""
        joined: dict[int, str] = {}
        for island in range(self.num_islands):
            name = "" if island in verdict.members else self._wants(island)
            if not name:
                continue
            difference = first_difference(
                self.hello_of(self.island), self.hello_of(island), self.island, island
            )
            if difference:
                self._store.set(f"refused/{name}", difference)
                self._store.set(f"wants/{island}", "")
            else:
                joined[island] = name
        if not joined:
            return verdict
        members = tuple(sorted((*verdict.members, *joined)))
        return replace(
            verdict, members=members, joined=tuple(joined.items()), adopters=tuple(joined),
            epoch=verdict.index, source=verdict.members[0],
        )  # fmt: skip

    # the store

    def note(self, key: str, text: str) -> None:
        """Leave a text for other islands."""
        self._store.set(key, text)

    def look_for(self, key: str) -> str | None:
        """Another island's text, once it is there."""
        return self._store.get(key).decode() if self._store.check([key]) else None

    def _read(self, index: int) -> JournalRecord | None:
        text = self.look_for(f"record/{index}")
        return _loads(JournalRecord, text) if text else None

    def _write(self, record: JournalRecord) -> JournalRecord:
        """Write a record, unless another island has written one of this number: then return it."""
        text = self._store.compare_set(f"record/{record.index}", "", _dumps(record))
        self._store.set("tail", str(record.index))
        self._forget(record.index - KEPT_RECORDS)
        return _loads(JournalRecord, text)

    def _forget(self, index: int) -> None:
        keys = [f"record/{index}", f"meta/{index}"]
        for island in range(self.num_islands):
            keys += [f"vote/{index}/{island}", f"begins/{index}/{island}"]
        for key in keys if index >= 0 else []:
            self._store.delete_key(key)


def decide(record: JournalRecord, votes: Mapping[int, Vote]) -> JournalRecord:
    """The record that follows from the votes on an attempt: complete everywhere, or nowhere."""
    index = record.index + 1
    after = replace(record, index=index, joined=(), adopters=(), is_dropped=False, tries=0)
    works = {(vote.step, vote.work) for vote in votes.values()}
    if len(works) > 1:
        described = ", ".join(f"{v.work} at step {v.step} on island {k}" for k, v in votes.items())
        return replace(after, is_committed=False, problem=described)
    voters = tuple(k for k in record.members if k in votes)
    if len(voters) == len(record.members) and all(vote.is_complete for vote in votes.values()):
        (step, _), *_ = works
        return replace(after, is_committed=True, step=step)
    members = tuple(k for k in voters if k not in record.adopters)
    tries = record.tries + 1
    is_dropped = tries >= MAX_TRIES or bool(record.adopters)
    return replace(
        after, members=members, epoch=index, is_committed=False, is_dropped=is_dropped,
        tries=0 if is_dropped else tries,
    )  # fmt: skip


def first_difference(mine: Hello, other: Hello, island: int, another: int) -> str:
    """A message that names the first fact in which two islands differ; "" if there is none."""
    for name, ours in mine.facts.items():
        theirs = other.facts.get(name)
        if ours == theirs:
            continue
        if isinstance(ours, list) and isinstance(theirs, list):
            pairs = [*zip(ours, theirs, strict=False), (len(ours), len(theirs))]
            ours, theirs = next(pair for pair in pairs if pair[0] != pair[1])
        return expected(
            f"the same {name} on every island",
            f"{ours} on island {island} and {theirs} on island {another}",
            hint="islands may differ in their number of ranks, mesh and offload alone",
        )
    return ""


def raise_problem(record: JournalRecord) -> None:
    """Raise `StateError` for a record that says that islands do different things."""
    if record.problem:
        wanted = "every island to exchange the same values at the same step"
        hint = "call step() of the handle once after each optimizer step, on every rank"
        raise StateError(wanted, record.problem, hint=hint)
