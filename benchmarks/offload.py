"""What offloading costs and what it hides, beside the disk, torch's AdamW, DeepSpeed and FSDP2.

    python benchmarks/offload.py                          all sections but `big`, 10 minutes
    python benchmarks/offload.py --only step-disk,overlap
    python benchmarks/offload.py --only peers --dtype bf16
    python benchmarks/offload.py --only big               1,000 M parameters on two ranks

step-disk   AdamW from disk without a forward, one rank and two: GB/s beside fio's in the same
            rounds, bytes by the kernel's count (/proc/self/io) beside 12 in and 12 out a parameter
step-cpu    the step of states in CPU memory, fp32 and bf16 with fp32 masters (28 bytes an element),
            beside torch's fused AdamW on one flat tensor and DeepSpeedCPUAdam; resident bytes
overlap     seconds that a slow tier adds to a training step, settled at once and in the background
peers       a training job of two ranks, states in CPU memory and on disk: seconds and peak bytes
big         `onefold train --model large` from disk: resident bytes of each rank

Ratios are taken inside a round, and the median over rounds is judged. The sections of one day are
kept together in `benchmarks/results/DATE-offload.json`, each with its command and commit. DeepSpeed
compiles its kernels at their first use, which takes minutes more; that from disk needs libaio-dev.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from datetime import date
from pathlib import Path
from shutil import which
from typing import Any

import optimizer_step
from contest import hiding, swapping
from contest.bounds import (
    Bound,
    big_row,
    disk_bounds,
    error_line,
    hiding_bounds,
    peer_bounds,
    step_bounds,
)
from contest.case import SIZES, Case
from contest.engines import offloaded
from contest.results import RESULTS, provenance, rounded
from contest.show import show_case
from contest.summary import LOSS_TOLERANCE, Round, disagreement
from contest.world import RunError, one_round, run, run_ranks
from rich.console import Console
from rich.table import Table

from onefold.compose.tiers import is_memory

UNIT_NUMEL = 6912 * optimizer_step.COLUMNS  # 28 MB in fp32
OURS = {
    "onefold offloaded, fp32": "",  # DeepSpeed's kernel in fp32 has no casts around it
    "onefold offloaded, bf16": "DeepSpeedCPUAdam between casts, bf16",
}
Found = tuple[dict[str, Any], list[Bound]]
"""A section's result, for JSON, and what it has to reach."""


def step_disk(options: argparse.Namespace, console: Console) -> Found:
    """Steps from disk, beside the disk alone."""
    disk = "fio" if which("fio") else "plain reads and writes"
    if disk != "fio":
        console.print("fio is not installed: the bound is a loop of preadv and pwritev")
    cases: list[dict[str, Any]] = []
    table = Table("", "threads", "GB/s", disk, "slots MB", "resident MB", title="step from disk")
    numel = int(UNIT_NUMEL * optimizer_step.NUM_LAYERS * options.scale)
    numel -= numel % (optimizer_step.NUM_LAYERS * optimizer_step.COLUMNS)
    for ranks in (1, 2):
        arguments = (ranks, numel, options.steps, options.rounds)
        with tempfile.TemporaryDirectory(dir=options.folder) as folder:
            told = run_ranks(ranks, swapping.step_from_disk, *arguments, folder)
        case = disk_case(told, numel, options.steps) | {"disk": disk}
        cases.append(case)
        nbytes = 24 * case["numel"] * case["steps"]
        rates = [nbytes / each["seconds"] for each in case["rounds"]]
        beside = [each["disk_rate"] for each in case["rounds"]]
        table.add_row(
            case["name"], str(case["threads"]), *(_giga(values) for values in (rates, beside)),
            *(f"{case[what] / 1e6:.0f}" for what in ("slots", "resident")),
        )  # fmt: skip
    console.print(table)
    return {"cases": cases}, [bound for case in cases for bound in disk_bounds(case)]


def disk_case(told: list[dict[str, Any]], numel: int, steps: int) -> dict[str, Any]:
    """All ranks together: the slowest one's seconds, everybody's bytes."""
    ranks = len(told)
    rounds = [
        {
            "seconds": max(one["seconds"] for one in each), "disk_rate": each[0]["disk_rate"],
            **{way: sum(one[way] for one in each) for way in ("read_nbytes", "written_nbytes")},
        }
        for each in zip(*(rank["rounds"] for rank in told), strict=True)
    ]  # fmt: skip
    return {
        "name": f"{ranks} rank{'s' * (ranks > 1)}", "ranks": ranks, "numel": ranks * numel,
        "steps": steps, "rounds": rounds, "threads": told[0]["threads"], "units": told[0]["units"],
        **{what: max(rank[what] for rank in told) for what in ("slots", "resident")},
    }  # fmt: skip


def step_cpu(options: argparse.Namespace, console: Console) -> Found:
    """Steps in CPU memory beside torch's and DeepSpeed's, and the memory of steps."""
    cases: list[dict[str, Any]] = []
    numel = int((32 << 20) * options.scale)
    numel -= numel % (optimizer_step.NUM_LAYERS * optimizer_step.COLUMNS)
    cores = min(2, len(os.sched_getaffinity(0)))
    for ranks, threads in ((1, cores), (2, 1)):
        arguments = (ranks, threads, numel, 4 * options.rounds + 1)
        told = run_ranks(ranks, swapping.step_in_memory, *arguments)
        seconds = {
            name: [statistics.mean(each) for each in zip(*times, strict=True)]
            for name in told[0]["seconds"]
            for times in [[rank["seconds"][name] for rank in told]]
        }
        case = {"name": f"{ranks} x {threads}", "ranks": ranks, "threads": threads, "numel": numel}
        cases.append({**case, "seconds": seconds, "missing": told[0]["missing"]})
        optimizer_step.show(console, cases[-1] | {"nbytes": dict.fromkeys(seconds, 28)})
    memory = [
        {"tier": tier, "dtype": dtype, "numel": numel}
        | _run_in_folder(options, swapping.memory_of_steps, tier, dtype, numel)
        for tier in ("cpu", "disk")
        for dtype in ("float32", "bfloat16")
    ]
    table = Table(
        "tier", "weights", "resident", "known", "beyond", "slots",
        title="MB of memory in steps: what the ledger knows of and what is beyond",
    )  # fmt: skip
    for row in memory:
        values = (row[what] for what in ("resident", "held", "beyond", "slots"))
        table.add_row(row["tier"], row["dtype"], *(f"{value / 1e6:.1f}" for value in values))
    console.print(table)
    bounds = [b for case in cases for b in step_bounds(case, optimizer_step.BASE, OURS)]
    return {"cases": cases, "memory": memory}, bounds


def _run_in_folder(
    options: argparse.Namespace, body: Callable[..., dict[str, Any]], *arguments: Any
) -> dict[str, Any]:
    """One rank's result; its last argument is a folder on the disk."""
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        (told,) = run_ranks(1, body, 1, *arguments, folder)
    return told


def overlap(options: argparse.Namespace, console: Console) -> Found:
    """What of a slow tier's step is seen."""
    size = "small" if options.scale >= 1 else "tiny"
    told = _run_in_folder(options, hiding.hide, 1, size, options.steps, options.rounds)
    forward, optimizer = (
        statistics.median(each[what] for each in told["rounds"])
        for what in ("forward", "optimizer")
    )
    console.print(
        f"overlap: forward {forward:.3f} s, optimizer {optimizer:.3f} s settled at once "
        f"({told['unslowed_optimizer']:.3f} s before it was slowed)"
    )
    table = Table("variant", "step s", "exposed s", title="a training step over a slow disk")
    for name in told["variants"]:
        base = "device, clipped" if name.endswith("clipped") else "device"
        steps = [each[name] for each in told["rounds"]]
        exposed = [each[name] - each[base] for each in told["rounds"]]
        shown = "" if name == base else f"{statistics.median(exposed):.3f}"
        table.add_row(name, f"{statistics.median(steps):.3f}", shown)
    console.print(table)
    console.print(f"losses: {'the same bits' if told['same_losses'] else 'NOT THE SAME BITS'}")
    return {"size": size, **told}, hiding_bounds(told["rounds"])


def peers(options: argparse.Namespace, console: Console) -> Found:
    """One job of two ranks under everybody who can offload."""
    case = Case(options.size, dtype=options.dtype, steps=options.peer_steps)
    names = []
    for name, engine in offloaded("").items():
        if engine.is_installed:
            names.append(name)
        else:
            console.print(f"{name}: {engine.package} is not installed, skipped")
    rounds: list[Round] = []
    failed: dict[str, str] = {}

    def run_one(name: str) -> list[dict[str, Any]]:
        with tempfile.TemporaryDirectory(dir=options.folder) as folder:
            try:
                return run(case, name, folder=folder)
            except RunError as error:
                raise RunError(error_line(str(error).replace(folder, "DIR"))) from error

    longest = 0.0
    for number in range(options.rounds):
        begin = time.monotonic()
        if begin + longest > options.deadline:
            console.print(f"no time was left for rounds {number + 1} to {options.rounds}")
            break
        first = number * len(names) // options.rounds  # nobody is always early or late
        rounds.append(one_round(names[first:] + names[:first], failed, run_one, console))
        longest = max(longest, time.monotonic() - begin)
    rounds = [found for found in rounds if found]
    show_case(console, case, rounds)
    apart = disagreement(rounds) if rounds else {}
    told = {"case": case.as_dict(), "failed": failed, "apart": apart, "rounds": rounds}
    worst = max((value for name, value in apart.items() if "onefold" in name), default=0.0)
    told["losses_agree"] = worst <= LOSS_TOLERANCE[case.dtype]
    return told, peer_bounds(rounds)


def big(options: argparse.Namespace, console: Console) -> Found:
    """The command with a large model, clipped and stepped inside backward."""
    rows = []
    table = Table("clip", "M", "s", "resident GB by rank", "B/param", "losses",
                  title=f"onefold train --model {options.model} from disk")  # fmt: skip
    for clip in ("0", "1"):
        with tempfile.TemporaryDirectory(dir=options.folder) as folder:
            command = [sys.executable, "-m", "onefold", "train", "--model", options.model]
            command += [
                "--offload",
                f"disk:{folder}",
                "--clip",
                clip,
                "--recompute",
                "--steps",
                "5",
            ]
            command += ["--batch", "1", "--seq", "64", "--sample", "0", "--json"]
            done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode != 0:
            raise RunError(f"onefold train failed: {error_line(done.stderr)}")
        row = big_row(json.loads(done.stdout))
        rows.append(row)
        peaks = ", ".join(f"{nbytes / 1e9:.2f}" for nbytes in row["resident_peak"])
        table.add_row(
            clip, f"{row['numel'] / 1e6:.0f}", f"{row['seconds']:.1f}", peaks,
            f"{row['peak_per_parameter']:.2f}", " ".join(f"{loss:.3f}" for loss in row["losses"]),
        )  # fmt: skip
    console.print(table)
    return {"model": options.model, "runs": rows}, []


SECTIONS: dict[str, Callable[[argparse.Namespace, Console], Found]] = {
    "step-disk": step_disk, "step-cpu": step_cpu, "overlap": overlap, "peers": peers, "big": big,
}  # fmt: skip


def bounds_table(bounds: list[Bound]) -> Table:
    """What had to be reached, and was or was not."""
    table = Table("ratio", "wanted", "median [spread]", "", title="bounds", title_justify="left")
    for bound in bounds:
        verdict = "holds" if bound.holds else "MISSED"
        table.add_row(bound.what, bound.wanted, str(bound.spread), verdict)
    return table


def keep(path: Path, name: str, section: dict[str, Any]) -> None:
    """Put one section into the file of the day, beside those that are there."""
    path.parent.mkdir(parents=True, exist_ok=True)
    about = provenance()
    before = json.loads(path.read_text())["sections"] if path.exists() else {}
    run_by = {key: about[key] for key in ("command", "commit")}
    sections = {**before, name: {**run_by, **section}}
    new = path.with_suffix(".new")
    new.write_text(json.dumps(rounded({**about, "sections": sections}), indent=1) + "\n")
    new.replace(path)


def _giga(rates: list[float]) -> str:
    return f"{statistics.median(rates) / 1e9:.2f}"


def main() -> int:
    """Run the sections that were asked for; the exit status is 1 if one of ours failed."""
    options = _parser().parse_args()
    console = Console(width=None if sys.stdout.isatty() else 120)
    names = (
        options.only.split(",") if options.only else [name for name in SECTIONS if name != "big"]
    )
    folder = Path(options.folder or tempfile.gettempdir())
    if is_memory(folder):
        console.print(f"{folder} lies in memory: name a folder on a disk (--folder)", markup=False)
    path = options.results / f"{date.today().isoformat()}-offload.json"
    options.deadline = time.monotonic() + 60 * options.minutes
    code = 0
    for name in names:
        console.rule(name)
        try:
            section, bounds = SECTIONS[name](options, console)
        except RunError as error:
            console.print(f"{name} failed:\n{error}", markup=False)
            code = 1
            continue
        if bounds:
            console.print(bounds_table(bounds))
        told = {**section, "bounds": [bound.as_dict() for bound in bounds]}
        keep(path, name if name != "peers" else f"peers {options.dtype}", told)
        is_wrong = not section.get("same_losses", True) or not section.get("losses_agree", True)
        failed = [each for each in section.get("failed", {}) if each.startswith("onefold")]
        code = 1 if is_wrong or failed else code
    console.print(f"written: {path.name}")
    return code


def _sections(text: str) -> str:
    unknown = [word for word in text.split(",") if word not in SECTIONS]
    if unknown:
        raise argparse.ArgumentTypeError(f"{unknown[0]!r}; known are {', '.join(SECTIONS)}")
    return text


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--only", type=_sections, help=f"some of {', '.join(SECTIONS)}")
    add("--rounds", type=int, default=5)
    add(
        "--minutes",
        type=float,
        default=9.5,
        help="for all; peers begins no round that may end later",
    )
    add("--steps", type=int, default=2, help="of a round, in step-disk and overlap")
    add("--scale", type=float, default=1.0, help="of the elements stepped; below 1 for a try")
    add("--size", default="small", choices=list(SIZES), help="of the peers' model")
    add("--dtype", default="fp32", choices=["fp32", "bf16"], help="of the peers' model")
    add("--peer-steps", type=int, default=1, help="measured, after the warm-up's")
    add("--model", default="large", help="that `big` trains")
    add("--folder", help="on the disk to be measured (default: TMPDIR)")
    add("--results", type=Path, default=RESULTS)
    return parser


if __name__ == "__main__":
    sys.exit(main())
