"""Step one unit in blocks, in the background: fetch a block of state, step it, flush it.

A block is a range of the unit's shard, over all its buffers: weight, master, moments. Workers take
blocks in turn, each with a slot of near memory of its own. While one worker fetches, another steps
and a third flushes. State that rests near is stepped in place (tier/step_device.py). A thread that
needs the unit runs the blocks that no worker has begun (tier/workers.py), so units finish in the
order of use.

Blocks are multiples of every kernel's vector width, so the bits are those of one step over all
(ZeRO-Offload, arXiv 2101.06840, section 4; ZeRO-Infinity, arXiv 2104.07857, section 5).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field

import torch
from torch import Tensor

from onefold.engine.rules import Rule, State
from onefold.errors import TierError
from onefold.layout.observer import Observer, Stream, watched
from onefold.tier import accelerator
from onefold.tier.slots import Room
from onefold.tier.step_device import StepDevice
from onefold.tier.store import whole_pages
from onefold.tier.workers import Task, one_thread
from onefold.unit.buffer import Buffer
from onefold.unit.unit import Unit

BLOCK_NUMEL = 1024 * 1024
"""Elements of a block: 4 MiB requests in fp32, which reach the disk's rate with few at a time."""


@dataclass(slots=True, eq=False)
class Segment:
    """A stretch of a unit's shard that one rule steps by one gradient."""

    start: int  # in the shard
    grad: Tensor  # [numel], flat
    rule: Rule
    moments: tuple[str, ...]  # names of the states with an element for each of the weight's
    state: State  # all states; the step updates here the states that are one number
    is_new: bool  # stepped for the first time: the rule makes the states
    owner: Buffer | None  # of the gradient's bytes; its bytes are counted until the step is over
    before: State = field(init=False)  # the numbers, as each block finds them

    def __post_init__(self) -> None:
        numbers = [name for name in self.state if name not in self.moments]
        self.before = {name: _copied(self.state[name]) for name in numbers}

    @property
    def stop(self) -> int:
        return self.start + len(self.grad)

    def begin(self, state: State, device: torch.device) -> State:
        """Return all states of some elements before the step, from their moments."""
        if self.is_new:
            return self.rule.start(state)
        return state | {name: _copied(value, device) for name, value in self.before.items()}

    def keep_number(self, name: str, value: object) -> None:
        """Keep a stepped number, the same for all elements. Numbers rest on the CPU."""
        now = self.state.get(name)
        if isinstance(now, Tensor) and isinstance(value, Tensor):
            now.copy_(value)
        else:
            self.state[name] = _copied(value, torch.device("cpu"))

    def step_numbers(self, dtype: torch.dtype) -> None:
        """Step no element: this rank has no rows, and its numbers follow those of other ranks."""
        rows = torch.empty(0, dtype=dtype)
        state = self.begin(dict.fromkeys(self.moments, rows), rows.device)
        self.rule.step(rows, rows, rows, state)
        for name in state.keys() - set(self.moments):
            self.keep_number(name, state[name])


class UnitStep:
    """The step of one unit, cut into tasks for workers; its waiter runs the rest of the tasks.

    A gradient is freed with the last block that needs it.
    """

    def __init__(self, unit: Unit, segments: Sequence[Segment]) -> None:
        self.stepped = unit.weight if unit.master is None else unit.master
        names = dict.fromkeys(name for segment in segments for name in segment.moments)
        self.moments = {name: unit.moments[name] for name in names}
        self.buffers = [self.stepped, *self.moments.values()]
        if unit.master is not None:
            self.buffers.append(unit.weight)
        self._unit, self._where = unit.name, unit.context.where
        self._ready: accelerator.Event | None = None  # gradients exist, weights may be changed
        device = unit.context.store.device
        if device.type != "cpu":
            self._ready = accelerator.record(device)
        ordered = sorted(segments, key=lambda segment: segment.start)
        for segment in ordered:
            if segment.start == segment.stop:
                segment.step_numbers(self.stepped.tensor.dtype)
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
        """Return when every block is stepped and back in its tier; raise the first error."""
        with one_thread():  # as on workers: each core has a block of its own
            for task in self._tasks:
                task.run()
        for task in self._tasks:
            task.finish()
        for task in self._tasks:
            if isinstance(task.error, TierError):
                raise task.error
            if task.error is not None:
                raise TierError(
                    f"the background step of unit {self._unit!r} to run to its end",
                    f"{task.error!r}: some of its blocks are stepped, others are not",
                    where=self._where,
                    hint="load the last checkpoint with onefold.load",
                ) from task.error

    def await_device(self) -> None:
        """Wait until the device has finished all work queued before the step began."""
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
        self._device = unit.context.tiers.step_device

    def run(self) -> None:
        step, device, numel = self._step, self._device, self._stop - self._start
        step.await_device()
        nbytes = [_staged_nbytes(buffer, numel, device) for buffer in step.buffers]
        watching = watched(self._observer, Stream.BACKGROUND, "step", self._unit.name)
        lending = device.lend(sum(nbytes)) if any(nbytes) else nullcontext()
        with watching, device.working(), lending as slot:
            self._run([*_parts(slot, step.buffers, nbytes, numel)])

    def _run(self, parts: list[Tensor | None]) -> None:
        step, is_covered = self._step, self._is_covered()
        is_first = is_covered and all(segment.is_new for segment in self._segments)
        is_read = [True, *[not is_first for _ in step.moments], not is_covered]
        near = [
            self._bring(buffer, part, is_read=reads)
            for buffer, part, reads in zip(step.buffers, parts, is_read, strict=False)
        ]
        moments = dict(zip(step.moments, near[1:], strict=False))
        weight = near[-1] if self._unit.master is not None else near[0]
        for segment in self._segments:
            self._step_segment(segment, near[0], weight, moments)
        for buffer, tensor in zip(step.buffers, near, strict=True):
            self._take_back(buffer, tensor)

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
        state = segment.begin(state, stepped.device)
        own = stepped[here]
        rounded = own if weight is stepped else weight[here]
        segment.rule.step(own, grad.to(own.device), rounded, state)
        for name, value in state.items():
            if name in segment.moments:
                moment = moments[name][here]
                if moment.data_ptr() != value.data_ptr():
                    moment.copy_(value)
            elif first == segment.start:
                segment.keep_number(name, value)

    def _bring(self, buffer: Buffer, near: Tensor | None, *, is_read: bool) -> Tensor:
        """Return the block of a buffer, in place or in `near`: read, or zeros."""
        resting = buffer.tensor.data[self._start : self._stop]  # `.data`: counts no edit
        if near is None:
            return resting
        if not is_read:
            return near.zero_()
        with self._moves("fetch", near):
            if buffer.far is not None:
                buffer.far.fetch(self._start, near)
            else:
                near.copy_(resting, non_blocking=self._device.is_queued)
        return near

    def _take_back(self, buffer: Buffer, near: Tensor) -> None:
        if buffer.far is not None:
            with self._moves("flush", near):
                buffer.far.flush(self._start, near)
            return
        resting = buffer.tensor.data[self._start : self._stop]
        if resting.data_ptr() != near.data_ptr():
            with self._moves("flush", near):
                resting.copy_(near, non_blocking=self._device.is_queued)

    def _moves(self, verb: str, near: Tensor) -> AbstractContextManager[None]:
        if self._device.is_queued:  # the host cannot see when the copy runs
            return nullcontext()
        return watched(self._observer, Stream.TIER, verb, self._unit.name, near.nbytes)

    @property
    def _observer(self) -> Observer | None:
        return self._unit.context.ledger.observer


def reserve_slots(unit: Unit) -> None:
    """Allocate the slots that blocks of the unit will need, once its moments exist."""
    device, numel = unit.context.tiers.step_device, min(BLOCK_NUMEL, len(unit.weight.tensor))
    buffers = [unit.weight, *unit.moments.values(), *([unit.master] if unit.master else [])]
    device.reserve(sum(_staged_nbytes(buffer, numel, device) for buffer in buffers))


def _staged_nbytes(buffer: Buffer, numel: int, device: StepDevice) -> int:
    """Return the bytes that a block of the buffer takes in a slot; 0 if it is stepped in place."""
    if buffer.far is None and device.is_at(buffer.tensor, buffer.tier):
        return 0
    return whole_pages(numel * buffer.tensor.itemsize)


def _parts(
    slot: Room | None, buffers: Sequence[Buffer], nbytes: Sequence[int], numel: int
) -> Iterator[Tensor | None]:
    """Yield the slot's page-aligned part for each buffer; None for one stepped in place."""
    start = 0
    for buffer, length in zip(buffers, nbytes, strict=True):
        yield slot.tensor(numel, buffer.tensor.dtype, start) if slot and length else None
        start += length


def _copied(value: object, device: torch.device | None = None) -> object:
    """Return a copy of a tensor, on `device`; anything else as it is."""
    if not isinstance(value, Tensor):
        return value
    return value.clone() if device is None else value.to(device, copy=True)
