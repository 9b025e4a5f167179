"""What a rank will hold, moment by moment: the events of a trace under the rules of the engine.

`forecast` plays one optimizer step in its steady state, from `zero_grad` to `zero_grad`. What rests
is a closed form (planner/setup.py); whole weights, partial gradients and receive buffers come and
go as engine/engine.py and engine/reducer.py have them come and go; activations are the trace's.
The peak is the largest sum of all three at any moment.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from onefold.config import Offload
from onefold.engine import blocks
from onefold.engine.successors import Phase
from onefold.engine.successors import Successors as Schedule
from onefold.planner.byte_counter import ByteCounter, Holding, KeptBuffers, Moment
from onefold.planner.reductions import Reductions
from onefold.planner.setup import Setup, UnitBytes, unit_bytes
from onefold.planner.trace import Event, Trace, What
from onefold.tier.step_device import NUM_STREAMS
from onefold.tier.workers import NUM_DISK_STEPPERS, NUM_FETCHERS

LINKS = ("inside", "between")
STEP_BLOCK_NBYTES = {"cpu": 512 * 1024 * 4, "cuda": 64 * 1024 * 1024 * 4}
"""Of one block of fp32 gradients, where narrow ones are widened (engine/blocked_adam.py)."""

_PHASES = {
    What.ENTER: Phase.FORWARD, What.AGAIN: Phase.BACKWARD, What.BACKWARD: Phase.BACKWARD,
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Forecast:
    """What rank 0 will hold and send. Tiers are `device`, `cpu` and `disk`.

    `peak` is the moment at which the device (where it is the CPU: device and CPU memory, which are
    one) holds most; `peaks` the most by tier, `most` the most by kind and tier. `timeline` has
    every moment, if it was asked for. `sent`: bytes of a step by collective, named as a report
    names them: "gather", "reduce_scatter", and on two axes each "inside" and "between".
    """

    setup: Setup
    peak: Moment
    peaks: dict[str, int]
    most: Holding
    resting: Holding
    timeline: tuple[Moment, ...]
    sent: dict[str, int]

    @property
    def sent_nbytes(self) -> int:
        """Bytes that this rank sends in a step."""
        return sum(self.sent.values())

    @property
    def sent_by_link(self) -> dict[tuple[str, str], float]:
        """Bytes of a step ("inside" the node or "between" nodes, of "weights" or "gradients").

        On two axes these are counted by themselves; what replicas gather are means of gradients.
        On one axis every rank sends its pieces straight to all others, in whatever node; an
        all-gather of GPUs goes round in a ring instead.
        """
        setup, sent = self.setup, self.sent
        ranks, near = setup.world_size, min(setup.ranks_per_host, setup.world_size)
        far = (ranks - near) / max(1, ranks - 1) if not setup.where else 0.0
        found = {(link, what): 0.0 for link in LINKS for what in ("weights", "gradients")}
        for name, nbytes in sent.items():
            is_gather = name.startswith("gather")
            means = setup.stage == 0 or (setup.are_replicas and name.endswith("between"))
            what = "weights" if is_gather and not means else "gradients"
            is_ring = is_gather and setup.device_type != "cpu"
            share = float(name.endswith("between")) or far / (near if is_ring else 1)
            found["between", what] += share * nbytes
            found["inside", what] += (1 - share) * nbytes
        return found

    @property
    def between_nbytes(self) -> float:
        """Bytes of a step that leave the node."""
        return sum(n for (link, _), n in self.sent_by_link.items() if link == "between")

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
    held = replay.held
    held.keeps_all = has_timeline
    replay.step()
    assert held.peak is not None, "a step without a moment"
    return Forecast(
        setup, held.peak, held.peaks, held.most, replay.resting, tuple(held.timeline),
        {name: nbytes for name, nbytes in replay.sent.items() if nbytes},
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
    """The engine's bookkeeping of whole weights without the engine."""

    def __init__(
        self, trace: Trace, setup: Setup, units: list[UnitBytes], chosen: list[bool]
    ) -> None:
        self._trace = trace
        self._setup = setup
        self._units = units
        self._chosen = chosen
        self.held = ByteCounter(setup.device_type)
        self.sent: Counter[str] = Counter()
        early = setup.offload.step_in_backward
        self._reductions = Reductions(
            setup, units, self.held, self.sent, [early and each for each in chosen]
        )
        self._whole: set[int] = set()
        self._unread: set[int] = set()  # whole, of weights that have been stepped since
        self._uncrossed: set[int] = set()  # the second shard is of weights from before the step
        self._gathers = {
            where: KeptBuffers(self.held, setup.device_type) for where in ("", "between")
        }
        self._staged: dict[
            int, list[tuple[KeptBuffers, tuple[int, ...]]]
        ] = {}  # by unit, on their way
        self._next: int | None = None
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

    def _rest(self) -> None:
        """What is there all the time, in the steady state."""
        offload, add = self._setup.offload, self.held.add
        add("batch", self._trace.batch_nbytes)
        add("buffer", self._trace.buffers_nbytes)
        for index, (unit, is_away) in enumerate(zip(self._units, self._chosen, strict=True)):
            add("weight", unit.weight, offload.parameters)
            tier = offload.optimizer if is_away else "device"
            add("master", unit.master if is_away or unit.has_master else 0, tier)
            add("optimizer", unit.moments, tier)
            add("secondary", unit.second)
            add("feedback", unit.feedback)
            if self._keeps_whole:
                self._whole.add(index)
                add("unsharded", unit.whole)
            if self._keeps_grads and not is_away:
                self._reductions.keep(index)
        if "disk" in (offload.parameters, offload.optimizer):
            add("staging", self._staging(), "cpu")
        is_asked = offload.step == "device" or self._setup.device_type != "cpu"
        if offload.may_stream and is_asked and any(self._chosen):
            add("staging", self._streamed())

    @property
    def _keeps_whole(self) -> bool:
        """Stages 1 and 2 keep what they gathered over the step (docs/adr/0006)."""
        return self._setup.stage in (1, 2) and self._setup.world_size > 1

    @property
    def _keeps_grads(self) -> bool:
        return self._setup.stage < 3 and self._setup.world_size > 1

    def _staging(self) -> int:
        """Slots of blocks, one a thread and one of who waits; rows are fetched into them too."""
        threads, block = NUM_DISK_STEPPERS + 1, blocks.BLOCK_NUMEL
        widest = max((unit.weight + unit.states) / max(1, unit.rest_numel) for unit in self._units)
        longest = max(unit.rest_numel for unit in self._units)
        slot = int(min(block, longest) * widest)
        rows = sorted(unit.weight for unit in self._units)[-NUM_FETCHERS:]
        return threads * slot + sum(max(0, nbytes - slot) for nbytes in rows)

    def _streamed(self) -> int:
        """Slots on the device, through which states in CPU memory pass."""
        near = self._setup.offload.parameters == "device"
        away = [unit for unit, is_away in zip(self._units, self._chosen, strict=True) if is_away]
        rooms = [
            min(blocks.BLOCK_NUMEL, unit.rest_numel)
            * (unit.states + (0 if near else unit.weight))
            // max(1, unit.rest_numel)
            for unit in away
        ]
        return NUM_STREAMS * max(rooms)

    def _gather(self, index: int) -> None:
        if index in self._whole and index not in self._unread:
            return
        if index not in self._whole:
            self._whole.add(index)
            self.held.add("unsharded", self._units[index].whole)
        self._unread.discard(index)
        if self._setup.rest_world == 1:
            return
        unit = self._units[index]
        if not unit.second or index in self._uncrossed:
            self._cross(index)
        if unit.second:  # it is read before the hop inside begins
            self._read(index)
        self.sent["gather" + self._setup.where] += unit.messages.gather.sent
        self._stage(index, "", unit.messages.gather.buffers)

    def _cross(self, index: int) -> None:
        """The hop of weights between nodes, where there is one."""
        message = self._units[index].messages.cross
        self._uncrossed.discard(index)
        self.sent["gather between"] += message.sent
        self._stage(index, "between", message.buffers)

    def _cross_early(self) -> None:
        """As forward begins, for all units that nobody steps in the background."""
        near = ("device", "cpu") if self._setup.device_type == "cpu" else ("device",)
        for index in sorted(self._uncrossed):
            if not self._chosen[index] and self._setup.offload.parameters in near:
                self._cross(index)

    def _stage(self, index: int, where: str, buffers: tuple[int, ...]) -> None:
        if buffers:
            kept = self._gathers[where]
            kept.take(buffers)
            self._staged.setdefault(index, []).append((kept, buffers))

    def _read(self, index: int) -> None:
        """What was on its way to a unit is there, and decoded."""
        staged = self._staged.pop(index, [])
        if staged:
            self.held.see()
        for kept, buffers in staged:
            kept.give(buffers)

    def _release(self, index: int) -> None:
        self._read(index)
        if index in self._whole and not self._keeps_whole:
            self._whole.remove(index)
            self.held.add("unsharded", -self._units[index].whole)

    # one step

    def step(self) -> None:
        """All micro-batches and the optimizer's step."""
        held, setup = self.held, self._setup
        self.resting = held.now
        self._unread = set(self._whole)
        self._uncrossed = {index for index, unit in enumerate(self._units) if unit.second}
        for micro in range(setup.accumulate):
            self._reductions.is_last = micro + 1 == setup.accumulate
            self._micro_batch()
        held.phase, held.unit, held.torch = "step", "", (0, 0)
        block = STEP_BLOCK_NBYTES.get(setup.device_type, 0)
        widened = min(block, 4 * max(unit.rest_numel for unit in self._units))
        is_narrow = any(unit.master for unit in self._units)
        held.add("staging", widened if is_narrow else 0)
        held.see()

    def _micro_batch(self) -> None:
        held = self.held
        held.phase, held.unit, held.torch = "forward", "", (0, 0)
        self._reductions.begin()
        self._cross_early()
        self._schedule.begin(Phase.FORWARD)
        for event in self._trace.events:
            held.torch = (event.peak, event.logits)
            held.see()
            before = held.on_device
            held.torch = (event.now, min(event.logits, event.now))
            self._apply(event)
            held.unit = self._trace.units[event.unit].name if event.unit >= 0 else held.unit
            if held.on_device > before:
                held.see()

    def _apply(self, event: Event) -> None:
        unit = event.unit
        match event.what:
            case What.ENTER:
                self._gather(unit)
                self._gather_ahead(self._schedule.enter(unit, Phase.FORWARD))
                self._read(unit)
            case What.LEAVE:
                self._rest_after_forward([unit])
            case What.END_FORWARD:
                self.held.phase = "loss"
                self._rest_after_forward(list(self._whole))
            case What.BACKWARD | What.AGAIN:
                self._enter_backward(unit, is_again=event.what is What.AGAIN)
            case What.GRAD:
                following, self._next = self._next, None
                self._gather_ahead(following)
                self._reductions.on_grad(unit, event.member)
            case What.THROUGH:
                self._reductions.note_ready(unit)
                self._release(unit)
            case What.END:
                for index in list(self._whole):
                    self._release(index)
                self._reductions.end_backward()
                for kept in self._gathers.values():
                    kept.clear()

    def _rest_after_forward(self, units: list[int]) -> None:
        if self._setup.rests_after_forward:
            for unit in units:
                self._release(unit)

    def _gather_ahead(self, following: int | None) -> None:
        if following is not None:
            self._gather(following)

    def _enter_backward(self, unit: int, *, is_again: bool) -> None:
        if is_again:
            self._reductions.note_recompute()
        if self.held.phase != "backward":
            self.held.phase = "backward"
            self._schedule.begin(Phase.BACKWARD)
        self._gather(unit)
        following = self._schedule.enter(unit, Phase.BACKWARD)
        if self._setup.device_type == "cpu":
            self._next = following
        else:
            self._gather_ahead(following)
        self._read(unit)
