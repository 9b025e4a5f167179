"""When units are reduced in a backward, and how many reductions may be under way at once."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping

from onefold.state.gradient import UnitGradient
from onefold.state.unit import Unit
from onefold.ticket import Ticket

MAX_IN_FLIGHT = 1
"""Reductions that may be under way while backward computes: one hides behind the next unit's
compute, and each further one holds another unit's gradients and receive buffer."""


class Reducer:
    """Starts each unit's reduction once per backward and finishes them in order."""

    def __init__(self, gradients: Mapping[Unit, UnitGradient]) -> None:
        self._gradients = gradients
        self._in_flight: deque[Ticket] = deque()
        self._reduced: set[UnitGradient] = set()

    def start(self, gradient: UnitGradient) -> None:
        """Reduce a unit whose gradients are complete, while backward goes on."""
        while len(self._in_flight) >= MAX_IN_FLIGHT:
            self._in_flight.popleft().wait()
        self._reduced.add(gradient)
        self._in_flight.append(gradient.start_reduce())

    def start_if_due(self, gradient: UnitGradient) -> None:
        """Reduce a unit that backward has left, unless its gradients were complete before."""
        if gradient not in self._reduced and gradient.trainable():
            self.start(gradient)

    def finish(self) -> None:
        """Reduce what backward left incomplete or did not reach, then wait for everything.

        A rank that did not use a unit still takes part with zeros: another may have used it. The
        last units of the module come first, so that ranks agree on the order.
        """
        for gradient in reversed(list(self._gradients.values())):
            is_due = gradient not in self._reduced or gradient.fired
            if is_due and gradient.trainable():
                self.start(gradient)
        self._reduced.clear()
        while self._in_flight:
            self._in_flight.popleft().wait()

    def abort(self) -> None:
        """Drop gradients that were not shown yet; wait for what is under way on all ranks."""
        self._reduced.clear()
        for gradient in self._gradients.values():
            gradient.is_discarding = True
        while self._in_flight:
            self._in_flight.popleft().wait()
        for gradient in self._gradients.values():
            gradient.is_discarding = False
            gradient.drop_partial()
