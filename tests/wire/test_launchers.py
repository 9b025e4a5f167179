"""Ranks of any launcher train together, and none of them trains alone in silence."""

from __future__ import annotations

import os
import socket
import warnings
from functools import partial

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn

import onefold
from onefold.engine.registry import engine_of
from onefold.wire import devices, launcher
from onefold.wire.collectives import Group
from onefold.wire.ranks import local_place
from tests.support.forking import await_ended_threads
from tests.support.models import Model, next_token_loss, token_batches
from tests.support.ports import free_port
from tests.support.ranks import run_ranks, seeded
from tests.support.rows import again_but
from tests.support.training import Job, train_plain, train_sharded

SOUND = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29400"}
LOCAL = ("LOCAL_RANK", "LOCAL_WORLD_SIZE")
STARTERS = [name for rank, names in launcher._STARTERS.items() for name in (rank, *names)]


@pytest.fixture
def environment(monkeypatch):
    def be(**variables):
        for name in (*launcher.NAMES, *LOCAL, *STARTERS):
            monkeypatch.delenv(name, raising=False)
        for name, value in variables.items():
            monkeypatch.setenv(name, value)

    be()
    return be


# joining

STARTED_BY = {  # what each sets for rank R of N beside the four names
    "a wrapper around srun": {
        "SLURM_PROCID": "R",
        "SLURM_LOCALID": "R",
        "SLURM_STEP_NUM_TASKS": "N",
    },
    "a wrapper around mpirun": {"OMPI_COMM_WORLD_RANK": "R", "OMPI_COMM_WORLD_LOCAL_RANK": "R"},
    "PyTorchJob": {},
    "accelerate launch": {"LOCAL_RANK": "R", "LOCAL_WORLD_SIZE": "N"},
}
JOB = Job(partial(Model, tied=True), token_batches(), next_token_loss)


def _train_as_launched(rank, world_size, port, starter, folder):
    names = {
        "RANK": rank,
        "WORLD_SIZE": world_size,
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": port,
    }
    more = {
        name: {"R": rank, "N": world_size}[value] for name, value in STARTED_BY[starter].items()
    }
    os.environ.update({name: str(value) for name, value in {**names, **more}.items()})
    result = train_sharded(rank, JOB, world_size, 3)
    assert (dist.get_rank(), dist.get_world_size()) == (rank, world_size)
    torch.save(result.losses, f"{folder}/{rank}")


@again_but("a wrapper around srun-2", "a wrapper around mpirun-3", "accelerate launch-2")
@pytest.mark.process
@pytest.mark.parametrize(
    ("starter", "world_size"), list(zip(STARTED_BY, (2, 3, 2, 2), strict=True))
)
def test_ranks_of_any_launcher_train_one_model_without_another_line(
    starter, world_size, environment, tmp_path
):
    await_ended_threads()
    arguments = world_size, free_port(), starter, str(tmp_path)
    mp.start_processes(_train_as_launched, arguments, nprocs=world_size, start_method="fork")
    wanted = train_plain(JOB).losses
    for rank in range(world_size):
        torch.testing.assert_close(torch.load(tmp_path / str(rank)), wanted, rtol=1e-5, atol=1e-6)


@pytest.mark.process
def test_ranks_that_a_notebook_starts_by_accelerate_train_one_model(environment, tmp_path):
    """On CPUs; its launcher for GPUs, `notebook_launcher`, sets the variables of torchrun."""
    accelerate = pytest.importorskip("accelerate")
    await_ended_threads()

    def work():
        result = train_sharded(dist.get_rank(), JOB, 2, 3)
        torch.save(result.losses, tmp_path / str(dist.get_rank()))

    accelerate.debug_launcher(work, num_processes=2)
    wanted = train_plain(JOB).losses
    for rank in range(2):
        torch.testing.assert_close(torch.load(tmp_path / str(rank)), wanted, rtol=1e-5, atol=1e-6)


CALLS = {
    "shard": lambda: onefold.shard(nn.Linear(4, 4)),
    "stream": lambda: onefold.stream(nn.Linear(4, 4), budget=1 << 20),
    "weigh": lambda: onefold.weigh(torch.ones(()), 4),
    "RowSampler": lambda: onefold.mixed.RowSampler(8, 4),
}


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("missing", [("RANK",), ("MASTER_ADDR", "MASTER_PORT")])
def test_a_launcher_that_leaves_something_out_is_an_error_that_names_it(call, missing, environment):
    environment(**{name: value for name, value in SOUND.items() if name not in missing})
    with pytest.raises(onefold.ConfigError) as caught:
        CALLS[call]()
    message, _, hint = str(caught.value).partition("\nhint:")
    assert message.endswith(f"got no {', '.join(missing)}")
    assert ", ".join(missing) in hint
    assert "unset WORLD_SIZE, pass mesh= a group of this rank alone" in hint
    assert not dist.is_initialized()


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("WORLD_SIZE", "two"), ("WORLD_SIZE", "0"), ("WORLD_SIZE", "-2"), ("RANK", "2"),
        ("RANK", "-1"), ("RANK", "%t"), ("MASTER_PORT", "tcp:80"), ("MASTER_PORT", "65536"),
    ],
)  # fmt: skip
def test_a_malformed_variable_of_a_launcher_is_an_error_that_names_it(name, value, environment):
    environment(**{**SOUND, name: value})
    with pytest.raises(onefold.ConfigError, match=rf"{name} to be[^\n]*got {value!r}\nhint:"):
        CALLS["shard"]()


@pytest.mark.parametrize("world_size", [None, "", "1"])
def test_a_world_of_one_needs_nothing_else(world_size, environment):
    environment(**({} if world_size is None else {"WORLD_SIZE": world_size}))
    assert onefold.report(CALLS["shard"]()).world_size == 1
    assert not dist.is_initialized()


def test_ranks_that_do_not_come_are_an_error_that_says_how_to_train_alone(environment):
    environment(**{**SOUND, "RANK": "0", "MASTER_PORT": str(free_port())})
    with pytest.raises(
        onefold.WireError, match=r"rank 0 to meet the other ranks, 2 in all"
    ) as caught:
        onefold.shard(nn.Linear(4, 4), timeout=1)
    assert "unset WORLD_SIZE" in str(caught.value).rpartition("hint:")[2]


def test_the_call_that_hints_name_trains_one_process_alone(environment):
    environment(**SOUND)
    _, _, call = launcher.ALONE.partition("first call ")
    exec(call, {"torch": torch})
    try:
        assert onefold.report(CALLS["shard"]()).world_size == 1
        module = onefold.shard(nn.Linear(4, 4), mesh=dist.group.WORLD)
        assert onefold.report(module).world_size == 1
    finally:
        dist.destroy_process_group()


def test_a_group_of_one_trains_alone_within_a_larger_world(environment):
    environment(**SOUND)

    def body(rank):
        groups = [dist.new_group([other]) for other in range(3)]
        module = onefold.shard(nn.Linear(4, 4), mesh=groups[rank])
        return onefold.report(module).world_size

    assert run_ranks(3, body) == [1, 1, 1]


@pytest.mark.parametrize(("rank", "names"), launcher._STARTERS.items())
def test_a_process_that_mpirun_or_srun_started_beside_others_hears_that_it_trains_alone(
    rank, names, environment
):
    environment(**{rank: "0", names[0]: "2"})
    with pytest.warns(UserWarning, match=rf"trains alone, though {names[0]}=2.*{rank}"):
        CALLS["shard"]()
    environment(**{rank: "0", names[0]: "1"})
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        CALLS["shard"]()


# the device of a rank


@pytest.mark.parametrize(
    ("variables", "index"),
    [
        ({}, 0),
        ({"RANK": "5", "LOCAL_RANK": "1"}, 1),
        ({"RANK": "5"}, 1),  # host by host, one rank for each device
        ({"RANK": "5", "SLURM_PROCID": "5", "SLURM_LOCALID": "2"}, 2),
        ({"RANK": "5", "OMPI_COMM_WORLD_RANK": "5", "OMPI_COMM_WORLD_LOCAL_RANK": "3"}, 3),
        ({"RANK": "5", "PMI_RANK": "5", "MPI_LOCALRANKID": "0"}, 0),
        ({"RANK": "5", "SLURM_PROCID": "1", "SLURM_LOCALID": "0"}, 1),  # a task of several ranks
        ({"RANK": "5", "LOCAL_RANK": "3", "SLURM_PROCID": "5", "SLURM_LOCALID": "2"}, 3),
    ],
)
def test_a_rank_takes_the_device_of_its_number_on_the_host(
    variables, index, environment, monkeypatch
):
    environment(**variables)
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: 4)
    assert devices.own_device_index() == index


# hosts


def test_without_local_world_size_hosts_are_told_apart_by_name(environment, monkeypatch):
    environment()
    monkeypatch.setattr(socket, "gethostname", lambda: f"host-{dist.get_rank() // 2}")

    def body(rank):
        module = onefold.shard(seeded(Model), wire="zero++")
        axes = engine_of(module).context.routes.reduce_hops.axes
        return axes.nodes, axes.local_world_size, local_place(engine_of(module).context.everyone)

    assert run_ranks(4, body) == [(2, 2, (rank % 2, 2)) for rank in range(4)]


@pytest.mark.parametrize("hosts", ["abab", "aabc", "aaab"])
def test_hosts_that_take_turns_or_differ_in_ranks_are_refused_on_every_rank_of_two_hops(
    hosts, environment, monkeypatch
):
    environment()
    monkeypatch.setattr(socket, "gethostname", lambda: hosts[dist.get_rank()])

    def body(rank):
        onefold.shard(seeded(Model), stage=3)  # one hop needs no order
        with pytest.raises(
            onefold.ConfigError, match=r"as many ranks on every host, host after host"
        ):
            onefold.shard(seeded(Model), wire="zero++")

    run_ranks(4, body)


def test_a_launcher_that_says_more_than_names_of_hosts_is_believed(environment, monkeypatch):
    """Containers of one machine may share its name."""
    environment()
    monkeypatch.setattr(launcher, "local_place", lambda: (dist.get_rank() % 2, 2))

    def body(rank):
        module = onefold.shard(nn.Linear(4, 4))
        return local_place(engine_of(module).context.everyone)

    assert run_ranks(4, body) == [(0, 2), (1, 2)] * 2


def test_ranks_that_have_not_met_are_taken_for_ranks_of_one_host(environment):
    assert run_ranks(3, lambda rank: local_place(Group.from_handle(dist.group.WORLD))) == [
        (0, 3), (1, 3), (2, 3),
    ]  # fmt: skip
