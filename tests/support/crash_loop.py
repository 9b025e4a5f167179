"""Kills a run of two ranks that saves every step, again and again, wherever it happens to be.

    python tests/support/crash_loop.py --kills 200

Each life starts the ranks anew: they join, shard, load the newest checkpoint, train, and save
after every step. SIGKILL comes after a time drawn log-uniformly, so that it meets start-up, load,
step and save alike, to both ranks or to one of them. Every life must find a complete checkpoint, at
least as new as the last one that was complete when the life before ended, and the weights at the
end must be, bit for bit, those of a run that nobody disturbed.
"""

from __future__ import annotations

import argparse
import math
import os
import random
import signal
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

import onefold
from onefold.checkpoint.directory import find
from tests.support.forking import HANG_S
from tests.support.models import Model, next_token_loss, token_batches
from tests.support.ports import free_port
from tests.support.ranks import seeded

SHORTEST_S, LONGEST_S = 0.02, 4.0


def life(rank: int, folder: Path, port: int, steps: int, is_async: bool) -> None:
    """One rank, from its start to the last step or its death."""
    torch.set_num_threads(1)
    with (folder / f"stderr-{rank}").open("w") as file:
        os.dup2(file.fileno(), 2)  # a rank whose peer is killed says so
    note(folder, rank, "start-up")
    url = f"tcp://127.0.0.1:{port}"
    dist.init_process_group("gloo", url, rank=rank, world_size=2)
    module = seeded(Model)
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-2)
    onefold.shard(module, optimizer, stage=3)
    done = 0
    if list((folder / "runs").glob("step-*")):
        note(folder, rank, "load")
        done = onefold.load(folder / "runs", module, optimizer)["step"]
    batches = token_batches(steps)
    for step in range(done, steps):
        note(folder, rank, "step")
        next_token_loss(module, batches[step].chunk(2)[rank]).backward()
        optimizer.step()
        optimizer.zero_grad()
        note(folder, rank, "save")
        path = folder / "runs" / f"step-{step + 1:06d}"
        extra = {"step": step + 1}
        wait = not is_async or step % 2 == 0
        onefold.save(path, module, optimizer, extra=extra, keep=2, wait=wait)
    note(folder, rank, "end")
    with onefold.unsharded(module):
        if rank == 0:
            weights = [p.detach().clone() for p in module.parameters()]
            torch.save(weights, folder / "final.tmp")  # a kill may come here, too
            (folder / "final.tmp").rename(folder / "final.pt")
    dist.barrier()
    dist.destroy_process_group()


def warm_up(folder: Path) -> None:
    """Do once here what imports modules, so that ranks, which are forked, need not."""
    module = seeded(Model)
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-2)
    onefold.shard(module, optimizer, stage=3)
    next_token_loss(module, token_batches(1)[0]).backward()
    optimizer.step()
    onefold.save(folder / "warm", module, optimizer, wait=False).wait()
    onefold.load(folder / "warm", module, optimizer)


def note(folder: Path, rank: int, phase: str) -> None:
    """Leave what a rank is about to do where its killer finds it."""
    new = folder / f"phase-{rank}-new"
    new.write_text(phase)
    new.rename(folder / f"phase-{rank}")


def run_once(
    folder: Path, steps: int, kill_after: float | None, victims: list[int], *, is_async: bool
) -> str:
    """A life: "finished", or the phase in which rank 0 was when the signal came."""
    context = mp.get_context("fork")
    port = free_port()
    ranks = [
        context.Process(target=life, args=(rank, folder, port, steps, is_async))
        for rank in range(2)
    ]
    for each in ranks:
        each.start()
    start = time.monotonic()
    deadline = HANG_S if kill_after is None else kill_after
    for each in ranks:
        each.join(max(0.0, deadline - (time.monotonic() - start)))
    if all(each.exitcode == 0 for each in ranks):
        return "finished"
    if kill_after is None:
        codes = [each.exitcode for each in ranks]
        _kill(ranks, [0, 1])
        told = "".join((folder / f"stderr-{rank}").read_text() for rank in range(2))
        raise RuntimeError(f"an undisturbed run ended with exit codes {codes}:\n{told}")
    if any(each.exitcode not in (0, None) for each in ranks):
        told = "".join((folder / f"stderr-{rank}").read_text() for rank in range(2))
        _kill(ranks, [0, 1])
        raise RuntimeError(f"a rank failed before it was killed:\n{told}")
    phase = (folder / "phase-0").read_text() if (folder / "phase-0").exists() else "start-up"
    _kill(ranks, victims)
    _kill(ranks, [0, 1])
    return phase


def _kill(ranks: list[Any], victims: list[int]) -> None:
    for victim in victims:
        if ranks[victim].exitcode is None:
            os.kill(ranks[victim].pid, signal.SIGKILL)
    for victim in victims:
        ranks[victim].join()


def newest(folder: Path) -> int:
    """The step of the newest complete checkpoint; 0 before the first."""
    runs = folder / "runs"
    if not list(runs.glob("step-*")):
        return 0
    manifest = find(runs)[0].manifest
    assert manifest is not None, "a checkpoint of ours has a manifest"
    return manifest.step


def loop(folder: Path, *, kills: int, steps: int, seed: int, is_async: bool) -> Counter[str]:
    """Kill `kills` times on the way to `steps`; phases and how often they were hit."""
    draws = random.Random(seed)
    calm, wild = folder / "calm", folder / "wild"
    calm.mkdir()
    wild.mkdir()
    warm_up(folder)
    run_once(calm, steps, None, [], is_async=is_async)
    hit: Counter[str] = Counter()
    reached = 0
    while sum(hit.values()) < kills:
        if reached >= steps:  # it got there between two signals: begin again
            _compare(calm, wild)
            for path in (wild / "runs").iterdir():
                _remove(path)
            (wild / "final.pt").unlink()
            reached = 0
        delay = math.exp(draws.uniform(math.log(SHORTEST_S), math.log(LONGEST_S)))
        victims = draws.choice([[0, 1], [0], [1]])
        phase = run_once(wild, steps, delay, victims, is_async=is_async)
        now = newest(wild)
        if now < reached:
            raise AssertionError(f"step {reached} was complete, after a kill {now} is the newest")
        reached = now
        if phase == "finished":
            reached = steps
        else:
            hit[phase] += 1
        told = f"kills {sum(hit.values())} of {kills}, step {reached} of {steps}"
        print(f"\r{told}", end="", flush=True)
    if not (wild / "final.pt").exists():
        run_once(wild, steps, None, [], is_async=is_async)
    _compare(calm, wild)
    print()
    return hit


def _compare(calm: Path, wild: Path) -> None:
    wanted, got = (torch.load(each / "final.pt") for each in (calm, wild))
    for index, (a, b) in enumerate(zip(wanted, got, strict=True)):
        if not torch.equal(a, b):
            raise AssertionError(f"parameter {index} differs from the undisturbed run's")


def _remove(path: Path) -> None:
    for each in path.iterdir():
        each.unlink()
    path.rmdir()


def main() -> int:
    """Run the loop in a temporary folder."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--steps", type=int, default=120)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--sync", action="store_true", help="no saves in the background")
    options = parser.parse_args()
    start = time.monotonic()
    with tempfile.TemporaryDirectory() as name:
        hit = loop(
            Path(name), kills=options.kills, steps=options.steps, seed=options.seed,
            is_async=not options.sync,
        )  # fmt: skip
    told = ", ".join(f"{count} in {phase}" for phase, count in hit.most_common())
    print(
        f"{options.kills} kills in {time.monotonic() - start:.0f} s: {told}; same bits at the end"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
