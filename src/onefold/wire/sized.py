"""What codecs demand of their tensors, said before bytes are misread."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from onefold.errors import WireError, expected


class Sized(Protocol):
    """What is known of any codec."""

    @property
    def name(self) -> str:
        """For messages."""
        ...

    def nbytes(self, numel: int) -> int:
        """Bytes of a message."""
        ...


def check_encoding(codec: Sized, values: Tensor, message: Tensor) -> None:
    """Raise WireError unless `values` can be encoded into `message`."""
    if values.dim() != 1 or not values.is_floating_point():
        _refuse(codec, "flat values of a floating dtype", values)
    _check_message(codec, message, values)


def check_decoding(codec: Sized, message: Tensor, out: Tensor, *, adds: bool = False) -> None:
    """Raise WireError unless `message` can be decoded into `out`, or added to it."""
    is_right = out.dtype == torch.float32 if adds else out.is_floating_point()
    if out.dim() != 1 or not is_right or not out.is_contiguous():
        what = "torch.float32" if adds else "a floating dtype"
        _refuse(codec, f"a flat, contiguous tensor of {what} to decode to", out)
    _check_message(codec, message, out)


def _check_message(codec: Sized, message: Tensor, values: Tensor) -> None:
    nbytes = codec.nbytes(values.numel())
    is_bytes = message.dtype == torch.uint8 and message.is_contiguous()
    if not is_bytes or message.shape != (nbytes,) or message.device != values.device:
        what = f"a message of {nbytes} bytes, torch.uint8, for {values.numel()} elements"
        _refuse(codec, f"{what} on {values.device}", message)


def _refuse(codec: Sized, what: str, got: Tensor) -> None:
    told = f"{tuple(got.shape)} of {got.dtype} on {got.device}"
    raise WireError(
        expected(what, told, where=f"codec {codec.name}", hint="Codec.nbytes(numel) is its length")
    )
