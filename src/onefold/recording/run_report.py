"""The data of a report: the value behind `report.json`, from which the page is made.

    {"format": 1,
     "written_at": "2026-01-31 12:00:00 UTC",
     "about":    {name: text or number}          the run: model, stage, ranks, ...
     "recorded": 3                               which step was recorded, from 1; null if unknown
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
     "plan":     {"stage",
                  "predicted": {"peak_nbytes", "by_kind": {kind: bytes},
                                "timeline": [{"phase", "unit", "nbytes_by_kind"}]}} or null}

Numbers that JSON cannot express (a loss that is not finite) are null. `format` grows with a change
that an older reader would misunderstand, not with a new member.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import MISSING, asdict, dataclass, field, fields, is_dataclass, replace
from datetime import UTC, datetime
from functools import cache
from math import isfinite
from types import NoneType, UnionType
from typing import Any, get_args, get_origin, get_type_hints

from onefold.recording.report import UnitLine
from onefold.recording.step_record import StepRecord

FORMAT = 1

Fact = str | int | float
"""A value that a page shows beside its name."""


@dataclass(frozen=True, slots=True)
class RankLine:
    """The recorded step on one rank: seconds and bytes."""

    rank: int
    seconds: float
    compute_s: float  # forward, backward and optimizer step, without waits
    wait_s: float  # the training thread waited for a collective or a background step
    sent_nbytes: int
    peak_by_tier: dict[str, int]  # in the step: the peak of all kinds together
    peak_by_kind: dict[str, int]
    resident_peak_nbytes: int = 0  # of the process since it began; 0 if unknown

    @property
    def peak_nbytes(self) -> int:
        """The peak on the device that computes."""
        return self.peak_by_tier.get("device", 0)

    @staticmethod
    def of(record: StepRecord, resident_peak_nbytes: int = 0) -> RankLine:
        """Sum up a record."""
        peaks: dict[str, int] = {}
        for series, nbytes in zip(record.series, record.memory.nbytes, strict=True):
            peaks[series.kind] = peaks.get(series.kind, 0) + max(nbytes, default=0)
        wait = record.total("compute", "wait") + record.total("compute", "wait_step")
        busy = record.total("compute") + record.total("phase", "step")  # no unit computes in a step
        sent = sum(each.nbytes for each in record.sent.values())
        return RankLine(
            record.rank, record.seconds, busy - wait, wait, sent, record.peaks, peaks,
            resident_peak_nbytes,
        )  # fmt: skip


@dataclass(frozen=True, slots=True)
class Training:
    """The course of a run, step by step."""

    first_step: int  # steps done before this run
    losses: tuple[float | None, ...]  # nats per token
    seconds: tuple[float, ...]  # of each step
    tokens_per_step: int
    held_out: float | None = None  # nats per token; None or NaN if not measured

    @property
    def speeds(self) -> list[float]:
        """Tokens per second of each step."""
        return [self.tokens_per_step / max(seconds, 1e-9) for seconds in self.seconds]


@dataclass(frozen=True, slots=True)
class PlannedMoment:
    """Predicted bytes while a unit computes in a phase, or in a phase of no unit."""

    phase: str
    nbytes_by_kind: dict[str, int]
    unit: str = ""


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """Predicted peaks, and the predicted bytes of each moment."""

    peak_nbytes: int | None = None
    by_kind: dict[str, int] = field(default_factory=dict[str, int])
    timeline: tuple[PlannedMoment, ...] = ()


@dataclass(frozen=True, slots=True)
class PlanLines:
    """A plan as a report shows it: the chosen stage and the predicted memory."""

    stage: Fact | None = None
    predicted: MemoryPlan = field(default_factory=MemoryPlan)


@dataclass(frozen=True, slots=True)
class RunReport:
    """The contents of a page."""

    about: dict[str, Fact]
    step: StepRecord
    ranks: tuple[RankLine, ...]
    recorded: int | None = None
    training: Training | None = None
    units: tuple[UnitLine, ...] = ()
    machine: dict[str, Fact] = field(default_factory=dict[str, Fact])
    versions: dict[str, Fact] = field(default_factory=dict[str, Fact])
    plan: PlanLines | None = None
    written_at: str = ""

    @staticmethod
    def of(
        records: Sequence[StepRecord], *, about: Mapping[str, Fact],
        units: Sequence[UnitLine] = (), recorded: int | None = None, resident: Sequence[int] = (),
    ) -> RunReport:  # fmt: skip
        """Report on one record a rank, of which the page draws the first.

        `resident` is the peak of each rank's process in bytes, where it is known.
        """
        known = [*resident, *[0] * len(records)]
        lines = tuple(map(RankLine.of, records, known))
        now = datetime.now(UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
        return RunReport(
            dict(about), records[0], lines, recorded, units=tuple(units), written_at=now
        )

    def as_json(self) -> dict[str, Any]:
        """Convert to plain values in the form above."""
        data: dict[str, Any] = {"format": FORMAT, **asdict(self)}
        data["step"]["changes"] = [[c.time, c.series, c.nbytes] for c in self.step.changes]
        return _plain(data)

    @staticmethod
    def parse(data: Mapping[str, Any]) -> RunReport:
        """Convert from JSON. Damage raises a `KeyError`, `TypeError`, `ValueError` or the like."""
        report: RunReport = _typed(RunReport, data)
        changes = sorted(report.step.changes, key=lambda change: change.time)
        return replace(report, step=replace(report.step, changes=tuple(changes)))


def _typed(wanted: Any, value: Any) -> Any:
    """Convert a JSON value to a type: a dataclass, tuple, dict, union or scalar."""
    arguments = get_args(wanted)
    if is_dataclass(wanted):
        return _members(wanted, value)
    if isinstance(wanted, UnionType):
        if value is None and NoneType in arguments:
            return None
        return value if isinstance(value, arguments) else _typed(arguments[0], value)
    if get_origin(wanted) is tuple:
        return tuple(_typed(arguments[0], each) for each in value)
    if get_origin(wanted) is dict:
        return {str(name): _typed(arguments[1], each) for name, each in value.items()}
    return wanted(value)


def _members(wanted: Any, value: Any) -> Any:
    """Convert an object, or the list of its members. An absent or null member has its default."""
    types = _types(wanted)
    given = dict(zip(types, value, strict=True)) if isinstance(value, list) else value
    optional = {each.name for each in fields(wanted)
                if each.default is not MISSING or each.default_factory is not MISSING}  # fmt: skip
    return wanted(**{
        name: _typed(kind, given[name])
        for name, kind in types.items()
        if name not in optional or given.get(name) is not None
    })  # fmt: skip


@cache
def _types(wanted: type) -> dict[str, Any]:
    return get_type_hints(wanted)


def _plain(value: Any) -> Any:
    """Replace numbers that JSON cannot express by None, and round times to 0.1 us."""
    if isinstance(value, float):
        return round(value, 7) if isfinite(value) else None
    if isinstance(value, dict):
        return {key: _plain(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(each) for each in value]
    return value
