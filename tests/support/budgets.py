"""CPU seconds of each test file, its child processes included, and its slow tests.

`pytest --durations-file=tests/support/durations.json` writes them. Unlike wall time they are nearly
the same on a busy machine. `pytest --quick` leaves the slow tests out.
"""

from __future__ import annotations

import json
import os
from collections import defaultdict
from collections.abc import Iterator
from multiprocessing import forkserver
from pathlib import Path
from typing import TypedDict

import pytest

BUDGETS = Path(__file__).parent / "durations.json"
MOST = 1.5
"""Times its budget that a file may take. A share of the total: a slow machine slows all files."""

SMALLEST_S = 5.0
SLOW = 1 / 10_000
"""A test is slow if a case takes more than this share of all CPU seconds: 0.15 s of 25 minutes."""

_CPU_S = "cpu_s"


def cpu_seconds() -> float:
    """CPU time of this process and of its children that have ended, also of forkserver's."""
    total = sum(os.times()[:4])
    server = forkserver._forkserver._forkserver_pid
    if server is not None:
        fields = Path(f"/proc/{server}/stat").read_text().rpartition(")")[2].split()
        total += sum(int(ticks) for ticks in fields[11:15]) / os.sysconf("SC_CLK_TCK")
    return total


class Row(TypedDict):
    """What a file took, and the names of its slow tests."""

    cpu_s: float
    slow: list[str]


Table = dict[str, Row]


class Budgets:
    """A plugin: workers measure, and the process that collects their reports writes the file."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._cases: dict[str, dict[str, float]] = defaultdict(dict)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[None]:
        self._begun = cpu_seconds()
        return (yield)

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_makereport(self, item: pytest.Item, call: pytest.CallInfo[None]) -> None:
        if call.when == "teardown":
            item.user_properties.append((_CPU_S, cpu_seconds() - self._begun))

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when == "teardown":
            file, _, case = report.nodeid.partition("::")
            self._cases[file][case] = float(str(dict(report.user_properties)[_CPU_S]))

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        if "PYTEST_XDIST_WORKER" not in os.environ:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            self._path.write_text(json.dumps(self.table(), indent=1) + "\n")

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        if BUDGETS.exists():
            for line in overruns(self.table(), json.loads(BUDGETS.read_text())):
                terminalreporter.write_line(line)

    def table(self) -> Table:
        """By file, the most expensive one first."""
        total = sum(sum(cases.values()) for cases in self._cases.values())
        files = {
            file: {
                "cpu_s": round(sum(cases.values()), 1),
                "slow": sorted({test_of(case) for case in cases if cases[case] > SLOW * total}),
            }
            for file, cases in self._cases.items()
        }
        return dict(sorted(files.items(), key=lambda row: -row[1]["cpu_s"]))


def test_of(case: str) -> str:
    """The name of a test without its parameters."""
    return case.partition("[")[0]


def slow_tests() -> set[str]:
    """The tests that were slow when `durations.json` was written, as `file::name`."""
    table: Table = json.loads(BUDGETS.read_text())
    return {f"{file}::{test}" for file, row in table.items() for test in row["slow"]}


def overruns(table: Table, before: Table) -> list[str]:
    """A line for each file whose share of the run exceeds that of its budget by half."""
    spent, budgets = ({file: row["cpu_s"] for file, row in run.items()} for run in (table, before))
    both = [file for file in spent if file in budgets]
    speed = sum(spent[file] for file in both) / (sum(budgets[file] for file in both) or 1.0)
    return [
        f"budget: {file} took {spent[file]:.0f} CPU seconds, expected {budgets[file] * speed:.0f}"
        for file in both
        if spent[file] > SMALLEST_S and spent[file] > MOST * budgets[file] * speed
    ]
