"""Some cases of large grids: each choice meets every world size and every stage, not every pair.

Marks choose the grids; `--grid full` runs all cases.
- `covering`: a test over `world_size` and `stage`. Of the cases that differ in these two alone, the
  rows remain that hold each world size and each stage at least once.
- `corner`: a case that remains in one of four tests.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from zlib import crc32

import pytest

AXES = ("world_size", "stage")
CORNERS_KEPT = 4


def left_out(items: Iterable[pytest.Item]) -> set[pytest.Item]:
    """The cases that only the full grid runs."""
    grids, corners = defaultdict[str, list[pytest.Function]](list), set[pytest.Item]()
    for item in items:
        if not isinstance(item, pytest.Function) or not hasattr(item, "callspec"):
            continue
        name = item.nodeid.partition("[")[0]
        if item.get_closest_marker("corner") and crc32(name.encode()) % CORNERS_KEPT:
            corners.add(item)
        elif item.get_closest_marker("covering") and set(AXES) <= set(item.callspec.params):
            grids[name].append(item)
    return corners.union(*(_beside_rows(cases) for cases in grids.values()))


def _beside_rows(cases: list[pytest.Function]) -> list[pytest.Function]:
    """Cases off the diagonals: whatever the other choices, one length of the two is walked."""
    values = defaultdict[str, list[object]](list)
    for case in cases:
        for axis, value in case.callspec.params.items():
            if not any(value is known for known in values[axis]):
                values[axis].append(value)
    shorter = min(len(values[axis]) for axis in AXES)

    def diagonal(case: pytest.Function) -> int:
        params = case.callspec.params.items()
        return sum(
            next(i for i, known in enumerate(values[axis]) if known is value)
            for axis, value in params
        )

    return [case for case in cases if diagonal(case) % shorter]
