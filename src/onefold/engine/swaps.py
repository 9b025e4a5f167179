"""`train()` and `eval()` of classes that swap weights between steps, as ScheduleFree does.

They run on the tensors that the class's steps see. A narrow weight is swapped in its master, and
rounded afterwards. Whole parameters are the same objects at the same addresses as in a step, by
which heavyball finds its states.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, Protocol
from weakref import ref

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from onefold.engine.engine import Engine
from onefold.engine.probe import acts_outside
from onefold.engine.rules import State
from onefold.layout.model_axes import local_of
from onefold.unit.parameter import UnitParameter
from onefold.unit.unit import unit_of


class Binding(Protocol):
    """The binding of an optimizer, as this file knows it."""

    engines: list[Engine]
    is_flat: bool

    def parameter(self, tensor: Tensor) -> UnitParameter | None: ...
    def stand_in(self, parameter: UnitParameter) -> Tensor: ...


def watch_swaps(optimizer: Optimizer, binding: Binding) -> None:
    """Have the optimizer's `train` and `eval` swap masters, if its class has both."""
    if acts_outside(type(optimizer)):
        for name in ("train", "eval"):
            act = getattr(type(optimizer), name)
            setattr(optimizer, name, partial(_swap, ref(optimizer), ref(binding), act))


def _swap(
    find_optimizer: Callable[[], Optimizer | None], find_binding: Callable[[], Binding | None],
    act: Callable[..., Any], *args: Any, **kwargs: Any,
) -> Any:  # fmt: skip
    optimizer, binding = find_optimizer(), find_binding()
    assert optimizer is not None, "a method of an optimizer that is gone"
    tensors = [tensor for group in optimizer.param_groups for tensor in group["params"]]
    held = {t: p for t in tensors if binding is not None and (p := binding.parameter(t))}
    if binding is None or not held:  # inside a step, or inside the other one of the two
        return act(optimizer, *args, **kwargs)
    units = dict.fromkeys(unit_of(parameter) for parameter in held.values())
    for engine in binding.engines:
        engine.rest()
    for unit in units:
        unit.wait_step()
        unit.check_untouched()
        unit.refresh_master()
    with _exchanged(optimizer, held, binding), torch.no_grad():
        result = act(optimizer, *args, **kwargs)
    for unit in units:
        unit.publish(is_rounded=False)
    for engine in binding.engines:
        engine.schedule.stepped()
    return result


@contextmanager
def _exchanged(
    optimizer: Optimizer, held: dict[Tensor, UnitParameter], binding: Binding
) -> Iterator[None]:
    """Put own rows, and their states, in place of sharded parameters; keep states as replaced."""
    seen = {tensor: _seen(parameter, binding) for tensor, parameter in held.items()}
    shown, groups = optimizer.state, [group["params"] for group in optimizer.param_groups]
    own = {tensor: _local_entry(shown.get(tensor, {})) for tensor in held}
    others = {key: entry for key, entry in dict.items(shown) if key not in held}
    state: defaultdict[Tensor, State] = defaultdict(dict, others)
    state.update({seen[tensor]: dict(entry) for tensor, entry in own.items()})
    optimizer.state = state
    for group, tensors in zip(optimizer.param_groups, groups, strict=True):
        group["params"] = [seen.get(tensor, tensor) for tensor in tensors]
    try:
        yield
    finally:
        optimizer.state = shown
        for group, tensors in zip(optimizer.param_groups, groups, strict=True):
            group["params"] = tensors
        for tensor, parameter in held.items():
            for name, value in state[seen[tensor]].items():
                if value is not own[tensor].get(name):
                    is_rows = isinstance(value, Tensor) and value.shape == parameter.local.shape
                    shown[tensor][name] = parameter.wrap(value) if is_rows else value


def _seen(parameter: UnitParameter, binding: Binding) -> Tensor:
    """Return own rows as the class's step sees them."""
    rows = parameter.stepped.detach()
    if binding.is_flat:
        return nn.Parameter(rows, requires_grad=False)
    seen = binding.stand_in(parameter)
    seen.data = rows
    return seen


def _local_entry(entry: State) -> State:
    return {name: local_of(v) if isinstance(v, DTensor) else v for name, v in entry.items()}
