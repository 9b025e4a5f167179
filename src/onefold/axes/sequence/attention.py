"""`scaled_dot_product_attention` over a sequence that is split over ranks (Ulysses).

Each rank calls it with all heads of its own positions. Queries, keys and values travel in one
all-to-all, attention runs on whole sequences of some heads, and the outputs travel back in another.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from onefold.axes.sequence.head_exchange import (
    Gather,
    HeadCut,
    HeadExchange,
    ToHeads,
    ToSequence,
)
from onefold.errors import ConfigError, StateError
from onefold.wire.collectives import Group


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

    @torch._disable_dynamo  # collectives stay out of graphs
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
        q, k, v = ToHeads.apply(call.inward, query, key, value)
        k, v, enable_gqa = call.grouped(k, v, mask is not None)
        mixed = F.scaled_dot_product_attention(
            q, k, v, mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
        )
        (out,) = ToSequence.apply(call.outward, mixed)
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
            raise ConfigError(
                "attention by F.scaled_dot_product_attention in a split sequence",
                "torch.nn.MultiheadAttention, which hides it",
                hint="call F.scaled_dot_product_attention in a module of your own",
            )
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
        return HeadCut.of(self.query[1], self.key[1], self.group.world_size)

    @cached_property
    def inward(self) -> HeadExchange:
        """What queries, keys and values take."""
        cut = self.heads
        ranges = tuple(
            (cut.queries(r), cut.keys(r), cut.keys(r)) for r in range(self.group.world_size)
        )
        return HeadExchange(self.group, ranges, (cut.num_heads, cut.num_kv_heads, cut.num_kv_heads))

    @cached_property
    def outward(self) -> HeadExchange:
        """What outputs take."""
        cut = self.heads
        ranges = tuple((cut.queries(r),) for r in range(self.group.world_size))
        return HeadExchange(self.group, ranges, (cut.num_heads,))

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
            raise StateError(
                "a mask, is_causal=True, or a length that the ranks divide",
                f"attention over all positions, {padding} of which are padding",
                where=f"rank {self.group.rank}",
                hint="pad the rows yourself and mask the padding, or choose another length",
            )

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
            mask = Gather.apply(group, 3, mask)
        elif _is_whole(columns, all_k, group.world_size) or columns == 1:
            mask = _padded(mask, 3, all_k, False) if columns > 1 else mask
            if rows == local_q:
                mask = Gather.apply(group, 2, mask)
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
