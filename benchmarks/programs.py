"""Run many programs that tests/support/programs draws: right, or an error by name?

    python benchmarks/programs.py --seeds 0:3000                 ranks are threads
    python benchmarks/programs.py --seeds 0:300 --processes      ranks are gloo processes
    python benchmarks/programs.py --seeds 0:100 --trainer        they train with a Trainer
    python benchmarks/programs.py --seeds 0:1000 --mesh          on meshes of four axes
    python benchmarks/programs.py --seeds 0:300 --many           on 17 to 32 ranks
    python benchmarks/programs.py --seeds 17:18 --show           print the program as a script

Seeds run in forked processes with a time limit, so a hang and an abort are verdicts. For each
defect the smallest program with the same verdict is written to `--keep`, as a script. With
`--record` the verdicts of each run are added to a file in `results`.
"""

from __future__ import annotations

import argparse
import faulthandler
import json
import os
import select
import signal
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

os.environ.setdefault("MKL_CBWR", "AVX2,STRICT")  # as in tests/conftest.py
sys.path.insert(0, str(Path(__file__).parents[1]))

import torch
from contest.results import append_run

from tests.support.programs.drawing import Drawn, draw, draw_many, draw_trainer
from tests.support.programs.gloo import run_gloo_ranks
from tests.support.programs.judging import Judge, judge_seed
from tests.support.programs.mesh_drawing import MeshJudge, draw_mesh
from tests.support.programs.shrinking import shrink
from tests.support.programs.verdicts import Verdict
from tests.support.ranks import run_ranks

Job = Callable[[], Any]
CHUNK = 50


def forked(jobs: list[Job], limit_s: float) -> Iterator[Any]:
    """Results of jobs as JSON, in order; "hang" or "abort: ..." for one that did not end well."""
    done = 0
    while done < len(jobs):
        read, write = os.pipe()
        child = os.fork()
        if child == 0:
            os.close(read)
            run_jobs(jobs[done:], write)
        os.close(write)
        with os.fdopen(read, "rb", buffering=0) as lines:
            for line in answers(lines, limit_s):
                if line is None:
                    break
                yield json.loads(line)
                done += 1
            else:
                line = b""
        if line is None:
            os.kill(child, signal.SIGKILL)
        _, status = os.waitpid(child, 0)
        if done < len(jobs) and (line is None or status or not line):
            code = os.waitstatus_to_exitcode(status)
            yield "hang" if line is None else f"abort: exit code {code}"
            done += 1


def answers(lines: Any, limit_s: float) -> Iterator[bytes | None]:
    """Lines until the end; None where one takes too long."""
    begun = b""
    deadline = time.monotonic() + limit_s
    while True:
        ready, _, _ = select.select([lines], [], [], max(0.0, deadline - time.monotonic()))
        if not ready:
            yield None
            return
        data = os.read(lines.fileno(), 1 << 16)
        if not data:
            return
        *whole, begun = (begun + data).split(b"\n")
        for line in whole:
            yield line
            deadline = time.monotonic() + limit_s


def run_jobs(jobs: list[Job], write: int) -> None:
    """In the child: one line for each job. It ends without cleaning up what jobs left."""
    torch.set_num_threads(1)
    faulthandler.enable()
    for job in jobs:
        os.write(write, json.dumps(job()).encode() + b"\n")
    os._exit(0)


def judged(seed: int, judge: Judge, draws: Callable[[int], Drawn]) -> tuple[int, dict[str, str]]:
    drawn, verdict = judge_seed(seed, judge, draws)
    return drawn.seed, asdict(verdict)


def uses(drawn: Drawn) -> set[str]:
    """Names of the options that a program chooses, and its dtype and ranks."""
    options = {name for leg in drawn.legs for name, _ in leg.options} - {"stage"}
    stages = {f"stage {dict(leg.options)['stage']}" for leg in drawn.legs}
    return options | stages | {drawn.dtype} | {f"{leg.world_size} ranks" for leg in drawn.legs}


def verdict_of(answer: Any, seed: int) -> tuple[int, Verdict]:
    if isinstance(answer, str):
        kind, _, text = answer.partition(": ")
        return seed, Verdict(kind, text)
    return answer[0], Verdict(**answer[1])


def shrunk(drawn: Drawn, verdict: Verdict, judge: Judge, limit_s: float) -> Drawn:
    """The smallest program with the same verdict; each try in a process of its own."""

    def same(smaller: Drawn) -> bool:
        (answer,) = forked([lambda: (smaller.seed, asdict(judge.judge(smaller)))], limit_s)
        return verdict_of(answer, smaller.seed)[1].key == verdict.key

    return shrink(drawn, same)


def read_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("--seeds", default="0:300", help="FROM:TO")
    parser.add_argument("--processes", action="store_true", help="ranks are gloo processes")
    parser.add_argument("--limit", type=float, default=60, help="seconds that a program may take")
    parser.add_argument("--keep", type=Path, default=Path("programs"), help="folder of scripts")
    parser.add_argument("--show", action="store_true", help="print the programs and run none")
    parser.add_argument("--no-shrink", dest="shrinks", action="store_false")
    parser.add_argument(
        "--trainer", action="store_true", help="train with a Trainer of Hugging Face"
    )
    parser.add_argument(
        "--mesh", action="store_true", help="pipeline, data, sequence, tensor ranks"
    )
    parser.add_argument("--many", action="store_true", help="more ranks than rows, mostly")
    parser.add_argument("--record", default="", help="name of a file in results")
    return parser.parse_args()


def main() -> int:
    """Run seeds; exit 1 if a program was silently wrong, raw, hung or ended its process."""
    arguments = read_arguments()
    first, end = map(int, arguments.seeds.split(":"))
    chosen = {"mesh": draw_mesh, "trainer": draw_trainer, "many": draw_many}
    draws = next((chosen[name] for name in chosen if vars(arguments)[name]), draw)
    if arguments.show:
        print("\n\n".join(draws(seed).script() for seed in range(first, end)))
        return 0
    judges = MeshJudge if arguments.mesh else Judge
    judge = judges(run_gloo_ranks if arguments.processes or arguments.trainer else run_ranks)
    kinds: Counter[str] = Counter()
    used: Counter[str] = Counter()
    refusals: Counter[str] = Counter()
    for start in range(first, end, CHUNK):
        seeds = range(start, min(start + CHUNK, end))
        jobs = [partial(judged, seed, judge, draws) for seed in seeds]
        for seed, answer in zip(seeds, forked(jobs, arguments.limit), strict=True):
            drawn_seed, verdict = verdict_of(answer, seed)
            kinds[verdict.kind] += 1
            used.update(uses(draws(drawn_seed)))
            if verdict.kind == "refused":
                refusals[verdict.key] += 1
            if not verdict.is_defect:
                continue
            print(f"seed {seed} ({drawn_seed}): {verdict.kind}\n{verdict.text}", flush=True)
            drawn = draws(drawn_seed)
            if arguments.shrinks:
                drawn = shrunk(drawn, verdict, judge, arguments.limit)
            arguments.keep.mkdir(exist_ok=True)
            path = arguments.keep / f"{seed}.py"
            path.write_text(drawn.script())
            print(f"{drawn.text}{path}", flush=True)
        print(f"up to {seeds.stop}: {dict(kinds)}", file=sys.stderr, flush=True)
    for text, count in refusals.most_common():
        print(f"{count:5} {text}")
    if arguments.record:
        run = {"verdicts": dict(kinds), "used": dict(sorted(used.items()))}
        append_run(arguments.record, {"seeds": arguments.seeds, **run})
    total = sum(kinds.values())
    print(", ".join(f"{count} {kind}" for kind, count in kinds.most_common()), f"of {total}")
    return 1 if set(kinds) - {"right", "refused", "redrawn"} else 0


if __name__ == "__main__":
    sys.exit(main())
