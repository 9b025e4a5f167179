"""Islands of real processes: the bits of threads, and errors that name a rank that is gone."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.distributed.device_mesh import DeviceMesh

import onefold
from onefold.wire.collectives import Group
from tests.support.forking import HANG_S, await_ended_threads
from tests.support.island_runs import IslandRank, IslandRun, build, island_of, train_islands
from tests.support.ranks import _process, run_processes, shorten_timeout
from tests.support.rows import again_but

pytestmark = pytest.mark.process

LATE_S = 3.0


def adamw(parameters):
    return torch.optim.AdamW(parameters, lr=1e-2)


RUN = IslandRun(
    (3, 2, 1), onefold.islands.Periods(4, exp_avg=4, fragments=2, delay=1, keep=0.5), steps=9,
    codec="int8", outer=None, optimizer=adamw,
)  # fmt: skip


def train(rank, folder):
    found = IslandRank.start(rank, RUN)
    found.train(RUN.data)
    torch.save(found.weights(), f"{folder}/{rank}.pt")


def test_islands_of_processes_have_the_bits_of_threads(tmp_path):
    """Messages are under way while steps go on; islands have 3, 2 and 1 ranks."""
    wanted = train_islands(RUN)
    run_processes(6, train, str(tmp_path))
    for rank, each in enumerate(wanted):
        got = torch.load(tmp_path / f"{rank}.pt")
        assert all(torch.equal(got[name], weight) for name, weight in each.weights.items()), rank


def train_on_a_part(rank):
    mesh = DeviceMesh("cpu", [[0, 1], [3, 4]], mesh_dim_names=("island", "rank"))
    if rank == 2:
        return
    torch.manual_seed(rank // 3)  # other weights: those of island 0 count
    module = build()
    optimizer = adamw(module.parameters())
    onefold.shard(module, optimizer, mesh=mesh["rank"])
    handle = onefold.islands(module, optimizer, every=2, mesh=mesh)
    assert handle.island == rank // 3
    found = IslandRank(IslandRun((6,)), rank, module, optimizer, handle)
    found.train(IslandRun(steps=4).data)
    total = sum(weight.sum() for weight in found.weights().values())
    sums = [None] * 4
    dist.all_gather_object(sums, total.item(), group=handle._places.group.handle)
    assert len(set(sums)) == 1


def test_islands_of_a_part_of_the_world_need_no_call_of_the_others():
    run_processes(5, train_on_a_part)


def meet_without_cpu(rank):
    """A stand-in for a world of NCCL alone: it sends nothing that lies in CPU memory."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dist, "get_backend_config", lambda _: "cuda:nccl")
        group = Group.over([0, 1], on_cpu=True)
    assert group.handle is not dist.group.WORLD
    assert group.all_reduced(torch.ones(1)).item() == 2
    assert Group.over([0, 1], on_cpu=True).handle is dist.group.WORLD


def test_a_world_that_sends_no_cpu_memory_gets_a_group_that_does():
    run_processes(2, meet_without_cpu)


# a rank that is gone


def killed():
    os.kill(os.getpid(), signal.SIGKILL)


def ends_early():
    os._exit(0)


def lose_a_rank(rank, sizes, lost, how, folder):
    """A rank ends before the second exchange. The others raise, then or as they wait for it."""
    run = IslandRun(sizes, 2, steps=4, outer=None)
    found = IslandRank.start(rank, run)
    found.train(run.data[:3])
    if rank == lost:
        how()
    begun = time.monotonic()
    try:
        found.train(run.data[3:])
    except onefold.WireError as error:
        said = f"{time.monotonic() - begun:.1f}\n{error}"
        Path(folder, str(rank)).write_text(said)
    os._exit(0)


@again_but("(2, 1)-1-ends_early", "(3, 2, 1)-1-killed")
@pytest.mark.parametrize(
    ("sizes", "lost", "how"),
    [((2, 1), 2, killed), ((2, 1), 1, ends_early), ((3, 2, 1), 1, killed)],
    ids=lambda value: getattr(value, "__name__", str(value)),
)
def test_a_rank_that_ends_is_named_on_all_others(sizes, lost, how, tmp_path):
    await_ended_threads()
    world_size, url = sum(sizes), f"file://{tmp_path}/store"
    arguments = (world_size, url, HANG_S, lose_a_rank, (sizes, lost, how, str(tmp_path)))
    context = mp.start_processes(
        _process, arguments, nprocs=world_size, join=False, start_method="fork"
    )
    for process in context.processes:
        process.join(HANG_S)
    for rank in set(range(world_size)) - {lost}:
        seconds, message = Path(tmp_path, str(rank)).read_text().split("\n", 1)
        assert float(seconds) < HANG_S / 2, "long before the timeout"
        is_beside = island_of(rank, sizes) == island_of(lost, sizes)  # its group has own numbers
        assert (" ended" if is_beside else f"rank {lost} ended") in message, message


def fail_in_turn(rank):
    """One rank alone fails before ranks have met, in step(), and at last never comes."""
    groups = [dist.new_group([0, 1]), dist.new_group([2])]
    module = build()
    optimizer = adamw(module.parameters())
    onefold.shard(module, optimizer, mesh=groups[rank // 2])
    with pytest.raises(onefold.ConfigError, match="a mesh of two axes") as refused:
        onefold.islands(module, optimizer, every=1, mesh="island" if rank == 1 else None)
    assert rank == 1 or "rank 1: " in str(refused.value)
    handle = onefold.islands(module, optimizer, every=1)
    if rank == 1:
        handle._anchors.check_trained = fail
    kind, message = (
        (ValueError, "on") if rank == 1 else (onefold.WireError, "rank 1: ValueError: on")
    )
    with pytest.raises(kind, match=f"{message} purpose"):
        handle.step()
    shorten_timeout(LATE_S)
    if rank == 1:
        time.sleep(2 * LATE_S)
        os._exit(0)
    with pytest.raises(onefold.WireError, match="of them"):
        onefold.islands(module, optimizer, every=1)
    os._exit(0)


def fail(*_):
    raise ValueError("on purpose")


def test_a_rank_that_fails_alone_or_never_comes_ends_the_others_by_name():
    run_processes(3, fail_in_turn)
