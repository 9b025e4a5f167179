"""Grids and budgets of the suite itself."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests import conftest
from tests.support import grids
from tests.support.budgets import Budgets, Table, overruns

pytest_plugins = ["pytester"]

TESTS = Path(__file__).parents[1]
GRID = """
import pytest

@pytest.mark.parametrize("world_size", [1, 2, 3])
@pytest.mark.parametrize("stage", [1, 3])
@pytest.mark.parametrize("edit", list("abcdefgh"))
def test_grid(world_size, stage, edit): ...

@pytest.mark.parametrize("world_size", [1, 2, 3])
@pytest.mark.parametrize("stage", [1, 3])
def test_axes(world_size, stage): ...

@pytest.mark.parametrize("world_size", [1, 2])
def test_others(world_size): ...

"""


SLOW = """
import pytest

@pytest.mark.parametrize("model", range(4))
@pytest.mark.parametrize("mode", list("abc"))
def test_slow_grid(model, mode): ...

@pytest.mark.parametrize("size", [1, 2, pytest.param(9, marks=pytest.mark.again("others"))])
def test_slow_sizes(size): ...

@pytest.mark.parametrize("stage", [0, 1, 3])
def test_whole(stage): ...

@pytest.mark.parametrize("tier", ["cpu", "disk"])
@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_slow(world_size, tier): ...

@pytest.mark.parametrize(("world_size", "stage"), [(4, 0), (1, 3), (2, 1), (3, 2)])
def test_slow_rows(world_size, stage): ...

def test_lone(): ...
"""


def table(**files: float) -> Table:
    return {f"{name}.py": {"cpu_s": cpu_s, "slow": []} for name, cpu_s in files.items()}


def test_a_file_is_over_its_budget_by_its_share_whatever_the_speed():
    budgets = table(a=10.0, b=30.0, c=1.0)
    assert overruns(table(a=40.0, b=120.0, c=4.0), budgets) == []
    assert overruns(table(a=40.0, b=30.0, new=90.0), budgets) == [
        "budget: a.py took 40 CPU seconds, expected 18"
    ]
    assert overruns(table(a=10.0, c=4.0), budgets) == [], "a small file"


def test_a_test_is_slow_if_one_of_its_cases_takes_much_of_the_run(tmp_path):
    budgets = Budgets(tmp_path / "durations.json")
    took = {"a.py::test_a[1]": 0.1, "a.py::test_a[2]": 2.0, "a.py::test_b": 0.5, "b.py::test": 1e4}
    for nodeid, cpu_s in took.items():
        report = pytest.TestReport(nodeid, ("", 0, ""), {}, "passed", None, "teardown")
        report.user_properties.append(("cpu_s", cpu_s))
        budgets.pytest_runtest_logreport(report)
    assert list(budgets.table().items()) == [
        ("b.py", {"cpu_s": 1e4, "slow": ["test"]}), ("a.py", {"cpu_s": 2.6, "slow": ["test_a"]}),
    ]  # fmt: skip


@pytest.mark.parametrize(("options", "passed"), [((), 2), (("--quick",), 1)])
def test_quick_leaves_out_what_was_slow_and_nothing_else(options, passed, pytester, monkeypatch):
    pytester.makepyfile(test_it="def test_fast(): ...\ndef test_slow(): ...\n")
    pytester.makeconftest(
        "from tests.conftest import pytest_addoption, pytest_collection_modifyitems"
    )
    monkeypatch.setattr(conftest, "slow_tests", lambda: {"test_it.py::test_slow"})
    pytester.inline_run(*options).assertoutcome(passed=passed)


def test_rows_of_a_grid_hold_each_world_size_stage_and_combination_of_the_others(pytester):
    pytester.makepyfile(test_it=GRID)
    items, _ = pytester.inline_genitems("-p", "no:randomly")
    left = grids.left_out(items)
    kept = [item for item in items if item not in left]
    rows = [item.callspec.params for item in kept]
    grid = [row for row in rows if "edit" in row]
    assert sorted(row["edit"] for row in grid) == list("abcdefgh")
    axes = [row for row in rows if "stage" in row and "edit" not in row]
    for some in (grid, axes):
        assert {row["world_size"] for row in some} == {1, 2, 3}
        assert {row["stage"] for row in some} == {1, 3}
    assert len(axes) == 3
    assert len(rows) == len(grid) + len(axes) + 2


def test_the_same_cases_stay_in_whatever_order_tests_are_collected(pytester):
    """`make test` and `make again` shuffle apart; together they run all rows, each once."""
    pytester.makepyfile(test_it=GRID + SLOW)
    items, _ = pytester.inline_genitems("-p", "no:randomly")
    left = grids.left_out(items)
    for shuffled in (items[::-1], sorted(items, key=lambda item: item.name[::-1])):
        assert grids.left_out(shuffled) == left


def test_one_of_so_many_cases_stays_and_each_shared_value_the_most_ranks_and_the_highest_stage(
    pytester,
):
    pytester.makepyfile(test_it=SLOW)
    items, _ = pytester.inline_genitems()  # in any order
    slow = ("test_slow", "test_slow_rows", "test_slow_grid", "test_slow_sizes", "test_lone")
    grids.leave_to_again(items, {f"test_it.py::{name}" for name in slow})
    stay = [item for item in items if not item.get_closest_marker("again")]
    rows = [item.callspec.params for item in stay if item.name.startswith("test_slow_grid")]
    assert {row["model"] for row in rows} == set(range(4))
    assert {row["mode"] for row in rows} == set("abc")
    assert 4 <= len(rows) <= 6
    assert sorted(item.name for item in stay if "grid" not in item.name) == [
        "test_lone", "test_slow[1-disk]", "test_slow[2-cpu]", "test_slow[3-disk]",
        "test_slow_rows[1-3]", "test_slow_rows[3-2]", "test_slow_rows[4-0]",
        "test_slow_sizes[1]", "test_slow_sizes[2]",  # this one says by itself what is left out
        "test_whole[0]", "test_whole[1]", "test_whole[3]",
    ]  # fmt: skip


def test_a_test_that_is_left_out_names_one_that_make_test_runs_and_that_keeps_its_law():
    keepers = [keeper for path in TESTS.rglob("test_*.py") for keeper in _keepers(path)]
    assert len(keepers) > 3
    for keeper in keepers:
        path, _, name = keeper.partition("::")
        body = ast.parse((TESTS.parent / path).read_text()).body
        test = next(node for node in body if getattr(node, "name", None) == name)
        assert isinstance(test, ast.FunctionDef)
        marks = "".join(map(ast.unparse, test.decorator_list))
        assert "mark.again" not in marks, keeper


def _keepers(path: Path) -> Iterator[str]:
    """The arguments of the mark `again` in a file."""
    if path == Path(__file__):
        return
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "pytest.mark.again":
            (keeper,) = node.args
            yield ast.literal_eval(keeper)
