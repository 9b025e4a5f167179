"""Execute a schedule's actions on byte counters, as engine/executor.py does: see docs/adr/0020."""

from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from onefold.engine import blocked_adam, blocks
from onefold.engine.driving import Action
from onefold.engine.policy import Policy
from onefold.layout.ledger import padding_of
from onefold.planner.action_executor import ActionExecutor
from onefold.planner.message_counts import PlannedMessage, PlannedUnit
from onefold.planner.row_slots import RowSlots
from onefold.planner.work import Event, EventKind
from onefold.recipe import Recipe
from onefold.tier.step_device import NUM_STREAMS
from onefold.tier.store import whole_pages
from onefold.tier.workers import NUM_DISK_SLOTS
from onefold.wire.exchange import SpareBuffers

Holding = dict[tuple[str, str], int]
"""Bytes by (kind, tier); kinds are those of `onefold.layout.ledger.Kind`, and `logits`."""

ACTIVATION, LOGITS = "activation", "logits"


@dataclass(frozen=True, slots=True)
class Moment:
    """The bytes of one moment of a step."""

    phase: str  # forward, loss, backward or step
    unit: str
    held: Holding

    def by_kind(self, device_type: str) -> Counter[str]:
        """Return the bytes in the memory that computes: the CPU's holds its own tier too."""
        tiers, kinds = ("device", "cpu") if device_type == "cpu" else ("device",), Counter[str]()
        for (kind, tier), nbytes in self.held.items():
            kinds[kind] += nbytes * (tier in tiers)
        return kinds

    def memory_nbytes(self, device_type: str) -> int:
        """Return the sum of all kinds."""
        return self.by_kind(device_type).total()


class ByteCounter:
    """The bytes of now; the most of each kind, of each tier, and of all at a time."""

    def __init__(self, device_type: str, *, has_timeline: bool = False) -> None:
        self.timeline: list[Moment] = []
        self.peak = Moment("", "", {})
        self.peaks: dict[str, int] = {}
        self.most: Holding = {}
        self._phase, self._unit = "forward", ""
        self._torch: tuple[int, int] = (0, 0)  # activations, and how much of them is logits
        self._has_timeline = has_timeline
        self._shares_memory = device_type == "cpu"
        self._highest = -1
        self._totals: Counter[str] = Counter()  # by tier
        self._now: Counter[tuple[str, str]] = Counter()

    @property
    def on_device(self) -> int:
        """Bytes on the device, without activations."""
        return self._totals["device"]

    @property
    def now(self) -> Holding:
        """Bytes by kind and tier, without activations."""
        return {place: nbytes for place, nbytes in self._now.items() if nbytes}

    def add(self, kind: str, nbytes: int, tier: str = "device") -> None:
        """Hold `nbytes` more (negative: less) of a kind."""
        place = (kind, tier)
        now = self._now[place] = self._now[place] + nbytes
        self._totals[tier] += nbytes
        if now > self.most.get(place, 0):
            self.most[place] = now

    def enter(self, phase: str | None = None, unit: str | None = None) -> None:
        """Moments belong to this phase and unit from now on; None: as before."""
        self._phase = self._phase if phase is None else phase
        self._unit = self._unit if unit is None else unit

    def note_torch(self, activations: int, logits: int) -> None:
        """Torch holds so many bytes now; `logits` of them are the model's outputs."""
        self._torch = activations, logits

    def see(self) -> None:
        """Note this moment."""
        activations, logits = self._torch
        for kind, nbytes in ((ACTIVATION, activations - logits), (LOGITS, logits)):
            if nbytes > self.most.get((kind, "device"), 0):
                self.most[kind, "device"] = nbytes
        for tier, nbytes in self._totals.items():
            total = nbytes + (activations if tier == "device" else 0)
            self.peaks[tier] = max(total, self.peaks.get(tier, 0))
        shared = self._totals["cpu"] if self._shares_memory else 0
        highest = self._totals["device"] + activations + shared
        if not self._has_timeline and highest <= self._highest:
            return
        held = self.now
        held |= {(ACTIVATION, "device"): activations - logits} if activations > logits else {}
        held |= {(LOGITS, "device"): logits} if logits else {}
        moment = Moment(self._phase, self._unit, held)
        if self._has_timeline:
            self.timeline.append(moment)
        if highest > self._highest:
            self._highest, self.peak = highest, moment


# the executor


class ByteExecutor(ActionExecutor):
    """Counts the bytes that one rank holds and sends. `is_far`: units with offloaded states."""

    def __init__(
        self, recipe: Recipe, units: list[PlannedUnit], is_far: Sequence[bool], counter: ByteCounter
    ) -> None:
        self._recipe = recipe
        self._units = units
        self._is_far = is_far
        self._counter = counter
        self.rows = RowSlots(recipe, counter.add)
        self.sent: Counter[str] = Counter()
        self._unsharded: set[int] = set()
        self._decoded: set[int] = set()
        self._partial: list[dict[int, int]] = [{} for _ in units]
        self._sums: set[int] = set()
        self._reduced: set[int] = set()
        self._resting_grads = frozenset[int]()
        # by ranks and link, of gathers and of the three hops of a reduction
        self._spares = defaultdict[tuple[int, str], SpareBuffers[None]](
            lambda: SpareBuffers[None](lambda nbytes: counter.add("wire", nbytes))
        )
        # by unit: gathers under way
        self._staged = defaultdict[int, list[tuple[str, tuple[int, ...]]]](list)
        self._hides_reduction = False  # a reduction ends behind the recompute of a unit

    # resting state

    def rest(self, policy: Policy, batch_nbytes: int, buffers_nbytes: int) -> None:
        """Count the bytes that rest from step to step."""
        recipe, offload, add = self._recipe, self._recipe.offload, self._counter.add
        add("batch", batch_nbytes)
        add("buffer", buffers_nbytes)
        for index, (unit, is_away) in enumerate(zip(self._units, self._is_far, strict=True)):
            add("weight", unit.weight, offload.parameters)
            tier = offload.optimizer if is_away else "device"
            add("master", unit.master if is_away or unit.has_master else 0, tier)
            add("optimizer", unit.moments, tier)
            add("secondary", unit.second)
            add("feedback", unit.feedback)
            if policy.keeps_bytes:
                self._unsharded.add(index)
                add("unsharded", unit.unsharded)
            if policy.keeps_gradients and not is_away:
                self._make_grad(index)
        self._resting_grads = frozenset(self._reduced)
        if "disk" in (offload.parameters, offload.optimizer):
            add("staging", self._staging(), "cpu")
        is_requested = offload.step == "device" or recipe.device_type != "cpu"
        if offload.may_stream and is_requested and any(self._is_far):
            add("staging", self._streamed())

    def _staging(self) -> int:
        """Slots of blocks on disk, which the engine takes at once.

        All are as long as the longest: a short block takes a long slot where no other is free.
        """
        units = zip(self._units, self._is_far, strict=True)
        slots = [nbytes for unit, is_away in units for nbytes in self._slots(unit, is_away)]
        return min(NUM_DISK_SLOTS, len(slots)) * max(slots, default=0)

    def _slots(self, unit: PlannedUnit, is_away: bool) -> list[int]:
        """Return the bytes of the slots in which blocks of a unit with files are stepped."""
        recipe, numel = self._recipe, unit.rest_numel
        weights, moments = recipe.offload.parameters, recipe.num_moments
        states = recipe.offload.optimizer if is_away else "device"
        if not (unit.grad and "disk" in (weights, states)):
            return []
        near = ("device", "cpu") if recipe.device_type == "cpu" else ("cpu",)  # stepped in place
        held = [(weights, unit.weight), ("device", unit.grad)]
        held += [(states, unit.master if is_away or unit.has_master else 0)]
        held += [(states, unit.moments // max(1, moments))] * moments
        staged = [nbytes for tier, nbytes in held if tier not in near]
        return [
            sum(whole_pages(n * nbytes // numel) for nbytes in staged)
            for n in blocks.block_numels(numel, blocks.BLOCK_NUMEL)
        ]

    def _streamed(self) -> int:
        """Slots on the device, through which states in CPU memory pass."""
        near = self._recipe.offload.parameters == "device"
        away = [unit for unit, is_away in zip(self._units, self._is_far, strict=True) if is_away]
        is_queued = self._recipe.device_type != "cpu"
        slots = [
            min(blocks.block_numel(unit.rest_numel, is_queued=is_queued), unit.rest_numel)
            * (unit.states + (0 if near else unit.weight))
            // max(1, unit.rest_numel)
            for unit in away
        ]
        return NUM_STREAMS * max(slots)

    # one step

    def reach(self, event: Event) -> None:
        """Count the activations until `event`."""
        counter = self._counter
        counter.note_torch(event.peak, event.logits)
        counter.see()
        counter.note_torch(event.now, min(event.logits, event.now))
        counter.enter(_PHASES.get(event.kind))

    def has_landed(self, unit: int) -> bool:
        """Return True after a recompute: the reduction before it is over by then.

        A link is not slower than half of a backward. A GPU's host is ahead of both. One rank sends
        no message.
        """
        return self._hides_reduction or self._recipe.world_size == 1

    def follow(self, event: Event, actions: Iterable[Action]) -> None:
        """Execute the actions that answer the event."""
        if event.kind is EventKind.GRAD:
            self._hides_reduction = False
            partial, nbytes = self._partial[event.unit], self._units[event.unit].partials
            if event.call not in partial:
                partial[event.call] = nbytes[event.call]
                self._counter.add("partial_grad", nbytes[event.call])
                self._counter.see()  # a reduction may land before the next one begins
        self.do(actions)
        if event.kind is EventKind.AGAIN:
            self._hides_reduction = self._recipe.device_type == "cpu"
        if event.unit >= 0:
            self._counter.enter(unit=self._units[event.unit].name)

    def do(self, actions: Iterable[Action]) -> None:
        """Execute actions in order; note each moment in which more is held than before."""
        before = self._counter.on_device
        super().do(actions)
        if self._counter.on_device > before:
            self._counter.see()

    def step(self) -> None:
        """The optimizer steps the states on the device."""
        counter, recipe = self._counter, self._recipe
        counter.enter("step", "")
        counter.note_torch(0, 0)
        self.rows.give_all()
        block = blocked_adam.block_numel(recipe.device_type)
        widened = (  # to fp32
            4 * min(block, unit.rest_numel)
            for unit in self._units
            if unit.has_master and blocked_adam.widens(unit.dtype, recipe.device_type)
        )
        counter.add("staging", max(widened, default=0))
        counter.see()

    def show(self, nbytes: int, shows_grads: bool) -> None:
        """The user looks at unsharded parameters, in buffers of `nbytes` of their own."""
        self._counter.enter("unsharded", "")
        for index in () if shows_grads else self._reduced - self._resting_grads:
            self._step(index)  # it was cleared
        self._counter.add("unsharded", nbytes)
        for index, unit in enumerate(self._units):
            self.begin_message(index, "gather", unit.messages.gather.buffers)
            self._counter.see()
            self.give(index, "gather", unit.messages.gather.buffers)

    # buffers of messages

    def begin_message(self, index: int, link: str, buffers: tuple[int, ...]) -> None:
        """Begin a message of a unit."""
        spares = self._spares[self._units[index].data_ranks, link]
        for nbytes in buffers:
            spares.take_spare(nbytes, nbytes, lambda: None)

    def give(self, index: int, link: str, buffers: tuple[int, ...]) -> None:
        """The message has been read."""
        spares = self._spares[self._units[index].data_ranks, link]
        if buffers:
            spares.clear()
        for nbytes in buffers:
            keeps = self._recipe.device_type == "cpu"
            spares.give(nbytes, nbytes, None, keeps=keeps)

    def _send(self, collective: str, message: PlannedMessage) -> None:
        self.sent[collective] += message.sent
        if message.padding:
            self.sent[padding_of(collective)] += message.padding

    # one verb each: weights

    def _fill(self, index: int) -> None:
        message = self._units[index].messages.cross
        self._send("gather between", message)
        self._stage(index, "gather between", message.buffers)

    def _fetch(self, index: int) -> None:
        self.rows.fetch(index, self._units[index].weight)

    def _gather(self, index: int) -> None:
        unit = self._units[index]
        self._fetch(index)
        if self._recipe.device_type == "cpu":  # else once they have crossed to the device
            self.rows.give(index)
        if index not in self._unsharded:
            self._unsharded.add(index)
            self._counter.add("unsharded", unit.unsharded)
        if self._recipe.rest_world == 1:
            return
        if unit.second:  # it is read before the hop inside the node begins
            self._decode_staged(index)
        else:
            self._fill(index)
        self._send("gather" + self._recipe.gather_suffix, unit.messages.gather)
        self._stage(index, "gather", unit.messages.gather.buffers)

    def _stage(self, index: int, link: str, buffers: tuple[int, ...]) -> None:
        if buffers:
            self.begin_message(index, link, buffers)
            self._staged[index].append((link, buffers))

    def _decode_staged(self, index: int) -> None:
        """The messages of a unit have arrived and are decoded."""
        staged = self._staged.pop(index, [])
        if staged:
            self._counter.see()
        for link, buffers in staged:
            self.give(index, link, buffers)

    def _show(self, index: int) -> None:
        self.rows.give(index)
        self._decode_staged(index)
        if index not in self._decoded:
            self._decoded.add(index)
            self._counter.add("unsharded", self._units[index].decoded)

    def _invalidate(self, index: int) -> None:
        self._decode_staged(index)
        if index in self._decoded:
            self._decoded.discard(index)
            self._counter.add("unsharded", -self._units[index].decoded)

    def _free(self, index: int) -> None:
        self._invalidate(index)
        self._unsharded.discard(index)
        self._counter.add("unsharded", -self._units[index].unsharded)

    def _rest(self, index: int) -> None:
        for spare in self._spares.values():
            spare.clear()

    # gradients

    def _reduce(self, index: int) -> None:
        messages, recipe = self._units[index].messages, self._recipe
        if recipe.reduces_in_hops and index not in self._sums:
            self._sums.add(index)
            self._counter.add("partial_grad", self._units[index].sums)
        elif not recipe.reduces_in_hops and recipe.world_size > 1:
            self._make_grad(index)
        self.begin_message(index, "first", messages.reduce.buffers)
        self._send("reduce_scatter" + recipe.reduce_suffix, messages.reduce)
        self._counter.see()

    def _land(self, index: int) -> None:
        partial, unit = self._partial[index], self._units[index]
        is_alone = self._recipe.world_size == 1
        if is_alone and unit.has_rows:
            self._make_grad(index)
            self._counter.see()
        self._counter.add("partial_grad", -sum(partial.values()))
        partial.clear()
        self.give(index, "first", unit.messages.reduce.buffers)
        if is_alone and not unit.has_rows:
            self._make_grad(index)

    def _follow(self, index: int) -> None:
        recipe = self._recipe
        if recipe.reduces_in_hops:
            self._make_grad(index)
        second_hop = self._units[index].messages.second_hop
        self.begin_message(index, "second", second_hop.buffers)
        crosses = recipe.reduces_in_hops or recipe.are_replicas
        name = "reduce_scatter between" if crosses else "gather"
        self._send(name, second_hop)
        self._counter.see()

    def _finish(self, index: int) -> None:
        messages = self._units[index].messages
        self.give(index, "second", messages.second_hop.buffers)
        name = "gather between" if self._recipe.is_sharded else "gather"
        self._send(name, messages.share)
        if messages.share.buffers:
            self.begin_message(index, "third", messages.share.buffers)
            self._counter.see()
            self.give(index, "third", messages.share.buffers)
        if index in self._sums:
            self._sums.remove(index)
            self._counter.add("partial_grad", -self._units[index].sums)

    def _step(self, index: int) -> None:
        self._counter.add("grad", -self._units[index].grad)
        self._reduced.discard(index)

    def _make_grad(self, index: int) -> None:
        if index not in self._reduced:
            self._reduced.add(index)
            self._counter.add("grad", self._units[index].grad)


_PHASES = {
    EventKind.ENTER: "forward", EventKind.END_FORWARD: "loss", EventKind.AGAIN: "backward",
    EventKind.BACKWARD: "backward", EventKind.GRAD: "backward",
}  # fmt: skip
