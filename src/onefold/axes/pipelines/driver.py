"""Drive the units of one stage module through the steps of a pipeline schedule.

    begin     the schedule's step starts: micro-batches follow one another
    gather    the schedule will use the stage soon: gather the units of its window
    backward  a whole backward of one micro-batch: gradients of the window's units rest
    split     a backward of inputs or of weights alone, which autograd's hooks do not see
    end       the stage's last backward is over: free its weights, begin to reduce what rests
    finish    the rank's last backward is over: wait for the reductions

A window is a set of units. They stay unsharded from their first use to `end`. At stage 3 their
gradients rest on each rank until `end`; other units are gathered for every forward and every
backward, and reduced in every backward. At stages 0 and 1 all gradients rest, as inside
`onefold.accumulate`, and at stage 2 every backward reduces all.

Single-stage schedules (GPipe, 1F1B) have no actions to register functions for. They and all others
call methods of their stages, which subclasses override. So a stage object becomes one of a subclass
of its own class. No class of torch is changed.

Stages may share parameters: one gradient then, the sum over all copies. Each copy is reduced over
its own data ranks. The same data rank of every stage holds the same rows, so the stages exchange
only these, once a step, over the pipeline axis. All copies get the same bits, and so do their
optimizer states and weights.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache, partial
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from onefold.axes.clipping import IS_COPY
from onefold.engine.driving import Drive, StageDrives
from onefold.engine.engine import Engine
from onefold.engine.pipelined import TIE, TiedCopy
from onefold.errors import ConfigError
from onefold.unit.parameter import UnitParameter
from onefold.unit.shortage import explained
from onefold.wire.collectives import Group
from onefold.wire.moves import swap


class StageDriver:
    """Tells one engine when a schedule's step begins and ends, and what rests in between."""

    def __init__(self, engine: Engine, window: frozenset[int], *, splits: bool) -> None:
        """`splits`: the schedule runs backwards of inputs and of weights apart."""
        self.engine = engine
        self.window = window
        self._choices = {
            "splits": splits,
            "reduces_all": engine.recipe.keeps_gathered and not engine.recipe.sums_rest,
        }
        self._drives = StageDrives.for_windows(Drive(), len(engine.units), window)

    def begin(self, *, trains: bool) -> None:
        """The schedule's step starts; `trains`: backwards follow."""
        engine = self.engine
        # the other choices may be those of a step that failed, and has not ended
        caller = Drive(accumulates=engine.schedule.driven.accumulates)
        self._drives = StageDrives.for_windows(
            caller, len(engine.units), self.window, trains=trains, **self._choices
        )
        engine.drive(self._drives.step)
        engine.prepare()

    def gather(self) -> None:
        """Begin to gather the window, in the order of use."""
        engine = self.engine
        engine.executor.do(engine.schedule.gather(sorted(self.window)))

    @contextmanager
    def backward(self) -> Iterator[None]:
        """Run the whole backward of one micro-batch."""
        self.engine.drive(self._drives.backward)
        try:
            yield
        finally:
            self.engine.drive(self._drives.step)

    @contextmanager
    def split(self) -> Iterator[None]:
        """Run a backward of inputs or weights: modules show the weights of the graph meanwhile.

        torch reads the graph's leaves from `module.parameters()` and adds to their gradients by
        hand, so no hook of autograd reports these.
        """
        engine, schedule = self.engine, self.engine.schedule
        engine.drive(self._drives.split)
        for index in range(len(engine.units)):
            engine.executor.do(schedule.show(index, is_recorded=False))
        try:
            yield
        finally:
            with torch._C.DisableTorchFunctionSubclass():
                for unit in engine.units:
                    for parameter in unit.parameters:
                        if parameter.unsharded.grad is not None:
                            unit.gradient.partial.note([parameter])
                    unit.gradient.rest_partial()
            engine.executor.do(schedule.hide())
            engine.drive(self._drives.step)

    def end(self, *, reduces: bool) -> bool:
        """The stage's part of the step is over: nothing uses its weights.

        Returns False if nothing is reduced, as the caller accumulates over more steps.
        """
        engine, drives = self.engine, self._drives
        engine.drive(drives.end)
        reduces = reduces and not drives.before.accumulates
        if reduces:
            engine.start_reductions()
        engine.drive(drives.before)
        return reduces

    def await_reductions(self) -> None:
        """Wait for the reductions."""
        self.engine.executor.do(self.engine.schedule.finish_reductions())


class StepsOfRank:
    """The steps of all stages of one rank: what waits until the last stage is through."""

    def __init__(self, group: Group, ties: list[Tie], num_stages: int) -> None:
        self._group = group
        self._ties = ties
        self._num_stages = num_stages
        self._ended: list[tuple[StageDriver, Callable[[], None], bool]] = []

    def begin(self) -> None:
        """A step with backwards starts on one of the stages."""
        self._ended.clear()  # of a step that failed
        for tie in self._ties:
            tie.forget_sums()

    def end(self, driver: StageDriver, scale: Callable[[], None], *, is_reduced: bool) -> None:
        """A stage's last backward is over; `scale` is called once its reductions are, too.

        After the last stage no compute follows.
        """
        self._ended.append((driver, scale, is_reduced))
        if len(self._ended) < self._num_stages:
            return  # its reductions go on beside the other stages
        for stage, scale_stage, waits in self._ended:
            if waits:
                stage.await_reductions()
            scale_stage()
        for tie in self._ties if is_reduced else ():
            tie.sum(self._group)
        for stage, _, waits in self._ended:
            if waits:
                stage.engine.executor.hooks.run_due(stage.engine.units)
        self._ended.clear()


def drive(stage: Any, driver: StageDriver, steps: StepsOfRank, *, gathers: bool) -> None:
    """Let `driver` follow a `PipelineStage`, whose class becomes a subclass of its own.

    `gathers`: the start of a step gathers; else a function that is registered does.
    """
    stage.__class__ = _driven(type(stage))
    stage._onefold = driver, steps, gathers


def is_driven(stage: Any) -> bool:
    """True if `drive` was called on the stage."""
    return "_onefold" in vars(stage)


@cache
def _driven(kind: Any) -> Any:
    class DrivenStage(kind):
        """A stage that reports steps, backwards and the reduction to a `StageDriver`."""

        _onefold: tuple[StageDriver, StepsOfRank, bool]

        def clear_runtime_states(self) -> None:
            """The schedule's step starts."""
            super().clear_runtime_states()
            driver, steps, gathers = self._onefold
            if self.has_backward:
                steps.begin()
            driver.begin(trains=self.has_backward)
            if gathers:
                driver.gather()

        def backward_maybe_with_nosync(
            self, backward_type: str, bwd_kwargs: dict[str, Any], last_backward: bool = False
        ) -> Any:
            """Run one backward of one micro-batch: "full", "input" or "weight"."""
            driver, _, _ = self._onefold
            part = driver.backward() if backward_type == "full" else driver.split()
            with explained(driver.engine.ledger), part:
                return super().backward_maybe_with_nosync(
                    backward_type, bwd_kwargs, last_backward=last_backward
                )

        def perform_reduce_grad(self, grad_scale_factor: int) -> None:
            """All backwards of the stage are over: reduce; scale once that is done."""
            driver, steps, _ = self._onefold
            is_reduced = driver.end(reduces=self.has_backward)
            if self.has_backward:  # torch would scale gradients of an earlier step in `eval`
                scale = partial(super().perform_reduce_grad, grad_scale_factor)
                steps.end(driver, scale, is_reduced=is_reduced)

    return DrivenStage


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
        rows = [_grad_rows(copy) for copy in self.copies]
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
        of_ranks = group.gather({stage: _described_tie(copy) for stage, copy in mine.items()})
        by_stage = {
            stage: (rank, fact)
            for rank, stages in enumerate(of_ranks)
            for stage, fact in stages.items()
        }
        _check_ties(names, {stage: facts for stage, (_, facts) in by_stage.items()})
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


def _grad_rows(copy: UnitParameter) -> Tensor:
    own = copy.own_grad()
    return torch.zeros_like(copy.local).flatten() if own is None else own.detach().flatten()


def _described_tie(parameter: UnitParameter) -> str:
    rank = parameter.spec.context.rest_rank
    offsets, sizes = parameter.slot.cut.box(rank)
    dtype = parameter.local.dtype
    return (
        f"shape {list(parameter.slot.shape)}, rows {offsets} + {sizes} on data rank {rank}, {dtype}"
    )


def _check_ties(names: Sequence[str], facts: dict[int, str]) -> None:
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
