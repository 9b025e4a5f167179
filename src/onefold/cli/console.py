"""What a person sees of a run: a bar or plain lines, the memory table, the text.

ASCII only, but for the bar, which rich draws as the terminal can.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import isfinite, log
from typing import Any, TextIO

from rich.console import Console
from rich.progress import BarColumn, TextColumn, TimeRemainingColumn
from rich.progress import Progress as Bar

from onefold.train.checkpoints import Resumed
from onefold.train.corpus import Corpus
from onefold.train.job import Job
from onefold.train.loop import Progress, TrainResult
from onefold.train.memory_table import KINDS, RankMemory

NUM_LINES = 10
"""Lines of progress where there is no terminal."""

MAX_COLUMNS = 4
"""Ranks that the memory table shows; of more it shows the first ones, and whether all agree."""


class Silent:
    """The observer of every rank but the first."""

    def __enter__(self) -> Silent:
        return self

    def __exit__(self, *_: object) -> None: ...

    def started(self, job: Job, corpus: Corpus, num_parameters: int, world_size: int) -> None: ...

    def resumed(self, resumed: Resumed) -> None: ...

    def stepped(self, progress: Progress) -> None: ...

    def trained(self) -> None: ...


class Lines(Silent):
    """Plain lines, for logs and pipes."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._steps = 0
        self._shown = 0

    def started(self, job: Job, corpus: Corpus, num_parameters: int, world_size: int) -> None:
        self._steps = job.steps
        print(heading(job, corpus, num_parameters, world_size), file=self._stream, flush=True)

    def resumed(self, resumed: Resumed) -> None:
        print(_told(resumed), file=self._stream, flush=True)
        self._shown = resumed.step * NUM_LINES // self._steps

    def stepped(self, progress: Progress) -> None:
        due = progress.step * NUM_LINES // self._steps
        if due > self._shown:
            self._shown = due
            line = f"step {progress.step:6,d} of {self._steps:,d}   {_speed(progress)}"
            print(f"{line}   {progress.seconds_left:4.0f} s left", file=self._stream, flush=True)


class LiveDisplay(Silent):
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
        self._bar.console.print(_told(resumed), markup=False)
        self._bar.update(self._task, completed=resumed.step)

    def stepped(self, progress: Progress) -> None:
        self._bar.update(self._task, completed=progress.step, description=_speed(progress))

    def trained(self) -> None:
        self._bar.stop()


def display(stream: TextIO) -> Lines | LiveDisplay:
    """A bar where somebody watches, lines where nobody does."""
    return LiveDisplay(stream) if stream.isatty() else Lines(stream)


def heading(job: Job, corpus: Corpus, num_parameters: int, world_size: int) -> str:
    """What is about to run."""
    ranks = "1 rank" if world_size == 1 else f"{world_size} ranks"
    precision = f", {job.precision} compute" if job.precision else ""
    precision += f", offload {job.offload}" if job.offload else ""
    precision += f", wire {job.wire}" if job.wire else ""
    cut = f" in {job.accumulate} micro-batches" if job.accumulate > 1 else ""
    return (
        f"{job.model}: {num_parameters:,d} parameters, stage {job.stage} over {ranks}{precision}\n"
        f"{corpus.name}: {_megabytes(corpus.train.nbytes)} to train on, "
        f"{_megabytes(corpus.held_out.nbytes)} held out\n"
        f"{job.steps:,d} steps of {job.batch} rows of {job.seq} bytes{cut}"
    )


def print_result(result: TrainResult, stream: TextIO) -> None:
    """Held-out loss, memory table and text, for people."""
    bits = result.held_out / log(2)
    print(
        f"\nheld-out loss {result.held_out:.3f} nats per byte ({bits:.2f} bits)   "
        f"{result.tokens_per_s:,.0f} tokens/s, {result.seconds:.1f} s of training\n",
        *memory_table(result),
        *([f'\ntext: "{result.text}"'] if result.text else []),
        *([f"\nreport: {result.report}"] if result.report else []),
        sep="\n",
        file=stream,
        flush=True,
    )


def memory_table(result: TrainResult) -> list[str]:
    """Bytes by kind on each rank, beside the closed form and what stage 0 holds."""
    shown = result.memory[:MAX_COLUMNS]
    names = [f"rank {memory.rank}" for memory in shown]
    lines = [_row("bytes after a step", names, "closed form", "at stage 0")]
    sums = [0] * len(shown)
    for kind in KINDS:
        held = [memory.now.get(kind, 0) for memory in shown]
        wanted = [memory.expected[kind] for memory in result.memory]
        if not any(held) and not any(wanted):
            continue
        sums = [total + nbytes for total, nbytes in zip(sums, held, strict=True)]
        is_equal = wanted == [memory.now.get(kind, 0) for memory in result.memory]
        verdict = "equal" if is_equal else f"{wanted[0]:,d}"
        lines.append(_row(_named(kind, shown[0]), held, verdict, result.stage0[kind]))
    lines.append(_row("together", sums, "", sum(result.stage0.values())))
    lines.append(_row("highest at any moment", [memory.total_peak for memory in shown], "", ""))
    lines += [result.predicted.verdict] if result.predicted else []
    lines += [f"planned for rank 0: {result.offload}"] * bool(result.offload)
    if any(tier != "device" for tiers in shown[0].tiers.values() for tier in tiers):
        lines.append(_row("resident, highest", [memory.resident_peak for memory in shown], "", ""))
    if len(result.memory) > len(shown):
        lines.append(f"(the first {len(shown)} of {len(result.memory)} ranks; --json has all)")
    return lines


def _named(kind: str, memory: RankMemory) -> str:
    """The kind, and where it rests if that is not the device."""
    tiers = memory.tiers.get(kind, [])
    return kind if tiers in ([], ["device"]) else f"{kind} on {' and '.join(tiers)}"


def finite(value: Any) -> Any:
    """The same with None for numbers that JSON cannot spell."""
    if isinstance(value, float):
        return value if isfinite(value) else None
    if isinstance(value, dict):
        return {key: finite(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [finite(each) for each in value]
    return value


def _row(name: str, held: Sequence[object], *others: object) -> str:
    cells = [f"{cell:,d}" if isinstance(cell, int) else str(cell) for cell in (*held, *others)]
    return f"{name:22s}" + "".join(f"{cell:>14s}" for cell in cells).rstrip()


def _told(resumed: Resumed) -> str:
    return f"goes on after step {resumed.step:,d}: {resumed.told}"


def _speed(progress: Progress) -> str:
    return f"loss {progress.loss:.3f}   {progress.tokens_per_s:,.0f} tokens/s"


def _megabytes(nbytes: int) -> str:
    return f"{nbytes / 1e6:.1f} MB" if nbytes >= 1e5 else f"{nbytes:,d} bytes"
