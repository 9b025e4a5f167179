"""Which rank attends with which heads; all-to-all between pieces of the sequence and heads.

A rank enters with all heads of its positions and leaves with some heads of all positions, and
back. The backward of each direction is the other one. All tensors of one call share one message.

Source: DeepSpeed-Ulysses, arXiv 2309.14509, section 3.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from math import prod
from typing import Any

import torch
from torch import Tensor

from onefold.errors import ConfigError
from onefold.wire.collectives import Group
from onefold.wire.ticket import Ticket

LABEL = "an all-to-all of attention over a split sequence"


@dataclass(frozen=True, slots=True)
class HeadCut:
    """Query heads cut into consecutive ranges, one a rank, whose lengths differ by one at most.

    Several query heads may share a head of keys and values (GQA). A rank gets all that its query
    heads read, so ranks that cut a group both get its head. With fewer heads than ranks some ranks
    have none.
    """

    num_heads: int
    num_kv_heads: int
    parts: int

    @classmethod
    def of(cls, num_heads: int, num_kv_heads: int, parts: int) -> HeadCut:
        """Raises `ConfigError` unless the query heads are a multiple of the others."""
        if num_kv_heads < 1 or num_heads % num_kv_heads:
            wanted = "query heads that are a multiple of the heads of keys and values"
            raise ConfigError(
                wanted,
                f"{num_heads} and {num_kv_heads}",
                where="attention of a split sequence",
                hint="each head of keys and values is copied to the ranks whose query heads "
                "read it, so the query heads must form equal groups",
            )
        return cls(num_heads, num_kv_heads, parts)

    def queries(self, rank: int) -> range:
        """The query heads, and output heads, of a rank."""
        start, stop = (self.num_heads * bound // self.parts for bound in (rank, rank + 1))
        return range(start, stop)

    def keys(self, rank: int) -> range:
        """The heads of keys and values that a rank reads."""
        heads, group = self.queries(rank), self.num_heads // self.num_kv_heads
        if not heads:
            return range(0)
        return range(heads.start // group, (heads.stop - 1) // group + 1)

    def reads(self, rank: int) -> list[int]:
        """For each query head of a rank, its head among `keys(rank)`."""
        group, first = self.num_heads // self.num_kv_heads, self.keys(rank).start
        return [head // group - first for head in self.queries(rank)]

    def repeats(self, rank: int) -> int | None:
        """How many query heads of a rank read each of its heads; None if some are read more."""
        reads, keys = self.reads(rank), len(self.keys(rank))
        if not reads:
            return 1
        repeats = len(reads) // keys
        return repeats if reads == [head // repeats for head in range(keys * repeats)] else None


@dataclass(frozen=True, slots=True)
class HeadExchange:
    """`heads[r][i]`: the heads of the i-th tensor on rank r; `num_heads[i]`: all of them."""

    group: Group
    heads: tuple[tuple[range, ...], ...]
    num_heads: tuple[int, ...]

    def to_heads(self, tensors: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """From [rows, all heads, local, width] to [rows, own heads, positions, width], each."""
        parts = self.group.world_size
        shapes = [
            [(t.shape[0], len(own), *t.shape[2:]) for t, own in zip(tensors, heads, strict=True)]
            for heads in self.heads
        ]
        sent, sends = _buffer(tensors[0], shapes)
        for views, heads in zip(sends, self.heads, strict=True):
            for view, tensor, own in zip(views, tensors, heads, strict=True):
                view.copy_(tensor[:, own.start : own.stop])
        received, pieces = _buffer(tensors[0], [shapes[self.group.rank]] * parts)
        self._send(received, sent, pieces, sends)
        columns = zip(*pieces, strict=True)
        return tuple(torch.cat(column, 2) for column in columns)

    def to_sequence(self, tensors: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """From [rows, own heads, positions, width] to [rows, all heads, local, width], each.

        Heads that several ranks had are added up, in rank order.
        """
        parts = self.group.world_size
        local = [(t.shape[0], t.shape[2] // parts, t.shape[3]) for t in tensors]
        chunks = list(zip(*(t.chunk(parts, 2) for t in tensors), strict=True))
        sent, sends = _buffer(tensors[0], [[chunk.shape for chunk in row] for row in chunks])
        for views, row in zip(sends, chunks, strict=True):
            for view, chunk in zip(views, row, strict=True):
                view.copy_(chunk)
        shapes = [
            [(rows, len(own), *rest) for own, (rows, *rest) in zip(heads, local, strict=True)]
            for heads in self.heads
        ]
        received, pieces = _buffer(tensors[0], shapes)
        self._send(received, sent, pieces, sends)
        out = [
            received.new_zeros((rows, number, *rest))
            for number, (rows, *rest) in zip(self.num_heads, local, strict=True)
        ]
        for views, heads in zip(pieces, self.heads, strict=True):
            for whole, view, own in zip(out, views, heads, strict=True):
                whole[:, own.start : own.stop] += view
        return tuple(out)

    def _send(
        self, received: Tensor, sent: Tensor, pieces: list[list[Tensor]], sends: list[list[Tensor]]
    ) -> None:
        numels = [[sum(view.numel() for view in row) for row in rows] for rows in (pieces, sends)]
        Ticket([self.group.all_to_all(received, sent, *numels)], label=LABEL).wait()


def _buffer(
    like: Tensor, shapes: Sequence[Sequence[Sequence[int]]]
) -> tuple[Tensor, list[list[Tensor]]]:
    """Return one flat buffer, and views into it of these shapes, in order."""
    numels = [prod(shape) for row in shapes for shape in row]
    flat = like.new_empty(sum(numels))
    starts = iter(accumulate(numels, initial=0))
    views = [
        [flat[(start := next(starts)) : start + prod(shape)].view(*shape) for shape in row]
        for row in shapes
    ]
    return flat, views


class ToHeads(torch.autograd.Function):
    """`HeadExchange.to_heads`, whose backward is `ToSequence`."""

    @staticmethod
    def forward(ctx: Any, exchange: HeadExchange, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.exchange = exchange
        return exchange.to_heads(tensors)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return None, *ToSequence.apply(ctx.exchange, *grads)


class ToSequence(torch.autograd.Function):
    """`HeadExchange.to_sequence`, whose backward is `ToHeads`."""

    @staticmethod
    def forward(ctx: Any, exchange: HeadExchange, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.exchange = exchange
        return exchange.to_sequence(tensors)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return None, *ToHeads.apply(ctx.exchange, *grads)


class Gather(torch.autograd.Function):
    """Concatenate the ranks' pieces along a dimension; its backward is `ScatterSum`."""

    @staticmethod
    def forward(ctx: Any, group: Group, dim: int, piece: Tensor) -> Tensor:
        ctx.group, ctx.dim = group, dim
        mine = piece.contiguous()
        out = mine.new_empty((group.world_size, *mine.shape))
        Ticket([group.all_gather(out.view(-1), mine.view(-1))], label=LABEL).wait()
        return torch.cat(out.unbind(), dim)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return None, None, ScatterSum.apply(ctx.group, ctx.dim, grads[0])


class ScatterSum(torch.autograd.Function):
    """Add up the ranks' tensors, in rank order, and return this rank's piece of the sum."""

    @staticmethod
    def forward(ctx: Any, group: Group, dim: int, whole: Tensor) -> Tensor:
        ctx.group, ctx.dim, parts = group, dim, group.world_size
        sent = torch.stack(whole.chunk(parts, dim))
        received = torch.empty_like(sent)
        numels = [sent.numel() // parts] * parts
        work = group.all_to_all(received.view(-1), sent.view(-1), numels, numels)
        Ticket([work], label=LABEL).wait()
        return received.sum(0)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return None, None, Gather.apply(ctx.group, ctx.dim, grads[0])
