"""What `onefold doctor` says of GPUs, from a driver's library that answers as a test wants."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import pytest

from onefold.app.tools import machine
from onefold.app.tools.gpu_health import SLOWING, GpuHealth, gpu_health, judged_gpus

BITS = {
    "nvmlClocksEventReasonHwSlowdown": 0x8,
    "nvmlClocksEventReasonSwThermalSlowdown": 0x20,
    "nvmlClocksEventReasonHwThermalSlowdown": 0x40,
    "nvmlClocksEventReasonHwPowerBrakeSlowdown": 0x80,
}
SW_POWER_CAP = 0x4
GOOD = {"links": 18, "lanes": 16, "most": 16, "reasons": SW_POWER_CAP}


class NVMLError(Exception):
    """The library's own error."""


def library(monkeypatch: pytest.MonkeyPatch, *gpus: dict[str, int]) -> list[str]:
    """Put a library with these GPUs in the place of nvidia-ml-py; returns its begins and ends."""
    calls: list[str] = []

    def link_state(gpu: dict[str, int], link: int) -> int:
        if not gpu["links"]:
            raise NVMLError("Not Supported")
        return int(link < gpu["links"])

    fake: Any = SimpleNamespace(
        NVMLError=NVMLError,
        NVML_NVLINK_MAX_LINKS=36,
        nvmlInit=lambda: calls.append("begin"),
        nvmlShutdown=lambda: calls.append("end"),
        nvmlDeviceGetCount=lambda: len(gpus),
        nvmlDeviceGetHandleByIndex=lambda index: gpus[index],
        nvmlDeviceGetNvLinkState=link_state,
        nvmlDeviceGetCurrPcieLinkWidth=lambda gpu: gpu["lanes"],
        nvmlDeviceGetMaxPcieLinkWidth=lambda gpu: gpu["most"],
        nvmlDeviceGetCurrentClocksEventReasons=lambda gpu: gpu["reasons"],
        **BITS,
    )
    monkeypatch.setitem(sys.modules, "pynvml", fake)
    return calls


def levels(monkeypatch: pytest.MonkeyPatch, *gpus: dict[str, int]) -> dict[str, tuple[str, str]]:
    library(monkeypatch, *gpus)
    return {check.name: (check.level, check.value) for check in machine._gpu_checks()}


def test_eight_alike_gpus_are_fine_also_at_their_cap_of_power(monkeypatch):
    assert levels(monkeypatch, *[GOOD] * 8) == {
        "NVLink": ("ok", "18 links a GPU"),
        "PCIe": ("ok", "x16"),
        "GPU clocks": ("ok", "not slowed"),
    }


@pytest.mark.parametrize(
    ("name", "change", "value"),
    [
        ("NVLink", {"links": 17}, "18 links a GPU"),
        ("NVLink", {"links": 0}, "18 links a GPU"),
        ("PCIe", {"lanes": 8}, "x8, x16"),
        ("GPU clocks", {"reasons": 0x20}, "too hot"),
        ("GPU clocks", {"reasons": 0x40 | 0x20}, "too hot"),
        ("GPU clocks", {"reasons": 0x80}, "the host limits its power"),
        ("GPU clocks", {"reasons": 0x8}, "the hardware slows it"),
    ],
)
def test_one_gpu_that_is_worse_is_a_warning_that_names_it(monkeypatch, name, change, value):
    found = levels(monkeypatch, GOOD, {**GOOD, **change}, GOOD)
    assert found[name] == ("warn", value)
    assert [level for level, _ in found.values()].count("warn") == 1
    remedies = [check.remedy for check in machine._gpu_checks() if check.name == name]
    assert remedies[0].startswith("GPU 1 ")


def test_gpus_without_nvlink_have_none_and_that_is_no_warning(monkeypatch):
    assert levels(monkeypatch, *[{**GOOD, "links": 0}] * 2)["NVLink"] == ("ok", "none")


def test_the_library_is_ended_also_when_a_gpu_is_lost(monkeypatch):
    calls = library(monkeypatch, GOOD)
    assert gpu_health() == [GpuHealth(18, 16, 16, "")]
    fake: Any = sys.modules["pynvml"]

    def lost(index: int) -> Any:
        raise NVMLError("GPU is lost")

    fake.nvmlDeviceGetHandleByIndex = lost
    assert gpu_health() == []
    assert calls == ["begin", "end"] * 2


def test_without_the_library_or_a_driver_nothing_is_said(monkeypatch):
    monkeypatch.setitem(sys.modules, "pynvml", None)
    assert machine._gpu_checks() == []
    library(monkeypatch)

    def refuse() -> None:
        raise NVMLError("Driver Not Loaded")

    fake: Any = sys.modules["pynvml"]
    fake.nvmlInit = refuse
    assert gpu_health() == []
    assert list(judged_gpus([])) == []


def test_the_names_of_reasons_are_those_of_the_library():
    nvml = pytest.importorskip("pynvml")
    assert {name: getattr(nvml, name) for name in SLOWING} == BITS
