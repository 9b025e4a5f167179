"""Which device a rank computes on, as decided beside an accelerator that these tests make up."""

from __future__ import annotations

import pickle
import socket
import warnings
from collections import Counter
from datetime import timedelta
from functools import partial
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.testing._internal.distributed.multi_threaded_pg import ProcessLocalGroup

import onefold
from onefold.layout.units import Owned
from onefold.wire import collectives, devices, ranks
from onefold.wire.collectives import Group
from tests.support.ranks import every_rank, run_processes, run_ranks

ALONE = Group(0, 1, None)


@pytest.fixture
def eight_devices(monkeypatch):
    monkeypatch.setattr(
        torch.accelerator, "current_accelerator", lambda check_available=False: torch.device("cuda")
    )
    monkeypatch.setattr(devices, "_backends", lambda handle: "cpu:gloo")
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: 8)
    monkeypatch.setattr(torch.accelerator, "current_device_index", lambda: 3)


def owned(device):
    module = nn.Linear(2, 2, device=device)
    return [Owned(n, p, [(module, n)]) for n, p in module.named_parameters()]


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_a_module_on_the_cpu_goes_to_the_accelerator_of_its_rank(device, eight_devices):
    assert devices.device_of(owned(device), ALONE) == torch.device("cuda", 3)


def test_without_an_accelerator_it_stays():
    assert devices.device_of(owned("cpu"), ALONE) == torch.device("cpu")


@every_rank(2)
def test_a_group_or_a_mesh_for_cpus_keeps_it_there(rank, eight_devices):
    group = Group.from_handle(dist.group.WORLD)
    assert devices.device_of(owned("cpu"), group) == torch.device("cpu")
    mesh = init_device_mesh("cpu", (2,))
    assert devices.device_of(owned("cpu"), ALONE, mesh) == torch.device("cpu")


def test_a_group_for_both_kinds_moves_it(eight_devices, monkeypatch):
    monkeypatch.setattr(devices, "_backends", lambda handle: "cpu:gloo,cuda:nccl")

    def body(rank):
        group = Group.from_handle(dist.group.WORLD)
        assert devices.device_of(owned("cpu"), group) == torch.device("cuda", 3)

    run_ranks(2, body)


def test_more_ranks_than_devices_is_an_error_that_says_what_to_start(eight_devices, monkeypatch):
    monkeypatch.setenv("LOCAL_RANK", "8")
    with pytest.raises(
        onefold.ConfigError, match=r"at most 8 ranks.*local rank 8 \(LOCAL_RANK[\s\S]*hint"
    ):
        devices.own_device_index()


@every_rank(2)
def test_two_ranks_on_one_device_is_an_error_on_both_that_names_local_rank(rank):
    with pytest.raises(onefold.ConfigError) as caught:
        devices.check_devices(torch.device("cuda", 0), Group.from_handle(dist.group.WORLD))
    assert f"cuda:0 on ranks 0 and 1, both on host {socket.gethostname()!r}" in str(caught.value)
    assert "LOCAL_RANK" in str(caught.value)
    assert "ONEFOLD_SHARE_DEVICES=1" in str(caught.value)


def refusal(rank, device, how):
    """What `check_devices` raises, "" if nothing."""
    with pytest.MonkeyPatch.context() as patch:
        if how == "store":  # as where the backend sends tensors of devices alone
            patch.setattr(Group, "_lacks_cpu", True)
        try:
            devices.check_devices(device(rank), Group.from_handle(dist.group.WORLD))
        except onefold.ConfigError as error:
            return str(error).splitlines()[0]
    return ""


def shared_by_1_and_3(rank):
    return torch.device("cuda", 1 if rank == 3 else rank)


@pytest.mark.parametrize("how", ["threads", "store"])
def test_every_rank_names_both_ranks_that_share_a_device(how):
    run = run_ranks if how == "threads" else run_processes
    run(4, named, how)


def named(rank, how):
    shared = f"cuda:1 on ranks 1 and 3, both on host {socket.gethostname()!r}"
    assert shared in refusal(rank, shared_by_1_and_3, how)
    assert refusal(rank, partial(torch.device, "cuda"), how) == ""


def test_only_rank_0_reads_where_other_ranks_are(monkeypatch):
    """Each rank reads as many texts in a large world as in a small one, in as many messages."""
    read, begun = Counter(), Counter()
    loads, start = pickle.loads, ProcessLocalGroup._start_coll

    def counted(text):
        read[dist.get_rank()] += 1
        return loads(text)

    def started(collective, pg):
        begun[pg._rank] += 1
        return start(collective, pg)

    monkeypatch.setattr(collectives, "pickle", SimpleNamespace(loads=counted, dumps=pickle.dumps))
    monkeypatch.setattr(ProcessLocalGroup, "_start_coll", staticmethod(started))
    found = {}
    for world_size in (3, 12):
        read.clear()
        begun.clear()
        assert run_ranks(world_size, refusal, partial(torch.device, "cuda"), "threads")[0] == ""
        assert read[0] <= world_size + 1
        found[world_size] = {(read[rank], begun[rank]) for rank in range(1, world_size)}
    assert found[3] == found[12]
    assert len(found[3]) == 1


@every_rank(2)
def test_a_rank_whose_module_stayed_on_the_cpu_is_named(rank):
    device = torch.device("cuda", 0) if rank == 0 else torch.device("cpu")
    with pytest.raises(onefold.ConfigError, match="cuda:0 on rank 0 and cpu on rank 1"):
        devices.check_devices(device, Group.from_handle(dist.group.WORLD))


def test_a_lone_rank_hears_once_of_the_devices_it_leaves_idle(eight_devices):
    with pytest.warns(UserWarning, match="1 of 8 cuda devices is used.*--nproc-per-node 8"):
        devices.check_devices(torch.device("cuda", 0), ALONE)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        devices.check_devices(torch.device("cpu"), ALONE)


def test_a_flag_for_tests_lets_ranks_share_a_device(eight_devices, monkeypatch):
    monkeypatch.setenv("ONEFOLD_SHARE_DEVICES", "1")
    monkeypatch.setenv("LOCAL_RANK", "9")
    assert devices.own_device_index() == 1

    def body(rank):
        devices.check_devices(torch.device("cuda", 0), Group.from_handle(dist.group.WORLD))

    run_ranks(3, body)


def test_a_launched_world_is_bound_to_the_device_of_its_rank(monkeypatch):
    """NCCL then connects at once, and reports its errors at the start of the script."""
    started = []
    monkeypatch.setattr(dist, "init_process_group", lambda *_, **options: started.append(options))
    monkeypatch.setattr(ranks, "backends_for", lambda device: "cpu:gloo,cuda:nccl")
    ranks.start_group(torch.device("cuda", 3), timedelta(seconds=9))
    ranks.start_group(torch.device("cpu"), timedelta(seconds=9))
    assert [options["device_id"] for options in started] == [torch.device("cuda", 3), None]


@pytest.mark.parametrize("splits", [False, True])
def test_a_part_of_a_bound_world_does_not_wait_for_ranks_outside(splits, monkeypatch):
    """NCCL would split the world's communicator, in which all ranks take part."""

    class World:
        bound_device_id = torch.device("cuda", 0)

        def _get_backend(self, device):
            return SimpleNamespace(supports_splitting=splits)

    made = []
    monkeypatch.setattr(dist, "get_world_size", lambda: 4)
    monkeypatch.setattr(dist.distributed_c10d._world, "default_pg", World())
    monkeypatch.setattr(dist, "new_group", lambda ranks, **options: made.append(options))
    Group.over([0, 2, 3])
    backend = "gloo" if splits else None
    assert made == [{"backend": backend, "use_local_synchronization": True}]
