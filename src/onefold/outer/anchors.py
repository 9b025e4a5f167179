"""Anchors: the weights that all islands agree on, and the outer optimizer that moves them.

Each rank keeps its own rows in the host tier, in fp32 at least: 4 bytes an element, the outer
momentum as much again, and with a codec the residual of error feedback.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from onefold.errors import ConfigError, StateError
from onefold.layout.ledger import Account, Kind, Ledger
from onefold.outer.periods import EXP_AVG, EXP_AVG_SQ, WEIGHTS
from onefold.outer.share import Share, ValuesOf
from onefold.tier.device import DeviceStore
from onefold.unit.buffer import Buffer
from onefold.unit.parameter import UnitParameter

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
        made = Buffer(share.numel, share.dtype, kind, store, self._ledger)
        made.tensor.zero_()
        return made

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
            raise StateError(
                f"finite weights in unit {unit.name!r}",
                "NaN or Inf",
                where=unit.context.where,
                hint="the other islands go on without this one; resume from its checkpoint",
            )
        residual = self.residual(index)
        return values if residual is None else values.add_(residual)

    def step(self, means: dict[int, Tensor]) -> None:
        """Step the outer optimizer on the mean steps of some units."""
        for index, mean in means.items():
            self.parameters[index].grad = mean
        self.outer.step()
        for index in means:
            self.parameters[index].grad = None
        tensors = [v for state in self.outer.state.values() for v in state.values()]
        self._bytes.set(sum(value.nbytes for value in tensors if isinstance(value, Tensor)))

    @torch.no_grad()
    def write(self, kind: str, index: int, rows: Tensor, keep: float = 0.0) -> None:
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

    # transfer and checkpoints

    def describe_state(self) -> dict[str, Any]:
        """The outer optimizer's numbers, and the names of its states like the anchor."""
        groups = [
            {k: v for k, v in group.items() if isinstance(v, int | float | bool | None)}
            for group in self.outer.param_groups
        ]
        numbers, rows = list[dict[str, float]](), list[list[str]]()
        for anchor in self.parameters:
            state = dict.get(self.outer.state, anchor, {})
            is_rows = {
                k: isinstance(v, Tensor) and v.shape == anchor.shape for k, v in state.items()
            }
            rows.append(sorted(name for name, found in is_rows.items() if found))
            numbers.append(
                {k: float(v) for k, v in state.items() if not is_rows[k] and v is not None}
            )
        return {"groups": groups, "numbers": numbers, "rows": rows}

    def state_rows(self, index: int, names: Sequence[str]) -> list[Tensor]:
        """The anchor of a unit, and states of the outer optimizer like it."""
        anchor = self.parameters[index]
        state = dict.get(self.outer.state, anchor, {})
        blank = torch.zeros_like(anchor)
        return [anchor.detach(), *(state.get(name, blank) for name in names)]

    @torch.no_grad()
    def adopt(self, described: dict[str, Any], rows: list[list[Tensor]]) -> None:
        """Take over another island's anchor and outer state, and its anchor as weights."""
        for group, given in zip(self.outer.param_groups, described["groups"], strict=True):
            group.update(given)
        self.outer.state.clear()
        for index, (anchor, *states) in enumerate(rows):
            parameter = self.parameters[index]
            parameter.copy_(anchor)
            found = dict(zip(described["rows"][index], states, strict=True))
            found |= {k: torch.tensor(v) for k, v in described["numbers"][index].items()}
            if found:
                self.outer.state[parameter] = found
            residual = self.residual(index)
            if residual is not None:
                residual.zero_()
            self.write(WEIGHTS, index, anchor)

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
        given = [*state["anchors"], *state["residuals"]]
        shapes, wanted = [list(t.shape) for t in given], [list(t.shape) for t in own]
        if shapes != wanted:
            raise StateError(
                f"anchors of shapes {wanted}",
                f"shapes {shapes}",
                where=self.shares[0].unit.context.where,
                hint="resume with as many ranks, the same model and codec; or leave the state "
                "out: an island that joins takes over that of the others",
            )
        for tensor, value in zip(own, given, strict=True):
            tensor.copy_(value)
        self.outer.load_state_dict(state["outer"])


def weight_of(parameter: UnitParameter) -> Tensor:
    """The weights that are stepped: the master where there is one."""
    return parameter.stepped


def _outer_of(outer: OuterChoice, parameters: list[nn.Parameter]) -> Optimizer:
    if outer is None:
        return torch.optim.SGD(parameters, lr=0.7, momentum=0.9, nesterov=True)
    made = outer(parameters) if callable(outer) else outer
    held = {id(p) for g in made.param_groups for p in g["params"]} if _is_optimizer(made) else None
    if held != {id(parameter) for parameter in parameters}:
        raise ConfigError(
            "outer to be a function that returns a torch.optim.Optimizer of its argument",
            f"a {type(made).__name__}",
            hint="outer=lambda parameters: torch.optim.SGD(parameters, lr=0.7, momentum=0.9)",
        )
    return made


def _is_optimizer(value: object) -> bool:
    return isinstance(value, Optimizer)
