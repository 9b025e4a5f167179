"""Predict the memory of a run: trace it before it starts, compare with its report at the end."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from onefold.app.train.corpus import own_rows
from onefold.app.train.job import Job
from onefold.config import precision_of
from onefold.planner.byte_hands import ACTIVATION, LOGITS, Moment
from onefold.planner.memory import Forecast, forecast
from onefold.planner.storages import Untraceable
from onefold.planner.trace import Trace, tokens_of, trace
from onefold.recipe import Recipe
from onefold.recording.report import Report
from onefold.recording.run_report import MemoryPlan, PlanLines, PlannedMoment
from onefold.recording.step_record import TORCH
from onefold.text import format_bytes
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
        )  # fmt: skip
    except Untraceable:
        return None


def predict(job: Job, recipe: Recipe, seen: Trace | None, report: Report) -> PredictedRun | None:
    """Forecast the bytes of rank 0, and compare them with its report."""
    if seen is None or report.steps == 0:
        return None
    first = 0 if recipe.shares else None  # of ranks with equal shares any stands for all
    found = forecast(seen, recipe, accumulate=job.accumulate, has_timeline=True, rank=first)
    moments = [PlannedMoment(each.phase, _by_kind(each), each.unit) for each in found.timeline]
    by_kind: dict[str, int] = {}
    for moment in moments:
        for kind, nbytes in moment.nbytes_by_kind.items():
            by_kind[kind] = max(nbytes, by_kind.get(kind, 0))
    ledger = max(sum(m.nbytes_by_kind.values()) - m.nbytes_by_kind.get(TORCH, 0) for m in moments)
    return PredictedRun(
        found.memory_nbytes, ledger, found.peak.phase, found.peak.unit, by_kind,
        _verdict(found, by_kind, report), _timeline(moments) if job.report else (),
    )  # fmt: skip


def _by_kind(moment: Moment) -> dict[str, int]:
    """Sum the bytes in memory by the kinds of a report, which has one kind for torch's tensors."""
    found: dict[str, int] = {}
    for (kind, tier), nbytes in moment.held.items():
        if tier != "disk":
            name = TORCH if kind in (ACTIVATION, LOGITS, "batch", "buffer") else kind
            found[name] = found.get(name, 0) + nbytes
    return found


def _verdict(found: Forecast, by_kind: dict[str, int], report: Report) -> str:
    where = f"in {found.peak.phase}" + (f" of {found.peak.unit}" if found.peak.unit else "")
    line = f"predicted with activations: {format_bytes(found.memory_nbytes)}, {where}; "
    compared = replace(report, predicted={**by_kind, "all": found.memory_nbytes}).differing()
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
    kept = [each for each in moments if each.unit or each.phase == "step"]
    runs = groupby(kept, key=lambda each: (each.phase, each.unit))
    return tuple(max(run, key=lambda each: sum(each.nbytes_by_kind.values())) for _, run in runs)
