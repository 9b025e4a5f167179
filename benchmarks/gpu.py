"""A campaign on one CUDA device, in one call of less than 8 minutes; and its two comparisons.

    python benchmarks/gpu.py                                             eight parts
    python benchmarks/gpu.py --device cpu --small                        in miniature, without one
    python benchmarks/gpu.py page                                        its newest result's page
    python benchmarks/gpu.py engines                                     world 1, and 2 over gloo
    python benchmarks/gpu.py offload                                     states in CPU memory
    python benchmarks/gpu.py engines --device cpu --sizes tiny --seconds 60
    python benchmarks/gpu.py offload --device cpu --sizes tiny

The campaign: correctness, host, engines at world 1, offload, inference, kernels, limits, processes.
Each part has a time and a process of its own (gpu_parts.py); what is finished is written to
`benchmarks/results/DATE-gpu-campaign.json`, and to a page beside it. Called again, it goes on with
the parts that are not there yet. One device cannot tell of overlap on links between devices.

With `engines`: world 1 in fp32 and bf16, and 2 ranks that share the device over gloo, where every
message waits for streams on both sides: an ordering mistake shows in the losses. Those of every
engine are compared with a run on the CPU. Rounds interleave the engines as in benchmarks/peers.py;
peak bytes are the device allocator's. What is finished when the time is up is shown and written to
`benchmarks/results/DATE-gpu.json`; the exit status is 1 if one of our runs failed or disagrees.

With `offload`: one rank in bf16, optimizer states in CPU memory, this library (stepping by the CPU,
streaming through the device, and choosing) beside DeepSpeed's ZeRO-Offload, FSDP2's
CPUOffloadPolicy and torchao's CPUOffloadOptimizer (those that are installed), 1.3 to 7 billion
parameters, the largest that each trains; tokens/s, bytes of the device and of the host.
In `DATE-gpu-offload.json`. A case of ours is planned too: `plan_ms` and `plan_gb` are next to what
was measured, in both files and in the campaign's tables. A CPU has no `plan_ms`.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field, replace
from datetime import date
from pathlib import Path
from statistics import median
from typing import Any

import torch
from contest.case import SIZES, Case
from contest.engines import everyone
from contest.results import RESULTS, provenance, rounded, write_block
from contest.show import show_case
from contest.summary import Round, base_of, curve, distance
from contest.world import RunError, one_round, run
from gpu_plans import planned_rows
from rich.console import Console
from rich.table import Table

ROUNDS = {"engines": 2, "offload": 1}
CPU_STEPS = 2  # beside the warm-up's: what is compared
TOLERANCE = {"fp32": 1e-3, "bf16": 3e-2}
ALONE = ["plain", "fsdp2 reshard", "onefold 0", "onefold 3"]
TOGETHER = ["ddp", "fsdp2 reshard", "onefold 0", "onefold 1", "onefold 2", "onefold 3"]
OFFLOADED = [  # in this order: what is first is measured where time is short
    "onefold 2 cpu",
    "deepspeed 2 cpu",
    "onefold 2 streamed",
    "fsdp2 cpu",
    "torchao cpu",
    "onefold 2 stepped",
    "onefold 3 cpu",
]
PARTS = {
    "correctness": 60, "host": 60, "engines": 90, "offload": 120, "inference": 45, "kernels": 45,
    "limits": 30, "processes": 10,
}  # fmt: skip
"""The parts of the campaign, and the seconds of each: 460 in all."""
DEFAULT_SIZES = {"engines": "small,large", "offload": "1.3b,7b,2.7b"}  # what matters most, first
PAGE = Path(__file__).parents[1] / "docs" / "measurements" / "gpu.md"
LARGEST_ON_CPU = 100_000_000  # parameters; above, plain torch on the device is the reference


@dataclass(slots=True)
class Outcome:
    """One case: its rounds, what failed, and how far the losses are from the reference's."""

    case: Case
    rounds: list[Round] = field(default_factory=list)
    failed: dict[str, str] = field(default_factory=dict)
    reference: str = ""
    apart: dict[str, float] = field(default_factory=dict)
    plans: dict[str, dict[str, float]] = field(default_factory=dict)  # by engine, where it has one

    @property
    def is_right(self) -> bool:
        """True if all our runs ended and their losses agree."""
        ours = [name for name in self.failed if name.startswith("onefold")]
        worst = max((v for k, v in self.apart.items() if k.startswith("onefold")), default=0.0)
        return not ours and worst <= TOLERANCE[self.case.dtype]


def cases(what: str, device: str, sizes: list[str]) -> Iterator[tuple[Case, list[str]]]:
    """In the order given, so that a slow device still shows something of everything."""
    backend = "nccl" if device == "cuda" else "gloo"
    for size in sizes:
        if what == "offload":
            dtype = "bf16" if device == "cuda" else "fp32"  # many CPUs have no fast bf16
            yield Case(size, 1, dtype, device=device, threads=0, backend=backend), OFFLOADED
            continue
        for dtype in ("fp32", "bf16"):
            yield Case(size, 1, dtype, device=device, steps=10, backend=backend), ALONE
        if SIZES[size].config.num_layers <= 8:
            yield Case(size, ranks=2, device=device, steps=4), TOGETHER


class OutOfTime(Exception):
    """The time is up; what is finished counts."""


def compete(
    case: Case, engines: list[str], rounds: int, deadline: float, console: Console
) -> Outcome:
    """Rounds of one case until they are done or the time is up."""

    def run_one(name: str) -> list[dict[str, Any]]:
        if time.monotonic() >= deadline:
            raise OutOfTime
        try:
            with tempfile.TemporaryDirectory() as folder:
                return run(case, name, folder=folder, timeout=deadline - time.monotonic())
        except RunError as error:
            if time.monotonic() >= deadline:
                raise OutOfTime from error
            raise

    outcome = Outcome(case)
    with suppress(OutOfTime):
        for _ in range(rounds):
            found = one_round(engines, outcome.failed, run_one, console)
            if found:
                outcome.rounds.append(found)
    return outcome


def compare(outcome: Outcome, deadline: float, console: Console) -> None:
    """Fill in how far every engine's losses are from those of a run on the CPU."""
    if not outcome.rounds:
        return
    case, first = outcome.case, outcome.rounds[0]
    base = base_of(first)
    outcome.reference, reference = f"{base} on {case.device}", curve(first[base])
    if first[base][0]["numel"] <= LARGEST_ON_CPU:
        on_cpu = replace(case, device="cpu", dtype="fp32", steps=CPU_STEPS, threads=4)
        try:
            reference = curve(run(on_cpu, base, timeout=max(1.0, deadline - time.monotonic())))
            outcome.reference = f"{base} in fp32 on the CPU"
        except RunError as error:
            told = f"{base} on the CPU failed, compared with {outcome.reference}:\n{error}"
            console.print(told, markup=False)
    for name, ranks in first.items():
        outcome.apart[name] = distance(curve(ranks), reference)


def throughput(outcome: Outcome) -> Table:
    """Tokens a second, and where the bytes were."""
    shape = outcome.case.shape
    table = Table("engine", "tokens/s", "device GB", "host GB", title=outcome.case.name)
    for name in outcome.rounds[0]:
        ranks = [found[name][0] for found in outcome.rounds if name in found]
        seconds = median(rank["wall_seconds"] for rank in ranks)
        table.add_row(
            name,
            f"{shape.rows * shape.positions / seconds:,.0f}",
            f"{max(rank['peak_nbytes'] for rank in ranks) / 1e9:.2f}",
            f"{max(rank['host_peak_nbytes'] for rank in ranks) / 1e9:.2f}",
        )
    return table


def show(console: Console, outcome: Outcome) -> None:
    """The costs of a case, and whether its losses are right."""
    show_case(console, outcome.case, outcome.rounds)
    if outcome.rounds and outcome.case.threads == 0:
        console.print(throughput(outcome))
    if not outcome.rounds:
        return
    for name, found in outcome.plans.items():
        words = ", ".join(f"{key} {value:.4g}" for key, value in found.items())
        console.print(f"{name}: {words}")
    for name, apart in outcome.apart.items():
        console.print(f"{name}: losses within {apart:.1e} of {outcome.reference}")
    allowed = TOLERANCE[outcome.case.dtype]
    console.print(f"{'right' if outcome.is_right else 'WRONG'} ({allowed:.0e} allowed)\n")


def as_dict(outcome: Outcome) -> dict[str, Any]:
    """For JSON."""
    return {
        "case": outcome.case.as_dict(), "reference": outcome.reference, "apart": outcome.apart,
        "is_right": outcome.is_right, "failed": outcome.failed, "plans": outcome.plans,
        "rounds": outcome.rounds,
    }  # fmt: skip


@dataclass(slots=True)
class Campaign:
    """The parts on one device: those that are finished are in a file."""

    path: Path
    device: str
    is_small: bool

    def run(self, console: Console) -> bool:
        """Run the parts that the file lacks; False if one found something wrong."""
        about = provenance() | {"device": self.device, "is_small": self.is_small}
        found = json.loads(self.path.read_text()) if self.path.exists() else {}
        same = all(found.get(key) == about[key] for key in ("commit", "device", "is_small"))
        parts: dict[str, dict[str, Any]] = found.get("parts", {}) if same else {}
        self.path.parent.mkdir(parents=True, exist_ok=True)
        for name, seconds in PARTS.items():
            if not parts.get(name, {}).get("rows"):
                parts[name] = self.part(name, seconds)
            console.print(f"{name}: {verdict(parts[name])}", markup=False)
            self.path.write_text(json.dumps(about | {"parts": rounded(parts)}) + "\n")
            self.path.with_suffix(".md").write_text("\n".join(page(about, parts)) + "\n")
        return all(verdict(part) == "right" for part in parts.values())

    def part(self, name: str, seconds: float) -> dict[str, Any]:
        """Run one part in a process of its own; its rows, or why there are none."""
        here, start = Path(__file__).parent, time.monotonic()
        words = [str(here / "gpu_parts.py"), name, "--device", self.device]
        with tempfile.TemporaryDirectory() as folder:
            if name in DEFAULT_SIZES:
                sizes = "tiny" if self.is_small else {"offload": "1.3b,7b"}.get(name, "large")
                words = [str(here / "gpu.py"), name, "--device", self.device, "--sizes", sizes]
                words += ["--seconds", str(seconds), "--results", folder]
            elif self.is_small:
                words.append("--small")
            try:
                done = subprocess.run(
                    [sys.executable, *words], capture_output=True, text=True, timeout=2 * seconds
                )
            except subprocess.TimeoutExpired:
                return {"failed": f"no end within {2 * seconds} s", "seconds": 2.0 * seconds}
            files = sorted(Path(folder).glob("*.json"))
            rows = _rows_of(json.loads(files[0].read_text())) if files else _last_line(done.stdout)
        took = {"seconds": time.monotonic() - start}
        if rows is None:
            lines = (done.stdout + done.stderr).strip().splitlines() or ["nothing was said"]
            return took | {"failed": lines[-1][:300]}
        return took | {"rows": rows}


def _rows_of(found: dict[str, Any]) -> list[dict[str, Any]]:
    """A row for each engine of a comparison's cases."""
    rows: list[dict[str, Any]] = []
    for case in found["cases"]:
        title = Case(**case["case"]).name
        for name in case["rounds"][0] if case["rounds"] else ():
            ranks = [one[name][0] for one in case["rounds"] if name in one]
            row = {
                "what": f"{title}: {name}",
                "step_ms": 1e3 * median(rank["wall_seconds"] for rank in ranks),
                "device_gb": max(rank["peak_nbytes"] for rank in ranks) / 1e9,
                "host_gb": max(rank["host_peak_nbytes"] for rank in ranks) / 1e9,
                **case.get("plans", {}).get(name, {}),
            }
            rows.append(row)
        for name, said in case["failed"].items():
            rows.append({"what": f"{title}: {name}", "absent": said.strip().splitlines()[-1][:300]})
        rows.append({"what": f"{title}: losses", "is_right": case["is_right"]})
    return rows


def _last_line(text: str) -> list[dict[str, Any]] | None:
    with suppress(ValueError, IndexError):
        return json.loads(text.strip().splitlines()[-1])
    return None


def verdict(part: dict[str, Any]) -> str:
    """One line about a part."""
    if "failed" in part:
        return part["failed"]
    wrong = [row["what"] for row in part["rows"] if row.get("is_right") is False]
    return f"wrong: {', '.join(wrong)}" if wrong else "right"


def _word(cell: object) -> str:
    """A cell without a figure: verdicts as words, what was said in its first words."""
    return {True: "right", False: "wrong"}.get(cell, str(cell)[:80]) if cell != "" else ""  # type: ignore[call-overload]


def page(about: dict[str, Any], parts: dict[str, dict[str, Any]]) -> list[str]:
    """The campaign as a page of Markdown: a table for each part."""
    lines = [f"# One device: {about['machine']}", "", f"Commit {about['commit']}, {about['date']}."]
    for name, part in parts.items():
        lines += ["", f"## {name.capitalize()}", "", f"{verdict(part)}; {part['seconds']:.0f} s."]
        rows = part.get("rows", [])
        columns = list(dict.fromkeys(key for row in rows for key in row if key != "what"))
        if rows:
            lines += ["", f"| what | {' | '.join(columns)} |", "| --- " * (1 + len(columns)) + "|"]
        for row in rows:
            cells = [row.get(key, "") for key in columns]
            told = [f"{cell:.4g}" if isinstance(cell, float) else _word(cell) for cell in cells]
            lines.append(f"| {row['what']} | {' | '.join(told)} |")
    return lines


def main() -> int:
    """Run what fits into the time."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    whats = ["campaign", "page", *DEFAULT_SIZES]
    parser.add_argument("what", nargs="?", default="campaign", choices=whats)
    parser.add_argument("--small", action="store_true", help="the campaign in miniature")
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"])
    parser.add_argument("--sizes", help=f"of {', '.join(SIZES)}")
    parser.add_argument("--seconds", type=float, default=420.0)
    parser.add_argument("--results", type=Path, default=RESULTS)
    options = parser.parse_args()
    console = Console(width=None if sys.stdout.isatty() else 120)
    if options.what == "page":
        found = json.loads(max(options.results.glob("*-gpu-campaign.json")).read_text())
        write_block(PAGE, "campaign", page(found, found["parts"])[2:])
        return 0
    if options.device == "cuda" and not torch.cuda.is_available():
        console.print("no CUDA device here: nothing was measured")
        return 2
    if options.what == "campaign":
        path = options.results / f"{date.today().isoformat()}-gpu-campaign.json"
        return int(not Campaign(path, options.device, options.small).run(console))
    sizes = (options.sizes or DEFAULT_SIZES[options.what]).split(",")
    unknown = set(sizes) - set(SIZES)
    if unknown:
        parser.error(f"unknown size {', '.join(sorted(unknown))}; known are {', '.join(SIZES)}")
    deadline = time.monotonic() + options.seconds
    is_cuda = options.device == "cuda"
    about = provenance() | {"gpu": torch.cuda.get_device_name() if is_cuda else None}
    name = "gpu" if options.what == "engines" else "gpu-offload"
    path = options.results / f"{date.today().isoformat()}-{name}.json"
    outcomes: list[Outcome] = []
    for case, engines in cases(options.what, options.device, sizes):
        present = [name for name in engines if everyone()[name].is_installed]
        outcome = compete(case, present, ROUNDS[options.what], deadline, console)
        outcome.plans = planned_rows(
            case, outcome.rounds[0] if outcome.rounds else (), about["gpu"]
        )
        compare(outcome, deadline, console)
        outcomes.append(outcome)
        show(console, outcome)
        options.results.mkdir(parents=True, exist_ok=True)
        found = rounded({"cases": [as_dict(outcome) for outcome in outcomes]})
        path.write_text(json.dumps(about | found) + "\n")
    left_out = [outcome.case.name for outcome in outcomes if not outcome.rounds]
    if left_out:
        console.print(f"no time was left for: {'; '.join(left_out)}")
    return 0 if all(outcome.is_right for outcome in outcomes) else 1


if __name__ == "__main__":
    sys.exit(main())
