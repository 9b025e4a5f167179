"""The largest model that two ranks with memory caps 1:3 train, by even shards and by shares="auto".

    python benchmarks/mixed_memory.py                     # caps of 700 and 2100 MiB; needs root
    python benchmarks/mixed_memory.py --cap 900 --steps 2

Each rank is a process in a memory cgroup of its own, whose cap the kernel enforces (swap included).
A model of n equal blocks is built on `meta`, so no rank holds it whole. It fits if all steps end.
The largest n is found by bisection, once for each way. A shared run is also compared with the
closed form: what the shares of the run say that each rank holds.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import subprocess
import sys
import time
from contextlib import ExitStack
from datetime import date
from pathlib import Path
from typing import Any

from contest.results import RESULTS, provenance, rounded
from streaming import memory_limit, peak_of

WANTED = {"memory": 1.8}
WIDTH = 1024
BLOCK_NUMEL = 2 * WIDTH * WIDTH
RATIO = 3
PATIENCE_S = 240
"""Of one try; a rank that the kernel has ended ends the other at once."""


def run_rank(asked: dict[str, Any]) -> dict[str, Any]:
    """Train some steps of a model of `blocks` blocks; return what this rank holds."""
    import torch
    import torch.distributed as dist
    from torch import nn

    import onefold

    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    with torch.device("meta"):
        model = nn.Sequential(*(Block(nn) for _ in range(asked["blocks"])))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    shares = "auto" if asked["way"] == "shares" else None
    onefold.shard(model, optimizer, stage=3, shares=shares)
    for _ in range(asked["steps"]):
        model(torch.randn(4, WIDTH)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    report = onefold.report(model)
    kinds = ("weight", "optimizer")
    dist.destroy_process_group()
    return {"shares": report.shares, "held": {kind: report.nbytes(kind) for kind in kinds}}


def Block(nn: Any) -> Any:
    """Two Linears with a residual: `BLOCK_NUMEL` weights."""

    class Residual(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up = nn.Linear(WIDTH, WIDTH, bias=False)
            self.down = nn.Linear(WIDTH, WIDTH, bias=False)

        def forward(self, x: Any) -> Any:
            return x + self.down(self.up(x).relu())

    return Residual()


def attempt(way: str, blocks: int, asked: argparse.Namespace) -> dict[str, Any] | None:
    """Run both ranks in their groups; None if one of them ended without a result."""
    with socket.socket() as free, ExitStack() as stack:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
        ranks = []
        for rank in range(2):
            cap = (asked.cap << 20) * (RATIO if rank else 1)
            group = stack.enter_context(memory_limit(cap, f"-rank{rank}"))
            ranks.append((group, start(way, blocks, rank, port, group, asked)))
        free.close()
        begun = time.monotonic()
        while any(process.poll() is None for _, process in ranks):
            is_lost = any(process.poll() not in (None, 0) for _, process in ranks)
            if is_lost or time.monotonic() - begun > PATIENCE_S:
                for _, process in ranks:
                    process.kill()
            time.sleep(0.1)
        told = [process.communicate()[0] for _, process in ranks]
        if any(process.returncode for _, process in ranks):
            return None
        found = [json.loads(text.splitlines()[-1]) for text in told]
        peaks = [peak_of(group) for group, _ in ranks]
    return {"blocks": blocks, "peaks": peaks, "ranks": found}


def start(
    way: str, blocks: int, rank: int, port: int, group: Path, asked: argparse.Namespace
) -> subprocess.Popen[str]:
    """Start one rank inside its group."""
    given = json.dumps({"way": way, "blocks": blocks, "steps": asked.steps})
    places = {"RANK": rank, "WORLD_SIZE": 2, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    environment = {
        **os.environ, **{name: str(value) for name, value in places.items()},
        "MALLOC_MMAP_THRESHOLD_": "1048576",
    }  # fmt: skip

    def join() -> None:
        (group / "cgroup.procs").write_text(str(os.getpid()))

    return subprocess.Popen(
        [sys.executable, __file__, "--rank-json", given], stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL, preexec_fn=join, text=True, env=environment,
    )  # fmt: skip


def largest(way: str, asked: argparse.Namespace) -> dict[str, Any]:
    """Find the most blocks that train, to within one block in sixteen."""
    best, low, high = None, 0, 0
    trial = asked.first
    while high == 0 or high - low > max(1, low // 16):
        found = attempt(way, trial, asked)
        print(f"{way}: {trial} blocks {'train' if found else 'do not fit'}", flush=True)
        if found:
            best, low = found, trial
        else:
            high = trial
        trial = 2 * trial if high == 0 else (low + high) // 2
        if trial == 0:
            raise SystemExit("not even one block fits: raise --cap")
    assert best is not None, "one try at least has fitted"
    return best | {"parameters": best["blocks"] * BLOCK_NUMEL}


def main() -> int:
    """Measure, print, and keep the result."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--cap", type=int, default=700, help="MiB of rank 0; rank 1 has 3 times it")
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--first", type=int, default=8, help="blocks of the first try")
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--rank-json", help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.rank_json:
        print(json.dumps(run_rank(json.loads(asked.rank_json))))
        return 0
    even, shared = largest("even", asked), largest("shares", asked)
    ratio = shared["blocks"] / even["blocks"]
    print(f"{ratio:.2f} times the model of even shards, wanted {WANTED['memory']}")
    result = provenance() | {"cap_mib": [asked.cap, RATIO * asked.cap], "wanted": WANTED}
    result |= {"even": even, "shares": shared, "ratio": ratio}
    asked.results.mkdir(parents=True, exist_ok=True)
    path = asked.results / f"{date.today().isoformat()}-mixed-caps.json"
    path.write_text(json.dumps(rounded(result)) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
