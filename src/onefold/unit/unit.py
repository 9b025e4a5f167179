"""One unit: the weights of some parameters, at rest and whole, and the moves between the two.

What lives in a unit, for a parameter of n elements over N ranks:

    weight   [n/N] (or [n] if replicated)  in the parameter's own dtype; what the faces show
    master   like weight, wider            only where the own dtype is narrower than the master
    full     [n]                           in the compute dtype; whole weights, gathered on demand
    second   [n/neighbours]                likewise, at rest for the node (unit/two_hop_gather.py)
    moments  like master                   where the unit is offloaded; else the optimizer's own
    grad     like weight                   see unit/gradient.py

Where nothing has to move (weights replicated, compute in their own dtype) the weight buffer is the
full buffer and both moves are free: the unit is *resident*.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from enum import Enum, auto
from typing import TYPE_CHECKING
from weakref import WeakSet, ref

import torch
from torch import Tensor, nn

from onefold.errors import StateError, TierError, expected
from onefold.layout.rows import Layout
from onefold.layout.units import UnitPlan
from onefold.ledger import Kind
from onefold.observer import Stream, watched
from onefold.ticket import DONE, Ticket, Waitable
from onefold.tier.store import Store
from onefold.unit import sharded as faces
from onefold.unit.buffer import Buffer
from onefold.unit.context import Context
from onefold.unit.gather import UnitGather
from onefold.unit.init import Values
from onefold.unit.own_rows import OwnRows
from onefold.unit.parameter import UnitParameter
from onefold.unit.tiles import TiledWeight
from onefold.unit.two_hop_gather import gather_of

if TYPE_CHECKING:
    from onefold.unit.gradient import UnitGradient

MAX_TAG = 120
"""Tags that tell units apart in messages stay below this: it fits int8 and is exact in bfloat16."""


class UnitState(Enum):
    """Where the weights of a unit are."""

    RESTING = auto()  # modules show faces
    WHOLE = auto()  # modules show whole weights, which may be read
    SUMMONED = auto()  # inside onefold.unsharded: modules show editable whole parameters


class Unit:
    """The weights of one unit, and the two moves: `unshard` and `reshard`."""

    def __init__(
        self, plan: UnitPlan, setting: Context, index: int = 0, *, is_offloaded: bool = False
    ) -> None:
        self.is_offloaded = is_offloaded  # masters and moments rest in tiers.state
        self.name = plan.name
        self.tag = index % MAX_TAG + 1
        self.setting = setting
        self.dtype = plan.dtype
        wants_compute = setting.compute is not None and self.dtype.is_floating_point
        self.compute_dtype = setting.compute if wants_compute and setting.compute else self.dtype
        self.is_resident = (
            setting.rest_world == 1 and self.compute_dtype == self.dtype and setting.rests_near
        )
        # stepped block by block in the background, rather than by the optimizer's own step
        self.steps_in_blocks = is_offloaded or not setting.rests_near
        # one process without a mesh: nothing to gather, reduce or show differently
        self.computes_on_faces = (
            self.is_resident and setting.mesh is None and setting.world_size == 1
            and not self.steps_in_blocks
        )  # fmt: skip
        self.state = UnitState.RESTING
        self.gradient: UnitGradient  # given by the engine
        shapes = [(owned.fqn, tuple(owned.parameter.shape)) for owned in plan.members]
        self.rest = Layout.build(shapes, setting.rest_world)
        self.wire = Layout.build(shapes, setting.world_size)
        self.parameters = [
            UnitParameter(self, slot, owned.owners)
            for slot, owned in zip(self.rest.slots, plan.members, strict=True)
        ]
        self.is_tiled = plan.tile_nbytes > 0  # never whole while it computes
        self._tile_nbytes = plan.tile_nbytes
        self.is_held = False
        self.keeps_bytes = False  # of whole weights that are not to be read any more
        self.on_demand: Callable[[Unit, object], None] | None = None
        self.is_wanted: Callable[[bool], bool] = bool
        self.pending: Waitable | None = None  # the step that is under way in the background
        self.failure: TierError | None = None  # of that step, or of a fetch: it stays
        self._ticket: Ticket = DONE
        self._fresh = False
        self._gathered = -1  # `edits` when the full buffer was filled
        self._touched_by_data = self._kept_edits = 0
        self._num_steps = 0
        self.gather = gather_of(self)
        is_exact = self.gather.is_exact
        self.exact_gather = self.gather if is_exact else UnitGather(self, setting.transport)
        self._allocate()

    def _allocate(self) -> None:
        setting, rank = self.setting, self.setting.rest_rank
        numel = self.rest.shard_numels[rank]
        tiers, ledger = setting.tiers, setting.ledger
        self.weight = Buffer(numel, self.dtype, Kind.WEIGHT, tiers.weight, ledger)
        self.weight.tensor.zero_()
        self.rows = OwnRows(self.weight, setting, self.name)
        self.master: Buffer | None = None
        self.moments: dict[str, Buffer] = {}
        is_narrow = self.dtype.is_floating_point and setting.master.itemsize > self.dtype.itemsize
        is_elsewhere = self.is_offloaded and tiers.weight.device != tiers.state.device
        if is_narrow or is_elsewhere:
            dtype = setting.master if is_narrow else self.dtype
            self.master = Buffer(numel, dtype, Kind.MASTER, self.state_store, ledger)
            self.master.tensor.zero_()
        self._shown, self._published = WeakSet[Tensor](), -1  # `edits` when the master agreed
        self.full = self.weight
        if not self.is_resident:
            numel, kind = self.gather.full_numel, Kind.UNSHARDED
            self.full = Buffer(numel, self.compute_dtype, kind, setting.store, ledger)
        for parameter in self.parameters:
            slot = parameter.slot
            start = slot.shard_offsets[rank]
            shape = slot.piece_shape(rank)
            numel = slot.piece_numel(rank)
            parameter.local = self.weight.tensor[start : start + numel].view(shape)

    @property
    def state_store(self) -> Store:
        """Where masters and moments rest."""
        return self.setting.tiers.state if self.is_offloaded else self.setting.store

    def make_moments(self, dtypes: Mapping[str, torch.dtype]) -> None:
        """Make room, of zeros, for the states that a step will keep: each [own rows], by name."""
        for name, dtype in dtypes.items():
            if name not in self.moments:
                numel, ledger = len(self.weight.tensor), self.setting.ledger
                made = Buffer(numel, dtype, Kind.OPTIMIZER, self.state_store, ledger)
                if made.far is None:  # else the file is new, and reads as zeros
                    made.tensor.zero_()
                self.moments[name] = made

    def await_step(self) -> None:
        """Wait for the step that runs in the background; if the tier failed it, note that."""
        if self.pending is not None:
            try:
                with watched(self.setting.ledger.observer, Stream.COMPUTE, "await_step", self.name):
                    self.pending.wait()
            except TierError as error:
                self.failure = error
            self.pending = None  # not before: an interrupted wait is waited for again

    def settle(self) -> None:
        """Wait for the step that runs in the background. Raises `TierError` if it failed."""
        self.await_step()
        if self.failure is not None:
            raise self.failure

    def forget(self) -> None:
        """Let go of memory in which users, or a checkpoint, looked at what rests far."""
        for buffer in (self.weight, self.master, *self.moments.values()):
            if buffer is not None and buffer.far is not None:
                buffer.far.forget()

    # building and reading

    def adopt(self, originals: Iterable[nn.Parameter], values: Values | None = None) -> None:
        """Take over parameters: keep own rows of their initial values, install faces.

        Rows that `values` has are read from there, into the master where there is one.
        """
        rank = self.setting.rest_rank
        given = [p for p in self.parameters if values is not None and p.fqn in values]
        with torch.no_grad():
            for parameter, original in zip(self.parameters, originals, strict=True):
                if parameter in given:
                    continue
                start, stop = parameter.slot.pieces[rank]
                source = original.detach().reshape(-1)[start:stop]
                parameter.local.copy_(source.view(parameter.local.shape))
            for parameter, original in zip(self.parameters, originals, strict=True):
                parameter.make_face(original)
                self._make_whole(parameter)
                parameter.show(parameter.face)
            if self.master is not None:
                self.master.tensor.copy_(self.weight.tensor)
            for parameter in given:
                assert values is not None, "given by nobody"
                values.fill(parameter.fqn, parameter.slot.rows(rank), parameter.stepped)
            if self.master is not None:
                if given:
                    self.weight.tensor.copy_(self.master.tensor)
                self._published = self.edits()
        if not self.is_resident:
            self.full.release()
        for parameter in self.parameters if self.is_tiled else []:
            parameter.tiled = TiledWeight(parameter, self._tile_nbytes)
        self.forget()

    def _make_whole(self, parameter: UnitParameter) -> None:
        if self.computes_on_faces:
            parameter.whole = parameter.face
        else:
            slot = parameter.slot
            view = self.full.view(slot.full_offset, slot.shape)
            parameter.whole = nn.Parameter(view, requires_grad=False)
            faces.introduce(parameter.whole, ref(parameter))
            parameter.bury_whole()
        if parameter.face.requires_grad:
            parameter.follow_requires_grad()

    # the two moves

    def start_unshard(self) -> None:
        """Begin to gather the whole weights in the compute dtype; `unshard` waits for it."""
        if self.is_resident:
            self.settle()
            return
        if self._is_current():
            return
        self._await_gather()  # of weights that have changed since, and nobody used
        self.full.reallocate()
        edits = self.edits()
        self._ticket = self.gather.start(self.full)
        self._gathered, self._fresh = edits, True

    def start_fetch(self) -> None:
        """Begin to bring own rows near, if they rest far: `start_unshard` will want them."""
        if not self._is_current():
            self.gather.prefetch()

    def _is_current(self) -> bool:
        """True if the full buffer holds, or is about to hold, the weights as they rest now."""
        return self._fresh and self._gathered == self.edits()

    def edits(self) -> int:
        """Grows with every in-place change of the weights at rest, ours or the user's.

        Faces count their own: an operation on a DTensor does not reach its local tensor's counter.
        """
        with torch._C.DisableTorchFunctionSubclass():
            by_data = sum(parameter.edits_by_data for parameter in self.parameters)
        return self.edits_at_rest() + self._kept_edits + self._touched_by_data + by_data

    def edits_at_rest(self) -> int:
        """`edits` but for those a forward made itself, and those by way of `.data`."""
        with torch._C.DisableTorchFunctionSubclass():
            by_users = sum(parameter.face._version for parameter in self.parameters)
        return self.weight.tensor._version + self._num_steps + by_users - self._kept_edits

    def note_data_access(self) -> None:
        """`.data` was taken, and no counter tells what is done to it: expect the worst."""
        self._touched_by_data += 1

    def unshard(self) -> None:
        """Show whole weights: wait for the gather, put them into the modules."""
        if self.state is not UnitState.RESTING:
            return
        self.check_untouched()
        self.start_unshard()
        self._await_gather()
        self.gather.check(self.full)
        for parameter in self.parameters:
            if parameter.whole is not parameter.face:
                faces.revive(parameter.whole)
                parameter.follow_requires_grad()
                parameter.version = parameter.whole._version
                parameter.show(parameter.whole)
            elif parameter.face.requires_grad:
                parameter.follow_requires_grad()
        self.state = UnitState.WHOLE

    def _await_gather(self) -> None:
        """Wait for the gather that is under way; one that fails leaves nothing to compute with."""
        ticket, self._ticket = self._ticket, DONE
        try:
            ticket.wait()
        except BaseException:
            self._fresh = False
            raise

    def reshard(self, *, release: bool) -> None:
        """Show faces again; with `release` also give up the whole weights, unless they are held."""
        if self.state is UnitState.WHOLE:
            self._keep_edits()
            for parameter in self.parameters:
                parameter.show(parameter.face)
            self.state = UnitState.RESTING
        if release and self.state is UnitState.RESTING and not (self.is_resident or self.is_held):
            self._await_gather()
            self._fresh = False
            if self.full.is_held:
                for parameter in self.parameters:
                    parameter.bury_whole()
                if not self.keeps_bytes:
                    self.full.release()

    def hold(self) -> None:
        """Keep the whole weights until `let_go`: a graph or an output refers to a view of them."""
        self.is_held = True

    def let_go(self) -> None:
        self.is_held = False

    def _keep_edits(self) -> None:
        """Bring in-place changes made to whole weights during forward back to the shards."""
        edited = [
            p for p in self.parameters if p.whole is not p.face and p.whole._version != p.version
        ]
        if self.is_resident:  # they are the weights at rest, under another counter
            self._touched_by_data += bool(edited)
        elif edited:
            was_current, before = self._is_current(), self.edits()
            with torch.no_grad():
                for parameter in edited:
                    parameter.keep_edits()
            self._kept_edits += self.edits() - before
            if was_current:
                self._gathered = self.edits()
                self.gather.follow(self.full, before)

    # masters

    def note_shown(self, weight: Tensor) -> None:
        """Own rows were given out as a DTensor (`state_dict`), whose edits no counter tells."""
        if self.master is not None:
            self._shown.add(weight)
            self._published = -1

    def refresh_master(self) -> None:
        """Follow edits of the weights at rest (a loaded state dict) with the master."""
        if self.master is None:
            return
        # a device's list kernels change plain parameters without counting it
        is_counted = not self.computes_on_faces or self.weight.tensor.device.type == "cpu"
        if is_counted and not self._shown and self._published == self.edits():
            return
        master = self.master.tensor
        weight = self.weight.tensor.to(master.device)
        with torch.no_grad():
            untouched = weight == master.to(weight.dtype)
            master.copy_(torch.where(untouched, master, weight.to(master.dtype)))
        self._published = self.edits()

    def publish(self, *, is_rounded: bool) -> None:
        """Round the stepped master into the weight that faces show and gathers send."""
        self._num_steps += 1  # fused kernels change lists of tensors without counting it on them
        if self.master is not None:
            if not is_rounded:
                with torch.no_grad():
                    self.weight.tensor.copy_(self.master.tensor)
            self._published = self.edits()

    def replaced(self) -> None:
        """Weights were read anew on every rank, into the master where there is one."""
        self.publish(is_rounded=False)
        self.gather.forget_base()
        self.gradient.reduction.feedback.forget(self.parameters)

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
                where=self.setting.where,
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
