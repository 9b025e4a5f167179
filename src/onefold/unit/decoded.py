"""DecodedWeight: the numbers of a weight whose bytes rest and travel coded.

at rest, gathered   uint8 [nbytes]           the message of all elements (unit/formats.py)
unsharded           compute dtype [shape]    decoded when its modules start, freed with the unit

A weight that is multiplied in its bytes (unit/products.py) is decoded only where an operation asks
for its numbers. They are freed whenever the unit rests, also where its bytes stay, and where the
numbers of another unit are decoded.
"""

from __future__ import annotations

import torch
from torch import Tensor

from onefold.layout.ledger import Kind
from onefold.layout.packed import CodedWeight
from onefold.unit.buffer import Buffer
from onefold.unit.context import Context
from onefold.unit.formats import format_of


class DecodedWeight:
    """Room for the numbers of one coded weight, which are valid from `fill` to `release`."""

    def __init__(self, coded: CodedWeight, message: Tensor, context: Context) -> None:
        """`message`: uint8 [nbytes], a view of the unit's full buffer."""
        self.word, self.shape, self.dtype = (
            coded.word,
            coded.shape_of_numbers,
            coded.dtype_of_numbers,
        )
        self.compute_dtype = context.compute or self.dtype
        self.is_multiplied, self.is_transposed = coded.is_multiplied, coded.is_transposed
        self.message, self._format = message, format_of(coded.word)
        self._context = context
        self._buffer: Buffer | None = None
        self._view: Tensor  # the numbers, once there is a buffer
        self._target: Tensor  # the same memory as it is decoded to
        if not self.is_multiplied:
            self._make_room().release()

    @property
    def view(self) -> Tensor:
        """The numbers [shape], which are valid after `fill`."""
        self._make_room()
        return self._view

    @property
    def tensor(self) -> Tensor:
        """The flat numbers."""
        return self._make_room().tensor

    def _make_room(self) -> Buffer:
        if self._buffer is None:
            numel, context = self.shape.numel(), self._context
            with torch.inference_mode(False):  # else nothing may resize it
                self._buffer = Buffer(
                    numel, self.compute_dtype, Kind.UNSHARDED, context.store, context.ledger
                )
                self._target = self._buffer.view(0, self.shape_in_message)
                self._view = self._turned(self._target.data)  # a refill is no edit of it
            self._buffer.release()
        return self._buffer

    @property
    def shape_in_message(self) -> tuple[int, ...]:
        """The shape that was coded: rows are outputs."""
        shape = tuple(self.shape)
        return (*shape[:-2], shape[-1], shape[-2]) if self.is_transposed else shape

    def _turned(self, numbers: Tensor) -> Tensor:
        return numbers.transpose(-1, -2) if self.is_transposed else numbers

    def fill(self) -> None:
        """Decode the gathered message, unless that was done since the last `release`."""
        if self.is_multiplied and (self._buffer is None or not self._buffer.is_held):
            self._context.numbers.note(self.message, self.release)
        room = self._make_room()
        if not room.is_held:
            room.reallocate()
            self._format.decode(self.message, self._target)

    def release(self) -> None:
        """Free the numbers."""
        if self._buffer is not None:
            self._buffer.release()

    def plain(self, message: Tensor) -> Tensor:
        """The numbers of a message, in memory of their own and their own dtype."""
        numbers = message.new_empty(self.shape_in_message, dtype=self.dtype)
        self._format.decode(message, numbers)
        return self._turned(numbers).contiguous()

    def message_of(self, numbers: Tensor) -> Tensor:
        """Code numbers [shape] anew.

        Numbers that were decoded in a block codec give the same bytes.
        """
        message = self.message.new_empty(self.message.shape)
        self._format.encode(self._turned(numbers.detach().to(message.device)), message)
        return message
