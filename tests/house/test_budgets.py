"""Grids and budgets of the suite itself."""

from __future__ import annotations

from tests.support import grids
from tests.support.budgets import overruns

pytest_plugins = ["pytester"]

GRID = """
import pytest

@pytest.mark.covering
@pytest.mark.parametrize("world_size", [1, 2, 3])
@pytest.mark.parametrize("stage", [1, 3])
@pytest.mark.parametrize("edit", ["a", "b", "c"])
def test_grid(world_size, stage, edit): ...

@pytest.mark.parametrize("world_size", [1, 2])
def test_others(world_size): ...
"""


def test_a_file_is_over_its_budget_by_its_share_whatever_the_speed():
    budgets = {"a.py": 10.0, "b.py": 30.0, "c.py": 1.0}
    assert overruns({name: 4 * cpu_s for name, cpu_s in budgets.items()}, budgets) == []
    assert overruns({"a.py": 40.0, "b.py": 30.0, "new.py": 90.0}, budgets) == [
        "budget: a.py took 40 CPU seconds, expected 18"
    ]
    assert overruns({"a.py": 10.0, "c.py": 4.0}, budgets) == [], "a small file"


def test_rows_of_a_grid_meet_each_world_size_and_each_stage_in_every_other_choice(pytester):
    """So does each pair of the other choice and one of the two."""
    pytester.makepyfile(test_it=GRID)
    items, _ = pytester.inline_genitems("-p", "no:randomly")
    left = grids.left_out(items)
    kept = [item for item in items if item not in left]
    assert len(kept) == 9 + 2
    for axis, values in {"world_size": (1, 2, 3), "stage": (1, 3)}.items():
        for value in values:
            edits = {
                c.callspec.params.get("edit") for c in kept if c.callspec.params.get(axis) == value
            }
            assert edits >= {"a", "b", "c"}, (axis, value)
