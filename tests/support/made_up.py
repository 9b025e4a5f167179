"""A small report that nobody measured: round numbers, every kind, every stream, awkward names."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from onefold.layout.ledger import Kind
from onefold.recording.page_data import report_of
from onefold.recording.report import UnitLine
from onefold.recording.run_report import PlanLines, RunReport, Training
from onefold.recording.step_record import TORCH, Change, Sent, Series, SpanLine, StepRecord

MIB = 2**20
AWKWARD = "<script>alert('x')</script> & \"blocks\"]]>"
UNITS = ("embed", "blocks.0", "blocks.1", AWKWARD)
KINDS = [(str(kind), "device") for kind in Kind if kind != Kind.ACTIVATION] + [
    (TORCH, "device"), ("activation", "cpu"), ("staging", "cpu"), ("optimizer", "disk"),
]  # fmt: skip


def spans() -> list[SpanLine]:
    """100 ms: forward, backward, step, with what runs beside them."""
    made = [
        SpanLine("phase", "forward", "", 0.0, 0.04, 0),
        SpanLine("phase", "backward", "", 0.042, 0.09, 0),
        SpanLine("phase", "step", "", 0.092, 0.1, 0),
    ]
    for number, unit in enumerate(UNITS):
        start = 0.01 * number
        made += [
            SpanLine("gather", "gather", unit, start, start + 0.012 * (number % 2 + 1) / 2, MIB),
            SpanLine("compute", "wait", unit, start, start + 0.001, 0),
            SpanLine("compute", "unpack", unit, start + 0.001, start + 0.0015, 0),
            SpanLine("compute", "forward", unit, start + 0.0015, start + 0.0095, 0),
        ]
    for number, unit in enumerate(reversed(UNITS)):
        start = 0.042 + 0.012 * number
        made += [
            SpanLine("compute", "recompute", unit, start, start + 0.003, 0),
            SpanLine("compute", "backward", unit, start + 0.003, start + 0.0118, 0),
            SpanLine("compute", "average", unit, start + 0.005, start + 0.006, 0),
            SpanLine("reduce", "reduce_scatter", unit, start + 0.004, start + 0.014, 2 * MIB),
            SpanLine("tier", "fetch", unit, start, start + 0.002, MIB),
            SpanLine("tier", "flush", unit, start + 0.003, start + 0.005, MIB),
            SpanLine("background", "step", unit, start + 0.001, start + 0.009, 0),
            SpanLine("compute", "wait_step", unit, start + 0.007, start + 0.009, 0),
        ]
    made.append(SpanLine("novel", "twirl", "a verb from the future", 0.05, 0.06, 0))
    return sorted(made, key=lambda span: (span.start, -span.stop))


def record() -> StepRecord:
    """Every kind rises by a MiB a step, and falls again."""
    changes = [
        Change(0.001 * step, index, MIB * (1 + (index + step) % 7))
        for step in range(0, 100, 4)
        for index in range(len(KINDS))
    ]
    series = tuple(Series(*key) for key in KINDS)
    sent = {"gather": Sent(8, 4 * MIB), "reduce_scatter": Sent(4, 8 * MIB), AWKWARD: Sent(1, 3)}
    return StepRecord(0, 2, 1.8e9, 0.1, tuple(spans()), series, tuple(changes), sent)


def report(*records: StepRecord, **changes: Any) -> RunReport:
    """Two ranks, forty steps; `records`: those of the ranks."""
    own = record()
    made = report_of(
        records or (own, replace(own, rank=1, seconds=0.101)),
        about={"model": AWKWARD, "parameters": 12_345_678, "stage": 3, "ranks": 2},
        recorded=3,
        resident=(2 * 2**30, 3 * 2**30),
        training=Training(
            0, tuple(5 / (1 + step / 9) for step in range(40)), (0.2, *[0.1] * 39), 1024, 1.5
        ),
        units=tuple(UnitLine(unit, 2, 3 * 2**18, 3 * MIB) for unit in UNITS),
        machine={"system": "Linux", "cores": 2, "memory_nbytes": 24 * 2**30},
        versions={"onefold": "0.1.0"},
    )
    return replace(made, **{"written_at": "2026-01-31 12:00:00 UTC", **changes})


def plan() -> PlanLines | None:
    """A plan with a prediction, as JSON gives it."""
    return RunReport.parse({**report().as_json(), "plan": plan_json()}).plan


def plan_json() -> dict[str, Any]:
    """The same as JSON."""
    timeline = [
        {"phase": phase, "unit": unit, "nbytes_by_kind": {"weight": 20 * MIB, "torch": n * MIB}}
        for phase, units in (("forward", UNITS), ("backward", UNITS[::-1]))
        for n, unit in enumerate(units)
    ]
    timeline.append({"phase": "step", "unit": None, "nbytes_by_kind": {"weight": 21 * MIB}})
    timeline.append({"phase": "forward", "unit": "nowhere", "nbytes_by_kind": {"weight": 1}})
    return {
        "stage": 3,
        "predicted": {
            "peak_nbytes": 40 * MIB,
            "by_kind": {"weight": 20 * MIB, "torch": 3 * MIB, "tomorrow": 1},
            "timeline": timeline,
        },
    }
