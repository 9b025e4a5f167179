"""UnitParameter: one parameter of a unit, its place in the module tree and its two forms.

face    the sharded parameter: modules and users see it at rest (unit/dtensors.py)
local   [own rows] of the weight at rest, a view of the unit's weight buffer; the face shows it
whole   the unsharded parameter: [all rows] in the compute dtype, a view of the unit's full buffer
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any
from weakref import ReferenceType, ref

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

from onefold.errors import StateError
from onefold.layout.rows import Slot
from onefold.unit import dtensors, logical, refusals
from onefold.unit.dtensors import ParameterHome
from onefold.unit.spec import UnitSpec
from onefold.wire.collectives import Group


class UnitParameter:
    """One parameter of a unit: its owners in the module tree, its sharded and unsharded forms."""

    __slots__ = (
        "__weakref__",
        "_data",
        "_hooked",
        "_looked_at",
        "_resting",
        "_template",
        "_unit",
        "fqn",
        "index",
        "label",
        "local",
        "owners",
        "sharded",
        "slot",
        "span",
        "spec",
        "unsharded",
        "version",
    )  # fmt: skip

    def __init__(
        self, unit: ParameterHome, spec: UnitSpec, index: int, weight: Tensor,
        owners: Iterable[tuple[nn.Module, str]],
    ) -> None:  # fmt: skip
        self._unit = ref(unit)
        self.spec = spec
        self.index = index  # in the unit
        slot = self.slot = spec.rest.slots[index]
        rank = spec.context.rest_rank
        start, numel = slot.shard_offsets[rank], slot.piece_numel(rank)
        self.span = slice(start, start + numel)  # of own rows, in the unit's flat buffers
        self.local = weight[self.span].view(slot.piece_shape(rank))
        self.fqn = slot.fqn
        self.label = f"parameter {slot.fqn!r} on {spec.context.where}"
        self.owners = [(ref(module), name) for module, name in owners]
        self._hooked = False
        self._resting = refusals.why_resting(slot.fqn, spec.context.where)
        self._template: DTensor | None = None
        self._data: Tensor | None = None  # `face.data`, once somebody took it
        self._looked_at: Tensor | None = None  # own rows of the whole weight when `.data` was taken
        self.version = 0  # of the whole weight, when it was gathered
        self.sharded: nn.Parameter
        self.unsharded: nn.Parameter

    @property
    def unit(self) -> Any:
        """The `Unit`. Untyped here: units are built of parameters."""
        return self.home

    @property
    def home(self) -> ParameterHome:
        """The unit, as a parameter knows it. Raises `StateError` if the module was deleted."""
        unit = self._unit()
        if unit is None:
            raise refusals.deleted(self.fqn)
        return unit

    @property
    def stepped(self) -> Tensor:
        """This rank's rows of the tensor that is stepped: a view of the master, or the weight."""
        return self.own_rows(self.home.stepped)

    def own_rows(self, flat: Tensor) -> Tensor:
        """This rank's rows in a flat buffer of the unit's shard, in the shape of `local`."""
        return flat[self.span].view(self.local.shape)

    def own_part(self, whole: Tensor) -> Tensor:
        """This rank's piece of a whole tensor."""
        return self.slot.own_view(whole, self.spec.context.rest_rank)

    # as users see it

    def wrap(self, local: Tensor) -> Tensor:
        """`local` [own rows] as users see it: a DTensor like the face, or itself."""
        if self._template is None:
            return local
        spec = self._template._spec
        if local.shape == self.local.shape:  # from_local would copy rows of another device
            if local.dtype != self._template.dtype and spec.tensor_meta is not None:
                spec = replace(spec, tensor_meta=spec.tensor_meta._replace(dtype=local.dtype))
            return logical.dtensor_over(logical.kind_over(spec), local, spec)
        shown = _dtensor(local, self.spec.context.mesh, self.slot)
        return logical.dtensor_over(logical.kind_over(spec), local, shown._spec)

    def wrap_grad(self, local: Tensor) -> Tensor:
        """A reduced gradient [own rows] as users see it."""
        in_background = self.spec.steps_in_blocks
        if self._template is not None:
            shown: Any = logical.dtensor_over(logical.LogicalTensor, local, self._template._spec)
            shown._label = self.label
        else:
            shown = local.as_subclass(logical.RestingGrad) if in_background else local
        if in_background:
            dtensors.introduce(shown, ref(self))
        return shown

    def wrap_partial(self, grad: Tensor) -> Tensor:
        """A gradient [all rows] that rests on each rank as its part of the mean."""
        if self._template is None:
            return grad
        mesh = self._template.device_mesh
        return logical.as_logical(DTensor.from_local(grad, mesh, [Partial("avg")], run_check=False))

    def no_mean(self, *, is_lost: bool) -> Tensor:
        """Stands in `face.grad` while sums rest inside the node, or after a backward tore them."""
        why = refusals.why_no_mean(self.fqn, self.spec.context.where, is_lost=is_lost)
        return logical.NoMean.like(self.sharded, why)

    def unwrap(self, shown: Tensor) -> Tensor:
        """The rank's rows of a tensor shown like the face, or of a whole plain tensor."""
        if self._template is not None and isinstance(shown, DTensor):
            return shown._local_tensor
        if self._template is None or tuple(shown.shape) == tuple(self.local.shape):
            return shown
        return self.own_part(shown)

    def own_grad(self) -> Tensor | None:
        """The rows that the face shows as its gradient, as real numbers; None if there are none."""
        with torch._C.DisableTorchFunctionSubclass():
            shown = self.sharded.grad
            if shown is None or not self.local.numel():
                return None
            own = self.unwrap(shown)
            return torch.view_as_real(own) if own.is_complex() else own

    def shown_like_sharded(self, value: Tensor) -> Tensor:
        """A whole or already sharded tensor, in the form that can be copied into the face."""
        if self._template is None:
            return value.full_tensor() if isinstance(value, DTensor) else value
        if isinstance(value, DTensor):
            return value
        return self.wrap(self.unwrap(value).to(self.local))

    # its two forms

    def show(self, parameter: nn.Parameter) -> None:
        """Put `parameter` into every owner, as assignment would, without its checks."""
        for owner, name in self.owners:
            module = owner()
            if module is not None:
                module._parameters[name] = parameter

    def build(self, original: nn.Parameter, full: Callable[[int, tuple[int, ...]], Tensor]) -> None:
        """Build both forms and show the face; `original` becomes the face, or is stale.

        `full` gives views of the unit's full buffer.
        """
        self._make_sharded(original)
        if self.spec.computes_on_sharded:
            self.unsharded = self.sharded
        else:
            view = full(self.slot.full_offset, self.slot.shape)
            self.unsharded = nn.Parameter(view, requires_grad=False)
            dtensors.introduce(self.unsharded, ref(self))
            self.invalidate_whole()
        if self.sharded.requires_grad:
            with torch._C.DisableTorchFunctionSubclass():
                self.follow_requires_grad()
        self.show(self.sharded)

    def _make_sharded(self, original: nn.Parameter) -> None:
        spec, context = self.spec, self.spec.context
        requires_grad = original.requires_grad
        original.grad = None
        if context.mesh is not None:
            self._template = _dtensor(self.local, context.mesh, self.slot)
            self.sharded = dtensors.sharded_parameter(
                self.local, self._template, ref(self), self.label
            )
            self.sharded.requires_grad_(requires_grad)
            original.data = original.data.new_empty(0)  # whoever holds the object holds no bytes
            dtensors.invalidate(original, refusals.why_replaced(self.fqn, context.where))
        else:
            original.data = self.local
            dtensors.introduce(original, ref(self))
            if not spec.computes_on_sharded:
                original.__class__ = dtensors.ReplicatedParameter
            elif context.master.itemsize > spec.dtype.itemsize and spec.dtype.is_floating_point:
                original.__class__ = dtensors.PlainSharded
            self.sharded = original
        if not spec.computes_on_sharded and requires_grad:
            self.sharded.register_post_accumulate_grad_hook(_DirectUse(ref(self)))
        if spec.compute_dtype != spec.dtype:
            self.sharded.grad_dtype = None  # a partial gradient shows in the compute dtype

    def show_whole(self) -> None:
        """Show the unsharded parameter, whose values have just been gathered."""
        if self.unsharded is not self.sharded:
            self.unsharded.__class__ = dtensors.UnshardedParameter
            self.follow_requires_grad()
            self.version = self.unsharded._version
            self.show(self.unsharded)
        elif self.sharded.requires_grad:
            self.follow_requires_grad()

    def invalidate_whole(self) -> None:
        """Make reading the unsharded parameter an error: its bytes are about to go."""
        if self.unsharded is not self.sharded:
            dtensors.invalidate(self.unsharded, self._resting)

    def is_untouched(self) -> bool:
        """True if the face shows the own memory still."""
        if self._template is not None:
            return self.sharded._local_tensor is self.local  # type: ignore[attr-defined]
        sharded, local = self.sharded, self.local
        return sharded.data_ptr() == local.data_ptr() and sharded.shape == local.shape

    def touched(self, got: str) -> StateError:
        """The error for a parameter that was replaced, moved or resized."""
        return refusals.touched(self.fqn, self.spec.context.where, got)

    # gradients

    def call_hooks(self) -> None:
        """Run the user's post-accumulate hooks: faces are in no graph, so autograd cannot."""
        hooks = (
            self.sharded._post_accumulate_grad_hooks if self.sharded is not self.unsharded else None
        )
        for hook in list((hooks or {}).values()):
            if not isinstance(hook, _DirectUse):
                hook(self.sharded)

    def follow_requires_grad(self) -> None:
        """Let the unsharded parameter train when, and only when, the face says so."""
        wanted = self.sharded.requires_grad
        if self.unsharded.requires_grad != wanted:
            self.unsharded.requires_grad_(wanted)
        if wanted and not self._hooked:
            self._hooked = True
            self.unsharded.register_post_accumulate_grad_hook(_grad_hook(ref(self)))

    # edits

    @property
    def user_edits(self) -> int:
        """How often users changed the weight at rest: through its face, or by way of `.data`."""
        with torch._C.DisableTorchFunctionSubclass():
            return self.sharded._version + (0 if self._data is None else self._data._version)

    def note_whole_edit(self) -> None:
        """`.data` of the unsharded parameter was taken: compare values at the next reshard."""
        if self.unsharded._version == self.version and not self.spec.is_resident:
            with torch.no_grad():
                self._looked_at = self.own_part(self.unsharded.detach()).clone()
        self.version = -1

    def keep_edits(self) -> None:
        """Bring edits made to the unsharded parameter back to own rows.

        Elements that did not change stay as they rest, maybe in a wider dtype.
        """
        before, self._looked_at = self._looked_at, None
        with torch.no_grad():
            now = self.own_part(self.unsharded.detach())
        if before is None:
            before = self.local.to(now)
        changed = (now != before).to(self.local.device)
        self.local.copy_(torch.where(changed, now.to(self.local), self.local))

    # for its face (`ParameterOwner` of unit/dtensors.py)

    @property
    def group(self) -> Group:
        return self.spec.context.transport.group

    def refuse_hook(self) -> None:
        raise refusals.tensor_hook(self.fqn)

    def detached(self) -> Tensor:
        shown = self.wrap(self.local.detach())
        self.home.note_shown(shown)
        return shown

    def refuse_other_data(self, value: Tensor) -> None:
        """`face.data = value`: accept only a value that is already in its place."""
        local = value._local_tensor if isinstance(value, DTensor) else value
        own = self.local
        found = (local.data_ptr(), local.dtype, local.shape)
        if found != (own.data_ptr(), own.dtype, own.shape):
            raise self.touched("an assignment to its .data")

    def shown_data(self) -> Tensor:
        """`face.data`, always the same object: it counts edits itself, so reads count as none.

        Where nothing counts them (plain tensors on a device, inference mode), assume an edit.
        """
        with torch._C.DisableTorchFunctionSubclass():
            if self._template is None or torch.is_inference_mode_enabled():
                self.home.note_data_access()
                return self.sharded.data
            if self._data is None:
                self._data = self.sharded.data
                self._data.__class__ = logical.ShownData
                self._data._label = self.label  # type: ignore[attr-defined]
                self.home.count_edits_of(self._data)
            return self._data


class _DirectUse:
    """Autograd accumulated into a face, so an operation used it where no dispatch could see it."""

    def __init__(self, parameter: ReferenceType[UnitParameter]) -> None:
        self.parameter = parameter

    def __call__(self, sharded: Tensor) -> None:
        parameter = self.parameter()
        if isinstance(sharded.grad, DTensor):  # of an operation that DTensor defines: full_tensor()
            return
        if parameter is not None:
            raise refusals.direct_use(parameter.fqn, parameter.spec.context.where)


def _grad_hook(parameter: ReferenceType[UnitParameter]) -> Callable[[Tensor], None]:
    def on_accumulated(_: Tensor) -> None:
        alive = parameter()
        unit = None if alive is None else alive._unit()
        if alive is not None and unit is not None:
            unit.on_grad(alive)

    return on_accumulated


def _dtensor(local: Tensor, mesh: DeviceMesh | None, slot: Slot) -> DTensor:
    placement = Replicate() if slot.replicated else Shard(slot.dim)
    shape = torch.Size(slot.shape)
    stride = torch.empty(shape, device="meta").stride()
    return DTensor.from_local(local, mesh, [placement], run_check=False, shape=shape, stride=stride)
