"""CPU seconds of each test file, its child processes included.

`pytest --durations-file=tests/support/durations.json` writes them. Unlike wall time they are nearly
the same on a busy machine. `pytest --quick` runs the cheapest files.
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
QUICK_S = 350.0
"""What the files of `--quick` take together, where the table was written."""

_CPU_S = "cpu_s"


def cpu_seconds() -> float:
    """CPU time of this process and of its children that have ended, also of forkserver's."""
    total = sum(os.times()[:4])
    server = forkserver._forkserver._forkserver_pid
    if server is not None:
        fields = Path(f"/proc/{server}/stat").read_text().rpartition(")")[2].split()
        total += sum(int(ticks) for ticks in fields[11:15]) / os.sysconf("SC_CLK_TCK")
    return total


Table = dict[str, float]  # CPU seconds by file


class Budgets:
    """A plugin: workers measure, and the process that collects their reports writes the file."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._files = defaultdict[str, float](float)

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
            cpu_s = float(str(dict(report.user_properties)[_CPU_S]))
            self._files[report.nodeid.partition("::")[0]] += cpu_s

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
        rounded = {file: round(cpu_s, 1) for file, cpu_s in self._files.items()}
        return dict(sorted(rounded.items(), key=lambda row: -row[1]))


def quick_files(table: Table) -> set[str]:
    """The cheapest files of the table, which take `QUICK_S` together at most."""
    quick, total = set[str](), 0.0
    for file, cpu_s in sorted(table.items(), key=lambda row: row[1]):
        total += cpu_s
        if total > QUICK_S:
            break
        quick.add(file)
    return quick


def overruns(table: Table, before: Table) -> list[str]:
    """A line for each file whose share of the run exceeds that of its budget by half."""
    both = [file for file in table if file in before]
    speed = sum(table[file] for file in both) / (sum(before[file] for file in both) or 1.0)
    return [
        f"budget: {file} took {table[file]:.0f} CPU seconds, expected {before[file] * speed:.0f}"
        for file in both
        if table[file] > SMALLEST_S and table[file] > MOST * before[file] * speed
    ]
