"""Stepping one unit in blocks, in the background: state comes near, is stepped, and goes back.

A block is a range of the unit's shard, over everything that rests there: weight, master, moments.
Workers take blocks one after the other, each with a slot of near memory of its own: while one
fetches, another steps and a third flushes. What rests near is stepped where it is
(tier/step_device.py). Whoever needs the unit does what is left of it (tier/workers.py), so the
order is that of use.

Blocks are multiples of every kernel's vector width, so the bits are those of one step over all
(ZeRO-Offload, arXiv 2101.06840, section 4; ZeRO-Infinity, arXiv 2104.07857, section 5).
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from onefold.engine.rules import Rule
from onefold.errors import TierError, expected
from onefold.observer import Observer, Stream, watched
from onefold.tier.slots import Room
from onefold.tier.step_device import StepDevice
from onefold.tier.store import whole_pages
from onefold.tier.workers import Task, one_thread
from onefold.unit.buffer import Buffer
from onefold.unit.unit import Unit

State = dict[str, Any]

BLOCK_NUMEL = 1024 * 1024
"""Elements of a block: 4 MiB requests in fp32, which reach the disk's rate with few at a time."""


@dataclass(slots=True, eq=False)
class Segment:
    """A stretch of a unit's shard that one rule steps by one gradient."""

    start: int  # in the shard
    grad: Tensor  # [numel], flat
    rule: Rule
    moments: tuple[str, ...]  # names of the states that have an element for each of the weight's
    state: State  # all states; those that are one number are updated here
    is_new: bool  # stepped for the first time: the rule makes the states
    owner: Buffer | None  # of the gradient's bytes, to be counted until the step is over
    before: State = field(default_factory=dict)

    @property
    def stop(self) -> int:
        return self.start + len(self.grad)


class UnitStep:
    """The step of one unit, cut into tasks that workers begin with. The unit is to wait for it.

    Gradients go with the last block that needs them, and the unit with the last block.
    """

    def __init__(self, unit: Unit, segments: Sequence[Segment]) -> None:
        self.stepped = unit.weight if unit.master is None else unit.master
        names = dict.fromkeys(name for segment in segments for name in segment.moments)
        self.moments = {name: unit.moments[name] for name in names}
        self._ready: torch.cuda.Event | None = None  # gradients are there, weights may be changed
        if unit.context.store.device.type == "cuda":
            self._ready = torch.cuda.Event()
            self._ready.record()
        ordered = sorted(segments, key=lambda segment: segment.start)
        for segment in ordered:
            numbers = [name for name in segment.state if name not in segment.moments]
            segment.before = {name: _copied(segment.state[name]) for name in numbers}
        self._tasks: list[Task] = []
        numel = len(unit.weight.tensor)
        for start in range(0, numel, BLOCK_NUMEL):
            stop = min(start + BLOCK_NUMEL, numel)
            inside = [s for s in ordered if s.start < stop and start < s.stop]
            if inside:
                block = _StepBlock(self, unit, start, stop, inside)
                self._tasks.append(unit.context.tiers.steppers.give(block.run))

    def is_completed(self) -> bool:
        """See `ticket.Work`."""
        return all(task.is_completed() for task in self._tasks)

    def wait(self) -> None:
        """Return when every block is stepped and back where it rests; raises the first error."""
        with one_thread():  # as on workers: each core has a block of its own
            for task in self._tasks:
                task.run()
        for task in self._tasks:
            task.finish()
        for task in self._tasks:  # every waiter is told
            if isinstance(task.error, TierError):
                raise task.error
            if task.error is not None:
                raise TierError(
                    expected(
                        "a step of offloaded state to run to its end",
                        f"{task.error!r}: some of its blocks are stepped, others are not",
                        hint="load the last checkpoint with onefold.load",
                    )
                ) from task.error

    def await_device(self) -> None:
        """Wait until the device has done what was asked of it before the step began."""
        if self._ready is not None:
            self._ready.synchronize()


class _StepBlock:
    """One block of a unit's step."""

    def __init__(
        self, step: UnitStep, unit: Unit, start: int, stop: int, segments: list[Segment]
    ) -> None:
        self._step = step
        self._unit = unit
        self._start, self._stop = start, stop
        self._segments = segments
        self._place = unit.context.tiers.workplace

    def run(self) -> None:
        self._step.await_device()
        watching = watched(self._observer, Stream.BACKGROUND, "step", self._unit.name)
        with watching, self._place.working():
            self._run_near()

    def _run_near(self) -> None:
        step, unit, place = self._step, self._unit, self._place
        buffers = [step.stepped, *step.moments.values()]
        if step.stepped is not unit.weight:
            buffers.append(unit.weight)
        rooms = [_room_nbytes(buffer, self._stop - self._start, place) for buffer in buffers]
        if not any(rooms):
            self._run([None] * len(buffers))
            return
        with place.lend(sum(rooms)) as slot:
            self._run(_cut(slot, buffers, rooms, self._stop - self._start))

    def _run(self, rooms: list[Tensor | None]) -> None:
        step, unit = self._step, self._unit
        is_first = all(segment.is_new for segment in self._segments) and self._is_covered()
        stepped = self._bring(step.stepped, rooms[0])
        moments = {
            name: self._bring(buffer, room, is_read=not is_first)
            for (name, buffer), room in zip(step.moments.items(), rooms[1:], strict=False)
        }
        weight = stepped
        if step.stepped is not unit.weight:
            weight = self._bring(unit.weight, rooms[-1], is_read=not self._is_covered())
        for segment in self._segments:
            self._step_segment(segment, stepped, weight, moments)
        self._take_back(step.stepped, stepped)
        for name, buffer in step.moments.items():
            self._take_back(buffer, moments[name])
        if weight is not stepped:
            self._take_back(unit.weight, weight)

    def _is_covered(self) -> bool:
        """True if every element of the block is stepped."""
        at = self._start
        for segment in self._segments:
            if segment.start > at:
                return False
            at = max(at, segment.stop)
        return at >= self._stop

    def _step_segment(
        self, segment: Segment, stepped: Tensor, weight: Tensor, moments: dict[str, Tensor]
    ) -> None:
        first, last = max(self._start, segment.start), min(self._stop, segment.stop)
        here = slice(first - self._start, last - self._start)
        grad = segment.grad[first - segment.start : last - segment.start]
        state: State = {name: moments[name][here] for name in segment.moments}
        if segment.is_new:
            state = segment.rule.start(state)
        else:
            state |= {
                name: _copied(value, stepped.device) for name, value in segment.before.items()
            }
        own = stepped[here]
        rounded = own if weight is stepped else weight[here]
        segment.rule.step(own, grad.to(own.device), rounded, state)
        for name, value in state.items():
            if name in segment.moments:
                room = moments[name][here]
                if room.data_ptr() != value.data_ptr():
                    room.copy_(value)
            elif first == segment.start:  # every block comes to the same
                now = segment.state.get(name)
                if isinstance(now, Tensor) and isinstance(value, Tensor):
                    now.copy_(value)
                else:  # where those rest that are one number
                    segment.state[name] = _copied(value, torch.device("cpu"))

    def _bring(self, buffer: Buffer, room: Tensor | None, *, is_read: bool = True) -> Tensor:
        """The block's part of a buffer where it can be stepped."""
        part = buffer.tensor.data[self._start : self._stop]  # no counter: nobody may look yet
        if room is None:
            return part
        if is_read:
            with self._moves("fetch", room):
                if buffer.far is not None:
                    buffer.far.fetch(self._start, room)
                else:
                    room.copy_(part, non_blocking=self._place.is_queued)
        elif len(room) > 0:
            room.zero_()
        return room

    def _take_back(self, buffer: Buffer, near: Tensor) -> None:
        if buffer.far is not None:
            with self._moves("flush", near):
                buffer.far.flush(self._start, near)
            return
        part = buffer.tensor.data[self._start : self._stop]
        if part.data_ptr() != near.data_ptr():
            with self._moves("flush", near):
                part.copy_(near, non_blocking=self._place.is_queued)

    def _moves(self, verb: str, near: Tensor) -> AbstractContextManager[None]:
        if self._place.is_queued:  # the host only asks for it
            return nullcontext()
        return watched(self._observer, Stream.TIER, verb, self._unit.name, near.nbytes)

    @property
    def _observer(self) -> Observer | None:
        return self._unit.context.ledger.observer


def reserve_room(unit: Unit) -> None:
    """Take the room that blocks of the unit will need on their way, now that moments are there."""
    place, numel = unit.context.tiers.workplace, min(BLOCK_NUMEL, len(unit.weight.tensor))
    buffers = [unit.weight, *unit.moments.values(), *([unit.master] if unit.master else [])]
    place.reserve(sum(_room_nbytes(buffer, numel, place) for buffer in buffers))


def _room_nbytes(buffer: Buffer, numel: int, place: StepDevice) -> int:
    """Bytes of a slot that a block of the buffer needs; none where it can be stepped in place."""
    if buffer.far is None and place.is_at(buffer.tensor, buffer.tier):
        return 0
    return whole_pages(numel * buffer.tensor.itemsize)


def _cut(
    slot: Room, buffers: Sequence[Buffer], rooms: Sequence[int], numel: int
) -> list[Tensor | None]:
    """The slot's memory, a page-aligned part for each buffer that needs one."""
    parts: list[Tensor | None] = []
    start = 0
    for buffer, nbytes in zip(buffers, rooms, strict=True):
        dtype = buffer.tensor.dtype
        parts.append(slot.tensor(numel, dtype, start) if nbytes else None)
        start += nbytes
    return parts


def _copied(value: object, device: torch.device | None = None) -> object:
    """A copy of a tensor, on `device`; of anything else, itself."""
    if not isinstance(value, Tensor):
        return value
    return value.clone() if device is None else value.to(device, copy=True)
