"""Pieces of parameters that model axes (tensor or expert parallel) have cut before `onefold.shard`.

A parameter that is a DTensor is cut twice: over the model axes by the plan of its module, and its
local piece over the data axis by layout/cut.py. Both DTensors of such a parameter have its global
shape:

    modules compute with   DTensor over (model axes ...), a view of the gathered local piece
    users see at rest      DTensor over (model axes ..., data axis)

The model axes come first and the data axis last. In this order torch's own rule for several `Shard`
of one dimension is the order in which the axes cut, also where sizes do not divide. So no
`_StridedShard` is needed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import Placement


@dataclass(frozen=True, slots=True, eq=False)
class ModelCut:
    """The cut of one parameter over its model axes.

    `is_plain`: modules compute with a plain tensor, which all ranks of the axes hold alike.
    """

    mesh: DeviceMesh
    placements: tuple[Placement, ...]
    shape: tuple[int, ...]  # global
    is_plain: bool = False

    @staticmethod
    def found_on(parameter: Tensor) -> ModelCut | None:
        """The cut of a DTensor that is no sharded parameter; None for other tensors."""
        if not isinstance(parameter, DTensor) or is_owned(parameter):
            return None
        return ModelCut(parameter.device_mesh, parameter.placements, tuple(parameter.shape))

    @staticmethod
    def replicated(parameter: Tensor, mesh: DeviceMesh) -> ModelCut:
        """The cut of a plain parameter that all ranks of the model axes hold alike."""
        return ModelCut(mesh, (Replicate(),) * mesh.ndim, tuple(parameter.shape), is_plain=True)

    @property
    def is_even(self) -> bool:
        """True if all ranks of the model axes hold pieces of one shape."""
        extents = list(self.shape)
        for axis, placement in enumerate(self.placements):
            if isinstance(placement, Shard):
                if extents[placement.dim] % self.mesh.size(axis):
                    return False
                extents[placement.dim] //= self.mesh.size(axis)
        return True

    @property
    def is_replicated(self) -> bool:
        """True if every rank of the model axes holds the whole parameter."""
        return all(placement.is_replicate() for placement in self.placements)

    def over(self, local: Tensor) -> Tensor:
        """What modules compute with, over the gathered `local` piece: a DTensor unless plain."""
        if self.is_plain:
            return local
        return dtensor_of(local, self.mesh, self.placements, self.shape)

    def piece_of(self, full: Tensor) -> Tensor:
        """This rank's piece of a plain tensor of the global shape, before the data axis cuts it."""
        return distribute_tensor(full, self.mesh, self.placements, src_data_rank=None)._local_tensor

    def __str__(self) -> str:
        names: Sequence[str] = self.mesh.mesh_dim_names or ("",) * self.mesh.ndim
        cuts = [
            f"{placement} over {f'{name} = ' if name else ''}{size}"
            for placement, name, size in zip(
                self.placements, names, self.mesh.shape, strict=True
            )
        ]  # fmt: skip
        return f"{list(self.shape)} as {', '.join(cuts)}{', plain' if self.is_plain else ''}"


def dtensor_of(
    local: Tensor, mesh: DeviceMesh | None, placements: Sequence[Placement], shape: Sequence[int]
) -> DTensor:
    """The DTensor of a global `shape`, in row order, over this rank's piece of it."""
    size = torch.Size(shape)
    stride = torch.empty(size, device="meta").stride()
    return DTensor.from_local(local, mesh, placements, run_check=False, shape=size, stride=stride)


def is_owned(parameter: Tensor) -> bool:
    """True for a parameter of a module that `onefold.shard` has sharded."""
    return getattr(parameter, "_onefold_owner", None) is not None


def local_of(tensor: Tensor) -> Tensor:
    """The local tensor of a DTensor; any other tensor as it is."""
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor
