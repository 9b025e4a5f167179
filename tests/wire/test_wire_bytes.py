"""Bytes on two axes and quantized wires: what is sent between and inside nodes, and held."""

from __future__ import annotations

import gc
import weakref
from contextlib import nullcontext
from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import onefold
from onefold import Wire
from onefold.engine.registry import engine_of
from onefold.layout.ledger import Usage
from onefold.layout.message_plan import ALIGN_NBYTES
from onefold.layout.rows import round_up
from onefold.wire.codec import codec_of
from onefold.wire_config import PRESETS
from tests.support.ranks import run_ranks, seeded
from tests.support.rows import again_but, worlds_in_turn

WIDTH, LAYERS = 128, 4
MATRIX, VECTOR = WIDTH * WIDTH, WIDTH
NUMEL = LAYERS * (MATRIX + VECTOR)
SHAPES = [(2, 2), (4, 2), (2, 4)]


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS))

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x


def train(rank, shape, stage, wire, micros, precision=None):
    """Two steps; the report afterwards, and what the ledger holds once the module is gone."""
    module = seeded(Net)
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-3)
    mesh, units = init_device_mesh("cpu", shape), list(module.layers)
    onefold.shard(
        module, optimizer, stage=stage, mesh=mesh, wire=wire, precision=precision, units=units
    )
    del units
    for _ in range(2):
        for micro in range(micros):
            with onefold.accumulate(module) if micro + 1 < micros else nullcontext():
                module(torch.ones(2, WIDTH)).float().square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    report, ledger, alive = onefold.report(module), engine_of(module).ledger, weakref.ref(module)
    del module, optimizer
    gc.collect()
    left = {kind: u.now for (kind, _), u in ledger.usage.items() if kind != "optimizer" and u.now}
    assert alive() is None
    assert left == {}
    return report


def sent(report):
    return {name: now.sent_nbytes for name, now in report.last_step.items() if name != "control"}


SECONDARIES = [False, "weights", "gradients", "optimizer", None]


@again_but("shape0-gradients", "shape1-False", "shape1-optimizer", "shape2-weights", "shape2-None")
@pytest.mark.parametrize("secondary", SECONDARIES)
@pytest.mark.parametrize("shape", SHAPES)
def test_stage_3_sends_between_nodes_what_its_placement_says(shape, secondary):
    """Own rows to every other node, once a step or a use; inside, twice a micro-batch.

    Micro-batches and precision change from case to case, so that any two choices meet.
    """
    case = SHAPES.index(shape) + SECONDARIES.index(secondary)
    micros, precision = (1, 3)[case % 2], (None, "bf16")[case // 2 % 2]
    nodes, local_world_size = shape
    itemsize = 2 if precision else 4
    reports = run_ranks(
        nodes * local_world_size, train, shape, 3, Wire(secondary=secondary), micros, precision
    )
    between = (nodes - 1) * NUMEL // nodes // local_world_size * itemsize
    inside = (local_world_size - 1) * NUMEL // local_world_size * itemsize
    gathers = {False: 2 * micros}.get(secondary, 1)
    reductions = micros if secondary in (False, "weights") else 1
    for report in reports:
        assert sent(report) == {
            "gather between": gathers * between,
            "reduce_scatter between": reductions * between,
            "gather inside": 2 * micros * inside,
            "reduce_scatter inside": micros * inside,
        }


@again_but("3-2")
@worlds_in_turn
@pytest.mark.parametrize("stage", [1, 2])
@pytest.mark.parametrize("micros", [1, 3])
def test_stages_that_keep_weights_send_everything_once_a_step(stage, micros):
    """But stage 2 sums each micro-batch into the shards of its node."""
    between, inside = NUMEL // 4 * 4, NUMEL // 2 * 4
    for report in run_ranks(4, train, (2, 2), stage, None, micros):
        assert sent(report) == {
            "gather between": between,
            "reduce_scatter between": between,
            "gather inside": inside,
            "reduce_scatter inside": inside * (micros if stage == 2 else 1),
        }


def parcel(codec, *matrices, vectors):
    """Bytes of a message: quantized matrices, then fp32 vectors, each at a multiple of 16."""
    parts = [codec_of(codec).nbytes(numel) for numel in matrices] + [4 * n for n in vectors]
    return sum(round_up(nbytes, ALIGN_NBYTES) for nbytes in parts)


@again_but("1-zero++diff", "3-zero++", "3-recommended", "3-zero++diff")
@pytest.mark.parametrize("name", ["zero++", "recommended", "zero++diff"])
@pytest.mark.parametrize("micros", [1, 3])
def test_quantized_messages_have_the_bytes_of_their_codec(name, micros):
    """A flag for each parameter of a unit travels with its gradients."""
    wire = PRESETS[name]
    weights = wire.weights_between.removesuffix("-diff")
    own = (MATRIX // 4, VECTOR // 4)
    half = (own[0], own[0]), (own[1], own[1])
    flags = 2
    wanted = {
        "gather between": LAYERS * parcel(weights, own[0], vectors=(own[1],)),
        "reduce_scatter between": LAYERS
        * parcel(wire.gradients_between, own[0], vectors=(own[1], flags)),
        "gather inside": 2 * micros * NUMEL // 2 * 4,
    }
    if wire.gradients_inside != "exact":
        wanted["reduce_scatter inside"] = (
            micros * LAYERS * parcel(wire.gradients_inside, *half[0], vectors=(*half[1], flags))
        )
    else:
        wanted["reduce_scatter inside"] = micros * NUMEL // 2 * 4
    for report in run_ranks(4, train, (2, 2), 3, wire, micros):
        assert sent(report) == wanted


HELD = [
    ((2, 2), 3, Wire(secondary=False), None),
    ((2, 2), 3, Wire(secondary="weights"), None),
    ((2, 4), 3, Wire(), None),
    ((4, 2), 3, Wire(), "bf16"),
    ((2, 2), 3, Wire(secondary="optimizer"), None),
    ((3, 2), 3, Wire(secondary="optimizer"), None),
    ((2, 2), 2, Wire(), None),
    ((2, 2), 3, PRESETS["zero++"], None),
    ((2, 2), 2, PRESETS["recommended"], None),
    ((2, 2), 3, replace(PRESETS["zero++"], feedback=True), None),
    ((2, 2), 3, Wire(gradients="int8", secondary="optimizer", feedback=True), None),
]


@again_but(
    "shape0-3-wire0-None-1", "shape3-3-wire3-None-3", "shape5-3-wire5-None-3",
    "shape6-3-wire6-bf16-1", "shape9-3-wire9-None-3", "shape12-3-wire12-None-3",
    "shape13-2-wire13-None-1", "shape15-3-wire15-None-1",
)  # fmt: skip
@pytest.mark.parametrize(
    ("shape", "stage", "wire", "precision", "micros"),
    [(*each, micros) for index, each in enumerate(HELD)
     for micros in ((1, 3) if index < 5 else (1 + 2 * (index % 2),))],
)  # fmt: skip
def test_what_is_held_for_the_node_was_predicted(shape, stage, wire, precision, micros):
    """Micro-batches meet every placement of weights; of quantized wires one number or the other."""
    report = run_ranks(shape[0] * shape[1], train, shape, stage, wire, micros, precision)[0]
    assert report.differing() == {}, report.verdict
    keeps = stage == 3 and wire.secondary in (None, "weights", "gradients")
    itemsize = 2 if precision else 4
    second = NUMEL // shape[1] * itemsize
    assert report.memory.get("secondary", {}).get("device", Usage()).peak == keeps * second
    assert report.predicted.get("secondary", 0) == keeps * second
