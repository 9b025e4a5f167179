"""Follow parameters that come and go after `shard`: adapters beside frozen weights.

Libraries of adapters wrap modules that hold sharded weights, add parameters, and take them away
again. A module with frozen parameters takes such parameters in. A module that trains as a whole
does not: there, a new parameter is more likely a mistake, so it is an error.
"""

from typing import Any, Protocol
from weakref import ref

import torch
from torch import nn

from onefold.errors import StateError
from onefold.layout.module_tree import Membership, ModuleTree
from onefold.layout.units import owned_parameters
from onefold.unit.parameter import UnitParameter
from onefold.unit.unit import Unit
from onefold.wire.collectives import Group


class Followed(Protocol):
    """The engine, as this file knows it."""

    units: list[Unit]
    by_sharded: dict[int, UnitParameter]
    group: Group
    executor: Any
    build_adapters: Any
    module: Any

    @property
    def is_unsharded(self) -> bool: ...
    def add(self, units: list[Unit]) -> None: ...
    def note_structure(self) -> None: ...


def take_root(engine: Followed, module: nn.Module) -> None:
    """Go on with a module as the root, as its wrapper was removed: names are those in it."""
    engine.module = ref(module)
    engine.note_structure()
    rename(engine, ModuleTree.from_root(module))


def follow(engine: Followed) -> None:
    """Take in parameters that were added to the module, and let go of those that were removed.

    A collective where something has changed. Raises `StateError` on every rank where the module has
    no frozen parameters, where a parameter was replaced, and where ranks differ.
    """
    module = engine.module()
    if module is None or engine.is_unsharded:
        return
    kept, shards = Membership().keys_in(module), engine.by_sharded
    gone = [
        parameter
        for key, parameter in shards.items()
        if key not in kept and parameter.places and not parameter.is_table
    ]
    if not gone and kept <= shards.keys():
        return
    tree = ModuleTree.from_root(module)
    tensors = {fqn: tensor for fqn, tensor, *_ in tree.parameters()}
    added = [fqn for fqn, tensor in tensors.items() if id(tensor) not in shards]
    removed = "a module from which it was removed or replaced"
    replaced = [parameter.fqn for parameter in gone if _is_replaced(parameter)]
    if replaced:
        raise _changed(engine, replaced[0], removed)
    if not any(is_frozen(parameter) for parameter in shards.values()):
        where, why = (added[0], "a parameter that it did not shard") if added else ("", removed)
        raise _changed(engine, where or gone[0].fqn, why)
    _compare_added(engine, [_described_parameter(fqn, tensors[fqn]) for fqn in added])
    for parameter in gone:
        with torch._C.DisableTorchFunctionSubclass():
            parameter.sharded.requires_grad_(False)
        parameter.move(parameter.fqn, [])
    if added:
        with torch.inference_mode(False):  # they train later
            engine.add(engine.build_adapters(engine))
    for unit in engine.units if not engine.executor.steppers else ():
        unit.drop_master()
    rename(engine, tree)


def rename(engine: Followed, tree: ModuleTree) -> None:
    """Give every parameter its name, and its places, in a module: wrappers change both."""
    names: dict[str, str] = {}
    for owned in owned_parameters(tree):
        parameter = engine.by_sharded.get(id(owned.parameter))
        if parameter is not None:
            names[parameter.fqn] = owned.fqn
            names[parameter.fqn.rpartition(".")[0]] = owned.fqn.rpartition(".")[0]
            parameter.move(owned.fqn, owned.owners)
    for table in (parameter for parameter in engine.by_sharded.values() if parameter.is_table):
        holder, _, name = table.fqn.rpartition(".")  # its weight, or the module of that
        table.rename(f"{names.get(holder, holder)}.{name}".lstrip("."))


def _is_replaced(parameter: UnitParameter) -> bool:
    """True if another tensor is in one of the parameter's places."""
    shown = [parameters.get(name) for parameters, name in parameter.places]
    return any(tensor is not None and tensor is not parameter.sharded for tensor in shown)


def is_frozen(parameter: UnitParameter) -> bool:
    """True if the parameter requires no gradient now."""
    with torch._C.DisableTorchFunctionSubclass():
        return not parameter.sharded.requires_grad


def _described_parameter(fqn: str, tensor: nn.Parameter) -> str:
    return f"{fqn} {list(tensor.shape)} {tensor.dtype} requires_grad={tensor.requires_grad}"


def _compare_added(engine: Followed, mine: list[str]) -> None:
    """Raise `StateError` on every rank unless all ranks have added the same parameters."""
    group = engine.group
    for rank, theirs in enumerate(group.gather(mine)):
        if theirs != mine:
            differing = sorted(set(mine) ^ set(theirs)) or mine
            wanted = "the same new parameters on every rank"
            got = f"{differing[0]!r} on rank {group.rank} or rank {rank} alone"
            hint = "add the same adapters, in the same order, on every rank"
            raise StateError(wanted, got, where=f"rank {group.rank}", hint=hint)


def _changed(engine: Followed, fqn: str, got: str) -> StateError:
    wanted = f"parameter {fqn!r} to be as onefold.shard left it"
    hint = "add, replace and resize parameters and modules before onefold.shard; adapters "
    hint += "may come later where the other parameters are frozen"
    return StateError(wanted, got, where=f"rank {engine.group.rank}", hint=hint)
