"""Rates of training for a dashboard: the share of the time that waits, tokens and model FLOPs."""

from __future__ import annotations

import time
from collections import deque
from functools import partial
from threading import get_ident
from typing import NamedTuple

import torch
from torch import nn

from onefold.compat import untraced
from onefold.engine.engine import Engine
from onefold.engine.watch import tensors_in
from onefold.layout.ledger import Ledger
from onefold.layout.observer import UNTIMED, NoteSpan, Observer, Span, Stream, members_of
from onefold.recording.allocator import allocator_probe
from onefold.recording.flops import FlopCounter
from onefold.recording.module_bytes import has_compiled

_WAITS = ("wait", "wait_step")
"""Spans of the training thread in which it waits for a message, or for a background step."""

STEPS = 10
"""Rates are those of the last steps, at most so many."""


MAX_SHAPES = 8
"""Shapes of batches whose FLOPs are counted: others, and the first batch of a run, take as many an
element as these together."""


class Mark(NamedTuple):
    """The end of a step: its number, the time, and sums since the meter began.

    batches: forwards by the shape of their batch. others: elements of batches of other shapes.
    """

    step: int
    at: float
    waited_s: float
    tokens: int
    batches: dict[torch.Size, int]
    others: int


class Rates(NamedTuple):
    """Rates of the last steps on this rank. FLOP/s are 0.0 where they are not known."""

    waiting_share: float
    tokens_per_s: float
    flops_per_s: float
    dtype: torch.dtype  # of most of the FLOPs


class Meter(Observer):
    """Observes the steps of one sharded module. Reading it changes nothing."""

    def __init__(self) -> None:
        self._marks: deque[Mark] = deque(maxlen=STEPS + 1)
        self._waited_s, self._tokens, self._others = 0.0, 0, 0
        self._batches: dict[torch.Size, int] = {}
        self._ledger = Ledger()  # of no module yet
        self._counts: dict[torch.Size, FlopCounter] = {}  # by the shape of a batch
        self._counting: tuple[torch.Size, FlopCounter] | None = None
        self._depth = self._thread = 0  # of the forward that is counted

    @staticmethod
    def on_engine(engine: Engine) -> Meter:
        """Return the meter of a module; the first call starts it."""
        meter, root = engine.facts.about(Meter), engine.module()
        if meter not in members_of(engine.ledger.observer) and root is not None:
            meter._ledger = engine.ledger
            engine.ledger.watch(meter)
            root.register_forward_pre_hook(meter.count, with_kwargs=True)
            root.register_forward_hook(meter.end_count, always_call=True)
            meter._mark()
        return meter

    def rates(self) -> Rates | None:
        """Return the rates of the last steps.

        None before a step has ended since the meter began, or since another run was loaded.
        """
        first, last = self._marks[0], self._marks[-1]
        if last.step == first.step or last.step != self._ledger.steps:
            return None
        seconds = max(last.at - first.at, 1e-9)
        waited, tokens = last.waited_s - first.waited_s, last.tokens - first.tokens
        flops, dtype = self._flops_between(first, last)
        return Rates(min(1.0, waited / seconds), tokens / seconds, flops / seconds, dtype)

    def _flops_between(self, first: Mark, last: Mark) -> tuple[float, torch.dtype]:
        counters, by_dtype = self._counts.values(), dict[torch.dtype, float]()
        if not all(counter.flops for counter in counters) or not counters:
            return 0.0, torch.float32
        for counter in counters:
            for dtype, flops in counter.by_dtype.items():
                by_dtype[dtype] = by_dtype.get(dtype, 0.0) + flops
        elements = max(1, sum(shape.numel() for shape in self._counts))
        each = sum(by_dtype.values()) / elements
        flops = (last.others - first.others) * each
        for shape, forwards in last.batches.items():
            counter = self._counts.get(shape)
            of_batch = shape.numel() * each if counter is None else counter.flops
            flops += (forwards - first.batches.get(shape, 0)) * of_batch
        return flops, max(by_dtype, key=by_dtype.__getitem__)

    def _mark(self) -> None:
        """A step ends, or goes on after another optimizer's: note what there is up to now."""
        step = self._ledger.steps
        if self._marks and step == self._marks[-1].step:
            self._marks.pop()
        elif self._marks and step != self._marks[-1].step + 1:
            self._marks.clear()  # a load is no step
        now = time.perf_counter()
        sums = self._waited_s, self._tokens, dict(self._batches), self._others
        self._marks.append(Mark(step, now, *sums))

    @untraced  # see [Note: torch.compile] in engine/hooks.py
    def count(self, _: nn.Module, args: object, kwargs: object) -> None:
        """Count the tokens of a forward that trains: the elements of its first integer tensor.

        A forward with a batch of a new shape also counts its FLOPs, once torch had the chance to
        compile: see [Note: model FLOPs].
        """
        if self._is_counting():
            self._depth += 1
        if not torch.is_grad_enabled():
            return
        first = next((t for t in tensors_in((args, kwargs)) if not t.is_floating_point()), None)
        self._tokens += 0 if first is None else first.numel()
        batch = first if first is not None else next(tensors_in((args, kwargs)), None)
        if batch is None:
            return
        ran = bool(self._batches) or self._ledger.steps > self._ledger.loaded_steps
        is_open = self._add_batch(batch.shape) and batch.shape not in self._counts
        if is_open and ran and self._counting is None and not has_compiled():
            self._counting, self._depth, self._thread = (batch.shape, FlopCounter()), 1, get_ident()
            self._counting[1].__enter__()

    def _add_batch(self, shape: torch.Size) -> bool:
        """Return whether batches of `shape` are told from others, once one more is noted."""
        is_told = shape in self._batches or len(self._batches) < MAX_SHAPES
        if is_told:
            self._batches[shape] = self._batches.get(shape, 0) + 1
        else:
            self._others += shape.numel()
        return is_told

    @untraced
    def end_count(self, _: nn.Module, __: object, output: object) -> None:
        """End the count of a forward; one that failed, without output, is counted anew."""
        if not self._is_counting():
            return
        self._depth -= 1
        if self._counting is not None and self._depth == 0:
            (shape, counter), self._counting = self._counting, None
            counter.__exit__(None, None, None)
            self._counts |= {} if output is None else {shape: counter}

    def _is_counting(self) -> bool:
        """True inside a forward that is counted, on its thread: modes belong to a thread."""
        return self._counting is not None and get_ident() == self._thread

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
