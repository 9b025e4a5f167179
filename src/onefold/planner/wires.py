"""Which wires a plan tries, and what each means at a stage, as `onefold.shard` would have it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from onefold.config import Offload, placements_of
from onefold.errors import ConfigError, expected
from onefold.wire_config import PRESETS, Wire, check_wire, fitted, wire_of

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

    def at(self, stage: int, offload: Offload, *, ranks: int, nodes: int) -> tuple[Wire, int]:
        """The wire at a stage, and the ranks of a node if that is an axis of the mesh (else 0).

        `ConfigError` where `onefold.shard` would refuse it. A wire that asks for nothing is exact
        on one axis, as nothing tells it of nodes.
        """
        if ranks * nodes == 1:
            return Wire(), 0
        has_axes = ranks > 1 and nodes > 1 and not self.wire.is_plain
        placements = placements_of(stage)
        wire = fitted(self.wire, placements, has_axes=has_axes) if self.is_named else self.wire
        check_wire(wire, placements, offload, has_axes=has_axes)
        return wire, ranks if has_axes and stage > 0 else 0


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
