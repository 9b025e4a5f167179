"""Put faults into engine, unit and wire, one at a time, and count those that a test finds.

    python benchmarks/mutants.py map                   which cases execute which statements
    python benchmarks/mutants.py draw                  150 faults, and 75 that are held out
    python benchmarks/mutants.py run                   run the tests of each; goes on where it ended
    python benchmarks/mutants.py run --to later.json   the same faults, on the source of today

A fault's tests are the cases of `make test` that execute its statement, cheapest first and from
many files in turn, until the first failure or 20 CPU seconds. The source is never written to: tests
import a folder of links to it, in which the one file differs. An interrupted run loses the faults
that it was at. Faults whose statement is gone count neither way.

The map is made by a mark before each statement of a copy (mutating.counted). Marks are memory that
all processes of a case share, so threads of ranks and of autograd, forked ranks and commands are
all seen. It takes about an hour of a core; `map --quick` runs the files of `make quick`. A later
`map` adds the others, and `run` then runs the faults that lived again. Make a new map when
statements have moved. Tests run in forks of a warm process, so on Linux.
"""

from __future__ import annotations

import argparse
import gzip
import json
import mmap
import os
import random
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections import Counter, defaultdict, deque
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass, field, fields
from functools import reduce
from itertools import pairwise
from operator import or_
from pathlib import Path
from typing import Any

os.environ.setdefault("MKL_CBWR", "AVX2,STRICT")  # as in tests/conftest.py
sys.path.insert(0, str(Path(__file__).parents[1]))

import pytest
from mutating import KINDS, Mutant, counted, enum_members, mutants_of

from tests.support.budgets import BUDGETS, quick_files

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "src" / "onefold"
BUILD = ROOT / "build" / "mutants"
RESULT = ROOT / "benchmarks" / "results" / "2026-11-28-mutants.json"
ROOMS = ("engine", "unit", "wire")
SETS = {"frozen": (150, 44), "held_out": (75, 4444)}
"""How many faults, and the seed that drew them."""
WARM = (
    "numpy", "hypothesis", "torch", "torch._dynamo", "torch.distributed.checkpoint", "transformers",
    "torch.testing._internal.distributed.multi_threaded_pg", "torch.distributed.fsdp",
    "torch.distributed.tensor.parallel", "torch.distributed.pipelining", "safetensors.torch",
)  # fmt: skip
LIMIT_S, BATCHES = 20.0, (6, 18, 60, 200, 400)
"""CPU seconds of a fault's cases, and how many are collected at a time."""
HANG_CPU_S, HANG_WALL_S, LONGER, LONGEST_S = 15.0, 60.0, 10.0, 240.0
"""A case hangs after so much, and `LONGER` times what it took for the map."""
IMPORTS = (1.0, 3.0)
LEFT_OUT = ("gone", "not run")
"""Ends that count neither way."""
MEMORY_NBYTES = 6 << 30
FLAGS = (
    "-m", "not again", "-p", "no:randomly", "-p", "no:cacheprovider", "--hypothesis-seed=0",
    "-W", "ignore::pytest.PytestAssertRewriteWarning",
)  # fmt: skip
NAMED = FLAGS[2:]
"""For cases by name: they run whatever `make test` leaves out."""
MARKS = "import mmap\nwith open({!r}, 'r+b') as file:\n    HITS = mmap.mmap(file.fileno(), 0)\n"


@dataclass
class Job:
    """Cases to run in a forked process, and what came of it."""

    key: str
    batches: list[list[str]]
    changed: dict[str, str]
    expected: dict[str, tuple[float, float]] = field(default_factory=dict)
    """CPU and wall seconds of each case; empty while the map is made."""
    num_marks: int = 0
    known: frozenset[str] = frozenset()
    """Cases that the map has."""
    flags: tuple[str, ...] = NAMED
    lines: list[dict[str, Any]] = field(default_factory=list)
    over: str = ""
    status: int = 0
    cpu_s: float = 0.0


class Cases:
    """The plugin of pytest: writes what happens, and ends the run at the limit."""

    def __init__(self, lines: Path, hits: mmap.mmap | None, known: frozenset[str]) -> None:
        self._file, self._hits, self._known = lines.open("a"), hits, known
        self._ends, self.is_over = list[str](), False

    def tell(self, **line: Any) -> None:
        """Write a line of the run."""
        self._file.write(json.dumps(line) + "\n")
        self._file.flush()

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        """Leave out cases that the map has."""
        items[:] = [item for item in items if item.nodeid not in self._known]

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[None]:
        """Write the case's CPU seconds, end and marks."""
        if self._hits is not None:
            self._hits[:] = bytes(len(self._hits))
        self.tell(start=item.nodeid)
        self._ends.clear()
        begun, cpu = time.monotonic(), sum(os.times()[:4])
        result = yield
        cpu_s = sum(os.times()[:4])
        spent = {"cpu": round(cpu_s - cpu, 3), "wall": round(time.monotonic() - begun, 3)}
        end = next((e for e in ("failed", "skipped") if e in self._ends), "passed")
        marks = {"hits": f"{packed(self._hits):x}"} if self._hits is not None else {}
        self.tell(case=item.nodeid, end=end, **spent, **marks)
        if self._hits is None and (end == "failed" or cpu_s > LIMIT_S):
            self.is_over = True
            item.session.shouldstop = "over"
        return result

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Note how a part of a case ended."""
        self._ends.append(report.outcome)
        if report.failed:
            text = str(getattr(report.longrepr, "reprcrash", report.longrepr))
            self.tell(failed=report.nodeid, why=text.split("\n")[0].rpartition("/")[2][:160])

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        """Note a file that does not import."""
        if report.failed:
            self.tell(failed=report.nodeid or "import", why=str(report.longrepr)[-160:])


def packed(marks: Any) -> int:
    """A number with a bit for each mark, the first one lowest."""
    return int(bytes(marks)[::-1].translate(bytes.maketrans(b"\0\1", b"01")) or b"0", 2)


class Slot:
    """A folder of links to the package, in which files may differ, and the process that uses it."""

    def __init__(self, folder: Path, package: Path) -> None:
        self.folder, self._package, self._changed = folder, package, list[str]()
        self._stamp = time.time() - 1e6
        for path in package.rglob("*"):
            if path.is_file() and path.suffix != ".pyc":
                link = folder / "onefold" / path.relative_to(package)
                link.parent.mkdir(parents=True, exist_ok=True)
                link.symlink_to(path)

    def put(self, changed: dict[str, str]) -> None:
        """Let the files of `changed` have that text, and all others their own."""
        for file in {*self._changed, *changed}:
            path = self.folder / "onefold" / file
            path.unlink(missing_ok=True)
            if file not in changed:
                path.symlink_to(self._package / file)
            else:
                path.write_text(changed[file])
                self._stamp += 10  # compiled code is found by size and second: no two are alike
                os.utime(path, (self._stamp, self._stamp))
        self._changed = [file for file in changed if (self._package / file).exists()]

    def start(self, job: Job) -> None:
        """Fork a process that runs the job's cases."""
        hits, lines = self.folder / "hits", self.folder / "lines"
        changed = dict(job.changed)
        if job.num_marks:
            hits.write_bytes(bytes(job.num_marks))
            changed["_hits.py"] = MARKS.format(str(hits))
        self.put(changed)
        lines.write_text("")
        self.job, self._lines = job, lines
        self._turned = self._looked = time.monotonic()
        self._size, self._turned_cpu, self._case = 0, 0.0, ""
        self.pid = os.fork()
        if self.pid == 0:
            try:
                self._work(job)
            except BaseException:
                traceback.print_exc()
                os._exit(1)
            os._exit(0)

    def _work(self, job: Job) -> None:
        """Run the cases, batch by batch, in the process that was forked."""
        os.setsid()
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        log = os.open(self.folder / "log", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(log, 1)
        os.dup2(log, 2)
        resource.setrlimit(resource.RLIMIT_DATA, (MEMORY_NBYTES, MEMORY_NBYTES))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        os.chdir(ROOT)
        sys.path[:0] = paths = [str(self.folder), str(ROOT)]
        os.environ["PYTHONPATH"] = os.pathsep.join(paths)
        os.environ["HYPOTHESIS_STORAGE_DIRECTORY"] = str(self.folder / "hypothesis")
        os.environ["TMPDIR"] = tempfile.mkdtemp(dir=self.folder)
        tempfile.tempdir = None  # read the variable again
        hits = None
        if job.num_marks:
            with (self.folder / "hits").open("r+b") as file:
                hits = mmap.mmap(file.fileno(), 0)
        cases = Cases(self._lines, hits, job.known)
        for batch in job.batches:
            code = int(pytest.main([*batch, *job.flags], plugins=[cases]))
            if code in (2, 3, 4) and not cases.is_over:
                cases.tell(failed="import", why=f"pytest ends with {code}")
            if cases.is_over or code not in (0, 1, 5):
                break

    def has_ended(self) -> bool:
        """True once the process is gone; it is killed for a hang, or for its memory."""
        pid, status, usage = os.wait4(self.pid, os.WNOHANG)
        if not pid:
            if time.monotonic() > self._looked + 0.5:
                self._looked = time.monotonic()
                self.job.over = self._judged()
            if not self.job.over:
                return False
        self.kill()
        if not pid:
            _, status, usage = os.wait4(self.pid, 0)
        self.job.cpu_s = max(self.job.cpu_s, usage.ru_utime + usage.ru_stime)
        self.job.status = os.waitstatus_to_exitcode(status)
        self.job.lines = [json.loads(line) for line in self._lines.read_text().splitlines()]
        for path in self.folder.glob("tmp*"):
            shutil.rmtree(path, ignore_errors=True)
        return True

    def _judged(self) -> str:
        """What is over its limit, by the CPU seconds and pages of the process's session."""
        cpu, nbytes = 0.0, 0
        for path in Path("/proc").glob("[0-9]*/stat"):
            with suppress(OSError):
                facts = path.read_text().rpartition(")")[2].split()
                if int(facts[3]) == self.pid:
                    cpu += sum(map(int, facts[11:15])) / os.sysconf("SC_CLK_TCK")
                    nbytes += int(facts[21]) * mmap.PAGESIZE
        self.job.cpu_s = max(self.job.cpu_s, cpu)
        size, now = self._lines.stat().st_size, time.monotonic()
        if size != self._size:
            self._size, self._turned, self._turned_cpu = size, now, cpu
            self._case = json.loads(self._lines.read_text().splitlines()[-1]).get("start", "")
        if nbytes > MEMORY_NBYTES:
            return "memory"
        usual, usual_wall = self.job.expected.get(self._case, IMPORTS)
        wall_s = min(HANG_WALL_S + LONGER * usual_wall, LONGEST_S)
        # other processes of a case, such as ranks that serve a whole file, are not in `usual`
        cpu_s = HANG_CPU_S + LONGER * max(usual, usual_wall)
        if self.job.num_marks:
            wall_s, cpu_s = 5 * LONGEST_S, 5 * LONGEST_S
        return "hang" if now > self._turned + wall_s or cpu > self._turned_cpu + cpu_s else ""

    def kill(self) -> None:
        """End the process and those of its session."""
        with suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)


def run_jobs(jobs: deque[Job], count: int) -> Iterator[Job]:
    """Run jobs in `count` forked processes at a time, and yield each as it ends.

    A job may be put into `jobs` again meanwhile.
    """
    with tempfile.TemporaryDirectory(prefix="onefold-mutants-") as folder:
        free, running = [Slot(Path(folder) / str(i), PACKAGE) for i in range(count)], list[Slot]()
        try:
            while jobs or running:
                while free and jobs:
                    running.append(free.pop())
                    running[-1].start(jobs.popleft())
                time.sleep(0.05)
                for slot in [slot for slot in running if slot.has_ended()]:
                    running.remove(slot)
                    free.append(slot)
                    yield slot.job
        finally:
            for slot in running:
                slot.kill()


def sources() -> dict[str, str]:
    """Text of each file of the three rooms."""
    paths = [path for room in ROOMS for path in sorted((PACKAGE / room).glob("*.py"))]
    return {str(path.relative_to(PACKAGE)): path.read_text() for path in paths}


def marked() -> tuple[dict[str, str], list[tuple[str, int]]]:
    """The sources with marks, and file and line of each mark."""
    changed, places = {}, list[tuple[str, int]]()
    for file, text in sources().items():
        if "triton.jit" not in text:  # Triton reads the source of its kernels
            changed[file], lines = counted(text, len(places))
            places += [(file, line) for line in lines]
    return changed, places


def read_lines(path: Path) -> list[dict[str, Any]]:
    """Lines of JSON, a last one that was cut off left out."""
    found = []
    if path.exists():
        with (gzip.open if path.suffix == ".gz" else open)(path, "rt") as file, suppress(EOFError):
            for line in file:
                with suppress(json.JSONDecodeError):
                    found.append(json.loads(line))
    return found


def make_map(options: argparse.Namespace) -> None:
    """Run each test file with marks; cases that the map has are left out."""
    path = BUILD / "map.jsonl.gz"
    lines = read_lines(path)
    done = {line["file"] for line in lines if "file" in line and line["flags"] == [*FLAGS]}
    known = frozenset(line["case"] for line in lines if "case" in line)
    changed, places = marked()
    files = {str(p.relative_to(ROOT)) for p in (ROOT / "tests").glob("*/test_*.py")}
    if options.quick:
        files &= quick_files(json.loads(BUDGETS.read_text()))
    jobs = deque(
        Job(file, [[file]], changed, num_marks=len(places), known=known, flags=FLAGS)
        for file in sorted(files)
        if file not in done
    )
    for job in run_jobs(jobs, options.jobs):
        lines = [line for line in job.lines if "case" in line]
        failed = [line["case"] for line in lines if line["end"] == "failed"]
        told = f"{job.key}: {len(lines)} cases in {job.cpu_s:.0f} CPU s"
        print(told, job.over, job.status or "", *failed, flush=True)
        with gzip.open(path, "at") as file:
            for line in [*lines, {"file": job.key, "cpu": job.cpu_s, "flags": FLAGS}]:
                file.write(json.dumps(line) + "\n")


class Map:
    """Which cases execute a statement, from the lines that `map` wrote."""

    def __init__(self) -> None:
        lines = read_lines(BUILD / "map.jsonl.gz")
        self.cases = {x["case"]: x for x in lines if x.get("end") == "passed"}
        self._hits = {name: int(line["hits"], 16) for name, line in self.cases.items()}
        self._marks = {place: number for number, place in enumerate(marked()[1])}

        self._executed = reduce(or_, self._hits.values(), 0)

    def is_executed(self, file: str, line: int) -> bool:
        """True if some case executes the statement."""
        mark = self._marks.get((file, line))
        return mark is not None and bool(self._executed >> mark & 1)

    def executing(self, file: str, line: int) -> list[str]:
        """Cases that execute the statement."""
        mark = self._marks.get((file, line))
        return [] if mark is None else [c for c, hits in self._hits.items() if hits >> mark & 1]

    def job(self, key: str, file: str, line: int, text: str) -> Job:
        """The tests of a fault: cheapest first, but not those of one file one after another.

        Files of the fault's room and laws come before others. Collecting costs time, so cases are
        collected in batches that grow.
        """
        by_file = defaultdict[str, list[str]](list)
        for case in self.executing(file, line):
            by_file[case.split("::")[0]].append(case)
        cost = {case: self.cases[case]["cpu"] for cases in by_file.values() for case in cases}
        turns = []
        for name, cases in by_file.items():
            weight = 1 if name.split("/")[1] in (file.split("/")[0], "laws") else 2
            for i, case in enumerate(sorted(cases, key=lambda case: (cost[case], case))):
                turns.append((weight * (cost[case] + 0.01) * (4 + i), case))
        chosen, spent = list[str](), 0.0
        for _, case in sorted(turns):
            if spent < LIMIT_S:
                chosen.append(case)
                spent += cost[case]
        expected = {c: (cost[c], self.cases[c]["wall"]) for c in chosen}
        ends = [sum(BATCHES[:i]) for i in range(len(BATCHES) + 1)]
        batches = [chosen[i:j] for i, j in pairwise(ends)]
        return Job(key, [batch for batch in batches if batch], {file: text}, expected)


def draw(options: argparse.Namespace) -> None:
    """Write the faults to run: a fair share for each room and kind, no statement twice."""
    cases, texts = Map(), sources()
    members = enum_members(list(texts.values()))
    pools = defaultdict[tuple[str, str], list[Mutant]](list)
    for file, text in texts.items():
        for mutant, _ in mutants_of(file, text, members):
            if cases.is_executed(file, mutant.line):
                pools[file.split("/")[0], mutant.kind].append(mutant)
    result: dict[str, Any] = {"commit": commit(), "cases_of_the_map": len(cases.cases)}
    used = set[tuple[str, str]]()
    for name, (count, seed) in SETS.items():
        chance, chosen = random.Random(seed), list[Mutant]()
        for number, room in enumerate(ROOMS, 1):
            while len(chosen) < number * count // len(ROOMS):
                for kind in chance.sample(KINDS, len(KINDS)):
                    pool = [m for m in pools[room, kind] if (m.function, m.statement) not in used]
                    if pool and len(chosen) < number * count // len(ROOMS):
                        chosen.append(chance.choice(pool))
                        used.add((chosen[-1].function, chosen[-1].statement))
        result[name] = {"seed": seed, "mutants": [asdict(mutant) for mutant in chosen]}
        print(name, Counter(mutant.kind for mutant in chosen))
    write(options.to, result)


def commit() -> str:
    """The commit that is checked out."""
    command = ["git", "-C", str(ROOT), "rev-parse", "HEAD"]
    return subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()


def write(path: Path, result: dict[str, Any]) -> None:
    """Replace a result file, one fault a line."""
    parts = []
    for name, part in result.items():
        if name in SETS:
            lines = ",\n".join(json.dumps(mutant) for mutant in part["mutants"])
            facts = json.dumps({**part, "mutants": []})
            parts.append(f'"{name}": {facts.removesuffix("[]}")}[\n{lines}\n]}}')
        else:
            parts.append(f'"{name}": {json.dumps(part)}')
    text = "{" + ",\n".join(parts) + "}"
    new = path.with_suffix(".new")
    new.write_text(text + "\n")
    new.replace(path)


def run(options: argparse.Namespace) -> None:
    """Run the tests of each fault that has not been run, and write the result file."""
    drawn, cases = json.loads(options.drawn.read_text()), Map()
    progress = BUILD / f"{options.to.stem}.jsonl"
    ends = {line.pop("name"): line for line in read_lines(progress)}
    names = [each.name for each in fields(Mutant)]
    mutants = [Mutant(*[m[k] for k in names]) for part in SETS for m in drawn[part]["mutants"]]
    found, is_again = located(mutants), set[str]()
    jobs = deque(cases.job(m.name, *found[m.name]) for m in mutants if m.name in found)
    jobs = deque(job for job in jobs if needs_run(job, ends.get(job.key)))
    jobs = deque(sorted(jobs, key=lambda job: job.key in ends))
    drawn["cases_of_the_map"] = len(cases.cases)
    try:
        for job in run_jobs(jobs, options.jobs):
            if job.over == "hang" and job.key not in is_again:
                is_again.add(job.key)
                jobs.append(cases.job(job.key, *found[job.key]))
                continue
            ends[job.key] = end_of(job)
            line = json.dumps({"name": job.key, **ends[job.key]})
            print(line, flush=True)
            with progress.open("a") as file:
                file.write(line + "\n")
    finally:
        known = {name: ends.get(name, {"end": "not run"}) for name in found}
        finish(options, drawn, known, names)


def needs_run(job: Job, end: dict[str, Any] | None) -> bool:
    """True if the fault was not run, or lived and has other tests since the map grew."""
    if end is None:
        return True
    is_short = end["ran"] < end["of"] and end["cpu_s"] < LIMIT_S
    return end["end"] == "alive" and (is_short or end["of"] != sum(map(len, job.batches)))


def end_of(job: Job) -> dict[str, Any]:
    """How a fault's run ended."""
    failed = next((line for line in job.lines if "failed" in line), None)
    last = next((line["start"] for line in job.lines[::-1] if "start" in line), "import")
    ran = sum("case" in line for line in job.lines)
    facts = {"ran": ran, "of": sum(map(len, job.batches)), "cpu_s": round(job.cpu_s, 1)}
    if failed:
        return {"end": "killed", "by": failed["failed"], "how": failed["why"], **facts}
    if job.over or job.status:
        return {"end": job.over or f"exit code {job.status}", "by": last, **facts}
    return {"end": "alive", **facts}


def located(mutants: list[Mutant]) -> dict[str, tuple[str, int, str]]:
    """File, line and faulty text of each fault whose statement is there, in its file or another."""
    texts = sources()
    members, found = enum_members(list(texts.values())), {}
    wanted = defaultdict[str, list[Mutant]](list)
    for mutant in mutants:
        wanted[mutant.name.partition("|")[2]].append(mutant)
    for file, text in texts.items():
        for here, faulty in mutants_of(file, text, members):
            for mutant in wanted.get(here.name.partition("|")[2], ()):
                if mutant.name not in found or here.file == mutant.file:
                    found[mutant.name] = (file, here.line, faulty)
    return found


def finish(
    options: argparse.Namespace, drawn: dict[str, Any], ends: dict[str, Any], names: list[str]
) -> None:
    """Write the table, and print the scores next to those that the drawn file has."""
    for part in SETS:
        lines, killed, killed_then = list[dict[str, Any]](), 0, 0
        for old in drawn[part]["mutants"]:
            mutant = {key: old[key] for key in names}
            end = ends.get(Mutant(**mutant).name, {"end": "gone"})
            why = {"why": old["why"]} if "why" in old and end["end"] == "alive" else {}
            lines.append({**mutant, **end, **why})
            if end["end"] not in LEFT_OUT:
                killed += end["end"] != "alive"
                killed_then += old.get("end", "alive") not in ("alive", *LEFT_OUT)
        number = sum(line["end"] not in LEFT_OUT for line in lines)
        seed = drawn[part]["seed"]
        drawn[part] = {"seed": seed, "run": number, "killed": killed, "mutants": lines}
        print(f"{part}: {killed} of {number} killed, {killed_then} in {options.drawn.name}")
    write(options.to, {**drawn, "commit": commit()})


def main() -> None:
    """Make the map, draw faults, or run them."""
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("task", choices=("map", "draw", "run"))
    parser.add_argument("--jobs", type=int, default=1, help="processes at a time")
    parser.add_argument("--quick", action="store_true", help="map the files of `make quick` alone")
    parser.add_argument("--drawn", type=Path, default=RESULT, help="the file that lists the faults")
    parser.add_argument("--to", type=Path, default=RESULT, help="the file to write")
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # the forked processes end too
    BUILD.mkdir(parents=True, exist_ok=True)
    if options.task != "draw":
        for name in WARM:
            __import__(name)
    {"map": make_map, "draw": draw, "run": run}[options.task](options)


if __name__ == "__main__":
    main()
