"""Which units stay unsharded, for a room of bytes: those of a stream, a generation, a window.

A pass over the units wants the unit that was used last again only after all others. A cache of the
units that were used last would never have the next one. So the choice is fixed: units that stay lie
evenly between the others, and their compute hides the gathers and reads of the others.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from onefold.engine.engine import Engine
from onefold.engine.policy import UnitFacts
from onefold.fit.bounds import RankMemory, most_of_budget, room_of


def spread(sizes: Sequence[int], room: int, moving: int = 0) -> frozenset[int]:
    """Choose the units that stay: the most bytes that fit, of sets at even distances.

    More room never keeps fewer bytes.

    Args:
        sizes: bytes of each unit, in the order of a pass.
        room: bytes of units that stay and, at a time, of `moving` others.
        moving: how many of the largest others come and go at a time.

    >>> sorted(spread([1, 1, 1, 1, 1, 1], 3))
    [0, 2, 4]
    """
    fitting = [
        stays
        for count in range(len(sizes), -1, -1)
        if most_nbytes(sizes, stays := _evenly(sizes, count), moving) <= room
    ]
    return max(fitting, key=lambda stays: sum(sizes[i] for i in stays), default=frozenset())


def _evenly(sizes: Sequence[int], count: int) -> frozenset[int]:
    """Choose about `count / len(sizes)` of all bytes, and at most one unit less."""
    stays, due = list[int](), 0
    for index in reversed(range(len(sizes))):
        due += count * sizes[index]
        if due >= len(sizes) * sizes[index]:
            due -= len(sizes) * sizes[index]
            stays.append(index)
    return frozenset(stays)


def most_nbytes(sizes: Sequence[int], stays: Iterable[int], moving: int) -> int:
    """The most bytes of a pass, an upper bound: units that stay, and the largest of the others."""
    kept = set(stays)
    others = sorted(size for index, size in enumerate(sizes) if index not in kept)
    return sum(sizes[i] for i in kept) + sum(others[len(others) - min(moving, len(others)) :])


@dataclass(frozen=True, slots=True)
class GatheredUnits:
    """The units of one module that are gathered as a whole, and what each holds unsharded.

    sizes: bytes of every unit of the module: its weights, and its gradients where they are summed.
    gathered: positions of those that are gathered as a whole.
    moving: how many that do not stay are unsharded at a time, at most.
    """

    sizes: tuple[int, ...]
    gathered: tuple[int, ...]
    moving: int

    @staticmethod
    def of(units: Sequence[UnitFacts], ahead: int, trains: Sequence[bool] = ()) -> GatheredUnits:
        """Describe units, of which `ahead` are gathered before they compute.

        Besides these and the unit that computes, one stays from its first to its last use: that of
        a weight which is tied to another module's, as an embedding to its head.

        Args:
            units: all units of a module.
            ahead: as in the module's policy.
            trains: True for units whose gradients rest beside their weights; default: none.
        """
        pairs = zip(units, trains or [False] * len(units), strict=True)
        sizes = tuple(facts.nbytes * (2 if trained else 1) for facts, trained in pairs)
        gathered = [i for i, unit in enumerate(units) if not (unit.is_resident or unit.is_tiled)]
        return GatheredUnits(sizes, tuple(gathered), ahead + 2)

    @property
    def everyone(self) -> frozenset[int]:
        """All units that are gathered as a whole."""
        return frozenset(self.gathered)

    def window(self, room: int) -> frozenset[int]:
        """Return the units that stay in `room` bytes, beside the gathered others."""
        stays = spread([self.sizes[i] for i in self.gathered], room, self.moving)
        return frozenset(self.gathered[i] for i in stays) if room > 0 else frozenset()

    def some(self, count: int) -> frozenset[int]:
        """Return so many units, or all, at even distances."""
        return frozenset(self.gathered[i] for i in spread([1] * len(self.gathered), count))

    def most(self, kept: frozenset[int]) -> int:
        """Return the most bytes of a pass that keeps some units, an upper bound."""
        stays = [at for at, index in enumerate(self.gathered) if index in kept]
        return most_nbytes([self.sizes[i] for i in self.gathered], stays, self.moving)

    def nbytes_of(self, indices: Iterable[int]) -> int:
        """Return the bytes of several units."""
        return sum(self.sizes[index] for index in indices)


def choose_windows(
    stages: Sequence[GatheredUnits], free: int, limit: int | None = None
) -> list[frozenset[int]]:
    """Choose the units of each stage module of a rank that stay through a step, in their order.

    A run measures the free memory when `onefold.pipeline` is called, a plan predicts it. Neither
    knows more: activations come later.

    Args:
        stages: the modules, which share the rank's memory.
        free: bytes that the rank may still take; a quarter is left for activations.
        limit: the most bytes of all windows; None: what fits.
    """
    room = room_of(free) if limit is None else min(room_of(free), limit)
    windows = list[frozenset[int]]()
    for stage in stages:
        windows.append(stage.window(room))
        room -= stage.nbytes_of(windows[-1])
    return windows


# a module that is sharded already


def memory_of(engine: Engine) -> RankMemory:
    """Return the memory of this rank, among the ranks of a module."""
    return RankMemory(engine.context.store.device, engine.recipe.local_world_size, engine.group)


def gathered_units(engine: Engine) -> GatheredUnits:
    """Return the units of a module, with the bytes of their weights."""
    return GatheredUnits.of(engine.schedule.units, engine.policy.prefetch)


def trained_units(engine: Engine) -> GatheredUnits:
    """Return the units of a module, with the bytes of their weights and gradients."""
    trains = [unit.requires_grad() for unit in engine.units]
    return GatheredUnits.of(engine.schedule.units, engine.policy.prefetch, trains)


def units_to_keep(engine: Engine, budget: int | None) -> frozenset[int]:
    """Choose the units that stay unsharded between evaluations; a collective where units move.

    `budget`: bytes of unsharded weights, at most; None: what fits.
    """
    if not engine.recipe.frees_after_forward:
        most_of_budget(budget)
        return frozenset()  # nothing is freed
    return gathered_units(engine).window(memory_of(engine).room_to_keep(budget))
