"""Sums over what plans predict, for comparisons with what runs do."""

from __future__ import annotations

from onefold.app.train.memory_table import MeasuredMemory
from onefold.planner.memory import Forecast
from onefold.planner.simulate import StepTime
from onefold.planner.trace import Trace


def most_of(found: Forecast, kind: str) -> int:
    """The most bytes of one kind, over all tiers."""
    return sum(nbytes for (held_kind, _), nbytes in found.most.items() if held_kind == kind)


def peak_of(seen: Trace) -> int:
    """The most bytes that torch holds besides parameters and their gradients."""
    return max(event.peak for event in seen.events)


def sent_for(step: StepTime, what: str) -> float:
    """Bytes that one rank sends in a step for a purpose: "gather", "reduce" ..."""
    return sum(span.nbytes for span in step.spans if span.what == what)


def is_equal(memory: MeasuredMemory) -> bool:
    """True if every kind of resting state equals the closed form, to the byte."""
    return all(memory.held(kind) == nbytes for kind, nbytes in memory.expected.items())
