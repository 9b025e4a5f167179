"""Facts about a run for reports and recordings, and the marks of its phases."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar

from onefold.engine.walks import Call, Noted
from onefold.layout.ledger import Ledger
from onefold.layout.observer import Span, Stream
from onefold.recipe import Recipe
from onefold.wire.lanes import CALL, PhaseNow


@dataclass(frozen=True, slots=True)
class RunHistory:
    """What a run has done that no recipe says.

    Attributes:
        accumulates: steps have several micro-batches.
        repeats: steps have several backwards, each of which reduces.
        events: those of a micro-batch; none: each unit is used once, in order.
        most_kept: bytes of unsharded weights that `onefold.generating` kept.
        most_shown: bytes of the buffers of `onefold.unsharded`.
        shows_grads: gradients had not been cleared then.
    """

    accumulates: bool = False
    events: tuple[Noted, ...] = ()
    most_kept: int = 0
    most_shown: int = 0
    shows_grads: bool = False
    repeats: bool = False


class Forecaster(Protocol):
    """The planner, as a run asks it. `onefold.shard` hands it down, so that no room below knows it.

    Bytes are those of one rank; of the one with the largest share, where `rank` is None.
    """

    def needs_of(
        self, recipe: Recipe, *, micro_batches: int = 1, rank: int | None = None
    ) -> dict[str, int]:
        """Return the most bytes of each memory, without activations."""
        ...

    def peaks_of(self, recipe: Recipe, rank: int | None, history: RunHistory) -> dict[str, int]:
        """Return the most bytes of each kind, and of all ("all"), after such a run."""
        ...

    def smallest_change(self, recipe: Recipe, shortage: int) -> str:
        """Say what would hold so many bytes less than the recipe does."""
        ...


Subject = TypeVar("Subject")


@dataclass(slots=True)
class RunFacts:
    """The record of one sharded module since `onefold.shard`.

    Attributes:
        forecaster: says how many bytes a recipe needs.
        description: the choices of the plan, in words.
        notes: exceptions to the plan.
        shares: recipes that the run has had, and the rank's number among the shares of each.
        most_kept: bytes of unsharded weights that `onefold.generating` kept, or more.
        most_shown, shows_grads: as in `RunHistory`.
        most_backwards: backwards before one step, outside of `accumulate`.
    """

    forecaster: Forecaster
    description: str = ""
    notes: tuple[str, ...] = ()
    shares: list[tuple[Recipe, int]] = field(default_factory=list[tuple[Recipe, int]])
    most_kept: int = 0
    most_shown: int = 0
    shows_grads: bool = False
    most_backwards: int = 0
    _num_backwards: int = 0  # since the last step
    _has_accumulated: bool = False
    _subjects: dict[type, Any] = field(default_factory=dict[type, Any])

    def add_notes(self, *notes: str) -> None:
        """Note exceptions to the plan."""
        self.notes += notes

    def note_kept(self, nbytes: int) -> None:
        """Evaluations keep up to so many bytes of unsharded weights."""
        self.most_kept = max(self.most_kept, nbytes)

    def note_shown(self, nbytes: int, *, shows_grads: bool) -> None:
        """`onefold.unsharded` shows so many bytes of weights, in buffers of its own."""
        self.most_shown = max(self.most_shown, nbytes)
        self.shows_grads |= shows_grads

    def begin_backward(self, *, is_first: bool) -> None:
        """A backward begins, the `is_first` one since gradients were cleared."""
        if is_first:
            self._num_backwards = 0  # cleared with or without a step

    def end_backward(self, *, accumulates: bool) -> None:
        """A backward is over; `accumulates`: that of a micro-batch that is not the last."""
        self._has_accumulated |= accumulates
        self._num_backwards += not accumulates

    def end_step(self) -> None:
        """The optimizer has stepped."""
        self.most_backwards = max(self.most_backwards, self._num_backwards)
        self._num_backwards = 0

    def predicted_peaks(self, events: Iterable[Noted] = ()) -> dict[str, int]:
        """Return the highest prediction: one for all the shares that the run has had."""
        history = RunHistory(
            self._has_accumulated, tuple(events), self.most_kept, self.most_shown,
            shows_grads=self.shows_grads, repeats=self.most_backwards > 1,
        )  # fmt: skip
        highest: dict[str, int] = {}
        for recipe, rank in self.shares:
            for kind, nbytes in self.forecaster.peaks_of(recipe, rank, history).items():
                highest[kind] = max(nbytes, highest.get(kind, 0))
        return highest

    def smallest_change(self, shortage: int) -> str:
        """Say what would hold so many bytes less than the run does now."""
        return self.forecaster.smallest_change(self.shares[-1][0], shortage)

    def about(self, subject: type[Subject]) -> Subject:
        """Return the record that another room keeps of the run: the first call makes it."""
        return self._subjects.setdefault(subject, subject())


class Marks:
    """Tells lanes and observers when a phase of a step runs, and observers when a call computes."""

    def __init__(self, ledger: Ledger, lanes: PhaseNow) -> None:
        self._ledger, self._running = ledger, ledger.running
        self._lanes = lanes
        self._name = self._unit = ""
        self._phase: Span | None = None

    def begin(self, phase: str, lane: str = CALL) -> None:
        """Begin a phase: "forward", "backward" or "step". End one that was left open."""
        self.end()
        self._name = phase
        self._running[:] = f"in {phase}", ""
        self._lanes.begin(lane)
        if phase == "backward":
            self._ledger.begin_backward()
        if self._ledger.observer is not None:
            self._phase = self._ledger.observer.begin(Stream.PHASE, phase, "")

    def end(self) -> None:
        """End the phase."""
        if self._name:
            self._running[:] = f"after {self._name}", ""
        self._lanes.begin(CALL)
        phase, self._phase, self._name = self._phase, None, ""
        if phase is not None:
            phase.end()

    def enter(self, call: Call, verb: str, unit: str) -> None:
        """Begin the compute of a call, whose unit is unsharded now."""
        self._unit = unit
        self._running[:] = f"in {verb}", unit
        if self._ledger.observer is not None:
            call.observe(self._ledger.observer.begin(Stream.COMPUTE, verb, unit))

    def leave(self, *calls: Call) -> None:
        """End the compute of calls: their forward, or their part of backward."""
        if calls and self._name:  # a block that was recomputed is about to run its backward
            unit = self._unit if self._name == "backward" else ""
            self._running[:] = f"in {self._name}", unit
        for call in calls:
            if call.span is not None:
                call.observe(None)
