"""Uneven rows: how they are divided, dealt and weighed, and how speeds are measured."""

from __future__ import annotations

import itertools
import time
from contextlib import nullcontext
from math import inf

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import onefold
from onefold.engine.registry import engine_of
from onefold.errors import ConfigError, StateError, WireError
from onefold.layout.observer import members_of
from onefold.layout.row_split import RankTime
from onefold.mixed.sampler import split_rows
from onefold.mixed.speeds import AffineFit, balance, measure
from tests.support.models import Model, token_batches
from tests.support.ranks import every_rank, run_processes, run_ranks, seeded
from tests.support.rows import again_but, worlds_in_turn

# divide


@given(st.integers(0, 200), st.lists(st.floats(0, 10), min_size=1, max_size=6))
def test_every_row_goes_to_one_rank_and_none_to_a_rank_of_weight_zero(rows, shares):
    shares[0] += 0.1
    parts = split_rows(rows, shares)
    assert [row for part in parts for row in part] == list(range(rows))
    for part, share in zip(parts, shares, strict=True):
        exact = rows * share / sum(shares)
        assert len(part) == 0 if share == 0 else len(part) <= exact + 1
        if share > 0 and rows >= len(shares):
            assert len(part) >= 1


@given(st.lists(st.integers(1, 50), min_size=1, max_size=6))
def test_weights_that_are_counts_give_these_counts(counts):
    total = sum(counts)
    assert [len(part) for part in split_rows(total, [n / total for n in counts])] == counts


@settings(max_examples=40)
@given(
    st.lists(st.tuples(st.floats(0, 3), st.floats(0.1, 3)), min_size=2, max_size=3),
    st.integers(3, 12),
)
def test_the_division_by_speed_ends_as_soon_as_any(speeds, rows):
    world_size = len(speeds)
    times = [RankTime(fixed, per_row) for fixed, per_row in speeds]
    now = [rows] + [0] * (world_size - 1)

    def seconds(counts):
        return max(time.seconds(n) for time, n in zip(times, counts, strict=True))

    found = balance(times, now, hysteresis=0)
    every = itertools.product(range(1, rows + 1), repeat=world_size)
    best = min(seconds(counts) for counts in every if sum(counts) == rows)
    assert sum(found) == rows
    assert seconds(found) <= min(best, seconds(now)) * (1 + 1e-9)


def test_rows_stay_where_moving_them_saves_less_than_the_hysteresis():
    almost = [RankTime(0, 1.0), RankTime(0, 1.04)]
    assert balance(almost, [100, 100]) == [100, 100]
    assert balance(almost, [100, 100], hysteresis=0) == [102, 98]
    assert balance([RankTime(0, 1.0), RankTime(0, 3.0)], [32, 32]) == [48, 16]
    assert balance([RankTime(0, 1.0), RankTime(0.5, inf)], [8, 0]) == [8, 0], "an unknown speed"
    assert balance([RankTime(0, 0.0), RankTime(0, 1.0)], [4, 4]) == [7, 1], "no time measured"


def test_a_fit_finds_the_fixed_part_once_rows_differ():
    fit = AffineFit()
    for _ in range(10):
        fit.note(8, 0.1 + 8 * 0.01)
    assert fit.fit() == pytest.approx((0.0, 0.18 / 8))
    for _ in range(10):
        fit.note(4, 0.1 + 4 * 0.01)
    assert fit.fit() == pytest.approx((0.1, 0.01))
    assert AffineFit().fit() == (0.0, inf)


def test_a_fit_remembers_a_second_of_short_steps_and_twenty_long_ones():
    def after(rows, slow, seconds, steps):
        fit = AffineFit()
        for _ in range(1000):
            fit.note(rows, seconds)
        for _ in range(steps):
            fit.note(rows, slow * seconds)
        return fit.fit()[1] / (seconds / rows)

    assert after(4, 2, 0.5, 20) > 1.6
    assert after(4, 2, 0.001, 20) < 1.1, "20 ms of work: a quota has periods of 100 ms"


# deal


def flat(lists):
    return list(itertools.chain.from_iterable(lists))


def dealt(world_size, body):
    return run_ranks(world_size, lambda rank: body(rank))


@pytest.mark.parametrize("drop_last", [False, True])
def test_global_batches_do_not_depend_on_ranks_or_shares(drop_last):
    def batches(world_size, shares):
        def body(rank):
            sampler = onefold.mixed.RowSampler(50, 12, seed=3, shares=shares, drop_last=drop_last)
            sampler.set_epoch(2)
            found = list(sampler)
            assert len(found) == len(sampler) == (4 if drop_last else 5)
            return found

        parts = dealt(world_size, body)
        return [flat(rows) for rows in zip(*parts, strict=True)], parts

    alone, _ = batches(1, None)
    assert sorted(flat(alone)) == (sorted(set(flat(alone))) if drop_last else list(range(50)))
    for world_size, shares in ((2, None), (2, [3, 1]), (3, [1, 0, 5]), (3, None)):
        together, parts = batches(world_size, shares)
        assert together == alone
        if shares == [3, 1]:
            assert [len(rows) for rows in parts[0]][:4] == [9] * 4
        if shares == [1, 0, 5]:
            assert not any(parts[1])


def test_epochs_and_seeds_permute_differently_and_no_shuffle_keeps_the_order():
    def order(epoch, **options):
        sampler = onefold.mixed.RowSampler(40, 7, **options)
        sampler.set_epoch(epoch)
        return flat(sampler)

    assert order(0, shuffle=False) == order(3, shuffle=False) == list(range(40))
    assert len({tuple(order(e, seed=s)) for e in range(3) for s in range(3)}) == 9
    assert order(1) == order(1)


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_a_sampler_resumes_exactly_on_any_number_of_ranks(world_size):
    def begun(rank):
        sampler = onefold.mixed.RowSampler(50, 12, seed=5, shares=[3, 1])
        sampler.set_epoch(4)
        rows = iter(sampler)
        first = [next(rows), next(rows)]
        state, ahead = sampler.state_dict(), [next(rows), sampler.state_dict(batches=2)]
        assert state == ahead[1], "a loader's workers read ahead"
        return first, state, [ahead[0], *rows]

    parts = dealt(2, begun)
    rest = [flat(rows) for rows in zip(*(part[2] for part in parts), strict=True)]

    def resumed(rank):
        sampler = onefold.mixed.RowSampler(50, 12)
        sampler.load_state_dict(parts[0][1])
        sampler.set_epoch(4)
        found = list(sampler)
        assert sampler.shares == pytest.approx((0.75, 0.25) if world_size == 2 else
                                               (1 / world_size,) * world_size)  # fmt: skip
        sampler.set_epoch(5)
        return found, flat(sampler)

    again = dealt(world_size, resumed)
    assert [flat(rows) for rows in zip(*(part[0] for part in again), strict=True)] == rest
    assert sorted(flat(part[1] for part in again)) == list(range(50)), "the next is whole"


def test_a_loader_reads_uneven_and_empty_batches_and_shares_change_between_steps():
    data = TensorDataset(torch.arange(26.0).reshape(13, 2), torch.arange(13))

    def body(rank):
        sampler = onefold.mixed.RowSampler(data, 6, shuffle=False, shares=[1, 0])
        loader = DataLoader(data, batch_sampler=sampler, collate_fn=sampler.collate(data))
        found = []
        for x, y in loader:
            assert x.shape == (len(y), 2)
            assert x.dtype == torch.float32
            found.append(y.tolist())
            sampler.set_shares([1, 2])
        return found

    first, second = dealt(2, body)
    assert first == [[0, 1, 2, 3, 4, 5], [6, 7], []]
    assert second == [[], [8, 9, 10, 11], [12]]


def test_a_batch_without_rows_keeps_its_kind():
    rows = [{"x": torch.ones(3), "more": (torch.ones(()), "name")}]
    made = onefold.mixed.RowSampler(1, 1).collate(rows)([])
    assert made["x"].shape == (0, 3)
    assert made["more"][0].shape == (0,)
    assert list(made["more"][1]) == []


@pytest.mark.parametrize(("arguments", "message"), [
    ((0, 4), "at least one global batch"),
    ((9, 0), "at least one global batch"),
    ((3, 4, {"drop_last": True}), "drop_last=False"),
    ((9, 4, {"shares": [1, 1]}), "1 shares of rows"),
    ((9, 4, {"shares": [-1]}), "none negative"),
    ((9, 4, {"shares": [float("nan")]}), "finite"),
    ((9, 4, {"shares": [0]}), "none negative"),
])  # fmt: skip
def test_samplers_that_cannot_work_are_refused(arguments, message):
    numel, rows, *options = arguments
    with pytest.raises(ConfigError, match=message):
        onefold.mixed.RowSampler(numel, rows, **(options[0] if options else {}))


def test_a_position_in_another_dataset_is_refused():
    state = onefold.mixed.RowSampler(9, 4).state_dict()
    with pytest.raises(StateError, match="dataset of 10 rows"):
        onefold.mixed.RowSampler(10, 4).load_state_dict(state)


@pytest.mark.parametrize("state", [
    {"epoch": 1, "num_replicas": 2}, {"seed": 0, "epoch": 1, "next_row": 4, "num_rows": 9},
    {"seed": 0, "epoch": 1, "next_row": 12, "num_rows": 10, "shares": [1.0]}, [1, 2],
])  # fmt: skip
def test_a_position_that_is_none_is_refused_and_changes_nothing(state):
    sampler = onefold.mixed.RowSampler(10, 4)
    before = sampler.state_dict(), list(sampler)
    with pytest.raises(StateError, match=r"position .*\nhint: "):
        sampler.load_state_dict(state)
    assert (sampler.state_dict(0), list(sampler)) == before


@pytest.mark.parametrize("num_rows", [8, 40])  # of 8, all are read ahead
@pytest.mark.parametrize("workers", [0, 2])
def test_a_position_that_is_set_once_rows_are_dealt_is_refused_when_they_go_on(workers, num_rows):
    def begun(batches):
        sampler = onefold.mixed.RowSampler(num_rows, 2, shuffle=False)
        rows = iter(DataLoader(torch.arange(num_rows), batch_sampler=sampler, num_workers=workers))
        return sampler, rows, [next(rows).tolist() for _ in range(batches)]

    sampler, rows, first = begun(1)
    state = sampler.state_dict(2)
    sampler.load_state_dict(state)
    with pytest.raises(StateError, match=r"set the position first, then call iter\(loader\)"):
        next(rows)
    assert flat(sampler) == list(range(4, num_rows)), "a new iteration begins there"
    sampler, rows, first = begun(1)
    sampler.set_epoch(0)
    assert flat([*first, *(row.tolist() for row in rows)]) == list(range(num_rows))
    sampler, rows, first = begun(0)
    sampler.load_state_dict(state)
    if workers:  # they have begun
        with pytest.raises(StateError, match="set the position first"):
            next(rows)
    else:
        assert flat(row.tolist() for row in rows) == list(range(4, num_rows))


def test_a_loaded_position_is_not_left_for_an_earlier_epoch():
    sampler = onefold.mixed.RowSampler(10, 4)
    sampler.set_epoch(3)
    sampler.load_state_dict(sampler.state_dict(1))
    with pytest.raises(StateError, match=r"epoch 3.*or a later one, got 0"):
        sampler.set_epoch(0)
    assert len(flat(sampler)) == 6
    sampler.set_epoch(0)
    assert len(flat(sampler)) == 10


# weigh

ROWS = 12


def summed(module, tokens):
    logits = module(tokens)
    return F.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten(), reduction="sum")


def stepped_alone(batch):
    module = seeded(lambda: Model().double())
    optimizer = torch.optim.SGD(module.parameters(), lr=1.0)
    (summed(module, batch) / batch[:, 1:].numel()).backward()
    optimizer.step()
    return {name: p.detach().clone() for name, p in module.named_parameters()}


def weights_after(rank, stage, batch, counts, parts):
    """One step in `parts[rank]` micro-batches; a rank's last ones may have no rows."""
    module = seeded(lambda: Model().double())
    optimizer = torch.optim.SGD(module.parameters(), lr=1.0)
    onefold.shard(module, optimizer, stage=stage)
    own = split_rows(len(batch), counts)[rank]
    mine = batch[own.start : own.stop]
    weight = onefold.weigh(torch.ones((), dtype=torch.float64), mine[:, 1:].numel())
    for part in range(parts[rank]):
        rows = mine[2 * part : 2 * part + 2] if part + 1 < parts[rank] else mine[2 * part :]
        last = part + 1 == parts[rank]
        with nullcontext() if last else onefold.accumulate(module):
            (summed(module, rows) * weight).backward()
    optimizer.step()
    return onefold.full_state_dict(module)


@again_but("counts1-parts1-1", "counts3-parts3-3", "counts4-parts4-0")
@worlds_in_turn
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize(
    ("counts", "parts"),
    [
        ((9, 3), (1, 1)),
        ((12, 0), (1, 1)),
        ((1, 7, 4), (1, 1, 1)),
        ((0, 0, 12), (1, 1, 1)),
        ((8, 2, 2), (3, 3, 3)),  # the last two have micro-batches without rows
    ],
)
def test_any_split_of_rows_gives_the_gradient_of_one_process(stage, counts, parts):
    batch = token_batches(1, rows=ROWS)[0]
    alone = stepped_alone(batch)
    found = run_ranks(len(counts), weights_after, stage, batch, counts, parts)[0]
    for name, weight in alone.items():
        torch.testing.assert_close(found[name], weight, rtol=0, atol=1e-13)


@pytest.mark.parametrize("stage", [0, 1])
def test_at_stages_0_and_1_ranks_may_run_different_numbers_of_micro_batches(stage):
    batch = token_batches(1, rows=ROWS)[0]
    alone = stepped_alone(batch)
    found = run_ranks(2, weights_after, stage, batch, (9, 3), (4, 1))[0]
    for name, weight in alone.items():
        torch.testing.assert_close(found[name], weight, rtol=0, atol=1e-13)


def test_a_row_whose_tokens_do_not_count_stands_in_for_none():
    data = token_batches(1, rows=ROWS)[0]
    alone = stepped_alone(data)

    class Whole(Model):
        def forward(self, tokens):
            return super().forward(tokens.view(len(tokens), -1))  # torch refuses it without rows

    def body(rank):
        module = seeded(lambda: Whole().double())
        optimizer = torch.optim.SGD(module.parameters(), lr=1.0)
        onefold.shard(module, optimizer, stage=3)
        rows = [{"x": row, "labels": row[1:]} for row in data]
        sampler = onefold.mixed.RowSampler(rows, ROWS, shares=[1, 0])

        def ignored(batch):
            return {**batch, "labels": torch.full_like(batch["labels"], -100)}

        (batch,) = DataLoader(
            rows, batch_sampler=sampler, collate_fn=sampler.collate(rows, empty=ignored)
        )
        logits, labels = module(batch["x"])[:, :-1].flatten(0, 1), batch["labels"].flatten()
        loss = F.cross_entropy(logits, labels, reduction="sum")
        onefold.weigh(loss, (labels >= 0).sum()).backward()
        optimizer.step()
        return onefold.full_state_dict(module)

    found = run_ranks(2, body)[0]
    for name, weight in alone.items():
        torch.testing.assert_close(found[name], weight, rtol=0, atol=1e-13)


def leave_out_micro_batches(rank):
    batch = token_batches(1, rows=ROWS)[0]
    words = (
        r"rank 0 elsewhere: forward, gather" if rank else r"(?s)rank 0: forward, gather.*rank 1: "
    )
    with pytest.raises(WireError, match=words):
        weights_after(rank, 3, batch, (9, 3), (4, 1))


@pytest.mark.process
def test_at_stage_3_a_rank_that_leaves_out_micro_batches_is_named():
    begun = time.monotonic()
    run_processes(2, leave_out_micro_batches)
    assert time.monotonic() - begun < 60


# measure


def test_nothing_is_measured_unless_it_is_asked_for():
    def body(rank):
        module = seeded(Model)
        onefold.shard(module, torch.optim.SGD(module.parameters(), lr=0.1), stage=3)
        assert members_of(engine_of(module).ledger.observer) == []
        found = onefold.report(module)
        assert "rows by speed" not in str(found)
        return found.row_shares

    assert run_ranks(2, body) == [(0.5, 0.5)] * 2


def train_at_two_speeds(rank, is_queued):
    """Rank 1 sleeps three times longer: rows move to rank 0, on both ranks in the same step."""
    torch.manual_seed(0)
    data = torch.cat(token_batches(1, rows=200))
    module = seeded(Model)
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-3)
    onefold.shard(module, optimizer, stage=3)

    def compute(_, arguments):  # longer than what the ranks compute, beside other load as well
        time.sleep((0.02 + 0.02 * len(arguments[0])) * (1 + 2 * rank) * torch.is_grad_enabled())

    module.blocks[0].register_forward_pre_hook(compute)
    sampler = onefold.mixed.RowSampler(data, 16)
    sampler.follow(module)
    measure(module)._is_queued = is_queued  # as on a device, whose steps are recorded
    lengths = []
    for step, rows in zip(range(30), itertools.cycle(sampler), strict=False):
        lengths.append(len(rows))
        with onefold.record(module) if step == 28 and rank == 0 else nullcontext():
            onefold.weigh(summed(module, data[rows]), data[rows].numel()).backward()
            optimizer.step()
            optimizer.zero_grad()
        with torch.no_grad():
            module(data[: 20 * (1 + rank)])  # an evaluation is not measured
    found = onefold.report(module)
    everyone = [None, None]
    dist.all_gather_object(everyone, (lengths, found.row_shares))
    (first, shares), (second, others) = everyone
    assert shares == others
    assert 0.5 < shares[0] < 1.0, "about three quarters, less where other work takes the cores"
    assert "rows by speed" in str(found)
    assert {a + b for a, b in zip(first, second, strict=True)} <= {16, 200 % 16}
    assert first[:5] == [8] * 5
    assert sampler.shares != (0.5, 0.5)
    sampler.set_shares([1, 1])
    assert len(next(iter(sampler))) == 8, "set_shares ends the following"


@again_but("True")
@pytest.mark.process
@pytest.mark.parametrize("is_queued", [False, True])
def test_rows_move_to_the_rank_that_computes_faster(is_queued):
    run_processes(2, train_at_two_speeds, is_queued)


@every_rank(3)
def test_a_sampler_follows_a_module_over_the_same_ranks_alone(rank):
    module = seeded(Model)
    pairs = [dist.new_group([0, 1]), dist.new_group([2])]
    mine = pairs[rank // 2]
    onefold.shard(module, torch.optim.SGD(module.parameters(), lr=0.1), mesh=mine)
    with pytest.raises(ConfigError, match="the same mesh"):
        onefold.mixed.RowSampler(9, 3).follow(module)
