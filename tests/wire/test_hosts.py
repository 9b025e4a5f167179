"""Several hosts of accelerators: gradients cross between them once, without being asked."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import onefold
from onefold.compose import resolve
from onefold.config import stage_of
from onefold.engine.registry import engine_of
from onefold.planner.memory import forecast
from onefold.planner.trace import trace
from onefold.recipe import Recipe
from onefold.wire import launcher
from tests.support.models import Model, next_token_loss, token_batches
from tests.support.ranks import run_ranks, seeded
from tests.support.rows import again_but
from tests.support.training import Job, assert_close, assert_same_bits, run_job, train_plain


@pytest.fixture
def hosts(monkeypatch):
    """Threads are ranks of hosts with so many ranks, whose device sends messages itself."""

    def start(local):
        place = lambda: (dist.get_rank() % local, local)
        monkeypatch.setattr(launcher, "local_place", place)
        monkeypatch.setattr(resolve, "sends_itself", lambda ranks, device: True)

    return start


def job_of(**changes):
    rows = 24 if changes.get("accumulate", 1) > 1 else 12
    return Job(Model, token_batches(rows=rows), next_token_loss, **changes)


@again_but("6-3")
@pytest.mark.parametrize(("world", "local"), [(4, 2), (6, 3)])
def test_all_stages_have_the_same_bits_over_hosts(hosts, world, local):
    hosts(local)
    job = job_of()
    runs = [run_job(job, world, stage) for stage in (0, 1, 3)]
    assert_close(runs[0], train_plain(job))
    for run in runs[1:]:
        assert_same_bits(run, runs[0])


@again_but("0", "3")
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_micro_batches_agree_with_one_process(hosts, stage):
    hosts(2)
    job = job_of(accumulate=2)
    assert_close(run_job(job, 4, stage), train_plain(job))


class Stacked(nn.Module):
    """A weight that is cut along its second dimension: a slab for each row of the first one."""

    def __init__(self):
        super().__init__()
        self.up = nn.Parameter(torch.randn(4, 96, 64) / 8)
        self.narrow = nn.Parameter(torch.randn(64, 1))
        self.scale = nn.Parameter(torch.tensor(1.0))
        self.unused = nn.Parameter(torch.ones(3))

    def forward(self, x, *, with_all=False):
        out = torch.einsum("td,ehd->teh", x, self.up) * self.scale + (x @ self.narrow)[:, None]
        return out + self.unused.sum() if with_all else out


def stacked(rank, stage, mesh=False):
    module = seeded(Stacked)
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-2)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),)) if mesh else None
    onefold.shard(module, optimizer, stage=stage, mesh=mesh)
    for step in range(3):  # in the second step one rank, of the last host, uses all
        x = torch.ones(4, 64) * (rank + 1)
        is_last = rank == dist.get_world_size() - 1
        module(x, with_all=step == 1 and is_last).square().mean().backward()
        assert (module.unused.grad is None) == (step != 1), step
        optimizer.step()
        optimizer.zero_grad()
    report = onefold.report(module)
    with onefold.unsharded(module):
        weights = {name: p.detach().clone() for name, p in module.named_parameters()}
    return weights, report, engine_of(module).recipe


@again_but("6")
@pytest.mark.parametrize("world", [4, 6])
def test_slabs_and_parameters_of_few_ranks_cross_between_hosts(hosts, world):
    hosts(2)
    runs = {stage: run_ranks(world, stacked, stage) for stage in (0, 1, 3)}
    first = runs[0][0][0]
    for results in runs.values():
        for weights, *_ in results:
            for name, weight in weights.items():
                assert torch.equal(weight, first[name]), name


@again_but("3")
@pytest.mark.parametrize("stage", [0, 1, 3])
def test_bytes_between_hosts_are_those_of_a_ring_and_of_the_plan(hosts, stage):
    """A ring over all ranks sends (N-1)/N of the gradients over each host's link."""
    hosts(3)
    results = run_ranks(6, stacked, stage, True)
    _, report, recipe = results[0]
    assert recipe.has_hosts
    nbytes = 4 * sum(p.numel() for p in Stacked().parameters())
    sent = [report.last_step["reduce_scatter between"].sent_nbytes for _, report, _ in results]
    for host in (sent[:3], sent[3:]):
        assert sum(host) <= 1.05 * nbytes * 5 / 6
    wanted = Recipe(stage=stage_of(stage), world_size=6, local_world_size=3, has_hosts=True)
    seen = trace(
        Stacked(), (torch.ones(4, 64),), precision=wanted.precision,
        loss=lambda out: out.square().mean(),
    )  # fmt: skip
    found = forecast(seen, wanted)
    counted = {k: t.sent_nbytes for k, t in report.last_step.items() if k != "control"}
    assert {k: n for k, n in counted.items() if n} == found.sent
    assert report.differing() == {}, report.verdict


@pytest.mark.parametrize(("local", "world"), [(1, 4), (4, 4), (3, 4)])
def test_one_host_or_uneven_ones_send_each_rank_its_part(hosts, local, world):
    hosts(local)
    _, report, recipe = run_ranks(world, stacked, 3)[0]
    assert not recipe.has_hosts
    assert "reduce_scatter" in report.last_step


def test_messages_by_way_of_the_cpu_take_one_hop(monkeypatch):
    monkeypatch.setattr(launcher, "local_place", lambda: (dist.get_rank() % 2, 2))
    _, _, recipe = run_ranks(4, stacked, 3)[0]
    assert not recipe.has_hosts
