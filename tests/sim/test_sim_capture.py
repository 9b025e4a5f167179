"""A step of one rank without offload can be captured into a graph, and replayed without Python."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import onefold
from tests.sim import building, device
from tests.sim.ranks import run_sim
from tests.sim.training import Recomputing, on_device
from tests.support.models import Model, next_token_loss, token_batches
from tests.support.ranks import seeded

pytestmark = [
    pytest.mark.process,
    pytest.mark.skipif(building.missing() is not None, reason=f"needs {building.missing()}"),
]

WARM, STEPS = 3, 10


class Keeping(Model):
    """Reads what it computed in the step before."""

    before: Tensor | None = None

    def forward(self, tokens: Tensor) -> Tensor:
        out = super().forward(tokens)
        if self.before is not None:
            out = out + self.before
        self.before = out.detach()
        return out


CASES: dict[str, dict[str, Any]] = {
    **{f"stage {stage}": {"stage": stage} for stage in (0, 2, 3)},
    **{f"stage {stage}, casts": {"stage": stage, "precision": "bf16"} for stage in (0, 2, 3)},
    "stage 3, bf16 weights": {"dtype": torch.bfloat16},
    "stage 3, clipping": {"clip": 1.0},
    "stage 2, two micro-batches": {"stage": 2, "precision": "bf16", "accumulate": 2},
    "stage 3, recompute": {"precision": "bf16", "model": Recomputing},
    "a learning rate as a tensor": {"lr": 1e-2},
    "SGD": {"precision": "bf16", "optimizer": torch.optim.SGD},
    "what the module keeps": {"model": Keeping},
}


def step(module: nn.Module, optimizer: Any, batch: Tensor, clip: float, accumulate: int) -> None:
    for micro in range(1, accumulate):
        with onefold.accumulate(module):
            next_token_loss(module, batch[micro:]).backward()
    next_token_loss(module, batch).backward()
    if clip:
        torch.nn.utils.clip_grad_norm_(module.parameters(), clip)
    optimizer.step()
    optimizer.zero_grad()


def repeated(launches: list[dict[str, Any]]) -> list[tuple[Any, ...]]:
    """Name the memory of each launch: by its address, or as the step's own n-th allocation.

    A graph has a pool of its own for what a step allocates, so these addresses are fixed in it.
    What was allocated before is freed outside of the pool: gradients, when the next step finds
    them cleared.
    """
    own: list[tuple[int, int, int]] = []  # begin, end, number
    told: list[tuple[Any, ...]] = []
    for launch in launches:
        ranges = launch["ranges"]
        if launch["name"] == "allocate":
            ((begin, end, _),) = ranges
            number = sum(name == "allocate" for name, *_ in told)
            own = [(b, e, n) for b, e, n in own if e <= begin or end <= b]
            own.append((begin, end, number))
            told.append(("allocate", launch["stream"], end - begin))
            continue
        named: list[tuple[Any, ...]] = []
        for begin, end, is_write in ranges:
            mine = [(n, begin - b) for b, e, n in own if b <= begin < e]
            named.append((*(mine[0] if mine else (None, begin)), end - begin, is_write))
        if launch["name"] != "free" or named[0][0] is not None:
            told.append((launch["name"], launch["stream"], *named))
    return told


def watched(rank: int) -> dict[str, tuple[list[int], int, int]]:
    """By case: steps that differ from the first, streams, and waits of the host."""
    found = {}
    for name, case in CASES.items():
        options = dict(case)
        module = seeded(options.pop("model", Model)).to(options.pop("dtype", torch.float32))
        make = options.pop("optimizer", torch.optim.AdamW)
        extra = {"capturable": True} if make is torch.optim.AdamW else {"momentum": 0.9}
        rate: Any = options.pop("lr", None)
        rate = 1e-2 if rate is None else on_device(torch.tensor(rate))
        optimizer = make(module.parameters(), lr=rate, **extra)
        clip, accumulate = options.pop("clip", 0.0), options.pop("accumulate", 1)
        onefold.shard(module, optimizer, **options)
        batch = on_device(token_batches(steps=1)[0])
        for _ in range(WARM):
            step(module, optimizer, batch, clip, accumulate)
        torch.accelerator.synchronize()
        device.native.reset()
        device.native.keep_ranges(True)
        steps = []
        for _ in range(STEPS):
            start = device.native.num_launches()
            step(module, optimizer, batch, clip, accumulate)
            steps.append(repeated(device.native.launches(start)))
        device.native.keep_ranges(False)
        changed = [number for number, told in enumerate(steps) if told != steps[0]]
        streams = {stream for told in steps for _, stream, *_ in told}
        assert len(steps[0]) > 100
        found[name] = changed, len(streams), device.host_waits().total()
    return found


@pytest.fixture(scope="module")
def of_each() -> dict[str, tuple[list[int], int, int]]:
    return run_sim(1, watched, backend=None)[0]


def test_ten_steps_launch_the_same_at_the_same_addresses_and_the_host_waits_for_none(of_each):
    for name, found in of_each.items():
        if CASES[name].get("model") is not Keeping:
            assert found == ([], 1, 0), name


def test_memory_that_a_module_keeps_is_seen_to_move(of_each):
    changed, _, _ = of_each["what the module keeps"]
    assert 1 in changed
