"""The axes of a composed run other than data: tensor, pipeline, context and expert. No torch here.

The mesh is (pp, dp, cp, tp), tp innermost: ranks of one tp group are neighbours in a node. The
data axis of a parameter is dp x cp, and dp x cp / ep for experts: the ranks that hold the same
piece and saw other tokens.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from onefold.errors import ConfigError
from onefold.planner.costs import LinkGroup

if TYPE_CHECKING:
    from torch import nn

    from onefold.planner.work import UnitWork
    from onefold.recipe import Recipe


MESSAGES: Mapping[str, str] = {
    "data": "gathers and reductions", "tp": "all-reduces", "pp": "sends", "cp": "all-to-alls",
    "ep": "all-to-alls",
}  # fmt: skip
"""The messages of each axis, in the order of a report."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelAxes:
    """The ranks of each axis; 1: the axis is not used. The ranks of dp are the rest of the world.

    tp: ranks that cut matrices and heads. Norms and residuals are cut along the sequence
        (Korthikanti et al., arXiv 2205.05198), so activations are, too.
    pp: stages of the pipeline; `virtual`: pieces of the model on each of its ranks, whose schedule
        is 1F1B, or interleaved above 1 (Narayanan et al., arXiv 2104.04473).
    cp: ranks that cut sequences; attention exchanges heads for positions by all-to-alls (Ulysses,
        arXiv 2309.14509).
    ep: ranks of dp x cp that share the experts.
    """

    tp: int = 1
    pp: int = 1
    cp: int = 1
    ep: int = 1
    virtual: int = 1

    @staticmethod
    def from_choice(choice: ModelAxes | Mapping[str, int] | None) -> ModelAxes:
        """The axes of `onefold.plan(axes=)`. Raises `ConfigError` for a name that is no axis."""
        try:
            return choice if isinstance(choice, ModelAxes) else ModelAxes(**(choice or {}))
        except TypeError as error:
            hint = 'axes={"tp": 2, "pp": 2}'
            raise ConfigError("axes tp, pp, cp, ep or virtual", error, hint=hint) from error

    @property
    def are_used(self) -> bool:
        """True if a model axis has more than one rank."""
        return self != ModelAxes()

    @property
    def sizes(self) -> dict[str, int]:
        """Ranks by the name of the axis."""
        return {"tp": self.tp, "pp": self.pp, "cp": self.cp, "ep": self.ep}

    @property
    def num_pieces(self) -> int:
        """Pieces into which the pipeline cuts the model."""
        return self.pp * self.virtual

    def check(self, world_size: int) -> None:
        """Raise `ConfigError` unless the axes fill a world."""
        check_counts(**self.sizes, virtual=self.virtual)
        model = self.tp * self.pp * self.cp
        if world_size % model:
            got = f"tp {self.tp} x pp {self.pp} x cp {self.cp} = {model}"
            hint = "the ranks of dp are the rest: world = pp x dp x cp x tp"
            wanted = f"axes that divide the world of {world_size} ranks"
            raise ConfigError(wanted, got, hint=hint)
        data = world_size // (self.tp * self.pp)
        if data % self.ep:
            hint = "experts are shared by ranks of dp x cp"
            raise ConfigError(
                f"ep to divide the {data} ranks of dp x cp", f"ep {self.ep}", hint=hint
            )
        if self.virtual > 1 and self.pp == 1:
            hint = "leave virtual out, or pass pp"
            got = f"virtual {self.virtual} with pp 1"
            raise ConfigError("virtual stages of a pipeline", got, hint=hint)

    # ranks

    def dp(self, world_size: int) -> int:
        """Return the ranks of the dp axis."""
        return world_size // (self.tp * self.pp * self.cp)

    def data(self, recipe: Recipe) -> Recipe:
        """Return the recipe of one rank's data axis, dp x cp; without tp and pp `recipe` itself.

        tp takes neighbours in a node, so a node has that many fewer ranks of the data axis. An axis
        that is not the whole world is a mesh of its own, for which no run looks at hosts.
        """
        if self.tp == self.pp == 1:
            return recipe
        ranks = recipe.world_size // (self.tp * self.pp)
        near = _near(ranks, self.tp, recipe.local_world_size)
        return replace(recipe, world_size=ranks, local_world_size=near, has_hosts=False)

    def group(self, axis: str, local_world_size: int, world_size: int) -> LinkGroup:
        """Return the ranks of an axis, and how many of them share a node.

        Ranks of pp are neighbours only where all ranks are.
        """
        if axis == "pp":
            return LinkGroup(2, 2 if world_size <= local_world_size else 1)
        ranks = self.sizes[axis]
        stride = 1 if axis == "tp" else self.tp
        return LinkGroup(ranks, _near(ranks, stride, local_world_size))

    # the pipeline

    def in_flight(self, rank: int, num_micro: int) -> float:
        """Return the micro-batches whose activations a rank of the pipeline holds at its peak.

        1F1B holds p - i on rank i. The interleaved schedule starts (v - 1) p + 2 (p - i - 1) pieces
        before its first backward, and one more; each is 1/v of the rank's blocks.
        """
        behind = self.pp - rank - 1
        if self.virtual == 1:
            return min(behind + 1, num_micro)
        pieces = (self.virtual - 1) * self.pp + 2 * behind + 1
        return min(pieces / self.virtual, num_micro)

    def bubble_share(self, num_micro: int) -> float:
        """Return the share of the pipeline's time that a rank is idle: (p-1) / (v m + p-1)."""
        return (self.pp - 1) / (self.virtual * num_micro + self.pp - 1)


def check_counts(**counts: object) -> None:
    """Raise `ConfigError` unless all are whole numbers from 1 on."""
    for name, count in counts.items():
        if not isinstance(count, int) or isinstance(count, bool) or count < 1:
            wanted = f"{name} to be a whole number of at least 1"
            raise ConfigError(wanted, repr(count), hint=f"{name}=1 or more")


def _near(ranks: int, stride: int, local_world_size: int) -> int:
    """Return how many of `ranks` at this distance share a node."""
    return max(1, min(ranks, local_world_size // stride))


# the parts of a model that axes cut: blocks, heads, experts, and the width between blocks


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
    def dissect(module: nn.Module, units: Sequence[UnitWork]) -> Anatomy:
        """Read a module, whose values are not needed, and the units of its trace."""
        from onefold.layout.module_tree import ModuleTree
        from onefold.layout.units import owned_parameters, repeated_blocks

        owned = owned_parameters(ModuleTree.from_root(module))
        blocks = repeated_blocks(module)
        names = {part: name for name, part in module.named_modules()}
        anatomy = Anatomy(blocks=tuple(names[block] for block in blocks))
        shapes = [m.shape for u in units if anatomy.block_of(u.name) == 0 for m in u.members]
        lengths = Counter(length for shape in shapes for length in shape)
        experts = {n for u in units for m in u.members if (n := expert_count(m.fqn, m.shape))}
        heads = _number(module, blocks, HEADS)
        return replace(
            anatomy,
            width=max(lengths, key=lambda length: (lengths[length], -length), default=0),
            heads=heads,
            kv_heads=_number(module, blocks, KV_HEADS) or heads,
            tied=frozenset(parameter.fqn for parameter in owned if len(parameter.owners) > 1),
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
            (num_blocks > 0, "a model of repeated blocks with tp, pp, cp or ep", "none",
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
            (self.experts > 0, "a model with experts for ep", "a model without",
             "experts lie in modules named `experts`"),
            (axes.ep <= self.experts, f"ep of at most {self.experts} experts", f"ep {axes.ep}",
             "a rank needs an expert"),
        )  # fmt: skip
        for holds, what, got, hint in (*blocks, *sizes, *(experts if axes.ep > 1 else ())):
            if not holds:
                raise ConfigError(what, got, hint=hint)

    def estimates(self, axes: ModelAxes) -> tuple[str, ...]:
        """Say what a plan with these axes takes for granted."""
        notes: list[str] = []
        if axes.tp > 1:
            notes.append(
                "tp cuts every matrix, and norms and residuals along the sequence; without the "
                "latter a rank holds more"
            )
        if axes.tp > 1 and self.heads % axes.tp:
            notes.append(
                f"tp {axes.tp} does not divide {self.heads} heads: the fullest rank counts"
            )
        for name, size in (("tp", axes.tp), ("cp", axes.cp)):
            if size > self.kv_heads > 0:
                kv = f"{self.kv_heads} heads of keys and values"
                notes.append(f"{name} {size} is more than {kv}: their copies are not counted")
        if axes.cp > 1:
            notes.append("attention on cp is an all-to-all of heads; its masks are not counted")
        if axes.pp > 1:
            kind = "1F1B" if axes.virtual == 1 else f"interleaved, {axes.virtual} pieces a rank"
            notes.append(f"the pipeline's schedule is {kind}, and its blocks are cut evenly")
        if axes.ep > 1:
            notes.append(f"tokens reach all experts alike, {self.active} of {self.experts} each")
        return tuple(notes)


def expert_count(fqn: str, shape: tuple[int, ...]) -> int:
    """Return how many experts a parameter's name or shape tells of; 0: it belongs to none.

    A list of experts tells its position and one more: the last expert tells the number.
    """
    _, marker, rest = f".{fqn}".partition(".experts.")
    if not marker:
        return 0
    first = rest.partition(".")[0]
    return int(first) + 1 if first.isdecimal() else shape[0] if len(shape) > 2 else 0


def _number(module: nn.Module, blocks: Sequence[nn.Module], names: Sequence[str]) -> int:
    """Return the first whole number under one of the names, in a configuration or a block."""
    for place in _config_places(module, blocks):
        for name in names:
            value = getattr(place, name, None)
            if isinstance(value, int) and not isinstance(value, bool) and value > 0:
                return value
    return 0


def _config_places(module: nn.Module, blocks: Sequence[nn.Module]) -> Iterator[Any]:
    config = getattr(module, "config", None)
    yield config
    yield getattr(config, "text_config", None)
    for block in blocks[:1]:
        yield from block.modules()
