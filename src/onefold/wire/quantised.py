"""Block-quantised messages: int8, int4 and fp8 with one bf16 scale for each group of elements.

    n elements, G = ceil(n / group):   [ G scales, bf16 | payload, 1 or 1/2 byte an element ]

Symmetric: x is sent as q = rint(x / scale), ties to even, and comes back as q * scale.

Scales are amax / 127 (int8), / 7 (int4) and / 448 (fp8, e4m3), rounded to the *nearest* bf16. That
is within 2^-8 of the quotient, so the largest element of a group is less than 127.5 scales and
always becomes q = 127 (7; 448): nothing clips, no error exceeds scale / 2, decoding overflows
nowhere (the largest fp32 included), and decoded values encode to the same message again. With
scales rounded up, neither of the last two would hold. (ZeRO++, arXiv 2306.10209, and SDP4Bit, arXiv
2410.15526, keep scales in fp16 or fp32; bf16 has the range of fp32 and adds 0.4 % to int8 and 3 %
to int4.)

No scale is below 2^-126, the smallest normal number: its reciprocal is finite, devices that flush
subnormals agree, and a group of zeros needs no case of its own. Infinities and NaN make the scale
of their group NaN and its payload 0: all of it decodes to NaN, and the scales alone tell.

Every operation is a correctly rounded one of fp32, in a fixed order: all devices produce the same
bits, and so does the C kernel (native/codec.c) that does the work of int8 and int4 on the CPU where
it was compiled: one pass over memory where torch makes five to thirty, block by block.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from onefold.errors import ConfigError, expected
from onefold.wire.native import CodecKernel, Parts, kernel
from onefold.wire.rotation import WIDTH, rotate, rotate_back
from onefold.wire.sized import check_decoding, check_encoding

Word = Literal["int8", "int4", "fp8"]

LARGEST: dict[Word, float] = {"int8": 127.0, "int4": 7.0, "fp8": 448.0}
"""The largest value of each format: what the largest element of a group becomes."""
GROUPS: dict[Word, int] = {"int8": 512, "int4": 128, "fp8": 512}
"""Elements that share a scale, if nothing else is asked for (SDP4Bit's choice)."""
MAX_GROUPS: dict[Word, int] = {"int8": 4096, "int4": 512, "fp8": 4096}
"""At 4096 elements int4 loses 2 (normal) to 6 times (heavy tails) what it loses at 128."""

SMALLEST_SCALE = 2.0**-126
CPU_BLOCK_NUMEL = 128 * 1024
"""Measured alike from here to 512 Ki; with 16 to 64 Ki the calls show (a third of the speed)."""
DEVICE_BLOCK_NUMEL = 16 * 1024 * 1024
"""Elsewhere only the extra memory counts, and launches should be few."""


@dataclass(frozen=True)
class Quantised:
    """A codec (see `onefold.wire.codec.Codec`): groups of elements that share one bf16 scale."""

    word: Word
    group: int
    is_rotated: bool = False

    def __post_init__(self) -> None:
        most = MAX_GROUPS[self.word]
        if not (WIDTH <= self.group <= most and self.group % WIDTH == 0):
            what = f"groups of a multiple of {WIDTH} elements up to {most} for {self.word}"
            raise ConfigError(expected(what, self.group, hint=f"{GROUPS[self.word]} is the usual"))

    @property
    def name(self) -> str:
        """As `codec_of` takes it, and the group size where that is not the usual one."""
        unusual = f" (groups of {self.group})" if self.group != GROUPS[self.word] else ""
        return self.word + "+h" * self.is_rotated + unusual

    @property
    def is_exact(self) -> bool:
        """False."""
        return False

    def nbytes(self, numel: int) -> int:
        """Scales and payload of `numel` elements."""
        return 2 * -(-numel // self.group) + self.payload_nbytes(numel)

    def encode(self, values: Tensor, message: Tensor) -> None:
        """See `Codec.encode`."""
        check_encoding(self, values, message)
        values, (scales, payload) = values.detach().contiguous(), self._parts(message)
        native = self._native(values)
        if native is not None:
            parts = Parts(self.word, self.group, self.is_rotated, scales, payload)
            native.encode(values, parts)
        else:
            _encode(self, values, scales, payload)

    def decode(self, message: Tensor, out: Tensor) -> None:
        """See `Codec.decode`."""
        check_decoding(self, message, out)
        self._decode(message, out.detach(), adds=False)

    def add(self, message: Tensor, out: Tensor) -> None:
        """See `Codec.add`."""
        check_decoding(self, message, out, adds=True)
        self._decode(message, out.detach(), adds=True)

    def _decode(self, message: Tensor, out: Tensor, *, adds: bool) -> None:
        scales, payload = self._parts(message)
        native = self._native(out)
        if native is not None:
            parts = Parts(self.word, self.group, self.is_rotated, scales, payload)
            native.decode(parts, out, adds=adds)
        else:
            _decode(self, scales, payload, out, adds=adds)

    def _native(self, values: Tensor) -> CodecKernel | None:
        found = kernel()
        return found if found is not None and found.takes(self.word, values) else None

    def payload_nbytes(self, numel: int) -> int:
        """Bytes of the payload alone."""
        return (numel + 1) // 2 if self.word == "int4" else numel

    def _parts(self, message: Tensor) -> tuple[Tensor, Tensor]:
        """Scales, bf16 [groups], and payload, uint8.

        Only the last group may be a short one, so the message's length tells how many there are.
        """
        groups = -(-len(message) // self.nbytes(self.group))
        return message[: 2 * groups].view(torch.bfloat16), message[2 * groups :]


class _Rooms:
    """Temporaries of one call, made once for all its blocks, each [numel of a block]."""

    def __init__(self, codec: Quantised, numel: int, device: torch.device) -> None:
        usual = CPU_BLOCK_NUMEL if device.type == "cpu" else DEVICE_BLOCK_NUMEL
        groups = min(usual // codec.group, numel // codec.group + 1)
        self.block = groups * codec.group
        self.wide, self.other = (torch.empty(self.block, device=device) for _ in range(2))
        self.third = torch.empty(self.block if codec.is_rotated else 0, device=device)
        nibbles = self.block if codec.word == "int4" else 0
        self.nibbles = torch.empty(nibbles, dtype=torch.int8, device=device)

    @property
    def beside_wide(self) -> tuple[Tensor, Tensor]:
        return self.other, self.third


class _CodedBlock(NamedTuple):
    """Where the parts of a block lie, and of how many elements its groups are."""

    elements: slice
    groups: slice
    payload: slice
    width: int


def _blocks(codec: Quantised, numel: int, block: int) -> Iterator[_CodedBlock]:
    """All of them; the last group has one of its own if it is a short one."""
    whole = numel // codec.group * codec.group
    for start in (*range(0, whole, block), *([whole] if whole < numel else [])):
        stop = min(start + block, whole) if start < whole else numel
        width = min(codec.group, stop - start)
        first = start // codec.group
        groups = slice(first, first + (stop - start) // width)
        payload = slice(codec.payload_nbytes(start), codec.payload_nbytes(stop))
        yield _CodedBlock(slice(start, stop), groups, payload, width)


def _encode(codec: Quantised, values: Tensor, scales: Tensor, payload: Tensor) -> None:
    rooms = _Rooms(codec, len(values), values.device)
    for elements, groups, bytes_, width in _blocks(codec, len(values), rooms.block):
        x = values[elements]
        work = rooms.wide[: len(x)]
        if codec.is_rotated or x.dtype != torch.float32:
            x = work.copy_(x)
        if codec.is_rotated:
            rotate(work, rooms.beside_wide)
        inverse = _scale(codec, x.view(-1, width), scales[groups], rooms.other)
        torch.mul(x.view(-1, width), inverse.unsqueeze(1), out=work.view(-1, width))
        if x.device.type != "cpu" or not scales[groups].isfinite().all():
            work.nan_to_num_(
                0.0, 0.0, 0.0
            )  # infinities and NaN times 0; elsewhere looking costs more
        _pack(codec, work, payload[bytes_], rooms)


def _scale(codec: Quantised, x: Tensor, scales: Tensor, room: Tensor) -> Tensor:
    """Write the scales of x [groups, width] and return what to multiply by, fp32 [groups]."""
    largest = torch.abs(x, out=room[: x.numel()].view_as(x)).amax(1)
    is_bad = ~largest.isfinite()
    # divided by a tensor on the device: by a Python number, CUDA multiplies with its reciprocal
    largest.div_(largest.new_full((), LARGEST[codec.word])).clamp_(min=SMALLEST_SCALE)
    scales.copy_(largest).masked_fill_(is_bad, math.nan)
    return scales.float().reciprocal_().masked_fill_(is_bad, 0.0)


def _pack(codec: Quantised, work: Tensor, payload: Tensor, rooms: _Rooms) -> None:
    """Round `work` [n], in units of its scales, to the payload."""
    if codec.word == "fp8":
        payload.view(torch.float8_e4m3fn).copy_(work)
        return
    work.round_()
    if codec.word == "int8":
        payload.view(torch.int8).copy_(work)
        return
    nibbles = rooms.nibbles[: 2 * len(payload)]
    nibbles[-1:] = 0  # one more than there are elements if their number is odd
    nibbles[: len(work)].copy_(work)
    pairs = nibbles.view(torch.int16)
    payload.copy_((pairs & 0x0F).bitwise_or_((pairs >> 4).bitwise_and_(0xF0)))


def _decode(codec: Quantised, scales: Tensor, payload: Tensor, out: Tensor, *, adds: bool) -> None:
    rooms = _Rooms(codec, len(out), out.device)
    is_direct = not (adds or codec.is_rotated) and out.dtype == torch.float32
    for elements, groups, bytes_, width in _blocks(codec, len(out), rooms.block):
        into = out[elements]
        work = into if is_direct else rooms.wide[: len(into)]
        _unpack(codec, payload[bytes_], work, rooms)
        work.view(-1, width).mul_(scales[groups].float().unsqueeze(1))
        if codec.is_rotated:
            rotate_back(work, rooms.beside_wide)
        if adds:
            into.add_(work)
        elif not is_direct:
            into.copy_(work)


def _unpack(codec: Quantised, payload: Tensor, work: Tensor, rooms: _Rooms) -> None:
    """The payload as numbers, in units of their scales."""
    if codec.word != "int4":
        dtype = torch.int8 if codec.word == "int8" else torch.float8_e4m3fn
        work.copy_(payload.view(dtype))
        return
    nibbles = rooms.nibbles[: 2 * len(payload)]
    pairs = nibbles.view(torch.int16)
    pairs.copy_(payload)
    torch.bitwise_or(pairs & 0x0F, (pairs << 4).bitwise_and_(0x0F00), out=pairs)
    pairs.bitwise_xor_(0x0808)  # a nibble has its sign in bit 3: flipped and 8 less is itself
    work.copy_(nibbles[: len(work)]).sub_(8.0)
