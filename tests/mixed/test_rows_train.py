"""`onefold train --rows`: uneven rows, the losses of one process."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.distributed as dist

from onefold.app.cli.arguments import Parser
from onefold.app.cli.train import add_to, job_of
from onefold.app.train.job import Job
from onefold.app.train.loop import Trainer, preflight, train
from onefold.app.train.run_record import TrainObserver
from onefold.engine.registry import engine_of
from onefold.errors import ConfigError
from onefold.layout.observer import members_of
from onefold.wire.collectives import Group
from onefold.wire.world import World
from tests.support.ranks import run_ranks
from tests.support.rows import again_but

CPU = torch.device("cpu")
UNSEEDED = "tests.app.test_training:unseeded_gpt"
JOB = Job(model=UNSEEDED, data="docs", steps=4, rows=7, seq=16, lr=1e-3,
          sample=0)  # fmt: skip


def losses_of(world_size, job):
    def body(rank):
        world = World(Group.from_handle(dist.group.WORLD if world_size > 1 else None), CPU)
        return train(job, world, TrainObserver())

    results = run_ranks(world_size, body)
    assert all(each.losses == results[0].losses for each in results)
    return results[0]


@pytest.fixture(scope="module")
def alone():
    return losses_of(1, JOB)


@again_but("row_shares1-2", "auto-1")
@pytest.mark.parametrize(
    ("row_shares", "accumulate"),
    [((3.0, 1.0), 1), ((3.0, 1.0), 2), ((1.0, 0.0), 1), ((1.0, 5.0, 1.0), 2), ("auto", 1)],
)
def test_losses_are_those_of_one_process_whatever_the_rows(alone, row_shares, accumulate):
    world_size = 2 if row_shares == "auto" else len(row_shares)
    found = losses_of(world_size, replace(JOB, row_shares=row_shares, accumulate=accumulate))
    assert found.losses == pytest.approx(alone.losses, rel=1e-5)
    assert found.held_out == pytest.approx(alone.held_out, rel=1e-4)


def test_uneven_rows_resume_exactly_and_on_another_number_of_ranks(tmp_path):
    saved = tmp_path / "saved"
    job = replace(JOB, row_shares=(3.0, 1.0), checkpoint=str(saved), every=2, keep=None)
    whole = losses_of(2, job)
    (saved / "step-00000004").rename(tmp_path / "last")
    again = losses_of(2, replace(job, resume=True))
    assert again.first_step == 2
    assert again.losses == whole.losses[2:], "bit for bit"
    (saved / "step-00000004").rename(tmp_path / "again")
    three = losses_of(3, replace(job, row_shares="auto", resume=True))
    assert three.losses == pytest.approx(whole.losses[2:], rel=1e-5)


def test_measured_rows_are_kept_in_checkpoints_and_move_at_a_step(tmp_path):
    job = replace(JOB, row_shares="auto", rows=8)

    def body(rank):
        world = World(Group.from_handle(dist.group.WORLD), CPU)
        trainer = Trainer(job, world, preflight(job, 2))
        assert len(members_of(engine_of(trainer.module).ledger.observer)) == 1
        first, state = trainer.deal, {"shares": [0.75, 0.25]}
        before = len(first.own)
        first.load_state_dict(state)
        assert first.stateful["row_shares"].state_dict() == state
        trainer.step(0)
        moved = len(trainer.windows.own)
        first.load_state_dict({"shares": [1.0]})
        return before, moved, len(first.own)

    assert run_ranks(2, body) == [(4, 6, 4), (4, 2, 4)]


@pytest.mark.parametrize(("changes", "message"), [
    ({"row_shares": (1.0, 1.0, 1.0)}, "expected 2 shares of rows"),
    ({"row_shares": (0.0, 0.0)}, "none negative"),
    ({"row_shares": "auto", "tp": 2, "model": "tiny"}, "no --rows with --tp"),
])  # fmt: skip
def test_rows_that_cannot_be_dealt_are_refused_before_any_rank_starts(changes, message):
    with pytest.raises(ConfigError, match=message):
        preflight(replace(JOB, **changes), 2)


def test_the_flag_takes_weights_or_auto():
    parser = Parser(prog="onefold")
    add_to(parser.add_subparsers(dest="command"))

    def job(*flags):
        return job_of(parser.parse_args(["train", *flags]), 2)

    assert job().row_shares is None
    assert job("--rows", "auto").row_shares == "auto"
    assert job("--rows", "3,1").row_shares == (3.0, 1.0)
    for bad in ("3,-1", "fast", "3,", "nan,1"):
        with pytest.raises(ConfigError, match="--rows to be a number of at least 0"):
            job("--rows", bad)
