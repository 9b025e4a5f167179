"""Pause Python's garbage collector where there is nothing to find."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def no_garbage() -> Iterator[None]:
    """Around what makes many objects and leaves none behind in a cycle: imports, plans, modules.

    The collector runs once in so many new objects, and goes over all that the process holds.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
