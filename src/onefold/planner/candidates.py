"""The stages, tiers and wires that a plan tries."""

from __future__ import annotations

from dataclasses import dataclass, replace

from onefold.config import Offload
from onefold.errors import ConfigError
from onefold.recipe import Recipe
from onefold.wire_config import EXACT, PRESETS, Wire, resolve_wire, wire_of

WAYS: tuple[tuple[int, str], ...] = (
    (0, "none"), (1, "none"), (2, "none"), (3, "none"),
    (1, "optimizer"), (2, "optimizer"), (3, "optimizer"), (3, "cpu"), (3, "disk"),
)  # fmt: skip
"""Stages and offloads, from the fastest to the one that needs least memory."""

OFFLOADS = {
    "none": Offload(),
    "optimizer": Offload(optimizer="cpu"),
    "cpu": Offload(optimizer="cpu", parameters="cpu"),
    "disk": Offload(optimizer="disk", parameters="disk", disk="."),
}
"""The tiers by the words of `--offload`. A plan needs no folder."""

EXACT_NAMES = ("exact", "hybrid", "replicas")
"""The presets that "auto" chooses from: they send every number as it is."""


@dataclass(frozen=True, slots=True)
class Candidate:
    """A wire of the request; a preset adapts to the stage and the mesh."""

    name: str  # a preset's, or the repr of another `Wire`
    wire: Wire
    adapts: bool = True

    @property
    def is_preset(self) -> bool:
        """True if `onefold train --wire` knows it."""
        return self.name in PRESETS

    @property
    def is_lossy(self) -> bool:
        """True if a message is quantized."""
        wire = self.wire
        return wire.rounds_gradients or {wire.weights_inside, wire.weights_between} != {EXACT}

    def fit(self, recipe: Recipe) -> Recipe:
        """Put the wire into a recipe; `ConfigError` where `onefold.shard` would refuse it.

        Nodes are an axis of the mesh where the wire asks for them.
        """
        if recipe.world_size == 1:
            return replace(recipe, wire=Wire(), has_axes=False)
        near = recipe.local_world_size
        has_axes = 1 < near < recipe.world_size and not self.wire.is_plain
        wire = resolve_wire(
            self.wire, recipe.stage, recipe.offload, has_axes=has_axes, adapts=self.adapts
        )
        return replace(recipe, wire=wire, has_axes=has_axes and recipe.is_sharded)


EXACT_WIRE = Candidate(EXACT, Wire())


def candidates(choice: object, *, nodes: int) -> tuple[Candidate, ...]:
    """Return the wires to try: for "auto" on several nodes all exact presets."""
    if choice == "auto":
        names = EXACT_NAMES if nodes > 1 else EXACT_NAMES[:1]
        return tuple(Candidate(name, PRESETS[name]) for name in names)
    if isinstance(choice, str) and choice not in PRESETS:
        hint = "wire='auto' compares all presets"
        words = f"wire to be auto, {', '.join(PRESETS)} or a Wire"
        raise ConfigError(words, repr(choice), hint=hint)
    wire = wire_of(choice)
    name = next((name for name, preset in PRESETS.items() if preset == wire), repr(wire))
    return (Candidate(name, wire, adapts=not isinstance(choice, Wire)),)


def lossy() -> tuple[Candidate, ...]:
    """Return the presets with quantized messages. A plan compares them; people choose them."""
    every = (Candidate(name, wire) for name, wire in PRESETS.items())
    return tuple(candidate for candidate in every if candidate.is_lossy)
