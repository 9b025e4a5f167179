"""Runs of other programs: three steps, a checkpoint, and the losses of the next five.

`python -m tests.support.peer_runs tests/foreign/data` writes each program's folder anew, and
`losses.json`. Two ranks of gloo write what FSDP2 writes; all others are one process.
"""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict
from torch.distributed.fsdp import fully_shard
from torch.optim.lr_scheduler import LambdaLR

ROWS, STEPS, MORE = 12, 3, 5


class PeerModel(nn.Module):
    """A frozen scale, two groups, and a name that begins with a number."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(6, 10), nn.Tanh())
        self.head = nn.Linear(10, 4)
        self.scale = nn.Parameter(torch.full((4,), 0.5), requires_grad=False)
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(x)) * self.scale


def build(seed: int = 0, lr: float = 1e-2) -> tuple[PeerModel, torch.optim.AdamW]:
    torch.manual_seed(seed)
    model = PeerModel()
    return model, optimizer_of(model, lr)


def optimizer_of(model: PeerModel, lr: float = 1e-2) -> torch.optim.AdamW:
    groups = [{"params": list(model.body.parameters()), "weight_decay": 0.1},
              {"params": list(model.head.parameters()), "weight_decay": 0.0}]  # fmt: skip
    return torch.optim.AdamW(groups, lr=lr)


def rows(step: int, rank: int = 0, world_size: int = 1) -> Tensor:
    whole = torch.randn(ROWS, 6, generator=torch.Generator().manual_seed(100 + step))
    return whole.chunk(world_size)[rank]


def loss_of(model: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    return (model(x) ** 2).mean()


def train(model: Any, optimizer: Any, steps: range, rank: int = 0, size: int = 1) -> list[float]:
    losses = []
    for step in steps:
        loss = loss_of(model, rows(step, rank, size))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


NEXT = range(STEPS, STEPS + MORE)


def plain(folder: Path) -> list[float]:
    """One file, under keys of one's own, with a scheduler."""
    model, optimizer = build()
    scheduler = LambdaLR(optimizer, lambda _: 1.0)
    train(model, optimizer, range(STEPS))
    state = {"net": model.state_dict(), "opt": optimizer.state_dict(), "epoch": 3,
             "sched": scheduler.state_dict(), "rng": torch.get_rng_state()}  # fmt: skip
    torch.save(state, folder / "run.pt")
    return train(model, optimizer, NEXT)


def wrapped(folder: Path) -> list[float]:
    """Names as DDP and torch.compile leave them."""
    model, optimizer = build()
    train(model, optimizer, range(STEPS))
    named = {f"module._orig_mod.{name}": value for name, value in model.state_dict().items()}
    torch.save({"model_state": named, "optimizer_state": optimizer.state_dict()}, folder / "run.pt")
    return train(model, optimizer, NEXT)


def accelerate(folder: Path) -> list[float]:
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True)
    model, optimizer = build()
    scheduler = LambdaLR(optimizer, lambda _: 1.0)
    model, optimizer, scheduler = accelerator.prepare(model, optimizer, scheduler)
    for step in range(STEPS):
        loss = loss_of(model, rows(step))
        accelerator.backward(loss)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
    accelerator.save_state(str(folder))
    return train(model, optimizer, NEXT)


def lightnings(folder: Path, rank: int = 0, size: int = 1) -> list[float]:
    """A run of Lightning, alone or with FSDP2."""
    import lightning.pytorch as pl
    from lightning.pytorch.strategies import ModelParallelStrategy

    class Module(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net, _ = build()

        def configure_model(self) -> None:
            if size > 1:
                mesh = self.device_mesh
                assert mesh is not None
                fully_shard(self.net, mesh=mesh["data_parallel"])

        def training_step(self, batch: Any, index: int) -> Tensor:
            return loss_of(self.net, batch[0])

        def configure_optimizers(self) -> Any:
            return optimizer_of(self.net)

    data = torch.utils.data.TensorDataset(torch.cat([rows(step) for step in range(STEPS)]))
    loader = torch.utils.data.DataLoader(data, batch_size=ROWS // size)
    module = Module()
    strategy = ModelParallelStrategy(size, 1) if size > 1 else "auto"
    trainer = pl.Trainer(
        max_steps=STEPS, accelerator="cpu", devices=size, strategy=strategy, logger=False,
        enable_progress_bar=False, enable_checkpointing=False, enable_model_summary=False,
    )  # fmt: skip
    trainer.fit(module, loader)
    trainer.save_checkpoint(folder)
    optimizer: Any = trainer.optimizers[0]
    optimizer.zero_grad()  # Lightning clears gradients before the next backward
    return train(module.net, optimizer, NEXT, rank, size)


def lightning(folder: Path) -> list[float]:
    return lightnings(folder / "run.ckpt")


def trainer(folder: Path) -> list[float]:
    import transformers

    class Net(PeerModel):
        def forward(self, x: Tensor) -> Any:  # type: ignore[override]
            return {"loss": loss_of(super().forward, x)}

    class Trained(transformers.Trainer):
        def create_optimizer(self, *_: Any) -> Any:  # type: ignore[override]
            self.optimizer = optimizer_of(self.model)  # type: ignore[arg-type]
            return self.optimizer

    torch.manual_seed(0)
    data = [{"x": row} for step in range(STEPS) for row in rows(step)]
    args = transformers.TrainingArguments(
        str(folder), max_steps=STEPS, per_device_train_batch_size=ROWS, report_to="none",
        use_cpu=True, save_steps=STEPS, disable_tqdm=True, lr_scheduler_type="constant",
        train_sampling_strategy="sequential", max_grad_norm=0.0, logging_strategy="no",
    )  # fmt: skip
    run = Trained(Net(), args, train_dataset=data)  # type: ignore[arg-type]
    run.train()
    model: Any = run.model
    for path in (folder / f"checkpoint-{STEPS}").iterdir():
        path.rename(folder / path.name)
    (folder / f"checkpoint-{STEPS}").rmdir()
    (folder / "training_args.bin").unlink()
    return train(lambda x: PeerModel.forward(model, x), run.optimizer, NEXT)


ALONE = {each.__name__: each for each in (plain, wrapped, accelerate, lightning, trainer)}

LAYOUTS = ("nested", "app", "flattened", "optimizer", "torchtitan", "numbers")


class _App:
    """As in torch's tutorial on distributed checkpoints."""

    def __init__(self, state: Any) -> None:
        self._state = state

    def state_dict(self) -> Any:
        return self._state

    def load_state_dict(self, state: Any) -> None:
        raise NotImplementedError


def accelerates(folder: Path, model: Any, optimizer: Any) -> None:
    """By the writers of Accelerate: on CPUs its Accelerator ignores the plugin, in silence."""
    from accelerate import Accelerator
    from accelerate.utils import FullyShardedDataParallelPlugin
    from accelerate.utils.fsdp_utils import save_fsdp_model, save_fsdp_optimizer

    if dist.get_rank() == 0:
        shutil.rmtree(folder, ignore_errors=True)
    dist.barrier()
    accelerator = Accelerator(cpu=True)
    accelerator.save_state(str(folder))
    if dist.get_rank() == 0:
        for path in folder.glob("*.safetensors"):
            path.unlink()
    plugin = FullyShardedDataParallelPlugin(fsdp_version=2, state_dict_type="SHARDED_STATE_DICT")
    save_fsdp_model(plugin, accelerator, model, str(folder))
    save_fsdp_optimizer(plugin, accelerator, optimizer, model, str(folder))


def fsdp2(folder: str) -> None:
    """On each of two ranks: one run, saved in all layouts."""
    dist.init_process_group("gloo")
    rank, size = dist.get_rank(), dist.get_world_size()
    model, _ = build()
    fully_shard(model)
    optimizer = optimizer_of(model)
    train(model, optimizer, range(STEPS), rank, size)
    nested = get_state_dict(model, optimizer)
    flat = get_state_dict(
        model, optimizer, options=StateDictOptions(flatten_optimizer_state_dict=True)
    )
    states: dict[str, Any] = {
        "nested": {"model": nested[0], "optim": nested[1]},
        "app": {"app": _App({"model": nested[0], "optim": nested[1]})},
        "flattened": {"model": flat[0], "optim": flat[1]},
        "optimizer": {"model": nested[0], "optimizer": nested[1]},
        "torchtitan": {**flat[0], "optimizer": flat[1], "train_state": {"step": torch.tensor(3)}},
        "numbers": {"model": model.state_dict(), "optim": optimizer.state_dict()},
    }
    for name, state in states.items():
        if rank == 0:
            shutil.rmtree(Path(folder, f"dcp-{name}"), ignore_errors=True)
        dist.barrier()
        dcp.save(state, checkpoint_id=Path(folder, f"dcp-{name}"))
    accelerates(Path(folder, "accelerate-fsdp2"), model, optimizer)
    ranks, shards = Path(folder, "rank-files"), Path(folder, "safetensors-shards")
    if rank == 0:
        for each in (ranks, shards):
            shutil.rmtree(each, ignore_errors=True)
        ranks.mkdir(parents=True)
    dist.barrier()
    torch.save(model.state_dict(), ranks / f"model_world_size_{size}_rank_{rank}.pt")
    torch.save(optimizer.state_dict(), ranks / f"optim_world_size_{size}_rank_{rank}.pt")
    if rank == 0:
        torch.save({"step": 3}, ranks / f"extra_state_world_size_{size}_rank_0.pt")
    dcp.save(
        model.state_dict(),
        storage_writer=dcp.HuggingFaceStorageWriter(str(shards), save_distributed=True),
    )
    losses = {"fsdp2": train(model, optimizer, NEXT, rank, size)}
    if rank == 0:
        shutil.rmtree(Path(folder, "lightning-fsdp2"), ignore_errors=True)
    losses["lightning-fsdp2"] = lightnings(Path(folder, "lightning-fsdp2"), rank, size)
    both: list[Any] = [None, None]
    dist.all_gather_object(both, losses)
    if rank == 0:
        means = {}
        for name in losses:
            pairs = zip(*(each[name] for each in both), strict=True)
            means[name] = [sum(pair) / size for pair in pairs]
        Path(folder, "fsdp2.json").write_text(json.dumps(means, indent=1) + "\n")
    dist.destroy_process_group()


def write(folder: Path, only: str = "") -> None:
    """Write what each program writes, and the losses that follow."""
    path = folder / "losses.json"
    losses: dict[str, list[float]] = json.loads(path.read_text()) if path.exists() else {}
    for name, run in ALONE.items():
        if only in ("", name):
            shutil.rmtree(folder / name, ignore_errors=True)
            (folder / name).mkdir(parents=True)
            losses[name] = run(folder / name)
    path.write_text(json.dumps(losses, indent=1) + "\n")


if __name__ == "__main__":
    if dist.is_torchelastic_launched():
        fsdp2(sys.argv[1])
    else:
        write(Path(sys.argv[1]), *sys.argv[2:])
