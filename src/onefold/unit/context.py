"""Context: what all units of a sharded module share. UnitSpec: the facts about one unit."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from onefold.layout.ledger import Ledger
from onefold.layout.ranges import Shares
from onefold.layout.rows import Layout
from onefold.layout.two_axes import Axes
from onefold.layout.units import UnitPlan
from onefold.tier.cpu import CopyStream
from onefold.tier.scratch import Scratch
from onefold.tier.slots import SlotPool
from onefold.tier.step_device import StepDevice
from onefold.tier.store import Store
from onefold.tier.workers import Workers
from onefold.wire.collectives import Group
from onefold.wire.lanes import PhaseNow
from onefold.wire.transport import LocalTransport, Transport


@dataclass(frozen=True, slots=True)
class Tiers:
    """Stores for state that has left the device, and the workers that move it."""

    weight: Store  # weights at rest
    state: Store  # masters and moments of the units that are offloaded
    slots: SlotPool
    fetchers: Workers  # bring own rows of weights
    steppers: Workers  # step units in blocks
    step_device: StepDevice  # where those steps run
    scratch: Scratch | None = None  # where activations go
    copies: CopyStream | None = None  # of weights that rest in another memory than they compute in


@dataclass(frozen=True, slots=True)
class Hops:
    """Two hops in place of one: inside the node and between nodes (layout/two_axes.py)."""

    axes: Axes
    inside: Transport
    between: Transport


@dataclass(frozen=True, slots=True)
class Routes:
    """Transports for weights and gradients.

    `group` holds all ranks that train, replicas included. `transport` is exact and joins the ranks
    among which resting state is cut. `gather` carries weights and `reduce` gradients;
    `gather_hops` and `reduce_hops` replace them. `replicas` joins the ranks of other nodes that
    hold the same state.
    """

    group: Group
    transport: Transport
    gather: Transport
    reduce: Transport
    gather_hops: Hops | None = None
    reduce_hops: Hops | None = None
    keeps_weights: bool = False  # with hops: a secondary shard rests inside the node
    replicas: Transport | None = None
    others: tuple[Routes, ...] = ()  # of units with a mesh of their own
    sends_differences: bool = False  # of weights, relative to the weights that every rank read last
    feeds_back: bool = False  # residuals of quantized gradients (error feedback)

    @property
    def rounds_gradients(self) -> bool:
        """True if a link quantizes gradients: ranks then agree on whether all are finite."""
        return any(transport.is_quantized for transport in self.reducers)

    @property
    def reducers(self) -> list[Transport]:
        """All transports that reduce gradients."""
        hops = self.reduce_hops
        transports = [self.transport, self.reduce, self.replicas]
        transports += [hops.inside, hops.between] if hops else []
        return [transport for transport in dict.fromkeys(transports) if transport is not None]

    @property
    def transports(self) -> list[Transport]:
        """All transports, those of other meshes last."""
        hops = self.gather_hops
        gathers = [self.gather, *([hops.inside, hops.between] if hops else [])]
        others = [transport for routes in self.others for transport in routes.transports]
        return list(dict.fromkeys([*self.reducers, *gathers, *others]))

    def rest(self) -> None:
        """Let every transport free the memory that it keeps for its next message."""
        for transport in self.transports:
            transport.rest()


class NumbersNow:
    """The packed weights that are decoded at the moment: those of one unit at most.

    A unit that stays is not resharded. So whoever decodes for another unit frees its numbers.
    """

    def __init__(self) -> None:
        self._unit = 0
        self._releases: list[Callable[[], None]] = []

    def note(self, message: Tensor, release: Callable[[], None]) -> None:
        """The weight of a `message` of its unit is about to be decoded; `release` frees it."""
        unit = message.untyped_storage()._cdata
        if unit != self._unit:
            self._unit, before, self._releases = unit, self._releases, []
            for release_other in before:
                release_other()
        self._releases.append(release)


@dataclass(frozen=True, slots=True)
class OwnMesh:
    """The ranks of a unit's own mesh, where that is a part of all ranks.

    Each of them holds other weights than the ranks outside, and computes with the rows that several
    ranks of the module send it: the experts of an expert axis. Its gradient is a sum over
    `sources` ranks' losses for each rank of the mesh. The mean over all ranks' losses divides the
    sum over the mesh by all ranks.
    """

    members: tuple[int, ...]  # their numbers among all ranks
    sources: int  # ranks of the module for each rank of the mesh


@dataclass(frozen=True, slots=True)
class Context:
    """The part of a sharded module that all its units share: tiers, routes, dtypes, the ledger.

    Units with a mesh of their own have other routes, and share the rest.
    """

    routes: Routes
    store: Store  # unsharded weights, gradients, and state that is not offloaded
    ledger: Ledger
    mesh: DeviceMesh | None  # None: parameters at rest are plain tensors
    is_sharded: bool  # weights, masters, moments and gradients rest as shards
    compute: torch.dtype | None
    master: torch.dtype
    tiers: Tiers
    shares: Shares = None  # of resting state, by rank; None cuts evenly
    is_inference: bool = False
    reads_directly: bool = False  # files into unsharded weights
    num_flags: int = 0  # behind gathered weights: whether each rank could read its own
    uses_disk: bool = False  # for weights or states, on some rank
    numbers: NumbersNow = field(default_factory=NumbersNow)
    phase: PhaseNow = field(default_factory=PhaseNow)  # of this rank, for the lanes
    own: OwnMesh | None = None
    meshes: Mapping[DeviceMesh, DeviceMesh] = field(default_factory=dict)  # see `mesh_with`
    holders: Group | None = None  # None: the group of `routes`

    def mesh_with(self, model: DeviceMesh) -> DeviceMesh:
        """The mesh of sharded parameters that `model` has cut: its axes, and the data axis last."""
        return model if self.mesh is None else self.meshes[model]

    @property
    def everyone(self) -> Group:
        """All ranks that together hold the module: those of the data axis and of model axes."""
        return self.holders or self.routes.group

    @property
    def transport(self) -> Transport:
        """Exact messages over the ranks among which resting state is cut."""
        return self.routes.transport

    @property
    def rank(self) -> int:
        return self.routes.transport.group.rank  # read often: one property less a read

    @property
    def where(self) -> str:
        """This rank in messages: its number among all ranks that train, replicas included."""
        return self.named(self.rank)

    def named(self, rank: int) -> str:
        """One of the ranks among which resting state is cut, as messages name it."""
        if self.own is not None:
            return f"rank {self.own.members[rank]}"
        return f"rank {self.routes.group.rank - self.rank + rank}"  # ranks of a node are adjacent

    @property
    def world_size(self) -> int:
        return self.transport.group.world_size

    @property
    def exchanges(self) -> bool:
        """True for several ranks, and for one that sends to itself (compose/routes.py)."""
        return not isinstance(self.transport, LocalTransport)

    @property
    def gathers(self) -> bool:
        """True if weights at rest are shards, which ranks gather."""
        return self.is_sharded and self.exchanges

    @property
    def rests_near(self) -> bool:
        """True if weights at rest lie where they are computed with."""
        weights = self.tiers.weight
        return not weights.is_far and weights.device == self.store.device

    @property
    def rest_world(self) -> int:
        """The number of ranks over which resting state is cut."""
        return self.world_size if self.is_sharded else 1

    @property
    def rest_rank(self) -> int:
        return self.rank if self.is_sharded else 0

    @property
    def sources(self) -> int:
        """The number of ranks of whose losses a rank's partial gradients are the sum."""
        return 1 if self.own is None else self.own.sources

    @property
    def defers_failures(self) -> bool:
        """True if a rank that cannot read its rows goes on until ranks exchange a digest."""
        is_step = self.phase.name in ("forward", "backward")  # which an optimizer ends
        others_wait = self.gathers and self.world_size > 1
        return is_step and others_wait and self.store.device.type != "cpu"

    def compare_logs(self, *, waits: bool = False) -> None:
        """Raise if ranks began other messages on a device, or one could not read its rows.

        A collective; see `StepDigest`. Where a disk may have failed, ranks wait for this digest.
        """
        digests = {t.group.digest: t.group for t in self.routes.transports}
        for group in digests.values():
            group.compare_logs(self.store.device, waits=waits or self.uses_disk)


@dataclass(frozen=True, slots=True, eq=False)
class UnitSpec:
    """Name, dtypes and rows of one unit, for the objects that move its weights and gradients."""

    name: str
    index: int  # among the units of the module
    described: str  # the unit and this rank, in labels of collectives
    context: Context
    dtype: torch.dtype  # of the parameters
    compute_dtype: torch.dtype
    rest: Layout  # rows of weights, masters, moments and gradients at rest
    wire: Layout  # rows of a gradient's message: cut over all ranks, at stage 0 too
    is_offloaded: bool  # masters and moments rest in tiers.state
    is_resident: bool  # modules compute with the weights at rest: both moves are free
    steps_in_blocks: bool  # in the background, rather than by the optimizer's own step
    is_packed: bool  # quantized bytes, or side tables: never cast, and without a master
    computes_on_sharded: bool  # one process: modules always show the same parameter
    is_trained: bool  # a parameter required a gradient at first; else its master is made later

    @staticmethod
    def from_plan(plan: UnitPlan, context: Context, index: int, *, is_offloaded: bool) -> UnitSpec:
        """The spec of a planned unit; `index` numbers the units of a module."""
        dtype, compute = plan.dtype, context.compute
        is_own = plan.is_packed or plan.keeps_dtype
        casts = compute is not None and dtype.is_floating_point and not is_own
        compute_dtype = compute if compute is not None and casts else dtype
        near = context.rests_near
        moves = compute_dtype != dtype or plan.is_quantized
        is_resident = not context.gathers and near and not moves
        steps_in_blocks = is_offloaded or not near
        is_alone = context.mesh is None and not context.exchanges and context.sources == 1
        shapes = [(owned.fqn, tuple(owned.values.shape)) for owned in plan.members]
        cuts = [owned.model for owned in plan.members if owned.model is not None]
        is_plain = not (steps_in_blocks or plan.is_multiplied or cuts)
        # by rows: a node that gathers has one range of rows, and a tile consists of rows
        by_rows = context.routes.gather_hops is not None or plan.tile_nbytes > 0
        by_rows |= not all(cut.is_even for cut in cuts)  # model axes: the same dim on all ranks
        wire = Layout.build(
            shapes, context.world_size, context.shares, by_rows=by_rows, has_gaps=not plan.is_packed
        )
        return UnitSpec(
            name=plan.name,
            index=index,
            described=f"unit {plan.name!r} on {context.where}",
            context=context,
            dtype=dtype,
            compute_dtype=compute_dtype,
            rest=wire if context.is_sharded else Layout.build(shapes, 1),
            wire=wire,
            is_offloaded=is_offloaded,
            is_resident=is_resident,
            steps_in_blocks=steps_in_blocks,
            is_packed=plan.is_packed,
            computes_on_sharded=is_resident and is_alone and is_plain,
            is_trained=plan.is_trained,
        )

    def on(self, context: Context, *, by_rows: bool) -> UnitSpec:
        """The same unit where `context` cuts its state by other shares."""
        shapes = [(slot.fqn, slot.shape) for slot in self.rest.slots]
        layout = Layout.build(
            shapes, context.world_size, context.shares, by_rows=by_rows,
            has_gaps=not self.is_packed,
        )  # fmt: skip
        return replace(self, context=context, rest=layout, wire=layout)

    def label(self, collective: str) -> str:
        """The name of a collective of this unit, for errors."""
        return f"{collective} of {self.described}"


class CountedEdits(Protocol):
    """The changes of a unit's weights at rest, as its parameters tell them (unit/weights.py)."""

    def bump(self, *, at_rest: int = 0, others: int = 0) -> None: ...
    def watch_data(self, data: Tensor) -> None: ...


class UnitInUse(Protocol):
    """A unit, as one of its parameters and the operations on that know it."""

    @property
    def context(self) -> Context: ...
    @property
    def edits(self) -> CountedEdits: ...
    @property
    def stepped(self) -> Tensor: ...
    @property
    def is_in_forward(self) -> bool: ...
    def note_shown(self, weight: Tensor) -> None: ...
    def wait_step(self) -> None: ...
    def is_wanted_unsharded(self, parameter: Any) -> bool: ...
    def unshard_for_use(self, parameter: Any) -> Tensor: ...
    def note_use(self, outputs: object) -> None: ...
    def note_data_read(self, parameter: Any) -> bool: ...
    def forget_edit(self, parameter: Any) -> None: ...
