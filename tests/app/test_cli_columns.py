"""What commands print fits a terminal: 80 columns, and never more than 100."""

from __future__ import annotations

import io
import json
import re
import shlex
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from onefold.app.cli.doctor import _lines
from onefold.app.cli.main import main
from onefold.app.tools.machine import HostReport, checks
from onefold.fit.rates import Rate
from onefold.text import columns, common_unit, in_unit, shell_lines, show, wrapped
from tests.support.commands import onefold
from tests.support.forking import HANG_S
from tests.support.rows import again_but

COMMANDS = (
    "train", "generate", "plan", "check", "report", "doctor", "bench", "inspect", "export",
)  # fmt: skip
NODES = ("plan", "--model", "small", "--gpus", "8", "--nodes", "4", "--seq", "128")


@pytest.fixture(autouse=True)
def _terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
        monkeypatch.delenv(name, raising=False)


def too_wide(text: str, width: int = 80) -> list[str]:
    return [line for line in text.splitlines() if len(line) > width]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a checkpoint `runs` and a report `page`, of a run that printed `out`."""
    folder = tmp_path_factory.mktemp("trained")
    flags = ("--steps", "2", "--batch", "1", "--seq", "16", "--sample", "200")
    done = onefold("train", *flags, "--checkpoint", "runs", "--report", "page", cwd=folder)
    assert done.returncode == 0, done.stderr
    (folder / "out").write_text(done.stdout)
    return folder


@pytest.mark.parametrize("terminal", ["80", "300"])
@pytest.mark.parametrize("command", ["", *COMMANDS])
def test_help_has_at_most_80_columns_there_and_100_elsewhere(
    command, terminal, capsys, monkeypatch
):
    monkeypatch.setenv("COLUMNS", terminal)
    with pytest.raises(SystemExit):
        main([*command.split(), "--help"])
    assert too_wide(capsys.readouterr().out, 80 if terminal == "80" else 100) == []


@again_but("flags2", "flags5")
@pytest.mark.parametrize("flags", [
    ("plan", "--ranks", "2", "--mem", "4GiB"),
    ("plan", "--model", "large", "--ranks", "2", "--mem", "4GiB", "--recompute"),
    ("plan", "--model", "small", "--gpus", "8", "--mem", "1GiB", "--batch", "auto"),
    (*NODES, "--mem", "80GiB", "--accumulate", "4"),
    (*NODES, "--cluster", "h100-80", "--precision", "bf16", "--batch", "auto", "--wire", "zero++"),
    (*NODES, "--cluster", "h100-80", "--precision", "bf16"),
])  # fmt: skip
def test_a_plan_has_80_columns_and_100_if_it_is_wide(flags, capsys):
    assert main([*flags]) in (0, 2)
    short = capsys.readouterr().out
    assert [line for line in too_wide(short) if "onefold.shard" not in line] == []
    assert too_wide(short, 100) == []
    main([*flags, "--wide"])
    wide = capsys.readouterr().out
    assert too_wide(wide, 100) == []
    assert len(wide.splitlines()) > len(short.splitlines()) + 10
    assert ("optim" in wide, "optim " in short) == (True, False)


class Terminal(io.StringIO):
    """A stream that says it is a terminal."""

    def isatty(self) -> bool:
        return True


RANKS = [
    ("rank", "host", "device", "free", "host free", "products", "copies", "slowest link"),
    *(("0", "vm", "cpu", "9.73 GiB", "19.5 GiB", "94 GFLOP/s", "17.1 GB/s", "959 MB/s"),) * 2,
]
WAYS = [
    ("stage", "offload", "memory", "fits", "step", "why"),
    ("*1", "none", "62.05 GiB", "yes", "1.70 s", "the fastest that fits"),
    ("3", "optimizer", "23.66 GiB", "if", "14.4 s", "needs host 4.20 GiB, disk 89.7 GiB"),
]


@pytest.mark.parametrize("terminal", [50, 80, 200])
@pytest.mark.parametrize(("rows", "sides"), [(RANKS, "<<<>"), (WAYS, "><>>><")])
def test_a_terminal_gets_tables_in_its_width_with_no_word_broken(
    rows, sides, terminal, monkeypatch
):
    monkeypatch.setenv("COLUMNS", str(terminal))
    stream = Terminal()
    show(columns(rows, sides), stream)
    text = re.sub(r"\x1b\[[0-9;]*m", "", stream.getvalue())
    assert too_wide(text, terminal) == []
    assert {word for row in rows for cell in row for word in cell.split()} <= {*text.split()}
    lines = text.splitlines()
    if terminal > 50:
        assert len(lines) == len(rows) + 1  # with a rule
    elif rows is RANKS:  # a line for each cell, and one between ranks
        assert len(lines) == 2 * len(rows[0]) + 1


def test_a_training_run_prints_80_columns(trained):
    out = (trained / "out").read_text()
    assert too_wide(out) == []
    assert "tokens" not in out
    (peak,) = [line for line in out.splitlines() if line.startswith("peak")]
    measured, _, predicted = (float(cell) for cell in peak.split()[3:])
    assert predicted == pytest.approx(measured, rel=0.05)


@pytest.mark.again("tests/app/test_cli_columns.py::test_a_training_run_prints_80_columns")
@pytest.mark.parametrize("command", [
    ("inspect", "runs"), ("inspect", "runs", "--verify"), ("report", "page"),
    ("export", "runs", "exported"),
])  # fmt: skip
def test_what_is_read_back_prints_80_columns(trained, command, capsys, monkeypatch):
    monkeypatch.chdir(trained)
    assert main([*command]) == 0
    assert too_wide(capsys.readouterr().out.replace(str(trained), "")) == []


MEASURES = [
    ("doctor",), ("bench", "cpu", "--seconds", "0.1"), ("bench", "link", "--seconds", "0.1"),
    ("bench", "disk", "--seconds", "0.1"),
]  # fmt: skip


@pytest.mark.again("tests/app/test_cli_columns.py::test_a_training_run_prints_80_columns")
@pytest.mark.process
def test_what_measures_prints_80_columns(tmp_path):
    """In forks of a fresh process: torch's threads do not survive a fork of one that used them."""
    code = (
        "import json; from pathlib import Path; from tests.support.commands import onefold\n"
        f"ended = [onefold(*command, cwd=Path({str(tmp_path)!r})) for command in {MEASURES}]\n"
        "print(json.dumps([(done.returncode, done.stdout, done.stderr) for done in ended]))"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=Path(__file__).parents[2],
                          capture_output=True, text=True, timeout=4 * HANG_S)  # fmt: skip
    assert done.returncode == 0, done.stderr
    for command, (code, out, errors) in zip(MEASURES, json.loads(done.stdout), strict=True):
        assert code == 0, errors
        assert len(out.splitlines()) > 3, command
        assert too_wide(out) == [], command


@pytest.mark.again("tests/app/test_cli_columns.py::test_a_training_run_prints_80_columns")
@pytest.mark.process
@pytest.mark.parametrize("command", [
    ("check", "--steps", "1"),
    ("train", "--steps", "1", "--offload", "disk:.", "--clip", "0", "--ranks", "4", "--batch", "1",
     "--seq", "16"),
])  # fmt: skip
def test_what_runs_on_ranks_prints_80_columns(tmp_path, command):
    done = onefold(*command, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert too_wide(done.stdout) == []


def test_a_command_on_several_nodes_can_be_pasted_and_meets_at_the_first(capsys):
    assert main([*NODES, "--mem", "80GiB", "--precision", "bf16", "--stage", "3"]) == 0
    lines = capsys.readouterr().out.splitlines()
    first = next(i for i, line in enumerate(lines) if "torchrun" in line)
    last = next(i for i in range(first, len(lines)) if not lines[i].endswith("\\"))
    assert last > first
    words = shlex.split(" ".join(line.rstrip("\\") for line in lines[first : last + 1]))
    rendezvous = ["--nnodes", "4", "--node-rank", "0", "--master-addr", "HOST"]
    assert words[:7] == ["torchrun", *rendezvous]
    assert "--rdzv-backend" not in words
    assert words[words.index("-m") :][:3] == ["-m", "onefold", "train"]


def test_rows_are_those_of_a_rank_in_plan_and_train(tmp_path, capsys):
    flags = ["--seq", "16", "--batch", "3", "--accumulate", "2"]
    assert main(["plan", *flags, "--ranks", "2", "--mem", "1GiB", "--json"]) == 0
    command = json.loads(capsys.readouterr().out)["command"]
    assert "--batch 3 --seq 16 --accumulate 2 --ranks 2" in command
    typed = [*shlex.split(command)[1:], "--steps", "1", "--sample", "0", "--json"]
    done = onefold(*typed, cwd=tmp_path)
    assert json.loads(done.stdout)["job"]["rows"] == 3 * 2 * 2


def test_host_memory_that_nobody_gave_is_marked_and_asked_for(capsys):
    flags = ["plan", "--model", "small", "--gpus", "2", "--mem", "500MiB", "--seq", "64"]
    assert main([*flags, "--offload", "cpu"]) == 0
    unchecked = capsys.readouterr().out
    assert "  if  " in unchecked
    said = " ".join(unchecked.split())
    assert "if: it fits if each node has so much free host memory, which was not checked" in said
    assert "of host memory on each node: not checked without --host-mem" in unchecked
    assert main([*flags, "--offload", "cpu", "--host-mem", "64GiB"]) == 0
    checked = capsys.readouterr().out
    assert "if: " not in checked
    assert "yes" in checked


HOST = HostReport(
    versions={"python": "3.11.7", "torch": "2.13.0", "onefold": "0.1.0"}, system="Linux x86_64",
    cores=2, threads=2, memory_total=2**35, memory_free=2**34, disk_folder="/tmp",
    disk_free=2**40, rates={name: Rate(1e9, 1e9, 1e9, "B", 3) for name in ("copy", "read", "write",
    "durable", "launch", "call")}, backends={"gloo": True, "nccl": True},
    gpus=["NVIDIA H100 80GB HBM3, 79.1 GiB"] * 8, limits=[],
)  # fmt: skip
LINK = {"backend": "nccl", "world_size": 8, "rates": {"gather": {"per_s": 1e11}}}


@pytest.mark.parametrize(("changes", "link", "level", "name"), [
    ({"versions": HOST.versions | {"torch": "2.10.1"}}, LINK, "warn", "versions"),
    ({"memory_total": 2**31}, LINK, "warn", "memory"),
    ({"disk_free": 2**30}, LINK, "warn", "disk"),
    ({"backends": {"gloo": True, "nccl": False}}, LINK, "fail", "backends"),
    ({}, None, "fail", "link"),
])  # fmt: skip
def test_each_check_of_the_doctor_says_ok_or_names_the_remedy(changes, link, level, name):
    assert {each.level for each in checks(HOST, LINK)} == {"ok"}
    found = checks(replace(HOST, **changes), link)
    (hurt,) = [each for each in found if each.level != "ok"]
    assert (hurt.level, hurt.name) == (level, name)
    lines = list(_lines(found))
    assert too_wide("\n".join(lines)) == []
    (at,) = [i for i, line in enumerate(lines) if line.startswith(f"{level}  {name}")]
    assert lines[at + 1].startswith("      remedy: ")
    assert sum(line.startswith("ok ") for line in lines) == len(found) - 1


def test_the_doctor_says_what_a_communicator_takes_where_there_are_gpus():
    values = {each.name: each.value for each in checks(HOST, LINK)}
    assert values["communicators"].startswith("about 519 MiB of a GPU each between two ranks")
    assert "communicators" not in {each.name for each in checks(replace(HOST, gpus=[]), LINK)}


def test_tables_and_units_are_aligned():
    assert columns([["a", "1"], ["bc", "20"]], "<>") == ["a    1\nbc  20"]
    assert common_unit(9 * 2**20) == ("KiB", 1024)
    assert common_unit(10 * 2**20) == ("MiB", 2**20)
    assert [in_unit(n, 1024) for n in (0, 1, 2048, 200_000, 2_000_000)] == [
        "-", "0.00", "2.00", "195.3", "1,953"]  # fmt: skip
    assert shell_lines(["short", "--flag 1"]) == ["  short --flag 1"]
    long = shell_lines(["x" * 50, "--flag value", "y" * 40])
    assert [line[-2:] for line in long] == [" \\", "yy"]
    assert max(len(line) for line in wrapped("word " * 100)) <= 80
