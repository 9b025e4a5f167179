"""Islands that are separate jobs: they meet at a store, one of them is killed and joins again."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from datetime import timedelta
from multiprocessing import get_context
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import onefold
from tests.support.forking import HANG_S, await_ended_threads
from tests.support.island_runs import build

pytestmark = pytest.mark.process

RANKS, STEPS, EVERY, KILLED_AT = 2, 24, 4, 10


def island(rank, number, port, folder, *, is_second_life):
    """One rank of a job that trains until step `STEPS`; island 1 dies once."""
    torch.set_num_threads(1)
    url = f"file://{folder}/store-{number}-{is_second_life}"
    limit = timedelta(seconds=HANG_S)
    dist.init_process_group("gloo", url, limit, rank=rank, world_size=RANKS)
    torch.manual_seed(number)  # other weights: those of island 0 count
    module = build()
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-2)
    onefold.shard(module, optimizer, stage=3)
    meeting = onefold.islands.Meeting(f"127.0.0.1:{port}", island=number, islands=2)
    handle = onefold.islands(module, optimizer, every=EVERY, meeting=meeting)
    first = handle.num_steps
    left_out = []
    while handle.num_steps < STEPS:
        if number == 1 and not is_second_life and handle.num_steps == KILLED_AT and rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        if number == 0:  # it waits a second for the island that was killed
            handle._members.timeout = 1.0 if handle.num_steps == 3 * EVERY - 1 else 60.0
        if number == 0 and handle.num_steps == 4 * EVERY - 1:
            left_out.append(handle.members)
            Path(folder, f"left-out-{rank}").touch()
            await_(lambda: handle._members._journal._wants(1))
        x = torch.randn(4, 8, dtype=torch.float64)
        module(x).pow(2).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        handle.step()
    weights = onefold.full_state_dict(module, rank0_only=False)
    found = {"weights": weights, "first": first, "left_out": left_out, "members": handle.members}
    torch.save(found, f"{folder}/{number}-{rank}.pt")
    dist.barrier()
    dist.destroy_process_group()


def await_(is_so):
    deadline = time.monotonic() + HANG_S
    while not is_so():
        assert time.monotonic() < deadline, "hangs"
        time.sleep(0.05)


def start(number, port, folder, *, is_second_life=False):
    context = get_context("fork")
    found = [
        context.Process(
            target=island, args=(rank, number, port, folder),
            kwargs={"is_second_life": is_second_life}, daemon=True,
        )
        for rank in range(RANKS)
    ]  # fmt: skip
    for process in found:
        process.start()
    return found


@pytest.fixture
def port():
    """The store where islands meet, as users start it."""
    code = [sys.executable, "-m", "onefold", "meet", "--port", "0"]
    with subprocess.Popen(code, stdout=subprocess.PIPE, text=True) as store:
        assert store.stdout is not None
        yield int(store.stdout.readline().split()[-1])
        store.kill()


def test_an_island_that_is_killed_joins_again(port, tmp_path):
    """It loses its own steps alone: the other one goes on, and afterwards both have one state."""
    await_ended_threads()
    folder = str(tmp_path)
    processes = [*start(0, port, folder), *(first := start(1, port, folder))]
    try:
        first[1].join(HANG_S)
        assert first[1].exitcode == -signal.SIGKILL
        first[0].join(HANG_S)  # its peer ends with an error
        assert first[0].exitcode == 1
        await_(lambda: Path(folder, "left-out-0").exists())
        processes += start(1, port, folder, is_second_life=True)
        for process in (*processes[:RANKS], *processes[-RANKS:]):
            process.join(HANG_S)
            assert process.exitcode == 0
    finally:
        for process in processes:
            process.kill()
    ends = {path.stem: torch.load(path) for path in Path(folder).glob("*.pt")}
    assert sorted(ends) == ["0-0", "0-1", "1-0", "1-1"]
    assert ends["0-0"]["left_out"] == [(0,)]
    assert ends["1-0"]["first"] == 4 * EVERY, "it goes on from the others' step"
    for end in ends.values():
        assert end["members"] == (0, 1)
        for name, weight in ends["0-0"]["weights"].items():
            assert torch.equal(end["weights"][name], weight), name


def test_a_store_that_is_not_there_is_named():
    module = build()
    onefold.shard(module)
    meeting = onefold.islands.Meeting("127.0.0.1:9", island=0, islands=2)
    with pytest.raises(onefold.WireError, match=r"a store at 127\.0\.0\.1:9"):
        onefold.islands(module, every=2, meeting=meeting, timeout=1)


def test_private_names_of_torch_that_islands_need_are_there():
    """If one is gone: outer/parcels.py needs another way to give gloo its address."""
    from torch.distributed.distributed_c10d import ProcessGroupGloo, _get_default_store

    options = ProcessGroupGloo._Options()
    options._devices = [ProcessGroupGloo.create_device(hostname="127.0.0.1")]
    options._timeout = timedelta(seconds=1)
    store = dist.HashStore()
    group = ProcessGroupGloo(store, 0, 1, options)
    assert callable(group._allgather_base)
    assert callable(_get_default_store)
