"""Rates of training for a dashboard: the share of the time that waits, and tokens per second."""

from __future__ import annotations

import time
from collections import deque
from functools import partial
from typing import NamedTuple

import torch
from torch import nn

from onefold.engine.engine import Engine
from onefold.engine.watch import tensors_in
from onefold.layout.ledger import Ledger
from onefold.layout.observer import UNTIMED, NoteSpan, Observer, Span, Stream, members_of
from onefold.recording.allocator import allocator_probe

_WAITS = ("wait", "wait_step")
"""Spans of the training thread in which it waits for a message, or for a background step."""

STEPS = 10
"""Rates are those of the last steps, at most so many."""


class Mark(NamedTuple):
    """The end of a step: its number, the time, and sums since the meter began."""

    step: int
    at: float
    waited_s: float
    tokens: int


class Meter(Observer):
    """Observes the steps of one sharded module. Reading it changes nothing."""

    def __init__(self) -> None:
        self._marks: deque[Mark] = deque(maxlen=STEPS + 1)
        self._waited_s, self._tokens = 0.0, 0
        self._ledger = Ledger()  # of no module yet

    @staticmethod
    def on_engine(engine: Engine) -> Meter:
        """Return the meter of a module; the first call starts it."""
        meter, root = engine.facts.about(Meter), engine.module()
        if meter not in members_of(engine.ledger.observer) and root is not None:
            meter._ledger = engine.ledger
            engine.ledger.watch(meter)
            root.register_forward_pre_hook(meter.count, with_kwargs=True)
            meter._mark()
        return meter

    def rates(self) -> tuple[float, float] | None:
        """Return the share of the time of the last steps that waited, and tokens a second.

        None before a step has ended since the meter began, or since another run was loaded.
        """
        first, last = self._marks[0], self._marks[-1]
        if last.step == first.step or last.step != self._ledger.steps:
            return None
        seconds = max(last.at - first.at, 1e-9)
        waited, tokens = last.waited_s - first.waited_s, last.tokens - first.tokens
        return min(1.0, waited / seconds), tokens / seconds

    def _mark(self) -> None:
        """A step ends, or goes on after another optimizer's: note what there is up to now."""
        step = self._ledger.steps
        if self._marks and step == self._marks[-1].step:
            self._marks.pop()
        elif self._marks and step != self._marks[-1].step + 1:
            self._marks.clear()  # a load is no step
        self._marks.append(Mark(step, time.perf_counter(), self._waited_s, self._tokens))

    @torch._disable_dynamo  # see [Note: torch.compile] in engine/hooks.py
    def count(self, _: nn.Module, args: object, kwargs: object) -> None:
        """Count the tokens of a forward that trains: the elements of its first integer tensor."""
        if torch.is_grad_enabled():
            whole = (t for t in tensors_in((args, kwargs)) if not t.is_floating_point())
            first = next(whole, None)
            self._tokens += 0 if first is None else first.numel()

    # the observer

    def begin(self, stream: Stream, verb: str, unit: str) -> Span:
        if stream is Stream.COMPUTE and verb in _WAITS:
            return NoteSpan(partial(self._note_wait, time.perf_counter()))
        return NoteSpan(self._mark) if (stream, verb) == (Stream.PHASE, "step") else UNTIMED

    def _note_wait(self, begun: float) -> None:
        self._waited_s += time.perf_counter() - begun


class PeakMeter(Observer):
    """Observes the highest bytes of torch's allocator in each step, read where phases begin."""

    def __init__(self, device: torch.device) -> None:
        self.peaks: list[int] = []  # of the steps that have ended
        self._read, self._highest = allocator_probe(device), 0

    def end_step(self) -> None:
        """Keep the peak of a step."""
        if self._read is not None:
            self.peaks.append(self._highest)
        self._highest = 0

    # the observer

    def begin(self, stream: Stream, verb: str, unit: str) -> Span:
        """See `Observer.begin`: the end of forward, the end of backward, and so on."""
        if stream is Stream.PHASE and self._read is not None:
            self._highest = max(self._highest, self._read())
        return UNTIMED
