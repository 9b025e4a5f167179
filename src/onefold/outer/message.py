"""The bytes of one parcel: matrices in the codec's form, then vectors and scalars as they are.

[ codec message of all matrices | up to a multiple of 16 | exact elements ]
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from onefold.layout.cut import Range
from onefold.layout.messages import ALIGN_NBYTES
from onefold.layout.rows import round_up
from onefold.outer.parcels import Parcel
from onefold.wire.codec import Codec


class ParcelMessage:
    """Packs one parcel of flat rows [own rows] into a message, and reads it again.

    Without a codec all elements are exact. `dtype` is that of the rows.
    """

    def __init__(self, parcel: Parcel, dtype: torch.dtype, codec: Codec | None) -> None:
        is_coded = codec is not None and dtype.is_floating_point
        self.owners, self._dtype, self._codec = parcel.owners, dtype, codec
        self.coded = parcel.coded if is_coded else []
        self.exact = parcel.exact if is_coded else parcel.coded + parcel.exact
        self._coded_numel, exact_numel = _numel(self.coded), _numel(self.exact)
        self._coded_nbytes = 0 if codec is None else codec.nbytes(self._coded_numel)
        self._start = round_up(self._coded_nbytes, ALIGN_NBYTES)
        self.nbytes = self._start + exact_numel * dtype.itemsize

    def pack(self, rows: Tensor) -> Tensor:
        """Return the message, uint8 [nbytes], of `rows` [own rows]."""
        message = torch.zeros(self.nbytes, dtype=torch.uint8)
        if self._codec is not None and self.coded:
            self._codec.encode(_taken(rows, self.coded).float(), message[: self._coded_nbytes])
        if self.exact:
            message[self._start :].view(self._dtype).copy_(_taken(rows, self.exact))
        return message

    def unpack(self, message: Tensor, rows: Tensor) -> None:
        """Write the values of a message to their places in `rows`; leave the others."""
        if self._codec is not None and self.coded:
            values = torch.empty(self._coded_numel)
            self._codec.decode(message[: self._coded_nbytes], values)
            _put(values, rows, self.coded)
        if self.exact:
            _put(message[self._start :].view(self._dtype), rows, self.exact)

    def mean(self, messages: Sequence[Tensor], weights: Sequence[int], rows: Tensor) -> None:
        """Write the weighted mean of all islands' values to `rows`: the same bits on each.

        Values are added in the order of the islands.
        """
        total, each = torch.zeros_like(rows), torch.zeros_like(rows)
        for message, weight in zip(messages, weights, strict=True):
            self.unpack(message, each)
            total.add_(each, alpha=weight)
        total.div_(sum(weights))
        for start, stop in (*self.coded, *self.exact):
            rows[start:stop] = total[start:stop]

    def keep_rounding(self, sent: Tensor, message: Tensor, residual: Tensor) -> None:
        """Write the part of `sent` that the codec rounded off to `residual` (error feedback).

        Source: Seide et al., Interspeech 2014.
        """
        if self._codec is None or not self.coded:
            return
        values = torch.empty(self._coded_numel)
        self._codec.decode(message[: self._coded_nbytes], values)
        rounded = _taken(sent, self.coded).float().sub_(values)
        _put(rounded.nan_to_num_(0.0, 0.0, 0.0), residual, self.coded)


def _numel(ranges: Sequence[Range]) -> int:
    return sum(stop - start for start, stop in ranges)


def _taken(rows: Tensor, ranges: Sequence[Range]) -> Tensor:
    return torch.cat([rows[start:stop] for start, stop in ranges])


def _put(values: Tensor, rows: Tensor, ranges: Sequence[Range]) -> None:
    parts = values.split([stop - start for start, stop in ranges])
    for (start, stop), part in zip(ranges, parts, strict=True):
        rows[start:stop] = part
