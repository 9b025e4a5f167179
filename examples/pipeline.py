"""A pipeline of two stages with sharded states: `torchrun --nproc-per-node 4 examples/pipeline.py`.

Ranks form a mesh of two pipeline stages (pp) with two data-parallel ranks each (dp). Each stage is
sharded over its data-parallel ranks. The schedule moves activations, and `onefold.pipeline` makes
it gather weights and reduce gradients once per step.
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.pipelining import PipelineStage, Schedule1F1B

import onefold

MICRO_BATCHES, STEPS, WORDS, WIDTH = 8, 25, 32, 64


class Block(nn.Module):
    """A residual block."""

    def __init__(self):
        super().__init__()
        self.norm, self.up, self.down = (
            nn.LayerNorm(WIDTH),
            nn.Linear(WIDTH, 128),
            nn.Linear(128, WIDTH),
        )

    def forward(self, x):
        return x + self.down(self.up(self.norm(x)).relu())


dist.init_process_group()
mesh = init_device_mesh("cpu", (2, dist.get_world_size() // 2), mesh_dim_names=("pp", "dp"))
pp, dp = mesh["pp"].get_local_rank(), mesh["dp"].get_local_rank()

torch.manual_seed(pp)
ends = [[nn.Embedding(WORDS, WIDTH), Block(), Block()], [Block(), Block(), nn.Linear(WIDTH, WORDS)]]
module = nn.Sequential(*ends[pp])
optimizer = torch.optim.AdamW(module.parameters(), lr=3e-3)
onefold.shard(module, optimizer, stage=3, mesh=mesh["dp"])

stage = PipelineStage(module, pp, 2, torch.device("cpu"), group=mesh["pp"].get_group())


def loss_fn(output, target):
    return nn.functional.cross_entropy(output.flatten(0, 1), target.flatten())


schedule = onefold.pipeline(Schedule1F1B(stage, MICRO_BATCHES, loss_fn=loss_fn))

torch.manual_seed(100 + dp)  # each data rank has rows of its own, the same on all stages
for _ in range(STEPS):
    words = torch.randint(WORDS, (4 * MICRO_BATCHES, 16))
    nexts, losses = (words * 5 + 3) % WORDS, []
    if pp == 0:
        schedule.step(words)
    else:
        schedule.step(target=nexts, losses=losses)
    optimizer.step()
    optimizer.zero_grad()

if pp == 1 and dp == 0:
    print(f"loss {torch.stack(losses).mean().item():.3f}")
dist.destroy_process_group()
