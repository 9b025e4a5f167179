"""Choose the units that stay unsharded through a schedule's step."""

from __future__ import annotations

from collections.abc import Sequence

from onefold.engine.engine import Engine
from onefold.errors import ConfigError
from onefold.fit.kept_units import choose_windows, memory_of, trained_units
from onefold.text import parse_nbytes

Window = int | str | None


def windows_of(engines: Sequence[Engine], window: Window) -> list[frozenset[int]]:
    """Choose the window of each of a rank's stage modules, in their order. A collective.

    Args:
        engines: of the modules, which share the rank's memory.
        window: units of each module, bytes of all of them as text, or None: what fits.
    """
    stages = [trained_units(engine) for engine in engines]
    windows = [stage.everyone for stage in stages]
    chosen = [i for i, engine in enumerate(engines) if engine.recipe.frees_after_forward]
    if isinstance(window, int):
        for i in chosen:
            windows[i] = stages[i].some(window)
    elif chosen:  # stages 0 to 2 hold whole weights anyway
        limit = None if window is None else parse_nbytes("window", window)
        free = min(memory_of(engines[i]).free_on_all() for i in chosen)
        fitting = choose_windows([stages[i] for i in chosen], free, limit)
        for i, units in zip(chosen, fitting, strict=True):
            windows[i] = units
    return windows


def check_window(window: object) -> None:
    """Raise `ConfigError` unless `window` is None, a number of units or bytes as text."""
    is_number = isinstance(window, int) and not isinstance(window, bool) and window >= 0
    if isinstance(window, str):
        parse_nbytes("window", window)
    elif not (window is None or is_number):
        raise ConfigError(
            "window to be a number of units from 0 on, bytes as text, or None",
            repr(window),
            hint='onefold.pipeline(schedule, window="8GiB"), or no window: what fits',
        )
