"""The time of one step: the engine's own schedule, on clocks. No torch here.

`simulate` announces the events of a step unit by unit, as torch would, to the schedule that the
engine runs (engine/schedule.py). Its actions fill one rank's streams (planner/clock_hands.py).
Units whose states are off the device are stepped in the background, in forward's order after
`step`, or in backward as they are reduced. The next forward waits for each unit alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import NormalDist
from typing import TYPE_CHECKING

from onefold.engine.policy import UnitFacts, policy_of
from onefold.engine.schedule import Call, Schedule
from onefold.engine.successors import Phase
from onefold.planner.clock_hands import ClockHands
from onefold.planner.conditions import Conditions
from onefold.planner.machines import Machine
from onefold.planner.streams import PlannedSpan
from onefold.planner.work import ModelWork, UnitWork

if TYPE_CHECKING:
    from onefold.recipe import Recipe


@dataclass(frozen=True, slots=True)
class StepTime:
    """One step's seconds and where they go: the parts sum to `seconds`.

    `compute` are matrix products, `memory` everything else that the device computes, `contention`
    what both lose beside collectives. `exposed_*` is waiting: for gathers, reductions, the host
    link and CPU, the disk. `optimizer` is the step on the device, `stragglers` the wait for the
    slowest rank. `tokens_per_s` is of all ranks together.
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

    @property
    def bound(self) -> str:
        """What most of the step is: "compute", "memory", "link", "host link" or "disk"."""
        parts = {
            "compute": self.compute,
            "memory": self.memory + self.optimizer,
            "link": self.exposed_gather + self.exposed_reduce + self.contention,
            "host link": self.exposed_host,
            "disk": self.exposed_disk,
        }
        return max(parts, key=lambda name: parts[name])

    def sent_nbytes(self, what: str) -> float:
        """Bytes that one rank sends in a step for one purpose: gather, reduce, spread, replica."""
        return sum(span.nbytes for span in self.spans if span.what == what)


def simulate(
    work: ModelWork, recipe: Recipe, machine: Machine, conditions: Conditions | None = None
) -> StepTime:
    """The time of one step of `work` under `recipe` on `machine`, seconds.

    With states off the device it is the second of two steps, which waits for the first's.
    """
    run = conditions or Conditions()
    rank = _Rank(work, recipe, run, machine)
    begin = rank.play()
    if rank.hands.tiers.is_used:
        begin = rank.play()
    streams, parts = rank.streams, rank.streams.parts
    own = sum(parts.get(part, 0.0) for part in ("compute", "memory", "contention"))
    stragglers = own * machine.spread * slowest_of(recipe.world_size)
    seconds = streams.now - begin + stragglers
    return StepTime(
        seconds=seconds,
        compute=parts.get("compute", 0.0),
        memory=parts.get("memory", 0.0),
        contention=parts.get("contention", 0.0),
        exposed_gather=parts.get("gather", 0.0),
        exposed_reduce=parts.get("reduce", 0.0),
        exposed_host=parts.get("host", 0.0),
        exposed_disk=parts.get("disk", 0.0),
        optimizer=parts.get("optimizer", 0.0),
        stragglers=stragglers,
        tokens_per_s=work.tokens * run.accumulate * recipe.world_size / seconds if seconds else 0.0,
        spans=tuple(
            replace(span, start=span.start - begin, end=span.end - begin) for span in streams.spans
        ),
    )


def slowest_of(ranks: int) -> float:
    """The expected maximum of `ranks` standard normal values, by Blom's approximation (1958)."""
    return NormalDist().inv_cdf((ranks - 0.375) / (ranks + 0.25))


class _Rank:
    """One rank: announces a step's events to the engine's schedule, and lets clocks follow it."""

    def __init__(self, work: ModelWork, recipe: Recipe, run: Conditions, machine: Machine) -> None:
        self.work, self.recipe, self.run, self.machine = work, recipe, run, machine
        self.hands = ClockHands(work, recipe, run, machine)
        self.streams = self.hands.streams
        self.durations = [durations(unit, run, machine) for unit in work.units]
        self.far = recipe.offloaded_units([unit.numel for unit in work.units])
        is_resident = recipe.rest_world == 1 and recipe.rests_near
        facts = [
            UnitFacts(is_resident=is_resident, is_offloaded=far or not recipe.rests_near)
            for far in self.far
        ]
        self.schedule = Schedule(replace(policy_of(recipe), prefetch=run.prefetch), facts)

    def play(self) -> float:
        """One step; when it began."""
        begin = self.streams.begin_step()
        for microbatch in range(self.run.accumulate):
            self.hands.is_last = microbatch == self.run.accumulate - 1
            self.backward(self.forward(), is_first=microbatch == 0)
        self.step()
        return begin

    def forward(self) -> list[Call]:
        """One micro-batch's forward: every unit in order, each by one module."""
        hands, schedule = self.hands, self.schedule
        calls: list[Call] = []
        hands.do(schedule.begin_forward(Phase.FORWARD))
        for index, unit in enumerate(self.work.units):
            call, actions = schedule.enter(index, Phase.FORWARD)
            hands.do(actions)
            self.streams.compute(unit.name, "forward", self.durations[index][0])
            hands.do(schedule.leave(call, index, 1, is_recompute=False))
            schedule.expect_backward(call)
            calls.append(call)
        hands.do(schedule.end_forward(Phase.FORWARD))
        return calls

    def backward(self, calls: list[Call], *, is_first: bool) -> None:
        """One micro-batch's backward. The first gradient of a unit comes as it begins to compute,
        the last as it ends.

        Stages 0-2 add all but the first whole gradients to resting ones: two reads, a write.
        """
        hands, schedule, is_last = self.hands, self.schedule, self.hands.is_last
        adds = 3.0 * self.run.grad_itemsize * (not is_first and self.recipe.sums_rest)
        rate = self.machine.memory_rate * self.machine.efficiency.memory
        schedule.begin_backward([2] * len(calls), is_last=is_last)
        for call in reversed(calls):
            index, unit = call.unit, self.work.units[call.unit]
            hands.do(schedule.enter_backward(call))
            self.gradient(index, 0)
            parts = self.durations[index][1]
            added = adds * unit.numel / rate
            self.streams.compute(unit.name, "backward", parts | {"memory": parts["memory"] + added})
            self.gradient(index, 1)
        hands.do(schedule.end_backward())

    def gradient(self, index: int, member: int) -> None:
        """A gradient is there: the engine looks whether the reduction before has landed."""
        flying = self.schedule.reductions.may_land
        if flying is not None and self.hands.has_landed(flying):
            self.hands.do(self.schedule.landed())
        self.hands.do(self.schedule.gradient(index, member))

    def step(self) -> None:
        """Wait for every reduction; step what is on the device; the rest goes on by itself."""
        hands, schedule, machine = self.hands, self.schedule, self.machine
        hands.finish()
        stepped = schedule.take_stepped()
        hands.do(schedule.rest())
        near = [u for u, is_far in zip(self.work.units, self.far, strict=True) if not is_far]
        rate = machine.memory_rate * machine.efficiency.optimizer
        numel = sum(unit.numel for unit in near)
        seconds = numel / self.recipe.rest_world * self.run.state_nbytes / rate
        parts = {"optimizer": seconds, "memory": machine.step_seconds}
        self.streams.compute("", "step", parts)
        schedule.stepped()
        for index, is_far in enumerate(self.far):
            if is_far and index not in stepped:
                hands.step_far(index)


def durations(
    unit: UnitWork, run: Conditions, machine: Machine
) -> tuple[dict[str, float], dict[str, float]]:
    """Seconds of one unit's forward, and of its backward with what that recomputes, by part.

    Products, attention and the rest follow one another, as kernels of one stream do. Where the
    host needs longer for its launches than the device for the kernels, the difference is `memory`;
    so are all launches where the host itself computes.
    """
    efficiency = machine.efficiency
    wide = "bf16" if run.dtype == "fp8" else run.dtype  # what is never in fp8, as attention
    matmul = machine.peak(run.dtype if unit.is_narrowed else wide) * efficiency.matmul
    attention = machine.peak(wide) * efficiency.attention
    memory = machine.memory_rate * efficiency.memory

    def parts(
        flops: float, attended: float, nbytes: float, drawn: float, kernels: float
    ) -> dict[str, float]:
        compute = flops / matmul + attended / attention
        rest = nbytes / memory + drawn / machine.draw_rate
        launches = kernels * machine.kernel_seconds
        if machine.launches_hide:
            return {"compute": compute, "memory": max(rest, launches - compute)}
        return {"compute": compute, "memory": rest + launches}

    forward = parts(
        unit.forward_flops, unit.forward_attention_flops, unit.forward_nbytes, unit.forward_drawn,
        unit.num_kernels / 3,
    )  # fmt: skip
    again = run.recompute if unit.is_recomputed else 0.0
    backward = parts(
        unit.backward_flops + again * unit.forward_flops,
        unit.backward_attention_flops + again * unit.forward_attention_flops,
        unit.backward_nbytes + again * unit.forward_nbytes,
        unit.backward_drawn + again * unit.forward_drawn,
        (2 + again) * unit.num_kernels / 3,
    )
    return forward, backward


@dataclass(frozen=True, slots=True)
class ScalePoint:
    """One world size of a scaling curve; `efficiency` is speed per rank against the first."""

    world_size: int
    step: StepTime
    efficiency: float

    @property
    def tokens_per_s_per_rank(self) -> float:
        """Tokens per second of one rank."""
        return self.step.tokens_per_s / self.world_size


def scaling_curve(
    work: ModelWork, recipe: Recipe, machine: Machine, world_sizes: Sequence[int],
    conditions: Conditions | None = None,
) -> list[ScalePoint]:  # fmt: skip
    """Weak scaling: the same micro-batch on every rank, at each world size in turn."""
    points: list[ScalePoint] = []
    for world_size in world_sizes:
        step = simulate(work, replace(recipe, world_size=world_size), machine, conditions)
        base = points[0].tokens_per_s_per_rank if points else step.tokens_per_s / world_size
        points.append(ScalePoint(world_size, step, step.tokens_per_s / world_size / base))
    return points
