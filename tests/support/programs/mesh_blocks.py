"""Modules that axes of a mesh can cut: stages, tensor ranks, pieces of a sequence."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, distribute_module
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    RowwiseParallel,
    parallelize_module,
)
from torch.nn import functional as F

WIDE, POSITIONS, HEAD = 8, 8, 2


class Words(nn.Module):
    """Tokens and their positions to rows [rows, positions, WIDE]."""

    rows = ("words", "places")

    def __init__(self, words: int) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(words, WIDE), nn.Embedding(POSITIONS, WIDE)

    def forward(self, tokens: Tensor, position_ids: Tensor) -> Tensor:
        return self.words(tokens) + self.places(position_ids)


class Looking(nn.Module):
    """Causal attention of any number of heads, and of heads of keys."""

    columns, rows = ("q", "k", "v"), ("out",)

    def __init__(self, heads: int, kv_heads: int | None = None, bias: bool = True) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDE)
        self.q = nn.Linear(WIDE, HEAD * heads, bias)
        self.k = nn.Linear(WIDE, HEAD * (kv_heads or heads), bias)
        self.v = nn.Linear(WIDE, HEAD * (kv_heads or heads), bias)
        self.out = nn.Linear(HEAD * heads, WIDE, bias)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x)
        q, k, v = (f(y).unflatten(-1, (-1, HEAD)).transpose(1, 2) for f in (self.q, self.k, self.v))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return x + self.out(mixed.transpose(1, 2).flatten(2))


class Widening(nn.Module):
    """The usual feed-forward part; tensor ranks need not divide its width."""

    columns, rows = ("up",), ("down",)

    def __init__(self, width: int, bias: bool = True) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(WIDE)
        self.up, self.down = nn.Linear(WIDE, width, bias), nn.Linear(width, WIDE, bias)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Gating(nn.Module):
    """A gated feed-forward part, without a norm."""

    columns, rows = ("gate", "up"), ("down",)

    def __init__(self, width: int) -> None:
        super().__init__()
        self.gate, self.up = nn.Linear(WIDE, width), nn.Linear(WIDE, width, bias=False)
        self.down = nn.Linear(width, WIDE)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.silu(self.gate(x)) * self.up(x))


class Levelled(nn.Module):
    """A factor of no axis and one of each column, the same on all tensor ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.factor, self.shift = nn.Parameter(torch.ones(())), nn.Parameter(torch.zeros(WIDE))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.factor + self.shift


class Repeating(nn.Module):
    """A block that is called twice."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(self.inner(x) * 0.5)


class Resting(nn.Module):
    """A block beside one that nobody calls."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner, self.unused = inner, nn.Linear(WIDE, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x)


class Net(nn.Module):
    """Words, blocks and a head, or those parts of it that a stage of a pipeline has."""

    rows, columns = (), ("head",)

    def __init__(self, *blocks: nn.Module, words: int = 12, is_tied: bool = False) -> None:
        super().__init__()
        self.is_tied = is_tied
        head = nn.Linear(WIDE, words, bias=False)
        with torch.no_grad():
            head.weight.mul_(3.0)
        numbered = {str(number): block for number, block in enumerate(blocks)}
        self.parts = nn.ModuleDict({"words": Words(words), **numbered, "head": head})
        self.tie()

    def tie(self) -> None:
        """One weight reads words and writes them."""
        if self.is_tied and {"words", "head"} <= self.parts.keys():
            self.parts["head"].weight = self.parts["words"].words.weight

    def stage(self, index: int, number: int) -> Net:
        """Stage `index` of `number`, whose parameters keep their names; a tied weight is copied."""
        names, made = list(self.parts), Net(is_tied=self.is_tied)
        first, end = (len(names) * each // number for each in (index, index + 1))
        made.parts = nn.ModuleDict({name: self.parts[name] for name in names[first:end]})
        if self.is_tied and number > 1 and "head" in made.parts:
            made.parts["head"].weight = nn.Parameter(self.parts["head"].weight.detach().clone())
        return made

    def forward(self, x: Tensor, position_ids: Tensor | None = None) -> Tensor:
        for name, part in self.parts.items():
            if name == "words":
                if position_ids is None:
                    position_ids = torch.arange(x.shape[1])[None]
                x = part(x, position_ids)
            else:
                x = part(x)
        return x if "head" in self.parts else x.clone()  # torch splits no backward of a view


class Replicated(ParallelStyle):
    """Parameters that are the same on all tensor ranks, and so are their gradients."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        def enter(_: nn.Module, inputs: tuple, mesh: DeviceMesh) -> tuple:
            return tuple(DTensor.from_local(each, mesh, [Replicate()]) for each in inputs)

        return distribute_module(
            module, device_mesh, None, enter, lambda _, output, __: output.to_local()
        )


def cut_tensors(net: Net, mesh: DeviceMesh) -> None:
    """Cut each layer over tensor ranks as its block says; the others are the same on all."""
    styles: dict[str, ParallelStyle] = {}
    for name, module in net.named_modules():
        if next(module.parameters(recurse=False), None) is None:
            continue
        above, _, own = name.rpartition(".")
        block = net if above == "parts" else net.get_submodule(above)
        if own in getattr(block, "columns", ()):
            even = module.weight.shape[0] % mesh.size() == 0
            styles[name] = ColwiseParallel(
                output_layouts=Replicate() if own == "head" else None,
                use_local_output=own == "head" or even,
            )
        elif own in getattr(block, "rows", ()):
            by_words = {"input_layouts": Replicate()} if isinstance(module, nn.Embedding) else {}
            styles[name] = RowwiseParallel(**by_words)
        else:
            styles[name] = Replicated()
    parallelize_module(net, mesh, styles)
    net.tie()
