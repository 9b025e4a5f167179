"""Experts given as a list: one module tree, whose parameters have a row for each expert.

Stacked experts compute as the first one does, each with its own rows. So experts that differ in
anything but values are refused by name: they would silently behave as the first one.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from functools import partial
from types import FunctionType, MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard

from onefold.errors import ConfigError
from onefold.layout.model_axes import dtensor_of

_OF_MODULES = vars(nn.Module()).keys() - {"training"}
"""Attributes that every module has. `training` follows the whole module."""


def stacked(experts: nn.ModuleList, own: slice, axis: DeviceMesh | None) -> nn.Module:
    """The module tree of one expert, whose parameters have a row for each own expert.

    Raises `ConfigError` for experts that differ in more than values.
    """
    problem = next(_problems(experts), None)
    if problem is not None:
        wanted = "experts with equal parameters and attributes, without hooks: a list is stacked"
        hint = "give each kind of expert a list of its own, or call them without ExpertParallel"
        raise ConfigError(wanted, problem, hint=hint)
    tree = without_values(experts[0])
    for name, parameter in experts[0].named_parameters():
        rows = torch.stack([expert.get_parameter(name).detach() for expert in experts[own]])
        shape = (len(experts), *parameter.shape)
        shown = rows if axis is None else dtensor_of(rows, axis, [Shard(0)], shape)
        owner, _, attribute = name.rpartition(".")
        parameter = nn.Parameter(shown, parameter.requires_grad)
        tree.get_submodule(owner).register_parameter(attribute, parameter)
    return tree


def without_values(module: nn.Module) -> nn.Module:
    """A copy of a module whose parameters have no memory; it shares the configuration."""
    known: dict[int, object] = {
        id(p): nn.Parameter(p.to("meta"), requires_grad=False) for p in module.parameters()
    }
    config = getattr(module, "config", None)  # of a model, which may choose other kernels later
    return copy.deepcopy(module, known | {id(config): config})


def _problems(experts: nn.ModuleList) -> Iterator[str]:
    """Say what cannot be stacked, the first difference first."""
    seen: dict[int, str] = {}
    for name, parameter in experts.named_parameters(remove_duplicate=False):
        if (first := seen.setdefault(id(parameter), name)) != name:
            yield f"one parameter as {first!r} and {name!r}"
    for name, part in experts.named_modules():
        if any(part.buffers(recurse=False)):
            yield f"a buffer in {name!r}"
        hooked = [part, *part.parameters(recurse=False)]
        if any(_hooks_of(each) for each in hooked):
            yield f"a hook of {name or 'the list'!r}, which would see no call or gradient"
    first = _facts(experts[0])
    for number, expert in enumerate(experts):
        facts = _facts(expert)
        for key in first | facts:
            one, other = (of.get(key, "nothing") for of in (first, facts))
            if not _alike(one, other):
                yield f"{key} = {one!r} in expert 0, but {other!r} in expert {number}"


def _hooks_of(hooked: Any) -> bool:
    """True if a module or a parameter has hooks that see forward or backward."""
    if isinstance(hooked, Tensor):
        return bool(hooked._backward_hooks or hooked._post_accumulate_grad_hooks)
    kinds = [name for name in vars(hooked) if name.startswith(("_forward_", "_backward_"))]
    return any(vars(hooked)[name] for name in kinds)


def _facts(expert: nn.Module) -> dict[str, object]:
    """All that an expert consists of but for values, by name."""
    facts: dict[str, object] = {}
    for name, parameter in expert.named_parameters():
        facts[f"shape of {name!r}"] = tuple(parameter.shape)
        facts[f"dtype of {name!r}"] = parameter.dtype
        facts[f"requires_grad of {name!r}"] = parameter.requires_grad
    for name, part in expert.named_modules():
        facts[f"class of {name!r}"] = type(part).__name__
        own = vars(part).items()
        facts |= {f"{name}.{key}".lstrip("."): v for key, v in own if key not in _OF_MODULES}
    return facts


def _alike(one: Any, other: Any) -> bool:
    """True if two attributes of equal experts are the same by identity, value or content."""
    if one is other:
        return True
    if type(one) is not type(other):
        return False
    if isinstance(one, nn.Module):  # the expert, or a part of it, which has facts of its own
        return True
    if isinstance(one, Tensor):
        return one.shape == other.shape and torch.equal(one, other)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(_alike, one, other))
    try:
        content = _content(one)
        return bool(one == other) or (bool(content) and _alike(content, _content(other)))
    except (ValueError, RuntimeError):  # an array, or objects that refer to each other
        return False


def _content(value: Any) -> list[Any]:
    """The parts of an object of which each expert has one of its own; [] if it shows none."""
    if isinstance(value, MethodType):  # of the expert itself
        return [value.__func__]
    if isinstance(value, FunctionType):  # made in the constructor
        return [value.__code__, *(cell.cell_contents for cell in value.__closure__ or ())]
    if isinstance(value, partial):
        return [value.func, value.args, value.keywords]
    inside = value if isinstance(value, Mapping) else getattr(value, "__dict__", {})
    return [part for item in inside.items() for part in item]
