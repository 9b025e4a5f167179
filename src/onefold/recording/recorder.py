"""`onefold.record`: record one training step of one rank.

    with onefold.record(model) as recording:
        loss = model(x, y)
        loss.backward()
        optimizer.step()
    recording.save("report")              # rank 0: a page, its data, and a trace

Each event of the engine appends one entry to a list, and the clock stops while torch's allocator is
read, so a recorded step takes as long as any other. On the CPU all times are the host's: a
collective lasts from its request to its arrival. On a GPU, events on the streams time compute and
collectives, and the host times changes of bytes. See docs/adr/0011.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import replace
from threading import get_ident

import torch
from torch import nn

from onefold.config import STAGES, Offload
from onefold.engine.engine import Engine
from onefold.engine.registry import engine_of
from onefold.errors import StateError
from onefold.layout.flat import unit_bytes
from onefold.layout.ledger import Ledger, Traffic
from onefold.layout.observer import Stream, members_of
from onefold.recipe import Recipe
from onefold.recording.allocator import allocator_probe
from onefold.recording.meter import Meter
from onefold.recording.module_bytes import ModuleBytes
from onefold.recording.report import unit_lines
from onefold.recording.step_record import TORCH, Change, Sent, Series, SpanLine, StepRecord
from onefold.tier import accelerator
from onefold.wire_config import Wire

KINDS: tuple[str, ...] = ("weight", "master", "grad", "optimizer")
"""Kinds of state that stay between backward and step, which the closed form covers."""

Moment = float | accelerator.Event
"""Seconds on the recorder's clock, or an event on a stream of the device."""

PROBE_INTERVAL_S = 0.001
"""Seconds between two readings of the allocator that changes of the ledger cause."""

_ON_DEVICE = (Stream.PHASE, Stream.COMPUTE, Stream.GATHER, Stream.REDUCE)
_PROBED = (Stream.PHASE, Stream.COMPUTE)  # the allocator is read where their spans begin and end


class Recording:
    """The result of `onefold.record`: `step` is set when its block ends."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._step: StepRecord | None = None
        self.number = engine.ledger.steps + 1
        """Which step of the module this is, from 1."""

    @property
    def step(self) -> StepRecord:
        """The recorded step. Raises `StateError` inside the block."""
        if self._step is None:
            got = "a block that has not ended, or ended with an exception"
            hint = "read it after `with onefold.record(module) as recording:`"
            where = f"rank {self._engine.group.rank}"
            raise StateError("a recorded step", got, where=where, hint=hint)
        return self._step

    def save(self, directory: str | os.PathLike[str], *later: Recording) -> None:
        """Write this rank's step as index.html, report.json and trace.json.

        Not a collective. Ranks that share a directory overwrite each other's files.

        Args:
            directory: it is made if it does not exist.
            later: recordings of later steps, among which the page lets its reader choose.
        """
        from onefold.recording.page import write_report
        from onefold.recording.page_data import report_of, view_of

        engine = self._engine
        about = {"stage": engine.recipe.stage.number, "ranks": engine.group.world_size}
        about |= {"offload": engine.facts.description} if engine.facts.description else {}
        report = report_of(
            [self.step], about=about, units=unit_lines(engine.units), recorded=self.number,
            stage0=stage0_nbytes(engine.recipe), rates=_rates(engine),
            others=[view_of(recording.step, recording.number) for recording in later],
        )  # fmt: skip
        write_report(directory, report, [self.step])

    def end_block(self, recorder: Recorder) -> None:
        """End the block: keep the recorder's result."""
        self._step = recorder.result(self._engine.group.rank, self._engine.group.world_size)


def _rates(engine: Engine) -> dict[str, float]:
    """Return the rates that the page shows, if something measures them."""
    meter = next((m for m in members_of(engine.ledger.observer) if isinstance(m, Meter)), None)
    rates = None if meter is None else meter.rates()
    return {} if rates is None else {"model_flops_per_s": rates.flops_per_s}


@contextmanager
def record(module: nn.Module) -> Iterator[Recording]:
    """Record the training step that runs in the block, on this rank; others need not record.

    Record the third step or a later one: the first steps make buffers and optimizer states.
    """
    engine = engine_of(module)
    ledger = engine.ledger
    if any(isinstance(member, Recorder) for member in members_of(ledger.observer)):
        wanted, got = "one recording of a module at a time", "a second one inside the first"
        where, hint = f"rank {engine.group.rank}", "end the block of one step before the next"
        raise StateError(wanted, got, where=where, hint=hint)
    recording, recorder = Recording(engine), Recorder(ledger, engine.context.store.device)
    ledger.watch(recorder)
    recorder.watch_modules(module)
    try:
        yield recording
    finally:
        ledger.unwatch(recorder)
        recorder.modules.remove()
    recording.end_block(recorder)


class _OpenSpan:
    """A span that has begun; see `onefold.layout.observer.Span`."""

    __slots__ = ("_recorder", "_start", "_stream", "_unit", "_verb")

    def __init__(self, recorder: Recorder, stream: Stream, verb: str, unit: str) -> None:
        self._recorder: Recorder | None = recorder
        self._stream, self._verb, self._unit = stream, verb, unit
        self._start = recorder.now(stream)

    def end(self, nbytes: int = 0) -> None:
        """End the span; only the first call counts."""
        recorder, self._recorder = self._recorder, None
        if recorder is not None:
            bounds = self._start, recorder.now(self._stream)
            recorder.add_span(self._stream, self._verb, self._unit, bounds, nbytes)


class Recorder:
    """The observer of one step. Any thread may call it: appending to a list is atomic."""

    def __init__(self, ledger: Ledger, device: torch.device, *, waits: bool = True) -> None:
        """`waits` for the device: its times begin with this step, on the clock of the host."""
        self._ledger = ledger
        self._device = device
        self._probe = allocator_probe(device)
        self._spans: list[tuple[Stream, str, str, tuple[Moment, Moment], int]] = []
        self._bytes = [(0.0, str(kind), tier, usage.now) for (kind, tier), usage in
                       ledger.usage.items()]  # fmt: skip
        self._sent_before = deepcopy(ledger.traffic)
        self._stopped = 0.0  # seconds for which the clock stood still
        self._probed_at = 0.0
        self._stopped_at: float | None = None  # not None while the clock stands still
        self._training_thread = get_ident()
        self._torch_now = 0
        self.modules = ModuleBytes(self._record_torch)
        self._base: accelerator.Event | None = None
        if device.type != "cpu":
            if waits:
                accelerator.synchronize(device)
            self._base = accelerator.record(device, is_timed=True)
        self._floor = 0 if self._base is not None else self._torch_nbytes()
        self._began_at, self._began = time.time(), time.perf_counter()
        self._record_torch()

    def watch_modules(self, module: nn.Module) -> None:
        """Measure the activations of each module, where the allocator can be read."""
        if self._probe is not None:
            self.modules.watch(module)

    # the observer

    def held(self, kind: str, tier: str, nbytes: int) -> None:
        self._bytes.append((self._clock(), str(kind), tier, nbytes))
        is_due = self._clock() - self._probed_at > PROBE_INTERVAL_S
        if is_due and (self._base is not None or get_ident() == self._training_thread):
            self._record_torch()

    def begin(self, stream: Stream, verb: str, unit: str) -> _OpenSpan:
        if stream in _PROBED:
            self._record_torch()
        return _OpenSpan(self, stream, verb, unit)

    def add_span(
        self, stream: Stream, verb: str, unit: str, bounds: tuple[Moment, Moment], nbytes: int
    ) -> None:
        """Record a span that has ended."""
        self._spans.append((stream, verb, unit, bounds, nbytes))
        if stream in _PROBED:
            self._record_torch()

    def now(self, stream: Stream) -> Moment:
        """Return this moment, on the device for streams that run there."""
        on_device = self._base is not None and stream in _ON_DEVICE
        return accelerator.record(self._device, is_timed=True) if on_device else self._clock()

    def _clock(self) -> float:
        """Seconds since the step began, the same for all threads; they never decrease."""
        stopped_at = self._stopped_at
        if stopped_at is not None:
            return stopped_at
        return time.perf_counter() - self._began - self._stopped

    def _record_torch(self) -> int:
        """Record torch's bytes beside the ledger, and return them. The clock stands still."""
        if self._probe is None or self._stopped_at is not None:
            return self._torch_now
        self._probed_at = self._stopped_at = self._clock()
        nbytes = max(0, self._torch_nbytes() - self._floor)
        self._torch_now = nbytes
        self._bytes.append((self._probed_at, TORCH, "device", nbytes))
        self._stopped = time.perf_counter() - self._began - self._probed_at
        self._stopped_at = None
        return nbytes

    def _torch_nbytes(self) -> int:
        """Bytes of torch's allocator beside the ledger; on the CPU those of the whole process."""
        if self._probe is None:
            return 0
        ledger = self._ledger
        if self._base is None:
            return self._probe() - (ledger.total.now - ledger.mapped)
        nbytes = [usage.now for (_, tier), usage in ledger.usage.items() if tier == "device"]
        return self._probe() - sum(nbytes)

    # the result

    def result(self, rank: int, world_size: int) -> StepRecord:
        """Return the step, with spans and changes in the order of time."""
        seconds = self._clock()
        for moment in (moment for _, _, _, bounds, _ in self._spans for moment in bounds):
            if isinstance(moment, accelerator.Event):
                accelerator.await_event(moment)
        spans: list[SpanLine] = []
        for stream, verb, unit, bounds, nbytes in self._spans:
            start, stop = map(self._seconds, bounds)
            stop = max(start, stop)  # other threads see the clock stand still
            spans.append(SpanLine(str(stream), verb, unit, start, stop, nbytes))
        spans.sort(key=lambda span: (span.start, -span.stop))
        index: dict[tuple[str, str], int] = {}
        changes: list[Change] = []
        latest = 0.0
        for moment, kind, tier, nbytes in self._bytes:  # in the order of events
            latest = max(latest, moment)
            number = index.setdefault((kind, tier), len(index))
            changes.append(Change(latest, number, nbytes))
        seconds = max([seconds, latest, *(span.stop for span in spans)])
        return StepRecord(
            rank, world_size, self._began_at, seconds, tuple(spans),
            tuple(Series(*key) for key in index), tuple(changes), self._sent(),
            {name: round(nbytes) for name, nbytes in self.modules.nbytes.items()},
        )  # fmt: skip

    def _seconds(self, moment: Moment) -> float:
        if isinstance(moment, accelerator.Event):
            assert self._base is not None, "events are only made on a device"
            return self._base.elapsed_time(moment) / 1e3
        return moment

    def _sent(self) -> dict[str, Sent]:
        """Calls and bytes since the step began, by collective."""
        sent = {
            name: now.since(self._sent_before.get(name, Traffic()))
            for name, now in self._ledger.traffic.items()
        }
        return {name: Sent(t.calls, t.sent_nbytes) for name, t in sent.items() if t != Traffic()}


# the closed form


def expected_nbytes(recipe: Recipe, shard: int = 0) -> dict[str, int]:
    """Compute the bytes by kind on a rank once every parameter has a gradient.

    Units that are stepped in backward keep no gradient.
    """
    totals = dict.fromkeys(KINDS, 0)
    for unit in recipe.units:
        here = None if unit.ranks else shard  # a mesh of its own: at most
        nbytes = unit_bytes(
            unit.members, recipe.on(unit.ranks), here, is_tiled=unit.tile_nbytes > 0
        )
        is_early = recipe.offload.step_in_backward and unit.is_offloaded
        totals["weight"] += nbytes.weight
        totals["master"] += nbytes.master if nbytes.has_master or unit.is_offloaded else 0
        totals["grad"] += 0 if is_early else nbytes.grad
        totals["optimizer"] += nbytes.moments
    return totals


def stage0_nbytes(recipe: Recipe) -> dict[str, int]:
    """Compute the bytes by kind that every rank would hold at stage 0, all on the device."""
    return expected_nbytes(replace(recipe, stage=STAGES[0], offload=Offload(), wire=Wire()))
