"""Law 1: stages, overlap and world sizes do not change what is computed."""

from __future__ import annotations

from functools import partial

import pytest
import torch

from tests.support.models import Model, next_token_loss, token_batches
from tests.support.rows import again_but, worlds_in_turn
from tests.support.training import Job, assert_close, assert_same_bits, run_job, train_plain

WORLDS = (1, 2, 3, 4)


def job(**changes: object) -> Job:
    return Job(Model, token_batches(), next_token_loss, **changes)  # type: ignore[arg-type]


@again_but("False-1", "False-4", "True-2")
@worlds_in_turn
@pytest.mark.parametrize("world_size", WORLDS)
@pytest.mark.parametrize("tied", [False, True])
def test_all_stages_give_the_same_bits_and_agree_with_one_process(world_size, tied):
    work = job()
    work.build = partial(Model, tied=tied)
    runs = [run_job(work, world_size, stage) for stage in (0, 1, 2, 3)]
    for run in runs[1:]:
        assert_same_bits(run, runs[0])
    assert_close(runs[0], train_plain(work))


@again_but("1", "4")
@pytest.mark.parametrize("world_size", WORLDS)
def test_clipping_agrees_with_one_process_and_bitwise_between_sharded_stages(world_size):
    work = job(clip=0.1)
    runs = [run_job(work, world_size, stage) for stage in (0, 1, 2, 3)]
    assert_same_bits(runs[2], runs[1])
    assert_same_bits(runs[3], runs[1])
    assert_close(runs[0], runs[1])
    assert_close(runs[1], train_plain(work))


@again_but("None-1", "None-4", "0.1-2")
@worlds_in_turn
@pytest.mark.parametrize("world_size", WORLDS)
@pytest.mark.parametrize("clip", [None, 0.1])
def test_accumulation_agrees_with_one_process_at_every_stage(world_size, clip):
    work = Job(Model, token_batches(rows=24), next_token_loss, accumulate=2, clip=clip)
    runs = [run_job(work, world_size, stage) for stage in (0, 1, 2, 3)]
    plain = train_plain(work)
    for run in runs:
        assert_close(run, plain)


@again_but("3")
@pytest.mark.parametrize("stage", [0, 1, 3])
def test_a_run_repeats_itself_bit_for_bit(stage):
    work = job()
    assert_same_bits(run_job(work, 3, stage), run_job(work, 3, stage))


@again_but("0", "3")
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_several_backwards_without_accumulate_add_up(stage):
    plain = Job(Model, token_batches(rows=24), next_token_loss, accumulate=2)

    def loss(module, tokens):
        first, second = tokens.chunk(2)
        (next_token_loss(module, first) / 2).backward()
        return next_token_loss(module, second) / 2

    def whole_loss(module, tokens):
        first, second = tokens.chunk(2)
        return (next_token_loss(module, first) + next_token_loss(module, second)) / 2

    twice = Job(Model, plain.batches, loss)
    once = Job(Model, plain.batches, whole_loss)
    got = run_job(twice, 2, stage).weights
    for name, weight in train_plain(once).weights.items():
        torch.testing.assert_close(got[name], weight, rtol=0, atol=1e-5, msg=name)
