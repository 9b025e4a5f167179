"""Seconds, bytes and memory of saving and loading, beside torch's, DeepSpeed's and the disk itself.

python benchmarks/checkpoint.py                 2 ranks, 2.0 GB of weights and moments, 5 rounds
python benchmarks/checkpoint.py --layers 12     1.0 GB

One GPT under FSDP2 with `torch.distributed.checkpoint`, DeepSpeed stage 3 and Onefold stage 3 in
turn, and a plain copy of as many bytes between the disk and aligned memory (O_DIRECT, both ranks at
once), which is the ceiling. "saved" is when the call returns, "durable" when the disk has every
byte, whoever waits for it. Loads find nothing in the page cache, then everything ("cached").
Memory is the highest resident set during the call above that before it. Writes
`benchmarks/results/DATE-checkpoint.json`.
"""

from __future__ import annotations

import argparse
import json
import mmap
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from datetime import date
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from contest.case import Case, batches, touch_libraries
from contest.engines import deepspeed, ordinary_step
from contest.keeping import DISK, HEAD, OURS, rows
from contest.results import RESULTS, provenance, rounded
from contest.summary import Round
from contest.world import Memory, one_round, run_ranks
from rich.console import Console
from rich.table import Table
from torch import nn

from onefold.planner.models.gpt import GPT, GPTConfig

WIDTH, HEADS = 768, 12
CHUNK_NBYTES = 8 << 20


@dataclass(slots=True)
class Keeper:
    """How one library saves and loads: into a folder, from it; `later` waits in the background."""

    save: Callable[[Path], object]
    load: Callable[[Path], object]
    later: Callable[[Path], Callable[[], object]] | None = None


def build(num_layers: int) -> GPT:
    """The model that everybody keeps."""
    torch.manual_seed(0)
    return GPT(GPTConfig(num_layers, WIDTH, HEADS, lr=3e-4), 128)


def keep_onefold(model: nn.Module) -> tuple[Keeper, Callable[[Any], float]]:
    """This library."""
    import onefold

    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, fused=True)
    onefold.shard(model, optimizer, stage=3)
    keeper = Keeper(
        save=lambda folder: onefold.save(folder, model, optimizer),
        load=lambda folder: onefold.load(folder, model, optimizer),
        later=lambda folder: onefold.save(folder, model, optimizer, wait=False).wait,
    )
    return keeper, ordinary_step(Case(), model, optimizer)


def keep_fsdp2(model: nn.Module) -> tuple[Keeper, Callable[[Any], float]]:
    """torch: state dicts of sharded tensors, `torch.distributed.checkpoint`."""
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
    from torch.distributed.fsdp import fully_shard

    for block in model.blocks:
        fully_shard(block)
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, fused=True)

    def state() -> dict[str, Any]:
        weights, moments = get_state_dict(model, optimizer)
        return {"model": weights, "optim": moments}

    def load(folder: Path) -> None:
        found = state()
        dcp.load(found, checkpoint_id=folder)
        set_state_dict(
            model, optimizer, model_state_dict=found["model"], optim_state_dict=found["optim"]
        )

    keeper = Keeper(lambda folder: dcp.save(state(), checkpoint_id=folder), load)
    return keeper, ordinary_step(Case(), model, optimizer)


def keep_deepspeed(model: nn.Module) -> tuple[Keeper, Callable[[Any], float]]:
    """DeepSpeed stage 3, its own checkpoints."""
    os.environ["DS_ACCELERATOR"] = "cpu"
    contestant = deepspeed(Case(), model, stage=3)
    engine = contestant.engine
    keeper = Keeper(
        save=lambda folder: engine.save_checkpoint(str(folder)),
        load=lambda folder: engine.load_checkpoint(str(folder)),
    )
    return keeper, contestant.step


KEEPERS = {OURS: keep_onefold, "fsdp2 + dcp": keep_fsdp2, "deepspeed 3": keep_deepspeed}
PACKAGES = {"deepspeed 3": "deepspeed"}


def measure(rank: int, name: str, num_layers: int, folder: str) -> dict[str, Any]:
    """One rank's turn: train a step, save, load, save in the background."""
    torch.set_num_threads(1)
    if name in PACKAGES:
        os.environ["DS_ACCELERATOR"] = "cpu"
        __import__("deepspeed").init_distributed(dist_backend="gloo")
    else:
        dist.init_process_group("gloo")
    case, root = Case(), Path(folder)
    touch_libraries(case)
    keeper, step = KEEPERS[name](build(num_layers))
    step(batches(case, rank, 0))
    keeper.save(root / "warm")  # what the first save imports is not what is measured
    keeper.load(root / "warm")
    step(batches(case, rank, 1))
    found: dict[str, Any] = {}
    _sync(root / "warm", rank)
    begin, memory = _begin()
    keeper.save(root / "a")
    dist.barrier()
    found["saved"] = time.perf_counter() - begin
    found["save_extra"] = memory.peak()
    _sync(root / "a", rank)
    found["durable"] = time.perf_counter() - begin
    found["nbytes"] = sum(path.stat().st_size for path in _files(root / "a"))
    forget_pages(root / "a")
    begin, memory = _begin()
    keeper.load(root / "a")
    dist.barrier()
    found["loaded"] = time.perf_counter() - begin
    found["load_extra"] = memory.peak()
    found["warm"] = load_cached(keeper, root / "a", rank)
    step(batches(case, rank, 2))
    if keeper.later is not None:
        begin, _ = _begin()
        wait = keeper.later(root / "b")
        found["copied"] = time.perf_counter() - begin
        wait()
    return found


def measure_disk(rank: int, nbytes: int, folder: str) -> dict[str, Any]:
    """Copy this rank's share of `nbytes` to the disk and back, past the page cache."""
    dist.init_process_group("gloo")
    path = Path(folder) / f"rank-{rank}"
    room = mmap.mmap(-1, CHUNK_NBYTES)  # aligned, as O_DIRECT wants it
    room.write(os.urandom(CHUNK_NBYTES))
    chunks = -(-nbytes // dist.get_world_size() // CHUNK_NBYTES)
    found: dict[str, Any] = {"nbytes": chunks * CHUNK_NBYTES * dist.get_world_size()}
    for name, flags, act in (
        ("durable", os.O_WRONLY | os.O_CREAT | os.O_DIRECT, lambda fd: os.writev(fd, [room])),
        ("loaded", os.O_RDONLY | os.O_DIRECT, lambda fd: os.readv(fd, [room])),
    ):
        dist.barrier()
        begin = time.perf_counter()
        fd = os.open(path, flags)
        for _ in range(chunks):
            if act(fd) != CHUNK_NBYTES:
                raise OSError(f"a short transfer to {path}")
        os.fsync(fd)
        os.close(fd)
        dist.barrier()
        found[name] = time.perf_counter() - begin
    return found


def _begin() -> tuple[float, Memory]:
    dist.barrier()
    return time.perf_counter(), Memory("cpu")


def _files(folder: Path) -> Iterator[Path]:
    return (path for path in folder.rglob("*") if path.is_file())


def _sync(folder: Path, rank: int) -> None:
    """Wait until the disk has what a library has left to the system."""
    if rank == 0:
        for path in _files(folder):
            fd = os.open(path, os.O_RDONLY)
            os.fsync(fd)
            os.close(fd)
    dist.barrier()


def load_cached(keeper: Keeper, folder: Path, rank: int) -> float:
    """Seconds to load once rank 0 has read all files through the system's cache."""
    if rank == 0:
        for path in _files(folder):
            with path.open("rb") as file:
                while file.read(CHUNK_NBYTES):
                    pass
    begin, _ = _begin()
    keeper.load(folder)
    dist.barrier()
    return time.perf_counter() - begin


def forget_pages(folder: Path) -> None:
    """Drop the files' pages from the system's cache; all pages, where this user may."""
    dist.barrier()
    for path in _files(folder):
        fd = os.open(path, os.O_RDONLY)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(fd)
    with suppress(OSError):
        Path("/proc/sys/vm/drop_caches").write_text("1")


def show(console: Console, rounds: list[Round]) -> None:
    """Medians, and the bandwidth beside the disk's."""
    table = Table(title=f"{len(rounds)} rounds: medians, highest rank", title_justify="left")
    for column in HEAD:
        table.add_column(column, justify="right" if column else "left")
    for row in rows(rounds):
        table.add_row(*row)
    console.print(table)


def main() -> int:
    """Run the rounds, print the table, write the result."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--layers", type=int, default=24)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--folder", type=Path, help="on the disk to be measured (default: TMPDIR)")
    parser.add_argument("--results", type=Path, default=RESULTS)
    options = parser.parse_args()
    console = Console(width=None if sys.stdout.isatty() else 160)
    names = []
    for name in KEEPERS:
        if name in PACKAGES and find_spec(PACKAGES[name]) is None:
            console.print(f"{name}: {PACKAGES[name]} is not installed, skipped")
        else:
            names.append(name)
    numel = sum(p.numel() for p in build(options.layers).parameters())
    rounds: list[Round] = []
    failed: dict[str, str] = {}

    def run_one(name: str) -> list[dict[str, Any]]:
        folder = tempfile.mkdtemp(dir=options.folder)
        try:
            if name == DISK:
                return run_ranks(options.ranks, measure_disk, 12 * numel, folder)
            return run_ranks(options.ranks, measure, name, options.layers, folder)
        finally:
            shutil.rmtree(folder)

    about = {**provenance(), "layers": options.layers, "ranks": options.ranks, "numel": numel}
    for number in range(options.rounds):
        first = number % (len(names) + 1)
        order = [DISK, *names]
        rounds.append(one_round(order[first:] + order[:first], failed, run_one, console))
        path = options.results / f"{date.today().isoformat()}-checkpoint.json"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps({**about, "rounds": rounded(rounds)}, indent=1) + "\n")
    show(console, rounds)
    return 1 if OURS in failed or DISK in failed else 0


if __name__ == "__main__":
    sys.exit(main())
