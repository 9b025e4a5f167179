"""A byte-level GPT: small enough for a laptop, an ordinary module in every other way.

Vocabulary is the 256 bytes, so there is no tokenizer. Pre-norm blocks, causal attention through
torch's SDPA, learned positions. Shapes: B rows, T positions, D width, V = 256.
"""

from collections import OrderedDict
from dataclasses import dataclass
from math import sqrt

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

VOCAB = 256
"""One token for each byte."""


@dataclass(frozen=True, slots=True)
class GPTConfig:
    """The sizes of a GPT, without its longest row. `lr` is a peak learning rate that suits it."""

    num_layers: int
    width: int
    num_heads: int
    lr: float
    is_tied: bool = False


PRESETS = {
    "tiny": GPTConfig(num_layers=4, width=128, num_heads=4, lr=3e-3),
    "mini": GPTConfig(num_layers=6, width=256, num_heads=8, lr=2e-3),
    "small": GPTConfig(num_layers=8, width=768, num_heads=12, lr=6e-4),
    "large": GPTConfig(num_layers=51, width=1280, num_heads=20, lr=1e-5),
}
"""About 0.9, 5, 57 and 1,000 million parameters."""


class Projection(nn.Linear):
    """A linear layer without bias whose outputs start with variance `gain**2` times the inputs'."""

    def __init__(self, num_in: int, num_out: int, *, gain: float = 1.0) -> None:
        self.gain = gain
        super().__init__(num_in, num_out, bias=False)

    def reset_parameters(self) -> None:
        nn.init.normal_(self.weight, std=self.gain / sqrt(self.in_features))


class SmallTable(nn.Embedding):
    """An embedding that starts small, so that the residual stream does too."""

    def reset_parameters(self) -> None:
        nn.init.normal_(self.weight, std=0.02)


class Attention(nn.Module):
    """Causal self-attention, [B, T, D] -> [B, T, D].

    Outputs of `qkv` lie head by head. So tensor parallel ranks, which have some rows of its weight,
    have whole heads.
    """

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.num_heads = config.num_heads  # of all tensor parallel ranks
        self.head_width = config.width // config.num_heads
        self.qkv = Projection(config.width, 3 * config.width)
        self.out = Projection(config.width, config.width, gain=1 / sqrt(2 * config.num_layers))

    def forward(self, x: Tensor) -> Tensor:
        heads = self.qkv(x).unflatten(2, (-1, 3, self.head_width))  # batches may have no rows
        q, k, v = heads.permute(3, 0, 2, 1, 4)  # each [B, heads, T, D / heads]
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(mixed.transpose(1, 2).flatten(2))


class Block(nn.Module):
    """Attention, then a feed-forward layer, each added to the residual stream [B, T, D]."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(config.width)
        self.attention = Attention(config)
        self.mlp_norm = nn.LayerNorm(config.width)
        self.up = Projection(config.width, 4 * config.width)
        self.down = Projection(4 * config.width, config.width, gain=1 / sqrt(2 * config.num_layers))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x))
        return x + self.down(F.gelu(self.up(self.mlp_norm(x))))


class GPT(nn.Module):
    """Bytes [B, T] to logits [B, T, 256] of the byte that follows each; T is at most `max_seq`."""

    is_first = is_last = True  # of the stages of a pipeline

    def __init__(self, config: GPTConfig, max_seq: int) -> None:
        super().__init__()
        self.tokens = SmallTable(VOCAB, config.width)
        self.positions = SmallTable(max_seq, config.width)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.num_layers))
        self.norm = nn.LayerNorm(config.width)
        self.head = Projection(config.width, VOCAB)
        self.recomputes = False  # True: keep only inputs of blocks, run them again in backward
        if config.is_tied:
            self.head.weight = self.tokens.weight

    def forward(self, x: Tensor, position_ids: Tensor | None = None) -> Tensor:
        if self.is_first:
            if position_ids is None:
                position_ids = torch.arange(x.shape[1], device=x.device)
            x = self.tokens(x) + self.positions(position_ids)
        for block in self.blocks:
            if self.recomputes and torch.is_grad_enabled():
                x = checkpoint(block, x, use_reentrant=False)
            else:
                x = block(x)
        return self.head(self.norm(x)) if self.is_last else x


class GPTStage(GPT):
    """Some blocks of a GPT, under its names, and what lies before the first or behind the last.

    The first stage takes bytes [B, T], others the residual stream [B, T, D]. The last one returns
    logits.
    """

    def __init__(self, model: GPT, index: int, count: int) -> None:
        """Stage `index` of `count`; it has modules of the model, none is copied."""
        nn.Module.__init__(self)
        num_layers = len(model.blocks)
        first, stop = index * num_layers // count, (index + 1) * num_layers // count
        self.is_first, self.is_last = index == 0, index + 1 == count
        if self.is_first:
            self.tokens, self.positions = model.tokens, model.positions
        own = ((str(number), model.blocks[number]) for number in range(first, stop))
        self.blocks = nn.Sequential(OrderedDict(own))
        if self.is_last:
            self.norm, self.head = model.norm, model.head
        self.recomputes = model.recomputes
