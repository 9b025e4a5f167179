"""`onefold doctor` on the ranks of a job: speeds, links, shares, and ranks that do not answer."""

from __future__ import annotations

import json
import os
import threading
import time
from datetime import timedelta
from itertools import combinations

import pytest
import torch
import torch.distributed as dist

from onefold.app.tools import rank_speeds
from onefold.app.tools.rank_speeds import (
    AbsentRanksError,
    JobSpeeds,
    RankSpeeds,
    check_presence,
    job_speeds,
)
from onefold.wire.collectives import Group
from onefold.wire.world import World
from tests.support.commands import onefold
from tests.support.ranks import run_processes


@pytest.mark.process
def test_doctor_measures_each_rank_and_each_pair():
    done = onefold("doctor", "--ranks", "2", "--json")
    assert done.returncode == 0, done.stderr
    job = json.loads(done.stdout)["job"]
    assert [each["rank"] for each in job["ranks"]] == [0, 1]
    for each in job["ranks"]:
        assert each["flops_per_s"] > 1e8
        assert each["copied_per_s"] > 1e6
        assert 0 < each["free_nbytes"] <= each["free_host_nbytes"]
    assert job["links"][0][1] == job["links"][1][0] > 0
    assert job["slowest_pair"] == [0, 1]


def world_of(rank: int) -> World:
    return World(Group.from_handle(dist.group.WORLD), torch.device("cpu"))


def _measure_three(rank: int) -> None:
    job = job_speeds(world_of(rank), 60.0)
    assert len(job.ranks) == 3
    pairs = [job.links[a][b] for a, b in combinations(range(3), 2)]
    assert min(pairs) > 0
    assert job.links[job.slowest_pair[0]][job.slowest_pair[1]] == min(pairs)
    assert JobSpeeds.from_dict(json.loads(json.dumps(job.as_dict()))) == job


@pytest.mark.process
def test_all_ranks_have_the_same_table():
    run_processes(3, _measure_three)


def _stay_away(rank: int) -> None:
    if rank == 1:
        time.sleep(4)
        return
    begun = time.monotonic()
    with pytest.raises(AbsentRanksError, match=r"every rank within 1\.5 s, got none from rank 1\n"):
        job_speeds(world_of(rank), 1.5)
    assert time.monotonic() - begun < 3.5


@pytest.mark.process
def test_a_rank_that_does_not_answer_is_named_within_the_timeout():
    run_processes(3, _stay_away)


def _end_early(rank: int) -> None:
    if rank == 2:  # it has measured itself, and ends before it meets the others
        rank_speeds._own_links = lambda world: os._exit(0)
    with pytest.raises(AbsentRanksError, match="none from rank 2\n"):
        job_speeds(world_of(rank), 30.0)
    os._exit(0)  # there is no barrier without the third


@pytest.mark.process
def test_a_rank_that_ends_among_the_pairs_is_named():
    run_processes(3, _end_early)


def test_a_rank_that_never_comes_is_named_before_there_is_a_group(monkeypatch):
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, timeout=timedelta(seconds=60))
    for name, value in {
        "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(store.port), "WORLD_SIZE": "3",
        "RANK": "0", rank_speeds.AGENT_STORE: "True",
    }.items():  # fmt: skip
        monkeypatch.setenv(name, value)
    key = "onefold/doctor/0/onefold/speeds/here"
    store.set(f"{key}/1", "")
    begun = time.monotonic()
    with pytest.raises(AbsentRanksError, match="none from rank 2\n"):
        check_presence(0.5)
    assert time.monotonic() - begun < 5
    late = threading.Timer(0.3, lambda: store.set(f"{key}/2", ""))
    late.start()
    check_presence(60)
    late.join()


@pytest.mark.parametrize("world_size", range(2, 10))
def test_each_two_ranks_meet_once(world_size):
    met: list[tuple[int, int]] = []
    for partners in rank_speeds.rounds_of(world_size):
        for rank, partner in enumerate(partners):
            assert partner != rank
            assert partner is None or partners[partner] == rank
            if partner is not None and rank < partner:
                met.append((rank, partner))
    assert sorted(met) == list(combinations(range(world_size), 2))


def job(speeds: list[float], memories: list[int]) -> JobSpeeds:
    ranks = tuple(
        RankSpeeds(rank, "host", "cpu", memory, 2 * memory, speed, 1e9)
        for rank, (speed, memory) in enumerate(zip(speeds, memories, strict=True))
    )
    world_size = len(ranks)
    links = tuple(
        tuple(0.0 if a == b else 1e9 / (1 + abs(a - b)) for b in range(world_size))
        for a in range(world_size)
    )
    return JobSpeeds(ranks, links)


def test_rows_follow_speeds_and_states_follow_free_memory():
    found = job([3e9, 1e9, 3e9], [1 << 30, 2 << 30, 1 << 30])
    assert found.row_shares == (429, 143, 428)
    assert found.state_shares == (1, 2, 1)
    text = "\n".join(found.lines())
    assert "slowest pair: ranks 0 and 2" in text
    assert "  onefold train --rows 429,143,428" in text
    assert "  onefold train --shares 1,2,1" in text
    even = job([1e9, 1.05e9], [1 << 30, 1 << 30])
    assert even.row_shares is None
    assert even.state_shares is None
    assert "the same on all ranks" in "\n".join(even.lines())


@pytest.mark.parametrize("flags", [("--ranks", "0"), ("--timeout", "-1"), ("--ranks", "two")])
def test_flags_that_cannot_be_are_named(flags):
    done = onefold("doctor", *flags)
    assert done.returncode == 2
    assert f"expected {flags[0]} to be" in done.stderr
