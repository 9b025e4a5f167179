"""Matrix optimizers (Muon, Adafactor, Shampoo ...) on whole matrices.

Their update needs a parameter whole. Each parameter has one owner among the ranks, chosen so that
all own about as many elements. Before the step every rank sends its rows of weight and gradient to
the owners (one all-to-all each), the owners step, and the new rows travel back. Each element is
updated once and each rank keeps 1/N of the state; the price is 3(N-1)/N elements sent per step.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from onefold.unit.parameter import UnitParameter
from onefold.unit.unit import Unit

State = dict[str, Any]


class MatrixStep:
    """Groups of faces become the whole parameters that this rank owns, and back."""

    def __init__(self) -> None:
        self._owner: dict[UnitParameter, int] = {}
        self._handles: dict[UnitParameter, nn.Parameter] = {}
        self._state: dict[UnitParameter, State] = {}
        self._entered: list[UnitParameter] = []
        self.rounded: set[Unit] = set()  # the class's own step rounds nothing

    def import_state(self, parameter: UnitParameter, state: State) -> None:
        """Keep whole per-parameter state, as loaded."""
        self._state[parameter] = state

    def forget(self) -> None:
        """Drop all states; who owns which parameter stays."""
        self._state.clear()

    def kept_here(self, parameters: Sequence[UnitParameter]) -> list[UnitParameter]:
        """Those that this rank steps. Asking decides it, if no step has yet."""
        self._assign(list(parameters))
        return [parameter for parameter in parameters if self._is_mine(parameter)]

    def enter(
        self, groups: list[list[UnitParameter]], rules: Sequence[object]
    ) -> list[list[Tensor]]:
        """For each group the whole parameters this rank owns, with whole gradients."""
        self._entered = [parameter for group in groups for parameter in group]
        with torch._C.DisableTorchFunctionSubclass(), torch.no_grad():
            for unit in _units(self._entered):
                members = [p for p in self._entered if p.unit is unit]
                self._assign(members)
                self._collect(unit, members)
        return [[self._handles[p] for p in group if self._is_mine(p)] for group in groups]

    def state_of(self, stand_in: Tensor) -> State | None:
        for parameter, handle in self._handles.items():
            if handle is stand_in:
                return self._state.get(parameter)
        return None

    def leave(self, state: dict[Tensor, State]) -> dict[UnitParameter, State]:
        """Send the stepped rows home; state stays with the owners."""
        with torch._C.DisableTorchFunctionSubclass(), torch.no_grad():
            for unit in _units(self._entered):
                self._return_rows(unit, [p for p in self._entered if p.unit is unit])
            for parameter in self._entered:
                handle = self._handles.get(parameter)
                if handle is not None:
                    self._state[parameter] = state.get(handle, {})
                    handle.grad = None
                    handle.data = handle.data.new_empty(0)
        return self._state

    def recover(self) -> None:
        """Let go of whole parameters; faces keep their gradients."""
        for handle in self._handles.values():
            handle.grad = None
            handle.data = handle.data.new_empty(0)

    def _is_mine(self, parameter: UnitParameter) -> bool:
        owner = self._owner[parameter]
        return owner in (-1, parameter.unit.context.rank)

    def _assign(self, members: list[UnitParameter]) -> None:
        """Give each parameter the rank that owns least so far; -1: every rank steps its copy."""
        for parameter in members:
            if parameter in self._owner:
                continue
            context = parameter.unit.context
            if context.rest_world == 1 or parameter.slot.replicated:
                self._owner[parameter] = -1
                continue
            load = [0] * context.rest_world
            for other, owner in self._owner.items():
                if owner >= 0 and other.unit.context is context:
                    load[owner] += other.slot.numel
            self._owner[parameter] = load.index(min(load))

    def _collect(self, unit: Unit, members: list[UnitParameter]) -> None:
        travelling = [p for p in members if self._owner[p] >= 0]
        weights = self._to_owners(unit, travelling, {p: p.stepped for p in travelling})
        grads = self._to_owners(unit, travelling, {p: _local_grad(p) for p in travelling})
        for parameter in members:
            if self._owner[parameter] < 0:
                weight, grad = parameter.stepped, _local_grad(parameter)
            elif self._is_mine(parameter):
                weight, grad = weights[parameter], grads[parameter]
            else:
                continue
            handle = self._handles.setdefault(parameter, nn.Parameter(weight))
            handle.data = weight
            handle.grad = grad

    def _to_owners(
        self, unit: Unit, members: list[UnitParameter], rows: dict[UnitParameter, Tensor]
    ) -> dict[UnitParameter, Tensor]:
        """Every rank's rows of each parameter, on its owner, whole."""
        if not members:
            return {}
        context = unit.context
        ranks = range(context.world_size)
        by_owner = [[p for p in members if self._owner[p] == rank] for rank in ranks]
        mine = by_owner[context.rank]
        sent = torch.cat([rows[p].reshape(-1) for owned in by_owner for p in owned])
        numels_sent = [sum(rows[p].numel() for p in owned) for owned in by_owner]
        numels = [sum(p.slot.piece_numel(rank) for p in mine) for rank in ranks]
        received = sent.new_empty(sum(numels))
        context.transport.group.all_to_all(received, sent, numels, numels_sent).wait()
        context.ledger.sent("whole_matrix", (len(sent) - numels_sent[context.rank]) * sent.itemsize)
        from_ranks = [
            part.split([p.slot.piece_numel(rank) for p in mine])
            for rank, part in enumerate(received.split(numels))
        ]
        return {
            p: torch.cat(
                [parts[i].view(p.slot.piece_shape(rank)) for rank, parts in enumerate(from_ranks)],
                p.slot.dim,
            )
            for i, p in enumerate(mine)
        }

    def _return_rows(self, unit: Unit, members: list[UnitParameter]) -> None:
        travelling = [p for p in members if self._owner[p] >= 0]
        if not travelling:
            return
        context = unit.context
        ranks = range(context.world_size)
        by_owner = [[p for p in travelling if self._owner[p] == rank] for rank in ranks]
        mine = by_owner[context.rank]
        empty = unit.stepped.new_empty(0)
        parts = [
            p.slot.own_view(self._handles[p].detach(), rank).reshape(-1)
            for rank in ranks
            for p in mine
        ]
        sent = torch.cat([empty, *parts])
        numels_sent = [sum(p.slot.piece_numel(rank) for p in mine) for rank in ranks]
        own = [[p.slot.piece_numel(context.rank) for p in owned] for owned in by_owner]
        received = sent.new_empty(sum(map(sum, own)))
        context.transport.group.all_to_all(received, sent, list(map(sum, own)), numels_sent).wait()
        context.ledger.sent("whole_matrix", (len(sent) - numels_sent[context.rank]) * sent.itemsize)
        flat = [numel for owned in own for numel in owned]
        homecoming = [p for owned in by_owner for p in owned]
        for parameter, rows in zip(homecoming, received.split(flat), strict=True):
            parameter.stepped.copy_(rows.view(parameter.local.shape))


def _units(parameters: list[UnitParameter]) -> list[Unit]:
    return list(dict.fromkeys(parameter.unit for parameter in parameters))


def _local_grad(parameter: UnitParameter) -> Tensor:
    grad = parameter.sharded.grad
    assert grad is not None, "a parameter without gradient is stepped"
    return parameter.unwrap(grad).to(parameter.unit.stepped.dtype)
