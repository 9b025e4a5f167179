"""The memory that limits a rank's share of the state, and the shares that fit.

A rank's need in one memory is a straight line in its share of the state:

    need(share) = base + share * whole        base: unsharded units, messages; whole: all the state

so `share <= (free - activations - base) / whole`. Ranks tell each other their lines and the limits
of their memory by name. Ranks under one limit (a host, a container, a disk) divide its free bytes.
Source: docs/guides/mixed-clusters.md.
"""

from __future__ import annotations

import os
import resource
import shutil
import socket
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from onefold.errors import TierError, expected
from onefold.host import free_host_bounds
from onefold.layout.cut import Shares
from onefold.planner.auto import ACTIVATIONS_SHARE
from onefold.planner.estimate import bare
from onefold.planner.memory import forecast
from onefold.recipe import Recipe
from onefold.shares.weights import in_parts, unless_even, weights_of
from onefold.text import format_bytes
from onefold.wire.collectives import Group

PARTS_A_RANK = 32
"""Measured shares are rounded down to so many parts of the mean share: free memory flickers."""


@dataclass(frozen=True, slots=True)
class MemoryLine:
    """One memory of one rank.

    `bounds`: free bytes by the name of the limit, which ranks of the same name share. `held`: bytes
    of the module that lie there whole, and make room for its shard.
    """

    tier: str
    bounds: tuple[tuple[str, int], ...]
    held: int
    base: int
    whole: int


def rooms_of(recipe: Recipe, device: torch.device, held: Mapping[str, int]) -> list[MemoryLine]:
    """Return the memories that limit this rank's share of a recipe's states.

    Args:
        recipe: the resolved choices but `shares`, for two ranks or more that cut the state.
        device: that which computes.
        held: bytes of the module that lie in each tier, and that its shard replaces.
    """
    ranks = recipe.shard_world
    even, alone = (
        _needs(replace(recipe, shares=shares)) for shares in (None, (1,) + (0,) * (ranks - 1))
    )
    found: list[MemoryLine] = []
    for tier, most in alone.items():
        slope = max(0, most - even.get(tier, 0)) * ranks // (ranks - 1)
        bounds = tuple(_bounds(tier, device, recipe.offload.paths))
        found.append(MemoryLine(tier, bounds, held.get(tier, 0), most - slope, slope))
    return found


def _needs(recipe: Recipe) -> dict[str, int]:
    """The most bytes of each memory on the rank with the largest share, without activations."""
    found = forecast(bare(recipe.units), recipe)
    if recipe.device_type == "cpu":
        return {"cpu": found.memory_nbytes, "disk": found.peaks.get("disk", 0)}
    return {tier: found.peaks.get(tier, 0) for tier in ("device", "cpu", "disk")}


def _bounds(tier: str, device: torch.device, paths: Sequence[Path]) -> Iterator[tuple[str, int]]:
    host = socket.gethostname()
    if tier == "device":
        yield f"{host} {device}", torch.accelerator.get_memory_info(device)[0]
    elif tier == "disk":
        for path in paths if all(path.is_dir() for path in paths) else ():
            free = shutil.disk_usage(path).free
            yield f"{host} disk {path.stat().st_dev}", free * len(paths)
    else:
        for name, free in free_host_bounds():
            yield f"{host} {name}", free
        limit, _ = resource.getrlimit(resource.RLIMIT_AS)
        if limit != resource.RLIM_INFINITY:
            pages = int(Path("/proc/self/statm").read_text().split()[0])
            yield f"{host} process {os.getpid()}", limit - pages * resource.getpagesize()


@dataclass(frozen=True)
class Capacity:
    """The memories of all ranks that hold one copy of the state, in rank order."""

    ranks: tuple[tuple[MemoryLine, ...], ...]

    @staticmethod
    def of(everyone: Sequence[Sequence[MemoryLine]], shard_world: int) -> Capacity:
        """Put the rooms of nodes that are replicas together: rank i of each has the same share."""
        users = Counter(
            name for rooms in everyone for name in {n for room in rooms for n, _ in room.bounds}
        )
        own = [[_divided(room, users) for room in rooms] for rooms in everyone]
        return Capacity(tuple(
            tuple(room for rooms in own[rank::shard_world] for room in rooms)
            for rank in range(shard_world)
        ))  # fmt: skip

    def most(self, left: float = 0.0) -> list[float]:
        """The largest share for which each rank has room, with a part of it `left` free."""
        return [min((_share(room, left) for room in rooms), default=1.0) for rooms in self.ranks]

    def fits(self, shares: Shares) -> bool:
        """True if every rank has room for its share."""
        weights = shares or (1,) * len(self.ranks)
        pairs = zip(self.most(), weights, strict=True)
        return all(most >= weight / sum(weights) for most, weight in pairs)

    @cached_property
    def best(self) -> Shares | str:
        """The most even shares that fit: they send least. A sentence where none fit.

        A share is at most what a rank has room for beside activations; where that does not
        suffice, beside nothing. Rows of the others are dealt as evenly as their room allows, since
        the rank that sends most, (N - 1) * share, is what a step waits for.
        """
        for left in (ACTIVATIONS_SHARE, 0.0):
            most = self.most(left)
            if sum(most) >= 1:
                return self._evenest(most)
        return f"all ranks together have room for {sum(self.most()):.0%} of the state"

    def _evenest(self, most: Sequence[float]) -> Shares:
        """Fill shares to one level, those of ranks with less room to their limit, in steps."""
        count = len(most)
        parts = PARTS_A_RANK * count
        limits = [int(min(1.0, each) * parts) / parts for each in most]
        if sum(limits) < 1:  # by rounding alone
            limits = list(most)
        found, left, open_ranks = [0.0] * count, 1.0, set(range(count))
        while open_ranks:
            level = left / len(open_ranks)
            full = {rank for rank in open_ranks if limits[rank] < level}
            if not full:
                for rank in open_ranks:
                    found[rank] = level
                break
            for rank in full:
                found[rank] = limits[rank]
                left -= limits[rank]
            open_ranks -= full
        return unless_even(weights_of(in_parts(found, parts)))

    def describe(self, shares: Shares) -> str:
        """Needed and free bytes of the tightest memory of each rank, at these shares."""
        weights = shares or (1,) * len(self.ranks)
        lines: list[str] = []
        for rank, (rooms, weight) in enumerate(zip(self.ranks, weights, strict=True)):
            share = weight / sum(weights)
            needs = [(_free(room) - _need(room, share), room) for room in rooms if room.bounds]
            if needs:
                _, room = min(needs, key=lambda pair: pair[0])
                need, free = format_bytes(_need(room, share)), format_bytes(max(0, _free(room)))
                lines.append(f"rank {rank} needs {need} of {free} free ({room.tier})")
        return ", ".join(lines)


def _divided(room: MemoryLine, users: Mapping[str, int]) -> MemoryLine:
    bounds = tuple((name, max(0, free) // users[name]) for name, free in room.bounds)
    return replace(room, bounds=bounds)


def _free(room: MemoryLine) -> int:
    """Free bytes of a room, with the module's own, which its shard replaces."""
    return min(free for _, free in room.bounds) + room.held


def _need(room: MemoryLine, share: float) -> int:
    return room.base + int(share * room.whole)


def _share(room: MemoryLine, left: float) -> float:
    """The largest share that a room holds."""
    if not room.bounds:
        return float("inf")
    spare = (1 - left) * _free(room) - room.base
    if spare < 0:
        return 0.0
    return spare / room.whole if room.whole else float("inf")


def choose(
    recipe: Recipe, device: torch.device, group: Group, held: Mapping[str, int], *, is_auto: bool
) -> tuple[Recipe, str]:
    """Settle the shares of a recipe, the same on every rank, and say why. A collective.

    Args:
        recipe: the resolved choices; its shares are checked, or measured where `is_auto`.
        device: that which computes.
        group: all ranks that train.
        held: see `rooms_of`.

    Raises:
        TierError: a rank has no room for its share, or all ranks together have none for the state.
    """
    is_cut = recipe.is_sharded and recipe.shard_world > 1
    if not is_cut or (recipe.shares is None and not is_auto):
        return recipe, ""
    everyone: list[Any] = group.all_gather_object(rooms_of(recipe, device, held))
    capacity = Capacity.of(everyone, recipe.shard_world)
    best = capacity.best
    if is_auto and not isinstance(best, str):
        return replace(recipe, shares=best), f"shares {in_words(best)}: {capacity.describe(best)}"
    if is_auto or not capacity.fits(recipe.shares):
        fits = f"shares={in_words(best)} fit"
        raise TierError(
            expected(
                "room on every rank for its share of the state",
                f"shares={in_words(recipe.shares)}: {capacity.describe(recipe.shares)}",
                where=f"rank {group.rank}",
                hint=f"{best}: offload more, or take more ranks" if isinstance(best, str) else fits,
            )
        )
    return recipe, ""


def in_words(shares: object) -> str:
    """Shares as a user writes them; "even" for equal ones."""
    return "even" if shares is None else str(list(shares)) if isinstance(shares, tuple) else ""
