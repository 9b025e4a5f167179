"""Predicted beside measured step times on this machine: one calibration, then everything else.

    python benchmarks/step_time.py                      all cases, 25 minutes; writes the page
    python benchmarks/step_time.py --only "llama"       the cases whose names have that in them
    python benchmarks/step_time.py --page               only write docs/measurements/time.md again

The machine is calibrated once, at a model that is not among those that are then measured. Every
round of a case starts fresh ranks that hold the module at all four stages, and these take turns:
where memory comes to lie makes one of two equal stages faster, as long as its process lives. What
is compared is the median of the rounds.

A virtual machine's speed may drift by tens of percent within minutes. So every round also takes the
calibrated micro-batch anew, and predictions are scaled by how fast that is now.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import replace
from datetime import date
from itertools import combinations
from pathlib import Path
from statistics import median
from typing import Any

from contest.results import RESULTS, provenance, rounded
from contest.world import run_ranks
from step_time_cases import CALIBRATED, CASES, ROWS, SEQ, STAGES, Case, train

from onefold.config import stage_of
from onefold.planner.calibration import Calibration, Sample, calibrate
from onefold.planner.costs import Conditions
from onefold.planner.simulate import simulate
from onefold.planner.trace import tokens_of, trace
from onefold.planner.work import ModelWork
from onefold.recipe import Recipe

DOCS = Path(__file__).parent.parent / "docs" / "measurements" / "time.md"
BEGIN, END = "<!-- steps: begin -->", "<!-- steps: end -->"
SAMPLE = Sample(model=CALIBRATED, seq=SEQ, rows=ROWS)
WORLDS = (1, 2)
GOAL = 0.15
TIE = 0.03
"""Stages whose steps differ by less are as good as each other."""
NUM_WORST = 8


def predict(case: Case, calibration: Calibration) -> dict[int, float]:
    """Seconds of a step at each stage, from a trace without values and the calibration."""
    work = _work(case)
    machine = calibration.machine(case.ranks)
    conditions = Conditions(
        accumulate=case.accumulate, dtype="fp32", weight_itemsize=4, grad_itemsize=4
    )
    recipe = Recipe(world_size=case.ranks, local_world_size=case.ranks)
    recipes = {stage: replace(recipe, stage=stage_of(stage)) for stage in STAGES}
    return {
        stage: simulate(work, each, machine, conditions).seconds for stage, each in recipes.items()
    }


def _work(case: Case) -> ModelWork:
    return trace(case.build(), tokens_of(ROWS, SEQ)).work(ROWS * SEQ)


def measure(case: Case, rounds: int) -> tuple[list[dict[str, Any]], float]:
    """One entry a stage: the seconds of every round, and the processor seconds of one rank; and
    the seconds of the calibrated micro-batch.
    """
    found = [run_ranks(case.ranks, train, case, number) for number in range(rounds)]
    stages = [
        {
            "stage": stage,
            "seconds": [ranks[0]["seconds"][stage] for ranks in found],
            "cpu_seconds": median(
                sum(each["cpu_seconds"][stage] for each in ranks) / len(ranks) for ranks in found
            ),
        }
        for stage in STAGES
    ]
    return stages, median(ranks[0]["reference"] for ranks in found)


def slower_now(calibration: Calibration, ranks: int, reference: float) -> float:
    """How many times as long the calibrated micro-batch takes as when it was calibrated."""
    at = max((each for each in calibration.speeds if each.ranks <= ranks), key=lambda s: s.ranks)
    return reference / (at.seconds * ranks / at.ranks)


def ranking(entries: Sequence[dict[str, Any]]) -> tuple[int, int]:
    """Pairs of stages that differ, and how many of them are predicted in the same order.

    They differ if the same one is faster in every round, and by more than `TIE`.
    """
    told = right = 0
    for a, b in combinations(entries, 2):
        ratios = [mine / its for mine, its in zip(a["seconds"], b["seconds"], strict=True)]
        is_slower = median(ratios) > 1
        is_clear = abs(median(ratios) - 1) > TIE
        if is_clear and all((ratio > 1) == is_slower for ratio in ratios):
            told += 1
            right += a["predicted"] != b["predicted"] and (
                (a["predicted"] > b["predicted"]) == is_slower
            )
    return told, right


def had(result: dict[str, Any]) -> float:
    """The share of the cores' time that the ranks had: below 0.9 somebody else was at work too."""
    cores = result["machine"]["cores"]
    shares = [
        entry["cpu_seconds"] * case["ranks"] / median(entry["seconds"]) / cores
        for case in result["cases"]
        if case["ranks"] >= cores
        for entry in case["stages"]
    ]
    return median(shares) if shares else 1.0


def error_of(entry: dict[str, Any]) -> float:
    """Predicted against the median of the rounds."""
    return entry["predicted"] / median(entry["seconds"]) - 1


# the page


def page(result: dict[str, Any]) -> list[str]:
    """What docs/measurements/time.md says between its marks."""
    cases = result["cases"]
    entries = [entry for case in cases for entry in case["stages"]]
    errors = [abs(error_of(entry)) for entry in entries]
    within = sum(error <= GOAL for error in errors)
    ranked = [ranking(case["stages"]) for case in cases if case["ranks"] > 1]
    right = sum(told == agreed for told, agreed in ranked)
    machine = result["machine"]
    slower = [case["slower"] for case in cases]
    return [
        f"{result['date']}, {machine['model name']}, {machine['cores']} cores, torch "
        f"{result['versions']['torch']}; {result['rounds']} rounds, by `{result['command']}`. With "
        f"as many ranks as cores or more, they had {had(result):.0%} of the cores' time. Beside "
        f"the cases the calibrated micro-batch took {min(slower):.2f} to {max(slower):.2f} times "
        "as long as when it was calibrated; predictions are scaled by that.", "",
        *[f"> {line.strip()}" for line in Calibration.of(result["calibration"]).lines()], "",
        f"**{within} of {len(entries)} step times within {GOAL:.0%}**, the median error is "
        f"{median(errors):.1%}, the largest {max(errors):.0%}. **Stages ranked right in {right} of "
        f"{len(ranked)} cases** of more than one rank (a lone rank does the same at every stage), "
        f"by {sum(t for t, _ in ranked)} pairs that are not ties, of which "
        f"{sum(r for _, r in ranked)} are in order.", "",
        *_summary(cases), "",
        "Seconds of a step, measured, and how far off the prediction is:", "",
        "| case | stage 0 | stage 1 | stage 2 | stage 3 | pairs in order |",
        "|---|---|---|---|---|---|",
        *(_row(case) for case in cases), "",
        "The furthest off, with the seconds that one rank computed (less than the wall's where it "
        "waited):", "",
        "| case | stage | rounds, s | computed | predicted | error |", "|---|---|---|---|---|---|",
        *_worst(cases),
    ]  # fmt: skip


def _summary(cases: Sequence[dict[str, Any]]) -> list[str]:
    lines = [
        "| ranks | step times | within 15 % | median error | largest |",
        "|---|---|---|---|---|",
    ]
    for ranks in sorted({case["ranks"] for case in cases}):
        errors = [
            error_of(entry) for case in cases if case["ranks"] == ranks for entry in case["stages"]
        ]
        within = sum(abs(error) <= GOAL for error in errors)
        largest = max(errors, key=abs)
        lines.append(f"| {ranks} | {len(errors)} | {within} | {median(map(abs, errors)):.1%} "
                     f"| {largest:+.0%} |")  # fmt: skip
    return lines


def _row(case: dict[str, Any]) -> str:
    cells = [f"{median(e['seconds']):.3f} ({error_of(e):+.0%})" for e in case["stages"]]
    told, right = ranking(case["stages"]) if case["ranks"] > 1 else (0, 0)
    order = f"{right} of {told}" if told else "ties" if case["ranks"] > 1 else ""
    return f"| {case['case']} | {' | '.join(cells)} | {order}{'' if right == told else ' **no**'} |"


def _worst(cases: Sequence[dict[str, Any]]) -> list[str]:
    rows = [(case["case"], entry) for case in cases for entry in case["stages"]]
    rows.sort(key=lambda row: -abs(error_of(row[1])))
    return [
        f"| {name} | {e['stage']} | {min(e['seconds']):.3f} - {max(e['seconds']):.3f} | "
        f"{e['cpu_seconds']:.3f} | {e['predicted']:.3f} | {error_of(e):+.0%} |"
        for name, e in rows[:NUM_WORST]
    ]


def filled(text: str, result: dict[str, Any]) -> str:
    """docs/measurements/time.md with its tables made anew."""
    before, _, rest = text.partition(BEGIN)
    _, found, after = rest.partition(END)
    if not found:
        raise SystemExit(f"expected {BEGIN} and {END} in {DOCS}, got none")
    return "\n".join((before + BEGIN, *page(result), END + after))


def newest(folder: Path = RESULTS) -> dict[str, Any]:
    """The newest result file."""
    return json.loads(sorted(folder.glob("*-step-time.json"))[-1].read_text())


# the run


def compete(asked: argparse.Namespace) -> dict[str, Any]:
    """Calibrate once, then predict and measure case after case."""
    about = provenance()
    calibration = calibrate(SAMPLE, WORLDS)
    print(*calibration.lines(), sep="\n", flush=True)
    cases = []
    for case in CASES:
        if asked.only not in str(case):
            continue
        predicted = predict(case, calibration)
        stages, reference = measure(case, asked.rounds)
        slower = slower_now(calibration, case.ranks, reference)
        for entry in stages:
            entry["predicted"] = predicted[entry["stage"]] * slower
        cases.append({"case": str(case), "ranks": case.ranks, "slower": slower, "stages": stages})
        print(_row(cases[-1]), flush=True)
    told = rounded(calibration.as_dict())
    return {**about, "rounds": asked.rounds, "calibration": told, "cases": rounded(cases)}


def main() -> int:
    """Run the cases, print each, write the results and the page."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", default="", help="part of the names of cases")
    parser.add_argument("--rounds", type=int, default=5, help="of every case (default: 5)")
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--page", action="store_true", help="only write the page again")
    asked = parser.parse_args()
    result = newest(asked.results) if asked.page else compete(asked)
    if not asked.only and not asked.page:
        path = asked.results / f"{date.today().isoformat()}-step-time.json"
        path.write_text(json.dumps(result, indent=1) + "\n")
    if not asked.only and asked.results == RESULTS:
        DOCS.write_text(filled(DOCS.read_text(), result))
    else:
        print(*page(result), sep="\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
