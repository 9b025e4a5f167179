"""Write the tables against the peers: README, compared.md, peers.md and targets.md.

python benchmarks/readme.py            write them from the newest results
python benchmarks/readme.py --check    exit 1 if they say something else
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from statistics import median
from typing import Any

from contest.case import Case
from contest.keeping import HEAD, rows
from contest.laws import laws
from contest.results import RESULTS, read_newest
from contest.summary import (
    PEAK,
    STEADY,
    WALL,
    base_of,
    engines_of,
    ratio,
    values,
    verdicts,
)

ROOT = Path(__file__).parent.parent
README = ROOT / "README.md"
PEERS = ROOT / "docs" / "measurements" / "peers.md"
TARGETS = ROOT / "docs" / "development" / "targets.md"
COMPARED = ROOT / "docs" / "coming-from" / "compared.md"
BEGIN, END = "<!-- peers: begin -->", "<!-- peers: end -->"
PAIRS = (
    ("onefold 3", "ddp", STEADY),
    ("onefold 3", "fsdp2 reshard", STEADY),
    ("onefold 2", "fsdp2 keep", STEADY),
    ("onefold 3", "deepspeed 3", STEADY),
    ("onefold 3", "fsdp2 reshard", PEAK),
    ("onefold 3", "deepspeed 3", PEAK),
)
SUMMARY = (
    ("stage 2 / DDP", "onefold 2", "ddp"),
    ("stage 3 / DDP", "onefold 3", "ddp"),
    ("stage 2 / FSDP2 that keeps weights", "onefold 2", "fsdp2 keep"),
    ("stage 3 / FSDP2", "onefold 3", "fsdp2 reshard"),
    ("stage 3 / DeepSpeed stage 3", "onefold 3", "deepspeed 3"),
)
STAGE_2_REDUCES_SINCE = "2026-11-24"
"""Before this date stage 2 reduced once a step, as stage 1 does: its bytes are not those of now."""
PREFACE = """# Benchmarks against DDP, FSDP2 and DeepSpeed

One GPT is trained under every engine in turn, on one machine of 2 cores with gloo and no GPU.
`make bench` measures again and writes this page from `benchmarks/results/`.

- Ratios are taken inside a round, and given as the median [lowest-highest] of the rounds.
- *CPU-seconds* are user and system time of all ranks. They are steadier than wall time when ranks
  fill the cores.
- *Peak* is the largest resident memory of a rank above the imports, per parameter of the model.
- `plain` are processes that never communicate: compute alone.

## Every case in one row

Model shape and malloc settings change these ratios more than rounds do: compare the rows before
you quote one.
"""
TARGETS_PREFACE = """# Targets

The targets were set before the engine was built. This page lists every target against other
libraries, reached or missed, and compares bytes with their closed forms. `make bench` writes it.
Ratios are medians [lowest-highest] of the rounds; *step* is CPU-seconds.
"""


def case_table(name: str, result: dict[str, Any]) -> list[str]:
    """Every engine of one case: ratios to the base in one run, bytes per parameter."""
    rounds = result["rounds"]
    base = base_of(engines_of(rounds))
    lines = [
        f"## {name}",
        "",
        f"{len(rounds)} rounds, {result['date']}, commit {result['commit']}.",
        "",
        f"| engine | step / {base} | CPU-seconds / {base} | peak B/param | sent B/param |",
        "|---|---|---|---|---|",
    ]
    for engine in engines_of(rounds):
        wall, cpu = (ratio(rounds, engine, base, what) for what in (WALL, STEADY))
        peak, sent = (median(values(rounds, engine, what)) for what in (PEAK, "sent"))
        lines.append(f"| {engine} | {wall} | {cpu} | {peak:.1f} | {sent:.2f} |")
    return [*lines, ""]


def matrix(results: dict[str, dict[str, Any]]) -> list[str]:
    """One row a case: our CPU-seconds and peak bytes over those of the peers."""
    lines = [
        "| case | CPU-s: stage 3 / DDP | stage 3 / FSDP2 reshard | stage 2 / FSDP2 keep | "
        "stage 3 / DeepSpeed 3 | peak: stage 3 / FSDP2 | stage 3 / DeepSpeed 3 |",
        "|---|---|---|---|---|---|---|",
    ]
    for name, result in sorted(results.items()):
        found = [ratio(result["rounds"], *pair) for pair in PAIRS]
        if any(found):
            cells = ["" if spread is None else f"{spread.median:.2f}" for spread in found]
            lines.append(f"| {name} | {' | '.join(cells)} |")
    return [*lines, ""]


def summary_table(results: dict[str, dict[str, Any]]) -> list[str]:
    """Ratios to each peer as the range of all cases' medians: what the README shows."""
    every = [result["rounds"] for result in results.values()]
    lines = [
        "| Onefold / peer | cases | CPU-seconds | wall time | peak memory |",
        "|---|---|---|---|---|",
    ]
    for title, ours, peer in SUMMARY:
        cells = []
        for what in (STEADY, WALL, PEAK):
            found = [ratio(rounds, ours, peer, what) for rounds in every]
            medians = [spread.median for spread in found if spread is not None]
            cells.append(f"{min(medians):.2f}-{max(medians):.2f}")
        lines.append(f"| {title} | {len(medians)} | {' | '.join(cells)} |")
    return [*lines, *spread_over_allocators(results)]


def spread_over_allocators(results: dict[str, dict[str, Any]]) -> list[str]:
    """One case under two settings of glibc's allocator, in a sentence."""
    pair = ("small, 2 ranks, fp32", "small, 2 ranks, fp32, malloc mmap")
    if not set(pair) <= set(results):
        return []
    found = [ratio(results[name]["rounds"], "onefold 3", "fsdp2 reshard", PEAK) for name in pair]
    default, mmap = (f"{spread.median:.2f}" for spread in found if spread is not None)
    return [
        "",
        "Results vary with model shape and malloc settings: in one case stage 3's peak is "
        f"{default} of FSDP2's,",
        f"and {mmap} with another `MALLOC_MMAP_THRESHOLD_`.",
    ]


def judged(result: dict[str, Any]) -> list[str]:
    """Targets and laws of one case."""
    rounds, case = result["rounds"], Case(**result["case"])
    lines = []
    for verdict in verdicts(case.as_dict(), rounds):
        target, found = verdict.target, verdict.peak or verdict.cpu
        lines.append(
            f"- {target.ours} / {target.peer}, {target.measure}: {found}, at most "
            f"{target.at_most:.2f} {'holds' if verdict.holds else '**missed**'}"
        )
    is_old = result["date"] < STAGE_2_REDUCES_SINCE and case.accumulate > 1
    lines += [
        f"- {law.engine}, {law.what} by the ledger: {law.found:.3f} B/param, closed form "
        f"{law.wanted:.3f} {'holds' if law.holds else '**missed**'}"
        for law in laws(case, rounds[0])
        if not (is_old and law.engine == "onefold 2")
    ]
    return [*lines, ""] if lines else []


def page(results: dict[str, dict[str, Any]]) -> str:
    """All of docs/measurements/peers.md."""
    lines = [PREFACE, *matrix(results), *checkpoint_table()]
    for name, result in sorted(results.items()):
        lines += case_table(name, result)
        machine = result["machine"]
        known = ", ".join(f"{key} {value}" for key, value in result["versions"].items())
        lines += [f"Machine: {machine['model name']}, {machine['cores']} cores; {known}.", ""]
    return "\n".join(lines)


def targets_page(results: dict[str, dict[str, Any]]) -> str:
    """All of docs/development/targets.md."""
    lines = [TARGETS_PREFACE]
    for name, result in sorted(results.items()):
        found = judged(result)
        lines += [f"## {name}", "", *found] if found else []
    return "\n".join(lines)


def checkpoint_table() -> list[str]:
    """The newest result of benchmarks/checkpoint.py; nothing if there is none."""
    paths = sorted(RESULTS.glob("*-checkpoint.json"))
    if not paths:
        return []
    result = json.loads(paths[-1].read_text())
    numel, rounds = result["numel"], result["rounds"]
    lines = [
        "## Saving and loading",
        "",
        f"{12 * numel / 1e9:.1f} GB of weights and moments by {result['ranks']} ranks "
        f"({len(rounds)} rounds, {result['date']}, commit {result['commit']}).",
        "",
        "- *durable*: until the disk has every byte. *async*: until `save(wait=False)` returns.",
        "- *load*: with nothing in the page cache. *cached*: with everything there.",
        "- *MB*: memory above the state that is held anyway.",
        "- */ disk*: against a plain O_DIRECT copy in the same round.",
        "",
        "| " + " | ".join(HEAD) + " |",
        "|" + "---|" * len(HEAD),
    ]
    return [*lines, *("| " + " | ".join(row) + " |" for row in rows(rounds)), ""]


def filled(path: Path, inside: str) -> str:
    """A page with another text between its marks."""
    before, _, rest = path.read_text().partition(BEGIN)
    return f"{before}{BEGIN}\n{inside}\n{END}{rest.partition(END)[2]}"


def main(arguments: list[str]) -> int:
    """Write or check the README's part and the pages."""
    results = read_newest()
    inside = "\n".join(summary_table(results))
    wanted = {
        **{path: filled(path, inside) for path in (README, COMPARED)},
        PEERS: page(results),
        TARGETS: targets_page(results),
    }
    if "--check" in arguments:
        return int(any(not p.exists() or p.read_text() != text for p, text in wanted.items()))
    for path, content in wanted.items():
        path.write_text(content)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
