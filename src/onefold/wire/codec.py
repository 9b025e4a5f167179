"""Codecs: how values become the bytes of a message, and values again.

    int8, int4       block-quantized, scales and payload in one message
    int8+h, int4+h   the same after a Hadamard rotation

    n elements, G = ceil(n / group):   [ G scales, bf16 | payload, 1 or 1/2 byte an element ]

Codecs are pure functions of tensors, on any device: the same values give the same bytes on every
rank, and the same bytes the same values. So replicas that decode one message agree, and a gradient
that is summed from decoded pieces in rank order is the same on every rank that sums it. A ring that
encodes its sum at each hop loses bits at each hop. So the rank that sums decodes the pieces, adds
them in fp32, and encodes the sum once more at most, for a second hop.

Symmetric: x is sent as q = rint(x / scale), ties to even, and decoded as q * scale. Scales are
amax / 127 (int8) or amax / 7 (int4), rounded to the *nearest* bf16. A scale is within 2^-8 of the
quotient, so the largest element of a group is less than 127.5 scales and becomes q = 127 (or 7):
nothing clips, no error exceeds scale / 2, decoding does not overflow (the largest fp32 included),
and decoded values encode to the same message again. With scales rounded up, the last two would not
hold. (ZeRO++, arXiv 2306.10209, and SDP4Bit, arXiv 2410.15526, keep scales in fp16 or fp32; bf16
has the range of fp32 and adds 0.4 % to int8 and 3 % to int4.)

No scale is below 2^-126, the smallest normal number: its reciprocal is finite, devices that flush
subnormals agree, and a group of zeros needs no case of its own. Infinities and NaN make the scale
of their group NaN and its payload 0: the whole group decodes to NaN.

Every operation is a correctly rounded one of fp32, in a fixed order: all devices produce the same
bits, and so does the C kernel (kernels/codec.c), which is used on the CPU where it was compiled:
one pass over memory where torch makes five to thirty, block by block.

[Note: rotation] Values of a group share the scale of the largest one; where most of the others are
small (heavy tails) they lose their bits to it. A Hadamard matrix H of order 32 turns a block into
32 signed sums of all of it, which are nearly normal whatever the values were (SDP4Bit; QuaRot,
arXiv 2404.00456). The normalised transform would multiply by 1/sqrt(32) on both sides and round
each time. Here the way in is H/32 and the way out H: the factor is a power of two, and no sum
overflows on the way in. Elements after the last whole block are not mixed, only brought to a like
scale: divided by 4, a power of two next to sqrt(32). The five stages add neighbours 1, 2, 4, 8 and
16 apart, in this order, in fp32 and without fused multiply-adds. See docs/adr/0012.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Literal, NamedTuple, get_args

import torch
from torch import Tensor

from onefold.errors import ConfigError, WireError
from onefold.wire.kernels.compiling import (
    LARGEST_INT4,
    LARGEST_INT8,
    MAX_GROUP,
    SMALLEST_SCALE,
    TAIL,
    WIDTH,
)
from onefold.wire.native import CodecKernel, Parts, kernel

Word = Literal["int8", "int4"]

LARGEST: dict[Word, float] = {"int8": LARGEST_INT8, "int4": LARGEST_INT4}
"""The largest value of each format: the largest element of a group becomes it."""
GROUPS: dict[Word, int] = {"int8": 512, "int4": 128}
"""Elements that share a scale by default (SDP4Bit's choice)."""
MAX_GROUPS: dict[Word, int] = {"int8": MAX_GROUP, "int4": 512}
"""At 4096 elements int4 loses 2 (normal) to 6 times (heavy tails) as much as at 128."""

CPU_BLOCK_NUMEL = 128 * 1024
"""As fast as 512 Ki; at 16 to 64 Ki the calls show (a third of the speed)."""
DEVICE_BLOCK_NUMEL = 16 * 1024 * 1024
"""On a device only the extra memory counts, and launches should be few."""


@dataclass(frozen=True)
class Codec:
    """How values travel: groups of elements share one bf16 scale. Equal codecs do the same.

    `message` is uint8 [nbytes(n)], contiguous, begun at a multiple of 16 bytes of a larger buffer,
    on the device of the values. Rows of values [rows, n] have a message each, [rows, nbytes(n)];
    rows of both may lie apart. Each call raises `WireError` for other shapes, dtypes or devices.
    """

    word: Word
    group: int
    is_rotated: bool = False

    def __post_init__(self) -> None:
        most = MAX_GROUPS[self.word]
        if not (WIDTH <= self.group <= most and self.group % WIDTH == 0):
            what = f"groups of a multiple of {WIDTH} elements up to {most} for {self.word}"
            raise ConfigError(what, self.group, hint=f"{GROUPS[self.word]} is the usual")

    @property
    def name(self) -> str:
        """The codec's word, and the group size where it is not the default."""
        unusual = f" (groups of {self.group})" if self.group != GROUPS[self.word] else ""
        return self.word + "+h" * self.is_rotated + unusual

    def nbytes(self, numel: int) -> int:
        """Return the bytes of a message of `numel` elements; 0 for 0."""
        return 2 * -(-numel // self.group) + self.payload_nbytes(numel)

    def encode(self, values: Tensor, message: Tensor) -> None:
        """Write all of `message` from `values` [n], of any floating dtype.

        Infinities and NaN raise nothing: they decode to NaN.
        """
        if not (0 < values.dim() == message.dim() < 3 and values.is_floating_point()):
            self._refuse_message("flat values of a floating dtype, or rows of them", values)
        self._check_message(message, values)
        values, (scales, payload) = values.detach(), self._message_parts(message)
        values = _as_rows(values if _is_packed(values) else values.contiguous())
        native = self._native(values)
        if native is not None:
            native.encode(values, Parts(self.word, self.group, self.is_rotated, scales, payload))
        else:
            _encode_blocks(self, values, scales, payload)

    def decode(self, message: Tensor, out: Tensor) -> None:
        """Overwrite `out` [n], of any floating dtype: computed in fp32, then rounded to it."""
        self._decode(message, out.detach(), adds=False)

    def add(self, message: Tensor, out: Tensor) -> None:
        """Add the decoded values to `out`, fp32: to [n] all rows of a message, in their order."""
        self._decode(message, out.detach(), adds=True)

    def _decode(self, message: Tensor, out: Tensor, *, adds: bool) -> None:
        is_right = out.dtype == torch.float32 if adds else out.is_floating_point()
        if not (0 < out.dim() < 3 and is_right and _is_packed(out)):
            dtype = "torch.float32" if adds else "a floating dtype"
            self._refuse_message(f"a flat, contiguous tensor of {dtype} to decode to", out)
        self._check_message(message, out, is_sum=adds and out.dim() < message.dim())
        (scales, payload), out = self._message_parts(message), _as_rows(out)
        native = self._native(out)
        if native is not None:
            out = out.expand(len(payload), -1)
            parts = Parts(self.word, self.group, self.is_rotated, scales, payload)
            native.decode(parts, out, adds=adds)
        else:
            _decode(self, scales, payload, out, adds=adds)

    def _native(self, values: Tensor) -> CodecKernel | None:
        native = kernel()
        return native if native is not None and native.takes(self.word, values) else None

    def payload_nbytes(self, numel: int) -> int:
        """Bytes of the payload alone."""
        return (numel + 1) // 2 if self.word == "int4" else numel

    def _message_parts(self, message: Tensor) -> tuple[Tensor, Tensor]:
        """Scales, bf16 [rows, groups], and payload, uint8 [rows, bytes].

        Only the last group may be a short one, so the message's length gives their number.
        """
        groups = -(-message.shape[-1] // self.nbytes(self.group))
        scales = message[..., : 2 * groups].view(torch.bfloat16)
        return _as_rows(scales), _as_rows(message[..., 2 * groups :])

    def _check_message(self, message: Tensor, values: Tensor, *, is_sum: bool = False) -> None:
        """`is_sum`: values of one row, messages of several."""
        *rows, numel = values.shape
        shape = (*message.shape[:1], self.nbytes(numel)) if is_sum else (*rows, self.nbytes(numel))
        is_bytes = message.dtype == torch.uint8 and _is_packed(message)
        if not is_bytes or message.shape != shape or message.device != values.device:
            wanted = f"a message of {shape[-1]} bytes, torch.uint8, for {numel} elements"
            self._refuse_message(f"{wanted} on {values.device}", message)

    def _refuse_message(self, wanted: str, tensor: Tensor) -> None:
        got = f"{tuple(tensor.shape)} of {tensor.dtype} on {tensor.device}"
        hint = "Codec.nbytes(numel) is its length"
        raise WireError(wanted, got, where=f"codec {self.name}", hint=hint)


def codec_of(name: str, *, group: int | None = None) -> Codec:
    """Return the codec of a word: int8, int4, int8+h or int4+h.

    `group` elements share a scale: by default 512, for int4 128. Raises ConfigError for other words
    and groups.
    """
    known = {
        word + "+h" * rotated: (word, rotated)
        for word in get_args(Word)
        for rotated in (False, True)
    }
    if name not in known:
        close = get_close_matches(name, known, n=1)
        hint = f"did you mean {close[0]!r}?" if close else "int8 loses least"
        raise ConfigError(f"one of {', '.join(known)}", repr(name), hint=hint)
    word, is_rotated = known[name]
    return Codec(word, group or GROUPS[word], is_rotated)


def encode_with_feedback(codec: Codec, values: Tensor, residual: Tensor, message: Tensor) -> None:
    """Encode `values` [n] plus `residual`, fp32 [n], and leave the rounding error in `residual`.

    Error feedback (Seide et al., Interspeech 2014; LoCo, arXiv 2407.04480): the decoded messages
    sum to the values but for the last residual. Start with zeros. The residual of a group with
    infinities or NaN is zero again.
    """
    residual.add_(values.detach())
    codec.encode(residual, message)
    codec.add(message, residual.neg_())  # -(decoded - sum): no temporary
    residual.neg_().nan_to_num_(0.0, 0.0, 0.0)


def add_rows(total: Tensor, rows: Tensor) -> None:
    """Add `rows` [rows, n] to `total` [n], one after the other.

    One call on the CPU: `index_add_` adds row by row there.
    """
    if total.is_cpu and rows.itemsize <= total.itemsize:
        index = torch.zeros(len(rows), dtype=torch.int64)
        total[None].index_add_(0, index, rows.to(total.dtype))
    else:
        for row in rows:
            total.add_(row)


def _as_rows(tensor: Tensor) -> Tensor:
    return tensor if tensor.dim() == 2 else tensor[None]


def _is_packed(tensor: Tensor) -> bool:
    """True if elements of a row lie side by side, and rows of bytes can be read as wider ones."""
    is_even = tensor.dim() < 2 or tensor.dtype != torch.uint8 or tensor.stride(0) % 2 == 0
    return is_even and (tensor.stride(-1) == 1 or tensor.shape[-1] < 2)


# torch's way


class _Scratch:
    """Temporaries of one call, made once for all its blocks, each [numel of a block]."""

    def __init__(self, codec: Codec, numel: int, device: torch.device) -> None:
        usual = CPU_BLOCK_NUMEL if device.type == "cpu" else DEVICE_BLOCK_NUMEL
        groups = min(usual // codec.group, numel // codec.group + 1)
        self.block = groups * codec.group
        self.wide, self.other = (torch.empty(self.block, device=device) for _ in range(2))
        self.third = torch.empty(self.block if codec.is_rotated else 0, device=device)
        nibbles = 2 * self.block if codec.word == "int4" else 0  # rows of one element take two
        self.nibbles = torch.empty(nibbles, dtype=torch.int8, device=device)

    @property
    def beside_wide(self) -> tuple[Tensor, Tensor]:
        return self.other, self.third


class _QuantizedBlock(NamedTuple):
    """Where the parts of a block lie, and how many elements its groups have."""

    rows: slice
    elements: slice
    groups: slice
    payload: slice
    width: int


def _codec_blocks(codec: Codec, shape: torch.Size, block: int) -> Iterator[_QuantizedBlock]:
    """Yield all blocks, of one row or of several; short last groups are a block of their own."""
    count, numel = shape
    whole, step = numel // codec.group * codec.group, max(1, block // max(1, numel))
    for row in range(0, count, step):
        rows = slice(row, min(row + step, count))
        for start in (*range(0, whole, block), *([whole] if whole < numel else [])):
            stop = min(start + block, whole) if start < whole else numel
            width = min(codec.group, stop - start)
            first = start // codec.group
            groups = slice(first, first + (stop - start) // width)
            payload = slice(codec.payload_nbytes(start), codec.payload_nbytes(stop))
            yield _QuantizedBlock(rows, slice(start, stop), groups, payload, width)


def _encode_blocks(codec: Codec, values: Tensor, scales: Tensor, payload: Tensor) -> None:
    scratch = _Scratch(codec, values.numel(), values.device)
    for rows, elements, groups, bytes_, width in _codec_blocks(codec, values.shape, scratch.block):
        x, block_scales = values[rows, elements], scales[rows, groups]
        work = scratch.wide[: x.numel()].view(x.shape)
        if codec.is_rotated or x.dtype != torch.float32:
            x = work.copy_(x)
        if codec.is_rotated:
            rotate(work, scratch.beside_wide)
        x, into = x.unflatten(1, (-1, width)), work.unflatten(1, (-1, width))
        inverse = _scale(codec, x, block_scales, scratch.other)
        torch.mul(x, inverse.unsqueeze(2), out=into)
        if x.device.type != "cpu" or not block_scales.isfinite().all():
            # infinities and NaN times 0; on a device looking for them costs more
            work.nan_to_num_(0.0, 0.0, 0.0)
        _pack(codec, work, payload[rows, bytes_], scratch)


def _scale(codec: Codec, x: Tensor, scales: Tensor, room: Tensor) -> Tensor:
    """Write scales of x [rows, groups, width]; return their reciprocals, fp32 [rows, groups]."""
    largest = torch.abs(x, out=room[: x.numel()].view(x.shape)).amax(2)
    is_bad = ~largest.isfinite()
    # divided by a tensor on the device: by a Python number, CUDA multiplies with its reciprocal
    largest.div_(largest.new_full((), LARGEST[codec.word])).clamp_(min=SMALLEST_SCALE)
    scales.copy_(largest).masked_fill_(is_bad, math.nan)
    return scales.float().reciprocal_().masked_fill_(is_bad, 0.0)


def _pack(codec: Codec, work: Tensor, payload: Tensor, scratch: _Scratch) -> None:
    """Round `work` [rows, n], in units of its scales, to the payload."""
    work.round_()
    if codec.word == "int8":
        payload.view(torch.int8).copy_(work)
        return
    nibbles = scratch.nibbles[: 2 * payload.numel()].view(len(payload), -1)
    nibbles[:, -1:] = 0  # one more than there are elements if their number is odd
    nibbles[:, : work.shape[1]].copy_(work)
    pairs = nibbles.view(torch.int16)
    payload.copy_((pairs & 0x0F).bitwise_or_((pairs >> 4).bitwise_and_(0xF0)))


def _decode(codec: Codec, scales: Tensor, payload: Tensor, out: Tensor, *, adds: bool) -> None:
    """To `out` [rows, n]; to one row, all rows are added."""
    shape = torch.Size((len(payload), out.shape[1]))
    scratch, is_sum = _Scratch(codec, shape.numel(), out.device), len(payload) != len(out)
    is_direct = not (adds or codec.is_rotated) and out.dtype == torch.float32
    for rows, elements, groups, bytes_, width in _codec_blocks(codec, shape, scratch.block):
        into, block_scales = out[0 if is_sum else rows, elements], scales[rows, groups]
        block = (len(block_scales), into.shape[-1])
        work = into if is_direct else scratch.wide[: math.prod(block)].view(block)
        _unpack(codec, payload[rows, bytes_], work, scratch)
        work.unflatten(1, (-1, width)).mul_(block_scales.float().unsqueeze(2))
        if codec.is_rotated:
            rotate_back(work, scratch.beside_wide)
        if is_sum:
            add_rows(into, work)
        elif adds:
            into.add_(work)
        elif not is_direct:
            into.copy_(work)


def _unpack(codec: Codec, payload: Tensor, work: Tensor, scratch: _Scratch) -> None:
    """Write the payload to `work` as numbers, in units of their scales."""
    if codec.word != "int4":
        work.copy_(payload.view(torch.int8))
        return
    nibbles = scratch.nibbles[: 2 * payload.numel()].view(len(payload), -1)
    pairs = nibbles.view(torch.int16)
    pairs.copy_(payload)
    torch.bitwise_or(pairs & 0x0F, (pairs << 4).bitwise_and_(0x0F00), out=pairs)
    pairs.bitwise_xor_(0x0808)  # a nibble has its sign in bit 3: flipped and 8 less is itself
    work.copy_(nibbles[:, : work.shape[1]]).sub_(8.0)


# the rotation


def rotate(values: Tensor, rooms: tuple[Tensor, Tensor]) -> None:
    """H/32 of each 32 of `values` [rows, n] fp32, in place; `rooms` are two as large at least."""
    whole = values.shape[1] // WIDTH * WIDTH
    values[:, :whole].mul_(1.0 / WIDTH)
    values[:, whole:].mul_(1.0 / TAIL)
    _transform(values[:, :whole], rooms)


def rotate_back(values: Tensor, rooms: tuple[Tensor, Tensor]) -> None:
    """H of each 32 of `values` [rows, n], in place: what `rotate` came from, within rounding."""
    whole = values.shape[1] // WIDTH * WIDTH
    values[:, whole:].mul_(TAIL)
    _transform(values[:, :whole], rooms)


def _transform(values: Tensor, rooms: tuple[Tensor, Tensor]) -> None:
    """Blocks side by side: a stage is then two passes over long rows, whatever its distance."""
    numel = values.numel()
    if numel == 0:
        return
    now, other = (room[:numel] for room in rooms)
    blocks = values.unflatten(1, (-1, WIDTH)).movedim(2, 0)  # [WIDTH, rows, blocks of a row]
    now.view(blocks.shape).copy_(blocks)
    distance = 1
    while distance < WIDTH:
        pairs = (-1, 2, distance * (numel // WIDTH))
        (a, b), (low, high) = (room.view(pairs).unbind(1) for room in (now, other))
        torch.add(a, b, out=low)
        torch.sub(a, b, out=high)
        now, other = other, now
        distance *= 2
    blocks.copy_(now.view(blocks.shape))
