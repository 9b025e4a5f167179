"""Clipping with weights in CPU memory: the bits of weights on the device, by one message."""

from __future__ import annotations

import gc
import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import onefold
from onefold.unit.shown_grads import RestingGrad
from tests.sim import building, device
from tests.sim.counting import MESSAGES, WEIGHTS
from tests.sim.ranks import run_sim
from tests.sim.training import Spared, on_device
from tests.support.models import Model, next_token_loss, token_batches
from tests.support.ranks import seeded
from tests.support.rows import again_but
from tests.support.training import cut

pytestmark = [
    pytest.mark.process,
    pytest.mark.skipif(building.missing() is not None, reason=f"needs {building.missing()}"),
]


class Narrow(Model):
    """A parameter of two rows: of three ranks one has none of it."""

    def __init__(self) -> None:
        super().__init__()
        self.gains = nn.Parameter(torch.ones(2))

    def forward(self, tokens: Tensor) -> Tensor:
        return super().forward(tokens) * self.gains.prod()


CASES: list[tuple[type[nn.Module], dict[str, Any]]] = [
    (Model, {"max_norm": 0.1}),
    (Model, {"max_norm": 0.1, "foreach": True}),
    (Model, {"max_norm": 0.1, "foreach": False}),
    (Model, {"max_norm": math.inf}),
    (Model, {"max_norm": 0.1, "norm_type": 1.0}),
    (Model, {"max_norm": 0.1, "norm_type": math.inf}),
    (Spared, {"max_norm": 0.1}),
    (Narrow, {"max_norm": 0.1}),
    (Narrow, {"max_norm": 0.1, "norm_type": math.inf}),
]
"""The model, and what it is clipped with; `foreach` is an option of torch's function alone."""
OFFLOADS = {1: "optimizer", 2: "optimizer", 3: WEIGHTS}
"""By stage: only stage 3 keeps weights in CPU memory."""

Clipped = tuple[Tensor, list[Tensor | None]]


def clipped(rank: int, world_size: int, stage: Any, offload: Any, case: int) -> list[Clipped]:
    """By torch and by onefold: the norm, and gradients [all rows] after clipping."""
    build, options = CASES[case]
    batch = cut(on_device(token_batches(steps=1)[0]), world_size)[rank]
    module = seeded(build)
    onefold.shard(module, torch.optim.AdamW(module.parameters()), stage=stage, offload=offload)
    found = []
    for clip in (torch.nn.utils.clip_grad_norm_, onefold.clip_grad_norm_):
        if clip is onefold.clip_grad_norm_:
            options = {name: value for name, value in options.items() if name != "foreach"}
        next_token_loss(module, batch).backward()
        norm = clip(module.parameters(), **options)
        grads = [parameter.grad for parameter in module.parameters()]
        found.append((_whole(norm), [None if grad is None else _whole(grad) for grad in grads]))
        module.zero_grad()
    return found


def _whole(tensor: Any) -> Tensor:
    return getattr(tensor, "full_tensor", lambda: tensor)().cpu()


def both_places(
    rank: int, world_size: int, runs: list[tuple[int, int]]
) -> list[list[list[Clipped]]]:
    return [
        [clipped(rank, world_size, stage, offload, case) for offload in (OFFLOADS[stage], None)]
        for stage, case in runs
    ]


AT_STAGE_3 = [(3, case) for case in range(len(CASES))]
AT_OTHERS = [(1 + case % 2, case) for case in range(len(CASES))]


@again_but("3-runs1")
@pytest.mark.parametrize(("world_size", "runs"), [(2, AT_OTHERS), (3, AT_STAGE_3)])
def test_offloaded_and_device_weights_are_clipped_to_the_same_bits(world_size, runs):
    """Three ranks: rows are uneven, and some ranks have none of a parameter."""
    ranks = run_sim(world_size, both_places, world_size, runs)
    for cases in ranks:
        for (offloaded, on_the_device), of_first in zip(cases, ranks[0], strict=True):
            for one, other, first in zip(offloaded, on_the_device, of_first[0], strict=True):
                _assert_same_bits(one, other)
                _assert_same_bits(one, first)


def _assert_same_bits(one: Clipped, other: Clipped) -> None:
    assert torch.equal(one[0], other[0])
    assert 0 < one[0] < math.inf
    for a, b in zip(one[1], other[1], strict=True):
        assert (a is None) == (b is None)
        assert a is None or b is None or torch.equal(a, b)


OF_ONE_MESSAGE = CASES[:-1]  # the last one gathers rows: some ranks have none


def costs_of_clipping(rank: int) -> list[list[tuple[dict[str, int], dict[str, int]]]]:
    """For each case, by torch and by onefold: host waits by line, and messages by kind."""
    return [_costs(*case) for case in OF_ONE_MESSAGE]


def _costs(
    build: type[nn.Module], options: dict[str, Any]
) -> list[tuple[dict[str, int], dict[str, int]]]:
    gc.collect()  # the module of the case before goes, and waits for its copies, now
    module = seeded(build)
    onefold.shard(module, torch.optim.AdamW(module.parameters()), stage=3, offload=WEIGHTS)
    batch, costs = on_device(token_batches(steps=1)[0]), []
    for clip in (torch.nn.utils.clip_grad_norm_, onefold.clip_grad_norm_):
        if clip is onefold.clip_grad_norm_:
            options = {name: value for name, value in options.items() if name != "foreach"}
        next_token_loss(module, batch).backward()
        torch.accelerator.synchronize()
        device.native.reset()
        clip(module.parameters(), **options)
        counts = device.native.counts()
        costs.append((device.host_waits(), {k: n for k, n in counts.items() if k in MESSAGES}))
        module.zero_grad()
    return costs


@pytest.mark.filterwarnings("ignore:ranks 0 and 1 got the same first batch")
def test_clipping_weights_in_cpu_memory_sends_one_message_and_waits_once():
    """torch asks for the factor in the memory of the parameter: the host reads one number."""
    found = run_sim(3, costs_of_clipping)[0]
    for (_, options), costs in zip(OF_ONE_MESSAGE, found, strict=True):
        for waits, messages in costs:
            assert sum(messages.values()) == 1, (options, messages)
            assert sum(waits.values()) <= 1, (options, waits)


def clip_resting_grads(rank: int, choices: list[dict[str, Any]]) -> list[list[Any]]:
    """Plain parameters in CPU memory whose gradients are on the device, as one process has them."""
    return [_clip_resting_grads(options) for options in choices]


def _clip_resting_grads(options: dict[str, Any]) -> list[Any]:
    found = []
    for is_resting in (True, False):
        parameters = list(seeded(Model).parameters())
        for parameter in parameters:
            values = torch.ones(parameter.shape).cumsum(0)
            if is_resting:
                parameter.grad = RestingGrad.showing(on_device(values), parameter)
            else:
                parameter.grad = values
        device.native.reset()
        norm = torch.nn.utils.clip_grad_norm_(parameters, **options)
        waits = device.host_waits()
        found.append((norm.cpu(), [p.grad.clone().cpu() for p in parameters], waits))
    return found


def test_one_process_waits_once_for_the_norm_of_gradients_on_the_device():
    choices = [CASES[case][1] for case in (0, 1, 2, 3, 5)]
    [found] = run_sim(1, clip_resting_grads, choices, backend=None)
    for options, ((norm, grads, waits), (plain_norm, plain_grads, _)) in zip(
        choices, found, strict=True
    ):
        torch.testing.assert_close([norm, *grads], [plain_norm, *plain_grads])
        assert sum(waits.values()) <= 1, (options, waits)


def read_norm(rank: int) -> tuple[object, ...]:
    """A norm that is shown in CPU memory, read in each way."""
    module = seeded(Model)
    onefold.shard(module, torch.optim.AdamW(module.parameters()), stage=3, offload=WEIGHTS)
    next_token_loss(module, on_device(token_batches(steps=1)[0])).backward()
    norm = module.head.weight.grad.norm()
    sums = (norm + torch.zeros(()), norm + torch.zeros(1))
    moved = norm.to(norm.device)
    return norm.device.type, norm.item(), moved.tolist(), float(moved.numpy()), *map(float, sums)


@pytest.mark.filterwarnings("ignore:ranks 0 and 1 got the same first batch")
def test_a_norm_of_gradients_is_shown_and_read_where_its_parameter_is():
    for device_type, *numbers in run_sim(2, read_norm):
        assert device_type == "cpu"
        assert len(set(numbers)) == 1, numbers
