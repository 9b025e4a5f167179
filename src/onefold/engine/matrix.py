"""Matrix optimizers (Muon, Adafactor, Shampoo ...) step unsharded parameters.

Their update needs all rows of a parameter. Each parameter has one owner among the ranks, chosen so
that all own about as many elements. Before the step every rank sends its rows of weight and
gradient to the owners (one all-to-all each). The owners step, and the new rows travel back. Each
element is updated once and each rank keeps 1/N of the state. A step sends 3(N-1)/N elements more.
"""

import itertools
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from onefold.engine.flat_groups import NUMBERS
from onefold.engine.rules import State
from onefold.unit.parameter import UnitParameter
from onefold.unit.unit import Unit, unit_of


class MatrixStep:
    """Replaces sharded parameters by the unsharded ones that this rank owns, during a step."""

    def __init__(self) -> None:
        self._owner: dict[UnitParameter, int] = {}
        self._unsharded: dict[UnitParameter, nn.Parameter] = {}
        self._state: dict[UnitParameter, State] = {}
        self._exact: list[Tensor] = []  # states of the dtypes that the class has chosen
        self._entered: dict[Unit, list[UnitParameter]] = {}
        self.rounded: set[Unit] = set()  # none: the class's own step rounds nothing

    def import_state(self, parameter: UnitParameter, state: State) -> None:
        """Keep unsharded per-parameter state, as loaded, in the dtype that is stepped.

        torch's load_state_dict has narrowed it to the dtype of its parameter. A class may have
        chosen another dtype: that stays, but for float64 on either side. So do all dtypes that
        `onefold.load` has read.
        """
        dtype, exact = unit_of(parameter).stepped.dtype, set(map(id, self._exact))
        narrowed = (torch.float64, parameter.spec.dtype)
        self._state[parameter] = {
            name: value.to(dtype)
            if type(value) is Tensor
            and value.is_floating_point()
            and (value.dtype in narrowed or dtype == torch.float64)
            and id(value) not in exact
            and name not in NUMBERS
            else value
            for name, value in state.items()
        }

    def take_over(self, tensors: Sequence[Tensor]) -> None:
        """Step states that will be assigned in their own dtypes."""
        self._exact += tensors

    def forget(self) -> None:
        """Drop all states; owners stay."""
        self._state.clear()
        self._exact.clear()

    def kept_here(self, parameters: Sequence[UnitParameter]) -> list[UnitParameter]:
        """Return the parameters that this rank owns; give owners to those without one."""
        self._assign(sorted(parameters, key=_exchange_order))
        return [parameter for parameter in parameters if self._is_mine(parameter)]

    def keeper_of(self, parameter: UnitParameter) -> int | None:
        """Return the parameter's owner; None if every rank keeps its state."""
        owner = self._owner.get(parameter, -1)
        return None if owner == -1 else owner

    def enter(
        self, groups: list[list[UnitParameter]], rules: Sequence[object]
    ) -> list[dict[Tensor, State]]:
        """For each group, return unsharded parameters of this rank with gradients, and states."""
        self._entered = {}
        self._exact.clear()
        for parameter in sorted(itertools.chain.from_iterable(groups), key=_exchange_order):
            self._entered.setdefault(unit_of(parameter), []).append(parameter)
        with torch._C.DisableTorchFunctionSubclass(), torch.no_grad():
            for unit, members in self._entered.items():
                self._assign(members)
                self._collect(unit, members)
        return [
            {self._unsharded[p]: self._state.get(p, {}) for p in group if self._is_mine(p)}
            for group in groups
        ]

    def leave(self, state: dict[Tensor, State]) -> dict[UnitParameter, State]:
        """Send the stepped rows back; states stay with the owners."""
        with torch._C.DisableTorchFunctionSubclass(), torch.no_grad():
            for unit, members in self._entered.items():
                self._return_rows(unit, members)
            for parameter in itertools.chain.from_iterable(self._entered.values()):
                if self._is_mine(parameter):
                    stepped = self._unsharded[parameter]
                    marks = vars(stepped)
                    vars(parameter.sharded).update({k: marks[k] for k in parameter.attributes})
                    self._state[parameter] = state.get(stepped, {})
                    _free(stepped)
        return self._state

    def stand_in(self, parameter: UnitParameter) -> nn.Parameter:
        """Return what the step sees of a parameter; no elements where it is not stepped here."""
        if parameter not in self._unsharded:
            empty = parameter.stepped.new_empty(0)
            trains = empty.is_floating_point() or empty.is_complex()
            self._unsharded[parameter] = nn.Parameter(empty, requires_grad=trains)
        stand_in = self._unsharded[parameter]
        vars(stand_in).update(parameter.attributes)
        return stand_in

    def recover(self) -> None:
        """Free unsharded parameters; sharded ones keep their gradients."""
        for unsharded in self._unsharded.values():
            _free(unsharded)

    def _is_mine(self, parameter: UnitParameter) -> bool:
        owner = self._owner[parameter]
        return owner in (-1, parameter.unit.context.rank)

    def _assign(self, members: Sequence[UnitParameter]) -> None:
        """Give each parameter to the rank that owns least; -1: every rank steps its copy."""
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
        weights = self._to_owners(unit, members, {p: p.stepped for p in members})
        grads = self._to_owners(unit, members, {p: _local_grad(p) for p in members})
        for parameter in filter(self._is_mine, members):
            weight, grad = weights[parameter], grads[parameter]
            unsharded = self.stand_in(parameter)
            unsharded.data = weight
            unsharded.grad = grad

    def _to_owners(
        self, unit: Unit, members: list[UnitParameter], rows: dict[UnitParameter, Tensor]
    ) -> dict[UnitParameter, Tensor]:
        """Return the unsharded tensors of this rank's parameters, from every rank's rows."""
        unowned = {p: rows[p] for p in members if self._owner[p] < 0}
        by_owner = self._by_owner(unit, members)
        mine = by_owner[unit.context.rank]
        sent = [[rows[p] for p in owned] for owned in by_owner]
        numels = [[p.slot.piece_numel(rank) for p in mine] for rank in range(len(by_owner))]
        from_ranks = _exchange_by_rank(unit, sent, numels)
        for i, p in enumerate(mine):
            cut = p.slot.cut
            pieces = [rows[i].view(cut.piece_shape(rank)) for rank, rows in enumerate(from_ranks)]
            unowned[p] = torch.cat(pieces, cut.dim)
        return unowned

    def _return_rows(self, unit: Unit, members: list[UnitParameter]) -> None:
        rank, by_owner = unit.context.rank, self._by_owner(unit, members)
        mine = [(p.slot, self._unsharded[p].detach()) for p in by_owner[rank]]
        sent = [[slot.cut.own_view(t, to) for slot, t in mine] for to in range(len(by_owner))]
        numels = [[p.slot.piece_numel(rank) for p in owned] for owned in by_owner]
        for owned, pieces in zip(by_owner, _exchange_by_rank(unit, sent, numels), strict=True):
            for parameter, rows in zip(owned, pieces, strict=True):
                parameter.stepped.copy_(rows.view(parameter.local.shape))

    def _by_owner(self, unit: Unit, members: list[UnitParameter]) -> list[list[UnitParameter]]:
        """Return the parameters that one rank alone steps, by that rank."""
        ranks = range(unit.context.world_size)
        return [[p for p in members if self._owner[p] == rank] for rank in ranks]


def _exchange_order(parameter: UnitParameter) -> tuple[int, str, int]:
    """The order in which ranks exchange rows, whatever the order of their groups."""
    return parameter.spec.index, parameter.spec.name, parameter.index


def _exchange_by_rank(
    unit: Unit, sent: list[list[Tensor]], numels: list[list[int]]
) -> list[list[Tensor]]:
    """Send tensors to each rank; return the flat tensors that came, of `numels` by rank."""
    if not any(sent) and not any(numels):
        return [[] for _ in sent]
    context, empty = unit.context, unit.stepped.new_empty(0)
    flat = torch.cat([empty, *[tensor.reshape(-1) for tensors in sent for tensor in tensors]])
    numels_sent = [sum(tensor.numel() for tensor in tensors) for tensors in sent]
    numels_received = [sum(counts) for counts in numels]
    received = flat.new_empty(sum(numels_received))
    group, label = context.transport.group, unit.spec.label("exchange of whole matrices")
    group.agree(("matrices", unit.spec.name), label, flat)
    group.wait(group.all_to_all(received, flat, numels_received, numels_sent), label)
    context.ledger.sent("whole_matrix", (len(flat) - numels_sent[context.rank]) * flat.itemsize)
    parts = received.split(numels_received)
    return [list(part.split(counts)) for part, counts in zip(parts, numels, strict=True)]


def _free(unsharded: nn.Parameter) -> None:
    unsharded.grad = None
    unsharded.data = unsharded.data.new_empty(0)


def _local_grad(parameter: UnitParameter) -> Tensor:
    grad = parameter.sharded.grad
    assert grad is not None, "a parameter without gradient is stepped"
    return parameter.unwrap(grad).to(unit_of(parameter).stepped.dtype)
