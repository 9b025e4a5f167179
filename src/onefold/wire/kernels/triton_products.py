"""Products of rows with a quantized matrix on a GPU, by one launch (unit/formats.py).

The matrix stays in its bytes: a program reads its rows once, widens them to bf16 in registers and
multiplies on tensor cores, with sums in fp32.
"""

# pyright: basic, reportMissingImports=false, reportMissingTypeStubs=false
from __future__ import annotations

from typing import Any

import triton
import triton.language as tl
from torch import Tensor

_GROUP = tl.constexpr(64)
_HALF = tl.constexpr(32)


@triton.jit
def _operand(x, is_interpreted: tl.constexpr):
    """As tensor cores take it; the interpreter cannot multiply bf16."""
    return x.to(tl.float32) if is_interpreted else x.to(tl.bfloat16)


@triton.jit
def _inputs(x, rows, columns, num_rows, num_columns):
    """Numbers of x [num_rows, num_columns]; zeros outside of it."""
    mask = (rows[:, None] < num_rows) & (columns[None, :] < num_columns)
    return tl.load(x + rows[:, None].to(tl.int64) * num_columns + columns[None, :], mask, other=0.0)


@triton.jit
def _own(axis: tl.constexpr, count: tl.constexpr):
    """The rows, or outputs, of this program."""
    return tl.program_id(axis) * count + tl.arange(0, count)


@triton.jit
def _keep(sums, out, rows, outputs, num_rows, num_outputs):
    """Write a program's part of out [num_rows, num_outputs]."""
    place = out + rows[:, None].to(tl.int64) * num_outputs + outputs[None, :]
    is_out = (rows[:, None] < num_rows) & (outputs[None, :] < num_outputs)
    tl.store(place, sums.to(tl.bfloat16), is_out)


@triton.jit
def _of_int8(
    x, payload, table, out, num_rows, num_outputs, width,
    num_columns: tl.constexpr, rows: tl.constexpr, outputs: tl.constexpr, step: tl.constexpr,
    is_interpreted: tl.constexpr,
):  # fmt: skip
    """Rows of x times int8 [outputs, width], transposed; then a scale for each output."""
    row, output = _own(1, rows), _own(0, outputs)
    at = payload + output[:, None].to(tl.int64) * width
    sums = tl.zeros((rows, outputs), tl.float32)
    for first in range(0, num_columns, step):
        column = first + tl.arange(0, step)
        is_there = (output[:, None] < num_outputs) & (column[None, :] < width)
        q = _operand(tl.load(at + column[None, :], is_there, other=0), is_interpreted)
        own = _operand(_inputs(x, row, column, num_rows, num_columns), is_interpreted)
        sums += tl.dot(own, tl.trans(q))
    scale = tl.load(table + output, output < num_outputs, other=0.0).to(tl.float32)
    _keep(sums * scale[None, :], out, row, output, num_rows, num_outputs)


@triton.jit
def _of_int4(
    x, payload, table, out, num_rows, num_outputs, padded,
    num_columns: tl.constexpr, rows: tl.constexpr, outputs: tl.constexpr, taken: tl.constexpr,
    is_interpreted: tl.constexpr,
):  # fmt: skip
    """The same for groups of 64 columns, `taken` at once: low nibbles are a group's first half."""
    row, output = _own(1, rows), _own(0, outputs)
    groups: tl.constexpr = (num_columns + _GROUP - 1) // _GROUP
    group = tl.arange(0, taken)
    byte = tl.arange(0, taken * _HALF)
    at = payload + output[:, None].to(tl.int64) * groups * _HALF
    sums = tl.zeros((rows, outputs), tl.float32)
    for first in range(0, groups, taken):
        is_there = (output[:, None] < padded) & (first + group[None, :] < groups)
        entry = table + ((first + group[None, :]) * padded + output[:, None]) * 2
        scale = tl.load(entry, is_there, other=0.0).to(tl.float32)[:, :, None]
        zero = tl.load(entry + 1, is_there, other=0.0).to(tl.float32)[:, :, None]
        place = first * _HALF + byte[None, :]
        q = tl.load(at + place, (output[:, None] < padded) & (place < groups * _HALF), other=0)
        q = tl.reshape(q, (outputs, taken, _HALF))
        low = ((q & 15).to(tl.float32) - 8) * scale + zero
        high = ((q >> 4).to(tl.float32) - 8) * scale + zero
        low = _operand(tl.reshape(low, (outputs, taken * _HALF)), is_interpreted)
        high = _operand(tl.reshape(high, (outputs, taken * _HALF)), is_interpreted)
        column = (first + byte // _HALF) * _GROUP + byte % _HALF
        left = _inputs(x, row, column, num_rows, num_columns)
        right = _inputs(x, row, column + _HALF, num_rows, num_columns)
        sums += tl.dot(_operand(left, is_interpreted), tl.trans(low))
        sums += tl.dot(_operand(right, is_interpreted), tl.trans(high))
    _keep(sums, out, row, output, num_rows, num_outputs)


def product(x: Tensor, payload: Tensor, table: Tensor, num_outputs: int, *, is_int4: bool) -> Any:
    """Return x [M, K] times the transposed matrix: bf16 [M, num_outputs], on the current stream."""
    num_rows, num_columns = x.shape
    out = x.new_empty(num_rows, num_outputs)
    rows = 16 if num_rows <= 16 else 64 if num_rows <= 64 else 128
    outputs = 16 if rows == 16 else 64
    grid = triton.cdiv(num_outputs, outputs), triton.cdiv(num_rows, rows)
    sizes = {"num_columns": num_columns, "rows": rows, "outputs": outputs}
    sizes["is_interpreted"] = x.device.type == "cpu"
    sizes["num_warps"] = 4 if rows < 128 else 8
    parts = x.contiguous(), payload, table, out, num_rows, num_outputs
    kernel: Any = _of_int4 if is_int4 else _of_int8
    if is_int4:
        taken = 4 if rows == 16 else 2
        kernel[grid](*parts, len(payload), **sizes, taken=taken, num_stages=3)
    else:
        step = 256 if rows == 16 else 128
        kernel[grid](*parts, payload.shape[1], **sizes, step=step, num_stages=3)
    return out
