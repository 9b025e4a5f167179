"""Keep weights unsharded over the forwards of a generation or evaluation: `onefold.generating`.

Units that fit stay, chosen once. The others are gathered in every forward, as ever. They lie evenly
between the ones that stay, so that the compute of those hides their gathers. A cyclic walk finds
nothing in a cache of the units that were used last, so the choice is fixed.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from onefold.engine.engine import Engine
from onefold.engine.policy import UnitFacts
from onefold.engine.watch import in_backward
from onefold.errors import StateError, expected


@contextmanager
def keeping(engine: Engine, room: int) -> Iterator[None]:
    """Keep up to `room` bytes of unsharded weights, the same on every rank, between evaluations."""
    schedule = engine.schedule
    if schedule.forward_depth > 0 or in_backward():
        raise StateError(
            expected(
                "onefold.generating outside forward and backward",
                "a call from within one",
                where=f"rank {engine.group.rank}",
                hint="enter it before the module is called",
            )
        )
    if schedule.driven.keeps:
        yield
        return
    units, ahead = schedule.units, schedule.policy.prefetch
    kept = choose(units, room, ahead)
    if kept:
        engine.facts.note_kept(most_nbytes(units, kept, ahead))
    with engine.driven(keeps=kept):
        yield


def choose(units: Sequence[UnitFacts], room: int, ahead: int) -> frozenset[int]:
    """Choose as many units as fit into `room` bytes beside the others that are gathered."""
    gathered = gathered_units(units)
    for count in range(len(gathered), 0, -1):
        kept = frozenset(gathered[i * len(gathered) // count] for i in range(count))
        if most_nbytes(units, kept, ahead) <= room:
            return kept
    return frozenset()


def most_nbytes(units: Sequence[UnitFacts], kept: frozenset[int], ahead: int) -> int:
    """The most unsharded bytes of a forward, an upper bound.

    Besides kept units: the unit that computes, `ahead` next ones, and one whose weight is tied to
    another module's, as an embedding to its head, and which stays from the first to the last use.
    """
    others = sorted(units[i].nbytes for i in gathered_units(units) if i not in kept)
    return sum(units[i].nbytes for i in kept) + sum(others[-(ahead + 2) :])


def gathered_units(units: Sequence[UnitFacts]) -> list[int]:
    """Return the units that are gathered as a whole."""
    return [i for i, unit in enumerate(units) if not (unit.is_resident or unit.is_tiled)]
