"""What moves when state is cut anew: rows between ranks, and optimizers' states that follow.

A piece of a parameter is a few ranges of its elements (`Cut.spans`). Where a range of a rank's old
piece meets a range of another rank's new piece, these elements travel: each rank sends only the
rows that it gives up. All rows of a unit that move to one rank are one message, whatever their
dtypes. Optimizers' states are taken off before rows move and given back after.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from onefold.engine.engine import Engine
from onefold.engine.optimizer import OptimizerBinding
from onefold.layout.ranges import Range
from onefold.layout.rows import Slot
from onefold.unit.context import Context
from onefold.unit.parameter import UnitParameter
from onefold.unit.unit import Unit
from onefold.wire.moves import swap

TRAFFIC = "reshare"
"""The name of these bytes in a report."""


@dataclass(frozen=True, slots=True)
class Rows:
    """One tensor of the shape of a parameter's piece: own rows before, and room for those after."""

    old_slot: Slot
    new_slot: Slot
    before: Tensor  # flat
    after: Tensor


def overlaps(old: Sequence[Range], new: Sequence[Range]) -> list[tuple[int, int, int]]:
    """Where two pieces meet: positions in the old and the new piece, and how many elements.

    >>> overlaps([(0, 4), (8, 12)], [(2, 9)])
    [(2, 0, 2), (4, 6, 1)]
    """
    common: list[tuple[int, int, int]] = []
    i = j = at_old = at_new = 0
    while i < len(old) and j < len(new):
        (a, b), (c, d) = old[i], new[j]
        start, stop = max(a, c), min(b, d)
        if start < stop:
            common.append((at_old + start - a, at_new + start - c, stop - start))
        if b <= d:
            i, at_old = i + 1, at_old + b - a
        else:
            j, at_new = j + 1, at_new + d - c
    return common


def move(items: Sequence[Rows], context: Context, name: str) -> None:
    """Fill the rows after from those before, of all ranks. A collective.

    `items` come in the same order on every rank. `name`: of the unit, for errors.
    """
    group, device = context.transport.group, context.store.device
    sent: list[list[Tensor]] = [[] for _ in range(group.world_size)]
    targets: list[list[Tensor]] = [[] for _ in range(group.world_size)]
    for item in items:
        if item.new_slot.replicated:
            continue  # every rank has them
        old, new = item.old_slot.cut.spans(group.rank), item.new_slot.cut.spans(group.rank)
        for at, to, numel in overlaps(old, new):
            item.after[to : to + numel].copy_(item.before[at : at + numel])
        for rank in range(group.world_size):
            if rank != group.rank:
                for at, _, numel in overlaps(old, item.new_slot.cut.spans(rank)):
                    sent[rank].append(_bytes(item.before[at : at + numel]))
                for _, to, numel in overlaps(item.old_slot.cut.spans(rank), new):
                    targets[rank].append(_bytes(item.after[to : to + numel]))
    shapes = [[target.shape for target in row] for row in targets]
    label = f"reshare of unit {name!r} on {context.where}"
    like = torch.empty(0, dtype=torch.uint8, device=device)
    pieces = swap(group, sent, shapes, like, label)
    for target, piece in zip(chain(*targets), chain(*pieces), strict=True):
        target.copy_(piece)
    context.ledger.sent(TRAFFIC, sum(map(len, chain(*sent))))


def _bytes(flat: Tensor) -> Tensor:
    return flat.view(torch.uint8)


Entry = dict[str, Any]
"""A parameter's state by name: a dtype where it has rows, else the value itself."""


@dataclass(slots=True, eq=False)
class OptimizerStates:
    """The states that one elementwise optimizer keeps of a module's parameters."""

    binding: OptimizerBinding
    optimizer: Optimizer
    engine: Engine
    entries: dict[UnitParameter, dict[str, Any]] = field(default_factory=dict)
    flats: list[Tensor] = field(default_factory=list)

    @staticmethod
    def all_of(engine: Engine) -> list[OptimizerStates]:
        """The states of all optimizers of a module, in the order of their first parameters."""
        order = {parameter: n for n, parameter in enumerate(engine.by_sharded.values())}
        owners: list[tuple[int, OptimizerStates]] = []
        for binding in list(engine.executor.steppers):
            if not isinstance(binding, OptimizerBinding) or not binding.is_flat:
                continue  # a matrix optimizer keeps whole matrices, which have owners
            optimizer = binding.optimizer
            if optimizer is not None:
                held = [order[p] for p in order if binding.holds(p)]
                owners.append((min(held, default=0), OptimizerStates(binding, optimizer, engine)))
        return [states for _, states in sorted(owners, key=lambda pair: pair[0])]

    def describe(self) -> dict[str, Entry]:
        """Name the states of each parameter here: ranks compare notes."""
        entries: dict[str, Entry] = {}
        for parameter, entry in self._own_states():
            entries[parameter.fqn] = {
                name: value.dtype if _is_row_state(parameter, value) else _number(value)
                for name, value in entry.items()
            }
        return entries

    def take_states(self) -> None:
        """Take the states off the optimizer, as own rows."""
        self.entries = {
            parameter: {
                name: parameter.unwrap(value.detach()) if _is_row_state(parameter, value) else value
                for name, value in entry.items()
            }
            for parameter, entry in self._own_states()
        }
        others = {
            tensor: entry
            for tensor, entry in dict.items(self.optimizer.state)
            if id(tensor) not in self.engine.by_sharded
        }
        self.binding.forget(self.optimizer)
        for tensor, entry in others.items():  # of parameters of other modules
            self.optimizer.state[tensor] = entry

    def rows(self, parameter: UnitParameter, name: str, dtype: torch.dtype) -> Tensor:
        """Own rows of a state, flat; none where this rank had no rows."""
        value = self.entries.get(parameter, {}).get(name)
        if isinstance(value, Tensor) and value.numel():
            return value.reshape(-1)
        return torch.empty(0, dtype=dtype)

    def room(self, unit: Unit, name: str, dtype: torch.dtype, numel: int) -> Tensor:
        """Zeros for a state of new rows: the unit's moments, or a flat tensor to step in place."""
        if unit.steps_in_blocks:
            unit.make_moments({name: dtype})
            return unit.moments[name].tensor
        self.flats.append(torch.zeros(numel, dtype=dtype, device=unit.stepped.device))
        return self.flats[-1]

    def give(self, parameter: UnitParameter, entry: Entry, flats: dict[str, Tensor]) -> None:
        """Give the optimizer a parameter's state back: rows of `flats`, and the numbers."""
        before = self.entries.pop(parameter, {})
        self.optimizer.state[parameter.sharded] = {
            name: parameter.wrap(parameter.own_rows(flats[name]))
            if isinstance(value, torch.dtype)
            else _number_here(value, before.get(name))
            for name, value in entry.items()
        }

    def end_move(self) -> None:
        """Count the states, and let the next step find them in place."""
        self.binding.follow_cut(self.optimizer, self.engine, self.flats)

    def _own_states(self) -> Sequence[tuple[UnitParameter, dict[str, Any]]]:
        known = self.engine.by_sharded
        state = dict.items(self.optimizer.state)
        return [(known[id(t)], entry) for t, entry in state if id(t) in known and entry]


def _is_row_state(parameter: UnitParameter, value: object) -> bool:
    is_like = isinstance(value, Tensor) and tuple(value.shape) == tuple(parameter.shape)
    return is_like and parameter.shape != ()


def _number(value: object) -> object:
    """A value as ranks send it; the moments of a parameter without dimensions are DTensors."""
    if not isinstance(value, Tensor):
        return value
    local: Tensor = value._local_tensor if isinstance(value, DTensor) else value
    return local.detach().cpu().clone()


def _number_here(value: object, own: object) -> object:
    """A number of another rank, on the device of this rank's own."""
    if not isinstance(value, Tensor):
        return value
    if isinstance(own, DTensor):
        own = own._local_tensor
    return value.to(own.device, copy=True) if isinstance(own, Tensor) else value.clone()
