"""Islands that fail, come late, or differ: a right result or a named error, the same on all."""

from __future__ import annotations

import threading
import time

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import onefold
from onefold.outer.journal import JournalRecord, Vote, decide
from onefold.outer.parcels import IslandLinks
from tests.support.island_runs import IslandRank, IslandRun, averaging, build, simulate
from tests.support.ranks import run_ranks


def nesterov(parameters):
    return torch.optim.SGD(parameters, lr=0.7, momentum=0.9, nesterov=True)


# islands that are not there


def await_asking(handle, island):
    """Wait until an island asks to join."""
    deadline = time.monotonic() + 60
    while not handle._members._journal._wants(island):
        assert time.monotonic() < deadline, "the island did not ask"
        time.sleep(0.02)


@pytest.mark.parametrize("sizes", [(1, 1), (1, 1, 1), (2, 1)], ids=str)
def test_an_island_that_comes_late_is_left_out_and_joins_again(sizes):
    """It misses the round at step 2, takes over the others' state, and trains on with them."""
    run = IslandRun(sizes, 2, steps=8, outer=nesterov, timeout=1.0)
    last, left_out, others = sum(sizes) - 1, threading.Event(), []

    def body(rank):
        found = IslandRank.start(rank, run)
        found.train(run.data[:1])
        if rank == last:
            left_out.wait(60)
            found.train(run.data[1:2])
        else:
            found.train(run.data[1:2])
            others.append(found.handle.members)
            left_out.set()
            await_asking(found.handle, len(sizes) - 1)
        while found.handle.num_steps < 8:
            found.train(run.data[found.handle.num_steps :][:1])
        return found.weights(), found.handle.num_joined, found.handle.members

    results = run_ranks(sum(sizes), body)
    everyone = tuple(range(len(sizes)))
    assert others == [everyone[:-1]] * last
    assert [joined for _, joined, _ in results] == [0] * last + [1]
    assert all(members == everyone for _, _, members in results)
    for weights, _, _ in results[1:]:
        assert all(torch.equal(weights[name], w) for name, w in results[0][0].items())


def fail_first(monkeypatch, num_failures, island=1):
    """Let messages of one island's attempts fail."""
    start, failed = IslandLinks.gather, []

    def gather(self, owners, message):
        if self._position == island and len(failed) < num_failures:
            failed.append(owners)
            raise RuntimeError("Connection closed by peer")
        return start(self, owners, message)

    monkeypatch.setattr(IslandLinks, "gather", gather)


@pytest.mark.parametrize("codec", [None, "int8"])
def test_a_round_that_fails_once_is_repeated_with_the_same_result(monkeypatch, codec):
    run = IslandRun((1, 1), 2, steps=4, outer=nesterov, codec=codec, timeout=1.0)

    def body(rank):
        found = IslandRank.start(rank, run)
        return found.ended(found.train(run.data))

    wanted = run_ranks(2, body)
    fail_first(monkeypatch, 1)
    got = run_ranks(2, body)
    assert got[0].handle.num_dropped == 0
    for each in got:
        for name, weight in wanted[0].weights.items():
            assert torch.equal(each.weights[name], weight)


@pytest.mark.parametrize("codec", [None, "int4"])
def test_a_round_that_keeps_failing_is_dropped_on_all_alike(monkeypatch, codec):
    """Nothing is half applied: weights, anchors, momentum and residuals are as they were."""
    run = IslandRun((2, 1), 2, steps=4, outer=nesterov, codec=codec, timeout=1.0)
    attempts = []
    connect = IslandLinks.connect

    def fail(self, everyone):
        connect(self, everyone)
        if attempts and self._position == 1 and len(attempts) < 4:
            attempts.append(self._name)
            raise RuntimeError("Connection closed by peer")

    monkeypatch.setattr(IslandLinks, "connect", fail)

    def body(rank):
        found = IslandRank.start(rank, run)
        found.train(run.data[:1])
        if rank == 2:
            attempts.append("begin")
        before = [t.clone() for t in flat(found.handle.rank_state())]
        found.train(run.data[1:2])
        local = found.weights()
        after = flat(found.handle.rank_state())
        assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))
        assert found.handle.num_rounds == 0
        found.train(run.data[2:])
        return found.ended([]), local

    results = run_ranks(3, body)
    assert [each.handle.num_dropped for each, _ in results] == [1, 1, 1]
    assert [each.handle.num_rounds for each, _ in results] == [1, 1, 1]
    apart = [(results[0][1][name] - weight).abs().max() for name, weight in results[2][1].items()]
    assert max(apart) > 0, "each island has its own weights, as the round was dropped"
    if codec is None:  # the next round has the steps of both
        wanted = simulate(IslandRun((2, 1), 4, steps=4, outer=nesterov), results[0][0].units)
        for name, weight in wanted[0].items():
            torch.testing.assert_close(results[0][0].weights[name], weight, rtol=0, atol=1e-12)


def flat(state):
    outer = [v for entry in state["outer"]["state"].values() for v in entry.values()]
    return [*state["anchors"], *state["residuals"], *(v for v in outer if v is not None)]


def test_votes_decide_alike():
    record = JournalRecord(4, (0, 1, 2), epoch=4)
    ok, failed = Vote(True, 30, "weights"), Vote(False, 30, "weights", "lost")
    everyone = decide(record, {0: ok, 1: ok, 2: ok})
    assert everyone.is_committed
    assert (everyone.members, everyone.epoch, everyone.step) == ((0, 1, 2), 4, 30)
    again = decide(record, {0: ok, 1: failed, 2: ok})
    assert not again.is_committed
    assert (again.members, again.epoch, again.tries) == ((0, 1, 2), 5, 1)
    without = decide(record, {0: ok, 2: failed})
    assert (without.members, without.is_committed) == ((0, 2), False)
    assert decide(JournalRecord(6, (0, 1), epoch=4, tries=2), {0: failed, 1: failed}).is_dropped
    apart = decide(record, {0: ok, 1: Vote(True, 29, "weights"), 2: ok})
    assert "step 29 on island 1" in apart.problem
    joining = JournalRecord(4, (0, 1, 2), epoch=4, adopters=(2,))
    assert decide(joining, {0: ok, 1: ok, 2: failed}).members == (0, 1)


# islands that differ


def other_model():
    return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4)).double()


DIFFERENT = {
    "stage": {"stage": 2},
    "codec": {"codec": "int4"},
    "every": {"every": onefold.islands.Periods(2, delay=1)},
    "outer": {"outer": averaging},
    "model": {"build": other_model},
}


@pytest.mark.parametrize("fact", DIFFERENT)
def test_islands_that_differ_are_named(fact):
    def body(rank):
        own = {"every": 2, "outer": nesterov, **(DIFFERENT[fact] if rank == 2 else {})}
        with pytest.raises(onefold.ConfigError, match=f"the same {fact} on every island") as info:
            IslandRank.start(rank, IslandRun((2, 1), **own))
        assert "island 0" in str(info.value)
        assert "island 1" in str(info.value)

    run_ranks(3, body)


def test_islands_that_step_differently_are_named():
    def body(rank):
        found = IslandRank.start(rank, IslandRun((1, 1), onefold.islands.Periods(4, fragments=2)))
        if rank == 1:
            found.handle.num_steps += 2
        with pytest.raises(onefold.StateError, match="fragment 0 at step 4 on island 1"):
            found.train(IslandRun(steps=2).data)

    run_ranks(2, body)


def test_an_island_that_never_comes_is_named():
    def body(rank):
        groups = [dist.new_group([0]), dist.new_group([1])]
        module = build()
        onefold.shard(module, mesh=groups[rank])
        if rank == 0:
            with pytest.raises(onefold.WireError, match="1 of 2 ranks"):
                onefold.islands(module, every=2, timeout=1)

    run_ranks(2, body)


# arguments


BAD = {
    "every": ({"every": 0}, "every to be a whole number from 1"),
    "codec": ({"codec": "int5"}, "one of int8"),
    "outer": ({"outer": lambda p: torch.optim.SGD([nn.Parameter(torch.zeros(1))], 1.0)}, "outer"),
    "no outer": ({"outer": lambda p: None}, "outer to be a function"),
    "timeout": ({"timeout": -1}, "timeout"),
    "fragments": ({"every": onefold.islands.Periods(90, fragments=80)}, "a unit for each fragment"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_arguments_are_named_on_every_rank(case):
    arguments, message = BAD[case]

    def body(rank):
        own = arguments if rank < 2 else {}
        with pytest.raises((onefold.ConfigError, onefold.WireError), match=message):
            run = IslandRun((2, 2))
            IslandRank.start(rank, run, **{"timeout": 1.0, **(own or arguments)})

    run_ranks(4, body)


def test_an_error_on_one_rank_of_an_island_is_raised_on_all_of_them():
    def body(rank):
        own = {"every": 2 if rank else -2}
        with pytest.raises(onefold.ConfigError, match="got -2"):
            IslandRank.start(
                rank, IslandRun((2, 1), timeout=1.0), **(own if rank < 2 else {"every": -2})
            )

    run_ranks(3, body)


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


def test_islands_need_two_of_them_and_a_sharded_module():
    def body(rank):
        module = build()
        with pytest.raises(onefold.StateError, match="has sharded"):
            onefold.islands(module, every=2)
        onefold.shard(module)
        with pytest.raises(onefold.ConfigError, match="at least two islands"):
            onefold.islands(module, every=2)
        mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("island", "rank"))
        with pytest.raises(onefold.ConfigError, match="rows are the islands' ranks"):
            onefold.islands(module, every=2, mesh=mesh)

    run_ranks(2, body)


def test_nodes_that_are_replicas_are_refused():
    def body(rank):
        mesh = init_device_mesh("cpu", (2, 2, 2), mesh_dim_names=("island", "node", "rank"))
        module = build()
        onefold.shard(module, mesh=mesh["node", "rank"], wire=onefold.Wire(secondary="optimizer"))
        with pytest.raises(onefold.ConfigError, match="replicas"):
            onefold.islands(module, every=2)

    run_ranks(8, body)


def test_a_step_inside_unsharded_is_refused():
    def body(rank):
        found = IslandRank.start(rank, IslandRun((1, 1)))
        with (
            onefold.unsharded(found.module),
            pytest.raises(onefold.StateError, match=r"after optimizer.step\(\)"),
        ):
            found.handle.step()

    run_ranks(2, body)


def test_weights_that_are_not_finite_do_not_reach_other_islands():
    """Every rank of the island raises, also one whose own rows are finite."""

    def body(rank):
        found = IslandRank.start(rank, IslandRun((1, 2), 2, timeout=1.0))
        found.train(found.run.data[:1])
        if rank > 0:
            with torch.no_grad():
                next(found.module.parameters()).to_local().fill_(float("nan" if rank == 1 else 1))
            with pytest.raises(onefold.StateError, match="finite weights"):
                found.handle.step()
            return None
        found.train(found.run.data[1:2])
        assert found.handle.members == (0,)
        return found.weights()

    assert all(weight.isfinite().all() for weight in run_ranks(3, body)[0].values())


@pytest.mark.parametrize(
    ("meeting", "message"),
    [
        ({"address": "nowhere", "island": 0, "islands": 2}, "HOST:PORT"),
        ({"address": "a:1", "island": 2, "islands": 2}, "island from 0"),
        ({"address": "a:1", "island": 0, "islands": 1}, "at least 2"),
    ],
)
def test_a_meeting_that_cannot_be_is_named(meeting, message):
    with pytest.raises(onefold.ConfigError, match=message):
        onefold.islands.Meeting(**meeting)


def test_a_state_of_another_size_is_refused():
    def body(rank):
        found = IslandRank.start(rank, IslandRun((2, 1)))
        state = found.handle.rank_state()
        state["anchors"] = [torch.zeros(3)]
        with pytest.raises(onefold.StateError, match="anchors of shapes"):
            found.handle.resume(state)

    run_ranks(3, body)
