"""What a rank will hold, moment by moment: the events of a trace under the rules of the engine.

`forecast` plays one optimizer step in its steady state, from `zero_grad` to `zero_grad`. What rests
is a closed form (planner/setup.py); whole weights, partial gradients and receive buffers come and
go as runtime/engine.py and runtime/reducer.py have them come and go; activations are the trace's.
The peak is the largest sum of all three at any moment.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from onefold.config import Offload
from onefold.planner.setup import Setup, UnitBytes, unit_bytes
from onefold.planner.trace import Event, Trace, What
from onefold.runtime.blocks import BLOCK_NUMEL
from onefold.runtime.schedule import Phase, Schedule
from onefold.tier.workers import NUM_DISK_STEPPERS, NUM_FETCHERS

Holding = dict[tuple[str, str], int]
"""Bytes by (kind, tier); kinds are those of `onefold.ledger.Kind`, and `logits`."""

ACTIVATION, LOGITS = "activation", "logits"
STEP_BLOCK_NBYTES = {"cpu": 512 * 1024 * 4, "cuda": 64 * 1024 * 1024 * 4}
"""Of one block of fp32 gradients, where narrow ones are widened on the way (runtime/adam.py)."""

_PHASES = {
    What.ENTER: Phase.FORWARD, What.AGAIN: Phase.BACKWARD, What.BACKWARD: Phase.BACKWARD,
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Moment:
    """What is held in one moment of a step."""

    phase: str  # forward, loss, backward or step
    unit: str
    held: Holding

    def nbytes(self, tier: str) -> int:
        """Bytes in one tier."""
        return sum(n for (_, place), n in self.held.items() if place == tier)

    def memory_nbytes(self, device_type: str) -> int:
        """Bytes in the memory that computes: the CPU's holds its own tier too."""
        return self.nbytes("device") + (self.nbytes("cpu") if device_type == "cpu" else 0)


@dataclass(frozen=True, slots=True)
class Forecast:
    """What rank 0 will hold and send. Tiers are `device`, `cpu` and `disk`.

    `peak` is the moment at which the device (where it is the CPU: device and CPU memory, which are
    one) holds most; `peaks` the most by tier, `most` the most by kind and tier. `timeline` has
    every moment, if it was asked for.
    """

    setup: Setup
    peak: Moment
    peaks: dict[str, int]
    most: Holding
    resting: Holding
    timeline: tuple[Moment, ...]
    gather_sent: int  # bytes per optimizer step
    reduce_sent: int

    @property
    def memory_nbytes(self) -> int:
        """The most that the memory which computes holds at a time."""
        return self.peak.memory_nbytes(self.setup.device_type)

    def most_of(self, kind: str) -> int:
        """The most of one kind, over all tiers."""
        return sum(nbytes for (each, _), nbytes in self.most.items() if each == kind)


def forecast(
    trace: Trace, setup: Setup, *, chosen: Sequence[bool] | None = None, has_timeline: bool = False
) -> Forecast:
    """Play one step of `trace`. `chosen`: whose states are offloaded; default: by fraction."""
    units = [unit_bytes(unit, setup) for unit in trace.units]
    if chosen is None:
        chosen = offloaded(units, setup.offload)
    replay = _Replay(trace, setup, units, list(chosen))
    replay.keeps_all = has_timeline
    replay.step()
    assert replay.peak is not None, "a step without a moment"
    return Forecast(
        setup, replay.peak, replay.peaks, replay.most, replay.resting, tuple(replay.timeline),
        replay.gather_sent, replay.reduce_sent,
    )  # fmt: skip


def offloaded(units: Sequence[UnitBytes], offload: Offload) -> list[bool]:
    """Whose states are off the device under a given fraction; all of them where it is "auto"."""
    if offload.optimizer == "device":
        return [False] * len(units)
    fraction = 1.0 if offload.fraction == "auto" else float(offload.fraction)
    return last_share([unit.numel for unit in units], fraction)


def last_share(numels: Sequence[int], fraction: float) -> list[bool]:
    """The last units, up to `fraction` of all elements.

    The first units' gradients come last in backward and their weights are wanted first in forward,
    so they have the least time to hide a step on another tier (as SuperOffload, arXiv 2509.21271,
    keeps the buckets that backward fills last on the GPU).
    """
    wanted, taken = fraction * sum(numels), 0
    chosen = [False] * len(numels)
    for index in reversed(range(len(numels))):
        if fraction == 0 or taken + numels[index] / 2 > wanted:
            break
        chosen[index] = True
        taken += numels[index]
    return chosen


class _Replay:
    """The engine's bookkeeping without the engine."""

    def __init__(
        self, trace: Trace, setup: Setup, units: list[UnitBytes], chosen: list[bool]
    ) -> None:
        self._trace = trace
        self._setup = setup
        self._units = units
        self._chosen = chosen
        self._steps_early = setup.offload.step_in_backward and any(chosen)
        self.keeps_all = False
        self.timeline: list[Moment] = []
        self.peak: Moment | None = None
        self.peaks: dict[str, int] = {}
        self.most: Holding = {}
        self._highest = -1
        self._totals: Counter[str] = Counter()  # by tier
        self._held: Counter[tuple[str, str]] = Counter()
        self._whole: set[int] = set()
        self._partial: dict[int, dict[int, int]] = {}
        self._fired: dict[int, set[int]] = {}
        self._reduced: set[int] = set()
        self._reduced_alone: set[int] = set()  # in a world of one
        self._in_flight: int | None = None
        self._spare: Counter[int] = Counter()  # receive buffers by length, of the reduction before
        self._filling: Counter[int] = Counter()  # and of the one under way
        self._ready: set[int] = set()
        self._started: set[int] = set()
        self._order = [i for i in reversed(range(len(units))) if any(units[i].partials)]
        self._awaited = [sum(map(bool, unit.partials)) for unit in units]
        self._next: int | None = None
        self._phase = "forward"
        self._defers = False
        self.gather_sent = self.reduce_sent = 0
        self.resting: Holding = {}
        self._schedule = Schedule(list(range(len(units))))
        self._learn()
        self._rest()

    def _learn(self) -> None:
        """Have the schedule know the order of use, as after a first step."""
        entered = [event for event in self._trace.events if event.what in _PHASES]
        for phase in (Phase.FORWARD, Phase.BACKWARD):
            self._schedule.begin(phase)
            for event in entered:
                if _PHASES[event.what] is phase:
                    self._schedule.enter(event.unit, phase)

    # what is held

    def _add(self, kind: str, nbytes: int, tier: str = "device") -> None:
        place = (kind, tier)
        now = self._held[place] = self._held[place] + nbytes
        self._totals[tier] += nbytes
        if now > self.most.get(place, 0):
            self.most[place] = now

    def _rest(self) -> None:
        """What is there all the time, in the steady state."""
        offload = self._setup.offload
        self._add("batch", self._trace.batch_nbytes)
        self._add("buffer", self._trace.buffers_nbytes)
        for index, (unit, is_away) in enumerate(zip(self._units, self._chosen, strict=True)):
            self._add("weight", unit.weight, offload.parameters)
            tier = offload.optimizer if is_away else "device"
            self._add("master", unit.master, tier)
            self._add("optimizer", unit.moments, tier)
            if self._keeps_whole:
                self._gather(index)
            if self._keeps_grads and not is_away:
                self._reduced.add(index)
                self._add("grad", unit.grad)
        if "disk" in (offload.parameters, offload.optimizer):
            self._add("staging", self._staging(), "cpu")

    @property
    def _keeps_whole(self) -> bool:
        """Stages 1 and 2 keep what they gathered over the step (docs/adr/0006)."""
        return self._setup.stage in (1, 2) and self._setup.world_size > 1

    @property
    def _keeps_grads(self) -> bool:
        return self._setup.stage < 3 and self._setup.world_size > 1

    def _staging(self) -> int:
        """Slots of blocks, one a thread and one of who waits; rows are fetched into them too."""
        threads, block = NUM_DISK_STEPPERS + 1, BLOCK_NUMEL
        widest = max((unit.weight + unit.states) / max(1, unit.rest_numel) for unit in self._units)
        longest = max(unit.rest_numel for unit in self._units)
        slot = int(min(block, longest) * widest)
        rows = sorted(unit.weight for unit in self._units)[-NUM_FETCHERS:]
        return threads * slot + sum(max(0, nbytes - slot) for nbytes in rows)

    def _gather(self, index: int) -> None:
        if index not in self._whole:
            self._whole.add(index)
            self._add("unsharded", self._units[index].whole)
            if self._setup.rest_world > 1:
                self.gather_sent += self._units[index].gather_sent

    def _release(self, index: int) -> None:
        if index in self._whole and not self._keeps_whole:
            self._whole.remove(index)
            self._add("unsharded", -self._units[index].whole)

    # one step

    def step(self) -> None:
        """All micro-batches and the optimizer's step."""
        self.resting = dict(self._held)
        self.gather_sent = sum(u.gather_sent for u in self._units) if self._keeps_whole else 0
        for micro in range(self._setup.accumulate):
            is_last = micro + 1 == self._setup.accumulate
            self._defers = not is_last and self._setup.stage < 3
            self._micro_batch()
        self._phase = "step"
        block = STEP_BLOCK_NBYTES.get(self._setup.device_type, 0)
        widened = min(block, 4 * max(unit.rest_numel for unit in self._units))
        is_narrow = any(unit.master for unit in self._units)
        self._add("staging", widened if is_narrow else 0)
        self._see(-1, 0, 0)

    def _micro_batch(self) -> None:
        self._phase = "forward"
        self._fired = {}
        self._schedule.begin(Phase.FORWARD)
        unit = -1
        for event in self._trace.events:
            self._see(unit, event.peak, event.logits)
            before = self._totals["device"]
            self._apply(event)
            unit = event.unit if event.unit >= 0 else unit
            if self._totals["device"] > before:
                self._see(unit, event.now, min(event.logits, event.now))

    def _see(self, unit: int, torch_nbytes: int, logits: int) -> None:
        """What is held in one moment, with what torch holds."""
        for kind, nbytes in ((ACTIVATION, torch_nbytes - logits), (LOGITS, logits)):
            if nbytes > self.most.get((kind, "device"), 0):
                self.most[kind, "device"] = nbytes
        for tier, nbytes in self._totals.items():
            total = nbytes + (torch_nbytes if tier == "device" else 0)
            self.peaks[tier] = max(total, self.peaks.get(tier, 0))
        shared = self._totals["cpu"] if self._setup.device_type == "cpu" else 0
        highest = self._totals["device"] + torch_nbytes + shared
        if not self.keeps_all and highest <= self._highest:
            return
        held = {place: nbytes for place, nbytes in self._held.items() if nbytes}
        held |= {(ACTIVATION, "device"): torch_nbytes - logits} if torch_nbytes > logits else {}
        held |= {(LOGITS, "device"): logits} if logits else {}
        name = self._trace.units[unit].name if unit >= 0 else ""
        moment = Moment(self._phase, name, held)
        if self.keeps_all:
            self.timeline.append(moment)
        if highest > self._highest:
            self._highest, self.peak = highest, moment

    def _apply(self, event: Event) -> None:
        unit = event.unit
        match event.what:
            case What.ENTER:
                self._gather(unit)
                self._gather_ahead(self._schedule.enter(unit, Phase.FORWARD))
            case What.LEAVE:
                self._rest_after_forward([unit])
            case What.END_FORWARD:
                self._phase = "loss"
                self._rest_after_forward(list(self._whole))
            case What.BACKWARD | What.AGAIN:
                self._enter_backward(unit)
            case What.GRAD:
                self._on_grad(unit, event.member)
            case What.THROUGH:
                self._note_ready(unit)
                self._release(unit)
            case What.END:
                self._end_backward()

    def _rest_after_forward(self, units: list[int]) -> None:
        if self._setup.rests_after_forward:
            for unit in units:
                self._release(unit)

    def _gather_ahead(self, following: int | None) -> None:
        if following is not None:
            self._gather(following)

    def _enter_backward(self, unit: int) -> None:
        if self._phase != "backward":
            self._phase = "backward"
            self._schedule.begin(Phase.BACKWARD)
        self._gather(unit)
        following = self._schedule.enter(unit, Phase.BACKWARD)
        if self._setup.device_type == "cpu":
            self._next = following
        else:
            self._gather_ahead(following)

    def _on_grad(self, unit: int, member: int) -> None:
        following, self._next = self._next, None
        self._gather_ahead(following)
        held = self._partial.setdefault(unit, {})
        if member not in held:
            held[member] = self._units[unit].partials[member]
            self._add("partial_grad", held[member])
        fired = self._fired.setdefault(unit, set())
        fired.add(member)
        if len(fired) == self._awaited[unit]:
            self._note_ready(unit)

    # reductions

    def _note_ready(self, unit: int) -> None:
        if self._defers:
            return
        self._ready.add(unit)
        for due in self._order:
            if due in self._started:
                continue
            if due not in self._ready:
                return
            self._start(due)

    def _start(self, unit: int) -> None:
        self._land()  # on a fast link it is over earlier: this is the most there can be
        self._started.add(unit)
        sizes = self._units[unit]
        if unit not in self._reduced:
            self._reduced.add(unit)
            self._add("grad", sizes.grad if self._setup.world_size > 1 else 0)
        self._filling = Counter(sizes.received)
        self._add("wire", _sum(self._filling - self._spare))
        self._spare -= self._filling
        self._in_flight = unit
        self.reduce_sent += sizes.reduce_sent

    def _land(self) -> None:
        unit, self._in_flight = self._in_flight, None
        if unit is None:
            return
        self._add("partial_grad", -sum(self._partial.pop(unit, {}).values()))
        if self._setup.world_size == 1 and unit not in self._reduced_alone:
            self._reduced_alone.add(unit)
            self._add("grad", self._units[unit].grad)
        elif self._setup.stage == 0:
            self.gather_sent += self._units[unit].gather_sent
        self._add("wire", -_sum(self._spare))
        self._spare, self._filling = self._filling, Counter()
        if self._setup.device_type != "cpu":
            self._free_spare()
        if self._steps_early and self._chosen[unit]:
            self._add("grad", -self._units[unit].grad)
            self._reduced.discard(unit)

    def _end_backward(self) -> None:
        for index in list(self._whole):
            self._release(index)
        if not self._defers:
            for due in self._order:
                if due not in self._started:
                    self._start(due)
            self._land()
        self._free_spare()
        self._ready.clear()
        self._started.clear()

    def _free_spare(self) -> None:
        self._add("wire", -_sum(self._spare))
        self._spare = Counter()


def _sum(buffers: Counter[int]) -> int:
    """Bytes of all buffers, counted by length."""
    return sum(nbytes * count for nbytes, count in buffers.items())
