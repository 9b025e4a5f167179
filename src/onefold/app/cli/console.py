"""Show runs of `onefold train` and `onefold generate`: progress or text, then a memory table.

All text is ASCII, except for the bar, which rich draws as the terminal can.
"""

from collections.abc import Callable, Mapping
from math import log
from pathlib import Path
from typing import TextIO

from rich.console import Console
from rich.progress import BarColumn, TextColumn, TimeRemainingColumn
from rich.progress import Progress as Bar

from onefold.app.finetune.progress import FinetuneObserver
from onefold.app.finetune.tuning import FinetuneResult
from onefold.app.generate.run import WARM_PASSES, Generated, Loaded
from onefold.app.generate.sources import TOKENIZERS
from onefold.app.generate.tokens import printable
from onefold.app.train.checkpoints import Resumed
from onefold.app.train.corpus import Corpus
from onefold.app.train.job import GenerateJob, Job
from onefold.app.train.memory_table import MeasuredMemory, TableRow, compared, rank_table
from onefold.app.train.run_record import Progress, TrainObserver, TrainResult
from onefold.recording.recorder import KINDS
from onefold.text import (
    WIDTH,
    counted,
    format_bytes,
    format_flops,
    format_rate,
    format_seconds,
    format_share,
    wrapped,
)

NUM_LINES = 10
"""Lines of progress where there is no terminal."""

MAX_COLUMNS = 3
"""Ranks that the memory table shows; of more it shows the first ones, and whether all agree."""

WORDS = {"unsharded": "unsharded, peak", "staging": "staging, peak", "wire": "wire, peak"}
"""Rows of the table besides weights at rest."""

MAX_NAMES = 8
"""Units that stay, by name; of more their number is enough."""


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

    def noted(self, note: str) -> None:
        self._print("\n".join(wrapped(f"note: {note}")))

    def resumed(self, resumed: Resumed) -> None:
        self._print(_resumed_line(resumed))
        self._shown = resumed.step * NUM_LINES // self._steps

    def stepped(self, progress: Progress) -> None:
        due = progress.step * NUM_LINES // self._steps
        if due > self._shown:
            self._shown = due
            line = f"step {progress.step:6,d} of {self._steps:,d}  {_speed(progress)}"
            self._print(f"{line}  {progress.seconds_left:4.0f} s left")


def _bar(stream: TextIO) -> Bar:
    return Bar(
        TextColumn("step {task.completed:,d} of {task.total:,d}"),
        BarColumn(bar_width=None),
        TextColumn("{task.description}"),
        TimeRemainingColumn(compact=True),
        TextColumn("left"),
        console=Console(file=stream, highlight=False),
        expand=True,
    )


class LiveDisplay(TrainObserver):
    """A bar on a terminal."""

    def __init__(self, stream: TextIO) -> None:
        self._bar = _bar(stream)
        self._task = self._bar.add_task("", total=0)

    def __exit__(self, *_: object) -> None:
        self._bar.stop()

    def started(self, job: Job, corpus: Corpus, num_parameters: int, world_size: int) -> None:
        self._bar.console.print(heading(job, corpus, num_parameters, world_size), markup=False)
        self._bar.reset(self._task, total=job.steps, description="loss  -")
        self._bar.start()

    def noted(self, note: str) -> None:
        self._bar.console.print("\n".join(wrapped(f"note: {note}")), markup=False)

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
    loaded = " from its files" if Path(job.model).is_dir() else ""
    has_tokenizer = loaded and any(Path(job.model, name).exists() for name in TOKENIZERS)
    unused = "; its tokenizer is not used: tokens are bytes" if has_tokenizer else ""
    parts = (
        f"{job.model}: {num_parameters:,d} parameters{loaded}, stage {job.stage} over "
        f"{counted(world_size, 'rank')}{choices}",
        f"{corpus.name}: {format_bytes(corpus.train.nbytes)} to train on, "
        f"{format_bytes(corpus.held_out.nbytes)} held out",
        f"{counted(job.steps, 'step')} of {counted(job.rows, 'row')} of {job.seq} bytes{cut}, "
        f"all ranks together{unused}",
    )
    return "\n".join(line for part in parts for line in wrapped(part))


def result_lines(result: TrainResult) -> list[str]:
    """Return held-out loss, memory table and text, for people."""
    bits = result.held_out / log(2)
    loss = f"held-out loss {result.held_out:.3f} ({bits:.2f} bits per byte)"
    speed = f"{result.tokens_per_s:,.0f} bytes/s for {format_seconds(result.seconds)}"
    report = [f"\nreport: {result.report}"] * bool(result.report)
    table = memory_table(result)
    return [f"\n{loss}   {speed}\n", *table, *_text_lines(result.text), *report]


def memory_table(result: TrainResult) -> list[str]:
    """List bytes by kind on each rank, beside the expected ones and those of stage 0."""
    memory, predicted, stage0 = result.memory, result.predicted, result.stage0
    rows: list[TableRow] = []
    for kind in KINDS:
        nbytes, expected = [rank.held(kind) for rank in memory], compared(memory, kind)
        if any(nbytes) or expected != "equal":
            rows.append((_kind_in_tiers(kind, memory[0]), nbytes, expected, stage0[kind]))
    sums, whole = [sum(map(rank.held, KINDS)) for rank in memory], sum(stage0.values())
    rows.append(("together, after a step", sums, "", whole))
    peaks = [rank.total_peak for rank in memory]
    rows.append(("peak without activations", peaks, predicted.ledger_nbytes if predicted else ""))
    if any(tier != "device" for tiers in memory[0].tiers.values() for tier in tiers):
        rows.append(("peak of the process", [rank.resident_peak for rank in memory]))
    notes = ["expected: the closed form"]
    if predicted:
        notes = [f"{notes[0]}; for the peak, the prediction for rank 0", predicted.verdict]
    notes += [f"planned for rank 0: {result.offload}"] if result.offload else []
    return rank_table(
        memory, rows, notes, heads=["expected", "stage 0"],
        largest=max(*peaks[:MAX_COLUMNS], whole), most=MAX_COLUMNS,
    )  # fmt: skip


def _text_lines(text: str) -> list[str]:
    """Break generated text anywhere: escapes of bytes have no spaces between them."""
    line = f'\ntext: "{text}"' if text else ""
    return [line[start : start + WIDTH] for start in range(0, len(line), WIDTH)]


def _kind_in_tiers(kind: str, memory: MeasuredMemory) -> str:
    """Return the kind, and its tiers if it is not on the device."""
    tiers = memory.tiers.get(kind, [])
    return kind if tiers in ([], ["device"]) else f"{kind} on {' and '.join(tiers)}"


def _resumed_line(resumed: Resumed) -> str:
    return "\n".join(wrapped(f"goes on after step {resumed.step:,d}: {resumed.description}"))


def _speed(progress: Progress) -> str:
    work = _work(progress.flops_per_s, progress.mfu)
    return f"loss {progress.loss:.3f}  {progress.tokens_per_s:,.0f} bytes/s{work}"


# onefold generate


def generate_heading(job: GenerateJob, loaded: Loaded, world_size: int) -> list[str]:
    """Describe the run that is about to start."""
    units = loaded.recipe.units
    kept = sum(unit.stays for unit in units)
    rest = {None: "exact", "int8": "in int8", "int4": "in int4"}[job.rest]
    tier = {"device": "on the device", "cpu": "in CPU memory", "disk": "on disk"}
    place = tier[loaded.recipe.offload.parameters]
    place = "in the model's own files" if loaded.recipe.reads_files else place
    budget = loaded.recipe.inference.budget if loaded.recipe.inference else 0
    lines = [
        f"{loaded.source.name}: {loaded.num_parameters:,d} parameters, weights rest {rest} "
        f"{place}" + (f", over {counted(world_size, 'rank')}" if world_size > 1 else ""),
        f"{kept} of {counted(len(units), 'unit')} stay within a budget of {format_bytes(budget)}; "
        f"prompt of {len(loaded.prompt):,d} {loaded.tokens.name}",
    ]
    lines += [f"note: {loaded.source.note}"] if loaded.source.note else []
    return [part for line in lines for part in wrapped(line)]


def writer(stream: TextIO) -> Callable[[str], None]:
    """Return a function that writes text at once, with characters that steer terminals escaped."""
    encoding = stream.encoding or "utf-8"

    def write(text: str) -> None:
        safe = printable(text).encode(encoding, "backslashreplace").decode(encoding)
        stream.write(safe)
        stream.flush()

    return write


def fact_lines(result: Generated) -> list[str]:
    """Return speed, bytes and memory, for people."""
    return ["", *_speed_lines(result), "", *_generate_table(result), *_stay_lines(result)]


def _speed_lines(result: Generated) -> list[str]:
    passes, link = result.passes, result.link
    lines = [
        f"{counted(result.num_tokens, 'token')} in {result.seconds:.2f} s: "
        f"{result.tokens_per_s:,.2f} tokens/s; the first pass took {result.first_seconds:.2f} s",
        f"{passes.number:,d} {'pass' if passes.number == 1 else 'passes'}, "
        f"{result.tokens_a_pass:.2f} tokens a pass",
    ]
    if passes.nbytes:
        rate = passes.nbytes / passes.seconds
        which = f"each pass after {WARM_PASSES}" if passes.is_warm else "on average a pass"
        lines[-1] += f"; {which} read {format_bytes(passes.nbytes)} a rank"
        lines.append(f"from {link.name}: {format_rate(rate)}")
        if link.rate:
            lines[-1] += (
                f", {format_share(link.share(passes))} of the {format_rate(link.rate)} measured"
            )
    else:
        lines[-1] += "; no weight moves"
    return [part for line in lines for part in wrapped(line)]


def _generate_table(result: Generated) -> list[str]:
    """List bytes by kind on each rank, as `onefold train` does."""
    memory = result.memory
    tiers = " and ".join(memory[0].tiers.get("weight", []))
    weights = [rank.held("weight") for rank in memory]
    rows: list[TableRow] = [(f"weight on {tiers}", weights, compared(memory, "weight"))]
    for kind, word in WORDS.items():
        peaks = [rank.peak.get(kind, 0) for rank in memory]
        rows += [(word, peaks)] if any(peaks) else []
    rows.append(("peak without activations", [rank.total_peak for rank in memory]))
    rows.append(("peak of the process", [rank.resident_peak for rank in memory]))
    notes = [f"expected: the closed form; the budget for weights was {format_bytes(result.budget)}"]
    return rank_table(
        memory, rows, [*notes, *result.notes], heads=["expected"], most=MAX_COLUMNS,
        largest=max(rank.total_peak + rank.held("weight") for rank in memory[:MAX_COLUMNS]),
    )  # fmt: skip


def _stay_lines(result: Generated) -> list[str]:
    kept = len(result.stays)
    if kept in (0, result.num_units):
        word = "no unit stays" if kept == 0 else "all units stay"
        return [f"{word} on the device between passes"]
    names = ", ".join(result.stays[:MAX_NAMES]) + (", ..." if kept > MAX_NAMES else "")
    return wrapped(
        f"{kept} of {result.num_units} units stay, {format_bytes(result.stay_nbytes)}: {names}"
    )


# onefold finetune


class FinetuneLines(FinetuneObserver):
    """Plain lines, for logs and pipes."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._steps, self._shown = 0, 0

    def noted(self, note: str) -> None:
        print("\n".join(wrapped(note)), file=self._stream, flush=True)

    def begin(self, steps: int) -> None:
        self._steps = steps

    def advanced(self, step: int, loss: float, numbers: Mapping[str, float]) -> None:
        due = step * NUM_LINES // max(1, self._steps)
        if due > self._shown:
            self._shown = due
            speed = _tuning_speed(loss, numbers)
            print(f"step {step:6,d} of {self._steps:,d}  {speed}", file=self._stream, flush=True)


class FinetuneBar(FinetuneObserver):
    """A bar on a terminal."""

    def __init__(self, stream: TextIO) -> None:
        self._bar = _bar(stream)
        self._task = self._bar.add_task("", total=0)

    def __exit__(self, *_: object) -> None:
        self._bar.stop()

    def noted(self, note: str) -> None:
        self._bar.console.print("\n".join(wrapped(note)), markup=False)

    def begin(self, steps: int) -> None:
        self._bar.reset(self._task, total=steps, description="loss  -")
        self._bar.start()

    def advanced(self, step: int, loss: float, numbers: Mapping[str, float]) -> None:
        description = _tuning_speed(loss, numbers)
        self._bar.update(self._task, completed=step, description=description)


def finetune_display(stream: TextIO) -> FinetuneObserver:
    """Return a bar for a terminal, and lines for anything else."""
    return FinetuneBar(stream) if stream.isatty() else FinetuneLines(stream)


def _tuning_speed(loss: float, numbers: Mapping[str, float]) -> str:
    """Write the numbers of a Trainer's logs."""
    tokens, peak, flops, mfu = (
        numbers.get(f"onefold_{name}", 0.0)
        for name in ("tokens_per_s", "peak_bytes", "model_flops_per_s", "mfu")
    )
    speed = f"{tokens:,.0f} tokens/s{_work(flops, mfu)}"
    return f"loss {loss:.3f}  {speed}  peak {format_bytes(peak)}"


def _work(flops_per_s: float, mfu: float) -> str:
    """Write the share of the GPU's peak, else the FLOP/s of a rank, where they are known."""
    if mfu:
        return f"  {format_share(mfu)} MFU"
    return f"  {format_flops(flops_per_s)}" * bool(flops_per_s)


def finetune_lines(result: FinetuneResult) -> list[str]:
    """Return losses, memory, the answers and the folders, for people."""
    lines = [""]
    if result.held_out is not None:
        before, after = result.held_out
        lines.append(f"held-out loss {before:.3f} before, {after:.3f} after, nats per token")
    peaks = [rank.total_peak for rank in result.memory]
    planned = f", planned {format_bytes(result.way.peak_nbytes)} with activations"
    planned *= bool(result.way.peak_nbytes)
    lines += wrapped(
        f"{counted(result.steps, 'step')} in {format_seconds(result.seconds)}; peak of a rank "
        f"{format_bytes(max(peaks))} without activations{planned}"
    )
    if result.answer is not None:
        answer = result.answer
        for word, text in (("prompt", answer.prompt), ("before", answer.before),
                           ("after ", answer.after)):  # fmt: skip
            ends = "" if text else "  (the model ended at once)"
            lines.append(f"{word}: {printable(text)!r}{ends}")
    return [*lines, "", *(f"saved: {folder}" for folder in result.saved)]
