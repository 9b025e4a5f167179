"""Clip gradients by their norm over all axes: data, tensor, expert and pipeline."""

import math
from collections.abc import Iterable

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from onefold.engine.pipelined import Pipeline
from onefold.engine.registry import find_engine, owner_of
from onefold.errors import ConfigError, StateError
from onefold.wire.collectives import Group
from onefold.wire.moves import of_ranks

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
) -> Tensor:
    """Scale gradients in place so that their norm over all axes is at most `max_norm`.

    The norm is that of one process: a gradient that is cut over tensor, expert or data ranks counts
    once with all of its pieces, and a replicated gradient counts once.
    `torch.nn.utils.clip_grad_norm_` does the same where all parameters lie on one mesh; it fails
    where they lie on several, and leaves out the other stages of a pipeline. A collective.

    Args:
        parameters: a module, or all stages of a pipeline rank, or parameters.
        max_norm: the largest norm that stays as it is.
        norm_type: p of the p-norm, above 0; `math.inf` takes the largest absolute value.
        error_if_nonfinite: raise `StateError`, on every rank, if the norm is NaN or infinite.

    Returns:
        The norm before clipping, as a plain scalar tensor, the same on all ranks.

    Raises:
        ConfigError: a `norm_type` that is not above 0, or some of this rank's stages alone.
        StateError: see `error_if_nonfinite`; a gradient that has no mean yet; or a stage that a
            schedule runs without `onefold.pipeline`.

    Example:
        >>> loss.backward()
        >>> onefold.clip_grad_norm_(model, 1.0)
        >>> optimizer.step()
    """
    order = float(norm_type)
    if not order > 0:
        hint = "norm_type=2.0 is the usual norm, math.inf the largest absolute value"
        raise ConfigError("norm_type above 0", norm_type, hint=hint)
    parts = [parameters] if isinstance(parameters, nn.Module | Tensor) else list(parameters)
    tensors = [
        tensor
        for part in parts
        for tensor in (part.parameters() if isinstance(part, nn.Module) else (part,))
    ]
    pipeline = _pipeline_of(tensors, [part for part in parts if isinstance(part, nn.Module)])
    by_mesh = _by_mesh(tensors)
    norms = [_norm(members, order) for members in by_mesh.values()]
    total = _together(norms, order, pipeline)
    if error_if_nonfinite and not bool(total.isfinite()):
        hint = "lower the learning rate or the loss scale, or look for NaN in the batch"
        raise StateError("gradients of a finite norm", total.item(), hint=hint)
    for members in by_mesh.values():
        torch.nn.utils.clip_grads_with_norm_(members, max_norm, total)
    return total


def _pipeline_of(tensors: list[Tensor], modules: list[nn.Module]) -> Pipeline | None:
    """The pipeline, as `onefold.pipeline` has told the modules, also those without parameters."""
    bare = [find_engine(module) for module in modules if not any(True for _ in module.parameters())]
    engines = {engine for engine in (*map(owner_of, tensors), *bare) if engine is not None}
    if any(engine.pipeline is None and engine.is_undriven for engine in engines):
        wanted = "the norm of all stages of a pipeline"
        hint = "call onefold.pipeline(schedule) before the first step"
        raise StateError(wanted, "a stage that a schedule runs without onefold.pipeline", hint=hint)
    axes = {engine.pipeline for engine in engines}
    pipeline = axes.pop() if len(axes) == 1 else None
    if axes or (pipeline and modules and len(engines) < pipeline.num_stages):
        got = f"parts of {len(engines)} modules"
        wanted = "all stages of this rank, and no other module"
        hint = "onefold.clip_grad_norm_([first_stage, second_stage], 1.0)"
        raise ConfigError(wanted, got, hint=hint)
    return pipeline if pipeline and pipeline.group.world_size > 1 else None


def _by_mesh(tensors: list[Tensor]) -> dict[DeviceMesh | None, list[Tensor]]:
    """Parameters that have a gradient, by the mesh of their gradients; None: plain tensors."""
    by_mesh: dict[DeviceMesh | None, list[Tensor]] = {}
    for tensor in {id(tensor): tensor for tensor in tensors if tensor.grad is not None}.values():
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
            mesh.size(axis) for axis, kind in enumerate(grad.placements) if kind.is_replicate()
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
        total = Group.from_handle(mesh.get_group(axis)).all_reduced(total, is_max=is_max)
    return total if is_max else total.pow(1 / order)


def _together(norms: list[Tensor], order: float, pipeline: Pipeline | None) -> Tensor:
    """The norm of all meshes, and of all ranks of `pipeline`, from the norm of each mesh."""
    parts = torch.stack(norms) if norms else torch.zeros(1)
    if pipeline is None and len(norms) == 1:
        return norms[0]
    if pipeline is not None:  # stages may differ in dtype, and one may have no parameter
        device = next((engine.context.store.device for engine in pipeline.engines), parts.device)
        wide = parts.to(device, torch.float64)
        own = torch.linalg.vector_norm(wide, order)
        parts = of_ranks(pipeline.group, own, f"norm of all stages: {pipeline.places}")
    return torch.linalg.vector_norm(parts, order)
