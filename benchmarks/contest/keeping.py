"""What saving and loading took, as rows of a table: arithmetic only, no torch."""

from __future__ import annotations

from statistics import median

from contest.summary import Round, Spread

DISK = "the disk"
OURS = "onefold 3"
SECONDS = {
    "saved": "save s", "durable": "durable s", "copied": "async s", "loaded": "load s",
    "warm": "cached s",
}  # fmt: skip
MEMORY = {"save_extra": "save MB", "load_extra": "load MB"}
SPEEDS = {"durable": "write / disk", "loaded": "read / disk"}
HEAD = ["", *SECONDS.values(), *MEMORY.values(), "write GB/s", "read GB/s", *SPEEDS.values()]


def rows(rounds: list[Round]) -> list[list[str]]:
    """A row for each library and the disk: medians over rounds of the slowest, or largest, rank."""
    names = dict.fromkeys(name for found in rounds for name in found)
    return [_row(rounds, name) for name in sorted(names, key=lambda n: (n != DISK, n != OURS, n))]


def _row(rounds: list[Round], name: str) -> list[str]:
    mine = [found for found in rounds if name in found]
    beside = [found for found in mine if DISK in found]
    cells = [name]
    for what in SECONDS:
        values = [_of(found, name, what) for found in mine if what in found[name][0]]
        cells.append(f"{median(values):.2f}" if values else "")
    for what in MEMORY:
        values = [_of(found, name, what) for found in mine if what in found[name][0]]
        cells.append(f"{max(0.0, median(values)) / 1e6:.0f}" if values else "")
    speeds = (median(_speed(found, name, what) for found in mine) for what in SPEEDS)
    cells += [f"{speed / 1e9:.2f}" for speed in speeds]
    for what in SPEEDS:
        ratios = [_speed(found, name, what) / _speed(found, DISK, what) for found in beside]
        cells.append(str(Spread.of(ratios)) if ratios and name != DISK else "")
    return cells


def _of(found: Round, name: str, what: str) -> float:
    return max(rank[what] for rank in found[name])


def _speed(found: Round, name: str, what: str) -> float:
    """Bytes a second from the call to the last byte's arrival."""
    return _of(found, name, "nbytes") / _of(found, name, what)
