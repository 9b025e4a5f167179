"""Anchors: the weights that all islands agree on, and the outer optimizer that moves them.

Each rank keeps its own rows in the host tier, in fp32 at least: 4 bytes an element, the outer
momentum as much again, and with a codec the residual of error feedback.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from onefold.errors import ConfigError, StateError
from onefold.layout.ledger import Account, Kind, Ledger
from onefold.layout.rows import PIECE_NUMEL, round_up
from onefold.outer.parcels import ShareRows
from onefold.outer.periods import EXP_AVG, EXP_AVG_SQ, WEIGHTS
from onefold.tier.device import DeviceStore
from onefold.unit.buffer import Buffer
from onefold.unit.parameter import UnitParameter
from onefold.unit.unit import Unit, unit_of
from onefold.wire.ticket import Ticket

OuterChoice = Callable[[list[nn.Parameter]], Optimizer] | None


class Anchors:
    """This rank's rows of the anchor, unit by unit, the outer optimizer's state, residuals."""

    def __init__(
        self, shares: list[Share], optimizers: Sequence[Optimizer], outer: OuterChoice, *,
        feeds_back: bool,
    ) -> None:  # fmt: skip
        self.shares, self._optimizers = shares, optimizers
        self._ledger: Ledger = shares[0].unit.context.ledger
        self._buffers = [self._buffer(share, Kind.ANCHOR) for share in shares]
        self.parameters = [nn.Parameter(buffer.tensor) for buffer in self._buffers]
        self.outer = _outer_of(outer, self.parameters)
        self._residuals = [self._buffer(s, Kind.FEEDBACK) for s in shares] if feeds_back else []
        self._bytes = Account(self, Kind.OPTIMIZER, "cpu", self._ledger)

    def _buffer(self, share: Share, kind: Kind) -> Buffer:
        store = DeviceStore(torch.device("cpu"), "cpu")
        buffer = Buffer(share.numel, share.dtype, kind, store, self._ledger)
        buffer.tensor.zero_()
        return buffer

    def follow_weights(self) -> None:
        """Start from the weights as they are."""
        with torch.no_grad():
            for share, anchor in zip(self.shares, self.parameters, strict=True):
                anchor.copy_(share.collect(weight_of))

    def residual(self, index: int) -> Tensor | None:
        """What the codec has rounded off of one unit: [own rows]; None without a codec."""
        return self._residuals[index].tensor if self._residuals else None

    def values_of(self, kind: str) -> ValuesOf:
        """How to find a parameter's values of a kind: its weight, or a state of its optimizer."""
        if kind == WEIGHTS:
            return weight_of

        def state_of(parameter: UnitParameter) -> Tensor | None:
            for optimizer in self._optimizers:
                value = optimizer.state.get(parameter.sharded, {}).get(kind)
                if isinstance(value, Tensor):
                    return parameter.unwrap(value)
            return None

        return state_of

    def _has_second(self, parameter: UnitParameter) -> Tensor | None:
        """Where a parameter's second moment is not 0; everywhere if its optimizer has none."""
        second = self.values_of(EXP_AVG_SQ)(parameter)
        if second is not None:
            return second != 0
        first = self.values_of(EXP_AVG)(parameter)
        return None if first is None else torch.ones_like(first)

    def to_send(self, kind: str, index: int) -> Tensor:
        """The values of a unit that other islands need: [own rows].

        Of weights the steps since the last exchange, anchor less weight, and the residual.
        """
        values = self.shares[index].collect(self.values_of(kind))
        if kind != WEIGHTS:
            return values
        torch.sub(self.parameters[index].detach(), values, out=values)
        if not torch.isfinite(values).all():
            unit = self.shares[index].unit
            wanted = f"finite weights in unit {unit.name!r}"
            hint = "lower the learning rate, or resume from a checkpoint"
            raise StateError(wanted, "NaN or Inf", where=unit.context.where, hint=hint)
        residual = self.residual(index)
        return values if residual is None else values.add_(residual)

    def check_trained(self, units: Iterable[Unit]) -> None:
        """Raise `StateError` if a parameter trains that has no anchor: islands would drift apart.

        One that has an anchor may freeze and thaw.
        """
        known = {parameter for share in self.shares for parameter in share.parameters}
        for parameter in (parameter for unit in units for parameter in unit.parameters):
            if parameter not in known and _is_exchanged(parameter):
                wanted = "islands to exchange all parameters that train"
                late = "was frozen or absent when onefold.islands was called"
                got = f"{parameter.fqn!r}, which {late}"
                hint = "call onefold.islands while it trains, and freeze it afterwards"
                where = parameter.unit.context.where
                raise StateError(wanted, got, where=where, hint=hint)

    def frozen(self, indices: Iterable[int]) -> list[tuple[int, slice, str]]:
        """Return the rows of parameters that were frozen since: unit, rows of its anchor, name."""
        return [
            (index, self.shares[index].slice_of(number), parameter.fqn)
            for index in indices
            for number, parameter in enumerate(self.shares[index].parameters)
            if not _trains(parameter)
        ]

    def step(self, means: dict[int, Tensor]) -> None:
        """Step the outer optimizer on the mean steps of some units.

        Frozen parameters take over the mean: momentum and weight decay would move them for good.
        """
        frozen = [
            (index, rows, self.parameters[index].detach()[rows] - means[index][rows])
            for index, rows, _ in self.frozen(means)
        ]
        for index, mean in means.items():
            self.parameters[index].grad = mean
        self.outer.step()
        for index, rows, values in frozen:
            self.parameters[index].detach()[rows] = values
        for index in means:
            self.parameters[index].grad = None
        tensors = [v for state in self.outer.state.values() for v in state.values()]
        self._bytes.set(sum(value.nbytes for value in tensors if isinstance(value, Tensor)))

    @torch.no_grad()
    def write_averages(self, kind: str, index: int, rows: Tensor, keep: float = 0.0) -> None:
        """Write averaged rows to a unit's weights or states, which keep a share of their own.

        A first moment stays 0 where the second one is: Adam divides by its root. Elements are like
        this that other islands alone have had gradients for, such as those of rare tokens.
        """
        share = self.shares[index]
        if kind == EXP_AVG:
            rows = rows * share.collect(self._has_second)
        share.spread(rows, self.values_of(kind), keep)
        if kind == WEIGHTS:
            share.unit.publish(is_rounded=False)
            share.unit.gather.forget_base()
        share.unit.forget()

    # checkpoints

    def state_dict(self) -> dict[str, Any]:
        """Anchors, residuals and the outer optimizer's state of this rank."""
        return {
            "anchors": [parameter.detach() for parameter in self.parameters],
            "residuals": [buffer.tensor for buffer in self._residuals],
            "outer": self.outer.state_dict(),
        }

    @torch.no_grad()
    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over a `state_dict()` of the same rank. Nothing changes if it does not fit."""
        own = [*self.parameters, *(buffer.tensor for buffer in self._residuals)]
        saved = [*state["anchors"], *state["residuals"]]
        shapes, wanted = [list(t.shape) for t in saved], [list(t.shape) for t in own]
        if shapes != wanted:
            hint = "resume with as many ranks, the same model and codec"
            got, where = f"shapes {shapes}", self.shares[0].unit.context.where
            raise StateError(f"anchors of shapes {wanted}", got, where=where, hint=hint)
        for tensor, value in zip(own, saved, strict=True):
            tensor.copy_(value)
        self.outer.load_state_dict(state["outer"])


def weight_of(parameter: UnitParameter) -> Tensor:
    """The weights that are stepped: the master where there is one."""
    return parameter.stepped


def _outer_of(outer: OuterChoice, parameters: list[nn.Parameter]) -> Optimizer:
    if outer is None:
        return torch.optim.SGD(parameters, lr=0.7, momentum=0.9, nesterov=True)
    optimizer = outer(parameters) if callable(outer) else outer
    groups = optimizer.param_groups if isinstance(optimizer, Optimizer) else []
    if {id(p) for group in groups for p in group["params"]} != set(map(id, parameters)):
        wanted = "outer to be a function that returns a torch.optim.Optimizer of its argument"
        hint = "outer=lambda parameters: torch.optim.SGD(parameters, lr=0.7, momentum=0.9)"
        raise ConfigError(wanted, f"a {type(optimizer).__name__}", hint=hint)
    return optimizer


ValuesOf = Callable[[UnitParameter], Tensor | None]
"""A parameter's values as this rank holds them: own rows, or all rows at stage 0."""


class Share:
    """This rank's rows of one unit's trainable parameters, as one flat tensor on the CPU."""

    def __init__(self, unit: Unit) -> None:
        context = unit.context
        self.unit, self._rank, self._world_size = unit, context.rank, context.world_size
        self.parameters = [p for p in unit.parameters if _is_exchanged(p)]
        self.dtype = torch.promote_types(unit.stepped.dtype, torch.float32)
        self._is_gathered = not context.is_sharded and context.world_size > 1
        self.rows, self._numels = list[ShareRows](), [0] * context.world_size
        for parameter in self.parameters:
            cut = unit.spec.wire.slots[parameter.index].cut
            assert cut is not None, "a parameter has a shape"
            self.rows.append(ShareRows(cut, self._numels[context.rank]))
            for rank in range(context.world_size):
                self._numels[rank] += round_up(cut.piece_numel(rank), PIECE_NUMEL)

    @property
    def numel(self) -> int:
        """Elements of the flat tensor, gaps included."""
        return self._numels[self._rank]

    def slice_of(self, number: int) -> slice:
        """Return where this rank's rows of one parameter are in the flat tensor."""
        rows = self.rows[number]
        return slice(rows.offset, rows.offset + rows.cut.piece_numel(self._rank))

    def collect(self, values_of: ValuesOf) -> Tensor:
        """Copy this rank's rows of each parameter: [numel] of `dtype`, zeros where it has none."""
        flat = torch.zeros(self.numel, dtype=self.dtype)
        for parameter, rows in zip(self.parameters, self.rows, strict=True):
            values = values_of(parameter)
            if values is not None:
                own = rows.cut.own_view(values, self._rank) if self._is_gathered else values
                flat[rows.offset : rows.offset + own.numel()].copy_(own.reshape(-1))
        return flat

    def spread(self, flat: Tensor, values_of: ValuesOf, keep: float = 0.0) -> None:
        """Write rows back to each parameter, at stage 0 on all ranks of the island (a collective).

        `keep` is the share of the old values that stays.
        """
        flats = self._gathered(flat) if self._is_gathered else {self._rank: flat}
        for rank, of_rank in flats.items():
            at = 0
            for parameter, rows in zip(self.parameters, self.rows, strict=True):
                start, numel = at, rows.cut.piece_numel(rank)
                at += round_up(numel, PIECE_NUMEL)
                values = values_of(parameter)
                if values is None:
                    continue
                place = rows.cut.own_view(values, rank) if self._is_gathered else values
                new = of_rank[start : start + numel].to(place.device).view(place.shape)
                if keep:
                    new = place.to(new).mul_(keep).add_(new, alpha=1 - keep)
                place.copy_(new)

    def _gathered(self, flat: Tensor) -> dict[int, Tensor]:
        """The rows of all ranks of the island."""
        group, device = self.unit.context.transport.group, self.unit.stepped.device
        flats = {
            rank: flat.to(device) if rank == self._rank else flat.new_empty(numel, device=device)
            for rank, numel in enumerate(self._numels)
            if numel
        }
        works = [group.broadcast(rows, rank) for rank, rows in flats.items()]
        nbytes = (self._world_size - 1) * flat.nbytes
        self.unit.context.ledger.sent("islands inside", nbytes)
        Ticket(works, label=f"gather of averaged rows of {self.unit.name!r}").wait()
        return flats


def _is_exchanged(parameter: UnitParameter) -> bool:
    dtype = unit_of(parameter).stepped.dtype
    is_number = dtype.is_floating_point or dtype.is_complex
    is_here = bool(parameter.places) and not parameter.spec.is_packed
    return is_here and is_number and _trains(parameter)


def _trains(parameter: UnitParameter) -> bool:
    with torch._C.DisableTorchFunctionSubclass():
        return parameter.sharded.requires_grad
