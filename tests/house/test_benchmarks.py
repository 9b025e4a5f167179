"""The comparison's arithmetic: ratios are taken inside a round, targets are judged by them."""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import checkpoint
import gpu
import offload
import peers
import pytest
import readme
from contest import bounds, keeping, summary, swapping, world
from contest.case import Case
from contest.engines import ENGINES, offloaded
from contest.laws import held_nbytes, laws, sent_nbytes
from contest.results import path_of, provenance, write
from contest.world import RunError

from onefold.wire import devices
from tests.support.commands import Command
from tests.support.forking import HANG_S


def ranks(wall, cpu, peak, losses=(2.0, 1.0)):
    one = {
        "wall_seconds": wall, "cpu_seconds": cpu, "peak_nbytes": peak, "resident_nbytes": peak,
        "sent_nbytes": 80.0, "numel": 10, "losses": list(losses), "ledger": {},
    }  # fmt: skip
    return [one, {**one, "wall_seconds": wall / 2}]


ROUNDS = [
    {"ddp": ranks(1.0, 1.0, 100), "onefold 0": ranks(2.0, 0.9, 50)},
    {"ddp": ranks(4.0, 2.0, 100), "onefold 0": ranks(2.0, 1.6, 50)},
    {"ddp": ranks(1.0, 1.0, 100), "onefold 0": ranks(1.0, 1.2, 50)},
]


def test_a_ratio_is_the_median_of_the_rounds_ratios():
    spread = summary.ratio(ROUNDS, "onefold 0", "ddp", summary.WALL)
    assert (spread.median, spread.low, spread.high) == (1.0, 0.5, 2.0)


def test_a_rounds_time_is_the_slowest_ranks_and_its_cpu_seconds_are_all_ranks():
    assert summary.measured(ROUNDS[0]["ddp"], summary.WALL) == 1.0
    assert summary.measured(ROUNDS[0]["ddp"], summary.STEADY) == 2.0
    assert summary.measured(ROUNDS[0]["ddp"], "sent") == 4.0


def test_a_step_target_is_judged_in_cpu_seconds():
    judged = summary.verdicts(Case("small").as_dict(), ROUNDS)
    assert [(v.target.ours, v.target.peer, v.holds) for v in judged] == [("onefold 0", "ddp", True)]
    assert judged[0].cpu.median == pytest.approx(0.9)


def test_an_engine_that_failed_in_a_round_is_compared_in_the_others():
    rounds = [*ROUNDS[:2], {"ddp": ROUNDS[2]["ddp"]}]
    assert summary.ratio(rounds, "onefold 0", "ddp", summary.WALL).high == 2.0
    assert summary.ratio(rounds, "deepspeed 3", "ddp", summary.WALL) is None


def test_losses_that_part_are_told():
    rounds = [{"ddp": ranks(1, 1, 1), "onefold 3": ranks(1, 1, 1, losses=(2.0, 1.1))}]
    assert summary.disagreement(rounds)["onefold 3"] == pytest.approx(0.1)


def test_a_result_file_is_replaced_whole(tmp_path):
    path = path_of(Case("tiny", dtype="bf16", accumulate=4), tmp_path)
    assert path.name.endswith("-peers-tiny-2-ranks-bf16-accumulate-4.json")
    write(path, Case("tiny"), ROUNDS, {"date": "2026-01-01"})
    assert [entry.name for entry in tmp_path.iterdir()] == [path.name]


def run_but(broken, message):
    """Stands in for a run: one engine fails."""

    def run(case, name):
        if name == broken:
            raise RunError(message)
        return ranks(1.0, 1.0, 100)

    return run


def options_of(tmp_path, engines, rounds=2):
    return argparse.Namespace(engines=engines, rounds=rounds, results=tmp_path)


def test_a_peer_that_is_not_installed_is_skipped_with_one_line(tmp_path, monkeypatch, capsys):
    missing = replace(ENGINES["deepspeed 3"], package="a_package_nobody_has")
    monkeypatch.setitem(ENGINES, "deepspeed 3", missing)
    monkeypatch.setattr(peers, "run", lambda case, name: ranks(1.0, 1.0, 100))
    assert peers.compete(Case("tiny"), options_of(tmp_path, "ddp,deepspeed 3,onefold 3")) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line for line in lines if "not installed" in line] == [
        "deepspeed 3: a_package_nobody_has is not installed, skipped"
    ]
    (result,) = tmp_path.iterdir()
    found = json.loads(result.read_text())["rounds"]
    assert [set(each) for each in found] == [{"ddp", "onefold 3"}] * 2


def test_a_peer_that_fails_shows_its_error_and_the_others_go_on(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(peers, "run", run_but("fsdp2 keep", "ValueError: it broke [here]"))
    assert peers.compete(Case("tiny"), options_of(tmp_path, "ddp,fsdp2 keep,onefold 3")) == 0
    shown = capsys.readouterr().out
    assert shown.count("ValueError: it broke [here]") == 1, "it is not tried again"
    (result,) = tmp_path.iterdir()
    assert len(json.loads(result.read_text())["rounds"]) == 2


def test_a_failure_of_our_own_fails_the_comparison(tmp_path, monkeypatch):
    monkeypatch.setattr(peers, "run", run_but("onefold 3", "StateError"))
    assert peers.compete(Case("tiny"), options_of(tmp_path, "ddp,onefold 3")) == 1


def test_an_interrupted_run_keeps_the_rounds_it_finished(tmp_path, monkeypatch, capsys):
    turns = iter(range(100))

    def run(case, name):
        if next(turns) == 5:
            raise KeyboardInterrupt
        return ranks(1.0, 1.0, 100)

    monkeypatch.setattr(peers, "run", run)
    options = options_of(tmp_path, "ddp,onefold 3", rounds=9)
    assert peers.compete(Case("tiny"), options) == peers.INTERRUPTED
    assert "the 2 rounds that were finished are kept" in capsys.readouterr().out
    (result,) = tmp_path.iterdir()
    assert len(json.loads(result.read_text())["rounds"]) == 2


@pytest.mark.process
def test_a_terminated_comparison_ends_with_its_ranks_and_keeps_its_rounds(tmp_path):
    command = ["benchmarks/peers.py", "--sizes", "tiny", "--steps", "1", "--rounds", "999"]
    command += ["--engines", "onefold 0", "--results", str(tmp_path)]
    started = Command(peers.main, command, Path(__file__).parents[2], HANG_S, forks_ranks=False)
    started.until(lambda _: bool(list(tmp_path.glob("*.json"))))
    os.kill(started.pid, signal.SIGTERM)
    ended = started.end()
    assert ended.returncode == peers.INTERRUPTED
    assert "that were finished are kept" in ended.stdout
    (result,) = tmp_path.iterdir()
    assert json.loads(result.read_text())["rounds"]


def stay(rank: int, folder: str) -> dict[str, int]:
    """A rank that runs on."""
    Path(folder, str(os.getpid())).touch()
    time.sleep(2 * HANG_S)
    return {"rank": rank}


@pytest.mark.process
def test_ranks_end_when_the_comparison_is_killed(tmp_path):
    run = f"from contest.world import run_ranks; run_ranks(2, stay, {str(tmp_path)!r})"
    code = f"import sys; sys.path[:0] = {sys.path!r}; from {__name__} import stay; {run}"
    comparison = subprocess.Popen([sys.executable, "-c", code], start_new_session=True)
    try:
        _until(lambda: len(list(tmp_path.iterdir())) == 2)
        comparison.kill()
        comparison.wait()
        _until(lambda: not any(Path("/proc", path.name).exists() for path in tmp_path.iterdir()))
    finally:
        with suppress(ProcessLookupError):
            os.killpg(comparison.pid, signal.SIGKILL)


def _until(is_so: Callable[[], bool], seconds: float = HANG_S) -> None:
    deadline = time.monotonic() + seconds
    while not is_so():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_an_interruption_before_the_first_run_ends_the_comparison_too():
    """A case that dies of the signal must not look like one that is merely over."""
    before = signal.getsignal(signal.SIGTERM)
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    interrupt = threading.Timer(2.0, lambda: os.kill(os.getpid(), signal.SIGTERM))
    interrupt.start()
    try:
        assert peers._wait(child) == peers.INTERRUPTED
    finally:
        signal.signal(signal.SIGTERM, before)
        interrupt.join()


def test_processes_that_do_not_talk_are_not_held_to_the_losses():
    rounds = [{"plain": ranks(1, 1, 1, losses=(2.0, 9.0)), "ddp": ranks(1, 1, 1)}]
    assert summary.base_of(rounds[0]) == "ddp"
    assert list(summary.disagreement(rounds)) == ["ddp"]


def test_the_gpu_script_tells_wrong_losses_from_right_ones():
    outcome = gpu.Outcome(Case("tiny", device="cuda"), apart={"plain": 0.5, "onefold 3": 1e-5})
    assert outcome.is_right, "a peer's losses are the peer's"
    outcome.apart["onefold 1"] = 2e-3
    assert not outcome.is_right
    assert not gpu.Outcome(Case("tiny"), failed={"onefold 0": "StateError"}).is_right


def test_the_bound_of_bytes_sent_is_the_closed_form_of_each_stage():
    assert [sent_nbytes(Case("tiny"), stage) for stage in range(4)] == [4.0, 4.0, 4.0, 6.0]
    assert sent_nbytes(Case("tiny", ranks=4), 3) == 9.0
    assert sent_nbytes(Case("tiny", accumulate=4), 3) == 24.0
    assert sent_nbytes(Case("tiny", accumulate=4), 2) == 10.0
    assert sent_nbytes(Case("tiny", accumulate=4), 1) == 4.0
    assert sent_nbytes(Case("tiny", dtype="bf16"), 3) == 3.0


def test_a_ledger_above_the_closed_form_is_told():
    case, numel, held = Case("tiny"), 1000, {}
    for excess in (1.0, 1.02, 1.04):
        ledger = {
            "sent gather": 4 * numel, "sent reduce_scatter": 2 * numel,
            "peak": excess * held_nbytes(case),
        }  # fmt: skip
        sent, peak = laws(case, {"onefold 3": [{"numel": numel, "ledger": ledger}] * 2})
        assert (sent.what, sent.found, sent.holds) == ("sent", 6.0, True)
        assert (peak.what, peak.ratio) == ("peak", pytest.approx(excess))
        held[excess] = peak.holds
    assert held == {1.0: True, 1.02: True, 1.04: False}


def test_every_target_names_engines_that_compete():
    for target in summary.TARGETS:
        assert target.ours in ENGINES
        assert target.peer in ENGINES


def test_the_readme_shows_the_newest_results():
    assert readme.main(["--check"]) == 0


def test_a_result_names_its_command_but_no_folder_of_the_machine(monkeypatch):
    typed = ["/home/me/onefold/benchmarks/peers.py", "--results", "/data/out", "--sizes", "tiny"]
    monkeypatch.setattr(sys, "argv", typed)
    assert provenance()["command"] == "python benchmarks/peers.py --sizes tiny"


def test_saving_and_loading_is_told_beside_the_disk():
    disk = [{"nbytes": 100, "durable": 1.0, "loaded": 2.0}] * 2
    mine = {"nbytes": 100, "saved": 1.0, "durable": 1.25, "loaded": 2.0, "save_extra": 3e6}
    slower = {**mine, "durable": 2.0}
    rounds = [{"onefold 3": [mine, mine], "the disk": disk}] * 2
    rounds.append({"onefold 3": [mine, slower], "the disk": disk})
    first, second = keeping.rows(rounds)
    assert first[0] == "the disk"
    told = dict(zip(keeping.HEAD, second, strict=True))
    assert told["durable s"] == "1.25"
    assert told["async s"] == ""
    assert told["save MB"] == "3"
    assert told["write / disk"] == "0.80 [0.50-0.80]"
    assert told["read / disk"] == "1.00 [1.00-1.00]"


@pytest.mark.again(
    "tests/house/test_benchmarks.py::test_steps_from_disk_move_the_bytes_of_the_formula"
)
@pytest.mark.process
def test_the_checkpoint_benchmark_measures_the_disk_and_this_library(tmp_path):
    """One small round of the two that need nothing but torch."""
    (disk,) = checkpoint.run_ranks(1, checkpoint.measure_disk, 1 << 20, str(tmp_path))
    assert disk["nbytes"] >= 1 << 20
    assert disk["durable"] > 0
    (tmp_path / "runs").mkdir()
    found = checkpoint.run_ranks(2, checkpoint.measure, "onefold 3", 1, str(tmp_path / "runs"))
    assert {"saved", "durable", "copied", "loaded", "save_extra", "load_extra"} <= found[0].keys()
    assert found[0]["nbytes"] > 12 * 7_000_000
    assert found[0]["save_extra"] < 28e6  # one unit


def test_what_fio_and_the_kernel_tell_is_read():
    ways = {
        "read": {"io_bytes": 600, "runtime": 1000, "bw_bytes": 0},
        "write": {"io_bytes": 400, "runtime": 2000, "bw_bytes": 0},
    }
    told = "fio: a warning\n" + json.dumps({"fio version": "fio-3.33", "jobs": [ways]})
    moved = bounds.fio_transfer(told)
    assert (moved.nbytes, moved.seconds, moved.rate) == (1000, 2.0, 500.0)
    counts = "rchar: 9\nwchar: 8\nread_bytes: 4096\nwrite_bytes: 8192\ncancelled_write_bytes: 0\n"
    assert bounds.disk_counts(counts) == (4096, 8192)


def test_a_step_from_disk_is_told_beside_the_disk_and_the_formula():
    rank = {"rounds": [{"seconds": 2.0, "read_nbytes": 240, "written_nbytes": 250}] * 3,
            "threads": 8, "units": 8, "slots": 5, "resident": 7}  # fmt: skip
    faster = {**rank, "rounds": [{**each, "seconds": 1.0} for each in rank["rounds"]]}
    for each in rank["rounds"]:
        each["disk_rate"] = 480.0
    case = offload.disk_case([rank, faster], 10, 2)  # 2 x 10 elements in all, 2 steps
    judged = bounds.disk_bounds(case | {"disk": "fio"})
    assert [(b.what, b.spread.median, b.holds) for b in judged] == [
        ("2 ranks: GB/s / fio", 1.0, True),
        ("2 ranks: bytes read / formula", 1.0, True),
        ("2 ranks: bytes written / formula", pytest.approx(1.0417, abs=1e-3), False),
    ]


def test_a_bound_is_on_the_median_and_says_what_is_wanted():
    spread = summary.Spread.of([0.7, 0.9, 2.0])
    low, high = bounds.Bound("", spread, at_least=0.85), bounds.Bound("", spread, at_most=0.6)
    both = bounds.Bound("", spread, at_least=0.98, at_most=1.02)
    assert [(b.wanted, b.holds) for b in (low, high, both)] == [
        (">= 0.85", True), ("<= 0.6", False), ("0.98 to 1.02", False)
    ]  # fmt: skip
    assert low.as_dict()["high"] == 2.0


def test_hidden_seconds_are_those_beyond_the_same_step_on_the_device():
    step = {"device, clipped": 1.0, "settled, clipped": 2.0, "overlapped, clipped": 1.25,
            "device": 0.75, "in backward": 1.5}  # fmt: skip
    hidden, early = bounds.hiding_bounds([step] * 3)
    assert (hidden.spread.median, hidden.holds) == (0.25, True)
    assert (early.spread.median, early.holds) == (0.75, False)


def test_steps_in_memory_are_compared_with_those_that_take_the_same_gradients():
    seconds = {
        "fused": [1.0, 1.0], "onefold offloaded, fp32": [0.5, 1.0],
        "onefold offloaded, bf16": [1.0, 1.0], "DeepSpeedCPUAdam between casts, bf16": [2.0, 2.0],
    }  # fmt: skip
    case = {"name": "1 x 2", "seconds": seconds}
    judged = bounds.step_bounds(case, "fused", offload.OURS)
    assert [(b.spread.median, b.wanted, b.holds) for b in judged] == [
        (1.5, ">= 0.8", True), (1.0, ">= 0.8", True), (2.0, ">= 1.8", True)
    ]  # fmt: skip
    del seconds["DeepSpeedCPUAdam between casts, bf16"]
    assert len(bounds.step_bounds(case, "fused", offload.OURS)) == 2


def test_offloading_is_compared_in_the_same_stage_and_tier():
    assert {name for name in offloaded("") if name.startswith("onefold")} == {
        f"onefold {stage} {tier}" for stage, tiers in bounds.PAIRS.items() for tier in tiers
    }
    assert not offloaded("").keys() & ENGINES.keys()
    found = {"onefold 3 disk": ranks(1.0, 2.0, 100), "deepspeed 3 disk": ranks(2.0, 2.0, 400)}
    judged = bounds.peer_bounds([found] * 2)
    assert [(b.spread.median, b.holds) for b in judged] == [(0.5, True), (1.0, False), (0.25, True)]
    assert all(b.what.startswith("onefold 3 disk / deepspeed 3 disk: ") for b in judged)


def test_a_peers_error_is_one_line():
    told = "Traceback (most recent call last):\n  File ...\nRuntimeError: no libaio\n\n"
    assert bounds.error_line(told) == "RuntimeError: no libaio"
    assert bounds.error_line("a rank ended without a result") == "a rank ended without a result"


def test_what_the_command_prints_of_a_large_model_is_read():
    told = {
        "job": {"clip": 1.0}, "losses": [5.0, 4.0], "seconds": 9.0, "num_parameters": 100,
        "memory": [{"rank": 0, "resident_peak": 300}, {"rank": 1, "resident_peak": 200}],
    }  # fmt: skip
    row = bounds.big_row(told)
    assert (row["resident_peak"], row["peak_per_parameter"]) == ([300, 200], 3.0)


def test_sections_of_one_day_are_kept_together(tmp_path):
    path = tmp_path / "a.json"
    offload.keep(path, "overlap", {"size": "medium", "bounds": []})
    offload.keep(path, "big", {"model": "large", "bounds": []})
    found = json.loads(path.read_text())
    assert {"date", "machine", "versions"} <= found.keys()
    assert found["sections"]["overlap"]["size"] == "medium"
    assert all({"command", "commit"} <= each.keys() for each in found["sections"].values())
    assert [entry.name for entry in tmp_path.iterdir()] == ["a.json"]


def test_a_disk_is_measured_without_fio_too(tmp_path):
    moved = swapping.plain_transfer(tmp_path, 2, 16 << 20)
    assert moved.nbytes == 16 << 20
    assert moved.seconds > 0


@pytest.mark.process
def test_steps_from_disk_move_the_bytes_of_the_formula(tmp_path):
    """One small round, by the kernel's own count."""
    numel = 8 << 17
    told = checkpoint.run_ranks(2, swapping.step_from_disk, 2, numel, 1, 1, str(tmp_path))
    case = offload.disk_case(told, numel, 1) | {"disk": "the disk"}
    _, read, written = bounds.disk_bounds(case)
    assert read.spread.median == pytest.approx(1, abs=0.02)
    assert written.spread.median == pytest.approx(1, abs=0.02)


def test_ranks_of_the_gpu_script_may_share_the_one_device(monkeypatch):
    shared = {}
    monkeypatch.setattr(os, "environ", shared)
    monkeypatch.setattr(world, "_measure", lambda case, engine, rank: world.Rank())
    world._train(1, Case("tiny", ranks=2, device="cuda"), "onefold 3", "")
    assert shared == {"LOCAL_RANK": "0", devices.SHARE: "1"}
