"""Find the other islands: in one world of ranks, or at a store where separate jobs meet."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import TypeVar

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.distributed_c10d import PrefixStore, Store

from onefold.errors import ConfigError, WireError
from onefold.outer.connections import Station
from onefold.wire import together
from onefold.wire.collectives import Group
from onefold.wire.interfaces import own_address_towards

T = TypeVar("T")

_PAUSES = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05)
"""Seconds between looks at the store: the first answers come soon."""

_TURN_S = 1.0
"""Rank 0 looks so long on its own; then all ranks of the island hear that it still waits."""


@dataclass(frozen=True, slots=True)
class Meeting:
    """Where islands that are separate jobs meet: a store that outlives each of them.

    `python -m onefold.outer --port 29400` runs one, on a host that all ranks reach.

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
            store = dist.TCPStore(
                host, int(port), is_master=False, timeout=timedelta(seconds=timeout)
            )
        except RuntimeError as error:
            hint = "start it with `python -m onefold.outer --port PORT`; all ranks must reach it"
            raise WireError(
                f"a store at {self.address}", str(error).splitlines()[0], hint=hint
            ) from error
        return PrefixStore(f"onefold/islands/{self.name}", store), own_address_towards(host) or ""


@dataclass(frozen=True, slots=True)
class IslandPlace:
    """This rank's island among all: its number, how many there are, and how to reach them."""

    station: Station
    island: int
    num_islands: int


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
    found: T | None = None
    while found is None:
        found = first(group, lambda: _look(look, limit))
    return found


def _look(look: Callable[[], T | None], limit: Callable[[], None]) -> T | None:
    until, pauses = time.monotonic() + _TURN_S, iter(_PAUSES)
    pause = 0.0
    while True:
        found = look()
        if found is not None:
            return found
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
        return IslandPlace(Station(store, group.rank, address), meeting.island, meeting.islands)
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
    firsts = wait_for(
        group, _islands_of(prefix, own, everyone), _until(timeout, prefix, len(everyone))
    )
    if len(firsts) < 2:
        raise _one_island(len(own))
    return IslandPlace(Station(prefix, group.rank), firsts.index(own[0]), len(firsts))


def _islands_of(
    store: Store, own: list[int], everyone: list[int]
) -> Callable[[], list[int] | None]:
    """Look for the first rank of each island, once every rank is in one."""
    is_counted: list[bool] = []

    def look() -> list[int] | None:
        if not is_counted:
            is_counted.append(True)
            store.set(f"first/{own[0]}", str(len(own)))
            store.add("ranks", len(own))
        if store.add("ranks", 0) < len(everyone):
            return None
        return [rank for rank in everyone if store.check([f"first/{rank}"])]

    return look


def _until(timeout: float, store: Store, wanted: int) -> Callable[[], None]:
    deadline = time.monotonic() + timeout

    def limit() -> None:
        if time.monotonic() > deadline:
            got = f"{store.add('ranks', 0)} of {wanted} ranks in onefold.islands"
            hint = "every rank of the world, or of mesh=, calls onefold.islands"
            raise WireError(f"all ranks within {timeout:g} s", got, hint=hint)

    return limit


def _ranks_of(mesh: DeviceMesh, own: list[int]) -> list[int]:
    """All ranks of a mesh (island, rank), whose rows are the ranks that shard together."""
    if not isinstance(mesh, DeviceMesh) or mesh.ndim != 2 or own not in mesh.mesh.tolist():
        got = f"a {type(mesh).__name__}"
        if isinstance(mesh, DeviceMesh):
            got = f"{mesh.mesh.tolist()}, and a module that is sharded over ranks {own}"
        hint = (
            'mesh = init_device_mesh(device, (2, 4), mesh_dim_names=("island", "rank")), then '
            'onefold.shard(module, optimizer, mesh=mesh["rank"])'
        )
        raise ConfigError("a mesh of two axes whose rows are the islands' ranks", got, hint=hint)
    return sorted(mesh.mesh.flatten().tolist())


def _one_island(num_ranks: int) -> ConfigError:
    return ConfigError(
        "at least two islands",
        f"one, of {num_ranks} ranks: all that there are",
        hint='shard over the ranks of an island, onefold.shard(..., mesh=mesh["rank"]), or '
        "pass meeting= for islands that are separate jobs",
    )


def _store_is_gone(error: Exception) -> WireError:
    return WireError(
        "the store where islands meet to answer",
        str(error).splitlines()[0],
        hint="run it on a host that outlives the islands, and restart from the last checkpoint",
    )
