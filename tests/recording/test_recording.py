"""A recorded step tells what happened: who computed, what travelled, what was held, and when."""

from __future__ import annotations

import gc
import json
import sys
from collections import Counter, defaultdict
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import onefold
from onefold.errors import StateError
from onefold.layout.ledger import Usage
from onefold.layout.observer import Stream
from onefold.recording.allocator import allocator_probe
from onefold.recording.page import chrome_trace
from onefold.recording.page_data import grouped_modules, report_of, rows
from onefold.recording.run_report import RankLine, RunReport
from onefold.recording.step_record import TORCH, StepRecord, idle_seconds, union
from tests.support.models import Model, next_token_loss, token_batches
from tests.support.ranks import run_ranks, seeded
from tests.support.rows import again_but, worlds_in_turn

pytestmark = pytest.mark.timeout(60)
UNITS = {"embed.weight", "blocks.0", "blocks.1", "blocks.2", "norm.weight"}


def train(rank: int, world_size: int, stage: int, records: bool, options: dict[str, Any]) -> Any:
    """Three steps, of which the last is recorded: the record, the report after it, the losses."""
    module = seeded(Model)
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-2)
    onefold.shard(module, optimizer, stage=stage, **options)
    losses, record = [], None

    def step(tokens):
        loss = next_token_loss(module, tokens)
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())

    for number, batch in enumerate(token_batches(3)):
        tokens = batch.chunk(world_size)[rank]
        if records and number == 2:
            with onefold.record(module) as recording:
                step(tokens)
                for unit in module.__dict__["_onefold_engine"].units:
                    unit.wait_step()
            record = recording.step
        else:
            step(tokens)
        if number < 2:
            optimizer.zero_grad()
    return record, onefold.report(module), torch.stack(losses)


def recorded(world_size: int, stage: int, **options: Any) -> list[tuple[StepRecord, Any]]:
    results = run_ranks(world_size, lambda rank: train(rank, world_size, stage, True, options))
    return [(record, report) for record, report, _ in results]


@again_but("2-3", "3-2")
@worlds_in_turn
@pytest.mark.parametrize("stage", [0, 2, 3])
@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_every_unit_computes_once_forward_and_backward_inside_its_phase(world_size, stage):
    units = UNITS if world_size > 1 else {"embed.weight"}  # the only process has one
    for record, _ in recorded(world_size, stage):
        phases = {s.verb: s for s in record.spans if s.stream == "phase"}
        assert list(phases) == ["forward", "backward", "step"]
        ends = [edge for s in phases.values() for edge in (s.start, s.stop)]
        assert ends == sorted(ends)
        for verb in ("forward", "backward"):
            spans = [s for s in record.spans if s.stream == "compute" and s.verb == verb]
            assert {s.unit for s in spans} == units
            assert all(phases[verb].start <= s.start for s in spans)
            assert all(s.stop <= phases[verb].stop for s in spans)


def test_the_actions_of_a_step_are_text_with_one_line_a_unit():
    for record, _ in recorded(3, 3):
        lines = dict(line.split(": ") for line in record.actions().split("\n"))
        assert set(lines) == UNITS
        verbs = [verb for verb in lines["blocks.1"].split() if verb not in ("wait", "unpack")]
        assert verbs[:4] == ["gather", "forward", "gather", "backward"]
        assert "reduce_scatter" in verbs[4:]


@again_but("3")
@pytest.mark.parametrize("world_size", [2, 3])
def test_spans_of_collectives_sum_to_the_bytes_of_the_report(world_size):
    for record, report in recorded(world_size, 3):
        told = {name: (t.calls, t.sent_nbytes) for name, t in report.last_step.items()}
        assert {name: (s.calls, s.nbytes) for name, s in record.sent.items()} == told
        gathers = [s for s in record.spans if s.stream == "gather"]
        reduces = [s for s in record.spans if s.stream == "reduce"]
        assert {s.unit for s in gathers} == {s.unit for s in reduces} == UNITS
        sent = sum(s.nbytes for s in gathers + reduces)
        assert sent == sum(nbytes for _, nbytes in told.values())
        waits = [s for s in record.spans if s.verb == "wait"]
        assert len(waits) == len(gathers) + len(reduces)


def test_spans_are_ordered_and_lie_within_the_step():
    for record, _ in recorded(2, 3):
        starts = [span.start for span in record.spans]
        assert starts == sorted(starts)
        assert all(0 <= s.start <= s.stop <= record.seconds for s in record.spans)
        times = [change.time for change in record.changes]
        assert times == sorted(times)
        assert times[0] >= 0
        assert times[-1] <= record.seconds


@pytest.mark.parametrize("stage", [0, 3])
def test_bytes_at_the_end_of_a_record_are_those_of_the_report(stage):
    for record, report in recorded(2, stage):
        memory = record.memory
        last = {
            (s.kind, s.tier): nbytes[-1]
            for s, nbytes in zip(record.series, memory.nbytes, strict=True)
            if s.kind != TORCH
        }
        told = {
            (kind, tier): usage.now
            for kind, tiers in report.memory.items()
            for tier, usage in tiers.items()
        }
        assert last == told
        sums = memory.totals_of(record.indices("device"))
        assert record.peaks == {"device": max(sums)}
        assert sums[-1] == sum(nbytes[-1] for nbytes in memory.nbytes)


def test_a_recorded_step_has_the_bits_of_one_that_is_not():
    with_it = run_ranks(2, lambda rank: train(rank, 2, 3, True, {})[2])
    without = run_ranks(2, lambda rank: train(rank, 2, 3, False, {})[2])
    assert all(torch.equal(a, b) for a, b in zip(with_it, without, strict=True))


def test_fetches_flushes_and_background_steps_have_spans_of_their_units(tmp_path):
    (record, _), _ = recorded(2, 3, offload=f"disk:{tmp_path}")
    by_verb: dict[tuple[str, str], set[str]] = {}
    for span in record.spans:
        by_verb.setdefault((span.stream, span.verb), set()).add(span.unit)
    assert by_verb["background", "step"] == UNITS
    assert by_verb["tier", "fetch"] == by_verb["tier", "flush"] == UNITS
    assert "wait_step" in {verb for stream, verb in by_verb if stream == "compute"}
    moved = [s for s in record.spans if s.stream == "tier"]
    assert all(s.nbytes > 0 for s in moved)


class Recomputing(Model):
    """Blocks whose activations are computed again in backward."""

    def forward(self, tokens):
        x = self.embed(tokens)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False)
        return self.head(self.norm(x))


def test_a_unit_that_is_computed_again_has_a_span_for_that():
    def body(rank):
        module = onefold.shard(seeded(Recomputing), stage=3)
        with onefold.record(module) as recording:
            next_token_loss(module, token_batches(1)[0].chunk(2)[rank]).backward()
        return recording.step

    record = run_ranks(2, body)[0]
    (backward,) = [s for s in record.spans if s.stream == "phase" and s.verb == "backward"]
    again = [s for s in record.spans if s.verb == "recompute"]
    assert {s.unit for s in again} == {"blocks.0", "blocks.1", "blocks.2"}
    assert all(backward.start <= s.start <= s.stop <= backward.stop for s in again)


@pytest.fixture
def nothing_compiled(monkeypatch):
    """As in a process that has compiled nothing: modules are watched there, not in others."""
    dynamo = sys.modules.get("torch._dynamo.utils")
    if dynamo is not None:
        monkeypatch.setattr(dynamo, "counters", defaultdict(Counter))


class Keeps(nn.Module):
    """A layer whose backward needs one activation of a known length."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1))

    def forward(self, x):
        return (x * self.weight).exp()  # exp keeps its result


def test_activations_that_torch_keeps_are_counted_to_a_few_kilobytes(nothing_compiled):
    if allocator_probe(torch.device("cpu")) is None:
        pytest.skip("this system's malloc does not tell what it has handed out")
    module = onefold.shard(nn.Sequential(Keeps(), Keeps()), stage=3)
    numel = 1 << 20
    gc.collect()  # or garbage of other tests is freed inside the block
    with onefold.record(module) as recording:
        x = torch.ones(numel)
        loss = module(x).sum()
        del x
        loss.backward()
    record = recording.step
    (index,) = [i for i, series in enumerate(record.series) if series.kind == TORCH]
    held = record.memory.nbytes[index]
    # x and two results of exp, which are kept for both products as well
    assert 3 * 4 * numel <= max(held) <= 3 * 4 * numel + 65536
    assert held[-1] < 65536
    kept = record.modules  # a module has its result; x was there before
    assert all(4 * numel <= kept[name] <= 4 * numel + 65536 for name in ("0", "1"))
    assert kept[""] < 65536


def test_modules_whose_forward_is_repeated_have_what_remains_of_it_once(nothing_compiled):
    if allocator_probe(torch.device("cpu")) is None:
        pytest.skip("this system's malloc does not tell what it has handed out")

    class Repeats(nn.Sequential):
        def forward(self, x):
            return checkpoint(super().forward, x, use_reentrant=False)

    numel = 1 << 20
    model = nn.Sequential(Repeats(Keeps(), Keeps(), Keeps()), Keeps())
    module = onefold.shard(model, stage=3)
    hooks = [len(part._forward_hooks) for part in module.modules()]
    gc.collect()
    with onefold.record(module) as recording:
        module(torch.ones(numel)).sum().backward()
    kept = recording.step.modules
    inside = sum(nbytes for name, nbytes in kept.items() if name.startswith("0"))
    assert 4 * numel <= inside <= 4 * numel + 131072  # its input of 4 numel bytes is not new
    assert [len(part._forward_hooks) for part in module.modules()] == hooks


def test_names_that_differ_in_numbers_are_one_row_largest_first():
    named = {"h.0.mlp": 3, "h.11.mlp": 4, "h.0.fc1": 9, "2": 1, "": 2, "gone": 0}
    assert grouped_modules(named) == [
        ["h.*.fc1", 1, 9], ["h.*.mlp", 2, 7], ["the model itself", 1, 2], ["*", 1, 1],
    ]  # fmt: skip


@again_but("3")
@pytest.mark.parametrize("stage", [0, 3])
def test_busy_waiting_and_idle_seconds_are_the_step(stage):
    for record, _ in recorded(3, stage):
        line, idle = RankLine.from_record(record), idle_seconds(record)
        assert line.compute_s + line.wait_s + sum(idle.values()) == pytest.approx(record.seconds)
        assert {"in forward", "forward to backward"} <= set(idle)


def test_nothing_is_watched_outside_the_block_and_one_recording_runs_at_a_time():
    module = onefold.shard(nn.Linear(4, 4))
    ledger = module.__dict__["_onefold_engine"].ledger
    with pytest.raises(ZeroDivisionError), onefold.record(module):
        assert ledger.observer is not None
        _ = 1 / 0
    assert ledger.observer is None
    with onefold.record(module) as recording:
        with pytest.raises(StateError, match="one recording of a module at a time"):
            onefold.record(module).__enter__()
        with pytest.raises(StateError, match="a recorded step"):
            _ = recording.step
    assert ledger.observer is None
    assert recording.step.seconds > 0


def test_a_module_that_is_not_sharded_cannot_be_recorded():
    with pytest.raises(StateError, match=r"onefold\.shard has sharded"):
        onefold.record(nn.Linear(2, 2)).__enter__()


# the files


def test_a_trace_has_the_fields_that_the_format_asks_for():
    """https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU."""
    records = [record for record, _ in recorded(3, 3)]
    trace = json.loads(json.dumps(chrome_trace(records)))
    events = trace["traceEvents"]
    assert all({"ph", "ts", "pid", "tid", "name"} <= event.keys() for event in events)
    assert {event["ph"] for event in events} == {"X", "M", "C"}
    assert {event["pid"] for event in events} == {0, 1, 2}
    named = {(e["pid"], e["tid"]) for e in events if e["name"] == "thread_name"}
    for event in events:
        if event["ph"] == "X":
            assert event["dur"] >= 0
            assert event["ts"] >= 0
            assert (event["pid"], event["tid"]) in named
        elif event["ph"] == "C":
            assert all(isinstance(value, int) for value in event["args"].values())
    num_spans = sum(len(record.spans) for record in records)
    assert sum(event["ph"] == "X" for event in events) == num_spans


def test_spans_of_a_row_lie_beside_or_inside_one_another():
    record = recorded(2, 3)[0][0]
    lanes = rows(record.spans)
    assert sum(len(lane) for _, lane in lanes) == len(record.spans)
    for name, lane in lanes:
        assert {span.stream for span in lane} == {name.split()[0]} <= set(Stream)
        for i, one in enumerate(lane):
            for other in lane[i + 1 :]:
                is_beside = other.start >= one.stop or one.start >= other.stop
                is_inside = one.start <= other.start and other.stop <= one.stop
                assert is_beside or is_inside


def test_a_report_comes_back_from_its_json_as_it_was():
    records = [record for record, _ in recorded(2, 3)]
    report = report_of(records, about={"model": "blocks", "stage": 3}, recorded=3)
    once = RunReport.parse(json.loads(json.dumps(report.as_json())))
    assert once == RunReport.parse(json.loads(json.dumps(once.as_json())))
    assert once.ranks[0].sent_nbytes == sum(sent.nbytes for sent in records[0].sent.values())
    assert once.views[0].sent == report.views[0].sent


@pytest.mark.parametrize("kind", ["staging", "partial_grad", "wire"])
def test_kinds_that_the_plan_bounds_from_above_may_need_less_and_no_other_kind(kind):
    module = nn.Linear(2, 2)
    onefold.shard(module, torch.optim.SGD(module.parameters()))
    usage = {kind: {"cpu": Usage(0, 100)}, "unsharded": {"device": Usage(0, 1000)}}
    predicted = {kind: 600, "unsharded": 1000, "all": 1600}

    def differing(total: int, **changes: int) -> dict[str, tuple[int, int]]:
        report = onefold.report(module)
        made = replace(report, memory=usage, total=Usage(0, total), predicted=predicted | changes)
        return made.differing()

    assert differing(1100) == {}
    assert differing(1000) == {}  # the kind held nothing at the peak of all
    assert differing(900) == {"all": (1600, 900)}
    assert differing(1700) == {"all": (1600, 1700)}
    assert differing(1100, all=1050, **{kind: 50}) == {kind: (50, 100)}
    assert differing(1100, unsharded=2000) == {"unsharded": (2000, 1000)}


def test_the_union_of_stretches_counts_overlaps_once():
    assert list(union([(3, 4), (0, 2), (1, 2.5), (0.5, 1)])) == [(0, 2.5), (3, 4)]
    assert list(union([])) == []
