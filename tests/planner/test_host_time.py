"""The host's time in a plan: counted calls, measured rates, and the page that shows both."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from types import FrameType

import gpu_plans
import pytest
import torch

import onefold
from onefold.planner.clock_executor import HOST, PARAMETER_CALLS, UNIT_CALLS
from onefold.planner.machines import known_machines, machine_of
from onefold.planner.models.gpt import GPT, GPTConfig
from onefold.planner.work import ModelWork, UnitWork, Work
from tests.support.fresh import run_scripts
from tests.support.recipes import timed, way

OURS = str(Path(onefold.__file__).parent)
ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "measurements" / "gpu.md"
PARAMETERS_OF_A_BLOCK = 12


def calls_of_a_step(
    num_layers: int, stage: int, precision: str | None, *, by_block: bool = True
) -> int:
    """Onefold's own Python calls in one steady step of one rank.

    `by_block`: with the units of several ranks, which one rank has where they are named.
    """
    torch.manual_seed(0)
    model = GPT(GPTConfig(num_layers=num_layers, width=32, num_heads=2, lr=1e-3), 8)
    optimizer = torch.optim.AdamW(model.parameters())
    units = list(model.blocks) if by_block else None
    onefold.shard(model, optimizer, stage=stage, precision=precision, units=units)
    tokens = torch.zeros(1, 8, dtype=torch.int64)

    def step() -> None:
        model(tokens).float().sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    count, before = 0, sys.getprofile()

    def note(frame: FrameType, event: str, _: object) -> None:
        nonlocal count
        name = frame.f_code.co_filename
        count += event == "call" and name.startswith(OURS) and "planner" not in name

    step()
    step()
    sys.setprofile(note)
    try:
        step()
    finally:
        sys.setprofile(before)
    return count


@pytest.mark.parametrize("by_block", [True, False], ids=["unit", "parameter"])
def test_a_plan_counts_the_calls_that_a_step_costs(by_block):
    """In processes of their own: after some tests of others, a unit takes 240 calls more."""
    cases = [(stage, precision) for stage in (0, 3) for precision in (None, "bf16")]
    how = f"by_block={by_block}"
    scripts = [
        f"import sys\nsys.path[:0] = [{str(ROOT)!r}, {str(ROOT / 'benchmarks')!r}]\n"
        "from tests.planner.test_host_time import calls_of_a_step as calls\n"
        f"four, two = (calls(n, {stage}, {precision!r}, {how}) for n in (4, 2))\n"
        "print((four - two) / 2)"
        for stage, precision in cases
    ]
    planned = UNIT_CALLS if by_block else PARAMETER_CALLS * PARAMETERS_OF_A_BLOCK
    for run in run_scripts(scripts):
        assert run.returncode == 0, run.stderr
        assert float(run.stdout) == pytest.approx(planned, rel=0.15 if by_block else 0.25)


def test_a_step_takes_as_long_as_the_host_where_the_device_is_faster():
    unit = UnitWork("small", 0, Work(1.0, num_kernels=10), Work(2.0, num_kernels=20))
    work, run = ModelWork((unit,) * 4, 1), way(3, 2, uses_rings=False)
    h200 = replace(machine_of("h200"), operation_seconds=1e-3, call_seconds=1e-5)
    step = timed(work, run, h200)
    assert step.seconds == pytest.approx(4 * (31e-3 + UNIT_CALLS * 1e-5), rel=0.01)
    assert step.bound == "host"
    assert getattr(step, HOST) > 0.9 * step.seconds
    others = timed(work, way(3, 2), h200)
    assert others.seconds == pytest.approx(4 * 31e-3, rel=0.01), "their calls are not known"
    slow = replace(h200, flops=dict.fromkeys(h200.flops, 1.0))
    assert timed(work, run, slow).exposed_launches == pytest.approx(0, abs=1e-2)


def test_with_rates_of_0_the_host_takes_no_time():
    unit = UnitWork("small", 0, Work(1e9, num_kernels=10), Work(2e9, num_kernels=20))
    machine = replace(machine_of("h100-80"), operation_seconds=0.0, call_seconds=0.0)
    step = timed(ModelWork((unit,) * 4, 1), way(3, 1, uses_rings=False), machine)
    assert step.exposed_launches == 0


def test_where_nobody_measured_a_host_a_plan_counts_with_the_one_that_was():
    rates = {(each.operation_seconds, each.call_seconds) for each in known_machines().values()}
    assert rates == {(43e-6, 1.2e-6)}


def test_the_page_shows_the_plans_of_the_campaign():
    block = PAGE.read_text().partition("<!-- plans: begin -->\n")[2]
    assert block.partition("\n<!-- plans: end -->")[0].splitlines() == gpu_plans.plan_lines()


def test_rates_of_the_host_are_fitted_without_the_row_that_they_predict():
    parts = gpu_plans.newest_campaign()
    for row in gpu_plans.OURS:
        whole, left = (gpu_plans.host_rates(parts, without) for without in ("", row.what))
        assert whole[0] == left[0]
        assert whole[1] != left[1]
    h200 = machine_of("h200")
    assert gpu_plans.host_rates(parts) == pytest.approx(
        (h200.operation_seconds, h200.call_seconds), rel=0.02
    )
