"""What it costs to code and to read a message. No torch here.

On the CPU: rates that benchmarks/codec.py measured (docs/codecs.md), of one core. On a GPU nobody
has measured it: the bytes that torch's passes over fp32 move, counted in wire/codec.py and
wire/rotation.py, at the machine's rate for kernels that wait for memory.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import NamedTuple

from onefold.planner.machines import Machine


class Coding(NamedTuple):
    """Of writing a message, and of adding one to a sum."""

    encode: float
    add: float


CPU_RATES: Mapping[str, Coding] = MappingProxyType(
    {
        "int8": Coding(17.4, 15.6), "int4": Coding(14.4, 13.5),
        "int8+h": Coding(5.3, 5.9), "int4+h": Coding(5.7, 7.3),
    }
)  # fmt: skip
"""GB/s of fp32 on one core, the kernel in C where there is one."""

GPU_NBYTES: Mapping[str, Coding] = MappingProxyType(
    {
        "int8": Coding(41, 25), "int4": Coding(52, 46),
        "int8+h": Coding(125, 101), "int4+h": Coding(136, 122),
    }
)  # fmt: skip
"""Bytes that passes over one element read and write."""


def seconds_of(codec: str, machine: Machine) -> Coding:
    """Seconds per element on `machine`; none for exact messages."""
    if codec not in CPU_RATES:
        return Coding(0.0, 0.0)
    if machine.launches_hide:
        rate = machine.memory_rate * machine.efficiency.memory
        return Coding(*(nbytes / rate for nbytes in GPU_NBYTES[codec]))
    return Coding(*(4 / (rate * 1e9) for rate in CPU_RATES[codec]))
