"""Group the parameters of a module tree into units, a list of `UnitPlan`s.

Only names, shapes and identities are read. One gather unshards a unit and one reduction averages
its gradients. It should be large enough to fill a message, and small enough that two of them fit:
repeated blocks are units, and the other parameters form units of about a block's bytes. A tied
parameter is found by identity and belongs to the first unit that owns it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn

from onefold.errors import ConfigError
from onefold.layout import packed
from onefold.layout.model_axes import ModelCut, local_of
from onefold.layout.module_tree import ModuleTree, uncompiled
from onefold.layout.packed import Place
from onefold.layout.statistics import Dtypes, keeps_dtype
from onefold.recipe import Member

TABLE_NBYTES = 1 << 20
"""Bytes of an Embedding's weight above which its rows are read, and not the whole table."""

UnitChoice = Sequence[nn.Module] | Callable[[nn.Module], bool] | Mapping[Any, object] | None
"""Blocks; or the mesh of each module, or of those that a function chooses, beside the others."""


@dataclass(slots=True, eq=False)
class Owned:
    """One parameter and every (module, attribute name) under which the module tree knows it.

    The owner of a side table is that of its packed weight. `others`: places outside of modules.
    """

    fqn: str
    parameter: nn.Parameter
    owners: list[tuple[nn.Module, str]]
    is_packed: bool = False  # bytes of a quantized weight, or a side table: never cast
    table: packed.SideTable | None = None
    others: list[Place] = field(default_factory=list)
    model: ModelCut | None = None  # its cut over model axes
    keeps_dtype: bool = False  # modules compute with it as it rests

    def materialise(self, parameter: nn.Parameter) -> None:
        """Put a real parameter in place of a meta one, for all its owners."""
        for module, name in self.owners:
            module._parameters[name] = parameter
        self.parameter = parameter

    def replicate(self, mesh: Any) -> None:
        """Count the parameter as a copy on each rank of model axes, which cut others."""
        self.model = ModelCut.replicated(self.parameter, mesh)

    @property
    def values(self) -> torch.Tensor:
        """The tensor that the data axis cuts: the local tensor of a DTensor, or the parameter."""
        return self.parameter if self.model is None else local_of(self.parameter)

    @property
    def nbytes(self) -> int:
        return self.values.numel() * self.parameter.element_size()

    def member(self, computes: torch.dtype | None) -> Member:
        """Describe the parameter in a unit that computes in this dtype; None: in its own."""
        choices = {"is_packed": self.is_packed, "keeps_dtype": self.keeps_dtype}
        member = Member.from_parameter(self.fqn, self.values, computes, **choices)
        if self.model is None:
            return member
        trains = self.parameter.requires_grad  # a local tensor does not say so
        return replace(member, requires_grad=trains, cut=str(self.model))

    @property
    def places(self) -> list[Place]:
        """Where the parameter is shown: in modules, or for a table in state objects."""
        own = [(module._parameters, name) for module, name in self.owners]
        return self.others if self.table else own

    @property
    def kernel_places(self) -> list[Place]:
        """Where kernels look for a packed weight as a bare tensor."""
        return [] if self.table else self.others


@dataclass(slots=True, eq=False)
class UnitPlan:
    """Parameters of one dtype that travel together, and the modules whose calls need them.

    `name` is the fqn of the block, or of the first parameter where there is no block. The unit is
    gathered before the forward of each of `modules` and may be resharded once all of them have run.
    A unit of one tiled weight has no modules: their operations reach its sharded parameter. `parts`
    need the unit where they are called without the root, which is then its only module. `mesh`
    has the ranks among which the unit travels; None: the mesh of the sharded module.
    """

    name: str
    modules: list[nn.Module]
    members: list[Owned] = field(default_factory=list)
    tile_nbytes: int = 0  # above it, one weight is used in row blocks of about so many bytes
    mesh: Any = None
    parts: list[nn.Module] = field(default_factory=list)  # of the root, if that brings the unit

    @property
    def numel(self) -> int:
        return sum(member.values.numel() for member in self.members)

    @property
    def nbytes(self) -> int:
        return sum(member.nbytes for member in self.members)

    @property
    def dtype(self) -> torch.dtype:
        return self.members[0].parameter.dtype

    @property
    def is_trained(self) -> bool:
        """True if a parameter requires a gradient now."""
        return any(member.parameter.requires_grad for member in self.members)

    @property
    def is_packed(self) -> bool:
        return self.members[0].is_packed

    @property
    def keeps_dtype(self) -> bool:
        """True if modules compute with the parameters as they rest."""
        return self.members[0].keeps_dtype

    @property
    def is_quantized(self) -> bool:
        """True if some weights are decoded before modules compute with them."""
        return any(not weight.is_multiplied for weight in self._quantized)

    @property
    def is_multiplied(self) -> bool:
        """True if modules multiply with the bytes of some weights."""
        return any(weight.is_multiplied for weight in self._quantized)

    @property
    def _quantized(self) -> list[packed.QuantizedWeight]:
        parameters = (member.parameter for member in self.members)
        return [weight for weight in parameters if isinstance(weight, packed.QuantizedWeight)]

    def joins(self, other: UnitPlan) -> bool:
        """True if the same modules use both units, so that both are gathered for them."""
        return bool(self.modules) and self.modules is other.modules


def owned_parameters(tree: ModuleTree) -> list[Owned]:
    """Every parameter of the tree once, in registration order, with all its owners.

    A packed weight is followed by its side tables.
    """
    by_id: dict[int, list[Owned]] = {}
    for fqn, parameter, module, name in tree.parameters():
        is_packed = packed.is_packed(parameter)
        if id(parameter) not in by_id:
            owned = Owned(fqn, parameter, [], is_packed, model=ModelCut.found_on(parameter))
            by_id[id(parameter)] = [owned, *_tables(module, name, fqn)]
        owned, *tables = by_id[id(parameter)]
        for member in (owned, *tables):
            member.owners.append((module, name))
        if is_packed:
            _add_other_places(owned, tables, module, name)
    return [owned for members in by_id.values() for owned in members]


def _tables(module: nn.Module, name: str, fqn: str) -> list[Owned]:
    """The side tables of a packed weight; none of another parameter."""
    return [
        Owned(table.fqn, nn.Parameter(table.values, requires_grad=False), [], True, table)
        for table in packed.tables_of(module, name, fqn)
    ]


def _add_other_places(owned: Owned, tables: list[Owned], module: nn.Module, name: str) -> None:
    """Note where the kernels of one more module look for a packed weight and its tables."""
    owned.others.extend(packed.other_places(module, name))
    for known, table in zip(tables, packed.tables_of(module, name, owned.fqn), strict=True):
        holder, key = table.place
        if not any(holder is other and key == k for other, k in known.others):
            known.others.append(table.place)


def plan_units(
    tree: ModuleTree,
    choice: UnitChoice = None,
    tile_nbytes: int = 0,
    *,
    tiles_tables: bool = False,
    parameters: list[Owned] | None = None,
    precision: Dtypes | None = None,
) -> list[UnitPlan]:
    """Group the parameters of a module tree into units, in its order.

    `choice`: None infers blocks; a list names them; a predicate is asked for every submodule. A
    mapping adds blocks with a mesh of their own to the inferred ones.
    `tile_nbytes`: weights of Linear and Embedding above it are units of their own, in row blocks.
    `tiles_tables`: weights of Embeddings alone are, too, from `TABLE_NBYTES` on. `parameters`:
    those of the tree, where somebody has noted their cuts. `precision`: parameters that kernels
    want in the dtype of running statistics are not cast, and have units of their own.
    """
    parameters = owned_parameters(tree) if parameters is None else parameters
    for owned in parameters:
        owned.keeps_dtype = any(keeps_dtype(module, precision) for module, _ in owned.owners)
    names = {module: name for name, module in tree.parts}
    own = own_meshes(tree, choice) if isinstance(choice, Mapping) else {}
    insides = {b: list(b.modules()) for b in _chosen_blocks(tree.root, names, choice, own)}
    block_of = _innermost_block(insides)
    mesh_of = {module: own.get(block) for module, block in block_of.items()}
    plans: list[UnitPlan] = []
    by_block: dict[nn.Module, UnitPlan] = {}
    rest: UnitPlan | None = None
    alike = [owned for owned in parameters if mesh_of.get(owned.owners[0][0]) is None]
    rest_limit = _rest_limit(alike, insides.values())
    for owned in parameters:
        _check_one_mesh(owned, mesh_of)
        least = TABLE_NBYTES if tiles_tables and _is_table(owned) else tile_nbytes
        if tile_nbytes > 0 and owned.nbytes > least and _can_be_tiled(owned):
            mesh = mesh_of.get(owned.owners[0][0])
            plans.append(UnitPlan(owned.fqn, [], [owned], tile_nbytes, mesh))
            continue
        block = block_of.get(owned.owners[0][0])
        if block is not None:
            plan, rest = by_block.get(block), None
            if plan is None:
                plan = by_block[block] = UnitPlan(names[block], [block], mesh=own.get(block))
                plans.append(plan)
        else:
            if rest is None or rest.nbytes + owned.nbytes > rest_limit:
                rest = UnitPlan(owned.fqn, [])
                plans.append(rest)
            plan = rest
        plan.members.append(owned)
        _add_callers(plan, owned, block, block_of)
    return [part for plan in plans for part in split(plan)]


def _is_table(owned: Owned) -> bool:
    """True for the weight of Embeddings alone, which read the rows of a batch."""
    return all(isinstance(module, nn.Embedding) for module, _ in owned.owners)


def _can_be_tiled(owned: Owned) -> bool:
    """True for the weight of Linears and Embeddings alone."""
    if owned.is_packed or owned.model is not None or owned.parameter.dim() != 2:
        return False
    kinds = nn.Linear | nn.Embedding
    return all(isinstance(part, kinds) and name == "weight" for part, name in owned.owners)


def _add_callers(
    plan: UnitPlan, owned: Owned, block: nn.Module | None, block_of: dict[nn.Module, nn.Module]
) -> None:
    """Let every module that uses the parameter, but is not covered by the unit's block, call it."""
    for owner, _ in owned.owners:
        covered = block is not None and block_of.get(owner) is block
        if not covered and owner not in plan.modules:
            plan.modules.append(owner)


def own_meshes(tree: ModuleTree, choice: Mapping[Any, object]) -> dict[nn.Module, object]:
    """The modules that a mapping of `units` gives a mesh of their own, each with that mesh."""
    mesh_of: dict[nn.Module, object] = {}
    inside = tree.modules[1:]
    for key, mesh in choice.items():
        if isinstance(key, nn.Module):
            chosen = [module for module in inside if module is key]
        else:
            chosen = [module for module in inside if key(module)] if callable(key) else []
        if not chosen:
            raise _bad_units(f"{_named_key(key)} in a mapping, which is none of them")
        for module in chosen:
            if type(module).forward is nn.Module.forward:
                raise _bad_units(f"a {type(module).__name__}, which is never called, with a mesh")
            mesh_of[module] = mesh
    return mesh_of


def _named_key(key: object) -> str:
    return f"a {type(key).__name__}" if isinstance(key, nn.Module) else repr(key)


def _check_one_mesh(owned: Owned, mesh_of: Mapping[nn.Module, object]) -> None:
    """Raise `ConfigError` for a parameter that is used in units with different meshes."""
    if len({id(mesh_of.get(module)) for module, _ in owned.owners}) > 1:
        wanted = f"parameter {owned.fqn!r} in one unit, as another one has a mesh of its own"
        hint = "give both modules to one unit, or untie them"
        raise ConfigError(wanted, "one that modules of both use", hint=hint)


def _chosen_blocks(
    root: nn.Module, names: dict[nn.Module, str], choice: UnitChoice,
    own: Mapping[nn.Module, object],
) -> list[nn.Module]:  # fmt: skip
    if choice is None:
        return repeated_blocks(root)
    if isinstance(choice, Mapping):
        inside = {part for module in own for part in module.modules()}
        return [block for block in repeated_blocks(root) if block not in inside] + list(own)
    if callable(choice):
        return [module for module in names if module is not root and choice(module)]
    if not isinstance(choice, Iterable):
        raise _bad_units(f"a {type(choice).__name__}")
    for module in choice:
        if not isinstance(module, nn.Module) or module not in names:
            raise _bad_units(f"a {type(module).__name__} that is not one of them")
    return [module for module in choice if module is not root]


def _bad_units(got: str) -> ConfigError:
    wanted = "`units` to list submodules of the sharded module, to be a predicate over them, or to "
    wanted += "map them to meshes"
    hint = "pass modules taken from the module itself, such as list(model.layers)"
    return ConfigError(wanted, got, hint=hint)


def _innermost_block(
    insides: Mapping[nn.Module, Sequence[nn.Module]],
) -> dict[nn.Module, nn.Module]:
    """For every module inside a block, the innermost block around it (outer blocks come first)."""
    innermost: dict[nn.Module, nn.Module] = {}
    for block, inside in sorted(insides.items(), key=lambda entry: -len(entry[1])):
        innermost.update(dict.fromkeys(inside, block))
    return innermost


def repeated_blocks(root: nn.Module) -> list[nn.Module]:
    """Children of lists whose members with parameters are mostly of one class, outermost first."""
    members = _repeated_members(root)
    return members or list(dict.fromkeys(_blocks_below(root)))


def _blocks_below(module: nn.Module) -> list[nn.Module]:
    """Outermost blocks among the descendants.

    Lists inside a block stay in its unit: they may be experts, of which each rank calls others, and
    all ranks must use a unit, or none.
    """
    blocks: list[nn.Module] = []
    for child in module.children():
        blocks += _repeated_members(child) or _blocks_below(child)
    return blocks


def _repeated_members(module: nn.Module) -> list[nn.Module]:
    if not isinstance(module, nn.ModuleList | nn.Sequential):
        return []
    members = [child for child in module.children() if any(True for _ in child.parameters())]
    kinds = [type(uncompiled(member)) for member in members]
    if any(kind.forward is nn.Module.forward for kind in kinds):
        return []  # lists of lists: a module that is never called cannot be a block
    classes = Counter(kinds)
    least = 1 if isinstance(module, nn.ModuleList) else 2  # a list of one: a model of one layer
    if not classes or classes.most_common(1)[0][1] < max(least, len(members) / 2):
        return []
    return members


def _rest_limit(parameters: Sequence[Owned], insides: Iterable[Sequence[nn.Module]]) -> float:
    """Most bytes of a unit of other parameters: the largest block's; all bytes without blocks.

    `parameters` are those that every rank has alike: others do not count, so ranks agree.
    `insides`: the modules of each block.
    """
    known = {id(owned.parameter): owned.nbytes for owned in parameters}
    ids = [{id(p) for module in inside for p in module._parameters.values()} for inside in insides]
    sizes = (sum(known.get(key, 0) for key in members) for members in ids)
    return max(sizes, default=0) or float(sum(known.values()))


def split(plan: UnitPlan) -> list[UnitPlan]:
    """Make a unit for each dtype, as a flat buffer has one; frozen and packed weights are apart.

    Weights that are not cast are apart, too: a unit computes in one dtype.

    Frozen parameters need no gradient, master or moments: a unit of their own allocates none.
    Packed weights are never cast. The units of a block are gathered one after the other. While the
    last one computes, the next block's first one is gathered: so the one with the most packed bytes
    comes first.
    """
    parts: dict[tuple[torch.dtype, bool, bool, bool], UnitPlan] = {}
    for owned in plan.members:
        dtype, is_trained = owned.parameter.dtype, owned.parameter.requires_grad
        key = dtype, owned.is_packed, is_trained, owned.keeps_dtype
        if key not in parts:
            kind = str(dtype).split(".")[-1] + (", not cast" if owned.keeps_dtype else "")
            if owned.is_packed:
                kind = f"packed {kind}"
            elif not is_trained:
                kind = f"{kind}, frozen"
            name = f"{plan.name} ({kind})" if parts else plan.name
            parts[key] = UnitPlan(name, plan.modules, [], plan.tile_nbytes, plan.mesh)
        parts[key].members.append(owned)
    return sorted(parts.values(), key=lambda part: -part.nbytes if part.is_packed else 0)
