"""Giving values to parameters before they are cut: from `meta`, and the same on every rank."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn

from onefold.errors import ConfigError, expected
from onefold.layout.units import Owned, UnitPlan
from onefold.wire.collectives import Group


def materialise(plan: UnitPlan, device: torch.device) -> None:
    """Give real memory and initial values to the unit's parameters that are on `meta`.

    Each owning module is initialised by its own `reset_parameters`, in module order. Only modules
    of this unit are touched, so no more than one unit exists whole at a time.
    """
    owners: dict[int, nn.Module] = {}
    for owned in plan.members:
        if owned.parameter.is_meta:
            owners[id(owned.owners[0][0])] = owned.owners[0][0]
            _replace(owned, device)
    mine = {id(owned.parameter) for owned in plan.members}
    for module in owners.values():
        elsewhere = {
            name: parameter
            for name, parameter in module._parameters.items()
            if parameter is not None and id(parameter) not in mine
        }
        for name, parameter in elsewhere.items():  # of another unit: a stand-in is initialised
            module._parameters[name] = nn.Parameter(_blank(parameter, device), False)
        initialise(module, device)
        module._parameters.update(elsewhere)


def materialise_buffers(root: nn.Module, device: torch.device) -> None:
    """Initialise modules that have buffers on `meta` but no parameters of their own."""
    for module in root.modules():
        if any(buffer is not None and buffer.is_meta for buffer in module._buffers.values()):
            initialise(module, device)


def initialise(module: nn.Module, device: torch.device) -> None:
    """Run `reset_parameters` over freshly allocated tensors and see that it set all of them."""
    reset = getattr(module, "reset_parameters", None)
    kind = type(module).__name__
    if not callable(reset):
        raise ConfigError(
            expected(
                f"{kind} to have reset_parameters(), since it is on the meta device",
                "a module without it",
                hint="add the method, build the module on a real device, or load its weights "
                "with onefold.load_pretrained",
            )
        )
    for name, buffer in module._buffers.items():
        if buffer is not None and buffer.is_meta:
            module._buffers[name] = _blank(buffer, device)
    with torch.no_grad():
        reset()
    for name, tensor in [*module._parameters.items(), *module._buffers.items()]:
        if tensor is not None and tensor.is_floating_point() and _has_nan(tensor):
            raise ConfigError(
                expected(
                    f"{kind}.reset_parameters() to set {name!r}",
                    "a tensor that it left uninitialised",
                    hint=f"initialise {name!r} in reset_parameters, or build the module on a "
                    "real device",
                )
            )


def _has_nan(tensor: Tensor) -> bool:
    """A sum tells without a temporary as large as a mask; only opposite infinities need a look."""
    return bool(tensor.sum().isnan()) and bool(tensor.isnan().any())


def agree_on_values(tensors: Iterable[Tensor], group: Group) -> None:
    """Give every rank the values of rank 0, one tensor at a time."""
    if group.world_size == 1:
        return
    with torch.no_grad():
        for tensor in tensors:
            if tensor.numel():
                sent = tensor.detach().contiguous()
                group.broadcast(sent, 0).wait()
                if sent.data_ptr() != tensor.data_ptr():
                    tensor.copy_(sent)


def _replace(owned: Owned, device: torch.device) -> None:
    """A real parameter in place of a meta one, for all its owners."""
    original = owned.parameter
    real = nn.Parameter(_blank(original, device), requires_grad=original.requires_grad)
    for module, name in owned.owners:
        module._parameters[name] = real
    owned.parameter = real


def _blank(like: Tensor, device: torch.device) -> Tensor:
    """Memory whose use before initialisation shows: NaN, or zero for integers."""
    fill = float("nan") if like.is_floating_point() else 0
    return torch.full(like.shape, fill, dtype=like.dtype, device=device)
