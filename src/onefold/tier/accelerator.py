"""The seam to accelerators: the only file that names torch's devices, streams and events.

torch's device-agnostic calls do nearly all of it, so any accelerator works that torch has a device
for. CUDA alone has calls of its own: locking the pages of mapped memory, and names of devices.
"""

from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, NamedTuple

import torch
from torch import Tensor

Stream = torch.Stream
"""A queue of work on a device; as a context, the one that work is queued on."""

Event = torch.Event
"""A place in a stream that other streams, and the host, may wait for."""


# devices


def kind() -> str | None:
    """The kind of accelerator that is present, as "cuda"; None without one."""
    device = torch.accelerator.current_accelerator(check_available=True)
    return None if device is None else device.type


def count() -> int:
    """The number of accelerators of this host that the process sees."""
    return torch.accelerator.device_count()


def computes_bf16() -> bool:
    """True if the accelerators multiply in bf16 by themselves; older GPUs emulate it."""
    return kind() != "cuda" or torch.cuda.is_bf16_supported(including_emulation=False)


def multiplies_in_tf32() -> bool:
    """True if CUDA multiplies fp32 matrices in tf32."""
    return bool(torch.backends.cuda.matmul.allow_tf32)


def current_index() -> int:
    """The number of the accelerator that this thread uses."""
    return torch.accelerator.current_device_index()


def is_capturing() -> bool:
    """True while the work of this thread's stream goes into a CUDA graph."""
    return torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()


def use(device: torch.device | None) -> None:
    """Have this thread use the device; a new thread uses the first one, whatever its parent does.

    Nothing happens for the CPU, None, or a kind of device without a number.
    """
    if device is not None and device.type == kind() and device.index is not None:
        torch.accelerator.set_device_index(device.index)


def model(device: torch.device) -> tuple[str, int]:
    """The name of a device's model, where CUDA tells it, else its kind; and its bytes of memory."""
    if device.type != "cuda":
        return device.type, memory(device).total
    properties = torch.cuda.get_device_properties(device)  # asks no device to start
    return properties.name, properties.total_memory


def record_memory(device: torch.device) -> Callable[[str], None] | None:
    """Record what CUDA's allocator does from now on; return what ends that and writes a snapshot.

    None for other devices.
    """
    if device.type != "cuda":
        return None
    history: Any = torch.cuda.memory
    history._record_memory_history(device=device)

    def write(path: str) -> None:
        history._dump_snapshot(path)
        history._record_memory_history(enabled=None, device=device)

    return write


def generator(device: torch.device) -> torch.Generator | None:
    """The generator that draws on a device by default; None for the CPU, and without one."""
    if device.type == "cpu":
        return None
    generators = getattr(torch.get_device_module(device), "default_generators", ())
    index = current_index() if device.index is None else device.index
    return generators[index] if generators else None


def rng_state(device: torch.device) -> Tensor:
    """The state of a device's generator."""
    return torch.get_device_module(device).get_rng_state(device)


def set_rng_state(state: Tensor, device: torch.device) -> None:
    """Continue with another state of a device's generator."""
    torch.get_device_module(device).set_rng_state(state, device)


def thread_state() -> Callable[[], None]:
    """Note the device and stream of this thread; return how another thread takes them over."""
    if kind() is None or not torch.get_device_module(kind()).is_initialized():
        return lambda: None
    stream = current(torch.device(str(kind()), current_index()))

    def enter() -> None:
        use(stream.device)
        torch.accelerator.set_stream(stream)

    return enter


# streams


def new(device: torch.device) -> Stream:
    """Make a stream beside those that compute."""
    return torch.Stream(device)


def current(device: torch.device) -> Stream:
    """The stream on which this thread queues its work for the device."""
    return torch.accelerator.current_stream(device)


def record(device: torch.device, *, is_timed: bool = False) -> Event:
    """Mark the end of what this thread has queued on its current stream."""
    event = torch.Event(device, enable_timing=is_timed)
    event.record(current(device))
    return event


def wait(event: Event, device: torch.device) -> None:
    """Have this thread's current stream wait for the event; the host goes on."""
    current(device).wait_event(event)


def await_event(event: Event) -> None:
    """Wait, on the host, for an event that is not over yet."""
    if not event.query():
        event.synchronize()


def synchronize(device: torch.device) -> None:
    """Wait, on the host, for all work that is queued on any stream of a device; not for the CPU."""
    if device.type != "cpu":
        torch.accelerator.synchronize(device)


# memory


class DeviceMemory(NamedTuple):
    """Bytes of a device: those that this process may still take, and all."""

    free: int
    total: int


def memory(device: torch.device | None = None) -> DeviceMemory:
    """The memory of a device, by default of the current one.

    Memory that torch's allocator keeps for later is free: the next tensors are made of it.
    """
    free, total = torch.accelerator.get_memory_info(device)
    kept = torch.accelerator.memory_reserved(device) - torch.accelerator.memory_allocated(device)
    return DeviceMemory(free + max(0, kept), total)


def allocated(device: torch.device) -> int:
    """Bytes of a device that torch's allocator has handed out."""
    return torch.accelerator.memory_allocated(device)


def pinned(numel: int, dtype: torch.dtype) -> Tensor:
    """Make an uninitialised tensor [numel] of page-locked host memory, for asynchronous copies."""
    return torch.empty(numel, dtype=dtype, pin_memory=kind() is not None)


def locks_mapped_pages() -> bool:
    """True if the accelerator locks the pages of memory that torch did not allocate."""
    return kind() == "cuda"


def sent(numbers: Sequence[float], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Make a tensor of numbers on a device; the host does not wait for the copy."""
    near = torch.tensor(numbers, dtype=dtype)
    if device.type == "cpu":
        return near
    return pinned(len(near), dtype).copy_(near).to(device, non_blocking=True)


class Fetched:
    """Numbers on their way to the host, which waits for them only where it reads them.

    Attributes:
        arrived: the end of the copy; None for numbers in host memory.
    """

    def __init__(self, source: Tensor) -> None:
        """Begin to copy `source` [numel] behind all that its stream has queued."""
        self._copy = source
        self.arrived: Event | None = None
        if source.device.type != "cpu":
            self._copy = pinned(source.numel(), source.dtype)
            self._copy.copy_(source, non_blocking=True)
            self.arrived = record(source.device)

    def read(self) -> Tensor:
        """Return the numbers in host memory; the host waits until they are there."""
        if self.arrived is not None:
            await_event(self.arrived)
        return self._copy


def lock_pages(flat: Tensor) -> int:
    """Lock the pages of `flat` [uint8, whole pages], so that copies from it are asynchronous.

    Returns CUDA's error, 0 if there was none. CUDA keeps an error until it is read: the next launch
    on this thread would raise it. torch has no call to read it, so a kernel is launched here.
    """
    runtime: Any = torch.cuda.cudart()
    code = int(runtime.cudaHostRegister(flat.data_ptr(), flat.nbytes, 0))
    if code:
        with suppress(RuntimeError):
            torch.ones(1, device="cuda")
    return code


def unlock_pages(address: int) -> None:
    """Undo `lock_pages` of a tensor that begins there."""
    runtime: Any = torch.cuda.cudart()
    runtime.cudaHostUnregister(address)
