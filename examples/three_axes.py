"""Data, tensor and pipeline axes: `torchrun --nproc-per-node 8 examples/three_axes.py`.

Eight ranks form a mesh of 2 x 2 x 2. Each pipeline stage holds some of the blocks (pp), two ranks
share each of its layers (tp), and two of these pairs train on different rows (dp). Training state
is sharded over dp. Losses match those of one process.
"""

import sys
from collections import OrderedDict

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

import onefold

WORDS, WIDTH, LENGTH, MICRO_BATCHES, STEPS = 32, 64, 16, 4, 8


class Block(nn.Module):
    """A residual block."""

    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x):
        return x + self.down(self.up(self.norm(x)).relu())


dist.init_process_group()
mesh = init_device_mesh(
    "cpu", (2, dist.get_world_size() // 4, 2), mesh_dim_names=("pp", "dp", "tp")
)
pp, dp = mesh["pp"].get_local_rank(), mesh["dp"].get_local_rank()

# the whole model from one seed, of which each rank keeps its stage, under the same names
torch.manual_seed(0)
losses = []
layers = [nn.Embedding(WORDS, WIDTH), *(Block() for _ in range(4)), nn.Linear(WIDTH, WORDS)]
first, stop = 3 * pp, 3 * pp + 3
names = [str(index) for index in range(len(layers))]
model = nn.Sequential(OrderedDict(zip(names[first:stop], layers[first:stop], strict=True)))

# 1. the tensor axis cuts layers; between them, ranks hold pieces of the sequence
plan = {
    "0": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
    "5": ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate()),
}
for block in range(1, 5):
    plan[f"{block}.norm"] = SequenceParallel()
    plan[f"{block}.up"] = ColwiseParallel(input_layouts=Shard(1))
    plan[f"{block}.down"] = RowwiseParallel(output_layouts=Shard(1))
own = {name: style for name, style in plan.items() if name.split(".")[0] in names[first:stop]}
parallelize_module(model, mesh["tp"], own)

# 2. the data axis shards the states of every piece
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
onefold.shard(model, optimizer, stage=3, mesh=mesh["dp"])

# 3. the pipeline axis passes micro-batches on
stage = PipelineStage(model, pp, 2, torch.device("cpu"), group=mesh["pp"].get_group())


def loss_fn(output, target):
    return nn.functional.cross_entropy(output.flatten(0, 1), target.flatten())


schedule = onefold.pipeline(Schedule1F1B(stage, MICRO_BATCHES, loss_fn=loss_fn))

torch.manual_seed(100 + dp)  # each data rank has rows of its own, the same on its other axes
for _ in range(STEPS):
    words = torch.randint(WORDS, (4 * MICRO_BATCHES, LENGTH))
    nexts, losses = (words * 5 + 3) % WORDS, []
    if pp == 0:
        schedule.step(words)
    else:
        schedule.step(target=nexts, losses=losses)
    onefold.clip_grad_norm_(model, 1.0)  # the norm over all three axes
    optimizer.step()
    optimizer.zero_grad()

if len(sys.argv) > 1:  # a folder: the checkpoint loads at any other split of the axes
    onefold.save(sys.argv[1], model, optimizer)
if losses and dist.get_rank() == dist.get_world_size() - 1:
    print(f"loss {torch.stack(losses).mean().item():.3f}")
dist.destroy_process_group()
