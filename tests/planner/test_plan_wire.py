"""Two axes and quantized wires: what a plan tells of them is what engines then send and hold."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

import onefold
from onefold import Wire
from onefold.config import Offload, Precision, precision_of, stage_of
from onefold.errors import ConfigError
from onefold.fit.bounds import ACTIVATIONS_SHARE
from onefold.layout.module_tree import ModuleTree
from onefold.layout.units import plan_units
from onefold.planner.clusters import Cluster
from onefold.planner.machines import machine_of
from onefold.planner.memory import Forecast, estimated, forecast
from onefold.planner.planning import plan
from onefold.planner.search import Search, candidates
from onefold.planner.show import wire_lines
from onefold.planner.trace import Trace, trace, without_values
from onefold.recipe import Recipe
from onefold.recording.report import Report
from onefold.text import format_bytes
from onefold.wire_config import PRESETS, resolve_wire
from tests.support.free_memory import has_free
from tests.support.planned import most_of
from tests.support.ranks import run_ranks, seeded
from tests.support.rows import again_but, worlds_in_turn

WIDTH, ODD = 128, 37


class Net(nn.Module):
    """Matrices that are alike and one that no number of ranks divides; a scalar, frozen rows."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.odd = nn.Linear(WIDTH, ODD)
        self.scale = nn.Parameter(torch.tensor(1.0))
        self.frozen = nn.Parameter(torch.ones(5, ODD), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return (self.odd(x) * self.scale)[:5] + self.frozen


NAMES = {
    "two hops": Wire(secondary=False),
    "hpZ": Wire(secondary="weights"),
    "all quantized": Wire(weights=("int8", "int8"), gradients=("int4", "int8")),
    "quantized replicas": Wire(("int8", "exact"), ("exact", "int8"), secondary="optimizer"),
    **{name: wire for name, wire in PRESETS.items() if name != "exact"},
}
CASES = [
    (stage, name)
    for stage, name in product((1, 2, 3), NAMES)
    if stage == 3 or not (name in ("two hops", "hpZ") or (stage == 1) == name.startswith("z"))
]


def loss_of(outputs: Any) -> Tensor:
    return outputs.float().square().mean()


def inputs() -> tuple[Tensor, ...]:
    return (torch.ones(5, WIDTH),)


@cache
def traced(precision: Precision) -> Trace:
    return trace(Net(), inputs(), precision=precision, loss=loss_of)


def wire_at(stage: int, name: str) -> Wire:
    adapts = name in PRESETS
    return resolve_wire(NAMES[name], stage_of(stage), Offload(), has_axes=True, adapts=adapts)


def recipe_of(shape: tuple[int, int], stage: int, name: str, **others: Any) -> Recipe:
    return Recipe(
        stage=stage_of(stage), world_size=shape[0] * shape[1], local_world_size=shape[1],
        has_axes=True, wire=wire_at(stage, name), **others,
    )  # fmt: skip


def run(
    rank: int, shape: tuple[int, int], recipe: Recipe, name: str, accumulate: int = 1
) -> Report:
    """What rank 0 holds and sends in its second step."""
    module = seeded(Net)
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-3)
    mesh = init_device_mesh("cpu", shape)
    wire = name if name in PRESETS else NAMES[name]
    onefold.shard(
        module, optimizer, stage=recipe.stage.number, mesh=mesh, wire=wire,
        precision=recipe.precision,
    )  # fmt: skip
    for _ in range(2):
        for micro in range(accumulate):
            is_last = micro + 1 == accumulate
            with nullcontext() if is_last else onefold.accumulate(module):
                loss_of(module(*inputs())).backward()
        optimizer.step()
        optimizer.zero_grad()
    return onefold.report(module)


def held(report: Report, kind: str) -> int:
    return sum(usage.peak for usage in report.memory.get(kind, {}).values())


def resting(found: Forecast, kind: str) -> int:
    return sum(n for (each, _), n in found.resting.items() if each == kind)


@again_but(
    "1-recommended-shape4-None-1", "2-zero++diff-shape6-bf16-2", "3-two hops-shape7-bf16-2",
    "3-hpZ-shape10-None-1", "3-all quantized-shape11-bf16-2", "3-quantized replicas-shape14-None-1",
    "3-hybrid-shape15-bf16-2", "3-replicas-shape18-None-1", "3-zero++-shape21-bf16-2",
    "3-zero++diff-shape24-None-1",
)  # fmt: skip
@worlds_in_turn
@pytest.mark.parametrize(
    ("stage", "name", "shape", "precision", "accumulate"),
    [
        (stage, name, *condition)
        for stage, name in CASES
        for index, condition in enumerate([((2, 2), "bf16", 2), ((2, 3), None, 1)])
        if stage == 3 or list(NAMES).index(name) % 2 == (index + stage) % 2
    ],
)
def test_bytes_held_and_sent_are_those_of_the_plan(stage, name, shape, precision, accumulate):
    """Both conditions meet every wire at stage 3, and stages 1 and 2 with wires in turn."""
    chosen = precision_of(precision)
    recipe = recipe_of(shape, stage, name, precision=chosen)
    report = run_ranks(shape[0] * shape[1], run, shape, recipe, name, accumulate)[0]
    found = forecast(traced(chosen), recipe, accumulate=accumulate)
    sent = {k: t.sent_nbytes for k, t in report.last_step.items() if k != "control"}
    assert {k: n for k, n in sent.items() if n} == found.sent
    for kind in ("weight", "master", "optimizer", "secondary"):
        assert report.nbytes(kind) == resting(found, kind), kind
    for kind in ("secondary", "unsharded", "grad"):
        assert held(report, kind) == most_of(found, kind), kind
    for kind in ("partial_grad", "wire"):  # at their most, were links slow
        assert 0.5 * most_of(found, kind) <= held(report, kind) <= most_of(found, kind), kind
    assert report.differing() == {}, report.verdict


@again_but("replicas")
@pytest.mark.usefixtures("sharing")
@pytest.mark.parametrize("name", ["zero++diff", "replicas"])
def test_messages_that_regions_share_are_those_of_the_plan(name):
    recipe = recipe_of((2, 2), 3, name)
    report = run_ranks(4, run, (2, 2), recipe, name)[0]
    most = most_of(forecast(traced(recipe.precision), recipe), "wire")
    assert 0.5 * most <= held(report, "wire") <= most


def test_between_nodes_a_plan_tells_what_was_counted_at_the_sockets_of_hosts():
    """Of every scheme in docs/measurements/wire.md, where headers and tags were counted too."""
    import wire

    with torch.device("meta"):
        module = wire.GPT(wire.MODEL, wire.SEQ)
    chosen = precision_of("bf16")
    seen = estimated(plan_units(ModuleTree.from_root(without_values(module))), 0, chosen)
    every = [line.split(" | ") for line in wire.PAGE.read_text().splitlines()]
    rows = [row for row in every if len(row) > 3 and row[3].endswith("%")]
    measured = {row[0].strip("| "): float(row[1]) for row in rows}
    schemes = [scheme for scheme in wire.SCHEMES if scheme.nbytes_between is not None]
    assert len(schemes) >= 10
    for scheme in schemes:
        recipe = Recipe(
            stage=stage_of(scheme.stage), world_size=4, local_world_size=2, has_axes=True,
            precision=chosen, wire=scheme.wire or Wire(),
        )  # fmt: skip
        found = forecast(seen, recipe, accumulate=scheme.accumulate)
        in_docs = 4 * found.between_nbytes / seen.numel
        assert in_docs == pytest.approx(scheme.nbytes_between, rel=0.005), scheme.name
        assert in_docs == pytest.approx(measured[scheme.name], rel=0.01), scheme.name
    flat = forecast(seen, Recipe(world_size=4, local_world_size=2, precision=chosen))
    in_docs = 4 * flat.between_nbytes / seen.numel
    at_sockets = next(float(row[1]) for row in every if row[0] == "| stage 3, one axis")
    said = " ".join(wire.PAGE.read_text().split())
    assert f"gives {in_docs:.0f} bytes, and the sockets counted {at_sockets:.1f}," in said


def test_an_open_stage_counts_the_states_of_a_replica_on_the_ranks_of_its_node(monkeypatch):
    """On 2 x 2 ranks half of them, not a quarter; and passes over stages without such a wire."""

    def needs(stage: int, name: str) -> int:
        recipe = recipe_of((2, 2), stage, name)
        return forecast(estimated(plans, 0, Precision()), recipe, accumulate=2).memory_nbytes

    plans = plan_units(ModuleTree.from_root(without_values(Net())))
    flat = Recipe(world_size=4)
    needs_flat = forecast(estimated(plans, 0, Precision()), flat, accumulate=2).memory_nbytes

    def body(rank: int, name: str) -> tuple[int, str]:
        module = seeded(Net)
        optimizer = torch.optim.AdamW(module.parameters(), lr=1e-3)
        mesh = init_device_mesh("cpu", (2, 2))
        onefold.shard(module, optimizer, stage="auto", mesh=mesh, wire=name)
        report = onefold.report(module)
        return report.stage, report.offload

    for name, stage in (("replicas", 1), ("replicas", 3), ("hybrid", 1), ("recommended", 1)):
        free = int(4 * (needs(stage, name) + 1) / (1 - ACTIVATIONS_SHARE)) + 8
        has_free(monkeypatch, free)
        for got, why in run_ranks(4, body, name):
            assert got == stage, name
            assert f"stage {stage} holds {format_bytes(needs(stage, name))} of" in why
    assert needs(3, "replicas") > needs_flat


# the plan


def two_nodes(**options: Any) -> Cluster:
    return Cluster(ranks=2, nodes=2, memory=2**30, **options)


def test_on_several_nodes_a_plan_takes_an_exact_wire_and_tells_of_the_others():
    machine = replace(machine_of("a100-40"), operation_seconds=0.0, call_seconds=0.0)
    made = plan("tiny", cluster=two_nodes(machine=machine), seq=32, stage=3, offload=None)
    assert made.best is not None
    assert not made.best.wire.is_lossy
    assert [row.wire.name for row in made.wires] == list(PRESETS)
    fastest = min(row.step.seconds for row in made.wires if row.step and not row.wire.is_lossy)
    assert made.best.step is not None
    assert made.best.step.seconds <= 1.01 * fastest
    told_of = {row["wire"]: row for row in made.as_dict()["wires"]}
    assert [name for name, row in told_of.items() if row["lossy"]] == [
        "recommended", "zero++", "zero++diff"]  # fmt: skip
    between = {name: row["sent_between_nodes_nbytes"] for name, row in told_of.items()}
    assert between["zero++diff"] < between["zero++"] < between["recommended"] < between["hybrid"]
    assert between["hybrid"] < between["exact"]
    for row in made.wires:
        assert f"{row.wire.name}  " in str(made)
    assert ", wire" in made.line


def test_without_a_machine_a_plan_takes_the_wire_that_sends_least_between_nodes():
    made = plan("tiny", cluster=two_nodes(), seq=32, stage=3, offload=None)
    assert made.best is not None
    exact = [row for row in made.wires if not row.wire.is_lossy]
    assert made.best.forecast.between_nbytes == min(row.forecast.between_nbytes for row in exact)


@pytest.mark.parametrize("name", PRESETS)
def test_the_command_and_the_line_of_a_plan_carry_its_wire(name):
    from onefold.app.cli.main import _parser
    from onefold.app.cli.train import job_of

    made = plan("tiny", cluster=two_nodes(), seq=32, wire=name, stage=3, offload=None)
    words = made.command.split()
    job = job_of(_parser().parse_args(words[words.index("onefold") + 1 :]), world_size=4)
    assert job.wire == (None if name == "exact" else name)
    assert (f'wire="{name}"' in made.line) == (name != "exact")
    assert any("rounds" in line for line in made.explain()) == made.rows[0].wire.is_lossy


def test_a_wire_without_a_name_is_in_the_line_alone():
    wire = Wire(weights="int8", secondary="weights")
    made = plan("tiny", cluster=two_nodes(), seq=32, wire=wire, stage=3, offload=None)
    assert eval(made.line.split("wire=")[1][:-1], {"onefold": onefold}) == wire
    assert "--wire" not in made.command
    assert any("no name for this wire" in line for line in made.explain())


@pytest.mark.parametrize(
    ("wire", "options", "match"),
    [
        (Wire(secondary="weights"), {"nodes": 1}, "a mesh of two axes"),
        (Wire(secondary="optimizer"), {"nodes": 2, "ranks": 1}, "a mesh of two axes"),
        (Wire(weights="int4-diff"), {"nodes": 1}, "weights that some rank keeps"),
        ("zero++", {"nodes": 2, "stage": 0}, "stage 0"),
        ("zero+", {"nodes": 2}, "wire to be auto"),
    ],
)
def test_a_plan_refuses_the_wires_that_shard_refuses(wire, options, match):
    where = {"stage": 3, "ranks": 2, **options}
    cluster = Cluster(ranks=where["ranks"], nodes=where["nodes"], memory=2**30)
    with pytest.raises(ConfigError, match=match):
        plan("tiny", cluster=cluster, seq=32, wire=wire, stage=where["stage"], offload=None)


def test_stages_that_have_no_such_wire_are_left_out_of_an_open_plan():
    made = plan("tiny", cluster=two_nodes(), seq=32, wire="recommended", offload=None)
    assert [row.stage for row in made.rows] == [1, 2, 3]


def test_a_name_on_one_node_is_what_shard_makes_of_it():
    """Nothing is kept for a node: "hybrid" is then exact, and "zero++" a code on one axis."""
    exact, hybrid, quantized = (
        plan("tiny", cluster=Cluster(ranks=2, memory=2**30), seq=32, wire=wire, stage=3).rows[0]
        for wire in (None, "hybrid", "zero++")
    )
    assert hybrid.forecast.sent == exact.forecast.sent
    assert quantized.forecast.sent_nbytes < exact.forecast.sent_nbytes / 2
    assert most_of(hybrid.forecast, "secondary") == 0


def test_the_plan_on_the_page_is_what_a_plan_tells():
    """With `pytest -s` this prints the block as it should be."""
    page = Path(onefold.__file__).parents[2].joinpath("docs", "measurements", "wire.md").read_text()
    where = Cluster(ranks=8, nodes=4, machine="h100-80")
    made = plan("large", cluster=where, seq=1024, batch=8, precision="bf16", stage=3, offload=None)
    block = "\n".join(["```text", *wire_lines(made.wires, made.taken, made.numel)[1:], "```"])
    print(block)
    assert f"<!-- plan: begin -->\n{block}\n<!-- plan: end -->" in page


_PLANS = plan_units(ModuleTree.from_root(without_values(Net())))


@settings(max_examples=15)
@given(memory=st.integers(2, 400))
def test_as_many_rows_as_fit_are_looked_for_on_every_wire(memory):
    """A wire with a secondary shard may lose to one that has room for more rows, and may not."""
    one, two = (estimated(_PLANS, rows * 32, Precision()) for rows in (1, 2))
    recipe = Recipe(world_size=4, local_world_size=2, device_type="cuda")
    room = {"device": memory * 2**17}
    search = Search(one, two, recipe, room, machine_of("a100-40"), 32, candidates("auto", nodes=2))
    best = search.largest(3, "none")
    alone = [replace(search, wires=(each,)).largest(3, "none") for each in search.wires]
    fitting = [row for row in alone if row.fits]
    assert best.fits == bool(fitting)
    if fitting:
        assert best.step is not None
        speeds = [row.step.tokens_per_s for row in fitting if row.step is not None]
        assert best.step.tokens_per_s >= 0.99 * max(speeds)
