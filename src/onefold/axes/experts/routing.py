"""Send tokens to the ranks that hold their experts, and the outputs back.

    rank 0: tokens sorted by expert   | for rank 0 | for rank 1 |     dispatch
    rank 1: received                  | of rank 0  | of rank 1  |     experts run
    rank 0: outputs                   | of rank 0  | of rank 1  |     combine: back, in token order

Nothing is dropped and nothing is padded: messages have as many rows as there are tokens, also none.
Every rank takes part in every message, forward and backward, with or without tokens of its own.
Source: Switch Transformer, arXiv 2101.03961, section 2; dropless: MegaBlocks, arXiv 2211.15841.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from onefold.wire.collectives import Group


@dataclass(frozen=True, slots=True)
class ExpertAxis:
    """The ranks of an expert axis, and the name of their messages in errors.

    Rank r holds experts `bounds[r]` to `bounds[r + 1]`.
    """

    group: Group
    bounds: tuple[int, ...]
    label: str = "exchange of tokens"

    @property
    def own(self) -> range:
        """The numbers of this rank's experts."""
        return range(*self.bounds[self.group.rank : self.group.rank + 2])


class _Exchange(torch.autograd.Function):
    """Rows [n, ...] to other ranks; the gradient of each row comes back to where it came from."""

    @staticmethod
    def forward(
        ctx: Any, rows: Tensor, sent: Sequence[int], received: Sequence[int], axis: ExpertAxis
    ) -> Tensor:
        ctx.counts, ctx.axis = (sent, received), axis
        return _exchange(rows, sent, received, axis)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:  # type: ignore[override]
        sent, received = ctx.counts
        return _exchange(grad, received, sent, ctx.axis), None, None, None


def _exchange(
    rows: Tensor, sent: Sequence[int], received: Sequence[int], axis: ExpertAxis
) -> Tensor:
    """Send consecutive parts of `rows`, of `sent` rows each, to ranks 0, 1, ...; get `received`."""
    group = axis.group
    if group.world_size == 1:
        return rows.clone()
    width = rows[:1].numel() if len(rows) else rows.new_empty(1, *rows.shape[1:]).numel()
    out = rows.new_empty(sum(received), *rows.shape[1:])
    work = group.all_to_all(
        out.view(-1), rows.contiguous().view(-1),
        [num * width for num in received], [num * width for num in sent],
    )  # fmt: skip
    for message in group.track([work], axis.label):
        message.wait()
    return out


class Routing:
    """The way of one batch of tokens to their experts and back. A collective to make."""

    def __init__(self, index: Tensor, axis: ExpertAxis) -> None:
        """Exchange how many tokens each expert gets.

        Args:
            index: int64 [tokens, choices], the experts of each token.
            axis: the ranks that hold them.
        """
        self._axis, self._choices = axis, index.shape[-1]
        bounds, ranks = axis.bounds, axis.group.world_size
        flat = index.reshape(-1)
        self._order = flat.argsort(stable=True)  # pairs of token and choice, by expert
        counts = flat.bincount(minlength=bounds[-1])
        lengths = [stop - start for start, stop in pairwise(bounds)]
        mine = len(axis.own)
        theirs = _exchange(counts, lengths, [mine] * ranks, axis)
        self.sent = [int(part.sum()) for part in counts.cpu().split(lengths)]
        table = theirs.cpu().view(ranks, mine)  # by sender, tokens of each own expert
        self.received: list[int] = table.sum(1).tolist()
        experts = torch.arange(mine).repeat(ranks)
        self.experts = experts.repeat_interleave(table.reshape(-1)).to(index.device)
        """int64 [received rows]: the expert of each, counted from this rank's first."""

    def dispatch(self, tokens: Tensor) -> Tensor:
        """Return the rows [received, width] of all ranks' `tokens` [n, width] for own experts."""
        rows = tokens[self._order // self._choices]
        return _Exchange.apply(rows, self.sent, self.received, self._axis)  # type: ignore[no-any-return,no-untyped-call]

    def combine(self, outputs: Tensor, weights: Tensor) -> Tensor:
        """Return the weighted sums [n, width] of what experts made of this rank's tokens.

        Args:
            outputs: [received, width], of the rows that `dispatch` returned.
            weights: [n, choices].
        """
        rows = _Exchange.apply(outputs, self.received, self.sent, self._axis)  # type: ignore[no-untyped-call]
        place = torch.empty_like(self._order)
        place[self._order] = torch.arange(len(place), device=place.device)
        choices = rows[place].view(len(weights), self._choices, rows.shape[-1])
        return (choices * weights.unsqueeze(-1)).sum(1)
