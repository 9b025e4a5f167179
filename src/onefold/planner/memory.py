"""What a rank will hold, moment by moment: the events of a trace under the rules of the engine.

`forecast` plays one optimizer step in its steady state, from `zero_grad` to `zero_grad`. What rests
is a closed form (planner/setup.py); whole weights, partial gradients and receive buffers come and go
as runtime/engine.py and runtime/reducer.py have them come and go; activations are the trace's. The
peak is the largest sum of all three at any moment.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from onefold.config import Offload
from onefold.offloading import NUM_DISK_STEPPERS, NUM_FETCHERS
from onefold.planner.setup import Setup, UnitBytes, unit_bytes
from onefold.planner.trace import Event, Trace, What
from onefold.runtime.blocks import BLOCK_NUMEL
from onefold.runtime.schedule import Phase, Schedule

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

    def nbytes(self, tier: str | None = None) -> int:
        """Bytes in one tier, or in all."""
        return sum(n for (_, place), n in self.held.items() if tier in (None, place))


@dataclass(frozen=True, slots=True)
class Forecast:
    """What rank 0 will hold and send. Tiers are `device`, `cpu` and `disk`."""

    setup: Setup
    moments: tuple[Moment, ...]
    gather_sent: int  # bytes per optimizer step
    reduce_sent: int

    @property
    def peak(self) -> Moment:
        """The moment at which the device holds most."""
        return max(self.moments, key=lambda moment: moment.nbytes("device"))

    def peak_nbytes(self, tier: str = "device") -> int:
        """The most that a tier holds at a time."""
        return max(moment.nbytes(tier) for moment in self.moments)

    @property
    def memory_nbytes(self) -> int:
        """The most that device and CPU memory hold together: where the CPU computes they are one."""
        return max(moment.nbytes("device") + moment.nbytes("cpu") for moment in self.moments)

    def peak_of(self, kind: str, tier: str | None = None) -> int:
        """The most of one kind at a time."""
        return max(
            sum(n for (k, t), n in moment.held.items() if k == kind and tier in (None, t))
            for moment in self.moments
        )


def forecast(trace: Trace, setup: Setup, chosen: Sequence[bool] | None = None) -> Forecast:
    """Play one step of `trace`; `chosen`: which units' states are offloaded (default: by fraction).
    """
    units = [unit_bytes(unit, setup) for unit in trace.units]
    if chosen is None:
        chosen = offloaded(units, setup.offload)
    replay = _Replay(trace, setup, units, list(chosen))
    moments = tuple(replay.step())
    return Forecast(setup, moments, replay.gather_sent, replay.reduce_sent)


def offloaded(units: Sequence[UnitBytes], offload: Offload) -> list[bool]:
    """As `offloading.offloaded_units`: the last units, up to the fraction of all elements."""
    chosen = [False] * len(units)
    if offload.optimizer == "device" or offload.fraction == "auto":
        return [offload.optimizer != "device"] * len(units)
    wanted, taken = float(offload.fraction) * sum(unit.numel for unit in units), 0
    for index in reversed(range(len(units))):
        if offload.fraction == 0 or taken + units[index].numel / 2 > wanted:
            break
        chosen[index] = True
        taken += units[index].numel
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
        self._held: Counter[tuple[str, str]] = Counter()
        self._whole: set[int] = set()
        self._partial: dict[int, dict[int, int]] = {}
        self._fired: dict[int, set[int]] = {}
        self._reduced: set[int] = set()
        self._reduced_alone: set[int] = set()  # in a world of one
        self._in_flight: int | None = None
        self._received = 0
        self._ready: set[int] = set()
        self._started: set[int] = set()
        self._order = [i for i in reversed(range(len(units))) if any(units[i].partials)]
        self._awaited = [sum(map(bool, unit.partials)) for unit in units]
        self._next: int | None = None
        self._phase = "forward"
        self._defers = False
        self.gather_sent = self.reduce_sent = 0
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
        self._held[kind, tier] += nbytes

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
        """Slots of blocks, one a thread, and of the own rows of the units that are fetched."""
        threads, block = NUM_DISK_STEPPERS, BLOCK_NUMEL
        widest = max((unit.weight + unit.states) / max(1, unit.rest_numel) for unit in self._units)
        rows = sorted(unit.weight for unit in self._units)[-NUM_FETCHERS:]
        is_far = self._setup.offload.parameters == "disk"
        longest = max(unit.rest_numel for unit in self._units)
        return int(threads * min(block, longest) * widest) + (sum(rows) if is_far else 0)

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

    def step(self) -> Iterator[Moment]:
        """Moments of all micro-batches and of the optimizer's step."""
        self.gather_sent = sum(u.gather_sent for u in self._units) if self._keeps_whole else 0
        for micro in range(self._setup.accumulate):
            is_last = micro + 1 == self._setup.accumulate
            self._defers = not is_last and self._setup.stage < 3
            yield from self._micro_batch()
        if self._setup.precision.master.itemsize and any(unit.master for unit in self._units):
            self._add("staging", STEP_BLOCK_NBYTES.get(self._setup.device_type, 0))
        self._phase = "step"
        yield self._moment(-1, 0, 0)
        if any(unit.master for unit in self._units):
            self._add("staging", -STEP_BLOCK_NBYTES.get(self._setup.device_type, 0))

    def _micro_batch(self) -> Iterator[Moment]:
        self._phase = "forward"
        self._fired = {}
        self._schedule.begin(Phase.FORWARD)
        unit = -1
        for event in self._trace.events:
            yield self._moment(unit, event.peak, event.logits)
            before = sum(self._held.values())
            self._apply(event)
            unit = event.unit if event.unit >= 0 else unit
            if sum(self._held.values()) > before:
                yield self._moment(unit, event.now, min(event.logits, event.now))

    def _moment(self, unit: int, torch_nbytes: int, logits: int) -> Moment:
        held = {place: nbytes for place, nbytes in self._held.items() if nbytes}
        if torch_nbytes > logits:
            held[ACTIVATION, "device"] = torch_nbytes - logits
        if logits:
            held[LOGITS, "device"] = logits
        name = self._trace.units[unit].name if unit >= 0 else ""
        return Moment(self._phase, name, held)

    def _apply(self, event: Event) -> None:
        what, unit = event.what, event.unit
        if what is What.ENTER:
            self._gather(unit)
            self._gather_ahead(self._schedule.enter(unit, Phase.FORWARD))
        elif what is What.LEAVE:
            if self._setup.rests_after_forward:
                self._release(unit)
        elif what is What.END_FORWARD:
            self._phase = "loss"
            if self._setup.rests_after_forward:
                for index in list(self._whole):
                    self._release(index)
        elif what in (What.BACKWARD, What.AGAIN):
            self._enter_backward(unit)
        elif what is What.GRAD:
            self._on_grad(unit, event.member)
        elif what is What.THROUGH:
            self._note_ready(unit)
            if not self._keeps_whole and self._setup.stage != 0:
                self._release(unit)
        else:
            self._end_backward()

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
        self._poll()
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
        self._land()
        self._started.add(unit)
        sizes = self._units[unit]
        if unit not in self._reduced:
            self._reduced.add(unit)
            self._add("grad", sizes.grad if self._setup.world_size > 1 else 0)
        self._add("wire", sizes.received - self._received)
        self._received = sizes.received
        self._in_flight = unit
        self.reduce_sent += sizes.reduce_sent

    def _poll(self) -> None:
        """A reduction is over once backward has gone on for a while."""
        if self._setup.stage > 0 or self._setup.world_size == 1:
            self._land()

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
        if self._setup.device_type != "cpu":
            self._add("wire", -self._received)
            self._received = 0
        if self._steps_early and self._chosen[unit]:
            self._add("grad", -self._units[unit].grad)
            self._reduced.discard(unit)

    def _end_backward(self) -> None:
        for index in list(self._whole):
            if not self._keeps_whole and self._setup.stage != 0:
                self._release(index)
        if not self._defers:
            for due in self._order:
                if due not in self._started:
                    self._start(due)
            self._land()
        self._add("wire", -self._received)
        self._received = 0
        self._ready.clear()
        self._started.clear()
