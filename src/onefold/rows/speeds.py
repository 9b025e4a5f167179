"""Measure how fast each rank computes, inside ordinary steps and without waiting.

An observer adds up the time of forward, backward and step, and subtracts the time in which this
rank waits for messages. Once in `EVERY` steps ranks exchange four numbers, while the next step
runs. So after each step all ranks know the same speeds.

[Note: steps] Ranks must agree on the step in which they exchange. A step ends when the next one
begins to train: the optimizers of a module may step one after the other.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import torch
from torch import Tensor, nn

from onefold.engine.engine import Engine
from onefold.engine.registry import engine_of
from onefold.engine.watch import tensors_in
from onefold.ledger import Ledger
from onefold.observer import Span, Stream, joined, members_of
from onefold.rows.dealing import AffineFit, RankSpeed, balance, even
from onefold.ticket import Ticket
from onefold.wire.collectives import Group

SPEEDS = "_onefold_speeds"
"""The attribute of a sharded root module that holds its `RowSpeeds`."""

EVERY = 5
"""Steps between two exchanges of speeds."""

WARM_STEPS = 2
"""Steps that are not measured: they allocate buffers and optimizer states."""


def measure(module: nn.Module) -> RowSpeeds:
    """Begin to measure the speed of each rank, or go on; call it on every rank.

    The rows of a step are those of the first tensor argument of its forwards that train.
    """
    engine = engine_of(module)
    root = engine.module()
    assert root is not None, "engine_of found it through the module"
    found: RowSpeeds | None = root.__dict__.get(SPEEDS)
    if found is None:
        found = root.__dict__[SPEEDS] = RowSpeeds(engine)
        found.count_rows(root)
    found.watch(engine.ledger)
    return found


def row_shares(engine: Engine) -> tuple[float, ...]:
    """Return the weights that `measure` has found so far; equal ones where nobody measures."""
    root = engine.module()
    found: RowSpeeds | None = None if root is None else root.__dict__.get(SPEEDS)
    return even(engine.group.world_size) if found is None else found.shares


class RowSpeeds:
    """The speeds of all ranks of one sharded module; an observer of its steps."""

    def __init__(
        self, engine: Engine, clock: Callable[[], float] = time.perf_counter, every: int = EVERY
    ) -> None:
        self.group: Group = engine.group
        self.shares = even(self.group.world_size)
        self._device = engine.context.store.device
        self._every = every
        self._clock = clock
        self._fit = AffineFit()
        self._num_steps = 0
        self._rows = self._most_rows = 0
        self._seconds = 0.0  # computed in this step
        self._has_stepped = self._is_open = False
        self._pending: tuple[Ticket, Tensor] | None = None

    def watch(self, ledger: Ledger) -> None:
        """Observe the module of a ledger from now on, beside who observes it already."""
        if self not in members_of(ledger.observer):
            ledger.observer = joined([*members_of(ledger.observer), self])

    def count_rows(self, root: nn.Module) -> None:
        """Count the rows of forwards that train."""

        @torch._disable_dynamo  # see [Note: torch.compile] in engine/hooks.py
        def count(_: nn.Module, args: object, kwargs: object) -> None:
            if torch.is_grad_enabled():
                first = next((t for t in tensors_in((args, kwargs)) if t.dim()), None)
                self._rows += 0 if first is None else len(first)

        root.register_forward_pre_hook(count, with_kwargs=True)

    # the observer

    def held(self, kind: str, tier: str, nbytes: int) -> None:
        """See `Observer.held`."""

    def begin(self, stream: Stream, verb: str, unit: str) -> Span:
        """See `Observer.begin`."""
        if stream is Stream.PHASE:
            trains = verb != "forward" or torch.is_grad_enabled()
            if trains:
                self._begin(verb)
                return _Phase(self)
        elif stream is Stream.COMPUTE and verb == "wait" and self._is_open:
            return _Wait(self)
        return _UNTIMED

    def _begin(self, verb: str) -> None:
        if verb == "step":
            self._has_stepped = True
        elif self._has_stepped:
            self._end_step()
        self._is_open = True
        self._seconds -= self._clock()

    def end_phase(self) -> None:
        """The phase that began last is over."""
        if self._is_open:
            self._is_open = False
            self._seconds += self._clock()

    def waited(self, seconds: float) -> None:
        """This rank has waited for others."""
        if self._is_open:
            self._seconds -= seconds

    def now(self) -> float:
        """Return seconds of this rank's clock."""
        return self._clock()

    # a step

    def _end_step(self) -> None:
        """The step before is complete: add it to the fit, and exchange speeds if that is due."""
        self.read()
        rows, seconds, self._rows, self._seconds = self._rows, self._seconds, 0, 0.0
        self._has_stepped = False
        self._num_steps += 1
        self._most_rows = max(self._most_rows, rows)
        if self._num_steps > WARM_STEPS:
            self._fit.note(rows, max(seconds, 0.0))
        if self._num_steps % self._every == 0 and self.group.world_size > 1:
            self._exchange()

    def _exchange(self) -> None:
        fixed, per_row = self._fit.fit()
        mine = torch.tensor(
            [fixed, per_row, self._most_rows, self._fit.is_ready],
            dtype=torch.float64, device=self._device,
        )  # fmt: skip
        self._most_rows = 0
        everyone = mine.new_empty(self.group.world_size * len(mine))
        works = self.group.track([self.group.all_gather(everyone, mine)], _LABEL)
        self._pending = Ticket(works, label=_LABEL), everyone

    def read(self) -> None:
        """Take in the speeds that the ranks have sent to one another."""
        pending, self._pending = self._pending, None
        if pending is None:
            return
        ticket, everyone = pending
        ticket.wait()
        found = everyone.view(self.group.world_size, -1).tolist()
        ranks = [RankSpeed(fixed, per_row, int(rows)) for fixed, per_row, rows, _ in found]
        total = sum(rank.rows for rank in ranks)
        if total and all(is_ready for *_, is_ready in found):
            self.shares = tuple(rows / total for rows in balance(ranks))


_LABEL = "an exchange of speeds"


class _Untimed:
    """Something that is not measured; see `onefold.observer.Span`."""

    def end(self, nbytes: int = 0) -> None:
        """Nothing to note."""


_UNTIMED = _Untimed()


class _Phase:
    """A forward, backward or step; see `onefold.observer.Span`."""

    __slots__ = ("_speeds",)

    def __init__(self, speeds: RowSpeeds) -> None:
        self._speeds = speeds

    def end(self, nbytes: int = 0) -> None:
        """It is over."""
        self._speeds.end_phase()


class _Wait:
    """A wait for a message; see `onefold.observer.Span`."""

    __slots__ = ("_since", "_speeds")

    def __init__(self, speeds: RowSpeeds) -> None:
        self._speeds = speeds
        self._since = speeds.now()

    def end(self, nbytes: int = 0) -> None:
        """The message is there."""
        self._speeds.waited(self._speeds.now() - self._since)
