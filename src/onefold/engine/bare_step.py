"""One rank that computes with the parameters that users see: their optimizer steps these.

Nothing is cut, so nothing is replaced around the class's own step. It is only made fused where
torch has that and the user left it open. See docs/adr/0041.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from onefold.engine.flat_groups import NUMBERS, with_numbers_on
from onefold.engine.rules import State, may_fuse
from onefold.unit.parameter import UnitParameter
from onefold.unit.unit import Unit


class BareStep:
    """A step that replaces nothing."""

    def __init__(self) -> None:
        self._fused: list[dict[str, Any]] = []  # groups that are fused during this step
        self.units: set[Unit] = set()  # that are stepped; empty: none is, now

    def begin(self, optimizer: Optimizer, known: Mapping[int, UnitParameter]) -> bool:
        """Begin a step. False: a parameter has another form or a master, or none has a gradient.

        `known`: the sharded parameters of Onefold by id; others step themselves.
        """
        own = [p for g in optimizer.param_groups for t in g["params"] if (p := known.get(id(t)))]
        units: set[Any] = {parameter.find_unit() or parameter.unit for parameter in own}
        is_bare = all([parameter.spec.computes_on_sharded for parameter in own])
        is_bare = is_bare and all(unit.master is None for unit in units)
        if not (is_bare and any(p.sharded.grad is not None for p in own)):
            return False
        for group in optimizer.param_groups:
            if may_fuse(optimizer, group, _states_of(optimizer, group)):
                group["fused"] = True
                self._fused.append(group)
                _move_numbers(optimizer, group)
        self.units = units
        return True

    def end(self) -> set[Unit]:
        """End the step, also one that raised; return the units that it stepped."""
        for group in self._fused:
            group["fused"] = None
        self._fused = []
        units, self.units = self.units, set()
        return units


def _states_of(optimizer: Optimizer, group: dict[str, Any]) -> list[State]:
    """Return the states of parameters with a gradient, where the class asks for all or none."""
    if type(optimizer) is not torch.optim.SGD:
        return []
    stepped: list[Tensor] = [tensor for tensor in group["params"] if tensor.grad is not None]
    return [dict.get(optimizer.state, tensor, {}) for tensor in stepped]


def _move_numbers(optimizer: Optimizer, group: dict[str, Any]) -> None:
    """Move counters to the device, where fused steps count them: users load them on the CPU."""
    for tensor in [tensor for tensor in group["params"] if tensor.device.type != "cpu"]:
        entry = dict.get(optimizer.state, tensor, {})
        numbers = [value for name in NUMBERS if isinstance(value := entry.get(name), Tensor)]
        if any(number.device != tensor.device for number in numbers):
            entry.update(with_numbers_on(tensor.device, entry))
