"""One memory model: runs and plans choose alike, and no choice exceeds its room."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from onefold.config import stage_of
from onefold.fit.bounds import ACTIVATIONS_SHARE, Limit, RankMemory, Users, room_of
from onefold.fit.kept_units import most_nbytes, spread
from onefold.fit.shares import Capacity, Line, choose, fill, fractions, lowest_stage, rooms_of
from onefold.planner.costs import Conditions
from onefold.planner.memory import bare, needs_of
from onefold.planner.mixed import DeviceKind, MixedJob, MixedSplit
from onefold.recipe import Member, Recipe, UnitRecipe
from onefold.wire.collectives import Group
from tests.support.free_memory import has_free
from tests.support.ranks import run_ranks
from tests.support.rows import again_but

STATE = 1 << 40
rooms_of_ranks = st.lists(st.floats(0.0, 1.5), min_size=1, max_size=5)
sizes_of_units = st.lists(st.integers(1, 100), min_size=1, max_size=12)


def run_shares(rooms: list[float]) -> Any:
    """The shares of a run whose ranks have room for these parts of the state."""
    lines = [Line("cpu", round(room * STATE / (1 - ACTIVATIONS_SHARE)), 0, STATE) for room in rooms]
    return Capacity(tuple((line,) for line in lines)).best(by_lines(lines))


def by_lines(lines: list[Line]) -> Any:
    """What ranks need is what their lines say."""
    return lambda left, shares: [
        line.excess(line.need(share), left)
        for line, share in zip(lines, fractions(shares, len(lines)), strict=True)
    ]


# shares


def test_ranks_with_little_room_are_full_to_a_part_and_the_others_share_the_rest():
    assert fill((0.5, 0.3, 0.3)) == run_shares([0.5, 0.3, 0.3]) == (10, 7, 7)
    assert fill((1.0, 1.0, 0.1)) == (29, 29, 6), "equal ranks have equal shares"
    assert fill((1.0, 1.0, 1.0)) is None


@given(rooms_of_ranks)
def test_fill_never_exceeds_a_limit(rooms):
    if sum(min(1.0, room) for room in rooms) < 1 + 1e-6:
        return
    for share, room in zip(fractions(fill(rooms), len(rooms)), rooms, strict=True):
        assert share <= room + 1e-12


@given(rooms_of_ranks)
def test_runs_fill_shares_by_the_same_function_as_plans(rooms):
    bounded = [min(1.0, room) for room in rooms]
    if sum(bounded) < 1 + 1e-6:
        return
    found = fractions(run_shares(rooms), len(rooms))
    for share, planned in zip(found, fractions(fill(rooms), len(rooms)), strict=True):
        assert share == pytest.approx(planned, abs=1 / 32), "a byte more or less is a part"


MEMBER = Member("weight", (256, 256), torch.float32, torch.float32)
UNITS = tuple(UnitRecipe(str(n), (MEMBER,)) for n in range(8))


def planned(memories: Sequence[int]) -> MixedSplit:
    """The split of a plan without activations, in the part of memory that a run leaves."""
    kinds = tuple(
        DeviceKind(str(rank), rank, 1, 1, {"device": room_of(free)}, None)
        for rank, free in enumerate(memories)
    )
    trace = bare(UNITS)
    return MixedJob(
        kinds=kinds,
        recipe=recipe_of(len(memories)),
        rows=1,
        tokens=1,
        conditions=Conditions(),
        near=lambda _: trace,
        exact=lambda _: trace,
    ).best()


def recipe_of(world: int) -> Recipe:
    return Recipe(world_size=world, local_world_size=world, units=UNITS)


@settings(max_examples=60, phases=(Phase.generate,))
@given(st.lists(st.integers(2_000_000, 14_000_000), min_size=2, max_size=5))
def test_runs_and_plans_choose_the_same_shares_in_the_same_memories(memories):
    world = len(memories)
    recipe, memory = recipe_of(world), RankMemory(torch.device("cpu"), 1, Group.from_handle(None))
    line, _ = rooms_of(recipe, needs_of, memory, {})[0]
    rooms = [[(line, (Limit("host", str(n), free),))] for n, free in enumerate(memories)]
    capacity, split = Capacity.from_rooms(rooms, world), planned(memories)
    if split.lacks:  # a run has the rest of the memory, too
        return

    def excess(left: float, shares: Any) -> list[float]:
        needs = (needs_of(replace(recipe, shares=shares), rank=rank) for rank in range(world))
        return [capacity.excess(rank, need, left) for rank, need in enumerate(needs)]

    assert capacity.best(excess) == split.weights


BENT = (12_747_581, 3_014_117, 6_852_706)
"""Memories in which a share needs more than its line says."""


def test_ranks_that_choose_shares_lower_those_that_need_more_than_their_line(monkeypatch):
    free = list(BENT)
    monkeypatch.setattr(
        RankMemory, "limits",
        lambda memory, *_: (Limit("host", str(memory.group.rank), free[memory.group.rank]),),
    )  # fmt: skip

    def body(rank: int) -> Any:
        memory = RankMemory(
            torch.device("cpu"), 1, Group.from_handle(torch.distributed.group.WORLD)
        )
        return choose(recipe_of(3), needs_of, memory, {}, is_auto=True)[0].shares

    memory = RankMemory(torch.device("cpu"), 1, Group.from_handle(None))
    line, _ = rooms_of(recipe_of(3), needs_of, memory, {})[0]
    lines = [replace(line, free=nbytes) for nbytes in BENT]
    unbent = Capacity(tuple((line,) for line in lines)).best(by_lines(lines))
    assert run_ranks(3, body) == [planned(BENT).weights] * 3 != [unbent] * 3


# units


@given(sizes_of_units, st.integers(0, 1500), st.integers(0, 4))
def test_units_that_stay_and_the_moving_ones_never_exceed_the_room(sizes, room, moving):
    stays = spread(sizes, room, moving)
    assert not stays or most_nbytes(sizes, stays, moving) <= room
    if sum(sizes) <= room:
        assert len(stays) == len(sizes)


@given(sizes_of_units, st.integers(0, 4))
def test_more_room_never_keeps_fewer_bytes(sizes, moving):
    kept = [sum(sizes[i] for i in spread(sizes, room, moving)) for room in range(0, 1300, 13)]
    assert kept == sorted(kept)


# bounds


def limits(host: str, *names: str, free: int = 900, local: int = 3) -> tuple[Limit, ...]:
    return tuple(Limit(host, name, free, local) for name in names)


def test_a_limit_that_all_ranks_of_a_host_name_is_shared_with_those_that_did_not_meet():
    met = [limits("a", "host"), limits("a", "host"), limits("b", "host", local=1)]
    users = Users.from_limits(met)
    assert [users.part(each) for each in met] == [300, 300, 900]


def test_ranks_in_containers_of_their_own_do_not_divide_them():
    met = [(*limits("a", "host", free=9000), *limits("a", f"container {n}")) for n in range(3)]
    users = Users.from_limits(met)
    assert [users.part(each) for each in met] == [900, 900, 900]


def test_a_device_is_divided_only_by_the_ranks_that_name_it():
    assert (
        Users.from_limits([limits("a", "cuda:0", local=1)]).part(limits("a", "cuda:0", local=1))
        == 900
    )


# stages


@again_but("3")
@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_a_run_takes_the_first_stage_that_a_plan_of_the_same_free_bytes_lets_fit(
    world_size, monkeypatch
):
    recipes = [
        Recipe(stage=stage_of(number), world_size=world_size, units=UNITS[:8])
        for number in (0, 1, 3)
    ]
    memory = RankMemory(torch.device("cpu"), world_size, Group.from_handle(None))
    for free in range(1_000_000, 20_000_000, 1_000_000):
        has_free(monkeypatch, free * world_size)
        fits = [each for each in recipes if needs_of(each)["cpu"] <= room_of(free)]
        assert lowest_stage(recipes, needs_of, memory)[0] == (fits[0] if fits else None)
