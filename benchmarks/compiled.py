"""Step time under torch.compile: FSDP2 and Onefold, every block compiled or none, in one run.

    python benchmarks/compiled.py                          size small, 2 ranks, 5 rounds, 10 minutes
    python benchmarks/compiled.py --size tiny --steps 2 --rounds 2

Engines take turns as in `peers.py`, each with fresh ranks: `block.compile()` on every block, back
end inductor, after the engine has sharded. The warm-up compiles; code is kept for all rounds. Every
round is written to `benchmarks/results/DATE-compiled-SIZE.json`, and a run with the folder left as
it is writes the table of docs/guides/compile.md. `--page` writes that from the newest result.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from dataclasses import replace
from datetime import date
from pathlib import Path
from statistics import median
from typing import Any

from contest.case import SIZES, Case
from contest.results import RESULTS, provenance, write, write_block
from contest.summary import STEADY, WALL, Round, disagreement, ratio, values
from contest.world import one_round, run
from rich.console import Console

GUIDE = Path(__file__).parent.parent / "docs" / "guides" / "compile.md"
ENGINES = ("ddp", "fsdp2 reshard", "onefold 3", "fsdp2 keep", "onefold 2")
PAIRS = (("onefold 3", "fsdp2 reshard"), ("onefold 2", "fsdp2 keep"))
COMPILED = " compiled"


def compete(case: Case, rounds: int, path: Path) -> dict[str, Any]:
    """Measure every engine twice a round; return the result that was written."""
    console, about = Console(width=100), provenance()
    names = [engine + word for engine in ENGINES for word in ("", COMPILED)]
    failed: dict[str, str] = {}
    found: list[Round] = []

    def run_one(name: str) -> list[dict[str, Any]]:
        is_compiled = name.endswith(COMPILED)
        return run(replace(case, compiled=is_compiled), name.removesuffix(COMPILED))

    for number in range(rounds):
        first = number * len(names) // rounds  # nobody is always early or late
        found.append(one_round(names[first:] + names[:first], failed, run_one, console))
        write(path, case, found, about)
        console.print(f"round {number + 1} of {rounds}: {len(found[-1])} of {len(names)} ran")
    if failed:
        raise SystemExit(1)
    return json.loads(path.read_text())


def table(result: dict[str, Any]) -> list[str]:
    """Lines of Markdown: step times, and ours over the peer's."""
    rounds, machine, case = result["rounds"], result["machine"], Case(**result["case"])
    shape = f"{case.shape.num_layers} blocks of width {case.shape.width}"
    apart = max(disagreement(rounds).values())
    return [
        f"{result['date']}, {machine['cores']} cores, torch {result['versions']['torch']}, "
        f"{case.ranks} gloo ranks, {case.dtype}, {shape}, {len(rounds)} rounds, by "
        f"`{result['command']}`.",
        "",
        "| engine | step, s | compiled, s | compiled / not |",
        "|---|---|---|---|",
        *(
            f"| {engine} | {median(values(rounds, engine, WALL)):.3f} | "
            f"{median(values(rounds, engine + COMPILED, WALL)):.3f} | "
            f"{ratio(rounds, engine + COMPILED, engine, WALL)} |"
            for engine in ENGINES
        ),
        "",
        "| ours / peer | wall time | compiled, wall time | compiled, CPU-seconds |",
        "|---|---|---|---|",
        *(
            f"| {ours} / {peer} | {ratio(rounds, ours, peer, WALL)} | "
            f"{ratio(rounds, ours + COMPILED, peer + COMPILED, WALL)} | "
            f"{ratio(rounds, ours + COMPILED, peer + COMPILED, STEADY)} |"
            for ours, peer in PAIRS
        ),
        "",
        "Ratios are taken inside a round: the median [lowest-highest]. Losses of all engines, "
        f"compiled or not, lie within {apart:.0e} of DDP's.",
    ]


def main() -> int:
    """Run the case, print the table, write the results and the page."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--size", choices=list(SIZES), default="small")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--dtype", choices=["fp32", "bf16"], default="fp32")
    parser.add_argument("--steps", type=int, default=0, help="measured; default: the size's own")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--page", action="store_true", help="only write the page again")
    asked = parser.parse_args()
    if asked.page:
        result = json.loads(max(asked.results.glob("*-compiled-*.json")).read_text())
    else:
        case = Case(asked.size, ranks=asked.ranks, dtype=asked.dtype, steps=asked.steps)
        path = asked.results / f"{date.today().isoformat()}-compiled-{asked.size}.json"
        with tempfile.TemporaryDirectory() as cache:
            # before the server of the ranks starts, which inherits it; no pools of compilers
            os.environ |= {"TORCHINDUCTOR_CACHE_DIR": cache, "TORCHINDUCTOR_COMPILE_THREADS": "1"}
            os.environ["OMP_NUM_THREADS"] = "1"
            result = compete(case, asked.rounds, path)
    print(*table(result), sep="\n")
    if asked.results == RESULTS:
        write_block(GUIDE, "compiled", table(result))
    return 0


if __name__ == "__main__":
    sys.exit(main())
