"""Choose the units that stay unsharded through a schedule's step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from onefold.engine.engine import Engine
from onefold.engine.keeping import choose, gathered_units
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
            found.append(_that_fit(engine, room - taken))
            taken += sum(_nbytes(engine, i) for i in found[-1])
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


def _that_fit(engine: Engine, room: int) -> frozenset[int]:
    """The units that fit into `room` bytes with their gradients, beside the gathered others."""
    units = [
        replace(facts, nbytes=_nbytes(engine, index))
        for index, facts in enumerate(engine.schedule.units)
    ]
    return choose(units, room, engine.policy.prefetch) if room > 0 else frozenset()


def _nbytes(engine: Engine, index: int) -> int:
    """Bytes of a unit's unsharded weights and gradients."""
    unit = engine.units[index]
    return engine.schedule.units[index].nbytes * (2 if unit.requires_grad() else 1)
