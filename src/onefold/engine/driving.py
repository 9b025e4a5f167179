"""What goes into a schedule and what comes out: choices of its driver, and actions.

Actions are executed on tensors, on byte counters or on clocks. The choices of whoever drives are
one frozen value for the events that follow.

A plain loop drives by the default. `onefold.accumulate`, `generating`, `unsharded`, a pipeline,
layered order and the planner's replay hand over other values, each at a boundary between two events
(`Schedule.drive`). No torch here.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from enum import IntEnum, auto


class Verb(IntEnum):
    """One thing to do with one unit; with `NO_UNIT`, with none."""

    FETCH = auto()  # bring this rank's rows near, if they rest in another tier
    FILL = auto()  # begin to fill the node's secondary shard of weights
    GATHER = auto()  # begin to gather the unsharded weights
    SHOW = auto()  # wait for that gather, let modules see unsharded parameters
    HIDE = auto()  # let modules see sharded parameters again
    FREE = auto()  # hide, and free the unsharded weights
    INVALIDATE = auto()  # hide; unsharded weights may not be read until the next gather
    REDUCE = auto()  # begin the reduction of gradients
    LAND = auto()  # wait for its first hop
    KEEP_SUMS = auto()  # the node's sums rest until the last micro-batch
    FOLLOW = auto()  # show the averaged gradient, or begin the second hop
    FINISH = auto()  # wait for the second hop, show the averaged gradient
    WAIT_STEP = auto()  # wait for the background step of the unit
    STEP = auto()  # begin the step of the unit in the background
    REST = auto()  # no message follows for now: free the buffers kept for the next


Action = tuple[Verb, int]

NO_UNIT = -1


@dataclass(frozen=True, slots=True, kw_only=True)
class Drive:
    """The choices of a driver.

    keeps: units that stay unsharded between forwards and backwards.
    frees_in_backward: units that `keeps` leaves out are freed as backward leaves them, not at once.
    rests: units whose gradients wait on their rank until the driver starts reductions.
    accumulates: the caller says that the micro-batch is not the last one of a step.
    reduces_later: the driver itself starts the reductions of its micro-batches, at their end.
    walks_apart: micro-batches of one step are interleaved: each backward is that of one forward,
        and a forward that trains does not end `keeps`.
    repeats: another micro-batch walks the units of the one before.
    more_to_come: this backward may reach calls of any unit that have not begun.
    joins_backwards: several backwards of autograd are one, which the driver ends.
    is_suspended: modules show editable unsharded parameters, and events decide nothing.
    is_plain: micro-batches run one after the other, each forward before its backward.
    is_last: the micro-batch is the last one that adds to the gradients of a step.
    """

    keeps: frozenset[int] = frozenset()
    frees_in_backward: bool = False
    rests: frozenset[int] = frozenset()
    accumulates: bool = False
    reduces_later: bool = False
    walks_apart: bool = False
    repeats: bool = False
    more_to_come: bool = False
    joins_backwards: bool = False
    is_suspended: bool = False
    is_plain: bool = field(init=False)
    is_last: bool = field(init=False)

    def __post_init__(self) -> None:
        more = self.walks_apart or self.repeats or self.more_to_come or self.joins_backwards
        object.__setattr__(self, "is_plain", not more)
        object.__setattr__(self, "is_last", not (self.accumulates or self.reduces_later))


@dataclass(frozen=True, slots=True)
class StageDrives:
    """The values by which a pipeline drives one stage through a step.

    before: between two steps of the schedule.
    step: from the begin of a step; a backward that infers shapes has no gradients to reduce.
    backward: a whole backward of one micro-batch.
    split: a backward of inputs or of weights alone.
    end: the stage's last backward is over, and what rests is reduced.
    """

    before: Drive
    step: Drive
    backward: Drive
    split: Drive
    end: Drive

    @staticmethod
    def for_windows(
        caller: Drive, num_units: int, window: frozenset[int], *, splits: bool = False,
        reduces_all: bool = False, trains: bool = True,
    ) -> StageDrives:  # fmt: skip
        """Return the values for a step inside `caller`'s that keeps the units of `window`.

        `splits`: backwards of inputs and of weights run apart, so a reduction of other units could
        not start before their backward of weights is over. `reduces_all`: every backward reduces
        the window's units, too.
        """
        everything = frozenset(range(num_units))
        resting = everything if splits else frozenset[int]() if reduces_all else window
        before = replace(caller, keeps=frozenset())
        step = replace(
            before, keeps=window, rests=everything, walks_apart=True, reduces_later=trains
        )
        backward, split = replace(step, rests=resting), replace(step, keeps=everything)
        return StageDrives(before, step, backward, split, replace(before, rests=resting))
