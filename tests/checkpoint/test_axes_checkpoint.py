"""Checkpoints on meshes of two axes: from any placement to any other, and between micro-batches."""

from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import onefold
from onefold import Wire
from onefold.checkpoint.safetensors import OffsetWriter
from onefold.wire_config import PRESETS
from tests.support.models import Model, next_token_loss, token_batches
from tests.support.ranks import run_ranks, seeded
from tests.support.rows import again_but, worlds_in_turn

BATCHES = token_batches(4)
PLACES = [(3, "weights"), (3, "gradients"), (3, "optimizer"), (2, None), (1, "optimizer")]


def start(shape, stage, wire, **options):
    """A module and its optimizer on this rank; `shape` None is one axis."""
    module = seeded(lambda: Model(2, tied=True))
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-2)
    mesh = init_device_mesh("cpu", shape) if shape else None
    onefold.shard(module, optimizer, stage=stage, mesh=mesh, wire=wire, **options)
    return module, optimizer


def step(rank, world, module, optimizer, micros, between=lambda: None, first=0):
    for index, micro in enumerate(micros[first:], first):
        waits = index + 1 < len(micros)
        with onefold.accumulate(module) if waits else nullcontext():
            (next_token_loss(module, micro.chunk(world)[rank]) / len(micros)).backward()
        if waits:
            between()
    optimizer.step()
    optimizer.zero_grad()


def whole_weights(module):
    with onefold.unsharded(module):
        return {name: p.detach().clone() for name, p in module.named_parameters()}


def same(got, wanted):
    for name, value in wanted.items():
        assert torch.equal(got[name], value), name


def close(got, wanted, within=1e-5):
    for name, value in wanted.items():
        torch.testing.assert_close(got[name], value, rtol=0, atol=within, msg=name)


@again_but("3-weights", "1-optimizer")
@worlds_in_turn
@pytest.mark.parametrize(("stage", "secondary"), PLACES)
def test_a_run_goes_on_from_any_placement_in_any_other(stage, secondary, tmp_path):
    """Bit for bit on the same mesh; on one axis, which sums in another order, to 1e-5.

    In itself and in the next two of the others: a load knows nothing of the save but its cuts.
    """

    def save(rank):
        module, optimizer = start((2, 2), stage, Wire(secondary=secondary))
        for batch in BATCHES[:2]:
            step(rank, 4, module, optimizer, [batch])
        onefold.save(tmp_path / "c", module, optimizer, extra={"at": 2})
        for batch in BATCHES[2:]:
            step(rank, 4, module, optimizer, [batch])
        return whole_weights(module)

    def resume(rank, shape, stage, secondary):
        module, optimizer = start(shape, stage, Wire(secondary=secondary))
        step(rank, 4, module, optimizer, [BATCHES[0]])
        assert onefold.load(tmp_path / "c", module, optimizer) == {"at": 2}
        for batch in BATCHES[2:]:
            step(rank, 4, module, optimizer, [batch])
        return whole_weights(module)

    wanted = run_ranks(4, save)[0]
    at = PLACES.index((stage, secondary))
    for other_stage, other in (PLACES * 2)[at : at + 3]:
        for got in run_ranks(4, resume, (2, 2), other_stage, other):
            same(got, wanted)
    if stage < 3 or secondary == "weights":
        close(run_ranks(4, resume, None, 3, None)[0], wanted)


@again_but("shape3-2-None", "shape5-3-gradients", "shape6-1-optimizer")
@worlds_in_turn
@pytest.mark.parametrize(
    ("shape", "stage", "secondary"),
    [((2, 2), *place) for place in PLACES] + [((3, 2), 3, "gradients"), ((3, 2), 1, "optimizer")],
)
def test_saving_between_micro_batches_changes_nothing(shape, stage, secondary, tmp_path):
    world = shape[0] * shape[1]
    batches = [batch.chunk(3) for batch in token_batches(3, rows=world * 3)]

    def run(rank, saves):
        module, optimizer = start(shape, stage, Wire(secondary=secondary))
        numbers = iter(range(9))

        def between():
            if saves:
                onefold.save(tmp_path / f"c{next(numbers)}", module, optimizer)

        for batch in batches:
            is_second = batch is batches[1]
            step(rank, world, module, optimizer, batch, between if is_second else lambda: None)
        return whole_weights(module)

    def resume(rank, other, stage, secondary):
        module, optimizer = start(other, stage, Wire(secondary=secondary))
        onefold.load(tmp_path / "c0", module, optimizer)
        step(rank, world, module, optimizer, batches[1], first=1)
        step(rank, world, module, optimizer, batches[2])
        return whole_weights(module)

    wanted = run_ranks(world, run, False)[0]
    for got in run_ranks(world, run, True):
        close(got, wanted)
    elsewhere = {"weights": [(shape, 3, "gradients")], "optimizer": [(None, 2, None)]}
    for place in [(shape, stage, secondary), *elsewhere.get(secondary, [])]:
        for got in run_ranks(world, resume, *place):
            close(got, wanted)


@again_but("3")
@pytest.mark.parametrize("stage", [2, 3])
def test_a_replica_that_differences_go_to_begins_anew_with_what_is_loaded(stage, tmp_path):
    """The first message after a load is exact, so outputs are those of an exact wire."""

    def body(rank):
        module, optimizer = start((2, 2), stage, PRESETS["zero++diff"])
        for batch in BATCHES[:2]:
            step(rank, 4, module, optimizer, [batch])
        onefold.save(tmp_path / "c", module, optimizer)
        onefold.save_pretrained(module, tmp_path / "p")
        wanted = whole_weights(module)
        for load in (
            lambda: onefold.load(tmp_path / "c", module, optimizer),
            lambda: onefold.load_pretrained(module, tmp_path / "p"),
        ):
            step(rank, 4, module, optimizer, [BATCHES[2]])
            load()
            same(whole_weights(module), wanted)
            exact, _ = start((2, 2), stage, None)
            onefold.load_pretrained(exact, tmp_path / "p")
            with torch.no_grad():
                assert torch.equal(module(BATCHES[3]), exact(BATCHES[3]))

    run_ranks(4, body)


class WithBuffer(nn.Module):
    def __init__(self):
        super().__init__()
        self.lines = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))
        self.register_buffer("seen", torch.zeros(3))


@pytest.mark.parametrize("secondary", ["optimizer", "gradients"])
def test_every_byte_of_pretrained_weights_is_written_by_one_rank(secondary, tmp_path, monkeypatch):
    """Nodes that are replicas hold all of them, and buffers of their own."""
    written = []
    write = OffsetWriter.write_at

    def noting(writer, name, start, data):
        if len(data):
            written.append((name, start))
        write(writer, name, start, data)

    monkeypatch.setattr(OffsetWriter, "write_at", noting)

    def body(rank):
        module = seeded(WithBuffer)
        onefold.shard(module, mesh=init_device_mesh("cpu", (2, 2)), wire=Wire(secondary=secondary))
        module.seen.fill_(rank)
        wanted = whole_weights(module)
        onefold.save_pretrained(module, tmp_path / "p")
        onefold.load_pretrained(module, tmp_path / "p")
        same(whole_weights(module), wanted)
        assert module.seen.tolist() == [0, 0, 0]

    run_ranks(4, body)
    assert len(written) == len(set(written))
