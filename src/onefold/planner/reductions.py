"""Gradients while a step is played back: partial, summed for the node, reduced, and what receives.

The rules are those of engine/reducer.py and unit/reduction.py: units are reduced in one order,
one at a time; where nodes have a hop of their own, a unit's begins when its first hop has landed,
and is over before the next unit's first hop lands.
"""

from __future__ import annotations

from collections import Counter

from onefold.planner.byte_counter import ByteCounter, KeptBuffers
from onefold.planner.setup import Setup, UnitBytes


class Reductions:
    """Which gradients are where. `steps_early`: units that are stepped as they are reduced."""

    def __init__(
        self, setup: Setup, units: list[UnitBytes], held: ByteCounter, sent: Counter[str],
        steps_early: list[bool],
    ) -> None:  # fmt: skip
        self._setup = setup
        self._units = units
        self._held = held
        self._sent = sent
        self._steps_early = steps_early
        self.is_last = True  # of the micro-batches
        self._first, self._second, self._third = (
            KeptBuffers(held, setup.device_type) for _ in range(3)
        )
        self._partial: dict[int, dict[int, int]] = {}
        self._fired: dict[int, set[int]] = {}
        self._sums: set[int] = set()
        self._reduced: set[int] = set()
        self._in_flight: int | None = None
        self._is_hidden = False  # behind the recompute of a unit
        self._finishes_alone = not (setup.has_hops or setup.are_replicas or setup.stage == 0)
        self._following: int | None = None
        self._ready: set[int] = set()
        self._started: set[int] = set()
        self._order = [i for i in reversed(range(len(units))) if any(units[i].partials)]
        self._awaited = [sum(map(bool, unit.partials)) for unit in units]

    def keep(self, unit: int) -> None:
        """The unit's reduced gradient is there from the step before."""
        self._reduced.add(unit)
        self._held.add("grad", self._units[unit].grad)

    def begin(self) -> None:
        """A micro-batch begins."""
        self._fired = {}

    def note_recompute(self) -> None:
        """A unit runs its forward again, on the CPU: what is under way is over then, on a link that
        is not slower than half of a backward. The host of a GPU is ahead of both.
        """
        self._is_hidden = self._finishes_alone and self._setup.device_type == "cpu"

    def on_grad(self, unit: int, member: int) -> None:
        """A gradient of the unit is there."""
        if self._is_hidden:
            self._land()
        held = self._partial.setdefault(unit, {})
        if member not in held:
            held[member] = self._units[unit].partials[member]
            self._held.add("partial_grad", held[member])
        fired = self._fired.setdefault(unit, set())
        fired.add(member)
        if len(fired) == self._awaited[unit]:
            self.note_ready(unit)

    @property
    def _defers(self) -> bool:
        return not self.is_last and self._setup.stage < 3

    def note_ready(self, unit: int) -> None:
        """Backward is through with a unit: reduce it once all before it in the order are."""
        if self._defers:
            return
        self._ready.add(unit)
        for due in self._order:
            if due in self._started:
                continue
            if due not in self._ready:
                return
            self._start(due)

    def end_backward(self) -> None:
        """Reduce what is left, and wait for everything."""
        if not self._defers:
            for due in self._order:
                if due not in self._started:
                    self._start(due)
            self._land()
            self._end_following()
        for kept in (self._first, self._second, self._third):
            kept.clear()
        self._ready.clear()
        self._started.clear()

    def _start(self, unit: int) -> None:
        self._land()  # on a fast link it is over earlier
        self._started.add(unit)
        messages = self._units[unit].messages
        if self._setup.has_hops and unit not in self._sums:
            self._sums.add(unit)
            self._held.add("partial_grad", self._units[unit].sums)
        elif not self._setup.has_hops and self._setup.world_size > 1:
            self._make_grad(unit)
        self._first.take(messages.reduce.buffers)
        self._in_flight = unit
        self._sent["reduce_scatter" + self._setup.where] += messages.reduce.sent

    def _make_grad(self, unit: int) -> None:
        if unit not in self._reduced:
            self.keep(unit)

    def _land(self) -> None:
        self._end_following()
        unit, self._in_flight, self._is_hidden = self._in_flight, None, False
        if unit is None:
            return
        setup = self._setup
        self._held.add("partial_grad", -sum(self._partial.pop(unit, {}).values()))
        self._first.give(self._units[unit].messages.reduce.buffers)
        if setup.world_size == 1:
            self._make_grad(unit)
        rests = setup.keeps_sums and not self.is_last
        if rests:
            return
        if setup.has_hops:
            self._make_grad(unit)
        self._following = unit
        settle = self._units[unit].messages.settle
        self._second.take(settle.buffers)
        self._sent["gather" if setup.stage == 0 else "reduce_scatter between"] += settle.sent
        self._held.see()
        if self._finishes_alone:
            self._end_following()

    def _end_following(self) -> None:
        unit, self._following = self._following, None
        if unit is None:
            return
        messages = self._units[unit].messages
        self._second.give(messages.settle.buffers)
        self._sent["gather between"] += messages.share.sent
        if messages.share.buffers:
            self._third.take(messages.share.buffers)
            self._held.see()
            self._third.give(messages.share.buffers)
        if unit in self._sums:
            self._sums.remove(unit)
            self._held.add("partial_grad", -self._units[unit].sums)
        if self._steps_early[unit]:
            self._held.add("grad", -self._units[unit].grad)
            self._reduced.discard(unit)
