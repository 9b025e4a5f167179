"""Machines as a TOML table."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from published_runs.decoder import TransformerShape, transformer_work

import onefold
from onefold.planner.costs import Conditions
from onefold.planner.machines import (
    known_machines,
    machine_of,
)
from onefold.planner.simulate import simulate
from onefold.recipe import Recipe

ROOT = Path(__file__).parents[2]
NAMES = list(known_machines())
every_machine = pytest.mark.parametrize("name", NAMES)


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
