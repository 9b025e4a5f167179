"""Gather DTensors over several axes: model axes first, the data axis last.

torch plans a redistribution over several axes as one. It caches the plan by a key without the rank.
Plans of ranks whose pieces differ in shape differ, and ranks may be threads. So each axis is
gathered by itself, from the last to the first: each cuts what the axes before have left.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement

from onefold.layout.cut import bounds_of


def has_several(shown: DTensor) -> bool:
    """True for a DTensor over more than one axis."""
    return shown._spec.mesh.ndim > 1


def full_tensor(shown: DTensor) -> Tensor:
    """All elements of the tensor, on every rank. A collective over all axes; differentiable."""
    mesh, local = shown.device_mesh, shown.to_local()
    shapes = _shapes(tuple(shown.shape), mesh, shown.placements)
    for axis in reversed(range(mesh.ndim)):
        placement = shown.placements[axis]
        if isinstance(placement, Replicate):
            continue
        alone = DeviceMesh.from_group(mesh.get_group(axis), mesh.device_type)
        shape = shapes[axis]
        stride = torch.empty(shape, device="meta").stride()
        cut = DTensor.from_local(
            local, alone, [placement], run_check=False, shape=torch.Size(shape), stride=stride
        )
        local = cut.full_tensor()
    return local


def replicated(shown: DTensor) -> DTensor:
    """The tensor, whole on every rank."""
    mesh = shown.device_mesh
    whole = [Replicate()] * mesh.ndim
    return DTensor.from_local(full_tensor(shown), mesh, whole, run_check=False)


def asks_whole(shown: DTensor, placements: Sequence[Placement] | None) -> bool:
    """True if `shown.redistribute(placements=placements)` is to gather every axis."""
    wanted = placements or ()
    return len(wanted) == shown.device_mesh.ndim > 1 and all(each.is_replicate() for each in wanted)


def _shapes(
    shape: tuple[int, ...], mesh: DeviceMesh, placements: Sequence[Placement]
) -> list[tuple[int, ...]]:
    """For each axis, the shape that it cuts: what the axes before it leave to this rank."""
    extents, found = list(shape), list[tuple[int, ...]]()
    for axis, placement in enumerate(placements):
        found.append(tuple(extents))
        if isinstance(placement, Shard):
            bounds = bounds_of(extents[placement.dim], mesh.size(axis))
            rank = mesh.get_local_rank(axis)
            extents[placement.dim] = bounds[rank + 1] - bounds[rank]
    return found
