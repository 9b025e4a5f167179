"""Communicators of GPUs: how many a rank has, and the memory that they take.

A communicator connects the ranks of a group whose tensors NCCL sends; a group of CPU tensors has
none. torch 2.13 makes one when a group begins its first message. A world that is bound to a device,
as `onefold train` starts it (`init_process_group(device_id=)`), makes its own at once, and
`init_device_mesh` then splits it: one an axis, at once. Onefold has one group for each set of
ranks, so it has one communicator.

No ledger counts them, and no "fits" of a plan: they are memory of the driver, not of tensors. Their
size depends on NCCL and its settings, and was measured once. A plan says it beside its exact bytes,
and a run that chooses by free memory finds what its communicators left.
"""

from collections.abc import Iterable, Mapping, Sequence

import torch.distributed as dist

from onefold.engine.engine import Engine
from onefold.recipe import Recipe
from onefold.text import format_bytes
from onefold.wire.collectives import Group

OF_TWO, OF_MORE = 544_000_000, 688_000_000
"""Bytes of one between two ranks, and between more: on 4 A100 (nccl issue 964)."""


def nbytes_of(sizes: Iterable[int]) -> int:
    """Return the estimated bytes of communicators of so many ranks each."""
    return sum(OF_TWO if size == 2 else OF_MORE for size in sizes)


def words_of(sizes: Sequence[int]) -> str:
    """Say how many there are and what they take."""
    return f"communicators: {len(sizes)} a rank, about {format_bytes(nbytes_of(sizes))}"


def planned_sizes(recipe: Recipe, axes: Mapping[str, int] | None = None) -> list[int]:
    """Return the ranks of each communicator of a rank, ascending: one a distinct set of ranks.

    Args:
        recipe: of the data axis, with the meshes of its units.
        axes: ranks of the model axes by name, "tp", "pp", "cp" and "ep"; none are used without.
    """
    data, near = recipe.world_size, recipe.local_world_size
    tp, pp, cp, ep = ((axes or {}).get(name, 1) for name in ("tp", "pp", "cp", "ep"))
    sizes = [*{data, data * tp, data * tp * pp}]  # each set contains the one before
    has_hops = recipe.reduces_in_hops or recipe.are_replicas
    sizes += [near, data // near] * (has_hops and near < data and near > 1)
    sizes += [tp] * (data > 1) + [pp] * (data * tp > 1)
    sizes += [size for size in (cp, ep) if size < data]
    sizes += {unit.ranks for unit in recipe.units} | {data // ep} - {data}
    return sorted(size for size in sizes if size > 1)


def communicator_sizes(engine: Engine) -> list[int]:
    """Return what `planned_sizes` predicts, of an engine and the world.

    Groups that the engine does not know are left out, such as the ranks that share a sequence.
    """
    contexts = [engine.context, *(unit.context for unit in engine.units)]
    groups = [engine.group, engine.context.everyone, Group.from_handle(dist.group.WORLD)]
    groups += [each.group for each in engine.context.routes.transports]
    if (pipeline := engine.pipeline) is not None:
        groups += filter(None, (pipeline.group, pipeline.steppers, pipeline.scalers))
    handles = {group.handle for group in groups}
    handles |= {h for context in contexts for mesh in context.meshes for h in mesh.get_all_groups()}
    sizes = [dist.get_world_size(handle) for handle in handles if handle is not None]
    return sorted(size for size in sizes if size > 1)
