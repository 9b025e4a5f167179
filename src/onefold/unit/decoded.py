"""DecodedWeight: the numbers of a frozen weight whose bytes rest and travel coded.

at rest, gathered   uint8 [nbytes]           the codec's message of all elements
unsharded           compute dtype [shape]    decoded when its modules start, freed with the unit
"""

from __future__ import annotations

from torch import Tensor

from onefold.layout.packed import CodedWeight
from onefold.ledger import Kind
from onefold.unit.buffer import Buffer
from onefold.unit.context import Context
from onefold.wire.codec import codec_of


class DecodedWeight:
    """Room for the numbers of one coded weight, which are valid from `fill` to `release`."""

    def __init__(self, coded: CodedWeight, message: Tensor, context: Context) -> None:
        """`message`: uint8 [nbytes], a view of the unit's full buffer."""
        self.shape, self.dtype = coded.shape_of_numbers, coded.dtype_of_numbers
        self._codec, self._message = codec_of(coded.word), message
        self._buffer = Buffer(
            self.shape.numel(), context.compute or self.dtype, Kind.UNSHARDED, context.store,
            context.ledger,
        )  # fmt: skip
        self.view = self._buffer.view(0, tuple(self.shape))
        self._buffer.release()

    @property
    def tensor(self) -> Tensor:
        """The flat numbers."""
        return self._buffer.tensor

    def fill(self) -> None:
        """Decode the gathered message, unless that was done since the last `release`."""
        if not self._buffer.is_held:
            self._buffer.reallocate()
            self._codec.decode(self._message, self._buffer.tensor)

    def release(self) -> None:
        """Free the numbers."""
        self._buffer.release()

    def plain(self, message: Tensor) -> Tensor:
        """The numbers of a message, in memory of their own and their own dtype."""
        numbers = message.new_empty(self.shape, dtype=self.dtype)
        self._codec.decode(message, numbers.view(-1))
        return numbers

    def message_of(self, numbers: Tensor) -> Tensor:
        """Code numbers [shape] anew: numbers that were decoded give the same bytes."""
        message = self._message.new_empty(self._message.shape)
        self._codec.encode(numbers.detach().to(message.device).reshape(-1), message)
        return message
