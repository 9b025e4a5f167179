"""Faults are put into copies: the source stays as it is, and a run goes on where it ended."""

from __future__ import annotations

import argparse
import json
from collections import Counter
from dataclasses import asdict

import mutants
import mutating
import pytest

SOURCE = '''"""Words."""

from __future__ import annotations


def cut(rows: int, rank: int) -> int:
    """Words too."""
    if rows < rank:
        raise ValueError(f"{rows < 1}")
    total = rows + 1
    return total


class Store:
    def close(self) -> str:
        return "a" if self else "b"

    def wait(self) -> None:
        self.work.wait()
        self.is_open = False
'''


def test_each_kind_of_fault_changes_one_statement_and_moves_no_line():
    found = list(mutating.mutants_of("unit/a.py", SOURCE, {}))
    kinds = Counter(mutant.kind for mutant, _ in found)
    assert kinds == {
        "compare": 1, "boundary": 1, "rank": 1, "arithmetic": 1, "constant": 2, "wait": 1,
        "drop": 1,
    }  # fmt: skip
    for mutant, text in found:
        lines = list(zip(SOURCE.splitlines(), text.splitlines(), strict=True))
        changed = [number for number, (old, new) in enumerate(lines, 1) if old != new]
        assert changed == [mutant.line], mutant
        compile(text, "a", "exec")
    assert len({mutant.name for mutant, _ in found}) == len(found)


def test_a_fault_is_found_again_when_lines_move(tmp_path, monkeypatch):
    room = tmp_path / "unit"
    room.mkdir()
    monkeypatch.setattr(mutants, "PACKAGE", tmp_path)
    drawn = [mutant for mutant, _ in mutating.mutants_of("unit/a.py", SOURCE, {})]
    (room / "b.py").write_text(SOURCE.replace('"""Words."""', '"""More."""\n\nimport math'))
    found = mutants.located(drawn)
    assert {file for file, _, _ in found.values()} == {"unit/b.py"}
    assert [found[mutant.name][1] for mutant in drawn] == [mutant.line + 2 for mutant in drawn]
    (room / "b.py").write_text(SOURCE.replace("total = rows + 1", "total = rows - 1"))
    gone = [mutant.kind for mutant in drawn if mutant.name not in mutants.located(drawn)]
    assert gone == ["arithmetic", "constant"]


def test_marks_say_which_statements_ran():
    text, lines = mutating.counted(SOURCE, 3)
    marks = bytearray(len(lines) + 3)
    names = {mutating.HITS: marks}
    exec(text.replace("from onefold._hits import HITS as _HITS", ""), names)
    assert not any(marks), "nothing has been called"
    assert names["cut"](2, 1) == 3
    bits = mutants.packed(marks) >> 3
    ran = [line for i, line in enumerate(lines) if bits >> i & 1]
    assert ran == [7, 8, 10, 11]


def test_a_fault_is_written_to_an_overlay_and_the_tree_stays(tmp_path):
    package = tmp_path / "src"
    (package / "unit").mkdir(parents=True)
    for name in ("a.py", "b.py"):
        (package / "unit" / name).write_text(SOURCE)
    slot = mutants.Slot(tmp_path / "overlay", package)
    slot.put({"unit/a.py": "wrong"})
    seen = tmp_path / "overlay" / "onefold" / "unit"
    assert (seen / "a.py").read_text() == "wrong"
    slot.put({"unit/b.py": "wrong"})
    assert [(seen / name).read_text() for name in ("a.py", "b.py")] == [SOURCE, "wrong"]
    assert {path.read_text() for path in package.rglob("*.py")} == {SOURCE}


class FakeMap:
    """Stands in for a map: one case for each fault."""

    cases = ("t.py::t",)

    def job(self, key, file, line, text):
        return mutants.Job(key, [["t.py::t"]], {file: text})


def test_an_interrupted_run_goes_on_and_its_faults_run_once(tmp_path, monkeypatch, capsys):
    package = tmp_path / "src"
    (package / "unit").mkdir(parents=True)
    (package / "unit" / "a.py").write_text(SOURCE)
    drawn = [asdict(mutant) for mutant, _ in mutating.mutants_of("unit/a.py", SOURCE, {})]
    drawn[-1]["statement"] = "self.is_closed = True"
    path = tmp_path / "drawn.json"
    parts = {name: {"seed": 1, "mutants": []} for name in mutants.SETS}
    path.write_text(json.dumps({**parts, "frozen": {"seed": 1, "mutants": drawn}}))
    for name, value in (("PACKAGE", package), ("BUILD", tmp_path), ("Map", FakeMap)):
        monkeypatch.setattr(mutants, name, value)
    ran = Counter()

    def run_jobs(jobs, count):
        while jobs:
            job = jobs.popleft()
            if sum(ran.values()) == 3 and not ran["interrupted"]:
                ran["interrupted"] += 1
                raise KeyboardInterrupt
            ran[job.key] += 1
            hangs = sum(ran.values()) == 5 or ran[job.key] == 2
            job.over = "hang" if hangs else ""
            job.lines = [{"start": "t.py::t"}, {"failed": "t.py::t", "why": "x"}] * (not hangs)
            yield job

    monkeypatch.setattr(mutants, "run_jobs", run_jobs)
    options = argparse.Namespace(drawn=path, to=tmp_path / "to.json", jobs=1)
    with pytest.raises(KeyboardInterrupt):
        mutants.run(options)
    mutants.run(options)
    assert sorted(ran.values())[-2:] == [1, 2], "one hung, and ran again"
    table = json.loads(options.to.read_text())["frozen"]
    ends = Counter(mutant["end"] for mutant in table["mutants"])
    assert ends == {"killed": len(drawn) - 2, "hang": 1, "gone": 1}
    assert (table["run"], table["killed"]) == (len(drawn) - 1, len(drawn) - 1)
    assert (package / "unit" / "a.py").read_text() == SOURCE
