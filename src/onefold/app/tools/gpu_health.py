"""What NVIDIA's driver says of the GPUs of this host, where nvidia-ml-py is installed.

NVLinks that are up, lanes of PCIe, and reasons for a lower clock. All GPUs of the host are asked,
by the driver's numbers, also those that CUDA_VISIBLE_DEVICES hides. nvidia-ml-py 13.615 raises
`NVMLError` for what a GPU does not have, such as NVLink.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from importlib import import_module
from typing import Any, NamedTuple

SLOWING = {
    "nvmlClocksEventReasonHwThermalSlowdown": "too hot",
    "nvmlClocksEventReasonSwThermalSlowdown": "too hot",
    "nvmlClocksEventReasonHwPowerBrakeSlowdown": "the host limits its power",
    "nvmlClocksEventReasonHwSlowdown": "the hardware slows it",
}
"""Reasons that hurt a run. A cap on power under load is no fault."""


class GpuHealth(NamedTuple):
    """One GPU: NVLinks that are up, lanes now and at most (0: not known), why it is slow."""

    nvlinks: int
    lanes: int
    most_lanes: int
    slowed_by: str


def gpu_health() -> list[GpuHealth]:
    """Ask the driver for each GPU of the host; none without nvidia-ml-py or a driver."""
    try:
        nvml: Any = import_module("pynvml")
        nvml.nvmlInit()
    except Exception:  # no package, no library of a driver, or no permission: nothing is known
        return []
    try:
        handles = map(nvml.nvmlDeviceGetHandleByIndex, range(nvml.nvmlDeviceGetCount()))
        return [_health_of(nvml, handle) for handle in handles]
    except nvml.NVMLError:
        return []
    finally:
        nvml.nvmlShutdown()


def _health_of(nvml: Any, handle: Any) -> GpuHealth:
    def asked(question: Callable[..., int], *about: Any) -> int:
        try:
            return int(question(handle, *about))
        except nvml.NVMLError:  # this GPU does not have it
            return 0

    links = range(nvml.NVML_NVLINK_MAX_LINKS)
    reasons = asked(nvml.nvmlDeviceGetCurrentClocksEventReasons)
    slowed_by = [word for name, word in SLOWING.items() if reasons & getattr(nvml, name)]
    return GpuHealth(
        nvlinks=sum(asked(nvml.nvmlDeviceGetNvLinkState, link) for link in links),
        lanes=asked(nvml.nvmlDeviceGetCurrPcieLinkWidth),
        most_lanes=asked(nvml.nvmlDeviceGetMaxPcieLinkWidth),
        slowed_by=", ".join(dict.fromkeys(slowed_by)),
    )


def judged_gpus(gpus: list[GpuHealth]) -> Iterator[tuple[str, str, bool, str]]:
    """Yield a name, what was found, whether it hurts a run, and a remedy."""
    if not gpus:
        return
    links = [gpu.nvlinks for gpu in gpus]
    fewer = _those(index for index, number in enumerate(links) if number < max(links))
    yield (
        "NVLink", f"{max(links)} links a GPU" if max(links) else "none", bool(fewer),
        f"{fewer} has fewer links up: see `nvidia-smi nvlink --status`",
    )  # fmt: skip
    narrow = [i for i, gpu in enumerate(gpus) if gpu.lanes < gpu.most_lanes]
    lanes = ", ".join(f"x{number}" for number in sorted({gpu.lanes for gpu in gpus if gpu.lanes}))
    yield (
        "PCIe", lanes, bool(narrow),
        f"{_those(narrow)} has fewer lanes than it could: offload is slower there; "
        "check the slot and the riser",
    )  # fmt: skip
    slow = {index: gpu.slowed_by for index, gpu in enumerate(gpus) if gpu.slowed_by}
    whys = ", ".join(dict.fromkeys(slow.values()))
    yield (
        "GPU clocks", whys or "not slowed", bool(slow),
        f"{_those(slow)} runs below its clock, and all ranks wait for it: see "
        "`nvidia-smi --query --display=PERFORMANCE`",
    )  # fmt: skip


def _those(indices: Iterable[int]) -> str:
    found = [str(index) for index in indices]
    return f"GPU {' and '.join(found)}" if found else ""
