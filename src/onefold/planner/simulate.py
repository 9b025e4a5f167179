"""The time of one step, by playing one rank's streams as the engine fills them.

Streams run beside one another, each in order: `compute`, `gather`, `reduce`, between nodes `cross`
(weights), `settle` (sums of gradients) and `replica` (those of copies), and for state off the
device `fetch`, `flush`, `disk`, `cpu` and `publish`. Collectives share two links, inside the node
and between nodes, and on one link they take turns. The rules are those of engine/engine.py,
schedule.py and reducer.py:

- entering a unit begins its gather, if nobody has, and those of the next `prefetch` units;
- compute waits for the unit's gather; stage 3 gathers again in backward, stages 1 and 2 only in
  the first forward after a step, stage 0 never;
- a unit's reduction begins when backward is through with it; one is under way at a time, so the
  next waits for it. Stages 0-2 reduce once a step, stage 3 once a micro-batch;
- where nodes keep weights, these cross once a step, for all units as forward begins; where they
  keep sums, these are settled in the last micro-batch, one unit behind its reduction;
- units whose states are off the device are stepped in the background, in forward's order after
  `step`, or in backward as they are reduced; the next forward waits for each unit alone.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from statistics import NormalDist
from typing import TYPE_CHECKING

from onefold.planner.conditions import Conditions
from onefold.planner.costs import costs_of
from onefold.planner.links import Cost
from onefold.planner.machines import Machine
from onefold.planner.streams import PlannedSpan, Streams
from onefold.planner.work import ModelWork, UnitWork

if TYPE_CHECKING:
    from onefold.recipe import Recipe

STREAMS = {"spread": "gather"}  # collectives that share another's stream
CAUSES = {"device": "host", "cpu": "host", "disk": "disk"}  # what a wait for a tier is called


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
    if rank.tiers.is_used:
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


STREAMED_NBYTES = 12
"""Of an element's fp32 states, each way at once, where the device steps them."""


@dataclass(frozen=True, slots=True)
class TierSeconds:
    """Seconds per element that one rank's state off the device costs on each stream."""

    optimizer: str
    parameters: str
    flush: float
    disk: float
    cpu: float
    publish: float
    fetch: float

    @property
    def is_used(self) -> bool:
        """True if anything rests off the device."""
        return self.optimizer != "device" or self.parameters != "device"

    @classmethod
    def of(cls, recipe: Recipe, run: Conditions, machine: Machine) -> TierSeconds:
        """The tiers of `recipe` on `machine`; each rank has its own rows only."""
        host, own, offload = machine.host_rate, 1.0 / recipe.rest_world, recipe.offload
        rate = machine.disk_rate if offload.parameters == "disk" else host
        by_cpu, streamed = run.state_nbytes / machine.cpu_rate, STREAMED_NBYTES / host
        is_faster = machine.launches_hide and streamed < by_cpu  # where there is a device to ask
        streams = (
            offload.optimizer == "cpu"
            and offload.parameters != "disk"
            and (offload.step == "device" or (offload.step == "auto" and is_faster))
        )
        returns = offload.parameters == "device" and not streams
        return cls(
            offload.optimizer,
            offload.parameters,
            flush=own * (STREAMED_NBYTES if streams else run.grad_itemsize) / host,
            disk=own * run.disk_nbytes / machine.disk_rate if offload.optimizer == "disk" else 0.0,
            cpu=0.0 if streams else own * by_cpu,
            publish=own * run.weight_itemsize / host if returns else 0.0,
            fetch=own * run.weight_itemsize / rate if offload.parameters != "device" else 0.0,
        )


class _Rank:
    """One rank as the engine drives it: forward, backward and step fill its streams."""

    def __init__(self, work: ModelWork, recipe: Recipe, run: Conditions, machine: Machine) -> None:
        self.work, self.recipe, self.run, self.machine = work, recipe, run, machine
        self.waits_for_hops = run.waits_for_hops(recipe)
        self.streams = Streams(machine.efficiency.contention)
        self.tiers = TierSeconds.of(recipe, run, machine)
        known = {unit.numel: costs_of(unit.numel, recipe, run, machine) for unit in work.units}
        self.costs = [known[unit.numel] for unit in work.units]
        self.durations = [durations(unit, run, machine) for unit in work.units]
        chosen = recipe.offloaded_units([unit.numel for unit in work.units])
        self.far = frozenset(at for at, is_chosen in enumerate(chosen) if is_chosen)
        self.settled = [0.0] * len(work.units)  # when a unit's background step is over
        self.landed = self.last = 0.0  # the newest reduction; the end of all of them
        self.crossed = [0.0] * len(work.units)  # when the node has a unit's new weights
        self.followed = 0.0  # the newest second hop
        self.following: tuple[int, bool] | None = None  # whose second hop has not begun

    def play(self) -> float:
        """One step; when it began."""
        begin = self.streams.begin_step()
        for microbatch in range(self.run.accumulate):
            self.forward(is_first=microbatch == 0)
            self.backward(is_first=microbatch == 0, is_last=microbatch == self.run.accumulate - 1)
        self.step()
        return begin

    def forward(self, *, is_first: bool) -> None:
        """One micro-batch's forward: stages 1 and 2 keep what its first has gathered."""
        gathers = self.recipe.shards_parameters or (is_first and self.recipe.is_sharded)
        if is_first and self.recipe.keeps_weights:
            for unit in range(len(self.work.units)):  # where it is stepped far, once it has been
                ready = self.settled[unit]
                self.crossed[unit] = self.talk("cross", unit, self.costs[unit].cross, ready)
        for unit in self.enter(range(len(self.work.units)), gathers=gathers):
            self.streams.compute(self.work.units[unit].name, "forward", self.durations[unit][0])

    def backward(self, *, is_first: bool, is_last: bool) -> None:
        """One micro-batch's backward, with the reductions that do not wait for a later one.

        At stages 0-2 all but the first add whole gradients to those that rest: two reads, a write.
        """
        adds = 3.0 * self.run.grad_itemsize * (not is_first and self.recipe.sums_rest)
        rate = self.machine.memory_rate * self.machine.efficiency.memory
        gathers = self.recipe.shards_parameters
        for unit in self.enter(range(len(self.work.units))[::-1], gathers=gathers):
            name, parts = self.work.units[unit].name, self.durations[unit][1]
            added = adds * self.work.units[unit].numel / rate
            self.streams.compute(name, "backward", parts | {"memory": parts["memory"] + added})
            if is_last or not self.recipe.sums_rest:
                self.reduce(unit, is_last=is_last)
        if self.waits_for_hops:
            self.land()
            self.streams.wait(self.last, "reduce")

    def enter(self, order: Sequence[int], *, gathers: bool) -> Iterator[int]:
        """Walk over units: begin the gathers of each and the next ones, wait for its own."""
        streams, ahead = self.streams, self.run.prefetch + 1
        fetched: dict[int, float] = {}
        whole: dict[int, float] = {}
        for position, unit in enumerate(order):
            near = order[position : position + ahead] if gathers else ()
            for other in order[position : position + ahead + 1] if gathers else ():
                if other not in fetched:
                    fetched[other] = self.fetch(other)
            for other in near:
                if other not in whole:
                    ready = max(fetched[other], self.crossed[other])
                    if self.recipe.has_hops and not self.recipe.keeps_weights:
                        ready = self.talk("cross", other, self.costs[other].cross, ready)
                    whole[other] = self.talk("gather", other, self.costs[other].gather, ready)
            streams.wait(self.settled[unit], CAUSES[self.tiers.optimizer])
            streams.wait(fetched.get(unit, 0.0), CAUSES[self.tiers.parameters])
            streams.wait(whole.get(unit, 0.0), "gather")
            yield unit

    def talk(self, what: str, unit: int, cost: Cost, ready: float) -> float:
        """One collective of a unit, on the stream of its name; when it ends.

        Where the host computes, it also codes: that is compute's own time.
        """
        streams, name = self.streams, self.work.units[unit].name
        if not self.machine.launches_hide:
            streams.compute(name, "code", {"memory": cost.encode + cost.decode})
            cost = replace(cost, encode=0.0, decode=0.0)
        stream = STREAMS.get(what, what)
        return streams.collective(stream, name, what, cost, max(streams.now, ready))

    def fetch(self, unit: int) -> float:
        """Own rows of a unit's weight come near, once its background step is over."""
        numel, ready = self.work.units[unit].numel, max(self.streams.now, self.settled[unit])
        seconds = numel * self.tiers.fetch
        return self.streams.move("fetch", self.work.units[unit].name, "fetch", seconds, ready)

    def reduce(self, unit: int, *, is_last: bool) -> None:
        """Backward is through with a unit: reduce it, once the reduction before has landed.

        Onefold begins a second hop where it has seen the first one land, and waits for it before
        the next; others have it follow by itself.
        """
        self.land()
        self.landed = self.talk("reduce", unit, self.costs[unit].reduce, 0.0)
        if not self.waits_for_hops:
            self.follow(unit, self.landed, is_last=is_last)
        else:
            self.following = (unit, is_last)

    def land(self) -> None:
        """Wait for the newest reduction, and begin what follows it."""
        self.streams.wait(max(self.followed, self.landed), "reduce")
        following, self.following = self.following, None
        if following is not None:
            unit, is_last = following
            self.followed = self.follow(unit, self.streams.now, is_last=is_last)

    def follow(self, unit: int, ready: float, *, is_last: bool) -> float:
        """What comes after a unit's reduction; when it ends."""
        end, costs = ready, self.costs[unit]
        if not self.recipe.is_sharded:
            end = self.talk("spread", unit, costs.spread, end)
        if is_last:
            end = self.talk("replica", unit, costs.replica, end)
        if is_last or not (self.recipe.has_hops and self.recipe.keeps_sums):
            end = self.talk("settle", unit, costs.settle, end)
        self.last = max(self.last, end)
        if is_last and unit in self.far and self.recipe.offload.step_in_backward:
            self.step_far(unit, end)
        return end

    def step(self) -> None:
        """Wait for every reduction; step what is on the device; the rest goes on by itself."""
        streams, run, machine = self.streams, self.run, self.machine
        self.land()
        streams.wait(self.last, "reduce")
        numel = sum(unit.numel for at, unit in enumerate(self.work.units) if at not in self.far)
        rate = machine.memory_rate * machine.efficiency.optimizer
        seconds = numel / self.recipe.rest_world * run.state_nbytes / rate
        streams.compute("", "step", {"optimizer": seconds, "memory": machine.step_seconds})
        if not self.recipe.offload.step_in_backward:
            for unit in sorted(self.far):
                self.step_far(unit, streams.now)

    def step_far(self, unit: int, ready: float) -> None:
        """A unit's background step: its gradient leaves, states are stepped, its weight returns."""
        streams, tiers = self.streams, self.tiers
        name, numel = self.work.units[unit].name, self.work.units[unit].numel
        end = streams.move("flush", name, "flush", numel * tiers.flush, ready)
        end = streams.move("disk", name, "swap", numel * tiers.disk, end)
        end = streams.move("cpu", name, "step", numel * tiers.cpu, end)
        self.settled[unit] = streams.move("publish", name, "publish", numel * tiers.publish, end)


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
