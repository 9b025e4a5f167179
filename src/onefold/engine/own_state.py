"""Tell this rank's optimizer state from another rank's, in a state dict that is loaded.

`optimizer.state_dict()` of a sharded optimizer holds this rank's part alone. Rows are DTensors,
which keep the place of the rank that made them. States of whole matrices are plain tensors on the
owner of a matrix: the other ranks' state dicts name the owner instead.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch.distributed.tensor import DTensor

from onefold.errors import StateError, expected
from onefold.unit.parameter import UnitParameter

KEPT_BY, OF_RANKS = "onefold_kept_by", "onefold_of_ranks"
"""Keys in a state dict, in place of a parameter's state: a rank, and the number of ranks."""


def name_keeper(parameter: UnitParameter, rank: int) -> dict[str, Any]:
    """Return what stands for the state of a parameter whose state `rank` keeps."""
    return {KEPT_BY: rank, OF_RANKS: parameter.unit.context.rest_world}


def own_state(parameter: UnitParameter, state: Mapping[str, Any]) -> dict[str, Any]:
    """Return the state of a parameter that was loaded, without the name of its keeper.

    Raises `StateError` for rows or a keeper that are not those of this rank and layout. Plain
    tensors of all rows, as from one process, fit everywhere.
    """
    context = parameter.unit.context
    keeper, world_size = state.get(KEPT_BY), state.get(OF_RANKS)
    if keeper is not None and (keeper == context.rest_rank or world_size != context.rest_world):
        raise _another_ranks(parameter, f"one of {world_size} ranks, where rank {keeper} keeps it")
    for name, value in state.items():
        if isinstance(value, DTensor) and not parameter.holds_own_rows(value):
            place, ranks = value.device_mesh.get_coordinate() or (), value.device_mesh.size()
            where = ", ".join(map(str, place))
            got = f"{name!r} with the rows of rank {where} of {ranks} ranks"
            raise _another_ranks(parameter, got)
    return {name: value for name, value in state.items() if name not in (KEPT_BY, OF_RANKS)}


def _another_ranks(parameter: UnitParameter, got: str) -> StateError:
    context = parameter.unit.context
    return StateError(
        expected(
            f"the optimizer state that rank {context.rest_rank} of {context.rest_world} keeps of "
            f"parameter {parameter.fqn!r}",
            got,
            where=context.where,
            hint="optimizer.state_dict() is one rank's part. Save with onefold.save and load with "
            "onefold.load; or, for optimizers such as AdamW, use get_optimizer_state_dict and "
            "set_optimizer_state_dict of torch.distributed.checkpoint.state_dict with "
            "StateDictOptions(full_state_dict=True)",
        )
    )
