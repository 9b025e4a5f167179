"""Seconds and memory of reading what others have written, beside the readers they have themselves.

    python benchmarks/loading.py [--gb 2.0] [--rounds 3]

experts   a made-up Mixtral whose experts are one by one in the files, and stacked in the module:
          on 2 ranks, by `load_pretrained` on meta under transformers' names and under the module's
          own, and by transformers' `from_pretrained`, which reads all of it on each rank
runs      weights and AdamW's moments of a GPT: one file of `torch.save`, beside `torch.load`; and a
          DCP folder of FSDP2, beside `dcp.load`

Loads find nothing in the page cache. Memory is the highest resident set above that before the
call; `anonymous` leaves out pages of files that are mapped. `read`: bytes of tensors that a rank
took from files. Highest rank, medians of rounds. Writes `benchmarks/results/DATE-loading.json`.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from datetime import date
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from checkpoint import build, forget_pages
from contest.results import RESULTS, provenance, rounded
from contest.world import Memory, run_ranks
from rich.console import Console
from rich.table import Table

import onefold

RANKS, LAYERS = 2, 12
LAYER_NBYTES = 4 * (8 * 3 * 1024 * 3584 + 4 * 1024 * 1024)  # of the Mixtral


class Anonymous:
    """The most bytes of memory that no file backs, looked at every millisecond."""

    def __init__(self) -> None:
        self._before = self.most = self._now()
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._look, daemon=True)
        self._thread.start()

    def end(self) -> int:
        self._ended.set()
        self._thread.join()
        return self.most - self._before

    def _look(self) -> None:
        while not self._ended.wait(0.001):
            self.most = max(self.most, self._now())

    @staticmethod
    def _now() -> int:
        lines = Path("/proc/self/status").read_text().splitlines()
        return 1024 * next(int(line.split()[1]) for line in lines if line.startswith("RssAnon"))


def experts(num_layers: int) -> Any:
    import transformers

    config = transformers.MixtralConfig(
        hidden_size=1024, intermediate_size=3584, num_hidden_layers=num_layers, vocab_size=1024,
        num_attention_heads=16, num_key_value_heads=16, num_local_experts=8,
    )  # fmt: skip
    return transformers.MixtralForCausalLM(config)


def write_experts(rank: int, folder: str, num_layers: int) -> dict[str, Any]:
    """Write both folders, from one process."""
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = experts(num_layers)
    onefold.shard(model, stage=0)
    onefold.save_pretrained(model, Path(folder, "theirs"))
    onefold.save_pretrained(model, Path(folder, "own"), original_names=False)
    nbytes = sum(p.numel() * 4 for p in model.parameters())
    return {"nbytes": nbytes, "fused": max(p.numel() * 4 for p in model.parameters())}


def write_runs(rank: int, folder: str) -> dict[str, Any]:
    """Write a run of FSDP2 as a DCP folder, and as one file of `torch.save`."""
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict

    dist.init_process_group("gloo")
    model, optimizer = fsdp2()
    for p in model.parameters():
        p.grad = torch.zeros_like(p)
    optimizer.step()
    weights, moments = get_state_dict(model, optimizer)
    dcp.save({"model": weights, "optim": moments}, checkpoint_id=Path(folder, "dcp"))
    options = StateDictOptions(full_state_dict=True, cpu_offload=True)
    weights, moments = get_state_dict(model, optimizer, options=options)
    if rank == 0:
        torch.save({"model": weights, "optim": moments}, Path(folder, "run.pt"))
    return {"nbytes": 12 * sum(p.numel() for p in model.parameters())}


def fsdp2() -> tuple[Any, Any]:
    from torch.distributed.fsdp import fully_shard

    model = build(LAYERS)
    for block in model.blocks:
        fully_shard(block)
    fully_shard(model)
    return model, torch.optim.AdamW(model.parameters(), lr=3e-4)


def sharded() -> tuple[Any, Any]:
    model = build(LAYERS)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)
    onefold.shard(model, optimizer, stage=3)
    return model, optimizer


def read_experts(folder: Path, num_layers: int) -> Callable[[], object]:
    with torch.device("meta"):
        model = experts(num_layers)

    def load() -> object:
        onefold.load_pretrained(model, folder)
        onefold.shard(model, stage=3)
        return model

    return load


def read_by_transformers(folder: Path, _: int) -> Callable[[], object]:
    import transformers

    return lambda: transformers.MixtralForCausalLM.from_pretrained(folder)


def read_run(path: Path, _: int) -> Callable[[], object]:
    model, optimizer = sharded()
    return lambda: onefold.load(path, model, optimizer)


def read_by_torch(path: Path, _: int) -> Callable[[], object]:
    from torch.distributed.checkpoint.state_dict import set_state_dict

    model = build(LAYERS)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)

    def load() -> object:
        state = torch.load(path, weights_only=True)
        return set_state_dict(model, optimizer, model_state_dict=state["model"],
                              optim_state_dict=state["optim"])  # fmt: skip

    return load


def read_by_dcp(path: Path, _: int) -> Callable[[], object]:
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

    model, optimizer = fsdp2()

    def load() -> object:
        weights, moments = get_state_dict(model, optimizer)
        dcp.load({"model": weights, "optim": moments}, checkpoint_id=path)
        return set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=moments)

    return load


CASES: dict[str, tuple[str, str, Callable[[Path, int], Callable[[], object]]]] = {
    "experts, transformers' names": ("experts", "theirs", read_experts),
    "experts, the module's names": ("experts", "own", read_experts),
    "experts, from_pretrained": ("experts", "theirs", read_by_transformers),
    "file of torch.save": ("runs", "run.pt", read_run),
    "file of torch.save, torch.load": ("runs", "run.pt", read_by_torch),
    "DCP folder": ("runs", "dcp", read_run),
    "DCP folder, dcp.load": ("runs", "dcp", read_by_dcp),
}


def measure(rank: int, name: str, folder: str, num_layers: int) -> dict[str, Any]:
    """Load once, with counted bytes."""
    from onefold.checkpoint.safetensors import PretrainedFiles

    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    _, inside, case = CASES[name]
    load = case(Path(folder, inside), num_layers)
    read = 0
    box = PretrainedFiles.box

    def counted(files: PretrainedFiles, tensor: str, wanted: Any) -> torch.Tensor:
        nonlocal read
        values = box(files, tensor, wanted)
        read += values.nbytes
        return values

    PretrainedFiles.box = counted  # type: ignore[method-assign]
    forget_pages(Path(folder))
    dist.barrier()
    memory, anonymous, begin = Memory("cpu"), Anonymous(), time.perf_counter()
    kept = load()
    seconds = time.perf_counter() - begin
    del kept
    return {"seconds": seconds, "peak": memory.peak(), "anonymous": anonymous.end(), "read": read}


def show(rounds: list[dict[str, Any]], nbytes: dict[str, int]) -> Table:
    table = Table(title=f"{len(rounds)} rounds: medians, highest rank", title_justify="left")
    for column in ("", "seconds", "s per GB", "peak MB", "anonymous MB", "read MB"):
        table.add_column(column, justify="right" if column else "left")
    for name, (kind, *_) in CASES.items():
        most = {
            key: median(max(rank[key] for rank in found[name]) for found in rounds)
            for key in ("seconds", "peak", "anonymous", "read")
        }
        per_gb = most["seconds"] * 1e9 / nbytes[kind]
        sizes = [f"{most[key] / 1e6:,.0f}" for key in ("peak", "anonymous", "read")]
        table.add_row(name, f"{most['seconds']:.2f}", f"{per_gb:.2f}", *sizes)
    return table


def main() -> int:
    """Write the folders once, read them in turn, print the table, and keep the result."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--gb", type=float, default=2.0, help="of the experts' weights")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--folder", type=Path, help="on the disk to be measured (default: TMPDIR)")
    parser.add_argument("--results", type=Path, default=RESULTS)
    options = parser.parse_args()
    layers = max(1, round(options.gb * 1e9 / LAYER_NBYTES))
    folder = tempfile.mkdtemp(dir=options.folder)
    rounds: list[dict[str, Any]] = []
    try:
        (about,) = run_ranks(1, write_experts, folder, layers)
        nbytes = {"experts": about["nbytes"]}
        nbytes["runs"] = run_ranks(RANKS, write_runs, folder)[0]["nbytes"]
        names = [*CASES]
        for number in range(options.rounds):
            order = names[number % len(names) :] + names[: number % len(names)]
            rounds.append({name: run_ranks(RANKS, measure, name, folder, layers) for name in order})
    finally:
        shutil.rmtree(folder)
    kept = {**provenance(), "nbytes": nbytes, "fused": about["fused"], "ranks": RANKS}
    path = options.results / f"{date.today().isoformat()}-loading.json"
    path.write_text(json.dumps({**kept, "rounds": rounded(rounds)}, indent=1) + "\n")
    Console(width=None if sys.stdout.isatty() else 120).print(show(rounds, nbytes))
    return 0


if __name__ == "__main__":
    sys.exit(main())
