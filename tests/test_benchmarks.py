"""The comparison's arithmetic: ratios are taken inside a round, targets are judged by them."""

from __future__ import annotations

import pytest
from contest import summary
from contest.case import Case
from contest.results import path_of, write


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
