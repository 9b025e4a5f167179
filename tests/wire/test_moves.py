"""Moves of tensors between ranks, and the way back of their gradients."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from onefold.wire.collectives import Group
from onefold.wire.moves import gathered, moved, of_ranks, swap
from tests.support.ranks import run_ranks

pytestmark = pytest.mark.parametrize("world_size", [1, 3])


def test_each_rank_gets_the_tensors_that_others_sent_it_in_their_shapes(world_size):
    """Rank s sends rank r a matrix [s + 1, 2] and, if s is even, a scalar: some send nothing."""

    def body(rank):
        group = Group.from_handle(dist.group.WORLD)
        sent = [
            [torch.full((rank + 1, 2), 10.0 * rank + other), torch.tensor(1.0 + rank)][
                : 2 - rank % 2
            ]
            for other in range(world_size)
        ]
        shapes = [[(s + 1, 2), ()][: 2 - s % 2] for s in range(world_size)]
        received = swap(group, sent, shapes, sent[0][0], "a test")
        for sender, tensors in enumerate(received):
            assert torch.equal(tensors[0], torch.full((sender + 1, 2), 10.0 * sender + rank))
            assert [float(scalar) for scalar in tensors[1:]] == [1.0 + sender] * (1 - sender % 2)

    run_ranks(world_size, body)


def test_nothing_may_be_sent(world_size):
    def body(rank):
        nothing = [[] for _ in range(world_size)]
        group = Group.from_handle(dist.group.WORLD)
        assert swap(group, nothing, nothing, torch.empty(0), "a test") == nothing

    run_ranks(world_size, body)


def test_a_move_goes_back_by_its_transpose_also_in_second_derivatives(world_size):
    def body(rank):
        there, back = (lambda x: (2 * x,)), (lambda x: (2 * x,))
        x = torch.tensor(3.0, requires_grad=True)
        (y,) = moved(there, back, x)
        (first,) = torch.autograd.grad(y**3, x, create_graph=True)  # of 8 x^3
        (second,) = torch.autograd.grad(first, x)
        assert (first.item(), second.item()) == (24 * 9.0, 48 * 3.0)

    run_ranks(world_size, body)


def test_gathered_pieces_get_the_sum_of_the_gradients_of_all_ranks(world_size):
    def body(rank):
        group = Group.from_handle(dist.group.WORLD)
        piece = torch.full((2, 1), float(rank), requires_grad=True)
        whole = gathered(group, 1, piece, "a test")
        assert torch.equal(whole, torch.arange(float(world_size)).expand(2, world_size))
        (whole * (1 + rank)).sum().backward()
        assert torch.equal(piece.grad, torch.full((2, 1), float(sum(range(1, world_size + 1)))))
        counts = of_ranks(group, torch.tensor([rank, 2 * rank]), "a test")
        assert counts.tolist() == [[r, 2 * r] for r in range(world_size)]

    run_ranks(world_size, body)
