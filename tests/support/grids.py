"""The rows of a grid, and which of them `make test` leaves to `make again`.

Rows: of a test over world sizes or stages and over other choices, each combination of the others
runs at one of them, in turn; each world size and each stage runs.

`make test` leaves out what has the mark `again(keeper)`, which names a test that keeps the same law
at less cost; and, of a test that durations.json calls slow, two of three cases. A test that marks
some of its cases by itself keeps the others.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence, Set

import pytest

from tests.support.budgets import test_of

AXES = ("world_size", "world", "ranks", "stage")
OF_SLOW = 3
"""One of so many cases of a slow test stays: about three quarters of all CPU seconds."""
Choice = tuple[tuple[str, int], ...]  # parameters, each with the number of its value


def left_out(items: Iterable[pytest.Item]) -> set[pytest.Item]:
    """The cases of grids that are in no row."""
    grids = _by_test(items).values()
    return set[pytest.Item]().union(*(set(cases) - set(_rows(cases)) for cases in grids))


def leave_to_again(items: Iterable[pytest.Item], slow: Set[str]) -> None:
    """Mark two of three cases of slow tests by `again`.

    Of each value that several cases share, one case stays; so does one with the most ranks, and
    one at the highest stage.
    """
    for name, cases in _by_test(items).items():
        if name not in slow or any(case.get_closest_marker("again") for case in cases):
            continue
        values = {case: set(_numbers(case, cases)) for case in cases}
        uses = Counter(value for case in cases for value in values[case])
        wanted = {value for value in uses if uses[value] > 1} | _largest(cases)
        stays = cases[(len(cases) - 1) % OF_SLOW :: OF_SLOW]
        for case in (*stays, *reversed(cases)):
            if case in stays or values[case] & wanted:
                wanted -= values[case]
            else:
                case.add_marker(pytest.mark.again(name))


def _by_test(items: Iterable[pytest.Item]) -> dict[str, list[pytest.Function]]:
    """Cases of each test, as they are written: `make test` and `make again` choose the same."""
    tests = defaultdict[str, list[pytest.Function]](list)
    for item in items:
        if isinstance(item, pytest.Function) and hasattr(item, "callspec"):
            tests[test_of(item.nodeid)].append(item)
    for cases in tests.values():
        cases.sort(key=lambda case: tuple(case.callspec.indices.values()))
    return tests


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
