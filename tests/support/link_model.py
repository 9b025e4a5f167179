"""A device with a link, as clocks: it plays what threads queue on streams, and needs no memory.

Tensors of the device, and of the host's memory, are on `meta`. Streams run in order and beside one
another. Each direction of the link, and the device's cores, take one task at a time. The host has
one interpreter: a thread that launches holds it, a thread that waits does not. Threads take turns,
the one whose clock is behind first, so a run gives nearly the same times on any machine.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from threading import Condition, Semaphore, Thread, current_thread, local
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from onefold.tier.workers import Task

DEVICE = torch.device("meta")


@dataclass(frozen=True)
class Machine:
    """Rates in bytes a second, times of the host in seconds."""

    link: float = 50e9  # each way: PCIe 5 with 16 lanes, page-locked
    memory: float = 2e12  # of the device
    launch_s: float = 10e-6  # that an operation takes the interpreter
    block_s: float = 150e-6  # that a block takes it beside its operations
    wake_s: float = 50e-6  # until a thread runs that has waited
    copy_s: float = 10e-6  # before a copy's first byte


class Stream:
    """A queue of work; as a context, the one that this thread's work goes to."""

    def __init__(self, model: LinkModel) -> None:
        self._model = model
        self.free_at = 0.0
        self.device = DEVICE

    def __enter__(self) -> Stream:
        self._model.now.streams.append(self)
        return self

    def __exit__(self, *_: object) -> None:
        self._model.now.streams.pop()

    def wait_event(self, event: Event) -> None:
        self.free_at = max(self.free_at, event.time)

    def wait_stream(self, other: Stream) -> None:
        self.free_at = max(self.free_at, other.free_at)

    def synchronize(self) -> None:
        self._model.wait(self.free_at)


@dataclass
class Event:
    """A moment of a stream."""

    model: LinkModel
    time: float

    def query(self) -> bool:
        return self.time <= self.model.clock()

    def synchronize(self) -> None:
        self.model.wait(self.time)


class _Now(local):
    """The clock of a thread, and its streams."""

    def __init__(self) -> None:
        self.clock = 0.0
        self.streams: list[Stream] = []


@dataclass
class LinkModel:
    """The clocks of a device, its link, the interpreter and all threads."""

    machine: Machine
    now: _Now = field(default_factory=_Now)
    host_waits: int = 0
    link_nbytes: dict[str, int] = field(default_factory=lambda: {"in": 0, "out": 0})
    _free_at: dict[str, float] = field(default_factory=dict)
    _clocks: dict[Thread, float] = field(default_factory=dict)
    _turn: Condition = field(default_factory=Condition)
    _is_host: set[int] = field(default_factory=set)

    def __post_init__(self) -> None:
        self._free_at = dict.fromkeys(("in", "out", "cores", "interpreter"), 0.0)
        self.default = Stream(self)

    # what the library asks of an accelerator

    def current(self, device: torch.device) -> Stream:
        return self.now.streams[-1] if self.now.streams else self.default

    def record(self, device: torch.device, *, is_timed: bool = False) -> Event:
        self.hold(self.machine.launch_s)
        return Event(self, self.current(device).free_at)

    # threads

    def clock(self) -> float:
        return self.now.clock

    def add(self, *threads: Thread) -> None:
        """Let these threads take turns with the others from now on."""
        with self._turn:
            self._clocks |= dict.fromkeys(threads, self.now.clock)

    def begin(self) -> None:
        """The running thread begins when it was added."""
        self.now.clock = self._clocks[current_thread()]
        self._move(self.now.clock)

    def end(self) -> None:
        """The running thread takes no more turns."""
        with self._turn:
            del self._clocks[current_thread()]
            self._turn.notify_all()

    def _move(self, clock: float) -> None:
        """Set this thread's clock, and let those go first that are behind it."""
        me = current_thread()
        self.now.clock = clock
        with self._turn:
            self._clocks[me] = clock
            if not self._is_first(me):
                self._turn.notify_all()
                self._turn.wait_for(lambda: self._is_first(me))

    def _is_first(self, me: Thread) -> bool:
        mine = self._clocks[me], me.name
        return all(mine <= (clock, thread.name) for thread, clock in self._clocks.items())

    def park(self, is_over: Callable[[], object]) -> None:
        """Let the other threads go on until one of them has done what this one waits for."""
        me = current_thread()
        with self._turn:
            mine = self._clocks.pop(me)
            self._turn.notify_all()
        is_over()
        with self._turn:
            self._clocks[me] = mine

    def resume(self, time: float) -> None:
        """Another thread was over at `time`."""
        clock = self.now.clock
        self._move(max(clock, time + self.machine.wake_s if time > clock else clock))

    def wait(self, time: float) -> None:
        """The host waits for a moment."""
        self.host_waits += 1
        self.resume(time)

    def hold(self, seconds: float) -> None:
        """This thread needs the interpreter."""
        self._move(self.now.clock)
        begun = max(self.now.clock, self._free_at["interpreter"])
        self._free_at["interpreter"] = begun + seconds
        self._move(begun + seconds)

    # work

    def hosts(self, tensor: Tensor) -> Tensor:
        """Say that a tensor is in the host's memory."""
        self._is_host.add(tensor.untyped_storage()._cdata)
        return tensor

    def is_host(self, tensor: Tensor) -> bool:
        return tensor.untyped_storage()._cdata in self._is_host

    def queue(self, engine: str, seconds: float) -> None:
        """Queue work on this thread's stream, for one engine of the device."""
        self.hold(self.machine.launch_s)
        stream = self.current(DEVICE)
        begun = max(stream.free_at, self._free_at[engine], self.now.clock)
        self._free_at[engine] = stream.free_at = begun + seconds

    def copy(self, into: Tensor, source: Tensor, is_asynchronous: bool) -> None:
        if self.is_host(into) == self.is_host(source):
            self.queue("cores", 2 * into.nbytes / self.machine.memory)
            return
        engine = "out" if self.is_host(into) else "in"
        self.link_nbytes[engine] += into.nbytes
        self.queue(engine, self.machine.copy_s + into.nbytes / self.machine.link)
        if not is_asynchronous:
            self.wait(self.current(DEVICE).free_at)

    def watching(self) -> TorchDispatchMode:
        """A mode in which the operations of a thread on `meta` take time."""
        return _Watched(self)


class _Watched(TorchDispatchMode):
    def __init__(self, model: LinkModel) -> None:
        super().__init__()
        self._model = model

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, name, model = kwargs or {}, func.overloadpacket.__name__, self._model
        flat = torch.utils._pytree.tree_leaves((args, kwargs))
        tensors = [value for value in flat if isinstance(value, Tensor) and value.is_meta]
        if tensors and name == "copy_":
            model.copy(args[0], args[1], bool(args[2]) if len(args) > 2 else False)
        elif tensors and not func.is_view and "empty" not in name:
            model.queue("cores", 2 * sum(t.nbytes for t in tensors) / model.machine.memory)
        return func(*args, **kwargs)


class Places:
    """A semaphore whose waiting threads let the others go on."""

    def __init__(self, model: LinkModel, number: int) -> None:
        self._model = model
        self._free = [0.0] * number  # since when
        self._given = Semaphore(number)

    def __enter__(self) -> None:
        if not self._given.acquire(blocking=False):
            self._model.park(self._given.acquire)
        self._model.resume(self._free.pop(0))

    def __exit__(self, *_: object) -> None:
        self._free.append(self._model.clock())
        self._given.release()


class ModelTask(Task):
    """A task that knows when it was over."""

    __slots__ = ("_model", "over_at")

    def __init__(self, work: Callable[[], None], model: LinkModel) -> None:
        self._model, self.over_at = model, 0.0

        def timed() -> None:
            model.hold(model.machine.block_s)
            work()
            self.over_at = model.clock()

        super().__init__(timed)

    def await_end(self) -> None:
        """See `Task.await_end`."""
        self.run_once()
        if not self.is_completed():
            self._model.park(super().await_end)
        self._model.resume(self.over_at)


class ModelWorkers:
    """Threads that take tasks in order, with clocks."""

    def __init__(self, model: LinkModel, num_threads: int) -> None:
        self.num_threads = num_threads
        self._model = model
        self.tasks: list[ModelTask] = []

    def give(self, work: Callable[[], None]) -> Task:
        task = ModelTask(work, self._model)
        self.tasks.append(task)
        return task

    @contextmanager
    def running(self) -> Iterator[None]:
        """Take the tasks in threads, while this one does something else."""
        queue, model = iter(self.tasks), self._model

        def run() -> None:
            model.begin()
            with model.watching():
                for task in queue:
                    task.run_once()
            model.end()

        threads = [Thread(target=run, name=f"worker {i}") for i in range(self.num_threads)]
        model.add(current_thread(), *threads)
        for thread in threads:
            thread.start()
        with model.watching():
            yield
        model.end()
        for thread in threads:
            thread.join()
