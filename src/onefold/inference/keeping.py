"""Keep weights unsharded over the forwards of a generation or evaluation: `onefold.generating`.

The caller has chosen the units that stay. The others are gathered in every forward.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from onefold.engine.engine import Engine
from onefold.engine.watch import in_backward
from onefold.errors import StateError


@contextmanager
def keeping(engine: Engine, kept: frozenset[int], most_nbytes: int) -> Iterator[None]:
    """Keep some units unsharded, the same on every rank, between evaluations.

    `most_nbytes`: the most bytes of unsharded weights of a forward that keeps them.
    """
    schedule = engine.schedule
    if schedule.forward_depth > 0 or in_backward():
        raise StateError(
            "onefold.generating outside forward and backward",
            "a call from within one",
            where=f"rank {engine.group.rank}",
            hint="enter it before the module is called",
        )
    if schedule.driven.keeps:
        yield
        return
    if kept:
        engine.facts.note_kept(most_nbytes)
    with engine.driven(keeps=kept):
        yield
