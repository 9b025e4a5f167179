"""Step one unit in blocks, in the background: fetch a block of state, step it, flush it.

A block is a range of the unit's shard, over all its buffers: weight, master, moments. Workers take
blocks in turn, each with a slot of near memory of its own. While one worker fetches, another steps
and a third flushes. State that rests near is stepped in place (tier/step_device.py). A thread that
needs the unit runs the blocks that no worker has begun (tier/workers.py), so units finish in the
order of use.

Blocks are multiples of every kernel's vector width, so the bits are those of one step over all
(ZeRO-Offload, arXiv 2101.06840, section 4; ZeRO-Infinity, arXiv 2104.07857, section 5).
See docs/adr/0009.
"""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from itertools import product
from threading import get_ident

import torch
from torch import Tensor

from onefold.engine.rules import Rule, State
from onefold.errors import TierError
from onefold.layout.observer import Observer, Stream, watched
from onefold.layout.rows import round_up
from onefold.tier import accelerator
from onefold.tier.slots import Room
from onefold.tier.step_device import DeviceStep, HostStep, StepDevice
from onefold.tier.store import GRAIN_NUMEL, whole_pages
from onefold.tier.workers import NUM_DISK_SLOTS, Task, one_thread
from onefold.unit.buffer import Buffer
from onefold.unit.unit import Unit

BLOCK_NUMEL = 1024 * 1024
"""Elements of a block: 4 MiB requests in fp32, which reach the disk's rate with few at a time."""

LINK_BLOCK_NUMEL = 16 * 1024 * 1024
"""Elements of a block that crosses a link to an accelerator: launches and waits of the host take
less time than its copies, in tests/engine/test_link.py."""


def block_numel(numel: int, *, is_queued: bool, num_threads: int = 1) -> int:
    """Elements of each block of a unit with `numel` on this rank, but the last.

    Blocks that cross a link are about equal, and as many as threads that take them, if they are not
    smaller than other blocks then.
    """
    if not is_queued:
        return BLOCK_NUMEL
    most = max(BLOCK_NUMEL, min(LINK_BLOCK_NUMEL, -(-numel // num_threads)))
    num_blocks = -(-numel // most)
    return round_up(-(-numel // max(1, num_blocks)), GRAIN_NUMEL)


def block_numels(numel: int, most: int) -> list[int]:
    """Return the lengths of the blocks of `numel` elements: of equal ones, as many as matter.

    No more than `NUM_DISK_SLOTS` are counted to have a slot at a time.
    """
    whole, rest = divmod(numel, most)
    return [most] * min(whole, NUM_DISK_SLOTS) + [rest] * bool(rest)


def _of_unit(unit: Unit) -> int:
    tiers = unit.context.tiers
    is_far = tiers.weight.is_far or tiers.state.is_far
    device, threads = tiers.step_device, tiers.steppers.num_threads + 1
    return block_numel(
        len(unit.weight.tensor),
        is_queued=device.is_queued and not is_far,
        num_threads=1 if isinstance(device, DeviceStep) else threads,
    )


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
    has_stepped_numbers: bool = False  # on the host; the blocks keep none

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
        if not self.rule.takes_numbers_near:
            device = torch.device("cpu")
        return state | {name: _on(device, value) for name, value in self.before.items()}

    def keep_number(self, name: str, value: object) -> None:
        """Keep a stepped number, the same for all elements. Numbers rest on the CPU."""
        now = self.state.get(name)
        if isinstance(now, Tensor) and isinstance(value, Tensor):
            now.copy_(value)
        else:
            self.state[name] = _copied(value, torch.device("cpu"))

    def step_numbers(self, dtype: torch.dtype) -> None:
        """Step no element, but the numbers: they are the same for all elements, and for none."""
        self.has_stepped_numbers = True
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
        # behind what blocks of a thread have changed, by its number
        self.leaving: dict[int, accelerator.Event] = {}
        self.stepped = unit.weight if unit.master is None else unit.master
        names = dict.fromkeys(name for segment in segments for name in segment.moments)
        self.moments = {name: unit.moments[name] for name in names}
        self.buffers = [self.stepped, *self.moments.values()]
        if unit.master is not None:
            self.buffers.append(unit.weight)
        self._unit, self._where = unit.name, unit.context.where
        self.ready: accelerator.Event | None = None  # gradients exist, weights may be changed
        self._streams: set[accelerator.Stream] = set()  # of the caller
        self._device, self._is_awaited = unit.context.store.device, False
        if self._device.type != "cpu":
            self.ready = accelerator.record(self._device)
            self._streams.add(accelerator.current(self._device))
        ordered = sorted(segments, key=lambda segment: segment.start)
        is_remote = unit.context.tiers.step_device.is_queued
        for segment in ordered:  # a device would have to be waited for
            if segment.start == segment.stop or is_remote:
                segment.step_numbers(self.stepped.tensor.dtype)
        self._tasks: list[Task] = []
        numel, block_numel = len(unit.weight.tensor), _of_unit(unit)
        for start in range(0, numel, block_numel):
            stop = min(start + block_numel, numel)
            inside = [s for s in ordered if s.start < stop and start < s.stop]
            if inside:
                block = _StepBlock(self, unit, start, stop, inside)
                self._tasks.append(unit.context.tiers.steppers.give(block.run_block))

    def is_completed(self) -> bool:
        is_over = all(task.is_completed() for task in self._tasks)
        return is_over and all(event.query() for event in list(self.leaving.values()))

    def wait(self) -> None:
        """Return when every block is stepped and back in its tier; raise the first error.

        What blocks queued on the device is over for this thread's stream, and for the caller's.
        """
        with one_thread():  # as on workers: each core has a block of its own
            for task in self._tasks:
                task.run_once()
        for task in self._tasks:
            task.await_end()
        if self._streams:
            self._streams.add(accelerator.current(self._device))
        for stream, event in product(self._streams, self.leaving.values()):
            stream.wait_event(event)
        self._is_awaited = True
        for task in self._tasks:
            if isinstance(task.error, TierError):
                raise task.error
            if task.error is not None:
                wanted = f"the background step of unit {self._unit!r} to run to its end"
                got = f"{task.error!r}: some of its blocks are stepped, others are not"
                hint = "load the last checkpoint with onefold.load"
                raise TierError(wanted, got, where=self._where, hint=hint) from task.error

    def __del__(self) -> None:
        for event in () if self._is_awaited else list(self.leaving.values()):
            event.synchronize()  # the model goes after a step that nobody waited for


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

    def run_block(self) -> None:
        step, device, numel = self._step, self._device, self._stop - self._start
        tensors = [(buffer.tensor.dtype, _is_staged(buffer, device)) for buffer in step.buffers]
        grad = self._segments[0].grad
        tensors.append((grad.dtype, not device.is_at(grad, self._unit.context.store.name)))
        nbytes = [whole_pages(numel * dtype.itemsize) * stays for dtype, stays in tensors]
        watching = watched(self._observer, Stream.BACKGROUND, "step", self._unit.name)
        is_far = any(buffer.far is not None for buffer in step.buffers)
        lends = any(nbytes)
        lending = device.lend(sum(nbytes), fills_by_host=is_far) if lends else nullcontext()
        with watching, lending as slot, device.working(step.ready):
            *parts, grads = _slot_parts(slot, [dtype for dtype, _ in tensors], nbytes, numel)
            near = self._bring_all(parts)
            if grads is not None:
                for segment in self._segments:
                    self._take_grad(segment, grads)
            device.arrived()
            self._run_block(near, grads)
            for buffer, part in zip(step.buffers, parts, strict=True):
                if part is not None:
                    self._take_back(buffer, part)
            event = device.leave(slot)
            if event is not None:
                step.leaving[get_ident()] = event

    def _bring_all(self, parts: Sequence[Tensor | None]) -> list[Tensor]:
        step, is_covered = self._step, self._is_covered()
        is_first = is_covered and all(segment.is_new for segment in self._segments)
        is_read = [True, *[not is_first for _ in step.moments], not is_covered]
        return [
            self._bring(buffer, part, is_read=reads)
            for buffer, part, reads in zip(step.buffers, parts, is_read, strict=False)
        ]

    def _run_block(self, near: list[Tensor], grads: Tensor | None) -> None:
        step = self._step
        moments = dict(zip(step.moments, near[1:], strict=False))
        weight = near[-1] if len(near) > 1 + len(moments) else near[0]
        for segment in self._segments:
            self._step_segment(segment, near[0], weight, moments, grads)

    def _is_covered(self) -> bool:
        """True if every element of the block is stepped."""
        at = self._start
        for segment in self._segments:
            if segment.start > at:
                return False
            at = max(at, segment.stop)
        return at >= self._stop

    def _part_of(self, segment: Segment) -> tuple[slice, Tensor]:
        """Return where the block steps a segment, and the gradient by which it does."""
        first, last = max(self._start, segment.start), min(self._stop, segment.stop)
        here = slice(first - self._start, last - self._start)
        return here, segment.grad[first - segment.start : last - segment.start]

    def _take_grad(self, segment: Segment, grads: Tensor) -> None:
        """Begin to copy a segment's gradient into its part of a slot."""
        here, grad = self._part_of(segment)
        grads[here].copy_(grad, non_blocking=self._device.is_queued)

    def _step_segment(
        self, segment: Segment, stepped: Tensor, weight: Tensor, moments: dict[str, Tensor],
        grads: Tensor | None,
    ) -> None:  # fmt: skip
        here, grad = self._part_of(segment)
        if grads is not None:
            grad = grads[here]
        state: State = {name: moments[name][here] for name in segment.moments}
        state = segment.begin(state, stepped.device)
        own = stepped[here]
        rounded = own if weight is stepped else weight[here]
        segment.rule.step(own, grad, rounded, state)
        for name, value in state.items():
            if name in segment.moments:
                moment = moments[name][here]
                if moment.data_ptr() != value.data_ptr():
                    moment.copy_(value)
            elif not segment.has_stepped_numbers and self._start <= segment.start:
                segment.keep_number(name, value)

    def _bring(self, buffer: Buffer, near: Tensor | None, *, is_read: bool) -> Tensor:
        """Return the block of a buffer, in place or in `near`: read, or zeros."""
        resting = buffer.tensor.data[self._start : self._stop]  # `.data`: counts no edit
        if near is None:
            return resting
        if not is_read:
            return near if buffer is self._unit.weight else near.zero_()
        with self._moves("fetch", buffer, near):
            if buffer.far is not None:
                buffer.far.fetch(self._start, near)
            else:
                near.copy_(resting, non_blocking=self._device.is_queued)
        return near

    def _take_back(self, buffer: Buffer, near: Tensor) -> None:
        with self._moves("flush", buffer, near):
            if buffer.far is not None:
                buffer.far.flush(self._start, near)
            else:
                resting = buffer.tensor.data[self._start : self._stop]
                resting.copy_(near, non_blocking=self._device.is_queued)

    def _moves(self, verb: str, buffer: Buffer, near: Tensor) -> AbstractContextManager[None]:
        if self._device.is_queued and buffer.far is None:
            return nullcontext()  # the host cannot see when the copy runs
        return watched(self._observer, Stream.TIER, verb, self._unit.name, near.nbytes)

    @property
    def _observer(self) -> Observer | None:
        return self._unit.context.ledger.observer


def reserve_slots(units: Iterable[Unit]) -> None:
    """Allocate the slots that blocks of these units will need, once their moments exist."""
    slots = defaultdict[StepDevice, list[int]](list)
    for unit in units:
        device = unit.context.tiers.step_device
        buffers = [unit.weight, *unit.moments.values(), *([unit.master] if unit.master else [])]
        if isinstance(device, DeviceStep) or any(buffer.far is not None for buffer in buffers):
            staged = [buffer.tensor.itemsize for buffer in buffers if _is_staged(buffer, device)]
            if isinstance(device, HostStep) and device.is_queued:
                staged.append(unit.weight.tensor.itemsize)  # of gradients, on the accelerator
            numels = block_numels(len(unit.weight.tensor), _of_unit(unit))
            slots[device] += [sum(whole_pages(n * size) for size in staged) for n in numels]
    for device, nbytes in slots.items():
        if nbytes:
            device.reserve(nbytes)


def _is_staged(buffer: Buffer, device: StepDevice) -> bool:
    """True if blocks of the buffer pass through a slot, as they are not stepped in place."""
    return buffer.far is not None or not device.is_at(buffer.tensor, buffer.tier)


def _slot_parts(
    slot: Room | None, dtypes: Sequence[torch.dtype], nbytes: Sequence[int], numel: int
) -> Iterator[Tensor | None]:
    """Yield the slot's page-aligned part for each tensor; None for one stepped in place."""
    start = 0
    for dtype, length in zip(dtypes, nbytes, strict=True):
        yield slot.tensor(numel, dtype, start) if slot and length else None
        start += length


def _copied(value: object, device: torch.device | None = None) -> object:
    """Return a copy of a tensor, on `device`; anything else as it is."""
    if not isinstance(value, Tensor):
        return value
    return value.clone() if device is None else value.to(device, copy=True)


def _on(device: torch.device, value: object) -> object:
    """Return a copy of a number of the CPU on a device, without a copy that the host waits for."""
    if isinstance(value, Tensor) and value.numel() == 1 and value.device != device:
        return torch.full(value.shape, value.item(), dtype=value.dtype, device=device)
    return _copied(value, device)
