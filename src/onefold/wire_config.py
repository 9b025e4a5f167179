"""The wire as users choose it: `Wire`, its words and presets.

compose/routes.py makes transports (wire/) from a `Wire`.
"""

from dataclasses import dataclass, replace
from typing import Final, Literal, get_args

from onefold.config import Offload, Placement, Stage, check_word, nearest_word, value_of
from onefold.errors import ConfigError

EXACT: Final = "exact"
Codec = Literal["exact", "int8", "int4", "int8+h", "int4+h"]
"""The codec of a message (wire/codec.py)."""
CODECS: tuple[Codec, ...] = get_args(Codec)

DIFFERENCE = "-diff"
"""Suffix of a codec of weights: a message holds the change since the last gather."""

WeightCodec = Codec | Literal["int8-diff", "int4-diff"]
WEIGHT_CODECS: tuple[WeightCodec, ...] = (*CODECS, "int8-diff", "int4-diff")

_WITHOUT_BASE: dict[WeightCodec, Codec] = {"int8-diff": "int8", "int4-diff": "int4"}

Secondary = Literal["weights", "gradients", "optimizer"]
"""The state that rests inside the node, on a mesh of two axes; each word includes the former."""
SECONDARY: tuple[Secondary, ...] = get_args(Secondary)


@dataclass(frozen=True, slots=True)
class Wire:
    """Codecs of weights and gradients between ranks, and the state that rests inside a node.

    A codec is "exact" (the compute dtype; sums in fp32), "int8" or "int4". "int8+h" and "int4+h"
    rotate first, which spreads outliers (32-wide Hadamard). One codec means ("exact", codec) on a
    mesh of two axes, as the slow link decides; two are (inside the node, between nodes).

    Args:
        weights: codec of gathers (int8: qwZ). "int8-diff" and "int4-diff" send the change since the
            last gather into a replica that every rank keeps, so that the next message brings the
            part that rounding left out.
        gradients: codec of reductions (int8 or int4: qgZ).
        secondary: on a mesh of two axes, the state that rests inside the node at stage 3.
            "weights": a secondary shard of weights, from which forward and backward gather (hpZ).
            "gradients": also sums of micro-batches, so that nodes communicate once a step (HFSDP;
            the meaning of None there). At stage 2 it is the sums alone. "optimizer": all states;
            nodes are replicas of one another (HSDP, MiCS), at stages 1 to 3. False: nothing. True
            is "weights".
        feedback: keep the rounding error of quantized gradients, 4 bytes for each element sent, and
            add it to the next step's gradients.

    Sources: ZeRO++, arXiv 2306.10209, sections 3.1-3.3; SDP4Bit, arXiv 2410.15526, section 3 (the
    differences); MiCS, arXiv 2205.00119, section 3; EF-SGD, arXiv 1901.09847 (feedback).
    """

    weights: WeightCodec | tuple[WeightCodec, WeightCodec] = EXACT
    gradients: Codec | tuple[Codec, Codec] = EXACT
    secondary: Secondary | bool | None = None
    feedback: bool = False

    def __post_init__(self) -> None:
        for name, known in (("weights", WEIGHT_CODECS), ("gradients", CODECS)):
            codec = getattr(self, name)
            words = codec if isinstance(codec, tuple) else (codec,)
            if len(words) > 2 or not words:
                wanted = f"Wire.{name} to be one codec, or two: (inside the node, between nodes)"
                raise ConfigError(wanted, repr(codec), hint=f'Wire({name}=("exact", "int8"))')
            for word in words:
                check_word(f"Wire.{name}", word, known, f'Wire({name}="int8")')
        if self.weights_inside.endswith(DIFFERENCE):
            wanted = "differences of weights between nodes, where each step sends one"
            hint = 'Wire(weights=("exact", "int4-diff"))'
            raise ConfigError(wanted, f"Wire.weights={self.weights!r}", hint=hint)
        if self.feedback and not self.rounds_gradients:
            wanted = "quantized gradients for Wire.feedback, which keeps what they round off"
            hint = 'Wire(gradients="int8", feedback=True)'
            raise ConfigError(wanted, f"Wire.gradients={self.gradients!r}", hint=hint)
        if self.secondary not in (None, False, True, *SECONDARY):
            wanted = "Wire.secondary to be None, False, True or one of "
            wanted += f"{', '.join(map(repr, SECONDARY))}"
            hint = nearest_word(self.secondary, SECONDARY) or "None: as the mesh suggests"
            raise ConfigError(wanted, repr(self.secondary), hint=hint)

    @property
    def weights_inside(self) -> WeightCodec:
        """The codec of weights inside the node."""
        return self.weights[0] if isinstance(self.weights, tuple) else EXACT

    @property
    def weights_between(self) -> WeightCodec:
        """The codec of weights between nodes, or between all ranks where there is one axis."""
        return self.weights[-1] if isinstance(self.weights, tuple) else self.weights

    @property
    def gradients_inside(self) -> Codec:
        """The codec of gradients inside the node."""
        return self.gradients[0] if isinstance(self.gradients, tuple) else EXACT

    @property
    def gradients_between(self) -> Codec:
        """The codec of gradients between nodes, or between all ranks where there is one axis."""
        return self.gradients[-1] if isinstance(self.gradients, tuple) else self.gradients

    @property
    def rounds_gradients(self) -> bool:
        """True if gradients are quantized on some link."""
        return (self.gradients_inside, self.gradients_between) != (EXACT, EXACT)

    @property
    def kept(self) -> str:
        """The state that rests inside the node at stage 3, on a mesh of two axes; "" for none."""
        if isinstance(self.secondary, str):
            return self.secondary
        return {None: "gradients", True: "weights", False: ""}[self.secondary]

    @property
    def is_plain(self) -> bool:
        """True for exact messages on one axis."""
        return self in (Wire(), Wire(secondary=False))


Preset = Literal["exact", "hybrid", "replicas", "recommended", "zero++", "zero++diff"]
WireChoice = Preset | Wire | None

PRESETS: dict[str, Wire] = {
    "exact": Wire(),
    "hybrid": Wire(secondary="gradients"),
    "replicas": Wire(secondary="optimizer"),
    "recommended": Wire(weights="int8-diff", gradients=("exact", "int8")),
    "zero++": Wire(weights="int8", gradients=("int8+h", "int4+h")),
    "zero++diff": Wire(weights="int4-diff", gradients=("int8+h", "int4+h")),
}
"""Named wires, from exact to lossy; docs/measurements/wire.md has the bytes and the loss of each.

"hybrid" is HFSDP and "replicas" HSDP, exact. "recommended" sends a third of their bytes between
nodes: int8 differences of weights, int8 gradients. "zero++" is ZeRO++ as published, and nodes also
keep sums of micro-batches: int8 weights (qwZ, hpZ), int8/int4 gradients in two hops (qgZ), here
with a rotation. A name adapts to the mesh: on one axis no state rests for a node.
"""


def wire_of(choice: object) -> Wire:
    """Return the `Wire` that None, a preset's name or a `Wire` stands for."""
    return value_of(choice, Wire, PRESETS, "wire", 'wire="zero++", or Wire(gradients="int8")')


def fitted(wire: Wire, stage: Stage, *, has_axes: bool) -> Wire:
    """Adapt a named wire, or one on a mesh with an axis of 1, to a stage and a mesh.

    Without a secondary shard, weights travel whole instead of as differences to it.
    """
    is_whole = stage.parameter is not Placement.SHARD
    if has_axes:
        is_moot = is_whole and wire.secondary == "gradients"
        return replace(wire, secondary=None) if is_moot else wire
    weights = wire.weights_between
    if not is_whole:
        weights = _WITHOUT_BASE.get(weights, weights)
    return replace(wire, weights=weights, secondary=None)


def resolve_wire(
    wire: Wire, stage: Stage, offload: Offload, *, has_axes: bool, adapts: bool
) -> Wire:
    """Return the wire as a stage and a mesh have it; `ConfigError` for one that they cannot have.

    Args:
        adapts: a name, or a mesh with an axis of 1, may mean less here than elsewhere.
    """
    chosen = fitted(wire, stage, has_axes=has_axes) if adapts else wire
    check_wire(chosen, stage, offload, has_axes=has_axes)
    return chosen


def check_wire(wire: Wire, stage: Stage, offload: Offload, *, has_axes: bool) -> None:
    """Raise `ConfigError` for a wire that would mean nothing at this stage or on this mesh."""
    if wire.rounds_gradients and offload.step_in_backward:
        wanted = "exact gradients where units step inside backward: a step by others may have to "
        wanted += "be skipped, once all are known"
        got = f"Wire.gradients={wire.gradients!r} with Offload.step_in_backward"
        raise ConfigError(wanted, got, hint='gradients="exact", or step_in_backward=False')
    if wire.secondary == "optimizer" and offload.tile is not None:
        got = f"Offload.tile={offload.tile} with secondary='optimizer'"
        hint = 'secondary="gradients" has the same traffic between nodes'
        raise ConfigError("no tiled weights where nodes are replicas", got, hint=hint)
    if stage.optimizer is not Placement.SHARD and not wire.is_plain:
        wanted = "an exact wire at stage 0, which averages gradients whole on every rank"
        raise ConfigError(wanted, f"{wire}", hint="stage=1 sends no more bytes, and takes any wire")
    is_whole = stage.parameter is not Placement.SHARD
    if has_axes:
        _check_two_axes(wire, stage)
    else:
        _check_one_axis(wire, is_whole=is_whole)


def _check_one_axis(wire: Wire, *, is_whole: bool) -> None:
    if wire.secondary:
        wanted = "a mesh of two axes (nodes, ranks of a node) for Wire.secondary"
        hint = "mesh=init_device_mesh(device, (nodes, ranks)), or start one process a "
        hint += "GPU by torchrun on several machines"
        raise ConfigError(wanted, f"secondary={wire.secondary!r} on one axis", hint=hint)
    if wire.weights_between.endswith(DIFFERENCE) and not is_whole:
        got = f"Wire.weights={wire.weights_between!r} at stage 3 on one axis"
        hint = "stage=2, or a mesh of two axes, where each node keeps a secondary shard"
        raise ConfigError("weights that some rank keeps, to send differences to", got, hint=hint)


def _check_two_axes(wire: Wire, stage: Stage) -> None:
    is_whole = stage.parameter is not Placement.SHARD
    are_partial = wire.secondary == "gradients" and stage.gradient is Placement.PARTIAL
    if are_partial or (is_whole and wire.secondary in (True, "weights")):
        raise ConfigError(
            "stage 3 for a secondary shard of weights, stage 2 or 3 for one of gradients",
            f"secondary={wire.secondary!r} at a stage that keeps them whole on every rank",
            hint='secondary=None, or "optimizer" to keep all states inside the node',
        )
    if wire.secondary is False and wire.weights_between.endswith(DIFFERENCE) and not is_whole:
        got = f"Wire.weights={wire.weights_between!r} with secondary=False"
        hint = 'secondary="weights" or "gradients"'
        raise ConfigError(
            "a secondary shard inside the node, to send differences to", got, hint=hint
        )
    if wire.secondary == "optimizer" and wire.weights_between != EXACT:
        raise ConfigError(
            "exact weights where nodes are replicas: none travel between them",
            f"Wire.weights={wire.weights!r} with secondary='optimizer'",
            hint='Wire(weights=("int8", "exact"), secondary="optimizer") quantizes them inside',
        )
