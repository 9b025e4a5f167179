"""States in CPU memory may be stepped by the CPU, or streamed through the device: the bits are the
same where both are the CPU, and what is faster is measured.

With a CPU for a device blocks are copied into slots, stepped there and copied back, as on a GPU but
for its streams (tests/laws/test_gpu.py).
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

import onefold
from onefold.compose.stepping import StepRates, measured, slowest, stepper_of
from onefold.config import Offload
from onefold.engine import blocks
from onefold.engine.registry import engine_of
from onefold.errors import ConfigError, TierError
from onefold.layout.ledger import Ledger
from onefold.planner.memory import forecast
from onefold.planner.models.loader import build_model
from onefold.planner.trace import tokens_of, trace
from onefold.recipe import Recipe
from onefold.tier.step_device import NUM_STREAMS, DeviceStep
from onefold.wire.collectives import Group
from tests.engine.test_offload import batches, build, same_as_on_device, small_blocks, train
from tests.support.ranks import every_rank, run_ranks
from tests.support.rows import again_but, worlds_in_turn

CPU, GPU = torch.device("cpu"), torch.device("cuda")
STREAMED = Offload(optimizer="cpu", step="device")
__all__ = ["small_blocks"]  # a fixture for everything here: several blocks for each unit


@again_but("2-3", "3-1")
@worlds_in_turn
@pytest.mark.parametrize("stage", [1, 3])
@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_streamed_states_give_the_bits_of_states_that_rest_on_the_device(world_size, stage):
    clip = 0.1 if (world_size + stage) % 2 else None
    same_as_on_device(world_size, STREAMED, stage=stage, clip=clip)


@again_but("None-fraction", "dtype1-parameters", "dtype1-in backward", "dtype1-fraction")
@pytest.mark.parametrize(
    "offload",
    [replace(STREAMED, parameters="cpu"), replace(STREAMED, step_in_backward=True),
     replace(STREAMED, fraction=0.4)],
    ids=["parameters", "in backward", "fraction"],
)  # fmt: skip
@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
def test_so_do_parameters_fractions_and_steps_inside_backward(offload, dtype):
    same_as_on_device(2, offload, dtype=dtype)


@again_but("RMSprop")
@pytest.mark.parametrize("optimizer", [torch.optim.SGD, torch.optim.RMSprop])
def test_other_elementwise_optimizers_are_streamed_too(optimizer):
    same_as_on_device(2, STREAMED, optimizer=lambda groups: optimizer(groups, lr=1e-2))


@every_rank(2)
def test_a_run_goes_on_streamed_where_the_cpu_left_off(rank, tmp_path):
    module, optimizer = build("optimizer")
    train(module, optimizer, batches(2))
    onefold.save(tmp_path / "saved", module, optimizer)
    wanted = train(module, optimizer, batches(2, seed=5))
    module, optimizer = build(STREAMED)
    onefold.load(tmp_path / "saved", module, optimizer)
    assert train(module, optimizer, batches(2, seed=5)) == wanted
    return wanted


@again_but("9")
@pytest.mark.parametrize("depth", [3, 9])
@every_rank(2)
def test_what_is_streamed_takes_a_few_slots_whatever_the_size_of_the_model(rank, depth):
    module, optimizer = build(STREAMED, depth=depth)
    train(module, optimizer, batches(3))
    report = onefold.report(module)
    staged = report.memory["staging"]["device"]
    assert staged.now == staged.peak == NUM_STREAMS * 2 * 4 * blocks.BLOCK_NUMEL
    assert report.predicted["staging"] == staged.peak
    assert report.memory["optimizer"]["cpu"].now > 0


def test_a_cpu_has_nothing_to_choose():
    group = Group.from_handle(None)
    asked = Offload(optimizer="cpu")
    assert stepper_of(asked, CPU, group) == (replace(asked, step="cpu"), "")
    files = replace(asked, parameters="disk", disk=".")
    assert stepper_of(files, GPU, group) == (replace(files, step="cpu"), "")
    assert stepper_of(Offload(), GPU, group) == (Offload(), "")
    assert stepper_of(STREAMED, GPU, group) == (STREAMED, "")


@pytest.mark.parametrize(
    ("rates", "step", "word"),
    [(StepRates(cpu=56e9, link=8e9), "cpu", "stepped by the CPU: 0.67 billion"),
     (StepRates(cpu=28e9, link=24e9), "device", "2.00 through the device"),
     (None, "cpu", "stepped by the CPU")],
)  # fmt: skip
def test_the_faster_way_is_taken_and_says_what_was_measured(rates, step, word, monkeypatch):
    monkeypatch.setattr("onefold.compose.stepping.measured", lambda device, cores: rates)
    offload, told = stepper_of(Offload(optimizer="cpu"), GPU, Group.from_handle(None))
    assert offload.step == step
    assert word in told


def test_ranks_agree_on_the_slowest_of_them():
    def body(rank: int) -> StepRates:
        mine = StepRates(cpu=[30e9, 20e9, 40e9][rank], link=[9e9, 12e9, 8e9][rank])
        return slowest(mine, Group.from_handle(torch.distributed.group.WORLD))

    assert run_ranks(3, body) == [StepRates(20e9, 8e9)] * 3


def test_all_do_without_where_one_rank_has_no_room_to_measure():
    def body(rank: int) -> StepRates | None:
        mine = StepRates(1e9, 1e9) if rank else None
        return slowest(mine, Group.from_handle(torch.distributed.group.WORLD))

    assert run_ranks(2, body) == [None, None]


def test_rates_are_measured_in_a_moment(monkeypatch):
    monkeypatch.setattr("onefold.fit.rates.beyond_caches", lambda: 1 << 20)
    monkeypatch.setattr("onefold.fit.rates.CROSSING_NBYTES", 1 << 16)
    found = measured(CPU, (0,))
    assert 1e6 < found.cpu < 1e13
    assert 1e6 < found.link < 1e13


def test_a_device_without_room_for_slots_says_what_was_wanted_and_what_helps():
    with pytest.raises(
        TierError, match=r"bytes on cpu for blocks of states .*\n.*step=\"cpu\""
    ) as caught:
        DeviceStep(CPU, Ledger()).reserve([1 << 60])
    assert f"{1 << 60:,}" in str(caught.value)


def test_a_plan_counts_slots_only_where_states_may_be_streamed():
    def staged(device_type: str, **tiers: str) -> int:
        offload = Offload(optimizer="cpu", disk=".", **tiers)
        recipe = Recipe(world_size=2, device_type=device_type, offload=offload)
        return forecast(seen, recipe).resting.get(("staging", "device"), 0)

    seen = trace(build_model("tiny", 64), tokens_of(2, 64))
    moments = staged("cpu", step="device")
    copies_too = 3 * moments // 2  # of the fp32 weights that stay on the device
    assert staged("cuda") == staged("cuda", step="device") == copies_too > 0
    assert staged("cpu") == staged("cuda", step="cpu") == staged("cuda", parameters="disk") == 0


def test_only_states_in_cpu_memory_are_streamed(tmp_path):
    with pytest.raises(ConfigError, match="states in CPU memory"):
        Offload(optimizer="disk", disk=tmp_path, step="device")
    with pytest.raises(ConfigError, match="no parameters on disk"):
        Offload(optimizer="cpu", parameters="disk", disk=tmp_path, step="device")
    with pytest.raises(ConfigError, match="did you mean 'device'"):
        Offload(optimizer="cpu", step="devise")


def test_what_was_chosen_is_in_the_setting_of_every_unit():
    module, _ = build(STREAMED)
    places = {type(unit.context.tiers.step_device).__name__ for unit in engine_of(module).units}
    assert places == {"DeviceStep"}
