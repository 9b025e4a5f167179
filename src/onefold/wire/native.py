"""How the C kernel of kernels/codec.c is called, where it was compiled and this CPU runs it."""

import ctypes
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import increment_version

from onefold.errors import WireError
from onefold.wire.kernels.library import Kernel


class Parts(NamedTuple):
    """Messages in CPU memory: how they are laid out, and their two parts, a row each."""

    word: str  # "int8" or "int4"
    group: int
    is_rotated: bool
    scales: Tensor  # bf16 [rows, groups]
    payload: Tensor  # uint8 [rows, bytes]


class _Message(ctypes.Structure):
    """`struct message`."""

    _fields_ = [
        ("numel", ctypes.c_int64),
        ("group", ctypes.c_int64),
        ("scales", ctypes.c_void_p),
        ("payload", ctypes.c_void_p),
        ("values", ctypes.c_void_p),
        ("is_int4", ctypes.c_int32),
        ("is_rotated", ctypes.c_int32),
        ("is_bf16", ctypes.c_int32),
        ("adds", ctypes.c_int32),
        ("num_scales", ctypes.c_int64),
        ("num_bytes", ctypes.c_int64),
        ("num_values", ctypes.c_int64),
        ("rows", ctypes.c_int64),
        ("message_stride", ctypes.c_int64),
        ("values_stride", ctypes.c_int64),
    ]


class CodecKernel(Kernel):
    """Quantized messages, int8 and int4, in one pass, on this thread: the bits of the torch way."""

    word = "codec"

    def __init__(self, library: ctypes.CDLL, index: int, name: str) -> None:
        super().__init__(library, index, name)
        self._encode = self._function("onefold_codec_encode", ctypes.c_void_p)
        self._decode = self._function("onefold_codec_decode", ctypes.c_void_p)
        self._encode.restype = self._decode.restype = ctypes.c_int

    @staticmethod
    def takes(word: str, values: Tensor) -> bool:
        """True if it has a loop for such values."""
        is_known = values.dtype in (torch.float32, torch.bfloat16) and word in ("int8", "int4")
        return is_known and values.device.type == "cpu"

    def encode(self, values: Tensor, parts: Parts) -> None:
        """Write scales and payload of `values` [rows, n], whose rows are contiguous."""
        self._call(self._encode, parts, values, adds=False)

    def decode(self, parts: Parts, out: Tensor, *, adds: bool) -> None:
        """Overwrite `out` [rows, n], or add to it, row by row, if it is fp32."""
        self._call(self._decode, parts, out, adds=adds)
        if not out.is_inference():  # inference tensors count no versions
            increment_version(out)

    def _call(self, call: Any, parts: Parts, values: Tensor, *, adds: bool) -> None:
        tensors = (parts.scales, parts.payload, values)
        message = _Message(
            values.shape[1],
            parts.group,
            *(tensor.data_ptr() for tensor in tensors),
            parts.word == "int4",
            parts.is_rotated,
            values.dtype == torch.bfloat16,
            adds,
            *(tensor.shape[1] for tensor in tensors),
            len(values),
            parts.payload.stride(0),
            values.stride(0) * values.itemsize,
        )
        if call(self._index, ctypes.addressof(message)):
            sizes = f"{parts.scales.shape[1]} scales and {parts.payload.shape[1]} bytes"
            raise WireError(
                f"the scales and payload of {values.shape[1]} elements in groups of {parts.group}",
                sizes, hint="ranks must send messages of the same codec and size",
            )  # fmt: skip


@cache
def kernel() -> CodecKernel | None:
    """The one to use, if there is one."""
    return CodecKernel.fastest()
