"""This host: its cores, memory and versions; and a pause of Python's garbage collector."""

import gc
import os
import platform
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

MIB, GIB = 2**20, 2**30


def versions() -> dict[str, str]:
    """What a result depends on."""
    import torch

    return {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "onefold": _own_version(),
    }


def _own_version() -> str:
    try:
        return version("onefold")
    except PackageNotFoundError:  # run from its source
        return "not installed"


def cores_of(local_rank: int, local_world_size: int) -> tuple[int, ...]:
    """This rank's share of the cores that its processes may run on; at least one."""
    if sys.platform != "linux":
        return tuple(range(max(1, (os.cpu_count() or 1) // local_world_size)))
    usable = sorted(os.sched_getaffinity(0))
    if len(usable) < local_world_size:
        return (usable[local_rank % len(usable)],)
    first, last = (i * len(usable) // local_world_size for i in (local_rank, local_rank + 1))
    return tuple(usable[first:last])


def usable_cores() -> int:
    """Cores that this process may run on."""
    return len(cores_of(0, 1))


def memory_nbytes() -> tuple[int, int]:
    """Bytes of memory, total and free, within the limit of this container."""
    total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    for path, _ in _cgroup_memory():
        text = path.read_text().strip() if path.exists() else "max"
        if text.isdigit():
            total = min(total, int(text))
    return total, min(total, free_host_nbytes())


def free_host_nbytes() -> int:
    """Bytes of memory that processes here may still take, within the limit of this container."""
    return max(0, min(free for _, free in free_host_bounds()))


def free_host_bounds() -> list[tuple[str, int]]:
    """Each limit of memory around this process, by name, with the bytes that are free in it.

    Processes under the same limit share these bytes.
    """
    free = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    with suppress(OSError, ValueError, StopIteration):
        lines = Path("/proc/meminfo").read_text().splitlines()
        line = next(line for line in lines if line.startswith("MemAvailable:"))
        free = int(line.split()[1]) * 1024
    bounds = [("host", free)]
    for limit, used in _cgroup_memory():
        with suppress(OSError, ValueError):  # also "max", which is no number
            lines = (used.parent / "memory.stat").read_text().splitlines()
            stat = dict(line.split() for line in lines)
            cached = int(stat.get("inactive_file", 0))  # given up when memory is wanted
            free = int(limit.read_text()) - int(used.read_text()) + cached
            bounds.append((str(limit.parent), free))
    return bounds


_CGROUP = Path("/sys/fs/cgroup")
_CGROUP_MEMORY = (
    ("", "memory.max", "memory.current"),  # version 2
    ("memory", "memory.limit_in_bytes", "memory.usage_in_bytes"),
)


def _cgroup_memory() -> Iterator[tuple[Path, Path]]:
    """Files with the limit and the use of each group around this process, outermost first."""
    own: list[str] = []
    with suppress(OSError):
        for line in Path("/proc/self/cgroup").read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            if controllers == "" or "memory" in controllers.split(","):
                own.append(path.lstrip("/"))
    for controller, limit, used in _CGROUP_MEMORY:
        root = _CGROUP / controller
        for folder in dict.fromkeys([root, *(root / path for path in own)]):
            yield folder / limit, folder / used


@contextmanager
def no_garbage() -> Iterator[None]:
    """Around what makes many objects and leaves none behind in a cycle: imports, plans, modules.

    The collector runs once in so many new objects, and goes over all that the process holds.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
