"""`onefold bench`: what it says of a disk, of memory and of a link, and what it refuses.

No test asserts a time: rates are positive, and shares are the ratios that they claim to be.
"""

from __future__ import annotations

import gc
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from onefold.app.cli import bench
from onefold.app.cli.launch import RESULT
from onefold.app.cli.main import main
from onefold.app.tools import bandwidth
from onefold.app.tools.bandwidth import MOVED_NBYTES, measure_link
from onefold.compose.tiers import is_memory
from onefold.errors import ConfigError
from onefold.fit import rates as fit_rates
from onefold.fit.rates import RateRow, in_rounds
from onefold.tier.host import MIB
from onefold.wire.collectives import Group
from onefold.wire.world import World
from tests.support.ranks import run_ranks

for command in ("check", "finetune", "generate", "train"):  # they import `launch`: the real one
    import_module(f"onefold.app.cli.{command}")

QUICK = ["--seconds", "0.02"]
SHM = Path("/dev/shm")

RATES = {
    "disk": ["read", "write", "mixed", "step", "durable"],
    "cpu": ["copy", "products", "launch", "call", "adam", "step_fp32", "step_bf16"],
    "link": ["exchange", "gather", "reduce_scatter"],
}


@pytest.fixture(autouse=True)
def _alone(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "TORCHELASTIC_ERROR_FILE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv(RESULT, "")  # the command sets it: gone afterwards
    monkeypatch.setattr(fit_rates, "beyond_caches", lambda: MIB)
    for name in ("DISK_NBYTES", "DURABLE_NBYTES", "CROSSING_NBYTES"):
        monkeypatch.setattr(fit_rates, name, MIB)
    monkeypatch.setattr(fit_rates, "LINK_NBYTES", {"cpu": MIB, "cuda": MIB})


@pytest.fixture
def _thread_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks that are threads of this process, where the command would launch processes."""

    @contextmanager
    def joined(**_: object) -> Iterator[World]:
        yield World(Group.from_handle(dist.group.WORLD), torch.device("cpu"))

    def launched(argv: list[str], ranks: int) -> int:
        def as_rank(rank: int) -> object:
            return bench.measure_as_rank(lambda world: measure_link(world, 0.02))

        assert run_ranks(ranks, as_rank) == [None] * ranks
        return 0

    monkeypatch.setattr("onefold.wire.world.joined", joined)
    monkeypatch.setattr("onefold.app.cli.launch.launch", launched)


def measured(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, Any]:
    assert main(["bench", *arguments, *QUICK, "--json"]) == 0
    told = capsys.readouterr()
    assert told.err == ""
    assert told.out.count("\n") == 1
    return json.loads(told.out)


def check_rates(found: dict[str, Any]) -> None:
    rates = found["rates"]
    assert list(rates) == RATES[found["target"]]
    assert set(found["versions"]) == {"python", "torch", "onefold"}
    for name, rate in rates.items():
        assert rate["rounds"] % 2 == 1
        assert 0 < rate["lowest"] <= rate["per_s"] <= rate["highest"]
        if rate["of"]:
            assert rate["share"] == pytest.approx(rate["per_s"] / rates[rate["of"]]["per_s"])
        if name in MOVED_NBYTES:
            assert rate["parameters_per_s"] * MOVED_NBYTES[name] == pytest.approx(rate["per_s"])


def open_swap_files() -> list[str]:
    gc.collect()
    links = []
    for entry in Path("/proc/self/fd").iterdir():
        try:
            links.append(os.readlink(entry))
        except OSError:  # the folder's own
            continue
    return [link for link in links if link.endswith(".swap (deleted)")]


# starting


@pytest.mark.process
def test_its_help_imports_neither_torch_nor_rich():
    program = (
        "import sys\nfrom onefold.app.cli.main import main\n"
        "try:\n    main(['bench', '--help'])\nexcept SystemExit:\n    pass\n"
        "assert 'torch' not in sys.modules and 'rich' not in sys.modules"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "--json" in done.stdout


# disk


def test_disks_are_measured_raw_and_under_a_step_and_keep_nothing_of_it(tmp_path, capsys):
    before, paths = open_swap_files(), [tmp_path / name for name in "abc"]
    for path in paths:
        path.mkdir()
    flags = [flag for path in paths for flag in ("--path", str(path))]
    found = measured(capsys, "disk", *flags)
    check_rates(found)
    assert found["paths"] == [str(path) for path in paths]
    assert [list(path.iterdir()) for path in paths] == [[], [], []]
    assert open_swap_files() == before


@pytest.mark.skipif(not is_memory(SHM), reason="/dev/shm is no tmpfs here")
def test_a_path_in_memory_is_no_disk_and_the_command_says_so(capsys):
    assert main(["bench", "disk", "--path", str(SHM), *QUICK]) == 0
    told = capsys.readouterr()
    assert "note: /dev/shm lies in memory (tmpfs)" in told.out
    assert told.err == ""


def test_what_raw_writes_leave_behind_are_numbers_that_can_be_stepped(tmp_path, monkeypatch):
    kept: list[Any] = []
    stepped = bandwidth.Stepped

    def keeping(*args: Any) -> Any:
        kept.append(stepped(*args))
        return kept[-1]

    monkeypatch.setattr(bandwidth, "Stepped", keeping)
    bandwidth.measure_disk([tmp_path], 0.02)
    for unit in kept[0].units:
        for buffer in (unit.weight, *unit.moments.values()):
            assert buffer.tensor.isfinite().all()


# cpu


def test_steps_on_the_cpu_stand_beside_torch_with_28_bytes_per_parameter(capsys):
    check_rates(measured(capsys, "cpu"))
    assert MOVED_NBYTES["adam"] == MOVED_NBYTES["step_bf16"] == 28


def test_buffers_exceed_the_largest_cache(monkeypatch, tmp_path):
    monkeypatch.undo()
    cache = tmp_path / "index3"
    cache.mkdir()
    (cache / "size").write_text(f"{200 * 1024}K\n")
    monkeypatch.setattr(fit_rates, "_CACHES", tmp_path)
    monkeypatch.setattr(fit_rates, "free_host_nbytes", lambda: 64 << 30)
    assert fit_rates.beyond_caches() == 400 * MIB
    monkeypatch.setattr(fit_rates, "free_host_nbytes", lambda: 1 << 30)
    assert fit_rates.beyond_caches() == 64 * MIB


# link


@pytest.mark.usefixtures("_thread_ranks")
def test_a_link_is_measured_bare_and_under_the_engines_collectives(capsys, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    found = measured(capsys, "link")
    check_rates(found)
    assert found["ranks"] == 2
    assert found["notes"] == []


@pytest.mark.parametrize("world_size", [2, 3])
def test_every_rank_goes_through_the_same_rounds_and_finds_its_own_rates(world_size):
    def body(rank: int) -> dict[str, Any]:
        world = World(Group.from_handle(dist.group.WORLD), torch.device("cpu"))
        return json.loads(json.dumps(measure_link(world, 0.02)))

    found = run_ranks(world_size, body)
    for each in found:
        check_rates(each)
    assert len({each["rates"]["gather"]["rounds"] for each in found}) == 1


def test_copies_to_a_gpu_and_back_are_measured(monkeypatch):
    """On the CPU in place of a device: what is counted, not how fast it is."""
    kinds = iter(["cpu"])  # for the question itself; memory is not to be pinned
    monkeypatch.setattr(bandwidth.accelerator, "kind", lambda: next(kinds, None))
    rates = bandwidth.measure_copies(0.02)
    assert list(rates) == ["h2d", "d2h", "both"]
    assert all(rate["per_s"] > 0 for rate in rates.values())


def test_a_single_rank_has_no_link():
    with pytest.raises(
        ConfigError, match="expected at least 2 ranks with a link between them, got"
    ):
        measure_link(World(Group(0, 1, None), torch.device("cpu")), 0.02)


def test_ranks_that_fail_end_the_command_with_their_code(capsys, monkeypatch):
    monkeypatch.setattr("onefold.app.cli.launch.launch", lambda *_: 7)
    assert main(["bench", "link", *QUICK]) == 7
    assert capsys.readouterr().out == ""


# rounds


def test_rounds_run_in_turn_after_a_warm_up_and_as_often_as_the_seconds_allow():
    order: list[str] = []
    rows = [RateRow(name, 8, lambda name=name: order.append(name)) for name in "ab"]
    asked: list[int] = []

    def once(rounds: int) -> int:
        asked.append(rounds)
        return 3

    found = in_rounds(rows, 0.001, once)
    assert order == ["a", "b"] * 5, "two of warm-up, three rounds"
    assert found["a"].rounds == found["b"].rounds == 3
    assert len(asked) == 1


# what is shown


def test_people_get_a_table_in_ascii_of_at_most_eighty_columns(tmp_path, capsys):
    for target, shares in ((["disk", "--path", str(tmp_path)], 1), (["cpu"], 2)):
        assert main(["bench", *target, *QUICK]) == 0
        told = capsys.readouterr()
        assert told.err == ""
        assert told.out.isascii()
        rows = [line for line in told.out.splitlines() if "%" in line]
        assert len(rows) == shares
        assert max(map(len, rows)) <= 80


# bad input


def test_bad_input_is_one_line_with_a_hint_and_exit_code_two(tmp_path, capsys, monkeypatch):
    for arguments, message in (
        (["fly"], "expected target: disk, cpu, link, got 'fly'"),
        ([], "the following arguments are required: target"),
        (["cpu", "--path", str(tmp_path)], "expected --path only with disk, got it with cpu"),
        (["cpu", "--seconds", "0"], "expected --seconds to be a number above 0, got '0'"),
    ):
        assert main(["bench", *arguments]) == 2, arguments
        told = capsys.readouterr()
        assert told.out == ""
        is_missing = message.startswith("the following")  # in argparse's own words
        assert told.err.startswith(f"onefold bench: {message if is_missing else 'expected'}")
        assert told.err.count("\n") == 1
        assert message in told.err
        assert "hint: " in told.err
    for path, got in ((tmp_path / "nothing", "nothing there"), (Path(__file__), "a file")):
        assert main(["bench", "disk", "--path", str(path)]) == 1
        wanted = f"expected a folder at {path} for the disk tier, got {got}"
        assert wanted in capsys.readouterr().err


def test_a_rank_of_a_launcher_measures_links_alone(capsys, monkeypatch):
    with pytest.raises(ConfigError, match="expected bench disk in one process"):
        monkeypatch.setenv("RANK", "0")
        bench.check_target("disk", has_paths=False)
    bench.check_target("link", has_paths=False)
