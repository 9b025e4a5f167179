"""GradientPhase: where the gradients of one unit are, between backward and the optimizer's step.

    phase       began by                         what it carries, beside partial gradients
    RESTING     a mean that is shown, or none    nothing is on its way
    SENT        `start_reduce`                   the first hop: its ticket is the executor's
    LANDED      the end of the first hop         the `Landed` of that hop, all rows in place
    FOLLOWING   `follow`, over two hops          the ticket of the second hop
    LATE        the last hop, or a tile's use    the `Landed` whose mean is to be shown
    CONSUMED    `consume`, a step in backward    no gradient: reading one is a `StateError`
    DISCARDING  `discard`, a failed backward     tickets of both hops, whose results are dropped

One rank alone goes from SENT to RESTING, as its partial gradient is the mean. Sums that rest in a
node (`keep_sums`) go from LANDED to RESTING. A unit that is CONSUMED has nothing on its way, so a
failed backward leaves it as it is. See docs/adr/0005.
"""

from __future__ import annotations

from enum import Enum, auto

from onefold.errors import StateError
from onefold.unit.context import UnitSpec


class GradientPhase(Enum):
    """The phases of a unit's gradients, each with those that may come `next`."""

    next: tuple[GradientPhase, ...]  # of few: a search by identity, which calls no hash

    RESTING = auto()
    SENT = auto()
    LANDED = auto()
    FOLLOWING = auto()
    LATE = auto()
    CONSUMED = auto()
    DISCARDING = auto()

    def not_next(self, phase: GradientPhase, spec: UnitSpec) -> StateError:
        """The error for a `phase` that may not come now."""
        may = ", ".join(other.name for other in self.next)
        wanted = f"{may} as the next phase of the gradients of unit {spec.name!r}"
        got = f"{phase.name}, while they are {self.name}"
        hint = "this is a fault of Onefold: please report it, with the actions of the step"
        return StateError(wanted, got, hint=hint, where=spec.context.where)


def _may_come_next(phase: GradientPhase, *others: GradientPhase) -> None:
    phase.next = others


_P = GradientPhase
_may_come_next(_P.RESTING, _P.SENT, _P.LATE, _P.CONSUMED, _P.DISCARDING)
_may_come_next(_P.SENT, _P.LANDED, _P.RESTING, _P.DISCARDING)
_may_come_next(_P.LANDED, _P.FOLLOWING, _P.LATE, _P.RESTING, _P.DISCARDING)
_may_come_next(_P.FOLLOWING, _P.LATE, _P.DISCARDING)
_may_come_next(_P.LATE, _P.RESTING, _P.LATE, _P.DISCARDING)
_may_come_next(_P.CONSUMED, _P.RESTING)
_may_come_next(_P.DISCARDING, _P.RESTING)
