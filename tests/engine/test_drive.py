"""Drivers hand a schedule one value at each boundary: a plan the same ones as the run."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch import nn

import onefold
from onefold.axes.pipelines.driver import StageDriver
from onefold.engine.driving import Action, Drive
from onefold.engine.policy import Policy, UnitFacts
from onefold.engine.registry import engine_of
from onefold.engine.run_facts import RunFacts, RunHistory
from onefold.engine.schedule import Schedule
from onefold.planner.replay import Replay, plain_events
from onefold.recipe import Recipe
from tests.support.ranks import every_rank, seeded

NUM_UNITS = 4


class Recorded(Schedule):
    """Notes the driver's choices under which backwards and reductions begin."""

    def __init__(self, *, defers: bool) -> None:
        policy = Policy(
            frees_after_forward=not defers, frees_after_backward=not defers, keeps_bytes=defers,
            defers_reduction=defers,
        )  # fmt: skip
        super().__init__(policy, [UnitFacts(1)] * NUM_UNITS)
        self.seen: list[tuple[str, Drive]] = []

    def begin_backward(self, trained: Any) -> list[Action]:
        self.seen.append(("backward", self.driven))
        return super().begin_backward(trained)

    def start(self, trained: Any) -> list[Action]:
        self.seen.append(("start", self.driven))
        return super().start(trained)

    def finish_reductions(self) -> list[Action]:
        self.seen.append(("finish", self.driven))
        return super().finish_reductions()


@pytest.mark.parametrize("window", [frozenset(), frozenset({0, 2}), frozenset(range(NUM_UNITS))])
@pytest.mark.parametrize("defers", [True, False], ids=["stage 1", "stage 3"])
def test_a_plan_drives_a_stage_by_the_values_of_the_pipelines_driver(window, defers):
    trained = [1] * NUM_UNITS
    planned, run = Recorded(defers=defers), Recorded(defers=defers)
    replay = Replay(plain_events(trained, [[0]] * NUM_UNITS), planned, trained, window)
    for micro in range(3):
        replay.micro_batch(None, is_last=micro == 2)

    engine: Any = SimpleNamespace(
        recipe=SimpleNamespace(keeps_gathered=defers, sums_rest=defers), units=trained,
        schedule=run, drive=run.drive, prepare=lambda: None,
        executor=SimpleNamespace(do=lambda _: None), start_reductions=lambda: run.start(trained),
    )  # fmt: skip
    driver = StageDriver(engine, window, splits=False)
    driver.begin(trains=True)
    for _ in range(3):
        with driver.backward():
            run.begin_backward(trained)
            run.end_backward()
    driver.end(reduces=True)
    driver.await_reductions()
    assert [event for event, _ in run.seen] == ["backward"] * 3 + ["start", "finish"]
    assert planned.seen == run.seen


@every_rank(3)
def test_a_driver_that_ends_takes_back_its_own_choices_alone(rank):
    """Training ends `generating`; a block of `accumulate` around it does not bring that back."""
    module = onefold.shard(seeded(lambda: nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))))
    schedule = engine_of(module).schedule
    with onefold.generating(module):
        assert schedule.driven == Drive(keeps=frozenset(range(len(schedule.units))))
        with onefold.accumulate(module):
            assert schedule.driven.accumulates
            assert schedule.driven.keeps
            module(torch.ones(2, 4)).sum().backward()
        assert schedule.driven == Drive()
    with onefold.accumulate(module), onefold.unsharded(module):
        assert schedule.driven == Drive(accumulates=True, is_suspended=True)
    assert schedule.driven == Drive()


def test_a_run_under_several_shares_predicts_the_highest_peaks_of_all():
    peaks = {3: {"weight": 3, "all": 7}, 2: {"weight": 5, "grad": 1, "all": 6}}

    class Planner:
        def peaks_of(self, recipe: Recipe, rank: int, history: RunHistory) -> dict[str, int]:
            assert rank == 1
            times = 1 + history.accumulates
            return {kind: times * nbytes for kind, nbytes in peaks[recipe.world_size].items()}

    shares = [(Recipe(world_size=ranks), 1) for ranks in peaks]
    facts = RunFacts(cast("Any", Planner()), shares=shares)
    assert facts.predicted_peaks() == {"weight": 5, "grad": 1, "all": 7}
    facts.end_backward(accumulates=True)
    assert facts.predicted_peaks() == {"weight": 10, "grad": 2, "all": 14}


@pytest.mark.parametrize("stage", [1, 3])
@every_rank(3)
def test_a_step_that_fails_leaves_the_next_one_to_its_own_caller(rank, stage):
    """`accumulate` around a pipeline's step that fails says nothing about the step after it."""
    module = onefold.shard(seeded(lambda: nn.Linear(4, 4)), stage=stage)
    driver = StageDriver(engine_of(module), frozenset(), splits=False)

    def step(*, fails: bool = False) -> bool:
        driver.begin(trains=True)
        with driver.backward():
            loss = module(torch.ones(2, 4)).sum()
            if fails:
                raise ZeroDivisionError
            loss.backward()
        return driver.end(reduces=True)

    with pytest.raises(ZeroDivisionError), onefold.accumulate(module):
        step(fails=True)
    assert step(), "outside of accumulate it is reduced"
    driver.await_reductions()
    assert torch.equal(module.weight.grad.full_tensor(), torch.full((4, 4), 2.0))
    module.zero_grad()
    with pytest.raises(ZeroDivisionError):
        step(fails=True)
    with onefold.accumulate(module):
        assert not step(), "inside accumulate it rests"
    assert step()
    driver.await_reductions()
    assert torch.equal(module.weight.grad.full_tensor(), torch.full((4, 4), 4.0))
