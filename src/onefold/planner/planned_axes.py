"""The axes of a composed run beside data: tensor, pipeline, context and expert. No torch here.

The mesh is (pp, dp, cp, tp), tp innermost: ranks of one tp group are neighbours in a node. The
data axis of a parameter is dp x cp, and dp x cp / ep for experts: the ranks that hold the same
piece and saw other tokens.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, NamedTuple

from onefold.errors import ConfigError
from onefold.planner.link_costs import Cost, LinkGroup, gather_cost, reduce_cost

if TYPE_CHECKING:
    from onefold.planner.machines import Machine
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
    def of(choice: ModelAxes | Mapping[str, int] | None) -> ModelAxes:
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
        for name, size in {**self.sizes, "virtual": self.virtual}.items():
            if not isinstance(size, int) or isinstance(size, bool) or size < 1:
                wanted = f"{name} to be a whole number of at least 1"
                raise ConfigError(wanted, repr(size), hint=f"{name}=1 is no such axis")
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
        """Return the recipe of one rank's data axis, dp x cp; without model axes `recipe` itself.

        tp takes neighbours in a node, so a node has that many fewer ranks of the data axis.
        """
        if not self.are_used:
            return recipe
        ranks = recipe.world_size // (self.tp * self.pp)
        near = _near(ranks, self.tp, recipe.local_world_size)
        return replace(recipe, world_size=ranks, local_world_size=near)

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


class AxisMessage(NamedTuple):
    """A message of a unit on a model axis: its bytes on this rank, and how often a micro-batch.

    A send is one to the next or previous rank of the pipeline.
    """

    axis: str
    nbytes: float
    group: LinkGroup
    forward: int = 0
    backward: int = 0

    def cost(self, machine: Machine) -> Cost:
        """Return the cost of one message.

        An all-reduce is a reduce-scatter and an all-gather. In an all-to-all each rank sends
        straight to every other one.
        """
        if self.axis == "tp":
            over = self.nbytes, self.group, machine
            return reduce_cost(*over).then(gather_cost(*over))
        if self.axis == "pp":  # of two ranks, a "gather" sends half
            return gather_cost(2 * self.nbytes, self.group, machine, is_straight=True)
        return gather_cost(self.nbytes, self.group, machine, is_straight=True)

    @property
    def sent(self) -> float:
        """Bytes that this rank sends for one message, by the closed form."""
        ranks = self.group.ranks
        share = (ranks - 1) / ranks
        return self.nbytes * {"tp": 2 * share, "pp": 1.0}.get(self.axis, share)

    def sent_nbytes(self, recompute: float = 0.0) -> float:
        """Bytes that this rank sends in a micro-batch; recompute repeats forward's messages."""
        return self.sent * (self.forward * (1 + recompute) + self.backward)

    @property
    def is_hidden(self) -> bool:
        """True if compute goes on meanwhile: sends of a pipeline that is full."""
        return self.axis == "pp"


def _near(ranks: int, stride: int, local_world_size: int) -> int:
    """Return how many of `ranks` at this distance share a node."""
    return max(1, min(ranks, local_world_size // stride))
