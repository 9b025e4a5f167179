"""The keys and values of one layer's tokens, in blocks.

Tokens fill a block on the computing device. A full block moves once, to the first tier with room
(kv_tiers.py). A block is [keys, values], each [batch, heads, tokens, width], in whole pages.

[Note: rows] Operations on the batch (reorder, repeat, select) move no block. Each run remembers
which row it reads for which sequence. Only the block that is being filled is copied.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import gcd

import torch
from torch import Tensor

from onefold.inference.kv_tiers import RUN_NBYTES, BlockRun, KVTiers
from onefold.layout.ledger import Kind
from onefold.layout.rows import round_up
from onefold.tier.area import Lease
from onefold.tier.slots import Room
from onefold.tier.store import PAGE_NBYTES

BLOCK_NBYTES = 64 << 10
"""Bytes of one sequence in a block, at least: each write is a request of this size or more."""


@dataclass(frozen=True, slots=True)
class TokenShape:
    """Keys and values of one token of one sequence: (heads, width) of each, and their dtype."""

    key: tuple[int, int]
    value: tuple[int, int]
    dtype: torch.dtype

    @staticmethod
    def from_keys(keys: Tensor, values: Tensor) -> TokenShape:
        """Return the shape of keys and values [batch, heads, tokens, width]."""
        (_, key_heads, _, key_width), (_, value_heads, _, value_width) = keys.shape, values.shape
        return TokenShape((key_heads, key_width), (value_heads, value_width), keys.dtype)

    def __str__(self) -> str:
        (heads, width), (value_heads, value_width) = self.key, self.value
        return f"keys {heads} x {width}, values {value_heads} x {value_width} of {self.dtype}"

    @property
    def nbytes(self) -> int:
        """Bytes of one token of one sequence."""
        return (self.key[0] * self.key[1] + self.value[0] * self.value[1]) * self.dtype.itemsize

    @property
    def block_tokens(self) -> int:
        """Tokens of a block: whole pages for every batch size."""
        fewest = PAGE_NBYTES // gcd(self.nbytes, PAGE_NBYTES)
        return round_up(-(-BLOCK_NBYTES // self.nbytes), fewest)

    def views(self, flat: Tensor, batch: int) -> tuple[Tensor, Tensor]:
        """Show the bytes of blocks as keys and values [batch, heads, blocks, tokens, width]."""
        tokens = self.block_tokens
        per_token = self.nbytes // self.dtype.itemsize
        blocks = flat.view(self.dtype).view(-1, batch * tokens * per_token)
        numel = batch * tokens * self.key[0] * self.key[1]
        parts = (blocks[:, :numel], self.key), (blocks[:, numel:], self.value)
        keys, values = (
            part.unflatten(1, (batch, heads, tokens, width)).permute(1, 2, 0, 3, 4)
            for part, (heads, width) in parts
        )
        return keys, values


class LayerTokens:
    """Keys and values of one layer: full blocks in tiers, and one on the device that fills."""

    def __init__(self, tiers: KVTiers, layer: int, shape: TokenShape, batch: int) -> None:
        self._tiers, self._layer = tiers, layer  # of the cache, and the position in it
        self.shape, self.batch, self.length = shape, batch, 0  # length: tokens
        self.runs: list[BlockRun] = []
        self._block_tokens = shape.block_tokens
        self._new_tail()

    @property
    def _block_nbytes(self) -> int:
        return self.batch * self._block_tokens * self.shape.nbytes

    def append(self, keys: Tensor, values: Tensor) -> None:
        """Add tokens [batch, heads, tokens, width]. Raises `TierError`."""
        start, number, full = 0, keys.shape[2], self._block_tokens
        while start < number:
            used = self.length % full
            step = min(full - used, number - start)
            if used == 0 and step == full:
                step = (number - start) // full * full
                self._put(keys[:, :, start : start + step], values[:, :, start : start + step])
            else:
                for tail, source in zip(self._tail, (keys, values), strict=True):
                    tail[:, :, used : used + step].copy_(source[:, :, start : start + step])
                if used + step == full:
                    self._put(*self._tail)
            start += step
            self.length += step

    def fill_tokens(self, keys: Tensor, values: Tensor) -> None:
        """Fill keys and values [batch, heads, length, width]. Raises `TierError`."""
        start, ahead = 0, self._tiers.arriving(self._layer, self.runs)
        try:
            arrived = ahead.arrived() if ahead else iter(())
            for run in self.runs:
                flat = self._on_device(run) if run.scratch is None else next(arrived)
                stop = start + run.filled * self._block_tokens
                self._show(run, flat, keys[:, :, start:stop], values[:, :, start:stop])
                start = stop
        finally:
            if ahead is not None:
                ahead.end()
        for tail, into in zip(self._tail, (keys, values), strict=True):
            into[:, :, start : self.length].copy_(tail[:, :, : self.length - start])

    def read_ahead(self) -> None:
        """Begin to read what rests off the device."""
        self._tiers.read_ahead(self._layer, self.runs)

    def crop(self, length: int) -> None:
        """Keep the first `length` tokens. A block that is cut fills again."""
        blocks, rest = divmod(length, self._block_tokens)
        spare = self.length // self._block_tokens - blocks
        if spare:
            self._tiers.drop_ahead()
            for _ in range(spare - 1):
                self._drop_block()
            if rest:
                self._refill()
            self._drop_block()
        self.length = length

    def select(self, rows: Sequence[int]) -> None:
        """Let sequence i of a new batch continue sequence `rows[i]`. See [Note: rows]."""
        if list(rows) == list(range(self.batch)):
            return
        for run in self.runs:
            run.select(rows)
        old, self.batch = self._tail, len(rows)
        self._new_tail()
        for tail, source in zip(self._tail, old, strict=True):
            torch.index_select(source, 0, torch.tensor(rows, device=source.device), out=tail)

    def _new_tail(self) -> None:
        self._room = self._tiers.room(self._block_nbytes, Kind.STAGING)
        flat = self._room.tensor(self._block_nbytes, torch.uint8)
        keys, values = self.shape.views(flat, self.batch)
        self._tail = keys.squeeze(2), values.squeeze(2)

    def _put(self, keys: Tensor, values: Tensor) -> None:
        """Move whole blocks of tokens to their tiers."""
        start, number, size = 0, keys.shape[2] // self._block_tokens, self._block_nbytes
        while start < number:
            run = self._open_run(number - start)
            count = min(number - start, run.capacity - run.filled)
            tokens = slice(start * self._block_tokens, (start + count) * self._block_tokens)
            at, part = run.filled * size, (keys[:, :, tokens], values[:, :, tokens])
            if isinstance(run.place, Room):
                self._lay(run.place.tensor(count * size, torch.uint8, at), *part)
            else:
                assert run.scratch is not None
                with self._tiers.slots.lend(count * size) as slot:
                    flat = slot.tensor(count * size, torch.uint8)
                    self._lay(flat, *part)
                    run.scratch.begin_write(run.place, flat, lambda: None, at).wait()
            run.fill(count)
            start += count

    def _open_run(self, wanted: int) -> BlockRun:
        last = self.runs[-1] if self.runs else None
        if last is not None and last.is_open:
            return last
        doubled = 2 * last.capacity if last is not None and last.rows is None else 1
        wanted = min(max(wanted, doubled), max(1, RUN_NBYTES // self._block_nbytes))
        run = self._tiers.new_run(self.runs, self.batch, self._block_nbytes, wanted)
        self.runs.append(run)
        return run

    def _lay(self, flat: Tensor, keys: Tensor, values: Tensor) -> None:
        for into, source in zip(self.shape.views(flat, self.batch), (keys, values), strict=True):
            into.copy_(source.unflatten(2, (-1, self._block_tokens)))

    def _show(self, run: BlockRun, flat: Tensor, keys: Tensor, values: Tensor) -> None:
        """Fill keys and values with the tokens of blocks."""
        shown = self.shape.views(flat, run.batch)
        for into, stored in zip((keys, values), shown, strict=True):
            blocks = into.unflatten(2, (-1, self._block_tokens))
            if run.rows is None:
                blocks.copy_(stored)
            else:
                for row, stored_row in enumerate(run.rows):
                    blocks[row].copy_(stored[stored_row])

    def _on_device(self, run: BlockRun) -> Tensor:
        assert isinstance(run.place, Room)
        return run.place.tensor(run.filled * run.block_nbytes, torch.uint8)

    def _refill(self) -> None:
        """Copy the last block to the one that fills."""
        run = self.runs[-1]
        size = run.block_nbytes
        at = (run.filled - 1) * size
        if isinstance(run.place, Lease):
            assert run.scratch is not None
            with self._tiers.slots.lend(size) as slot:
                flat = slot.tensor(size, torch.uint8)
                run.scratch.read_into(run.place, flat, at).wait()
                self._show(run, flat, *self._tail)
        else:
            self._show(run, run.place.tensor(size, torch.uint8, at), *self._tail)

    def _drop_block(self) -> None:
        self.runs[-1].fill(-1)
        if self.runs[-1].filled == 0:
            self.runs.pop()
