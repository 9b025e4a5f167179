"""The public function of sequence parallelism: `onefold.split_sequence`."""

from __future__ import annotations

import sys
from importlib import import_module

import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from onefold.axes.sequence.attention_calls import Calls, PlainCalls
from onefold.axes.sequence.split import MARK, SequenceSplit
from onefold.errors import ConfigError
from onefold.layout.module_tree import uncompiled
from onefold.wire import ranks as meshes
from onefold.wire.collectives import Group

_MIXERS = (nn.RNNBase, nn.MultiheadAttention)


def split_sequence(
    module: nn.Module,
    mesh: meshes.MeshChoice = None,
    *,
    positions: str | None = "position_ids",
    inputs: bool = True,
) -> SequenceSplit:
    """Split the sequences of a module's forward over ranks, in place.

    Each rank then computes on its piece of the positions. At each
    `F.scaled_dot_product_attention` ranks exchange: whole sequences of some heads, and back. The
    module is called with whole rows, the same on all ranks of `mesh`, and returns the outputs of
    this rank's positions. A causal language model of transformers also takes whole labels; its
    loss averages, over the ranks of `onefold.shard`, to the mean over all tokens.

    A collective at its first forward. Call it before or after `onefold.shard`, whose `mesh=` holds
    the ranks of data and sequence together.

    Args:
        module: calls `scaled_dot_product_attention`, and mixes positions nowhere else; or a model
            of transformers.
        mesh: the ranks that share a sequence: a `DeviceMesh` of one axis, a `ProcessGroup`, or
            None, the whole world.
        positions: the argument of a plain module's forward that takes global positions, int64
            [1, positions]. They are passed if the caller does not. None: the module needs none.
        inputs: False leaves the forward's arguments as they are, for a stage of a pipeline: the
            caller cuts tokens by `split`.

    Returns:
        A handle that cuts labels and other tensors, gathers outputs, and undoes the split by
        `remove()` or as a context manager.

    Raises:
        ConfigError: a module or mesh that cannot work; on every rank.

    Example:
        >>> mesh = init_device_mesh("cuda", (dp, cp), mesh_dim_names=("dp", "cp"))
        >>> onefold.shard(model, optimizer)  # with more axes: mesh["dp", "cp"]._flatten("data")
        >>> sequence = onefold.split_sequence(model, mesh["cp"])
        >>> logits = model(tokens)
        >>> labels = sequence.labels(tokens)
        >>> loss_sum = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")
        >>> onefold.weigh(loss_sum, (labels != -100).sum()).backward()

    Source: DeepSpeed-Ulysses, arXiv 2309.14509.
    """
    module = uncompiled(module)
    group = _group_of(mesh)
    _check(module, group)
    return SequenceSplit(module, group, _calls_of(module, group, positions, inputs))


def _group_of(mesh: meshes.MeshChoice) -> Group:
    if isinstance(mesh, DeviceMesh) and mesh.ndim != 1:
        wanted = "the axis of the sequence, a mesh of one axis"
        raise ConfigError(wanted, f"shape {tuple(mesh.shape)}", hint='mesh["cp"]')
    return meshes.resolve(mesh).everyone


def _calls_of(module: nn.Module, group: Group, positions: str | None, inputs: bool) -> Calls | None:
    """How the module is called; None if the caller cuts the inputs."""
    if "transformers" in sys.modules:
        theirs = import_module("onefold.axes.sequence.transformers_split")
        calls = theirs.calls_of(module, group, inputs)
        if calls is not None:
            return calls
    return PlainCalls(module, positions) if inputs else None


def _check(module: nn.Module, group: Group) -> None:
    """Raise `ConfigError` for a module that cannot be split over these ranks."""
    for name, part in module.named_modules():
        mixes = isinstance(part, _MIXERS) or (
            isinstance(part, nn.Conv1d) and part.kernel_size > (1,)
        )
        if group.world_size > 1 and mixes:
            raise ConfigError(
                "positions to be mixed by F.scaled_dot_product_attention alone",
                f"torch.nn.{type(part).__name__} at {name!r}",
                hint="it would see this rank's positions alone",
            )
        if MARK in part.__dict__:
            wanted = "a module that is not split yet"
            hint = "keep the handle of the first call; sequence.remove() undoes it"
            raise ConfigError(wanted, f"one split at {name!r}", hint=hint)
    if group.handle is None:
        return
    mine, rank = dist.get_process_group_ranks(group.handle), dist.get_rank()
    for name, parameter in module.named_parameters():
        if isinstance(parameter, DTensor) and getattr(parameter, "_onefold_owner", None) is None:
            shared = set(parameter.device_mesh.mesh.flatten().tolist()) & set(mine) - {rank}
            if shared:
                raise ConfigError(
                    "axes of sequence and tensors that share no other rank",
                    f"ranks {sorted(shared)} in both, at parameter {name!r}",
                    hint="make a mesh with one axis for each",
                )
