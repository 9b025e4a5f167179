"""Islands: data parallelism where they exchange every step, and the published methods elsewhere."""

from __future__ import annotations

import math
import time

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import onefold
from onefold.outer.parcels import ParcelMessage
from onefold.wire.codec import codec_of
from tests.support.island_runs import (
    IslandRank,
    IslandRun,
    averaging,
    batches,
    build,
    simulate,
    train_islands,
    train_plain,
)
from tests.support.ranks import every_rank, run_ranks, seeded
from tests.support.rows import again_but, worlds_in_turn

SIZES = [(1, 1), (2, 2), (2, 1), (3, 2, 1)]


def assert_near(got, wanted, tolerance=1e-12):
    for name, weight in wanted.items():
        torch.testing.assert_close(got[name], weight, rtol=0, atol=tolerance, msg=name)


def assert_alike(trained):
    for other in trained[1:]:
        for name, weight in trained[0].weights.items():
            assert torch.equal(other.weights[name], weight), name


@again_but("(1, 1)-0", "(2, 1)-3", "(3, 2, 1)-0")
@worlds_in_turn
@pytest.mark.parametrize("stage", [0, 1, 3])
@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_an_exchange_every_step_is_data_parallelism(sizes, stage):
    run = IslandRun(sizes, stage=stage)
    trained = train_islands(run)
    assert_alike(trained)
    assert_near(trained[0].weights, train_plain(run))
    assert trained[0].handle.num_rounds == run.steps


def test_it_is_exactly_data_parallelism_where_no_number_is_rounded():
    """Small whole numbers: every sum and product is exact, so the bits are equal."""

    def whole():
        layer = nn.Linear(8, 8, bias=False)
        nn.init.constant_(layer.weight, 2.0)
        return layer

    made = torch.Generator().manual_seed(0)
    data = [
        tuple(torch.randint(-2, 3, (4, 8), generator=made).float() for _ in range(2))
        for _ in range(2)
    ]
    run = IslandRun((2, 2), build=whole, batches=data, optimizer=lambda p: torch.optim.SGD(p, 0.25))
    trained = train_islands(run)
    plain = train_plain(run)["weight"]
    assert not torch.equal(plain, whole().weight)
    assert all(torch.equal(each.weights["weight"], plain) for each in trained)


def test_the_law_sees_a_wrong_divisor(monkeypatch):
    mean = ParcelMessage.mean

    def doubled(self, messages, weights, rows):
        mean(self, messages, weights, rows)
        rows.div_(2)

    monkeypatch.setattr(ParcelMessage, "mean", doubled)
    run = IslandRun((2, 1))
    with pytest.raises(AssertionError):
        assert_near(train_islands(run)[0].weights, train_plain(run))


METHODS = {
    "diloco": onefold.islands.Periods(4),
    "streaming": onefold.islands.Periods(6, fragments=3, delay=1, keep=0.5),
    "des-loc": onefold.islands.Periods(2, exp_avg=4, exp_avg_sq=6),
    "all": onefold.islands.Periods(4, exp_avg=4, exp_avg_sq=8, fragments=2, delay=1, keep=0.25),
}


def nesterov(parameters):
    return torch.optim.SGD(parameters, lr=0.7, momentum=0.9, nesterov=True)


@again_but("default")
@pytest.mark.parametrize("outer", [averaging, None], ids=["averaging", "default"])
def test_islands_step_by_the_outer_optimizer_and_by_that_of_diloco_by_default(outer):
    adam = {"optimizer": lambda p: torch.optim.AdamW(p, lr=1e-2)}
    trained = train_islands(IslandRun((2, 1), 3, outer=outer, **adam))[0]
    wanted = IslandRun((2, 1), 3, outer=outer or nesterov, **adam)
    assert_near(trained.weights, simulate(wanted, trained.units)[0])


@again_but("(1, 1)-3-des-loc", "(2, 1)-2-streaming", "(2, 2)-0-diloco", "(2, 2)-0-all")
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize(("sizes", "stage"), [((1, 1), 3), ((2, 1), 2), ((2, 2), 0)], ids=str)
def test_methods_are_what_the_papers_write(method, sizes, stage):
    run = IslandRun(
        sizes, METHODS[method], steps=13, stage=stage, outer=nesterov,
        optimizer=lambda p: torch.optim.AdamW(p, lr=1e-2),
    )  # fmt: skip
    trained = train_islands(run)
    wanted = simulate(run, trained[0].units)
    ranks = [k for k, size in enumerate(sizes) for _ in range(size)]
    for rank, island in enumerate(ranks):
        assert_near(trained[rank].weights, wanted[island], 1e-9)
    assert len(set(trained[0].units.values())) > 2


class SignMomentum(torch.optim.Optimizer):
    """Steps by the sign of a first moment, and has no second one."""

    def __init__(self, params, lr):
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                first = self.state[p].setdefault("exp_avg", torch.zeros_like(p))
                first.lerp_(p.grad, 0.1)
                p.sub_(first.sign(), alpha=group["lr"])


@again_but("SignMomentum")
@pytest.mark.parametrize("optimizer", [torch.optim.AdamW, SignMomentum])
def test_first_moments_alone_do_not_move_weights_far(optimizer):
    """The first input is not 0 on island 1 alone, so island 0 has no second moment for it."""
    data = batches(8)
    for x, _ in data:
        x[: len(x) // 2, 0] = 0
    run = IslandRun(
        (1, 1), onefold.islands.Periods(2, exp_avg=4), steps=8, batches=data,
        optimizer=lambda p: optimizer(p, lr=1e-2),
    )  # fmt: skip
    start = dict(seeded(build).named_parameters())
    trained = train_islands(run)
    for each in trained:
        moved = max((w - start[n]).abs().max().item() for n, w in each.weights.items())
        assert 1e-2 < moved < 8 * 2e-2
    if optimizer is SignMomentum:  # whose first moments all travel
        assert_near(trained[0].weights, simulate(run, trained[0].units)[0])


@again_but("{'precision': 'bf16'}", "{'offload': 'disk:'}")
@pytest.mark.parametrize(
    "options",
    [{"precision": "bf16"}, {"offload": "cpu"}, {"offload": "optimizer"}, {"offload": "disk:"}],
    ids=str,
)
def test_masters_and_tiers_take_part(options, tmp_path):
    """Weights of both islands agree after an exchange, whatever the precision and the tier."""
    if options.get("offload") == "disk:":
        options = {"offload": f"disk:{tmp_path}"}
    run = IslandRun(
        (2, 1), 2, steps=4, outer=nesterov, options=options,
        build=lambda: build().float(),
        batches=[(x.float(), y.float()) for x, y in IslandRun(steps=4).data],
        optimizer=lambda p: torch.optim.AdamW(p, lr=1e-2),
    )  # fmt: skip
    trained = train_islands(run)
    assert_alike(trained)
    assert trained[0].handle.num_rounds == 2


@again_but(
    "(1, 1)-None", "(1, 1)-int8+h", "(2, 2)-int4", "(1, 1, 1)-int8", "(2, 1)-None", "(2, 1)-int8+h"
)
@pytest.mark.parametrize("codec", [None, "int8", "int4", "int8+h"])
@pytest.mark.parametrize("sizes", [(1, 1), (2, 2), (1, 1, 1), (2, 1)], ids=str)
def test_an_exchange_sends_the_closed_form(sizes, codec):
    """Each rank sends its rows once to each other island: quantized matrices, exact vectors."""
    trained = train_islands(IslandRun(sizes, 2, steps=4, codec=codec, outer=nesterov))
    assert_alike(trained)
    shapes = [weight.shape for weight in trained[0].weights.values()]
    matrices = sum(math.prod(s) for s in shapes if len(s) == 2)
    vectors = sum(math.prod(s) for s in shapes if len(s) == 1)
    wanted = 8 * (matrices + vectors) * len(sizes) * (len(sizes) - 1) * 2  # rounds, fp64
    sent = sum(each.report.traffic["islands"].sent_nbytes for each in trained)
    if codec is None:
        assert sent == wanted
        return
    messages = [
        message
        for each in trained
        for index in range(len(each.handle._anchors.shares))
        for message in each.handle._places.messages(index, exact=False)
    ]
    numels = [
        [sum(b - a for a, b in m.quantized), sum(b - a for a, b in m.exact)] for m in messages
    ]
    aligned = [
        -(-codec_of(codec).nbytes(quantized) // 16) * 16 + 8 * exact for quantized, exact in numels
    ]
    assert sum(quantized for quantized, _ in numels) == matrices * len(sizes)
    assert sent == sum(aligned) * (len(sizes) - 1) * 2
    assert sent < wanted / 2


def regression(codec, *, feeds_back=True):
    """A convex problem on two islands: the distance of the last anchors from the optimum."""
    made = torch.Generator().manual_seed(3)
    target = torch.randn(4, 64, generator=made)
    x = torch.randn(64, 64, generator=made)
    data = [(x, x @ target.T)] * 120

    def zeros():
        layer = nn.Linear(64, 4, bias=False)
        nn.init.zeros_(layer.weight)
        return layer

    run = IslandRun(
        (1, 1), 5, build=zeros, batches=data, codec=codec, outer=nesterov,
        optimizer=lambda p: torch.optim.SGD(p, lr=0.1),
    )  # fmt: skip
    trained = train_islands(run)
    assert_alike(trained)
    return (trained[0].weights["weight"] - target).norm().item()


def test_quantized_exchanges_with_feedback_reach_the_optimum(monkeypatch):
    exact, int8, int4 = (regression(codec) for codec in (None, "int8", "int4"))
    assert int8 < 1.05 * exact
    assert int4 < 1.05 * exact
    monkeypatch.setattr(ParcelMessage, "keep_rounding", lambda *_: None)
    assert abs(regression("int4") - exact) > 3 * abs(int4 - exact)


def test_an_island_counts_the_seconds_that_it_waited():
    """Island 1 is late in every step."""

    def body(rank):
        run = IslandRun((1, 1), 2, steps=4)
        found = IslandRank.start(rank, run)
        for batch in run.data:
            time.sleep(0.2 if rank == 1 else 0.0)
            found.train([batch])
        return found.handle.waited_s

    island_0, island_1 = run_ranks(2, body)
    assert island_0 > 0.3
    assert island_1 < island_0


def test_states_lie_in_the_host_tier_and_are_counted():
    trained = train_islands(IslandRun((2, 2), 2, codec="int8", outer=nesterov))
    numel = sum(weight.numel() for weight in trained[0].weights.values())
    anchors = sum(each.report.memory["anchor"]["cpu"].now for each in trained[:2])
    assert numel * 8 <= anchors <= 1.3 * numel * 8
    assert sum(each.report.memory["feedback"]["cpu"].now for each in trained[:2]) == anchors
    assert sum(each.report.memory["optimizer"]["cpu"].now for each in trained[:2]) == anchors


CHECKPOINTED = {
    "mid-period": (onefold.islands.Periods(4), None, 6),
    "under way": (onefold.islands.Periods(4, delay=2, keep=0.5), "int8", 5),
    "fragments": (onefold.islands.Periods(4, exp_avg=4, fragments=2, delay=1), "int4", 7),
}


@again_but(
    "load first-fragments", "islands first-mid-period", "islands first-under way",
    "islands first-fragments",
)  # fmt: skip
@pytest.mark.parametrize("case", CHECKPOINTED)
@pytest.mark.parametrize("order", ["load first", "islands first"])
def test_a_run_goes_on_from_a_checkpoint_bit_for_bit(case, order, tmp_path):
    every, codec, at = CHECKPOINTED[case]
    run = IslandRun(
        (2, 1), every, steps=14, codec=codec, outer=nesterov,
        optimizer=lambda p: torch.optim.AdamW(p, lr=1e-2),
    )  # fmt: skip

    def whole(rank):
        found = IslandRank.start(rank, run)
        found.train(run.data[:at])
        folder = tmp_path / f"island-{found.handle.island}"
        onefold.save(folder, found.module, found.optimizer)
        found.train(run.data[at:])
        return found.weights()

    def resumed(rank):
        folder = tmp_path / f"island-{int(rank == 2)}"
        groups = [dist.new_group([0, 1]), dist.new_group([2])]
        module = run.build()
        optimizer = run.optimizer(module.parameters())
        onefold.shard(module, optimizer, mesh=groups[rank == 2])
        options = {"every": every, "codec": codec, "outer": nesterov}
        if order == "load first":
            onefold.load(folder, module, optimizer)
            handle = onefold.islands(module, optimizer, **options)
        else:
            handle = onefold.islands(module, optimizer, **options)
            onefold.load(folder, module, optimizer)
        assert handle.num_steps == at
        found = IslandRank(run, rank, module, optimizer, handle)
        found.train(run.data[at:])
        return found.weights()

    wanted, got = run_ranks(3, whole), run_ranks(3, resumed)
    for rank in range(3):
        for name, weight in wanted[rank].items():
            assert torch.equal(got[rank][name], weight), (rank, name)


def test_islands_refuse_a_checkpoint_of_another_number_of_ranks_and_change_nothing(tmp_path):
    run = IslandRun((2, 1), 2, steps=3, outer=nesterov)

    def save(rank):
        trained = IslandRank.start(rank, run)
        trained.train(run.data)
        onefold.save(tmp_path / f"{trained.handle.island}", trained.module, trained.optimizer)

    def load(rank):
        other = IslandRank.start(rank, IslandRun((1, 2), 2, steps=3, outer=nesterov))
        before = other.weights()
        with pytest.raises(onefold.CheckpointError, match=r"'islands\.0' .*\n?hint: load before"):
            onefold.load(tmp_path / f"{other.handle.island}", other.module, other.optimizer)
        after = other.weights()
        assert all(torch.equal(after[name], before[name]) for name in before)

    run_ranks(3, save)
    run_ranks(3, load)


def test_a_mesh_names_the_islands():
    def body(rank):
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("island", "rank"))
        module = build()
        optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
        onefold.shard(module, optimizer, mesh=mesh["rank"])
        handle = onefold.islands(module, optimizer, every=3, mesh=mesh)
        return handle.island

    assert run_ranks(4, body) == [0, 0, 1, 1]


def test_islands_start_from_the_weights_of_the_first():
    """Each island shards other weights; afterwards all have those of island 0."""

    def body(rank):
        groups = [dist.new_group([0]), dist.new_group([1])]
        module = nn.Linear(4, 4)
        nn.init.constant_(module.weight, float(rank + 1))
        optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
        onefold.shard(module, optimizer, mesh=groups[rank])
        onefold.islands(module, optimizer, every=3)
        return onefold.full_state_dict(module, rank0_only=False)["weight"]

    assert [each.unique().tolist() for each in run_ranks(2, body)] == [[1.0], [1.0]]


def half_frozen():
    module = build()
    module[0].requires_grad_(False)
    return module


def test_frozen_parameters_stay_where_they_are():
    trained = train_islands(IslandRun((2, 1), 2, steps=2, build=half_frozen))
    assert not any(name.startswith("0.") for name in trained[0].units)
    sent = sum(each.report.traffic["islands"].sent_nbytes for each in trained)
    assert sent == 8 * 2 * sum(w.numel() for n, w in trained[0].weights.items() if n[0] != "0")


@pytest.mark.parametrize("stage", [0, 3])
def test_a_parameter_that_thaws_or_arrives_later_is_refused_by_name(stage):
    def body(rank):
        run = IslandRun((2, 1), 2, stage=stage, build=half_frozen)
        found = IslandRank.start(rank, run)
        module = found.module
        found.train(run.data[:2])
        module[0].bias.requires_grad_(True)
        with pytest.raises(onefold.StateError, match=r"'0\.bias', which was frozen or absent when"):
            found.train(run.data[2:3])
        module[0].bias.requires_grad_(False)
        found.train(run.data[3:5])
        return found.weights()

    (first, _, last) = run_ranks(3, body)
    assert all(torch.equal(first[name], last[name]) for name in first if name != "0.bias")


@pytest.mark.parametrize("stage", [0, 3])
def test_a_parameter_that_freezes_takes_the_mean_of_islands_and_then_rests(stage):
    """Nesterov momentum of the outer optimizer would move it for good."""

    def body(rank):
        found = IslandRank.start(rank, IslandRun((2, 1), 2, stage=stage, outer=None))
        data = batches(8)
        seen = []
        found.train(data[:3])  # one exchange, and one step apart
        apart = found.weights()
        found.module[0].requires_grad_(False)
        found.train(data[3:4])
        seen.append(found.weights())
        found.train(data[4:6])
        seen.append(found.weights())
        found.module[0].requires_grad_(True)
        found.train(data[6:])
        seen.append(found.weights())
        return apart, seen

    (first, seen), (alike, _), (last, others) = run_ranks(3, body)
    for name in ("0.weight", "0.bias"):
        assert torch.equal(first[name], alike[name])
        mean = (2 * first[name] + last[name]) / 3
        assert_near({name: seen[0][name]}, {name: mean})
        assert torch.equal(seen[0][name], seen[1][name])
        assert not torch.equal(seen[1][name], seen[2][name])
    for ours, theirs in zip(seen, others, strict=True):
        assert all(torch.equal(ours[name], theirs[name]) for name in ours)


@every_rank(2)
def test_islands_that_freeze_different_parameters_are_named(rank):
    found = IslandRank.start(rank, IslandRun((1, 1), 1))
    if rank == 1:
        found.module[0].weight.requires_grad_(False)
    with pytest.raises(onefold.StateError, match=r"0\.weight is frozen"):
        found.train(IslandRun(steps=1).data)
