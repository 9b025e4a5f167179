"""Executes a schedule's actions on the units of one module: tensors, messages, background steps."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Protocol
from weakref import WeakSet

import torch

from onefold.engine.actions import Action, Verb
from onefold.engine.schedule import Schedule
from onefold.ticket import Ticket
from onefold.unit.context import Context
from onefold.unit.gradient import UnitGradient
from onefold.unit.unit import Unit


class Stepper(Protocol):
    """An optimizer's binding, as the engine knows it."""

    def step_early(self, unit: Unit) -> None:
        """Begin to step the parameters that the optimizer holds of a unit."""
        ...

    def recover(self) -> None:
        """Undo a step that raised, if one did."""
        ...


class Hands:
    """Does to each unit what a schedule says."""

    def __init__(
        self, schedule: Schedule, units: Sequence[Unit], gradients: Sequence[UnitGradient],
        context: Context,
    ) -> None:  # fmt: skip
        self.schedule = schedule
        self.units = units
        self.gradients = gradients
        self.context = context
        self.steppers: WeakSet[Stepper] = WeakSet()
        self._tickets: dict[int, Ticket] = {}  # of reductions, by unit

    def do(self, actions: Iterable[Action]) -> None:
        """Execute actions in order; where one raises, the others are left out."""
        index = -1
        try:
            for verb, index in actions:
                _HANDS[verb](self, index)
        except BaseException:
            self.schedule.lost(index)
            raise

    def has_landed(self, index: int) -> bool:
        """True if the first hop of the unit's reduction is over."""
        ticket = self._tickets.get(index)
        return ticket is not None and ticket.done

    def drain(self) -> None:
        """Wait for reductions whose wait was interrupted: other ranks take part in them."""
        for index in list(self._tickets):
            self._land(index)

    # one verb each

    def _fetch(self, index: int) -> None:
        self.units[index].start_fetch()

    def _fill(self, index: int) -> None:
        self.units[index].gather.begin_early(is_summoned=self.schedule.is_suspended)

    def _gather(self, index: int) -> None:
        self.units[index].start_unshard()

    def _show(self, index: int) -> None:
        self.units[index].unshard()

    def _hide(self, index: int) -> None:
        self.units[index].reshard(release=False)

    def _free(self, index: int) -> None:
        self.units[index].reshard(release=True)

    def _invalidate(self, index: int) -> None:
        self.units[index].reshard(release=True, keeps_bytes=True)

    def _reduce(self, index: int) -> None:
        self._tickets[index] = self.gradients[index].start_reduce()

    def _land(self, index: int) -> None:
        ticket = self._tickets.get(index)
        if ticket is not None:
            ticket.wait()
            del self._tickets[index]

    def _keep_sums(self, index: int) -> None:
        self.gradients[index].keep_sums()

    def _follow(self, index: int) -> None:
        self.gradients[index].follow()

    def _finish(self, index: int) -> None:
        self.gradients[index].end_following()

    def _wait_step(self, index: int) -> None:
        self.units[index].join_step()

    def _step(self, index: int) -> None:
        unit, gradient, steppers = self.units[index], self.gradients[index], list(self.steppers)
        if not steppers or gradient.is_unused:
            self.schedule.skipped(index)
            return
        unit.join_step()
        unit.refresh_master()
        for stepper in steppers:
            stepper.step_early(unit)
        gradient.consume()

    def _rest(self, index: int) -> None:
        self.context.routes.rest()

    # over all units

    def are_gradients_finite(self) -> bool:
        """False if a gradient is not finite on some rank: then on all. A collective.

        A rank sees its own rows only, so ranks have to ask each other. A GPU's host waits for the
        answer. Gradients are asked as they are now: cleared, zeroed, unscaled since the reduction
        or stepped by another optimizer makes no difference.
        """
        if not self.units:
            return True
        is_bad = torch.zeros(1, device=self.context.store.device)
        for unit in self.units:
            for parameter in unit.parameters:
                rows = parameter.own_grad()
                if rows is not None:
                    for bound in torch.aminmax(rows):  # both are NaN if an element is
                        is_bad += bound.isfinite().logical_not()
        self.context.routes.group.all_reduce_max(is_bad)
        is_finite = not is_bad.item()
        for gradient in self.gradients if not is_finite else []:
            gradient.reduction.feedback.forget(gradient.unit.parameters)
        return is_finite


_HANDS: Mapping[Verb, Callable[[Hands, int], None]] = {
    Verb.FETCH: Hands._fetch, Verb.FILL: Hands._fill, Verb.GATHER: Hands._gather,
    Verb.SHOW: Hands._show, Verb.HIDE: Hands._hide, Verb.FREE: Hands._free,
    Verb.INVALIDATE: Hands._invalidate, Verb.REDUCE: Hands._reduce, Verb.LAND: Hands._land,
    Verb.KEEP_SUMS: Hands._keep_sums, Verb.FOLLOW: Hands._follow, Verb.FINISH: Hands._finish,
    Verb.WAIT_STEP: Hands._wait_step, Verb.STEP: Hands._step, Verb.REST: Hands._rest,
}  # fmt: skip
