"""The things that a schedule keeps between events, each about one question. No torch here.

Call, OpenCalls which calls of modules backward will reach, and is not through with
ModuleUses      how many modules of each unit run, and which have run
Successors      the order in which the last walk used units, so the next gather starts early
EarlySteps      which offloaded units backward steps, and how many at a time
EventLog        the events of a micro-batch, for a prediction
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Sequence, Set
from enum import StrEnum
from itertools import pairwise
from typing import NamedTuple
from weakref import WeakSet

from onefold.engine.driving import Action, Drive, Verb
from onefold.layout.observer import Span


class EventKind(StrEnum):
    """An event that torch announces to an engine."""

    BEGIN = "begin"  # one more forward of the root, before a backward
    ENTER = "enter"  # a module that uses a unit starts, in forward
    AGAIN = "again"  # the same in a recompute, which belongs to backward
    LEAVE = "leave"  # the module's forward is over
    USE = "use"  # an operation outside the unit's modules needs unsharded weights
    HOLD = "hold"  # a graph or an output refers to unsharded weights
    END_FORWARD = "end_forward"
    EXPECT = "expect"  # the module's outputs are watched
    BACKWARD = "backward"  # autograd reaches them
    GRAD = "grad"  # autograd has accumulated the gradient of one parameter
    END = "end"  # of backward


class Noted(NamedTuple):
    """An event of a unit; see `onefold.planner.work.Event`. `call` of `GRAD`: the parameter."""

    kind: EventKind
    unit: int = -1
    call: int = -1
    module: Hashable = -1
    num_modules: int = 1


class EventLog:
    """The events of the first micro-batch that trains, until its backward is over.

    A prediction plays them again: tied weights and shared modules keep a unit unsharded for longer
    than the order of modules says.
    """

    def __init__(self) -> None:
        self.events: list[Noted] = []
        self.is_complete = self.is_open = self._is_backward = False

    def begin(self, *, is_plain: bool, goes_on: bool) -> None:
        """A forward of the root starts; `is_plain`: it trains, and a plain loop drives.

        `goes_on`: backward will reach calls of the forward before, too.
        """
        self.is_open, self._is_backward = is_plain and not self.is_complete, False
        if goes_on:
            self.note(EventKind.BEGIN)
        elif self.is_open:
            self.events.clear()

    def end_forward(self) -> None:
        """The root's forward is over."""
        self.note(EventKind.END_FORWARD)

    def note(
        self, kind: EventKind, unit: int = -1, call: int = -1, module: Hashable = -1,
        num_modules: int = 1,
    ) -> None:  # fmt: skip
        """Note an event of the micro-batch."""
        if self.is_open:
            self._is_backward |= kind is EventKind.BACKWARD
            is_again = kind is EventKind.ENTER and self._is_backward
            kind = EventKind.AGAIN if is_again else kind
            self.events.append(Noted(kind, unit, call, module, num_modules))

    def note_gradient(self, unit: int, member: int) -> None:
        """Autograd has accumulated the gradient of one parameter."""
        self.note(EventKind.GRAD, unit, member)

    def end(self) -> None:
        """A backward is over."""
        if self.is_open and self._is_backward:
            self.note(EventKind.END)
            self.is_complete, self.is_open = True, False


class Call:
    """One forward of a module that uses a unit, from its start until backward is through with it.

    `walk` tells the forwards of the root apart. `edits`: of the weights, when it started. `span`:
    its compute, where somebody observes.
    """

    __slots__ = ("__weakref__", "edits", "finished", "span", "started", "unit", "walk")

    def __init__(self, unit: int, started: int, walk: int = 0) -> None:
        self.unit = unit
        self.started = self.finished = started
        self.walk = walk
        self.edits = 0
        self.span: Span | None = None

    def note_edits(self, edits: int) -> None:
        """Note how often the weights have been edited: backward must meet the same ones."""
        self.edits = edits

    def observe(self, span: Span | None) -> None:
        """End the compute that is observed; another span of it begins, or none."""
        before, self.span = self.span, span
        if before is not None:
            before.end()

    def end_forward(self, clock: int) -> None:
        """The forward is over."""
        self.finished = clock


class HeldUnits(set[int]):
    """Units whose unsharded weights a graph or an output refers to, until a backward ends.

    No call announces such weights to a backward. So `recall` names those that were freed since: a
    backward came between, of the same graph or of another one. It names them until the second
    step, too, so that the node that made the reference says that the weights have changed.
    """

    def __init__(self) -> None:
        super().__init__()
        self._since_step: set[int] = set()
        self._before_step: set[int] = set()

    def hold(self, unit: int) -> None:
        """A graph or an output refers to the unit's weights."""
        self.add(unit)
        self._since_step.add(unit)

    def recall(self) -> list[int]:
        """Hold again all units to which graphs may refer; return those that were not held."""
        recalled = sorted((self._since_step | self._before_step) - self)
        self.update(recalled)
        return recalled

    def step(self) -> None:
        """Weights have changed: graphs from before cannot run backward."""
        self._before_step, self._since_step = self._since_step, set()


class OpenCalls:
    """The calls that backward will reach, by unit.

    A backward may reach the calls of several forwards of the root, as of siamese networks. Where a
    pipeline drives, each backward is that of one forward, and others wait for theirs.
    """

    def __init__(self, num_units: int) -> None:
        self._calls: list[WeakSet[Call]] = [WeakSet() for _ in range(num_units)]
        self._begun: list[Call] = []  # backward has reached them, and is not through with them
        self.held = HeldUnits()  # that no call announces
        self.event_log = EventLog()
        self.walk = 0  # the forward of the root that runs, or whose backward runs

    def grow(self, num_units: int) -> None:
        """More units came."""
        self._calls += [WeakSet() for _ in range(num_units)]

    def open(self, unit: int, clock: int, *, is_module: bool = True) -> Call:
        """A module starts, or an operation outside the unit's modules is over."""
        self.event_log.note(EventKind.ENTER if is_module else EventKind.USE, unit, clock)
        return Call(unit, clock, self.walk)

    def leave(self, call: Call, clock: int, module: Hashable, num_modules: int) -> None:
        """The forward of a call is over."""
        call.end_forward(clock)
        self.event_log.note(EventKind.LEAVE, call.unit, call.started, module, num_modules)

    def hold(self, unit: int) -> None:
        """A graph or an output refers to the unit's unsharded weights."""
        self.event_log.note(EventKind.HOLD, unit)

    def add(self, call: Call) -> None:
        """Backward will reach a call."""
        self.event_log.note(EventKind.EXPECT, call.unit, call.started)
        self._calls[call.unit].add(call)

    def begin_walk(self, clock: int, phase: Phase, driven: Drive) -> None:
        """A forward of the root starts."""
        self.walk, is_plain = clock, phase is Phase.FORWARD and driven.is_plain
        self.event_log.begin(is_plain=is_plain, goes_on=any(self._calls))

    def reach(self, call: Call) -> list[Call]:
        """Backward reaches a call; return the calls that it is through with, for `close`."""
        self.walk = call.walk
        return [other for other in self._begun if other.started > call.finished]

    def begin(self, call: Call) -> None:
        """Backward begins with a call."""
        self.event_log.note(EventKind.BACKWARD, call.unit, call.started)
        self._begun.append(call)

    def begun_units(self) -> set[int]:
        """Units of calls that backward has reached, and is not through with."""
        return {call.unit for call in self._begun}

    def has_begun(self, call: Call) -> bool:
        """True if backward has reached the call, and is not through with it."""
        return call in self._begun

    def close(self, call: Call) -> None:
        """Backward is through with a call."""
        self._begun.remove(call)
        self._calls[call.unit].discard(call)

    def calls_of(self, unit: int) -> Iterable[Call]:
        """The calls of the unit that backward will reach, or has begun with."""
        return self._calls[unit]

    def has(self, unit: int, driven: Drive) -> bool:
        """True if this backward will reach the unit."""
        if driven.more_to_come or not driven.walks_apart:
            return driven.more_to_come or bool(self._calls[unit])
        return any(call.walk == self.walk for call in self._calls[unit])

    def end(self, driven: Drive) -> list[Call]:
        """A backward is over: it reaches no further call. Return those that it was not through."""
        for calls in self._calls:
            kept = [call for call in calls if driven.walks_apart and call.walk != self.walk]
            calls.clear()
            calls.update(kept)
        ended, self._begun = self._begun, []
        return ended


class ModuleUses:
    """For each unit: how many of its modules run, and which have run."""

    def __init__(self, num_units: int) -> None:
        self._running = [0] * num_units
        self._over: list[set[Hashable]] = [set() for _ in range(num_units)]

    def grow(self, num_units: int) -> None:
        """More units came."""
        self._running += [0] * num_units
        self._over += [set() for _ in range(num_units)]

    def begin(self) -> None:
        """A forward of the root starts, or is over: no module runs."""
        self._running = [0] * len(self._running)
        for over in self._over:
            over.clear()

    def enter(self, unit: int) -> None:
        """A module that uses the unit starts."""
        self._running[unit] += 1

    def leave(self, unit: int) -> bool:
        """A module is over; return True if no other one that uses the unit runs."""
        self._running[unit] -= 1
        return self._running[unit] <= 0

    def note(self, unit: int, module: Hashable, num_modules: int) -> bool:
        """Note that a module has run (None: it failed); return True if all have."""
        over = self._over[unit]
        if module is not None:
            over.add(module)
        are_over = len(over) >= num_modules
        if are_over:
            over.clear()
        return are_over

    def is_running(self, unit: int) -> bool:
        """True if a module that uses the unit runs."""
        return bool(self._running[unit])

    def is_between(self, unit: int) -> bool:
        """True if either none of the unit's modules has run or all have, and none runs."""
        return self._running[unit] == 0 and not self._over[unit]


class Phase(StrEnum):
    """A walk over the units; each phase has an order of its own."""

    FORWARD = "forward"
    EVALUATION = "evaluation"
    BACKWARD = "backward"  # recompute belongs to it: it uses units in backward's order


class Successors:
    """The successor of each unit in each phase, learned from the last walk."""

    def __init__(self, units: Sequence[int], *, is_cyclic: bool = False) -> None:
        """`is_cyclic`: a walk follows the one before without a pause, as tokens do."""
        self._is_cyclic = is_cyclic
        forward = dict(pairwise([*units, *units[:1]] if is_cyclic else units))
        self._after: dict[Phase, dict[int, int]] = {
            Phase.FORWARD: dict(forward),
            Phase.EVALUATION: dict(forward),
            Phase.BACKWARD: {after: before for before, after in forward.items()},
        }
        self._last: dict[Phase, int | None] = dict.fromkeys(Phase)

    def begin(self, phase: Phase) -> None:
        """A new walk starts; its first unit has no predecessor."""
        if not self._is_cyclic:
            self._last[phase] = None

    def enter(
        self, unit: int, phase: Phase, number: int, without: Set[int] = frozenset()
    ) -> list[int]:
        """Note that `unit` is used now; return up to `number` units that the last walk used next.

        None if it was used just before. `without`: units to pass over, as they are there already.
        """
        last = self._last[phase]
        if last == unit:
            return []
        if last is not None:
            self._after[phase][last] = unit
            if phase is Phase.FORWARD:
                self._after[Phase.BACKWARD].setdefault(unit, last)
        self._last[phase] = unit
        successors: list[int] = []
        seen, after = {unit}, self._after[phase].get(unit)
        while after is not None and after not in seen and len(successors) < number:
            seen.add(after)
            if after not in without:
                successors.append(after)
            after = self._after[phase].get(after)
        return successors


MAX_PENDING = 2
"""Units whose background steps may be under way during backward: each holds its gradient until its
step is over. Where the tier is slower than backward, all units would otherwise pile up."""


class EarlySteps:
    """Steps reduced units once backward is through with them."""

    def __init__(self) -> None:
        self._due: list[int] = []  # reduced; stepped once backward is through with them
        self._stepped: list[int] = []  # since the optimizer's last step

    def __bool__(self) -> bool:
        return bool(self._stepped)

    def step(
        self, units: Iterable[int], is_through: Callable[[int], bool], out: list[Action]
    ) -> None:
        """Note reduced `units`, and step all with which backward is through."""
        self._due += units
        for unit in [due for due in self._due if is_through(due)]:
            self._due.remove(unit)
            if len(self._stepped) >= MAX_PENDING:
                out.append((Verb.WAIT_STEP, self._stepped[-MAX_PENDING]))
            self._stepped.append(unit)
            out.append((Verb.STEP, unit))

    def take_stepped(self) -> set[int]:
        """The optimizer's step begins: return the units that were stepped already."""
        stepped, self._stepped = set(self._stepped), []
        return stepped

    def skip(self, unit: int) -> None:
        """A step was not necessary: no rank has a gradient for the unit."""
        if unit in self._stepped:
            self._stepped.remove(unit)

    def forget(self) -> None:
        """Backward has failed."""
        self._due.clear()
        self._stepped.clear()
