"""See in which order a forward uses modules: it runs once on `meta`, where nothing is computed."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_iter

from onefold.layout.units import UnitPlan
from onefold.planner.passes import Use
from onefold.planner.storages import Storages, Untraceable
from onefold.planner.work import Work


@dataclass(frozen=True, slots=True)
class ForwardTrace:
    """One forward of [rows, seq] tokens."""

    uses: tuple[Use, ...]
    peak: int  # the most bytes that torch holds besides parameters
    work: Work
    cache_nbytes: int  # keys and values of all its tokens; 0 for a model without a cache


def names_of_users(module: nn.Module, plans: Sequence[UnitPlan]) -> dict[str, list[Use]]:
    """Return the units that modules use, by the modules' names: they outlive a copy."""
    names = {id(part): name for name, part in module.named_modules()}
    uses: dict[str, list[Use]] = {}
    for index, plan in enumerate(plans):
        owners = [owner for owned in plan.members for owner, _ in owned.owners]
        is_large = plan.tile_nbytes > 0
        users = list(dict.fromkeys(owners)) if is_large else plan.modules
        for user in users:
            verb = verb_of(user) if is_large else "enter"
            use = Use(index, verb, id(user), len(users))
            uses.setdefault(names[id(user)], []).append(use)
    return uses


def verb_of(user: nn.Module) -> str:
    """Say how a module uses a weight that is too large for a unit."""
    return "rows" if isinstance(user, nn.Embedding) else "blocks"


def trace_forward(
    module: nn.Module, users: Mapping[str, Sequence[Use]], tokens: Tensor, device_type: str,
    options: Mapping[str, Any] | None = None,
) -> ForwardTrace:  # fmt: skip
    """Trace one forward of a module on `meta`; `users` by name, of a module like it.

    Args:
        module: the model.
        users: the units that its modules use.
        tokens: [rows, seq], its first argument.
        device_type: of the device that computes.
        options: more arguments of its forward.

    Raises `Untraceable` where the forward depends on the values of tensors.
    """
    arguments = dict(options or {})
    events: list[Use] = []
    hooks: list[Any] = []
    for name, part in module.named_modules():
        for use in users.get(name, ()):
            hooks.append(part.register_forward_pre_hook(partial(_note, events, use)))
            if use.verb == "enter":
                leave = Use(use.unit, "leave", use.module, use.num_modules)
                hooks.append(part.register_forward_hook(partial(_note, events, leave)))
    works: list[Work] = []
    storages = Storages(device_type, works.append)
    inputs = [leaf for leaf in tree_iter((tokens, arguments)) if isinstance(leaf, Tensor)]
    for tensor in chain(module.parameters(), module.buffers(), inputs):
        storages.ignore(tensor)
    try:
        with torch.no_grad(), storages.watching():
            outputs = module(tokens, **arguments, **_options(module))
    except (NotImplementedError, RuntimeError, TypeError, ValueError) as error:
        raise Untraceable(f"{type(error).__name__}: {str(error).splitlines()[0]}") from error
    finally:
        for hook in hooks:
            hook.remove()
    work = Work()
    for kernel in works:
        work = work.plus(kernel)
    cache = _cache_nbytes(getattr(outputs, "past_key_values", None))
    return ForwardTrace(tuple(events), storages.take_peak()[0], work, cache)


def _note(events: list[Use], use: Use, *_: object) -> None:
    events.append(use)


def _options(module: nn.Module) -> dict[str, Any]:
    """The options with which generation calls a model of transformers."""
    known = inspect.signature(module.forward).parameters
    wanted = {"use_cache": True, "logits_to_keep": 1}
    return {name: value for name, value in wanted.items() if name in known}


def _cache_nbytes(cache: Any) -> int:
    both = (
        getattr(cache, "self_attention_cache", None),
        getattr(cache, "cross_attention_cache", None),
    )
    if all(both):  # an encoder-decoder's
        return sum(_cache_nbytes(part) for part in both)
    layers = getattr(cache, "layers", None) or ()
    tensors = [(getattr(layer, "keys", None), getattr(layer, "values", None)) for layer in layers]
    return sum(tensor.nbytes for tensor in tree_iter(tensors) if isinstance(tensor, Tensor))
