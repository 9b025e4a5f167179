"""Whether a module still has the parameters that it was sharded with, and their values."""

from __future__ import annotations

from collections.abc import Mapping

from torch import nn

from onefold.errors import StateError, expected
from onefold.unit.parameter import UnitParameter
from onefold.unit.unit import Unit


def check_structure(module: nn.Module, by_sharded: Mapping[int, UnitParameter], rank: int) -> None:
    """Raise `StateError` if the module has gained or lost parameters since `shard`."""
    unseen = dict(by_sharded)
    for prefix, part in module.named_modules():
        for name, tensor in part._parameters.items():
            if tensor is None:
                continue
            if id(tensor) not in by_sharded:
                raise _changed(f"{prefix}.{name}".lstrip("."), "one it did not shard", rank)
            unseen.pop(id(tensor), None)
    for parameter in unseen.values():
        raise _changed(parameter.fqn, "a module from which it was removed or replaced", rank)


def edited(unit: Unit) -> StateError:
    """The error for weights that changed between a forward and its backward."""
    return StateError(
        expected(
            f"the weights of unit {unit.name!r} to be in backward what they were in forward",
            "weights changed in between",
            where=unit.context.where,
            hint="run backward before the optimizer steps or weights are loaded",
        )
    )


def _changed(fqn: str, got: str, rank: int) -> StateError:
    return StateError(
        expected(
            f"parameter {fqn!r} to be as onefold.shard left it",
            got,
            where=f"rank {rank}",
            hint="add, replace and resize parameters and modules before onefold.shard",
        )
    )
