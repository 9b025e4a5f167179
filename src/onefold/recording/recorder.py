"""`onefold.record`: watches one training step of one rank.

    with onefold.record(model) as recording:
        loss = model(x, y)
        loss.backward()
        optimizer.step()
    recording.save("report")              # rank 0; a page, its data, and a trace

Everything the engine says is one entry in a list, and the clock stands still while torch's
allocator is asked, so a recorded step looks like any other. On the CPU all times are the host's: a
collective is there from the moment it was asked for, on the wire or waiting for it. On a GPU
compute and collectives are timed on their streams, by events, while bytes change when the host
says so.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from threading import get_ident

import torch
from torch import nn

from onefold.engine.engine import Engine
from onefold.engine.registry import engine_of
from onefold.errors import StateError, expected
from onefold.ledger import Ledger, Traffic
from onefold.observer import Stream
from onefold.recording.heap import held_now
from onefold.recording.report import unit_lines
from onefold.recording.run_report import RunReport
from onefold.recording.step_record import TORCH, Change, Sent, Series, SpanLine, StepRecord

Moment = float | torch.cuda.Event
"""Seconds on the recorder's clock, or an event on a stream of the device."""

_ON_DEVICE = (Stream.PHASE, Stream.COMPUTE, Stream.GATHER, Stream.REDUCE)
EVERY_S = 0.001
"""Between units' marks the allocator is asked where the ledger changes, but not more often."""

_AT_MARKS = (Stream.PHASE, Stream.COMPUTE)  # the allocator is asked where these begin and end


class Recording:
    """What `onefold.record` gives: `step` is there once its block is over."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._step: StepRecord | None = None

    @property
    def step(self) -> StepRecord:
        """The recorded step. Raises `StateError` inside the block."""
        if self._step is None:
            raise StateError(
                expected(
                    "a recorded step",
                    "a block that is not over, or was left by an exception",
                    where=f"rank {self._engine.group.rank}",
                    hint="read it after `with onefold.record(module) as recording:`",
                )
            )
        return self._step

    def save(self, directory: str | Path) -> None:
        """Write this rank's step as a page, its data and a trace: index.html, report.json,
        trace.json. Not a collective; ranks that share a directory overwrite each other.
        """
        from onefold.recording.files import write

        engine = self._engine
        about = {"stage": engine.stage, "ranks": engine.group.world_size}
        about |= {"offload": engine.told} if engine.told else {}
        report = RunReport.of([self.step], about=about, units=unit_lines(engine.units))
        write(directory, report, [self.step])

    def finish(self, recorder: Recorder) -> None:
        """The block is over."""
        group = self._engine.group
        self._step = recorder.result(group.rank, group.world_size)


@contextmanager
def record(module: nn.Module) -> Iterator[Recording]:
    """Watch what runs inside: one training step, after one or two that are not watched.

    On this rank alone; the others may record or not. The first steps of a run make the buffers and
    states that later ones find, so they tell little.
    """
    engine = engine_of(module)
    if engine.ledger.observer is not None:
        raise StateError(
            expected(
                "one recording of a module at a time",
                "a second one inside the first",
                where=f"rank {engine.group.rank}",
                hint="record one step, and leave its block before the next",
            )
        )
    recording, recorder = Recording(engine), Recorder(engine.ledger, engine.setting.store.device)
    engine.ledger.observer = recorder
    try:
        yield recording
    finally:
        engine.ledger.observer = None
    recording.finish(recorder)


class _Open:
    """A span under way; see `onefold.observer.Span`."""

    __slots__ = ("_recorder", "_start", "_stream", "_unit", "_verb")

    def __init__(self, recorder: Recorder, stream: Stream, verb: str, unit: str) -> None:
        self._recorder: Recorder | None = recorder
        self._stream, self._verb, self._unit = stream, verb, unit
        self._start = recorder.now(stream)

    def end(self, nbytes: int = 0) -> None:
        """The first time it is called."""
        recorder, self._recorder = self._recorder, None
        if recorder is not None:
            stop = recorder.now(self._stream)
            recorder.note(self._stream, self._verb, self._unit, (self._start, stop), nbytes)


class Recorder:
    """Takes down what an engine says, from whichever thread: appending to a list is atomic."""

    def __init__(self, ledger: Ledger, device: torch.device) -> None:
        self._ledger = ledger
        self._device = device
        self._held_now = held_now(device)
        self._spans: list[tuple[Stream, str, str, tuple[Moment, Moment], int]] = []
        self._held = [(0.0, str(kind), tier, usage.now) for (kind, tier), usage in
                      ledger.usage.items()]  # fmt: skip
        self._sent = {n: Traffic(t.calls, t.sent_nbytes) for n, t in ledger.traffic.items()}
        self._asking = 0.0  # seconds that went into asking the allocator
        self._asked = 0.0  # when it was asked last
        self._frozen: float | None = None  # while it is asked
        self._home = get_ident()  # the thread that trains
        self._base: torch.cuda.Event | None = None
        if device.type == "cuda":
            torch.cuda.synchronize(device)
            self._base = _event()
        self._floor = 0 if self._base is not None else self._apart()
        self._began_at, self._began = time.time(), time.perf_counter()
        self._ask()

    # the observer

    def held(self, kind: str, tier: str, nbytes: int) -> None:
        """See `Observer.held`."""
        self._held.append((self._clock(), str(kind), tier, nbytes))
        is_due = self._clock() - self._asked > EVERY_S
        if is_due and (self._base is not None or get_ident() == self._home):
            self._ask()

    def begin(self, stream: Stream, verb: str, unit: str) -> _Open:
        """See `Observer.begin`."""
        if stream in _AT_MARKS:
            self._ask()
        return _Open(self, stream, verb, unit)

    def note(
        self, stream: Stream, verb: str, unit: str, bounds: tuple[Moment, Moment], nbytes: int
    ) -> None:
        """A span is over."""
        self._spans.append((stream, verb, unit, bounds, nbytes))
        if stream in _AT_MARKS:
            self._ask()

    def now(self, stream: Stream) -> Moment:
        """This moment, as the stream sees it."""
        return _event() if self._base is not None and stream in _ON_DEVICE else self._clock()

    def _clock(self) -> float:
        """Seconds since the step began, for every thread alike; they never run backwards."""
        frozen = self._frozen
        return time.perf_counter() - self._began - self._asking if frozen is None else frozen

    def _ask(self) -> None:
        """Note what torch holds beside the ledger; the clock stands still meanwhile."""
        if self._held_now is None or self._frozen is not None:
            return
        self._asked = self._frozen = self._clock()
        nbytes = max(0, self._apart() - self._floor)
        self._held.append((self._asked, TORCH, "device", nbytes))
        self._asking = time.perf_counter() - self._began - self._asked
        self._frozen = None

    def _apart(self) -> int:
        """Bytes of torch's allocator that are not in the ledger.

        On the CPU that is all of the process, so what is held as the step begins is taken off.
        """
        if self._held_now is None:
            return 0
        ledger = self._ledger
        if self._base is None:
            return self._held_now() - (ledger.total.now - ledger.mapped)
        held = [usage.now for (_, tier), usage in ledger.usage.items() if tier == "device"]
        return self._held_now() - sum(held)

    # the result

    def result(self, rank: int, world_size: int) -> StepRecord:
        """The step, in order."""
        seconds = self._clock()
        if self._base is not None:
            torch.cuda.synchronize(self._device)
        at = self._seconds()
        spans: list[SpanLine] = []
        for stream, verb, unit, bounds, nbytes in self._spans:
            start = at(bounds[0])
            stop = max(start, at(bounds[1]))  # other threads see the clock stand still
            spans.append(SpanLine(str(stream), verb, unit, start, stop, nbytes))
        spans.sort(key=lambda span: (span.start, -span.stop))
        keys = list(dict.fromkeys((kind, tier) for _, kind, tier, _ in self._held))
        index = {key: number for number, key in enumerate(keys)}
        changes: list[Change] = []
        latest = 0.0
        for moment, kind, tier, nbytes in self._held:  # in the order in which it happened
            latest = max(latest, moment)
            changes.append(Change(latest, index[kind, tier], nbytes))
        seconds = max([seconds, latest, *(span.stop for span in spans)])
        return StepRecord(
            rank, world_size, self._began_at, seconds, tuple(spans),
            tuple(Series(*key) for key in keys), tuple(changes), self._sent_since(),
        )  # fmt: skip

    def _seconds(self) -> Callable[[Moment], float]:
        base = self._base

        def at(moment: Moment) -> float:
            if isinstance(moment, float):
                return moment
            assert base is not None, "events are only made on a device"
            assert not isinstance(moment, int), "moments are seconds or events"
            return base.elapsed_time(moment) / 1e3

        return at

    def _sent_since(self) -> dict[str, Sent]:
        empty, sent = Traffic(), {}
        for name, now in self._ledger.traffic.items():
            then = self._sent.get(name, empty)
            if now.calls > then.calls or now.sent_nbytes > then.sent_nbytes:
                sent[name] = Sent(now.calls - then.calls, now.sent_nbytes - then.sent_nbytes)
        return sent


def _event() -> torch.cuda.Event:
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event
