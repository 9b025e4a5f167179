"""`scaled_dot_product_attention` over a sequence that is split over ranks (Ulysses).

Each rank calls it with all heads of its own positions. Queries, keys and values travel in one
all-to-all, attention runs on whole sequences of some heads, and the outputs travel back in another.

Source: DeepSpeed-Ulysses, arXiv 2309.14509, section 3.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from onefold.compat import untraced
from onefold.errors import ConfigError, StateError
from onefold.wire.collectives import Group
from onefold.wire.moves import gathered, moved, swap

LABEL = "an all-to-all of attention over a split sequence"


class SplitAttention(threading.local):
    """Attention of one module over the ranks of `group`.

    `num_calls` counts calls. Forwards of several threads have their own.
    """

    def __init__(self, group: Group) -> None:
        self.group = group
        self.num_calls = 0
        self._padding = 0

    def pad(self, padding: int) -> None:
        """No sequence of the present forward has so many positions at the end.

        0 where each attention has a mask of its own.
        """
        self._padding = padding

    @untraced  # collectives stay out of graphs
    def __call__(  # noqa: PLR0913 - torch's signature
        self, query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None,
        dropout_p: float = 0.0, is_causal: bool = False, scale: float | None = None,
        enable_gqa: bool = False,
    ) -> Tensor:  # fmt: skip
        """Attend as `torch.nn.functional.scaled_dot_product_attention` would in one process."""
        self.num_calls += 1
        shape, dtype = query.shape, _autocast_dtype(query)
        query, key, value = (_four_axes(tensor).to(dtype) for tensor in (query, key, value))
        call = _Call(self.group, tuple(query.shape), tuple(key.shape), tuple(value.shape))
        call.check(attn_mask, is_causal, self._padding)
        mask = None if attn_mask is None else call.whole_mask(attn_mask)
        to_heads = partial(call.heads.to_heads, self.group)
        to_sequence = partial(call.heads.to_sequence, self.group)
        q, k, v = moved(to_heads, to_sequence, query, key, value)
        k, v, enable_gqa = call.grouped(k, v, mask is not None)
        mixed = F.scaled_dot_product_attention(
            q, k, v, mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
        )
        (out,) = moved(to_sequence, to_heads, mixed)
        return out.view(*shape[:-1], value.shape[-1])


class AttentionMode(TorchFunctionMode):
    """While it is entered, `scaled_dot_product_attention` on this thread is the one given."""

    def __init__(self, attention: SplitAttention) -> None:
        self.attention = attention

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func is F.scaled_dot_product_attention:
            return self.attention(*args, **(kwargs or {}))
        if func is F.multi_head_attention_forward:
            wanted = "attention by F.scaled_dot_product_attention in a split sequence"
            hint = "call F.scaled_dot_product_attention in a module of your own"
            raise ConfigError(wanted, "torch.nn.MultiheadAttention, which hides it", hint=hint)
        return func(*args, **(kwargs or {}))


@dataclass(frozen=True)
class _Call:
    """One attention: the shapes [rows, heads, local positions, width] of its inputs."""

    group: Group
    query: tuple[int, ...]
    key: tuple[int, ...]
    value: tuple[int, ...]

    @cached_property
    def heads(self) -> HeadCut:
        return HeadCut.over_parts(self.query[1], self.key[1], self.group.world_size)

    def check(self, mask: Tensor | None, is_causal: bool, padding: int) -> None:
        """Raise the same error on every rank, before anything is sent."""
        alike = self.query[0] == self.key[0] and self.key[:3] == self.value[:3]
        if not alike or self.query[3] != self.key[3]:
            wanted = "queries, keys and values of the same rows, keys and values of one length"
            hint = "expand them before attention"
            raise ConfigError(wanted, f"{self.query}, {self.key}, {self.value}", hint=hint)
        if mask is not None and is_causal:
            wanted = "attn_mask or is_causal=True"
            raise ConfigError(wanted, "both", hint="put the causal part into the mask")
        if mask is None and not is_causal and padding:
            wanted = "a mask, is_causal=True, or a length that the ranks divide"
            got = f"attention over all positions, {padding} of which are padding"
            hint = "pad the rows yourself and mask the padding, or choose another length"
            raise StateError(wanted, got, where=f"rank {self.group.rank}", hint=hint)

    def grouped(self, key: Tensor, value: Tensor, is_masked: bool) -> tuple[Tensor, Tensor, bool]:
        """Return keys and values for this rank's query heads, and whether kernels repeat them.

        Kernels repeat heads by equal groups; with a mask the fast ones do not.
        """
        rank = self.group.rank
        repeats = self.heads.repeats(rank)
        if repeats is None:
            index = torch.tensor(self.heads.reads(rank), device=key.device)
            return key.index_select(1, index), value.index_select(1, index), False
        if repeats == 1 or not is_masked:
            return key, value, repeats > 1
        return key.repeat_interleave(repeats, 1), value.repeat_interleave(repeats, 1), False

    def whole_mask(self, mask: Tensor) -> Tensor:
        """Return the mask [rows or 1, own heads or 1, positions, positions] of this rank's heads.

        A mask may be whole, hold the rows of this rank's queries for all keys, or be a mask of this
        rank's keys for all queries. Whole ones may end before the padding.
        """
        group, shape = self.group, list(mask.shape)
        local_q, local_k = self.query[2], self.key[2]
        all_q, all_k = local_q * group.world_size, local_k * group.world_size
        mask = mask[(None,) * (4 - mask.ndim)] if mask.ndim < 4 else mask
        rows, columns = mask.shape[2], mask.shape[3]
        if columns == local_k and rows == 1:
            mask = gathered(group, 3, mask, LABEL)
        elif _is_whole(columns, all_k, group.world_size) or columns == 1:
            mask = _padded(mask, 3, all_k, False) if columns > 1 else mask
            if rows == local_q:
                mask = gathered(group, 2, mask, LABEL)
            elif rows > 1 and _is_whole(rows, all_q, group.world_size):
                mask = _padded(mask, 2, all_q, True)
        if mask.ndim != 4 or mask.shape[2] not in (1, all_q) or mask.shape[3] not in (1, all_k):
            raise ConfigError(
                f"a mask of {all_q} x {all_k} positions, of {local_q} x {all_k} for this "
                f"rank's queries, or of 1 x {local_k} for its keys",
                f"shape {shape}",
                where=f"rank {group.rank}, attention of a split sequence",
                hint="build masks from the whole sequence, or use is_causal=True",
            )
        own = self.heads.queries(group.rank)
        return mask if mask.shape[1] == 1 else mask[:, own.start : own.stop]


def _is_whole(numel: int, positions: int, parts: int) -> bool:
    """True for a length of all positions, with or without their padding."""
    return positions - parts < numel <= positions


def _padded(mask: Tensor, dim: int, length: int, attends: bool) -> Tensor:
    """Append padding that nobody attends to, or rows of padding, which attend to everything."""
    missing = length - mask.shape[dim]
    if not missing:
        return mask
    shape = list(mask.shape)
    shape[dim] = missing
    if mask.dtype == torch.bool:
        return torch.cat([mask, mask.new_full(shape, attends)], dim)
    return torch.cat([mask, mask.new_full(shape, 0.0 if attends else -torch.inf)], dim)


def _four_axes(tensor: Tensor) -> Tensor:
    """[rows, heads, positions, width]; without rows, the first axis counts as heads."""
    wanted = "plain queries, keys and values of shape [rows, heads, positions, width]"
    if isinstance(tensor, DTensor):
        hint = "let tensor parallel layers return local tensors (use_local_output=True)"
        raise ConfigError(wanted, "a DTensor", hint=hint)
    if tensor.ndim not in (3, 4):
        hint = "reshape them before attention"
        raise ConfigError(wanted, f"{list(tensor.shape)}", hint=hint)
    return tensor if tensor.ndim == 4 else tensor[None]


def _autocast_dtype(tensor: Tensor) -> torch.dtype:
    """The dtype in which attention will run: cast before sending, not after."""
    kind = tensor.device.type
    if torch.is_autocast_enabled(kind) and tensor.dtype != torch.float64:
        return torch.get_autocast_dtype(kind)
    return tensor.dtype


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
    def over_parts(cls, num_heads: int, num_kv_heads: int, parts: int) -> HeadCut:
        """Raises `ConfigError` unless the query heads are a multiple of the others."""
        if num_kv_heads < 1 or num_heads % num_kv_heads:
            wanted = "query heads that are a multiple of the heads of keys and values"
            got = f"{num_heads} and {num_kv_heads}"
            hint = "each head of keys and values is copied to the ranks whose query heads "
            hint += "read it, so the query heads must form equal groups"
            raise ConfigError(wanted, got, where="attention of a split sequence", hint=hint)
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

    def _heads(self, rank: int) -> tuple[range, range, range]:
        """The heads of a rank: of queries, and of outputs alone; of keys; of values."""
        return self.queries(rank), self.keys(rank), self.keys(rank)

    def to_heads(self, group: Group, *tensors: Tensor) -> tuple[Tensor, ...]:
        """From [rows, all heads, local, width] to [rows, own heads, positions, width], each."""
        sent = [
            [t[:, own.start : own.stop] for t, own in zip(tensors, self._heads(r), strict=False)]
            for r in range(self.parts)
        ]
        shapes = [[piece.shape for piece in sent[group.rank]]] * self.parts
        pieces = swap(group, sent, shapes, tensors[0], LABEL)
        return tuple(torch.cat(column, 2) for column in zip(*pieces, strict=True))

    def to_sequence(self, group: Group, *tensors: Tensor) -> tuple[Tensor, ...]:
        """From [rows, own heads, positions, width] to [rows, all heads, local, width], each.

        Heads that several ranks had are added up, in rank order.
        """
        sent = list(zip(*(t.chunk(self.parts, 2) for t in tensors), strict=True))
        shapes = [
            [
                (len(t), len(own), *t.shape[2:])
                for t, own in zip(sent[0], self._heads(r), strict=False)
            ]
            for r in range(self.parts)
        ]
        pieces = swap(group, sent, shapes, tensors[0], LABEL)
        numbers = self.num_heads, self.num_kv_heads, self.num_kv_heads
        out = [
            t.new_zeros(len(t), number, *t.shape[2:])
            for t, number in zip(sent[0], numbers, strict=False)
        ]
        for rank, views in enumerate(pieces):
            for whole, view, own in zip(out, views, self._heads(rank), strict=False):
                whole[:, own.start : own.stop] += view
        return tuple(out)
