"""The wires that a plan tries, each adapted to a recipe as `onefold.shard` would adapt it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from onefold.errors import ConfigError, expected
from onefold.recipe import Recipe
from onefold.wire_config import PRESETS, Wire, resolve_wire, wire_of

EXACT_NAMES = ("exact", "hybrid", "replicas")
"""What "auto" chooses from: all of them send every number as it is."""


@dataclass(frozen=True, slots=True)
class Candidate:
    """A wire as it is asked for; a name means what of it a stage and a mesh have."""

    name: str  # a preset's, or the repr of a `Wire` that is none
    wire: Wire
    is_named: bool = True

    @property
    def is_preset(self) -> bool:
        """True if `onefold train --wire` knows it."""
        return self.name in PRESETS

    @property
    def is_lossy(self) -> bool:
        """True if some message is coded."""
        wire = self.wire
        return wire.rounds_gradients or (wire.weights_inside, wire.weights_between) != (
            "exact", "exact")  # fmt: skip

    def fit(self, recipe: Recipe) -> Recipe:
        """Put the wire into a recipe; `ConfigError` where `onefold.shard` would refuse it.

        Nodes are an axis of the mesh where the wire asks for them: an exact wire on one axis does
        not know nodes.
        """
        if recipe.world_size == 1:
            return replace(recipe, wire=Wire(), has_axes=False)
        near = recipe.local_world_size
        has_axes = 1 < near < recipe.world_size and not self.wire.is_plain
        wire = resolve_wire(
            self.wire, recipe.stage, recipe.offload, has_axes=has_axes, adapts=self.is_named
        )
        return replace(recipe, wire=wire, has_axes=has_axes and recipe.is_sharded)


def candidates(choice: object, *, nodes: int) -> tuple[Candidate, ...]:
    """What is tried: of "auto" on several nodes all exact presets, else what was asked for."""
    if choice == "auto":
        names = EXACT_NAMES if nodes > 1 else EXACT_NAMES[:1]
        return tuple(Candidate(name, PRESETS[name]) for name in names)
    if isinstance(choice, str) and choice not in PRESETS:
        raise ConfigError(
            expected(f"wire to be auto, {', '.join(PRESETS)} or a Wire", repr(choice),
                     hint="auto tells of all of them")
        )  # fmt: skip
    wire = wire_of(choice)
    name = next((name for name, each in PRESETS.items() if each == wire), repr(wire))
    return (Candidate(name, wire, is_named=not isinstance(choice, Wire)),)


def lossy() -> tuple[Candidate, ...]:
    """The coded presets: what they would give is told, and left to people."""
    every: Sequence[Candidate] = [Candidate(name, wire) for name, wire in PRESETS.items()]
    return tuple(each for each in every if each.is_lossy)
