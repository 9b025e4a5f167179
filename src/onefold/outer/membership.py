"""Which islands take part now, and the connections between their ranks."""

import json
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.distributed_c10d import PrefixStore, Store

from onefold.errors import ConfigError, WireError, expected
from onefold.layout.cut import Cut, cut_of
from onefold.outer.anchors import Share
from onefold.outer.gate import SECRET, connect
from onefold.outer.journal import Hello, Journal, JournalRecord, Vote, raise_problem
from onefold.outer.parcels import IslandLinks, IslandPlace, ParcelMessage, ShareRows, parcels_of
from onefold.wire import together
from onefold.wire.codec import Codec
from onefold.wire.collectives import Group
from onefold.wire.interfaces import own_address_towards

GRACE_S = 5.0
"""Seconds beyond the timeout in which islands that gave up together still hear of each other."""

JOIN_TIMEOUTS = 30
"""An island that joins waits for the others' next round, at most so many timeouts."""


class Membership:
    """This island among the others: joins them, votes with them, links its ranks to theirs."""

    def __init__(
        self, group: Group, place: IslandPlace, shares: list[Share], codec: Codec | None,
        timeout: float, facts: dict[str, Any],
    ) -> None:  # fmt: skip
        """`facts` must be the same on all islands, as the parameters that they exchange."""
        self.group, self.timeout = group, timeout
        self.island = place.island
        self._place, self._shares, self._codec = place, shares, codec
        context = shares[0].unit.context
        by_rows = [
            context.routes.gather_hops is not None or share.unit.is_tiled for share in shares
        ]
        layout = {"ranks": group.world_size, "shares": context.shares, "by_rows": by_rows}
        model = [
            f"{parameter.fqn} {list(parameter.slot.shape)} of {str(share.dtype)[6:]} in unit "
            f"{share.unit.name}"
            for share in shares
            for parameter in share.parameters
        ]
        self._hello = Hello({**facts, "model": model}, layout)
        self._journal = Journal(place.store, place.island, place.num_islands)
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

    def meet(self, step: int) -> None:
        """Ask to take part, and wait for a record that has this island. A collective."""
        journal, start = self._journal, time.monotonic()

        def limit() -> None:
            waited = time.monotonic() - start
            if journal.is_running() and waited < JOIN_TIMEOUTS * self.timeout:
                return
            if waited > self.timeout:
                raise WireError(_not_met(journal, waited))

        hello = first(self.group, lambda: journal.arrive(replace(self._hello, step=step)))
        self._enter(wait_for(self.group, lambda: journal.look_for_place(hello), limit))

    def verdict(self, deadline: float, failure: str, step: int, work: str) -> JournalRecord:
        """Vote on an attempt, and wait for what all islands hold of it. A collective.

        `failure` says what this rank missed, "" if nothing.
        """
        failures = self.group.gather(failure)
        why = next((f"rank {rank}: {missed}" for rank, missed in enumerate(failures) if missed), "")
        record, journal = self.record, self._journal
        first(self.group, lambda: journal.vote(record, Vote(not why, step, work, why)))
        late = max(deadline, time.monotonic()) + min(GRACE_S, self.timeout)
        record_after = wait_for(self.group, lambda: journal.look_for_verdict(record, late))
        raise_problem(record_after)
        if self.island in record_after.members:
            self._enter(record_after)
        return record_after

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
        seat, name = (self.position, len(members)), f"epoch/{record.epoch}"
        self.links = IslandLinks(self._place, name, seat, self.timeout)
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
            islands = self._layouts
            cuts = [[self._cut(rows, index, island) for island in islands] for rows in share.rows]
            parcels = parcels_of(share.rows, cuts, self.position, self.group.rank)
            codec = None if exact else self._codec
            self._messages[key] = [ParcelMessage(parcel, share.dtype, codec) for parcel in parcels]
        return self._messages[key]

    def _cut(self, rows: ShareRows, index: int, layout: dict[str, Any]) -> Cut:
        """How an island cuts a parameter of one unit."""
        shares, by_rows = layout["shares"], layout["by_rows"][index]
        shares = None if shares is None else tuple(shares)
        return cut_of(rows.cut.shape, layout["ranks"], shares, by_rows=by_rows)

    def note(self, described: dict[str, Any]) -> None:
        """Leave values about this attempt for the other islands. A collective."""
        key, text = f"meta/{self.record.index}", json.dumps(described)
        first(self.group, lambda: self._journal.note(key, text))

    def read_note(self, deadline: float) -> dict[str, Any]:
        """The values that an island left about this attempt. A collective."""

        def limit() -> None:
            if time.monotonic() > deadline:
                got = "no answer within the timeout"
                hint = "the transfer is repeated"
                raise WireError("the state of a running island", got, hint=hint)

        key = f"meta/{self.record.index}"
        return json.loads(wait_for(self.group, lambda: self._journal.look_for(key), limit))


def _not_met(journal: Journal, waited: float) -> str:
    if journal.is_running():
        got = f"no round of theirs in {waited:.0f} s"
        hint = "the other islands have ended, or are stopped; use another name for a new run"
        return expected("running islands to let this one join", got, hint=hint)
    missing = ", ".join(map(str, journal.missing()))
    hint = "start every island; onefold.islands(timeout=) says how many seconds they wait"
    return expected(f"all islands within {waited:.0f} s", f"none of island {missing}", hint=hint)


T = TypeVar("T")

_PAUSES = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05)
"""Seconds between looks at the store: the first answers come soon."""

_TURN_S = 1.0
"""Rank 0 looks so long on its own; then all ranks of the island hear that it still waits."""


@dataclass(frozen=True, slots=True)
class Meeting:
    """Where islands that are separate jobs meet: a store that outlives each of them.

    `onefold meet --host 10.0.0.1 --port 29400` runs one, on a host that all ranks reach. Ranks have
    the environment variable ONEFOLD_SECRET that it has.

    Args:
        address: "HOST:PORT" of the store.
        island: the number of this island, from 0.
        islands: how many islands there are; training starts when all have come.
        name: of the run, where several use one store.

    Example:
        >>> meeting = onefold.islands.Meeting("10.0.0.1:29400", island=0, islands=2)
        >>> handle = onefold.islands(model, optimizer, every=30, meeting=meeting)
    """

    address: str
    island: int
    islands: int
    name: str = "run"

    def __post_init__(self) -> None:
        host, _, port = str(self.address).rpartition(":")
        if not host or not port.isdecimal():
            hint = 'Meeting("10.0.0.1:29400", island=0, islands=2)'
            raise ConfigError('address as "HOST:PORT"', repr(self.address), hint=hint)
        if not (self.islands >= 2 and 0 <= self.island < self.islands):
            got = f"island={self.island} of islands={self.islands}"
            hint = "islands counts all of them, island numbers this one from 0"
            raise ConfigError("island from 0 to islands - 1, of at least 2", got, hint=hint)

    def connect(self, timeout: float) -> tuple[Store, str]:
        """Connect to the store; also return the address of this host on the way to it."""
        host, _, port = self.address.rpartition(":")
        try:
            store = connect(host, int(port), timeout)
        except (OSError, RuntimeError) as error:
            hint = "start it with `onefold meet --host HOST --port PORT`; all ranks must reach it, "
            hint += f"and have its {SECRET}"
            got = str(error).splitlines()[0]
            raise WireError(f"a store at {self.address}", got, hint=hint) from error
        return PrefixStore(f"onefold/islands/{self.name}", store), own_address_towards(host) or ""


def first(group: Group, act: Callable[[], T]) -> T:
    """Call `act`, which asks the store, on rank 0; return its value on every rank. A collective."""

    def ask() -> T:
        try:
            return act()
        except dist.DistError as error:
            raise _store_is_gone(error) from error

    return together.first(group, ask)


def wait_for(
    group: Group, look: Callable[[], T | None], limit: Callable[[], None] = lambda: None
) -> T:
    """Return what rank 0 finds once `look` returns it, on every rank. A collective.

    `look` may raise an error, which all ranks raise. `limit` raises where it takes too long.
    """
    answer: T | None = None
    while answer is None:
        answer = first(group, lambda: _look(look, limit))
    return answer


def _look(look: Callable[[], T | None], limit: Callable[[], None]) -> T | None:
    until, pauses = time.monotonic() + _TURN_S, iter(_PAUSES)
    pause = 0.0
    while True:
        answer = look()
        if answer is not None:
            return answer
        limit()
        if time.monotonic() > until:
            return None
        pause = next(pauses, pause)
        time.sleep(pause)


def find_place(
    group: Group, mesh: DeviceMesh | None, meeting: Meeting | None, timeout: float
) -> IslandPlace:
    """Find this island's place. A collective of the world where no `meeting` is given."""
    if mesh is not None and meeting is not None:
        hint = "mesh= for islands of one world, meeting= for islands that are separate jobs"
        raise ConfigError("mesh or meeting", "both", hint=hint)
    if meeting is not None:
        if not isinstance(meeting, Meeting):
            hint = 'onefold.islands.Meeting("10.0.0.1:29400", island=0, islands=2)'
            raise ConfigError(
                "meeting to be an onefold.islands.Meeting", f"a {type(meeting).__name__}", hint=hint
            )
        store, address = together.together(group, lambda: meeting.connect(timeout))
        return IslandPlace(store, meeting.island, meeting.islands, address)
    return _place_in_world(group, mesh, timeout)


def _place_in_world(group: Group, mesh: DeviceMesh | None, timeout: float) -> IslandPlace:
    if not dist.is_initialized():
        raise _one_island(1)
    store = dist.distributed_c10d._get_default_store()
    own = group.global_ranks()
    name, everyone = "world", list(range(dist.get_world_size()))
    if mesh is not None:
        everyone = _ranks_of(mesh, own)
        name = "-".join(map(str, everyone))
    number = first(group, lambda: store.add(f"onefold/islands/{name}/of/{own[0]}", 1))
    prefix = PrefixStore(f"onefold/islands/{name}/{number}", store)
    deadline = time.monotonic() + timeout

    def come() -> None:
        prefix.set(f"first/{own[0]}", str(len(own)))
        prefix.add("ranks", len(own))

    def look() -> list[int] | None:
        """The first rank of each island, once every rank is in one."""
        if prefix.add("ranks", 0) < len(everyone):
            return None
        return [rank for rank in everyone if prefix.check([f"first/{rank}"])]

    def limit() -> None:
        if time.monotonic() > deadline:
            got = f"{prefix.add('ranks', 0)} of {len(everyone)} ranks in onefold.islands"
            hint = "every rank of the world, or of mesh=, calls onefold.islands"
            raise WireError(f"all ranks within {timeout:g} s", got, hint=hint)

    first(group, come)
    firsts = wait_for(group, look, limit)
    if len(firsts) < 2:
        raise _one_island(len(own))
    return IslandPlace(prefix, firsts.index(own[0]), len(firsts))


def _ranks_of(mesh: DeviceMesh, own: list[int]) -> list[int]:
    """All ranks of a mesh (island, rank), whose rows are the ranks that shard together."""
    if not isinstance(mesh, DeviceMesh) or mesh.ndim != 2 or own not in mesh.mesh.tolist():
        got = f"a {type(mesh).__name__}"
        if isinstance(mesh, DeviceMesh):
            got = f"{mesh.mesh.tolist()}, and a module that is sharded over ranks {own}"
        hint = 'mesh = init_device_mesh(device, (2, 4), mesh_dim_names=("island", "rank")), then '
        hint += 'onefold.shard(module, optimizer, mesh=mesh["rank"])'
        raise ConfigError("a mesh of two axes whose rows are the islands' ranks", got, hint=hint)
    return sorted(mesh.mesh.flatten().tolist())


def _one_island(num_ranks: int) -> ConfigError:
    got = f"one, of {num_ranks} ranks: all that there are"
    hint = 'shard over the ranks of an island, onefold.shard(..., mesh=mesh["rank"]), or '
    hint += "pass meeting= for islands that are separate jobs"
    return ConfigError("at least two islands", got, hint=hint)


def _store_is_gone(error: Exception) -> WireError:
    got = str(error).splitlines()[0]
    hint = "run it on a host that outlives the islands, and restart from the last checkpoint"
    return WireError("the store where islands meet to answer", got, hint=hint)
