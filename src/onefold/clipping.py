"""Clip gradients by their norm over all axes: data, tensor, expert and pipeline."""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from onefold.errors import ConfigError, StateError, expected
from onefold.wire.collectives import Group

IS_COPY = "_onefold_is_copy"
"""The attribute of every copy but the first of a weight that pipeline stages share: the norm counts
the first, and all are scaled."""

Clipped = nn.Module | Tensor | Iterable[nn.Module | Tensor]


@torch.no_grad()
def clip_grad_norm_(
    parameters: Clipped,
    max_norm: float,
    norm_type: float = 2.0,
    *,
    error_if_nonfinite: bool = False,
    pipeline: DeviceMesh | dist.ProcessGroup | None = None,
) -> Tensor:
    """Scale gradients in place so that their norm over all axes is at most `max_norm`.

    The norm is that of one process: a gradient that is cut over tensor, expert or data ranks counts
    once with all of its pieces, and a replicated gradient counts once.
    `torch.nn.utils.clip_grad_norm_` does the same where all parameters lie on one mesh; it fails
    where they lie on several, and leaves out the other stages of a pipeline. A collective.

    Args:
        parameters: a module, or several as a pipeline rank has them, or parameters.
        max_norm: the largest norm that stays as it is.
        norm_type: p of the p-norm, above 0; `math.inf` takes the largest absolute value.
        error_if_nonfinite: raise `StateError`, on every rank, if the norm is NaN or infinite.
        pipeline: the pipeline axis, a mesh of one axis or a process group, whose ranks hold other
            parameters. None: there is no pipeline.

    Returns:
        The norm before clipping, as a plain scalar tensor, the same on all ranks.

    Raises:
        ConfigError: a `norm_type` that is not above 0.
        StateError: see `error_if_nonfinite`; or a gradient that has no mean yet.

    Example:
        >>> loss.backward()
        >>> onefold.clip_grad_norm_(model, 1.0)
        >>> optimizer.step()
    """
    order = float(norm_type)
    if not order > 0:
        hint = "norm_type=2.0 is the usual norm, math.inf the largest absolute value"
        raise ConfigError(expected("norm_type above 0", norm_type, hint=hint))
    by_mesh = _by_mesh(parameters)
    norms = [_norm(each, order) for each in by_mesh.values()]
    total = _together(norms, order, pipeline)
    if error_if_nonfinite and not bool(total.isfinite()):
        hint = "lower the learning rate or the loss scale, or look for NaN in the batch"
        raise StateError(expected("gradients of a finite norm", total.item(), hint=hint))
    for each in by_mesh.values():
        torch.nn.utils.clip_grads_with_norm_(each, max_norm, total)
    return total


def _by_mesh(parameters: Clipped) -> dict[DeviceMesh | None, list[Tensor]]:
    """Parameters that have a gradient, by the mesh of their gradients; None: plain tensors."""
    given = [parameters] if isinstance(parameters, nn.Module | Tensor) else parameters
    found: dict[int, Tensor] = {}
    for each in given:
        tensors = each.parameters() if isinstance(each, nn.Module) else (each,)
        found |= {id(tensor): tensor for tensor in tensors if tensor.grad is not None}
    by_mesh: dict[DeviceMesh | None, list[Tensor]] = {}
    for tensor in found.values():
        grad = tensor.grad
        mesh = grad.device_mesh if isinstance(grad, DTensor) else None
        by_mesh.setdefault(mesh, []).append(tensor)
    return by_mesh


def _norm(parameters: list[Tensor], order: float) -> Tensor:
    counted = [tensor for tensor in parameters if not getattr(tensor, IS_COPY, False)]
    grads = [tensor.grad for tensor in counted if tensor.grad is not None]
    first = grads[0] if grads else None
    if isinstance(first, DTensor) and first.device_mesh.ndim > 1:
        return _norm_of_pieces([grad for grad in grads if isinstance(grad, DTensor)], order)
    norm = torch.nn.utils.get_total_norm(grads, order)
    return norm.full_tensor() if isinstance(norm, DTensor) else norm


def _norm_of_pieces(grads: list[DTensor], order: float) -> Tensor:
    """The norm of gradients on one mesh of several axes: a scalar message for each axis.

    Each rank adds up its own pieces. Several ranks have a replicated piece, so it counts a part on
    each. torch would send a message for each gradient whose placements differ from the first one's.
    """
    mesh, is_max = grads[0].device_mesh, math.isinf(order)
    by_copies: dict[int, list[Tensor]] = {}
    for grad in grads:
        copies = math.prod(
            mesh.size(axis) for axis, each in enumerate(grad.placements) if each.is_replicate()
        )
        by_copies.setdefault(copies, []).append(grad.to_local())
    dtype = torch.promote_types(torch.float32, grads[0].dtype)
    total = torch.zeros((), dtype=dtype, device=grads[0].to_local().device)
    for copies, pieces in by_copies.items():
        own = [piece for piece in pieces if piece.numel()]
        if own:
            norm = torch.nn.utils.get_total_norm(own, order).to(dtype)
            total = total.maximum(norm) if is_max else total + norm.pow(order) / copies
    for axis in range(mesh.ndim):
        total = Group.of(mesh.get_group(axis)).all_reduced(total, is_max=is_max)
    return total if is_max else total.pow(1 / order)


def _together(
    norms: list[Tensor], order: float, pipeline: DeviceMesh | dist.ProcessGroup | None
) -> Tensor:
    """The norm of all meshes, and of all ranks of `pipeline`, from the norm of each mesh."""
    parts = torch.stack(norms) if norms else torch.zeros(1)
    if pipeline is None and len(norms) == 1:
        return norms[0]
    is_max = math.isinf(order)
    total = parts.amax() if is_max else parts.pow(order).sum()
    if pipeline is not None:
        handle = pipeline.get_group() if isinstance(pipeline, DeviceMesh) else pipeline
        total = Group.of(handle).all_reduced(total, is_max=is_max)
    return total if is_max else total.pow(1 / order)
