"""Show a run of `onefold train`: a progress bar or plain lines, then loss, memory table and text.

All text is ASCII, except for the bar, which rich draws as the terminal can.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import log
from typing import TextIO

from rich.console import Console
from rich.progress import BarColumn, TextColumn, TimeRemainingColumn
from rich.progress import Progress as Bar

from onefold.app.train.checkpoints import Resumed
from onefold.app.train.corpus import Corpus
from onefold.app.train.course import Progress, TrainObserver, TrainResult
from onefold.app.train.job import Job
from onefold.app.train.memory_table import MeasuredMemory
from onefold.recording.closed_form import KINDS
from onefold.text import (
    WIDTH,
    columns,
    common_unit,
    counted,
    format_bytes,
    format_seconds,
    in_unit,
    show,
    wrapped,
)

NUM_LINES = 10
"""Lines of progress where there is no terminal."""

MAX_COLUMNS = 3
"""Ranks that the memory table shows; of more it shows the first ones, and whether all agree."""


class Lines(TrainObserver):
    """Plain lines, for logs and pipes."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._steps = 0
        self._shown = 0

    def _print(self, line: str) -> None:
        print(line, file=self._stream, flush=True)

    def started(self, job: Job, corpus: Corpus, num_parameters: int, world_size: int) -> None:
        self._steps = job.steps
        self._print(heading(job, corpus, num_parameters, world_size))

    def resumed(self, resumed: Resumed) -> None:
        self._print(_resumed_line(resumed))
        self._shown = resumed.step * NUM_LINES // self._steps

    def stepped(self, progress: Progress) -> None:
        due = progress.step * NUM_LINES // self._steps
        if due > self._shown:
            self._shown = due
            line = f"step {progress.step:6,d} of {self._steps:,d}   {_speed(progress)}"
            self._print(f"{line}   {progress.seconds_left:4.0f} s left")


class LiveDisplay(TrainObserver):
    """A bar on a terminal."""

    def __init__(self, stream: TextIO) -> None:
        self._bar = Bar(
            TextColumn("step {task.completed:,d} of {task.total:,d}"),
            BarColumn(bar_width=None),
            TextColumn("{task.description}"),
            TimeRemainingColumn(compact=True),
            TextColumn("left"),
            console=Console(file=stream, highlight=False),
            expand=True,
        )
        self._task = self._bar.add_task("", total=0)

    def __exit__(self, *_: object) -> None:
        self._bar.stop()

    def started(self, job: Job, corpus: Corpus, num_parameters: int, world_size: int) -> None:
        self._bar.console.print(heading(job, corpus, num_parameters, world_size), markup=False)
        self._bar.reset(self._task, total=job.steps, description="loss  -")
        self._bar.start()

    def resumed(self, resumed: Resumed) -> None:
        self._bar.console.print(_resumed_line(resumed), markup=False)
        self._bar.update(self._task, completed=resumed.step)

    def stepped(self, progress: Progress) -> None:
        self._bar.update(self._task, completed=progress.step, description=_speed(progress))

    def trained(self) -> None:
        self._bar.stop()


def display(stream: TextIO) -> TrainObserver:
    """Return a bar for a terminal, and lines for anything else."""
    return LiveDisplay(stream) if stream.isatty() else Lines(stream)


def heading(job: Job, corpus: Corpus, num_parameters: int, world_size: int) -> str:
    """Describe the run that is about to start."""
    choices = f", {job.precision} compute" if job.precision else ""
    choices += f", offload {job.offload}" if job.offload else ""
    choices += f", wire {job.wire}" if job.wire else ""
    choices += ", compiled" if job.compile else ""
    cut = f" in {job.accumulate} micro-batches" if job.accumulate > 1 else ""
    parts = (
        f"{job.model}: {num_parameters:,d} parameters, stage {job.stage} over "
        f"{counted(world_size, 'rank')}{choices}",
        f"{corpus.name}: {format_bytes(corpus.train.nbytes)} to train on, "
        f"{format_bytes(corpus.held_out.nbytes)} held out",
        f"{counted(job.steps, 'step')} of {counted(job.rows, 'row')} of {job.seq} bytes{cut}, "
        "all ranks together",
    )
    return "\n".join(line for part in parts for line in wrapped(part))


def print_result(result: TrainResult, stream: TextIO) -> None:
    """Print held-out loss, memory table and text, for people."""
    bits = result.held_out / log(2)
    loss = f"held-out loss {result.held_out:.3f} nats per byte ({bits:.2f} bits)"
    speed = f"{result.tokens_per_s:,.0f} bytes/s for {format_seconds(result.seconds)}"
    report = [f"\nreport: {result.report}"] * bool(result.report)
    show(
        [f"\n{loss}   {speed}\n", *memory_table(result), *_text_lines(result.text), *report], stream
    )


def memory_table(result: TrainResult) -> list[str]:
    """List bytes by kind on each rank, beside the expected ones and those of stage 0."""
    shown, predicted = result.memory[:MAX_COLUMNS], result.predicted
    peaks = [memory.total_peak for memory in shown]
    name, unit = common_unit(max(*peaks, sum(result.stage0.values())))
    rows = [[f"memory in {name}", *(f"rank {m.rank}" for m in shown), "expected", "stage 0"]]

    def add(row: str, nbytes: Sequence[int], expected: str = "", stage0: int | None = None) -> None:
        last = "" if stage0 is None else in_unit(stage0, unit)
        rows.append([row, *(in_unit(each, unit) for each in nbytes), expected, last])

    for kind in KINDS:
        nbytes = [memory.now.get(kind, 0) for memory in result.memory]
        wanted = [memory.expected[kind] for memory in result.memory]
        if any(nbytes) or any(wanted):
            verdict = "equal" if wanted == nbytes else in_unit(wanted[0], unit)
            add(_named(kind, shown[0]), nbytes[: len(shown)], verdict, result.stage0[kind])
    sums = [sum(memory.now.get(kind, 0) for kind in KINDS) for memory in shown]
    add("together, after a step", sums, "", sum(result.stage0.values()))
    add("peak, no activations", peaks, in_unit(predicted.ledger_nbytes, unit) if predicted else "")
    if any(tier != "device" for tiers in shown[0].tiers.values() for tier in tiers):
        add("peak of the process", [memory.resident_peak for memory in shown])
    notes = ["expected: the closed form"]
    if predicted:
        notes = [f"{notes[0]}; for the peak, the prediction for rank 0", predicted.verdict]
    notes += [f"planned for rank 0: {result.offload}"] if result.offload else []
    if len(result.memory) > len(shown):
        notes.append(f"(the first {len(shown)} of {len(result.memory)} ranks; --json has all)")
    return [*columns(rows, "<>"), *(line for note in notes for line in wrapped(note))]


def _text_lines(text: str) -> list[str]:
    """Break generated text anywhere: escapes of bytes have no spaces between them."""
    line = f'\ntext: "{text}"' if text else ""
    return [line[start : start + WIDTH] for start in range(0, len(line), WIDTH)]


def _named(kind: str, memory: MeasuredMemory) -> str:
    """Return the kind, and its tiers if it is not on the device."""
    tiers = memory.tiers.get(kind, [])
    return kind if tiers in ([], ["device"]) else f"{kind} on {' and '.join(tiers)}"


def _resumed_line(resumed: Resumed) -> str:
    return "\n".join(wrapped(f"goes on after step {resumed.step:,d}: {resumed.description}"))


def _speed(progress: Progress) -> str:
    return f"loss {progress.loss:.3f}   {progress.tokens_per_s:,.0f} bytes/s"
