"""Find optimizers whose parameters are coupled: stepping them together differs from apart.

D-Adaptation and Prodigy estimate one learning rate from all parameters, and global clipping takes
one norm. Where ranks step different parameters, each rank would compute another number. A probe
finds such a class by its behaviour: it steps two small parameters together and apart.

At stage 0 LBFGS searches over all parameters: `share_losses` lets ranks search alike.
"""

from __future__ import annotations

from collections.abc import Sequence
from copy import deepcopy
from inspect import Parameter, signature
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import LBFGS, Optimizer

from onefold.engine.rules import unhooked_step
from onefold.errors import ConfigError
from onefold.recipe import Recipe
from onefold.wire.collectives import Group

SCALES = (1.0, 3.0, 0.5, 40.0, 2.0, 0.1)
"""Gradients of the probe's steps, relative to one another: a sudden one is clipped."""


def check_separable(optimizer: Optimizer, recipe: Recipe) -> None:
    """Raise `ConfigError` if ranks step different parameters, and the class needs them together.

    A class that cannot be built from its hyper-parameters, or cannot step two float32 matrices on a
    CPU, is not probed: it is taken to step each parameter by itself.
    """
    is_spread = recipe.rest_world > 1 or any(unit.ranks for unit in recipe.units)
    if not is_spread:
        return
    if isinstance(optimizer, LBFGS):
        why = "which searches over all parameters at once"
    elif type(optimizer).__module__.startswith("torch.optim."):
        return  # none of the others is coupled
    elif is_coupled(optimizer):
        why = "whose step of a parameter depends on the other parameters"
    else:
        return
    raise ConfigError(
        "an optimizer that steps each parameter by itself, as ranks step different ones",
        f"{type(optimizer).__name__}, {why}",
        hint="use stage=0, where every rank steps all parameters, or another optimizer, "
        "such as AdamW",
    )


def is_coupled(optimizer: Optimizer) -> bool:
    """True if a probe of the optimizer's class, with its hyper-parameters, is coupled.

    It compares weights, and the numbers that a class keeps in its groups. The optimizer itself, and
    the global generator, stay as they are. A class that draws random numbers is not compared.
    """
    before = torch.get_rng_state()
    try:
        together, *apart = [_probe(optimizer, which) for which in ((0, 1), (0,), (1,))]
    except Exception:  # whatever a class raises on parameters that it is not made for
        return False
    finally:
        draws = not torch.equal(before, torch.get_rng_state())
        if draws:
            torch.set_rng_state(before)
    if any(not isinstance(key, Tensor) for key in together.state):
        return True
    weights = [p.detach().nan_to_num() for probe in apart for p in probe.param_groups[0]["params"]]
    shared = [p.detach().nan_to_num() for p in together.param_groups[0]["params"]]
    is_same = all(map(torch.equal, shared, weights))
    is_same &= all(_numbers(probe) == _numbers(together) for probe in apart)
    return not (is_same or draws)


def _probe(optimizer: Optimizer, which: Sequence[int]) -> Optimizer:
    """Return an optimizer of the class that has stepped some of two small matrices."""
    kind = type(optimizer)
    matrices = [torch.linspace(-0.3, 0.4, 6).view(2, 3), torch.linspace(0.1, 0.9, 12).view(3, 4)]
    directions = [torch.linspace(0.02, -0.01, 6).view(2, 3), torch.linspace(1, 2, 12).view(3, 4)]
    parameters = [nn.Parameter(matrices[index]) for index in which]
    group = {k: deepcopy(v) for k, v in optimizer.param_groups[0].items() if _is_plain(v)}
    probe = kind([{**group, "params": parameters}], **_arguments(optimizer))
    step = unhooked_step(kind)
    with torch.no_grad():
        for scale in SCALES:
            for parameter, index in zip(parameters, which, strict=True):
                parameter.grad = directions[index] * scale
            step(probe)
    return probe


def _numbers(probe: Optimizer) -> str:
    return repr({key: v for key, v in probe.param_groups[0].items() if _is_plain(v)})


def _arguments(optimizer: Optimizer) -> dict[str, Any]:
    """Return the arguments of the optimizer's constructor, as far as they can be read from it."""
    known = {**vars(optimizer), **optimizer.defaults, **optimizer.param_groups[0]}
    _, *parameters = signature(type(optimizer)).parameters.values()
    named = [
        p.name
        for p in parameters
        if p.kind in (Parameter.POSITIONAL_OR_KEYWORD, Parameter.KEYWORD_ONLY)
    ]
    return {
        name: deepcopy(known[name]) for name in named if name in known and _is_plain(known[name])
    }


def _is_plain(value: object) -> bool:
    """True for numbers, words and small tensors, and tuples of them: not for parameters."""
    if isinstance(value, tuple):
        return all(map(_is_plain, value))
    is_number = isinstance(value, Tensor) and value.numel() == 1 and value.is_leaf
    return is_number or value is None or isinstance(value, bool | int | float | str)


def share_losses(
    group: Group, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    """Let a step's closure return the mean loss of all ranks, so that all search alike."""
    optimizer, *rest = args
    closure = rest[0] if rest else kwargs.get("closure")
    if closure is None or group.world_size == 1:
        return None

    def mean_loss() -> Tensor:
        with torch.enable_grad():
            loss = torch.as_tensor(closure()).detach()
        return group.all_reduced(loss) / group.world_size

    return (optimizer, mean_loss), {k: v for k, v in kwargs.items() if k != "closure"}
