"""The data of a report: the value behind `report.json`, from which the page is made.

    {"format": 1,
     "written_at": "2026-01-31 12:00:00 UTC",
     "about":    {name: text or number}          the run: model, stage, ranks, ...
     "world_size": 2,
     "views":    [{"recorded": 3,                  which step was recorded, from 1; null if unknown
                   "line": {"rank", "seconds", "compute_s", "wait_s", "sent_nbytes",
                            "peak_by_tier": {tier: bytes at once}, "peak_by_kind": {kind: bytes},
                            "at_peak": {kind: bytes},      on the device, at its peak
                            "resident_peak_nbytes"},       of the process since it began
                   and what the page draws: "sent", "memory", "lanes", "times", "idle", "modules"}]
                                                   by step and rank, first those of one step
     "stage0":   {kind: bytes}                     the states that a rank would hold at stage 0
     "training": {"first_step", "losses": [nats], "seconds": [per step], "tokens_per_step",
                  "held_out", "peaks": [bytes per step]} or null
     "units":    [{"name", "num_parameters", "numel", "nbytes"}],
     "machine":  {name: text or number}, "versions": {name: text},
     "rates":    {"model_flops_per_s", "mfu"}      of a rank in the last steps, where they are known
     "plan":     {"stage",
                  "predicted": {"peak_nbytes", "by_kind": {kind: bytes},
                                "timeline": [{"phase", "unit", "nbytes_by_kind"}]}} or null}

Spans and bytes of whole steps are in `trace.json`. Numbers that JSON cannot express (a loss that is
not finite) are null. `format` grows with a change that an older reader would misunderstand, not
with a new member.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import MISSING, asdict, dataclass, field, fields, is_dataclass
from functools import cache
from types import NoneType, UnionType
from typing import Any, get_args, get_origin, get_type_hints

from onefold.recording.report import UnitLine
from onefold.recording.step_record import StepRecord
from onefold.text import finite, format_share

FORMAT = 1

SMALL_WAIT = 0.05
"""Below this share of a step, waits are not worth a diagnosis."""

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
    at_peak: dict[str, int] = field(default_factory=dict[str, int])  # on the device, at its peak

    @property
    def wait_share(self) -> float:
        """The share of the step in which the training thread waited."""
        return self.wait_s / max(self.seconds, 1e-9)

    @property
    def peak_nbytes(self) -> int:
        """The peak on the device that computes."""
        return self.peak_by_tier.get("device", 0)

    @staticmethod
    def from_record(record: StepRecord, resident_peak_nbytes: int = 0) -> RankLine:
        """Sum up a record."""
        peaks, memory = dict[str, int](), record.memory
        for series, nbytes in zip(record.series, memory.nbytes, strict=True):
            peaks[series.kind] = peaks.get(series.kind, 0) + max(nbytes, default=0)
        device = record.indices("device")
        totals = memory.totals_of(device)
        highest = totals.index(max(totals)) if totals else 0
        at_peak = {record.series[i].kind: memory.nbytes[i][highest] for i in device
                   if totals and memory.nbytes[i][highest]}  # fmt: skip
        wait = record.total("compute", "wait") + record.total("compute", "wait_step")
        busy = record.total("compute") + record.total("phase", "step")  # no unit computes in a step
        sent = sum(collective.nbytes for collective in record.sent.values())
        return RankLine(
            record.rank, record.seconds, busy - wait, wait, sent, record.peaks, peaks,
            resident_peak_nbytes, at_peak,
        )  # fmt: skip


@dataclass(frozen=True, slots=True)
class StepView:
    """One recorded step of one rank: its sums, and what the page draws (`page_data.view_of`).

    Members without a type of their own are lists as the page's script reads them, bounded in size.
    """

    recorded: int | None
    line: RankLine
    sent: dict[str, Any]  # collective: calls, nbytes
    memory: tuple[Any, ...]  # tier, kinds, times, layers, peaks
    lanes: tuple[Any, ...]  # name, stream, spans
    times: tuple[Any, ...]  # verb, stream, spans, seconds, bytes
    idle: dict[str, float]  # seconds that are neither busy nor waiting, by their place
    modules: tuple[Any, ...]  # name, number of modules, bytes


@dataclass(frozen=True, slots=True)
class Training:
    """The course of a run, step by step."""

    first_step: int  # steps done before this run
    losses: tuple[float | None, ...]  # nats per token
    seconds: tuple[float, ...]  # of each step
    tokens_per_step: int
    held_out: float | None = None  # nats per token; None or NaN if not measured
    peaks: tuple[int, ...] = ()  # bytes of torch's allocator at their highest in each step

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
    views: tuple[StepView, ...]
    world_size: int
    training: Training | None = None
    units: tuple[UnitLine, ...] = ()
    machine: dict[str, Fact] = field(default_factory=dict[str, Fact])
    versions: dict[str, Fact] = field(default_factory=dict[str, Fact])
    plan: PlanLines | None = None
    written_at: str = ""
    stage0: dict[str, int] = field(default_factory=dict[str, int])
    rates: dict[str, float] = field(default_factory=dict[str, float])

    @property
    def ranks(self) -> list[RankLine]:
        """The sums of all ranks in the step that the page opens."""
        recorded = self.views[0].recorded
        return [view.line for view in self.views if view.recorded == recorded]

    @property
    def title(self) -> str:
        """The model, its stage and the number of ranks."""
        ranks = self.world_size
        model, stage = self.about.get("model", "one training step"), self.about.get("stage")
        over = "1 rank" if ranks == 1 else f"{ranks:,d} ranks"
        return f"{model}, {over}" if stage is None else f"{model}: stage {stage} over {over}"

    @property
    def _waits_most(self) -> RankLine:
        """The line of the rank that waits for the largest share of the step."""
        return max(self.ranks, key=lambda line: line.wait_share)

    @property
    def opens(self) -> int:
        """The number of the view that the page opens: of the rank that the diagnosis is about."""
        most = self._waits_most
        if most.wait_share < SMALL_WAIT:
            return 0
        return next(i for i, view in enumerate(self.views) if view.line is most)

    @property
    def diagnosis(self) -> str:
        """Say in a sentence how long the step waits, and for whom."""
        most = self._waits_most
        least = min(self.ranks, key=lambda line: line.wait_share)
        share = format_share(most.wait_share)
        if most.wait_share < SMALL_WAIT:
            return f"The step computes: at most {share} of it waits."
        behind = sum(row[3] for row in self.views[self.opens].times if row[0] == "wait_step")
        if behind > most.wait_s / 2:
            return f"{share} of the step waits for optimizer steps on another tier."
        if most.wait_s - least.wait_s > most.wait_s / 2:
            return f"{share} of the step waits: rank {most.rank} for rank {least.rank}."
        who = "every rank" if len(self.ranks) > 1 else f"rank {most.rank}"
        return f"{share} of the step waits: {who} for messages of the others."

    def as_json(self) -> dict[str, Any]:
        """Convert to plain values in the form above."""
        return {"format": FORMAT, **finite(asdict(self), digits=7)}  # times to 0.1 us

    @staticmethod
    def parse(data: Mapping[str, Any]) -> RunReport:
        """Convert from JSON. Damage raises a `KeyError`, `TypeError`, `ValueError` or the like."""
        report: RunReport = _typed(RunReport, data)
        if not report.views:
            raise ValueError("no step")
        return report


def _typed(wanted: Any, value: Any) -> Any:
    """Convert a JSON value to a type: a dataclass, tuple, dict, union or scalar."""
    arguments = get_args(wanted)
    if wanted is Any:
        return value
    if is_dataclass(wanted):
        return _members(wanted, value)
    if isinstance(wanted, UnionType):
        if value is None and NoneType in arguments:
            return None
        return value if isinstance(value, arguments) else _typed(arguments[0], value)
    if get_origin(wanted) is tuple:
        return tuple(_typed(arguments[0], part) for part in value)
    if get_origin(wanted) is dict:
        return {str(name): _typed(arguments[1], part) for name, part in value.items()}
    return wanted(value)


def _members(wanted: Any, members: Any) -> Any:
    """Convert an object. An absent or null member has its default."""
    types = _types(wanted)
    optional = {member.name for member in fields(wanted)
                if (member.default, member.default_factory) != (MISSING, MISSING)}  # fmt: skip
    return wanted(**{
        name: _typed(kind, members[name])
        for name, kind in types.items()
        if name not in optional or members.get(name) is not None
    })  # fmt: skip


@cache
def _types(wanted: type) -> dict[str, Any]:
    return get_type_hints(wanted)
