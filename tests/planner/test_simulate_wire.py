"""Two hops, replicas and quantized messages in the simulator: its bytes and its monotonic laws."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from onefold.config import Precision, stage_of
from onefold.layout.module_tree import ModuleTree
from onefold.layout.units import plan_units
from onefold.planner.costs import (
    GPU_NBYTES,
    Conditions,
    LinkGroup,
    gather_cost,
    seconds_of,
)
from onefold.planner.machines import Link
from onefold.planner.memory import estimated, forecast
from onefold.recipe import Recipe
from onefold.wire_config import PRESETS, Wire
from tests.planner import test_simulate
from tests.planner.test_plan_wire import CASES, recipe_of, traced
from tests.support.planned import sent_for
from tests.support.recipes import Way, timed, way
from tests.support.rows import worlds_in_turn

MACHINE, NUMEL, UNITS = test_simulate.MACHINE, test_simulate.NUMEL, test_simulate.UNITS
WIDE = replace(MACHINE, flops={"fp32": 1e12, "bf16": 1e12})
PAGES = Path(__file__).parents[2] / "docs" / "measurements"
SEVERAL = settings(max_examples=40)
WHATS = {
    "gather inside": ("gather",),
    "gather between": ("cross",),
    "reduce_scatter inside": ("reduce",),
    "reduce_scatter between": ("second_hop",),
}


def hops(keeps: str | bool, weights: str = "exact", gradients: str = "exact") -> Wire:
    return Wire(("exact", weights), ("exact", gradients), secondary=keeps)


def nodes_of_8(stage: int, world_size: int, wire: Wire, **options: Any) -> Way:
    return way(stage, world_size, uses_rings=False, has_axes=True, wire=wire, **options)


WIRES = st.builds(
    hops,
    st.sampled_from([False, "weights", "gradients", "optimizer"]),
    st.sampled_from(["exact", "int8"]),
    st.sampled_from(["exact", "int8"]),
)
OPTIONS = {
    "stage": st.integers(1, 3),
    "world_size": st.sampled_from([16, 24, 64]),
    "accumulate": st.integers(1, 3),
    "optimizer": st.sampled_from(["device", "cpu"]),
    "step_in_backward": st.booleans(),
}
RUNS = st.one_of(
    st.builds(nodes_of_8, wire=WIRES, **OPTIONS),
    st.builds(way, uses_rings=st.just(False), **OPTIONS),
)


@worlds_in_turn
@pytest.mark.parametrize(("stage", "name"), CASES)
def test_bytes_of_the_spans_are_those_of_the_forecast(stage, name):
    """The forecast's are an engine's to the byte; these know neither vectors nor padding."""
    with torch.device("meta"):
        plans = plan_units(
            ModuleTree.from_root(nn.Sequential(*(nn.Linear(2048, 2048) for _ in range(3))))
        )
    seen = estimated(plans, 5, Precision())
    for accumulate in (1, 3):
        recipe = recipe_of((2, 2), stage, name)
        conditions = Conditions(
            accumulate=accumulate, dtype="fp32", weight_itemsize=4, grad_itemsize=4
        )
        step = timed(seen.work(5), (recipe, conditions), WIDE)
        sent = forecast(seen, recipe, accumulate=accumulate).sent
        if recipe.are_replicas:
            told = {"replica": sum(n for k, n in sent.items() if k.endswith("between"))}
            told |= {"gather": sent["gather inside"], "reduce": sent["reduce_scatter inside"]}
        else:
            told = {WHATS[k][0]: n for k, n in sent.items()}
        for what, nbytes in told.items():
            assert sent_for(step, what) == pytest.approx(nbytes, rel=0.01), what


def test_two_hops_are_the_volumes_of_the_page():
    """All ranks together, a step of m micro-batches: 3m, m + 1 + ... , 2 times (k-1) models."""
    nodes, near, micros = 4, 8, 3
    model = UNITS * NUMEL * 2
    wanted: dict[str | bool, int] = {
        False: 3 * micros, "weights": micros + 1, "gradients": 2,
    }  # fmt: skip
    for keeps, passes in wanted.items():
        run = nodes_of_8(3, nodes * near, hops(keeps), accumulate=micros)
        step = timed(test_simulate.work_of(), run, MACHINE)
        between = sent_for(step, "cross") + sent_for(step, "second_hop")
        assert between * nodes * near == pytest.approx(passes * (nodes - 1) * model), keeps
        inside = sent_for(step, "gather") + sent_for(step, "reduce")
        assert inside == pytest.approx(3 * micros * model * (near - 1) / near)


def test_nodes_that_keep_more_never_send_more_between_them():
    """Nor take longer, where the links between nodes are the bound."""
    slow = replace(test_simulate.FAST_COMPUTE, outside=Link(1e8, 0.0))
    for accumulate in (1, 2, 5):
        sent, seconds = [], []
        for keeps in ("gradients", "weights", False):
            run = nodes_of_8(3, 32, hops(keeps), accumulate=accumulate)
            step = timed(test_simulate.work_of(), run, slow)
            sent.append(sent_for(step, "cross") + sent_for(step, "second_hop"))
            seconds.append(step.seconds)
        assert sent == sorted(sent)
        assert seconds == sorted(seconds)


@given(RUNS, st.floats(1.0, 50.0), st.floats(1.0, 50.0))
@SEVERAL
def test_a_slower_link_never_makes_a_step_faster(run, inside, outside):
    slower = replace(
        MACHINE, inside=Link(MACHINE.inside.nbytes_per_second / inside, 0.0),
        outside=Link(MACHINE.outside.nbytes_per_second / outside, 0.0),
    )  # fmt: skip
    fast, slow = (timed(test_simulate.work_of(), run, each).seconds for each in (MACHINE, slower))
    assert fast <= slow * (1 + 1e-9)


@given(RUNS)
@SEVERAL
def test_the_parts_of_a_step_sum_to_its_seconds_and_no_two_messages_share_a_link(run):
    step = timed(test_simulate.work_of(), run, replace(MACHINE, spread=0.02))
    parts = (
        step.compute, step.memory, step.contention, step.exposed_gather, step.exposed_reduce,
        step.exposed_host, step.exposed_disk, step.optimizer, step.stragglers,
    )  # fmt: skip
    assert sum(parts) == pytest.approx(step.seconds)
    for whats in (("cross", "second_hop"), ("gather", "reduce")):
        if not run[0].has_hops:
            continue
        spans = sorted((s for s in step.spans if s.what in whats), key=lambda s: s.start)
        for before, after in pairwise(spans):
            assert before.end <= after.start + 1e-12


def test_weights_of_the_node_cross_once_a_step_before_they_are_gathered_inside():
    run = nodes_of_8(3, 16, hops("gradients"), accumulate=2)
    spans = timed(test_simulate.work_of(), run, MACHINE).spans
    for name in {span.unit for span in spans if span.what == "gather"}:
        (cross,) = [span for span in spans if (span.unit, span.what) == (name, "cross")]
        gathers = [span for span in spans if (span.unit, span.what) == (name, "gather")]
        assert len(gathers) == 4
        assert all(cross.end <= gather.start + 1e-12 for gather in gathers)
        (second_hop,) = [span for span in spans if (span.unit, span.what) == (name, "second_hop")]
        reduces = [span for span in spans if (span.unit, span.what) == (name, "reduce")]
        assert all(reduce.end <= second_hop.start + 1e-12 for reduce in reduces)


def test_fewer_bytes_win_on_slow_links_and_coding_costs_on_fast_ones():
    quantized = nodes_of_8(3, 16, hops("gradients", "int8", "int8"))
    exact = nodes_of_8(3, 16, hops("gradients"))
    slow = replace(test_simulate.FAST_COMPUTE, outside=Link(1e8, 0.0), memory_rate=1e12)
    fast = replace(MACHINE, outside=Link(1e18, 0.0))
    work = test_simulate.work_of()
    saved = [
        timed(work, exact, m).seconds - timed(work, quantized, m).seconds for m in (slow, fast)
    ]
    assert saved[0] > 0.4 * timed(work, exact, slow).seconds
    assert saved[1] <= 0


def test_pieces_that_go_straight_to_every_rank_cross_once_for_each_of_them():
    """A sum on one axis crosses p times as often as in a ring, or in two hops (wire.md)."""
    group = LinkGroup(32, 8)
    machine = replace(MACHINE, inside=Link(1e18, 0.0))
    ring, straight = (
        gather_cost(1e9, group, machine, is_straight=each).seconds for each in (False, True)
    )
    assert straight == pytest.approx(1e9 * 3 / 4 / 10e9)
    assert straight / ring == pytest.approx(8)
    inside = LinkGroup(8, 8)
    assert gather_cost(1e9, inside, MACHINE) == gather_cost(1e9, inside, MACHINE, is_straight=True)


def test_the_bytes_of_coding_are_those_of_the_page():
    short, long = GPU_NBYTES["int8"], GPU_NBYTES["int4+h"]
    said = f"int8 {short.encode} an element to write and {short.add} to add"
    said += f", int4+h {long.encode} and {long.add}"
    assert said in (PAGES / "time-formulas.md").read_text()
    assert seconds_of("int8", MACHINE).encode == GPU_NBYTES["int8"].encode / 1e12
    assert seconds_of("", MACHINE) == (0.0, 0.0)


@pytest.mark.parametrize(("ranks", "nodes"), [(4, 2), (8, 4)])
def test_one_axis_counts_what_leaves_the_node_and_hybrid_never_sends_more(ranks, nodes):
    seen, world = traced(Precision()), ranks * nodes
    for device, stage in (("cpu", 3), ("cuda", 3), ("cpu", 2)):
        flat = Recipe(
            stage=stage_of(stage), world_size=world, local_world_size=ranks, device_type=device
        )
        found = forecast(seen, flat)
        share = (world - ranks) / (world - 1)
        gathered, reduced = (
            found.sent[verb] + found.sent.get(f"{verb} padding", 0)
            for verb in ("gather", "reduce_scatter")
        )
        ring = ranks if device == "cuda" else 1
        assert found.between_nbytes == pytest.approx(share * (gathered / ring + reduced))
        assert sum(found.sent_by_link.values()) == pytest.approx(found.sent_nbytes)
        hybrid = forecast(seen, replace(flat, has_axes=True))
        two_hops = forecast(seen, replace(flat, has_axes=True, wire=Wire(secondary=False)))
        assert hybrid.between_nbytes <= two_hops.between_nbytes <= found.between_nbytes * 1.02
    names = [name for name in PRESETS if name != "exact"]
    sent = {
        name: forecast(seen, replace(flat, stage=stage_of(3), has_axes=True, wire=PRESETS[name]))
        for name in names
    }
    order = sorted(names, key=lambda name: sent[name].between_nbytes)
    assert order[:2] == ["zero++diff", "zero++"]
