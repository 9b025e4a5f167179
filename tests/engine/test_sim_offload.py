"""On the simulated device, offloaded states and weights: the losses of the CPU, without a race."""

from __future__ import annotations

from dataclasses import replace

import pytest

import onefold
from onefold.config import Offload
from onefold.engine import blocks
from onefold.engine.registry import engine_of
from onefold.tier.store import GRAIN_NUMEL
from tests.sim import building, device
from tests.sim.ranks import run_sim
from tests.sim.training import on_device, step, train_sim
from tests.support.models import Model, next_token_loss, token_batches
from tests.support.ranks import seeded
from tests.support.rows import again_but, worlds_in_turn
from tests.support.training import Job, assert_close, assert_same_bits, train_plain

pytestmark = [
    pytest.mark.process,
    pytest.mark.skipif(building.missing() is not None, reason=f"needs {building.missing()}"),
]

JOB = Job(Model, token_batches(), next_token_loss, clip=0.1)
BY_CPU, BY_DEVICE = Offload(optimizer="cpu", step="cpu"), Offload(optimizer="cpu", step="device")
OFFLOADS = [
    offload
    for base in (BY_CPU, BY_DEVICE)
    for offload in (base, replace(base, parameters="cpu"), replace(base, step_in_backward=True))
]


def small_blocks() -> None:
    for name in ("BLOCK_NUMEL", "LINK_BLOCK_NUMEL"):
        setattr(blocks, name, GRAIN_NUMEL // 4)


def all_offloads(rank, world_size, stage, offloads):
    small_blocks()
    results = []
    for offload in offloads:
        clip = None if offload.step_in_backward else JOB.clip
        job = replace(JOB, options={"offload": offload}, clip=clip)
        results.append(train_sim(rank, job, world_size, stage))
    return results


@again_but("3-3")
@pytest.mark.parametrize(("world_size", "stage"), [(1, 3), (2, 1), (3, 3)])
def test_offloaded_states_and_weights_train_as_on_the_cpu(world_size, stage):
    # the simulated device cannot show one rank's plain parameter in another memory
    stays = world_size == 1 or stage < 3
    offloads = [o for o in OFFLOADS if not stays or o.parameters == "device"]
    backend = None if world_size == 1 else device.BACKENDS
    ranks = run_sim(world_size, all_offloads, world_size, stage, offloads, backend=backend)
    for runs in ranks:
        for offload, run, first in zip(offloads, runs, ranks[0], strict=True):
            assert_same_bits(run, first)
            clip = None if offload.step_in_backward else JOB.clip
            assert_close(run, train_plain(replace(JOB, clip=clip)))


def waits_of_a_step(rank, world_size, offload):
    """Host waits of a steady step by line, and its blocks."""
    small_blocks()
    module = seeded(JOB.build)
    optimizer = JOB.optimizer(module.parameters())
    onefold.shard(module, optimizer, stage=3, offload=offload)
    *earlier, last = map(on_device, JOB.batches[:3])  # beforehand: the host waits for such copies
    for batch in earlier:
        step(module, optimizer, JOB, batch, rank, world_size)
    for unit in engine_of(module).units:
        unit.wait_step()
    run, num_blocks = blocks._StepBlock.run_block, []
    blocks._StepBlock.run_block = lambda block: (num_blocks.append(block), run(block))[1]
    device.native.reset()
    step(module, optimizer, JOB, last, rank, world_size)
    for unit in engine_of(module).units:
        unit.wait_step()
    return device.host_waits(), len(num_blocks)


@again_but("by device-2")
@worlds_in_turn
@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize("offload", [BY_CPU, BY_DEVICE], ids=["by cpu", "by device"])
def test_a_steady_step_waits_at_most_once_a_block(world_size, offload):
    """Where the CPU steps, whoever needs a unit waits for the new weights, too."""
    backend = None if world_size == 1 else device.BACKENDS
    ranks = run_sim(world_size, waits_of_a_step, world_size, offload, backend=backend)
    for waits, num_blocks in ranks:
        ends = sum(n for line, n in waits.items() if line.startswith("event.synchronize"))
        assert sum(waits.values()) - ends == num_blocks > 4, waits
        assert ends <= (num_blocks if offload is BY_CPU else 0), waits
