"""One plain state dict of a sharded module, for one file."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from onefold.engine.registry import engine_of
from onefold.errors import StateError
from onefold.layout.module_tree import uncompiled
from onefold.unit.decoded import DecodedWeight


def full_state_dict(
    module: nn.Module, *, rank0_only: bool = True, cpu: bool = True
) -> dict[str, Any]:
    """Gather the state dict of a sharded module as plain tensors.

    A collective: every rank calls it, at every stage. Parameters are gathered one at a time, so a
    rank that gets nothing never holds more than one of them.

    Args:
        module: one that `shard` has sharded.
        rank0_only: give the values to rank 0 alone; the other ranks get {}.
        cpu: put the tensors into CPU memory.

    Returns:
        By the names of `module.state_dict()`: tensors of the unsharded shapes, in the dtype of the
        parameters, that share no memory with the module. Tied parameters share one tensor.

    Raises:
        StateError: the module is not sharded, or modules show unsharded parameters now.
        WireError: another rank makes another call.

    Example:
        >>> values = onefold.full_state_dict(model)
        >>> if rank == 0:
        ...     torch.save(values, "model.pt")
    """
    module = uncompiled(module)
    engine = engine_of(module)
    if engine.is_unsharded:
        raise StateError(
            "full_state_dict outside of onefold.unsharded",
            "a call inside it",
            where=f"rank {engine.group.rank}",
            hint="inside, module.state_dict() has plain tensors already",
        )
    shown = module.state_dict(keep_vars=True)  # without values that hooks would put in place
    everyone = engine.context.everyone
    everyone.gather(len(shown))  # a rank that is elsewhere is named here, not inside torch
    is_wanted = everyone.rank == 0 or not rank0_only
    owners = {name: id(p) for name, p in module.named_parameters(remove_duplicate=False)}
    packed = {
        key: parameter.decoded
        for key, parameter in engine.by_sharded.items()
        if parameter.decoded is not None and parameter.decoded.is_multiplied
    }
    found: dict[str, Any] = {}
    gathered: dict[int, Any] = {}
    for name, value in shown.items():
        owner = owners.get(name, id(value))
        if owner not in gathered:
            gathered[owner] = _plain(value, packed.get(owner), is_wanted=is_wanted, cpu=cpu)
        if is_wanted:
            found[name] = gathered[owner]
    return found


def _plain(value: Any, decoded: DecodedWeight | None, *, is_wanted: bool, cpu: bool) -> Any:
    """An entry of a state dict on its own; None where nobody wants it."""
    if not isinstance(value, torch.Tensor):  # of get_extra_state()
        return value
    value = value.detach()
    full = value.full_tensor() if isinstance(value, DTensor) else value
    if not is_wanted:
        return None
    if decoded is not None:
        return decoded.plain(full).to("cpu" if cpu else full.device)
    # a gathered tensor is nobody else's, but for a world of one
    return full.to("cpu" if cpu else full.device, copy=True)
