"""Machines as data: peak speeds from data sheets, links from measurements, three fitted constants.

docs/measurements/time.md says where every figure comes from, and how far the published runs are
from it. No figure is measured here: `onefold.fit.rates` measures the machine that it runs on.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from types import MappingProxyType

from onefold.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Link:
    """`nbytes_per_second` of one rank in one direction; `latency`: seconds of one hop of a ring."""

    nbytes_per_second: float
    latency: float


@dataclass(frozen=True, slots=True)
class Efficiency:
    """The shares of a data sheet that runs reach, between 0 and 1.

    `matmul` and `attention` (a fused kernel) are shares of the peak FLOP/s, `memory` of the memory
    bandwidth, `link` of both links'. `contention` is the share of its speed that compute loses
    while a collective runs.
    """

    matmul: float
    attention: float
    contention: float = 0.0
    memory: float = 0.85
    link: float = 1.0


@dataclass(frozen=True, slots=True)
class Machine:
    """One kind of node and the network between nodes; rates in bytes per second of one rank.

    flops: dense peak per dtype, in FLOP/s.
    inside, outside: bus bandwidth of a collective in the node; a rank's share of network cards.
    host_rate: one direction between device and host.
    cpu_rate, disk_rate: a rank's share of host memory traffic, and of the disks.
    kernel_seconds: host time of one kernel launch, which hides behind the kernel before.
    spread: standard deviation of a rank's compute time relative to its mean, for stragglers.
    """

    name: str
    flops: Mapping[str, float]
    memory_rate: float
    memory_nbytes: float
    inside: Link
    outside: Link
    efficiency: Efficiency
    ranks_per_node: int = 8
    host_rate: float = 25e9
    cpu_rate: float = 20e9
    disk_rate: float = 2e9
    kernel_seconds: float = 5e-6
    spread: float = 0.0

    def peak(self, dtype: str) -> float:
        """Return the dense peak of `dtype` in FLOP/s; `ConfigError` for an unknown one."""
        if dtype not in self.flops:
            known = f"a dtype that {self.name} has a peak for: {', '.join(self.flops)}"
            hint = "name the dtype of matrix products, as in Conditions(dtype='bf16')"
            raise ConfigError(known, repr(dtype), hint=hint)
        return self.flops[dtype]


NVLINK_HOP, NETWORK_HOP = 4e-6, 20e-6  # seconds, derived in docs/measurements/time.md
NETWORK_SHARE = 0.74  # of a card's rate that collectives reach: 8x B200, 400 Gb/s cards


def _network(gigabits: float) -> Link:
    """One network card per rank."""
    return Link(gigabits / 8 * 1e9 * NETWORK_SHARE, NETWORK_HOP)


_AMPERE = MappingProxyType({"bf16": 312e12, "fp16": 312e12, "tf32": 156e12, "fp32": 19.5e12})
_HOPPER = MappingProxyType(
    {"fp8": 1979e12, "bf16": 989e12, "fp16": 989e12, "tf32": 494e12, "fp32": 67e12}
)
_BLACKWELL = MappingProxyType(
    {"fp8": 4500e12, "bf16": 2250e12, "fp16": 2250e12, "tf32": 1125e12, "fp32": 75e12}
)
FITS: Mapping[str, Efficiency] = MappingProxyType(
    {
        "FSDP 2023, H100": Efficiency(0.80, 0.16, 0.95, 0.26),
        "FSDP 2023, A100": Efficiency(0.87, 0.33, 0.95, 0.25),
        "FSDP2 2024, H100": Efficiency(0.47, 0.35, 0.50, 0.54),
        "ZeRO-3 2021, A100": Efficiency(0.59, 0.33, 0.15, 0.50, link=0.11),
    }
)
"""Fits to published runs by benchmarks/published.py; docs/measurements/time.md shows them."""

MACHINES: Mapping[str, Machine] = MappingProxyType(
    {
        machine.name: machine
        for machine in (
            Machine("a100-40", _AMPERE, 1.555e12, 40e9, Link(235e9, NVLINK_HOP), _network(200),
                    FITS["FSDP 2023, A100"]),
            Machine("a100-80", _AMPERE, 2.039e12, 80e9, Link(235e9, NVLINK_HOP), _network(200),
                    FITS["FSDP 2023, A100"]),
            Machine("h100-80", _HOPPER, 3.35e12, 80e9, Link(360e9, NVLINK_HOP), _network(400),
                    FITS["FSDP2 2024, H100"], host_rate=50e9),
            Machine("h100-96-500w", _HOPPER, 2.4e12, 96e9, Link(360e9, NVLINK_HOP), _network(400),
                    FITS["FSDP2 2024, H100"], host_rate=50e9),
            Machine("h200", _HOPPER, 4.8e12, 141e9, Link(360e9, NVLINK_HOP), _network(400),
                    FITS["FSDP2 2024, H100"], host_rate=50e9),
            Machine("b200", _BLACKWELL, 8.0e12, 180e9, Link(720e9, NVLINK_HOP), _network(400),
                    FITS["FSDP2 2024, H100"], host_rate=50e9),
        )
    }
)  # fmt: skip


_SHORT = {"a100": "a100-80", "h100": "h100-80"}
"""The usual variant of a machine that has several."""


def machine_of(name: str) -> Machine:
    """Return the machine called `name`, in any case; `ConfigError` lists the known ones."""
    known = name.strip().lower()
    known = _SHORT.get(known, known)
    if known not in MACHINES:
        close = get_close_matches(known, MACHINES, n=1, cutoff=0.5)
        other = "describe any other machine with onefold.planner.machines.Machine(...)"
        hint = f"did you mean {close[0]}?" if close else other
        raise ConfigError(f"a GPU among {', '.join(MACHINES)}", repr(name), hint=hint)
    return MACHINES[known]
