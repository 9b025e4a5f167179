"""Units with a mesh of their own: their ranks, checked against those of the module.

Ranks of one mesh hold the same weights, and other ranks hold others: experts, say. So every rank is
in one mesh of each such unit, and all meshes of a unit have the same length.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch.distributed as dist

from onefold.errors import ConfigError
from onefold.layout.module_tree import ModuleTree
from onefold.layout.units import Owned, UnitPlan
from onefold.recipe import Recipe
from onefold.unit.context import OwnMesh
from onefold.wire import ranks as meshes
from onefold.wire.collectives import Group
from onefold.wire.ranks import Ranks, meet_part

EXPERTS = "own_experts"
"""The attribute of a module that names the experts that this rank holds: `ExpertParallel`."""


@dataclass(frozen=True, slots=True, eq=False)
class UnitRanks:
    """The ranks of a unit's own mesh, and their place among those of the module."""

    ranks: Ranks
    own: OwnMesh


@dataclass(frozen=True, slots=True)
class MeshPlace:
    """One rank's view of a unit: the ranks that it travels among, and its content here."""

    unit: str
    members: tuple[int, ...]
    shapes: tuple[tuple[int, ...], ...]
    experts: tuple[str, ...]  # the numbers of those that it holds, where it is of an expert axis


def ranks_of(plan: UnitPlan) -> Ranks | None:
    """Return the ranks of a unit's own mesh; `ConfigError` unless this rank is in it."""
    return None if plan.mesh is None else meshes.of_axis(plan.mesh)


def members_of(plan: UnitPlan, own: Group, everyone: Group) -> tuple[int, ...]:
    """Return the numbers of a mesh's ranks among all ranks; `ConfigError` if one is not there."""
    known, members = everyone.global_ranks(), own.global_ranks()
    outside = [rank for rank in members if rank not in known]
    if outside:
        wanted = f"the mesh of unit {plan.name!r} to be a part of the ranks {known} of `mesh=`"
        hint = "pass the whole data axis as mesh=, and slices of it in units="
        raise ConfigError(wanted, f"one with {outside}", where=f"rank {everyone.rank}", hint=hint)
    return tuple(known.index(rank) for rank in members)


def places_of(tree: ModuleTree, plans: Sequence[UnitPlan], everyone: Group) -> list[MeshPlace]:
    """Describe the units that may differ from rank to rank, for `clash_of`."""
    experts: dict[int, object] = {}
    for part in tree.modules:
        own = part.__dict__.get(EXPERTS)
        if own is not None:
            experts |= {id(parameter): own for parameter in part.parameters()}
    places: list[MeshPlace] = []
    for plan in plans:
        ranks = ranks_of(plan)
        held = [experts[key] for o in plan.members if (key := id(o.parameter)) in experts]
        if ranks is not None or held:
            group = everyone if ranks is None else ranks.everyone
            shapes = tuple(tuple(owned.values.shape) for owned in plan.members)
            numbers = tuple(dict.fromkeys(map(str, held)))
            members = members_of(plan, group, everyone)
            if len(members) < everyone.world_size:
                for owned in plan.members:
                    _check_cut(owned, plan, everyone)
            places.append(MeshPlace(plan.name, members, shapes, numbers))
    return places


def _check_cut(owned: Owned, plan: UnitPlan, everyone: Group) -> None:
    """Raise `ConfigError` unless a parameter says which part of it this rank's mesh holds.

    Norms and checkpoints would count parts of several meshes as one. A parameter that all meshes
    hold alike would have another gradient in each.
    """
    cut, known = owned.model, set(everyone.global_ranks())
    problem = "a plain tensor" if cut is None else ""
    for axis, placement in enumerate(cut.placements if cut else ()):
        assert cut is not None, "it has placements"
        beside = known.issuperset(dist.get_process_group_ranks(cut.mesh.get_group(axis)))
        if beside and not placement.is_shard():
            problem = str(cut)
    if problem:
        raise ConfigError(
            f"parameter {owned.fqn!r} of unit {plan.name!r} to be a DTensor, cut over the axis "
            "whose ranks hold other parts of it",
            problem,
            hint='onefold.experts.ExpertParallel(experts, mesh["expert"]), or '
            'DTensor.from_local(rows, mesh["expert"], [Shard(0)])',
        )


def clash_of(places: Sequence[Sequence[MeshPlace]]) -> ConfigError | None:
    """The error if meshes of a unit overlap, or their ranks hold other weights; else None.

    `places`: of every rank; all ranks have the same units.
    """
    for rank, of_rank in enumerate(places):
        names, first = ([place.unit for place in some] for some in (of_rank, places[0]))
        if names != first:
            wanted, hint = "the same experts to be spread on every rank", "distribute them on all"
            got = f"units {first} on rank 0, but {names} on rank {rank}"
            return ConfigError(wanted, got, hint=hint)
        for index, place in enumerate(of_rank):
            for other in place.members:
                difference = _difference(place, places[other][index], rank, other)
                if difference is not None:
                    return difference
    return None


def _difference(
    place: MeshPlace, other: MeshPlace, rank: int, other_rank: int
) -> ConfigError | None:
    wanted = got = ""
    if place.members != other.members:
        wanted = f"meshes of unit {place.unit!r} that do not overlap: each rank in one of them"
        got = f"ranks {list(place.members)} on rank {rank}, but {list(other.members)}"
    elif place.experts != other.experts:
        wanted = f"the same experts in unit {place.unit!r} on all ranks {list(place.members)}"
        got = f"{' and '.join(place.experts)} on rank {rank}, but {' and '.join(other.experts)}"
    elif place.shapes != other.shapes:
        wanted = f"the same parameters in unit {place.unit!r} on all ranks of its mesh"
        got = f"shapes {place.shapes} on rank {rank}, but {other.shapes}"
    if not wanted:
        return None
    hint = 'units={experts: mesh["replica"]}, the axis of the ranks that hold the same weights; '
    hint += "other experts are on the other axis"
    return ConfigError(wanted, f"{got} on rank {other_rank}", hint=hint)


def meet_all(plans: Sequence[UnitPlan], ranks: Ranks) -> tuple[UnitRanks | None, ...]:
    """Connect the ranks of every unit's own mesh, each mesh once. A collective."""
    by_members: dict[tuple[int, ...], UnitRanks] = {}
    result: list[UnitRanks | None] = []
    for plan in plans:
        own = ranks_of(plan)
        everyone = ranks.everyone
        members = () if own is None else members_of(plan, own.everyone, everyone)
        is_whole = members == tuple(range(everyone.world_size)) and ranks.axes is None
        if own is None or is_whole:
            result.append(None)
            continue
        if members not in by_members:
            own = replace(own, everyone=meet_part(own.everyone, ranks), phase=ranks.phase)
            mesh = OwnMesh(members, everyone.world_size // len(members))
            by_members[members] = UnitRanks(own, mesh)
        result.append(by_members[members])
    return tuple(result)


def check_adapters(members: Sequence[Owned], recipe: Recipe) -> None:
    """Raise `ConfigError` for parameters that join a unit with a mesh of its own."""
    own = [unit.name.partition(" (")[0] for unit in recipe.units if unit.ranks]
    for owned in members:
        if any(owned.fqn.startswith(f"{name}.") for name in own):
            got = "one that joined a unit with a mesh of its own afterwards"
            hint = "add adapters of experts first, then shard"
            raise ConfigError(f"parameter {owned.fqn!r} before onefold.shard", got, hint=hint)


def connect_experts(tree: ModuleTree, ranks: Ranks) -> None:
    """Connect the ranks of expert axes, each axis once, if all of them have met. A collective."""
    known, groups = set(ranks.everyone.global_ranks()), dict[tuple[int, ...], Group]()
    for name, part in tree.parts:
        if EXPERTS not in part.__dict__:
            continue
        spread: Any = part
        group: Group = spread.axis.group
        members = tuple(group.global_ranks())
        if members not in groups:
            groups[members] = meet_part(group, ranks) if known.issuperset(members) else group
        spread.connect(name, groups[members])
