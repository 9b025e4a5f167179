"""The parts of a model that axes cut: blocks, heads, experts, and the width between blocks."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from onefold.errors import ConfigError

if TYPE_CHECKING:
    from torch import nn

    from onefold.planner.planned_axes import ModelAxes
    from onefold.planner.work import UnitWork

HEADS = ("num_attention_heads", "num_heads", "n_head", "n_heads")
KV_HEADS = ("num_key_value_heads", "num_kv_heads", "n_kv_heads")
ACTIVE = ("num_experts_per_tok", "num_experts_per_token", "moe_top_k", "top_k")
"""Names under which configurations and modules keep these numbers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Anatomy:
    """The parts of a model; 0 and empty: none, or not known.

    blocks: names of the blocks in the order of the model; a unit has the name of its block.
    width: elements of a token between blocks.
    heads, kv_heads: of attention, and of its keys and values.
    tied: names of parameters that modules of several units use.
    experts, active: experts of a block, and how many of them compute a token.
    """

    blocks: tuple[str, ...] = ()
    width: int = 0
    heads: int = 0
    kv_heads: int = 0
    tied: frozenset[str] = frozenset()
    experts: int = 0
    active: int = 1

    @staticmethod
    def of(module: nn.Module, units: Sequence[UnitWork]) -> Anatomy:
        """Read a module, whose values are not needed, and the units of its trace."""
        from onefold.layout.module_tree import ModuleTree
        from onefold.layout.units import owned_parameters, repeated_blocks

        blocks = repeated_blocks(module)
        names = {part: name for name, part in module.named_modules()}
        found = Anatomy(blocks=tuple(names[block] for block in blocks))
        shapes = [m.shape for u in units if found.block_of(u.name) == 0 for m in u.members]
        lengths = Counter(length for shape in shapes for length in shape)
        experts = {n for u in units for m in u.members if (n := expert_count(m.fqn, m.shape))}
        heads = _number(module, blocks, HEADS)
        return Anatomy(
            blocks=found.blocks,
            width=max(lengths, key=lambda length: (lengths[length], -length), default=0),
            heads=heads,
            kv_heads=_number(module, blocks, KV_HEADS) or heads,
            tied=frozenset(
                o.fqn for o in owned_parameters(ModuleTree.of(module)) if len(o.owners) > 1
            ),
            experts=max(experts, default=0),
            active=_number(module, blocks, ACTIVE) or 1,
        )

    def block_of(self, unit: str) -> int:
        """Return the position of a unit's block; -1: it belongs to none."""
        name = unit.partition(" (")[0]
        return self.blocks.index(name) if name in self.blocks else -1

    def check(self, axes: ModelAxes) -> None:
        """Raise `ConfigError` where the model has not enough parts for the axes."""
        num_blocks, heads = len(self.blocks), self.heads
        blocks = (
            (num_blocks > 0, "a model of repeated blocks beside tp, pp, cp or ep", "none",
             "repeated blocks lie in a ModuleList or Sequential"),
            (axes.num_pieces <= num_blocks, f"at most {num_blocks} pipeline stages: one a block",
             f"pp {axes.pp} x virtual {axes.virtual}", "fewer stages, or a deeper model"),
        )  # fmt: skip
        sizes = [
            (size <= heads or not heads, f"{name} of at most {heads} heads", f"{name} {size}",
             "a rank needs a head of attention")
            for name, size in (("tp", axes.tp), ("cp", axes.cp))
        ]  # fmt: skip
        experts = (
            (self.experts > 0, "a model with experts beside ep", "a model without",
             "experts lie in modules named `experts`"),
            (axes.ep <= self.experts, f"ep of at most {self.experts} experts", f"ep {axes.ep}",
             "a rank needs an expert"),
        )  # fmt: skip
        for holds, what, got, hint in (*blocks, *sizes, *(experts if axes.ep > 1 else ())):
            if not holds:
                raise ConfigError(what, got, hint=hint)

    def estimates(self, axes: ModelAxes) -> tuple[str, ...]:
        """Say what a plan with these axes takes for granted."""
        found: list[str] = []
        if axes.tp > 1:
            found.append(
                "tp cuts every matrix, and norms and residuals along the sequence; without the "
                "latter a rank holds more"
            )
        if axes.tp > 1 and self.heads % axes.tp:
            found.append(
                f"tp {axes.tp} does not divide {self.heads} heads: the fullest rank counts"
            )
        for name, size in (("tp", axes.tp), ("cp", axes.cp)):
            if size > self.kv_heads > 0:
                kv = f"{self.kv_heads} heads of keys and values"
                found.append(f"{name} {size} is more than {kv}: their copies are not counted")
        if axes.cp > 1:
            found.append("attention on cp is an all-to-all of heads; its masks are not counted")
        if axes.pp > 1:
            kind = "1F1B" if axes.virtual == 1 else f"interleaved, {axes.virtual} pieces a rank"
            found.append(f"the pipeline's schedule is {kind}, and its blocks are cut evenly")
        if axes.ep > 1:
            found.append(f"tokens reach all experts alike, {self.active} of {self.experts} each")
        return tuple(found)


def expert_count(fqn: str, shape: tuple[int, ...]) -> int:
    """Return how many experts a parameter's name or shape tells of; 0: it belongs to none.

    A list of experts tells its position and one more: the last expert tells the number.
    """
    _, found, rest = f".{fqn}".partition(".experts.")
    if not found:
        return 0
    first = rest.partition(".")[0]
    return int(first) + 1 if first.isdecimal() else shape[0] if len(shape) > 2 else 0


def _number(module: nn.Module, blocks: Sequence[nn.Module], names: Sequence[str]) -> int:
    """Return the first whole number under one of the names, in a configuration or a block."""
    for place in _places(module, blocks):
        for name in names:
            value = getattr(place, name, None)
            if isinstance(value, int) and not isinstance(value, bool) and value > 0:
                return value
    return 0


def _places(module: nn.Module, blocks: Sequence[nn.Module]) -> Iterator[Any]:
    config = getattr(module, "config", None)
    yield config
    yield getattr(config, "text_config", None)
    for block in blocks[:1]:
        yield from block.modules()
