"""Kinds of modules that laws and drawn programs are made of; most map rows [n, 8] to rows [n, 8].

A printed script holds the source of those that it uses.
"""

from __future__ import annotations

from collections import UserDict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from operator import attrgetter
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn import functional as F
from torch.utils.checkpoint import (
    checkpoint,
    checkpoint_sequential,
    create_selective_checkpoint_contexts,
)


class Chain(nn.Module):
    """Blocks one after the other; the root of every program."""

    def __init__(self, *blocks: nn.Module) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(blocks)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


class Residual(nn.Module):
    """Two Linears around a width that divides by nothing."""

    def __init__(self, hidden: int = 7, bias: bool = True) -> None:
        super().__init__()
        self.up = nn.Linear(8, hidden, bias=bias)
        self.down = nn.Linear(hidden, 8, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.up(x)))


class Normed(nn.Module):
    """A norm, then a Linear. "batch" keeps no statistics, which would be a rank's own."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.norm = {
            "layer": lambda: nn.LayerNorm(8),
            "rms": lambda: nn.RMSNorm(8),
            "group": lambda: nn.GroupNorm(2, 8),
            "instance": lambda: nn.InstanceNorm1d(2, affine=True),
            "batch": lambda: nn.BatchNorm1d(8, track_running_stats=False),
            "local": lambda: nn.LocalResponseNorm(2),
        }[kind]()
        self.kind, self.out = kind, nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        if self.kind in ("instance", "local"):
            return self.out(self.norm(x.unflatten(1, (2, 4))).flatten(1))
        return self.out(self.norm(x))


class Convolved(nn.Module):
    """A convolution over two channels of four, and one back."""

    def __init__(self, kind: str = "Conv1d") -> None:
        super().__init__()
        self.kind = kind
        if kind == "Conv1d":
            self.there, self.back = nn.Conv1d(2, 5, 3, padding=1), nn.Conv1d(5, 2, 1)
        elif kind == "transposed":
            self.there, self.back = nn.ConvTranspose1d(2, 3, 3, padding=1), nn.Conv1d(3, 2, 1)
        elif kind == "depthwise":
            self.there, self.back = nn.Conv1d(2, 6, 3, padding=1, groups=2), nn.Conv1d(6, 2, 1)
        else:
            self.there, self.back = nn.Conv2d(2, 3, 2, padding=1), nn.Conv2d(3, 2, 2)

    def forward(self, x: Tensor) -> Tensor:
        shape = (2, 2, 2) if self.kind == "Conv2d" else (2, 4)
        return x + self.back(torch.tanh(self.there(x.unflatten(1, shape)))).flatten(1)


class Embedded(nn.Module):
    """Adds an embedding of the sign pattern; some rows are never looked up."""

    def __init__(self, kind: str = "Embedding", rows: int = 11) -> None:
        super().__init__()
        self.kind, self.rows = kind, rows
        if kind == "bag":
            self.table: Any = nn.EmbeddingBag(rows, 8, mode="sum")
        else:
            self.table = nn.Embedding(rows, 8, padding_idx=0 if kind == "padded" else None)

    def forward(self, x: Tensor) -> Tensor:
        words = (x.detach().float() > 0).long()[:, :4].cumsum(1).clamp(max=self.rows - 1)
        return x + (self.table(words) if self.kind == "bag" else self.table(words).mean(1))


class TiedHead(nn.Module):
    """A head that reads an embedding's weight without calling the embedding for it."""

    def __init__(self, uses: str = "module") -> None:
        super().__init__()
        self.table, self.head = nn.Embedding(8, 8), nn.Linear(8, 8, bias=False)
        self.uses, self.head.weight = uses, self.table.weight

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.table((x.detach().float() > 0).long().sum(1).clamp(max=7))
        if self.uses == "module":
            return self.head(x)
        if self.uses == "linear":
            return F.linear(x, self.table.weight)
        return x @ self.table.weight.t()


class Recurrent(nn.Module):
    """A recurrent layer over two steps of four."""

    def __init__(self, kind: str = "LSTM", layers: int = 1, bidirectional: bool = False) -> None:
        super().__init__()
        cell = getattr(nn, kind)
        self.cell = cell(4, 3, num_layers=layers, bidirectional=bidirectional, batch_first=True)
        self.out = nn.Linear(6 if bidirectional else 3, 4)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.out(self.cell(x.unflatten(1, (2, 4)))[0]).flatten(1)


class Cells(nn.Module):
    """A cell that is called once for each step."""

    def __init__(self, kind: str = "GRUCell") -> None:
        super().__init__()
        self.cell, self.out = getattr(nn, kind)(4, 5), nn.Linear(5, 8)

    def forward(self, x: Tensor) -> Tensor:
        first = self.cell(x[:, :4])
        second = self.cell(x[:, 4:], first)
        return x + self.out(second[0] if isinstance(second, tuple) else second)


class Attends(nn.Module):
    """Attention over two tokens of four; "cross" looks at tokens of another width."""

    def __init__(self, kind: str = "attention") -> None:
        super().__init__()
        if kind == "attention":
            self.inner: Any = nn.MultiheadAttention(4, 2, batch_first=True)
        elif kind == "cross":
            self.inner = nn.MultiheadAttention(4, 2, kdim=2, vdim=2, batch_first=True)
        elif kind == "whole":
            self.inner = nn.Transformer(4, 2, 1, 1, 5, dropout=0.0, batch_first=True)
        else:
            self.inner = nn.TransformerEncoderLayer(4, 2, 5, dropout=0.0, batch_first=True)
        self.kind = kind

    def forward(self, x: Tensor) -> Tensor:
        tokens = x.unflatten(1, (2, 4))
        if self.kind == "whole":
            return x + self.inner(tokens, tokens[:, :1]).flatten(1).repeat(1, 2)
        if self.kind in ("attention", "cross"):
            seen = tokens[..., :2] if self.kind == "cross" else tokens
            return x + self.inner(tokens, seen, seen, need_weights=False)[0].flatten(1)
        return self.inner(tokens).flatten(1)


class Odd(nn.Module):
    """Parameters of the shapes that break a cut: scalars, empty ones, fewer rows than ranks."""

    def __init__(self, *shapes: tuple[int, ...]) -> None:
        super().__init__()
        self.odd = nn.ParameterList(nn.Parameter(torch.randn(shape) / 3) for shape in shapes)

    def forward(self, x: Tensor) -> Tensor:
        for parameter in self.odd:
            x = x + x * torch.tanh(parameter).sum() / 5
        return x


class Named(nn.Module):
    """Parameters in a dictionary, one of them without contiguous memory."""

    def __init__(self) -> None:
        super().__init__()
        self.byname = nn.ParameterDict(
            {"turned": nn.Parameter(torch.randn(8, 8).t() / 3), "gain": nn.Parameter(torch.ones(8))}
        )

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(x @ self.byname["turned"]) * self.byname["gain"]


class Filtered(nn.Module):
    """A complex parameter between two Fourier transforms."""

    def __init__(self) -> None:
        super().__init__()
        self.filter = nn.Parameter(torch.randn(5, dtype=torch.complex64))

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.fft.irfft(torch.fft.rfft(x.float()) * self.filter).to(x.dtype)


class Frozen(nn.Module):
    """A frozen base and an adapter that trains: of low rank, or a bias alone."""

    def __init__(self, rank: int = 2) -> None:
        super().__init__()
        self.base = nn.Linear(8, 8).requires_grad_(False)
        self.a, self.b = nn.Linear(8, rank, bias=False), nn.Linear(rank, 8, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.base(x)) + self.b(self.a(x))


class Unused(nn.Module):
    """A layer that no forward calls, and one whose output the loss does not see."""

    def __init__(self) -> None:
        super().__init__()
        self.used, self.spare, self.idle = nn.Linear(8, 8), nn.Linear(8, 3), nn.Linear(8, 2)

    def forward(self, x: Tensor) -> Tensor:
        self.idle(x)
        return torch.tanh(self.used(x))


class Shared(nn.Module):
    """One layer under two names, called several times."""

    def __init__(self, times: int = 2) -> None:
        super().__init__()
        self.one = nn.Linear(8, 8)
        self.two, self.times = self.one, times

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(self.times):
            x = torch.tanh(self.one(x)) + self.two(x)
        return x


class Recomputed(nn.Module):
    """A block whose activations are computed again in backward."""

    def __init__(self, inner: nn.Module, reentrant: bool = False) -> None:
        super().__init__()
        self.inner, self.reentrant = inner, reentrant

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self.inner, x, use_reentrant=self.reentrant)


class Functional(nn.Module):
    """Calls its inner module by `functional_call`, with its own or with halved weights."""

    def __init__(self, inner: nn.Module, scale: float = 1.0) -> None:
        super().__init__()
        self.inner, self.scale = inner, scale

    def forward(self, x: Tensor) -> Tensor:
        weights = {name: p * self.scale for name, p in self.inner.named_parameters()}
        return torch.func.functional_call(self.inner, weights, (x,))


class Borrowed(nn.Module):
    """Uses its inner layer's weight and never calls the layer, or before it calls it."""

    def __init__(self, calls: bool = True) -> None:
        super().__init__()
        self.inner, self.calls = nn.Linear(8, 8), calls

    def forward(self, x: Tensor) -> Tensor:
        x = F.linear(torch.tanh(x), self.inner.weight) + self.inner.bias
        return self.inner(x) if self.calls else x


class Buffered(nn.Module):
    """Buffers that the checkpoint holds, and one that it does not."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(8, 8)
        self.register_buffer("scale", torch.linspace(0.5, 1.5, 8))
        self.register_buffer("shift", torch.ones(8), persistent=False)
        self.register_buffer("count", torch.tensor(3))

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x * self.scale.to(x.dtype) + self.shift.to(x.dtype)) / self.count


class Experts(nn.Module):
    """Experts of which every row takes one; some may get no row, and `skips` calls none of those.

    `dense`: every row takes all of them.
    """

    def __init__(self, count: int = 3, dense: bool = False, skips: bool = False) -> None:
        super().__init__()
        self.router, self.dense, self.skips = nn.Linear(8, count), dense, skips
        self.experts = nn.ModuleList(nn.Linear(8, 8) for _ in range(count))

    def forward(self, x: Tensor) -> Tensor:
        gates = self.router(x).softmax(-1)
        if self.dense:
            return sum(e(x) * gates[:, i : i + 1] for i, e in enumerate(self.experts)) + x
        chosen, out = gates.argmax(-1), x
        for i in chosen.unique().tolist() if self.skips else range(len(self.experts)):
            rows = (chosen == i).nonzero().flatten()
            part = self.experts[i](x[rows]) * gates[rows, i : i + 1]
            out = out.index_add(0, rows, part.to(out.dtype))  # autocast narrows it
        return out


class Stacked(nn.Module):
    """Experts as one parameter of three dimensions."""

    def __init__(self, count: int = 5) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(count, 8, 8) / 4)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(torch.einsum("bi,eio->bo", x, self.weight)) / len(self.weight)


@dataclass
class Output:
    """As models of transformers return."""

    hidden: Tensor
    total: Tensor
    extra: Any = None


class Holder:
    """An object with a tensor."""

    def __init__(self, hidden: Tensor) -> None:
        self.hidden = hidden


class Slotted:
    """An object without a dictionary."""

    __slots__ = ("hidden",)

    def __init__(self, hidden: Tensor) -> None:
        self.hidden = hidden


def pack(kind: str, x: Tensor) -> Any:
    """Put a tensor inside something else."""
    return {
        "tuple": lambda: (None, x, 3), "list": lambda: [x, x * 2],
        "dict": lambda: {"x": x, "name": "n"}, "nested": lambda: {"a": [(x, {"b": x + 1})]},
        "dataclass": lambda: Output(x, x.sum(1, True)), "object": lambda: Holder(x),
        "object with slots": lambda: Slotted(x), "namespace": lambda: SimpleNamespace(x=[x]),
        "user dict": lambda: UserDict(x=x),
    }[kind]()  # fmt: skip


def unpack(kind: str, held: Any) -> Tensor:
    """Take it out again, or a function of it."""
    return {
        "tuple": lambda: held[1], "list": lambda: held[0] + held[1], "dict": lambda: held["x"],
        "nested": lambda: held["a"][0][1]["b"], "dataclass": lambda: held.hidden - held.total,
        "object": lambda: held.hidden, "object with slots": lambda: held.hidden,
        "namespace": lambda: held.x[0], "user dict": lambda: held["x"],
    }[kind]()  # fmt: skip


class Packed(nn.Module):
    """Returns its rows inside something else, and takes them by keyword."""

    def __init__(self, kind: str = "dict") -> None:
        super().__init__()
        self.kind, self.inner = kind, nn.Linear(8, 8)
        self.reader = Reader(kind)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.inner(input=x))
        return self.reader({"x": x} if self.kind == "dict" else (None, [x]), scale=2.0)["out"][0]


class Reader(nn.Module):
    """See `Packed`."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind, self.inner = kind, nn.Linear(8, 8, bias=False)

    def forward(self, packed: Any, *, scale: float) -> dict[str, list[Tensor]]:
        x = packed["x"] if self.kind == "dict" else packed[1][0]
        return {"out": [x + self.inner(x) / scale]}


class Packer(nn.Module):
    """A residual block that returns its rows inside something else."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind, self.up, self.down = kind, nn.Linear(8, 7), nn.Linear(7, 8)

    def forward(self, x: Tensor) -> Any:
        return pack(self.kind, x + self.down(torch.tanh(self.up(x))))


class Unpacked(nn.Module):
    """Takes out what `Packer`s return; `packs`: and returns its own rows like them."""

    def __init__(self, kind: str = "tuple", count: int = 1, packs: bool = False) -> None:
        super().__init__()
        self.kind = kind
        self.inner = nn.ModuleList(Packer(kind) for _ in range(count))
        self.gain = nn.Parameter(torch.ones(8)) if packs else None

    def forward(self, x: Tensor) -> Any:
        for inner in self.inner:
            x = unpack(self.kind, inner(x))
        return x if self.gain is None else pack(self.kind, x * self.gain)


class InPlace(nn.Module):
    """Changes its layer's output in place, and views it."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        x = self.one(x)
        x.mul_(0.5).add_(1)
        return F.relu_(self.two(x.view(-1, 2, 4).flatten(1))) + x


class Detached(nn.Module):
    """A branch without gradients: a target as in self-distillation."""

    def __init__(self, how: str = "no_grad") -> None:
        super().__init__()
        self.inner, self.how = nn.Linear(8, 8), how

    def forward(self, x: Tensor) -> Tensor:
        if self.how == "no_grad":
            with torch.no_grad():
                target = self.inner(x)
        else:
            target = self.inner(x).detach()
        return torch.tanh(self.inner(x)) + target / 4


class Mixed(nn.Module):
    """Layers of other dtypes than the rest."""

    def __init__(self, dtype: str = "float64") -> None:
        super().__init__()
        self.low = nn.Linear(8, 8, dtype=getattr(torch, dtype))
        self.codes = nn.Parameter(torch.arange(8, dtype=torch.uint8), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        low = self.low(x.to(self.low.weight.dtype)).to(x.dtype)
        return torch.tanh(low) + x * self.codes.to(x.dtype) / 8


class Parametrized(nn.Module):
    """A Linear with weight norm (also by torch's older hooks) or an orthogonal weight."""

    def __init__(self, how: str = "weight_norm") -> None:
        super().__init__()
        old = nn.utils.weight_norm
        make = old if how == "old" else getattr(nn.utils.parametrizations, how)
        self.inner = make(nn.Linear(8, 8))

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.inner(x))


class Rebuilt(nn.Module):
    """An initialiser that computes a buffer, and draws the weights of its child as well."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(8, 8)
        self.register_buffer("ramp", torch.empty(8), persistent=False)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        torch.nn.init.normal_(self.inner.weight, std=0.3)
        self.ramp = torch.linspace(0.5, 1.5, 8, device=self.inner.weight.device)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.inner(x * self.ramp.to(x.dtype)))


class Hooked(nn.Module):
    """A layer with hooks of a user around its forward."""

    def __init__(self, kind: str = "forward") -> None:
        super().__init__()
        self.inner = nn.Linear(8, 8)
        if kind == "forward":
            self.inner.register_forward_hook(lambda module, args, out: out * 2)
        elif kind == "pre":
            self.inner.register_forward_pre_hook(lambda module, args: (args[0] / 2,))
        else:
            self.inner.register_full_backward_hook(
                lambda module, into, out: tuple(None if g is None else g / 2 for g in into)
            )

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.inner(x))


class Gated(nn.Module):
    """Which of two layers runs depends on the rows, so on the rank."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.one(x) if x.detach().sum() > 0 else self.two(x))


class Clamped(nn.Module):
    """Changes its own weight in every forward: a norm of rows, or a clamp through `data`."""

    def __init__(self, how: str = "norm") -> None:
        super().__init__()
        self.weight, self.how = nn.Parameter(torch.randn(7, 8)), how

    def forward(self, x: Tensor) -> Tensor:
        if self.how == "norm":
            with torch.no_grad():
                self.weight.copy_(F.normalize(self.weight, dim=1))
        else:
            self.weight.data.clamp_(-0.5, 0.5)
        return F.linear(x, self.weight) @ self.weight


class Positions(nn.Module):
    """Its output is its weight, or a slice of it, as learned position embeddings have."""

    def __init__(self, first: int = 0) -> None:
        super().__init__()
        self.weight, self.first = nn.Parameter(torch.randn(4, 8)), first

    def forward(self) -> Tensor:
        return self.weight[self.first :] if self.first else self.weight


class Positioned(nn.Module):
    """Uses what `Positions` return."""

    def __init__(self, first: int = 0, count: int = 1) -> None:
        super().__init__()
        self.positions = nn.ModuleList(Positions(first) for _ in range(count))

    def forward(self, x: Tensor) -> Tensor:
        for positions in self.positions:
            where = positions()
            x = torch.tanh(x + x @ where.t() @ where)
        return x


class Passing(nn.Module):
    """Returns its input and a view of it, too."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(3, 8))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return x, x[:, :3], F.linear(x, self.weight)


class Passed(nn.Module):
    """Uses what `Passing` returns."""

    def __init__(self, count: int = 1) -> None:
        super().__init__()
        self.inner = nn.ModuleList(Passing() for _ in range(count))

    def forward(self, x: Tensor) -> Tensor:
        for inner in self.inner:
            x, start, projected = inner(x)
            x = x + (start * projected).sum(1, keepdim=True)
        return x


class Scaled(torch.autograd.Function):
    """What a fused kernel is to autograd: it is given the weight itself."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return x * weight

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        x, weight = ctx.saved_tensors
        return grad * weight, (grad * x).sum(0)


class Scaling(nn.Module):
    """Gives its weight to a function of autograd."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.inner = nn.Parameter(torch.randn(8)), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(Scaled.apply(x, self.weight))


class Gained(nn.Module):
    """Multiplies what its inner module returns, and adds to it: by a scalar, or by a row."""

    def __init__(self, inner: nn.Module, gain: Any = 2.0, shift: Any = None) -> None:
        super().__init__()
        self.inner, self.gain = inner, nn.Parameter(torch.as_tensor(gain))
        self.shift = None if shift is None else nn.Parameter(torch.as_tensor(shift))

    def forward(self, x: Tensor) -> Tensor:
        x = self.inner(x) * self.gain
        return x if self.shift is None else x + self.shift


def in_turn(layers: Iterable[nn.Module], x: Tensor) -> Tensor:
    """Call layers one after the other; of a list, its own."""
    for layer in layers:
        x = in_turn(layer, x) if isinstance(layer, nn.ModuleList) else layer(x)
    return x


def with_parts(module: nn.Module, parts: dict[str, Any]) -> nn.Module:
    """Give a module parameters and children by name; a text is the name of one that it has."""
    for name, part in parts.items():
        owner, _, last = name.rpartition(".")
        part = attrgetter(part)(module) if isinstance(part, str) else part
        setattr(attrgetter(owner)(module) if owner else module, last, part)
    return module


def without_grad(module: nn.Module, *names: str) -> nn.Module:
    """Freeze parameters and children of a module."""
    for name in names:
        attrgetter(name)(module).requires_grad_(False)
    return module


class By(nn.Module):
    """A module of parts, and of a function of itself and its input; by default it calls the parts
    one after the other."""

    def __init__(self, function: Callable[..., Any] | None = None, **parts: Any) -> None:
        super().__init__()
        self.function = function or (lambda self, x: in_turn(self.children(), x))
        for name, part in parts.items():
            setattr(self, name, part)

    def forward(self, *inputs: Any, **named: Any) -> Any:
        return self.function(self, *inputs, **named)


class Fitted(nn.Module):
    """Adds what its inner module returns, of eight columns at most, to its rows."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        out = self.inner(x)
        return x + F.pad(out, (0, 8 - out.shape[1])).to(x.dtype)


# roots of laws, and what they do


def codebook(module: Any, x: Tensor) -> Tensor:
    """A frozen parameter that the module updates by itself, alike on all ranks."""
    out = module.inner(x) + module.codes.mean(0)
    module.codes.mul_(0.9)
    return out


def lent(**last: nn.Module) -> nn.Module:
    """Lends its layer to blocks that use the weight: it is none of their own parameters."""
    borrow = lambda self, x: torch.tanh(F.linear(self.own(x), self.lender[0].weight))
    lender = nn.Linear(8, 8)
    blocks = [By(borrow, own=nn.Linear(8, 8), lender=[lender]) for _ in range(2)]
    return By(lender=lender, blocks=nn.ModuleList(blocks), **last)


def uncalled(module: Any, x: Tensor) -> Tensor:
    """Uses the weights of pairs of layers, and calls nothing."""
    for one, two in module.pairs:
        x = F.linear(torch.tanh(F.linear(x, one.weight, one.bias)), two.weight)
    return x


def by_full_tensor(module: Any, x: Tensor) -> Tensor:
    """Reads another module's weight as fused losses read a head, where it is a DTensor."""
    gain = module.other.gain
    full = gain.full_tensor() if isinstance(gain, DTensor) else gain.view_as(gain)
    return module.scale(module.inner(Scaled.apply(x, full)))


def between(tower: Any, x: Tensor) -> Tensor:
    return tower.last(in_turn(tower.blocks, tower.first(x)))


class Tower(nn.Module):
    """Blocks between two layers of the root: so many residual ones, or these; `by` calls them."""

    def __init__(self, blocks: int | Sequence[nn.Module] = 2, out: int = 3, by: Any = None) -> None:
        super().__init__()
        self.first, self.by = nn.Linear(8, 8), by or between
        several = [Residual() for _ in range(blocks)] if isinstance(blocks, int) else blocks
        self.blocks, self.last = nn.ModuleList(several), nn.Linear(8, out)

    def forward(self, *inputs: Any, **named: Any) -> Any:
        return self.by(self, *inputs, **named)


def tied_words(calls: bool = True, norm: bool = False) -> Tower:
    """Takes tokens: its head is tied to the embedding, or reads the weight, maybe before a norm."""
    inner = lambda self, x: in_turn(self.blocks, self.first(x))
    by_weight = lambda self, x: self.last(F.linear(inner(self, x), self.first.weight))
    tower = Tower(out=20, by=None if calls else by_weight)
    tower.first = nn.Embedding(20, 8)
    if calls:
        tower.last.weight = tower.first.weight
    else:
        tower.last = nn.LayerNorm(20) if norm else nn.Identity()
    return tower


def ordered(*order: int) -> Any:
    """Calls its blocks in an order that may change: several times, or not at all."""
    tower: Any = Tower(
        max(order) + 1, by=lambda self, x: self.last(
            in_turn([self.blocks[index] for index in self.order], self.first(x)))
    )  # fmt: skip
    tower.order = order
    return tower


def recursive(tower: Any, x: Tensor, depth: int = 2) -> Tensor:
    x = in_turn(tower.blocks, tower.first(x))
    return tower(x, depth - 1) if depth else tower.last(x)


def uses_weights(tower: Any, x: Tensor) -> Tensor:
    """Weights of the root, and of blocks after it has called them."""
    low = lambda layer: layer.weight.to(x.dtype)
    x = in_turn(tower.blocks, F.linear(x, low(tower.first), tower.first.bias.to(x.dtype)))
    x = x @ low(tower.blocks[0].up).t() @ low(tower.blocks[1].up)
    return tower.last(x) + torch.einsum("oi,bi->bo", low(tower.last), x)


def uses_weights_before(tower: Any, x: Tensor) -> Tensor:
    """A weight's gradient is complete only after backward has left the block."""
    x, up = tower.first(x) * tower.blocks[0].down.bias, tower.blocks[1].up.weight
    return tower.last(in_turn(tower.blocks, x + x @ up.t() @ up) + tower.last.weight.sum())


def partly_detached(tower: Any, x: Tensor) -> Tensor:
    with torch.no_grad():
        x = tower.blocks[0](tower.first(x))
    return tower.last(tower.blocks[1](x))


def keeping(tower: Any, x: Tensor) -> None:
    tower.kept = [between(tower, x)]


def viewed(tower: Any, x: Tensor) -> Tensor:
    """Changes what blocks return in place, and views it; returns a view."""
    x = tower.first(x)
    for block in tower.blocks:
        x = block(x).view(-1, 2, 4)
        x += 1
        x = x.view(-1, 8)
        x[:, :2] *= 0.5
        x.relu_()
    x = tower.last(x)
    x.sub_(1)
    return x[:, 1:]


def renewing(tower: Any, x: Tensor) -> Tensor:
    """Halves a weight of its own in every forward, and recomputes a block."""
    with torch.no_grad():
        tower.last.weight.mul_(0.5)
    x = checkpoint(tower.blocks[0], tower.first(x), use_reentrant=False)
    return tower.last(tower.blocks[1](x))


def recomputed(tower: Any, x: Tensor, how: str, reentrant: bool = False) -> Tensor:
    """Computes again: each block, several at once, some of their operations, one within the other,
    or a function that is given a block's weight."""
    again = partial(checkpoint, use_reentrant=reentrant)
    if how == "selective":  # runs the operations that it counted, and gathers more than forward did
        saved = [torch.ops.aten.addmm.default]
        again = partial(again, context_fn=partial(create_selective_checkpoint_contexts, saved))
        return tower.last(again(partial(in_turn, tower.blocks), again(tower.first, x)))
    x, each = tower.first(x), [partial(again, block) for block in tower.blocks]
    if how == "each":
        x = in_turn(each, x)
    elif how == "several":
        x = checkpoint_sequential(tower.blocks, 2, x, use_reentrant=reentrant)
    elif how == "nested":
        x = again(partial(in_turn, each), x)
    else:
        x = again(F.linear, x, tower.blocks[0].down.weight.t())
        x = torch.cat([x, x[:, :1]], 1)
    return tower.last(x)


def scaling_by_another(tower: Any, x: Tensor) -> Tensor:
    return tower.last(
        in_turn(tower.blocks, Scaled.apply(tower.first(x), tower.blocks[0].down.bias))
    )


def dropping(tower: Any, x: Tensor, mark: Tensor) -> Tensor:
    """Leaves out blocks as the first row's mark says: bit k for block k (LayerDrop)."""
    x = tower.first(x)
    for index, block in enumerate(tower.blocks):
        x = x if int(mark[0]) & 1 << index else block(x)
    return tower.last(x)


def skipping(tower: Any, x: Tensor, mark: Tensor) -> Tensor:
    """Leaves out a layer of the root if the first row's mark says so."""
    x = tower.blocks[0](tower.first(x))
    x = x if mark[0] else torch.tanh(tower.middle(x))
    return tower.last(tower.blocks[1](x))


def halving(tower: Any, x: Tensor, mark: Tensor) -> Tensor:
    """Leaves out the second layer of each block if the first row's mark says so."""
    x = tower.first(x)
    for block in tower.blocks:
        x = block(x, mark)
    return tower.last(x)


def halved() -> By:
    half = lambda self, x, mark: in_turn([self.one, *([] if mark[0] else [self.two])], x)
    return By(half, one=nn.Sequential(nn.Linear(8, 8), nn.Tanh()), two=nn.Linear(8, 8))
