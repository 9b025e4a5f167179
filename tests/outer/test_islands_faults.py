"""Islands that fail or differ: a right result or a named error, the same on all ranks."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import onefold
from tests.support.island_runs import IslandRank, IslandRun, averaging, build, island_of
from tests.support.ranks import every_rank, run_ranks
from tests.support.rows import again_but

UNEQUAL = [(2, 1), (3, 2, 1)]


def nesterov(parameters):
    return torch.optim.SGD(parameters, lr=0.7, momentum=0.9, nesterov=True)


# islands that differ


def other_model():
    return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4)).double()


DIFFERENT = {
    "stage": ({"stage": 2}, "'stage 3'", "'stage 2'"),
    "codec": ({"codec": "int4"}, "'codec exact'", "'codec int4'"),
    "every": ({"every": onefold.islands.Periods(2, delay=1)}, "delay=0", "delay=1"),
    "outer": ({"outer": averaging}, "'lr': 0.7", "'lr': 1.0"),
    "model": ({"build": other_model}, "2.weight [16, 16]", "2.weight [4, 16]"),
}


@again_but("stage-(2, 1)", "codec-(3, 2, 1)", "every-(3, 2, 1)", "outer-(2, 1)", "model-(3, 2, 1)")
@pytest.mark.parametrize("sizes", UNEQUAL, ids=str)
@pytest.mark.parametrize("fact", DIFFERENT)
def test_islands_that_differ_are_named_on_every_rank(fact, sizes):
    """The last island differs: every rank names both values."""
    arguments, usual, other = DIFFERENT[fact]

    def body(rank):
        is_last = island_of(rank, sizes) == len(sizes) - 1
        own = {"every": 2, "outer": nesterov, **(arguments if is_last else {})}
        with pytest.raises(onefold.ConfigError, match="the same choices and parameters") as info:
            IslandRank.start(rank, IslandRun(sizes, **own))
        assert usual in str(info.value)
        assert other in str(info.value)

    run_ranks(sum(sizes), body)


@pytest.mark.parametrize("sizes", UNEQUAL, ids=str)
def test_ranks_that_step_differently_are_named_on_every_rank(sizes):
    """One rank of the first island is two steps ahead."""

    def body(rank):
        run = IslandRun(sizes, onefold.islands.Periods(4, fragments=2), steps=2)
        found = IslandRank.start(rank, run)
        found.handle.num_steps += 2 * (rank == 1)
        with pytest.raises(onefold.StateError, match="the same exchange of islands") as info:
            found.train(run.data)
        assert "fragment 1 at step 2' on rank" in str(info.value)
        assert "fragment 0 at step 4' on rank 1" in str(info.value)

    run_ranks(sum(sizes), body)


@pytest.mark.parametrize("sizes", UNEQUAL, ids=str)
def test_states_of_different_steps_are_named_on_every_rank(sizes):
    def body(rank):
        run = IslandRun(sizes, 2, steps=2)
        found = IslandRank.start(rank, run)
        state = found.handle.rank_state()
        found.train(run.data)
        if island_of(rank, sizes) == 0:
            state = found.handle.rank_state()
        with pytest.raises(onefold.ConfigError, match="the same step of islands") as info:
            found.handle.resume(state)
        assert "'step 2' on rank" in str(info.value)
        assert "'step 0' on rank" in str(info.value)

    run_ranks(sum(sizes), body)


@again_but("(3, 2, 1)")
@pytest.mark.parametrize("sizes", UNEQUAL, ids=str)
def test_a_rank_that_fails_in_an_exchange_is_named_on_every_rank(sizes, monkeypatch):
    """Its own error there, on the others one with its number; nothing has changed on any."""

    def body(rank):
        run = IslandRun(sizes, 2, steps=2)
        found = IslandRank.start(rank, run)
        found.train(run.data[:1])
        if rank == 1:
            monkeypatch.setattr(found.handle._anchors, "to_send", fail)
        before = [anchor.clone() for anchor in found.handle.rank_state()["anchors"]]
        kind = ValueError if rank == 1 else onefold.StateError
        with pytest.raises(kind, match="on purpose" if rank == 1 else "rank 1: ValueError"):
            found.train(run.data[1:])
        after = found.handle.rank_state()["anchors"]
        assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))

    run_ranks(sum(sizes), body)


def fail(*_):
    raise ValueError("on purpose")


# arguments


BAD = {
    "every": ({"every": 0}, "every to be a whole number from 1"),
    "codec": ({"codec": "int5"}, "one of int8"),
    "outer": ({"outer": lambda p: torch.optim.SGD([nn.Parameter(torch.zeros(1))], 1.0)}, "outer"),
    "no outer": ({"outer": lambda p: None}, "outer to be a function"),
    "fragments": ({"every": onefold.islands.Periods(90, fragments=80)}, "a unit for each fragment"),
}


@pytest.mark.parametrize("case", BAD)
def test_a_bad_argument_of_one_rank_is_named_on_every_rank(case):
    arguments, message = BAD[case]

    def body(rank):
        own = arguments if rank == 3 else {}
        with pytest.raises(onefold.ConfigError, match=message) as info:
            IslandRank.start(rank, IslandRun((2, 2)), **own)
        assert rank == 3 or "rank 3: " in str(info.value)

    run_ranks(4, body)


@pytest.mark.parametrize(
    ("fields", "name"),
    [
        ({"exp_avg": 45}, "exp_avg"),
        ({"exp_avg_sq": True}, "exp_avg_sq"),
        ({"fragments": 0}, "fragments"),
        ({"fragments": 31}, "fragments"),
        ({"delay": 30}, "delay"),
        ({"delay": 10, "fragments": 3}, "delay"),
        ({"keep": 1.0}, "keep"),
    ],
    ids=str,
)
def test_periods_that_cannot_work_are_named(fields, name):
    with pytest.raises(onefold.ConfigError, match=name):
        onefold.islands.Periods(30, **fields)


def test_fragments_are_spread_over_the_period():
    periods = onefold.islands.Periods(6, exp_avg=12, fragments=3)
    due = [(step, periods.due(step)) for step in range(1, 13)]
    fragments = {step: found[0] for step, found in due if found}
    assert fragments == {2: 2, 4: 1, 6: 0, 8: 2, 10: 1, 12: 0}
    moments = {step for step, found in due if found and "exp_avg" in found[1]}
    assert moments == {8, 10, 12}


@every_rank(2)
def test_islands_need_two_of_them_and_a_sharded_module(rank):
    module = build()
    with pytest.raises(onefold.StateError, match="has sharded"):
        onefold.islands(module, every=2)
    onefold.shard(module)
    with pytest.raises(onefold.ConfigError, match="at least two islands"):
        onefold.islands(module, every=2)
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("island", "rank"))
    with pytest.raises(onefold.ConfigError, match="rows are the islands' ranks"):
        onefold.islands(module, every=2, mesh=mesh)


@every_rank(8)
def test_nodes_that_are_replicas_are_refused(rank):
    mesh = init_device_mesh("cpu", (2, 2, 2), mesh_dim_names=("island", "node", "rank"))
    module = build()
    onefold.shard(module, mesh=mesh["node", "rank"], wire=onefold.Wire(secondary="optimizer"))
    with pytest.raises(onefold.ConfigError, match="replicas"):
        onefold.islands(module, every=2)


@every_rank(2)
def test_a_step_inside_unsharded_is_refused(rank):
    found = IslandRank.start(rank, IslandRun((1, 1)))
    with (
        onefold.unsharded(found.module),
        pytest.raises(onefold.StateError, match=r"after optimizer.step\(\)"),
    ):
        found.handle.step()


@pytest.mark.parametrize("sizes", UNEQUAL, ids=str)
def test_weights_that_are_not_finite_reach_no_other_rank(sizes):
    last = sum(sizes) - 1

    def body(rank):
        found = IslandRank.start(rank, IslandRun(sizes, 2))
        found.train(found.run.data[:1])
        if rank == last:
            with torch.no_grad():
                next(found.module.parameters()).to_local().fill_(float("nan"))
        with pytest.raises(onefold.StateError, match="finite weights") as info:
            found.handle.step()
        assert rank == last or f"rank {last}: " in str(info.value)
        assert all(anchor.isfinite().all() for anchor in found.handle.rank_state()["anchors"])

    run_ranks(sum(sizes), body)


@every_rank(3)
def test_a_state_of_another_size_is_refused(rank):
    found = IslandRank.start(rank, IslandRun((2, 1)))
    state = found.handle.rank_state()
    state["anchors"] = [torch.zeros(3)]
    with pytest.raises(onefold.StateError, match="anchors of shapes"):
        found.handle.resume(state)
