"""A calibration measures real ranks, and a machine is nothing but quotients of what it measured."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import partial

import pytest
import torch
from torch import nn

from onefold.config import Precision
from onefold.errors import ConfigError
from onefold.planner.calibration import (
    Calibration,
    Sample,
    Speeds,
    Transfer,
    Whole,
    calibrate,
    contention_of,
    link_of,
    middle,
    predict_seconds,
    rate_of,
    with_whole_steps,
)
from onefold.planner.planning import Cluster, plan
from onefold.planner.simulate import slowest_of
from onefold.planner.trace import tokens_of, trace
from onefold.planner.work import ModelWork, UnitWork, Work
from tests.support.commands import onefold
from tests.support.recipes import Way, timed, way

MIB = 2**20
ALONE = Speeds(
    ranks=1, threads=2, dtype="fp32", seconds=0.5, flops=20e9, products=rate_of(20e9, 0.2),
    attention_flops=4e9, attention=rate_of(4e9, 0.1), memory=rate_of(1e9, 0.1),
    kernel_seconds=0.1 / 1000, optimizer=rate_of(28e6, 2.8e-3), spread=0.0,
)  # fmt: skip
GATHER = Transfer(2e6, 3e-3, 2e-3), Transfer(10e6, 7e-3, 5e-3)
REDUCE = Transfer(2e6, 4e-3, 2e-3), Transfer(10e6, 12e-3, 9e-3)


def linked(
    cores: float,
    gather: tuple[Transfer, Transfer] = GATHER,
    reduce: tuple[Transfer, Transfer] = REDUCE,
) -> Speeds:
    """Two ranks of one thread each, with these collectives of small and of large units."""
    (gathers, hop), (reductions, other_hop) = link_of(*gather, ranks=2), link_of(*reduce, ranks=2)
    return replace(
        ALONE, ranks=2, threads=1, gather=gathers, reduce=reductions,
        hop_seconds=(hop + other_hop) / 2,
        contention=contention_of((gather[-1], reduce[-1]), cores / 2, 1),
    )  # fmt: skip


TOGETHER = linked(cores=2)
MADE = Calibration("made", 7_000, 512, (ALONE, TOGETHER), disk_rate=1e9)

UNIT = UnitWork("unit", 2_000_000, Work(1e9, 1e8, 1e7), Work(2e9, 2e8, 2e7, num_kernels=30))
WORK = ModelWork((UNIT, UNIT), 512)
"""Two units: in forward and backward 3 GFLOP, 30 MB, 30 kernels and 0.3 GFLOP of attention each."""


def fp32(stage: int, ranks: int, **options: float) -> Way:
    return way(
        stage, ranks, uses_rings=False, local_world_size=ranks, dtype="fp32", weight_itemsize=4,
        grad_itemsize=4, **options,
    )  # fmt: skip


def test_every_constant_is_a_quotient_of_two_measured_numbers():
    machine = MADE.machine(2)
    assert machine.peak("fp32") == pytest.approx(100e9)
    assert machine.efficiency.attention == pytest.approx(0.4)  # 40 GFLOP/s of 100
    assert machine.memory_rate == pytest.approx(10e9)
    assert machine.kernel_seconds == pytest.approx(100e-6)  # 0.1 s outside of 1000 kernels
    assert machine.memory_rate * machine.efficiency.optimizer == pytest.approx(10e9)
    assert machine.inside.nbytes_per_second == pytest.approx(1e9)  # 4 MB more in 4 ms
    assert machine.efficiency.reduce == pytest.approx(0.5)  # and in 8 ms
    assert machine.inside.latency == pytest.approx(2e-3)  # 3 ms less 1; 4 ms less 2
    assert machine.efficiency.contention == pytest.approx(14 / 19)  # of a core, none is left over


def test_a_step_takes_the_sum_of_its_work_where_nothing_is_hidden():
    compute = 2 * (3e9 / 100e9 + 0.3e9 / 40e9)
    memory = 2 * (30e6 / 10e9 + 30 * 100e-6)
    optimizer = 2 * 2_000_000 * 28 / 10e9
    step = timed(WORK, fp32(0, 1), MADE.machine(1))
    assert step.compute == pytest.approx(compute)
    assert step.memory == pytest.approx(memory)
    assert step.optimizer == pytest.approx(optimizer)
    assert step.seconds == pytest.approx(compute + memory + optimizer)


def test_random_numbers_take_time_of_their_own_and_are_drawn_again_by_a_recompute():
    drawing = replace(
        UNIT, forward=UNIT.forward._replace(drawn=3e6), backward=UNIT.backward._replace(drawn=1e6)
    )
    machine = replace(ALONE, draws=2e8).machine(1, 1e9)
    without, once, again = (
        timed(ModelWork((unit,), 512), fp32(0, 1, recompute=share), machine)
        for unit, share in ((UNIT, 0.0), (drawing, 0.0), (drawing, 1.0))
    )
    assert once.memory == pytest.approx(without.memory + 4e6 / 2e8)
    unit_forward = 1e7 / 10e9 + 10 * 100e-6
    assert again.memory == pytest.approx(once.memory + unit_forward + 3e6 / 2e8)


def test_a_trace_counts_what_dropout_draws_and_no_other_operation():
    blocks = (nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.1), nn.GELU()) for _ in range(2))
    module = nn.Sequential(*blocks)

    def is_block(child: nn.Module) -> bool:
        return isinstance(child, nn.Sequential) and child is not module

    seen = trace(module, (torch.zeros(5, 8),), units=is_block)
    assert [unit.forward.drawn for unit in seen.units] == [5 * 8, 5 * 8]
    assert sum(unit.backward.drawn for unit in seen.units) == 0
    assert sum(u.forward.drawn for u in trace(module.eval(), (torch.zeros(5, 8),)).units) == 0


def test_later_micro_batches_add_whole_gradients_to_those_that_rest():
    once, twice = (timed(WORK, fp32(1, 1, accumulate=n), MADE.machine(1)) for n in (1, 2))
    added = WORK.numel * 12 / 10e9  # two reads and a write
    assert twice.memory == pytest.approx(2 * once.memory + added)
    for stage in (2, 3):
        step = timed(WORK, fp32(stage, 1, accumulate=2), MADE.machine(1))
        assert step.memory == pytest.approx(2 * once.memory)


def test_twice_as_many_ranks_on_the_same_cores_are_half_as_fast_each():
    two, four = MADE.machine(2), MADE.machine(4)
    assert four.peak("fp32") == two.peak("fp32") / 2
    assert four.memory_rate == two.memory_rate / 2
    assert four.cpu_rate == two.cpu_rate / 2
    assert four.draw_rate == two.draw_rate / 2
    assert four.inside.nbytes_per_second == two.inside.nbytes_per_second / 2
    assert four.inside.latency == 2 * two.inside.latency
    assert four.kernel_seconds == 2 * two.kernel_seconds
    assert four.efficiency == two.efficiency
    assert four.disk_rate == 1e9 / 4


def test_where_collectives_need_whole_cores_compute_stands_still_beside_them():
    busy = GATHER[0], GATHER[1]._replace(cpu_seconds=GATHER[1].seconds)
    blocked = linked(2, busy, busy)
    assert blocked.contention == 1.0
    step = timed(WORK, fp32(2, 2), blocked.machine(2, 1e9))
    sent = sum(span.end - span.start for span in step.spans if span.stream != "compute")
    assert step.seconds == pytest.approx(step.compute + step.memory + step.optimizer + sent)


def test_cores_to_spare_take_the_collectives():
    assert linked(cores=16).contention == 0.0


def test_json_holds_what_was_measured_and_makes_the_same_calibration():
    made = replace(MADE, speeds=(ALONE, replace(TOGETHER, wholes=(Whole(2, 1, 0.5),))))
    fields = json.loads(json.dumps(made.as_dict()))
    assert Calibration.of(fields) == made
    assert fields["speeds"][1]["products"] == pytest.approx(100e9)
    assert fields["speeds"][1]["gather"] == pytest.approx(1e9)


def test_collectives_and_attention_are_described_where_they_were_measured():
    alone, together = MADE.lines()[1::2]
    assert "attention 40" in alone
    assert "gathers" not in alone
    assert "gathers 1.00 GB/s, reductions 500 MB/s" in together
    (_, plain) = replace(MADE, speeds=(replace(ALONE, attention_flops=0.0),)).lines()
    assert "attention" not in plain


# whole steps


def as_measured(speeds: Speeds, *ways: tuple[int, int]) -> Speeds:
    """`speeds` with whole steps that take what these very speeds say."""
    steps = (Whole(stage, accumulate, 0.0) for stage, accumulate in ways)
    wholes = tuple(step._replace(seconds=predict_seconds(speeds, WORK, step)) for step in steps)
    return replace(speeds, wholes=wholes, overlap_penalty=0.0, step_overhead=0.0)


@pytest.mark.parametrize("overlap_penalty", [0.0, 1e-4, 6e-3])
@pytest.mark.parametrize("step_overhead", [0.0, 0.03])
def test_whole_steps_tell_what_a_collective_takes_in_a_step_and_what_is_around_it(
    overlap_penalty, step_overhead
):
    true = replace(TOGETHER, overlap_penalty=overlap_penalty, step_overhead=step_overhead)
    found = with_whole_steps(as_measured(true, (2, 1), (3, 4)), WORK)
    assert found.overlap_penalty == pytest.approx(overlap_penalty)
    assert found.step_overhead == pytest.approx(step_overhead, abs=1e-9)


def test_a_lone_rank_has_only_what_is_around_its_steps():
    found = with_whole_steps(as_measured(replace(ALONE, step_overhead=0.02), (2, 1)), WORK)
    assert found.step_overhead == pytest.approx(0.02)
    step, without = (timed(WORK, fp32(2, 1), s.machine(1, 1e9)) for s in (found, ALONE))
    assert step.seconds == pytest.approx(without.seconds + 0.02)


def test_steps_that_are_faster_than_their_parts_leave_the_constants_as_they_were():
    fast = tuple(Whole(*way, seconds=1e-6) for way in ((2, 1), (3, 4)))
    found = with_whole_steps(replace(TOGETHER, wholes=fast), WORK)
    assert (found.overlap_penalty, found.step_overhead) == (0.0, 0.0)


def test_twice_as_many_ranks_on_the_same_cores_wait_twice_as_long_around_a_step():
    found = replace(TOGETHER, overlap_penalty=3e-3, step_overhead=0.01)
    assert found.machine(4, 1e9).step_seconds == 0.02
    assert found.machine(2, 1e9).inside.latency == pytest.approx(2e-3 + 3e-3)
    # once a collective, of three hops, which twice as many ranks share the cores for
    assert found.machine(4, 1e9).inside.latency == pytest.approx(2 * (2e-3 + 1e-3))


def test_ranks_that_share_a_core_do_not_wait_longer_for_the_slowest():
    waits = [
        replace(TOGETHER, spread=0.1).machine(ranks, 1e9).spread * slowest_of(ranks)
        for ranks in (2, 4, 8)
    ]
    assert waits == [pytest.approx(waits[0])] * 3
    assert waits[0] > 0


def test_of_several_runs_the_middle_one_counts():
    runs = [replace(ALONE, seconds=s) for s in (0.3, 0.9, 0.2, 0.25)]
    assert middle(runs[:3]).seconds == 0.3
    assert middle(runs).seconds == 0.25
    assert middle(runs[:1]) is runs[0]


# real ranks


impatient = partial(calibrate, patience=0, runs=1)  # the bounds below are wide


SAMPLE = Sample(model="tiny", seq=64, rows=1, precision=Precision())


@pytest.fixture(scope="module")
def measured() -> Calibration:
    return impatient(SAMPLE, (1, 2))


@pytest.mark.process
@pytest.mark.timeout(300)
def test_real_ranks_reach_plausible_rates_alone_and_together(measured):
    assert [each.ranks for each in measured.speeds] == [1, 2]
    for speeds in measured.speeds:
        machine = measured.machine(speeds.ranks)
        assert 1e6 < machine.peak("fp32") < 1e14
        assert 1e6 < machine.memory_rate < 1e13
        assert 0 <= machine.kernel_seconds < 1
        assert 1e6 < machine.cpu_rate < 1e13
        # the difference of two times, which other load may swallow: then drawing costs nothing
        assert 1e6 < machine.draw_rate < 1e13 or machine.draw_rate > 1e14
        assert speeds.seconds > 0
        assert speeds.overlap_penalty >= 0
        assert speeds.step_overhead >= 0
    assert [(w.stage, w.accumulate) for w in measured.speeds[0].wholes] == [(2, 1)]
    assert [(w.stage, w.accumulate) for w in measured.speeds[1].wholes] == [(2, 1), (3, 4)]
    assert all(w.seconds > 0 for speeds in measured.speeds for w in speeds.wholes)
    machine = measured.machine(2)
    assert 1e5 < machine.inside.nbytes_per_second < 1e12
    assert machine.efficiency.reduce > 0
    assert 0 <= machine.efficiency.contention <= 1


@pytest.mark.process
@pytest.mark.timeout(300)
def test_what_runs_is_what_a_trace_without_values_counts(measured):
    from onefold.planner.models.loader import build_model

    seen = trace(build_model("tiny", 64), tokens_of(SAMPLE.rows, SAMPLE.seq))
    flops = sum(unit.forward.flops + unit.backward.flops for unit in seen.units)
    attended = sum(u.forward.attention_flops + u.backward.attention_flops for u in seen.units)
    for speeds in measured.speeds:
        assert speeds.flops == flops
        assert speeds.attention_flops == attended


@pytest.mark.process
@pytest.mark.timeout(300)
def test_a_plan_that_calibrates_tells_step_times_of_this_machine(measured, monkeypatch):
    """It asks for the very ranks and the sample that are measured here."""

    def measured_here(sample: Sample, worlds: list[int]) -> Calibration:
        assert (sample, worlds) == (SAMPLE, [2])
        return replace(measured, speeds=measured.speeds[1:])

    monkeypatch.setattr("onefold.planner.planning.measured_here", measured_here)
    done = onefold("plan", "--seq", "64", "--calibrate", "--json")
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    assert told["machine"] == "this machine"
    assert told["calibration"]["model"] == "tiny"
    assert all(row["seconds"] > 0 for row in told["rows"])


@pytest.mark.process
@pytest.mark.timeout(300)
def test_a_module_that_cannot_run_is_one_clear_error():
    with pytest.raises(ConfigError, match=r"Sequential to run a micro-batch, got"):
        calibrate(Sample(model=nn.Sequential(nn.Linear(3, 4)), seq=8, rows=1), (1,))


def test_a_module_that_no_other_process_can_have_is_an_error():
    module = nn.Linear(3, 4)
    module.secret = lambda: None
    with pytest.raises(ConfigError, match="Linear to be pickled"):
        calibrate(Sample(model=module), (1,))


def test_a_module_that_does_not_fit_is_an_error():
    with pytest.raises(ConfigError, match="to fit into memory once for each of 4096 ranks"):
        calibrate(Sample(model="large"), (4096,))


@pytest.mark.parametrize(
    "cluster",
    [Cluster(machine="h100-80"), Cluster(memory=MIB), Cluster(device_type="cpu", nodes=2)],
)
def test_other_machines_cannot_be_calibrated_here(cluster):
    with pytest.raises(ConfigError, match="calibration for ranks on the CPU of this machine"):
        plan("tiny", cluster=cluster, seq=64, calibrate=True)


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (("--gpus", "4", "--mem", "1GiB"), "--calibrate for the CPU ranks"),
        (("--cluster", "h100-80"), "--calibrate for the CPU ranks"),
        (("--nodes", "2", "--ranks", "2"), "got 2 nodes"),
    ],
)
def test_the_command_refuses_them_in_one_line(flags, said):
    done = onefold("plan", "--seq", "64", *flags, "--calibrate")
    assert done.returncode == 2
    assert said in done.stderr
    assert "hint:" in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1


def test_the_command_refuses_a_model_to_calibrate_at_that_there_is_not():
    done = onefold("plan", "--seq", "64", "--ranks", "2", "--calibrate", "tinny")
    assert done.returncode == 2
    assert "did you mean 'tiny'?" in done.stderr
