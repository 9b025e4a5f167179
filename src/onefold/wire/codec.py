"""Codecs: how values become the bytes that travel, and values again.

    exact              their own bytes
    bf16, fp16         rounded
    int8, int4, fp8    block-quantised, scales and payload in one message (onefold.wire.quantised)
    int8+h, int4+h     the same after a Hadamard rotation (onefold.wire.rotation)

Pure functions of tensors, on any device: the same values give the same bytes on every rank, and the
same bytes the same values. So replicas that decode one message agree, and a gradient that is summed
from decoded pieces in rank order is the same whoever sums it.

Sums that are encoded anew at each hop of a ring lose bits at each of them. So pieces are decoded by
whoever sums them, in fp32, and a sum is encoded once more at most, for a second hop.
"""

from __future__ import annotations

from dataclasses import dataclass
from difflib import get_close_matches
from typing import Protocol, get_args

import torch
from torch import Tensor

from onefold.errors import ConfigError, WireError, expected
from onefold.wire.quantised import GROUPS, Quantised, Word
from onefold.wire.sized import check_decoding, check_encoding

ALIGNMENT = 16
"""Bytes at which a message in a larger buffer has to begin."""

BLOCK_NUMEL = 64 * 1024
"""Torch adds tensors of two dtypes slowly; widened in the cache first, 3 to 6 times as fast."""

CASTS = {"bf16": torch.bfloat16, "fp16": torch.float16}


class Codec(Protocol):
    """How values travel. Codecs are values too: frozen, hashable, equal if they do the same."""

    @property
    def name(self) -> str:
        """For reports: "int8", "int4+h", "bf16"."""
        ...

    @property
    def is_exact(self) -> bool:
        """True if every value of the dtype it is for comes back with the same bits."""
        ...

    def nbytes(self, numel: int) -> int:
        """Bytes of the message of `numel` elements, all of them; 0 for 0."""
        ...

    def encode(self, values: Tensor, message: Tensor) -> None:
        """Write all of `message`, uint8 [nbytes(n)], begun at a multiple of 16 bytes.

        `values` are [n] of any floating dtype, on any device, the message's. Nothing is raised for
        infinities and NaN, which come back as none. WireError for other shapes, dtypes or devices.
        """
        ...

    def decode(self, message: Tensor, out: Tensor) -> None:
        """Overwrite `out` [n], of any floating dtype: computed in fp32, then rounded to it."""
        ...

    def add(self, message: Tensor, out: Tensor) -> None:
        """Add what was encoded to `out`, fp32 [n]."""
        ...


@dataclass(frozen=True)
class Cast:
    """Rounded to another dtype, to nearest, ties to even; to its own dtype, nothing happens at all.

    `is_exact` is a promise: wider values are then refused instead of rounded.
    """

    dtype: torch.dtype
    is_exact: bool = False

    @property
    def name(self) -> str:
        """As `codec_of` takes it."""
        if self.is_exact:
            return "exact"
        return next(word for word, dtype in CASTS.items() if dtype == self.dtype)

    def nbytes(self, numel: int) -> int:
        """Bytes of as many elements of the dtype."""
        return numel * self.dtype.itemsize

    def encode(self, values: Tensor, message: Tensor) -> None:
        """See `Codec.encode`."""
        check_encoding(self, values, message)
        if self.is_exact and torch.promote_types(values.dtype, self.dtype) != self.dtype:
            what = f"values that {self.dtype} holds exactly"
            hint = "make the codec for the dtype of the values: codec_of('exact', dtype=...)"
            raise WireError(expected(what, values.dtype, where="codec exact", hint=hint))
        message.view(self.dtype).copy_(values.detach())

    def decode(self, message: Tensor, out: Tensor) -> None:
        """See `Codec.decode`."""
        check_decoding(self, message, out)
        out.detach().copy_(message.view(self.dtype))

    def add(self, message: Tensor, out: Tensor) -> None:
        """See `Codec.add`."""
        check_decoding(self, message, out, adds=True)
        values, out = message.view(self.dtype), out.detach()
        if self.dtype == out.dtype or out.device.type != "cpu":
            out.add_(values)
            return
        wide = torch.empty(min(len(out), BLOCK_NUMEL))
        for own, into in zip(values.split(BLOCK_NUMEL), out.split(BLOCK_NUMEL), strict=True):
            into.add_(wide[: len(own)].copy_(own))


def codec_of(
    name: str | None, *, dtype: torch.dtype = torch.float32, group: int | None = None
) -> Codec:
    """The codec of a word: exact, bf16, fp16, or int8, int4 or fp8, and these also with "+h".

    `dtype` is that of the values an exact codec (or None) is for. `group` is how many elements
    share a scale: by default 512, for int4 128. ConfigError for other words and groups.
    """
    if name is None or name == "exact":
        return Cast(dtype, is_exact=True)
    if name in CASTS:
        return Cast(CASTS[name])
    quantised = {
        word + "+h" * rotated: (word, rotated)
        for word in get_args(Word)
        for rotated in (False, True)
    }
    if name not in quantised:
        known = ["exact", *CASTS, *quantised]
        close = get_close_matches(name, known, n=1)
        hint = f"did you mean {close[0]!r}?" if close else "None sends values as they are"
        raise ConfigError(expected(f"one of {', '.join(known)}", repr(name), hint=hint))
    word, is_rotated = quantised[name]
    return Quantised(word, group or GROUPS[word], is_rotated)


def encode_with_feedback(codec: Codec, values: Tensor, residual: Tensor, message: Tensor) -> None:
    """Encode `values` [n] and what is still owed; `residual`, fp32 [n], is then what is owed now.

    Error feedback (Seide et al., Interspeech 2014; LoCo, arXiv 2407.04480): all that was decoded
    sums to all values but for the last residual, however many messages there were. Start with
    zeros. What a group with infinities or NaN lost is not known: its residual is zero again.
    """
    residual.add_(values.detach())
    codec.encode(residual, message)
    codec.add(message, residual.neg_())  # -(decoded - sum): no temporary
    residual.neg_().nan_to_num_(0.0, 0.0, 0.0)
