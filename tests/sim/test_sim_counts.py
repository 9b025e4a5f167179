"""What a steady step costs the host: waits, and launches of messages."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from torch.utils.checkpoint import checkpoint

import onefold
from onefold.engine.registry import engine_of
from tests.sim import building, device
from tests.sim.ranks import run_sim
from tests.sim.training import on_device
from tests.support.models import Model, next_token_loss, token_batches
from tests.support.ranks import seeded

pytestmark = [
    pytest.mark.process,
    pytest.mark.skipif(building.missing() is not None, reason=f"needs {building.missing()}"),
]

MESSAGES = ("all_gather", "all_to_all", "broadcast", "all_reduce", "reduce_scatter")
MESSAGES = (*MESSAGES, "group of collectives")
STEPS = 5


class Recomputing(Model):
    """Blocks that keep nothing for backward."""

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False)
        return self.head(self.norm(x))


CASES: dict[str, dict[str, Any]] = {
    "stage 0": {"stage": 0},
    "stage 1": {"stage": 1},
    "stage 2": {"stage": 2},
    "stage 3": {"stage": 3},
    "stage 3 in bf16": {"stage": 3, "precision": "bf16"},
    "clipping": {"stage": 3, "clip": 1.0},
    "recompute": {"stage": 3, "model": Recomputing},
}

Cost = tuple[Counter[str], Counter[str], int]
"""Waits of the host by line, messages by kind, and the number of units."""


def cost(case: dict[str, Any]) -> Cost:
    """The cost of the last of some steps."""
    case = dict(case)
    clip = case.pop("clip", None)
    module = seeded(case.pop("model", Model))
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-2)
    onefold.shard(module, optimizer, **case)
    batches = [on_device(batch) for batch in token_batches(steps=STEPS)]
    for number, batch in enumerate(batches):
        if number == STEPS - 1:
            torch.accelerator.synchronize()
            device.native.reset()
        next_token_loss(module, batch).backward()
        if clip is not None:
            torch.nn.utils.clip_grad_norm_(module.parameters(), clip)
        optimizer.step()
        optimizer.zero_grad()
    counts = device.native.counts()
    sent = Counter({kind: counts[kind] for kind in MESSAGES if kind in counts})
    return device.host_waits(), sent, len(engine_of(module).units)


def costs(rank: int) -> dict[str, Cost]:
    return {name: cost(case) for name, case in CASES.items()}


@pytest.fixture(scope="module")
def of_each() -> dict[str, Cost]:
    """By case, on rank 0 of three."""
    return run_sim(3, costs)[0]


def test_the_host_waits_for_nothing(of_each):
    waits = {name: dict(waits) for name, (waits, _, _) in of_each.items() if waits}
    assert waits == {}


def test_a_unit_begins_one_message_a_direction(of_each):
    """A gather, at stage 3 one more for backward; a reduction; one number for clipping."""
    for name, (_, sent, units) in of_each.items():
        most = units * (3 if CASES[name]["stage"] == 3 else 2) + (name == "clipping")
        assert sum(sent.values()) <= most, (name, sent, units)
