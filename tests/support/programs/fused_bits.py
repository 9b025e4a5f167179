"""Compare the kernels of wire/fused.py with the C kernel and torch, to the bit.

TRITON_INTERPRET=1 python -m tests.support.programs.fused_bits
python -m tests.support.programs.fused_bits cuda                 on a GPU, without the transport
"""

from __future__ import annotations

import math
import sys
import threading
from itertools import product
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

from onefold.layout import message_plan
from onefold.layout.ledger import Ledger
from onefold.layout.ranges import Ranges
from onefold.layout.rows import Layout, Slot
from onefold.wire import fused
from onefold.wire.codec import Codec, encode_with_feedback
from onefold.wire.collectives import Group
from onefold.wire.exchange import Exchange
from onefold.wire.fused import FusedCodec, MessageRow, address
from onefold.wire.message_cut import MessageLayout
from onefold.wire.quantized import Quantized
from onefold.wire.transport import Composed, Reduction, SendRows
from tests.support.ranks import run_ranks

DEVICE = torch.device(sys.argv[1] if len(sys.argv) > 1 else "cpu")
SIZES = [1, 31, 32, 97, 512, 700, 5000]
KINDS = [torch.float32, torch.bfloat16]


def values_of(numel: int, dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    """Numbers of all sizes, with the odd ones among them."""
    source = torch.Generator().manual_seed(seed)
    sizes = torch.logspace(-30, 30, numel)[torch.randperm(numel, generator=source)]
    values = torch.randn(numel, generator=source) * sizes
    values[: numel // 3] = torch.randn(numel // 3, generator=source)
    odd = [0.0, -0.0, math.inf, math.nan, 1e-45, 3.4e38, -1e-40]
    if numel >= 5000:
        values[:512] = 0.0
        for index, number in enumerate(odd):
            values[600 + 600 * index] = number
    return values.to(dtype)


def same(a: torch.Tensor, b: torch.Tensor, what: object) -> None:
    """Raise unless two tensors have the same bits; all NaN are one."""
    a, b = a.cpu(), b.cpu()
    if a.is_floating_point():
        a, b = (t.where(t == t, torch.full_like(t, math.nan)) for t in (a, b))
    kind = {1: torch.uint8, 2: torch.int16, 4: torch.int32}[a.itemsize]
    if not torch.equal(a.view(kind), b.view(kind)):
        where = (a.view(kind) != b.view(kind)).nonzero()[:5].flatten()
        raise SystemExit(f"{what}: expected {a[where]}, got {b[where]} at {where}")


def check_codec(codec: Codec, dtype: torch.dtype) -> None:
    """One message of parts of many sizes: encoded, with feedback and to a base, and decoded."""
    kernels = FusedCodec(codec)
    parts = [values_of(numel, dtype, seed) for seed, numel in enumerate(SIZES)]
    there = [part.to(DEVICE) for part in parts]
    narrow = int(dtype == torch.bfloat16)

    def rows_of(
        messages: list[torch.Tensor], values: list[torch.Tensor], **others: list[int]
    ) -> list[MessageRow]:
        return [
            kernels.row(len(v), address(m), is_quantized=True, values=address(v), is_narrow=narrow,
                        **{name: of[i] for name, of in others.items()})
            for i, (m, v) in enumerate(zip(messages, values, strict=True))
        ]  # fmt: skip

    def empty() -> list[torch.Tensor]:
        return [torch.full((codec.nbytes(n),), 77, dtype=torch.uint8) for n in SIZES]

    def compared(wanted: list[torch.Tensor], got: list[torch.Tensor], what: str) -> None:
        for numel, a, b in zip(SIZES, wanted, got, strict=True):
            same(a, b, (codec.name, dtype, what, numel))

    wanted, got = empty(), [message.to(DEVICE) for message in empty()]
    for part, message in zip(parts, wanted, strict=True):
        codec.encode(part, message)
    assert kernels.encode(rows_of(got, there), DEVICE, dtype, has_base=False)
    compared(wanted, got, "encoded")

    for adds in (False, True):
        if adds and dtype == torch.bfloat16:
            continue
        out = [torch.ones_like(part) for part in parts]
        mine = [torch.ones_like(part) for part in there]
        sent = [message.to(DEVICE) for message in wanted]
        for message, target in zip(wanted, out, strict=True):
            (codec.add if adds else codec.decode)(message, target)
        assert kernels.decode(rows_of(sent, mine), DEVICE, dtype, adds=adds)
        compared(out, mine, f"decoded, adds={adds}")

    rests = [values_of(numel, torch.float32, 9) * 1e-3 for numel in SIZES]
    kept = [rest.to(DEVICE, copy=True) for rest in rests]
    for part, rest, message in zip(parts, rests, wanted, strict=True):
        encode_with_feedback(codec, part, rest, message)
    others = [address(rest) for rest in kept]
    assert kernels.encode(rows_of(got, there, other=others), DEVICE, dtype, has_base=False)
    compared(wanted, got, "encoded with a residual")
    compared(rests, kept, "residual")

    bases = [values_of(numel, dtype, 5) for numel in SIZES]
    for part, base, message in zip(parts, bases, wanted, strict=True):
        codec.encode(part.to(torch.float32, copy=True).sub_(base), message)
    bases = [base.to(DEVICE) for base in bases]
    others = [address(base) for base in bases]
    assert kernels.encode(rows_of(got, there, other=others), DEVICE, dtype, has_base=True)
    compared(wanted, got, "difference")


def check_mean(ranks: int, dtype: torch.dtype, into: torch.dtype) -> None:
    """Exact sums, as torch adds them one after the other."""
    parts = [[values_of(n, dtype, n + rank) for rank in range(ranks)] for n in (3, 70, 3000)]
    for is_fresh in (True, False):
        wanted = [torch.ones(len(of[0]), dtype=into) for of in parts]
        got = [target.to(DEVICE, copy=True) for target in wanted]
        for of, target in zip(parts, wanted, strict=True):
            total = of[0].to(torch.float32, copy=True)
            for part in of[1:]:
                total.add_(part)
            total.mul_(1 / 3)
            target.copy_(total) if is_fresh else target.add_(total)
        there = [torch.stack(of).to(DEVICE) for of in parts]
        for kind in (list, torch.Tensor):  # pieces of few ranks, and the rows of many
            means = [
                (list(of) if kind is list else of, target.clone(), is_fresh)
                for of, target in zip(there, got, strict=True)
            ]
            assert fused.mean(means, 1 / 3, torch.float32)
            for one, (_, other, _) in zip(wanted, means, strict=True):
                same(one, other, ("mean", kind, ranks, dtype, into))
    apart = [there[0][0], there[0][1], there[1][0][:3]] if ranks > 2 else []
    assert not apart or not fused.mean([(apart, got[0], True)], 1.0, torch.float32)


def check_adopted(numel: int) -> None:
    """Weights that were edited go to the master, and no other element of it changes."""
    master = values_of(numel, torch.float32)
    weight = master.bfloat16()
    weight[::3] = values_of(len(weight[::3]), torch.bfloat16, seed=1)
    untouched = weight == master.bfloat16()
    wanted = torch.where(untouched, master, weight.float())
    got = master.to(DEVICE, copy=True)
    assert fused.adopt(weight.to(DEVICE), got)
    same(wanted, got, ("adopted", numel))
    assert not torch.equal(wanted, master)


SHAPES = [("matrix", (70, 33)), ("vector", (5,)), ("uneven", (7, 3)), ("wide", (3, 600))]


def transported(
    rank: int, codec: Codec, dtype: torch.dtype, into: torch.dtype
) -> list[torch.Tensor]:
    """A gather, differences of one, and a reduction with feedback, through the whole transport."""
    group, layout = Group.from_handle(dist.group.WORLD), Layout.build(SHAPES, dist.get_world_size())
    transport = Quantized(Composed(Exchange(group, Ledger())), codec)
    full = values_of(layout.full_numel, dtype, rank)
    slots = layout.slots
    cut = MessageLayout(slots, [slot.full_offset for slot in slots], group, dtype.itemsize)
    masters = [values_of(slot.piece_numel(rank), torch.float32, rank) for slot in slots]
    rows = [None if len(slot.shape) < 2 else own for slot, own in zip(slots, masters, strict=True)]
    found = []
    for has_base in (False, True):
        transport.gather(full, cut, "gather", SendRows(rows, has_base=has_base)).wait()
        found.append(full.clone())
    flags = Slot("", (), 0, Ranges.alike(5, group.world_size))
    reduced = MessageLayout([*slots, flags], None, group, dtype.itemsize)
    partials = [values_of(slot.numel, dtype, 7 + rank) for slot in slots]
    partials.append(torch.arange(5).to(dtype))
    out = [torch.ones(slot.piece_numel(rank), dtype=into) for slot in slots]
    out.append(torch.ones(5, dtype=into))
    rests: dict[int, torch.Tensor] = {}

    def feedback(region: int, numel: int) -> torch.Tensor:
        return rests.setdefault(region, torch.zeros(numel))

    fresh = [True, False, False, True, True]
    for _ in range(2):
        reduction = Reduction(partials, reduced, out, fresh, "reduce", feedback)
        transport.reduce_scatter(reduction).wait()
    return [*found, *out, *(rests[region] for region in sorted(rests))]


def check_transport(
    ranks: int, codec: Codec, dtype: torch.dtype, into: torch.dtype, *, few: int = 16
) -> None:
    """With kernels and without them: the same bits on every rank; `few`: more ranks are many."""
    with mock.patch.object(message_plan, "FEW_RANKS", few):
        compare_transports(ranks, codec, dtype, into)


def compare_transports(ranks: int, codec: Codec, dtype: torch.dtype, into: torch.dtype) -> None:
    kernels = fused.kernels_for(DEVICE)
    assert kernels is not None
    launch, turn = kernels.module.launch, threading.Lock()

    def in_turn(*arguments: Any, **constants: Any) -> None:
        with turn:  # the interpreter runs one kernel at a time
            launch(*arguments, **constants)

    with mock.patch.object(kernels.module, "launch", in_turn):
        mine = run_ranks(ranks, transported, codec, dtype, into)
    assert not kernels.is_broken
    kernels.is_broken = True
    wanted = run_ranks(ranks, transported, codec, dtype, into)
    kernels.is_broken = False
    for rank, (of_torch, of_kernels) in enumerate(zip(wanted, mine, strict=True)):
        for index, (a, b) in enumerate(zip(of_torch, of_kernels, strict=True)):
            same(a, b, ("transport", ranks, codec.name, dtype, into, rank, index))


def main() -> None:
    """All codecs and dtypes."""
    fused.DEVICES = frozenset({DEVICE.type})
    codecs = [Codec("int8", 512), Codec("int4", 128), Codec("int8", 96, is_rotated=True)]
    codecs += [Codec("int4", 128, is_rotated=True), Codec("int8", 4096)]
    for codec, dtype in product(codecs, KINDS):
        check_codec(codec, dtype)
    for ranks, dtype, into in product((1, 3), KINDS, KINDS):
        check_mean(ranks, dtype, into)
    for numel in (5, 2048, 5000):
        check_adopted(numel)
    if DEVICE.type != "cpu":
        return
    check_transport(2, codecs[0], torch.float32, torch.float32)
    check_transport(3, codecs[3], torch.bfloat16, torch.float32)
    check_transport(3, codecs[0], torch.bfloat16, torch.bfloat16)
    check_transport(3, codecs[0], torch.bfloat16, torch.float32, few=1)
    check_transport(4, codecs[3], torch.float32, torch.float32, few=1)


if __name__ == "__main__":
    main()
