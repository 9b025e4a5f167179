"""Choose the units that stay unsharded through a schedule's step."""

from __future__ import annotations

from collections.abc import Sequence

from onefold.engine.engine import Engine
from onefold.engine.keeping import gathered_units, trained_nbytes, with_gradients
from onefold.errors import ConfigError, expected
from onefold.planner.auto import room_to_keep
from onefold.planner.sizes import parse_nbytes

Window = int | str | None


def windows_of(engines: Sequence[Engine], window: Window) -> list[frozenset[int]]:
    """Choose the window of each of a rank's stage modules, in their order. A collective.

    Args:
        engines: of the modules, which share the rank's memory.
        window: units of each module, bytes of all of them as text, or None: what fits.
    """
    limit = parse_nbytes("window", window) if isinstance(window, str) else None
    taken, found = 0, list[frozenset[int]]()
    for engine in engines:
        gathered = gathered_units(engine.schedule.units)
        if not engine.recipe.frees_after_forward:  # stages 0 to 2 hold whole weights anyway
            found.append(frozenset(gathered))
        elif isinstance(window, int):
            count = min(window, len(gathered))
            found.append(frozenset(gathered[i * len(gathered) // count] for i in range(count)))
        else:
            room = room_to_keep(engine.recipe, engine.context.store.device, engine.group, limit)
            found.append(with_gradients(engine, room - taken))
            taken += trained_nbytes(engine, found[-1])
    return found


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
