"""A plan for several kinds of devices: rows by speed, states by memory."""

from __future__ import annotations

import json
from dataclasses import replace
from math import inf
from typing import Any

import pytest
import torch
from torch import nn

import onefold
from onefold.config import stage_of
from onefold.errors import ConfigError
from onefold.planner.clusters import Cluster, parsed
from onefold.planner.machines import Efficiency, Link, Machine, machine_of
from onefold.planner.memory import forecast
from onefold.planner.models.gpt import GPT, GPTConfig
from onefold.planner.planned_axes import ModelAxes
from onefold.planner.planning import plan
from onefold.planner.result import Plan
from onefold.planner.show import runs_of
from onefold.planner.trace import default_loss, tokens_of, trace
from onefold.recipe import Recipe
from onefold.recording.report import Report
from tests.support.commands import onefold as command
from tests.support.planned import most_of
from tests.support.ranks import run_ranks, seeded
from tests.support.rows import again_but, worlds_in_turn

SEQ, MIB = 32, 2**20
GPUS = "8xh100-80 + 16xa100-40"


def gpt(layers: int = 4, width: int = 64) -> nn.Module:
    with torch.device("meta"):
        return GPT(GPTConfig(num_layers=layers, width=width, num_heads=2, lr=1e-3), SEQ)


def machine(name: str, speed: float = 1.0) -> Machine:
    """A machine whose network and host cost nothing."""
    return Machine(
        name, {"fp32": speed * 1e12, "bf16": speed * 1e12}, speed * 1e12, 80e9,
        Link(inf, 0.0), Link(inf, 0.0), Efficiency(0.5, 0.5), kernel_seconds=0.0,
        operation_seconds=0.0, call_seconds=0.0,
    )  # fmt: skip


def kinds(*speeds: float, memory: tuple[int, ...] = (80 << 30, 80 << 30)) -> list[Cluster]:
    """Two ranks of each kind, on a host of their own."""
    return [
        Cluster(ranks=2, memory=nbytes, machine=machine(f"kind {index}", speed))
        for index, (speed, nbytes) in enumerate(zip(speeds, memory, strict=True))
    ]


def planned(cluster: Any, **options: Any) -> Plan:
    return plan(gpt(), cluster=cluster, seq=SEQ, **{"stage": 3, "offload": None, **options})


# one kind


def twice(kind: str) -> list[Cluster]:
    """One kind under two names."""
    first, second = (parsed(f"8x{kind}")[0] for _ in range(2))
    return [first, replace(second, machine=replace(machine_of(kind), name="the same"))]


@again_but("h100-80-3", "a100-40-1")
@worlds_in_turn
@pytest.mark.parametrize("stage", [0, 1, 3])
@pytest.mark.parametrize("kind", ["h100-80", "a100-40"])
def test_one_kind_twice_is_one_kind_byte_for_byte_and_time_for_time(kind, stage):
    one = planned(f"16x{kind}", stage=stage, batch=2, wire=None)
    two = planned(twice(kind), stage=stage, batch=2, wire=None)
    assert one.mixed is None
    assert one.taken.composed is None
    assert two.mixed.split.rows == (2,) * 16
    assert two.mixed.split.weights is None
    assert two.taken.forecast == one.taken.forecast
    assert two.taken.step == one.taken.step
    assert two.mixed.split.as_dict()["kinds"][0] == {
        **two.mixed.split.as_dict()["kinds"][1], "kind": kind, "first_rank": 0
    }  # fmt: skip
    assert parsed(f"8x{kind} + 8x{kind}") == parsed(f"16x{kind}")


@again_but("8xh100-80 + 4xa100-40-False")
@pytest.mark.parametrize(("cluster", "are_even"), [(GPUS, True), ("8xh100-80 + 4xa100-40", False)])
def test_gradients_cross_between_hosts_as_in_a_run_that_knows_no_kinds(cluster, are_even):
    row = planned(cluster, stage=0).taken
    assert row.forecast.recipe.has_hosts == are_even
    assert ("reduce_scatter between" in row.forecast.sent) == are_even


# rows


def test_rows_sum_to_the_batch_and_follow_speeds():
    split = planned(kinds(1.0, 3.0), batch=16).mixed.split
    assert sum(split.rows) == 4 * 16
    assert split.rows == (8, 8, 24, 24)
    found = planned(GPUS, batch=8, precision="bf16", stage="auto", offload="auto")
    for row in found.rows:
        assert sum(row.mixed.rows) == 24 * 8


def test_speeds_of_one_to_three_take_half_of_the_time_of_an_equal_split():
    mixed = planned(kinds(1.0, 3.0), batch=16).mixed
    assert mixed.equal.step.seconds / mixed.split.step.seconds == pytest.approx(2.0, rel=0.01)
    assert mixed.split.step.tokens_per_s == pytest.approx(4 * 16 * SEQ / mixed.split.step.seconds)


def test_a_step_takes_as_long_as_its_slowest_rank():
    split = planned(GPUS, batch=3).mixed.split
    assert split.step.seconds == max(each.step.seconds for each in split.kinds)


def test_rows_that_do_not_fit_go_to_ranks_that_have_room():
    """The fast kind's memory holds few rows: the slow one takes the others."""
    free = planned(kinds(3.0, 1.0), batch=16).mixed.split
    assert free.rows[0] == 24
    nbytes = int(0.7 * free.kinds[0].needs["device"])
    split = planned(kinds(3.0, 1.0, memory=(nbytes, 80 << 30)), batch=16).mixed.split
    assert split.fits
    assert sum(split.rows) == 64
    assert split.rows[0] < 24
    assert split.rows[2] > 8


# states


def deep(layers: int, memory: tuple[int, int]) -> Plan:
    """A model whose states are many and whose activations are few."""
    cluster = kinds(1.0, 1.0, memory=memory)
    return plan(gpt(layers, 256), cluster=cluster, seq=4, stage=3, offload=None, batch=1)


def test_memories_of_one_to_three_hold_a_model_of_twice_the_parameters():
    memory = (64 * MIB, 192 * MIB)
    mixed = deep(4, memory).mixed
    assert mixed.largest / mixed.equal_largest == pytest.approx(2.0, rel=0.05)
    assert deep(15, memory).mixed.equal.fits
    assert not deep(16, memory).mixed.equal.fits, "even shares hold the sums of a host, too"
    assert deep(33, memory).fits, "more than twice the layers: one window less is paid for"
    assert not deep(40, memory).fits


def test_shares_are_even_where_even_ones_fit_and_as_even_as_memory_allows_elsewhere():
    assert planned(kinds(1.0, 3.0)).mixed.split.weights is None
    made = deep(24, (64 * MIB, 192 * MIB))
    split = made.mixed.split
    assert split.fits
    assert not made.mixed.equal.fits
    low, high = split.weights[0], split.weights[-1]
    assert split.weights == (low, low, high, high)
    assert low < high
    free = -split.kinds[0].missing["device"]
    assert free < 0.05 * 64 * MIB, "the tight kind is full"
    assert split.tightest.kind.name == "kind 0"
    assert f"shares={runs_of(split.weights)}" in made.line
    assert made.command == ""


@again_but("2-3")
@worlds_in_turn
@pytest.mark.parametrize("stage", [1, 3])
@pytest.mark.parametrize("accumulate", [1, 2])
def test_states_and_messages_of_each_rank_are_those_of_a_run_with_its_share(stage, accumulate):
    shares, rows = (5, 0, 2), (3, 1, 2)

    def body(rank: int) -> Report:
        module = seeded(gpt_on_cpu)
        optimizer = torch.optim.AdamW(module.parameters(), lr=1e-3)
        onefold.shard(module, optimizer, stage=stage, shares=shares)
        tokens = torch.arange(rows[rank] * SEQ).view(rows[rank], SEQ) % 256
        for _ in range(2):
            for _ in range(accumulate - 1):
                with onefold.accumulate(module):
                    default_loss(module(tokens)).backward()
            default_loss(module(tokens)).backward()
            optimizer.step()
            optimizer.zero_grad()
        return onefold.report(module)

    recipe = Recipe(stage=stage_of(stage), world_size=3, shares=shares)
    for rank, report in enumerate(run_ranks(3, body)):
        traced = trace(gpt(), tokens_of(rows[rank], SEQ))
        found = forecast(traced, recipe, rank=rank, accumulate=accumulate)
        for kind in ("weight", "master", "optimizer"):
            held = sum(usage.now for usage in report.memory.get(kind, {}).values())
            rest = sum(n for (each, _), n in found.resting.items() if each == kind)
            assert held == rest, (rank, kind)
        for what in ("gather", "reduce_scatter"):
            assert report.last_step[what].sent_nbytes == found.sent.get(what, 0), (rank, what)
        for kind in ("unsharded", "grad"):
            held = sum(usage.peak for usage in report.memory.get(kind, {}).values())
            assert held == pytest.approx(most_of(found, kind), rel=0.05), (rank, kind)
        for kind in ("partial_grad", "wire"):
            held = sum(usage.peak for usage in report.memory.get(kind, {}).values())
            assert held <= 1.05 * most_of(found, kind), (rank, kind)


def gpt_on_cpu() -> nn.Module:
    return GPT(GPTConfig(num_layers=4, width=64, num_heads=2, lr=1e-3), SEQ)


def test_a_plan_for_which_nothing_fits_says_what_would():
    memory = (24 * MIB, 40 * MIB)
    made = deep(12, memory)
    assert not made.fits
    mixed = made.mixed
    assert mixed.largest < made.numel
    assert mixed.more
    text = str(made)
    assert "it would fit with" in text
    assert "more kind 1" in text
    memory = (8 * MIB, 8 * MIB)
    rows = planned(kinds(1.0, 1.0, memory=memory), batch=64)
    fewer = rows.mixed.fewer_rows
    assert 0 < fewer < 64
    assert f"--batch {fewer}" in str(rows)
    assert planned(kinds(1.0, 1.0, memory=memory), batch=fewer).fits
    assert not planned(kinds(1.0, 1.0, memory=memory), batch=fewer + 1).fits


def test_more_of_a_kind_fit_as_the_plan_says():
    mixed = deep(12, (24 * MIB, 40 * MIB)).mixed
    count = dict(mixed.more)["kind 1"]
    small, large = kinds(1.0, 1.0, memory=(24 * MIB, 40 * MIB))
    more = [small, replace(large, ranks=large.ranks + count)]
    assert plan(gpt(12, 256), cluster=more, seq=4, stage=3, offload=None).fits


# text, JSON and mistakes


def test_the_command_prints_each_kind_and_json_has_the_same():
    flags = ["plan", "--model", "mini", "--cluster", GPUS, "--batch", "48", "--stage", "0"]
    done = command(*flags)
    assert done.returncode == 0, done.stderr
    for word in ("h100-80", "a100-40", "an equal split takes", "tightest: rank", "rows of each"):
        assert word in done.stdout
    plain = json.loads(command(*flags, "--json").stdout)
    mixed = plain["mixed"]
    assert sum(mixed["rows"]) == 24 * 48
    assert [each["kind"] for each in mixed["kinds"]] == ["h100-80", "a100-40"]
    assert mixed["seconds"] < mixed["equal"]["seconds"]
    assert plain["rows"][0]["seconds"] == mixed["seconds"]
    assert mixed["would_fit"] is None


BAD = {
    "8xh100-80 + ": "expected kinds of devices as COUNTxMACHINE",
    "h100-80 + 8xa100-40": "got 'h100-80'",
    "0xh100-80 + 8xa100-40": "got '0xh100-80'",
    "8xabacus + 8xa100-40": "got 'abacus'",
    "12xh100-80 + 8xa100-40": "whole nodes of 8 h100-80",
}


@pytest.mark.parametrize("text", BAD)
def test_a_cluster_that_cannot_be_is_named(text):
    with pytest.raises(ConfigError, match=BAD[text]):
        planned(text)


def test_choices_that_no_mixed_cluster_has_are_named():
    with pytest.raises(ConfigError, match="axes of the model"):
        planned(GPUS, axes=ModelAxes(tp=2))
    with pytest.raises(ConfigError, match="wire 'hybrid'"):
        planned(GPUS, wire="hybrid")
    with pytest.raises(ConfigError, match="devices of types cpu and cuda"):
        planned([Cluster(ranks=2, memory="1GiB"), Cluster(device_type="cpu", memory="1GiB")])
    with pytest.raises(ConfigError, match="at least one kind"):
        planned([])
    done = command("plan", "--cluster", GPUS, "--mem", "80GiB")
    assert done.returncode == 2
    assert "mem too" in done.stderr


def test_auto_takes_as_many_rows_in_the_mean_as_fit():
    memory = (8 * MIB, 24 * MIB)
    made = planned(kinds(1.0, 3.0, memory=memory), batch="auto")
    rows = made.taken.rows
    assert made.fits
    assert sum(made.mixed.split.rows) == 4 * rows
    assert not planned(kinds(1.0, 3.0, memory=memory), batch=rows + 1).fits


def test_without_machines_rows_are_the_same_and_states_follow_memory():
    """There is no speed: only memory is known."""
    cluster = [Cluster(ranks=2, memory="24MiB"), Cluster(ranks=2, memory="96MiB")]
    made = plan(gpt(12, 256), cluster=cluster, seq=4, stage=3, offload=None)
    assert made.taken.step is None
    assert made.mixed.split.rows == (1,) * 4
    assert made.mixed.split.weights[0] < made.mixed.split.weights[3]
    assert made.fits
    assert "an equal split does not fit: " in str(made)
