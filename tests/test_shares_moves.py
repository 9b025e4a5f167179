"""Shares that change between two steps: the run is the one that had them from the start."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import onefold
from onefold import ConfigError, StateError
from onefold.engine.registry import engine_of
from onefold.shares.moving import overlaps
from onefold.train.memory_table import measure
from tests.ranks import run_processes, run_ranks, seeded
from tests.test_cut import Model, batches, loss_of

STEPS = 6


def trained(
    rank: int, plan: dict[int, Any], between: bool = False, **choices: Any
) -> dict[str, Any]:
    """Train; `plan` has the shares from a step on. Weights, averages and states, whole."""
    module = seeded(Model)
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-2)
    onefold.shard(module, optimizer, shares=plan[0], **choices)
    average = onefold.ema(module, 0.9)
    losses = []
    for number, batch in enumerate(batches(STEPS)):
        if number in plan and number and not between:
            onefold.reshare(module, plan[number])
        parts = [t.chunk(dist.get_world_size())[rank] for t in batch]
        with onefold.accumulate(module):
            loss_of(module, [t[:2] for t in parts]).backward()
        if number in plan and number and between:
            onefold.reshare(module, plan[number])
        loss = loss_of(module, [t[2:] for t in parts])
        loss.backward()
        losses.append(loss.detach())
        optimizer.step()
        optimizer.zero_grad()
        average.update()
    own = sum(p.to_local().numel() for p in module.parameters())
    table = measure(engine_of(module).recipe, onefold.report(module))
    state = optimizer.state_dict()["state"]
    values = {f"{n}.{k}": whole(v) for n, entry in state.items() for k, v in entry.items()}
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


@pytest.mark.parametrize("between", [False, True], ids=["between steps", "between micro-batches"])
@pytest.mark.parametrize(("plan", "last"), PLANS, ids=str)
@pytest.mark.parametrize(
    "choices", [{"stage": 1}, {"stage": 2}, {}, {"precision": "bf16"}, {"offload": "cpu"}], ids=str
)
def test_shares_that_change_mid_run_give_the_bits_of_those_from_the_start(
    plan, last, choices, between
):
    world = len(last)

    def body(rank, shares):
        return trained(rank, shares, between, **choices)

    found = run_ranks(world, body, plan)
    assert_same(found, run_ranks(world, body, {0: last}))
    assert all(each["table"].is_equal for each in found)
    assert sum(each["moved"] for each in found) > 0
