"""Fit two constants to full steps of the measured model, as its parts do not add up to a step.

Collectives were measured alone. In a step they begin and end between kernels and compete for the
cores: each takes `overlap_penalty` seconds more, for any number of bytes. Each step also spends
`step_overhead` seconds outside of kernels and messages, as for memory that is freed and mapped
again. Steps with few and with many collectives tell the two apart.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from onefold.config import stage_of
from onefold.planner.calibration import Speeds, Whole
from onefold.planner.conditions import Conditions
from onefold.planner.simulate import simulate
from onefold.planner.work import ModelWork
from onefold.recipe import Recipe

MOST_PENALTY = 0.1
"""Seconds of one collective: longer than any scheduler makes it wait."""
HALVINGS = 40


def with_whole_steps(speeds: Speeds, work: ModelWork) -> Speeds:
    """Fit `speeds` to its measured full steps of `work`, as closely as the constants allow.

    `step_overhead` is the rest of the step with the fewest collectives. `overlap_penalty` makes
    the step with the most collectives fit; a lone rank has none.
    """
    if not speeds.wholes:
        return speeds
    few, many = speeds.wholes[0], speeds.wholes[-1]

    def at(overlap_penalty: float) -> Speeds:
        slowed = replace(speeds, overlap_penalty=overlap_penalty, step_overhead=0.0)
        rest = few.seconds - predict_seconds(slowed, work, few)
        return replace(slowed, step_overhead=max(0.0, rest))

    if few is many:
        return at(0.0)
    return at(
        _root(
            lambda overlap_penalty: predict_seconds(at(overlap_penalty), work, many) - many.seconds
        )
    )


def predict_seconds(speeds: Speeds, work: ModelWork, whole: Whole) -> float:
    """Simulate one of the measured steps."""
    itemsize = 2 if speeds.dtype == "bf16" else 4
    ranks = speeds.ranks
    recipe = Recipe(stage=stage_of(whole.stage), world_size=ranks, local_world_size=ranks)
    conditions = Conditions(
        accumulate=whole.accumulate, dtype=speeds.dtype, weight_itemsize=itemsize,
        grad_itemsize=itemsize,
    )  # fmt: skip
    return simulate(work, recipe, speeds.machine(ranks, 1.0), conditions).seconds


def _root(rising: Callable[[float], float]) -> float:
    """Find where a rising function is 0 between 0 and `MOST_PENALTY`, or the nearer end."""
    low, high = 0.0, MOST_PENALTY
    if rising(low) >= 0:
        return low
    for _ in range(HALVINGS):
        middle = (low + high) / 2
        low, high = (middle, high) if rising(middle) < 0 else (low, middle)
    return high
