"""Two axes: nodes, and the ranks of each. Where state rests and how it travels changes nothing."""

from __future__ import annotations

from dataclasses import replace
from functools import cache, partial

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.device_mesh import init_device_mesh

import onefold
from onefold import Wire
from onefold.engine.registry import engine_of
from onefold.layout.rows import Layout
from onefold.layout.two_axes import Axes, NodeLayout
from onefold.wire import launcher
from tests.support.models import Model, next_token_loss, token_batches
from tests.support.ranks import run_ranks, seeded
from tests.support.rows import again_but, worlds_in_turn
from tests.support.training import (
    Job,
    Result,
    _step,
    assert_close,
    assert_same_bits,
    run_job,
    train_plain,
)

shape_lists = st.lists(
    st.sampled_from([(), (1,), (0,), (3, 0), (5,), (7, 3), (2, 2, 2), (16, 4)]),
    min_size=1,
    max_size=5,
)


@settings(max_examples=50)
@given(shape_lists, st.integers(2, 3), st.integers(2, 3))
def test_what_places_hold_for_their_node_is_every_element_once(shapes, nodes, local_world_size):
    layout = Layout.build(
        [(str(i), shape) for i, shape in enumerate(shapes)], nodes * local_world_size
    )
    for node in range(nodes):
        for slot in layout.slots:
            if slot.replicated:
                continue
            held = []
            for local_rank in range(local_world_size):
                axes = Axes(nodes, local_world_size, node * local_world_size + local_rank)
                held += [tuple(piece) for piece in axes.between(slot).pieces]
            elements = sorted(e for start, stop in held for e in range(start, stop))
            assert elements == list(range(slot.numel))


@settings(max_examples=50)
@given(shape_lists, st.integers(2, 3), st.integers(2, 3), st.data())
def test_two_hops_lead_to_own_rows(shapes, nodes, local_world_size, data):
    """Inside: each node's rows, cut over places. Between: this place's piece of every node's."""
    layout = Layout.build(
        [(str(i), shape) for i, shape in enumerate(shapes)], nodes * local_world_size
    )
    rank = data.draw(st.integers(0, nodes * local_world_size - 1))
    axes = Axes(nodes, local_world_size, rank)
    kept = NodeLayout.build(layout.slots, axes)
    for index, slot in enumerate(layout.slots):
        if slot.replicated:
            continue
        whole = torch.arange(slot.numel)
        buffer = torch.full((kept.numel,), -1)
        stretches = [(part.pieces[0][0], part.pieces[-1][1]) for part in axes.inside(slot)]
        for part, (first, last), (start, stop) in zip(
            kept.inside()[index], stretches, kept.spans[index], strict=True
        ):
            buffer[start:stop] = whole[first:last][slice(*part.pieces[axes.local_rank])]
        region = buffer[slice(*kept.region(index))]
        own = region[slice(*kept.between()[index][0].pieces[axes.node])]
        assert torch.equal(own, whole[slice(*slot.pieces[rank])])


def train(rank, job, shape, stage):
    """The job on one rank of a mesh of two axes."""
    module = seeded(job.build)
    optimizer = job.optimizer(module.parameters())
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("node", "rank"))
    onefold.shard(module, optimizer, stage=stage, mesh=mesh, **job.options)
    world_size = shape[0] * shape[1]
    losses = []
    for batch in job.batches:
        loss = _step(module, optimizer, job, batch, rank, world_size, True)
        dist.all_reduce(loss)
        losses.append(loss / world_size)
    with onefold.unsharded(module):
        weights = {name: p.detach().clone() for name, p in module.named_parameters()}
    return Result(torch.stack(losses), weights)


def run_axes(job: Job, shape: tuple[int, int], stage: int) -> Result:
    results = run_ranks(shape[0] * shape[1], train, job, shape, stage)
    for other in results[1:]:
        assert_same_bits(other, results[0])
    return results[0]


def job_of(secondary=None, **changes: object) -> Job:
    rows = 24 if changes.get("accumulate", 1) > 1 else 12
    if changes.pop("tied", False):
        build = partial(Model, tied=True)
    else:
        build = Model
    options = {"wire": Wire(secondary=secondary), **changes.pop("options", {})}
    return Job(build, token_batches(rows=rows), next_token_loss, options=options, **changes)


PLACES = [(3, False), (3, "weights"), (3, "gradients"), (3, "optimizer"), (3, None), (2, None),
          (1, None), (2, "optimizer"), (1, "optimizer")]  # fmt: skip


@cache
def on_two_nodes(stage, secondary):
    """What two nodes of two ranks train to."""
    return run_axes(job_of(secondary), (2, 2), stage)


@again_but(
    "3-False-shape0", "3-weights-shape1", "3-gradients-shape1", "2-None-shape0",
    "1-optimizer-shape1",
)  # fmt: skip
@worlds_in_turn
@pytest.mark.parametrize("shape", [(3, 2), (2, 3)])
@pytest.mark.parametrize(("stage", "secondary"), PLACES)
def test_every_placement_agrees_with_one_process(shape, stage, secondary):
    """Two nodes of two ranks do with accumulation, and bit for bit with each other, below."""
    work = job_of(secondary, tied=True, clip=0.1)
    assert_close(run_axes(work, shape, stage), train_plain(work))


@again_but("3-weights", "2-optimizer")
@worlds_in_turn
@pytest.mark.parametrize(("stage", "secondary"), PLACES)
def test_accumulation_agrees_with_one_process(stage, secondary):
    work = job_of(secondary, accumulate=2)
    assert_close(run_axes(work, (2, 2), stage), train_plain(work))


def test_placements_whose_sums_have_one_order_give_the_same_bits():
    runs = [on_two_nodes(*place) for place in PLACES]
    assert_close(runs[0], train_plain(job_of(None)))
    for run in runs[1:]:
        assert_same_bits(run, runs[0])


@pytest.mark.parametrize("how", ["sharing", "wide"])
def test_messages_that_regions_share_change_no_bit(how, request):
    """Neither in messages of few ranks, nor in chunks of one size."""
    apart = [on_two_nodes(*place) for place in PLACES]
    plain = [run_job(job_of(None, options={}), 3, stage) for stage in range(4)]
    request.getfixturevalue(how)
    for (stage, secondary), run in zip(PLACES, apart, strict=True):
        assert_same_bits(run_axes(job_of(secondary), (2, 2), stage), run)
    for stage, run in enumerate(plain):
        assert_same_bits(run_job(job_of(None, options={}), 3, stage), run)


@pytest.mark.parametrize(("local", "axes"), [("1", None), ("2", (2, 2)), ("4", None), ("3", "")])
def test_a_preset_takes_the_hosts_of_the_launcher_for_nodes(local, axes, monkeypatch):
    """A number of processes a host that the world is no multiple of is refused on every rank."""
    ranks_here = int(local)
    place = lambda: (dist.get_rank() % ranks_here, ranks_here)  # threads share an environment
    monkeypatch.setattr(launcher, "local_place", place)

    def body(rank):
        if axes == "":
            with pytest.raises(onefold.ConfigError, match="as many ranks on every host"):
                onefold.shard(seeded(Model), wire="zero++")
            return None
        module = onefold.shard(seeded(Model), wire="zero++")
        hops = engine_of(module).context.routes.reduce_hops
        return None if hops is None else (hops.axes.nodes, hops.axes.local_world_size)

    assert run_ranks(4, body) == [axes or None] * 4


@again_but("shape1")
@pytest.mark.parametrize("shape", [(1, 3), (3, 1)])
def test_a_mesh_with_an_axis_of_one_trains_as_one_axis_does(shape, monkeypatch):
    """Whatever a script for several nodes asks for, and whatever hosts a launcher has started."""
    monkeypatch.setenv("LOCAL_RANK", "0")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "1")
    wire = Wire(weights="int8", gradients="int8")
    wanted = run_job(job_of(options={"wire": wire}), 3, 3)
    for secondary in (None, "weights", "gradients", "optimizer"):
        asked = replace(wire, weights="int8-diff", secondary=secondary)
        assert_same_bits(run_axes(job_of(options={"wire": asked}), shape, 3), wanted)
