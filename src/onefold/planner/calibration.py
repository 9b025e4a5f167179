"""Turn measurements of this machine, at one model size, into a `Machine` for the simulator.

Every constant divides work by the seconds it took, both measured in the same run. Two more are
fitted to full steps, as the parts do not add up to a step: docs/measurements/time.md has both.
"""

from __future__ import annotations

import tempfile
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

from onefold.config import Precision, stage_of
from onefold.errors import ConfigError
from onefold.planner.costs import Conditions
from onefold.planner.machines import Efficiency, Link, Machine
from onefold.planner.models.loader import described, named_model
from onefold.planner.search import DTYPES
from onefold.planner.simulate import simulate, slowest_of
from onefold.planner.trace import Untraceable, tokens_of, trace
from onefold.planner.work import ModelWork
from onefold.recipe import Recipe
from onefold.text import counted, format_bytes, format_rate, format_seconds, format_share
from onefold.tier.host import free_host_nbytes, measure_disk, usable_cores
from onefold.wire.local_ranks import run_local

THIS_MACHINE = "this machine"
FASTEST = 1e18
"""The rate of work that the model does not have, as attention: it takes no time."""
MOST_PENALTY = 0.1
"""Seconds of one collective: longer than any scheduler makes it wait."""


class Whole(NamedTuple):
    """A full step of the model through the engine: micro-batches, AdamW, cleared gradients."""

    stage: int
    accumulate: int
    seconds: float


class Transfer(NamedTuple):
    """One collective of a unit of `nbytes`, while no other work runs.

    One rank's threads computed for `cpu_seconds` meanwhile.
    """

    nbytes: float
    seconds: float
    cpu_seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Speeds:
    """Speeds of one rank while `ranks` of them work side by side: the mean of all.

    seconds, flops, attention_flops: of the measured micro-batch.
    products, attention: FLOP/s. memory, optimizer: bytes a second of other kernels, and of AdamW.
    kernel_seconds: of the host around one kernel: Python, autograd, views.
    draws: random numbers a second, without the time to fill memory.
    gather, reduce: bytes that one rank sends in a second; hop_seconds: the latency of a hop, of
        n - 1. contention: see `contention_of`. A lone rank has no collectives.
    wholes: full steps, to which `with_whole_steps` fits the seconds that a collective takes longer
        in a step than alone (`overlap_penalty`), and seconds `step_overhead` every step.
    """

    ranks: int
    threads: int
    dtype: str
    seconds: float
    flops: float
    products: float
    attention_flops: float = 0.0
    attention: float = FASTEST
    memory: float
    kernel_seconds: float
    draws: float = FASTEST
    optimizer: float
    spread: float
    gather: float = FASTEST
    reduce: float = FASTEST
    hop_seconds: float = 0.0
    contention: float = 0.0
    wholes: tuple[Whole, ...] = ()
    overlap_penalty: float = 0.0
    step_overhead: float = 0.0

    def machine(self, ranks: int, disk_rate: float) -> Machine:
        """Return the rates of one rank, where all are as fast together as the measured ranks."""
        share = self.ranks / ranks
        # the penalty counts once a collective, which has ranks - 1 hops
        hop = self.hop_seconds + self.overlap_penalty / max(1, ranks - 1)
        link = Link(self.gather * share, hop / share)
        # ranks that share a core do not wait for a slow one: it has the core while they would
        waits = slowest_of(self.ranks) / slowest_of(ranks) if ranks > self.ranks > 1 else 1.0
        return Machine(
            THIS_MACHINE,
            {self.dtype: self.products * share},
            memory_rate=self.memory * share,
            memory_nbytes=0.0,
            inside=link,
            outside=link,
            efficiency=Efficiency(
                matmul=1.0,
                attention=self.attention / self.products,
                contention=self.contention,
                memory=1.0,
                reduce=self.reduce / self.gather,
                optimizer=self.optimizer / self.memory,
            ),
            ranks_per_node=ranks,
            cpu_rate=self.optimizer * share,
            disk_rate=disk_rate / ranks,
            kernel_seconds=self.kernel_seconds / share,
            launches_hide=False,
            step_seconds=self.step_overhead / share,
            spread=self.spread * waits,
            draw_rate=self.draws * share,
        )

    @staticmethod
    def of(fields: Mapping[str, Any]) -> Speeds:
        """Rebuild speeds from plain dicts, as JSON returns them."""
        return Speeds(**{**fields, "wholes": tuple(Whole(*step) for step in fields["wholes"])})


def rate_of(work: float, seconds: float) -> float:
    """Return work a second; `FASTEST` where there is no work."""
    return work / seconds if work > 0 and seconds > 0 else FASTEST


def link_of(small: Transfer, large: Transfer, ranks: int) -> tuple[float, float]:
    """Return a link's bytes a second and seconds of a hop: the line through two collectives."""
    share = (ranks - 1) / ranks
    rate = (large.nbytes - small.nbytes) * share / max(large.seconds - small.seconds, 1e-9)
    return rate, max(0.0, small.seconds - small.nbytes * share / rate) / (ranks - 1)


def contention_of(transfers: tuple[Transfer, ...], cores: float, threads: int) -> float:
    """Return the share of its speed that compute loses during a collective.

    Gloo's threads compute while they transfer. They take cores from the rank's compute where its
    share of the `cores` has no room for them.
    """
    busy = sum(t.cpu_seconds for t in transfers) / sum(t.seconds for t in transfers)
    return min(1.0, max(0.0, busy - max(0.0, cores - threads)) / threads)


# two constants, fitted to full steps


def with_whole_steps(speeds: Speeds, work: ModelWork | None) -> Speeds:
    """Fit `speeds` to its measured full steps of `work`, as closely as the constants allow.

    Collectives were measured alone. In a step they compete for the cores: each takes
    `overlap_penalty` seconds more, for any number of bytes. `step_overhead` is the rest of the step
    with the fewest collectives, as for memory that is freed and mapped again.
    """
    if not speeds.wholes or work is None:
        return speeds
    few, many = speeds.wholes[0], speeds.wholes[-1]

    def at(overlap_penalty: float) -> Speeds:
        slowed = replace(speeds, overlap_penalty=overlap_penalty, step_overhead=0.0)
        rest = few.seconds - predict_seconds(slowed, work, few)
        return replace(slowed, step_overhead=max(0.0, rest))

    if few is many:
        return at(0.0)
    least = MOST_PENALTY / 2**40
    rising = bisect_left(
        range(1 << 40), many.seconds, key=lambda n: predict_seconds(at(n * least), work, many)
    )
    return at(rising * least)


def predict_seconds(speeds: Speeds, work: ModelWork, whole: Whole) -> float:
    """Simulate one of the measured steps."""
    itemsize, ranks = 2 if speeds.dtype == "bf16" else 4, speeds.ranks
    recipe = Recipe(stage=stage_of(whole.stage), world_size=ranks, local_world_size=ranks)
    conditions = Conditions(
        accumulate=whole.accumulate, dtype=speeds.dtype, weight_itemsize=itemsize,
        grad_itemsize=itemsize,
    )  # fmt: skip
    return simulate(work, recipe, speeds.machine(ranks, 1.0), conditions).seconds


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
        by_ranks = {speeds.ranks: speeds for speeds in self.speeds}
        nearest = max((n for n in by_ranks if least <= n <= ranks), default=min(by_ranks))
        return by_ranks[nearest].machine(ranks, self.disk_rate)

    def lines(self) -> list[str]:
        """Describe the measurements for people."""
        return [line for speeds in self.speeds for line in self._lines(speeds)]

    def _lines(self, speeds: Speeds) -> tuple[str, str]:
        machine = speeds.machine(speeds.ranks, 1.0)
        ranks = f"{counted(speeds.ranks, 'rank')} of {counted(speeds.threads, 'thread')}"
        attends, has_links = speeds.attention_flops > 0, speeds.ranks > 1
        constants = [
            f"products {speeds.products / 1e9:.0f} GFLOP/s",
            *[f"attention {speeds.attention / 1e9:.0f}"] * attends,
            f"the rest {format_rate(speeds.memory)}",
            f"{format_seconds(speeds.kernel_seconds)} around a kernel",
            f"{speeds.draws / 1e9:.2f} G random numbers/s",
            f"AdamW {format_rate(speeds.optimizer)}",
            f"{format_seconds(speeds.step_overhead)} around a step",
            *[f"gathers {format_rate(speeds.gather)}"] * has_links,
            *[f"reductions {format_rate(speeds.reduce)}"] * has_links,
            *[f"{format_seconds(machine.inside.latency)} a hop in a step"] * has_links,
            *[f"compute meanwhile {format_share(1 - speeds.contention)}"] * has_links,
        ]
        return (
            f"measured here, {ranks}: a micro-batch of {self.model} "
            f"({format_bytes(4 * self.numel)} of weights in fp32, {self.tokens} tokens) in "
            f"{format_seconds(speeds.seconds)}",
            "  " + ", ".join(constants),
        )

    def as_dict(self) -> dict[str, Any]:
        """Return plain dicts for JSON."""
        return asdict(self)

    @staticmethod
    def of(fields: Mapping[str, Any]) -> Calibration:
        """Rebuild a calibration from `as_dict`."""
        return Calibration(**{**fields, "speeds": tuple(map(Speeds.of, fields["speeds"]))})


# running a model on the CPU ranks of this machine


ENTRY = "onefold.app.tools.calibration_rank:main"
WORDS = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: None}
HELD_NBYTES = 8
"""Copies of the weights in a rank of a calibration: weights and gradients of a plain module, the
same of a sharded one, and this rank's rows of both and of two moments."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """A model, by name or as a module, and a micro-batch of rows of `seq` tokens."""

    model: nn.Module | str
    seq: int = 128
    rows: int = 4
    precision: Precision | None = None
    recompute: bool = False


def calibrate(
    sample: Sample, worlds: Sequence[int] = (1, 2), *, patience: float = 1.0, runs: int = 3
) -> Calibration:
    """Measure CPU ranks of this machine in each world of `worlds`, for up to a minute each.

    Every rank gets its share of the cores as threads, as `onefold train` gives it. `patience` is
    a factor of that minute: at 0 every median is of as few passes as possible. The passes are
    spread over `runs`, each in fresh processes, and the run with the median micro-batch counts:
    the placement of memory and threads makes one process up to a fifth faster than the next.

    Raises:
        ConfigError: a model that cannot be built, does not fit, or does not run.
    """
    name, module = _look_at(sample, max(worlds))
    numel = sum(parameter.numel() for parameter in module.parameters())
    itemsize = next((parameter.itemsize for parameter in module.parameters()), 4)
    word = None
    if sample.precision is not None and sample.precision.compute is not None:
        word, itemsize = WORDS[sample.precision.compute], sample.precision.compute.itemsize
    request = {
        "name": name, "pickled": None, "seq": sample.seq, "rows": sample.rows, "precision": word,
        "recompute": sample.recompute, "dtype": DTYPES.get(itemsize, "fp32"),
        "patience": patience / runs,
    }  # fmt: skip

    def run(ranks: int) -> Speeds:
        threads = max(1, usable_cores() // ranks)
        return Speeds.of(run_local(ENTRY, request, ranks=ranks, threads=threads))

    with tempfile.TemporaryDirectory(prefix="onefold_") as folder:
        if isinstance(sample.model, nn.Module):
            request["pickled"] = _pickled(sample.model, Path(folder, "module.pt"))
        tokens = sample.rows * sample.seq
        try:
            micro = trace(module, tokens_of(sample.rows, sample.seq), precision=sample.precision)
            work = micro.work(tokens)
        except Untraceable:  # a plan would only estimate the work
            work = None
        middles = (middle([run(ranks) for _ in range(runs)]) for ranks in worlds)
        speeds = tuple(with_whole_steps(of_world, work) for of_world in middles)
        return Calibration(name, numel, tokens, speeds, measure_disk(folder))


def middle(runs: Sequence[Speeds]) -> Speeds:
    """Return the run with the median micro-batch; of an even number the faster of the two."""
    return sorted(runs, key=lambda speeds: speeds.seconds)[(len(runs) - 1) // 2]


def _look_at(sample: Sample, ranks: int) -> tuple[str, nn.Module]:
    """Return the name of a model that fits, and the model, without values if it was named."""
    name, module = named_model(sample.model, sample.seq, recomputes=sample.recompute)
    weights = sum(parameter.nbytes for parameter in module.parameters())
    if (needed := HELD_NBYTES * weights * ranks) > (free := free_host_nbytes()):
        raise ConfigError(
            f"{name} to fit into memory once for each of {ranks} ranks, with Adam's states",
            f"{format_bytes(needed)} where {format_bytes(free)} are free",
            hint="calibrate at a smaller model: rates carry over to other sizes",
        )
    return name, module


def _pickled(module: nn.Module, path: Path) -> str:
    try:
        torch.save(module, path)
    except Exception as error:
        wanted = f"{type(module).__name__} to be pickled, so that other processes can run it"
        hint = "name the model instead: module:function, a config.json or a preset"
        raise ConfigError(wanted, described(error), hint=hint) from error
    return str(path)
