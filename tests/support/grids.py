"""Some cases of large grids, in place of every combination; `--grid full` runs all.

- A test over world sizes or stages and over other choices: each combination of the other choices
  runs at one of them, in turn, and each world size meets each stage.
- `covering`: a test over `world_size` and `stage` alone. The rows remain that hold each world size
  and each stage at least once.
- `corner`: a case that remains in one of four tests; `half`: in one of two.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from zlib import crc32

import pytest

AXES = ("world_size", "world", "ranks", "stage")
KEPT = {"corner": 4, "half": 2}
Choice = tuple[tuple[str, int], ...]  # parameters, each with the number of its value


def left_out(items: Iterable[pytest.Item]) -> set[pytest.Item]:
    """The cases that only the full grid runs."""
    grids, seldom = defaultdict[str, list[pytest.Function]](list), set[pytest.Item]()
    for item in items:
        if not isinstance(item, pytest.Function) or not hasattr(item, "callspec"):
            continue
        name = item.nodeid.partition("[")[0]
        marks = [KEPT[mark.name] for mark in item.iter_markers() if mark.name in KEPT]
        if any(crc32(name.encode()) % one_of for one_of in marks):
            seldom.add(item)
        else:
            grids[name].append(item)
    return seldom.union(*(set(cases) - set(_rows(cases)) for cases in grids.values()))


def _rows(cases: Sequence[pytest.Function]) -> Sequence[pytest.Function]:
    """The cases that remain of one test."""
    numbers = {case: _numbers(case, cases) for case in cases}
    axes = {case: tuple(p for p in numbers[case] if p[0] in AXES) for case in cases}
    by_others = defaultdict[Choice, list[pytest.Function]](list)
    for case in cases:
        by_others[tuple(pair for pair in numbers[case] if pair[0] not in AXES)].append(case)
    if len(by_others) == 1:
        return _diagonals(axes) if cases[0].get_closest_marker("covering") else cases
    uses, rows = Counter[Choice](), list[pytest.Function]()
    for same in by_others.values():
        rows.append(min(same, key=lambda case: uses[axes[case]]))
        uses[axes[rows[-1]]] += 1
    for case in cases:
        if not uses[axes[case]]:
            uses[axes[case]] += 1
            rows.append(case)
    return rows


def _numbers(case: pytest.Function, cases: Sequence[pytest.Function]) -> Choice:
    """The number of each of its values among those of the test, of which equal ones are one."""
    return tuple(
        (name, next(i for i, other in enumerate(cases) if other.callspec.params[name] is value))
        for name, value in case.callspec.params.items()
    )


def _diagonals(axes: dict[pytest.Function, Choice]) -> list[pytest.Function]:
    """Cases of which one length of the two is walked."""
    values = {name: dict[int, int]() for pairs in axes.values() for name, _ in pairs}
    for pairs in axes.values():
        for name, number in pairs:
            values[name].setdefault(number, len(values[name]))
    shorter = min(map(len, values.values())) if len(values) > 1 else 1
    return [
        case
        for case, pairs in axes.items()
        if sum(values[name][number] for name, number in pairs) % shorter == 0
    ]
