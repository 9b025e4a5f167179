"""Record what a change of the code must not make worse: calls, bytes of a checkpoint, peaks.

    python benchmarks/measures.py                          write all to a file in results
    python benchmarks/measures.py --compare FILE           print what differs from a recorded file
    python benchmarks/measures.py --only "calls of plan"   some sections alone, repeatable

Calls are Python's, of rank 0 and in all of its threads where ranks are processes. A walk runs once
to warm up and is then counted three times; a range stands where these differ. "first" is the first
call in a process that has imported all modules. Peaks are bytes of the ledger by kind and tier,
"sent" is bytes by collective. How far work overlaps is a matter of time: the peaks of partial_grad,
wire and staging, and that of all kinds, may be lower in one run than in another. CPU seconds of
tests stand in tests/support/durations.json.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import os
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterator
from dataclasses import replace
from datetime import date
from functools import partial
from pathlib import Path
from typing import Any

os.environ.setdefault("MKL_CBWR", "AVX2,STRICT")  # as in tests/conftest.py
sys.path.insert(0, str(Path(__file__).parents[1]))

import torch
import torch.distributed as dist
from contest.results import RESULTS, provenance
from programs import forked
from torch import Tensor, nn
from torch.testing._internal.distributed.fake_pg import FakeStore

import onefold
from onefold.app.cli.main import main as run_command
from tests.support.calls import CallCounter
from tests.support.hf_ranks import run_forks
from tests.support.programs.chosen import CHOSEN
from tests.support.programs.drawing import DrawnLeg, draw
from tests.support.programs.frame import Process, run_rank
from tests.support.programs.judging import scratch
from tests.support.ranks import run_ranks, seeded

WORLD, TIMES, LIMIT_S = 2, 3, 600.0
IMAGINED = (8, 512)
PLANS = (
    "plan --model tiny --ranks 4 --stage 3 --offload none",
    "plan --gpu h100-80 --nodes 2 --wide",
    "plan --model llama-8b --gpu h100-80 --gpus 2 --host-mem 512GiB --disk 1TiB --offload auto",
)
TO_IMPORT = "plan --model small --gpu a100-80 --gpus 2 --stage 1"
TOWERS = {"the tower": (4, 16, 64), "10 M parameters": (16, 256, 2048)}
"""Towers whose checkpoints are measured: blocks, width, rows of the embedding."""

Section = dict[str, dict[str, Any]]


def tower(num_blocks: int = 4, width: int = 16, num_rows: int = 64) -> nn.Module:
    """Blocks between an embedding and a head: 27 parameters in 6 units, if there are 4 blocks."""

    def block() -> nn.Module:
        up, down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        return nn.Sequential(nn.LayerNorm(width), up, nn.GELU(), down)

    blocks = nn.Sequential(*(block() for _ in range(num_blocks)))
    return nn.Sequential(nn.Embedding(num_rows, width), blocks, nn.Linear(width, num_rows))


def build(*sizes: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    """Return a tower and its AdamW."""
    model = seeded(tower, *sizes)
    return model, torch.optim.AdamW(model.parameters())


# calls


def joined(counts: list[dict[str, int]]) -> dict[str, Any]:
    """Return one count for several of the same work: a number, or the least and the most."""
    values = {name: sorted({count[name] for count in counts}) for name in counts[0]}
    return {name: several[0] if len(several) == 1 else [several[0], several[-1]]
            for name, several in values.items()}  # fmt: skip


class Walk:
    """Counts named work on rank 0; the other ranks only do it."""

    def __init__(self, rank: int, every_thread: bool) -> None:
        self._counter = None if rank else CallCounter(every_thread=every_thread)
        self._counts: dict[str, list[dict[str, int]]] = {}

    def __call__(self, name: str, work: Callable[[], object]) -> None:
        if self._counter is None:
            work()
        else:
            self._counts.setdefault(name, []).append(self._counter.of(work).summary())

    def rows(self) -> Section:
        """Return the counts by name; those before the last ones were to warm up."""
        return {name: joined(counts[-TIMES:]) for name, counts in self._counts.items()}


def walks(rank: int, folder: str, every_thread: bool) -> Section:
    """Shard, train, save and load the tower."""
    walk, x = Walk(rank, every_thread), torch.arange(8).view(2, 4)

    def train(stage: int) -> tuple[nn.Module, torch.optim.Optimizer]:
        for _ in range(1 + TIMES):
            model, optimizer = build()
            walk(f"shard, stage {stage}", partial(onefold.shard, model, optimizer, stage=stage))
        losses: list[Tensor] = []
        parts: dict[str, Callable[[], object]] = {
            "forward": lambda: losses.append(model(x).square().mean()),
            "backward": lambda: losses.pop().backward(),
            "optimizer.step": optimizer.step,
            "zero_grad": optimizer.zero_grad,
        }
        for _ in range(2 + TIMES):  # states begin in the first step
            walk(f"step, stage {stage}", lambda: [part() for part in parts.values()])
        for name, part in (1 + TIMES) * list(parts.items()):
            walk(f"{name}, stage {stage}", part)
        return model, optimizer

    for stage in (0, 2, 3):
        model, optimizer = train(stage)
    for number in range(1 + TIMES):
        walk("save", partial(onefold.save, f"{folder}/{number}", model, optimizer))
    for number in range(1 + TIMES):
        walk("load", partial(onefold.load, f"{folder}/{number}", model, optimizer))
    return walk.rows()


def of_ranks(run: Callable[..., list[Section]], every_thread: bool) -> Section:
    """Walk on ranks of a kind."""
    with scratch() as folder:
        return run(WORLD, walks, folder, every_thread)[0]


def first_and_again(work: Callable[[], Callable[[], object]]) -> Section:
    """Count what `work` prepares, the first time and the next ones."""
    counter = CallCounter(every_thread=True)
    first, *again = (counter.of(work()).summary() for _ in range(1 + TIMES))
    return {"first": first, "again": joined(again)}


def imagined(world_size: int) -> Section:
    """Shard a tower of 80 blocks on rank 0 of ranks that do not exist."""

    def shard(num_blocks: int = 80) -> Callable[[], object]:
        model, optimizer = build(num_blocks)
        return partial(onefold.shard, model, optimizer, stage=3)

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=1)
    shard(1)()
    dist.destroy_process_group()
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=world_size)
    return first_and_again(shard)


def planned(line: str) -> Section:
    """Run a command line in this process."""

    def plan(line: str = line) -> None:
        quiet = io.StringIO()
        with contextlib.redirect_stdout(quiet), contextlib.redirect_stderr(quiet):
            if run_command(line.split()):
                raise SystemExit(f"{line}: {quiet.getvalue()}")

    plan(TO_IMPORT)
    return first_and_again(lambda: plan)


def each_apart(count: Callable[[Any], Section], cases: tuple[Any, ...], name: str) -> Section:
    """Count each case in a process of its own, so that none finds what another has kept."""
    return {name.format(case): next(forked([partial(count, case)], LIMIT_S)) for case in cases}


# bytes


def of_checkpoints() -> Section:
    """Save after a step, and list the files."""

    def body(rank: int, path: str, sizes: tuple[int, ...]) -> None:
        model, optimizer = build(*sizes)
        onefold.shard(model, optimizer, stage=3)
        model(torch.arange(8).view(2, 4)).square().mean().backward()
        optimizer.step()
        onefold.save(path, model, optimizer)

    rows: Section = {}
    for name, sizes in TOWERS.items():
        with scratch() as folder:
            run_ranks(WORLD, body, f"{folder}/saved", sizes)
            root = Path(folder, "saved")
            files = {str(path.relative_to(root)): path.stat().st_size
                     for path in sorted(root.rglob("*")) if path.is_file()}  # fmt: skip
        rows[name] = {"files": len(files), "bytes": sum(files.values()), **files}
    return rows


def peaks(report: onefold.Report) -> dict[str, Any]:
    """Return predicted peaks by kind, the ledger's by kind and tier, and bytes sent."""
    held = {f"{kind}, {tier}": usage.peak
            for kind, tiers in report.memory.items() for tier, usage in tiers.items()}  # fmt: skip
    sent = {name: traffic.sent_nbytes for name, traffic in report.traffic.items()}
    return {
        "predicted": report.predicted,
        "ledger": {**held, "all but disk": report.memory_peak},
        "sent": sent,
    }


def of_architectures(steps: int = 2) -> Section:
    """Every case of predictions.py; predictions after two steps are those after twenty."""
    import predictions

    return {f"{case['kind']}, {case['model']}, stage {case['stage']}": peaks(report)
            for case, report in predictions.reports(steps)}  # fmt: skip


def resized(leg: DrawnLeg, world_size: int) -> DrawnLeg:
    """Return a leg on other ranks; one whose ranks form a mesh of two axes keeps its own."""
    options = dict(leg.options)
    if {"nodes", "islands", "tp"} & options.keys():
        return leg
    if "shares" in options:
        shares = json.loads(options["shares"])
        options["shares"] = str([*(shares * world_size)[: world_size - 1], 1])
    return replace(leg, world_size=world_size, options=tuple(options.items()))


def program_peaks(seed: int, world_size: int) -> dict[str, Any]:
    """Run a drawn program on threads; the reports of its legs, or the error that ended it."""
    drawn = draw(seed)
    drawn = replace(drawn, legs=tuple(resized(leg, world_size) for leg in drawn.legs))
    found: dict[str, Any] = {}

    def report(process: Process) -> None:
        if process.rank == 0:
            found[f"leg {process.leg}"] = peaks(onefold.report(process.model))

    with scratch() as folder, contextlib.suppress(StopIteration):
        program = drawn.program()
        legs = [replace(leg, operations=[*leg.operations, report]) for leg in program.legs]
        program = replace(program, legs=legs)
        try:
            for number, leg in enumerate(legs):
                run_ranks(leg.world_size, run_rank, program, folder, number)
        except Exception as error:
            found["ended"] = type(error).__name__
    return found


def of_programs() -> Section:
    names = [(seed, world) for seed in sorted(CHOSEN) for world in (2, 3)]
    answers = forked([partial(program_peaks, *name) for name in names], LIMIT_S)
    return {f"seed {seed}, {world} ranks": answer if isinstance(answer, dict) else {"ended": answer}
            for (seed, world), answer in zip(names, answers, strict=True)}  # fmt: skip


SECTIONS: dict[str, Callable[[], Section]] = {
    "calls, ranks are threads": partial(of_ranks, run_ranks, False),
    "calls, ranks are processes": partial(of_ranks, run_forks, True),
    "calls of shard": partial(each_apart, imagined, IMAGINED, "80 blocks, {} imagined ranks"),
    "calls of plan": partial(each_apart, planned, PLANS, "{}"),
    "files of a checkpoint": of_checkpoints,
    "peaks of architectures": of_architectures,
    "peaks of drawn programs": of_programs,
}


def numbers(value: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Walk over the leaves of nested dicts, with the names that lead to them."""
    if not isinstance(value, dict):
        yield path, value
        return
    for name, item in value.items():
        yield from numbers(item, (*path, name))


def is_near(one: Any, other: Any) -> bool:
    """True for equal values, and for counts whose ranges overlap."""
    if list not in map(type, (one, other)) or None in (one, other):
        return one == other
    (low, high), (least, most) = (v if isinstance(v, list) else [v, v] for v in (one, other))
    return low <= most and least <= high


def compare(before: dict[str, Any], after: dict[str, Any]) -> list[str]:
    """Return a line for each number that differs, of the sections that both have."""
    lines = []
    for section in [name for name in after if name in before]:
        old, new = dict(numbers(before[section])), dict(numbers(after[section]))
        for path in [*old, *(path for path in new if path not in old)]:
            if not is_near(old.get(path), new.get(path)):
                name = ": ".join((section, *path))
                lines.append(f"{name}: {old.get(path, 'none')} -> {new.get(path, 'none')}")
    return lines


def write(path: Path, sections: dict[str, Section]) -> None:
    """Write sections, a row a line; those of the file that were not measured again stay."""
    about = provenance()
    command = ["git", "log", "-1", "--format=%h", "--", "src"]
    about["commit of src"] = subprocess.check_output(
        command, text=True, cwd=Path(__file__).parents[1]
    ).strip()
    known = json.loads(path.read_text())["sections"] if path.exists() else {}
    parts = []
    for name, section in (known | sections).items():
        rows = (f" {json.dumps(row)}: {json.dumps(value)}" for row, value in section.items())
        parts.append(json.dumps(name) + ": {\n" + ",\n".join(rows) + "\n}")
    head = json.dumps(about, indent=1)[:-2]
    path.write_text(head + ',\n "sections": {\n' + ",\n".join(parts) + "\n}\n}\n")


def main() -> int:
    """Measure; write, or compare and exit 1 if a number differs."""
    parser = argparse.ArgumentParser(description=str(__doc__).partition("\n")[0])
    parser.add_argument("--compare", type=Path, metavar="FILE")
    parser.add_argument("--only", action="append", choices=SECTIONS, help="a section")
    arguments = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    sections: dict[str, Section] = {}
    for name in arguments.only or SECTIONS:
        print(name, file=sys.stderr, flush=True)
        sections[name] = next(forked([SECTIONS[name]], 10 * LIMIT_S))
    if not arguments.compare:
        write(RESULTS / f"{date.today()}-measures.json", sections)
        return 0
    lines = compare(json.loads(arguments.compare.read_text())["sections"], sections)
    print("\n".join(lines) or "nothing differs")
    return int(bool(lines))


if __name__ == "__main__":
    sys.exit(main())
