"""Parameters that several stages share: one gradient, the sum over all copies.

Each copy is reduced over its own data ranks. The same data rank of every stage holds the same rows,
so the stages exchange only these, once a step, over the pipeline axis. All copies get the same
bits, and so do their optimizer states and weights.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import chain

import torch
from torch import Tensor

from onefold.axes.clipping import IS_COPY
from onefold.axes.exchange import swap
from onefold.checkpoint.contents import TIE, TiedCopy
from onefold.engine.engine import Engine
from onefold.errors import ConfigError
from onefold.unit.parameter import UnitParameter
from onefold.wire.collectives import Group

Tied = Sequence[str | Sequence[str]] | None


@dataclass(slots=True)
class Tie:
    """One shared parameter: the copies on this rank, by stage, and the ranks that hold copies."""

    copies: list[UnitParameter]
    ranks: list[int]  # of the pipeline group, ascending
    is_first: bool  # this rank's first copy is the first of all
    summed: dict[UnitParameter, Tensor] = field(default_factory=dict)

    def forget_sums(self) -> None:
        """A step adds to gradients of an earlier one, a sum already: one copy alone keeps it."""
        for copy in self.copies[self.is_first :]:
            with torch._C.DisableTorchFunctionSubclass():
                is_there = self.summed.get(copy) is copy.sharded.grad
            rows = copy.own_grad() if is_there and copy in self.summed else None
            if rows is not None:
                rows.zero_()
        self.summed.clear()

    def sum(self, group: Group) -> None:
        """Add the gradients of all copies, in the order of ranks. A collective of `group`."""
        rows = [_rows(copy) for copy in self.copies]
        mine = torch.stack(rows).sum(0) if len(rows) > 1 else rows[0] if rows else torch.empty(0)
        total = sum_over(group, self.ranks, mine) if len(self.ranks) > 1 else mine
        for copy in self.copies:
            own = copy.own_grad()
            if own is not None:
                own.copy_(total.view_as(own))
            with torch._C.DisableTorchFunctionSubclass():
                if copy.sharded.grad is not None:
                    self.summed[copy] = copy.sharded.grad


def sum_over(group: Group, ranks: Sequence[int], mine: Tensor) -> Tensor:
    """Sum flat `mine` of `ranks` in their order; the other ranks of the group only take part."""
    if group.rank not in ranks:
        ranks = [group.rank]
    sent = [[mine] * (rank in ranks and rank != group.rank) for rank in range(group.world_size)]
    shapes = [[tensor.shape for tensor in row] for row in sent]
    parts = swap(group, sent, shapes, mine, "gradients of tied parameters")
    return torch.stack([*chain(*parts[: group.rank]), mine, *chain(*parts[group.rank :])]).sum(0)


def ties_of(engines: dict[int, Engine], group: Group, tied: Tied) -> list[Tie]:
    """Find the copies of tied parameters on all stages. A collective of the pipeline group.

    Args:
        engines: of this rank's stage modules, by stage.
        group: the pipeline axis.
        tied: for each shared parameter its name, or its names where stages call it differently.

    Raises:
        ConfigError: a name that fewer than two stages have, or copies that differ in shape or cut.
    """
    ties = list[Tie]()
    for names in [(name,) if isinstance(name, str) else tuple(name) for name in tied or ()]:
        mine = {
            stage: parameter
            for stage, engine in sorted(engines.items())
            for parameter in engine.by_sharded.values()
            if parameter.fqn in names
        }
        of_ranks = group.gather({stage: _described(copy) for stage, copy in mine.items()})
        by_stage = {
            stage: (rank, fact)
            for rank, stages in enumerate(of_ranks)
            for stage, fact in stages.items()
        }
        _check(names, {stage: facts for stage, (_, facts) in by_stage.items()})
        ranks = sorted({rank for rank, _ in by_stage.values()})
        copies = [mine[stage] for stage in sorted(mine)]
        is_first = min(by_stage) in mine
        key = " ".join(names)
        for index, copy in enumerate(copies):
            is_copy = index >= is_first
            setattr(copy.sharded, TIE, TiedCopy(key, is_copy))
            if is_copy:
                setattr(copy.sharded, IS_COPY, True)
        ties.append(Tie(copies, ranks, is_first))
        _share_values(ties[-1], group, by_stage[min(by_stage)][0])
    return ties


def _share_values(tie: Tie, group: Group, first: int) -> None:
    """Start all copies from the values of the first one."""
    mine = tie.copies[0].local.detach().flatten() if tie.copies else torch.empty(0)
    if first != group.rank:
        mine = torch.zeros_like(mine)
    values = sum_over(group, tie.ranks, mine) if len(tie.ranks) > 1 else mine
    with torch.no_grad():
        for copy in tie.copies[tie.is_first :]:
            copy.local.copy_(values.view_as(copy.local))


def _rows(copy: UnitParameter) -> Tensor:
    own = copy.own_grad()
    return torch.zeros_like(copy.local).flatten() if own is None else own.detach().flatten()


def _described(parameter: UnitParameter) -> str:
    rank = parameter.spec.context.rest_rank
    offsets, sizes = parameter.slot.box(rank)
    dtype = parameter.local.dtype
    return (
        f"shape {list(parameter.slot.shape)}, rows {offsets} + {sizes} on data rank {rank}, {dtype}"
    )


def _check(names: Sequence[str], facts: dict[int, str]) -> None:
    wanted = f"tied parameter {' or '.join(map(repr, names))}"
    hint = 'tied=[("embed.weight", "head.weight")]: the names that the stage modules give it'
    if len(facts) < 2:
        got = f"it on stage {min(facts)} alone" if facts else "no stage that has it"
        raise ConfigError(f"{wanted} on two stages or more", got, hint=hint)
    first = min(facts)
    for stage, fact in facts.items():
        if fact != facts[first]:
            got = f"{fact} on stage {stage}, but {facts[first]} on stage {first}"
            hint = "shard all stages with the same stage, precision and number of data ranks"
            raise ConfigError(f"{wanted} to be alike on all stages", got, hint=hint)
