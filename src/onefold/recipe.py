"""The recipe: every choice of `onefold.shard`, resolved once into one frozen value.

    arguments --(compose/resolve.py)--> Recipe --> engine, planner, checkpoint, report, digest

A stage is a row of placements (config.py). Code below the composition root asks the properties
here; it reads no user's argument and tests no stage's number. See docs/adr/0018.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from math import prod
from typing import Any

import torch

from onefold.config import STAGES, Inference, Offload, Placement, Precision, Stage
from onefold.errors import ConfigError
from onefold.wire_config import Wire

ADAM_MOMENTS = 2


@dataclass(frozen=True, slots=True)
class Member:
    """One parameter of a unit. `dtype` is at rest, `compute_dtype` in forward and backward."""

    fqn: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    compute_dtype: torch.dtype
    requires_grad: bool = True
    is_packed: bool = False  # bytes of a quantized weight, or a side table: never cast
    decoded_nbytes: int = 0  # of the numbers that modules compute with, where they are others
    stack_nbytes: int = 0  # of the numbers of a stack of matrices, decoded where a kernel asks
    cut: str = ""  # over model axes; `shape` is that of this rank's piece

    @staticmethod
    def from_parameter(
        fqn: str, parameter: torch.Tensor, computes: torch.dtype | None, *,
        is_packed: bool = False, keeps_dtype: bool = False,
    ) -> Member:  # fmt: skip
        """Describe a parameter whose unit `computes` in a dtype; None: in the parameter's own."""
        dtype, is_cast = parameter.dtype, not (is_packed or keeps_dtype)
        compute = computes if dtype.is_floating_point and is_cast else None
        shape, requires_grad, decoded, stack = tuple(parameter.shape), parameter.requires_grad, 0, 0
        numbers = getattr(parameter, "shape_of_numbers", None)
        if numbers is not None:  # quantized
            own: torch.dtype = getattr(parameter, "dtype_of_numbers", dtype)
            nbytes = prod(numbers) * (computes or own).itemsize
            is_multiplied = getattr(parameter, "is_multiplied", False)
            decoded = 0 if is_multiplied else nbytes
            stack = nbytes if is_multiplied and len(numbers) > 2 else 0
        return Member(fqn, shape, dtype, compute or dtype, requires_grad, is_packed, decoded, stack)

    @property
    def itemsize(self) -> int:
        """Bytes of an element at rest."""
        return self.dtype.itemsize

    @property
    def compute_itemsize(self) -> int:
        """Bytes of an element in forward and backward."""
        return self.compute_dtype.itemsize

    @property
    def is_floating(self) -> bool:
        """True if the values are numbers that may be cast, quantized and stepped."""
        return self.dtype.is_floating_point and not self.is_packed

    @property
    def numel(self) -> int:
        return prod(self.shape)


@dataclass(frozen=True, slots=True)
class UnitRecipe:
    """One unit: its parameters in the order of its buffers, and the tier of its states."""

    name: str
    members: tuple[Member, ...]
    tile_nbytes: int = 0  # above it, a weight is used in row blocks of about so many bytes
    is_offloaded: bool = False  # masters and moments rest in the tier `Offload.optimizer`
    is_joined: bool = False  # the modules of the unit before use it, too
    stays: bool = False  # once it is unsharded, it is not freed between forwards (inference)
    ranks: int = 0  # of a mesh of its own; 0: it travels among all ranks

    @property
    def numel(self) -> int:
        return sum(member.numel for member in self.members)


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """One way to train a module, resolved: it names no default and no "auto" that is still open.

    `local_world_size`: ranks of a host; where the mesh `has_axes` (nodes, ranks of a node), of a
    node. `has_hosts`: an accelerator's ranks on several hosts, equally many on each.
    `num_moments`: optimizer states per element. `shares`: one weight per rank that holds one copy
    of the states; None: all ranks hold the same. `inference`: None where the module trains.
    `tiers_of_others`: of weights and states on all ranks, where each chooses its own.
    `units`: empty where no module is known.
    """

    stage: Stage = STAGES[3]
    world_size: int = 1
    local_world_size: int = 1
    has_axes: bool = False
    has_hosts: bool = False
    precision: Precision = field(default_factory=Precision)
    offload: Offload = field(default_factory=Offload)
    wire: Wire = field(default_factory=Wire)
    device_type: str = "cpu"
    num_moments: int = ADAM_MOMENTS
    shares: tuple[int, ...] | None = None
    inference: Inference | None = None
    tiers_of_others: tuple[str, ...] = ()
    units: tuple[UnitRecipe, ...] = ()

    def __post_init__(self) -> None:
        node = self.local_world_size if self.has_axes or self.has_hosts else 1
        if min(self.world_size, self.local_world_size) < 1 or self.world_size % node:
            got = f"{self.world_size} ranks on nodes of {self.local_world_size}"
            hint = "world_size is the ranks of all nodes"
            raise ConfigError("nodes with the same number of ranks", got, hint=hint)
        if self.offload.disk is not None and type(self.offload.disk) is not tuple:
            paths = tuple(map(str, self.offload.paths))
            object.__setattr__(self, "offload", replace(self.offload, disk=paths))

    # the stage's row

    @property
    def is_sharded(self) -> bool:
        """True if masters, moments and weights at rest are cut over ranks (stages 1 to 3)."""
        return self.stage.optimizer is Placement.SHARD

    @property
    def shards_parameters(self) -> bool:
        """True if weights are sharded between forward and backward (stage 3)."""
        return self.stage.parameter is Placement.SHARD

    @property
    def sums_rest(self) -> bool:
        """True if gradients rest Partial between micro-batches (stages 0 and 1)."""
        return self.stage.gradient is Placement.PARTIAL

    @property
    def keeps_gathered(self) -> bool:
        """True if gathered weights stay until the step, and their bytes over it (stages 1, 2).

        Backward's peak has room for them (docs/adr/0006). A local cast is not worth that.
        """
        return self.is_sharded and not self.shards_parameters and self.world_size > 1

    @property
    def is_alone(self) -> bool:
        """True for one rank that trains, with nothing offloaded: its units wait for nothing.

        Weights that are decoded are held for one block at a time.
        """
        is_plain = self.offload == Offload() and self.precision.frozen is None
        return self.world_size == 1 and is_plain and self.inference is None

    @property
    def frees_after_forward(self) -> bool:
        """True if unsharded weights are freed between forward and backward (stage 3).

        Alone they stay where they rest near, unless they are decoded: that takes memory.
        """
        moves = self.world_size > 1 or not self.rests_near or self.precision.frozen is not None
        return self.shards_parameters and moves

    @property
    def reads_directly(self) -> bool:
        """True if files are read straight into unsharded weights: no other rank has rows."""
        is_whole = self.rest_world == 1 and self.device_type == "cpu"
        return self.inference is not None and is_whole and self.offload.parameters == "disk"

    @property
    def tiers(self) -> set[str]:
        """Where weights, masters and moments rest on some rank."""
        return {self.offload.parameters, self.offload.optimizer, *self.tiers_of_others}

    @property
    def flags_failures(self) -> bool:
        """True if each gather says which ranks could not read their rows: those of a tier.

        On a device the digest of a step says so: its host waits for no gather.
        """
        return self.device_type == "cpu" and self.tiers != {"device"}

    @property
    def num_flags(self) -> int:
        """Elements behind gathered weights, one of each rank."""
        return self.rest_world if self.rest_world > 1 and self.flags_failures else 0

    @property
    def reads_files(self) -> bool:
        """True if weights at rest are the files of a checkpoint."""
        return self.inference is not None and self.inference.reads_files

    @property
    def rests_near(self) -> bool:
        """True if weights rest in the memory that computes."""
        tier = self.offload.parameters
        return tier == "device" or (tier == "cpu" and self.device_type == "cpu")

    # ranks

    @property
    def nodes(self) -> int:
        """The number of hosts."""
        return -(-self.world_size // self.local_world_size)

    @property
    def shard_world(self) -> int:
        """The number of ranks that hold one copy of the states: all, or those of a node."""
        return self.local_world_size if self.are_replicas else self.world_size

    @property
    def rest_world(self) -> int:
        """The number of ranks over which weights at rest are cut."""
        return self.shard_world if self.is_sharded else 1

    # the wire

    @property
    def are_replicas(self) -> bool:
        """True if each node holds all states among its ranks (HSDP)."""
        return self.is_sharded and self.has_axes and self.wire.secondary == "optimizer"

    @property
    def has_hops(self) -> bool:
        """True if weights and gradients cross between nodes in a hop of their own."""
        return self.is_sharded and self.has_axes and not self.are_replicas

    @property
    def reduces_in_hops(self) -> bool:
        """True if gradients are summed inside a node before they cross to others.

        Over several hosts that is the default of an accelerator: a message from each rank to each
        would cross once for every rank of a host. Weights cross once anyway.
        """
        return self.has_hops or (self.has_hosts and not self.has_axes and self.shares is None)

    @property
    def keeps_weights(self) -> bool:
        """True if a secondary shard of weights rests inside the node (stage 3)."""
        return self.shards_parameters and bool(self._kept)

    @property
    def keeps_sums(self) -> bool:
        """True if nodes exchange gradients once a step, not once a micro-batch."""
        return self.are_replicas or (self._kept == "gradients" and not self.sums_rest)

    @property
    def _kept(self) -> str:
        return self.wire.kept if self.has_hops else ""

    @property
    def gather_suffix(self) -> str:
        """The suffix of a gather's name in a report, if it does not leave the node."""
        return " inside" if self.is_sharded and self.has_axes else ""

    @property
    def reduce_suffix(self) -> str:
        """The suffix of a reduction's name in a report, if it does not leave the node."""
        return " inside" if self.reduces_in_hops or self.are_replicas else ""

    # values

    def on(self, ranks: int) -> Recipe:
        """The recipe of units with a mesh of so many ranks of their own; 0: this one."""
        if not ranks:
            return self
        near = max(1, self.local_world_size * ranks // self.world_size)  # the axis lies in nodes
        wire = Wire() if self.has_axes else self.wire
        return replace(
            self, world_size=ranks, local_world_size=near, has_axes=False, has_hosts=False,
            wire=wire, shares=None,
        )  # fmt: skip

    def offloaded_units(self, numels: Sequence[int]) -> tuple[bool, ...]:
        """Which of some units' states leave the device; all of them while the share is "auto"."""
        if self.offload.optimizer == "device":
            return (False,) * len(numels)
        share = self.offload.fraction
        return last_units(numels, 1.0 if share == "auto" else float(share))

    def digest(self) -> list[str]:
        """One line for each choice. Ranks compare these lines, so they name the one that differs.

        Folders of the disk tier are left out: each host may have its own.
        """
        nodes = f"mesh of {self.nodes} nodes x {self.local_world_size} ranks"
        lines = [nodes if self.has_axes else "one axis", f"stage={self.stage.number}"]
        lines += [repr(self.inference)] if self.inference else []
        for choice in (self.precision, self.offload, self.wire):
            kind = type(choice).__name__
            names = [option.name for option in fields(choice) if option.name != "disk"]
            lines += [f"{kind}.{name}={getattr(choice, name)!r}" for name in names]
        lines += [f"shares={self.shares}"] if self.shares else []
        return lines + [
            f"{member.fqn} {member.cut or list(member.shape)} {member.dtype} "
            f"requires_grad={member.requires_grad} in unit {unit.name}"
            if not unit.ranks
            else f"{member.fqn} {member.dtype} requires_grad={member.requires_grad} "
            f"in unit {unit.name} on a mesh of {unit.ranks} ranks"
            for unit in self.units
            for member in unit.members
        ]

    def as_dict(self) -> dict[str, Any]:
        """Plain dicts, lists, words and numbers, for JSON."""
        plain = {choice.name: getattr(self, choice.name) for choice in fields(self)}
        offload = asdict(self.offload) | {"disk": list(map(str, self.offload.paths)) or None}
        return plain | {
            "stage": self.stage.number,
            "precision": {name: _word(dtype) for name, dtype in asdict(self.precision).items()},
            "offload": offload,
            "wire": asdict(self.wire),
            "shares": list(self.shares) if self.shares else None,
            "tiers_of_others": list(self.tiers_of_others),
            "inference": asdict(self.inference) if self.inference else None,
            "units": [_plain_unit(unit) for unit in self.units],
        }

    @staticmethod
    def from_dict(plain: Mapping[str, Any]) -> Recipe:
        """Rebuild a recipe from `as_dict`, or from JSON of it."""
        values = dict(plain)
        values["stage"] = STAGES[values["stage"]]
        dtypes = {
            name: word if name == "frozen" else _dtype(word)
            for name, word in values["precision"].items()
        }
        values["precision"] = Precision(**dtypes)
        disk = values["offload"]["disk"]
        values["offload"] = Offload(**values["offload"] | {"disk": tuple(disk) if disk else None})
        wire: dict[str, Any] = {
            k: tuple(v) if isinstance(v, list) else v for k, v in values["wire"].items()
        }
        values["wire"] = Wire(**wire)
        values["shares"] = tuple(values["shares"]) if values.get("shares") else None
        values["tiers_of_others"] = tuple(values.get("tiers_of_others", ()))
        inference = values.get("inference")
        values["inference"] = Inference(**inference) if inference else None
        values["units"] = tuple(_unit_of_plain(unit) for unit in values["units"])
        return Recipe(**values)


def last_units(numels: Sequence[int], fraction: float) -> tuple[bool, ...]:
    """Choose the last units, up to about `fraction` of all elements.

    The first units' gradients come last in backward, and forward wants their weights first. So
    they have the least time to hide a step on another tier (SuperOffload, arXiv 2509.21271, keeps
    the buckets that backward fills last on the GPU).
    """
    wanted, taken = fraction * sum(numels), 0
    chosen = [False] * len(numels)
    for index in reversed(range(len(numels))):
        if fraction == 0 or taken + numels[index] / 2 > wanted:
            break
        chosen[index] = True
        taken += numels[index]
    return tuple(chosen)


def _word(dtype: torch.dtype | str | None) -> str | None:
    return None if dtype is None else str(dtype).removeprefix("torch.")


def _dtype(word: str | None) -> Any:
    return None if word is None else getattr(torch, word)


def _plain_unit(unit: UnitRecipe) -> dict[str, Any]:
    words = [
        {"dtype": _word(m.dtype), "compute_dtype": _word(m.compute_dtype)} for m in unit.members
    ]
    members = [asdict(m) | word for m, word in zip(unit.members, words, strict=True)]
    return asdict(unit) | {"members": members}


def _unit_of_plain(plain: Mapping[str, Any]) -> UnitRecipe:
    return UnitRecipe(**{**plain, "members": tuple(map(_member, plain["members"]))})


def _member(plain: Mapping[str, Any] | Sequence[Any]) -> Member:
    """Rebuild a member from its fields by name, or from the first ones in order (older files)."""
    names = (field.name for field in fields(Member))
    values = plain if isinstance(plain, Mapping) else dict(zip(names, plain, strict=False))
    dtypes = {name: _dtype(values[name]) for name in ("dtype", "compute_dtype")}
    return Member(**{**values, **dtypes, "shape": tuple(values["shape"])})
