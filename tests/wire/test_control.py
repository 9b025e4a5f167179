"""What ranks say to one another outside of steps: where all say the same, nothing grows."""

from __future__ import annotations

from collections import Counter
from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.testing._internal.distributed.multi_threaded_pg import ProcessLocalGroup

import onefold
from onefold.errors import StateError, WireError
from onefold.wire.collectives import Group
from onefold.wire.ranks import find_and_meet
from onefold.wire.together import collect, first
from tests.support.ranks import run_processes, run_ranks, seeded
from tests.support.rows import again_but


@pytest.fixture
def begun(monkeypatch):
    """Collectives that each rank began."""
    calls = Counter()
    start = ProcessLocalGroup._start_coll

    def counted(collective, pg):
        calls[pg._rank] += 1
        return start(collective, pg)

    monkeypatch.setattr(ProcessLocalGroup, "_start_coll", staticmethod(counted))
    return calls


def world():
    return Group.from_handle(dist.group.WORLD)


def said(rank, value_of, what):
    return what(world(), value_of(rank))


@pytest.mark.parametrize("world_size", [2, 3, 5])
def test_values_travel_only_where_they_differ(world_size, begun):
    calls = begun
    same = run_ranks(world_size, said, lambda _: {"a": [1, "b"]}, Group.gather)
    assert same == [[{"a": [1, "b"]}] * world_size] * world_size
    assert set(calls.values()) == {1}
    calls.clear()
    other = run_ranks(world_size, said, lambda rank: "x" * rank, Group.gather)
    assert other == [["x" * rank for rank in range(world_size)]] * world_size
    assert set(calls.values()) == {2}


def tell(rank, world_size, how):
    """Every way to say something, three times: texts before are deleted."""
    values = [[each, "é" * each] for each in range(world_size)]
    with pytest.MonkeyPatch.context() as patch:
        if how == "store":
            patch.setattr(Group, "_lacks_cpu", True)
        group = find_and_meet(None).everyone if how == "lanes" else world()
        for _ in range(3):
            assert group.gather(values[rank]) == values
            assert group.gather_at_first(values[rank]) == (values if rank == 0 else [])
            assert group.take_first(values[rank]) == values[0]
            assert group.total(rank) == sum(range(world_size))


@pytest.mark.parametrize("how", ["threads", "lanes", "store"])
@pytest.mark.parametrize("world_size", [2, 3])
def test_every_way_to_say_something_reaches_whom_it_should(world_size, how):
    """Also in groups whose backend sends tensors of devices alone: texts go by the store."""
    run = run_ranks if how == "threads" else run_processes
    run(world_size, tell, world_size, how)


def test_an_error_of_rank_0_alone_is_raised_on_all_and_one_of_others_is_its_own():
    def body(rank):
        with pytest.raises(StateError, match="on purpose"):
            first(world(), partial(fail, StateError("on purpose")))
        with pytest.raises((ZeroDivisionError, WireError)) as raised:
            collect(world(), lambda: 1 / (rank - 1))
        return type(raised.value)

    assert run_ranks(3, body) == [WireError, ZeroDivisionError, WireError]


def fail(error):
    raise error


def used(rank, folder):
    """A model sharded, trained, saved and loaded."""
    module = seeded(lambda: nn.Sequential(nn.Linear(8, 512), nn.Linear(512, 3)))
    optimizer = torch.optim.AdamW(module.parameters())
    onefold.shard(module, optimizer, stage=3, units=[module])
    module(torch.full((2, 8), float(rank))).sum().backward()
    optimizer.step()
    onefold.save(folder, module, optimizer)
    onefold.load(folder, module, optimizer)
    return module[0].weight.shape


@again_but("24")
@pytest.mark.parametrize("most", [24, 256])
def test_shard_save_and_load_begin_as_many_messages_on_many_ranks_as_on_17(most, begun, tmp_path):
    calls, found = begun, {}
    for world_size in (17, most):
        calls.clear()
        run_ranks(world_size, used, tmp_path / str(world_size))
        assert len(set(calls.values())) == 1
        found[world_size] = calls[0]
    assert found[17] == found[most]
