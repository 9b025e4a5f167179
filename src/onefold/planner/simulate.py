"""The time of one step: the engine's own schedule, on clocks. No torch here.

`simulate` announces the events of a step unit by unit (planner/replay.py) to the schedule that the
engine runs. Its actions fill one rank's streams (planner/clock_executor.py). Units whose states are
off the device are stepped in the background, in forward's order after `step`, or in backward as
they are reduced. The next forward waits for each unit alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import exp, expm1, sqrt
from statistics import NormalDist
from typing import TYPE_CHECKING

from onefold.engine.policy import Policy, UnitFacts, policy_of
from onefold.engine.schedule import Schedule
from onefold.errors import ConfigError
from onefold.planner.clock_executor import GRADIENTS, ClockExecutor, PlannedSpan
from onefold.planner.costs import Conditions
from onefold.planner.machines import Machine
from onefold.planner.replay import Replay, plain_events
from onefold.planner.work import ModelWork

if TYPE_CHECKING:
    from onefold.recipe import Recipe


PARTS = (
    "compute", "memory", "contention", "exposed_gather", "exposed_reduce", "exposed_host",
    "exposed_disk", "optimizer", "exposed_axes", "exposed_launches",
)  # fmt: skip
"""The parts of the compute stream's time."""


@dataclass(frozen=True, slots=True)
class StepTime:
    """One step's seconds and where they go: the parts sum to `seconds`.

    `compute` is matrix products, `memory` everything else that the device computes, `contention`
    the time that both lose while collectives run. `exposed_*` is waiting: for gathers, reductions,
    the host link and CPU, the disk, messages of model axes, and kernels that the host has not
    launched yet. `optimizer` is the step on the device, `stragglers` the wait for the slowest rank,
    `bubble` the wait for other ranks of a pipeline.
    `tokens_per_s` counts all ranks.
    """

    seconds: float
    compute: float
    memory: float
    contention: float
    exposed_gather: float
    exposed_reduce: float
    exposed_host: float
    exposed_disk: float
    optimizer: float
    stragglers: float
    tokens_per_s: float
    spans: tuple[PlannedSpan, ...]
    exposed_axes: float = 0.0
    exposed_launches: float = 0.0
    bubble: float = 0.0

    @property
    def bound(self) -> str:
        """The largest part: "compute", "memory", "link", "host link", "disk", "host", "bubble"."""
        parts = {
            "compute": self.compute,
            "memory": self.memory + self.optimizer,
            "link": self.exposed_gather + self.exposed_reduce + self.contention + self.exposed_axes,
            "host link": self.exposed_host,
            "disk": self.exposed_disk,
            "host": self.exposed_launches,
            "bubble": self.bubble,
        }
        return max(parts, key=lambda name: parts[name])


def simulate(
    work: ModelWork, recipe: Recipe, machine: Machine, conditions: Conditions | None = None,
    policy: Policy | None = None, window: frozenset[int] | None = None,
) -> StepTime:  # fmt: skip
    """Return the time of one step of `work` under `recipe` on `machine`, in seconds.

    With states off the device it is the second of two steps, which waits for the first's. `policy`:
    other rules than the recipe's. `window`: the units that a pipeline's schedule keeps.
    """
    run, units = conditions or Conditions(), work.units
    policy = policy or policy_of(recipe)
    rests = window if window and not policy.keeps_bytes else frozenset[int]()  # not at stage 2
    sums = frozenset(range(len(units))) if policy.defers_reduction else rests
    executor = ClockExecutor(work, recipe, run, machine, sums=sums)
    is_far = recipe.offloaded_units([unit.numel for unit in units])
    is_resident = recipe.rest_world == 1 and recipe.rests_near
    facts = [
        UnitFacts(is_resident=is_resident, is_offloaded=far or not recipe.rests_near)
        for far in is_far
    ]
    schedule = Schedule(replace(policy, prefetch=run.prefetch), facts)
    events = plain_events([0] * len(units), [GRADIENTS] * len(units))
    replay = Replay(events, schedule, [len(GRADIENTS)] * len(units), window)
    begin = 0.0
    is_offloaded = {recipe.offload.optimizer, recipe.offload.parameters} != {"device"}
    for _ in range(2 if is_offloaded else 1):
        begin = executor.streams.begin_step()
        for micro in range(run.accumulate):
            executor.begin(micro)
            replay.micro_batch(executor, is_last=micro + 1 == run.accumulate)
        executor.await_reductions()
        stepped = schedule.early_steps.take_stepped()
        executor.do(schedule.rest())
        executor.step(is_far, stepped)
        schedule.stepped()
    parts = executor.streams.parts
    own = sum(parts.get(part, 0.0) for part in PARTS[:3])
    stragglers = own * machine.spread * slowest_of(recipe.world_size)
    seconds = executor.streams.now - begin + stragglers
    return StepTime(
        seconds=seconds,
        **{part: parts.get(part, 0.0) for part in PARTS},
        stragglers=stragglers,
        tokens_per_s=work.tokens * run.accumulate * recipe.world_size / seconds if seconds else 0.0,
        spans=tuple(
            replace(span, start=span.start - begin, end=span.end - begin)
            for span in executor.streams.spans
        ),
    )


def slowest_of(ranks: int) -> float:
    """Return the expected maximum of `ranks` standard normal values (Blom, 1958)."""
    return NormalDist().inv_cdf((ranks - 0.375) / (ranks + 0.25))


@dataclass(frozen=True, slots=True)
class ScalePoint:
    """One world size of a scaling curve; `efficiency` is speed per rank against the first."""

    world_size: int
    step: StepTime
    efficiency: float


def scaling_curve(
    work: ModelWork, recipe: Recipe, machine: Machine, world_sizes: Sequence[int],
    conditions: Conditions | None = None,
) -> list[ScalePoint]:  # fmt: skip
    """Simulate weak scaling: the same micro-batch on every rank, at each world size in turn."""
    points: list[ScalePoint] = []
    first = 0.0
    for world_size in world_sizes:
        step = simulate(work, replace(recipe, world_size=world_size), machine, conditions)
        speed = step.tokens_per_s / world_size  # of one rank
        first = first or speed
        points.append(ScalePoint(world_size, step, speed / first))
    return points


# goodput: the share of a run's time that becomes progress, between failures and checkpoints


HOUR = 3600.0
LLAMA3_DEVICE_MTBF = 54 * 24 * HOUR * 16384 / 419
"""Seconds: 419 unexpected interruptions of 16,384 H100 in 54 days (Llama 3, arXiv 2407.21783,
section 3.3.4), hosts, network and software included."""


@dataclass(frozen=True, slots=True)
class Goodput:
    """The `share` of the time that becomes progress, with a save every `interval` seconds of work.

    `steps` is that interval in steps, `mtbf` the seconds between two failures of the whole run.
    """

    share: float
    interval: float
    steps: float
    mtbf: float


def goodput(
    step_seconds: float, *, world_size: int, checkpoint_seconds: float,
    restart_seconds: float = 0.0, device_mtbf: float = LLAMA3_DEVICE_MTBF,
    interval: float | None = None,
) -> Goodput:  # fmt: skip
    """Estimate the goodput at the best interval between checkpoints, or at a given one, in seconds.

    Args:
        step_seconds: of one step.
        world_size: devices that may fail.
        checkpoint_seconds: how long a checkpoint stops training; in the background, its copy alone.
        restart_seconds: from a failure to the first new step.
        device_mtbf: mean time between failures of one device.
        interval: seconds of work between two checkpoints.
    """
    if min(step_seconds, checkpoint_seconds, device_mtbf, world_size) <= 0:
        wanted = "step_seconds, checkpoint_seconds, device_mtbf and world_size above 0"
        got = f"{step_seconds}, {checkpoint_seconds}, {device_mtbf}, {world_size}"
        hint = "a checkpoint's seconds are its bytes over the rate of its storage"
        raise ConfigError(wanted, got, hint=hint)
    mtbf = device_mtbf / world_size
    if interval is None:
        interval = _best_interval(checkpoint_seconds, mtbf)
    exponent = (interval + checkpoint_seconds) / mtbf
    share = 0.0
    if exponent + restart_seconds / mtbf <= 700:  # beyond that any float overflows
        # M e^(R/M) (e^((t+d)/M) - 1) seconds pass for t seconds of work: an interval, its
        # checkpoint, and the retries of both until one holds
        share = interval / (mtbf * exp(restart_seconds / mtbf) * expm1(exponent))
    return Goodput(share, interval, interval / step_seconds, mtbf)


def _best_interval(checkpoint_seconds: float, mtbf: float) -> float:
    """Find the zero of t/M - 1 + e^(-(t+d)/M), where the share is highest, by Newton's method.

    A restart scales every interval's share alike and does not move the best one.
    """
    ratio = checkpoint_seconds / mtbf
    at = min(sqrt(2 * ratio), 1 + ratio)
    for _ in range(20):  # of a convex function: each doubles the digits
        decay = exp(-(at + ratio))
        at -= (at - 1 + decay) / (1 - decay)
    return at * mtbf
