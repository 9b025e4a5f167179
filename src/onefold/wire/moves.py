"""Moves of tensors between the ranks of an axis that autograd goes back through.

The gradient of an exchange is the exchange back, and that of a gather a sum of pieces.
"""

from collections.abc import Callable, Sequence
from functools import partial
from itertools import chain
from math import prod
from typing import Any

import torch
from torch import Tensor

from onefold.wire.collectives import Group, without_rank

Move = Callable[..., tuple[Tensor, ...]]
Shapes = Sequence[Sequence[Sequence[int]]]


class _Moved(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, there: Move, back: Move, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.moves = back, there
        return there(*tensors)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return None, None, *_Moved.apply(*ctx.moves, *grads)


def moved(there: Move, back: Move, *tensors: Tensor) -> tuple[Tensor, ...]:
    """Return `there(*tensors)`, a linear map; `back` is its transpose. Differentiable twice."""
    return _Moved.apply(there, back, *tensors)  # type: ignore[no-any-return,no-untyped-call]


def swap(
    group: Group, sent: Sequence[Sequence[Tensor]], shapes: Shapes, like: Tensor, label: str
) -> list[list[Tensor]]:
    """Send the tensors `sent[r]` to each rank r, in one message; return those of each rank.

    `shapes[r]`: of the tensors that rank r sends here. All have the dtype and device of `like`.
    """
    message, places = _buffer(like, [[tensor.shape for tensor in row] for row in sent])
    for place, tensor in zip(chain(*places), chain(*sent), strict=True):
        place.copy_(tensor)
    received, pieces = _buffer(like, shapes)
    numels = [[sum(view.numel() for view in row) for row in rows] for rows in (pieces, places)]
    group.agree(without_rank(label), label, message)
    work = group.all_to_all(received, message, *numels)
    group.wait(work, label)
    return pieces


def _buffer(like: Tensor, shapes: Shapes) -> tuple[Tensor, list[list[Tensor]]]:
    """Return one flat buffer, and views into it of these shapes, in order."""
    numels = [prod(shape) for row in shapes for shape in row]
    flat = like.new_empty(sum(numels))
    views = iter(flat.split(numels)) if numels else iter(())
    return flat, [[next(views).view(tuple(shape)) for shape in row] for row in shapes]


def gathered(group: Group, dim: int, piece: Tensor, label: str) -> Tensor:
    """Concatenate the ranks' pieces along a dimension; gradients are added up, in rank order."""
    gather, scatter = partial(_gather, group, dim, label), partial(_scatter_sum, group, dim, label)
    return moved(gather, scatter, piece)[0]


def of_ranks(group: Group, mine: Tensor, label: str) -> Tensor:
    """Return the tensors of all ranks [ranks, ...], alike in shape, without a graph."""
    mine = mine.detach().contiguous()
    if group.world_size == 1:
        return mine[None]
    everyone = mine.new_empty((group.world_size, *mine.shape))
    group.agree((without_rank(label), mine.nbytes), label, mine)
    work = group.all_gather(everyone.view(-1), mine.view(-1))
    group.wait(work, label)
    return everyone


def mean_count(num_tokens: int | Tensor, group: Group, device: torch.device) -> Tensor:
    """Return the mean over the ranks of a count, 1 if it is zero everywhere. A collective."""
    mine = torch.as_tensor(num_tokens, dtype=torch.float64, device=device).reshape(1)
    mean = of_ranks(group, mine, "an exchange of token counts").mean()
    return torch.where(mean > 0, mean, torch.ones_like(mean))


def _gather(group: Group, dim: int, label: str, piece: Tensor) -> tuple[Tensor]:
    return (torch.cat(of_ranks(group, piece, label).unbind(), dim),)


def _scatter_sum(group: Group, dim: int, label: str, whole: Tensor) -> tuple[Tensor]:
    """Add up the ranks' tensors, in rank order, and return this rank's piece of the sum."""
    parts = whole.chunk(group.world_size, dim)
    shapes = [[parts[group.rank].shape]] * group.world_size
    received = swap(group, [[part] for part in parts], shapes, whole, label)
    return (torch.stack([piece for (piece,) in received]).sum(0),)
