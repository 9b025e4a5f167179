"""A plan counts the communicators that a run has: one a distinct set of ranks."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import parallelize_module

import onefold
from onefold.compose import resolve
from onefold.engine.registry import engine_of
from onefold.fit.communicators import OF_MORE, OF_TWO, communicator_sizes, planned_sizes
from onefold.planner.clusters import Cluster
from onefold.planner.planning import plan
from onefold.wire import launcher, ranks
from tests.axes import test_tensor_parallel as tensors
from tests.support import experts, pipelines
from tests.support.ranks import run_ranks, seeded


def made(**options):
    """Two modules, sharded one after the other."""
    modules = []
    for _ in range(2):
        module = seeded(lambda: nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)))
        modules.append(onefold.shard(module, torch.optim.AdamW(module.parameters()), **options))
    return modules


def checked(modules, **axes):
    """The ranks of each communicator of an engine, as its recipe predicts them."""
    found = [communicator_sizes(engine_of(module)) for module in modules]
    for module, sizes in zip(modules, found, strict=True):
        assert planned_sizes(engine_of(module).recipe, axes) == sizes
    world = dist.distributed_c10d._world
    groups = Counter(tuple(sorted(world.pg_group_ranks[handle])) for handle in world.pg_map)
    assert set(groups.values()) == {1}, f"several groups of the same ranks: {groups}"
    return found[0]


def on_one_axis(rank, stage):
    return checked(made(stage=stage))


@pytest.mark.parametrize(("world_size", "stage"), [(1, 3), (2, 3), (3, 0), (4, 1)])
def test_ranks_of_one_axis_have_one(world_size, stage):
    sizes = [world_size] * (world_size > 1)
    assert run_ranks(world_size, on_one_axis, stage) == [sizes] * world_size


@pytest.fixture
def hosts_of_2(monkeypatch):
    """Threads are ranks of hosts of two, whose device sends messages itself."""
    monkeypatch.setattr(launcher, "local_place", lambda: (dist.get_rank() % 2, 2))
    monkeypatch.setattr(resolve, "sends_itself", lambda ranks, device: True)


@pytest.mark.parametrize("splits", [False, True])
@pytest.mark.parametrize("options", [{}, {"wire": "zero++"}, {"wire": "replicas"}, {"stage": 0}])
def test_hosts_have_two_more_however_often_a_script_shards(
    options, splits, hosts_of_2, monkeypatch
):
    monkeypatch.setattr(ranks, "splits_world", lambda: splits)
    assert run_ranks(4, lambda rank: checked(made(**options))) == [[2, 2, 4]] * 4


def test_a_rank_makes_two_groups_for_hosts_however_many_there_are(hosts_of_2, monkeypatch):
    calls, make = Counter(), dist.new_group

    def counted(*args, **options):
        calls[dist.get_rank()] += 1
        return make(*args, **options)

    monkeypatch.setattr(dist, "new_group", counted)
    for world_size in (4, 8):
        calls.clear()
        run_ranks(world_size, lambda rank: made())
        assert calls == dict.fromkeys(range(world_size), 2)


@pytest.mark.parametrize(("stage", "sizes"), [(0, [4]), (1, [2, 2, 4]), (3, [2, 2, 4])])
def test_a_mesh_of_two_axes_counts_the_groups_that_the_stage_uses(stage, sizes):
    def body(rank):
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("node", "rank"))
        return checked(made(mesh=mesh, stage=stage, wire="hybrid" if stage else "exact"))

    assert run_ranks(4, body) == [sizes] * 4


@pytest.mark.parametrize(
    ("shape", "sizes"),
    [
        ((1, 2, 2), [2, 2, 4]),
        ((2, 1, 2), [2, 4]),
        ((1, 3, 1), [3]),
        ((1, 1, 3), [3]),
        ((2, 2, 2), [2, 2, 4, 8]),
    ],
)
def test_tensor_parallel_ranks_share_one_group_of_all_holders(shape, sizes):
    """Also where stages of a pipeline shard in turn: the group of dp x tp was made each time."""

    def body(rank):
        mesh = init_device_mesh("cpu", shape, mesh_dim_names=("pp", "dp", "tp"))
        modules = []
        for _ in range(2):
            module = tensors.made()
            parallelize_module(module, mesh["tp"], tensors.plan())
            optimizer = torch.optim.AdamW(module.parameters())
            modules.append(onefold.shard(module, optimizer, mesh=mesh["dp"], stage=3))
        found = [communicator_sizes(engine_of(module)) for module in modules]
        groups = dist.distributed_c10d._world.pg_group_ranks
        return found, Counter(tuple(sorted(each)) for each in groups.values() if len(each) > 1)

    for found, groups in run_ranks(shape[0] * shape[1] * shape[2], body):
        assert found == [sizes, sizes]
        assert set(groups.values()) == {1}


@pytest.mark.parametrize("kind", ["1F1B", "Interleaved1F1B"])
@pytest.mark.parametrize(("shape", "sizes"), [((2, 2), [2, 2, 4]), ((3, 1), [3]), ((2, 1), [2])])
def test_a_pipeline_has_one_more(kind, shape, sizes):
    def body(rank):
        mesh = pipelines.mesh_of(*shape)
        pipe = pipelines.Pipe(kind, 3, mesh, model=pipelines.blocks(layers=6))
        return checked([*pipe.modules.values()], pp=shape[0])

    assert run_ranks(shape[0] * shape[1], body) == [sizes] * (shape[0] * shape[1])


@pytest.mark.parametrize(("shape", "sizes"), [((2, 2), [2, 2, 4]), ((1, 3), [3]), ((1, 2), [2])])
def test_experts_have_their_axis_and_that_of_their_copies(shape, sizes):
    def body(rank):
        return checked([experts.sharded(experts.Axis(*shape))[0]], ep=shape[1])

    assert run_ranks(shape[0] * shape[1], body) == [sizes] * (shape[0] * shape[1])


@pytest.mark.parametrize(
    ("nodes", "axes", "sizes"),
    [(1, {}, [4]), (2, {}, [2, 2, 4]), (1, {"tp": 2}, [2, 2, 4]), (1, {"pp": 2}, [2, 2, 4]),
     (1, {"cp": 2}, [2, 4]), (1, {"tp": 2, "cp": 2}, [2, 2, 4])],
)  # fmt: skip
def test_a_plan_for_gpus_says_how_many_and_about_how_many_bytes(nodes, axes, sizes):
    cluster = Cluster(ranks=4 // nodes, nodes=nodes, memory="1GiB")
    planned = plan("tiny", cluster=cluster, axes=axes, seq=32, stage=3, offload=None)
    assert planned.best.communicators == sizes
    nbytes = sizes.count(2) * OF_TWO + (len(sizes) - sizes.count(2)) * OF_MORE
    row = planned.best.as_dict()
    assert (row["communicators"], row["communicator_nbytes"]) == (len(sizes), nbytes)
    assert f"communicators: {len(sizes)} a rank, about" in str(planned)


def test_a_plan_warns_where_communicators_may_not_fit_into_what_is_free():
    ample, tight = (
        str(plan("tiny", cluster=Cluster(ranks=4, memory=memory), seq=32, stage=3, offload=None))
        for memory in ("1GiB", "512MiB")
    )
    assert "are free" not in ample
    assert "MiB are free" in tight.replace("\n", " ")


def test_a_plan_for_cpu_ranks_and_for_one_gpu_names_none():
    for cluster in (Cluster(ranks=4, device_type="cpu", memory="1GiB"), Cluster(memory="1GiB")):
        planned = plan("tiny", cluster=cluster, seq=32, stage=3, offload=None)
        assert planned.best.communicators == []
        assert "communicator" not in str(planned)
