"""Some cases of large grids, in place of every combination; `--grid full` runs all.

Of a test over world sizes or stages and over other choices, each combination of the others runs at
one of them, in turn; each world size and each stage runs. The marks `half` and `corner` keep a case
in one of two and in one of four tests; `seldom(keeper)` leaves a case to the full grid, and names a
test that keeps the same law at less cost.

`every(number, first)`: `make test` runs one case of so many, and `make again` the others. A test
that was slow has one of three stay.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence, Set
from zlib import crc32

import pytest

from tests.support.budgets import test_of

AXES = ("world_size", "world", "ranks", "stage")
KEPT = {"corner": 4, "half": 2}
OF_SLOW = 3
"""One of so many cases of a slow test stays: about three quarters of all CPU seconds."""
Choice = tuple[tuple[str, int], ...]  # parameters, each with the number of its value


def left_out(items: Iterable[pytest.Item]) -> set[pytest.Item]:
    """The cases that only the full grid runs."""
    grids, seldom = defaultdict[str, list[pytest.Function]](list), set[pytest.Item]()
    for item in items:
        name = test_of(item.nodeid)
        marks = [KEPT[mark.name] for mark in item.iter_markers() if mark.name in KEPT]
        is_out = any(crc32(name.encode()) % one_of for one_of in marks)
        if is_out or item.get_closest_marker("seldom"):
            seldom.add(item)
        elif isinstance(item, pytest.Function) and hasattr(item, "callspec"):
            grids[name].append(item)
    return seldom.union(*(set(cases) - set(_rows(_in_order(cases))) for cases in grids.values()))


def leave_to_again(items: Iterable[pytest.Item], slow: Set[str]) -> None:
    """Mark cases of slow tests, and of tests with `every`, by `again`: all but one of so many.

    Of each value that several cases share, one case stays; so does one with the most ranks, and
    one at the highest stage.
    """
    tests = defaultdict[str, list[pytest.Function]](list)
    for item in items:
        name = test_of(item.nodeid)
        is_one_of_so_many = name in slow or item.get_closest_marker("every")
        if is_one_of_so_many and isinstance(item, pytest.Function) and hasattr(item, "callspec"):
            tests[name].append(item)
    for name, shuffled in tests.items():
        cases = _in_order(shuffled)
        mark = cases[0].get_closest_marker("every")
        number, first = (*mark.args, 0)[:2] if mark else (OF_SLOW, (len(cases) - 1) % OF_SLOW)
        values = {case: set(_numbers(case, cases)) for case in cases}
        uses = Counter(value for case in cases for value in values[case])
        wanted = {value for value in uses if uses[value] > 1} | _largest(cases)
        stays = cases[first::number]
        for case in (*stays, *reversed(cases)):
            if case in stays or values[case] & wanted:
                wanted -= values[case]
            else:
                case.add_marker(pytest.mark.again(name))


def _in_order(shuffled: Iterable[pytest.Function]) -> list[pytest.Function]:
    """As they are written: `make test` and `make again`, which shuffle apart, choose the same."""
    return sorted(shuffled, key=lambda case: tuple(case.callspec.indices.values()))


def _rows(cases: Sequence[pytest.Function]) -> list[pytest.Function]:
    """A case of each combination of the other choices, and of each world size and stage."""
    numbers = {case: _numbers(case, cases) for case in cases}
    axes = {case: tuple(p for p in numbers[case] if p[0] in AXES) for case in cases}
    by_others = defaultdict[Choice, list[pytest.Function]](list)
    for case in cases:
        by_others[tuple(pair for pair in numbers[case] if pair[0] not in AXES)].append(case)
    diagonals, uses = _diagonals(set(axes.values())), Counter[Choice]()
    rows = list[pytest.Function]()
    if len(by_others) > 1:
        for same in by_others.values():
            rows.append(min(same, key=lambda case: uses[axes[case]]))
            uses[axes[rows[-1]]] += 1
    for case in cases:
        if axes[case] in diagonals and not uses[axes[case]]:
            uses[axes[case]] += 1
            rows.append(case)
    return rows


def _largest(cases: Sequence[pytest.Function]) -> set[tuple[str, int]]:
    """The most ranks and the highest stage, each as `_numbers` has it."""
    largest = set[tuple[str, int]]()
    for axis in AXES:
        counts = [case for case in cases if isinstance(case.callspec.params.get(axis), int)]
        if counts:
            last = max(counts, key=lambda case: int(case.callspec.params[axis]))
            largest |= {pair for pair in _numbers(last, cases) if pair[0] == axis}
    return largest


def _numbers(case: pytest.Function, cases: Sequence[pytest.Function]) -> Choice:
    """The number of each of its values among those of the test, of which equal ones are one."""
    return tuple(
        (name, next(i for i, other in enumerate(cases) if other.callspec.params[name] is value))
        for name, value in case.callspec.params.items()
    )


def _diagonals(axes: Set[Choice]) -> set[Choice]:
    """World sizes and stages that meet each value of either: one length of the two is walked."""
    values = defaultdict[str, list[int]](list)
    for name, number in sorted({pair for pairs in axes for pair in pairs}):
        values[name].append(number)
    shorter = min(map(len, values.values())) if len(values) > 1 else 1
    return {
        pairs
        for pairs in axes
        if sum(values[name].index(number) for name, number in pairs) % shorter == 0
    }
