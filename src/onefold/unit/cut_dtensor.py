"""Gather DTensors whose cut torch's own rules do not cover: unequal shares, and several axes.

Unequal shares. torch's placements know one rule of cutting, that of `torch.chunk`. A `WeightedMesh`
carries one weight per rank. DTensors over it keep the placement `Shard(d)`, whose local operations
do not depend on the lengths of other pieces. Operations that do (`full_tensor`, redistribution, the
boxes of checkpoints) are defined here, with the ranges of layout/ranges.py.

Several axes: model axes first, the data axis last. torch plans a redistribution over several axes
as one. It caches the plan by a key without the rank. Plans of ranks whose pieces differ in shape
differ, and ranks may be threads. So each axis is gathered by itself, from the last to the first:
each cuts what the axes before have left.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from onefold.errors import StateError
from onefold.layout.model_axes import dtensor_of
from onefold.layout.ranges import Ranges
from onefold.wire.collectives import Group

if TYPE_CHECKING:
    from torch.distributed.checkpoint.metadata import ChunkStorageMetadata


class WeightedMesh(DeviceMesh):
    """A mesh of one axis whose ranks hold shares in proportion to their weights."""

    shares: tuple[int, ...]

    @staticmethod
    def over(mesh: DeviceMesh, shares: tuple[int, ...]) -> WeightedMesh:
        """The same ranks as `mesh`, with a weight each."""
        weighted = object.__new__(WeightedMesh)
        vars(weighted).update(vars(mesh), shares=shares, _hash=None)
        return weighted

    @staticmethod
    def plain(mesh: DeviceMesh) -> DeviceMesh:
        """The same ranks as `mesh`, without weights."""
        plain = object.__new__(DeviceMesh)
        vars(plain).update({k: v for k, v in vars(mesh).items() if k != "shares"}, _hash=None)
        return plain

    def __eq__(self, other: object) -> bool:
        return (
            isinstance(other, WeightedMesh)
            and self.shares == other.shares
            and DeviceMesh.__eq__(self, other)
        )

    def __hash__(self) -> int:
        return hash((self.shares, DeviceMesh.__hash__(self)))


def is_weighted(shown: object) -> bool:
    """True for a DTensor of which ranks hold pieces in proportion to their weights."""
    return (
        isinstance(shown, DTensor)
        and isinstance(shown._spec.mesh, WeightedMesh)
        and shown._spec.placements[0].is_shard()
    )


def full_tensor(shown: DTensor) -> Tensor | None:
    """All elements, on every rank; None where torch can gather. A collective; differentiable."""
    if is_weighted(shown):
        full: Tensor = _FullTensor.apply(shown)  # type: ignore[no-untyped-call]
        return full
    return _gathered_by_axis(shown) if shown._spec.mesh.ndim > 1 else None


def redistributed(shown: DTensor, placements: Any) -> DTensor | None:
    """`shown.redistribute(placements=placements)`, every rank getting all; None: torch can."""
    mesh, wanted = shown.device_mesh, tuple(placements or ())
    if is_weighted(shown):
        if wanted == tuple(shown.placements):
            return shown
        if wanted != (Replicate(),):
            raise StateError(
                "a shard of unequal shares to be redistributed to [Replicate()]",
                str(placements),
                hint="call full_tensor() first, then distribute_tensor(full, mesh, placements)",
            )
    elif not (len(wanted) == mesh.ndim > 1 and all(p.is_replicate() for p in wanted)):
        return None
    full = full_tensor(shown)
    assert full is not None, "gathered by a rule of this file"
    return DTensor.from_local(full, mesh, wanted, run_check=False)


def _gathered_by_axis(shown: DTensor) -> Tensor:
    mesh, local = shown.device_mesh, shown.to_local()
    extents, shapes = list(shown.shape), list[tuple[int, ...]]()
    for axis, placement in enumerate(shown.placements):  # what the axes before it leave here
        shapes.append(tuple(extents))
        if isinstance(placement, Shard):
            ranges = Ranges.over(extents[placement.dim], mesh.size(axis))
            start, stop = ranges[mesh.get_local_rank(axis)]
            extents[placement.dim] = stop - start
    for axis in reversed(range(mesh.ndim)):
        placement = shown.placements[axis]
        if not isinstance(placement, Replicate):
            alone = DeviceMesh.from_group(mesh.get_group(axis), mesh.device_type)
            local = dtensor_of(local, alone, [placement], shapes[axis]).full_tensor()
    return local


# unequal shares


def offsets_of(shown: DTensor) -> tuple[int, ...]:
    """Where this rank's piece begins in the tensor, by dimension.

    Raises `StateError` for a partial sum, which is no piece.
    """
    spec = shown._spec
    if is_weighted(shown):
        dim, start, _, _ = _own_range(shown)
        return tuple(start if axis == dim else 0 for axis in range(shown.dim()))
    if any(placement.is_partial() for placement in spec.placements):
        hint = "redistribute it to Replicate() or Shard() first"
        raise StateError("a DTensor whose ranks hold its values", str(spec.placements), hint=hint)
    return tuple(compute_local_shape_and_global_offset(spec.shape, spec.mesh, spec.placements)[1])


def box_of(shown: DTensor) -> ChunkStorageMetadata:
    """The box of this rank's piece, as `torch.distributed.checkpoint` lists it."""
    # whoever asks has imported it; with it come 160 modules, which a run does not need
    from torch.distributed.checkpoint.metadata import ChunkStorageMetadata

    return ChunkStorageMetadata(torch.Size(offsets_of(shown)), shown._local_tensor.shape)


def own_view(shown: DTensor, full: Tensor) -> Tensor:
    """This rank's piece of `full`, cut as `shown`."""
    box = zip(offsets_of(shown), shown._local_tensor.shape, strict=True)
    return full[tuple(slice(start, start + length) for start, length in box)]


def write_items(shown: DTensor, fqn: str, items: list[Any]) -> list[Any]:
    """List torch's items for the even cut, each with the box of this rank's piece.

    No items for an empty piece: torch would take it for a copy of the piece that starts there.
    """
    from torch.distributed.checkpoint.metadata import MetadataIndex

    if not shown._local_tensor.numel() and shown.numel():
        return []
    chunk = box_of(shown)
    return [
        replace(
            item,
            index=MetadataIndex(fqn, chunk.offsets),
            tensor_data=replace(item.tensor_data, chunk=chunk),
        )
        for item in items
    ]


LOCAL = {
    "norm", "vector_norm", "linalg_vector_norm", "_foreach_norm", "sum", "nansum",
    "add", "sub", "mul", "div", "true_divide", "__add__", "__radd__", "__sub__", "__rsub__",
    "__mul__", "__rmul__", "__truediv__", "__rtruediv__", "__neg__", "__pow__", "neg", "pow",
    "abs", "square", "sqrt", "rsqrt", "exp", "sign", "clamp", "where", "isnan", "isinf", "isfinite",
    "_foreach_add", "_foreach_sub", "_foreach_mul", "_foreach_div", "_foreach_abs", "_foreach_sqrt",
    "lerp", "addcmul", "addcdiv", "to", "float", "double", "half", "bfloat16", "clone", "detach",
    "contiguous", "view_as", "zeros_like", "ones_like", "empty_like", "full_like",
    "__get__", "__set__", "__delete__", "size", "dim", "numel", "nelement", "stride",
    "element_size", "is_contiguous", "is_floating_point", "is_complex", "requires_grad_",
    "data_ptr", "untyped_storage", "storage_offset", "is_shared", "get_device", "__len__",
    "__hash__", "__repr__", "__format__", "__deepcopy__", "__reduce_ex__", "is_same_size",
    "register_hook", "register_post_accumulate_grad_hook", "is_tensor", "backward",
}  # fmt: skip
"""Functions that are right on own pieces alone, or need no values: their results do not depend on
the lengths of other ranks' pieces. All others gather the tensor first."""


def needs_whole(func: Callable[..., Any], leaves: list[Any]) -> bool:
    """True where torch would redistribute by its own rule of cutting."""
    is_local = getattr(func, "__name__", "") in LOCAL
    return not is_local and any(is_weighted(leaf) for leaf in leaves)


def _own_range(shown: DTensor) -> tuple[int, int, int, tuple[int, ...]]:
    """The dimension that is cut, this rank's start and length in it, and the lengths of all."""
    mesh, placement = shown._spec.mesh, shown._spec.placements[0]
    assert isinstance(mesh, WeightedMesh), "only weighted cuts have shares"
    assert isinstance(placement, Shard), "a weighted tensor is cut by one dimension"
    ranges = Ranges.over(shown.shape[placement.dim], mesh.size(), mesh.shares)
    lengths, rank = tuple(ranges.lengths), mesh.get_local_rank()
    if shown._local_tensor.shape[placement.dim] != lengths[rank]:
        wanted = f"{lengths[rank]} indices of dimension {placement.dim} on rank {rank}"
        hint = "compute with unsharded tensors: full_tensor(), or `onefold.unsharded`"
        raise StateError(wanted, f"a piece of shape {list(shown._local_tensor.shape)}", hint=hint)
    return placement.dim, ranges[rank][0], lengths[rank], lengths


class _FullTensor(torch.autograd.Function):
    """All rows of a weighted DTensor; backward keeps the own piece of the gradient."""

    @staticmethod
    def forward(ctx: Any, shown: DTensor) -> Tensor:
        dim, start, own_length, lengths = _own_range(shown)
        ctx.cut, ctx.spec = (dim, start, own_length), shown._spec
        local = shown._local_tensor.detach().movedim(dim, 0)
        inner = shown.numel() // max(1, shown.shape[dim])
        own = local.new_zeros(max(lengths) * inner)
        own[: local.numel()] = local.reshape(-1)
        rows = own.new_empty(len(lengths) * len(own))
        Group.from_handle(shown.device_mesh.get_group()).all_gather(rows, own).wait()
        parts = [
            part[: length * inner].view(length, *local.shape[1:])
            for part, length in zip(rows.view(len(lengths), -1), lengths, strict=True)
        ]
        return torch.cat(parts).movedim(0, dim)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:  # type: ignore[override]
        local, spec = grad.narrow(*ctx.cut).contiguous(), ctx.spec
        return DTensor.from_local(
            local, spec.mesh, spec.placements, run_check=False, shape=spec.shape,
            stride=spec.stride,
        )  # fmt: skip
