"""What one rank of a calibration measures, beside its peers: a micro-batch, collectives, AdamW,
random numbers, and whole steps of the model.

The clock of a rank with one thread is its processor time, which goes on while it computes and
stands still while others have the core; with several threads it is the wall's.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import onefold
from onefold.config import precision_of
from onefold.errors import OnefoldError, expected
from onefold.host import usable_cores
from onefold.mesh.local_ranks import ASKED, FAILED, TOLD, end_with_starter
from onefold.mesh.world import World, joined
from onefold.models.gpt import VOCAB
from onefold.models.loader import build_model, described, recompute
from onefold.planner.calibration import Collective, MicroBatch, Speeds, TransferRate, Whole
from onefold.planner.storages import WorkDone, work_of_call
from onefold.planner.trace import default_loss

MICRO_SECONDS = 6.0
"""About how long micro-batches are measured, half of them watched."""
SHORT, SHORT_SECONDS = 8, 2.0
"""Tokens of a row at which kernels take next to no time; how long those are measured."""
MOST, LEAST = 15, 3
REPEATS, REPEAT_SECONDS = 9, 2.0
ROW = 1024
LARGE_ROWS, LARGE_UNITS = 2048, 3  # 8 MiB of fp32 a unit: about a block of a small model
SMALL_ROWS, SMALL_UNITS = 16, 12  # 64 KiB: a message whose latency counts
DRAWN = 1 << 20
WHOLE_SECONDS = 4.0
FEW, MANY = (2, 1), (3, 4)
"""Stage and micro-batches of whole steps: of as few collectives as can be, and of many."""
STD = 0.02
DEVIATION = 1.4826  # standard deviations of a normal value in its median absolute deviation


def main(folder: str) -> int:
    """Measure as `ASKED` says; rank 0 leaves `TOLD`. Whoever fails leaves why, and ends with 1."""
    end_with_starter()
    asked = json.loads(Path(folder, ASKED).read_text())
    try:
        with joined(use_gpus=False) as world:
            found = measure(world, asked)
    except Exception as error:
        why = str(error) if isinstance(error, OnefoldError) else described(error)
        if not isinstance(error, OnefoldError):
            hint = "it is called with tokens [batch, seq] and gives logits or a loss"
            why = expected(f"{asked['name']} to run a micro-batch", why, hint=hint)
        Path(folder, FAILED).write_text(why)
        return 1
    if world.rank == 0:
        Path(folder, TOLD).write_text(json.dumps(asdict(found)))
    return 0


def measure(world: World, asked: dict[str, Any]) -> Speeds:
    """What the ranks reached, the mean of all; a collective."""
    threads = torch.get_num_threads()
    compute = precision_of(asked["precision"]).compute
    tokens = torch.randint(VOCAB, (asked["rows"], asked["seq"]))
    module = _module(asked, compute)
    dtype = next((parameter.dtype for parameter in module.parameters()), torch.float32)
    ranks = _MeasuredRanks(world, asked["patience"])
    micro, spread = _micro_batch(ranks, module, tokens, threads)
    del module
    gather = reduce = None
    if world.world_size > 1:
        gather, reduce = _collectives(ranks, dtype)
    nbytes, seconds = _step(ranks, compute or torch.float32, _clock(threads))
    draw_rate = _draw_rate(ranks, dtype, _clock(threads))
    steps = (FEW, MANY) if world.world_size > 1 else (FEW,)
    wholes = tuple(_whole(ranks, asked, tokens, each, micro.seconds) for each in steps)
    own = Speeds(
        world.world_size, threads, usable_cores(), asked["dtype"], micro, nbytes, seconds,
        spread, gather, reduce, wholes, draw_rate=draw_rate,
    )  # fmt: skip
    return _mean(world, own)


@dataclass(frozen=True, slots=True)
class _MeasuredRanks:
    """All ranks, which begin everything together, and how long they take for it."""

    world: World
    patience: float  # a factor of all seconds below

    def rounds(self, most: int, seconds: float) -> Iterator[int]:
        """Rounds that begin together: at most so many, fewer where time runs out."""
        begun = time.perf_counter()
        for number in range(most):
            elapsed = max(self.world.gather(time.perf_counter() - begun))
            if number >= LEAST and elapsed > seconds * self.patience:
                return
            yield number


def _clock(threads: int) -> Callable[[], float]:
    return time.process_time if threads == 1 else time.perf_counter


def _mean(world: World, own: Speeds) -> Speeds:
    """The mean over ranks of every measured number."""
    from onefold.planner.calibration import speeds_of

    def mean(values: Sequence[Any]) -> Any:
        first = values[0]
        if isinstance(first, dict):
            return {key: mean([value[key] for value in values]) for key in first}
        if isinstance(first, tuple):
            return [mean(each) for each in zip(*values, strict=True)]
        return sum(values) / len(values) if isinstance(first, float) else first

    return speeds_of(mean(world.gather(asdict(own))))


# the micro-batch


def _module(asked: dict[str, Any], compute: torch.dtype | None) -> nn.Module:
    """The model with values of its own, whole on every rank."""
    if asked["pickled"] is None:
        module = build_model(asked["name"], asked["seq"])
        if asked["recompute"]:
            recompute(module, asked["name"])
    else:
        module = torch.load(asked["pickled"], weights_only=False)
    if any(tensor.is_meta for tensor in (*module.parameters(), *module.buffers())):
        module.to_empty(device="cpu")
        with torch.no_grad():
            for buffer in module.buffers():
                buffer.zero_()
            for parameter in module.parameters():
                nn.init.normal_(parameter, std=STD)
    return module.train() if compute is None else module.train().to(compute)


def train_once(module: nn.Module, tokens: Tensor) -> None:
    """Forward, backward, and the gradients given back."""
    default_loss(module(tokens)).backward()
    for parameter in module.parameters():
        parameter.grad = None


class Clocked(TorchDispatchMode):
    """Notes what every operation does and how long it takes, as the planner's trace counts them."""

    def __init__(self, clock: Callable[[], float]) -> None:
        super().__init__()
        self._clock = clock
        self.calls: list[tuple[WorkDone, float]] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        begun = self._clock()
        out = func(*args, **(kwargs or {}))
        seconds = self._clock() - begun
        if not func.is_view:
            self.calls.append((work_of_call(func, args, kwargs or {}, out), seconds))
        return out


def _micro_batch(ranks: _MeasuredRanks, module: nn.Module, tokens: Tensor, threads: int) -> _Found:
    """A micro-batch of `tokens`, and one so short that only the host takes time.

    What of the long one's seconds is neither inside a kernel nor of the host, as memory that is
    freed, or is there twice, belongs to its kernels in proportion.
    """
    short = tokens[:1, :SHORT]
    clock = _clock(threads)
    brief, _ = _passes(ranks, partial(train_once, module, short), clock, SHORT_SECONDS)
    whole, spread = _passes(ranks, partial(train_once, module, tokens), clock, MICRO_SECONDS)
    host = max(0.0, brief.seconds - brief.inside) * whole.num_kernels / max(1, brief.num_kernels)
    host = min(host, whole.seconds / 2)
    scale = (whole.seconds - host) / whole.inside if whole.inside else 1.0
    return MicroBatch(
        whole.seconds, whole.flops, whole.product_seconds * scale, whole.attention_flops,
        whole.attention_seconds * scale, whole.nbytes, whole.memory_seconds * scale,
        whole.num_kernels, host,
    ), spread  # fmt: skip


_Found = tuple[MicroBatch, float]


@dataclass(frozen=True, slots=True)
class _Passes:
    """The median pass: its seconds, and work and seconds inside its kernels."""

    seconds: float
    num_kernels: int
    flops: float
    attention_flops: float
    nbytes: float
    product_seconds: float
    attention_seconds: float
    memory_seconds: float
    drawing_seconds: float

    @property
    def inside(self) -> float:
        computed = self.product_seconds + self.attention_seconds
        return computed + self.memory_seconds + self.drawing_seconds


def _passes(
    ranks: _MeasuredRanks, train: Callable[[], None], clock: Callable[[], float], seconds: float
) -> tuple[_Passes, float]:
    """Plain passes and watched ones in turn, for about so long; and how much plain ones vary."""
    train()
    plain: list[float] = []
    watched: list[tuple[float, ...]] = []
    calls: list[tuple[WorkDone, float]] = []
    for _ in ranks.rounds(MOST, seconds):
        begun = clock()
        train()
        plain.append(clock() - begun)
        with Clocked(clock) as mode:
            train()
        calls = mode.calls
        watched.append(_inside(calls))
    done = [each for each, _ in calls]
    found = _Passes(
        median(plain), len(done), sum(each.flops for each in done),
        sum(each.attention_flops for each in done),
        sum(each.nbytes for each in done if not each.drawn),
        *(median(column) for column in zip(*watched, strict=True)),
    )  # fmt: skip
    deviation = median(abs(each - median(plain)) for each in plain)
    return found, DEVIATION * deviation / median(plain)


def _inside(calls: Sequence[tuple[WorkDone, float]]) -> tuple[float, ...]:
    """Seconds inside products, attention, all other kernels, and those that draw numbers."""
    products = sum(took for done, took in calls if done.flops)
    attention = sum(took for done, took in calls if done.attention_flops)
    drawing = sum(took for done, took in calls if done.drawn)
    rest = sum(took for _, took in calls) - products - attention - drawing
    return products, attention, rest, drawing


# collectives and the optimizer's step


class MeasuredRank(nn.Module):
    """A unit of one weight [rows, ROW] of which a forward reads one row: it computes nothing."""

    def __init__(self, rows: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(rows, ROW, dtype=dtype))

    def forward(self, x: Tensor) -> Tensor:
        """[ROW] to [ROW]."""
        return x + self.weight[0]


def _stack(rows: int, units: int, dtype: torch.dtype) -> nn.Sequential:
    return nn.Sequential(*(MeasuredRank(rows, dtype) for _ in range(units)))


@dataclass(frozen=True, slots=True)
class _Taken:
    seconds: float
    cpu_seconds: float


def _fastest(ranks: _MeasuredRanks, ready: Callable[[], Callable[[], object]]) -> _Taken:
    """Of some calls of what `ready` gives, begun together by all ranks."""
    found: list[_Taken] = []
    for _ in ranks.rounds(REPEATS, REPEAT_SECONDS):
        action = ready()
        ranks.world.gather(0)
        wall, cpu = time.perf_counter(), time.process_time()
        action()
        found.append(_Taken(time.perf_counter() - wall, time.process_time() - cpu))
    return _Taken(min(each.seconds for each in found), min(each.cpu_seconds for each in found))


def _collectives(ranks: _MeasuredRanks, dtype: torch.dtype) -> tuple[Collective, Collective]:
    """Gathers and reductions of small and large units, through the engine."""
    sizes = {"small": (SMALL_ROWS, SMALL_UNITS), "large": (LARGE_ROWS, LARGE_UNITS)}
    gathers: dict[str, TransferRate] = {}
    reduces: dict[str, TransferRate] = {}
    for size, (rows, units) in sizes.items():
        nbytes = float(rows * ROW * dtype.itemsize)
        gathers[size] = _per_unit(nbytes, units, *_gathers(ranks, rows, units, dtype))
        reduces[size] = _per_unit(nbytes, units, *_reduces(ranks, rows, units, dtype))
    return Collective(**gathers), Collective(**reduces)


def _per_unit(nbytes: float, units: int, whole: _Taken, plain: _Taken) -> TransferRate:
    """What the sharded stack takes more than the plain one."""
    seconds = max(whole.seconds - plain.seconds, 1e-9) / units
    cpu_seconds = max(whole.cpu_seconds - plain.cpu_seconds, 1e-9) / units
    return TransferRate(nbytes, max(seconds, cpu_seconds), cpu_seconds)


def _sharded(module: nn.Sequential, ranks: _MeasuredRanks, stage: int) -> nn.Module:
    units = list(module)
    return onefold.shard(module, stage=stage, units=units, mesh=ranks.world.group.handle)


def _gathers(
    ranks: _MeasuredRanks, rows: int, units: int, dtype: torch.dtype
) -> tuple[_Taken, _Taken]:
    """A forward without gradients at stage 3 gathers and frees each unit once."""
    x = torch.zeros(ROW, dtype=dtype)

    def forward(module: nn.Module) -> None:
        with torch.no_grad():
            module(x)

    plain = _stack(rows, units, dtype)
    whole = _sharded(_stack(rows, units, dtype), ranks, 3)
    forward(whole)
    ready = [partial(forward, module) for module in (whole, plain)]
    sharded, alone = (_fastest(ranks, lambda action=action: action) for action in ready)
    return sharded, alone


def _reduces(
    ranks: _MeasuredRanks, rows: int, units: int, dtype: torch.dtype
) -> tuple[_Taken, _Taken]:
    """A backward at stage 2, whose weights are there already, reduces each unit once."""
    x = torch.zeros(ROW, dtype=dtype)

    def ready(module: nn.Module) -> Callable[[], object]:
        for parameter in module.parameters():
            parameter.grad = None
        return module(x).float().sum().backward

    plain = _stack(rows, units, dtype)
    whole = _sharded(_stack(rows, units, dtype), ranks, 2)
    for _ in range(2):
        ready(whole)()
    sharded, alone = (_fastest(ranks, partial(ready, module)) for module in (whole, plain))
    return sharded, alone


def _step(
    ranks: _MeasuredRanks, dtype: torch.dtype, clock: Callable[[], float]
) -> tuple[float, float]:
    """Bytes that AdamW moves and the seconds of a step, states on the device."""
    rows = LARGE_ROWS * ranks.world.world_size
    module = _stack(rows, LARGE_UNITS, dtype if dtype is torch.float32 else torch.float32)
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-9)
    precision = None if dtype is torch.float32 else str(dtype).removeprefix("torch.")
    words = {"bfloat16": "bf16", "float16": "fp16", None: None}
    onefold.shard(
        module, optimizer, stage=3, units=list(module), mesh=ranks.world.group.handle,
        precision=words[precision],
    )  # fmt: skip
    found: list[float] = []
    for _ in ranks.rounds(REPEATS, REPEAT_SECONDS):
        module(torch.zeros(ROW)).float().sum().backward()
        ranks.world.gather(0)
        begun = clock()
        optimizer.step()
        found.append(clock() - begun)
        optimizer.zero_grad()
    moved = 28 if dtype is torch.float32 else 30  # bytes per own element: planner/run.py
    return float(LARGE_ROWS * LARGE_UNITS * ROW * moved), median(found[1:])


def _draw_rate(ranks: _MeasuredRanks, dtype: torch.dtype, clock: Callable[[], float]) -> float:
    """Random numbers a second, as dropout draws them, beyond what filling memory takes."""
    room = torch.empty(DRAWN, dtype=dtype)
    found: list[float] = []
    for _ in ranks.rounds(REPEATS, REPEAT_SECONDS):
        begun = clock()
        room.bernoulli_(0.9)
        drawn = clock()
        room.zero_()
        found.append((drawn - begun) - (clock() - drawn))
    return DRAWN / max(median(found), 1e-9)


def _whole(
    ranks: _MeasuredRanks,
    asked: dict[str, Any],
    tokens: Tensor,
    way: tuple[int, int],
    micro_seconds: float,
) -> Whole:
    """The median step of the model itself, sharded, in turn with plain micro-batches.

    Their ratio counts: a machine that is slower now than when `micro_seconds` were measured is so
    for both. Where every core has a rank of one thread, its processor time is the step's:
    nobody waits.
    """
    stage, accumulate = way
    plain = _module(asked, precision_of(asked["precision"]).compute)
    module = _module(asked, None)
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-9)
    onefold.shard(
        module, optimizer, stage=stage, mesh=ranks.world.group.handle, precision=asked["precision"]
    )
    threads = torch.get_num_threads()
    is_full = ranks.world.world_size >= usable_cores()
    clock = _clock(threads) if is_full else time.perf_counter
    found: list[float] = []
    for _ in ranks.rounds(MOST, WHOLE_SECONDS):
        begun = clock()
        train_once(plain, tokens)
        alone = clock() - begun
        begun = clock()
        for number in range(accumulate):
            with nullcontext() if number == accumulate - 1 else onefold.accumulate(module):
                default_loss(module(tokens)).backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append((clock() - begun) / alone)
    return Whole(stage, accumulate, median(found[1:]) * micro_seconds)
