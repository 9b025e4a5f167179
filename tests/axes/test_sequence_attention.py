"""Attention over a split sequence is that of one process: outputs, gradients, bytes, errors."""

from __future__ import annotations

from itertools import product

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.nn import functional as F

from onefold.axes.sequence.attention import LABEL, HeadCut, SplitAttention
from onefold.errors import ConfigError, StateError
from onefold.wire.collectives import Group
from onefold.wire.moves import gathered
from tests.support.ranks import run_processes, run_ranks
from tests.support.rows import again_but

ROWS, LOCAL, WIDTH = 2, 3, 4
HEADS = [(4, 4), (8, 2), (6, 2), (3, 3), (6, 3), (5, 1), (1, 1), (2, 2)]
"""Query heads, and heads of keys and values: more, fewer and others than ranks divide."""


def tensors(heads, kv_heads, parts, dtype=torch.float64, value_width=WIDTH):
    generator = torch.Generator().manual_seed(heads * 10 + kv_heads)
    shapes = [(heads, WIDTH), (kv_heads, WIDTH), (kv_heads, value_width)]
    return [
        torch.randn(ROWS, h, parts * LOCAL, width, generator=generator, dtype=dtype)
        for h, width in shapes
    ]


def piece(tensor, rank, parts, dim=2):
    return tensor.chunk(parts, dim)[rank].clone().requires_grad_()


def masks(kind, parts, heads):
    """What one process gets as its mask, and what a rank may get for the same."""
    length = parts * LOCAL
    causal = torch.ones(length, length, dtype=torch.bool).tril()
    window = causal & torch.ones_like(causal).triu(-2)
    keys = torch.ones(ROWS, 1, 1, length, dtype=torch.bool)
    keys[0, ..., :2], keys[1, ..., -2:] = False, False
    padded = causal & keys | torch.eye(length, dtype=torch.bool)
    bias = torch.linspace(-1, 1, heads * length * length, dtype=torch.float64)
    return {
        "none": (None, lambda rank: None),
        "window": (window, lambda rank: window),
        "padding": (padded, lambda rank: padded),
        "rows of a rank": (window, lambda rank: window.chunk(parts, 0)[rank]),
        "whole keys": (keys, lambda rank: keys),
        "keys of a rank": (keys, lambda rank: keys.chunk(parts, 3)[rank]),
        "bias": (bias.view(heads, length, length),) * 1
        + (lambda rank: bias.view(heads, length, length),),
    }[kind]


def attend(parts, heads, kv_heads, kind, **options):
    """Outputs and gradients of one process, and those of ranks put together."""
    mask, _ = masks(kind, parts, heads)
    whole = [each.requires_grad_() for each in tensors(heads, kv_heads, parts)]
    out = F.scaled_dot_product_attention(*whole, mask, enable_gqa=True, **options)
    weight = torch.arange(out.numel(), dtype=out.dtype).view_as(out).cos()
    wanted = [out, *torch.autograd.grad((out * weight).sum(), whole)]

    def body(rank):
        _, of = masks(kind, parts, heads)
        own = [piece(each, rank, parts) for each in tensors(heads, kv_heads, parts)]
        split = SplitAttention(Group.from_handle(dist.group.WORLD))
        out = split(*own, of(rank), enable_gqa=True, **options)
        return [out, *torch.autograd.grad((out * piece(weight, rank, parts)).sum(), own)]

    ranks = run_ranks(parts, body)
    return wanted, [torch.cat(each, 2) for each in zip(*ranks, strict=True)]


def assert_equal(got, wanted, relative=1e-12):
    for mine, other in zip(got, wanted, strict=True):
        assert mine.shape == other.shape
        scale = other.abs().max().clamp_min(1e-3).item()
        torch.testing.assert_close(mine, other, rtol=0, atol=relative * scale)


@again_but("4")
@pytest.mark.parametrize("parts", [2, 3, 4])
def test_outputs_and_gradients_are_those_of_one_process_for_any_number_of_heads(parts):
    for heads, kv_heads in HEADS:
        for is_causal in (False, True):
            wanted, got = attend(parts, heads, kv_heads, "none", is_causal=is_causal)
            assert_equal(got, wanted)


@pytest.mark.parametrize("parts", [2, 3])
@pytest.mark.parametrize(
    "kind", ["window", "padding", "rows of a rank", "whole keys", "keys of a rank", "bias"]
)
def test_masks_whole_or_of_one_rank_are_those_of_one_process(parts, kind):
    for heads, kv_heads in [(4, 2), (5, 1), (3, 3)]:
        wanted, got = attend(parts, heads, kv_heads, kind, scale=0.3)
        assert_equal(got, wanted)


def test_learned_biases_get_the_gradient_of_one_process():
    """Whole on each rank, the ranks' gradients add up; so do those of gathered rows."""
    parts, heads, length = 2, 3, 2 * LOCAL
    bias = torch.randn(heads, length, length, dtype=torch.float64)
    whole, wanted = tensors(heads, heads, parts), bias.clone().requires_grad_()
    F.scaled_dot_product_attention(*whole, wanted).square().sum().backward()

    def body(rank):
        own = [piece(each, rank, parts) for each in tensors(heads, heads, parts)]
        split = SplitAttention(Group.from_handle(dist.group.WORLD))
        mine, rows = bias.clone().requires_grad_(), piece(bias, rank, parts, 1)
        split(*own, mine).square().sum().backward()
        split(*own, rows).square().sum().backward()
        return mine.grad, rows.grad

    both = run_ranks(parts, body)
    assert_equal([sum(each[0] for each in both)], [wanted.grad])
    assert_equal([torch.cat([each[1] for each in both], 1)], [wanted.grad])


def test_values_of_another_width_other_dtypes_and_no_axis_of_rows():
    """Keys of another length than queries too."""
    for dtype, relative in ((torch.float64, 1e-12), (torch.float32, 1e-5), (torch.bfloat16, 0.05)):
        whole = tensors(4, 4, 2, dtype, value_width=6)
        wanted = F.scaled_dot_product_attention(*whole, is_causal=True)
        alone = F.scaled_dot_product_attention(*(each[0] for each in whole))
        fewer = F.scaled_dot_product_attention(whole[0], *(each[:, :, ::3] for each in whole[1:]))

        def body(rank, whole=whole):
            own = [piece(each, rank, 2) for each in whole]
            split = SplitAttention(Group.from_handle(dist.group.WORLD))
            keys = [piece(each[:, :, ::3], rank, 2) for each in whole[1:]]
            return split(*own, is_causal=True), split(*(e[0] for e in own)), split(own[0], *keys)

        first, second, third = zip(*run_ranks(2, body), strict=True)
        got = [torch.cat(first, 2), torch.cat(second, 1), torch.cat(third, 2)]
        assert {each.dtype for each in got} == {dtype}
        assert_equal(got, [wanted, alone, fewer], relative)


def test_dropout_draws_on_each_rank_and_keeps_the_mean():
    def body(rank):
        generator = torch.Generator().manual_seed(rank)
        own = [torch.randn(8, 4, 16, WIDTH, generator=generator) for _ in range(2)]
        out = SplitAttention(Group.from_handle(dist.group.WORLD))(
            *own, torch.ones_like(own[0]), None, 0.5
        )
        return out

    out = torch.cat(run_ranks(2, body))
    assert out.std() > 0.05
    assert out.mean().item() == pytest.approx(1, abs=0.1)


def test_under_autocast_tensors_travel_in_its_dtype():
    def body(rank):
        split = SplitAttention(Group.from_handle(dist.group.WORLD))
        own = [piece(each, rank, 2) for each in tensors(2, 2, 2, torch.float32)]
        with torch.autocast("cpu", torch.bfloat16):
            out = split(*own)
        out.sum().backward()
        return out.dtype, own[0].grad.dtype

    assert run_ranks(2, body) == [(torch.bfloat16, torch.float32)] * 2


def test_bytes_are_four_transfers_of_the_local_activations_forward_and_as_many_backward():
    """Of b * s * h / P numbers that a rank holds, a share of (P - 1) / P goes to other ranks."""
    for parts, (heads, kv_heads) in product((2, 4), ((8, 8), (8, 4))):

        def body(rank, parts=parts, heads=heads, kv_heads=kv_heads):
            counting = CountingGroup.from_handle(dist.group.WORLD)
            own = [piece(each, rank, parts) for each in tensors(heads, kv_heads, parts)]
            out = SplitAttention(counting)(*own, is_causal=True, enable_gqa=True)
            forward = list(SENT[rank])
            out.sum().backward()
            return forward, SENT[rank][len(forward) :]

        SENT.update({rank: [] for rank in range(parts)})
        local = ROWS * LOCAL * WIDTH
        inward, outward = local * (heads + 2 * kv_heads), local * heads
        for forward, backward in run_ranks(parts, body):
            assert forward == [inward, outward]
            assert backward == [outward, inward]
        if heads == kv_heads:
            assert inward + outward == 4 * local * heads


SENT: dict[int, list[int]] = {}


class CountingGroup(Group):
    """Counts the numbers that each rank gives to an all-to-all."""

    __slots__ = ()

    @staticmethod
    def from_handle(handle):
        return CountingGroup(dist.get_rank(handle), dist.get_world_size(handle), handle)

    def all_to_all(self, out, sent, numels_out, numels_sent):
        assert sent.numel() == sum(numels_sent)
        SENT[self.rank].append(sent.numel())
        return super().all_to_all(out, sent, numels_out, numels_sent)


def test_groups_that_ranks_cut_are_copied_to_both():
    cut = HeadCut.over_parts(6, 2, 4)
    assert [list(cut.queries(r)) for r in range(4)] == [[0], [1, 2], [3], [4, 5]]
    assert [list(cut.keys(r)) for r in range(4)] == [[0], [0], [1], [1]]
    cut = HeadCut.over_parts(6, 2, 4)
    assert HeadCut.over_parts(8, 2, 4).repeats(1) == 2
    uneven = HeadCut.over_parts(10, 2, 3)
    assert [uneven.repeats(r) for r in range(3)] == [3, None, 4]
    assert uneven.reads(1) == [0, 0, 1]


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"heads": (4, 3)}, ConfigError, "query heads that are a multiple"),
        ({"mask": torch.ones(LOCAL, LOCAL, dtype=torch.bool)}, ConfigError, "mask of 6 x 6"),
        ({"mask": torch.ones(7, 7, dtype=torch.bool)}, ConfigError, r"shape \[7, 7\]"),
        ({"mask": torch.ones(6, 6, dtype=torch.bool), "is_causal": True}, ConfigError, "or is_c"),
        ({"padding": 1}, StateError, "1 of which are padding"),
        ({"is_dtensor": True}, ConfigError, "a DTensor"),
        ({"axes": 5}, ConfigError, r"\[rows, heads, positions, width\]"),
        ({"rows": 1}, ConfigError, "of the same rows"),
    ],
)
def test_what_cannot_be_exchanged_is_an_error_on_every_rank(change, error, message):
    def body(rank):
        own = [piece(each, rank, 2) for each in tensors(*change.get("heads", (4, 4)), 2)]
        if "axes" in change:
            own = [each[None] for each in own]
        if "is_dtensor" in change:
            own[1] = DTensor.from_local(own[1], init_device_mesh("cpu", (2,)))
        own[0] = own[0][: change.get("rows", ROWS)]
        split = SplitAttention(Group.from_handle(dist.group.WORLD))
        split.pad(change.get("padding", 0))
        with pytest.raises(error, match=message):
            split(*own, change.get("mask"), is_causal=change.get("is_causal", False))
        return True

    assert run_ranks(2, body) == [True, True]


def test_masks_of_a_length_before_padding_hide_the_padding():
    """Rows of 5 positions over 2 ranks: the sixth is padding, whatever it holds."""
    heads = 2
    whole = [each[:, :, :5] for each in tensors(heads, heads, 2)]
    mask = torch.ones(5, 5, dtype=torch.bool).tril()
    bias = torch.where(mask, 0.5, -torch.inf).double()
    wanted = F.scaled_dot_product_attention(*whole, mask)

    def body(rank):
        own = [piece(F.pad(each, (0, 0, 0, 1), value=9.0), rank, 2) for each in whole]
        split = SplitAttention(Group.from_handle(dist.group.WORLD))
        split.pad(1)
        return [split(*own, each) for each in (mask, bias, mask[None, None, -1:])]

    ranks = run_ranks(2, body)
    got = [torch.cat(each, 2)[:, :, :5] for each in zip(*ranks, strict=True)]
    assert_equal(got, [wanted, wanted, F.scaled_dot_product_attention(*whole)])


@pytest.mark.process
def test_processes_exchange_in_each_dtype_over_gloo():
    run_processes(3, over_gloo)


def over_gloo(rank):
    group = Group.from_handle(dist.group.WORLD)
    for dtype, relative in ((torch.float64, 1e-12), (torch.float32, 1e-5), (torch.bfloat16, 0.05)):
        whole = [each.requires_grad_() for each in tensors(4, 2, 3, dtype)]
        wanted = F.scaled_dot_product_attention(*whole, is_causal=True, enable_gqa=True)
        grads = torch.autograd.grad(wanted.square().sum(), whole)
        own = [piece(each.detach(), rank, 3) for each in whole]
        out = SplitAttention(group)(*own, is_causal=True, enable_gqa=True)
        out.square().sum().backward()
        got = [out, *(each.grad for each in own)]
        assert_equal(got, [each.chunk(3, 2)[rank] for each in (wanted, *grads)], relative)
    mask = torch.arange(6).reshape(1, 6) % (rank + 2) == 0
    everyone = [torch.arange(6).reshape(1, 6) % (r + 2) == 0 for r in range(3)]
    assert torch.equal(gathered(group, 1, mask, LABEL), torch.cat(everyone, 1))
