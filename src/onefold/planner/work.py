"""The work of one micro-batch of a model on one rank, unit by unit. No torch here.

`planner/trace.py` counts it on a module; `planner/simulate.py` turns it into seconds.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from onefold.errors import ConfigError

if TYPE_CHECKING:
    from onefold.planner.planned_axes import AxisMessage
    from onefold.recipe import Member, Recipe


class Work(NamedTuple):
    """The work of one kernel, or of all kernels of a pass; 0: none, or not known.

    flops: of matrix products; a multiply-add counts as two.
    attention_flops: of a fused attention kernel, which has a speed of its own.
    nbytes: memory traffic of every other kernel.
    drawn: random numbers, as of dropout.
    """

    flops: float = 0.0
    attention_flops: float = 0.0
    nbytes: float = 0.0
    drawn: float = 0.0
    num_kernels: int = 0

    def plus(self, other: Work, times: float = 1) -> Work:
        """Add `times` the work of `other`."""
        sums: Any = (mine + times * its for mine, its in zip(self, other, strict=True))
        return Work(*sums)

    def at_rows(self, two: Work, rows: int) -> Work:
        """Extrapolate to `rows` rows, where `self` is the work of one row and `two` of two."""
        grown = self.plus(two.plus(self, -1), rows - 1)
        return grown._replace(num_kernels=self.num_kernels)


NO_WORK = Work()


@dataclass(frozen=True, slots=True)
class UnitWork:
    """One unit: parameters that travel together, and the work between two gathers.

    `backward` of a trace includes recompute; otherwise `Conditions.recompute` adds it.
    """

    name: str
    numel: int  # parameters
    forward: Work = NO_WORK
    backward: Work = NO_WORK
    members: tuple[Member, ...] = ()  # empty where no module is known
    is_narrowed: bool = True  # False: its products stay in bf16 where others are in fp8
    is_recomputed: bool = True  # where blocks are recomputed at all
    messages: tuple[AxisMessage, ...] = ()  # on model axes (planner/planned_axes.py)
    data_ranks: int = 0  # of the data axis, where it is not the recipe's: that of experts

    @property
    def num_kernels(self) -> int:
        """Kernel launches of one forward and backward."""
        return self.forward.num_kernels + self.backward.num_kernels


@dataclass(frozen=True, slots=True)
class ModelWork:
    """All units in forward order, and the tokens of one rank in one micro-batch."""

    units: tuple[UnitWork, ...]
    tokens: int

    @property
    def numel(self) -> int:
        """Parameters of the model."""
        return sum(unit.numel for unit in self.units)


# the run around it: facts besides its recipe


@dataclass(frozen=True, slots=True, kw_only=True)
class Conditions:
    """The job, the dtypes of messages, and the system that runs it. `ConfigError` for bad numbers.

    Args:
        accumulate: micro-batches of a step.
        recompute: share of forward's work that backward repeats, 0 to 1.
        prefetch: units gathered ahead.
        dtype: dtype of matrix products.
        weight_itemsize: bytes of an element of an exact message of weights.
        grad_itemsize: bytes of an element of an exact message of gradients.
        ranks_per_host: ranks that share a host's network cards; 0: `Recipe.local_world_size`.
        share: of all states, the part that this rank holds; None: as much as every other.
        uses_rings: another library than Onefold runs it: all messages are exact and go round rings,
            and a second hop follows the first by itself.
    """

    accumulate: int = 1
    recompute: float = 0.0
    prefetch: int = 1
    dtype: str = "bf16"
    weight_itemsize: int = 2
    grad_itemsize: int = 2
    ranks_per_host: int = 0
    share: float | None = None
    uses_rings: bool = False

    def __post_init__(self) -> None:
        checks = (
            (self.accumulate >= 1, "accumulate of at least 1", self.accumulate),
            (self.prefetch >= 0, "prefetch of at least 0", self.prefetch),
            (0 <= self.recompute <= 1, "recompute between 0 and 1", self.recompute),
            (0 <= (self.share or 0) <= 1, "share between 0 and 1", self.share),
            (self.ranks_per_host >= 0, "ranks_per_host of at least 0", self.ranks_per_host),
        )
        for holds, what, got in checks:
            if not holds:
                hint = "Conditions() is one micro-batch in bf16"
                raise ConfigError(what, repr(got), hint=hint)

    def waits_for_hops(self, recipe: Recipe) -> bool:
        """Return True where a second hop begins only once the host has seen the first one land.

        Onefold's messages on one host and one axis, and those of other libraries, have no such hop.
        """
        is_local = recipe.world_size <= self.near(recipe)
        is_plain = is_local and recipe.wire.is_plain
        return recipe.is_sharded and not self.uses_rings and not is_plain

    def own_share(self, recipe: Recipe) -> float:
        """Return the part of all states that this rank holds."""
        return 1.0 / recipe.rest_world if self.share is None else self.share

    def near(self, recipe: Recipe) -> int:
        """Return the number of ranks of a host."""
        return self.ranks_per_host or recipe.local_world_size

    @property
    def itemsize(self) -> int:
        """Bytes of an element of activations."""
        return 4 if self.dtype == "fp32" else 2

    @property
    def state_nbytes(self) -> int:
        """Bytes per element that Adam moves.

        Master, two moments and gradient in fp32 are read, the first three are written, and so is a
        weight that is narrower.
        """
        return 16 + 12 + (self.weight_itemsize if self.weight_itemsize < 4 else 0)

    @property
    def disk_nbytes(self) -> int:
        """Bytes per element that a step from disk moves (docs/concepts/memory.md)."""
        return 12 + 12 + (self.weight_itemsize if self.weight_itemsize < 4 else 0)
