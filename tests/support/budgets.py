"""CPU seconds of each test file, its child processes included.

`pytest --durations-file=tests/support/durations.json` writes them. Unlike wall time they are nearly
the same on a busy machine.
"""

from __future__ import annotations

import json
import os
from collections import defaultdict
from collections.abc import Iterator
from multiprocessing import forkserver
from pathlib import Path

import pytest

BUDGETS = Path(__file__).parent / "durations.json"
MOST = 1.5
"""Times its budget that a file may take. A share of the total: a slow machine slows all files."""

SMALLEST_S = 5.0
_CPU_S = "cpu_s"


def cpu_seconds() -> float:
    """CPU time of this process and of its children that have ended, also of forkserver's."""
    total = sum(os.times()[:4])
    server = forkserver._forkserver._forkserver_pid
    if server is not None:
        fields = Path(f"/proc/{server}/stat").read_text().rpartition(")")[2].split()
        total += sum(int(ticks) for ticks in fields[11:15]) / os.sysconf("SC_CLK_TCK")
    return total


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

    def table(self) -> dict[str, float]:
        """CPU seconds by file, the most expensive file first."""
        files = {file: round(sum(cases.values()), 1) for file, cases in self._cases.items()}
        return dict(sorted(files.items(), key=lambda row: -row[1]))


def overruns(spent: dict[str, float], budgets: dict[str, float]) -> list[str]:
    """A line for each file whose share of the run exceeds that of its budget by half."""
    both = [file for file in spent if file in budgets]
    speed = sum(spent[file] for file in both) / (sum(budgets[file] for file in both) or 1.0)
    return [
        f"budget: {file} took {spent[file]:.0f} CPU seconds, expected {budgets[file] * speed:.0f}"
        for file in both
        if spent[file] > SMALLEST_S and spent[file] > MOST * budgets[file] * speed
    ]
