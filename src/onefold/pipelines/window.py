"""Choose the units that stay unsharded through a schedule's step."""

from __future__ import annotations

from collections.abc import Sequence

from onefold.engine.engine import Engine
from onefold.engine.keeping import gathered_units
from onefold.errors import ConfigError, expected
from onefold.planner.auto import free_on_all
from onefold.planner.windows import TrainedUnits, choose_windows
from onefold.text import parse_nbytes

Window = int | str | None


def windows_of(engines: Sequence[Engine], window: Window) -> list[frozenset[int]]:
    """Choose the window of each of a rank's stage modules, in their order. A collective.

    Args:
        engines: of the modules, which share the rank's memory.
        window: units of each module, bytes of all of them as text, or None: what fits.
    """
    found = [frozenset(gathered_units(engine.schedule.units)) for engine in engines]
    chosen = [i for i, each in enumerate(engines) if each.recipe.frees_after_forward]
    if isinstance(window, int):
        for i in chosen:
            gathered = sorted(found[i])
            count = min(window, len(gathered))
            found[i] = frozenset(gathered[n * len(gathered) // count] for n in range(count))
    elif chosen:  # stages 0 to 2 hold whole weights anyway
        limit = None if window is None else parse_nbytes("window", window)
        free = min(_free_nbytes(engines[i]) for i in chosen)
        windows = choose_windows([TrainedUnits.of(engines[i]) for i in chosen], free, limit)
        for i, each in zip(chosen, windows, strict=True):
            found[i] = each
    return found


def _free_nbytes(engine: Engine) -> int:
    local = engine.recipe.local_world_size
    return free_on_all(engine.context.store.device, local, engine.group)


def check_window(window: object) -> None:
    """Raise `ConfigError` unless `window` is None, a number of units or bytes as text."""
    is_number = isinstance(window, int) and not isinstance(window, bool) and window >= 0
    if isinstance(window, str):
        parse_nbytes("window", window)
    elif not (window is None or is_number):
        raise ConfigError(
            expected(
                "window to be a number of units from 0 on, bytes as text, or None",
                repr(window),
                hint='onefold.pipeline(schedule, window="8GiB"), or no window: what fits',
            )
        )
