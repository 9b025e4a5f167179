"""A 32-wide Hadamard rotation: it spreads an outlier over its block, so that one scale fits it.

Block-quantised values share the scale of the largest one; where most of the others are small (heavy
tails) they lose their bits to it. H of order 32 turns a block into 32 signed sums of all of it,
which are nearly normal whatever the values were (SDP4Bit, arXiv 2410.15526; QuaRot, arXiv
2404.00456).

The normalised transform would multiply by 1/sqrt(32) on both sides and round each time. Here the
way in is H/32 and the way out H: the factor is a power of two, and no sum overflows on the way in.
Elements after the last whole block are not mixed, only brought to a like scale: divided by 4.

The five stages add neighbours 1, 2, 4, 8 and 16 apart, in this order, in fp32 and without fused
multiply-adds: the same bits on every device and in the C kernel.
"""

from __future__ import annotations

from torch import Tensor, add, sub

from onefold.wire.kernels.compiling import TAIL, WIDTH

# elements after the last whole block are divided by TAIL: a power of two next to sqrt(WIDTH)


def rotate(values: Tensor, rooms: tuple[Tensor, Tensor]) -> None:
    """H/32 of each 32 of `values` [n] fp32, in place; `rooms` are two of at least n elements."""
    whole = len(values) // WIDTH * WIDTH
    values[:whole].mul_(1.0 / WIDTH)
    values[whole:].mul_(1.0 / TAIL)
    _transform(values[:whole], rooms)


def rotate_back(values: Tensor, rooms: tuple[Tensor, Tensor]) -> None:
    """H of each 32 of `values` [n] fp32, in place: what `rotate` came from, within rounding."""
    whole = len(values) // WIDTH * WIDTH
    values[whole:].mul_(TAIL)
    _transform(values[:whole], rooms)


def _transform(values: Tensor, rooms: tuple[Tensor, Tensor]) -> None:
    """Blocks side by side: a stage is then two passes over long rows, whatever its distance."""
    numel = len(values)
    if numel == 0:
        return
    now, other = (room[:numel] for room in rooms)
    blocks = values.view(-1, WIDTH)
    now.view(WIDTH, -1).copy_(blocks.t())
    distance = 1
    while distance < WIDTH:
        pairs = (-1, 2, distance * len(blocks))
        (a, b), (low, high) = (each.view(pairs).unbind(1) for each in (now, other))
        add(a, b, out=low)
        sub(a, b, out=high)
        now, other = other, now
        distance *= 2
    blocks.copy_(now.view(WIDTH, -1).t())
