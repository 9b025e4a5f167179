"""Who may watch a step: the one seam between the engine and recordings of it.

An observer hangs on a module's `Ledger`, which everything that holds, moves or computes bytes knows
already. Without one each place that could tell something tests for None, and that is all it costs.
Several threads call observers: the one that trains, autograd's and workers'.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from enum import StrEnum
from typing import Protocol


class Stream(StrEnum):
    """What may be under way at the same time as other things: a row of a timeline."""

    PHASE = "phase"  # forward, backward, step
    COMPUTE = "compute"  # the training thread: units' forwards and backwards, and its waits
    GATHER = "gather"  # whole weights on their way
    REDUCE = "reduce"  # gradients on their way
    TIER = "tier"  # fetches from far tiers and flushes to them
    BACKGROUND = "background"  # blocks of offloaded units, stepped by workers


class Span(Protocol):
    """Something that has begun."""

    def end(self, nbytes: int = 0) -> None:
        """It is over, and moved so many bytes."""
        ...


class NoteSpan:
    """A span that calls back at its end, or that nobody times."""

    __slots__ = ("_note",)

    def __init__(self, note: Callable[[], None] | None = None) -> None:
        self._note = note

    def end(self, nbytes: int = 0) -> None:
        if self._note is not None:
            self._note()


UNTIMED = NoteSpan()


class Observer(Protocol):
    """Hears of events as they happen. A call must be quick and may not raise."""

    def held(self, kind: str, tier: str, nbytes: int) -> None:
        """So many bytes of a kind are held in a tier from now on. By default nobody counts them."""

    def begin(self, stream: Stream, verb: str, unit: str) -> Span:
        """A verb begins, for a unit where it has one; any thread may end it."""
        ...


class Several:
    """Tells several observers, one after the other."""

    def __init__(self, members: Sequence[Observer]) -> None:
        self.members = members

    def held(self, kind: str, tier: str, nbytes: int) -> None:
        for member in self.members:
            member.held(kind, tier, nbytes)

    def begin(self, stream: Stream, verb: str, unit: str) -> Span:
        return _Spans([member.begin(stream, verb, unit) for member in self.members])


class _Spans:
    """The spans of several observers."""

    __slots__ = ("_spans",)

    def __init__(self, spans: Sequence[Span]) -> None:
        self._spans = spans

    def end(self, nbytes: int = 0) -> None:
        for span in self._spans:
            span.end(nbytes)


def members_of(observer: Observer | None) -> Sequence[Observer]:
    """Return the observers that an observer tells, or itself."""
    if isinstance(observer, Several):
        return observer.members
    return [] if observer is None else [observer]


def joined(observers: Sequence[Observer]) -> Observer | None:
    """Return one observer for any number of them."""
    return Several(observers) if len(observers) > 1 else next(iter(observers), None)


_NOTHING = nullcontext()


def watched(
    observer: Observer | None, stream: Stream, verb: str, unit: str, nbytes: int = 0
) -> AbstractContextManager[None]:
    """Around work that begins and ends on one thread; nothing where nobody watches."""
    return _NOTHING if observer is None else _told(observer.begin(stream, verb, unit), nbytes)


@contextmanager
def _told(span: Span, nbytes: int) -> Iterator[None]:
    try:
        yield
    finally:
        span.end(nbytes)
