"""Plan a composed run: memory of every rank of the pipeline, bytes of every axis, and the step.

Each rank of the pipeline is planned on its data axis (planner/composed.py). Stage 3 chooses a
window for each from its free memory, as `onefold.pipeline` does (fit/kept_units.py): weights kept
through the step, and gradients summed where they are, cost memory and save messages.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from onefold.engine.policy import Policy, policy_of
from onefold.fit.kept_units import GatheredUnits, choose_windows
from onefold.planner.byte_hands import Moment
from onefold.planner.composed import ComposedJob, parts_of, pieces_of, rank_trace
from onefold.planner.memory import Forecast, facts_of, forecast
from onefold.planner.message_counts import planned_unit
from onefold.planner.planned_axes import MESSAGES, ModelAxes
from onefold.planner.simulate import StepTime, simulate
from onefold.planner.work import ModelWork

if TYPE_CHECKING:
    from onefold.planner.costs import Conditions
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
    units: both hold for these units alone, as positions; None: all are alike.
    """

    keeps: bool
    sums: bool
    units: frozenset[int] | None = None

    @staticmethod
    def choices(recipe: Recipe, axes: ModelAxes) -> tuple[Window, ...]:
        """Return the windows in which all units are alike, first that with the fewest messages.

        Only stage 3 of a pipeline has a choice.
        """
        if recipe.frees_after_forward and axes.pp > 1:
            return Window(True, True), Window(False, False)
        sums = recipe.sums_rest or recipe.world_size == 1
        return (Window(not recipe.frees_after_forward, sums),)

    @staticmethod
    def fitting(stages: Sequence[GatheredUnits], free: int, limit: int | None = None) -> Window:
        """Return the window that `onefold.pipeline` chooses for the stages of a rank."""
        kept, all_units, first = set[int](), set[int](), 0
        for stage, window in zip(stages, choose_windows(stages, free, limit), strict=True):
            kept |= {first + unit for unit in window}
            all_units |= {first + unit for unit in stage.gathered}
            first += len(stage.sizes)
        is_whole = kept == all_units
        return Window(is_whole, is_whole, None if is_whole or not kept else frozenset(kept))

    def policy(self, recipe: Recipe) -> Policy:
        """Return the rules of a recipe with this window."""
        policy = policy_of(recipe)
        if not recipe.frees_after_forward or self.units is not None:
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
            "units": len(self.work.units),
            "window": None if self.window.units is None else sorted(self.window.units),
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
    """The ranks of a pipeline and the axes of one way to train; `fullest`: of which rank.

    `window`: the bytes to pass to `onefold.pipeline` where activations need more than it leaves.
    """

    axes: ModelAxes
    dp: int
    local_world_size: int  # ranks of a node, of all axes
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
            "axes": [
                {"axis": line.axis, "ranks": line.ranks, "sent_nbytes": round(line.nbytes),
                 "seconds": line.seconds, "share": line.share}
                for line in self.lines
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
    ranks, limit = list[RankPlan](), None
    for limit in _limits(recipe, axes, place):
        ranks = [_plan_rank(trace, job, recipe, place, rank, limit) for rank in range(axes.pp)]
        if place.room is None or all(r.forecast.memory_nbytes <= place.room for r in ranks):
            break
    fullest = max(ranks, key=lambda rank: rank.forecast.memory_nbytes).rank
    step, slowest = None, 0
    if place.machine is not None:
        works = [(rank.work, rank.window.policy(recipe)) for rank in ranks]
        windows = [rank.window.units for rank in ranks]
        step, slowest = pipeline_step(works, recipe, axes, place.machine, run, windows)
    composition = Composition(
        axes, axes.dp(job.recipe.world_size), job.recipe.local_world_size, run.accumulate,
        tuple(ranks), fullest, tuple(_lines(ranks, ranks[slowest], recipe, axes, (step, place))),
        limit,
    )  # fmt: skip
    return composition, step


def _limits(recipe: Recipe, axes: ModelAxes, place: Place) -> tuple[int | None, ...]:
    """Return the limits of windows to try: none, which a run has by itself, and then less."""
    if len(Window.choices(recipe, axes)) == 1 or place.room is None:
        return (None,)
    return (None, *(whole_mib(place.room // part) for part in (4, 8, 16)), 0)


def whole_mib(nbytes: int) -> int:
    """Round bytes down to MiB, where they have some."""
    return nbytes >> 20 << 20 or nbytes


def _plan_rank(
    trace: Trace, job: ComposedJob, recipe: Recipe, place: Place, rank: int, limit: int | None
) -> RankPlan:  # fmt: skip
    """Plan a rank with the window that a run chooses under this limit."""
    axes, num_micro = job.axes, place.conditions.accumulate
    own = rank_trace(trace, job, rank, num_micro)
    pieces = pieces_of(trace.units, job)
    blocks = tuple(
        block
        for unit, piece in zip(trace.units, pieces, strict=True)
        if (block := job.anatomy.block_of(unit.name)) >= 0 and piece % axes.pp == rank
    )
    window = Window.choices(recipe, axes)[0]
    if len(Window.choices(recipe, axes)) > 1 and place.room is not None:
        of_units = [
            axes.num_pieces - 1 if part.is_tied else pieces[part.unit]
            for part in parts_of(trace.units, job, rank)
        ]
        stages, free = stages_of(own, recipe, of_units), free_of(own, recipe, place)
        window = Window.fitting(stages, free, limit)
    step = forecast_steps(own, recipe, num_micro, window.policy(recipe), window.units)
    work, held = own.work(job.tokens // axes.cp), axes.in_flight(rank, num_micro)
    return RankPlan(rank, tuple(dict.fromkeys(blocks)), held, window, work, step)


def stages_of(trace: Trace, recipe: Recipe, pieces: Sequence[int]) -> list[GatheredUnits]:
    """Describe the stages of a rank, whose units belong to these pieces of the pipeline."""
    planned = [planned_unit(unit, recipe) for unit in trace.units]
    facts = facts_of(planned, recipe)
    stages = list[GatheredUnits]()
    for piece in dict.fromkeys(pieces):
        own = [index for index, unit_piece in enumerate(pieces) if unit_piece == piece]
        trains = tuple(any(planned[index].partials) for index in own)
        units = tuple(facts[index] for index in own)
        stages.append(GatheredUnits.of(units, policy_of(recipe).prefetch, trains))
    return stages


def free_of(trace: Trace, recipe: Recipe, place: Place) -> int:
    """Predict the bytes that are free before the first step: all but what rests."""
    assert place.room is not None, "checked by the caller"
    resting = Moment("", "", forecast(trace, recipe).resting)
    return max(0, place.room - resting.memory_nbytes(recipe.device_type))


def forecast_steps(
    trace: Trace, recipe: Recipe, num_micro: int, policy: Policy,
    units: frozenset[int] | None = None,
) -> Forecast:  # fmt: skip
    """Forecast a step of many micro-batches from one of three: bytes sent grow along a line."""

    def played(micro: int) -> Forecast:
        return forecast(trace, recipe, accumulate=micro, policy=policy, window=units)

    step = played(min(num_micro, MOST_PLAYED))
    if num_micro <= MOST_PLAYED:
        return step
    fewer = played(MOST_PLAYED - 1)
    more = num_micro - MOST_PLAYED
    sent = {name: n + more * (n - fewer.sent.get(name, 0)) for name, n in step.sent.items()}
    return replace(step, sent=sent)


def pipeline_step(
    works: Sequence[tuple[ModelWork, Policy]], recipe: Recipe, axes: ModelAxes, machine: Machine,
    run: Conditions, windows: Sequence[frozenset[int] | None] = (),
) -> tuple[StepTime, int]:  # fmt: skip
    """Return the step of a pipeline, and which of its ranks is the slowest.

    The slowest rank computes all micro-batches. While the pipeline fills and drains it waits for
    one micro-batch of all others, or for one piece of it where pieces are interleaved. `windows`:
    of ranks that keep some of their units.
    """
    known: dict[object, StepTime] = {}
    steps: list[StepTime] = []
    for (work, policy), window in zip(works, windows or [None] * len(works), strict=True):
        units = tuple(replace(unit, name="", members=()) for unit in work.units)
        key, same = (units, policy, window), ModelWork(units, work.tokens)
        if key not in known:
            known[key] = simulate(same, recipe, machine, run, policy, window)
        steps.append(known[key])
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
    ranks: Sequence[RankPlan], slowest: RankPlan, recipe: Recipe, axes: ModelAxes,
    timed: tuple[StepTime | None, Place],
) -> list[AxisLine]:  # fmt: skip
    """Return a line for data, and for each axis that is used."""
    step, place = timed
    run, lines = place.conditions, list[AxisLine]()
    for axis in MESSAGES:
        size = recipe.world_size if axis == "data" else axes.sizes[axis]
        if size == 1 and axis != "data":
            continue
        if axis == "data":
            nbytes = float(max(rank.forecast.sent_nbytes for rank in ranks))
            seconds = step and step.exposed_gather + step.exposed_reduce
        else:
            nbytes = max(sent_on(axis, rank.work, run) for rank in ranks)
            seconds = step and (
                step.bubble if axis == "pp" else waited_on(axis, slowest.work, place)
            )
        share = None if step is None or seconds is None else seconds / step.seconds
        lines.append(AxisLine(axis, size, nbytes, seconds, share))
    return lines


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
    run, waited = place.conditions, 0.0
    for unit in work.units:
        again = run.recompute if unit.is_recomputed else 0.0
        for message in unit.messages:
            if message.axis == axis:
                times = message.forward * (1 + again) + message.backward
                waited += times * message.cost(place.machine).seconds
    return run.accumulate * waited
