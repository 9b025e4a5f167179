"""Machines as a TOML table: the packaged ones, and those of users."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from published_runs.decoder import TransformerShape, transformer_work

import onefold
from onefold.errors import ConfigError
from onefold.planner.costs import Conditions
from onefold.planner.machines import (
    _FIELDS,
    FITS,
    Link,
    known_machines,
    machine_of,
    read_machines,
)
from onefold.planner.simulate import simulate
from onefold.recipe import Recipe
from tests.support.commands import onefold as command

ROOT = Path(__file__).parents[2]
GUIDE = ROOT / "docs" / "guides" / "choose-a-stage.md"
NAMES = list(known_machines())
every_machine = pytest.mark.parametrize("name", NAMES)

ROW = """
[mine]
flops = { bf16 = 100e12, fp32 = 10e12 }
memory_rate = 1e12
memory_nbytes = 20e9
inside_rate = 50e9
outside_rate = 5e9
fit = "FSDP 2023, A100"
"""


def file_of(folder: Path, text: str) -> Path:
    path = folder / "gpus.toml"
    path.write_text(text)
    return path


def refused(folder: Path, text: str) -> str:
    """The message about a file, which names it."""
    path = file_of(folder, text)
    with pytest.raises(ConfigError, match=r"expected .*, got .*\nhint: ") as caught:
        read_machines(path)
    assert str(path) in str(caught.value)
    return str(caught.value)


# --- the packaged table


SECONDS = {  # of the step below, before the machines were data
    "a100-40": 3.2116561668776678,
    "a100-80": 3.117782628351401,
    "h100-80": 1.4345150670918454,
    "h100-96-500w": 1.4683439938754448,
    "h200": 1.4086982545464672,
    "b200": 0.7564232503100075,
}


@pytest.mark.parametrize("name", SECONDS)
def test_the_table_gives_the_seconds_that_the_figures_in_code_gave(name):
    shape = TransformerShape(hidden=4096, layers=32, heads=32, vocab=50_368)
    work = transformer_work(shape, seq=2048, microbatch=6)
    step = simulate(work, Recipe(world_size=64, local_world_size=8), machine_of(name), Conditions())
    assert step.seconds == pytest.approx(SECONDS[name], rel=1e-12)


@every_machine
def test_every_machine_names_a_public_source(name):
    assert re.fullmatch(r"[^,]+, https://\S+", machine_of(name).source)


@every_machine
def test_narrower_dtypes_are_as_fast_or_faster(name):
    """Tensor cores of GeForce cards are no faster in tf32 than the other cores in fp32."""
    peaks = machine_of(name).flops
    assert peaks["fp32"] <= peaks["tf32"] < peaks["bf16"] == peaks["fp16"]
    assert (peaks["fp32"] == peaks["tf32"]) == name.startswith("rtx")
    assert peaks.get("fp8", 2 * peaks["bf16"]) == pytest.approx(2 * peaks["bf16"], rel=0.02)


@every_machine
def test_peaks_are_dense_so_memory_keeps_up_with_at_most_700_flops_a_byte(name):
    """A peak with sparsity, or one of another unit, would be outside."""
    machine = machine_of(name)
    assert 100 < machine.flops["bf16"] / machine.memory_rate < 700


@every_machine
def test_links_get_slower_from_memory_to_the_network(name):
    machine = machine_of(name)
    inside, outside = machine.inside.nbytes_per_second, machine.outside.nbytes_per_second
    assert machine.memory_rate > inside >= outside > 1e9
    assert machine.inside.latency <= machine.outside.latency


@every_machine
def test_every_name_gives_a_plan_with_times(name):
    cluster = {"ranks": machine_of(name).ranks_per_node, "nodes": 2, "machine": name}
    for precision in ("bf16", "fp16", None):
        made = onefold.plan("tiny", cluster=cluster, seq=32, stage=3, precision=precision)
        assert made.best is not None
        assert made.best.step.seconds > 0
        assert made.machine == name


def test_a_faster_generation_of_a_vendor_has_faster_steps():
    def seconds(name: str) -> float:
        shape = TransformerShape(hidden=4096, layers=32, heads=32, vocab=50_368)
        work = transformer_work(shape, seq=2048, microbatch=6)
        return simulate(work, Recipe(world_size=4), machine_of(name), Conditions()).seconds

    for slow, fast in (("a10", "l40s"), ("rtx-4090", "rtx-5090"), ("l40s", "h100-80"),
                       ("b200", "gb200"), ("a100-80", "mi300x")):  # fmt: skip
        assert seconds(slow) > seconds(fast), (slow, fast)


def test_the_table_is_read_when_it_is_first_needed():
    code = (
        "import builtins, io, sys; opened = []; real = io.open;\n"
        "io.open = lambda file, *a, **k: opened.append(str(file)) or real(file, *a, **k)\n"
        "import onefold.planner.machines as machines; before = len(opened)\n"
        "machines.machine_of('h200'); once = len(opened); machines.machine_of('a10')\n"
        "print(before, once - before, len(opened) - once)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["0", "1", "0"]


def test_the_wheel_has_the_table():
    """Hatch packs all files of a package."""
    wheel = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["hatch"]["build"]
    assert wheel["targets"]["wheel"]["packages"] == ["src/onefold"]
    path = "src/onefold/planner/machines.toml"
    assert (ROOT / path).is_file()


# --- files of users


def test_a_file_adds_its_machines_to_the_known_ones(tmp_path):
    machines = read_machines(file_of(tmp_path, ROW))
    assert [*machines] == [*NAMES, "mine"]
    mine = machines["mine"]
    assert mine.flops == {"bf16": 100e12, "fp32": 10e12}
    assert (mine.inside, mine.outside) == (Link(50e9, 4e-6), Link(5e9, 20e-6))
    assert mine.efficiency == FITS["FSDP 2023, A100"]
    assert (mine.ranks_per_node, mine.host_rate, mine.source) == (8, 25e9, "")
    assert "mine" not in known_machines()


def test_a_machine_like_another_differs_in_the_fields_of_its_row_alone(tmp_path):
    text = """
    [Ours]
    like = "H100"
    memory_nbytes = 94e9
    flops.fp8 = 1e15
    outside_latency = 0
    [theirs]
    like = "ours"
    ranks_per_node = 4
    """
    machines = read_machines(file_of(tmp_path, text))
    ours, theirs, known = machines["ours"], machines["theirs"], machine_of("h100-80")
    assert ours.flops == {**known.flops, "fp8": 1e15}
    assert ours.memory_nbytes == 94e9
    assert (ours.memory_rate, ours.efficiency) == (known.memory_rate, known.efficiency)
    assert ours.outside == Link(known.outside.nbytes_per_second, 0)
    assert ours.source == ""
    assert (theirs.flops, theirs.ranks_per_node) == (ours.flops, 4)


def test_a_file_is_read_again_at_each_call(tmp_path):
    path = file_of(tmp_path, ROW)
    read_machines(path)
    path.write_text(ROW.replace("20e9", "21e9"))
    assert read_machines(path)["mine"].memory_nbytes == 21e9


def test_a_plan_takes_a_machine_of_a_file(tmp_path):
    mine = read_machines(file_of(tmp_path, ROW))["mine"]
    made = onefold.plan("tiny", cluster={"ranks": 4, "machine": mine}, seq=32, stage=3)
    assert made.machine == "mine"
    assert made.best is not None


@pytest.mark.parametrize("gpu", ["mine", "4xMINE + 8xh100"])
def test_the_command_takes_machines_of_a_file_by_name(tmp_path, gpu):
    path = str(file_of(tmp_path, ROW))
    done = command("plan", "--seq", "32", "--stage", "3", "--machines", path, "--gpu", gpu)
    assert done.returncode == 0, done.stderr
    assert "mine" in done.stdout


def test_an_inference_plan_takes_machines_of_a_file(tmp_path):
    path = str(file_of(tmp_path, ROW))
    done = command("plan", "--inference", "--gpus", "1", "--machines", path, "--gpu", "mine")
    assert done.returncode == 0, done.stderr
    assert "mine's data sheet" in " ".join(done.stdout.split())


def test_the_file_of_the_guide_is_read(tmp_path):
    (text,) = re.findall(r"```toml\n(.*?)```", GUIDE.read_text(), re.DOTALL)
    machines = read_machines(file_of(tmp_path, text))
    assert [*machines][len(NAMES) :] == re.findall(r"^\[(.*?)\]", text, re.MULTILINE)


def test_the_guide_lists_every_field():
    section = GUIDE.read_text().partition("## Other GPUs")[2].partition("\n## ")[0]
    fields = {field.partition(".")[0] for field in _FIELDS}
    cells = re.findall(r"^\| (`.*?) \|", section, re.MULTILINE)
    assert {each for cell in cells for each in re.findall(r"`(\w+)`", cell)} == fields
    assert all(f"`{field.partition('.')[2]}`" in section for field in _FIELDS if "." in field)


WRONG = {
    "memory_rte = 1e12": ["[mine]", "'memory_rte'", "did you mean memory_rate?"],
    "flops.bf61 = 1e12": ["[mine]", "'flops.bf61'", "did you mean flops.bf16?"],
    "memory_rate = -1e12": ["[mine]", "memory_rate to be a number above 0", "got -1000"],
    "memory_rate = 0": ["memory_rate to be a number above 0"],
    "memory_rate = nan": ["memory_rate", "got nan"],
    "memory_rate = inf": ["memory_rate", "got inf"],
    f"memory_rate = 1{'0' * 400}": ["memory_rate to be a number above 0"],
    "memory_rate = true": ["memory_rate", "got True"],
    'memory_rate = "1 TB/s"': ["memory_rate to be a number above 0", "'1 TB/s'"],
    "memory_rate = [1e12]": ["memory_rate", "[1000000000000.0]"],
    "spread = -0.1": ["spread to be a number of at least 0"],
    "ranks_per_node = 8.0": ["ranks_per_node to be a whole number above 0"],
    "ranks_per_node = 0": ["ranks_per_node"],
    "flops = 1e12": ["'flops'"],
    "flops = {}": ["'flops'"],
    "source = 1": ["source to be a text"],
    'fit = "FSDP 2023 A100"': ["fit to be one of", "did you mean FSDP 2023, A100?"],
    "fit = { matmul = 0.5 }": ["[mine]", "'fit.matmul'"],
    'like = "h10-80"': ["[mine] like", "did you mean h100-80?"],
    'like = "mine"': ["'mine'"],
}


@pytest.mark.parametrize("line", WRONG, ids=lambda line: line[:30])
def test_a_wrong_field_is_an_error_that_names_file_machine_and_field(tmp_path, line):
    key = re.split(r"[ .]", line)[0]
    kept = [row for row in ROW.splitlines() if not row.startswith(key)]
    message = refused(tmp_path, "\n".join([*kept, line]))
    for words in WRONG[line]:
        assert words in message


@pytest.mark.parametrize("field", ["flops", "memory_rate", "memory_nbytes", "inside_rate",
                                   "outside_rate", "fit"])  # fmt: skip
def test_a_missing_field_is_named(tmp_path, field):
    message = refused(tmp_path, re.sub(rf"(?m)^{field} = .*$", "", ROW))
    assert "[mine]" in message
    assert field in message
    assert "like =" in message


def test_both_peaks_that_plans_use_are_needed(tmp_path):
    for dtype in ("bf16", "fp32"):
        text = re.sub(rf"{dtype} = \S+(,| (?=}}))", "", ROW).replace(", }", " }")
        assert f"flops.{dtype}" in refused(tmp_path, text)


@pytest.mark.parametrize("name", ["h100-80", "H100-80", "h100", "A100"])
def test_a_file_cannot_change_a_known_machine(tmp_path, name):
    message = refused(tmp_path, ROW.replace("mine", name))
    assert "the name of a new machine" in message
    assert f"like = '{name}'" in message


@pytest.mark.parametrize("name", ["8xmine", "4090", "my gpu", "a+b", ""])
def test_a_name_that_a_cluster_could_not_use_is_refused(tmp_path, name):
    assert repr(name) in refused(tmp_path, ROW.replace("mine", f'"{name}"'))


@pytest.mark.parametrize(
    "text", ["memory_rate = ", "[mine]\n[mine]", "a = 1", "\0", "[a.b]\nc = 1"]
)
def test_a_file_that_is_no_table_of_machines_is_refused(tmp_path, text):
    refused(tmp_path, text)


def test_a_file_of_other_bytes_is_refused(tmp_path):
    path = tmp_path / "gpus.toml"
    path.write_bytes(b"\xff\xfe")
    with pytest.raises(ConfigError, match=r"a TOML file at .*gpus\.toml"):
        read_machines(path)


def test_a_file_that_is_not_there_or_a_folder_is_refused(tmp_path):
    for path in (tmp_path / "none.toml", tmp_path):
        with pytest.raises(ConfigError, match="a TOML file at") as caught:
            read_machines(path)
        assert str(path) in str(caught.value)


def test_the_command_says_what_is_wrong_in_one_line(tmp_path):
    path = str(file_of(tmp_path, ROW.replace("memory_rate = 1e12", "memory_rate = -1")))
    for flags, said in (
        (("--machines", path, "--gpu", "mine"), "memory_rate to be a number above 0, got -1"),
        (("--machines", path), "the name of a GPU with machines, got machines alone"),
        (("--machines", str(tmp_path / "none"), "--gpu", "mine"), "a TOML file at"),
    ):
        done = command("plan", *flags)
        assert done.returncode == 2
        (line,) = done.stderr.strip().splitlines()
        assert line.startswith("onefold plan: ")
        assert said in line


def test_a_machine_that_is_not_known_is_listed_with_those_of_the_file(tmp_path):
    machines = read_machines(file_of(tmp_path, ROW))
    assert machine_of("MINE", machines) is machines["mine"]
    with pytest.raises(ConfigError, match=r"a GPU among a100-40.*, mine, got 'abacus'"):
        machine_of("abacus", machines)
