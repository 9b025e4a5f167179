"""How many bytes are free, by the name of the limit, and how many of them each rank may take.

Ranks under one limit (a host, a container, a disk) divide its free bytes. A rank knows its own
limits. Ranks that meet compare names, and so find out who shares which limit.
"""

from __future__ import annotations

import os
import resource
import shutil
import socket
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from onefold.errors import ConfigError
from onefold.text import parse_nbytes
from onefold.tier import accelerator
from onefold.tier.host import free_host_bounds
from onefold.wire.collectives import Group
from onefold.wire.together import collect

ACTIVATIONS_SHARE = 0.25
"""The share of the free memory that is left for activations and messages."""


def room_of(free: int) -> int:
    """Return the share of free bytes that is not left for activations and messages."""
    return int((1 - ACTIVATIONS_SHARE) * free)


@dataclass(frozen=True, slots=True)
class Limit:
    """Free bytes under a limit of one host. `local_ranks`: ranks of the host that may share it."""

    host: str
    name: str
    free: int
    local_ranks: int = 1


Limits = tuple[Limit, ...]
"""All limits of one memory of one rank; empty: no limit is known."""


def _measured(
    tier: str, device: torch.device, local: int, paths: Sequence[Path]
) -> Iterator[Limit]:
    host = socket.gethostname()
    if tier == "device":
        yield Limit(host, str(device), accelerator.memory(device).free)
    elif tier == "disk":
        for path in paths if all(path.is_dir() for path in paths) else ():
            free = shutil.disk_usage(path).free * len(paths)
            yield Limit(host, f"disk {path.stat().st_dev}", free, local)
    else:
        for name, free in free_host_bounds():
            yield Limit(host, name, free, local)
        most, _ = resource.getrlimit(resource.RLIMIT_AS)
        if most != resource.RLIM_INFINITY:
            pages = int(Path("/proc/self/statm").read_text().split()[0])
            free = most - pages * resource.getpagesize()
            yield Limit(host, f"process {os.getpid()}", free)


@dataclass(frozen=True, slots=True)
class Users:
    """How many ranks each limit has, and each host."""

    ranks: Counter[str]
    users: Counter[tuple[str, str]]

    @staticmethod
    def from_limits(everyone: Sequence[Sequence[Limit]]) -> Users:
        """Count the ranks, from the limits of each of them."""
        hosts = Counter(host for limits in everyone for host in {limit.host for limit in limits})
        names = [{(limit.host, limit.name) for limit in limits} for limits in everyone]
        return Users(hosts, Counter(name for of_rank in names for name in of_rank))

    def part(self, limits: Limits) -> int:
        """Return the bytes that one rank may take under all of these limits.

        Ranks that did not meet, as those of other stages of a pipeline, count where all ranks of
        the host that met share the limit.
        """
        return min(max(0, limit.free) // self._users(limit) for limit in limits)

    def _users(self, limit: Limit) -> int:
        users = self.users[limit.host, limit.name]
        is_of_host = users == self.ranks[limit.host]
        return max(users, limit.local_ranks) if is_of_host else users


@dataclass(frozen=True, slots=True)
class RankMemory:
    """The memories of this rank: its device, the ranks of its host, and those that it meets."""

    device: torch.device
    local_world_size: int
    group: Group

    @property
    def near(self) -> str:
        """The tier of the memory that computes."""
        return "cpu" if self.device.type == "cpu" else "device"

    def limits(self, tier: str, paths: Sequence[Path] = ()) -> Limits:
        """Measure the limits of a tier on this rank: "device", "cpu" or "disk".

        Args:
            tier: the memory; on a CPU that computes, "cpu".
            paths: folders of the disk tier. There is no limit unless all of them exist.
        """
        return tuple(_measured(tier, self.device, self.local_world_size, paths))

    def free(self, tier: str | None = None, paths: Sequence[Path] = ()) -> int:
        """Return the bytes that this rank may still take, by default where it computes."""
        limits = self.limits(tier or self.near, paths)
        return Users.from_limits([limits]).part(limits)

    def free_on_all(self) -> int:
        """Return the least bytes that a rank may still take where it computes. A collective."""
        everyone = collect(self.group, lambda: self.limits(self.near))
        users = Users.from_limits(everyone)
        return min(map(users.part, everyone))

    def room_to_keep(self, budget: int | str | None = None) -> int:
        """Return the bytes of unsharded weights that every rank may keep. A collective.

        `budget`: the most bytes on this rank, or a text such as "2GiB". A share is left for
        activations.
        """
        most = min(collect(self.group, lambda: most_of_budget(budget)))
        return min(room_of(self.free_on_all()), most)


def most_of_budget(budget: int | str | None, *, least: int = 0) -> int:
    """Return the most bytes that a budget allows, such as "2GiB".

    Raises `ConfigError` where it is not a number of at least `least` bytes.
    """
    if isinstance(budget, str):
        budget = parse_nbytes("budget", budget)
    if budget is not None and (type(budget) is not int or budget < least):
        hint = 'budget="2GiB"; None takes what is free on the device'
        raise ConfigError(f"a budget in bytes, from {least} on", repr(budget), hint=hint)
    return sys.maxsize if budget is None else budget
