"""Ranks that are not equal: a rank of a third of the speed, enforced by the kernel.

    python benchmarks/mixed.py speed               equal rows beside rows by speed
    python benchmarks/mixed.py speed --rounds 3    in turns, three times

speed   Two processes under CPU quotas (cgroups, v1 or v2; this needs root): 100 % and 33 % of a
        core. A byte-level GPT at stage 3 trains on equal rows, then on rows by measured speed, from
        equal ones. The bound of the gain is (1 + 0.33) / (2 x 0.33) = 2.0.

Each part is a function of `PARTS`.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from contest.results import RESULTS, provenance, rounded
from torch import nn
from torch.nn import functional as F

import onefold
from onefold.app.train.corpus import Windows, open_corpus
from onefold.mixed.sampler import split_rows
from onefold.mixed.speeds import measure
from onefold.planner.models.gpt import GPT, PRESETS

GROUPS = Path("/sys/fs/cgroup")
PERIOD_US = 100_000
CORES = (1.0, 0.33)
"""Shares of a core, by rank."""

SETTLED_AFTER, WANTED = 30, 1.85


# a rank of the part "speed"


def train(is_auto: bool, arguments: argparse.Namespace) -> None:
    """Train in a cgroup; rank 0 prints seconds and rows of each step."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    preset = PRESETS[arguments.model]
    module = GPT(preset, arguments.seq)
    optimizer = torch.optim.AdamW(module.parameters(), lr=preset.lr)
    onefold.shard(module, optimizer, stage=3)
    speeds = measure(module) if is_auto else None
    rows = arguments.rows
    own = split_rows(rows, [1.0] * world_size)[rank]
    corpus = open_corpus(None, arguments.seq)
    windows = Windows(corpus.train, rows=rows, seq=arguments.seq, seed=0, own=own)
    Path(os.environ["ONEFOLD_GROUPS"].split(":")[rank], "cgroup.procs").write_text(str(os.getpid()))
    dist.barrier()
    seconds, counts, losses = [], [], []
    for _ in range(arguments.steps):
        begun = time.perf_counter()
        if speeds is not None:
            windows.own = split_rows(rows, speeds.shares)[rank]
        tokens = next(windows)
        logits = module(tokens[:, :-1]).flatten(0, 1)
        loss = F.cross_entropy(logits, tokens[:, 1:].flatten(), reduction="sum")
        loss = loss * (world_size / (rows * arguments.seq))
        loss.backward()
        nn.utils.clip_grad_norm_(module.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach() / world_size)
        counts.append(len(windows.own))
        seconds.append(time.perf_counter() - begun)
    summed = torch.stack(losses)
    dist.all_reduce(summed)
    if rank == 0:
        told = {"seconds": seconds, "rows": counts, "losses": summed.tolist()}
        print(json.dumps(told), flush=True)
    dist.destroy_process_group()


# cgroups


@contextmanager
def core_shares(shares: tuple[float, ...]) -> Iterator[list[Path]]:
    """Cgroups whose processes may use these shares of a core, before all other processes."""
    is_v1 = (GROUPS / "cpu").is_dir()
    parent = GROUPS / "cpu" if is_v1 else GROUPS
    made = [parent / f"onefold-{os.getpid()}-{number}" for number in range(len(shares))]
    try:
        for group, share in zip(made, shares, strict=True):
            group.mkdir()
            quota = int(share * PERIOD_US)
            (group / ("cpu.shares" if is_v1 else "cpu.weight")).write_text("10000")
            if is_v1:
                (group / "cpu.cfs_period_us").write_text(str(PERIOD_US))
                (group / "cpu.cfs_quota_us").write_text(str(quota))
            else:
                (group / "cpu.max").write_text(f"{quota} {PERIOD_US}")
        yield made
    finally:
        for group in made:
            with suppress(OSError):
                group.rmdir()


# the part "speed"


def speed(arguments: argparse.Namespace) -> dict[str, Any]:
    """Equal rows beside rows by speed, in turns."""
    rounds = []
    for _ in range(arguments.rounds):
        equal, auto = run("equal", arguments), run("auto", arguments)
        gain = settled_seconds(equal) / settled_seconds(auto)
        changes = [i for i in range(1, arguments.steps) if auto["rows"][i] != auto["rows"][i - 1]]
        apart = max(abs(a / b - 1) for a, b in zip(equal["losses"], auto["losses"], strict=True))
        found = {
            "gain": gain, "equal_step_s": settled_seconds(equal),
            "auto_step_s": settled_seconds(auto), "changed_at": changes,
            "rows_of_rank_0": auto["rows"][-1], "losses_apart": apart,
        }  # fmt: skip
        print(json.dumps(rounded(found)), flush=True)
        rounds.append(found)
    gain = median(each["gain"] for each in rounds)
    settled = max(next(iter(each["changed_at"][-1:]), 0) for each in rounds)
    print(
        f"rows by speed: {gain:.2f}x the rows a second of equal rows (wanted {WANTED}, bound "
        f"{sum(CORES) / (2 * min(CORES)):.2f}); rows moved last at step {settled}"
    )
    return {"cores": CORES, "rows": arguments.rows, "steps": arguments.steps,
            "model": arguments.model, "seq": arguments.seq, "gain": gain, "wanted": WANTED,
            "rounds": rounds}  # fmt: skip


def run(kind: str, arguments: argparse.Namespace) -> dict[str, Any]:
    """One run of two fresh ranks."""
    given = [f"--{name}={getattr(arguments, name)}" for name in ("steps", "rows", "seq", "model")]
    with core_shares(CORES) as groups:
        done = subprocess.run(
            [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2",
             __file__, "speed", f"--worker={kind}", *given],
            env={**os.environ, "ONEFOLD_GROUPS": ":".join(map(str, groups))},
            capture_output=True, text=True, timeout=1800, check=False,
        )  # fmt: skip
    if done.returncode:
        sys.exit(f"mixed: a rank failed:\n{done.stderr[-4000:]}")
    return json.loads(next(line for line in done.stdout.splitlines() if line.startswith("{")))


def settled_seconds(found: dict[str, Any]) -> float:
    """The mean time of a step once shares have settled; quotas make single steps uneven."""
    seconds = found["seconds"][SETTLED_AFTER:]
    return sum(seconds) / len(seconds)


PARTS: Mapping[str, Callable[[argparse.Namespace], dict[str, Any]]] = {"speed": speed}


def main() -> int:
    """Run the parts; the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("parts", nargs="*", default=list(PARTS), choices=PARTS)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--rows", type=int, default=128)
    parser.add_argument("--seq", type=int, default=64)
    parser.add_argument("--model", default="tiny", choices=PRESETS)
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.worker:
        train(arguments.worker == "auto", arguments)
        return 0
    if arguments.steps <= SETTLED_AFTER:
        parser.error(f"--steps must be above {SETTLED_AFTER}")
    about = provenance()
    found = {part: PARTS[part](arguments) for part in arguments.parts}
    path = arguments.results / f"{about['date']}-mixed-{'-'.join(found)}.json"
    path.write_text(json.dumps(rounded({**about, **found}), indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
