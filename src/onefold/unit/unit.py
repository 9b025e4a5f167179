"""Unit: parameters that are gathered and reduced together, and the two moves of their weights.

Memory of a unit, for a parameter of n elements over N ranks:

    weight, master, moments  [n/N]         at rest, see unit/weights.py
    full     [n]                           in the compute dtype; unsharded weights, on demand
    second   [n/local_world_size]          likewise, at rest for the node (unit/gather.py)
    grad     like weight                   see unit/gradient.py

Where nothing has to move (weights replicated, compute in their own dtype) the weight buffer is the
full buffer and both moves are free: the unit is *resident*.

Imports go one way: unit -> tiles -> gradient -> hops of gradients (reduction), unit -> gather ->
weights -> parameter. The engine is the `UnitOwner`, which a unit refers to weakly.
"""

from __future__ import annotations

from collections.abc import Iterable, Set
from contextlib import suppress
from enum import Enum, auto
from typing import Any, Protocol
from weakref import ref

import torch
from torch import Tensor, nn

from onefold.errors import TierError
from onefold.layout.ledger import Kind
from onefold.layout.model_axes import local_of
from onefold.layout.units import UnitPlan
from onefold.tier.files import FileRows
from onefold.unit import refusals
from onefold.unit.buffer import Buffer
from onefold.unit.context import Context, UnitSpec
from onefold.unit.decoded import DecodedWeight
from onefold.unit.forms import Forms
from onefold.unit.gather import UnitGather, gather_of
from onefold.unit.gradient import UnitGradient
from onefold.unit.init import Values, rows_in_files
from onefold.unit.packed_parameter import class_of
from onefold.unit.parameter import (
    UnitParameter,
    take_form,
)
from onefold.unit.showing import Showing
from onefold.unit.tiles import TiledWeight
from onefold.unit.weights import UnitWeights
from onefold.wire.ticket import DONE, Ticket


class UnitState(Enum):
    """The form in which modules show a unit's parameters."""

    RESTING = auto()  # sharded parameters
    UNSHARDED = auto()  # unsharded parameters, to compute with
    EDITABLE = auto()  # inside onefold.unsharded: plain parameters, all rows


class UnitOwner(Protocol):
    """The engine, as its units know it."""

    def on_grad(self, parameter: UnitParameter, unit: Unit) -> None: ...
    def is_wanted(self, requires_grad: bool) -> bool: ...
    def unshard_for_use(self, unit: Unit) -> None: ...
    def on_use(self, unit: Unit, outputs: object) -> None: ...
    def note_reduced(self, gradient: UnitGradient) -> None: ...
    def note_hooked(self, parameter: UnitParameter) -> None: ...


class Unit(UnitWeights):
    """The weights of one unit, at rest and unsharded, and the moves: `unshard` and `reshard`."""

    def __init__(
        self, plan: UnitPlan, context: Context, index: int, owner: UnitOwner, *,
        is_offloaded: bool = False, keeps_gradients: bool = False,
    ) -> None:  # fmt: skip
        super().__init__(UnitSpec.from_plan(plan, context, index, is_offloaded=is_offloaded))
        self.find_owner = ref(owner)
        self.state = UnitState.RESTING
        self.is_tiled = plan.tile_nbytes > 0  # gathered in row blocks
        self._ticket: Ticket = DONE
        self._fresh = False
        self._is_checked = False  # that every rank could read its rows for the full buffer
        self._gathered = -1  # `edits` when the full buffer was filled
        self.parameters = [
            class_of(member)(self, self.spec, number, self.weight.tensor, member)
            for number, member in enumerate(plan.members)
        ]
        self._showing = Showing(self.parameters)
        self._forms: dict[Forms, list[Tensor]] = {}  # of their unsharded objects
        self.decoded: list[DecodedWeight] = []  # before modules compute with them
        self.multiplied: list[DecodedWeight] = []  # only where an operation asks for numbers
        self._tile_nbytes = plan.tile_nbytes
        self._keeps_bytes = keeps_gradients and not self.steps_in_blocks
        self._connect()
        self.unsharded = self.weight
        if not self.is_resident:
            numel, ledger = self.gather.full_numel, context.ledger
            self.unsharded = Buffer(
                numel, self.compute_dtype, Kind.UNSHARDED, context.store, ledger,
                is_counted=not self.is_tiled,
            )  # fmt: skip

    def _connect(self) -> None:
        """Make the objects that exchange rows with other ranks."""
        self.gather = gather_of(self, is_tiled=self.is_tiled)
        is_exact = self.gather.is_exact
        self.exact_gather = self.gather if is_exact else UnitGather(self, self.context.transport)
        self.gradient = UnitGradient(self, keeps_bytes=self._keeps_bytes)
        self.tiled: TiledWeight | None = None
        if self.is_tiled:
            (parameter,) = self.parameters
            self.tiled = TiledWeight(
                parameter, self.gather, self.gradient, self.find_owner, self._tile_nbytes
            )

    def recut(self, spec: UnitSpec, edits: int) -> None:
        """Follow another cut, whose rows the buffers hold already; `edits` before that."""
        self.spec, self.context, self.rest, self.wire = spec, spec.context, spec.rest, spec.wire
        for parameter in self.parameters:
            parameter.recut(spec, self.weight.tensor)
        self._fresh = False
        self._connect()
        self.edits.bump(others=max(0, edits + 1 - self.edits.all()))  # it never returns to a number
        self._published = self.edits.all()  # weights and masters agree as before

    def adopt(self, originals: Iterable[nn.Parameter], values: Values | None = None) -> None:
        """Take over parameters: keep own rows of their initial values, show sharded parameters.

        Parameters that `values` has are read from there, into the master where there is one.
        """
        pairs = list(zip(self.parameters, originals, strict=True))
        rows, promised = self.weight.far, set[UnitParameter]()
        if values is not None and not isinstance(rows, FileRows):
            promised = {p for p in self.parameters if p.fqn in values}
        with torch.no_grad():
            for parameter, original in pairs:
                if isinstance(rows, FileRows):
                    parameter.rest_in(rows_in_files(parameter, rows, values))
                elif parameter not in promised:
                    parameter.local.copy_(parameter.own_piece(local_of(original.detach())))
            for parameter, original in pairs:
                parameter.build(original, self.unsharded.view)
                if parameter.decoded is not None:
                    is_multiplied = parameter.decoded.is_multiplied
                    (self.multiplied if is_multiplied else self.decoded).append(parameter.decoded)
                self.edits.watch(parameter.sharded)
                if parameter.unsharded is not parameter.sharded:
                    self._forms.setdefault(parameter.forms, []).append(parameter.unsharded)
            self._read_own_rows(promised, values)
        if not self.is_resident:
            self.unsharded.release()
        self.forget()
        if isinstance(rows, FileRows):
            self.files_edits = self.edits.all()

    def _read_own_rows(self, promised: Set[UnitParameter], values: Values | None) -> None:
        """Read own rows of the `promised` parameters, into the master where there is one."""
        if self.master is not None:
            self.master.tensor.copy_(self.weight.tensor)
        for parameter in self.parameters:
            if parameter in promised:
                assert values is not None, "no source has these values"
                values.fill(parameter.fqn, parameter.box, parameter.stepped)
        if self.master is not None:
            if promised:
                self.weight.tensor.copy_(self.master.tensor)
            self._published = self.edits.all()

    # the two moves

    def start_unshard(self) -> None:
        """Begin to gather the unsharded weights in the compute dtype; `unshard` waits for it."""
        if self.is_resident:
            self.wait_step()
            return
        edits = self.edits.all()
        if self._fresh and self._gathered == edits:
            return
        if self.files_edits not in (None, edits):
            raise refusals.EDITED_IN_FILES(self.name, where=self.context.where)
        if self._ticket is not DONE:  # of weights that were not used and have changed since
            self._await_gather()
        self.unsharded.reallocate()
        self._ticket = self.gather.start(self.unsharded)
        self._gathered, self._fresh, self._is_checked = edits, True, False

    def start_fetch(self) -> None:
        """Begin to fetch own rows from a far tier: `start_unshard` will want them."""
        if self.weight.far is not None and not self._is_current():
            self.gather.prefetch()

    def _is_current(self) -> bool:
        """True if the full buffer holds, or is about to hold, the weights as they rest now."""
        return self._fresh and self._gathered == self.edits.all()

    def is_there(self) -> bool:
        """True if a graph may read the unsharded weights."""
        return self.is_resident or self.is_tiled or self._is_current()

    def unshard(self) -> None:
        """Show unsharded parameters: wait for the gather, put them into the modules."""
        if self.state is not UnitState.RESTING:
            return
        if self._is_current() and torch._C._current_graph_task_id() != -1:
            self._showing.check_places()  # backward reads nothing of what rests
        else:
            self.check_untouched()
        self.start_unshard()
        if self._ticket is not DONE:
            self._await_gather()
        if not self._is_checked:
            self.gather.check(self.unsharded)
            self._is_checked = True
        for weight in self.decoded:
            weight.fill()
        with torch._C.DisableTorchFunctionSubclass():
            for forms, unsharded in self._forms.items():
                take_form(forms.shown, unsharded, forms.library)
            self._showing.show_unsharded()
        self.state = UnitState.UNSHARDED

    def _await_gather(self) -> None:
        """Wait for the gather that is under way; one that fails leaves nothing to compute with."""
        try:
            self._ticket.wait()
        except BaseException as error:
            self._fresh = False
            if isinstance(error, Exception):  # an interrupted wait is waited for again
                self._ticket = DONE
            raise
        self._ticket = DONE

    def await_reads(self) -> None:
        """Wait for the gather and the fetch that are under way; the next use meets their rows."""
        self._await_gather()
        self.rows.await_fetch()

    def begin_edits(self) -> None:
        """Modules show the parameters of `onefold.unsharded`, which has shown them."""
        self.state = UnitState.EDITABLE

    def end_edits(self) -> None:
        """Show sharded parameters again."""
        self._showing.show_sharded()
        self.state = UnitState.RESTING

    def reshard(self, *, release: bool, keeps_bytes: bool = False) -> None:
        """Show sharded parameters; with `release` also free the full buffer.

        `keeps_bytes`: its memory stays, but may not be read until the next gather.
        """
        if self.state is UnitState.UNSHARDED:
            self._keep_edits()
            self._showing.show_sharded()
            for weight in self.multiplied:
                weight.release()
            self.state = UnitState.RESTING
        if release and self.state is UnitState.RESTING and not self.is_resident:
            if self._ticket is not DONE:
                with suppress(TierError):  # nobody used what it was to bring
                    self._await_gather()
            self._fresh = False
            if self.unsharded.is_held:
                for forms, unsharded in self._forms.items():
                    take_form(forms.stale, unsharded)  # reading them is an error from now on
                for weight in self.decoded:
                    weight.release()
                if not keeps_bytes:
                    self.unsharded.release()

    def _keep_edits(self) -> None:
        """Copy in-place changes that a forward made to unsharded weights back to the shards."""
        edited = self._showing.edited()
        if not edited:
            return
        if self.is_resident:  # they are the weights at rest, under another counter
            self.edits.bump(others=1)
            return
        was_current, before = self._is_current(), self.edits.all()
        with torch.no_grad():
            for parameter in edited:
                parameter.keep_edits()
        num_kept = self.edits.all() - before
        self.edits.bump(at_rest=-num_kept, others=num_kept)
        if was_current:
            self._gathered = self.edits.all()
            self.gather.follow(self.unsharded, before)

    def replaced(self) -> None:
        """Weights were read anew on every rank, into the master where there is one."""
        self.publish(is_rounded=False)
        self.gather.forget_base()
        self.gradient.reduction.feedback.forget(self.parameters)

    # guards

    def check_untouched(self) -> None:
        """Raise `StateError` if a parameter was replaced, moved or resized since `shard`."""
        with torch._C.DisableTorchFunctionSubclass():
            self._showing.check_places()
            self._showing.check_memory()

    @property
    def owner(self) -> UnitOwner | None:
        """The engine, while it is alive."""
        return self.find_owner()

    # for parameters: uses outside the unit's own modules

    @property
    def is_in_forward(self) -> bool:
        """True while the sharded module's forward runs, or backward computes a part of it again."""
        return self.owner is not None and self.owner.is_wanted(False)

    def is_wanted_unsharded(self, parameter: UnitParameter) -> bool:
        """True if an operation on the sharded parameter needs the unsharded one."""
        with torch._C.DisableTorchFunctionSubclass():
            wants = parameter.sharded.requires_grad
        return self.owner is not None and self.owner.is_wanted(wants)

    def unshard_for_use(self, parameter: UnitParameter) -> Tensor:
        """The unsharded parameter, for an operation outside the unit's own modules."""
        assert self.owner is not None, "an operation needs the unsharded parameter of a dead engine"
        self.owner.unshard_for_use(self)
        return parameter.unsharded

    def note_data_read(self, parameter: UnitParameter) -> bool:
        """Compare its unsharded values at the next reshard; False if that was due already."""
        return self._showing.note_data_read(parameter)

    def forget_edit(self, parameter: UnitParameter) -> None:
        """Take unsharded values as they are for those that were gathered."""
        self._showing.forget_edit(parameter)

    def note_use(self, outputs: object) -> None:
        """Note results that were computed outside the unit's modules."""
        if self.owner is not None:
            self.owner.on_use(self, outputs)


def unit_of(parameter: UnitParameter) -> Unit:
    """The unit of a parameter, which knows it as a `UnitInUse`. `StateError` if it was deleted."""
    unit: Any = parameter.unit
    return unit  # type: ignore[no-any-return]
