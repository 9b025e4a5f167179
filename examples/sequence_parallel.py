"""Long rows over several ranks: `torchrun --nproc-per-node 4 examples/sequence_parallel.py`.

Two ranks share each sequence, and the other two train on different rows. Every rank computes some
of the positions, and holds a shard of the training state. Losses match those of one rank.
"""

import os

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn import functional as F

import onefold


class Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm, self.qkv = nn.LayerNorm(width), nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows, positions, width = x.shape
        heads = self.qkv(self.norm(x)).view(rows, positions, 3, self.heads, -1)
        q, k, v = heads.permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(rows, positions, width))
        return x + self.down(F.gelu(self.up(x)))


class Net(nn.Module):
    def __init__(self, longest: int, width: int = 48) -> None:
        super().__init__()
        self.embed, self.places = nn.Embedding(256, width), nn.Embedding(longest, width)
        self.blocks = nn.ModuleList(Block(width, heads=3) for _ in range(2))
        self.head = nn.Linear(width, 256)

    def forward(self, tokens: torch.Tensor, position_ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens) + self.places(position_ids)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


LENGTH = 129  # two ranks do not divide it, nor the three heads
world_size = int(os.environ["WORLD_SIZE"])
cp = min(world_size, 2)
kind = "cuda" if torch.cuda.is_available() else "cpu"
mesh = init_device_mesh(kind, (world_size // cp, cp), mesh_dim_names=("dp", "cp"))

torch.manual_seed(0)
model = Net(LENGTH)
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
onefold.shard(model, optimizer, stage=3)  # all ranks of both axes hold the state
sequence = onefold.split_sequence(model, mesh["cp"])  # one axis shares sequences

device = next(model.parameters()).device
text = torch.tensor(list(b"the same bytes, over and over, until the model knows them. " * 40))
for step in range(20):
    starts = torch.randint(0, len(text) - LENGTH, (4,))
    rows = torch.stack([text[start : start + LENGTH] for start in starts])
    targets = rows.clone()
    targets[0, :100] = -100  # a row with few targets: ranks have unequal numbers
    own = slice(mesh.get_local_rank("dp"), None, mesh["dp"].size())  # rows by the data axis

    logits = model(rows[own].to(device))  # whole rows in, outputs of own positions back
    labels = sequence.labels(targets[own].to(device))  # shifted first, then cut
    loss_sum = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")
    loss = onefold.weigh(loss_sum, (labels != -100).sum())
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    mean = loss.detach()
    dist.all_reduce(mean, dist.ReduceOp.SUM)
    if step % 5 == 4 and dist.get_rank() == 0:
        print(f"step {step + 1}, loss {mean.item() / world_size:.4f}")
dist.destroy_process_group()
