"""ShardedForm: this rank's piece of a parameter as users see it, and tensors shaped like it.

    one process            the plain tensor
    stages 1 to 3          a DTensor over the data axis
    after tensor parallel  a DTensor over the model axes, and the data axis last (stages 1 to 3)

See layout/model_axes.py for parameters that model axes have cut before.
"""

from collections.abc import Mapping
from dataclasses import replace
from itertools import islice
from typing import Any
from weakref import ref

from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement

from onefold.layout.cut import Box
from onefold.layout.model_axes import ModelCut, dtensor_of
from onefold.layout.rows import Slot
from onefold.unit import dtensors, logical, shown_grads, whole
from onefold.unit.context import UnitSpec
from onefold.unit.cut_dtensor import offsets_of
from onefold.unit.decoded import DecodedWeight

OURS = {"_is_param", "_label", "_onefold_owner", "_why", "full_tensor", "to_local"}
"""Attributes that torch and Onefold put on a parameter object."""


class ShardedForm:
    """The sharded form of one parameter."""

    spec: UnitSpec
    slot: Slot
    local: Tensor
    model: ModelCut | None
    label: str
    sharded: nn.Parameter
    _template: DTensor | None
    _empty: Tensor
    decoded: DecodedWeight | None = None  # the numbers of a quantized weight

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the parameter over all axes."""
        return self.slot.shape if self.model is None else self.model.shape

    @property
    def attributes(self) -> dict[str, Any]:
        """What users and libraries have put on the sharded parameter."""
        return self.attributes_on(self.sharded)

    def attributes_on(self, parameter: nn.Parameter) -> dict[str, Any]:
        """What they have put on one of its forms."""
        return {name: value for name, value in vars(parameter).items() if name not in OURS}

    @property
    def box(self) -> Box:
        """Offsets and sizes of this rank's piece in the parameter over all axes."""
        if self.model is None or self._template is None:
            return self.slot.cut.box(self.spec.context.rest_rank)
        return offsets_of(self._template), tuple(self.local.shape)

    def is_writer(self, number: int) -> bool:
        """True if this rank writes its piece to a file; ranks that hold the same piece take turns.

        `number`: of the parameter. Over model axes the first rank that holds a piece writes it.
        """
        context, model = self.spec.context, self.model
        everyone, world = context.routes.group, context.world_size
        copies, own = everyone.world_size // world, everyone.rank // world
        if context.rest_world == 1 or self.slot.replicated:
            copies, own = everyone.world_size, everyone.rank
        placements = enumerate(() if model is None else model.placements)
        axes = [axis for axis, placement in placements if placement.is_replicate()]
        is_first = model is None or not any(map(model.mesh.get_local_rank, axes))
        return is_first and number % copies == own

    def make_template(self) -> DTensor | None:
        """The DTensor that all others are shaped like; None where users see plain tensors."""
        mesh = self.spec.context.mesh
        data: tuple[Placement, ...] = ()
        if mesh is not None:
            data = (Replicate() if self.slot.replicated else Shard(self.slot.cut.dim),)
        if self.model is None:
            return None if mesh is None else self._over(self.local, data)
        return self._over(self.local, (*self.model.placements, *data))

    def _over(self, local: Tensor, placements: tuple[Placement, ...]) -> DTensor:
        context, model = self.spec.context, self.model
        mesh = context.mesh if model is None else context.mesh_with(model.mesh)
        return dtensor_of(local, mesh, placements, self.shape)

    def own_piece(self, full: Tensor) -> Tensor:
        """This rank's piece of a tensor [all rows] that the data axis cuts."""
        return self.slot.cut.own_view(full, self.spec.context.rest_rank)

    def wrap(self, local: Tensor) -> Tensor:
        """Wrap `local` [own rows] in a DTensor like the sharded parameter, if that is one."""
        if self._template is None:
            return local
        spec = self._template._spec
        if local.shape == self.local.shape:  # from_local would copy rows of another device
            if local.dtype != self._template.dtype and spec.tensor_meta is not None:
                spec = replace(spec, tensor_meta=spec.tensor_meta._replace(dtype=local.dtype))
        else:
            spec = self._over(local, self._template.placements)._spec
        return logical.dtensor_over(logical.LogicalTensor, local, spec)

    def wrap_grad(self, local: Tensor) -> Tensor:
        """Wrap a reduced gradient [own rows] for `sharded.grad`."""
        in_background = self.spec.steps_in_blocks
        if self._template is not None:
            kind, spec = logical.LogicalTensor, self._template._spec
            shown: Tensor = logical.dtensor_over(kind, local, spec, self._empty)
            shown._label = self.label  # type: ignore[attr-defined]
        else:
            is_own = not in_background and local.device == self.sharded.device
            shown = (
                whole.shown(local)
                if is_own
                else shown_grads.RestingGrad.showing(local, self.sharded)
            )
        if in_background:
            dtensors.introduce(shown, ref(self))  # type: ignore[arg-type]
        return shown

    def wrap_partial(self, grad: Tensor) -> Tensor:
        """Wrap this rank's partial gradient [all rows], which waits for its reduction."""
        if self._template is None:
            return whole.shown_partial(grad, self.spec.context.transport.group)
        model = () if self.model is None else self.model.placements
        data = () if self.spec.context.mesh is None else (Partial("avg"),)
        return logical.as_logical(self._over(grad, (*model, *data)))

    def unwrap_partial(self, shown: Tensor) -> Tensor | None:
        """Undo `wrap_partial`; None for a tensor that is no rank's part of a mean."""
        if self._template is None:
            return shown
        is_partial = isinstance(shown, DTensor) and shown.placements[-1] == Partial("avg")
        return shown._local_tensor if is_partial else None  # type: ignore[attr-defined]

    def unwrap(self, shown: Tensor) -> Tensor:
        """The rank's rows of a tensor shown like the sharded parameter, or of a plain tensor."""
        if self._template is None:
            return shown_grads.values_of(shown)  # type: ignore[no-any-return]
        if isinstance(shown, DTensor):
            return self._unwrap_dtensor(shown)
        if tuple(shown.shape) == tuple(self.local.shape):
            return shown
        return self.own_piece(shown if self.model is None else self.model.piece_of(shown))

    def holds_own_rows(self, shown: DTensor) -> bool:
        """True unless `shown` was made on another rank, or is cut over other ranks or shares.

        A DTensor keeps the place of the rank that made it, also in a file.
        """
        template, model = self._template, self.model
        if template is None:
            return all(placement.is_replicate() for placement in shown.placements)
        if _is_alike(shown, template):
            place = template.device_mesh.get_coordinate()
            is_cut_alike = shown._local_tensor.shape == self.local.shape
            return is_cut_alike and shown.device_mesh.get_coordinate() == place
        if model is None or shown.device_mesh != model.mesh:
            return False
        return shown.device_mesh.get_coordinate() == model.mesh.get_coordinate()

    def _unwrap_dtensor(self, shown: DTensor) -> Tensor:
        model, template = self.model, self._template
        if template is None or _is_alike(shown, template):
            return shown._local_tensor
        if model is None:  # replicated, or partial sums
            return self.own_piece(shown.full_tensor())
        is_before_shard = shown.device_mesh == model.mesh and shown.placements == model.placements
        piece = shown._local_tensor if is_before_shard else model.piece_of(shown.full_tensor())
        return self.own_piece(piece)

    def shown_like_sharded(self, value: Tensor) -> Tensor:
        """A tensor, sharded or not, in the form that `sharded.copy_` takes."""
        if self._template is None:
            return value.full_tensor() if isinstance(value, DTensor) else value
        if self.model is None:  # `copy_` cuts plain tensors
            return value
        return self.wrap(self.unwrap(value).to(self.local))


def _is_alike(shown: DTensor, template: DTensor) -> bool:
    spec, other = shown._spec, template._spec
    return spec is other or (spec.mesh == other.mesh and spec.placements == other.placements)


def wrap_grads(rows: Mapping[Any, Tensor]) -> list[Tensor]:
    """Wrap the reduced gradients [own rows] of parameters of one unit; see `wrap_grad`.

    Plain tensors have a loop of their own, as a call for each would be felt.
    """
    is_plain = not any([p._template is not None or p.spec.steps_in_blocks for p in rows])
    is_near = all(rows[p].device == p.sharded.device for p in islice(rows, 1))
    if is_plain and is_near:
        own: list[Any] = [*rows.values()]
        for view in own:
            view.__class__ = whole.WholeGrad
        return own
    return [parameter.wrap_grad(own) for parameter, own in rows.items()]
