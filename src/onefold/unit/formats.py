"""Formats of weights that rest in bytes: what a message holds, and products with it.

A matrix has N rows (outputs) and K columns (inputs). torch's kernels multiply with two formats:

    int8 rows     [ q int8 [N, K'] | scales bf16 [N] ]              w = q * scale
    int4 groups   [ q 4 bits [N', K'] | (scale, zero) bf16 [K'/64, N', 2] ]
                                                                    w = (q - 8) * scale + zero

K' is K rounded up to 16 for int8 and to 64 for int4, N' is N rounded up to 64: the rest is zeros,
whose products add nothing. A message ends at a multiple of 64 bytes. A stack [E, N, K] is E
messages, one behind the other. `BlockFormat` quantizes a weight of any shape as the wire quantizes
messages (wire/codec.py); no kernel multiplies with it.

Scales are rounded to the nearest bf16, as on the wire. No int8 error exceeds scale / 2, with scale
= max |w| of the row / 127. Groups of int4 have 64 columns, and their range includes zero, so that
its rounding stays small beside a step: no error exceeds 0.55 of the range / 15. NaN and infinities
make their row or group NaN.

[Note: padding] `_weight_int8pack_mm` in bf16 reads past the end of rows that are no multiple of 16
long: it crashes, or is wrong. Nothing checks it.

[Note: layout] torch keeps 4-bit weights in tiles whose order of rows depends on the processor
(64 rows with AVX512, else 32). On CUDA a group of a row is a tile: low nibbles are its first 32
columns. `_tile_order` packs row and column numbers and
reads where they went, so decoding needs no copy of that table. Bytes are for the processor that
packed them: they are never saved.

[Note: rows] Which way is faster was measured on a core with AVX512, 4096 x 4096 in bf16, ms:

    rows of inputs                   1     8    16    32    64   128   256
    F.linear, exact                2.0   2.2   6.5   8.8  11.3  23.5  36.7
    int8: kernel                   1.2   2.3   8.4  16.7  38.9  74.5   126
    int8: decode blocks            3.7   5.6    10    15    25    26    46
    int4: kernel                   0.5   1.7   7.4  13.3  49.2  62.4   105
    int4: decode blocks             17 more than F.linear

So the kernels serve up to 16 and 32 rows. Above them, and for other dtypes than bf16, for which the
kernels have scalar loops (10 to 50 times slower), blocks of rows are decoded where a cache holds
them, and F.linear multiplies.

On one H200 torch's CUDA kernels took 28 (int8, any rows) and 2 to 3 times (int4) as long as bf16 of
the same shape, and decoding in blocks for a CPU's cache 30 to 110 times: it is launches there. So a
GPU has kernels of its own (unit/products.py), and decodes large blocks.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from math import prod
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from onefold.layout.packed import QuantizedWeight
from onefold.layout.rows import round_up
from onefold.unit import products
from onefold.wire.codec import LARGEST, SMALLEST_SCALE, Codec, codec_of

ALIGN_NBYTES = 64
"""Messages of a stack begin at multiples of it, as regions of a unit's buffer do."""
BLOCK_NUMEL = 1024 * 1024
"""Elements of a block of rows that is decoded at once: 2 MiB of bf16, which a cache holds."""
DEVICE_BLOCK_NUMEL = 64 * BLOCK_NUMEL
"""The same on a GPU: few launches, and 128 MiB of bf16."""
DEVICE_ROWS = 512
"""Most rows of inputs for a GPU's kernel; for more, decoding once is cheap beside the product."""


@dataclass(frozen=True)
class BlockFormat:
    """The codec of the wire, for weights of any shape."""

    codec: Codec

    def nbytes(self, shape: Sequence[int]) -> int:
        return self.codec.nbytes(prod(shape))

    def encode(self, numbers: Tensor, message: Tensor) -> None:
        self.codec.encode(numbers.reshape(-1), message)

    def decode(self, message: Tensor, out: Tensor) -> None:
        self.codec.decode(message, out.view(-1))


class MatrixParts(NamedTuple):
    """Views of the message of one matrix, as kernels take them."""

    shape: tuple[int, int]  # N, K
    payload: Tensor  # int8 [N, K'], or uint8 [N', K' / 2] in tiles
    table: Tensor  # bf16 [N], or [K' / 64, N', 2]


@dataclass(frozen=True)
class MatrixFormat:
    """A format of matrices [N, K] and of stacks [E, N, K] that torch's kernels multiply with."""

    kernel_rows: ClassVar[int]
    """Most rows of inputs for which torch's kernel for CPUs is faster than decoding blocks."""
    device_type: str = "cpu"
    """The device whose kernel wants this layout."""

    def nbytes(self, shape: Sequence[int]) -> int:
        """Return the bytes of a message of numbers [shape]."""
        payload, table = self._nbytes(shape[-2], shape[-1])
        return prod(shape[:-2]) * round_up(payload + table, ALIGN_NBYTES)

    def encode(self, numbers: Tensor, message: Tensor) -> None:
        """Write all of `message`."""
        message.zero_()
        matrices = numbers.reshape(-1, *numbers.shape[-2:])
        for matrix, parts in zip(matrices, self.matrices(message, numbers.shape), strict=True):
            self._encode(matrix, parts)

    def decode(self, message: Tensor, out: Tensor) -> None:
        """Overwrite `out` [shape], of any floating dtype."""
        matrices = out.view(-1, *out.shape[-2:])
        for matrix, parts in zip(matrices, self.matrices(message, out.shape), strict=True):
            for block in self.blocks(parts):
                matrix[block].copy_(self.rows(parts, block, out.dtype))

    def matrices(self, message: Tensor, shape: Sequence[int]) -> list[MatrixParts]:
        """The parts of each matrix of a message of numbers [shape]."""
        rows, columns = shape[-2:]
        payload, table = self._nbytes(rows, columns)
        matrices: list[MatrixParts] = []
        for packed in message.view(prod(shape[:-2]), -1):
            scales = packed[payload : payload + table].view(torch.bfloat16)
            views = self._shaped(packed[:payload], scales, rows)
            matrices.append(MatrixParts((rows, columns), *views))
        return matrices

    def linear(self, x: Tensor, parts: MatrixParts) -> Tensor:
        """Return x [..., K] times the transposed matrix: [..., N], in the dtype of `x`."""
        flat = x.reshape(-1, x.shape[-1])
        product = self._product(flat, parts) if len(flat) and x.dtype == torch.bfloat16 else None
        if product is None:
            product = flat.new_empty(len(flat), parts.shape[0])
            for block in self.blocks(parts):
                product[:, block] = F.linear(flat, self.rows(parts, block, x.dtype))
        return product.view(*x.shape[:-1], parts.shape[0])

    def _product(self, x: Tensor, parts: MatrixParts) -> Tensor | None:
        """The product by a kernel, or None where decoding is faster, or the only way."""
        if x.device.type == "cpu":
            has_kernel = self.device_type == "cpu" and len(x) <= self.kernel_rows
            return self._kernel(x, parts) if has_kernel else None
        if len(x) > DEVICE_ROWS:
            return None
        return products.product(
            x, parts.payload, parts.table, parts.shape[0], is_int4=isinstance(self, Int4Groups)
        )

    def blocks(self, parts: MatrixParts) -> list[slice]:
        """Ranges of rows that are decoded at once."""
        rows, columns = parts.shape
        numel = BLOCK_NUMEL if parts.payload.device.type == "cpu" else DEVICE_BLOCK_NUMEL
        step = round_up(max(1, numel // max(1, columns)), 64)
        return [slice(start, min(start + step, rows)) for start in range(0, rows, step)]

    def rows(self, parts: MatrixParts, block: slice, dtype: torch.dtype) -> Tensor:
        """Return the numbers of some rows, [rows, K]."""
        raise NotImplementedError

    def _nbytes(self, rows: int, columns: int) -> tuple[int, int]:
        raise NotImplementedError

    def _shaped(self, payload: Tensor, table: Tensor, rows: int) -> tuple[Tensor, Tensor]:
        raise NotImplementedError

    def _encode(self, matrix: Tensor, parts: MatrixParts) -> None:
        raise NotImplementedError

    def _kernel(self, x: Tensor, parts: MatrixParts) -> Tensor:
        raise NotImplementedError


@dataclass(frozen=True)
class Int8Rows(MatrixFormat):
    """One scale for each row: `aten._weight_int8pack_mm`."""

    kernel_rows: ClassVar[int] = 16

    def rows(self, parts: MatrixParts, block: slice, dtype: torch.dtype) -> Tensor:
        payload = parts.payload[block, : parts.shape[1]]
        return payload.to(dtype).mul_(parts.table[block, None])

    def _nbytes(self, rows: int, columns: int) -> tuple[int, int]:
        return rows * round_up(columns, 16), rows * 2

    def _shaped(self, payload: Tensor, table: Tensor, rows: int) -> tuple[Tensor, Tensor]:
        return payload.view(torch.int8).view(rows, -1), table

    def _encode(self, matrix: Tensor, parts: MatrixParts) -> None:
        for block in self.blocks(parts):
            x = matrix[block].to(torch.float32, copy=True)
            largest = x.abs().amax(1) if x.shape[1] else x.new_zeros(len(x))
            is_bad = ~largest.isfinite()
            largest.div_(largest.new_full((), LARGEST["int8"])).clamp_(min=SMALLEST_SCALE)
            scales = parts.table[block].copy_(largest).masked_fill_(is_bad, torch.nan)
            x.div_(scales.float().unsqueeze(1)).nan_to_num_(0.0, 0.0, 0.0)
            parts.payload[block, : x.shape[1]].copy_(x.round_())

    def _kernel(self, x: Tensor, parts: MatrixParts) -> Tensor:
        padding = parts.payload.shape[1] - x.shape[1]
        x = F.pad(x, (0, padding)) if padding else x.contiguous()
        return torch.ops.aten._weight_int8pack_mm(x, parts.payload, parts.table)


@dataclass(frozen=True)
class Int4Groups(MatrixFormat):
    """A scale and a zero for 64 columns of a row: `aten._weight_int4pack_mm_for_cpu`."""

    kernel_rows: ClassVar[int] = 32
    group: ClassVar[int] = 64

    def rows(self, parts: MatrixParts, block: slice, dtype: torch.dtype) -> Tensor:
        padded = slice(block.start, round_up(block.stop, 64))
        q = _unpacked(parts.payload[padded], self.device_type)
        table = parts.table[:, padded].to(dtype)
        scales, zeros = table.transpose(0, 1).unbind(-1)  # [rows, groups] each
        numbers = q.view(len(q), -1, self.group).to(dtype)
        numbers.mul_(scales.unsqueeze(2)).add_(zeros.unsqueeze(2))  # addcmul is 20 times slower
        return numbers.view(len(q), -1)[: block.stop - block.start, : parts.shape[1]]

    def _nbytes(self, rows: int, columns: int) -> tuple[int, int]:
        numel = round_up(rows, 64) * round_up(columns, self.group)
        return numel // 2, numel // self.group * 4

    def _shaped(self, payload: Tensor, table: Tensor, rows: int) -> tuple[Tensor, Tensor]:
        padded = round_up(rows, 64)
        return payload.view(padded, -1), table.view(-1, padded, 2)

    def _encode(self, matrix: Tensor, parts: MatrixParts) -> None:
        width = round_up(parts.shape[1], self.group)
        for block in self.blocks(parts):
            padded = slice(block.start, round_up(block.stop, 64))
            x = matrix.new_zeros(padded.stop - padded.start, width, dtype=torch.float32)
            x[: block.stop - block.start, : parts.shape[1]] = matrix[block]
            x = x.view(len(x), -1, self.group)
            least, most = x.amin(2).clamp_(max=0), x.amax(2).clamp_(min=0)
            is_bad = ~(most - least).isfinite()
            scales = ((most - least) / 15).clamp_(min=SMALLEST_SCALE).bfloat16()
            zeros = least.add_(scales.float(), alpha=8).bfloat16()
            x.sub_(zeros.float().unsqueeze(2)).div_(scales.float().unsqueeze(2))
            x.nan_to_num_(0.0, 0.0, 0.0).round_().add_(8).clamp_(0, 15)
            parts.payload[padded].copy_(_packed(x.view(len(x), -1), self.device_type))
            scales.masked_fill_(is_bad, torch.nan)
            parts.table[:, padded] = torch.stack([scales, zeros], -1).transpose(0, 1)

    def _kernel(self, x: Tensor, parts: MatrixParts) -> Tensor:
        padding = parts.payload.shape[1] * 2 - x.shape[1]
        x = F.pad(x, (0, padding)) if padding else x.contiguous()
        product = torch.ops.aten._weight_int4pack_mm_for_cpu(
            x, parts.payload, self.group, parts.table
        )
        return product[:, : parts.shape[0]]


# [Note: layout]


def _tile(device_type: str) -> tuple[int, int]:
    """Rows and columns that are packed together; tiles of the same rows lie side by side."""
    if device_type == "cuda":
        return 1, 64
    return (64 if torch.backends.cpu.get_cpu_capability() == "AVX512" else 32), 1


def _packed(q: Tensor, device_type: str) -> Tensor:
    """Pack numbers 0 to 15, [N, K], N and K multiples of 64, as a device's kernel wants them."""
    if device_type == "cuda":
        low, high = q.to(torch.uint8).view(len(q), -1, 2, 32).unbind(2)
        return (low | high << 4).view(len(q), -1)
    q = q.to("cpu", torch.int32)
    tiles = torch.ops.aten._convert_weight_to_int4pack_for_cpu(q.contiguous(), 2)
    return tiles.view(torch.uint8).view(len(q), -1)


@cache
def _tile_order(device_type: str) -> Tensor | None:
    """For each element of a tile, its place among the low nibbles, then the high ones, of a tile.

    None where that is the order of columns, and of rows in them.
    """
    rows, columns = _tile(device_type)
    numbers = torch.arange(rows).unsqueeze(1) + rows * torch.arange(columns)
    numbers = numbers.repeat(64 // rows, 64 // columns)
    place = torch.zeros(rows * columns, dtype=torch.int64)
    for digit in range(3):
        packed = _packed(numbers >> 4 * digit & 15, device_type).cpu()
        tile = packed.view(-1, rows * columns // 2)[0]
        place += torch.cat([tile & 15, tile >> 4]).long() << 4 * digit
    order = place.argsort()
    return None if torch.equal(order, torch.arange(len(order))) else order


def _unpacked(packed: Tensor, device_type: str) -> Tensor:
    """The numbers -8 to 7, int8 [N, K], of bytes [N, K / 2] for a device's kernel."""
    rows, columns = _tile(device_type)
    order = _tile_order(device_type)
    tiles = packed.reshape(-1, rows * columns // 2)
    nibbles = torch.cat([tiles & 15, tiles >> 4], 1).view(torch.int8).sub_(8)
    if order is not None:
        nibbles = nibbles[:, order.to(nibbles.device)]
    strips = nibbles.view(len(packed) // rows, -1, columns, rows)
    return strips.permute(0, 3, 1, 2).reshape(len(packed), -1)


MATRIX_FORMATS: dict[str, MatrixFormat] = {
    "int8 rows": Int8Rows(),
    "int4 groups": Int4Groups(),
    "int4 groups (cuda)": Int4Groups("cuda"),
}
"""By the word of a quantized weight."""


def format_of(word: str) -> BlockFormat | MatrixFormat:
    """The format that a quantized weight names."""
    return MATRIX_FORMATS.get(word) or BlockFormat(codec_of(word))


def described(
    numbers: Tensor, word: str, *, is_multiplied: bool = False, is_transposed: bool = False
) -> QuantizedWeight:
    """Describe the message of numbers, without its bytes."""
    shape = numbers.mT.shape if is_transposed else numbers.shape
    message = torch.empty(format_of(word).nbytes(shape), dtype=torch.uint8, device="meta")
    return QuantizedWeight.describing(
        message, word, numbers, is_multiplied=is_multiplied, is_transposed=is_transposed
    )


def encode(about: QuantizedWeight, numbers: Tensor) -> Tensor:
    """Return the message that is described: uint8 [nbytes], on the device of the numbers."""
    message = torch.empty(about.shape, dtype=torch.uint8, device=numbers.device)
    values = numbers.detach()
    format_of(about.word).encode(values.mT if about.is_transposed else values, message)
    return message
