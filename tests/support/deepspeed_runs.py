"""Write the folders of tests/foreign/data/deepspeed-*, by DeepSpeed itself; and go on from one.

Needs DeepSpeed 0.19 (`DS_BUILD_OPS=0 pip install --no-build-isolation deepspeed==0.19.8`), on CPUs:

    torchrun --nproc-per-node 2 -m tests.support.deepspeed_runs write tests/foreign/data [CASE...]
    torchrun --nproc-per-node 2 -m tests.support.deepspeed_runs resume FOLDER STAGE

The second takes the parent of a universal folder named `t`, and prints the losses that follow.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

NUM_STEPS, NUM_NEXT, NUM_ROWS = 3, 5, 6
CASES = {
    "stage1": (1, "fp32"), "stage2": (2, "fp32"), "stage3": (3, "fp32"),
    "stage1-bf16": (1, "bf16"), "stage3-bf16": (3, "bf16"),
}  # fmt: skip
IN_TURNS = {"round_robin_gradients": True, "parameter_alignment": True}
"""Options of stage 2, under which parameters lie in another order than in the module."""


class PeerNet(nn.Module):
    """Tied weights, frozen ones, a buffer, and sizes that no number of ranks divides."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 5)
        self.norm = nn.LayerNorm(5)
        self.fixed = nn.Linear(5, 5)
        self.wide, self.back = nn.Linear(5, 7), nn.Linear(7, 5)
        self.head = nn.Linear(5, 11, bias=False)
        self.head.weight = self.embed.weight
        self.fixed.requires_grad_(False)
        self.register_buffer("scale", torch.linspace(0.5, 1.5, 5))

    def forward(self, rows: Tensor) -> Tensor:
        hidden = self.norm(self.fixed(self.embed(rows))) * self.scale.to(self.embed.weight.dtype)
        return self.head(hidden + self.back(torch.tanh(self.wide(hidden)))).float()


def built(seed: int = 0) -> tuple[PeerNet, torch.optim.AdamW]:
    """Return the module, and an optimizer of two groups."""
    torch.manual_seed(seed)
    net = PeerNet()
    trained = [p for p in net.parameters() if p.requires_grad]
    groups = [
        {"params": [p for p in trained if p.dim() > 1], "weight_decay": 0.1},
        {"params": [p for p in trained if p.dim() == 1], "weight_decay": 0.0, "lr": 2e-2},
    ]
    return net, torch.optim.AdamW(groups, lr=1e-2)


def rows_of(step: int, rank: int, num_ranks: int) -> tuple[Tensor, Tensor]:
    """Return the inputs and labels of one rank: the same rows in all, on any number of ranks."""
    drawn = torch.randint(11, (2, NUM_ROWS), generator=torch.Generator().manual_seed(step))
    own = slice(rank * NUM_ROWS // num_ranks, (rank + 1) * NUM_ROWS // num_ranks)
    return drawn[0, own], drawn[1, own]


def _main(arguments: list[str]) -> None:
    deepspeed = import_module("deepspeed")
    deepspeed.init_distributed("gloo")
    if arguments[0] == "resume":
        engine = _engine(int(arguments[2]), "fp32", 1, universal=True)
        engine.load_checkpoint(arguments[1], tag="t")
        _show(json.dumps(_losses(engine, NUM_STEPS, NUM_NEXT)))
    else:
        for name in arguments[2:] or CASES:
            stage, precision = CASES[name]
            _write(Path(arguments[1]), name, stage, precision)
    torch.distributed.destroy_process_group()


def _show(line: str) -> None:
    if torch.distributed.get_rank() == 0:
        sys.stdout.write(f"losses {line}\n")


def _engine(stage: int, precision: str, seed: int = 0, *, universal: bool = False) -> Any:
    net, optimizer = built(seed)
    net.fixed.load_state_dict(built()[0].fixed.state_dict())  # no universal folder fills them
    config = {
        "train_micro_batch_size_per_gpu": 3,
        "zero_optimization": {"stage": stage, **(IN_TURNS if stage == 2 else {})},
        "zero_allow_untested_optimizer": True,
        "bf16": {"enabled": precision == "bf16"},
        "checkpoint": {"load_universal": universal},
    }
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 100)
    engine, *_ = import_module("deepspeed").initialize(
        model=net, optimizer=optimizer, lr_scheduler=schedule, config=config
    )
    return engine


def _losses(engine: Any, first: int, number: int) -> list[float]:
    """Train, and return the losses of all rows."""
    rank, num_ranks = torch.distributed.get_rank(), torch.distributed.get_world_size()
    losses = []
    for step in range(first, first + number):
        rows, labels = rows_of(step, rank, num_ranks)
        loss = nn.functional.cross_entropy(engine(rows), labels)
        engine.backward(loss)
        engine.step()
        mean = loss.detach().double()
        torch.distributed.all_reduce(mean)
        losses.append(mean.item() / num_ranks)
    return losses


def _write(data: Path, name: str, stage: int, precision: str) -> None:
    is_first, out = torch.distributed.get_rank() == 0, data / f"deepspeed-{name}"
    if is_first:
        shutil.rmtree(out, ignore_errors=True)
    torch.distributed.barrier()
    engine = _engine(stage, precision)
    _losses(engine, 0, NUM_STEPS)
    engine.save_checkpoint(str(out), tag="t", client_state={"epoch": 7})
    losses = _losses(engine, NUM_STEPS, NUM_NEXT)
    torch.distributed.barrier()
    if is_first:
        (out / "next.json").write_text(json.dumps(losses) + "\n")
        for file in ("zero_to_fp32.py", "zero_to_torch.py"):
            (out / file).unlink(missing_ok=True)
        if name in ("stage1", "stage3"):
            _convert(out, data / f"deepspeed-universal-{name}")
    torch.distributed.barrier()


def _convert(source: Path, target: Path) -> None:
    """Make a universal folder, by DeepSpeed's own tool."""
    shutil.rmtree(target, ignore_errors=True)
    command = [sys.executable, "-m", "deepspeed.checkpoint.ds_to_universal"]
    command += ["--input_folder", str(source / "t"), "--output_folder", str(target / "t")]
    env = {key: value for key, value in os.environ.items() if "RANK" not in key}
    subprocess.run([*command, "--inject_missing_state"], check=True, env=env)
    shutil.copy(source / "next.json", target)


if __name__ == "__main__":
    _main(sys.argv[1:])
