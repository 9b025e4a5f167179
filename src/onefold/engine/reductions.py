"""Decide when units are reduced in a backward, and how many at a time. No torch here.

Every rank reduces units in the same order, also if it used other parts of the module: the last unit
of the module first. So ranks never reduce different units at the same time.
"""

from collections import deque
from collections.abc import Collection, Sequence, Set

from onefold.engine.driving import Action, Verb
from onefold.engine.policy import Policy, UnitFacts


class Reductions:
    """Starts the reduction of each unit once in a backward, and finishes reductions in order."""

    def __init__(self, policy: Policy, units: Sequence[UnitFacts]) -> None:
        self._policy, self._units = policy, units
        # tiled units are reduced tile by tile, where they are used
        self._order = [index for index, unit in enumerate(units) if not unit.is_tiled][::-1]
        self._trained: Sequence[int] = ()
        self._fired: list[set[int]] = [set() for _ in units]
        self._ready: set[int] = set()
        self._started: set[int] = set()
        self._in_flight: deque[int] = deque()
        # whose reduction may finish early, where that needs no other rank: each gradient asks
        self.may_land: int | None = None
        self._following: int | None = None  # landed last, whose second hop may be under way
        self._averaged: list[int] = []  # units with averaged gradients
        self.is_last = True  # of the micro-batches

    def add(self, policy: Policy, units: Sequence[UnitFacts]) -> None:
        """More units came, at the end of `units`; they are reduced first."""
        self._policy, self._units = policy, units
        new = range(len(self._fired), len(units))
        self._order = [*reversed(new), *self._order]
        self._fired += [set() for _ in new]

    @property
    def defers(self) -> bool:
        """True for a micro-batch that is not the last, where gradients rest on their rank."""
        return self._policy.defers_reduction and not self.is_last

    def has_fired(self, unit: int) -> bool:
        """True if gradients of the unit wait to be reduced in this backward."""
        return bool(self._fired[unit])

    def has_arrived(self, unit: int, member: int) -> bool:
        """True if this backward has brought the gradient of a parameter of the unit."""
        return member in self._fired[unit] or unit in self._started

    def begin(self, trained: Sequence[int], without: Set[int], *, is_last: bool) -> None:
        """A backward begins. `trained`: parameters of each unit that will have a gradient.

        Gradients of the units in `without` rest.
        """
        self._trained = [0 if unit in without else number for unit, number in enumerate(trained)]
        self.is_last = is_last

    def num_missing(self, unit: int) -> int:
        """The gradients of the unit that this backward still has to bring."""
        return self._trained[unit] - len(self._fired[unit])

    def note_gradients(
        self, unit: int, members: Sequence[int], out: list[Action], *, waits: bool
    ) -> bool:
        """Note gradients of parameters; the last one of a unit makes the unit ready: then True.

        `waits`: more gradients may follow, until backward has left the unit's last call.
        """
        if not self._trained[unit]:  # its gradients rest
            return False
        fired = self._fired[unit]
        before = len(fired)
        fired.update(members)
        is_new = len(fired) > before  # a reentrant recompute brings one for each of its calls
        if len(fired) < self._trained[unit] or self.defers or waits:
            return False
        self.note_ready(unit, out)
        return is_new

    def note_ready(self, unit: int, out: list[Action]) -> None:
        """Backward is through with a unit: reduce it after all units before it in the order."""
        self._ready.add(unit)
        for due in self._order:
            if due in self._started or not self._trained[due]:
                continue
            if due not in self._ready:
                return
            self._start_reduction(due, out)

    def _start_reduction(self, unit: int, out: list[Action], *, at_once: bool = False) -> None:
        # one hides behind the next unit's compute; a further one holds gradients and a buffer more
        while self._in_flight and not at_once:
            self.land(out)
        if self._following == unit:  # a second reduction adds to the gradients that the first shows
            self._finish(out)
        self._started.add(unit)
        self._fired[unit].clear()
        self._in_flight.append(unit)
        self._find_next()
        out.append((Verb.REDUCE, unit))

    def land(self, out: list[Action]) -> None:
        """Finish the first hop of the oldest reduction, and the second hop of the one before it.

        All ranks do so in the same order, as second hops are collectives too.
        """
        self._finish(out)
        if not self._in_flight:
            return
        unit = self._in_flight.popleft()
        self._find_next()
        out.append((Verb.LAND, unit))
        if self._policy.sums_rest and not self.is_last and self._units[unit].keeps_sums:
            out.append((Verb.KEEP_SUMS, unit))
            return
        out.append((Verb.FOLLOW, unit))
        self._following = unit
        if not self._policy.has_second_hop:
            self._finish(out)

    def _find_next(self) -> None:
        alone = self._in_flight and not self._policy.has_second_hop
        self.may_land = self._in_flight[0] if alone else None

    def _finish(self, out: list[Action]) -> None:
        unit, self._following = self._following, None
        if unit is not None:
            out.append((Verb.FINISH, unit))
            if self._policy.steps_in_backward:
                self._averaged.append(unit)

    def take_averaged(self) -> list[int]:
        """Return the units whose gradients were averaged since the last call."""
        averaged, self._averaged = self._averaged, []
        return averaged

    def reduce_rest(self, out: list[Action]) -> None:
        """Reduce every unit that backward left incomplete or did not reach; finish everything.

        A rank that did not use a unit still takes part with zeros: another may have used it.
        """
        self.start_all(out)
        self.drain(out)

    def start_all(self, out: list[Action], *, at_once: bool = False) -> None:
        """Reduce every unit that `reduce_rest` would; `at_once`: without a wait for any of them."""
        for unit in list(self._order):
            is_due = unit not in self._started or self._fired[unit]
            if is_due and self._trained[unit]:
                self._start_reduction(unit, out, at_once=at_once)

    def drain(self, out: list[Action]) -> None:
        """Finish every reduction that is under way."""
        while self._in_flight:
            self.land(out)
        self._finish(out)
        self._ready.clear()
        self._started.clear()

    def defer(self) -> None:
        """The backward of a micro-batch that is not the last is over: its gradients rest."""
        self.forget()
        self._ready.clear()
        self._started.clear()

    def forget(self) -> None:
        """Drop gradients that were not reduced."""
        self._averaged.clear()
        for fired in self._fired:
            fired.clear()

    def note_unused(self, units: Collection[int]) -> None:
        """No rank used these units: put them last in the order, so that they delay no other."""
        self._order.sort(key=lambda unit: unit in units)
