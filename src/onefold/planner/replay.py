"""Announce the events of a micro-batch to the engine's schedule, as torch would. No torch here.

The schedule (engine/schedule.py) answers each event with actions. In training engine/executor.py
executes them; here `planner/byte_executor.py` counts bytes and `planner/clock_executor.py` time.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from onefold.engine.driving import Action, Drive, StageDrives
from onefold.engine.schedule import Schedule
from onefold.engine.walks import Call, Phase
from onefold.planner.work import Event, EventKind

if TYPE_CHECKING:
    from onefold.planner.action_executor import ActionExecutor


class Replay:
    """Micro-batches of one rank.

    trained: how many parameters of each unit have a gradient.
    window: units that a pipeline keeps through the step, as axes/pipelines/driver.py does; None: no
        pipeline drives.
    """

    def __init__(
        self, events: Sequence[Event], schedule: Schedule, trained: Sequence[int],
        window: frozenset[int] | None = None,
    ) -> None:  # fmt: skip
        self._events = events
        self._schedule = schedule
        self._trained = trained
        self._stage = None
        if window is not None:
            reduces = schedule.policy.keeps_bytes and not schedule.policy.defers_reduction
            self._stage = StageDrives.for_windows(
                Drive(), len(trained), window, reduces_all=reduces
            )
        self._calls: dict[int, Call] = {}

    def learn(self, num_microbatches: int) -> None:
        """Play a step without executing it: the schedule then knows the order of use."""
        for micro in range(num_microbatches):
            self.micro_batch(None, is_last=micro + 1 == num_microbatches)
        self._schedule.early_steps.take_stepped()
        self._schedule.rest()
        self._schedule.stepped()

    def micro_batch(self, executor: ActionExecutor | None, *, is_last: bool) -> None:
        """Announce every event of a micro-batch, and have `executor` execute the answers."""
        schedule, stage = self._schedule, self._stage
        self._calls.clear()
        schedule.drive(Drive(accumulates=not is_last) if stage is None else stage.step)
        begun = schedule.begin_forward(Phase.FORWARD)
        for event in self._events:
            if event.kind in _OF_BACKWARD and not schedule.is_backward:
                if stage is not None:
                    schedule.drive(stage.backward)
                begun += schedule.begin_backward(self._trained)
            if executor is not None:
                executor.reach(event)
                flying = schedule.reductions.may_land if event.kind is EventKind.GRAD else None
                if flying is not None and executor.has_landed(flying):
                    executor.do(schedule.landed())
            actions, begun = begun + self._answer(event), []
            if executor is not None:
                executor.follow(event, actions)
        if is_last and stage is not None:
            for actions in self._end_stage(stage):
                if executor is not None:
                    executor.do(actions)

    def _end_stage(self, stage: StageDrives) -> Iterator[list[Action]]:
        """The stage's last backward is over: free what stayed, reduce what rests."""
        yield self._schedule.drive(stage.end)
        yield self._schedule.start(self._trained)
        yield self._schedule.drive(stage.before)
        yield self._schedule.finish_reductions()

    def _use(self, event: Event) -> list[Action]:
        """An operation outside the unit's modules uses it, or a graph refers to it."""
        schedule = self._schedule
        if event.kind is EventKind.HOLD:
            schedule.hold(event.unit)
            return []
        shown = schedule.show(event.unit, is_recorded=True)
        self._calls[event.call], over = schedule.use(event.unit, is_recorded=True)
        return shown + over

    def _answer(self, event: Event) -> list[Action]:
        schedule, calls = self._schedule, self._calls
        match event.kind:
            case EventKind.ENTER | EventKind.AGAIN:
                phase = Phase.FORWARD if event.kind is EventKind.ENTER else Phase.BACKWARD
                calls[event.call], actions = schedule.enter(event.unit, phase)
                return actions
            case EventKind.LEAVE:
                is_again = schedule.is_backward
                call, modules = calls[event.call], event.num_modules
                return schedule.leave(call, event.module, modules, is_recompute=is_again)
            case EventKind.EXPECT:
                schedule.expect_backward(calls[event.call])
                return []
            case EventKind.BEGIN:
                return schedule.begin_forward(Phase.FORWARD)
            case EventKind.USE | EventKind.HOLD:
                return self._use(event)
            case EventKind.END_FORWARD:
                return schedule.end_forward(Phase.FORWARD)
            case EventKind.BACKWARD:
                call = calls.get(event.call)  # None: a use before the forward, as by a penalty
                return [] if call is None else schedule.enter_backward(call)
            case EventKind.GRAD:
                return schedule.gradients(event.unit, [event.call])
            case EventKind.END:
                return schedule.end_backward()


_OF_BACKWARD = (EventKind.AGAIN, EventKind.BACKWARD, EventKind.GRAD)


def plain_events(
    kept: Sequence[int], trained: Sequence[Sequence[int]], joined: Sequence[bool] = ()
) -> list[Event]:
    """Return the events of units that are used once, in order.

    Args:
        kept: bytes that each unit keeps from forward to backward.
        trained: the parameters of each unit that have a gradient, as positions in the unit.
        joined: which units the modules of the unit before use, too; none by default.
    """
    events: list[Event] = []
    calls: list[list[int]] = []
    for unit in range(len(kept)):
        if joined and joined[unit]:
            calls[-1].append(unit)
        else:
            calls.append([unit])
    now = 0
    for units in calls:
        events += [Event(EventKind.ENTER, unit, unit, now, now) for unit in units]
        now += sum(kept[unit] for unit in units)
        events += [Event(EventKind.LEAVE, unit, unit, now, now) for unit in units]
        events += [Event(EventKind.EXPECT, unit, unit, now, now) for unit in units]
    events.append(Event(EventKind.END_FORWARD, now=now, peak=now))
    before = now
    for units in reversed(calls):
        events += [Event(EventKind.BACKWARD, unit, unit, now, before) for unit in units]
        events += [
            Event(EventKind.GRAD, unit, member, now, now)
            for unit in units
            for member in trained[unit]
        ]
        before, now = now, now - sum(kept[unit] for unit in units)
    events.append(Event(EventKind.END, peak=before))
    return events
