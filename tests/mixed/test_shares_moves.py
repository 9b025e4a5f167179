"""Shares that change between two steps: the run is the one that had them from the start."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

import onefold
from onefold import ConfigError, StateError
from onefold.app.train.memory_table import measure
from onefold.engine.registry import engine_of
from onefold.mixed.moving import overlaps
from tests.axes.test_cut import Model, batches, loss_of
from tests.support.ranks import every_rank, run_processes, run_ranks, seeded
from tests.support.rows import again_but

STEPS = 6


def trained(
    rank: int, plan: dict[int, Any], between: bool = False, **choices: Any
) -> dict[str, Any]:
    """Train; `plan` has the shares from a step on. Weights, averages and states, whole."""
    module = seeded(Model)
    kind = choices.pop("optimizer", torch.optim.AdamW)
    optimizer = kind(module.parameters(), lr=1e-2)
    onefold.shard(module, optimizer, shares=plan[0], **choices)
    average = onefold.ema(module, 0.9)
    losses = []
    for number, batch in enumerate(batches(STEPS)):
        if number in plan and number and not between:
            onefold.mixed.reshare(module, plan[number])
        parts = [t.chunk(dist.get_world_size())[rank] for t in batch]
        with onefold.accumulate(module):
            loss_of(module, [t[:2] for t in parts]).backward()
        if number in plan and number and between:
            onefold.mixed.reshare(module, plan[number])
        loss = loss_of(module, [t[2:] for t in parts])
        loss.backward()
        losses.append(loss.detach())
        optimizer.step()
        optimizer.zero_grad()
        average.update()
    own = sum(p.to_local().numel() for p in module.parameters())
    table = measure(engine_of(module).recipe, onefold.report(module))
    values = values_of(optimizer.state_dict()["state"], module)
    values |= {f"average {n}": whole(v) for n, v in average.state_dict()["averages"].items()}
    with onefold.unsharded(module):
        values |= {n: p.detach().clone() for n, p in module.named_parameters()}
    traffic = onefold.report(module).traffic
    moved = traffic["reshare"].sent_nbytes if "reshare" in traffic else 0
    return {"values": values, "losses": losses, "own": own, "moved": moved, "table": table}


def whole(value: Any) -> Tensor:
    return value.full_tensor() if hasattr(value, "full_tensor") else torch.as_tensor(value)


def assert_same(found: list[Any], wanted: list[Any]) -> None:
    for mine, theirs in zip(found, wanted, strict=True):
        assert mine["own"] == theirs["own"]
        assert all(map(torch.equal, mine["losses"], theirs["losses"]))
        assert mine["values"].keys() == theirs["values"].keys()
        for name, value in theirs["values"].items():
            assert torch.equal(mine["values"][name], value), name


PLANS = [({0: None, 2: [3, 1], 4: [1, 3]}, [1, 3]), ({0: [1, 0, 2], 3: [0, 2, 1]}, [0, 2, 1])]
CASES = {
    "1": ({"stage": 1}, True), "2": ({"stage": 2}, False), "3": ({}, False), "between": ({}, True),
    "bf16": ({"precision": "bf16"}, True), "cpu": ({"offload": "cpu"}, True),
    "disk": ({"offload": "disk"}, False), "mixed": ({"offload": "mixed"}, True),
    "Adagrad": ({"optimizer": torch.optim.Adagrad}, False),
    "tiles": ({"offload": onefold.Offload(tile=4096)}, False),
}  # fmt: skip
"""Choices, and whether shares change between the micro-batches of a step."""


def tier_of(word: Any, rank: int, folder: Any) -> Any:
    """The tier of one rank, where each may have its own."""
    if word == "mixed":
        word = [None, "cpu", "disk"][rank]
    return f"disk:{folder}" if word == "disk" else word


@again_but(
    "1-three ranks", "2-three ranks", "3-two ranks", "between-three ranks", "bf16-three ranks",
    "cpu-two ranks", "disk-three ranks", "mixed-three ranks", "Adagrad-two ranks",
    "tiles-three ranks",
)  # fmt: skip
@pytest.mark.parametrize(("plan", "last"), PLANS, ids=["two ranks", "three ranks"])
@pytest.mark.parametrize(("choices", "between"), CASES.values(), ids=CASES)
def test_shares_that_change_mid_run_give_the_bits_of_those_from_the_start(
    plan, last, choices, between, tmp_path
):
    def body(rank, shares):
        tier = tier_of(choices.get("offload"), rank, tmp_path)
        return trained(rank, shares, between, **{**choices, "offload": tier})

    found = run_ranks(len(last), body, plan)
    wanted = run_ranks(len(last), body, {0: last})
    assert_same(found, wanted)
    for mine, theirs in zip(found, wanted, strict=True):
        held, wanted_bytes = ({**each["table"].now, "staging": 0} for each in (mine, theirs))
        assert held == wanted_bytes, "bytes at rest are those of the shares; slots stay"
    assert sum(each["moved"] for each in found) > 0


def test_only_rows_that_change_their_rank_are_sent():
    def body(rank):
        module = seeded(Model)
        optimizer = torch.optim.AdamW(module.parameters(), lr=1e-2)
        onefold.shard(module, optimizer, shares=[2, 1, 1])
        loss_of(module, [t.chunk(3)[rank] for t in batches(1)[0]]).backward()
        optimizer.step()
        optimizer.zero_grad()
        before = {n: p.to_local().numel() for n, p in module.named_parameters() if p.dim()}
        onefold.mixed.reshare(module, [1, 1, 2])
        after = {n: p.to_local().numel() for n, p in module.named_parameters() if p.dim()}
        sent = onefold.report(module).traffic["reshare"].sent_nbytes
        units = engine_of(module).units
        slots = {p.fqn: p.slot for u in units for p in u.parameters}
        assert onefold.report(module).shares == (1, 1, 2)
        return before, after, sent, {n: s.cut.spans(rank) for n, s in slots.items()}

    found = run_ranks(3, body)
    old = run_ranks(3, old_spans)
    for rank, (_, _, sent, _) in enumerate(found):
        kept = gone = 0
        for name, spans in old[rank].items():
            if spans is not None:
                numel = sum(stop - start for start, stop in spans)
                same = sum(n for *_, n in overlaps(spans, found[rank][3][name]))
                kept, gone = kept + same, gone + numel - same
        assert sent == 3 * 4 * gone, "a weight and two moments of four bytes"


def old_spans(rank: int) -> dict[str, Any]:
    module = seeded(Model)
    onefold.shard(module, shares=[2, 1, 1])
    slots = [p.slot for unit in engine_of(module).units for p in unit.parameters]
    return {slot.fqn: None if slot.replicated else slot.cut.spans(rank) for slot in slots}


@again_but("wire1")
@pytest.mark.parametrize("wire", [{"gradients": "int8", "feedback": True}, {"weights": "int8"}])
def test_quantized_wires_go_on_under_other_shares(wire):
    def body(rank, plan):
        return trained(rank, plan, wire=onefold.Wire(**wire))["values"]

    wanted = run_ranks(2, body, {0: [1, 3]})[0]
    for found in run_ranks(2, body, {0: [3, 1], 3: [1, 3]}):
        for name, value in wanted.items():
            torch.testing.assert_close(found[name], value, rtol=0, atol=0.05, msg=name)


def test_matrix_optimizers_keep_their_matrices():
    def body(rank, plan):
        module = seeded(Model)
        optimizer = torch.optim.Adafactor(module.parameters(), lr=1e-2)
        onefold.shard(module, optimizer, shares=plan[0])
        for number, batch in enumerate(batches(4)):
            if number == 2 and 2 in plan:
                onefold.mixed.reshare(module, plan[2])
            loss_of(module, [t.chunk(2)[rank] for t in batch]).backward()
            optimizer.step()
            optimizer.zero_grad()
        with onefold.unsharded(module):
            return [p.detach().clone() for p in module.parameters()]

    wanted = run_ranks(2, body, {0: [1, 3]})[0]
    assert all(map(torch.equal, run_ranks(2, body, {0: None, 2: [1, 3]})[0], wanted))


def test_replicas_of_nodes_change_their_shares_together():
    def body(rank, plan):
        mesh = init_device_mesh("cpu", (2, 2))
        return trained(rank, plan, mesh=mesh, wire=onefold.Wire(secondary="optimizer"))

    assert_same(run_ranks(4, body, {0: None, 3: [3, 1]}), run_ranks(4, body, {0: [3, 1]}))


@pytest.mark.parametrize(
    ("shares", "match"),
    [
        ([1], "one weight"),
        ([0, 0], "finite numbers"),
        ([1, float("nan")], "finite"),
        ("even", "fin"),
    ],
)
@every_rank(2)
def test_shares_that_mean_nothing_change_nothing(rank, shares, match):
    module = seeded(Model)
    onefold.shard(module)
    for asked in (shares, shares if rank else [3, 1]):
        with pytest.raises(ConfigError, match=match):
            onefold.mixed.reshare(module, asked)
    with pytest.raises(ConfigError, match="shares"):
        onefold.mixed.reshare(module, [1, 3] if rank else [3, 1])
    assert onefold.report(module).shares is None
    loss_of(module, [t.chunk(2)[rank] for t in batches(1)[0]]).backward()


@every_rank(2)
def test_moves_at_a_wrong_moment_are_refused_by_name(rank):
    module = seeded(Model)
    onefold.shard(module)
    with onefold.unsharded(module), pytest.raises(StateError, match="unsharded"):
        onefold.mixed.reshare(module, [3, 1])
    whole = seeded(Model)
    onefold.shard(whole, stage=0)
    with pytest.raises(StateError, match="stage 0"):
        onefold.mixed.reshare(whole, [3, 1])
    onefold.mixed.reshare(module, [3, 1])
    onefold.mixed.reshare(module, None)
    assert onefold.report(module).shares is None
    for name, wanted in seeded(Model).named_parameters():
        assert torch.equal(dict(module.named_parameters())[name].full_tensor(), wanted)


def in_process(rank: int) -> None:
    found = trained(rank, {0: None, 2: [3, 1]})
    assert found["moved"] == 0 or rank == 1, "rank 0 keeps all of its rows"


@pytest.mark.process
def test_real_processes_move_rows_as_threads_do():
    run_processes(2, in_process)


def values_of(state: dict[Any, Any], module: torch.nn.Module) -> dict[str, Tensor]:
    found = {f"{n}.{k}": whole(v) for n, entry in state.items() for k, v in entry.items()}
    return found | {n: whole(p.detach()) for n, p in module.named_parameters()}


def test_a_checkpoint_after_a_move_loads_in_one_process(tmp_path):
    def move_and_save(rank):
        module = seeded(Model)
        optimizer = torch.optim.AdamW(module.parameters(), lr=1e-2)
        onefold.shard(module, optimizer, offload="cpu" if rank else None)
        for number, batch in enumerate(batches(3)):
            loss_of(module, [t.chunk(3)[rank] for t in batch]).backward()
            optimizer.step()
            optimizer.zero_grad()
            onefold.mixed.reshare(module, [[1, 0, 2], [0, 1, 1], [4, 1, 0]][number])
        onefold.save(tmp_path / "saved", module, optimizer)
        state = optimizer.state_dict()["state"]
        return values_of(state, module)

    wanted = run_ranks(3, move_and_save)[0]
    module = seeded(Model)
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-2)
    onefold.shard(module, optimizer)
    onefold.load(tmp_path / "saved", module, optimizer)
    state = optimizer.state_dict()["state"]
    found = values_of(state, module)
    assert found.keys() == wanted.keys()
    for name, value in wanted.items():
        assert torch.equal(found[name].reshape(-1), value.reshape(-1)), name


def test_a_disk_gets_the_bytes_of_old_rows_back(tmp_path):
    def body(rank):
        module = seeded(Model)
        optimizer = torch.optim.AdamW(module.parameters(), lr=1e-2)
        onefold.shard(module, optimizer, offload=f"disk:{tmp_path}")
        (file,) = engine_of(module).context.tiers.weight.files
        for number, batch in enumerate(batches(4)):
            loss_of(module, [t.chunk(2)[rank] for t in batch]).backward()
            optimizer.step()
            optimizer.zero_grad()
            onefold.mixed.reshare(module, [3, 1] if number % 2 else [1, 3])
        held = sum(b.tensor.nbytes for u in engine_of(module).units for b in u.row_buffers())
        pages = 4096 * sum(len(u.row_buffers()) for u in engine_of(module).units)
        return os.fstat(file.fd).st_blocks * 512 - held - pages

    assert max(run_ranks(2, body)) <= 0
