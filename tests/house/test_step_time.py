"""The arithmetic of predicted beside measured step times, and what the page says of it."""

from __future__ import annotations

import pytest
import step_time
from step_time_cases import CASES, MODELS, Case

from tests.planner.test_calibration import MADE


def entry(stage, seconds, predicted):
    return {"stage": stage, "seconds": list(seconds), "predicted": predicted, "cpu_seconds": 0.1}


FAST = entry(0, [1.0, 1.1, 1.0, 0.9, 1.0], 1.05)
SLOW = entry(1, [2.0, 2.1, 2.0, 1.9, 2.0], 1.5)
NEAR = entry(2, [0.8, 1.0, 1.01, 1.1, 1.3], 0.5)
WRONG = entry(3, [3.0, 3.1, 3.0, 2.9, 3.0], 1.2)


def test_an_error_is_against_the_median_of_the_rounds():
    assert step_time.error_of(FAST) == pytest.approx(0.05)
    assert step_time.error_of(SLOW) == pytest.approx(-0.25)


def test_a_machine_that_is_slower_now_is_so_for_what_is_predicted():
    assert step_time.slower_now(MADE, 1, 0.6) == pytest.approx(1.2)  # 0.5 s when it was calibrated
    assert step_time.slower_now(MADE, 4, 1.0) == pytest.approx(1.0)  # four ranks on two cores


def test_stages_of_which_neither_is_faster_in_every_round_are_no_pair():
    assert step_time.ranking([FAST, NEAR]) == (0, 0)


def test_stages_that_are_nearly_as_fast_are_no_pair():
    near = {**FAST, "seconds": [1.02 * each for each in FAST["seconds"]]}
    assert step_time.ranking([FAST, near]) == (0, 0)


def test_a_pair_is_right_where_the_prediction_has_its_order():
    assert step_time.ranking([FAST, SLOW]) == (1, 1)
    assert step_time.ranking([SLOW, WRONG]) == (1, 0)
    assert step_time.ranking([FAST, SLOW, WRONG]) == (3, 2)


def test_equal_predictions_of_stages_that_differ_are_not_right():
    assert step_time.ranking([FAST, {**SLOW, "predicted": FAST["predicted"]}]) == (1, 0)


def test_the_page_shows_every_case_and_the_worst_first():
    result = {
        "date": "2000-01-01", "command": "python benchmarks/step_time.py", "rounds": 5,
        "machine": {"model name": "abacus", "cores": 2}, "versions": {"torch": "0"},
        "calibration": MADE.as_dict(),
        "cases": [{"case": "one", "ranks": 2, "slower": 1.1, "stages": [FAST, SLOW, NEAR, WRONG]}],
    }  # fmt: skip
    text = "\n".join(step_time.page(result))
    assert "**1 of 4 step times within 15%**" in text
    assert "Stages ranked right in 0 of 1 cases" in text
    assert "they had 7% of the cores' time" in text
    assert "took 1.10 to 1.10 times as long" in text
    assert "| one | 1.000 (+5%) | 2.000 (-25%) |" in text
    worst = text.partition("furthest off")[2].splitlines()
    assert worst[4].startswith("| one | 3 | 2.900 - 3.100 |")
    marks = f"before\n{step_time.BEGIN}\nold\n{step_time.END}\nafter"
    filled = step_time.filled(marks, result)
    assert filled.startswith("before\n")
    assert filled.endswith("\nafter")
    assert "old" not in filled


def test_every_model_is_predicted_at_all_stages_from_a_calibration_at_another():
    assert {case.model for case in CASES} == set(MODELS)
    assert {case.ranks for case in CASES} == {1, 2, 4}
    found = step_time.predict(Case("gpt 3M", 2), MADE)
    assert list(found) == [0, 1, 2, 3]
    assert found[1] == found[2] < found[0]  # a whole optimizer step on every rank
    assert found[3] > found[2]  # gathers in backward too
