"""How a model is trained, as far as its time depends on it."""

from __future__ import annotations

from dataclasses import dataclass

from onefold.errors import ConfigError, expected

TIERS = ("device", "cpu", "disk")


@dataclass(frozen=True, slots=True)
class Element:
    """How one element travels: bytes, and the codec, if it has one."""

    itemsize: float
    codec: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Travel:
    """How Onefold sends, where that is not one exact hop inside a node (docs/wire.md).

    `weights` and `gradients` on one axis or inside the node; those `_between` nodes, where they
    have a hop of their own. `hops`: two hops over one cut, of which a node keeps nothing (""),
    "weights" or also sums of "gradients"; None: one hop, or `Run.shard_ranks` of each replica.
    `sends_straight`: pieces of one axis go straight to every rank, each of them between nodes,
    gradients always and weights where no all-gather of the backend is used (`gathers_straight`).
    """

    weights: Element
    gradients: Element
    weights_between: Element
    gradients_between: Element
    hops: str | None = None
    sends_straight: bool = False
    gathers_straight: bool = False


@dataclass(frozen=True, slots=True)
class Run:
    """Stage, ranks, wire, tiers. What cannot be is a `ConfigError`.

    `shard_ranks`: how many ranks hold one copy of the model; 0 is all of them, fewer is hybrid
    sharding (HSDP, MiCS). `recompute`: the share of forward's work that backward repeats, 0 to 1.
    `travel` says how messages differ from rings of exact ones. `dtype` is that of matrix products;
    `weight_itemsize` and `grad_itemsize` are bytes per element
    on the wire. `prefetch`: units gathered ahead. `optimizer` and `parameters` are the tiers where
    these rest, `fraction` the share of optimizer states that does, `step` who steps what is in CPU
    memory: "cpu", "device", or whoever is faster.
    """

    stage: int
    world_size: int
    ranks_per_node: int = 8
    shard_ranks: int = 0
    dtype: str = "bf16"
    weight_itemsize: int = 2
    grad_itemsize: int = 2
    accumulate: int = 1
    recompute: float = 0.0
    prefetch: int = 1
    optimizer: str = "device"
    parameters: str = "device"
    fraction: float = 1.0
    step: str = "auto"
    steps_in_backward: bool = False
    travel: Travel | None = None

    def __post_init__(self) -> None:
        ranks = self.shard_ranks or self.world_size
        checks = (
            (self.stage in (0, 1, 2, 3), "stage to be 0, 1, 2 or 3", self.stage),
            (self.world_size >= 1, "world_size of at least 1", self.world_size),
            (self.ranks_per_node >= 1, "ranks_per_node of at least 1", self.ranks_per_node),
            (self.accumulate >= 1, "accumulate of at least 1", self.accumulate),
            (self.prefetch >= 0, "prefetch of at least 0", self.prefetch),
            (0 <= self.recompute <= 1, "recompute between 0 and 1", self.recompute),
            (0 <= self.fraction <= 1, "fraction between 0 and 1", self.fraction),
            (self.optimizer in TIERS, f"optimizer to be one of {TIERS}", self.optimizer),
            (self.parameters in TIERS, f"parameters to be one of {TIERS}", self.parameters),
            (
                1 <= ranks <= self.world_size and self.world_size % ranks == 0,
                f"shard_ranks to divide the world of {self.world_size}",
                self.shard_ranks,
            ),
        )
        for holds, what, got in checks:
            if not holds:
                raise ConfigError(
                    expected(what, repr(got), hint="Run(stage=3, world_size=64) is all a run needs")
                )

    @property
    def hops(self) -> str | None:
        """What nodes keep that have a hop of their own; None where they have none."""
        is_several = self.world_size > self.ranks_per_node and self.stage > 0
        return self.travel.hops if self.travel and is_several else None

    @property
    def copy_ranks(self) -> int:
        """Ranks that reduce and gather together: all, but in hybrid sharding."""
        return self.world_size if self.stage == 0 else self.shard_ranks or self.world_size

    @property
    def shards(self) -> int:
        """Pieces into which the state of a copy is cut: 1 at stage 0."""
        return 1 if self.stage == 0 else self.copy_ranks

    @property
    def state_nbytes(self) -> int:
        """Bytes per element that Adam moves: master, two moments and gradient in fp32 are read, the
        first three written, and the weight, where it is narrower.
        """
        return 16 + 12 + (self.weight_itemsize if self.weight_itemsize < 4 else 0)

    @property
    def disk_nbytes(self) -> int:
        """Bytes per element that a step from disk moves (docs/memory.md)."""
        return 12 + 12 + (self.weight_itemsize if self.weight_itemsize < 4 else 0)
