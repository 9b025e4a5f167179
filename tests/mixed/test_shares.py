"""`onefold.shard(shares=)`: state cut by weights that users give, or by free memory."""

from __future__ import annotations

from bisect import bisect
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import onefold
from onefold import ConfigError, TierError
from onefold.engine.registry import engine_of
from onefold.fit import shares as rooms
from onefold.fit.bounds import Limit, RankMemory
from onefold.fit.shares import Capacity, Line, Room, fractions, weights_of
from onefold.layout.flat import unit_bytes
from onefold.planner.memory import needs_of
from onefold.recipe import Member, Recipe, UnitRecipe
from onefold.wire.collectives import Group
from tests.axes.test_cut import Model, batches, loss_of
from tests.support.ranks import every_rank, run_ranks, seeded
from tests.support.rows import again_but, worlds_in_turn

WEIGHTS = [[1, 3], [0.2, 0.5, 0.3], [1, 0, 2]]


def sharded(shares: Any = None, **choices: Any) -> tuple[nn.Module, torch.optim.Optimizer]:
    module = seeded(Model)
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-2)
    onefold.shard(module, optimizer, shares=shares, **choices)
    return module, optimizer


def train(module: nn.Module, optimizer: Any, rank: int, world: int, steps: int = 2) -> None:
    for batch in batches(steps):
        loss_of(module, [t.chunk(world)[rank] for t in batch]).backward()
        optimizer.step()
        optimizer.zero_grad()


def weights_after(module: nn.Module) -> dict[str, Tensor]:
    with onefold.unsharded(module):
        return {n: p.detach().clone() for n, p in module.named_parameters()}


# weights


@pytest.mark.parametrize(
    ("given", "wanted"),
    [
        ([6, 2], (3, 1)), ([1.0, 3.0], (1, 3)), ([0.75, 0.25], (3, 1)), ([2, 2, 2], (1, 1, 1)),
        ([1 / 3, 2 / 3], (333, 667)), ([1e-9, 1.5], (1, 1000)), ((0, 0.5), (0, 1)),
    ],
)  # fmt: skip
def test_numbers_become_small_integers(given, wanted):
    assert weights_of(given) == wanted


@pytest.mark.parametrize(
    "given",
    [[1], [0, 0], [1, -1], [1, float("nan")], [float("inf"), 1], "equal", 3, [1, None], [1, True]],
    ids=str,
)
@pytest.mark.parametrize("where", ["everywhere", "on rank 1"])
@every_rank(2)
def test_shares_that_mean_nothing_are_named_on_every_rank(rank, given, where):
    with pytest.raises(ConfigError, match="shares"):
        sharded(given if rank or where == "everywhere" else [1, 2])


@every_rank(2)
def test_a_share_of_zero_is_refused_at_stage_0_and_ranks_that_disagree_are_named(rank):
    with pytest.raises(ConfigError, match="stage 0"):
        sharded([0, 1], stage=0)
    with pytest.raises(ConfigError, match=r"shares=\(3, 1\)"):
        sharded([3, 1] if rank else "auto")


# laws


@worlds_in_turn
@pytest.mark.parametrize("shares", WEIGHTS, ids=str)
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_any_split_gives_the_gradient_of_one_process(shares, stage):
    plain = seeded(Model).double()
    x, y = batches(1)[0]
    loss_of(plain, (x.double(), y)).backward()
    world = len(shares)

    def body(rank):
        module = seeded(Model).double()
        onefold.shard(module, stage=stage, shares=shares)
        parts = x.double().chunk(world)[rank], y.chunk(world)[rank]
        loss_of(module, parts).backward()
        return {n: p.grad.full_tensor() for n, p in module.named_parameters()}

    for found in run_ranks(world, body):
        for name, wanted in plain.named_parameters():
            torch.testing.assert_close(found[name], wanted.grad, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("shares", WEIGHTS, ids=str)
def test_bytes_at_rest_are_those_of_the_closed_form_and_in_proportion(shares):
    world = len(shares)

    def body(rank):
        module, optimizer = sharded(shares)
        train(module, optimizer, rank, world, 1)
        report, recipe = onefold.report(module), engine_of(module).recipe
        held = [unit_bytes(unit.members, recipe, rank) for unit in recipe.units]
        assert report.nbytes("weight") == sum(each.weight for each in held)
        assert report.nbytes("optimizer") == sum(each.moments for each in held)
        assert report.shares == weights_of(shares)
        assert "shares: " in str(report)
        return report.nbytes("weight")

    found = run_ranks(world, body)
    for nbytes, share in zip(found, shares, strict=True):
        assert nbytes / sum(found) == pytest.approx(share / sum(shares), abs=0.03)


def test_each_rank_may_have_a_tier_of_its_own(tmp_path):
    tiers = [None, "cpu", f"disk:{tmp_path}"]

    def body(rank, offload, shares):
        module, optimizer = sharded(shares, offload=offload[rank])
        train(module, optimizer, rank, 3)
        onefold.save(tmp_path / f"saved {offload[1]} {shares}", module, optimizer)
        return weights_after(module)

    for shares in (None, [1, 2, 1], [1, 0, 2]):
        mixed, even = run_ranks(3, body, tiers, shares)[0], run_ranks(3, body, [None] * 3, shares)
        for name, wanted in even[0].items():
            assert torch.equal(mixed[name], wanted), name


@pytest.mark.parametrize(
    "choices", [{"stage": "auto"}, {"wire": "zero++", "mesh": True}], ids=["stage", "two hops"]
)
@every_rank(4)
def test_tiers_that_do_not_go_together_are_refused_on_every_rank(rank, choices):
    given = dict(choices)
    if given.pop("mesh", None):
        given["mesh"] = torch.distributed.init_device_mesh("cpu", (2, 2))
    with pytest.raises(ConfigError, match="same tiers"):
        sharded(offload="optimizer" if rank else None, **given)


@again_but("3")
@pytest.mark.parametrize("stage", [1, 3])
def test_checkpoints_go_round_between_shares_and_one_process(tmp_path, stage):
    cuts = [(3, [1, 0, 2]), (2, None), (1, None), (2, [1, 3]), (3, [1, 0, 2])]

    def resume(rank, world, shares, number):
        module, optimizer = sharded(shares, stage=stage, offload="optimizer")
        if number:
            onefold.load(tmp_path / str(number - 1), module, optimizer)
        else:
            train(module, optimizer, rank, world)
        onefold.save(tmp_path / str(number), module, optimizer)
        state = optimizer.state_dict()["state"]
        entries = {f"{n}.{k}": v for n, each in state.items() for k, v in each.items()}
        return weights_after(module) | {
            name: v.full_tensor() if hasattr(v, "full_tensor") else torch.as_tensor(v)
            for name, v in entries.items()
        }

    wanted: dict[str, Tensor] = {}
    for number, (world, shares) in enumerate(cuts):
        for found in run_ranks(world, resume, world, shares, number):
            wanted = wanted or found
            assert found.keys() == wanted.keys()
            for name, value in wanted.items():
                assert torch.equal(found[name].reshape(-1), value.reshape(-1)), (number, name)


# "auto"

STATE = 1000


def room(free: int, name: str = "", base: int = 100, held: int = 0) -> Room:
    return Line("cpu", held, base, STATE), (Limit("host", name or str(free), free),)


def best(*rooms_by_rank: Room) -> Any:
    return by_lines(Capacity.from_rooms([[each] for each in rooms_by_rank], len(rooms_by_rank)))


def by_lines(capacity: Capacity) -> Any:
    """The shares of ranks that need what their one line says."""
    return capacity.best(
        lambda left, shares: [
            line.excess(line.need(share), left)
            for (line,), share in zip(
                capacity.ranks, fractions(shares, len(capacity.ranks)), strict=True
            )
        ]
    )


def test_shares_are_even_while_every_rank_has_room():
    assert best(room(10_000), room(900)) is None
    assert best(room(10_000), room(10_001), room(9_999)) is None


def test_a_tight_rank_is_filled_and_the_others_take_the_rest_evenly():
    shares = best(room(10_000), room(400), room(20_000))
    assert abs(shares[0] - shares[2]) <= 1
    assert shares[1] < shares[0]
    assert 0.15 < shares[1] / sum(shares) <= (0.75 * 400 - 100) / STATE
    assert best(room(401), room(10_000)) == best(room(403), room(10_001)), "memory flickers"
    assert best(room(80), room(10_000)) == (0, 1), "no room even for its unsharded units"


def test_ranks_of_one_host_divide_its_memory():
    assert best(room(1_000, "host"), room(1_000, "host"), room(9_000)) != best(
        room(1_000, "a"), room(1_000, "b"), room(9_000)
    )
    assert best(room(800, "a", held=600), room(9_000)) is None, "its own copy makes room"


def test_state_without_room_is_refused_and_ranks_are_named(monkeypatch):
    free, measured = [300_000, 800_000], rooms.rooms_of

    def limited(recipe: Recipe, needs: Any, memory: RankMemory, held: Any) -> list[Room]:
        """The real needs, in memory that is made up."""
        rank = torch.distributed.get_rank()
        line, _ = measured(recipe, needs, memory, {})[0]
        return [(line, (Limit("host", str(rank), free[rank]),))]

    monkeypatch.setattr(rooms, "rooms_of", limited)

    def fits(rank):
        module, optimizer = sharded("auto")
        train(module, optimizer, rank, 2, 1)
        return onefold.report(module)

    def refused(rank):
        with pytest.raises(TierError, match=r"rank 0 needs .* of .* free.*\n.*shares=\[.*fit"):
            sharded([3, 1])
        module, _ = sharded([1, 3])
        with pytest.raises(TierError, match="rank 0 needs"):
            onefold.mixed.reshare(module, [3, 1])
        assert onefold.report(module).shares == (1, 3)
        onefold.mixed.reshare(module)
        assert onefold.report(module).shares == wanted

    def nowhere(rank):
        with pytest.raises(TierError, match="all ranks together have room for"):
            sharded("auto")

    reports = run_ranks(2, fits)
    wanted = reports[0].shares
    assert wanted[0] < wanted[1]
    assert "rank 0 needs" in reports[0].offload
    run_ranks(2, refused)
    free[1] = 50_000
    run_ranks(2, nowhere)


def test_caps_of_one_to_three_hold_twice_the_model_of_even_shares():
    """By the closed form: the largest number of blocks whose state fits, even and with shares."""

    def recipe_of(blocks: int) -> Recipe:
        member = Member("weight", (512, 512), torch.float32, torch.float32)
        units = tuple(UnitRecipe(f"block {n}", (member,)) for n in range(blocks))
        return Recipe(world_size=2, local_world_size=2, units=units)

    caps = [200 << 20, 600 << 20]

    def best_of(blocks: int) -> Capacity:
        memory = RankMemory(torch.device("cpu"), 2, Group.from_handle(None))
        line, _ = rooms.rooms_of(recipe_of(blocks), needs_of, memory, {})[0]
        lines = [[(line, (Limit("host", str(n), cap),))] for n, cap in enumerate(caps)]
        return Capacity.from_rooms(lines, 2)

    counts = range(1, 300)  # blocks; a smaller model fits where a larger one does
    even = bisect(counts, 0, key=lambda n: min(best_of(n).most()) < 0.5)
    uneven = bisect(counts, 0, key=lambda n: isinstance(by_lines(best_of(n)), str))
    assert uneven >= 1.8 * even
    shares = by_lines(best_of(uneven))
    held = sum(unit_bytes(u.members, recipe_of(uneven), 0).numel for u in recipe_of(uneven).units)
    assert 16 * held * shares[0] / sum(shares) <= caps[0]
    assert 16 * held * shares[1] / sum(shares) <= caps[1]


def test_measured_shares_are_even_on_one_host():
    def body(rank):
        module, _ = sharded("auto")
        lowest, _ = sharded("auto", stage="auto")
        return onefold.report(module).shares, onefold.report(lowest).stage

    assert run_ranks(2, body) == [(None, 0), (None, 0)]
