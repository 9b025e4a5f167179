"""The one line under Ray Train:  python ray_train.py [workers] [gpu]

Ray starts the workers, on as many nodes as it takes, and makes the process group;
`onefold.shard` finds it.
"""

import sys

import ray.train
import torch
from ray.train import RunConfig, ScalingConfig
from ray.train.torch import TorchConfig, TorchTrainer, get_device
from torch import nn

import onefold


def train_on_worker(config):
    device = get_device()
    torch.manual_seed(0)  # every worker begins with the same weights
    layers = [layer for _ in range(config["depth"]) for layer in (nn.Linear(256, 256), nn.ReLU())]
    model = nn.Sequential(nn.Linear(16, 256), *layers, nn.Linear(256, 1)).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=config["lr"])
    onefold.shard(model, optimizer, stage=3)

    generator = torch.Generator().manual_seed(ray.train.get_context().get_world_rank())
    for step in range(config["steps"]):
        x = torch.randn(64, 16, generator=generator).to(device)
        loss = (model(x) - x.sum(1, keepdim=True)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if step % 10 == 9:
            ray.train.report({"step": step + 1, "loss": loss.item()})
    if ray.train.get_context().get_world_rank() == 0:
        print(onefold.report(model))


def main():
    workers = int(sys.argv[1]) if len(sys.argv) > 1 else 2
    trainer = TorchTrainer(
        train_on_worker,
        train_loop_config={"depth": 4, "lr": 1e-3, "steps": 100},
        torch_config=TorchConfig(timeout_s=300),  # a worker that is lost ends the others then
        scaling_config=ScalingConfig(num_workers=workers, use_gpu="gpu" in sys.argv),
        run_config=RunConfig(name="onefold"),
    )
    trainer.fit()


if __name__ == "__main__":
    main()
