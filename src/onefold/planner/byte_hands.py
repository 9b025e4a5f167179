"""Executes a schedule's actions on byte counters: what engine/hands.py does to tensors."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping

from onefold.engine import blocks
from onefold.engine.actions import Action, Verb
from onefold.engine.policy import Policy, UnitFacts
from onefold.engine.schedule import Schedule
from onefold.planner.byte_counter import ByteCounter, KeptBuffers
from onefold.planner.trace import Event, Heard
from onefold.planner.traffic import PlannedUnit
from onefold.recipe import Recipe
from onefold.tier.step_device import NUM_STREAMS
from onefold.tier.workers import NUM_DISK_STEPPERS, NUM_FETCHERS

STEP_BLOCK_NBYTES = {"cpu": 512 * 1024 * 4, "cuda": 64 * 1024 * 1024 * 4}
"""Of one block of fp32 gradients, where narrow ones are widened (engine/blocked_adam.py)."""


def facts_of(unit: PlannedUnit, recipe: Recipe, *, is_far: bool) -> UnitFacts:
    """The facts that a schedule decides by. `is_far`: states of the unit are offloaded."""
    return UnitFacts(
        nbytes=unit.unsharded, is_resident=unit.unsharded == 0,
        is_offloaded=is_far or not recipe.rests_near,
    )  # fmt: skip


class ByteHands:
    """Counts the bytes that one rank holds and sends. `chosen`: units with offloaded states."""

    def __init__(
        self, recipe: Recipe, units: list[PlannedUnit], chosen: list[bool], held: ByteCounter
    ) -> None:
        self._recipe = recipe
        self._units = units
        self._chosen = chosen
        self._held = held
        self.sent: Counter[str] = Counter()
        self._whole: set[int] = set()
        self._partial: list[dict[int, int]] = [{} for _ in units]
        self._sums: set[int] = set()
        self._reduced: set[int] = set()
        self._gathers = {where: KeptBuffers(held, recipe.device_type) for where in ("", "between")}
        self._staged: dict[int, list[tuple[KeptBuffers, tuple[int, ...]]]] = {}  # by unit, underway
        self._first, self._second, self._third = (
            KeptBuffers(held, recipe.device_type) for _ in range(3)
        )
        self._is_hidden = False  # a reduction is over behind the recompute of a unit

    # resting state

    def rest(self, policy: Policy, batch_nbytes: int, buffers_nbytes: int) -> None:
        """Count the bytes that are there all the time, in the steady state."""
        recipe, offload, add = self._recipe, self._recipe.offload, self._held.add
        add("batch", batch_nbytes)
        add("buffer", buffers_nbytes)
        for index, (unit, is_away) in enumerate(zip(self._units, self._chosen, strict=True)):
            add("weight", unit.weight, offload.parameters)
            tier = offload.optimizer if is_away else "device"
            add("master", unit.master if is_away or unit.has_master else 0, tier)
            add("optimizer", unit.moments, tier)
            add("secondary", unit.second)
            add("feedback", unit.feedback)
            if policy.keeps_bytes:
                self._whole.add(index)
                add("unsharded", unit.unsharded)
            if policy.keeps_gradients and not is_away:
                self._make_grad(index)
        if "disk" in (offload.parameters, offload.optimizer):
            add("staging", self._staging(), "cpu")
        is_asked = offload.step == "device" or recipe.device_type != "cpu"
        if offload.may_stream and is_asked and any(self._chosen):
            add("staging", self._streamed())

    def _staging(self) -> int:
        """Slots of blocks, one a thread and one for the waiter; rows are fetched into them, too."""
        threads, block = NUM_DISK_STEPPERS + 1, blocks.BLOCK_NUMEL
        widest = max((unit.weight + unit.states) / max(1, unit.rest_numel) for unit in self._units)
        longest = max(unit.rest_numel for unit in self._units)
        slot = int(min(block, longest) * widest)
        rows = sorted(unit.weight for unit in self._units)[-NUM_FETCHERS:]
        return threads * slot + sum(max(0, nbytes - slot) for nbytes in rows)

    def _streamed(self) -> int:
        """Slots on the device, through which states in CPU memory pass."""
        near = self._recipe.offload.parameters == "device"
        away = [unit for unit, is_away in zip(self._units, self._chosen, strict=True) if is_away]
        slots = [
            min(blocks.BLOCK_NUMEL, unit.rest_numel)
            * (unit.states + (0 if near else unit.weight))
            // max(1, unit.rest_numel)
            for unit in away
        ]
        return NUM_STREAMS * max(slots)

    # one step

    def follow(self, event: Event, actions: list[Action], schedule: Schedule) -> None:
        """Count what torch held until `event`, then execute the actions that follow it."""
        held = self._held
        held.torch = (event.peak, event.logits)
        held.see()
        held.torch = (event.now, min(event.logits, event.now))
        if event.heard in _PHASES:
            held.phase = _PHASES[event.heard]
        if event.heard is Heard.GRAD:
            self._note_gradient(event, schedule)
        self.do(actions)
        if event.heard is Heard.AGAIN:
            # a link is not slower than half of a backward; a GPU's host is ahead of both
            self._is_hidden = self._recipe.device_type == "cpu"
        if event.unit >= 0:
            held.unit = self._units[event.unit].name

    def _note_gradient(self, event: Event, schedule: Schedule) -> None:
        if self._is_hidden and schedule.reductions.may_land is not None:
            self.do(schedule.landed())
        self._is_hidden = False
        partial, nbytes = self._partial[event.unit], self._units[event.unit].partials[event.call]
        if event.call not in partial:
            partial[event.call] = nbytes
            self._held.add("partial_grad", nbytes)

    def do(self, actions: list[Action]) -> None:
        """Execute actions in order; note each moment in which more is held than before."""
        before = self._held.on_device
        for verb, index in actions:
            hand = _HANDS.get(verb)
            if hand is not None:
                hand(self, index)
        if self._held.on_device > before:
            self._held.see()

    def step(self) -> None:
        """The optimizer's own step."""
        held, recipe = self._held, self._recipe
        held.phase, held.unit, held.torch = "step", "", (0, 0)
        block = STEP_BLOCK_NBYTES.get(recipe.device_type, 0)
        widened = min(block, 4 * max(unit.rest_numel for unit in self._units))
        held.add("staging", widened if any(unit.master for unit in self._units) else 0)
        held.see()

    # one verb each: weights

    def _fill(self, index: int) -> None:
        message = self._units[index].messages.cross
        self.sent["gather between"] += message.sent
        self._stage(index, "between", message.buffers)

    def _gather(self, index: int) -> None:
        unit = self._units[index]
        if index not in self._whole:
            self._whole.add(index)
            self._held.add("unsharded", unit.unsharded)
        if self._recipe.rest_world == 1:
            return
        if unit.second:  # it is read before the hop inside the node begins
            self._read(index)
        else:
            self._fill(index)
        self.sent["gather" + self._recipe.collective_suffix] += unit.messages.gather.sent
        self._stage(index, "", unit.messages.gather.buffers)

    def _stage(self, index: int, where: str, buffers: tuple[int, ...]) -> None:
        if buffers:
            kept = self._gathers[where]
            kept.take(buffers)
            self._staged.setdefault(index, []).append((kept, buffers))

    def _read(self, index: int) -> None:
        """Messages that were on their way to a unit are there, and decoded."""
        staged = self._staged.pop(index, [])
        if staged:
            self._held.see()
        for kept, buffers in staged:
            kept.give(buffers)

    def _free(self, index: int) -> None:
        self._read(index)
        self._whole.discard(index)
        self._held.add("unsharded", -self._units[index].unsharded)

    def _rest(self, _: int) -> None:
        for kept in (*self._gathers.values(), self._first, self._second, self._third):
            kept.clear()

    # gradients

    def _reduce(self, index: int) -> None:
        messages, recipe = self._units[index].messages, self._recipe
        if recipe.has_hops and index not in self._sums:
            self._sums.add(index)
            self._held.add("partial_grad", self._units[index].sums)
        elif not recipe.has_hops and recipe.world_size > 1:
            self._make_grad(index)
        self._first.take(messages.reduce.buffers)
        self.sent["reduce_scatter" + recipe.collective_suffix] += messages.reduce.sent
        self._held.see()

    def _land(self, index: int) -> None:
        partial = self._partial[index]
        self._held.add("partial_grad", -sum(partial.values()))
        partial.clear()
        self._first.give(self._units[index].messages.reduce.buffers)
        if self._recipe.world_size == 1:
            self._make_grad(index)

    def _follow(self, index: int) -> None:
        if self._recipe.has_hops:
            self._make_grad(index)
        second_hop = self._units[index].messages.second_hop
        self._second.take(second_hop.buffers)
        name = "reduce_scatter between" if self._recipe.is_sharded else "gather"
        self.sent[name] += second_hop.sent
        self._held.see()

    def _finish(self, index: int) -> None:
        messages = self._units[index].messages
        self._second.give(messages.second_hop.buffers)
        self.sent["gather between"] += messages.share.sent
        if messages.share.buffers:
            self._third.take(messages.share.buffers)
            self._held.see()
            self._third.give(messages.share.buffers)
        if index in self._sums:
            self._sums.remove(index)
            self._held.add("partial_grad", -self._units[index].sums)

    def _step(self, index: int) -> None:
        self._held.add("grad", -self._units[index].grad)
        self._reduced.discard(index)

    def _make_grad(self, index: int) -> None:
        if index not in self._reduced:
            self._reduced.add(index)
            self._held.add("grad", self._units[index].grad)


_PHASES = {
    Heard.ENTER: "forward", Heard.END_FORWARD: "loss", Heard.AGAIN: "backward",
    Heard.BACKWARD: "backward", Heard.GRAD: "backward",
}  # fmt: skip

_HANDS: Mapping[Verb, Callable[[ByteHands, int], None]] = {
    Verb.FILL: ByteHands._fill, Verb.GATHER: ByteHands._gather, Verb.SHOW: ByteHands._read,
    Verb.FREE: ByteHands._free, Verb.INVALIDATE: ByteHands._read, Verb.REDUCE: ByteHands._reduce,
    Verb.LAND: ByteHands._land, Verb.FOLLOW: ByteHands._follow, Verb.FINISH: ByteHands._finish,
    Verb.STEP: ByteHands._step, Verb.REST: ByteHands._rest,
}  # fmt: skip
