"""Small modules with the shapes that break sharding."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

VOCAB, WIDTH = 50, 16


class Block(nn.Module):
    """A pre-norm residual block whose hidden width (33) divides by nothing."""

    def __init__(self, width: int = WIDTH, hidden: int = 33, bias: bool = True) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, hidden)
        self.down = nn.Linear(hidden, width, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Model(nn.Module):
    """Embedding, blocks, a head tied to the embedding on request."""

    def __init__(self, num_blocks: int = 3, tied: bool = False) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(num_blocks))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCAB, bias=False)
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def next_token_loss(module: nn.Module, tokens: Tensor) -> Tensor:
    logits = module(tokens)
    return F.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())


def token_batches(steps: int = 3, rows: int = 12, seed: int = 1) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(0, VOCAB, (rows, 6), generator=generator) for _ in range(steps)]
