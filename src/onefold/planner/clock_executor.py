"""Execute a schedule's actions on clocks: the counterpart of engine/executor.py. No torch here.

Streams run at the same time, each in order: `compute`, `gather`, `reduce`, between nodes `cross`
(weights), `second_hop` (sums of gradients) and `replica` (averages of copies), and for state off
the device `fetch`, `flush`, `disk`, `cpu` and `publish`. Collectives share two links, inside the
node and between nodes, and take turns on a link.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING

from onefold.engine.driving import Action
from onefold.planner.action_executor import ActionExecutor
from onefold.planner.costs import Conditions, Cost, HostRates, costs_of
from onefold.planner.machines import Machine
from onefold.planner.work import Event, EventKind, ModelWork, UnitWork, Work

if TYPE_CHECKING:
    from onefold.recipe import Recipe


@dataclass(frozen=True, slots=True)
class PlannedSpan:
    """The work of one stream from `start` to `end`; `nbytes` that this rank sends."""

    stream: str
    unit: str
    what: str
    start: float
    end: float
    nbytes: float = 0.0


class Streams:
    """The streams of one rank, filled in the order in which its host fills them."""

    def __init__(self, contention: float) -> None:
        self.now = 0.0  # the end of the compute stream
        self.spans: list[PlannedSpan] = []
        self.parts: dict[str, float] = {}  # the compute stream's time, by cause
        self._rate = 1.0 - contention
        self._free: dict[str, float] = {}  # when a stream or a link is free again
        self._collectives: list[tuple[float, float]] = []  # collectives that may still run

    def begin_step(self) -> float:
        """Forget the spans of the step before, and return the time."""
        self.spans.clear()
        self.parts.clear()
        return self.now

    def collective(self, stream: str, unit: str, what: str, cost: Cost, ready: float) -> float:
        """Put a collective on its stream once that and its links are free; return when it ends."""
        if cost.seconds == 0:
            return ready
        keys = (stream, *cost.links)
        ready = max(ready, self._free.get(stream, 0.0)) + cost.encode
        start = max(ready, *(self._free.get(key, 0.0) for key in keys))
        end = start + cost.seconds
        for key in cost.links:
            self._free[key] = end
        self._free[stream] = end + cost.decode
        self._collectives.append((start, end))
        self.spans.append(PlannedSpan(stream, unit, what, start, end, cost.nbytes))
        return end + cost.decode

    def move(self, stream: str, unit: str, what: str, seconds: float, ready: float) -> float:
        """Put a copy or a background step on its stream, and return when it ends."""
        if seconds == 0:
            return ready
        start = max(ready, self._free.get(stream, 0.0))
        end = self._free[stream] = start + seconds
        self.spans.append(PlannedSpan(stream, unit, what, start, end))
        return end

    def wait(self, until: float, cause: str) -> None:
        """Stall compute; `cause` is the part of the step that the wait counts for."""
        if until > self.now:
            self._count_part(cause, until - self.now)
            self.now = until

    def compute(self, unit: str, what: str, parts: dict[str, float]) -> None:
        """Run work on the compute stream, slower while a collective runs."""
        seconds = sum(parts.values())
        if seconds == 0:
            return
        start = self.now
        lost = self._lost(start, seconds) if self._rate < 1 else 0.0
        self.now = start + seconds + lost
        for part, own in {**parts, "contention": lost}.items():
            self._count_part(part, own)
        self.spans.append(PlannedSpan("compute", unit, what, start, self.now))

    def _lost(self, start: float, seconds: float) -> float:
        """Return the time that work of `seconds` loses to the collectives under way."""
        self._collectives = sorted(span for span in self._collectives if span[1] > start)
        now, left, lost = start, seconds, 0.0
        for begin, end in self._collectives:
            alone = max(0.0, begin - now)
            if alone >= left:
                break
            now, left = now + alone, left - alone
            window = max(0.0, end - now)
            done = min(left, window * self._rate)  # of `left`, done while the collective runs
            took = window if done < left else done / self._rate
            lost += took - done
            now, left = now + took, left - done
        return lost

    def _count_part(self, part: str, seconds: float) -> None:
        self.parts[part] = self.parts.get(part, 0.0) + seconds


# the executor


STREAMS = {"spread": "gather"}
"""Collectives that share another's stream."""
STEP_STREAMS = {"flush": "flush", "disk": "swap", "cpu": "step", "publish": "publish"}
"""The streams of a background step, one after the other, and the work on each."""
CAUSES = {"device": "exposed_host", "cpu": "exposed_host", "disk": "exposed_disk"}
"""The parts of a step that wait for a tier."""
AXES = "exposed_axes"
"""The part of a step that waits for messages of model axes."""
STEP_SHARE = 0.85
"""The share of the memory bandwidth that the optimizer's kernel over long tensors reaches."""
HOST = "exposed_launches"
"""The part of a step that waits for the host's Python and launches."""
UNIT_CALLS = 340
"""Onefold's own Python calls for a unit of a step, whose weights are cast for compute or not;
tests/planner/test_host_time.py counts them."""
PARAMETER_CALLS = 5
"""The same for a parameter of the only process, where the root brings all units at once."""
GRADIENTS = (0, 1)
"""Each unit has two: one comes as its backward begins to compute, the other as it ends."""


def durations(
    unit: UnitWork, run: Conditions, machine: Machine
) -> tuple[dict[str, float], dict[str, float]]:
    """Return the seconds of a unit's forward, and of its backward with recompute, by part.

    Kernels follow one another. Where the host needs longer to launch them than the device to run
    them, the difference is `memory`. Messages on model axes are waited for.
    """
    efficiency = machine.efficiency
    wide = "bf16" if run.dtype == "fp8" else run.dtype  # of attention, which is never in fp8
    matmul = machine.peak(run.dtype if unit.is_narrowed else wide) * efficiency.matmul
    attention = machine.peak(wide) * efficiency.attention
    memory = machine.memory_rate * efficiency.memory

    def parts(work: Work, kernels: float) -> dict[str, float]:
        compute = work.flops / matmul + work.attention_flops / attention
        launches = kernels * machine.kernel_seconds
        return {"compute": compute, "memory": max(work.nbytes / memory, launches - compute)}

    again = run.recompute if unit.is_recomputed else 0.0
    forward = parts(unit.forward, unit.num_kernels / 3)
    backward = parts(unit.backward.plus(unit.forward, again), (2 + again) * unit.num_kernels / 3)
    waits = [
        (message, message.cost(machine).seconds)
        for message in unit.messages
        if message.axis != "pp"  # compute goes on while a full pipeline sends
    ]
    if waits:
        forward[AXES] = sum(message.forward * seconds for message, seconds in waits)
        backward[AXES] = sum(
            (message.backward + again * message.forward) * s for message, s in waits
        )
    return forward, backward


def tier_seconds(recipe: Recipe, run: Conditions, machine: Machine) -> dict[str, float]:
    """Return the seconds per element that one rank's state off the device costs, by stream.

    Ranks of a host share its memory: what a step by the cores reads and writes, and all copies.
    """
    # the simulator is imported without torch
    from onefold.tier.step_device import STREAMED_NBYTES

    own, offload = run.own_share(recipe), recipe.offload
    host = HostRates.shared_by(machine, min(run.near(recipe), recipe.world_size))
    rate = machine.disk_rate if offload.parameters == "disk" else host.link
    copied = run.grad_itemsize + run.weight_itemsize * (offload.parameters == "device")
    by_cpu, streamed = host.stepped(run.state_nbytes, copied), host.streamed(STREAMED_NBYTES)
    wanted = offload.step == "device" or (offload.step == "auto" and streamed < by_cpu)
    streams = offload.optimizer == "cpu" and offload.parameters != "disk" and wanted
    returns = offload.parameters == "device" and not streams
    on_disk = own * (run.state_nbytes - 4) / machine.disk_rate
    return {
        "flush": own * (streamed if streams else host.copied(run.grad_itemsize)),
        "disk": on_disk if offload.optimizer == "disk" else 0.0,
        "cpu": 0.0 if streams else own * by_cpu,
        "publish": own * host.copied(run.weight_itemsize) if returns else 0.0,
        "fetch": own * run.weight_itemsize / rate if offload.parameters != "device" else 0.0,
    }


def host_seconds(
    unit: UnitWork, run: Conditions, machine: Machine, *, is_alone: bool
) -> tuple[float, float]:
    """Return the host's seconds for a unit's forward, and for its backward and its step.

    `is_alone`: of the only process, without offload. Casts of weights and of gradients are one
    operation a parameter; a step is one a unit. Python calls of other libraries are not known.
    """
    casts = sum(member.compute_dtype != member.dtype for member in unit.members)
    calls = PARAMETER_CALLS * len(unit.members) if is_alone else UNIT_CALLS
    calls = 0 if run.uses_rings else calls
    again = run.recompute if unit.is_recomputed else 0.0
    forward = unit.forward.num_kernels
    backward = unit.backward.num_kernels + again * forward + 1
    own = calls / 2 * machine.call_seconds
    each = machine.operation_seconds
    return own + (forward + casts / 2) * each, own + (backward + casts / 2) * each


class ClockExecutor(ActionExecutor):
    """The clocks of one rank. With `uses_rings` a second hop follows the first one by itself.

    `sums`: units whose gradients are summed over micro-batches where they are, as all are at stages
    0 and 1.
    """

    def __init__(
        self, work: ModelWork, recipe: Recipe, run: Conditions, machine: Machine, *,
        sums: frozenset[int],
    ) -> None:  # fmt: skip
        self._sums = sums
        self._units, self._recipe, self._machine, self._run = work.units, recipe, machine, run
        self._crosses_late = recipe.has_hops and not recipe.keeps_weights
        self.streams = Streams(machine.efficiency.contention)
        self._tiers = tier_seconds(recipe, run, machine)
        self._durations = [durations(unit, run, machine) for unit in work.units]
        alone = recipe.is_alone
        self._host = [host_seconds(u, run, machine, is_alone=alone) for u in work.units]
        self._issued = 0.0  # when the host has launched all that it was to launch by now
        costs = cache(lambda numel, ranks: costs_of(numel, recipe.on(ranks), run, machine))
        self._costs = [costs(unit.numel, unit.data_ranks) for unit in work.units]
        self._stepped = [0.0] * len(work.units)  # when the background step of a unit is over
        self._crossed = [0.0] * len(work.units)  # when the node has a unit's new weights
        self._fetched: dict[int, float] = {}
        self._gathered: dict[int, float] = {}
        self._landed: dict[int, float] = {}  # ends of first hops, until they are waited for
        self._followed: dict[int, float] = {}  # ends of second hops, until they are waited for
        self._is_last = True  # of the micro-batches
        self._added_nbytes = 0.0  # per element: gradients that are added to resting ones

    def begin(self, micro: int) -> None:
        """Begin a micro-batch. The host has seen the end of the step before.

        All but the first gradients are added to resting ones: two reads, a write.
        """
        self._issued = self._issued if micro else self.streams.now
        self._is_last = micro + 1 == self._run.accumulate
        self._added_nbytes = 3.0 * self._run.grad_itemsize * (micro > 0)

    def reach(self, event: Event) -> None:
        """Compute until the event."""
        if event.kind is EventKind.LEAVE:
            name, parts = self._units[event.unit].name, self._durations[event.unit][0]
            self.streams.compute(name, "forward", parts)
            self._await_host(event.unit, 0)
        elif event.kind is EventKind.GRAD and event.call == GRADIENTS[-1]:
            unit, parts = self._units[event.unit], self._durations[event.unit][1]
            rate = self._machine.memory_rate * self._machine.efficiency.memory
            added = self._added_nbytes * unit.numel * (event.unit in self._sums)
            memory = parts["memory"] + added / rate
            self.streams.compute(unit.name, "backward", parts | {"memory": memory})
            self._await_host(event.unit, 1)

    def _await_host(self, index: int, which: int) -> None:
        """The last kernel of a pass starts once the host has launched it."""
        self._issued += self._host[index][which]
        self.streams.wait(self._issued, HOST)

    def has_landed(self, unit: int) -> bool:
        """Return True if the first hop of the unit's reduction is over by now."""
        return self._landed.get(unit, 0.0) <= self.streams.now

    def follow(self, event: Event, actions: Iterable[Action]) -> None:
        """Execute the actions that answer the event."""
        self.do(actions)

    def await_reductions(self) -> None:
        """Wait for every reduction."""
        for index in list(self._landed):
            self.streams.wait(self._landed.pop(index), "exposed_reduce")
        for index in list(self._followed):
            self.streams.wait(self._followed.pop(index), "exposed_reduce")

    def step(self, is_far: tuple[bool, ...], stepped: Collection[int]) -> None:
        """Step the units on the device, and begin to step the others that are not `stepped`."""
        rate = self._machine.memory_rate * STEP_SHARE
        numel = sum(u.numel for u, far in zip(self._units, is_far, strict=True) if not far)
        seconds = numel * self._run.own_share(self._recipe) * self._run.state_nbytes / rate
        self.streams.compute("", "step", {"optimizer": seconds})
        for index, far in enumerate(is_far):
            if far and index not in stepped:
                self._step(index)

    # one verb each

    def _step(self, index: int) -> None:
        """Step a unit in the background.

        Its gradient leaves the device, its states are stepped, its weight returns.
        """
        unit, end = self._units[index], self.streams.now
        for stream, what in STEP_STREAMS.items():
            seconds = unit.numel * self._tiers[stream]
            end = self.streams.move(stream, unit.name, what, seconds, end)
        self._stepped[index] = end

    def _fetch(self, index: int) -> None:
        if index not in self._fetched:
            ready = max(self.streams.now, self._stepped[index])
            seconds, name = self._units[index].numel * self._tiers["fetch"], self._units[index].name
            self._fetched[index] = self.streams.move("fetch", name, "fetch", seconds, ready)

    def _fill(self, index: int) -> None:
        cost, ready = self._costs[index].cross, self._stepped[index]
        self._crossed[index] = self._talk("cross", index, cost, ready)

    def _gather(self, index: int) -> None:
        self._fetch(index)
        ready = max(self._fetched[index], self._crossed[index])
        if self._crosses_late:
            ready = self._talk("cross", index, self._costs[index].cross, ready)
        self._gathered[index] = self._talk("gather", index, self._costs[index].gather, ready)

    def _show(self, index: int) -> None:
        wait = self.streams.wait
        wait(self._stepped[index], CAUSES[self._recipe.offload.optimizer])
        wait(self._fetched.get(index, 0.0), CAUSES[self._recipe.offload.parameters])
        wait(self._gathered.get(index, 0.0), "exposed_gather")

    def _free(self, index: int) -> None:
        self._fetched.pop(index, None)
        self._gathered.pop(index, None)

    def _invalidate(self, index: int) -> None:
        self._free(index)

    def _reduce(self, index: int) -> None:
        if self._run.uses_rings:
            for before in list(self._landed):
                self.streams.wait(self._landed.pop(before), "exposed_reduce")
        self._landed[index] = self._talk("reduce", index, self._costs[index].reduce, 0.0)
        if self._run.uses_rings:
            self._followed[index] = self._chain(index, self._landed[index])

    def _land(self, index: int) -> None:
        if not self._run.uses_rings:
            self.streams.wait(self._landed.pop(index), "exposed_reduce")

    def _follow(self, index: int) -> None:
        if not self._run.uses_rings:
            self._followed[index] = self._chain(index, self.streams.now)

    def _finish(self, index: int) -> None:
        if not self._run.uses_rings:
            self.streams.wait(self._followed.pop(index, 0.0), "exposed_reduce")

    def _chain(self, index: int, ready: float) -> float:
        """Begin the collectives after a unit's first hop, and return when the last one ends."""
        costs = self._costs[index]
        if not self._recipe.is_sharded:
            ready = self._talk("spread", index, costs.spread, ready)
        if self._is_last:
            ready = self._talk("replica", index, costs.replica, ready)
        return self._talk("second_hop", index, costs.second_hop, ready)

    def _wait_step(self, index: int) -> None:
        self.streams.wait(self._stepped[index], CAUSES[self._recipe.offload.optimizer])

    def _talk(self, what: str, index: int, cost: Cost, ready: float) -> float:
        """Put one collective of a unit on the stream of its name, and return when it ends."""
        streams, name = self.streams, self._units[index].name
        stream = STREAMS.get(what, what)
        return streams.collective(stream, name, what, cost, max(streams.now, ready))
