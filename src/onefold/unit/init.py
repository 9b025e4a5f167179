"""Giving values to parameters before they are cut: from `meta`, and the same on every rank."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor, nn

from onefold.errors import ConfigError
from onefold.layout.cut import Box
from onefold.layout.module_tree import ModuleTree
from onefold.layout.packed import QuantizedWeight
from onefold.layout.units import Owned, UnitPlan
from onefold.wire.collectives import Group

if TYPE_CHECKING:
    from onefold.tier.files import FileRows
    from onefold.unit.parameter import UnitParameter

Room = Callable[[int], AbstractContextManager[None]]
"""A context that explains an error for want of so many bytes."""

PROMISED = "_onefold_promised_values"
"""The attribute of a module that is not sharded yet that says where its values will come from."""


class Values(Protocol):
    """Where parameters and buffers of a module on `meta` get their values, by name."""

    directory: Path

    def __contains__(self, name: str) -> bool: ...

    def fill(self, name: str, box: Box | None, out: Tensor) -> None:
        """Copy a box of the tensor, or all of it, into `out`."""
        ...

    def where(self, name: str) -> tuple[Path, int, str]:
        """The file of a tensor, the offset of its first byte there, and its dtype's name."""
        ...


Initialisers = dict[int, Callable[[nn.Module], object]]
"""By id of a module: the enclosing model's `_init_weights`, as Hugging Face's models define it."""


def initialisers_of(tree: ModuleTree) -> Initialisers:
    """The `_init_weights` of the innermost model around each module, where there is one."""
    by_name: dict[str, Callable[[nn.Module], object]] = {}
    for name, part in tree.parts:  # a module comes after the one around it
        own = getattr(part, "_init_weights", None)
        initialiser = own if callable(own) else by_name.get(name.rpartition(".")[0])
        if initialiser is not None:
            by_name[name] = initialiser
    return {id(part): by_name[name] for name, part in tree.parts if name in by_name}


def materialise(
    plan: UnitPlan, device: torch.device, room: Room, initialisers: Initialisers,
    values: Values | None = None,
) -> None:  # fmt: skip
    """Give real memory and initial values to the unit's parameters that are on `meta`.

    Each owning module is initialised by the model around it or by its own `reset_parameters`, in
    module order. Only modules of this unit are touched, so no more than one unit is unsharded at a
    time. Parameters that `values` has get a stand-in without memory: `Unit.adopt` reads their rows.
    """
    owners: dict[int, nn.Module] = {}
    mine: set[int] = set()
    for owned in plan.members:
        is_given = values is not None and owned.fqn in values
        if is_given:
            _replace(owned, torch.empty((), dtype=owned.parameter.dtype, device=device))
            continue
        if owned.parameter.is_meta:
            _refuse_cut(owned)
            owners[id(owned.owners[0][0])] = owned.owners[0][0]
            with room(owned.parameter.nbytes):
                blank = _blank(owned.parameter, device)
            _replace(owned, blank)
        mine.add(id(owned.parameter))
    for module in owners.values():
        elsewhere = {
            name: parameter
            for name, parameter in module._parameters.items()
            if parameter is not None and id(parameter) not in mine
        }
        _initialise(module, device, initialisers, elsewhere)  # stand-ins of other units' parameters


def materialise_buffers(
    tree: ModuleTree, device: torch.device, initialisers: Initialisers, values: Values | None = None
) -> None:
    """Initialise modules that have buffers on `meta`; then fill those that `values` has."""
    for prefix, module in tree.parts:
        names = {
            name: f"{prefix}.{name}" if prefix else name
            for name, buffer in module._buffers.items()
            if buffer is not None and (buffer.is_meta or values is not None)
        }
        promised = [name for name, fqn in names.items() if values is not None and fqn in values]
        on_meta = [name for name in names if getattr(module._buffers[name], "is_meta", False)]
        if set(on_meta) - set(promised):
            stand_ins = {n: p for n, p in module._parameters.items() if p is not None}
            _initialise(module, device, initialisers, stand_ins)
        for name, buffer in list(module._buffers.items()):
            if values is None or buffer is None or name not in promised:
                continue
            if buffer.is_meta:
                buffer = module._buffers[name] = _blank(buffer, device)
            values.fill(names[name], None, buffer)


def _initialise(
    module: nn.Module, device: torch.device, initialisers: Initialisers,
    stand_ins: dict[str, nn.Parameter],
) -> None:  # fmt: skip
    """Initialise freshly allocated tensors of a module, and stand-ins; see that all are set."""
    for name, parameter in stand_ins.items():
        module._parameters[name] = nn.Parameter(_blank(parameter, device), False)
    kind = type(module).__name__
    for name, buffer in module._buffers.items():
        if buffer is not None and buffer.is_meta:
            module._buffers[name] = _blank(buffer, device)
    by_model, reset = initialisers.get(id(module)), getattr(module, "reset_parameters", None)
    if by_model is None and not callable(reset):
        wanted = f"{kind} to have reset_parameters(), since it is on the meta device"
        hint = "add the method, build the module on a real device, or load its weights "
        hint += "with onefold.load_pretrained before onefold.shard"
        raise ConfigError(wanted, "a module without it", hint=hint)
    with torch.no_grad():
        if by_model is not None:
            by_model(module)
        if callable(reset) and (by_model is None or _unset(module)):
            reset()
    for name in _unset(module):
        got = "a tensor that it left uninitialized"
        hint = f"initialize {name!r} in reset_parameters, or build the module on a real device"
        raise ConfigError(f"{kind}.reset_parameters() to set {name!r}", got, hint=hint)
    module._parameters.update(stand_ins)


def _unset(module: nn.Module) -> list[str]:
    """Names of the module's own tensors that have no values yet."""
    tensors = [*module._parameters.items(), *module._buffers.items()]
    return [n for n, t in tensors if t is not None and t.is_floating_point() and _has_nan(t)]


def _has_nan(tensor: Tensor) -> bool:
    """Sum first, without a temporary as large as a mask; opposite infinities need a second test."""
    return bool(tensor.sum().isnan()) and bool(tensor.isnan().any())


VALUES = "a message of rank 0's values"


def agree_on_values(tensors: Iterable[Tensor], group: Group) -> None:
    """Give every rank the values of rank 0, one tensor at a time."""
    if group.world_size == 1:
        return
    with torch.no_grad():
        for tensor in tensors:
            if tensor.numel():
                sent = tensor.detach().contiguous()
                group.agree((VALUES, sent.nbytes), VALUES, sent)
                group.wait(group.broadcast(sent, 0), VALUES)
                if sent.data_ptr() != tensor.data_ptr():
                    tensor.copy_(sent)


def rows_in_files(parameter: UnitParameter, rows: FileRows, values: Values | None) -> Tensor:
    """Let own rows of a parameter rest where its file has them; return them as they lie there."""
    assert values is not None, "only promised values lie in files"
    path, offset, dtype = values.where(parameter.fqn)
    local, hint = parameter.local, 'offload="disk:PATH", which keeps a copy in that folder'
    if str(local.dtype) != f"torch.{dtype}":
        wanted = f"parameter {parameter.fqn!r} in the dtype of its file, {dtype}"
        raise ConfigError(wanted, local.dtype, hint=f"build the module in {dtype}, or {hint}")
    spans = [
        span for span in parameter.slot.cut.spans(parameter.spec.context.rest_rank) if local.numel()
    ]
    if len(spans) > 1:
        wanted = f"this rank's rows of parameter {parameter.fqn!r} side by side in {path.name}"
        raise ConfigError(wanted, f"{len(spans)} parts of it", hint=hint)
    first, last = spans[0] if spans else (0, 0)
    start = offset + first * local.itemsize
    return rows.place(path, start, parameter.span.start, last - first).view(local.shape)


def _replace(owned: Owned, value: Tensor, *, is_cut: bool = False) -> None:
    """A real parameter in place of a meta one, for all its owners."""
    original = owned.parameter
    shown = value if is_cut else value.expand(owned.values.shape)
    if isinstance(original, QuantizedWeight):
        real: nn.Parameter = original.over(shown)
    else:
        real = nn.Parameter(shown, requires_grad=original.requires_grad)
    owned.materialise(real)


def _refuse_cut(owned: Owned) -> None:
    """Raise `ConfigError` for a piece on meta: initialisers draw the values of whole tensors."""
    if owned.model is not None:
        wanted = f"parameter {owned.fqn!r} to have values before model axes cut it"
        hint = "call onefold.load_pretrained(module, directory) before onefold.shard, or "
        hint += "build the module on a real device before parallelize_module"
        raise ConfigError(wanted, f"one on the meta device: {owned.model}", hint=hint)


def move(owned: Owned, device: torch.device) -> None:
    """Let a parameter's values lie on `device`."""
    if owned.model is None or owned.parameter is owned.values:
        owned.parameter.data = owned.parameter.data.to(device)
    elif owned.values.device != device:
        cut = owned.model.over(owned.values.detach().to(device))
        _replace(owned, cut, is_cut=True)


def _blank(like: Tensor, device: torch.device) -> Tensor:
    """Memory whose use before initialisation shows: NaN, or zero for integers."""
    fill = float("nan") if like.is_floating_point() else 0
    return torch.full(like.shape, fill, dtype=like.dtype, device=device)
