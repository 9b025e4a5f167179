"""Plan a composed run: memory of every rank of the pipeline, bytes of every axis, and the step.

Each rank of the pipeline is planned on its data axis (planner/composed.py). Stage 3 chooses a
window for each from its free memory: weights kept through the step, and gradients summed where they
are, cost memory and save messages.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from onefold.engine.policy import Policy, policy_of
from onefold.planner.axes import MESSAGES, ModelAxes
from onefold.planner.composed import ComposedJob, pieces_of, rank_trace
from onefold.planner.memory import Forecast, forecast
from onefold.planner.simulate import StepTime, simulate
from onefold.planner.work import ModelWork

if TYPE_CHECKING:
    from onefold.planner.conditions import Conditions
    from onefold.planner.machines import Machine
    from onefold.planner.trace import Trace
    from onefold.recipe import Recipe

MOST_PLAYED = 3
"""Micro-batches of a step that are played: the first, another one, the last."""


@dataclass(frozen=True, slots=True)
class Window:
    """How a rank of the pipeline treats weights and gradients between micro-batches.

    keeps: unsharded weights stay until the step, and are gathered once.
    sums: gradients of the micro-batches are summed where they are, and reduced once.
    """

    keeps: bool
    sums: bool

    @staticmethod
    def choices(recipe: Recipe, axes: ModelAxes) -> tuple[Window, ...]:
        """Return the windows to try, from the fewest messages to the least memory.

        Only stage 3 of a pipeline has a choice.
        """
        if recipe.frees_after_forward and axes.pp > 1:
            return Window(True, True), Window(True, False), Window(False, False)
        sums = recipe.sums_rest or recipe.world_size == 1
        return (Window(not recipe.frees_after_forward, sums),)

    def policy(self, recipe: Recipe) -> Policy:
        """Return the rules of a recipe with this window."""
        policy = policy_of(recipe)
        if not recipe.frees_after_forward:
            return policy
        frees = not self.keeps
        return replace(
            policy, frees_after_forward=frees, frees_after_backward=frees,
            defers_reduction=self.sums,
        )  # fmt: skip


@dataclass(frozen=True, slots=True)
class RankPlan:
    """One rank of the pipeline: its blocks, as positions in the model, and its bytes."""

    rank: int
    blocks: tuple[int, ...]
    in_flight: float  # micro-batches whose activations it holds
    window: Window
    work: ModelWork
    forecast: Forecast

    @property
    def numel(self) -> int:
        """Parameters of one rank of tp and ep, before the data axis cuts them."""
        return self.work.numel

    def as_dict(self) -> dict[str, Any]:
        """Return plain dicts and numbers, for JSON."""
        return {
            "rank": self.rank, "blocks": list(self.blocks), "parameters": self.numel,
            "micro_batches_in_flight": self.in_flight, "keeps_weights": self.window.keeps,
            "sums_gradients": self.window.sums, "nbytes": self.forecast.memory_nbytes,
        }  # fmt: skip


@dataclass(frozen=True, slots=True)
class AxisLine:
    """One axis: bytes that its busiest rank sends in a step, and seconds that the slowest waits.

    seconds: None without a machine. That of pp is the bubble.
    """

    axis: str
    ranks: int
    nbytes: float
    seconds: float | None
    share: float | None  # of the step


@dataclass(frozen=True, slots=True)
class Composition:
    """The ranks of a pipeline and the axes of one way to train; `fullest`: of which rank."""

    axes: ModelAxes
    dp: int
    local_world_size: int  # ranks of a node, of all axes
    num_micro: int
    ranks: tuple[RankPlan, ...]
    fullest: int
    lines: tuple[AxisLine, ...]

    def as_dict(self) -> dict[str, Any]:
        """Return plain dicts and numbers, for JSON."""
        return {
            "dp": self.dp, **self.axes.sizes, "virtual": self.axes.virtual,
            "bubble_share": self.axes.bubble_share(self.num_micro), "fullest_rank": self.fullest,
            "axes": [
                {"axis": each.axis, "ranks": each.ranks, "sent_nbytes": round(each.nbytes),
                 "seconds": each.seconds, "share": each.share}
                for each in self.lines
            ],
            "pipeline": [rank.as_dict() for rank in self.ranks],
        }  # fmt: skip


@dataclass(frozen=True, slots=True)
class Place:
    """What a composition is planned for: the memory of a device, its machine, the conditions."""

    room: int | None
    machine: Machine | None
    conditions: Conditions


def compose(
    trace: Trace, job: ComposedJob, recipe: Recipe, place: Place
) -> tuple[Composition, StepTime | None]:
    """Plan every rank of the pipeline; `recipe` is that of one data axis.

    Returns the composition, and the step where there is a machine.
    """
    axes, run = job.axes, place.conditions
    ranks = [_plan_rank(trace, job, recipe, place, rank) for rank in range(axes.pp)]
    fullest = max(ranks, key=lambda each: each.forecast.memory_nbytes).rank
    step, slowest = None, 0
    if place.machine is not None:
        works = [(each.work, each.window.policy(recipe)) for each in ranks]
        step, slowest = pipeline_step(works, recipe, axes, place.machine, run)
    made = Composition(
        axes, axes.dp(job.recipe.world_size), job.recipe.local_world_size, run.accumulate,
        tuple(ranks), fullest, tuple(_lines(ranks, ranks[slowest], recipe, axes, (step, place))),
    )  # fmt: skip
    return made, step


def _plan_rank(trace: Trace, job: ComposedJob, recipe: Recipe, place: Place, rank: int) -> RankPlan:
    """Choose the first window that fits, or the last."""
    axes, num_micro = job.axes, place.conditions.accumulate
    own = rank_trace(trace, job, rank, num_micro)
    blocks = tuple(
        block
        for unit, piece in zip(trace.units, pieces_of(trace.units, job), strict=True)
        if (block := job.anatomy.block_of(unit.name)) >= 0 and piece % axes.pp == rank
    )
    windows = Window.choices(recipe, axes)
    for window in windows:
        found = forecast_steps(own, recipe, num_micro, window.policy(recipe))
        if place.room is None or found.memory_nbytes <= place.room or window == windows[-1]:
            work = own.work(job.tokens // axes.cp)
            held = axes.in_flight(rank, num_micro)
            return RankPlan(rank, tuple(dict.fromkeys(blocks)), held, window, work, found)
    raise AssertionError("the last window is taken")


def forecast_steps(trace: Trace, recipe: Recipe, num_micro: int, policy: Policy) -> Forecast:
    """Forecast a step of many micro-batches from one of three: bytes sent grow along a line."""
    found = forecast(trace, recipe, accumulate=min(num_micro, MOST_PLAYED), policy=policy)
    if num_micro <= MOST_PLAYED:
        return found
    fewer = forecast(trace, recipe, accumulate=MOST_PLAYED - 1, policy=policy)
    more = num_micro - MOST_PLAYED
    sent = {name: n + more * (n - fewer.sent.get(name, 0)) for name, n in found.sent.items()}
    return replace(found, sent=sent)


def pipeline_step(
    works: Sequence[tuple[ModelWork, Policy]], recipe: Recipe, axes: ModelAxes, machine: Machine,
    run: Conditions,
) -> tuple[StepTime, int]:  # fmt: skip
    """Return the step of a pipeline, and which of its ranks is the slowest.

    The slowest rank computes all micro-batches. While the pipeline fills and drains it waits for
    one micro-batch of all others, or for one piece of it where pieces are interleaved.
    """
    known: dict[object, StepTime] = {}
    steps: list[StepTime] = []
    for work, policy in works:
        units = tuple(replace(unit, name="", members=()) for unit in work.units)
        key = units, policy
        if key not in known:
            known[key] = simulate(ModelWork(units, work.tokens), recipe, machine, run, policy)
        steps.append(known[key])
    busy = [each.compute + each.memory + each.contention + each.exposed_axes for each in steps]
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
    ranks: Sequence[RankPlan], slowest: RankPlan, recipe: Recipe, axes: ModelAxes,
    timed: tuple[StepTime | None, Place],
) -> list[AxisLine]:  # fmt: skip
    """Return a line for data, and for each axis that is used."""
    step, place = timed
    run, found = place.conditions, list[AxisLine]()
    for axis in MESSAGES:
        size = recipe.world_size if axis == "data" else axes.sizes[axis]
        if size == 1 and axis != "data":
            continue
        if axis == "data":
            nbytes = float(max(each.forecast.sent_nbytes for each in ranks))
            seconds = step and step.exposed_gather + step.exposed_reduce
        else:
            nbytes = max(sent_on(axis, each.work, run) for each in ranks)
            seconds = step and (
                step.bubble if axis == "pp" else waited_on(axis, slowest.work, place)
            )
        share = None if step is None or seconds is None else seconds / step.seconds
        found.append(AxisLine(axis, size, nbytes, seconds, share))
    return found


def sent_on(axis: str, work: ModelWork, run: Conditions) -> float:
    """Return the bytes that a rank sends on a model axis in a step."""
    return run.accumulate * sum(
        message.sent_nbytes(run.recompute if unit.is_recomputed else 0.0)
        for unit in work.units
        for message in unit.messages
        if message.axis == axis
    )


def waited_on(axis: str, work: ModelWork, place: Place) -> float:
    """Return the seconds that a rank waits for messages of a model axis in a step."""
    assert place.machine is not None, "there are no seconds without a machine"
    run, found = place.conditions, 0.0
    for unit in work.units:
        again = run.recompute if unit.is_recomputed else 0.0
        for message in unit.messages:
            if message.axis == axis:
                times = message.forward * (1 + again) + message.backward
                found += times * message.cost(place.machine).seconds
    return run.accumulate * found
