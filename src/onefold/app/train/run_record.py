"""Follow a run: predict its memory, observe its progress, record one step, report its result."""

import platform
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import onefold
from onefold.api import rates_of
from onefold.app.train.checkpoints import Resumed
from onefold.app.train.corpus import Corpus, own_rows
from onefold.app.train.job import Job
from onefold.app.train.memory_table import MeasuredMemory
from onefold.config import precision_of
from onefold.engine.registry import engine_of
from onefold.planner.byte_executor import ACTIVATION, LOGITS, Moment
from onefold.planner.memory import Forecast, forecast
from onefold.planner.storages import Untraceable
from onefold.planner.trace import Trace, tokens_of, trace
from onefold.recipe import Recipe
from onefold.recording import page
from onefold.recording.meter import PeakMeter
from onefold.recording.page_data import report_of, view_of
from onefold.recording.recorder import Recording
from onefold.recording.report import Report
from onefold.recording.run_report import (
    Fact,
    MemoryPlan,
    PlanLines,
    PlannedMoment,
    StepView,
    Training,
)
from onefold.recording.step_record import TORCH
from onefold.recording.third_step import WARM_STEPS
from onefold.text import format_bytes
from onefold.tier.host import memory_nbytes, usable_cores, versions
from onefold.wire.world import World


@dataclass(frozen=True, slots=True)
class PredictedRun:
    """The predicted peak of rank 0; `by_kind` has the peak of each kind."""

    peak_nbytes: int  # on the device, activations included
    ledger_nbytes: int  # the peak without torch's own tensors
    phase: str
    unit: str
    by_kind: dict[str, int]
    verdict: str  # compares with the measured bytes, in a sentence
    timeline: tuple[PlannedMoment, ...]

    def as_plan(self, stage: int) -> PlanLines:
        """Return the plan of a report, which has the predicted line."""
        predicted = MemoryPlan(self.peak_nbytes, self.by_kind, self.timeline)
        return PlanLines(stage, predicted=predicted)


def loss_of_rows(outputs: Any) -> Tensor:
    """Compute the loss of the training loop, with labels of zero."""
    logits = getattr(outputs, "logits", outputs)
    del outputs
    labels = torch.zeros(logits.shape[:-1].numel(), dtype=torch.int64, device=logits.device)
    return F.cross_entropy(logits.flatten(0, 1).float(), labels, reduction="sum")


def trace_of(job: Job, module: nn.Module, world: World) -> Trace | None:
    """Trace one micro-batch of this rank, before `shard`; None if the module cannot be traced."""
    rows = own_rows(job.rows, world.rank, world.world_size)
    part = own_rows(rows.stop - rows.start, 0, job.accumulate)
    try:
        return trace(
            module, tokens_of(part.stop - part.start, job.seq), loss=loss_of_rows,
            precision=precision_of(job.precision), device_type=world.device.type,
            is_alone=world.world_size == 1 and not job.offload,
        )  # fmt: skip
    except Untraceable:
        return None


def predict(job: Job, recipe: Recipe, seen: Trace | None, report: Report) -> PredictedRun | None:
    """Forecast the bytes of rank 0, and compare them with its report."""
    if seen is None or report.steps == 0:
        return None
    first = 0 if recipe.shares else None  # of ranks with equal shares any stands for all
    predicted = forecast(seen, recipe, accumulate=job.accumulate, has_timeline=True, rank=first)
    moments = [
        PlannedMoment(moment.phase, _by_kind(moment), moment.unit) for moment in predicted.timeline
    ]
    by_kind: dict[str, int] = {}
    for moment in moments:
        for kind, nbytes in moment.nbytes_by_kind.items():
            by_kind[kind] = max(nbytes, by_kind.get(kind, 0))
    ledger = max(sum(m.nbytes_by_kind.values()) - m.nbytes_by_kind.get(TORCH, 0) for m in moments)
    return PredictedRun(
        predicted.memory_nbytes, ledger, predicted.peak.phase, predicted.peak.unit, by_kind,
        _peak_verdict(predicted, by_kind, report), _timeline(moments) if job.report else (),
    )  # fmt: skip


def _by_kind(moment: Moment) -> dict[str, int]:
    """Sum the bytes in memory by the kinds of a report, which has one kind for torch's tensors."""
    totals: dict[str, int] = {}
    for (kind, tier), nbytes in moment.held.items():
        if tier != "disk":
            name = TORCH if kind in (ACTIVATION, LOGITS, "batch", "buffer") else kind
            totals[name] = totals.get(name, 0) + nbytes
    return totals


def _peak_verdict(predicted: Forecast, by_kind: dict[str, int], report: Report) -> str:
    where = f"in {predicted.peak.phase}" + (
        f" of {predicted.peak.unit}" if predicted.peak.unit else ""
    )
    line = f"predicted with activations: {format_bytes(predicted.memory_nbytes)}, {where}; "
    compared = replace(report, predicted={**by_kind, "all": predicted.memory_nbytes}).differing()
    off = [
        f"{kind} {format_bytes(wanted)} but {format_bytes(got)}"
        for kind, (wanted, got) in compared.items()
        if kind != "all"
    ]
    if off:
        return f"{line}peaks more than 5 % off: {', '.join(off)}"
    return f"{line}the peak of each kind is within 5 %"


def _timeline(moments: Sequence[PlannedMoment]) -> tuple[PlannedMoment, ...]:
    """Return the highest moment of each run of one phase and unit, in order.

    Moments of no unit are left out: only the step has a phase without units.
    """
    kept = [moment for moment in moments if moment.unit or moment.phase == "step"]
    runs = groupby(kept, key=lambda moment: (moment.phase, moment.unit))
    return tuple(
        max(run, key=lambda moment: sum(moment.nbytes_by_kind.values())) for _, run in runs
    )


# what happened in a run


@dataclass(frozen=True, slots=True)
class Progress:
    """The progress of a run."""

    step: int  # steps taken
    loss: float  # nats per token, mean over ranks, of the last LOG_STEPS
    tokens_per_s: float
    seconds_left: float
    flops_per_s: float = 0.0  # of rank 0, 0.0 where not known
    mfu: float = 0.0  # of its GPU


class TrainObserver:
    """Receives the events of a run on one rank. This one ignores them."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None: ...

    def started(self, job: Job, corpus: Corpus, num_parameters: int, world_size: int) -> None: ...

    def noted(self, note: str) -> None: ...

    def resumed(self, resumed: Resumed) -> None: ...

    def stepped(self, progress: Progress) -> None: ...

    def trained(self) -> None: ...


@dataclass(frozen=True, slots=True)
class TrainResult:
    """The result of a run; the same on every rank."""

    first_step: int  # steps taken by the run that this one resumed
    losses: list[float]  # per step of this run, nats per token, mean over the global batch
    held_out: float  # nats per token, of the held-out files
    seconds: float  # of the steps alone
    tokens_per_s: float
    text: str  # generated; empty if none was asked for
    num_parameters: int
    offload: str  # the plan for the tiers of rank 0; empty: all on the device
    memory: list[MeasuredMemory]  # per rank
    stage0: dict[str, int]  # bytes by kind that each rank would hold at stage 0
    predicted: PredictedRun | None  # of rank 0; None on others, and without a trace
    report: str  # the page about the run; empty without one, or without a step


# the report


class RunRecorder:
    """Records three steps of a run: the third, the middle one and the last.

    It reads the peak of each step as well.
    """

    def __init__(self, job: Job, module: nn.Module, first: int, device: torch.device) -> None:
        self.job = job
        self.module = module
        second = min(first + WARM_STEPS, job.steps - 1)
        self.numbers = sorted({second, (second + job.steps) // 2, job.steps - 1})
        self.recordings: dict[int, Recording] = {}
        self.peaks = PeakMeter(device)
        if job.report is not None:
            engine_of(module).ledger.watch(self.peaks)

    @contextmanager
    def around_step(self, step: int) -> Iterator[None]:
        """Record the step in the block, if it is one of those."""
        if self.job.report is None:
            yield
            return
        if step in self.numbers:
            with onefold.record(self.module) as self.recordings[step]:
                yield
        else:
            yield
        self.peaks.end_step()

    def later(self, world: World) -> list[StepView]:
        """Return the recorded steps of all ranks but the first step, in order. A collective."""
        steps = list(self.recordings.items())[1:]
        own = [view_of(recording.step, number + 1) for number, recording in steps]
        ranks = world.group.gather(own)
        return [view for views in zip(*ranks, strict=True) for view in views]


def write_report(
    recorder: RunRecorder, world: World, result: TrainResult, step_seconds: Sequence[float]
) -> str:
    """Write the report on rank 0; return its path, or nothing without a step. A collective."""
    job = recorder.job
    if job.report is None or not recorder.recordings:
        return ""
    number, recording = next(iter(recorder.recordings.items()))
    records, later = world.group.gather(recording.step), recorder.later(world)
    if world.rank > 0:
        return world.group.gather("")[0]
    own = onefold.report(recorder.module)
    sizes = {"parameters": result.num_parameters, "ranks": world.world_size}
    about = {"model": job.model, **sizes, **_about(job), "stage": own.stage,
             "token": "byte"}  # fmt: skip
    if job.offload:
        about["planned"] = own.offload
    report = report_of(
        records, about=about, units=tuple(own.units), recorded=number + 1, others=later,
        resident=[memory.resident_peak for memory in result.memory],
        training=Training(
            result.first_step, tuple(result.losses), tuple(step_seconds), job.tokens_per_step,
            result.held_out, tuple(recorder.peaks.peaks),
        ),
        machine={
            "system": f"{platform.system()} {platform.machine()}",
            "device": str(world.device),
            "cores": usable_cores(),
            "memory_nbytes": memory_nbytes()[0],
        },
        versions=dict(versions()),
        plan=None if result.predicted is None else result.predicted.as_plan(own.stage),
        stage0=result.stage0, rates=known_rates(recorder.module),
    )  # fmt: skip
    return world.group.gather(str(page.write_report(job.report, report, records)))[0]


def known_rates(module: nn.Module) -> dict[str, float]:
    """Return FLOP/s and MFU of this rank in the last steps, where they are known."""
    rates = rates_of(engine_of(module))
    return {name: rate for name in ("model_flops_per_s", "mfu") if (rate := rates.get(name))}


def _about(job: Job) -> dict[str, Fact]:
    """Return the choices of a run, as the page shows them."""
    return {
        "stage": job.stage,
        "precision": job.precision or "the parameters' own",
        **({"dtype": job.dtype} if job.dtype else {}),
        **({"offload": job.offload} if job.offload else {}),
        "data": job.data or "Python's standard library",
        "steps": job.steps,
        "batch": f"{job.rows} rows of {job.seq} bytes",
        **({"micro-batches": job.accumulate} if job.accumulate > 1 else {}),
        **({"recompute": "every block"} if job.recompute else {}),
        **({"compile": "every block"} if job.compile else {}),
        "clip": job.clip or "off",
        "seed": job.seed,
    }
