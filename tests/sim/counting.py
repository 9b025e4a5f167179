"""What a steady step costs the host: its waits, messages and kernels, by engine."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
)

import onefold
from onefold.engine.registry import engine_of
from onefold.unit.unit import Unit
from tests.sim import device
from tests.sim.training import Recomputing, Spared, on_device
from tests.support.models import Model, next_token_loss, token_batches
from tests.support.ranks import seeded

MESSAGES = ("all_gather", "all_to_all", "broadcast", "all_reduce", "reduce_scatter")
MESSAGES = (*MESSAGES, "group of collectives")
STEPS = 4


WEIGHTS = onefold.Offload(optimizer="cpu", parameters="cpu", step="cpu")
CASES: dict[str, dict[str, Any]] = {
    "stage 0": {"stage": 0},
    "stage 1": {"stage": 1},
    "stage 2": {"stage": 2},
    "stage 3": {"stage": 3},
    "stage 3 in bf16": {"stage": 3, "precision": "bf16"},
    "stage 3, clipping": {"stage": 3, "clip": 1.0},
    "stage 3, recompute": {"stage": 3, "model": Recomputing},
    "stage 3, unused parameters": {"stage": 3, "model": Spared},
    "stage 3, weights in CPU memory": {"stage": 3, "offload": WEIGHTS},
    "stage 3, weights in CPU memory, clipping": {"stage": 3, "offload": WEIGHTS, "clip": 1.0},
}


@dataclass(frozen=True)
class Cost:
    """Of one step: waits of the host by line, messages by kind, kernels, and the units."""

    waits: Counter[str]
    messages: Counter[str]
    kernels: int
    units: int


def of_onefold(case: dict[str, Any]) -> Cost:
    """Of Onefold, whose last step has no race."""
    options = dict(case)
    clip, module = options.pop("clip", None), seeded(options.pop("model", Model))
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-2)
    onefold.shard(module, optimizer, **options)
    units = engine_of(module).units
    cost = _last_step(module, optimizer, clip, len(units), lambda: _end_steps(units))
    device.check()
    return cost


def _end_steps(units: list[Unit]) -> None:
    """Return when no step runs in the background; nothing waits for the device."""
    steps = [unit.pending for unit in units if unit.pending is not None]
    while not all(step.is_completed() for step in steps):
        time.sleep(1e-3)


def of_fsdp2(case: dict[str, Any]) -> Cost:
    """Of FSDP2 with the same units: stage 3 reshards after forward, stage 2 does not."""
    module = seeded(case.get("model", Model)).to(torch.accelerator.current_accelerator())
    mesh = init_device_mesh("sim", (torch.distributed.get_world_size(),))
    policy = MixedPrecisionPolicy()
    if "precision" in case:
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    units: list[Any] = [module.embed, *module.blocks, [module.norm, module.head], module]
    for unit in units:
        fully_shard(
            unit, mesh=mesh, mp_policy=policy, reshard_after_forward=case["stage"] == 3,
            offload_policy=CPUOffloadPolicy() if "offload" in case else OffloadPolicy(),
        )  # fmt: skip
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-2, fused=True)
    return _last_step(module, optimizer, case.get("clip"), len(units) - 1)  # the root has none


def _last_step(
    module: nn.Module, optimizer: Any, clip: float | None, units: int,
    end_steps: Callable[[], None] = lambda: None,
) -> Cost:  # fmt: skip
    """The last of some steps, with the part of it that runs in the background."""
    batches = [on_device(batch) for batch in token_batches(steps=STEPS)]
    for number, batch in enumerate(batches):
        if number == STEPS - 1:
            end_steps()
            torch.accelerator.synchronize()
            device.native.reset()
        next_token_loss(module, batch).backward()
        if clip is not None:
            torch.nn.utils.clip_grad_norm_(module.parameters(), clip)
        optimizer.step()
        optimizer.zero_grad()
    end_steps()
    counts = Counter(device.native.counts())
    messages = Counter({kind: counts.pop(kind) for kind in MESSAGES if kind in counts})
    return Cost(Counter(device.host_waits()), messages, counts.total(), units)


def costs(rank: int, compared: Collection[str]) -> dict[str, tuple[Cost, Cost | None]]:
    """By case: Onefold's, and FSDP2's of those that are `compared`."""
    return {
        name: (of_onefold(case), of_fsdp2(case) if name in compared else None)
        for name, case in CASES.items()
    }
