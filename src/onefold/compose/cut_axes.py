"""Model axes (tensor or expert parallel) that have cut parameters before `onefold.shard`.

claim      one rank: refuse cuts that cannot be sharded, and plain parameters left among them
join       all ranks: the meshes of model axes and data axis, and the group of all their ranks
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, Shard
from torch.optim import Optimizer

from onefold.engine.behaviour import behaviour_of
from onefold.engine.rules import whole_matrices
from onefold.errors import ConfigError
from onefold.layout.model_axes import ModelCut
from onefold.layout.module_tree import ModuleTree
from onefold.layout.units import Owned
from onefold.wire.collectives import Group

HOOKED = "_is_hooked"
"""The attribute that transformers sets on modules of a `tp_plan`. Its plans leave some parameters
plain on purpose: their gradients are the same on all ranks of the axis, or hooks sum them."""


@dataclass(frozen=True, slots=True)
class AxesOfCuts:
    """Meshes of (model axes ..., data axis) by that of the model axes; all ranks together."""

    meshes: dict[DeviceMesh, DeviceMesh] = field(default_factory=dict)
    holders: Group | None = None


def claim(tree: ModuleTree, parameters: Sequence[Owned], data: Group) -> None:
    """Check the cuts of all parameters; find one for those that transformers leaves plain."""
    cuts = [owned for owned in parameters if owned.model is not None]
    for owned in cuts:
        _check_placements(owned)
    ranks = set(data.global_ranks()) if cuts else set[int]()
    beyond = [o for o in cuts if o.model and not ranks.issuperset(_ranks_of(o.model.mesh))]
    if not beyond:
        return
    first = beyond[0]
    assert first.model is not None, "it has a cut"
    is_planned = any(part.__dict__.get(HOOKED) for part in tree.modules)
    for owned in parameters:
        if owned.model is not None:
            continue
        if not is_planned:
            raise _left_plain(owned, first)
        owned.replicate(first.model.mesh)


def _check_placements(owned: Owned) -> None:
    assert owned.model is not None, "checked by the caller"
    for placement in owned.model.placements:
        if type(placement) not in (Shard, Replicate):
            wanted = f"parameter {owned.fqn!r} to be a DTensor of Shard and Replicate placements"
            hint = "plan it as colwise or rowwise; packed layouts are not supported"
            raise ConfigError(wanted, str(owned.model), hint=hint)


def _left_plain(owned: Owned, cut: Owned) -> ConfigError:
    return ConfigError(
        f"parameter {owned.fqn!r} to be a DTensor, as {cut.fqn!r} is: {cut.model}",
        "a plain tensor, whose gradient may be a part of a sum on each rank",
        hint="name its module in the plan of parallelize_module, such as SequenceParallel() "
        "for a norm, or distribute it by torch.distributed.tensor.distribute_module",
    )


def check_choices(
    parameters: Sequence[Owned], optimizers: Iterable[Optimizer], *, others: Mapping[str, object]
) -> None:
    """Raise `ConfigError` for optimizers and `others`, by name, that do not go with model axes."""
    cuts = [owned for owned in parameters if owned.model is not None]
    for name, choice in others.items():
        if cuts and choice is not None:
            got = f"{cuts[0].fqn!r}: {cuts[0].model}"
            hint = "use it without parallelize_module"
            raise ConfigError(f"{name} with parameters that no model axis has cut", got, hint=hint)
    for optimizer in optimizers:
        held = {id(t) for group in optimizer.param_groups for t in group["params"]}
        is_elementwise = behaviour_of(optimizer).kind == "elementwise"
        for owned in [] if is_elementwise else cuts:
            if id(owned.parameter) in held and not (owned.model and owned.model.is_replicated):
                raise whole_matrices(owned.fqn, str(owned.model), optimizer)


def axes_of(tree: ModuleTree) -> list[Group]:
    """The ranks of every model axis that has cut parameters of a module."""
    cuts = [cut for _, parameter, *_ in tree.parameters() if (cut := ModelCut.found_on(parameter))]
    meshes = dict.fromkeys(cut.mesh for cut in cuts)
    return [Group.from_handle(mesh.get_group(axis)) for mesh in meshes for axis in range(mesh.ndim)]


def join(
    parameters: Sequence[Owned], data: Group, shards: Group, device: str,
    holders: Group | None = None,
) -> AxesOfCuts:  # fmt: skip
    """Build the meshes of sharded parameters. A collective over the data axis.

    `data` is the group of all ranks that train on other data, `shards` the part of them that holds
    one copy of the states, `holders` all ranks together, if they are known. Raises `ConfigError`,
    on all these ranks, for axes that overlap.
    """
    joined: dict[DeviceMesh, DeviceMesh] = {}
    firsts = {o.model.mesh: o for o in reversed(parameters) if o.model is not None}
    if not firsts:
        return AxesOfCuts()
    everyone = set(data.global_ranks())
    known = [] if data.handle is None else [data.handle]
    for mesh, first in firsts.items():
        grid = _grid(mesh, data)
        everyone |= set(grid.flatten().tolist())
        known += mesh.get_all_groups()
        if grid.numel() != len(set(grid.flatten().tolist())):
            raise ConfigError(
                f"a data axis whose ranks hold the same piece of parameter {first.fqn!r}, "
                f"{first.model}: ranks {mesh.mesh.tolist()}",
                f"ranks {data.global_ranks()}, of which some hold other pieces",
                hint='pass the axis of data alone: onefold.shard(..., mesh=mesh["dp"])',
            )
        names = mesh.mesh_dim_names or tuple(f"model{axis}" for axis in range(mesh.ndim))
        if shards.handle is not None:
            groups = [*mesh.get_all_groups(), shards.handle]
            joined[mesh] = DeviceMesh.from_group(
                groups, device, mesh=_grid(mesh, shards), mesh_dim_names=(*names, "fsdp")
            )
    return AxesOfCuts(joined, holders or Group.over(sorted(everyone), known=known))


def _grid(mesh: DeviceMesh, data: Group) -> torch.Tensor:
    """Global ranks [model axes ..., data axis]. A collective over the data axis."""
    mine = mesh.mesh.tolist()
    return torch.tensor(data.gather(mine)).movedim(0, -1).contiguous()


def _ranks_of(mesh: DeviceMesh) -> set[int]:
    return set(mesh.mesh.flatten().tolist())
