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
from onefold.app.measure import BandwidthRow, in_rounds
from onefold.app.tools import bandwidth
from onefold.app.tools.bandwidth import ADAM_NBYTES, STATE_NBYTES, Ask, measure_link
from onefold.compose.tiers import is_memory
from onefold.errors import ConfigError
from onefold.wire.collectives import Group
from onefold.wire.world import World
from tests.support.ranks import run_ranks

for command in ("check", "train"):  # commands that import `launch` keep the real one
    import_module(f"onefold.app.cli.{command}")

QUICK = ["--mib", "1", "--seconds", "0.02"]
SHM = Path("/dev/shm")

DISK_RATES = ["read", "write", "mixed", "step"]
CPU_RATES = ["copy", "adamw", "step_fp32", "step_bf16"]
LINK_RATES = ["exchange", "gather", "reduce_scatter"]


@pytest.fixture(autouse=True)
def _alone(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "TORCHELASTIC_ERROR_FILE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv(RESULT, "")  # the command sets it: gone afterwards


@pytest.fixture
def _thread_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks that are threads of this process, where the command would launch processes."""

    @contextmanager
    def joined(**_: object) -> Iterator[World]:
        yield World(Group.of(dist.group.WORLD), torch.device("cpu"))

    def launched(argv: list[str], ranks: int) -> int:
        def as_rank(rank: int) -> object:
            return bench.measure_as_rank(lambda world: measure_link(world, Ask(0.02, 2**20, 1)))

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


def check_rates(found: dict[str, Any], names: list[str]) -> None:
    rates = found["rates"]
    assert list(rates) == names
    assert found["rounds"] % 2 == 1
    assert found["seconds"] > 0
    assert set(found["versions"]) == {"python", "torch", "onefold"}
    for rate in rates.values():
        assert 0 < rate["lowest"] <= rate["bytes_per_s"] <= rate["highest"]
        if rate["of"]:
            ratio = rate["bytes_per_s"] / rates[rate["of"]]["bytes_per_s"]
            assert rate["share"] == pytest.approx(ratio)
        else:
            assert rate["share"] is None


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


def test_a_disk_is_measured_raw_and_under_a_step_and_keeps_nothing_of_it(tmp_path, capsys):
    before = open_swap_files()
    found = measured(capsys, "disk", "--path", str(tmp_path))
    check_rates(found, DISK_RATES)
    assert found["paths"][0]["path"] == str(tmp_path)
    assert found["nbytes"] == STATE_NBYTES * found["parameters"] <= 2**20
    assert found["rates"]["step"]["of"] == "mixed"
    assert list(tmp_path.iterdir()) == []
    assert open_swap_files() == before


def test_a_step_on_disk_reads_and_writes_twelve_bytes_per_parameter(tmp_path, capsys):
    found = measured(capsys, "disk", "--path", str(tmp_path))
    wear, step = found["wear"], found["rates"]["step"]
    assert wear["read_per_parameter"] == wear["written_per_parameter"] == STATE_NBYTES
    moved = wear["read_per_parameter"] + wear["written_per_parameter"]
    assert step["parameters_per_s"] * moved == pytest.approx(step["bytes_per_s"])
    assert wear["written_per_day"] == pytest.approx(step["bytes_per_s"] / 2 * 86400)


def test_several_paths_are_measured_together(tmp_path, capsys):
    paths = [tmp_path / name for name in "abc"]
    for path in paths:
        path.mkdir()
    flags = [flag for path in paths for flag in ("--path", str(path))]
    found = measured(capsys, "disk", *flags, "--threads", "2")
    check_rates(found, DISK_RATES)
    assert [each["path"] for each in found["paths"]] == [str(path) for path in paths]
    assert found["threads"] == 2
    assert found["engine_threads"] >= 1, "the engine's step has its own"


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
    bandwidth.measure_disk([tmp_path], Ask(0.02, 2**20))
    for unit in kept[0].units:
        for buffer in (unit.weight, *unit.moments.values()):
            assert buffer.tensor.isfinite().all()


# cpu


def test_steps_on_the_cpu_stand_beside_torch_with_28_bytes_per_parameter(capsys):
    threads = torch.get_num_threads()
    found = measured(capsys, "cpu")
    check_rates(found, CPU_RATES)
    for name in ("adamw", "step_fp32", "step_bf16"):
        rate = found["rates"][name]
        assert rate["parameters_per_s"] * ADAM_NBYTES == pytest.approx(rate["bytes_per_s"])
    assert {found["rates"][name]["of"] for name in ("step_fp32", "step_bf16")} == {"adamw"}
    assert torch.get_num_threads() == threads, "as it was before"


def test_what_fits_into_a_cache_is_said_to(capsys, monkeypatch, tmp_path):
    cache = tmp_path / "index3"
    cache.mkdir()
    (cache / "size").write_text("32768K\n")
    monkeypatch.setattr(bandwidth, "_CACHES", tmp_path)
    found = measured(capsys, "cpu")
    assert any("may stay in a cache of 32.0 MiB" in note for note in found["notes"])


# link


@pytest.mark.usefixtures("_thread_ranks")
def test_a_link_is_measured_bare_and_under_the_engines_collectives(capsys, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    found = measured(capsys, "link")
    check_rates(found, LINK_RATES)
    assert found["ranks"] == 2
    assert found["nbytes"] == 2**20
    assert found["notes"] == []


@pytest.mark.parametrize("world_size", [2, 3])
def test_every_rank_goes_through_the_same_rounds_and_finds_its_own_rates(world_size):
    def body(rank: int) -> dict[str, Any]:
        world = World(Group.of(dist.group.WORLD), torch.device("cpu"))
        return json.loads(json.dumps(measure_link(world, Ask(0.02, 2**20, 1))))

    found = run_ranks(world_size, body)
    for each in found:
        check_rates(each, LINK_RATES)
    assert len({each["rounds"] for each in found}) == 1


def test_copies_to_a_gpu_and_back_are_measured(monkeypatch):
    """On the CPU in place of a device: what is counted, not how fast it is."""
    kinds = iter(["cpu"])  # for the question itself; memory is not to be pinned
    monkeypatch.setattr(bandwidth.accelerator, "kind", lambda: next(kinds, None))
    rates = bandwidth.measure_copies(Ask(0.02, 2**20))
    assert list(rates) == ["h2d_pinned", "d2h_pinned"]
    assert all(rate["bytes_per_s"] > 0 for rate in rates.values())


def test_a_single_rank_has_no_link():
    with pytest.raises(
        ConfigError, match="expected at least 2 ranks with a link between them, got"
    ):
        measure_link(World(Group(0, 1, None), torch.device("cpu")), Ask(0.02))


def test_ranks_that_fail_end_the_command_with_their_code(capsys, monkeypatch):
    monkeypatch.setattr("onefold.app.cli.launch.launch", lambda *_: 7)
    assert main(["bench", "link", *QUICK]) == 7
    assert capsys.readouterr().out == ""


# rounds


def test_rounds_run_in_turn_after_a_warm_up_and_as_often_as_the_seconds_allow():
    order: list[str] = []
    rows = [
        BandwidthRow(name, 8, lambda name=name: order.append(name), "" if name == "a" else "a")
        for name in "ab"
    ]
    asked: list[int] = []

    def once(rounds: int) -> int:
        asked.append(rounds)
        return 3

    found = in_rounds(rows, 0.001, once)
    rates = found["rates"]
    assert order == ["a", "b"] * 5, "two of warm-up, three rounds"
    assert found["rounds"] == 3
    assert len(asked) == 1
    assert rates["b"]["share"] == pytest.approx(
        rates["b"]["bytes_per_s"] / rates["a"]["bytes_per_s"]
    )


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
        assert ("wear: " in told.out) == (target[0] == "disk")


# bad input


def test_bad_input_is_one_line_with_a_hint_and_exit_code_two(tmp_path, capsys, monkeypatch):
    file = tmp_path / "file"
    file.write_text("")
    nothing = str(tmp_path / "nothing")
    for arguments, message in (
        (["disk", "--path", nothing], f"expected --path to be a folder: {nothing}, got nothing"),
        (["disk", "--path", str(file)], f"expected --path to be a folder: {file}, got a file"),
        (["disk", "--path", str(tmp_path), "--mib", "99999999"], "of free space at"),
        (["cpu", "--mib", "99999999"], "of free memory"),
        (["link", "--mib", "99999999"], "of free memory"),
        (["fly"], "expected target: disk, cpu, link, got 'fly'"),
        ([], "the following arguments are required: target"),
        (["cpu", "--path", str(tmp_path)], "expected --path only with disk, got it with cpu"),
        (["disk", "--mib", "0"], "expected --mib to be a whole number of at least 1, got '0'"),
        (["cpu", "--threads", "x"], "expected --threads to be a whole number of at least 1"),
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
    assert list(tmp_path.iterdir()) == [file]


def test_a_rank_of_a_launcher_measures_links_alone(capsys, monkeypatch):
    with pytest.raises(ConfigError, match="expected bench disk in one process"):
        monkeypatch.setenv("RANK", "0")
        bench.check_target("disk", has_paths=False)
    bench.check_target("link", has_paths=False)
