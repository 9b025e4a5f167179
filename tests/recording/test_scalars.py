"""`onefold.report(model).scalars()`: numbers for a dashboard, in a plain loop and in Trainer."""

from __future__ import annotations

import time
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import onefold
from onefold.recording.meter import STEPS
from tests.support.hf_ranks import run_forks
from tests.support.programs.blocks import Borrowed
from tests.support.ranks import run_ranks, seeded


class Words(nn.Module):
    """Tokens to numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.head = nn.Embedding(16, 8), nn.Linear(8, 16)
        self.drop = nn.Dropout(0.1)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.drop(self.table(tokens)))


@pytest.mark.filterwarnings("ignore:ranks .* drop the same elements")
def test_a_plain_loop_gets_peaks_bytes_waits_and_its_tokens_a_second():
    def body(rank: int) -> None:
        model = seeded(Words)
        optimizer = torch.optim.AdamW(model.parameters())
        onefold.shard(model, optimizer, stage=3)
        tokens = torch.arange(12).view(2, 6) + rank
        assert set(onefold.report(model).scalars()) == {"peak_bytes", "sent_bytes"}
        first = [0.0, 0.0]  # around the first report after a step
        for step in range(STEPS + 3):
            model(tokens).square().mean().backward()
            begun = time.perf_counter()
            optimizer.step()
            ended = time.perf_counter()
            optimizer.zero_grad()
            report = onefold.report(model)
            first = first if step else [ended, time.perf_counter()]
            numbers = report.scalars()
            assert numbers["peak_bytes"] == report.memory_peak > 0
            assert numbers["sent_bytes"] == sum(t.sent_nbytes for t in report.last_step.values())
            assert ("tokens_per_s" in numbers) == ("waiting_share" in numbers) == (step > 0)
            if step > 0:
                assert 0 < numbers["waiting_share"] <= 1
            if 0 < step <= STEPS:
                counted = step * tokens.numel()
                assert counted / (ended - first[0]) < numbers["tokens_per_s"]
                assert numbers["tokens_per_s"] < counted / (begun - first[1])

    run_ranks(3, body)


@pytest.mark.filterwarnings("ignore:ranks .* drop the same elements")
def test_a_reader_of_the_report_changes_nothing_of_what_another_reads():
    """The guide's idiom, beside a reader of each step and one of each line."""

    def body(rank: int) -> list[dict[str, float]]:
        model = seeded(Words)
        optimizer = torch.optim.AdamW(model.parameters())
        onefold.shard(model, optimizer, stage=2)
        found = []
        for step in range(5):
            model(torch.arange(12).view(2, 6) + rank).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            readers = [onefold.report(model) for _ in range(3)]
            str(readers[0])
            assert readers[0] == readers[1] == readers[2]
            if step % 2 == 0:
                found.append(onefold.report(model).scalars())
                assert found[-1] == readers[0].scalars()
        return found

    for first, *later in run_ranks(3, body):
        assert "tokens_per_s" not in first
        assert all(n["tokens_per_s"] > 0 and n["waiting_share"] > 0 for n in later)


@pytest.mark.parametrize("world", [1, 3])
def test_after_a_load_the_title_and_the_traffic_count_the_same_steps(world, tmp_path):
    def body(rank: int) -> tuple[str, Any, Any]:
        model = seeded(lambda: nn.Sequential(nn.Linear(64, 8), nn.Linear(8, 4)))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        onefold.shard(model, optimizer)

        def step() -> None:
            model(torch.ones(2, 64)).mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            onefold.report(model)  # rates of steps before a load are not those of a later one

        for _ in range(3):
            step()
        onefold.save(tmp_path / "step-3", model, optimizer)
        step()
        onefold.load(tmp_path, model, optimizer)
        report = onefold.report(model)
        assert (report.steps, report.loaded_steps) == (3, 3)
        assert report.traffic == report.last_step == {}
        assert "predicted" not in str(report)
        assert report.waiting_share is None
        step()
        one = onefold.report(model)
        step()
        return str(one), one, onefold.report(model)

    for text, one, two in run_ranks(world, body):
        assert "4 steps, 3 before the load" in text
        assert one.traffic == one.last_step
        assert (" 1 step " in text) == bool(one.traffic)
        sent = {name: traffic.sent_nbytes for name, traffic in one.traffic.items()}
        assert {name: t.sent_nbytes for name, t in two.traffic.items()} == {
            name: 2 * nbytes for name, nbytes in sent.items()
        }
        assert two.waiting_share is not None


def test_a_model_without_tokens_has_no_rate_of_them():
    model = seeded(lambda: nn.Sequential(nn.Linear(64, 8), nn.Linear(8, 4)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    onefold.shard(model, optimizer)
    for _ in range(2):
        model(torch.ones(2, 64)).mean().backward()
        optimizer.step()
        numbers = onefold.report(model).scalars()
    assert set(numbers) - {"model_flops_per_s"} == {"peak_bytes", "sent_bytes", "waiting_share"}


@pytest.mark.process
def test_callbacks_that_report_to_a_dashboard_get_the_numbers_of_trainer(tmp_path):
    """They come before the user's; ranks drop elements of their own, without a warning."""
    pytest.importorskip("transformers")
    first, second = run_forks(2, _under_trainer, tmp_path)
    assert first["generators"] != second["generators"]
    assert first["warnings"] == second["warnings"] == []
    for logged in first["logged"]:
        assert logged["onefold_peak_bytes"] > logged["onefold_sent_bytes"] > 0
        assert 0 < logged["onefold_waiting_share"] <= 1
        assert logged["onefold_tokens_per_s"] > 0


def _under_trainer(rank: int, folder: Path) -> dict[str, Any]:
    import transformers

    from onefold.hf import Callback
    from tests.support.trainers import trainer_of

    logged: list[dict[str, Any]] = []

    class Curious(transformers.TrainerCallback):
        """Looks at the report before the numbers of a log are read."""

        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            str(onefold.report(kwargs["model"]))

    class Dashboard(transformers.TrainerCallback):
        def on_log(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if "loss" in kwargs["logs"]:
                logged.append(dict(kwargs["logs"]))

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer = trainer_of(folder, Curious(), Dashboard(), Callback(stage=3), build=_with_dropout)
        trainer.train()
    own = [str(warning.message) for warning in caught if "ranks" in str(warning.message)]
    generators = torch.get_rng_state().tolist()
    return {"logged": logged, "warnings": own, "generators": generators}


def _with_dropout() -> nn.Module:
    from tests.support.trainers import llama

    model = llama()
    model.lm_head = nn.Sequential(nn.Dropout(0.1), model.lm_head)
    return model


@pytest.mark.parametrize("stage", [2, 3])
def test_a_report_follows_a_penalty_on_weights_that_came_before_the_forward(stage):
    def body(rank):
        module = seeded(lambda: nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)))
        optimizer = torch.optim.SGD(module.parameters())
        onefold.shard(module, optimizer, stage=stage)
        penalty = sum(p.abs().pow(1).sum() for p in module.parameters())
        (module(torch.full((2, 8), 1.0 + rank)).sum() + penalty).backward()
        optimizer.step()
        return onefold.report(module)

    for report in run_ranks(2, body):
        assert report.predicted["grad"] >= report.memory["grad"]["device"].peak > 0


@pytest.mark.parametrize("stage", [2, 3])
def test_a_report_after_a_failed_backward_leaves_room_for_results_that_arrive(stage):
    def fail(grad):
        raise ZeroDivisionError

    def body(rank, reports):
        module = seeded(Borrowed, False)
        optimizer = torch.optim.SGD(module.parameters())
        onefold.shard(module, optimizer, stage=stage)
        rows = torch.full((2, 8), 1.0 + rank)
        failing = rows.clone().requires_grad_()
        failing.register_hook(fail)
        with pytest.raises(ZeroDivisionError):
            module(failing).sum().backward()
        module.zero_grad()
        if reports:
            onefold.report(module)
        module(rows).sum().backward()
        return [p.grad.to_local() for p in module.parameters()]

    for wanted, got in zip(run_ranks(2, body, False), run_ranks(2, body, True), strict=True):
        assert all(map(torch.equal, wanted, got))
