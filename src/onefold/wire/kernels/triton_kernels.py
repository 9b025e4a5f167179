"""Quantized messages and sums on a GPU, one launch for each: the bits of codec.c and of torch.

A table in the device's memory has a row for each part of a message, so that one launch takes parts
wherever they lie. `plan` has two numbers for each program: its part, and the first group there. The
second axis of a launch is that of ranks, whose pieces of a part are alike.

    is_quantized, numel, scales, payload, values, other, is_narrow, is_fresh, ranks,
    message_stride, values_stride, other_stride

Addresses and strides are in bytes; 0: there is none. `is_narrow`: values are bf16, else fp32.

Numbers are rounded to bf16 by integers, as codec.c does: a cast may truncate in the interpreter
that tests run. Divisions are `div_rn`, and callers pass `enable_fp_fusion=False`: each operation of
fp32 is rounded by itself.
"""

# pyright: basic, reportMissingImports=false, reportMissingTypeStubs=false
from __future__ import annotations

from typing import Any

import triton
import triton.language as tl

_FIELDS = tl.constexpr(12)
_NUMEL, _SCALES, _PAYLOAD, _VALUES, _OTHER, _IS_NARROW, _IS_FRESH = map(tl.constexpr, range(1, 8))
_RANKS, _MESSAGE_STRIDE, _VALUES_STRIDE, _OTHER_STRIDE = map(tl.constexpr, range(8, 12))
_WIDTH = tl.constexpr(32)
_NEAREST = tl.constexpr(12582912.0)  # 1.5 * 2^23: the last bit of its significand is 1
_NAN_BITS = tl.constexpr(0x7FC0)
_INF_BITS = tl.constexpr(0x7F800000)


@triton.jit
def _load(address, at, mask, is_bf16: tl.constexpr):
    """Numbers at `at` behind an address, as fp32."""
    if is_bf16:
        narrow = tl.load(address.to(tl.pointer_type(tl.uint16)) + at, mask=mask, other=0)
        return (narrow.to(tl.uint32) << 16).to(tl.float32, bitcast=True)
    return tl.load(address.to(tl.pointer_type(tl.float32)) + at, mask=mask, other=0.0)


@triton.jit
def _address(row, field: tl.constexpr, stride: tl.constexpr):
    """An address of the row, moved to the piece of this program's rank."""
    return tl.load(row + field) + tl.program_id(1) * tl.load(row + stride)


@triton.jit
def _values(row, at, mask):
    """Own values, of the dtype that the row names."""
    address = _address(row, _VALUES, _VALUES_STRIDE)
    if tl.load(row + _IS_NARROW) != 0:
        x = _load(address, at, mask, True)
    else:
        x = _load(address, at, mask, False)
    return x


@triton.jit
def _rounded(x):
    """The nearest bf16, as an integer; ties to even, NaN stays NaN."""
    bits = x.to(tl.uint32, bitcast=True)
    nearest = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
    return tl.where(x == x, nearest, _NAN_BITS).to(tl.uint16)


@triton.jit
def _store(address, at, x, mask, is_bf16: tl.constexpr):
    if is_bf16:
        tl.store(address.to(tl.pointer_type(tl.uint16)) + at, _rounded(x), mask=mask)
    else:
        tl.store(address.to(tl.pointer_type(tl.float32)) + at, x, mask=mask)


@triton.jit
def _stage(x, apart: tl.constexpr, numel: tl.constexpr):
    """Sums and differences of neighbours that are so far apart."""
    pairs = tl.permute(tl.reshape(x, (numel // (2 * apart), 2, apart)), (0, 2, 1))
    a, b = tl.split(pairs)
    return tl.reshape(tl.permute(tl.join(a + b, a - b), (0, 2, 1)), (numel,))


@triton.jit
def _transform(x, rows: tl.constexpr, block: tl.constexpr):
    """H of each 32 elements of x [rows, block]."""
    flat = tl.reshape(x, (rows * block,))
    flat = _stage(flat, 1, rows * block)
    flat = _stage(flat, 2, rows * block)
    flat = _stage(flat, 4, rows * block)
    flat = _stage(flat, 8, rows * block)
    flat = _stage(flat, 16, rows * block)
    return tl.reshape(flat, (rows, block))


@triton.jit
def _places(table, plan, group: tl.constexpr, rows: tl.constexpr, block: tl.constexpr):
    """A program's row of the table and the elements of its piece, none where a part has fewer
    pieces; its groups [rows, 1], columns and elements [rows, block].
    """
    program = tl.program_id(0)
    row = table + tl.load(plan + 2 * program).to(tl.int64) * _FIELDS
    groups = tl.load(plan + 2 * program + 1).to(tl.int64) + tl.arange(0, rows)[:, None]
    columns = tl.arange(0, block)[None, :]
    at = groups * group + columns
    numel = tl.where(tl.program_id(1) < tl.load(row + _RANKS), tl.load(row + _NUMEL), 0)
    mask = (columns < group) & (at < numel)
    return row, numel, groups, columns, at, mask


@triton.jit
def _whole(numel, groups, columns, group: tl.constexpr):
    """The elements of groups that blocks of the rotation hold; those behind are only scaled."""
    length = tl.minimum(numel - groups * group, group)
    return columns < length // _WIDTH * _WIDTH


@triton.jit
def _decoded(
    scales, payload, numel, groups, columns, at, mask, group: tl.constexpr, rows: tl.constexpr,
    block: tl.constexpr, is_int4: tl.constexpr, is_rotated: tl.constexpr, tail: tl.constexpr,
):  # fmt: skip
    """The numbers of a message."""
    has = groups * group < numel
    bits = tl.load(scales.to(tl.pointer_type(tl.uint16)) + groups, mask=has, other=0)
    scale = (bits.to(tl.uint32) << 16).to(tl.float32, bitcast=True)
    first = payload.to(tl.pointer_type(tl.uint8))
    if is_int4:
        pair = tl.load(first + at // 2, mask=mask, other=0).to(tl.int32)
        q = ((pair >> ((at % 2) * 4).to(tl.int32)) & 15 ^ 8) - 8
    else:
        q = tl.load(first + at, mask=mask, other=0).to(tl.int8, bitcast=True).to(tl.int32)
    x = q.to(tl.float32) * scale
    if is_rotated:
        whole = _whole(numel, groups, columns, group)
        turned = _transform(tl.where(whole, x, 0.0), rows, block)
        x = tl.where(whole, turned, x * tail)
    return x


@triton.jit
def encode(
    table, plan, group: tl.constexpr, rows: tl.constexpr, block: tl.constexpr,
    is_int4: tl.constexpr, is_rotated: tl.constexpr, tail: tl.constexpr, is_bf16: tl.constexpr,
    largest: tl.constexpr, smallest: tl.constexpr, has_base: tl.constexpr,
):  # fmt: skip
    """Write a message whose exact parts are bf16 or fp32.

    `other`: with `has_base` what to send differences to, in that dtype; else the residual (fp32),
    which is read and written.
    """
    row, numel, groups, columns, at, mask = _places(table, plan, group, rows, block)
    scales = _address(row, _SCALES, _MESSAGE_STRIDE)
    payload = _address(row, _PAYLOAD, _MESSAGE_STRIDE)
    other, x = _address(row, _OTHER, _OTHER_STRIDE), _values(row, at, mask)
    if tl.load(row) == 0:
        _store(payload, at, x, mask, is_bf16)
    else:
        if has_base:
            x = x - _load(other, at, mask, is_bf16)
        elif other != 0:
            x = _load(other, at, mask, False) + x
        total = x
        if is_rotated:
            whole = _whole(numel, groups, columns, group)
            turned = _transform(tl.where(whole, x * (1.0 / _WIDTH), 0.0), rows, block)
            x = tl.where(whole, turned, x * (1.0 / tail))
        bits = x.to(tl.int32, bitcast=True) & 0x7FFFFFFF
        amax = tl.max(bits, axis=1, keep_dims=True)  # infinity and NaN are above all numbers
        is_bad = amax >= _INF_BITS
        amax = amax.to(tl.float32, bitcast=True)
        quotient = tl.div_rn(amax, tl.full((rows, 1), largest, tl.float32))
        quotient = tl.where(quotient > smallest, quotient, smallest)
        scale = tl.where(is_bad, _NAN_BITS, _rounded(quotient).to(tl.uint32)).to(tl.uint16)
        has = groups * group < numel
        tl.store(scales.to(tl.pointer_type(tl.uint16)) + groups, scale, mask=has)
        wide = (scale.to(tl.uint32) << 16).to(tl.float32, bitcast=True)
        inverse = tl.div_rn(tl.full((rows, 1), 1.0, tl.float32), wide)
        q = (x * inverse + _NEAREST).to(tl.int32, bitcast=True)
        q = tl.where(is_bad, 0, q)
        first = payload.to(tl.pointer_type(tl.uint8))
        if is_int4:
            low, high = tl.split(tl.reshape(q & 15, (rows, block // 2, 2)))
            even = groups * group // 2 + tl.arange(0, block // 2)[None, :]
            in_group = 2 * tl.arange(0, block // 2)[None, :] < group
            there = in_group & (2 * even < numel)
            tl.store(first + even, (low | (high << 4)).to(tl.uint8), mask=there)
            q = ((q & 15) ^ 8) - 8
        else:
            tl.store(first + at, (q & 255).to(tl.uint8), mask=mask)
            q = (q << 24) >> 24
        if not has_base and other != 0:
            back = q.to(tl.float32) * wide
            if is_rotated:
                turned = _transform(tl.where(whole, back, 0.0), rows, block)
                back = tl.where(whole, turned, back * tail)
            rest = (back + total * -1.0) * -1.0
            is_number = (rest.to(tl.int32, bitcast=True) & 0x7FFFFFFF) < _INF_BITS
            _store(other, at, tl.where(is_number, rest, 0.0), mask, False)


@triton.jit
def decode(
    table, plan, group: tl.constexpr, rows: tl.constexpr, block: tl.constexpr,
    is_int4: tl.constexpr, is_rotated: tl.constexpr, tail: tl.constexpr, is_bf16: tl.constexpr,
    adds: tl.constexpr,
):  # fmt: skip
    """Write the numbers of messages over `values`, or add them."""
    row, numel, groups, columns, at, mask = _places(table, plan, group, rows, block)
    scales = _address(row, _SCALES, _MESSAGE_STRIDE)
    payload = _address(row, _PAYLOAD, _MESSAGE_STRIDE)
    values = _address(row, _VALUES, _VALUES_STRIDE)
    if tl.load(row) == 0:
        _store(values, at, _load(payload, at, mask, is_bf16), mask, is_bf16)
    else:
        x = _decoded(
            scales, payload, numel, groups, columns, at, mask, group, rows, block, is_int4,
            is_rotated, tail,
        )  # fmt: skip
        if adds:
            x = _load(values, at, mask, is_bf16) + x
        _store(values, at, x, mask, is_bf16)


@triton.jit
def average(
    table, plan, num_ranks, rank, nbytes, skipped, scale, group: tl.constexpr, rows: tl.constexpr,
    block: tl.constexpr, is_int4: tl.constexpr, is_rotated: tl.constexpr, tail: tl.constexpr,
    is_bf16: tl.constexpr, into_bf16: tl.constexpr,
):  # fmt: skip
    """Sum the messages of all ranks in rank order; `other` gets the mean.

    `scales` and `payload` are those of the first message. Each message has `nbytes`; this rank's
    part is in `values`, and its message, which has `skipped` bytes, is not read.
    """
    row, numel, groups, columns, at, mask = _places(table, plan, group, rows, block)
    scales = _address(row, _SCALES, _MESSAGE_STRIDE)
    payload = _address(row, _PAYLOAD, _MESSAGE_STRIDE)
    other, is_quantized, own = tl.load(row + _OTHER), tl.load(row), _values(row, at, mask)
    if is_bf16:  # as if it had been sent
        narrow = (_rounded(own).to(tl.uint32) << 16).to(tl.float32, bitcast=True)
        own = tl.where(is_quantized == 0, narrow, own)
    total = tl.zeros((rows, block), tl.float32)
    passed = numel * 0
    for sender in range(num_ranks):
        if sender == rank:
            total += own
            passed += skipped
        elif is_quantized != 0:
            total += _decoded(
                scales + passed, payload + passed, numel, groups, columns, at, mask, group, rows,
                block, is_int4, is_rotated, tail,
            )  # fmt: skip
            passed += nbytes
        else:
            total += _load(payload + passed, at, mask, is_bf16)
            passed += nbytes
    total = total * scale
    if tl.load(row + _IS_FRESH) == 0:
        total = _load(other, at, mask, into_bf16) + total
    _store(other, at, total, mask, into_bf16)


@triton.jit
def mean(
    table, plan, num_ranks, scale, group: tl.constexpr, rows: tl.constexpr,
    block: tl.constexpr, is_bf16: tl.constexpr, into_bf16: tl.constexpr,
):  # fmt: skip
    """Sum exact pieces in rank order: the first at `payload`, the next `scales` bytes on."""
    row, _numel, _groups, _columns, at, mask = _places(table, plan, group, rows, block)
    stride, first = tl.load(row + _SCALES), tl.load(row + _PAYLOAD)
    other = tl.load(row + _OTHER)
    total = _load(first, at, mask, is_bf16)
    for sender in range(1, num_ranks):
        total += _load(first + sender * stride, at, mask, is_bf16)
    total = total * scale
    if tl.load(row + _IS_FRESH) == 0:
        total = _load(other, at, mask, into_bf16) + total
    _store(other, at, total, mask, into_bf16)


@triton.jit
def adopt(weight, master, numel, block: tl.constexpr):
    """Take bf16 weights [numel] into the fp32 master where its rounded values are others."""
    at = tl.program_id(0).to(tl.int64) * block + tl.arange(0, block)
    mask = at < numel
    narrow = tl.load(weight + at, mask=mask, other=0)
    now = (narrow.to(tl.uint32) << 16).to(tl.float32, bitcast=True)
    rounded = _rounded(tl.load(master + at, mask=mask, other=0.0)).to(tl.uint32) << 16
    is_edited = now != rounded.to(tl.float32, bitcast=True)
    tl.store(master + at, now, mask=mask & is_edited)


def launch(kernel: Any, grid: tuple[int, int], *arguments: Any, **constants: Any) -> None:
    """Launch a grid of programs, on the current stream; nothing for none."""
    if grid[0]:
        kernel[grid](*arguments, **constants, enable_fp_fusion=False)
