"""Measure one rank of a calibration among its peers: a micro-batch, collectives, AdamW, random
numbers, and full steps of the model.

A rank with one thread uses its processor time, which stands still while other processes have the
core. A rank with several threads uses wall time.
"""

import json
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from statistics import fmean, median
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import onefold
from onefold.config import PrecisionChoice, StageNumber, precision_of
from onefold.errors import OnefoldError, expected
from onefold.planner.calibration import Speeds, Transfer, Whole, contention_of, link_of, rate_of
from onefold.planner.models.gpt import VOCAB
from onefold.planner.models.loader import build_model, described, recompute
from onefold.planner.storages import work_of_call
from onefold.planner.trace import default_loss
from onefold.planner.work import Work
from onefold.tier.host import usable_cores
from onefold.wire.local_ranks import ANSWER, ASKED, FAILED, end_with_starter
from onefold.wire.world import World, joined

T = TypeVar("T")

MICRO_SECONDS = 6.0
"""Seconds for micro-batches, half of them watched."""
SHORT, SHORT_SECONDS = 8, 2.0
"""Tokens of a row so short that kernels take next to no time, and seconds for those passes."""
MOST, LEAST = 15, 3
REPEATS, REPEAT_SECONDS = 9, 2.0
ROW = 1024
LARGE_ROWS, LARGE_UNITS = 2048, 3  # 8 MiB of fp32 a unit: about a block of a small model
SMALL_ROWS, SMALL_UNITS = 16, 12  # 64 KiB: a message whose latency counts
DRAWN = 1 << 20
WHOLE_SECONDS = 4.0
FEW: tuple[StageNumber, int] = (2, 1)
MANY: tuple[StageNumber, int] = (3, 4)
"""Stage and micro-batches of full steps: with the fewest collectives, and with many."""
STD = 0.02
DEVIATION = 1.4826  # standard deviations of a normal value in its median absolute deviation


def main(folder: str) -> int:
    """Measure as `ASKED` says. Rank 0 writes `ANSWER`; a rank that fails writes `FAILED`."""
    end_with_starter()
    request = json.loads(Path(folder, ASKED).read_text())
    try:
        with joined(use_gpus=False) as world:
            speeds = measure(world, request)
    except Exception as error:
        why = str(error) if isinstance(error, OnefoldError) else described(error)
        if not isinstance(error, OnefoldError):
            hint = "it is called with tokens [batch, seq] and gives logits or a loss"
            why = expected(f"{request['name']} to run a micro-batch", why, hint=hint)
        Path(folder, FAILED).write_text(why)
        return 1
    if world.rank == 0:
        Path(folder, ANSWER).write_text(json.dumps(asdict(speeds)))
    return 0


def measure(world: World, request: dict[str, Any]) -> Speeds:
    """Return the mean speeds of all ranks. A collective."""
    compute = precision_of(request["precision"]).compute
    tokens = torch.randint(VOCAB, (request["rows"], request["seq"]))
    module = _module(request, compute)
    dtype = next((parameter.dtype for parameter in module.parameters()), torch.float32)
    threads = torch.get_num_threads()
    clock = time.process_time if threads == 1 else time.perf_counter
    ranks = _MeasuredRanks(world, request["patience"], clock)
    micro = _micro_batch(ranks, module, tokens)
    del module
    has_peers = world.world_size > 1
    speeds = Speeds(
        ranks=world.world_size, threads=threads, dtype=request["dtype"], **micro,
        **(_links(ranks, threads, dtype) if has_peers else {}),
        optimizer=_optimizer_rate(ranks, request["precision"]), draws=_draw_rate(ranks, dtype),
    )  # fmt: skip
    steps = (FEW, MANY) if has_peers else (FEW,)
    wholes = (_full_step(ranks, request, tokens, way, speeds.seconds) for way in steps)
    return replace(speeds, wholes=tuple(wholes))


@dataclass(frozen=True, slots=True)
class _MeasuredRanks:
    """All ranks, which begin every measurement together."""

    world: World
    patience: float  # a factor of all seconds above
    clock: Callable[[], float]

    def repeat(self, most: int, seconds: float, take: Callable[[], T]) -> list[T]:
        """Take a measurement up to `most` times, fewer where time runs out."""
        begun, results = time.perf_counter(), list[T]()
        while len(results) < most:
            elapsed = max(self.world.group.gather(time.perf_counter() - begun))
            if len(results) >= LEAST and elapsed > seconds * self.patience:
                break
            results.append(take())
        return results

    def timed(self, action: Callable[[], object]) -> float:
        """Return the seconds of one call, by this rank's clock."""
        begun = self.clock()
        action()
        return self.clock() - begun

    def mean(self, *values: float) -> list[float]:
        """Return the mean of each value over all ranks."""
        return [fmean(column) for column in zip(*self.world.group.gather(values), strict=True)]


# the micro-batch


def _module(request: dict[str, Any], compute: torch.dtype | None) -> nn.Module:
    """Build the model with random values, unsharded on every rank."""
    if request["pickled"] is None:
        module = build_model(request["name"], request["seq"])
        if request["recompute"]:
            recompute(module, request["name"])
    else:
        module = torch.load(request["pickled"], weights_only=False)
    if any(tensor.is_meta for tensor in (*module.parameters(), *module.buffers())):
        module.to_empty(device="cpu")
        with torch.no_grad():
            for buffer in module.buffers():
                buffer.zero_()
            for parameter in module.parameters():
                nn.init.normal_(parameter, std=STD)
    return module.train() if compute is None else module.train().to(compute)


def train_once(module: nn.Module, tokens: Tensor) -> None:
    """Run forward and backward, and drop the gradients."""
    default_loss(module(tokens)).backward()
    for parameter in module.parameters():
        parameter.grad = None


class Clocked(TorchDispatchMode):
    """Record the work and seconds of every operation, counted as the planner's trace counts it."""

    def __init__(self, clock: Callable[[], float]) -> None:
        super().__init__()
        self._clock = clock
        self.calls: list[tuple[Work, float]] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        begun = self._clock()
        out = func(*args, **(kwargs or {}))
        seconds = self._clock() - begun
        if not func.is_view:
            self.calls.append((work_of_call(func, args, kwargs or {}, out), seconds))
        return out


def _micro_batch(ranks: _MeasuredRanks, module: nn.Module, tokens: Tensor) -> dict[str, Any]:
    """Measure a micro-batch of `tokens`, and one so short that only the host takes time.

    Seconds of the long one that are neither inside a kernel nor of the host, as for memory that is
    freed or cached twice, are added to its kernels in proportion.
    """
    brief = _passes(ranks, partial(train_once, module, tokens[:1, :SHORT]), SHORT_SECONDS)
    long = _passes(ranks, partial(train_once, module, tokens), MICRO_SECONDS)
    seconds, inside = median(long.plain), sum(long.inside)
    host_of_brief = max(0.0, median(brief.plain) - sum(brief.inside))
    host = min(seconds / 2, host_of_brief * len(long.work) / max(1, len(brief.work)))
    scale = (seconds - host) / inside if inside else 1.0
    deviation = median(abs(taken - seconds) for taken in long.plain)
    spread = DEVIATION * deviation / seconds
    seconds, host, spread, *inside_means = ranks.mean(
        seconds, host, spread, *(scale * part for part in long.inside)
    )
    flops = sum(work.flops for work in long.work)
    attended = sum(work.attention_flops for work in long.work)
    moved = sum(work.nbytes for work in long.work if not work.drawn)
    products, attention, rest, _ = inside_means
    return {
        "seconds": seconds, "flops": flops, "attention_flops": attended, "spread": spread,
        "products": rate_of(flops, products), "attention": rate_of(attended, attention),
        "memory": rate_of(moved, rest), "kernel_seconds": host / max(1, len(long.work)),
    }  # fmt: skip


@dataclass(frozen=True, slots=True)
class _Passes:
    """Seconds of every plain pass, the operations of a pass, and medians of `_inside`."""

    plain: list[float]
    work: list[Work]
    inside: list[float]


def _passes(ranks: _MeasuredRanks, train: Callable[[], None], seconds: float) -> _Passes:
    """Run plain passes and watched ones in turn, for about so many seconds."""
    train()

    def take() -> tuple[float, list[tuple[Work, float]]]:
        plain = ranks.timed(train)
        with Clocked(ranks.clock) as mode:
            train()
        return plain, mode.calls

    taken = ranks.repeat(MOST, seconds, take)
    columns = zip(*(_inside(calls) for _, calls in taken), strict=True)
    work = [done for done, _ in taken[-1][1]]
    return _Passes([plain for plain, _ in taken], work, [median(column) for column in columns])


def _inside(calls: Sequence[tuple[Work, float]]) -> tuple[float, ...]:
    """Sum seconds inside products, attention, all other kernels, and random numbers."""
    products = sum(took for done, took in calls if done.flops)
    attention = sum(took for done, took in calls if done.attention_flops)
    drawing = sum(took for done, took in calls if done.drawn)
    rest = sum(took for _, took in calls) - products - attention - drawing
    return products, attention, rest, drawing


# collectives


class MeasuredRank(nn.Module):
    """A unit of one weight [rows, ROW]. Its forward reads one row, so compute takes no time."""

    def __init__(self, rows: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(rows, ROW, dtype=dtype))

    def forward(self, x: Tensor) -> Tensor:
        """[ROW] to [ROW]."""
        return x + self.weight[0]


def _stack(rows: int, units: int, dtype: torch.dtype) -> nn.Sequential:
    return nn.Sequential(*(MeasuredRank(rows, dtype) for _ in range(units)))


Ready = Callable[[nn.Module, Tensor], Callable[[], object]]
"""Prepares a module, and returns the action to be timed."""


def _forward(module: nn.Module, x: Tensor) -> Callable[[], object]:
    """Run forward without gradients: at stage 3 it gathers and frees each unit once."""

    def forward() -> None:
        with torch.no_grad():
            module(x)

    return forward


def _backward(module: nn.Module, x: Tensor) -> Callable[[], object]:
    """Run backward: at stage 2, where forward has gathered, it reduces each unit once."""
    for parameter in module.parameters():
        parameter.grad = None
    return module(x).float().sum().backward


def _links(ranks: _MeasuredRanks, threads: int, dtype: torch.dtype) -> dict[str, Any]:
    """Measure gathers and reductions of small and of large units, through the engine."""
    n, stacks = ranks.world.world_size, ((SMALL_ROWS, SMALL_UNITS), (LARGE_ROWS, LARGE_UNITS))
    small, large = (_transfer(ranks, 3, _forward, _stack(*sizes, dtype)) for sizes in stacks)
    gather, gather_hop = link_of(small, large, n)
    small, large_sum = (_transfer(ranks, 2, _backward, _stack(*sizes, dtype)) for sizes in stacks)
    reduce, reduce_hop = link_of(small, large_sum, n)
    return {
        "gather": gather, "reduce": reduce, "hop_seconds": (gather_hop + reduce_hop) / 2,
        "contention": contention_of((large, large_sum), usable_cores() / n, threads),
    }  # fmt: skip


def _transfer(
    ranks: _MeasuredRanks, stage: StageNumber, ready: Ready, plain: nn.Sequential
) -> Transfer:
    """Return the seconds per unit that a sharded copy of a stack takes beyond the plain one."""
    units, weight = len(plain), plain[0].weight
    assert isinstance(weight, Tensor), "a unit has a weight"
    module = _stack(len(weight), units, weight.dtype)
    onefold.shard(module, stage=stage, units=list(module), mesh=ranks.world.group.handle)
    x = torch.zeros(ROW, dtype=weight.dtype)

    def fastest(module: nn.Module) -> tuple[float, float]:
        def take() -> tuple[float, float]:
            action = ready(module, x)
            ranks.world.group.gather(0)
            wall, cpu = time.perf_counter(), time.process_time()
            action()
            return time.perf_counter() - wall, time.process_time() - cpu

        walls, cpus = zip(*ranks.repeat(REPEATS, REPEAT_SECONDS, take), strict=True)
        return min(walls), min(cpus)

    for _ in range(2):
        ready(module, x)()
    sharded, alone = fastest(module), fastest(plain)
    wall, cpu = (max(a - b, 1e-9) / units for a, b in zip(sharded, alone, strict=True))
    return Transfer(float(weight.nbytes), *ranks.mean(max(wall, cpu), cpu))


# the optimizer, random numbers, full steps


def _optimizer_rate(ranks: _MeasuredRanks, precision: PrecisionChoice) -> float:
    """Return the bytes that AdamW moves in a second, states on the device."""
    rows = LARGE_ROWS * ranks.world.world_size
    module = _stack(rows, LARGE_UNITS, torch.float32)
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-9)
    onefold.shard(
        module, optimizer, stage=3, units=list(module), mesh=ranks.world.group.handle,
        precision=precision,
    )  # fmt: skip

    def take() -> float:
        module(torch.zeros(ROW)).float().sum().backward()
        ranks.world.group.gather(0)
        seconds = ranks.timed(optimizer.step)
        optimizer.zero_grad()
        return seconds

    (seconds,) = ranks.mean(median(ranks.repeat(REPEATS, REPEAT_SECONDS, take)[1:]))
    moved = 28 if precision is None else 30  # bytes per own element: planner/work.py
    return rate_of(float(LARGE_ROWS * LARGE_UNITS * ROW * moved), seconds)


def _draw_rate(ranks: _MeasuredRanks, dtype: torch.dtype) -> float:
    """Return random numbers a second, as dropout draws them, beyond the time to fill memory."""
    room = torch.empty(DRAWN, dtype=dtype)

    def take() -> float:
        return ranks.timed(lambda: room.bernoulli_(0.9)) - ranks.timed(room.zero_)

    seconds = median(ranks.repeat(REPEATS, REPEAT_SECONDS, take))
    return ranks.mean(DRAWN / max(seconds, 1e-9))[0]


def _full_step(
    ranks: _MeasuredRanks,
    request: dict[str, Any],
    tokens: Tensor,
    way: tuple[StageNumber, int],
    micro_seconds: float,
) -> Whole:
    """Measure the median step of the sharded model, in turn with plain micro-batches.

    Only their ratio counts: a machine that has slowed down since `micro_seconds` were measured has
    done so for both. Where every core has a rank of one thread, its processor time is the step's:
    no rank waits.
    """
    stage, accumulate = way
    plain = _module(request, precision_of(request["precision"]).compute)
    module = _module(request, None)
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-9)
    onefold.shard(
        module,
        optimizer,
        stage=stage,
        mesh=ranks.world.group.handle,
        precision=request["precision"],
    )

    def step() -> None:
        for number in range(accumulate):
            with nullcontext() if number == accumulate - 1 else onefold.accumulate(module):
                default_loss(module(tokens)).backward()
        optimizer.step()
        optimizer.zero_grad()

    if ranks.world.world_size < usable_cores():
        ranks = _MeasuredRanks(ranks.world, ranks.patience, time.perf_counter)

    def take() -> float:
        alone = ranks.timed(partial(train_once, plain, tokens))
        return ranks.timed(step) / alone

    (ratio,) = ranks.mean(median(ranks.repeat(MOST, WHOLE_SECONDS, take)[1:]))
    return Whole(stage, accumulate, ratio * micro_seconds)
