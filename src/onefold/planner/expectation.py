"""Bytes without a forward: of a sharded module's states, and of a model that cannot be traced.

There the shapes of matrices decide. A product keeps its input and makes an output, which the next
operation keeps. So a weight [out, in] keeps t x (in + out) elements of t tokens, and costs
2 x t x in x out FLOPs in forward and twice that in backward. The estimate knows nothing of scores
of attention, convolutions, dropout, or modules that are called more than once. `Plan.estimates`
says that it was used.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import prod

from torch import nn

from onefold.config import Precision, stage_of
from onefold.layout.units import UnitPlan
from onefold.planner.candidates import OFFLOADS, WAYS
from onefold.planner.memory import forecast
from onefold.planner.replay import plain_events
from onefold.planner.trace import Trace
from onefold.planner.work import UnitWork, Work
from onefold.recipe import Member, Recipe, UnitRecipe
from onefold.text import format_bytes


def estimated(plans: Sequence[UnitPlan], tokens: int, precision: Precision) -> Trace:
    """Estimate the activations and the work of `tokens` tokens of one micro-batch."""
    units: list[UnitWork] = []
    kept: list[int] = []
    for plan in plans:
        members = tuple(
            Member.of(owned.fqn, owned.parameter, precision, is_packed=owned.is_packed)
            for owned in plan.members
        )
        nbytes = flops = 0
        for member, owned in zip(members, plan.members, strict=True):
            is_table = any(isinstance(owner, nn.Embedding) for owner, _ in owned.owners)
            if len(member.shape) == 2:
                width = member.shape[1] if is_table else sum(member.shape)
                nbytes += member.compute_itemsize * width
                flops += 0 if is_table else 2 * prod(member.shape)
        work = float(tokens * flops)
        units.append(_unit(plan.name, members, Work(work), Work(2 * work)))
        kept.append(tokens * nbytes)
    joined = [index > 0 and plan.joins(plans[index - 1]) for index, plan in enumerate(plans)]
    return _trace(units, kept, 8 * tokens, joined)


def bare(units: Sequence[UnitRecipe]) -> Trace:
    """Trace a micro-batch without activations: only the engine's own bytes, which are exact."""
    works = [
        replace(_unit(unit.name, unit.members, Work(), Work()), data_ranks=unit.ranks)
        for unit in units
    ]
    # a unit with a mesh of its own is a part of the block before, which stays unsharded around it
    joined = [unit.is_joined or (i > 0 and unit.ranks > 0) for i, unit in enumerate(units)]
    return _trace(works, [0] * len(works), 0, joined)


def _unit(name: str, members: tuple[Member, ...], forward: Work, backward: Work) -> UnitWork:
    return UnitWork(name, sum(member.numel for member in members), forward, backward, members)


def _trace(units: list[UnitWork], kept: list[int], batch_nbytes: int, joined: list[bool]) -> Trace:
    trained = [[i for i, member in enumerate(u.members) if member.requires_grad] for u in units]
    return Trace(tuple(units), tuple(plain_events(kept, trained, joined)), batch_nbytes, 0)


# the bytes that an engine should hold


def needs_of(recipe: Recipe, *, micro_batches: int = 1) -> dict[str, int]:
    """Return the most bytes of each memory on the rank with the largest share.

    Activations are left out. Where the CPU computes, "cpu" counts the bytes of "device", too.
    """
    step = forecast(bare(recipe.units), recipe, accumulate=micro_batches)
    if recipe.device_type == "cpu":
        return {"cpu": step.memory_nbytes, "disk": step.peaks.get("disk", 0)}
    return {tier: step.peaks.get(tier, 0) for tier in ("device", "cpu", "disk")}


@dataclass(frozen=True, slots=True)
class Expectation:
    """The bytes that an engine should hold. It keeps numbers, no parameter."""

    trace: Trace  # without activations
    recipe: Recipe
    rank: int | None = None  # whose share is expected; None: the largest

    @staticmethod
    def of(recipe: Recipe, rank: int | None = None) -> Expectation:
        """Make the expectation of a module that is about to be sharded."""
        return Expectation(bare(recipe.units), recipe, rank if recipe.shares else None)

    def peaks(self, *, accumulates: bool) -> dict[str, int]:
        """Return the most bytes of each kind in CPU and device memory, and of all ("all")."""
        step = forecast(self.trace, self.recipe, accumulate=2 if accumulates else 1, rank=self.rank)
        kinds: dict[str, int] = {}
        for (kind, tier), nbytes in step.most.items():
            if tier != "disk":
                kinds[kind] = kinds.get(kind, 0) + nbytes
        return kinds | {"all": step.peaks["device"] + step.peaks.get("cpu", 0)}

    def smallest_change(self, shortage: int) -> str:
        """Describe the nearest way to train that holds `shortage` bytes less."""
        mine = self.recipe
        now = forecast(self.trace, mine).memory_nbytes
        for number, name in WAYS:
            other = replace(mine, stage=stage_of(number), offload=OFFLOADS[name])
            if number < mine.stage.number or other == mine:
                continue
            saved = now - forecast(self.trace, other).memory_nbytes
            if saved >= shortage:
                word = "disk:PATH" if name == "disk" else name
                tiers = f', offload="{word}"' if name != "none" else ""
                return f"stage={number}{tiers} holds {format_bytes(saved)} less"
        return "smaller micro-batches, recompute or more ranks: states alone cannot give as much"
