"""Plan a composed run: memory of every rank of the pipeline, bytes of every axis, and the step.

Each rank of the pipeline is planned on its data axis (planner/composed.py). Stage 3 chooses a
window for each from its free memory, as `onefold.pipeline` does (fit/kept_units.py): weights kept
through the step, and gradients summed where they are, cost memory and save messages.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cache, partial
from typing import TYPE_CHECKING, Any

from onefold.engine.policy import Policy, policy_of
from onefold.fit.kept_units import GatheredUnits, choose_windows
from onefold.planner.byte_executor import Moment
from onefold.planner.composed import ComposedJob, parts_of, rank_trace
from onefold.planner.memory import Forecast, facts_of, forecast
from onefold.planner.message_counts import planned_unit
from onefold.planner.planned_axes import MESSAGES, ModelAxes
from onefold.planner.simulate import StepTime, simulate
from onefold.planner.work import AxisMessage, ModelWork

if TYPE_CHECKING:
    from onefold.planner.costs import Conditions
    from onefold.planner.machines import Machine
    from onefold.planner.trace import Trace
    from onefold.recipe import Recipe

MOST_PLAYED = 3
"""Micro-batches of a step that are played: the first, another one, the last."""


@dataclass(frozen=True, slots=True)
class RankPlan:
    """One rank of the pipeline: its blocks, as positions in the model, and its bytes.

    keeps: unsharded weights stay until the step, and are gathered once.
    sums: gradients of the micro-batches are summed where they are, and reduced once.
    window: both hold for these units alone, as positions; None: there is no pipeline.
    """

    rank: int
    blocks: tuple[int, ...]
    in_flight: float  # micro-batches whose activations it holds
    keeps: bool
    sums: bool
    window: frozenset[int] | None
    work: ModelWork
    forecast: Forecast

    def as_dict(self) -> dict[str, Any]:
        """Return plain dicts and numbers, for JSON."""
        return {
            "rank": self.rank, "blocks": list(self.blocks), "parameters": self.work.numel,
            "micro_batches_in_flight": self.in_flight, "keeps_weights": self.keeps,
            "sums_gradients": self.sums, "nbytes": self.forecast.memory_nbytes,
            "units": len(self.work.units),
            "window": sorted(self.window) if self.window and not self.keeps else None,
        }  # fmt: skip


@dataclass(frozen=True, slots=True)
class AxisLine:
    """One axis: bytes that its busiest rank sends in a step, and seconds that the slowest waits.

    seconds: None without a machine. That of pp is the bubble.
    """

    axis: str
    ranks: int
    sent_nbytes: int
    seconds: float | None
    share: float | None  # of the step


@dataclass(frozen=True, slots=True)
class Composition:
    """The ranks of a pipeline and the axes of one way to train; `fullest`: of which rank.

    `window`: the bytes to pass to `onefold.pipeline` where activations need more than it leaves.
    """

    axes: ModelAxes
    dp: int
    num_micro: int
    ranks: tuple[RankPlan, ...]
    fullest: int
    lines: tuple[AxisLine, ...]
    window: int | None = None

    def as_dict(self) -> dict[str, Any]:
        """Return plain dicts and numbers, for JSON."""
        return {
            "dp": self.dp, **self.axes.sizes, "virtual": self.axes.virtual,
            "bubble_share": self.axes.bubble_share(self.num_micro), "fullest_rank": self.fullest,
            "window": self.window,
            "axes": [asdict(line) for line in self.lines],
            "pipeline": [rank.as_dict() for rank in self.ranks],
        }  # fmt: skip


def compose(trace: Trace, job: ComposedJob, recipe: Recipe) -> tuple[Composition, StepTime | None]:
    """Plan every rank of the pipeline; `recipe` is that of one data axis.

    Returns the composition, and the step where there is a machine.
    """
    axes, run, room = job.axes, job.conditions, job.room
    ranks, limit = list[RankPlan](), None
    for limit in _limits(recipe, job):
        ranks = [_plan_rank(trace, job, recipe, rank, limit) for rank in range(axes.pp)]
        if room is None or all(r.forecast.memory_nbytes <= room for r in ranks):
            break
    fullest = max(ranks, key=lambda rank: rank.forecast.memory_nbytes).rank
    step, slowest = None, 0
    if job.machine is not None:
        works = [(rank.work, rank.window) for rank in ranks]
        step, slowest = pipeline_step(works, recipe, axes, job.machine, run)
    composition = Composition(
        axes, axes.dp(job.recipe.world_size), run.accumulate, tuple(ranks), fullest,
        tuple(_lines(ranks, ranks[slowest], recipe, job, step)), limit,
    )  # fmt: skip
    return composition, step


def _limits(recipe: Recipe, job: ComposedJob) -> tuple[int | None, ...]:
    """Return the limits of windows to try: none, which a run has by itself, and then less.

    Only stage 3 of a pipeline has a choice.
    """
    if job.room is None or job.axes.pp == 1 or not recipe.frees_after_forward:
        return (None,)
    parts = (job.room // part for part in (4, 8, 16))
    return (None, *(nbytes >> 20 << 20 or nbytes for nbytes in parts), 0)  # whole MiB, if any


def _plan_rank(
    trace: Trace, job: ComposedJob, recipe: Recipe, rank: int, limit: int | None
) -> RankPlan:
    """Plan a rank with the window that a run chooses under this limit."""
    axes, num_micro = job.axes, job.conditions.accumulate
    own, parts = rank_trace(trace, job, rank, num_micro), parts_of(trace.units, job, rank)
    blocks = [job.anatomy.block_of(trace.units[part.unit].name) for part in parts]
    keeps, sums = not recipe.frees_after_forward, recipe.sums_rest or recipe.world_size == 1
    window = frozenset(range(len(own.units))) if axes.pp > 1 else None
    if window is not None and not keeps:
        stages = stages_of(own, recipe, [part.piece for part in parts])
        window = window_of(stages, free_of(own, recipe, job.room), limit)
        keeps = sums = len(window) == sum(len(stage.gathered) for stage in stages)
    step = forecast_steps(own, recipe, num_micro, window)
    work, held = own.work(job.tokens // axes.cp), axes.in_flight(rank, num_micro)
    own_blocks = tuple(dict.fromkeys(block for block in blocks if block >= 0))
    return RankPlan(rank, own_blocks, held, keeps, sums, window, work, step)


def window_of(stages: Sequence[GatheredUnits], free: int, limit: int | None) -> frozenset[int]:
    """Return the units of a rank that `onefold.pipeline` keeps of its stages through a step."""
    kept, first = set[int](), 0
    for stage, window in zip(stages, choose_windows(stages, free, limit), strict=True):
        kept |= {first + unit for unit in window}
        first += len(stage.sizes)
    return frozenset(kept)


def stages_of(trace: Trace, recipe: Recipe, pieces: Sequence[int]) -> list[GatheredUnits]:
    """Describe the stages of a rank, whose units belong to these pieces of the pipeline."""
    planned = [planned_unit(unit, recipe) for unit in trace.units]
    facts = facts_of(planned, recipe)
    stages = list[GatheredUnits]()
    for piece in dict.fromkeys(pieces):
        own = [index for index, unit_piece in enumerate(pieces) if unit_piece == piece]
        trains = tuple(any(planned[index].partials) for index in own)
        units = tuple(facts[index] for index in own)
        stages.append(GatheredUnits.from_facts(units, policy_of(recipe).prefetch, trains))
    return stages


def free_of(trace: Trace, recipe: Recipe, room: int | None) -> int:
    """Predict the bytes that are free before the first step: all but what rests."""
    resting = Moment("", "", forecast(trace, recipe).resting)
    return max(0, (room or sys.maxsize) - resting.memory_nbytes(recipe.device_type))


def forecast_steps(
    trace: Trace, recipe: Recipe, num_micro: int, window: frozenset[int] | None = None
) -> Forecast:
    """Forecast a step of many micro-batches from one of three: bytes sent grow along a line."""
    few = min(num_micro, MOST_PLAYED)
    step = forecast(trace, recipe, accumulate=few, window=window)
    if num_micro == few:
        return step
    fewer = forecast(trace, recipe, accumulate=few - 1, window=window).sent
    more = num_micro - few
    sent = {name: n + more * (n - fewer.get(name, 0)) for name, n in step.sent.items()}
    return replace(step, sent=sent)


def pipeline_step(
    works: Sequence[tuple[ModelWork, frozenset[int] | None]], recipe: Recipe, axes: ModelAxes,
    machine: Machine, run: Conditions, policy: Policy | None = None,
) -> tuple[StepTime, int]:  # fmt: skip
    """Return the step of a pipeline, and which of its ranks is the slowest.

    The slowest rank computes all micro-batches. While the pipeline fills and drains it waits for
    one micro-batch of all others, or for one piece of it where pieces are interleaved.

    Args:
        works: of each rank, with the units that it keeps, see `RankPlan.window`.
        policy: other rules than the recipe's.
    """
    known = cache(partial(simulate, recipe=recipe, machine=machine, conditions=run, policy=policy))
    steps: list[StepTime] = []
    for work, window in works:
        units = tuple(replace(unit, name="", members=()) for unit in work.units)
        steps.append(known(ModelWork(units, work.tokens), window=window))
    busy = [step.compute + step.memory + step.contention + step.exposed_axes for step in steps]
    slowest = max(range(len(steps)), key=lambda rank: steps[rank].seconds)
    sends = [m.cost(machine).seconds for w, _ in works for u in w.units for m in u.messages
             if m.axis == "pp"]  # fmt: skip
    filled = (sum(busy) - busy[slowest]) / run.accumulate / axes.virtual
    bubble = filled + 2 * (axes.pp - 1) * max(sends, default=0.0)
    step = steps[slowest]
    seconds = step.seconds + bubble
    speed = step.tokens_per_s * step.seconds / seconds if seconds else 0.0
    return replace(step, seconds=seconds, bubble=bubble, tokens_per_s=speed), slowest


def _lines(
    ranks: Sequence[RankPlan], slowest: RankPlan, recipe: Recipe, job: ComposedJob,
    step: StepTime | None,
) -> Iterator[AxisLine]:  # fmt: skip
    """Yield a line for data, and for each axis that is used."""
    run, sizes = job.conditions, {"data": recipe.world_size, **job.axes.sizes}
    for axis in MESSAGES:
        if sizes[axis] == 1 and axis != "data":
            continue
        seconds = None
        if step is not None and job.machine is not None:
            seconds = sum(
                times * message.cost(job.machine).seconds
                for message, times in messages_on(axis, slowest.work, run)
            )
            seconds = {"pp": step.bubble, "data": step.exposed_gather + step.exposed_reduce}.get(
                axis, seconds
            )
        nbytes = [sent_on(axis, rank.work, run) for rank in ranks]
        if axis == "data":
            nbytes = [rank.forecast.sent_nbytes for rank in ranks]
        share = None if step is None or seconds is None else seconds / step.seconds
        yield AxisLine(axis, sizes[axis], round(max(nbytes)), seconds, share)


def messages_on(axis: str, work: ModelWork, run: Conditions) -> Iterator[tuple[AxisMessage, float]]:
    """Yield the messages of a rank on a model axis, and how often each is sent in a step."""
    for unit in work.units:
        again = 1 + (run.recompute if unit.is_recomputed else 0.0)
        for message in unit.messages:
            if message.axis == axis:
                yield message, run.accumulate * (message.forward * again + message.backward)


def sent_on(axis: str, work: ModelWork, run: Conditions) -> float:
    """Return the bytes that a rank sends on a model axis in a step."""
    return sum(times * message.sent for message, times in messages_on(axis, work, run))
