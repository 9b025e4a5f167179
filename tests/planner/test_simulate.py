"""The step-time simulator: closed-form limits, the engine's order, stragglers, failures."""

from __future__ import annotations

import subprocess
import sys
from collections import defaultdict
from dataclasses import replace
from itertools import pairwise
from math import exp
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from published_runs.decoder import TransformerShape, block_activation_nbytes, transformer_work
from published_runs.tables import young_interval

from onefold.errors import ConfigError
from onefold.planner.costs import HOST_SHARE, LinkGroup, gather_cost
from onefold.planner.machines import Efficiency, Link, Machine, known_machines, machine_of
from onefold.planner.simulate import goodput, scaling_curve, slowest_of
from onefold.planner.work import ModelWork, UnitWork, Work
from tests.laws.test_bytes import NUMEL as NUMEL_OF_ENGINE
from tests.laws.test_bytes import one_step
from tests.support.planned import sent_for
from tests.support.ranks import run_ranks
from tests.support.recipes import timed, way
from tests.support.rows import again_but, worlds_in_turn

MIB = 1 << 20
NUMEL, UNITS = MIB, 6
PERFECT = Efficiency(matmul=1.0, attention=1.0, contention=0.0, memory=1.0)
MACHINE = Machine(
    "test", {"bf16": 1e12}, memory_rate=1e12, memory_nbytes=80e9, inside=Link(100e9, 0.0),
    outside=Link(10e9, 0.0), operation_seconds=0.0, call_seconds=0.0, efficiency=PERFECT,
)  # fmt: skip
FAST_LINKS = replace(MACHINE, inside=Link(1e18, 0.0), outside=Link(1e18, 0.0))
FAST_COMPUTE = replace(MACHINE, flops={"bf16": 1e24}, memory_rate=1e24)


def work_of(units=UNITS, numel=NUMEL, flops=1e9):
    unit = UnitWork("", numel, Work(flops), Work(2 * flops))
    return ModelWork(
        tuple(replace(unit, name=f"unit {index}") for index in range(units)), tokens=1024
    )


RUNS = st.builds(
    way,
    stage=st.integers(0, 3),
    world_size=st.sampled_from([1, 2, 3, 8, 24, 64]),
    accumulate=st.integers(1, 3),
    recompute=st.sampled_from([0.0, 0.5, 1.0]),
    prefetch=st.integers(0, 3),
    optimizer=st.sampled_from(["device", "cpu", "disk"]),
    step_in_backward=st.booleans(),
)
SEVERAL = settings(max_examples=60)


def test_a_step_that_compute_bounds_takes_the_sum_of_its_products():
    step = timed(work_of(), way(3, 64), FAST_LINKS)
    assert step.compute == pytest.approx(UNITS * 3e9 / 1e12)
    assert step.seconds == pytest.approx(step.compute + step.optimizer, rel=1e-6)
    assert step.bound == "compute"


@pytest.mark.parametrize(("stage", "passes"), [(0, 2), (1, 2), (2, 2), (3, 3)])
def test_a_step_that_links_bound_takes_bytes_over_bandwidth(stage, passes):
    """Inside one node; the last reduction of stage 0 is followed by its gather."""
    step = timed(work_of(), way(stage, 8), FAST_COMPUTE)
    sent = passes * UNITS * NUMEL * 2 * 7 / 8
    assert step.seconds == pytest.approx(sent / 100e9)
    assert step.bound == "link"


def test_between_nodes_the_network_cards_of_a_node_carry_its_share():
    """k nodes of 8: (k-1)/k of the bytes enter each node over 8 cards."""
    machine = replace(MACHINE, inside=Link(1e12, 0.0))
    cost = gather_cost(8 * MIB, LinkGroup(32, 8), machine)
    assert cost.seconds == pytest.approx(8 * MIB * 3 / 4 / 8 / 10e9)
    assert cost.nbytes == pytest.approx(8 * MIB * 31 / 32)
    assert set(cost.links) == {"inside", "outside"}


def test_a_ring_pays_one_hop_for_each_rank_and_more_between_nodes():
    machine = replace(MACHINE, inside=Link(1e18, 1.0), outside=Link(1e18, 100.0))
    assert gather_cost(1.0, LinkGroup(8, 8), machine).seconds == pytest.approx(7)
    assert gather_cost(1.0, LinkGroup(32, 8), machine).seconds == pytest.approx(27 + 4 * 100)
    assert gather_cost(1.0, LinkGroup(4, 1), machine).seconds == pytest.approx(3 * 100)


@pytest.mark.parametrize("stage", range(4))
def test_a_world_of_one_is_silent(stage):
    step = timed(work_of(), way(stage, 1, accumulate=2), MACHINE)
    assert {span.stream for span in step.spans} == {"compute"}
    assert step.seconds == pytest.approx(step.compute + step.memory + step.optimizer)


@worlds_in_turn
@pytest.mark.parametrize("ranks", [2, 3, 8, 64])
@pytest.mark.parametrize("accumulate", [1, 4])
@pytest.mark.parametrize("stage", range(4))
def test_bytes_sent_are_the_table_of_memory_md(stage, accumulate, ranks):
    """(N-1)/N per step: 2 at stages 0 and 1, m + 1 at stage 2, 3 m at stage 3."""
    step = timed(work_of(), way(stage, ranks, accumulate=accumulate), MACHINE)
    unit = UNITS * NUMEL * 2 * (ranks - 1) / ranks
    passes = {2: accumulate + 1, 3: 3 * accumulate}.get(stage, 2)
    assert sum(span.nbytes for span in step.spans) == pytest.approx(passes * unit)
    reduced = accumulate if stage > 1 else 1
    assert sent_for(step, "reduce") == pytest.approx(reduced * unit)


@worlds_in_turn
@pytest.mark.parametrize("micro_batches", [1, 3])
@pytest.mark.parametrize("stage", range(4))
def test_collectives_are_as_many_and_as_large_as_those_of_the_engine(stage, micro_batches):
    """Against a step that ranks really made: four units on two ranks, fp32."""
    (_, report), _ = run_ranks(2, one_step, 2, stage, micro_batches)
    run = way(stage, 2, weight_itemsize=4, grad_itemsize=4, accumulate=micro_batches)
    step = timed(work_of(4, NUMEL_OF_ENGINE // 4), run, MACHINE)
    for told, whats in (("gather", ("gather", "spread")), ("reduce_scatter", ("reduce",))):
        spans = [span for span in step.spans if span.what in whats]
        assert len(spans) == report.last_step[told].calls
        assert sum(span.nbytes for span in spans) == report.last_step[told].sent_nbytes


def test_a_hybrid_gathers_inside_the_node_and_reduces_its_shards_outside_once_a_step():
    """scale.md's HSDP: 3m(p-1)/p inside, 2(k-1)/k of a p-th outside, whatever m is."""
    run = way(3, 64, copies=8, accumulate=4)
    step = timed(work_of(), run, MACHINE)
    model = UNITS * NUMEL * 2
    inside = sent_for(step, "gather") + sent_for(step, "reduce")
    assert inside == pytest.approx(3 * 4 * model * 7 / 8)
    assert sent_for(step, "replica") == pytest.approx(2 * model / 8 * 7 / 8)
    assert gather_cost(1.0, LinkGroup(8, 8), MACHINE).links == ("inside",)
    assert gather_cost(1.0, LinkGroup(8, 1), MACHINE).links == ("outside",)


def test_a_hybrid_whose_copy_is_the_world_is_the_flat_run():
    flat = timed(work_of(), way(3, 64), MACHINE)
    assert timed(work_of(), way(3, 64, copies=64), MACHINE) == flat


def test_a_hybrid_beats_the_flat_run_where_the_network_is_the_bound():
    machine = replace(FAST_COMPUTE, outside=Link(1e8, 0.0))
    flat = timed(work_of(), way(3, 64, accumulate=4), machine)
    hybrid = timed(work_of(), way(3, 64, copies=8, accumulate=4), machine)
    assert hybrid.seconds < flat.seconds / 4, "12 passes of the model between nodes against 2"


@pytest.mark.parametrize(("stage", "reductions"), [(1, 1), (2, 4)])
def test_accumulation_repeats_compute_at_stage_2_reductions_too_and_no_gather(stage, reductions):
    once, four = (timed(work_of(), way(stage, 8, accumulate=m), MACHINE) for m in (1, 4))
    assert four.compute == pytest.approx(4 * once.compute)
    assert sent_for(four, "gather") == sent_for(once, "gather")
    assert sent_for(four, "reduce") == reductions * sent_for(once, "reduce")
    assert four.seconds < 4 * once.seconds


@given(RUNS, st.floats(0, 0.9))
@SEVERAL
def test_the_parts_of_a_step_sum_to_its_seconds(run, contention):
    machine = replace(MACHINE, efficiency=replace(PERFECT, contention=contention), spread=0.02)
    step = timed(work_of(), run, machine)
    parts = (
        step.compute, step.memory, step.contention, step.exposed_gather, step.exposed_reduce,
        step.exposed_host, step.exposed_disk, step.optimizer, step.stragglers,
    )  # fmt: skip
    assert sum(parts) == pytest.approx(step.seconds)
    assert min(parts) >= 0


@given(RUNS)
@SEVERAL
def test_spans_of_one_stream_never_overlap(run):
    spans = defaultdict(list)
    for span in timed(work_of(), run, MACHINE).spans:
        spans[span.stream].append(span)
    for stream in spans.values():
        for before, after in pairwise(sorted(stream, key=lambda span: span.start)):
            assert before.end <= after.start + 1e-12


@given(RUNS)
@SEVERAL
def test_collectives_take_turns_on_a_link(run):
    """Whatever the streams: one node, so all of them are on the inside link."""
    spans = timed(work_of(), (replace(run[0], world_size=8), run[1]), MACHINE).spans
    sending = sorted((span for span in spans if span.nbytes), key=lambda span: span.start)
    for before, after in pairwise(sending):
        assert before.end <= after.start + 1e-12


@given(st.integers(0, 3), st.integers(1, 3), st.floats(0, 0.5))
@SEVERAL
def test_a_units_compute_never_begins_before_its_gather_has_ended(prefetch, accumulate, contention):
    machine = replace(MACHINE, efficiency=replace(PERFECT, contention=contention))
    run = way(3, 64, prefetch=prefetch, accumulate=accumulate)
    spans = timed(work_of(), run, machine).spans
    for name in {span.unit for span in spans if span.what == "gather"}:
        gathers = [span for span in spans if (span.unit, span.what) == (name, "gather")]
        uses = [s for s in spans if s.unit == name and s.stream == "compute"]
        assert len(gathers) == len(uses) == 2 * accumulate
        for gather, use in zip(gathers, uses, strict=True):
            assert gather.end <= use.start


def test_a_gather_begins_when_the_unit_before_is_entered():
    """At depth 1, and not earlier: its memory is that of the unit before that one."""
    spans = timed(work_of(), way(3, 8), FAST_LINKS).spans
    forward = [span for span in spans if span.what == "forward"]
    gathers = [span for span in spans if span.what == "gather"][:UNITS]
    assert [g.start for g in gathers[2:]] == pytest.approx([f.start for f in forward[1:-1]])


def test_a_reduction_begins_with_the_end_of_its_units_backward_and_one_is_under_way():
    slow = replace(MACHINE, inside=Link(1e7, 0.0))
    spans = timed(work_of(), way(2, 8), slow).spans
    backward = {span.unit: span.end for span in spans if span.what == "backward"}
    reductions = [span for span in spans if span.what == "reduce"]
    assert all(span.start >= backward[span.unit] for span in reductions)
    assert reductions[0].start == pytest.approx(backward[reductions[0].unit])
    starts = [span.start for span in spans if span.what == "backward"]
    assert starts[2] >= reductions[0].end, "the second reduction waits, and compute with it"


@given(RUNS, st.floats(1.0, 50.0))
@SEVERAL
def test_a_faster_link_is_never_slower(run, factor):
    faster = replace(
        MACHINE,
        inside=Link(MACHINE.inside.nbytes_per_second * factor, 0.0),
        outside=Link(MACHINE.outside.nbytes_per_second * factor, 0.0),
    )
    slow, fast = (timed(work_of(), run, each).seconds for each in (MACHINE, faster))
    assert fast <= slow * (1 + 1e-9)


@given(RUNS, st.floats(0.0, 1e-3), st.floats(0.0, 1e-3))
@SEVERAL
def test_a_longer_hop_is_never_faster(run, one, other):
    low, high = sorted((one, other))
    seconds = [
        timed(work_of(), run, replace(MACHINE, inside=Link(1e11, hop))).seconds
        for hop in (low, high)
    ]
    assert seconds[0] <= seconds[1] * (1 + 1e-9)


def test_recompute_adds_a_forward_to_every_backward_and_sends_nothing():
    plain, again = (timed(work_of(), way(3, 8, recompute=r), MACHINE) for r in (0.0, 1.0))
    assert again.compute == pytest.approx(plain.compute * 4 / 3)
    assert sent_for(again, "gather") == sent_for(plain, "gather")


def test_later_micro_batches_add_whole_gradients_to_those_that_rest():
    once, twice = (timed(work_of(), way(1, 1, accumulate=n), MACHINE) for n in (1, 2))
    assert once.memory == 0
    assert twice.memory == pytest.approx(UNITS * NUMEL * 6 / 1e12)  # two reads and a write
    for stage in (2, 3):
        assert timed(work_of(), way(stage, 1, accumulate=2), MACHINE).memory == 0


def test_contention_slows_compute_only_beside_collectives():
    slow = replace(MACHINE, efficiency=replace(PERFECT, contention=0.5))
    assert timed(work_of(), way(3, 1), slow).contention == 0
    # links are the bound: while compute runs, something is always under way, at half the speed
    heavy = replace(slow, inside=Link(1e8, 0.0))
    step = timed(work_of(), way(3, 8), heavy)
    assert 0 < step.contention <= step.compute + step.memory + 1e-12


@again_but("1000")
@pytest.mark.parametrize("ranks", [2, 10, 1000])
def test_the_slowest_of_many_is_the_expected_maximum(ranks):
    """Against sampling; Blom's approximation is good to 0.02 from two ranks on."""
    random = Random(0)
    rounds = 4000 if ranks < 1000 else 400
    drawn = [max(random.gauss(0, 1) for _ in range(ranks)) for _ in range(rounds)]
    assert slowest_of(ranks) == pytest.approx(sum(drawn) / rounds, abs=0.06)
    assert slowest_of(1) == pytest.approx(0, abs=1e-12)


def test_a_step_on_the_cpu_that_fits_beside_the_next_forward_costs_nothing():
    """Only the last units' steps are waited for when the CPU is slow."""
    work = work_of(flops=1e10)
    run = way(3, 8, optimizer="cpu", step="cpu")
    quick = replace(MACHINE, cpu_rate=1e15, host_rate=1e15, host_memory_rate=1e17)
    assert timed(work, run, quick).exposed_host == pytest.approx(0, abs=1e-6)
    slow = timed(work, run, replace(MACHINE, cpu_rate=1e7))
    assert slow.bound == "host link"
    # the CPU is the bound: a step is what it needs for every element
    assert slow.seconds >= UNITS * NUMEL / 8 * 30 / 1e7


def test_states_in_cpu_memory_are_streamed_where_the_link_is_faster_than_the_cores():
    machine = replace(MACHINE, cpu_rate=1e7, host_rate=1e7)  # 30 bytes by the cores, 12 each way
    chosen, streamed, stepped = (
        timed(work_of(), way(3, 8, optimizer="cpu", step=step), machine)
        for step in ("auto", "device", "cpu")
    )
    assert chosen.seconds == streamed.seconds < stepped.seconds
    assert streamed.seconds == pytest.approx(UNITS * NUMEL / 8 * 12 / 1e7, rel=0.02)
    slow_link = replace(machine, host_rate=3e6)
    chosen, stepped = (
        timed(work_of(), way(3, 8, optimizer="cpu", step=step), slow_link)
        for step in ("auto", "cpu")
    )
    assert chosen.seconds == stepped.seconds


@pytest.mark.parametrize(
    ("options", "nbytes"),
    [({"optimizer": "cpu", "step": "device"}, 2 * 12), ({"optimizer": "cpu", "step": "cpu"}, 30),
     ({"parameters": "cpu"}, 2)],
)  # fmt: skip
def test_ranks_of_a_host_share_its_memory_and_its_bytes_a_second(options, nbytes):
    """Links and cores of each rank are endless: the memory of the host is what bounds the step."""
    machine = replace(MACHINE, cpu_rate=1e15, host_rate=1e15, host_memory_rate=1e7 / HOST_SHARE)
    seconds = {
        ranks: timed(work_of(), way(3, 64, local_world_size=ranks, **options), machine).seconds
        for ranks in (1, 2, 8)
    }
    for ranks in (2, 8):
        assert seconds[ranks] == pytest.approx(ranks * seconds[1], rel=0.1)
    own = UNITS * NUMEL / 64
    assert seconds[8] >= own * nbytes / (1e7 / 8)


def test_a_rank_alone_has_the_memory_of_one_numa_node():
    rate = 1e7 / HOST_SHARE
    one = replace(MACHINE, cpu_rate=1e15, host_rate=1e15, host_memory_rate=rate)
    two = replace(one, numa_nodes=2)

    def seconds(machine, ranks):
        chosen = way(3, 64, local_world_size=ranks, parameters="cpu")
        return timed(work_of(), chosen, machine).seconds

    assert seconds(two, 1) == pytest.approx(2 * seconds(one, 1), rel=0.1)
    assert seconds(two, 2) == seconds(one, 2)
    assert seconds(two, 8) == seconds(one, 8)


def test_one_rank_of_a_host_has_the_cores_of_all():
    machine = replace(MACHINE, cpu_rate=1e7)
    alone, full = (
        timed(
            work_of(flops=1.0), way(3, 64, local_world_size=n, optimizer="cpu", step="cpu"), machine
        )
        for n in (1, 8)
    )
    assert full.seconds == pytest.approx(8 * alone.seconds, rel=0.1)


def test_a_fraction_of_the_states_leaves_the_rest_on_the_device():
    step = timed(work_of(), way(3, 8, optimizer="cpu", fraction=0.5, step="cpu"), MACHINE)
    stepped = {span.unit for span in step.spans if span.stream == "cpu"}
    assert stepped == {f"unit {index}" for index in range(UNITS // 2, UNITS)}
    whole = timed(work_of(), way(3, 8), MACHINE)
    assert step.optimizer == pytest.approx(whole.optimizer / 2)


def test_a_disk_that_bounds_the_step_takes_its_bytes_over_its_rate():
    run, machine = way(3, 8, optimizer="disk"), replace(MACHINE, disk_rate=1e6)
    step = timed(work_of(), run, machine)
    assert step.bound == "disk"
    assert step.seconds == pytest.approx(UNITS * NUMEL / 8 * 26 / 1e6, rel=0.02)


def test_weights_off_the_device_are_fetched_before_each_gather():
    step = timed(work_of(), way(3, 8, parameters="cpu"), replace(MACHINE, host_rate=1e6))
    fetches = [span for span in step.spans if span.what == "fetch"]
    assert len(fetches) == 2 * UNITS
    assert step.bound == "host link"


def test_a_scaling_curve_starts_at_one_and_large_worlds_are_quick():
    shape = TransformerShape(hidden=8192, layers=98, heads=64, vocab=50000)
    work = transformer_work(shape, seq=4096, microbatch=1)
    assert len(work.units) == 100
    recipe, conditions = way(3, 8)
    curve = scaling_curve(work, recipe, machine_of("h100-80"), [8, 512, 10_000], conditions)
    assert curve[0].efficiency == 1
    assert [point.efficiency for point in curve] == sorted(
        (point.efficiency for point in curve), reverse=True
    )
    speeds = [point.step.tokens_per_s / point.world_size for point in curve]
    assert curve[1].efficiency == pytest.approx(speeds[1] / speeds[0])


@pytest.mark.parametrize(
    "wrong",
    [
        {"stage": 4}, {"world_size": 0}, {"copies": 3}, {"optimizer": "tape"}, {"prefetch": -1},
        {"accumulate": 0}, {"recompute": 2.0}, {"fraction": -0.1},
    ],
)  # fmt: skip
def test_a_run_that_cannot_be_is_an_error_with_a_hint(wrong):
    with pytest.raises(ConfigError, match=r"expected .*, got .*\nhint: "):
        way(**{"stage": 3, "world_size": 8, **wrong})
    with pytest.raises(ConfigError, match="h100-80"):
        machine_of("abacus")
    with pytest.raises(ConfigError, match="fp8"):
        timed(work_of(), way(3, 8, dtype="fp8"), MACHINE)


def test_a_unit_takes_as_long_as_the_host_needs_to_launch_its_kernels():
    unit = UnitWork("small", 0, Work(1.0, nbytes=1.0), Work(2.0, nbytes=2.0, num_kernels=300))
    step = timed(ModelWork((unit,), 1), way(3, 1), replace(MACHINE, kernel_seconds=1e-5))
    assert step.seconds == pytest.approx(300e-5)
    assert step.bound == "memory"
    step = timed(
        ModelWork((unit,), 1), way(3, 1, recompute=1.0), replace(MACHINE, kernel_seconds=1e-5)
    )
    assert step.seconds == pytest.approx(400e-5)


def test_attention_and_the_head_stay_in_bf16_where_products_are_in_fp8():
    shape = TransformerShape(hidden=256, layers=1, heads=4, vocab=256, ffn=1024)
    machine = replace(MACHINE, flops={"bf16": 1e12, "fp8": 2e12})
    work = transformer_work(shape, seq=128, microbatch=1)
    wide, narrow = (timed(work, way(3, 1, dtype=dtype), machine) for dtype in ("bf16", "fp8"))
    block = work.units[1]
    saved = (block.forward.flops + block.backward.flops) / 2e12
    assert wide.compute - narrow.compute == pytest.approx(saved)


# shapes


@pytest.mark.parametrize(
    ("shape", "numel"),
    [
        # llm-foundry's table of results, NumParams at 2048 positions
        (TransformerShape(768, 12, 12, 50368, positions=2048), 125_311_488),
        (TransformerShape(2048, 24, 16, 50368, positions=2048), 1_315_950_592),
        (TransformerShape(4096, 32, 32, 50368, positions=2048), 6_658_859_008),
        (TransformerShape(8192, 80, 64, 50368, positions=2048), 64_862_437_376),
        # Llama 3.1 8B, its model card
        (
            TransformerShape(4096, 32, 32, 128256, kv_heads=8, ffn=14336, is_gated=True,
                             is_tied=False, has_bias=False),
            8_030_261_248,
        ),
    ],
)  # fmt: skip
def test_parameters_by_shape_are_those_that_were_published(shape, numel):
    assert shape.numel == numel
    assert transformer_work(shape, seq=2048, microbatch=1).numel == numel


def test_flops_by_shape_are_six_for_each_parameter_and_token_and_attention():
    """Megatron's formula, 72 B s l h^2 (1 + s/6h + V/12lh), for a GPT with unfused attention."""
    hidden, layers, vocab, seq, batch = 12288, 96, 51200, 2048, 2
    shape = TransformerShape(hidden, layers, 96, vocab)
    work = transformer_work(shape, seq=seq, microbatch=batch, fused_attention=False)
    formula = 72 * batch * seq * layers * hidden**2
    formula *= 1 + seq / (6 * hidden) + vocab / (12 * layers * hidden)
    passes = (each for unit in work.units for each in (unit.forward, unit.backward))
    assert sum(each.flops + each.attention_flops for each in passes) == pytest.approx(formula)


def test_saved_activations_are_korthikantis_table_two():
    shape = TransformerShape(6144, 48, 64, 51200)
    sbh = 2048 * 4 * 6144
    assert block_activation_nbytes(shape, seq=2048, microbatch=4) == pytest.approx(
        sbh * (34 + 5 * 64 * 2048 / 6144)
    )
    least = block_activation_nbytes(
        shape, seq=2048, microbatch=4, tensor_parallel=8, sequence_parallel=True,
        selective_recompute=True,
    )  # fmt: skip
    assert least == pytest.approx(sbh * 34 / 8)


# failures


def brute_force(seconds, checkpoint, restart, mtbf, random, until=300_000):
    """The useful share of a run that fails at exponential times, by playing it."""
    clock = useful = 0.0
    fails = random.expovariate(1 / mtbf)
    while useful < until:
        if clock + seconds + checkpoint <= fails:
            clock += seconds + checkpoint
            useful += seconds
        else:
            clock = fails
            up = random.expovariate(1 / mtbf)
            while up < restart:  # fails again while it starts
                clock += up
                up = random.expovariate(1 / mtbf)
            fails = clock + up
            clock += restart
    return useful / clock


def test_the_useful_share_is_that_of_a_run_played_with_random_failures():
    told = goodput(
        10.0, world_size=1, device_mtbf=2000.0, checkpoint_seconds=20.0, restart_seconds=60.0,
        interval=200.0,
    )  # fmt: skip
    played = brute_force(200.0, 20.0, 60.0, 2000.0, Random(1))
    assert told.share == pytest.approx(played, abs=0.01)


@given(st.floats(1.0, 600.0), st.floats(3600.0, 1e7), st.floats(0.0, 600.0))
@SEVERAL
def test_the_best_interval_is_the_best_of_a_fine_search(checkpoint, mtbf, restart):
    best = goodput(
        1.0, world_size=1, device_mtbf=mtbf, checkpoint_seconds=checkpoint, restart_seconds=restart
    )
    shares = [
        goodput(
            1.0, world_size=1, device_mtbf=mtbf, checkpoint_seconds=checkpoint,
            restart_seconds=restart, interval=best.interval * factor,
        ).share
        for factor in (0.5, 0.8, 0.95, 1.05, 1.25, 2.0)
    ]  # fmt: skip
    assert best.share >= max(shares) - 1e-9


def test_youngs_interval_is_the_limit_for_rare_failures():
    best = goodput(1.0, world_size=1, device_mtbf=1e9, checkpoint_seconds=1.0)
    assert young_interval(1.0, 1e9) == pytest.approx((2 * 1e9) ** 0.5)
    assert best.interval == pytest.approx(young_interval(1.0, 1e9), rel=1e-3)
    assert best.share == pytest.approx(1 - (2 / 1e9) ** 0.5, rel=1e-5)


def test_failures_come_as_often_as_there_are_devices():
    one, many = (
        goodput(1.0, world_size=n, device_mtbf=1.8e8, checkpoint_seconds=60.0) for n in (1, 10_000)
    )
    assert many.mtbf == pytest.approx(one.mtbf / 10_000)
    assert many.share < one.share
    assert many.share == pytest.approx(
        many.interval / (many.mtbf * (exp((many.interval + 60) / many.mtbf) - 1))
    )


def test_the_simulator_imports_no_torch():
    code = (
        "import sys, onefold.planner.simulate;print('torch' in sys.modules, 'numpy' in sys.modules)"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout.split() == ["False", "False"]


def test_every_machine_has_efficiencies_below_one():
    for machine in known_machines().values():
        shares = machine.efficiency
        assert 0 < shares.matmul <= 1
        assert 0 < shares.attention <= 1
        assert 0 < shares.memory <= 1
        assert 0 <= shares.contention < 1
