"""One training job under DDP, ZeroRedundancyOptimizer, FSDP2, DeepSpeed and Onefold, side by side.

    python benchmarks/peers.py                            every case below, 80 minutes
    python benchmarks/peers.py --sizes tiny --rounds 2    one small case
    python benchmarks/peers.py --sizes small --ranks 2,4 --dtypes fp32,bf16 --malloc default,mmap

Engines take turns (A B C B C A ...), each time with fresh ranks; ratios are taken inside a round.
Peak bytes are the kernel's own high-water mark above what is resident after the imports; bytes sent
are what passed over the loopback device; CPU-seconds are user + system of all ranks, as the
difference between the end of the warm-up and the end of the run. Every case writes
`benchmarks/results/DATE-peers-CASE.json` after each round, so a run that is interrupted keeps the
rounds it finished. `benchmarks/readme.py` turns the newest results into the README's table.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
from itertools import product
from pathlib import Path
from typing import Any

from contest.case import MALLOC, SIZES, Case
from contest.engines import ENGINES
from contest.results import RESULTS, path_of, provenance, write
from contest.show import show_case
from contest.summary import Round
from contest.world import one_round, run
from rich.console import Console

SHARDED = [name for name in ENGINES if name != "plain"]
STAGES = [name for name in SHARDED if name not in ("zero-redundancy", "onefold 0")]
FEWER = ["ddp", "onefold 2", "fsdp2 keep", "fsdp2 reshard", "onefold 3", "deepspeed 3"]
README_CASES: list[tuple[Case, list[str]]] = [
    (Case("small", steps=3), list(ENGINES)),
    (Case("small", malloc="mmap", steps=2), ["ddp", "fsdp2 reshard", "onefold 3", "deepspeed 3"]),
    (Case("small", ranks=1, threads=2), ["plain", "onefold 0", "onefold 3"]),
    (Case("wide", steps=2), STAGES),
    (Case("deep", steps=2), STAGES),
    (Case("tiny"), STAGES),
    (Case("tiny", accumulate=4), FEWER),
    (Case("small", dtype="bf16", steps=2), FEWER),
    (Case("small", recompute=True, steps=2), FEWER),
    (Case("small", ranks=4, steps=2), FEWER),
]
INTERRUPTED = 130


def main() -> int:
    """Run the cases that were asked for; each in a process of its own, for its environment."""
    options = _parser().parse_args()
    if options.one:
        signal.signal(signal.SIGTERM, signal.default_int_handler)
        return compete(Case(**json.loads(options.one)), options)
    code = 0
    for case, engines in _cases(options):
        command = [sys.executable, __file__, "--one", json.dumps(case.as_dict())]
        command += ["--engines", ",".join(engines), "--rounds", str(options.rounds)]
        command += ["--results", str(options.results)]
        path = os.pathsep.join([str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")])
        environment = {**os.environ, "OMP_NUM_THREADS": str(case.threads), "PYTHONPATH": path}
        ended = _wait(subprocess.Popen(command, env=environment | MALLOC[case.malloc]))
        if ended == INTERRUPTED:
            return INTERRUPTED
        code = code or ended
    return code


def _wait(child: subprocess.Popen[bytes]) -> int:
    """Its exit status. It gets a Ctrl-C from the terminal as we do, and a SIGTERM from us."""
    interrupted = False

    def pass_on(*_: object) -> None:
        nonlocal interrupted
        interrupted = True
        child.terminate()

    signal.signal(signal.SIGTERM, pass_on)
    while True:
        try:
            ended = child.wait()
        except KeyboardInterrupt:
            interrupted = True
        else:
            return INTERRUPTED if interrupted else ended


def compete(case: Case, options: argparse.Namespace) -> int:
    """All rounds of one case."""
    console = Console(width=None if sys.stdout.isatty() else 120)
    about = provenance()
    engines = []
    for name in options.engines.split(","):
        if ENGINES[name].is_installed:
            engines.append(name)
        else:
            console.print(f"{name}: {ENGINES[name].package} is not installed, skipped")
    rounds: list[Round] = []
    failed: dict[str, str] = {}
    interrupted = False
    for number in range(options.rounds):
        first = number * len(engines) // options.rounds  # nobody is always early or late

        def run_one(name: str, number: int = number) -> list[dict[str, Any]]:
            _tell(console, f"{case.name}: round {number + 1} of {options.rounds}, {name}")
            return run(case, name)

        try:
            found = one_round(engines[first:] + engines[:first], failed, run_one, console)
        except KeyboardInterrupt:
            interrupted = True
            break
        rounds.append(found)
        write(path_of(case, options.results), case, rounds, about)
    _tell(console, "")
    show_case(console, case, rounds)
    if interrupted:
        console.print(f"interrupted: the {len(rounds)} rounds that were finished are kept")
        return INTERRUPTED
    return 1 if any(name.startswith("onefold") for name in failed) else 0


def _tell(console: Console, line: str) -> None:
    if console.is_terminal:
        console.file.write(f"\r\033[K{line}")
        console.file.flush()


def _cases(options: argparse.Namespace) -> list[tuple[Case, list[str]]]:
    axes = (options.sizes, options.ranks, options.dtypes, options.accumulate, options.recompute)
    chosen = options.engines.split(",") if options.engines else None
    if not any((*axes, options.malloc)):
        return [(case, chosen or engines) for case, engines in README_CASES]
    found = []
    for size, ranks, dtype, accumulate, recompute, malloc in product(
        (options.sizes or "small").split(","),
        (options.ranks or "2").split(","),
        (options.dtypes or "fp32").split(","),
        (options.accumulate or "1").split(","),
        (options.recompute or "off").split(","),
        (options.malloc or "default").split(","),
    ):
        alone = ranks == "1"
        case = Case(
            size, int(ranks), dtype, int(accumulate), recompute == "on", malloc,
            threads=2 if alone else 1, steps=options.steps,
        )  # fmt: skip
        found.append((case, chosen or (["plain", "onefold 0", "onefold 3"] if alone else SHARDED)))
    return found


def _listed(known: object) -> object:
    """An argparse type: a comma-separated list of known words."""

    def read(text: str) -> str:
        for word in text.split(","):
            if word not in known:
                raise argparse.ArgumentTypeError(
                    f"{word!r}; known are {', '.join(known)}"  # type: ignore[arg-type]
                )
        return text

    return read


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--sizes", type=_listed(SIZES))
    parser.add_argument("--ranks", type=_listed([str(n) for n in range(1, 9)]))
    parser.add_argument("--dtypes", type=_listed(["fp32", "bf16"]))
    parser.add_argument("--accumulate", help="micro-batches a step, e.g. 1,4")
    parser.add_argument("--recompute", type=_listed(["off", "on"]))
    parser.add_argument("--malloc", type=_listed(MALLOC))
    parser.add_argument("--engines", type=_listed(ENGINES), help="default: all")
    parser.add_argument("--steps", type=int, default=0, help="measured; default: the size's own")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--one", help=argparse.SUPPRESS)
    return parser


if __name__ == "__main__":
    sys.exit(main())
