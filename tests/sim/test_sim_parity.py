"""On the simulated device every stage computes what the CPU does, without a race."""

from __future__ import annotations

import pytest

from tests.sim import building
from tests.sim.ranks import run_sim
from tests.sim.training import train_sim
from tests.support.models import Model, next_token_loss, token_batches
from tests.support.rows import again_but
from tests.support.training import Job, assert_close, assert_same_bits, train_plain

STAGES = (0, 1, 2, 3)

pytestmark = [
    pytest.mark.process,
    pytest.mark.skipif(building.missing() is not None, reason=f"needs {building.missing()}"),
]


def job():
    return Job(Model, token_batches(), next_token_loss, clip=0.1)


def all_stages(rank, world_size):
    return [train_sim(rank, job(), world_size, stage) for stage in STAGES]


@again_but("3")
@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_every_stage_computes_what_the_cpu_does(world_size):
    ranks = run_sim(world_size, all_stages, world_size)
    plain = train_plain(job())
    for runs in ranks:
        for run, first in zip(runs, ranks[0], strict=True):
            assert_same_bits(run, first)
            assert_close(run, plain)
