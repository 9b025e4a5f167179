"""What a report is made of: the value behind `report.json`, which the page is drawn from alone.

    {"format": 1,
     "written_at": "2026-01-31 12:00:00 UTC",
     "about":    {name: text or number}          what was run: model, stage, ranks, ...
     "recorded": 3                               which step `step` is, from 1; null if unknown
     "step":     {"rank", "world_size", "began_at", "seconds",
                  "spans":   [{"stream", "verb", "unit", "start", "stop", "nbytes"}]   seconds
                  "series":  [{"kind", "tier"}],
                  "changes": [[seconds, index of a series, bytes from then on]],
                  "sent":    {collective: {"calls", "nbytes"}}},
     "ranks":    [{"rank", "seconds", "compute_s", "wait_s", "sent_nbytes",
                   "peak_by_tier": {tier: bytes at once}, "peak_by_kind": {kind: bytes},
                   "resident_peak_nbytes"}]        of the recorded step; the last of the process
     "training": {"first_step", "losses": [nats], "seconds": [per step], "tokens_per_step",
                  "held_out"} or null
     "units":    [{"name", "num_parameters", "numel", "nbytes"}],
     "machine":  {name: text or number}, "versions": {name: text},
     "plan":     {"stage", "table": [{column: cell}],
                  "predicted": {"peak_nbytes", "by_kind": {kind: bytes},
                                "timeline": [{"phase", "unit", "nbytes_by_kind"}]}} or null}

Numbers that JSON cannot spell (a loss that is not finite) are null. `format` grows with a change
that an older reader would misunderstand; a new member does not count.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from math import isfinite, nan
from typing import Any

from onefold.recording.report import UnitLine
from onefold.recording.step_record import Change, Sent, Series, SpanLine, StepRecord

FORMAT = 1

Fact = str | int | float
"""Something that is told with its name."""


@dataclass(frozen=True, slots=True)
class RankLine:
    """The recorded step on one rank: seconds and bytes."""

    rank: int
    seconds: float
    compute_s: float  # units' forwards and backwards, and the optimizer, without waits
    wait_s: float  # the training thread stood still, for a collective or a step in the background
    sent_nbytes: int
    peak_by_tier: dict[str, int]  # in the step: the most that was held at once
    peak_by_kind: dict[str, int]
    resident_peak_nbytes: int = 0  # of the process since it began; 0 if unknown

    @property
    def peak_nbytes(self) -> int:
        """In the memory of the device that computes."""
        return self.peak_by_tier.get("device", 0)

    @staticmethod
    def of(record: StepRecord, resident_peak_nbytes: int = 0) -> RankLine:
        """Sums of a record."""
        memory = record.memory
        peaks: dict[str, int] = {}
        for series, nbytes in zip(record.series, memory.nbytes, strict=True):
            peaks[series.kind] = peaks.get(series.kind, 0) + max(nbytes, default=0)
        wait = record.total("compute", "wait") + record.total("compute", "await_step")
        busy = record.total("compute") + _step_seconds(record)
        return RankLine(
            record.rank, record.seconds, busy - wait, wait,
            sum(sent.nbytes for sent in record.sent.values()), record.peaks, peaks,
            resident_peak_nbytes,
        )  # fmt: skip


@dataclass(frozen=True, slots=True)
class Training:
    """How a whole run went, step by step."""

    first_step: int  # steps that were done before this run
    losses: tuple[float, ...]  # nats per token
    seconds: tuple[float, ...]  # of each step
    tokens_per_step: int
    held_out: float  # nats per token; not a number if it was not measured


@dataclass(frozen=True, slots=True)
class RunReport:
    """All that a page shows."""

    about: dict[str, Fact]
    recorded: int | None
    step: StepRecord
    ranks: tuple[RankLine, ...]
    training: Training | None = None
    units: tuple[UnitLine, ...] = ()
    machine: dict[str, Fact] = field(default_factory=dict[str, Fact])
    versions: dict[str, Fact] = field(default_factory=dict[str, Fact])
    plan: dict[str, Any] | None = None
    written_at: str = ""

    @staticmethod
    def of(
        records: Sequence[StepRecord], *, about: Mapping[str, Fact],
        units: Sequence[UnitLine] = (), recorded: int | None = None,
        resident: Sequence[int] = (),
    ) -> RunReport:  # fmt: skip
        """The first of `records` is drawn; of every one there is a line. `resident`: bytes each."""
        known = [*resident, *[0] * len(records)]
        lines = [RankLine.of(each, known[number]) for number, each in enumerate(records)]
        now = datetime.now(UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
        return RunReport(
            dict(about), recorded, records[0], tuple(lines), units=tuple(units), written_at=now
        )

    def as_json(self) -> dict[str, Any]:
        """Plain values, in the form above."""
        told: dict[str, Any] = {"format": FORMAT, **asdict(self)}
        told["step"]["changes"] = [[c.time, c.series, c.nbytes] for c in self.step.changes]
        plain: dict[str, Any] = _plain(told)
        return plain

    @staticmethod
    def parse(told: Mapping[str, Any]) -> RunReport:
        """The same from JSON. Raises `KeyError`, `TypeError` or `ValueError` if it is damaged."""
        training = told.get("training")
        plan = told.get("plan")
        return RunReport(
            about=_facts(told["about"]),
            recorded=None if told.get("recorded") is None else int(told["recorded"]),
            step=_step(told["step"]),
            ranks=tuple(_rank(each) for each in told["ranks"]),
            training=None if training is None else _training(training),
            units=tuple(
                UnitLine(str(u["name"]), int(u["num_parameters"]), int(u["numel"]),
                         int(u["nbytes"])) for u in told.get("units", [])
            ),
            machine=_facts(told.get("machine", {})),
            versions=_facts(told.get("versions", {})),
            plan=None if plan is None else _plan(plan),
            written_at=str(told.get("written_at", "")),
        )  # fmt: skip


def _step_seconds(record: StepRecord) -> float:
    """Seconds of the optimizer's step: no unit computes in it."""
    return record.total("phase", "step")


def _step(told: Mapping[str, Any]) -> StepRecord:
    series = tuple(Series(str(each["kind"]), str(each["tier"])) for each in told["series"])
    changes = [Change(float(time), int(n), int(nbytes)) for time, n, nbytes in told["changes"]]
    if any(not 0 <= change.series < len(series) for change in changes):
        raise ValueError("a change of a series that is not there")
    return StepRecord(
        rank=int(told["rank"]),
        world_size=int(told["world_size"]),
        began_at=float(told["began_at"]),
        seconds=_positive(told["seconds"]),
        spans=tuple(
            SpanLine(
                str(s["stream"]), str(s["verb"]), str(s["unit"]), float(s["start"]),
                float(s["stop"]), int(s["nbytes"]),
            )
            for s in told["spans"]
        ),
        series=series,
        changes=tuple(sorted(changes, key=lambda change: change.time)),
        sent={
            str(name): Sent(int(sent["calls"]), int(sent["nbytes"]))
            for name, sent in told["sent"].items()
        },
    )  # fmt: skip


def _rank(told: Mapping[str, Any]) -> RankLine:
    return RankLine(
        int(told["rank"]), float(told["seconds"]), float(told["compute_s"]),
        float(told["wait_s"]), int(told["sent_nbytes"]), _counts(told["peak_by_tier"]),
        _counts(told["peak_by_kind"]),
        int(told.get("resident_peak_nbytes", 0)),
    )  # fmt: skip


def _training(told: Mapping[str, Any]) -> Training:
    return Training(
        int(told["first_step"]),
        tuple(_number(loss) for loss in told["losses"]),
        tuple(float(seconds) for seconds in told["seconds"]),
        int(told["tokens_per_step"]),
        _number(told.get("held_out")),
    )


def _plan(told: Mapping[str, Any]) -> dict[str, Any]:
    """A plan as it is; what a page reads of it is looked at now."""
    predicted = told.get("predicted") or {}
    timeline = [
        {
            "phase": str(entry["phase"]),
            "unit": str(entry.get("unit") or ""),
            "nbytes_by_kind": _counts(entry["nbytes_by_kind"]),
        }
        for entry in predicted.get("timeline") or []
    ]
    kept = {**predicted, "by_kind": _counts(predicted.get("by_kind") or {}), "timeline": timeline}
    if kept.get("peak_nbytes") is not None:
        kept["peak_nbytes"] = int(kept["peak_nbytes"])
    return {**told, "table": [dict(row) for row in told.get("table") or []], "predicted": kept}


def _facts(told: Mapping[str, Any]) -> dict[str, Fact]:
    return {
        str(name): fact if isinstance(fact, int | float) else str(fact)
        for name, fact in told.items()
    }


def _counts(told: Mapping[str, Any]) -> dict[str, int]:
    return {str(name): int(nbytes) for name, nbytes in told.items()}


def _number(told: float | None) -> float:
    return nan if told is None else float(told)


def _positive(told: float) -> float:
    if not (isfinite(told) and told > 0):
        raise ValueError(f"a step of {told} seconds")
    return float(told)


def _plain(value: Any) -> Any:
    """The same with None for numbers that JSON cannot spell, and times to 0.1 us."""
    if isinstance(value, float):
        return round(value, 7) if isfinite(value) else None
    if isinstance(value, dict):
        return {key: _plain(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(each) for each in value]
    return value
