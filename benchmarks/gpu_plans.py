"""Plans of the cases that benchmarks/gpu.py runs, against what was measured.

    python benchmarks/gpu_plans.py       the table of plans in docs/measurements/gpu.md

The host's rates are fitted to measured steps, never to the step that they then predict. Seconds of
an operation of torch come from steps of plain torch. Seconds of one of Onefold's Python calls come
from what steps of Onefold take beyond that: of all such steps but the row's own. Calls were counted
at the campaign's commit, on a CPU. Operations are those that the campaign, or the profile of the
same day, counted.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from contest.case import Case
from contest.results import RESULTS, write_block

import onefold
from onefold.layout.module_tree import ModuleTree
from onefold.layout.units import plan_units
from onefold.planner.clock_executor import PARAMETER_CALLS, UNIT_CALLS
from onefold.planner.machines import Machine, known_machines, machine_of
from onefold.planner.models.gpt import GPT
from onefold.planner.result import Plan
from onefold.planner.simulate import simulate

TIERS = {"onefold 2 cpu": "optimizer", "onefold 3 cpu": "cpu"}
STAGES = {f"onefold {stage}": stage for stage in range(4)} | {
    "onefold 2 cpu": 2,
    "onefold 3 cpu": 3,
}
"""Engines that a plan has words for."""


class HostRow(NamedTuple):
    """A step that the host bounds: its operations of torch, and Python calls of Onefold."""

    part: str
    what: str
    operations: int
    calls: int


PLAIN = (
    HostRow("host", "plain torch", 274, 0),  # 34.25 of each of 8 blocks
    HostRow("engines", "large, 1 rank, bf16, cuda: plain", 1156, 0),
)
OURS = (
    HostRow("host", "stage 0", 274, 7595),
    HostRow("host", "stage 3", 274, 7677),
    HostRow("engines", "large, 1 rank, bf16, cuda: onefold 0", 1039, 28471),
    HostRow("engines", "large, 1 rank, bf16, cuda: onefold 3", 1039, 28697),
)
CALLS_THEN = {False: 803, True: 1128}
"""Onefold's calls for a unit at the campaign's commit, in fp32 and in bf16; fewer since."""
WRITTEN = (
    ("engines", "large", "fp32", "onefold 0"), ("engines", "large", "fp32", "onefold 3"),
    ("engines", "large", "bf16", "onefold 0"), ("engines", "large", "bf16", "onefold 3"),
    ("offload", "1.3b", "bf16", "onefold 2 cpu"), ("offload", "1.3b", "bf16", "onefold 3 cpu"),
)  # fmt: skip


def plan_of_case(case: Case, engine: str, machine: str) -> Plan | None:
    """Plan a case; None for an engine that a plan has no words for.

    machine: of the planner's, on a GPU; empty: one that it does not know, or a CPU.
    """
    if engine not in STAGES:
        return None
    module = module_of(case)
    cluster: dict[str, Any] = {"ranks": case.ranks, "memory": "1TiB"}
    cluster |= {"machine": machine} if machine else {}
    cluster |= {"device_type": "cpu"} if case.device == "cpu" else {}
    return onefold.plan(
        module, cluster=cluster, seq=case.shape.positions, batch=case.shape.rows,
        accumulate=case.accumulate, precision="bf16" if case.dtype == "bf16" else None,
        stage=STAGES[engine], offload=TIERS.get(engine, "none"),
    )  # fmt: skip


def planned_rows(
    case: Case, engines: Iterable[str], gpu: str | None
) -> dict[str, dict[str, float]]:
    """Return columns of each engine's plan: GB of the device, and milliseconds on a known GPU."""
    found: dict[str, dict[str, float]] = {}
    for engine in engines:
        made = plan_of_case(case, engine, machine_named(gpu))
        if made is not None:
            row = made.taken
            seconds = {"plan_ms": 1e3 * row.step.seconds} if row.step is not None else {}
            found[engine] = {**seconds, "plan_gb": row.needs["device"] / 1e9}
    return found


def machine_named(gpu: str | None) -> str:
    """Return the planner's name of a GPU, such as "NVIDIA H200"; empty if it knows none."""
    words = (gpu or "").lower().split()
    return next((name for name in known_machines() if name.partition("-")[0] in words), "")


# the campaign that the page shows


def newest_campaign() -> dict[str, Any]:
    """Return the newest committed campaign without plans."""
    return json.loads((RESULTS / "2026-11-26-gpu-campaign.json").read_text())["parts"]


def measured_row(parts: dict[str, Any], part: str, what: str) -> dict[str, Any]:
    """Return a row of a campaign."""
    return next(row for row in parts[part]["rows"] if row["what"] == what)


def host_rates(parts: dict[str, Any], without: str = "") -> tuple[float, float]:
    """Return seconds of an operation and of a call, fitted without the row of that name."""

    def milliseconds(row: HostRow) -> float:
        return measured_row(parts, row.part, row.what)["step_ms"]

    plain = [row for row in PLAIN if row.what != without]
    operation = sum(map(milliseconds, plain)) / sum(row.operations for row in plain)
    ours = [row for row in OURS if row.what != without]
    beyond = sum(milliseconds(row) - operation * row.operations for row in ours)
    return 1e-3 * operation, 1e-3 * beyond / sum(row.calls for row in ours)


def step_ms(made: Plan, machine: Machine) -> float:
    """Return the milliseconds of the way that a plan takes, on another machine."""
    search, row = made.search, made.taken
    work = search.trace_of(row.rows).work(row.rows * search.tokens)
    return 1e3 * simulate(work, row.forecast.recipe, machine, search.conditions).seconds


def module_of(case: Case) -> GPT:
    """Return a case's model on meta."""
    with torch.device("meta"):
        return GPT(case.shape.config, case.shape.positions)


def calls_then(case: Case) -> int:
    """Return the calls of a step at the campaign's commit, when blocks of one rank were units."""
    units = plan_units(ModuleTree.from_root(module_of(case)))
    return CALLS_THEN[case.dtype == "bf16"] * len(units)


def calls_today(case: Case, made: Plan) -> int:
    """Return Onefold's calls of the step that was planned."""
    if made.taken.offload == "none":
        return PARAMETER_CALLS * sum(1 for _ in module_of(case).parameters())
    return UNIT_CALLS * len(made.search.one_row.units)


def plan_lines() -> list[str]:
    """Return the table of the page."""
    parts, h200 = newest_campaign(), machine_of("h200")
    lines = [
        "| case, one H200 | plan without the host, ms | plan, ms | plan today, ms | measured, ms "
        "| plan, GB | measured, GB |",
        "|---|---|---|---|---|---|---|",
    ]
    for part, size, dtype, engine in WRITTEN:
        case = Case(size, 1, dtype, device="cuda")
        what = f"{case.name}: {engine}"
        found, made = measured_row(parts, part, what), plan_of_case(case, engine, "h200")
        assert made is not None
        operation, call = host_rates(parts, without=what)
        fewer = calls_then(case) / calls_today(case, made)
        then = replace(h200, operation_seconds=operation, call_seconds=call * fewer)
        bare = replace(h200, operation_seconds=0.0, call_seconds=0.0)
        times = [step_ms(made, machine) for machine in (bare, then, h200)]
        cells = [f"{ms:.0f}" for ms in (*times, found["step_ms"])]
        cells += [f"{made.taken.needs['device'] / 1e9:.2f}", f"{found['device_gb']:.2f}"]
        lines.append(
            f"| {what.replace(', 1 rank', '').replace(', cuda', '')} | {' | '.join(cells)} |"
        )
    return lines


if __name__ == "__main__":
    from gpu import PAGE

    write_block(PAGE, "plans", plan_lines())
