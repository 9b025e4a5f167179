"""Measure how fast each rank computes, inside ordinary steps and without waiting.

An observer adds up the time of forward, backward and step, and subtracts the time in which this
rank waits for messages. Once in `EVERY` steps ranks exchange four numbers, while the next step
runs. So after each step all ranks know the same speeds.

[Note: outside] The loss and the clipping of gradients run between these phases, and may wait for
collectives that no observer sees. Their CPU time counts, which does not pass in a wait. It is
scaled by seconds per CPU second of the phases: a rank that the kernel stops for two thirds of the
time has three.

[Note: steps] Ranks must agree on the step in which they exchange. A step ends when the next one
begins to train: the optimizers of a module may step one after the other.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from math import inf

import torch
from torch import nn

from onefold.compat import untraced
from onefold.engine.engine import Engine
from onefold.engine.registry import engine_of
from onefold.engine.watch import tensors_in
from onefold.layout.ledger import Ledger
from onefold.layout.observer import UNTIMED, NoteSpan, Span, Stream, members_of
from onefold.layout.row_split import RankTime, rows_of
from onefold.recording.recorder import Recorder
from onefold.recording.step_record import total_seconds
from onefold.tier import accelerator
from onefold.tier.accelerator import Fetched
from onefold.wire.collectives import Group
from onefold.wire.ticket import Ticket

SPEEDS = "_onefold_speeds"
"""The attribute of a sharded root module that holds its `RowSpeeds`."""

HYSTERESIS = 0.05
"""Rows move only if a step becomes shorter by more than this share."""

EVERY = 5
"""Steps between two exchanges of speeds."""

WARM_STEPS = 2
"""Steps that are not measured: they allocate buffers and optimizer states."""


@dataclass(frozen=True, slots=True)
class Times:
    """Seconds of the wall's clock, and CPU seconds of this thread."""

    wall: float
    cpu: float

    def __add__(self, other: Times) -> Times:
        return Times(self.wall + other.wall, self.cpu + other.cpu)

    def __sub__(self, other: Times) -> Times:
        return Times(self.wall - other.wall, self.cpu - other.cpu)


_SHORTEST = 1e-12  # seconds of a row that took no time to be measured
_NO_TIME = Times(0.0, 0.0)


def now() -> Times:
    return Times(time.perf_counter(), time.thread_time())


def measure(module: nn.Module) -> RowSpeeds:
    """Begin to measure the speed of each rank, or go on; call it on every rank.

    The rows of a step are those of the first tensor argument of its forwards that train.
    """
    engine = engine_of(module)
    root = engine.module()
    assert root is not None, "engine_of found it through the module"
    speeds: RowSpeeds | None = root.__dict__.get(SPEEDS)
    if speeds is None:
        speeds = root.__dict__[SPEEDS] = RowSpeeds(engine)
        speeds.count_rows(root)
    speeds.watch(engine.ledger)
    return speeds


def row_shares(engine: Engine) -> tuple[float, ...]:
    """Return the weights that `measure` has found so far; equal ones where nobody measures."""
    root = engine.module()
    speeds: RowSpeeds | None = None if root is None else root.__dict__.get(SPEEDS)
    return even(engine.group.world_size) if speeds is None else speeds.shares


class RowSpeeds:
    """The speeds of all ranks of one sharded module; an observer of its steps."""

    def __init__(self, engine: Engine) -> None:
        self.group: Group = engine.group
        self.shares = even(self.group.world_size)
        self._ledger = engine.ledger
        self._device = engine.context.store.device
        self._fit = AffineFit()
        self._num_steps = 0
        self._rows = self._last_rows = 0  # of this step, and of the one before
        self._total = 0  # rows of all ranks at the last exchange
        self._busy = _NO_TIME  # in the phases of this step, without waits
        self._since: Times | None = None  # the running phase began
        self._first: Times | None = None  # this step began to train
        self._cpu = 0.0  # CPU seconds from there to the end of the optimizer's step
        self._has_stepped = False
        self._pending: tuple[Ticket, Fetched] | None = None
        self._is_queued = self._device.type != "cpu"  # a recorder times its kernels
        self._recorder: Recorder | None = None
        self._recorded: tuple[int, Recorder | None] = 0, None  # the step before, with its rows

    def watch(self, ledger: Ledger) -> None:
        """Observe the module of a ledger from now on, beside who observes it already."""
        if self not in members_of(ledger.observer):
            self._ledger = ledger
            ledger.watch(self)

    def begin_at(self, shares: tuple[float, ...]) -> None:
        """Suggest these shares until enough is measured."""
        self.shares = shares

    def count_rows(self, root: nn.Module) -> None:
        """Count the rows of forwards that train."""

        @untraced  # see [Note: torch.compile] in engine/hooks.py
        def count(_: nn.Module, args: object, kwargs: object) -> None:
            if torch.is_grad_enabled():
                first = next((t for t in tensors_in((args, kwargs)) if t.dim()), None)
                self._rows += 0 if first is None else len(first)

        root.register_forward_pre_hook(count, with_kwargs=True)

    # the observer

    def held(self, kind: str, tier: str, nbytes: int) -> None:
        if self._recorder is not None:
            self._recorder.held(kind, tier, nbytes)

    def begin(self, stream: Stream, verb: str, unit: str) -> Span:
        if stream is Stream.PHASE:
            if verb != "forward" or torch.is_grad_enabled():
                self._begin_measuring(verb)
                return NoteSpan(self._end_phase)
        elif self._recorder is not None:
            return self._recorder.begin(stream, verb, unit)
        elif stream is Stream.COMPUTE and verb == "wait" and self._since is not None:
            return NoteSpan(partial(self._waited, now()))
        return UNTIMED

    def _begin_measuring(self, verb: str) -> None:
        if verb == "step":
            self._has_stepped = True
        elif self._has_stepped:
            self._end_step()
        is_new = self._first is None
        self._since = now()
        self._first = self._first or self._since
        is_due = not self._fit.is_ready or self._num_steps % EVERY == 0
        if is_new and self._is_queued and is_due:
            self._recorder = Recorder(self._ledger, self._device, waits=False)

    def _end_phase(self) -> None:
        if self._since is not None and self._first is not None:
            end = now()
            self._busy += end - self._since
            self._cpu = (end - self._first).cpu
            self._since = None

    def _waited(self, since: Times) -> None:
        self._busy -= now() - since

    # a step

    def _end_step(self) -> None:
        """The step before is complete: add it to the fit, and exchange speeds if that is due."""
        self.take_in()
        rows, measured = self._rows, self._measured()
        self._rows, self._busy, self._first, self._has_stepped = 0, _NO_TIME, None, False
        self._num_steps += 1
        self._last_rows = rows
        if self._num_steps - self._is_queued > WARM_STEPS and measured is not None:
            self._fit.note(*measured)
        if self._num_steps % EVERY == 0 and self.group.world_size > 1:
            self._exchange_speeds()

    def _measured(self) -> tuple[int, float] | None:
        """Return the rows of the step, and the seconds that they computed.

        A device is read one step later, so that the host need not wait: the step before is
        returned, None if it was not recorded.
        """
        if self._is_queued:
            (rows, recorder), self._recorded = self._recorded, (self._rows, self._recorder)
            self._recorder = None
            if recorder is None:
                return None
            record = recorder.result(self.group.rank, self.group.world_size)
            waits = [span for span in record.spans if span.verb == "wait"]
            spans = [span for span in record.spans if span.unit and span.verb in _COMPUTES]
            return rows, max(total_seconds(spans + waits) - total_seconds(waits), 0.0)
        outside = self._cpu / self._busy.cpu if self._busy.cpu > 0 else 1.0
        return self._rows, max(self._busy.wall * max(1.0, outside), 0.0)

    def _exchange_speeds(self) -> None:
        fixed, per_row = self._fit.fit()
        mine = accelerator.sent(
            [fixed, per_row, self._last_rows, self._fit.is_ready], torch.float64, self._device
        )
        everyone = mine.new_empty(self.group.world_size * len(mine))
        self.group.agree(_LABEL, _LABEL, mine)
        works = self.group.track([self.group.all_gather(everyone, mine)], _LABEL)
        ticket = Ticket(works, label=_LABEL)
        if self._is_queued:
            ticket.wait()  # on the device
        self._pending = ticket, Fetched(everyone)

    def take_in(self) -> None:
        """Take in the speeds that the ranks have sent to one another."""
        pending, self._pending = self._pending, None
        if pending is None:
            return
        ticket, everyone = pending
        ticket.wait()
        speeds = everyone.read().view(self.group.world_size, -1).tolist()
        times = [RankTime(fixed, per_row) for fixed, per_row, _, _ in speeds]
        now = [int(rows) for _, _, rows, _ in speeds]
        total = sum(now)
        is_partial = total < self._total  # the last batch of an epoch: too few rows to divide well
        self._total = total
        if total and not is_partial and all(is_ready for *_, is_ready in speeds):
            self.shares = tuple(rows / total for rows in balance(times, now))


_COMPUTES = ("forward", "backward", "recompute")
_LABEL = "an exchange of speeds"


def even(world_size: int) -> tuple[float, ...]:
    return (1 / world_size,) * world_size


def balance(
    times: Sequence[RankTime], now: Sequence[int], hysteresis: float = HYSTERESIS
) -> list[int]:
    """Divide the rows that ranks take now so that the slowest rank ends soonest.

    Ranks of known speed get one row at least, if there are enough. A rank whose `per_row` is
    infinite, unknown, gets none. Returns the rows of now where the best division does not save more
    than the share `hysteresis` of a step.
    """
    best = _best(times, sum(now))

    def seconds(rows: Sequence[int]) -> float:
        return max(time.seconds(count) for time, count in zip(times, rows, strict=True))

    return best if seconds(best) < (1 - hysteresis) * seconds(now) else list(now)


def _best(times: Sequence[RankTime], total: int) -> list[int]:
    is_known = [time.per_row < inf for time in times]
    least = int(total >= sum(is_known))  # the first row of each rank is part of its fixed time
    others = [
        RankTime(time.fixed + least * time.per_row, max(time.per_row, _SHORTEST))
        if known
        else RankTime(0.0, 1.0)
        for time, known in zip(times, is_known, strict=True)
    ]
    limits = [total * known for known in is_known]
    rows = rows_of(others, total - least * sum(is_known), limits)
    return [count + least * known for count, known in zip(rows, is_known, strict=True)]


class AffineFit:
    """Fits `seconds = fixed + per_row * rows` to the latest steps of one rank.

    Older steps weigh exponentially less. The fit remembers about `STEPS` steps, and more where
    these take less than `SECONDS`: the quota of a cgroup stops a process once in 100 ms.
    """

    STEPS = 20
    SECONDS = 1.0
    SPREAD = 0.1  # relative spread of rows below which the fixed part cannot be told

    def __init__(self) -> None:
        self.seconds = 0.0  # of all steps
        self.steps = 0
        self._weight = self._rows = self._seconds = self._squares = self._products = 0.0

    @property
    def is_ready(self) -> bool:
        """True if enough time or steps were measured."""
        return self.steps >= self.STEPS or (self.steps > 2 and self.seconds > self.SECONDS / 2)

    def note(self, rows: int, seconds: float) -> None:
        self.steps += 1
        self.seconds += seconds
        keep = 1 - min(1 / self.STEPS, seconds / self.SECONDS)
        self._weight = self._weight * keep + 1
        self._rows = self._rows * keep + rows
        self._seconds = self._seconds * keep + seconds
        self._squares = self._squares * keep + rows * rows
        self._products = self._products * keep + rows * seconds

    def fit(self) -> tuple[float, float]:
        """Return seconds of the fixed part, and seconds of each row: infinite without any row."""
        if self._seconds <= 0:
            return 0.0, inf
        rows, seconds = self._rows / self._weight, self._seconds / self._weight
        if rows == 0:
            return seconds, inf
        variance = self._squares / self._weight - rows * rows
        if variance <= (self.SPREAD * rows) ** 2:
            return 0.0, seconds / rows
        slope = (self._products / self._weight - rows * seconds) / variance
        slope = min(max(slope, 0.1 * seconds / rows), seconds / rows)
        return seconds - slope * rows, slope
