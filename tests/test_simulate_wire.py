"""Two hops, replicas and coded messages in the simulator: its bytes and its monotonic laws."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from onefold.config import Precision
from onefold.layout.units import plan_units
from onefold.planner.coding import CPU_RATES, GPU_NBYTES, seconds_of
from onefold.planner.estimate import estimated
from onefold.planner.links import LinkGroup, gather_cost, reduce_cost
from onefold.planner.machines import Link
from onefold.planner.memory import forecast
from onefold.planner.run import Element, Run, Travel
from onefold.planner.search import run_of, work_of
from onefold.planner.setup import Setup
from onefold.planner.simulate import simulate
from onefold.wire_config import PRESETS, Wire
from tests import test_simulate
from tests.test_plan_wire import CASES, setup_of, traced

MACHINE, NUMEL, UNITS = test_simulate.MACHINE, test_simulate.NUMEL, test_simulate.UNITS
WIDE = replace(MACHINE, flops={"fp32": 1e12, "bf16": 1e12})
PAGES = Path(__file__).parent.parent / "docs"
HALF = Element(2.0)
EIGHT = Element(1 + 2 / 512, "int8")
SEVERAL = settings(max_examples=40, deadline=None)
WHATS = {"gather inside": ("gather",), "gather between": ("cross",),
         "reduce_scatter inside": ("reduce",), "reduce_scatter between": ("settle",)}  # fmt: skip


def travel(keeps: str | None, weights: Element = HALF, gradients: Element = HALF) -> Travel:
    return Travel(
        weights=HALF, gradients=HALF, weights_between=weights, gradients_between=gradients,
        hops=keeps,
    )  # fmt: skip


TRAVELS = st.builds(
    travel,
    st.sampled_from(["", "weights", "gradients", None]),
    st.sampled_from([HALF, EIGHT]),
    st.sampled_from([HALF, EIGHT]),
)
RUNS = st.builds(
    Run,
    stage=st.integers(1, 3),
    world_size=st.sampled_from([16, 24, 64]),
    shard_ranks=st.sampled_from([0, 8]),
    accumulate=st.integers(1, 3),
    optimizer=st.sampled_from(["device", "cpu"]),
    steps_in_backward=st.booleans(),
    travel=TRAVELS,
)


@pytest.mark.parametrize(("stage", "name"), CASES)
def test_bytes_of_the_spans_are_those_of_the_forecast(stage, name):
    """The forecast's are an engine's to the byte; these know neither vectors nor padding."""
    with torch.device("meta"):
        plans = plan_units(nn.Sequential(*(nn.Linear(2048, 2048) for _ in range(3))))
    seen = estimated(plans, 5, Precision())
    for accumulate in (1, 3):
        setup = setup_of((2, 2), stage, name, ranks_per_host=2, accumulate=accumulate)
        step = simulate(work_of(seen, 5), run_of(setup), WIDE)
        sent = forecast(seen, setup).sent
        if setup.are_replicas:
            told = {"replica": sum(n for k, n in sent.items() if k.endswith("between"))}
            told |= {"gather": sent["gather inside"], "reduce": sent["reduce_scatter inside"]}
        else:
            told = {WHATS[k][0]: n for k, n in sent.items()}
        for what, nbytes in told.items():
            assert step.sent_nbytes(what) == pytest.approx(nbytes, rel=0.01), what


def test_two_hops_are_the_volumes_of_the_page():
    """All ranks together, a step of m micro-batches: 3m, m + 1 + ... , 2 times (k-1) models."""
    nodes, near, micros = 4, 8, 3
    model = UNITS * NUMEL * 2
    wanted = {"": 3 * micros, "weights": micros + 1, "gradients": 2}
    for keeps, passes in wanted.items():
        run = Run(3, nodes * near, accumulate=micros, travel=travel(keeps))
        step = simulate(test_simulate.work_of(), run, MACHINE)
        between = step.sent_nbytes("cross") + step.sent_nbytes("settle")
        assert between * nodes * near == pytest.approx(passes * (nodes - 1) * model), keeps
        inside = step.sent_nbytes("gather") + step.sent_nbytes("reduce")
        assert inside == pytest.approx(3 * micros * model * (near - 1) / near)


def test_nodes_that_keep_more_never_send_more_between_them():
    """Nor take longer, where the links between nodes are the bound."""
    slow = replace(test_simulate.FAST_COMPUTE, outside=Link(1e8, 0.0))
    for accumulate in (1, 2, 5):
        sent, seconds = [], []
        for keeps in ("gradients", "weights", ""):
            run = Run(3, 32, accumulate=accumulate, travel=travel(keeps))
            step = simulate(test_simulate.work_of(), run, slow)
            sent.append(step.sent_nbytes("cross") + step.sent_nbytes("settle"))
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
    fast, slow = (
        simulate(test_simulate.work_of(), run, each).seconds for each in (MACHINE, slower)
    )
    assert fast <= slow * (1 + 1e-9)


@given(RUNS)
@SEVERAL
def test_the_parts_of_a_step_sum_to_its_seconds_and_no_two_messages_share_a_link(run):
    step = simulate(test_simulate.work_of(), run, replace(MACHINE, spread=0.02))
    parts = (
        step.compute, step.memory, step.contention, step.exposed_gather, step.exposed_reduce,
        step.exposed_host, step.exposed_disk, step.optimizer, step.stragglers,
    )  # fmt: skip
    assert sum(parts) == pytest.approx(step.seconds)
    for whats in (("cross", "settle"), ("gather", "reduce")):
        if run.hops is None:
            continue
        spans = sorted((s for s in step.spans if s.what in whats), key=lambda s: s.start)
        for before, after in pairwise(spans):
            assert before.end <= after.start + 1e-12


def test_weights_of_the_node_cross_once_a_step_before_they_are_gathered_inside():
    run = Run(3, 16, accumulate=2, travel=travel("gradients"))
    spans = simulate(test_simulate.work_of(), run, MACHINE).spans
    for name in {span.unit for span in spans if span.what == "gather"}:
        (cross,) = [span for span in spans if (span.unit, span.what) == (name, "cross")]
        gathers = [span for span in spans if (span.unit, span.what) == (name, "gather")]
        assert len(gathers) == 4
        assert all(cross.end <= gather.start + 1e-12 for gather in gathers)
        (settle,) = [span for span in spans if (span.unit, span.what) == (name, "settle")]
        reduces = [span for span in spans if (span.unit, span.what) == (name, "reduce")]
        assert all(reduce.end <= settle.start + 1e-12 for reduce in reduces)


def test_fewer_bytes_win_on_slow_links_and_coding_costs_on_fast_ones():
    coded = travel("gradients", EIGHT, EIGHT)
    exact = Run(3, 16, travel=travel("gradients"))
    slow = replace(test_simulate.FAST_COMPUTE, outside=Link(1e8, 0.0), memory_rate=1e12)
    fast = replace(MACHINE, outside=Link(1e18, 0.0))
    work = test_simulate.work_of()
    saved = [simulate(work, exact, m).seconds - simulate(work, replace(exact, travel=coded),
             m).seconds for m in (slow, fast)]  # fmt: skip
    assert saved[0] > 0.4 * simulate(work, exact, slow).seconds
    assert saved[1] <= 0


def test_pieces_that_go_straight_to_every_rank_cross_once_for_each_of_them():
    """A sum on one axis crosses p times as often as in a ring, or in two hops (docs/wire.md)."""
    group = LinkGroup(32, 8)
    machine = replace(MACHINE, inside=Link(1e18, 0.0))
    ring, straight = (
        reduce_cost(1e9, group, machine, is_straight=each).seconds for each in (False, True)
    )
    assert straight == pytest.approx(1e9 * 3 / 4 / 10e9)
    assert straight / ring == pytest.approx(8)
    inside = LinkGroup(8, 8)
    assert gather_cost(1e9, inside, MACHINE) == gather_cost(1e9, inside, MACHINE, is_straight=True)


def test_the_rates_of_coding_are_those_of_the_page():
    rows = {}
    for line in (PAGES / "codecs.md").read_text().splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        word = cells[0].partition(":")[0].partition(" ")[0]
        if len(cells) == 5 and cells[0][:1] != "`" and cells[1][:1].isdigit():
            rows[word] = (float(cells[1].split(",")[0]), float(cells[3].split(",")[0]))
    assert {word: tuple(rate) for word, rate in CPU_RATES.items()} == rows
    assert set(GPU_NBYTES) == set(CPU_RATES)
    short, long = GPU_NBYTES["int8"], GPU_NBYTES["int4+h"]
    said = f"int8 {short.encode} an element to write and {short.add} to add"
    said += f", int4+h {long.encode} and {long.add}"
    assert said in (PAGES / "time.md").read_text()
    assert seconds_of("int8", MACHINE).encode == GPU_NBYTES["int8"].encode / 1e12
    on_cpu = seconds_of("int8", replace(MACHINE, launches_hide=False))
    assert on_cpu.encode == pytest.approx(4 / 17.4e9)
    assert seconds_of("", MACHINE) == (0.0, 0.0)


@pytest.mark.parametrize(("ranks", "nodes"), [(4, 2), (8, 4)])
def test_one_axis_counts_what_leaves_the_node_and_hybrid_never_sends_more(ranks, nodes):
    seen, world = traced(Precision()), ranks * nodes
    for device, stage in (("cpu", 3), ("cuda", 3), ("cpu", 2)):
        flat = Setup(stage=stage, world_size=world, ranks_per_host=ranks, device_type=device)
        found = forecast(seen, flat)
        share = (world - ranks) / (world - 1)
        gathered, reduced = found.sent["gather"], found.sent["reduce_scatter"]
        ring = ranks if device == "cuda" else 1
        assert found.between_nbytes == pytest.approx(share * (gathered / ring + reduced))
        assert sum(found.sent_by_link.values()) == pytest.approx(found.sent_nbytes)
        hybrid = forecast(seen, replace(flat, neighbours=ranks))
        two_hops = forecast(seen, replace(flat, neighbours=ranks, wire=Wire(secondary=False)))
        assert hybrid.between_nbytes <= two_hops.between_nbytes <= found.between_nbytes * 1.02
    names = [name for name in PRESETS if name != "exact"]
    sent = {
        name: forecast(seen, replace(flat, stage=3, neighbours=ranks, wire=PRESETS[name]))
        for name in names
    }
    order = sorted(names, key=lambda name: sent[name].between_nbytes)
    assert order[:2] == ["zero++diff", "zero++"]
