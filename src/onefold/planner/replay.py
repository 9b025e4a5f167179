"""Plays the events of a trace through a schedule, as torch would announce them to an engine."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from onefold.engine.actions import Action
from onefold.engine.schedule import Call, Schedule
from onefold.engine.successors import Phase
from onefold.planner.trace import Event, Heard, Trace


class Replay:
    """One rank's micro-batches. `trained`: parameters of each unit that will have a gradient."""

    def __init__(self, trace: Trace, schedule: Schedule, trained: Sequence[int]) -> None:
        self._trace = trace
        self._schedule = schedule
        self._trained = trained
        self._calls: dict[int, Call] = {}

    def learn(self, num_microbatches: int) -> None:
        """Play a step that nobody executes: the schedule then knows the order of use."""
        for micro in range(num_microbatches):
            for _ in self.micro_batch(is_last=micro + 1 == num_microbatches):
                pass
        self._schedule.take_stepped()
        self._schedule.rest()
        self._schedule.stepped()

    def micro_batch(self, *, is_last: bool) -> Iterator[tuple[Event, list[Action]]]:
        """Each event of the trace with the actions that follow it."""
        schedule = self._schedule
        self._calls.clear()
        begun = schedule.begin_forward(Phase.FORWARD)
        for event in self._trace.events:
            if event.heard in _OF_BACKWARD and not schedule.is_backward:
                schedule.begin_backward(self._trained, is_last=is_last)
            yield event, begun + self._answer(event)
            begun = []

    def _answer(self, event: Event) -> list[Action]:
        schedule, calls = self._schedule, self._calls
        match event.heard:
            case Heard.ENTER | Heard.AGAIN:
                phase = Phase.FORWARD if event.heard is Heard.ENTER else Phase.BACKWARD
                calls[event.call], actions = schedule.enter(event.unit, phase)
                return actions
            case Heard.LEAVE:
                is_again = schedule.is_backward
                call, modules = calls[event.call], event.num_modules
                return schedule.leave(call, event.module, modules, is_recompute=is_again)
            case Heard.EXPECT:
                schedule.expect_backward(calls[event.call])
                return []
            case Heard.END_FORWARD:
                return schedule.end_forward(Phase.FORWARD)
            case Heard.BACKWARD:
                return schedule.enter_backward(calls[event.call])
            case Heard.GRAD:
                return schedule.gradient(event.unit, event.call)
            case Heard.END:
                return schedule.end_backward()


_OF_BACKWARD = (Heard.AGAIN, Heard.BACKWARD, Heard.GRAD)
