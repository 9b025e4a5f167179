"""Kill a rank of three a hundred times, at seven kinds of work, and see how the others end.

    python benchmarks/kills.py --kills 100
    python benchmarks/kills.py --works save load --seed 7

SIGKILL comes at any time in the work (tests/support/kills.py says which). Each rank that was not
killed must raise a `WireError` that names the killed rank, and its process must be gone within
five seconds on a machine that is not busy. With `--record` the counts are added to a file in
`results`.
"""

from __future__ import annotations

import argparse
import gc
import os
import random
import sys
from collections import Counter
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

import torch
from contest.results import append_run

from tests.support.kills import RANKS, WORKS, is_right, kill_once

LONGEST_S = 1.0
"""Seconds of work before the signal, at most."""
GONE_S = 5.0


def main() -> int:
    """Kill, and print what happened; exit 1 for a rank without the name, or late for the load."""
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("--kills", type=int, default=100)
    parser.add_argument("--works", nargs="+", choices=WORKS, default=list(WORKS))
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--record", default="", help="name of a file in results")
    options = parser.parse_args()
    draws, seconds, kills = random.Random(options.seed), list[float](), Counter[str]()
    unnamed, late = 0, 0
    torch.set_num_threads(1)
    gc.freeze()
    for number in range(options.kills):
        work, victim = options.works[number % len(options.works)], draws.randrange(RANKS)
        kills[work] += 1
        for rank, end in kill_once(work, victim, draws.uniform(0, LONGEST_S)).items():
            seconds.append(end.seconds)
            unnamed += not is_right(end, victim)
            late += end.seconds > GONE_S
            if end.seconds > GONE_S or not is_right(end, victim):
                text = f"{work}, rank {victim} killed, rank {rank}: {end.error}"
                print(f"{text}; gone after {end.seconds:.1f} s", flush=True)
    seconds.sort()
    run = {
        "seed": options.seed, "kills": dict(kills), "survivors": len(seconds), "unnamed": unnamed,
        "gone_later_than_5_s": late, "median_s": seconds[len(seconds) // 2],
        "longest_s": seconds[-1], "load": os.getloadavg()[0],
    }  # fmt: skip
    print(run)
    busy = max(1.0, os.getloadavg()[0] / (os.cpu_count() or 1))
    if options.record:
        append_run(options.record, run)
    return int(unnamed > 0 or seconds[-1] > GONE_S * busy)


if __name__ == "__main__":
    sys.exit(main())
