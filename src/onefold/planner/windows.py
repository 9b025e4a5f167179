"""Choose the units that stay unsharded through a step of several micro-batches.

Pipelines, loops that keep weights, and plans of both have this one rule.

A run measures the free memory when `onefold.pipeline` is called, a plan predicts it. Neither knows
more: activations come later. Units that stay need room for their gradients, too, which rest until
the stage's last backward.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from onefold.engine.engine import Engine
from onefold.engine.keeping import choose
from onefold.engine.policy import UnitFacts
from onefold.planner.auto import room_of


@dataclass(frozen=True, slots=True)
class TrainedUnits:
    """The units of one module, which of them train, and how many are gathered ahead."""

    units: tuple[UnitFacts, ...]
    trains: tuple[bool, ...]
    ahead: int

    @staticmethod
    def of(engine: Engine) -> TrainedUnits:
        """Describe the units of a sharded module."""
        trains = tuple(unit.requires_grad() for unit in engine.units)
        return TrainedUnits(tuple(engine.schedule.units), trains, engine.policy.prefetch)

    def window(self, room: int) -> frozenset[int]:
        """Return the units that fit into `room` bytes, beside the gathered others."""
        units = [replace(unit, nbytes=self.nbytes(index)) for index, unit in enumerate(self.units)]
        return choose(units, room, self.ahead) if room > 0 else frozenset()

    def nbytes(self, index: int) -> int:
        """Return the bytes of a unit's unsharded weights and gradients."""
        return self.units[index].nbytes * (2 if self.trains[index] else 1)

    def nbytes_of(self, indices: Iterable[int]) -> int:
        """Return the bytes of several units' unsharded weights and gradients."""
        return sum(map(self.nbytes, indices))


def choose_windows(
    stages: Sequence[TrainedUnits], free: int, limit: int | None = None
) -> list[frozenset[int]]:
    """Choose the window of each stage module of a rank, in their order.

    Args:
        stages: the modules, which share the rank's memory.
        free: bytes that the rank may still take; a quarter is left for activations.
        limit: the most bytes of all windows; None: what fits.
    """
    room = room_of(free) if limit is None else min(room_of(free), limit)
    found = list[frozenset[int]]()
    for stage in stages:
        found.append(stage.window(room))
        room -= stage.nbytes_of(found[-1])
    return found
