"""One parameter of a unit: where it stands in the module tree, what it shows, where its rows lie.

face    what modules and users see at rest (unit/sharded.py)
local   [own rows] of the weight at rest, a view of the unit's weight buffer; what the face shows
whole   [all rows] in the compute dtype, a view of the unit's full buffer; what forward sees
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import TYPE_CHECKING
from weakref import ReferenceType, ref

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

from onefold.errors import StateError, expected
from onefold.layout.rows import Slot
from onefold.unit import logical
from onefold.unit import sharded as faces
from onefold.wire.collectives import Group

if TYPE_CHECKING:
    from onefold.unit.tiles import TiledWeight
    from onefold.unit.unit import Unit


class UnitParameter:
    """One parameter of a unit: its owners in the module tree, its face, its whole weight."""

    __slots__ = (
        "__weakref__", "_data", "_hooked", "_looked_at", "_resting", "_template", "_unit", "face",
        "fqn", "local", "on_grad", "owners", "slot", "tiled", "version", "whole",
    )  # fmt: skip

    def __init__(self, unit: Unit, slot: Slot, owners: Iterable[tuple[nn.Module, str]]) -> None:
        self._unit = ref(unit)
        self.slot = slot
        self.fqn = slot.fqn
        self.owners = [(ref(module), name) for module, name in owners]
        self._hooked = False
        self._resting = _why_resting(slot.fqn, unit.setting.where)
        self._template: DTensor | None = None
        self._data: Tensor | None = None  # `face.data`, once somebody took it
        self._looked_at: Tensor | None = None  # own rows of the whole weight when `.data` was taken
        self.on_grad: Callable[[UnitParameter], None] | None = None
        self.tiled: TiledWeight | None = None  # of a weight that is used in row blocks
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

    @property
    def stepped(self) -> Tensor:
        """This rank's rows of what is stepped: a view of the unit's master, or of its weight."""
        start = self.slot.shard_offsets[self.unit.setting.rest_rank]
        return self.unit.stepped[start : start + self.local.numel()].view(self.local.shape)

    def wrap(self, local: Tensor) -> Tensor:
        """`local` [own rows] as what users see: a DTensor like the face, or itself."""
        if self._template is None:
            return local
        spec = self._template._spec
        if local.shape == self.local.shape:  # from_local would copy what lies on another device
            if local.dtype != self._template.dtype and spec.tensor_meta is not None:
                spec = replace(spec, tensor_meta=spec.tensor_meta._replace(dtype=local.dtype))
            return logical.dtensor_over(DTensor, local, spec)
        return _dtensor(local, self.unit.setting.mesh, self.slot)

    def wrap_grad(self, local: Tensor) -> Tensor:
        """A reduced gradient [own rows] as users see it."""
        in_background = self.unit.steps_in_blocks
        if self._template is not None:
            shown: Tensor = logical.dtensor_over(logical.LogicalTensor, local, self._template._spec)
        else:
            shown = local.as_subclass(logical.RestingGrad) if in_background else local
        if in_background:
            faces.introduce(shown, ref(self))
        return shown

    def why_spent(self) -> str:
        """The message about a gradient that a step in backward has used up."""
        return expected(
            f"no use for the gradient of {self.fqn!r} between backward and step",
            "one, after it was stepped by and freed",
            where=self.unit.setting.where,
            hint="turn Offload.step_in_backward off to clip, scale or read gradients; of "
            "several backwards, put all but the last inside onefold.accumulate(module)",
        )

    def mean_to_come(self) -> Tensor:
        """What stands in `face.grad` while sums of micro-batches rest inside the node."""
        return self._no_mean(
            "sums of its node, before the last micro-batch",
            "clip, scale and read gradients after a backward outside of onefold.accumulate; to "
            "clear them between micro-batches, zero_grad(set_to_none=True)",
        )

    def mean_lost(self) -> Tensor:
        """What stands in `face.grad` once a backward that failed has torn earlier micro-batches'
        sums, until it is cleared.
        """
        return self._no_mean(
            "sums of micro-batches that a failed backward has torn",
            "optimizer.zero_grad(), and all micro-batches of the step anew",
        )

    def _no_mean(self, got: str, hint: str) -> Tensor:
        what = f"the gradient of {self.fqn!r} to be the mean of all ranks"
        where = self.unit.setting.where
        return logical.NoMean.like(self.face, expected(what, got, where=where, hint=hint))

    def wrap_partial(self, grad: Tensor) -> Tensor:
        """A gradient [all rows] that rests on each rank as its part of the mean."""
        if self._template is None:
            return grad
        mesh = self._template.device_mesh
        return logical.as_logical(DTensor.from_local(grad, mesh, [Partial("avg")], run_check=False))

    def unwrap(self, shown: Tensor) -> Tensor:
        """The rank's rows of a tensor shown like the face, or of a whole plain tensor."""
        if self._template is not None and isinstance(shown, DTensor):
            return shown._local_tensor
        if self._template is None or tuple(shown.shape) == tuple(self.local.shape):
            return shown
        start, stop = self.slot.pieces[self.unit.setting.rest_rank]
        return shown.reshape(-1)[start:stop].view(self.local.shape)

    def own_grad(self) -> Tensor | None:
        """The rows that the face shows as its gradient, as real numbers; None if there are none."""
        with torch._C.DisableTorchFunctionSubclass():
            shown = self.face.grad
            if shown is None or not self.local.numel():
                return None
            own = self.unwrap(shown)
            return torch.view_as_real(own) if own.is_complex() else own

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
            faces.bury(original, _why_replaced(self.fqn, setting.where))
        else:
            original.grad = None
            original.data = self.local
            faces.introduce(original, ref(self))
            if not self.unit.computes_on_faces:
                original.__class__ = faces.ReplicatedParameter
            elif self.unit.master is not None:
                original.__class__ = faces.PlainSharded
            self.face = original
        if not self.unit.computes_on_faces and requires_grad:
            self.face.register_post_accumulate_grad_hook(_DirectUse(ref(self)))
        if self.unit.compute_dtype != self.unit.dtype:
            self.face.grad_dtype = None  # a partial gradient shows in the compute dtype

    def call_hooks(self) -> None:
        """Run the user's post-accumulate hooks: faces are in no graph, so autograd cannot."""
        if self.face is not self.whole:
            for hook in list((self.face._post_accumulate_grad_hooks or {}).values()):
                if not isinstance(hook, _DirectUse):
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

    def settle(self) -> None:
        self.unit.settle()

    def check_grad(self) -> None:
        self.unit.gradient.check_there(self)

    def why_no_hook(self) -> str:
        return expected(
            f"no tensor hook on sharded parameter {self.fqn!r}",
            "register_hook, which autograd would never call",
            hint="use register_post_accumulate_grad_hook, or change gradients between backward "
            "and step",
        )

    def detached(self) -> Tensor:
        shown = self.wrap(self.local.detach())
        self.unit.note_shown(shown)
        return shown

    def is_differentiable_use(self) -> bool:
        return self.unit.is_wanted_whole(self)

    def whole_for(self) -> Tensor:
        return self.unit.summon_for_use(self)

    def refuse_other_data(self, value: Tensor) -> None:
        """`face.data = value`: only a value that is already where it belongs may come."""
        local = value._local_tensor if isinstance(value, DTensor) else value
        own = self.local
        same = (local.data_ptr(), local.dtype, local.shape) == (
            own.data_ptr(),
            own.dtype,
            own.shape,
        )
        if not same:
            raise self.unit.touched(self, "an assignment to its .data")

    def note_data_access(self) -> None:
        self.unit.note_data_access()

    def shown_data(self) -> Tensor:
        """`face.data`, always the same: it counts its edits itself, so they are told from looks.

        Where no counter tells (plain tensors on a device, inference mode), expect the worst.
        """
        with torch._C.DisableTorchFunctionSubclass():
            if self._template is None or torch.is_inference_mode_enabled():
                self.unit.note_data_access()
                return self.face.data
            if self._data is None:
                self._data = self.face.data
                self._data.__class__ = logical.ShownData
            return self._data

    @property
    def edits_by_data(self) -> int:
        """How often the weight at rest was changed by way of `face.data`."""
        return 0 if self._data is None else self._data._version

    @property
    def edits_by_users(self) -> int:
        """How often the weight at rest was changed through its face, or by way of `.data`."""
        with torch._C.DisableTorchFunctionSubclass():
            return self.face._version + self.edits_by_data

    def note_whole_edit(self) -> None:
        if self.whole._version == self.version and not self.unit.is_resident:
            self._looked_at = self._own_rows_of_whole().clone()
        self.version = -1

    def _own_rows_of_whole(self) -> Tensor:
        start, stop = self.slot.pieces[self.unit.setting.rest_rank]
        with torch.no_grad():
            return self.whole.detach().reshape(-1)[start:stop].view(self.local.shape)

    def keep_edits(self) -> None:
        """Bring edits made to the whole weight back to own rows.

        Elements that were not changed stay as they rest: more exact than what computes, maybe.
        """
        before, self._looked_at = self._looked_at, None
        now = self._own_rows_of_whole()
        if before is None:
            before = self.local.to(now)
        changed = (now != before).to(self.local.device)
        self.local.copy_(torch.where(changed, now.to(self.local), self.local))

    def used_by(self, outputs: object) -> None:
        self.unit.note_use(outputs)


class _DirectUse:
    """Autograd accumulated into a face, so an operation used it where no dispatch could see it."""

    def __init__(self, parameter: ReferenceType[UnitParameter]) -> None:
        self.parameter = parameter

    def __call__(self, face: Tensor) -> None:
        parameter = self.parameter()
        if isinstance(face.grad, DTensor):  # of an operation that DTensor defines: full_tensor()
            return
        if parameter is not None:
            raise StateError(
                expected(
                    f"parameter {parameter.fqn!r} to be used by its own module, or by functions",
                    "a use inside a torch.autograd.Function outside that module",
                    where=parameter.unit.setting.where,
                    hint="pass `weight.view_as(weight)`, or call the function in the module that "
                    "owns the weight",
                )
            )


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
    return DTensor.from_local(local, mesh, [placement], run_check=False, shape=shape, stride=stride)


def _why_replaced(fqn: str, where: str) -> str:
    return expected(
        f"the parameter that {fqn!r} is now",
        "the object it was before onefold.shard replaced it",
        where=where,
        hint="pass the optimizer to onefold.shard, or build optimizers and lists of parameters "
        "from module.parameters() after it",
    )


def _why_resting(fqn: str, where: str) -> str:
    return expected(
        f"whole weight {fqn!r} to be used while its module runs",
        "a use after it was sharded again",
        where=where,
        hint="read module parameters anew, or inside `with onefold.unsharded(module):`",
    )
