"""Grids and budgets of the suite itself."""

from __future__ import annotations

import ast
import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests import conftest
from tests.support import budgets
from tests.support.budgets import Budgets, overruns, quick_files
from tests.support.rows import again_but

pytest_plugins = ["pytester"]

TESTS = Path(__file__).parents[1]
GRID = """
import pytest
from tests.support.rows import again_but, worlds_in_turn

@worlds_in_turn
@pytest.mark.parametrize("world_size", [1, 2, 3])
@pytest.mark.parametrize("stage", [1, 3])
@pytest.mark.parametrize("edit", list("abcdefgh"))
def test_grid(world_size, stage, edit): ...

@worlds_in_turn
@pytest.mark.parametrize("world_size", [1, 2, 3])
@pytest.mark.parametrize("stage", [1, 3])
def test_axes(world_size, stage): ...

@again_but("1-a-cpu", "3-b-cpu")
@worlds_in_turn
@pytest.mark.filterwarnings("ignore:odd")
@pytest.mark.parametrize(("tier", "_"), [("cpu", 0), ("disk", 1)], ids=["cpu", "disk"])
@pytest.mark.parametrize("mode", [str, pytest.param(int, id="b")], ids=lambda mode: "a")
@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_named(world_size, mode, tier, _): ...
"""


def test_a_file_is_over_its_budget_by_its_share_whatever_the_speed():
    budgets = {"a.py": 10.0, "b.py": 30.0, "c.py": 1.0}
    assert overruns({"a.py": 40.0, "b.py": 120.0, "c.py": 4.0}, budgets) == []
    assert overruns({"a.py": 40.0, "b.py": 30.0, "new.py": 90.0}, budgets) == [
        "budget: a.py took 40 CPU seconds, expected 18"
    ]
    assert overruns({"a.py": 10.0, "c.py": 4.0}, budgets) == [], "a small file"


def test_the_table_has_the_sum_of_each_files_cases_and_the_dearest_file_first(tmp_path):
    budgets = Budgets(tmp_path / "durations.json")
    took = {"a.py::test_a[1]": 0.1, "a.py::test_a[2]": 2.0, "a.py::test_b": 0.5, "b.py::test": 1e4}
    for nodeid, cpu_s in took.items():
        report = pytest.TestReport(nodeid, ("", 0, ""), {}, "passed", None, "teardown")
        report.user_properties.append(("cpu_s", cpu_s))
        budgets.pytest_runtest_logreport(report)
    assert list(budgets.table().items()) == [("b.py", 1e4), ("a.py", 2.6)]


def test_quick_runs_the_cheapest_files_and_none_that_nobody_has_measured(pytester, monkeypatch):
    pytester.makepyfile(**dict.fromkeys(("test_a", "test_b", "test_new"), "def test(): ..."))
    pytester.makeconftest("from tests.conftest import pytest_addoption, pytest_ignore_collect")
    table = pytester.path / "table.json"
    table.write_text('{"test_a.py": 300.0, "test_c.py": 60.0, "test_b.py": 40.0}')
    monkeypatch.setattr(conftest, "BUDGETS", table)
    monkeypatch.setattr(conftest, "ROOT", pytester.path)
    pytester.inline_run().assertoutcome(passed=3)
    items, _ = pytester.inline_genitems("--quick")
    assert [item.nodeid for item in items] == ["test_b.py::test"]


def test_quick_takes_what_it_may_by_the_table():
    table = json.loads(budgets.BUDGETS.read_text())
    cost = sum(table[file] for file in quick_files(table))
    assert 0.9 * budgets.QUICK_S < cost <= budgets.QUICK_S


def test_rows_in_turn_hold_each_world_size_stage_and_combination_of_the_others(pytester):
    rows = [item.callspec.params for item in _items(pytester)]
    grid = [row for row in rows if "edit" in row]
    assert sorted(row["edit"] for row in grid) == list("abcdefgh")
    axes = [row for row in rows if "stage" in row and "edit" not in row]
    for some in (grid, axes):
        assert {row["world_size"] for row in some} == {1, 2, 3}
        assert {row["stage"] for row in some} == {1, 3}
    assert len(axes) == 3


def test_cases_that_are_not_named_run_again_and_names_are_those_of_pytest(pytester):
    cases = [item for item in _items(pytester) if item.originalname == "test_named"]
    named = [case.name for case in cases if not case.get_closest_marker("again")]
    assert named == ["test_named[1-a-cpu]", "test_named[3-b-cpu]"]
    assert len(cases) == 4
    again = {case.get_closest_marker("again").args for case in cases if case.name not in named}
    assert again == {("test_it.py::test_named",)}
    assert all(case.get_closest_marker("filterwarnings") for case in cases)


def test_a_name_that_no_case_has_is_an_error_and_so_is_no_name():
    for ids in (("1", "4"), ()):

        @pytest.mark.parametrize("stage", [1, 3])
        def some(stage): ...

        with pytest.raises(AssertionError, match="some has no case"):
            again_but(*ids)(some)


def _items(pytester: pytest.Pytester) -> list[pytest.Function]:
    pytester.makepyfile(test_it=GRID)
    items, _ = pytester.inline_genitems("-p", "no:randomly")
    return items


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
