"""A KV cache of transformers whose tokens rest in memory up to a budget, and on disk beyond it.

    cache = onefold.hf.KVCache(budget=2 << 30, disk="/path/on/a/fast/disk")
    model.generate(**inputs, past_key_values=cache)

transformers' own offloaded cache moves the keys and values of every layer down and up again for
each token. Here a token's keys and values move down once. Before layer i computes, the far tokens
of layer i+1 begin to come, cyclically (the order of FlexGen, arXiv 2303.06865, section 4.1).
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, NoReturn
from weakref import ref

import torch
import torch.distributed as dist
from torch import Tensor
from transformers import PreTrainedConfig
from transformers.cache_utils import (
    DYNAMIC_LAYER_TYPE_MAPPING,
    Cache,
    CacheLayerMixin,
    DynamicCache,
    get_layer_types_and_kwargs,
)

from onefold.compose.tiers import is_memory
from onefold.config import Offload
from onefold.errors import ConfigError, StateError, TierError
from onefold.inference.kv_tiers import KVTiers
from onefold.inference.token_store import LayerTokens, TokenShape
from onefold.layout.ledger import Kind
from onefold.layout.rows import round_up
from onefold.tier.slots import Room

Paths = str | os.PathLike[str] | Sequence[str | os.PathLike[str]] | None
_ALIGNMENT = 64  # bytes; torch's own allocations begin there, so kernels give the same bits
_OTHER_LAYERS = ("sliding_attention", "chunked_attention", "dummy")


@dataclass(frozen=True, slots=True)
class KVReport:
    """Bytes of a `KVCache`: held by tier, and moved to and from the disk since it was made."""

    tokens: int  # of one sequence
    token_nbytes: int  # keys and values of one token: all layers, all sequences
    held: dict[str, int]  # blocks by tier: "device", "cpu", "disk"
    staging_nbytes: int  # beyond the budgets, now
    peak_nbytes: int  # of memory, blocks and staging
    read_nbytes: int
    written_nbytes: int


class KVCache(DynamicCache):
    """Keys and values in tiers, for `generate(past_key_values=...)`.

    The first tokens rest on the computing device up to `budget` bytes over all layers, then in
    page-locked CPU memory up to `cpu_budget` bytes (accelerators), then in files. Tokens and logits
    are those of `DynamicCache`, bit for bit.

    Memory beyond the budgets, with L bytes of keys and values in one layer: L that its attention
    reads, at most L + 8 MiB of the next layer on their way from far tiers, 8 MiB or one block for
    writes, and one block for each layer. A block holds at least 64 KiB of each sequence. Sequences
    that were removed from the batch still count in full blocks.

    One object serves one model and one batch at a time. `reset()` frees memory and disk space.
    Deleting the object does too. For an encoder-decoder model, give
    `EncoderDecoderCache(KVCache(...), KVCache(...))`.

    Args:
        budget: bytes of keys and values on the computing device, over all layers.
        disk: a folder for further tokens, or several whose bandwidths add; None: no disk tier.
        cpu_budget: bytes in page-locked CPU memory. Where the CPU computes, it adds to `budget`.
            Memory is page-locked in steps of 256 MiB.
        config: the model's. With it the budgets are divided evenly over the layers, and
            sliding-window layers keep their window alone, on the device and outside the budget.
            Without it, the first layers take the budget, and every layer keeps all tokens.

    Raises:
        ConfigError: for a budget that is no number of bytes, a layer type without keys and values
            of single tokens (linear attention), or other sequences and shapes than before.
        StateError: for a cache that two models use at once, or after a failure until `reset()`.
        TierError: if the disk or memory refuses; the message names the path and the offset.
    """

    def __init__(
        self,
        budget: int,
        *,
        disk: Paths = None,
        cpu_budget: int = 0,
        config: PreTrainedConfig | None = None,
    ) -> None:
        for name, value in (("budget", budget), ("cpu_budget", cpu_budget)):
            if type(value) is not int or value < 0:
                hint = "2 << 30 is 2 GiB; 0 keeps full blocks on the disk alone"
                raise ConfigError(f"KVCache({name}=) in bytes", repr(value), hint=hint)
        types, arguments = _layer_types(config)
        rank, paths = dist.get_rank() if dist.is_initialized() else 0, Offload(disk=disk).paths
        self._tiers = _Shared(budget, cpu_budget, paths, rank, types.count("full_attention"))
        for path in filter(is_memory, paths):
            warnings.warn(
                f"the disk tier at {path} lies in memory (tmpfs): keys and values there stay in "
                "memory; name a folder on a disk",
                stacklevel=2,
            )
        if config is None:
            replicate: Any = partial(KVLayer, self._tiers)
            Cache.__init__(self, layer_class_to_replicate=replicate)
            return
        layers: list[Any] = [
            KVLayer(self._tiers)
            if kind == "full_attention"
            else DYNAMIC_LAYER_TYPE_MAPPING[kind](**more)
            for kind, more in zip(types, arguments, strict=True)
        ]
        Cache.__init__(self, layers=layers)

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Add tokens [batch, heads, tokens, width] of a layer; return its keys and values."""
        if self.layer_class_to_replicate is None and layer_idx >= len(self.layers):
            wanted, hint = f"a model of {len(self.layers)} layers", "give config= of this model"
            raise ConfigError(wanted, f"its layer {layer_idx}", hint=hint)
        return super().update(key_states, value_states, layer_idx, *args, **kwargs)

    def reset(self) -> None:
        """Forget all tokens; free their memory and disk space."""
        super().reset()
        self._tiers.close(sum(isinstance(layer, KVLayer) for layer in self.layers))

    def report(self) -> KVReport:
        """Return what is held, and what was read and written."""
        usage, (read, written) = self._tiers.ledger.usage, self._tiers.moved_nbytes
        layers = (layer for layer in self.layers if isinstance(layer, KVLayer))
        ours = [layer.tokens for layer in layers if layer.tokens is not None]
        near = [(kind, used) for (kind, tier), used in usage.items() if tier != "disk"]
        return KVReport(
            tokens=max((tokens.length for tokens in ours), default=0),
            token_nbytes=sum(tokens.batch * tokens.shape.nbytes for tokens in ours),
            held={tier: used.now for (kind, tier), used in usage.items() if kind is Kind.CACHE},
            staging_nbytes=sum(used.now for kind, used in near if kind is Kind.STAGING),
            peak_nbytes=sum(used.peak for _, used in near),
            read_nbytes=read,
            written_nbytes=written,
        )

    def __deepcopy__(self, memo: object) -> NoReturn:
        hint = "crop() the cache back to the prompt, or make another and prefill it"
        raise StateError("one owner of a KV cache's files", "a copy of it", hint=hint)


class _Shared(KVTiers):
    """What the layers of one cache share: tiers, their order, the layer that is assembled."""

    def __init__(self, *budgets: Any) -> None:
        super().__init__(*budgets)
        self.layers: list[ref[KVLayer]] = []  # the cache owns them
        self.whole: tuple[int, Room, Tensor, Tensor] | None = None  # until the next one is
        self.has_failed = False

    def started(self) -> list[KVLayer]:
        """The layers that hold tokens."""
        layers = (layer() for layer in self.layers)
        return [layer for layer in layers if layer is not None and layer.tokens is not None]

    @contextmanager
    def changing(self) -> Iterator[None]:
        """Refuse a call after a failure, which leaves layers with different numbers of tokens."""
        if self.has_failed:
            hint = "reset() the cache, and generate again"
            raise StateError("a KV cache that is whole", "one that failed", hint=hint)
        try:  # buffers outlive the call: they must not be tensors of an inference mode
            with torch.inference_mode(False), torch.no_grad():
                yield
        except BaseException as error:
            self.whole, self.has_failed = None, True
            if isinstance(error, TierError):
                error.add_note("of the KV cache: reset() frees its memory and its disk space")
            raise


class KVLayer(CacheLayerMixin):
    """One layer of a `KVCache`. transformers calls it."""

    is_compileable = False
    is_croppable = True
    is_sliding = False

    def __init__(self, shared: _Shared) -> None:
        self._shared, self._index = shared, len(shared.layers)
        shared.layers.append(ref(self))
        self.tokens: LayerTokens | None = None
        self.is_initialized = False

    @property
    def keys(self) -> Tensor | None:  # type: ignore[override] - an attribute there
        """All keys [batch, heads, tokens, width], assembled anew; None before the first."""
        return None if self.tokens is None else self._whole()[0]

    @property
    def values(self) -> Tensor | None:  # type: ignore[override]
        """All values, as `keys`."""
        return None if self.tokens is None else self._whole()[1]

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Learn the shape of tokens, and the device."""
        self._shared.open(key_states.device)
        self.dtype, self.device = key_states.dtype, key_states.device
        shape, batch = TokenShape.from_keys(key_states, value_states), key_states.shape[0]
        self.tokens = LayerTokens(self._shared, self._index, shape, batch)
        self.is_initialized = True

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Add tokens [batch, heads, tokens, width]; return the keys and values of all."""
        self._check_tokens(key_states, value_states)
        with self._shared.changing():
            if self.tokens is None:
                self.lazy_initialization(key_states, value_states)
            assert self.tokens is not None
            self._check_pass(self.tokens.length + key_states.shape[2])
            keys, values = self._assemble(self.tokens, key_states.shape[2])
            keys[:, :, self.tokens.length :].copy_(key_states)
            values[:, :, self.tokens.length :].copy_(value_states)
            self.tokens.append(key_states, value_states)
            self._read_ahead_of_next()
        return keys, values

    def _check_tokens(self, key_states: Tensor, value_states: Tensor) -> None:
        if torch.is_grad_enabled() and key_states.requires_grad:
            hint = "torch.no_grad() around the call, or use_cache=False in training"
            raise StateError("keys without gradients", "a graph", hint=hint)
        if self.tokens is None:
            return
        known = self.tokens.shape, self.tokens.batch, self.device
        new = TokenShape.from_keys(key_states, value_states), key_states.shape[0], key_states.device
        if known != new:
            wanted = "{}, {} sequences, on {}, as before".format(*known)
            got = "{}, {} sequences, on {}".format(*new)
            hint = "a cache serves one model and one batch: reset() it before another"
            raise ConfigError(wanted, got, where=f"layer {self._index} of a KV cache", hint=hint)

    def _check_pass(self, length: int) -> None:
        first = self._shared.started()[0]
        assert first.tokens is not None
        if first is not self and first.tokens.length != length:
            wanted = f"{first.tokens.length:,} tokens in every layer after this pass"
            got = f"{length:,}"
            hint = "two models share the cache, or a pass failed: reset() it"
            raise StateError(wanted, got, where=f"layer {self._index} of a KV cache", hint=hint)

    def _assemble(self, tokens: LayerTokens, further: int) -> tuple[Tensor, Tensor]:
        """Fill new tensors, contiguous as `DynamicCache`'s, with room for further tokens."""
        self._shared.whole = None
        (key_heads, key_width), (value_heads, value_width) = tokens.shape.key, tokens.shape.value
        total, dtype = tokens.length + further, tokens.shape.dtype
        shape = tokens.batch, key_heads, total, key_width
        value_shape = tokens.batch, value_heads, total, value_width
        numel, value_numel = torch.Size(shape).numel(), torch.Size(value_shape).numel()
        start = round_up(numel * dtype.itemsize, _ALIGNMENT)
        room = self._shared.room(start + value_numel * dtype.itemsize, Kind.STAGING)
        keys = room.tensor(numel, dtype).view(shape)
        values = room.tensor(value_numel, dtype, start).view(value_shape)
        tokens.fill_tokens(keys[:, :, : tokens.length], values[:, :, : tokens.length])
        self._shared.whole = self._index, room, keys, values
        return keys, values

    def _whole(self) -> tuple[Tensor, Tensor]:
        whole = self._shared.whole
        if whole is not None and whole[0] == self._index:
            return whole[2:]
        assert self.tokens is not None
        with self._shared.changing():
            keys, values = self._assemble(self.tokens, 0)
            self._read_ahead_of_next()
        return keys, values

    def _read_ahead_of_next(self) -> None:
        started = self._shared.started()
        after = started[(started.index(self) + 1) % len(started)]
        if after is not self:
            after.prefetch()

    def get_seq_length(self) -> int:
        return 0 if self.tokens is None else self.tokens.length

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.get_seq_length() + query_length, 0

    def get_max_length(self) -> int:
        """Return -1: there is no maximum."""
        return -1

    def offload(self) -> None:
        """Free the assembled keys and values."""
        self._shared.whole = None

    def prefetch(self) -> None:
        """Begin to read what rests off the device."""
        if self.tokens is not None:
            self.tokens.read_ahead()

    def reset(self) -> None:
        """Forget all tokens."""
        self._shared.drop_ahead()
        self._shared.whole, self._shared.has_failed = None, False
        self.tokens = None
        self.is_initialized = False

    def crop(self, tokens_to_remove: int) -> None:
        """Remove the last tokens: a number of 0 or below, as in transformers 5."""
        if tokens_to_remove > 0:
            got, hint = repr(tokens_to_remove), f"crop({-tokens_to_remove}) removes so many tokens"
            raise ConfigError("a number of tokens to remove, negative", got, hint=hint)
        if self.tokens is None or tokens_to_remove == 0:
            return
        self._shared.whole = None
        with self._shared.changing():
            self.tokens.crop(max(0, self.tokens.length + tokens_to_remove))

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Let each sequence continue another one."""
        self._select(beam_idx.tolist())

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat each sequence, next to itself."""
        if self.tokens is not None:
            self._select([row for row in range(self.tokens.batch) for _ in range(repeats)])

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keep these sequences: indices, or a mask."""
        if self.tokens is not None:
            device = indices.device if isinstance(indices, Tensor) else None
            self._select(torch.arange(self.tokens.batch, device=device)[indices].tolist())

    def _select(self, rows: list[int]) -> None:
        if self.get_seq_length() > 0 and self.tokens is not None:
            self._shared.whole = None
            with self._shared.changing():
                self.tokens.select(rows)


def _layer_types(config: PreTrainedConfig | None) -> tuple[list[str], list[dict[str, Any]]]:
    """Return the layer types of a model's decoder, and arguments of their cache layers."""
    if config is None:
        return [], []
    types, arguments = get_layer_types_and_kwargs(config.get_text_config(decoder=True))
    strange = sorted(set(types) - {"full_attention", *_OTHER_LAYERS})
    if strange:
        hint = "DynamicCache(config=...) holds such layers in memory"
        wanted = "layers with keys and values of each token"
        raise ConfigError(wanted, ", ".join(strange), hint=hint)
    return types, arguments
