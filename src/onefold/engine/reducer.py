"""When units are reduced in a backward, and how many reductions may be under way at once."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping

import torch

from onefold.ticket import Ticket
from onefold.unit.gradient import UnitGradient
from onefold.unit.unit import Unit

MAX_IN_FLIGHT = 1
"""Reductions that may be under way while backward computes: one hides behind the next unit's
compute, and each further one holds another unit's gradients and receive buffer."""


class Reducer:
    """Starts each unit's reduction once per backward and finishes them in order."""

    def __init__(
        self,
        gradients: Mapping[Unit, UnitGradient],
        on_reduced: Callable[[UnitGradient], None],
    ) -> None:
        self._on_reduced = on_reduced
        # the last unit of the module is the first that backward is through with; tiled ones
        # are reduced tile by tile, where they are used
        self._order = [g for unit, g in gradients.items() if not unit.is_tiled][::-1]
        self._parameters = [p for unit in gradients for p in unit.parameters]
        self._in_flight: deque[tuple[UnitGradient, Ticket]] = deque()
        self._landed: UnitGradient | None = None  # the last; a second hop may follow
        self._finishes_alone = all(each.reduction.finishes_alone for each in gradients.values())
        self._setting = next((unit.setting for unit in gradients), None)
        self._ready: set[UnitGradient] = set()
        self._started: set[UnitGradient] = set()

    def note_ready(self, gradient: UnitGradient) -> None:
        """Backward is through with a unit: reduce it once all before it in the order are.

        The order is the same on every rank, whatever parts of the module a rank used, so ranks
        never reduce different units at the same time.
        """
        self._ready.add(gradient)
        for due in self._order:
            if due in self._started or not due.trainable():
                continue
            if due not in self._ready:
                return
            self._start(due)

    def _start(self, gradient: UnitGradient) -> None:
        while len(self._in_flight) >= MAX_IN_FLIGHT:
            self._land()
        gradient.end_following()  # a second reduction adds to what the first has shown
        self._started.add(gradient)
        self._in_flight.append((gradient, gradient.start_reduce()))

    def _land(self) -> None:
        """Finish the oldest reduction's first hop, and the second hop of the one before it.

        Every rank does so at the same reductions, as second hops are collectives too.
        """
        self._end_following()
        landed, ticket = self._in_flight.popleft()
        ticket.wait()
        self._landed = landed
        if self._finishes_alone:
            self._end_following()

    def _end_following(self) -> None:
        landed, self._landed = self._landed, None
        if landed is not None:
            landed.end_following()
            if not landed.is_discarding:
                self._on_reduced(landed)

    def poll(self) -> None:
        """Finish a reduction that is complete: its gradients and receive buffer go early.

        Only where finishing is local: a second hop is a collective, which has its place in the
        order.
        """
        if self._in_flight and self._finishes_alone and self._in_flight[0][1].done:
            self._land()

    def finish(self) -> None:
        """Reduce what backward left incomplete or did not reach, then wait for everything.

        A rank that did not use a unit still takes part with zeros: another may have used it. Units
        that turn out to be used by none go to the end of the order, where they delay nobody.
        """
        for gradient in self._order:
            is_due = gradient not in self._started or gradient.fired
            if is_due and gradient.trainable():
                self._start(gradient)
        self._drain()
        self._order.sort(key=lambda gradient: gradient.is_unused)
        self._ready.clear()
        self._started.clear()

    def complete(self) -> None:
        """Reduce what an accumulation left that ended without its last micro-batch."""
        for gradient in self._order:
            gradient.check_whole()
            gradient.is_last = True
        if any(gradient.partial or gradient.reduction.waits for gradient in self._order):
            self.finish()

    def is_sound(self) -> bool:
        """False if a gradient is not finite on some rank: then on all. A collective.

        A rank sees its own rows only, so ranks have to ask each other. A GPU's host waits for the
        answer. Asked of the gradients as they are, so that what happened to them since they were
        reduced (cleared, zeroed in place, unscaled, stepped by another optimizer) is no matter.
        """
        if self._setting is None:
            return True
        is_bad = torch.zeros(1, device=self._setting.store.device)
        for parameter in self._parameters:
            rows = parameter.own_grad()
            if rows is not None:
                for bound in torch.aminmax(rows):  # both are NaN if an element is
                    is_bad += bound.isfinite().logical_not()
        self._setting.routes.group.all_reduce_max(is_bad)
        is_sound = not is_bad.item()
        for gradient in self._order if not is_sound else []:
            gradient.reduction.feedback.forget(gradient.unit.parameters)
        return is_sound

    def abort(self) -> None:
        """Drop gradients that were not shown yet; wait for what is under way on all ranks."""
        self._ready.clear()
        self._started.clear()
        for gradient in self._order:
            gradient.is_discarding = True
        self._drain()
        for gradient in self._order:
            gradient.is_discarding = False
            gradient.lose()

    def _drain(self) -> None:
        while self._in_flight:
            self._land()
        self._end_following()
        if self._setting is not None:
            self._setting.routes.rest()
