"""What the parts of a step do not add up to: two constants from whole steps of the measured model.

Collectives were measured alone, by threads that had nothing else to do. In a step they are begun
and waited for between kernels, and take the cores from them: each has its `crowding` on top, the
same for few bytes and for many. And every step has something `around` it that is no kernel and no
message, as memory that is given back and fetched anew. Steps of few and of many collectives tell
one from the other.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from onefold.planner.calibration import Speeds, Whole
from onefold.planner.run import Run
from onefold.planner.simulate import simulate
from onefold.planner.work import ModelWork

MOST_CROWDING = 0.1
"""Seconds of one collective: more than any system's scheduler lets it wait."""
HALVINGS = 40


def with_whole_steps(speeds: Speeds, work: ModelWork) -> Speeds:
    """`speeds` whose constants give its measured whole steps of `work`, as far as they can.

    Without collectives `around` is what is left of the step. With them it is what is left of the
    step with the fewest, and `crowding` is that at which the step with the most fits.
    """
    if not speeds.wholes:
        return speeds
    few, many = speeds.wholes[0], speeds.wholes[-1]

    def at(crowding: float) -> Speeds:
        crowded = replace(speeds, crowding=crowding, around=0.0)
        return replace(crowded, around=max(0.0, few.seconds - told(crowded, work, few)))

    if few is many:
        return at(0.0)
    return at(_root(lambda crowding: told(at(crowding), work, many) - many.seconds))


def told(speeds: Speeds, work: ModelWork, whole: Whole) -> float:
    """Seconds that the simulator gives one of the measured steps."""
    itemsize = 2 if speeds.dtype == "bf16" else 4
    run = Run(
        whole.stage, speeds.ranks, ranks_per_node=speeds.ranks, dtype=speeds.dtype,
        weight_itemsize=itemsize, grad_itemsize=itemsize, accumulate=whole.accumulate,
    )  # fmt: skip
    return simulate(work, run, speeds.machine(speeds.ranks, 1.0)).seconds


def _root(rising: Callable[[float], float]) -> float:
    """Where a rising function is 0, between 0 and `MOST_CROWDING`; the end that is nearer."""
    low, high = 0.0, MOST_CROWDING
    if rising(low) >= 0:
        return low
    for _ in range(HALVINGS):
        middle = (low + high) / 2
        low, high = (middle, high) if rising(middle) < 0 else (low, middle)
    return high
