"""UnitParameter: one parameter of a unit, its place in the module tree and its two forms.

sharded    what modules and users see at rest: a DTensor over `local`, or `local` itself
local      [own rows] of the weight at rest, a view of the unit's weight buffer
unsharded  what modules compute with: [all rows] in the compute dtype, a view of the full buffer
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable
from functools import cached_property, partial
from math import prod
from typing import Any
from weakref import ref

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils.hooks import RemovableHandle

from onefold.errors import StateError
from onefold.layout.model_axes import local_of
from onefold.layout.units import Owned
from onefold.unit import dtensors, logical, refusals, shown_grads, user_hooks, whole
from onefold.unit.context import UnitInUse, UnitSpec
from onefold.unit.forms import Form, Forms
from onefold.unit.sharded_form import ShardedForm
from onefold.wire.collectives import Group


class UnitParameter(ShardedForm):
    """One parameter of a unit: its owners in the module tree, its sharded and unsharded forms."""

    def __init__(
        self, unit: UnitInUse, spec: UnitSpec, index: int, weight: Tensor, owned: Owned
    ) -> None:
        self.find_unit = ref(unit)
        self.index = index  # in the unit
        self.model = owned.model  # its cut over model axes
        self._cut(spec, weight)
        self.full_nbytes = self.slot.numel * spec.compute_dtype.itemsize  # unsharded
        self.rename(self.slot.fqn)
        self.places = owned.places
        self.kernel_places = owned.kernel_places
        self.forms: Forms  # of `unsharded`
        self._bare: Tensor  # the values of `unsharded`, for kernels
        self._is_hooked = False
        self.first_hooks: OrderedDict[int, Callable[[Tensor], object]] = OrderedDict()
        self.num_hooks = 0  # that refuse a gradient of the sharded parameter
        self._template: DTensor | None = None
        self.is_dtensor = False  # its sharded form is one
        self._empty = self.local.new_empty(0)
        self._data: Tensor | None = None  # `sharded.data`, once somebody read it
        self._before_edit: Tensor | None = None  # own rows when `unsharded.data` was read
        self.sharded: nn.Parameter
        self.unsharded: nn.Parameter

    def _cut(self, spec: UnitSpec, weight: Tensor) -> None:
        """Find own rows in the unit's flat weight."""
        self.spec = spec
        slot = self.slot = spec.rest.slots[self.index]
        rank = spec.context.rest_rank
        start, shape = spec.rest.starts(rank)[self.index], slot.cut.piece_shape(rank)
        self.span = slice(start, start + prod(shape))  # of own rows, in the unit's flat buffers
        self.local = weight[self.span].view(shape)

    def recut(self, spec: UnitSpec, weight: Tensor) -> None:
        """Show other rows, which lie in `weight`. The parameter stays the same object."""
        self._cut(spec, weight)
        self._data = self._before_edit = None
        self._template = self.make_template()
        assert self._template is not None, "rows move between ranks, which see DTensors"
        sharded: Any = self.sharded
        sharded._local_tensor, sharded._spec = self.shown_local, self._template._spec

    @property
    def unit(self) -> UnitInUse:
        """Its unit; rooms above ask `unit_of` for all of it. `StateError` if it was deleted."""
        unit = self.find_unit()
        if unit is None:
            raise refusals.DELETED(self.fqn)
        return unit

    @property
    def shown_local(self) -> Tensor:
        """Own rows as users see them in a DTensor."""
        return self.local

    def shown_sharded(self) -> Tensor:
        """The sharded parameter, for an operation at rest."""
        return self.sharded

    @property
    def stepped(self) -> Tensor:
        """This rank's rows of the tensor that is stepped: a view of the master, or the weight."""
        return self.own_rows(self.unit.stepped)

    def own_rows(self, flat: Tensor) -> Tensor:
        """This rank's rows in a flat buffer of the unit's shard, in the shape of `local`."""
        return flat[self.span].view(self.local.shape)

    # as users see it

    def no_mean(self, why: refusals.Refusal = refusals.NO_MEAN_YET) -> Tensor:
        """A stand-in for `sharded.grad` while there is no mean."""
        where = self.spec.context.where
        return shown_grads.NoMean.like(self.sharded, partial(why, self.fqn, where=where))

    @cached_property
    def lost_mean(self) -> Tensor:
        """The stand-in for a sum that a failed backward has torn, or that is on its way."""
        return self.no_mean(refusals.LOST_MEAN)

    def own_grad(self) -> Tensor | None:
        """Own rows of `sharded.grad`, as real numbers; None if there are none."""
        with torch._C.DisableTorchFunctionSubclass():
            shown = self.sharded._grad
            if shown is None or not self.local.numel():
                return None
            own = self.unwrap(shown)
            return torch.view_as_real(own) if own.is_complex() else own

    # its two forms

    is_table = False  # a side table of a packed weight: it is in no module

    def current(self) -> Tensor | None:
        """The tensor in its place: this one, or one that the user put there."""
        parameters, name = self.places[0]
        return parameters.get(name)

    def rename(self, fqn: str) -> None:
        """Note its name."""
        self.fqn = fqn
        self.label = f"parameter {fqn!r} on {self.spec.context.where}"

    def move(self, fqn: str, owners: Iterable[tuple[nn.Module, str]]) -> None:
        """Note its name, and all its places in the module tree; none: it was removed."""
        self.rename(fqn)
        self.places = [(module._parameters, name) for module, name in owners]

    def drop_empty_places(self) -> None:
        """Forget places from which it was removed."""
        self.places = [place for place in self.places if place[0].get(place[1]) is not None]

    def show(self, parameter: nn.Parameter) -> None:
        """Put `parameter` into every place, as assignment would, without its checks."""
        for parameters, name in self.places:
            parameters[name] = parameter
        for state, name in self.kernel_places:
            is_sharded = parameter is self.sharded and parameter is not self.unsharded
            state[name] = parameter if is_sharded else parameter.data

    def show_values(self) -> None:
        """Show unsharded values where kernels take plain tensors."""
        if self.unsharded is not self.sharded:
            for state, name in self.kernel_places:
                state[name] = self._bare

    def build(self, original: nn.Parameter, full: Callable[[int, tuple[int, ...]], Tensor]) -> None:
        """Build both forms and show the sharded one; `original` becomes that, or is stale.

        `full` gives views of the unit's full buffer.
        """
        self._make_sharded(original)
        vars(self.sharded).update(self.attributes_on(original))
        if self.spec.computes_on_sharded:
            self.unsharded = self.sharded
        else:
            self._bare = full(self.slot.full_offset, self.slot.shape)
            view = self._computed(self._bare)
            self.unsharded = nn.Parameter(view, requires_grad=False)
            vars(self.unsharded).update(self.attributes)
            dtensors.introduce(self.unsharded, ref(self))
            why = partial(refusals.STALE, self.fqn, where=self.spec.context.where)
            self.forms = self._forms_over(view, invalidate(self.unsharded, why))
        if self.sharded.requires_grad:
            with torch._C.DisableTorchFunctionSubclass():
                self.follow_requires_grad()
        self.show(self.sharded)

    def _computed(self, view: Tensor) -> Tensor:
        """What modules compute with, over a `view` [all rows] of the full buffer."""
        return view if self.model is None else self.model.over(view)

    def _forms_over(self, view: Tensor, stale: Form) -> Forms:
        """The forms of the unsharded parameter over `view`."""
        return Forms(Form.OVER_AXES if isinstance(view, DTensor) else Form.UNSHARDED, stale)

    def _make_sharded(self, original: nn.Parameter) -> None:
        spec, context = self.spec, self.spec.context
        requires_grad = original.requires_grad
        original.grad = None
        self._template = self.make_template()
        self.is_dtensor = self._template is not None
        if self._template is not None:
            self.sharded = dtensors.sharded_parameter(
                self.shown_local, self._template, ref(self), self.label
            )
            self.sharded.requires_grad_(requires_grad)
            user_hooks.carry_over(original, self.sharded)
            dtensors.drop_values(original)  # whoever holds the object holds no bytes
            why = partial(refusals.REPLACED, self.fqn, where=context.where)
            invalidate(original, why)
        else:
            original.data = self.local
            whole.introduce(original, ref(self))
            if not spec.computes_on_sharded:
                take_form(Form.REPLICATED, (original,))
            elif context.master.itemsize > spec.dtype.itemsize and spec.dtype.is_floating_point:
                take_form(Form.WATCHED, (original,))
            self.sharded = original
        if not spec.computes_on_sharded and requires_grad:
            self.sharded.register_post_accumulate_grad_hook(dtensors.DirectUse(ref(self)))
            self.num_hooks = 1
        if spec.compute_dtype != spec.dtype:
            self.sharded.grad_dtype = None  # a partial gradient shows in the compute dtype

    def plain(self, view: Tensor) -> nn.Parameter:
        """A parameter over `view` [all rows] as it was before `shard`."""
        shown = view if self.model is None else self.model.over(view)
        parameter = nn.Parameter(shown, requires_grad=self.sharded.requires_grad)
        vars(parameter).update(self.attributes)
        return parameter

    def rows_of(self, plain: Tensor | None) -> Tensor | None:
        """Own rows of what `plain` has become, to be kept; None if it has another shape now."""
        if plain is None or tuple(plain.shape) != self.shape:
            return None
        is_piece = self.model is None or self.model.is_plain or isinstance(plain, DTensor)
        return self.own_piece(local_of(plain.detach())) if is_piece else self.unwrap(plain.detach())

    def check_own(self) -> None:
        """Raise `StateError` if the sharded parameter was moved or resized since `shard`."""
        sharded, local = self.sharded, self.local
        is_own = sharded.data_ptr() == local.data_ptr() and sharded.shape == local.shape
        if self.is_dtensor or not is_own:
            raise self.touched("one that was moved, cast or resized")

    def touched(self, got: str) -> StateError:
        """The error for a parameter that was replaced, moved or resized."""
        return refusals.TOUCHED(self.fqn, got, where=self.spec.context.where)

    def rest_in(self, rows: Tensor) -> None:
        """Own rows rest in other memory from now on."""
        self.local = rows

    # gradients

    @property
    def partial_grad(self) -> Tensor | None:
        """This rank's partial gradient [all rows], as a plain tensor; None if there is none."""
        grad = self.unsharded.grad
        return grad if grad is None or self.model is None else local_of(grad)

    def set_partial_grad(self, grad: Tensor) -> None:
        """Show a partial gradient [all rows] on the unsharded parameter."""
        self.unsharded.grad = whole.shown(grad) if self.model is None else self.model.over(grad)

    def flat_partial(self) -> Tensor:
        """This rank's partial gradient as one dense row; zeros if there is none."""
        grad = self.unsharded.grad if self.model is None else self.partial_grad
        if grad is None:
            dtype, device = self.spec.compute_dtype, self.unsharded.device
            return torch.zeros(self.slot.numel, dtype=dtype, device=device)
        dense = grad if grad.layout is torch.strided else grad.to_dense()
        return dense.ravel()

    def fit_grad(self) -> None:
        """Make a gradient that autograd has accumulated fit the parameter's model axes.

        An operation on DTensors may leave a partial sum on each rank of the model axes. The sum is
        taken here, in the order of backward: it is the same on all these ranks.
        """
        for hook in self.first_hooks.values():
            hook(self.unsharded)
        grad, model = self.unsharded.grad, self.model
        if isinstance(grad, DTensor) and model is not None:
            with torch.no_grad(), torch._C.DisableTorchFunctionSubclass():
                if grad.placements != model.placements:
                    grad = grad.redistribute(placements=model.placements)
                await_local = getattr(grad._local_tensor, "wait", None)  # of a collective
                local = grad._local_tensor if await_local is None else await_local()
                self.set_partial_grad(local)

    def follow_requires_grad(self) -> None:
        """Let the unsharded parameter train if, and only if, the sharded one requires it."""
        wanted = self.sharded.requires_grad
        if self.unsharded.requires_grad != wanted:
            self.unsharded.requires_grad_(wanted)
        if wanted and not self._is_hooked:
            self._is_hooked = True
            hook = partial(dtensors.on_accumulated, ref(self))
            user_hooks.register_first(self.unsharded, hook)

    # edits

    def note_unsharded_data(self) -> None:
        """`.data` of the unsharded parameter was read: compare values at the next reshard."""
        if self.unit.note_data_read(self) and not self.spec.is_resident:
            with torch.no_grad():
                self._before_edit = self.own_piece(local_of(self.unsharded.detach())).clone()

    def keep_edits(self) -> None:
        """Bring edits made to the unsharded parameter back to own rows.

        Elements that did not change stay as they rest, maybe in a wider dtype.
        """
        before, self._before_edit = self._before_edit, None
        with torch.no_grad():
            now = self.own_piece(local_of(self.unsharded.detach()))
        if before is None:
            before = self.local.to(now)
        changed = (now != before).to(self.local.device)
        self.local.copy_(torch.where(changed, now.to(self.local), self.local))

    # for the sharded parameter (unit/dtensors.py)

    @property
    def group(self) -> Group:
        context = self.spec.context
        return context.holders or context.transport.group

    def register_first(self, hook: Callable[[Tensor], object]) -> RemovableHandle:
        """Run a hook of the unsharded parameter before its gradient can be reduced."""
        handle = RemovableHandle(self.first_hooks)
        self.first_hooks[handle.id] = hook
        return handle

    def detached(self) -> Tensor:
        """The sharded parameter as `detach` shows it, of this rank's memory."""
        shown = self.wrap(self.shown_local.detach())
        if isinstance(shown, DTensor):
            shown.__class__ = logical.DetachedShard
            dtensors.introduce(shown, ref(self))
        self.unit.note_shown(shown)
        return shown

    def refuse_other_data(self, value: Tensor) -> None:
        """`sharded.data = value`: accept only the memory that the parameter has already."""
        local = value._local_tensor if isinstance(value, DTensor) else value
        memories = {(x.data_ptr(), x.dtype, x.shape) for x in (local, self.local)}
        if len(memories) > 1:
            raise self.touched("an assignment to its .data")

    def shown_data(self) -> Tensor:
        """`sharded.data`, always the same object: it counts edits itself, so reading is free.

        Where nothing counts them (plain tensors on a device, inference mode), assume an edit.
        """
        with torch._C.DisableTorchFunctionSubclass():
            if self._template is None or torch.is_inference_mode_enabled():
                self.unit.edits.bump(others=1)
                return logical.as_logical(self.shown_sharded().data)
            if self._data is None:
                self._data = self.sharded.data
                self._data.__class__ = logical.ShownData
                self._data._label = self.label  # type: ignore[attr-defined]
                dtensors.introduce(self._data, ref(self))
                self.unit.edits.watch_data(self._data)
            return self._data


def user_edits(parameters: Iterable[UnitParameter]) -> list[int]:
    """How often users changed each sharded parameter, also by way of its `.data`."""
    with torch._C.DisableTorchFunctionSubclass():
        return [
            p.sharded._version + (0 if p._data is None else p._data._version) for p in parameters
        ]


def with_gradient(parameters: Iterable[UnitParameter]) -> list[UnitParameter]:
    """Return those whose sharded parameter shows a gradient."""
    with torch._C.DisableTorchFunctionSubclass():
        return [p for p in parameters if p.sharded._grad is not None]


def take_form(
    form: Form, parameters: Iterable[Tensor], library: type[Tensor] | None = None
) -> None:
    """Let parameter objects take a form, each of their unit; `library`: the class of LIBRARY."""
    kind: Any = form.kind or library
    for parameter in parameters:
        parameter.__class__ = kind


def invalidate(parameter: nn.Parameter, why: Callable[[], StateError]) -> Form:
    """Make every later use of the object a `StateError` that says `why`; return its form."""
    form = Form.STALE_AXES if isinstance(parameter, DTensor) else Form.STALE
    take_form(form, (parameter,))
    setattr(parameter, "_why", why)  # noqa: B010 - the class is new, the object is not
    return form
