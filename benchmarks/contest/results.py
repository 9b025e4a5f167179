"""Result files: what was measured, on what, with which versions, by which command."""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
from datetime import date
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from contest.case import Case
from contest.summary import Round

RESULTS = Path(__file__).parent.parent / "results"


def provenance() -> dict[str, Any]:
    """Date, machine, versions, commit and command."""
    return {
        "date": date.today().isoformat(),
        "command": _command(),
        "commit": _commit(),
        "machine": _machine(),
        "versions": {
            "python": platform.python_version(),
            **{name: _version(name) for name in ("torch", "deepspeed", "onefold")},
        },
    }


def write(path: Path, case: Case, rounds: list[Round], about: dict[str, Any]) -> None:
    """Replace the file of a case by the rounds that are finished."""
    path.parent.mkdir(parents=True, exist_ok=True)
    text = json.dumps({**about, "case": case.as_dict(), "rounds": rounded(rounds)})
    new = path.with_suffix(".new")
    new.write_text(text.replace('{"ddp"', '\n{"ddp"').replace('"rounds"', '\n"rounds"') + "\n")
    new.replace(path)


def append_run(name: str, run: dict[str, Any], folder: Path = RESULTS) -> None:
    """Add a run to a file that keeps the runs of one benchmark."""
    path = folder / name
    runs = json.loads(path.read_text())["runs"] if path.exists() else []
    about = provenance()
    key = {name: about.pop(name) for name in ("date", "commit", "command")}
    text = json.dumps({**about, "runs": [*runs, rounded({**key, **run})]}, indent=1)
    path.write_text(text + "\n")


def path_of(case: Case, folder: Path = RESULTS) -> Path:
    """Where the result of a case goes: its date and name."""
    words = case.name.replace(",", "").replace(" ", "-")
    return folder / f"{date.today().isoformat()}-peers-{words}.json"


def read_newest(folder: Path = RESULTS) -> dict[str, dict[str, Any]]:
    """The newest result of each case by its name."""
    found = {}
    for path in sorted(folder.glob("*-peers-*.json")):
        result = json.loads(path.read_text())
        found[Case(**result["case"]).name] = result
    return found


def write_block(page: Path, name: str, lines: list[str]) -> None:
    """Replace what a page has between the marks of a block."""
    begin, end = f"<!-- {name}: begin -->", f"<!-- {name}: end -->"
    before, found, rest = page.read_text().partition(begin)
    _, ended, after = rest.partition(end)
    if not (found and ended):
        raise SystemExit(f"{page.name} has no {begin} ... {end} to write between")
    page.write_text("\n".join([before + begin, *lines, end + after]))


def rounded(value: Any) -> Any:
    """Numbers with six digits: more would be noise."""
    if isinstance(value, float):
        return float(f"{value:.6g}")
    if isinstance(value, dict):
        return {key: rounded(item) for key, item in value.items()}
    if isinstance(value, list):
        return [rounded(item) for item in value]
    return value


def _command() -> str:
    """As typed in the root of a checkout; no folder of this machine is told."""
    script, *arguments = sys.argv
    for option in ("--results", "--folder"):
        if option in arguments:
            at = arguments.index(option)
            del arguments[at : at + 2]
    return " ".join(["python", f"benchmarks/{Path(script).name}", *arguments])


def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return "not installed"


def _commit() -> str:
    def git(*arguments: str) -> str:
        command = ["git", *arguments]
        where = RESULTS.parent.parent
        return subprocess.run(command, capture_output=True, text=True, check=True, cwd=where).stdout

    if "COMMIT" in os.environ:  # of a copy without its history
        return os.environ["COMMIT"]
    try:
        changed = git("status", "--porcelain", "--", "src", "benchmarks", ":!benchmarks/results")
        return git("rev-parse", "--short=10", "HEAD").strip() + ("-dirty" if changed else "")
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


def _machine() -> dict[str, Any]:
    facts = {"system": platform.system(), "arch": platform.machine()}
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith(("model name", "cache size")):
            name, _, value = line.partition(":")
            facts.setdefault(name.strip(), value.strip())
    meminfo = Path("/proc/meminfo").read_text().splitlines()[0]
    return {
        **facts,
        "cores": len(os.sched_getaffinity(0)),
        "memory": meminfo[9:].strip(),
    }
