"""The memory that limits a rank's share of the state, and the shares that fit.

Ranks tell each other the lines of their needs, and the limits of their memory by name.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from math import gcd, inf
from typing import Any

from onefold.config import Offload
from onefold.errors import ConfigError, TierError
from onefold.fit.bounds import ACTIVATIONS_SHARE, Limits, RankMemory, Users, room_of
from onefold.layout.ranges import Shares
from onefold.recipe import Recipe
from onefold.text import format_bytes, format_share
from onefold.wire.together import collect

TRIES = 8
"""Of shares, until what they need fits."""
PARTS_A_RANK = 32
"""Shares are rounded down to so many parts of the mean share: free memory flickers."""
MOST_PARTS = 1 << 40
"""Of all ranks, where coarser ones leave no room for the state."""


@dataclass(frozen=True, slots=True)
class Line:
    """The need of one rank in one memory, and the bytes that it may take there."""

    tier: str
    free: int
    base: int
    whole: int
    fixed: int = 0

    @staticmethod
    def through(tier: str, free: int, even: int, alone: int, ranks: int, fixed: int = 0) -> Line:
        """Draw the line through the needs of an even share and of all the state, on `ranks`."""
        whole = max(0, alone - even) * ranks // (ranks - 1)
        return Line(tier, free, alone - whole - fixed, whole, fixed)

    def need(self, share: float) -> int:
        """Return the bytes of a share of the state."""
        return self.fixed + self.base + int(share * self.whole)

    def most(self, left: float = 0.0, times: float = 1.0) -> float:
        """Return the largest share that fits; below 0 where none does.

        Args:
            left: the part of the free bytes that stays free.
            times: how many times as large as the model another one is, whose share is wanted.
        """
        spare = ((1 - left) * self.free - self.fixed) / times - self.base
        if self.whole <= 0:
            return inf if spare >= 0 else -inf
        return spare / self.whole

    def excess(self, need: int, left: float = 0.0) -> float:
        """Return the part of the state by which a share that needs these bytes is too large."""
        over = need - (1 - left) * self.free
        return over / self.whole if self.whole > 0 else inf if over > 0 else 0.0


def most_of(lines: Iterable[Line], left: float = 0.0, times: float = 1.0) -> float:
    """Return the largest share that fits into all memories of a rank, up to 1."""
    return min([1.0, *(line.most(left, times) for line in lines)])


def fill(limits: Sequence[float]) -> Shares:
    """Return the most even shares within limits, as integer weights; None where all are equal.

    Shares of ranks with little room are their limits, rounded down. The others share the rest
    evenly. Where all limits together are less than 1, shares are in proportion to them.

    Args:
        limits: the largest share of the state for which each rank has room, in rank order.

    >>> fill((0.5, 0.3, 0.3))
    (10, 7, 7)
    """
    bounded = [min(1.0, max(0.0, limit)) for limit in limits]
    parts = PARTS_A_RANK * len(limits)
    rounded = [int(limit * parts) for limit in bounded]
    while sum(rounded) < parts < MOST_PARTS and sum(bounded) >= 1:
        parts *= 2
        rounded = [int(limit * parts) for limit in bounded]
    rest, open_ranks = parts, set(range(len(limits)))
    while full := {rank for rank in open_ranks if rounded[rank] * len(open_ranks) < rest}:
        open_ranks -= full
        rest -= sum(rounded[rank] for rank in full)
    count = len(open_ranks)
    weights = [
        rest if rank in open_ranks else rounded[rank] * max(1, count) for rank in range(len(limits))
    ]
    divisor = gcd(*weights)
    return None if len(set(weights)) == 1 else tuple(weight // divisor for weight in weights)


def settle(
    limits: Sequence[float], excess: Callable[[Shares], Sequence[float]]
) -> tuple[Shares, float]:
    """Return the most even shares that fit, and the part of the state that has no room.

    Lines are exact at an even share and at all the state. In between bytes bend a little, as pieces
    are whole rows: the limit of a rank that needs more than its line says is lowered.

    Args:
        limits: the largest share of each rank, by its lines.
        excess: by how much each rank's share is too large, from what it needs at these shares.
    """
    shares: Shares = None
    if max(excess(shares)) <= 0:
        return None, 0.0
    for _ in range(TRIES):
        if not any(limits):
            return None, 1.0
        shares, lacks = fill(limits), 1 - sum(limits)
        if lacks > 0:
            return shares, lacks
        parts = zip(limits, fractions(shares, len(limits)), excess(shares), strict=True)
        lowered = [
            limit if over <= 0 else max(0.0, min(limit, share) - over)
            for limit, share, over in parts
        ]
        if lowered == limits:  # all fit, or those that do not hold nothing
            break
        limits = lowered
    return shares, 0.0


def fractions(shares: Shares, ranks: int) -> list[float]:
    """Return the part of the state that each rank holds."""
    weights = shares or (1,) * ranks
    total = sum(weights)
    return [weight / total for weight in weights]


# the shares that fit


Room = tuple[Line, Limits]
"""A line with the bytes that a rank's shard replaces as the free ones, and limits to divide."""


def rooms_of(
    recipe: Recipe, needs: Needs, memory: RankMemory, held: Mapping[str, int]
) -> list[Room]:
    """Return the memories that limit this rank's share of a recipe's states.

    Args:
        recipe: the resolved choices but `shares`, for two ranks or more that cut the state.
        needs: bytes of a recipe on the rank with the largest share.
        memory: that of this rank.
        held: bytes of the module that lie in each tier, and that its shard replaces.
    """
    ranks, rooms = recipe.shard_world, list[Room]()
    even = needs(replace(recipe, shares=None))
    for tier, most in needs(replace(recipe, shares=(1,) + (0,) * (ranks - 1))).items():
        line = Line.through(tier, held.get(tier, 0), even.get(tier, 0), most, ranks)
        limits = memory.limits(tier, recipe.offload.paths)
        rooms += [(line, limits)] if limits else []
    return rooms


@dataclass(frozen=True)
class Capacity:
    """The memories of all ranks that hold one copy of the state, in rank order."""

    ranks: tuple[tuple[Line, ...], ...]

    @staticmethod
    def from_rooms(everyone: Sequence[Sequence[Room]], shard_world: int) -> Capacity:
        """Put the rooms of nodes that are replicas together: rank i of each has the same share."""
        users = Users.from_limits(
            [[limit for _, limits in rooms for limit in limits] for rooms in everyone]
        )
        own = [
            [replace(line, free=line.free + users.part(limits)) for line, limits in rooms]
            for rooms in everyone
        ]
        return Capacity(tuple(
            tuple(line for lines in own[rank::shard_world] for line in lines)
            for rank in range(shard_world)
        ))  # fmt: skip

    def most(self, left: float = 0.0) -> list[float]:
        """The largest share for which each rank has room, with a part of it `left` free."""
        return [max(0.0, most_of(lines, left)) for lines in self.ranks]

    def excess(self, rank: int, needs: Mapping[str, int], left: float = 0.0) -> float:
        """Return by how much the share of a rank with these needs is too large; see `Line`."""
        lines = self.ranks[rank]
        return max((line.excess(needs.get(line.tier, 0), left) for line in lines), default=0.0)

    def best(self, excess: Callable[[float, Shares], Sequence[float]]) -> Shares | str:
        """Return the most even shares that fit: they send least. A sentence where none fit.

        A share is at most what a rank has room for besides activations; where that does not
        suffice, besides nothing.

        Args:
            excess: of each rank, with a part of the memory left free, at these shares.
        """
        for left in (ACTIVATIONS_SHARE, 0.0):
            shares, lacks = settle(self.most(left), partial(excess, left))
            if not lacks:
                return shares
        return f"all ranks together have room for {format_share(sum(self.most()))} of the state"

    def describe(self, shares: Shares) -> str:
        """Needed and free bytes of the tightest memory of each rank, at these shares."""
        words: list[str] = []
        parts = fractions(shares, len(self.ranks))
        for rank, (lines, share) in enumerate(zip(self.ranks, parts, strict=True)):
            needs = [(line.free - line.need(share), line) for line in lines]
            if needs:
                spare, line = min(needs, key=lambda pair: pair[0])
                need, free = format_bytes(line.free - spare), format_bytes(max(0, line.free))
                words.append(f"rank {rank} needs {need} of {free} free ({line.tier})")
        return ", ".join(words)


def choose(
    recipe: Recipe, needs: Needs, memory: RankMemory, held: Mapping[str, int], *, is_auto: bool
) -> tuple[Recipe, str]:
    """Settle the shares of a recipe, the same on every rank, and say why. A collective.

    Args:
        recipe: the resolved choices; its shares are checked, or measured where `is_auto`.
        needs, held: see `rooms_of`.
        memory: that of this rank, among all ranks that train.

    Raises:
        TierError: a rank has no room for its share, or all ranks together have none for the state.
    """
    is_cut = recipe.is_sharded and recipe.shard_world > 1
    if not is_cut or (recipe.shares is None and not is_auto):
        return recipe, ""
    everyone = collect(memory.group, lambda: rooms_of(recipe, needs, memory, held))
    ranks = recipe.shard_world
    capacity, own = Capacity.from_rooms(everyone, ranks), memory.group.rank % ranks

    def excess(left: float, shares: Shares) -> list[float]:
        wanted = replace(recipe, shares=shares)
        of_all = collect(memory.group, lambda: capacity.excess(own, needs(wanted, rank=own), left))
        return [max(of_all[rank::ranks]) for rank in range(ranks)]

    if not is_auto and max(excess(0.0, recipe.shares)) <= 0:
        return recipe, ""
    best = capacity.best(excess)
    if is_auto and not isinstance(best, str):
        return replace(recipe, shares=best), f"shares {in_words(best)}: {capacity.describe(best)}"
    fits = f"shares={in_words(best)} fit"
    raise TierError(
        "room on every rank for its share of the state",
        f"shares={in_words(recipe.shares)}: {capacity.describe(recipe.shares)}",
        where=f"rank {memory.group.rank}",
        hint=f"{best}: offload more, or take more ranks" if isinstance(best, str) else fits,
    )


def in_words(shares: object) -> str:
    """Shares as a user writes them; "even" for equal ones."""
    return "even" if shares is None else str(list(shares)) if isinstance(shares, tuple) else ""


Needs = Callable[..., Mapping[str, int]]
"""The most bytes by tier that a rank holds without activations. The CPU's own tier is "cpu".

Of a recipe, and with `rank` of another rank than the one with the largest share.
"""


def lowest_stage(
    recipes: Iterable[Recipe], needs: Needs, memory: RankMemory
) -> tuple[Recipe | None, str]:
    """Choose the first recipe whose states fit on every rank, and say why. A collective.

    Args:
        recipes: the same module at each stage that has these tiers and this wire, lowest first.
        needs: bytes of a recipe.
        memory: that of this rank, among all ranks that train.

    Returns:
        The recipe, or None where none fits; the reason, for people.
    """
    free = memory.free_on_all()
    room, before = room_of(free), ""
    for recipe in recipes:
        need, number = needs(recipe)[memory.near], recipe.stage.number
        if need <= room:
            why = f"stage {number} holds {format_bytes(need)} of {format_bytes(free)} free"
            return recipe, before + why
        before = f"stage {number} would hold {format_bytes(need)}, "
    hint = "offload more, or take more ranks"
    return None, f"{before}of {format_bytes(free)} free, and no stage holds less: {hint}"


def least_fraction(
    recipe: Recipe, states: int, needs: Needs, memory: RankMemory
) -> tuple[float, str]:
    """Choose the smallest share of `states`, bytes, that must leave the device, and say why.

    States that stay are stepped at the device's own bandwidth and wait for nothing.
    """
    free = memory.free()
    others = needs(replace(recipe, offload=Offload(), num_moments=0))[memory.near]
    line = Line(memory.near, free, others, max(1, states))
    stays = max(0.0, line.most(ACTIVATIONS_SHARE))
    why = f"of {states:,} bytes of optimizer state {int(stays * line.whole):,} have room on the "
    why += f"device ({free:,} bytes are free)"
    return 1 - min(1.0, stays), why


# from numbers that a user gives to integer weights, one a rank


AUTO = "auto"

SharesChoice = str | Sequence[float] | None
"""None cuts evenly, "auto" by free memory, a list by one weight a rank."""

PARTS = 1000
"""Floats become parts of this many, or of 100 a rank where that is more."""


def is_auto(choice: object) -> bool:
    """True for the word that has shares measured."""
    return isinstance(choice, str) and choice == AUTO


def weights_of(choice: object) -> tuple[int, ...]:
    """Return integer weights without a common divisor.

    Integers keep their ratios exactly. Floats become thousandths of their sum (hundredths of the
    mean share, above 10 ranks): rounded by largest remainder, at least one for a weight above 0.

    Raises:
        ConfigError: not a list of finite numbers from 0 up, one of them above 0.

    >>> weights_of([6, 2]), weights_of([0.75, 0.25]), weights_of([2, 2])
    ((3, 1), (3, 1), (1, 1))
    """
    numbers: list[Any] = []
    if isinstance(choice, Sequence) and not isinstance(choice, str | bytes):
        numbers = list(choice)
    if not all(map(_is_weight, numbers)) or not any(numbers):
        wanted = '`shares` to be None, "auto", or one weight a rank: finite numbers from 0 up, '
        hint = "shares=[3, 1] gives rank 0 three quarters of the state"
        raise ConfigError(f"{wanted}not all of them 0", repr(choice), hint=hint)
    if not all(number == int(number) for number in numbers):
        total = sum(numbers)
        parts = max(PARTS, 100 * len(numbers))
        numbers = in_parts([number / total for number in numbers], parts)
    integers = [int(number) for number in numbers]
    divisor = math.gcd(*integers)
    return tuple(number // divisor for number in integers)


def unless_even(shares: Shares) -> Shares:
    """Return None where all weights are equal: the even cut, which plain DTensors describe."""
    return None if shares is None or len(set(shares)) == 1 else shares


def in_parts(fractions: Sequence[float], parts: int) -> list[int]:
    """Round fractions that sum to 1 to `parts` parts; each fraction above 0 keeps one at least."""
    exact = [fraction * parts for fraction in fractions]
    whole = [int(fraction) for fraction in exact]
    left = parts - sum(whole)
    by_remainder = sorted(range(len(exact)), key=lambda i: whole[i] - exact[i])
    for index in by_remainder[: max(0, left)]:
        whole[index] += 1
    return [max(part, 1) if f > 0 else 0 for part, f in zip(whole, fractions, strict=True)]


def _is_weight(number: Any) -> bool:
    is_number = isinstance(number, int | float) and not isinstance(number, bool)
    return is_number and math.isfinite(number) and number >= 0
