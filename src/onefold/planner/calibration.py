"""Turn measurements of this machine, at one model size, into a `Machine` for the simulator.

Every constant divides work by the seconds it took, both measured in the same run.
docs/measurements/time.md says how each was measured, and which assumptions the quotients make. No
torch here.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from onefold.planner.machines import Efficiency, Link, Machine
from onefold.planner.simulate import slowest_of
from onefold.text import format_bytes

THIS_MACHINE = "this machine"
FASTEST = 1e18
"""The rate of work that the model does not have, as attention: it takes no time."""


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """One real forward and backward on one rank, and its operations by kind.

    `seconds` includes products, fused attention, every other kernel, kernels that draw random
    numbers (measured by themselves too), and the host around them: Python, autograd, views. The
    host's share was measured at a batch whose kernels take next to no time.
    """

    seconds: float
    flops: float
    product_seconds: float
    attention_flops: float
    attention_seconds: float
    nbytes: float
    memory_seconds: float
    num_kernels: int
    host_seconds: float

    @property
    def kernel_seconds(self) -> float:
        """Seconds of the host around one kernel."""
        return self.host_seconds / max(1, self.num_kernels)


@dataclass(frozen=True, slots=True)
class TransferRate:
    """One collective of a unit of `nbytes`, with nothing beside it.

    One rank's threads computed for `cpu_seconds` meanwhile.
    """

    nbytes: float
    seconds: float
    cpu_seconds: float


@dataclass(frozen=True, slots=True)
class Collective:
    """The same collective for a small and for a large unit: a line through two points."""

    small: TransferRate
    large: TransferRate

    def rate(self, ranks: int) -> float:
        """Return the bytes that one rank sends in a second, without the latency."""
        sent = (self.large.nbytes - self.small.nbytes) * (ranks - 1) / ranks
        return sent / max(self.large.seconds - self.small.seconds, 1e-9)

    def latency(self, ranks: int) -> float:
        """Return the seconds of one hop, of n - 1."""
        moving = self.small.nbytes * (ranks - 1) / ranks / self.rate(ranks)
        return max(0.0, self.small.seconds - moving) / (ranks - 1)


@dataclass(frozen=True, slots=True)
class Whole:
    """A full step of the model through the engine: micro-batches, AdamW, cleared gradients."""

    stage: int
    accumulate: int
    seconds: float


@dataclass(frozen=True, slots=True)
class Speeds:
    """Speeds of one rank while `ranks` of them work side by side on `cores`: the mean of all.

    AdamW moves `step_nbytes` in `step_seconds`. `draw_rate` counts random numbers a second, without
    the time to fill memory. A lone rank has no collectives. Two constants are fitted to `wholes`
    (planner/whole_steps.py): seconds that a collective takes longer in a step than alone
    (`overlap_penalty`), and seconds `step_overhead` every step.
    """

    ranks: int
    threads: int
    cores: int
    dtype: str
    micro_batch: MicroBatch
    step_nbytes: float
    step_seconds: float
    spread: float
    gather: Collective | None = None
    reduce: Collective | None = None
    wholes: tuple[Whole, ...] = ()
    overlap_penalty: float = 0.0
    step_overhead: float = 0.0
    draw_rate: float = FASTEST

    @property
    def contention(self) -> float:
        """The share of its speed that compute loses beside a collective.

        Gloo's threads compute while they transfer. They take cores from the rank's compute where
        its share of the cores has no room for them.
        """
        if self.gather is None or self.reduce is None:
            return 0.0
        both = (self.gather.large, self.reduce.large)
        busy = sum(each.cpu_seconds for each in both) / sum(each.seconds for each in both)
        room = max(0.0, self.cores / self.ranks - self.threads)
        return min(1.0, max(0.0, busy - room) / self.threads)

    def machine(self, ranks: int, disk_rate: float) -> Machine:
        """Return the rates of one rank, where all are as fast together as the measured ranks."""
        share = self.ranks / ranks
        link, reduce = Link(FASTEST, 0.0), 1.0
        if self.gather is not None and self.reduce is not None:
            n = self.ranks
            hop = (self.gather.latency(n) + self.reduce.latency(n)) / 2
            hop += self.overlap_penalty / max(1, ranks - 1)  # once a collective, of ranks - 1 hops
            link = Link(self.gather.rate(n) * share, hop / share)
            reduce = self.reduce.rate(n) / self.gather.rate(n)
        micro = self.micro_batch
        products = _rate(micro.flops, micro.product_seconds)
        memory = _rate(micro.nbytes, micro.memory_seconds)
        attention = _rate(micro.attention_flops, micro.attention_seconds)
        stepped = _rate(self.step_nbytes, self.step_seconds)
        # ranks that share a core do not wait for a slow one: it has the core while they would
        waits = slowest_of(self.ranks) / slowest_of(ranks) if ranks > self.ranks > 1 else 1.0
        return Machine(
            THIS_MACHINE,
            {self.dtype: products * share},
            memory_rate=memory * share,
            memory_nbytes=0.0,
            inside=link,
            outside=link,
            efficiency=Efficiency(
                matmul=1.0,
                attention=attention / products,
                contention=self.contention,
                memory=1.0,
                reduce=reduce,
                optimizer=stepped / memory,
            ),
            ranks_per_node=ranks,
            cpu_rate=stepped * share,
            disk_rate=disk_rate / ranks,
            kernel_seconds=micro.kernel_seconds / share,
            launches_hide=False,
            step_seconds=self.step_overhead / share,
            spread=self.spread * waits,
            draw_rate=self.draw_rate * share,
        )


def _rate(work: float, seconds: float) -> float:
    return work / seconds if work > 0 and seconds > 0 else FASTEST


@dataclass(frozen=True, slots=True)
class Calibration:
    """One calibration: the model that ran, and the speeds of ranks alone or side by side."""

    model: str
    numel: int
    tokens: int  # of its micro-batch on one rank
    speeds: tuple[Speeds, ...]
    disk_rate: float  # bytes per second of this host's disk, for all ranks

    def machine(self, ranks: int) -> Machine:
        """Return this machine for a number of ranks, from the nearest number that was measured.

        More ranks than were measured share the same cores: together they are as fast.
        """
        least = min(2, ranks)  # a lone rank has no collectives
        fewer = [each for each in self.speeds if least <= each.ranks <= ranks] or [
            min(self.speeds, key=lambda each: each.ranks)
        ]
        return max(fewer, key=lambda each: each.ranks).machine(ranks, self.disk_rate)

    def lines(self) -> list[str]:
        """Describe the measurements for people."""
        return [line for each in self.speeds for line in _lines(self, each)]

    def as_dict(self) -> dict[str, Any]:
        """Return plain dicts for JSON: the measurements, and the constants derived from them."""
        return {
            **asdict(self),
            "speeds": [asdict(each) | {"constants": _constants(each)} for each in self.speeds],
        }

    @staticmethod
    def of(fields: Mapping[str, Any]) -> Calibration:
        """Rebuild a calibration from `as_dict`."""
        return Calibration(**{**fields, "speeds": tuple(map(speeds_of, fields["speeds"]))})


def speeds_of(fields: Mapping[str, Any]) -> Speeds:
    """Rebuild `Speeds` from plain dicts, as JSON returns them."""
    plain = {key: value for key, value in fields.items() if key != "constants"}
    plain["micro_batch"] = MicroBatch(**plain["micro_batch"])
    plain["wholes"] = tuple(Whole(**each) for each in plain["wholes"])
    for name in ("gather", "reduce"):
        if plain[name] is not None:
            sizes = {size: TransferRate(**each) for size, each in plain[name].items()}
            plain[name] = Collective(**sizes)
    return Speeds(**plain)


_TEXTS: dict[str, Callable[[float], str]] = {
    "products_flops_per_s": lambda rate: f"products {rate / 1e9:.0f} GFLOP/s",
    "attention_flops_per_s": lambda rate: f"attention {rate / 1e9:.0f}",
    "memory_bytes_per_s": lambda rate: f"the rest {rate / 1e9:.1f} GB/s",
    "kernel_seconds": lambda seconds: f"{seconds * 1e6:.0f} us around a kernel",
    "random_numbers_per_s": lambda rate: f"{rate / 1e9:.2f} G random numbers/s",
    "optimizer_bytes_per_s": lambda rate: f"AdamW {rate / 1e9:.1f} GB/s",
    "seconds_around_a_step": lambda seconds: f"{seconds * 1e3:.0f} ms around a step",
    "gather_bytes_per_s": lambda rate: f"gathers {rate / 1e9:.2f} GB/s",
    "reduce_bytes_per_s": lambda rate: f"reductions {rate / 1e9:.2f} GB/s",
    "latency_seconds": lambda seconds: f"{seconds * 1e3:.2f} ms a hop in a step",
    "contention": lambda share: f"compute beside them {1 - share:.0%}",
}
"""Constants for people, in order."""


def _constants(speeds: Speeds) -> dict[str, float]:
    """Return the numbers that the simulator reads, for one rank."""
    machine = speeds.machine(speeds.ranks, 1.0)
    efficiency, link = machine.efficiency, machine.inside
    products = machine.peak(speeds.dtype)
    found = {
        "products_flops_per_s": products,
        "memory_bytes_per_s": machine.memory_rate,
        "kernel_seconds": machine.kernel_seconds,
        "optimizer_bytes_per_s": machine.cpu_rate,
        "seconds_around_a_step": machine.step_seconds,
        "spread": machine.spread,
        "random_numbers_per_s": machine.draw_rate,
    }
    if speeds.micro_batch.attention_flops:
        found["attention_flops_per_s"] = products * efficiency.attention
    if speeds.gather is not None:
        found |= {
            "gather_bytes_per_s": link.nbytes_per_second,
            "reduce_bytes_per_s": link.nbytes_per_second * efficiency.reduce,
            "latency_seconds": link.latency,
            "contention": efficiency.contention,
        }
    return found


def _lines(made: Calibration, speeds: Speeds) -> list[str]:
    found = _constants(speeds)
    ranks = f"{speeds.ranks} ranks" if speeds.ranks > 1 else "1 rank"
    threads = f"{speeds.threads} threads" if speeds.threads > 1 else "1 thread"
    return [
        f"measured here, {ranks} of {threads}: a micro-batch of {made.model} "
        f"({format_bytes(4 * made.numel)} of weights in fp32, {made.tokens} tokens) in "
        f"{speeds.micro_batch.seconds:.3f} s",
        "  " + ", ".join(text(found[name]) for name, text in _TEXTS.items() if name in found),
    ]
