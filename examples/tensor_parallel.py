"""Tensor parallel inside ZeRO: `torchrun --nproc-per-node 4 examples/tensor_parallel.py`.

A small Llama-shaped model learns to continue the source of Python's own library, byte by byte, on
2 x 2 ranks: each pair of ranks computes one model, and the pairs train on different rows.
First torch's `parallelize_module` splits the weights over "tp". Then `onefold.shard` shards these
pieces, their gradients and the optimizer state over "dp".
"""

import string
from pathlib import Path

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.nn import functional as F

import onefold

LENGTH, WIDTH, HEADS, TP = 64, 64, 4, 2


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in "qkvo")

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        # the heads of this rank: as many as its columns of q, k and v have
        q, k, v = (
            part(x).unflatten(-1, (-1, WIDTH // HEADS)).transpose(1, 2)
            for part in (self.q, self.k, self.v)
        )
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.o(y.transpose(1, 2).flatten(2))


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.attention = nn.RMSNorm(WIDTH), Attention()
        self.norm2 = nn.RMSNorm(WIDTH)
        self.gate, self.up = (nn.Linear(WIDTH, 3 * WIDTH, bias=False) for _ in "gu")
        self.down = nn.Linear(3 * WIDTH, WIDTH, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.norm1(x))
        y = self.norm2(x)
        return x + self.down(F.silu(self.gate(y)) * self.up(y))


class Llama(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(256, WIDTH)
        self.position = nn.Embedding(LENGTH, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.norm = nn.RMSNorm(WIDTH)
        self.head = nn.Linear(WIDTH, 256, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens) + self.position(torch.arange(LENGTH).expand_as(tokens))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


# Between the blocks each rank has a part of the sequence; every parameter is named
plan = {
    "embed": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
    "position": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
    "blocks.*.norm1": SequenceParallel(),
    "blocks.*.attention": PrepareModuleInput(
        input_layouts=Shard(1), desired_input_layouts=Replicate()
    ),
    "blocks.*.attention.[qkv]": ColwiseParallel(),
    "blocks.*.attention.o": RowwiseParallel(output_layouts=Shard(1)),
    "blocks.*.norm2": SequenceParallel(),
    "blocks.*.gate": ColwiseParallel(input_layouts=Shard(1)),
    "blocks.*.up": ColwiseParallel(input_layouts=Shard(1)),
    "blocks.*.down": RowwiseParallel(output_layouts=Shard(1)),
    "norm": SequenceParallel(),
    "head": ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate()),
}

torch.distributed.init_process_group()
ranks = torch.distributed.get_world_size()
device = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
kind = device.type if device else "cpu"
mesh = init_device_mesh(kind, (ranks // TP, TP), mesh_dim_names=("dp", "tp"))

torch.manual_seed(0)
model = Llama().to(kind)
parallelize_module(model, mesh["tp"], plan)  # first
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
onefold.shard(model, optimizer, stage=3, mesh=mesh["dp"])  # last

text = torch.tensor(list(Path(string.__file__).read_bytes()))
own = torch.Generator().manual_seed(mesh["dp"].get_local_rank())  # the same rows on a pair
for step in range(30):
    starts = torch.randint(0, len(text) - LENGTH - 1, (8,), generator=own)
    rows = torch.stack([text[start : start + LENGTH + 1] for start in starts]).to(kind)
    loss = F.cross_entropy(model(rows[:, :-1]).flatten(0, 1), rows[:, 1:].flatten())
    loss.backward()
    norm = onefold.clip_grad_norm_(model, 1.0)  # over both axes, as of one process
    optimizer.step()
    optimizer.zero_grad()
    if step in (0, 29) and torch.distributed.get_rank() == 0:
        print(f"step {step}: loss {loss.item():.3f}, norm of all gradients {norm.item():.3f}")

up = model.blocks[0].up.weight
weights = onefold.full_state_dict(model)  # plain tensors on rank 0
if torch.distributed.get_rank() == 0:
    print(f"blocks.0.up.weight {list(up.shape)}: {list(up.to_local().shape)} rest on a rank")
    print(f"{sum(value.numel() for value in weights.values()):,d} parameters on {ranks} ranks")
