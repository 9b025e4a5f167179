"""Which cases a test has, said above the test. Each runs in `make test` or in `make again`.

`worlds_in_turn` makes rows of stacked lists, instead of their product. `again_but` names the rows
that `make test` runs, and gives the others the mark `again`.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from itertools import product
from typing import Any, TypeVar

import pytest
from _pytest.python import IdMaker

AXES = ("world_size", "world", "ranks", "stage")
Test = TypeVar("Test", bound=Callable[..., Any])
Row = Any  # what pytest.param returns: values, marks and an id
Choice = tuple[tuple[str, int], ...]  # parameters, each with the number of its value


def again_but(*ids: str) -> Callable[[Test], Test]:
    """`make test` runs the cases of these ids, which keep the law; `make again` the others."""

    def decorate(test: Test) -> Test:
        names, rows = _taken_rows(test)
        cases = [row.id for row in rows]
        missing = {*ids} - {*cases}
        assert ids, f"{test.__name__} has no case in `make test`"
        assert not missing, f"{test.__name__} has no case {sorted(missing)}: {cases}"
        again = pytest.mark.again(f"{test.__module__.replace('.', '/')}.py::{test.__name__}")
        marked = [
            row
            if row.id in ids
            else pytest.param(*row.values, id=row.id, marks=[*row.marks, again])
            for row in rows
        ]
        return pytest.mark.parametrize(names, marked)(test)

    return decorate


def worlds_in_turn(test: Test) -> Test:
    """Each combination of the other choices runs at one world size and stage, in turn.

    Each world size and each stage has a row.
    """
    names, rows = _taken_rows(test)
    return pytest.mark.parametrize(names, _rows_in_turn(names, rows))(test)


def _taken_rows(test: Any) -> tuple[tuple[str, ...], list[Row]]:
    """The names and the product of the lists that stand below, which the test has no longer."""
    lists = [mark for mark in test.pytestmark if mark.name == "parametrize"]
    test.pytestmark = [mark for mark in test.pytestmark if mark not in lists]
    names = tuple(name for mark in lists for name in _names(mark))
    rows = list[Row]()
    for parts in product(*map(_rows_of_list, lists)):
        values = [value for part in parts for value in part.values]
        marks = [mark for part in parts for mark in part.marks]
        rows.append(pytest.param(*values, id="-".join(part.id for part in parts), marks=marks))
    return names, rows


def _names(mark: pytest.Mark) -> list[str]:
    names = mark.args[0]
    return [name.strip() for name in (names.split(",") if isinstance(names, str) else names)]


def _rows_of_list(mark: pytest.Mark) -> Iterator[Row]:
    """The rows of one list, with the ids that pytest would give them."""
    names, ids = _names(mark), mark.kwargs.get("ids")
    rows = [
        value if hasattr(value, "marks") and hasattr(value, "values")
        else pytest.param(*([value] if len(names) == 1 else value))
        for value in mark.args[1]
    ]  # fmt: skip
    function, listed = (ids, None) if callable(ids) else (None, ids and [*ids])
    made = IdMaker(names, rows, function, listed, None, None).make_unique_parameterset_ids()
    for row, each in zip(rows, made, strict=True):
        yield pytest.param(*row.values, id=str(each), marks=row.marks)


def _rows_in_turn(names: Sequence[str], rows: Sequence[Row]) -> list[Row]:
    """A row of each combination of the other choices, and of each world size and stage."""
    by_others = defaultdict[Choice, list[int]](list)
    axes = list[Choice]()
    for number, row in enumerate(rows):
        pairs = _numbers(names, row, rows)
        axes.append(tuple(pair for pair in pairs if pair[0] in AXES))
        by_others[tuple(pair for pair in pairs if pair[0] not in AXES)].append(number)
    diagonals, uses, taken = _diagonals({*axes}), Counter[Choice](), list[int]()
    for same in by_others.values() if len(by_others) > 1 else ():
        taken.append(min(same, key=lambda number: uses[axes[number]]))
        uses[axes[taken[-1]]] += 1
    for number, pairs in enumerate(axes):
        if pairs in diagonals and not uses[pairs]:
            uses[pairs] += 1
            taken.append(number)
    return [rows[number] for number in sorted(taken)]


def _numbers(names: Sequence[str], row: Row, rows: Sequence[Row]) -> Choice:
    """The number of each of its values among those of the test, of which equal ones are one."""
    return tuple(
        (name, next(i for i, other in enumerate(rows) if other.values[at] is row.values[at]))
        for at, name in enumerate(names)
    )


def _diagonals(axes: set[Choice]) -> set[Choice]:
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
