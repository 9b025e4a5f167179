"""One unit: the weights of some parameters, at rest and whole, and the moves between the two.

What lives in a unit, for a parameter of n elements over N ranks:

    weight   [n/N] (or [n] if replicated)  in the parameter's own dtype; what the faces show
    master   like weight, wider            only where the own dtype is narrower than the master dtype
    full     [n]                           in the compute dtype; whole weights, gathered on demand
    grad     like weight                   see state/gradient.py

Where nothing has to move (weights replicated, compute in their own dtype) the weight buffer is the
full buffer and both moves are free: the unit is *resident*.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from enum import Enum, auto
from typing import TYPE_CHECKING
from weakref import ReferenceType, ref

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from onefold.errors import StateError, WireError, expected
from onefold.layout.rows import Layout, Slot
from onefold.layout.units import UnitPlan
from onefold.ledger import Kind, Ledger
from onefold.state import face as faces
from onefold.state.buffer import Buffer
from onefold.ticket import DONE, Ticket
from onefold.tier.store import Store
from onefold.wire.collectives import Group
from onefold.wire.transport import Cut, Transport

if TYPE_CHECKING:
    from onefold.state.gradient import UnitGradient


@dataclass(frozen=True, slots=True)
class Setting:
    """What all units of one sharded module share: where state rests and how it travels."""

    transport: Transport
    store: Store
    ledger: Ledger
    mesh: DeviceMesh | None  # None: faces are plain tensors
    is_sharded: bool  # weights, masters, moments and grads rest as shards
    compute: torch.dtype | None
    master: torch.dtype

    @property
    def rank(self) -> int:
        return self.transport.group.rank

    @property
    def world_size(self) -> int:
        return self.transport.group.world_size

    @property
    def rest_world(self) -> int:
        """Over how many ranks resting state is cut."""
        return self.world_size if self.is_sharded else 1

    @property
    def rest_rank(self) -> int:
        return self.rank if self.is_sharded else 0


MAX_TAG = 120
"""Tags that tell units apart in messages stay below this: it fits int8 and is exact in bfloat16."""


class UnitState(Enum):
    """Where the weights of a unit are."""

    RESTING = auto()  # modules show faces
    WHOLE = auto()  # modules show whole weights, which may be read
    SUMMONED = auto()  # inside onefold.unsharded: modules show editable whole parameters


class UnitParameter:
    """One parameter of a unit: its owners in the module tree, its face, its whole weight."""

    __slots__ = (
        "__weakref__", "_hooked", "_resting", "_template", "_unit", "face", "fqn", "local", "on_grad",
        "owners", "slot", "version", "whole",
    )  # fmt: skip

    def __init__(self, unit: Unit, slot: Slot, owners: Iterable[tuple[nn.Module, str]]) -> None:
        self._unit = ref(unit)
        self.slot = slot
        self.fqn = slot.fqn
        self.owners = [(ref(module), name) for module, name in owners]
        self._hooked = False
        self._resting = _why_resting(slot.fqn, unit.setting.rank)
        self._template: DTensor | None = None
        self.on_grad: Callable[[UnitParameter], None] | None = None
        self.version = 0
        self.face: nn.Parameter
        self.whole: nn.Parameter
        self.local: Tensor  # this rank's rows of the weight at rest, a view of the weight buffer

    @property
    def unit(self) -> Unit:
        unit = self._unit()
        if unit is None:
            raise StateError(
                expected(
                    f"the sharded module of parameter {self.fqn!r} to be alive",
                    "a parameter whose module was deleted",
                    hint="keep the module as long as its parameters are used",
                )
            )
        return unit

    def wrap(self, local: Tensor) -> Tensor:
        """`local` [own rows] as what users see: a DTensor like the face, or itself."""
        if self._template is None:
            return local
        template = self._template
        if local.dtype == template.dtype and local.shape == self.local.shape:
            return faces.dtensor_over(DTensor, local, template._spec)
        return _dtensor(local, self.unit.setting.mesh, self.slot)

    def unwrap(self, shown: Tensor) -> Tensor:
        """The rank's rows of a tensor shown like the face, or of a whole plain tensor."""
        if self._template is not None and isinstance(shown, type(self._template)):
            return shown._local_tensor
        if self._template is None or tuple(shown.shape) == tuple(self.local.shape):
            return shown
        start, stop = self.slot.pieces[self.unit.setting.rest_rank]
        return shown.reshape(-1)[start:stop].view(self.local.shape)

    def shown_like_face(self, value: Tensor) -> Tensor:
        """A whole or already sharded tensor as the face shows its own: for copying into it."""
        if self._template is None:
            return value.full_tensor() if isinstance(value, DTensor) else value
        if isinstance(value, DTensor):
            return value
        return self.wrap(self.unwrap(value).to(self.local))

    def bury_whole(self) -> None:
        """Make reading the whole weight an error: its bytes are about to go."""
        if self.whole is not self.face:
            faces.bury(self.whole, self._resting)

    def show(self, parameter: nn.Parameter) -> None:
        """Put `parameter` into every owner, as assignment would, without its checks."""
        for owner, name in self.owners:
            module = owner()
            if module is not None:
                module._parameters[name] = parameter

    def make_face(self, original: nn.Parameter) -> None:
        """Build the face over `local`; `original` becomes it, or is gone."""
        setting = self.unit.setting
        requires_grad = original.requires_grad
        if setting.mesh is not None:
            self._template = _dtensor(self.local, setting.mesh, self.slot)
            self.face = faces.sharded_face(self.local, self._template, ref(self))
            self.face.requires_grad_(requires_grad)
            original.grad = None
            original.data = original.data.new_empty(0)  # whoever holds the object holds no bytes
            faces.bury(original, _why_replaced(self.fqn, setting.rank))
        else:
            original.grad = None
            original.data = self.local
            if not self.unit.computes_on_faces:
                original.__class__ = faces.ReplicatedFace
            original._summoner = ref(self)
            self.face = original

    def call_hooks(self) -> None:
        """Run the user's post-accumulate hooks, which autograd cannot: faces are not in its graph."""
        if self.face is not self.whole:
            for hook in list((self.face._post_accumulate_grad_hooks or {}).values()):
                hook(self.face)

    def follow_requires_grad(self) -> None:
        """Let the whole weight train when, and only when, the face says so."""
        with torch._C.DisableTorchFunctionSubclass():
            wanted = self.face.requires_grad
            if self.whole.requires_grad != wanted:
                self.whole.requires_grad_(wanted)
            if wanted and not self._hooked:
                self._hooked = True
                self.whole.register_post_accumulate_grad_hook(_grad_hook(ref(self)))

    @property
    def group(self) -> Group:
        return self.unit.setting.transport.group

    # what faces ask for (state.face.Summoner)

    def why_no_hook(self) -> str:
        return expected(
            f"no tensor hook on sharded parameter {self.fqn!r}",
            "register_hook, which autograd would never call",
            hint="use register_post_accumulate_grad_hook, or change gradients between backward "
            "and step",
        )

    def detached(self) -> Tensor:
        return self.wrap(self.local.detach())

    def is_differentiable_use(self) -> bool:
        return self.unit.is_wanted_whole(self)

    def whole_for(self) -> Tensor:
        return self.unit.summon_for_use(self)

    def refuse_other_data(self, value: Tensor) -> None:
        """`face.data = value`: only a value that is already where it belongs may come."""
        local = value._local_tensor if isinstance(value, DTensor) else value
        own = self.local
        same = (local.data_ptr(), local.dtype, local.shape) == (own.data_ptr(), own.dtype, own.shape)
        if not same:
            raise self.unit.touched(self, "an assignment to its .data")

    def note_data_access(self) -> None:
        self.unit.note_data_access()

    def note_whole_edit(self) -> None:
        self.version = -1

    def used_by(self, outputs: object) -> None:
        self.unit.note_use(outputs)


def _grad_hook(parameter: ReferenceType[UnitParameter]) -> Callable[[Tensor], None]:
    def on_accumulated(_: Tensor) -> None:
        alive = parameter()
        if alive is not None and alive.on_grad is not None:
            alive.on_grad(alive)

    return on_accumulated


def _dtensor(local: Tensor, mesh: DeviceMesh | None, slot: Slot) -> DTensor:
    placement = Replicate() if slot.replicated else Shard(0)
    shape = torch.Size(slot.shape)
    stride = torch.empty(shape, device="meta").stride()
    return DTensor.from_local(
        local, mesh, [placement], run_check=False, shape=shape, stride=stride
    )


def _why_replaced(fqn: str, rank: int) -> str:
    return expected(
        f"the parameter that {fqn!r} is now",
        "the object it was before onefold.shard replaced it",
        where=f"rank {rank}",
        hint="pass the optimizer to onefold.shard, or build optimizers and lists of parameters "
        "from module.parameters() after it",
    )


def _why_resting(fqn: str, rank: int) -> str:
    return expected(
        f"whole weight {fqn!r} to be used while its module runs",
        "a use after it was sharded again",
        where=f"rank {rank}",
        hint="read module parameters anew, or inside `with onefold.unsharded(module):`",
    )


class Unit:
    """The weights of one unit, and the two moves: `unshard` and `reshard`."""

    def __init__(self, plan: UnitPlan, setting: Setting, index: int = 0) -> None:
        self.name = plan.name
        self.tag = index % MAX_TAG + 1
        self.setting = setting
        self.dtype = plan.dtype
        wants_compute = setting.compute is not None and self.dtype.is_floating_point
        self.compute_dtype = setting.compute if wants_compute and setting.compute else self.dtype
        self.is_resident = setting.rest_world == 1 and self.compute_dtype == self.dtype
        # one process without a mesh: nothing to gather, reduce or show differently
        self.computes_on_faces = (
            self.is_resident and setting.mesh is None and setting.world_size == 1
        )
        self.state = UnitState.RESTING
        self.gradient: UnitGradient  # given by the engine
        shapes = [(owned.fqn, tuple(owned.parameter.shape)) for owned in plan.members]
        self.rest = Layout.build(shapes, setting.rest_world)
        self.wire = Layout.build(shapes, setting.world_size)
        self.parameters = [
            UnitParameter(self, slot, owned.owners)
            for slot, owned in zip(self.rest.slots, plan.members, strict=True)
        ]
        self.is_held = False
        self.on_demand: Callable[[Unit, object], None] | None = None
        self.is_wanted: Callable[[bool], bool] = lambda requires_grad: False
        self._ticket: Ticket = DONE
        self._fresh = False
        self._gathered = -1  # `edits` when the full buffer was filled
        self._touched_by_data = 0
        self._gather_cut: Cut | None = None
        self._local_rows: list[Tensor] = []
        self._allocate()

    def _allocate(self) -> None:
        setting, rank = self.setting, self.setting.rest_rank
        numel = self.rest.shard_numels[rank]
        self.weight = Buffer(numel, self.dtype, Kind.WEIGHT, setting.store, setting.ledger)
        self.weight.tensor.zero_()
        self.master: Buffer | None = None
        if self.dtype.is_floating_point and setting.master.itemsize > self.dtype.itemsize:
            self.master = Buffer(
                numel, setting.master, Kind.MASTER, setting.store, setting.ledger
            )
            self.master.tensor.zero_()
        self._published = -1  # `edits` when the master agreed with the weight
        self.full = self.weight
        if not self.is_resident:
            self.full = Buffer(
                self.full_numel, self.compute_dtype, Kind.UNSHARDED, setting.store, setting.ledger
            )
        for parameter in self.parameters:
            slot = parameter.slot
            start = slot.shard_offsets[rank]
            shape = slot.piece_shape(rank)
            numel = slot.piece_numel(rank)
            parameter.local = self.weight.tensor[start : start + numel].view(shape)

    # building and reading

    def adopt(self, originals: Iterable[nn.Parameter]) -> None:
        """Take over parameters that hold their initial values: keep own rows, install faces."""
        rank = self.setting.rest_rank
        with torch.no_grad():
            for parameter, original in zip(self.parameters, originals, strict=True):
                start, stop = parameter.slot.pieces[rank]
                source = original.detach().reshape(-1)[start:stop]
                parameter.local.copy_(source.view(parameter.local.shape))
            for parameter, original in zip(self.parameters, originals, strict=True):
                parameter.make_face(original)
                self._make_whole(parameter)
                parameter.show(parameter.face)
        if self.master is not None:
            self.master.tensor.copy_(self.weight.tensor)
            self._published = self.edits()
        if not self.is_resident:
            self.full.release()

    def _make_whole(self, parameter: UnitParameter) -> None:
        if self.computes_on_faces:
            parameter.whole = parameter.face
        else:
            slot = parameter.slot
            view = self.full.view(slot.full_offset, slot.shape)
            parameter.whole = nn.Parameter(view, requires_grad=False)
            parameter.whole._summoner = ref(parameter)
            parameter.bury_whole()
        if parameter.face.requires_grad:
            parameter.follow_requires_grad()

    # the two moves

    def start_unshard(self) -> None:
        """Begin to gather the whole weights in the compute dtype; `unshard` waits for it."""
        if self.is_resident or self._is_current():
            return
        self.full.reallocate()
        self._gathered = self.edits()
        self._fresh = True
        self._ticket = self.gather_into(self.full)

    def gather_into(self, full: Buffer) -> Ticket:
        """Start filling `full` (any dtype) from the shards of all ranks."""
        if not self._local_rows:
            sharded = [slot for slot in self.rest.slots if not slot.replicated]
            offsets = [slot.full_offset for slot in sharded]
            if self.setting.rest_world > 1:
                group, ranks = self.setting.transport.group, range(self.setting.world_size)
                tags = Slot("", (len(ranks),), 0, tuple((r, r + 1) for r in ranks), ())
                self._gather_cut = Cut(
                    [*sharded, tags], [*offsets, self.rest.full_numel], group, full.tensor.itemsize
                )
            self._local_rows = [parameter.local.reshape(-1) for parameter in self.parameters]
        rank = self.setting.rest_rank
        flat = full.tensor
        with torch.no_grad():
            own = [flat[start:stop] for start, stop in self._own_spans(rank)]
            torch._foreach_copy_(own, self._local_rows)
            flat[self.rest.full_numel :] = self.tag
        if self._gather_cut is None:
            return DONE
        where = f"gather of unit {self.name!r} on rank {self.setting.rank}"
        return self.setting.transport.gather(flat, self._gather_cut, where)

    @property
    def full_numel(self) -> int:
        """Elements of a full buffer: the regions, and one tag for each rank where it is gathered."""
        return self.rest.full_numel + (self.rest.world_size if self.rest.world_size > 1 else 0)

    def check_tags(self, full: Buffer) -> None:
        """Raise `WireError` if some rank gathered another unit at the same time.

        Pieces of equal length would otherwise mix two units without anyone noticing. Only where
        the host can look without waiting for a device.
        """
        if self._gather_cut is None or full.tensor.device.type != "cpu":
            return
        for rank, tag in enumerate(full.tensor[self.rest.full_numel :].tolist()):
            if abs(tag - self.tag) > 0.25:
                raise WireError(
                    expected(
                        f"gather of unit {self.name!r} on every rank",
                        f"another unit on rank {rank}",
                        where=f"rank {self.setting.rank}",
                        hint="all ranks must use units in the same order; a branch that only some "
                        "ranks take has to be inside one unit (`units=`)",
                    )
                )

    def _own_spans(self, rank: int) -> list[tuple[int, int]]:
        return [
            (slot.full_offset + slot.pieces[rank][0], slot.full_offset + slot.pieces[rank][1])
            for slot in self.rest.slots
        ]

    def _is_current(self) -> bool:
        """True if the full buffer holds, or is about to hold, the weights as they rest now."""
        return self._fresh and self._gathered == self.edits()

    def edits(self) -> int:
        """Grows with every in-place change of the weights at rest, ours or the user's.

        Faces count their own: an operation on a DTensor does not reach its local tensor's counter.
        """
        with torch._C.DisableTorchFunctionSubclass():
            by_users = sum(parameter.face._version for parameter in self.parameters)
        return self.weight.tensor._version + by_users + self._touched_by_data

    def note_data_access(self) -> None:
        """`face.data` was taken: what is done to it has a counter of its own, so expect the worst."""
        self._touched_by_data += 1

    def unshard(self) -> None:
        """Show whole weights: wait for the gather, put them into the modules."""
        if self.state is not UnitState.RESTING:
            return
        self.check_untouched()
        self.start_unshard()
        self._ticket.wait()
        self._ticket = DONE
        self.check_tags(self.full)
        for parameter in self.parameters:
            if parameter.whole is not parameter.face:
                faces.revive(parameter.whole)
                parameter.follow_requires_grad()
                parameter.version = parameter.whole._version
                parameter.show(parameter.whole)
            elif parameter.face.requires_grad:
                parameter.follow_requires_grad()
        self.state = UnitState.WHOLE

    def reshard(self, *, release: bool) -> None:
        """Show faces again; with `release` also free the whole weights, unless they are held."""
        if self.state is UnitState.WHOLE:
            self._keep_edits()
            for parameter in self.parameters:
                parameter.show(parameter.face)
            self.state = UnitState.RESTING
        if release and self.state is UnitState.RESTING and not (self.is_resident or self.is_held):
            self._ticket.wait()
            self._ticket = DONE
            self._fresh = False
            if self.full.is_held:
                for parameter in self.parameters:
                    parameter.bury_whole()
                self.full.release()

    def hold(self) -> None:
        """Keep the whole weights until `let_go`: a graph or an output refers to them in ways that
        no hook of a module foresees, such as a view."""
        self.is_held = True

    def let_go(self) -> None:
        self.is_held = False

    def _keep_edits(self) -> None:
        """Bring in-place changes made to whole weights during forward back to the shards."""
        if self.is_resident:
            return
        rank = self.setting.rest_rank
        with torch.no_grad():
            for parameter in self.parameters:
                if parameter.whole._version != parameter.version:
                    start, stop = parameter.slot.pieces[rank]
                    edited = parameter.whole.detach().reshape(-1)[start:stop]
                    was_current = self._is_current()
                    parameter.local.copy_(edited.view(parameter.local.shape))
                    if was_current:
                        self._gathered = self.edits()

    # masters

    def refresh_master(self) -> None:
        """Follow edits of the weights at rest (a loaded state dict) with the master."""
        if self.master is None:
            return
        is_seen = self.setting.mesh is not None or not self.is_resident  # a plain face has no hooks
        if is_seen and self._published == self.edits():
            return
        weight, master = self.weight.tensor, self.master.tensor
        with torch.no_grad():
            untouched = weight == master.to(weight.dtype)
            master.copy_(torch.where(untouched, master, weight.to(master.dtype)))

    def publish(self) -> None:
        """Round the stepped master into the weight that faces show and gathers send."""
        if self.master is not None:
            with torch.no_grad():
                self.weight.tensor.copy_(self.master.tensor)
            self._published = self.edits()

    @property
    def stepped(self) -> Tensor:
        """The flat tensor that the optimizer steps: the master, or the weight itself."""
        return self.weight.tensor if self.master is None else self.master.tensor

    # guards, and uses outside the unit's own modules

    def check_untouched(self) -> None:
        """Raise `StateError` if a parameter was replaced, moved or resized since `shard`."""
        for parameter in self.parameters:
            for owner, name in parameter.owners:
                module = owner()
                if module is not None and module._parameters.get(name) is not parameter.face:
                    raise self.touched(parameter, "another tensor in its place")
            with torch._C.DisableTorchFunctionSubclass():
                if not self._is_own_memory(parameter):
                    raise self.touched(parameter, "one that was moved, cast or resized")

    def _is_own_memory(self, parameter: UnitParameter) -> bool:
        if self.setting.mesh is not None:
            return parameter.face._local_tensor is parameter.local  # type: ignore[attr-defined]
        return (
            parameter.face.data_ptr() == parameter.local.data_ptr()
            and parameter.face.shape == parameter.local.shape
        )

    def touched(self, parameter: UnitParameter, got: str) -> StateError:
        return StateError(
            expected(
                f"parameter {parameter.fqn!r} to be as onefold.shard left it",
                got,
                where=f"rank {self.setting.rank}",
                hint="move, cast and resize a module before onefold.shard; "
                "edit values inside `with onefold.unsharded(module, writeback=True):`",
            )
        )

    def is_wanted_whole(self, parameter: UnitParameter) -> bool:
        with torch._C.DisableTorchFunctionSubclass():
            return self.is_wanted(parameter.face.requires_grad)

    def summon_for_use(self, parameter: UnitParameter) -> Tensor:
        """The whole compute weight for an operation outside the unit's own modules."""
        self.unshard()
        if torch.is_grad_enabled():
            self.hold()
        return parameter.whole

    def note_use(self, outputs: object) -> None:
        """Let the runtime watch what was computed from whole weights outside the unit's modules."""
        if self.on_demand is not None:
            self.on_demand(self, outputs)
