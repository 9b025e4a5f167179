"""The bytes that a sharded module should hold: for choices before it is built, and its report."""

from __future__ import annotations

from dataclasses import dataclass, replace

from onefold.config import stage_of
from onefold.planner.candidates import OFFLOADS, WAYS
from onefold.planner.estimate import bare
from onefold.planner.memory import forecast
from onefold.planner.trace import Trace
from onefold.recipe import Recipe
from onefold.text import format_bytes


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
