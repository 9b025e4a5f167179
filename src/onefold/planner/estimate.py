"""A trace without a forward: where a model cannot be traced, its matrices tell what it keeps.

A product keeps its input and makes an output, which the next operation keeps: for a weight
[out, in] and t tokens that is t x (in + out) elements, and 2 x t x in x out FLOPs forward, twice
that backward. It is an estimate, and `Plan.estimates` says so: it knows nothing of scores of
attention, convolutions, dropout, or modules that are called more than once.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

from torch import nn

from onefold.config import Precision
from onefold.layout.units import UnitPlan
from onefold.planner.trace import Event, Heard, Tally, Trace, UnitTrace
from onefold.recipe import Member, UnitRecipe


def estimated(plans: Sequence[UnitPlan], tokens: int, precision: Precision) -> Trace:
    """Estimate what `tokens` tokens of one micro-batch keep and compute, from shapes alone."""
    traced: list[UnitTrace] = []
    kept: list[int] = []
    for plan in plans:
        members: list[Member] = []
        elements = flops = 0
        for owned in plan.members:
            member = Member.of(owned.fqn, owned.parameter, precision)
            members.append(member)
            shape, itemsize = member.shape, member.compute_itemsize
            is_table = any(isinstance(owner, nn.Embedding) for owner, _ in owned.owners)
            if len(shape) == 2:
                elements += itemsize * (shape[1] if is_table else sum(shape))
                flops += 0 if is_table else 2 * prod(shape)
        work = float(tokens * flops)
        traced.append(UnitTrace(plan.name, tuple(members), Tally(work), Tally(2 * work)))
        kept.append(tokens * elements)
    return Trace(tuple(traced), tuple(_events(traced, kept)), 8 * tokens, 0)


def bare(units: Sequence[UnitRecipe]) -> Trace:
    """Trace a micro-batch without activations: only the engine's own bytes, which are exact."""
    traced = [UnitTrace(unit.name, unit.members) for unit in units]
    return Trace(tuple(traced), tuple(_events(traced, [0] * len(traced))), 0, 0)


def _events(units: list[UnitTrace], kept: list[int]) -> list[Event]:
    """Units forward in order, then backward; each keeps its bytes from one pass to the other."""
    events: list[Event] = []
    now = 0
    for index, nbytes in enumerate(kept):
        events.append(Event(Heard.ENTER, index, index, now, now, 0))
        now += nbytes
        events.append(Event(Heard.LEAVE, index, index, now, now, 0))
        events.append(Event(Heard.EXPECT, index, index, now, now, 0))
    events.append(Event(Heard.END_FORWARD, -1, -1, now, now, 0))
    before = now
    for index in reversed(range(len(units))):
        events.append(Event(Heard.BACKWARD, index, index, now, before, 0))
        for member, each in enumerate(units[index].members):
            if each.requires_grad:
                events.append(Event(Heard.GRAD, index, member, now, now, 0))
        before, now = now, now - kept[index]
    events.append(Event(Heard.END, -1, -1, 0, before, 0))
    return events
