"""Every line at which a stream or the host waits is needed: without it, the device finds a race.

Nothing is late here: what finds the race are the clocks, so each run finds it.
"""

from __future__ import annotations

import gc
import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch

import onefold
from onefold import Offload
from onefold.engine import activations
from onefold.errors import WireError
from onefold.tier import accelerator
from onefold.tier.cpu import CopyStream
from onefold.wire import digest
from onefold.wire.digest import StepDigest
from onefold.wire.watching import DeviceWatch
from tests.sim import building, device
from tests.sim.ranks import run_sim
from tests.sim.training import on_device, train_sim
from tests.support.models import Model, next_token_loss, token_batches
from tests.support.training import Job

pytestmark = [
    pytest.mark.process,
    pytest.mark.skipif(building.missing() is not None, reason=f"needs {building.missing()}"),
]

STEPS = 4  # the host waits in none of the last ones
Losses = list[float]


def trained(rank: int, world_size: int, stage: int, **options: object) -> Losses:
    work = Job(two_blocks, token_batches(steps=STEPS), next_token_loss, options=options)
    return train_sim(rank, work, world_size, stage).losses.tolist()


def two_blocks() -> torch.nn.Module:
    return Model(2)


WEIGHTS = Offload(optimizer="cpu", parameters="cpu", step="cpu")


def tiers(rank: int, world_size: int, folder: str) -> Losses:
    weights = Offload(optimizer="cpu", parameters="cpu", step="device")
    states = Offload(optimizer="cpu", step="cpu")
    found = trained(rank, 1, 3, offload=weights) + trained(rank, 1, 2, offload=states)
    edited()
    return found + trained(rank, 1, 3, offload=WEIGHTS)


def edited() -> None:
    """The host edits weights in its memory, whose copies to the device may still run."""
    module = two_blocks()
    onefold.shard(module, stage=3, offload=WEIGHTS)
    tokens = on_device(token_batches()[0])
    for _ in range(2):  # the host waits in the first
        next_token_loss(module, tokens).backward()
    with torch.no_grad():
        torch._foreach_mul_(list(module.parameters()), 0.5)


def dropped(folder: str) -> None:
    """A forward whose graph goes before what it saved has left the device."""
    module = two_blocks()
    tokens = on_device(token_batches()[0])
    onefold.shard(module, stage=1, offload=Offload(activations="cpu"))
    loss = next_token_loss(module, tokens)
    del loss


def saved(rank: int, world_size: int, folder: str) -> Losses:
    activations.Limits = lambda: Limits(least=1, window=0)  # all leave
    in_memory = trained(rank, 1, 1, offload=Offload(activations="cpu"))
    dropped(folder)
    return in_memory + trained(rank, 1, 1, offload=Offload(activations="disk", disk=folder))


Limits = activations.Limits
Scenario = Callable[[int, int, str], Losses]


def fate(scenario: Scenario, wanted: Losses, *arguments: object) -> str:
    """What shows that something is wrong; "" if nothing does."""
    device.native.reset()
    differing.clear()
    try:
        got = scenario(*arguments)
    except Exception as error:
        return f"{type(error).__name__}: {error}".splitlines()[0]
    finally:
        gc.collect()
    if device.native.races():
        return "a race"
    if differing:
        return "other digests"
    return "" if got == wanted else "other losses"


differing: list[WireError] = []
"""Digests that were not the expected ones, since the last run began."""


def noting(judge: Callable[..., None]) -> Callable[..., None]:
    """A rank that finds another digest goes on as the others do, which may not have found it."""

    def judge_all(*arguments: object) -> None:
        try:
            judge(*arguments)
        except WireError as error:
            differing.append(error)

    return judge_all


def unmet(*_: object) -> WireError:
    """The error for a digest that differs, without a message to the other ranks."""
    return WireError("other digests")


def unseen(look: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """What a thread sees of events that it only asks, nobody relies on: the host has one clock."""

    def blindly(asker: Any) -> Any:
        device.native.blind(True)
        try:
            return look(asker)
        finally:
            device.native.blind(False)

    return blindly


def without_each(rank: int, scenario: Scenario, world_size: int, folder: str) -> dict[str, str]:
    """The fate of the scenario without each line that waits."""
    arguments = (rank, world_size, folder)
    DeviceWatch.look = unseen(DeviceWatch.look)
    CopyStream.mark = unseen(CopyStream.mark)
    accelerator.await_event = (
        torch.Event.synchronize
    )  # else an event that is over is not waited for
    StepDigest._judge = noting(StepDigest._judge)
    digest._first_difference = digest.first_failure = unmet
    wanted = scenario(*arguments)
    device.native.mutate("", True)
    device.check()
    assert fate(scenario, wanted, *arguments) == "", device.check()
    fates = {}
    for site in sorted(device.native.sites()):
        device.native.mutate(site, True)
        fates[site] = fate(scenario, wanted, *arguments)
    device.native.mutate("", False)
    device.native.reset()
    return fates


BY_CHANCE = "tier/slots.py"
"""A slot that a copy still leaves is taken by another thread, or goes: threads meet by chance."""

LIFETIMES = [
    f"tier/cpu.py:{line}"
    for text, first in [inspect.getsourcelines(CopyStream.__del__)]
    for line in range(first, first + len(text))
]
"""The end of memory that copies read: torch's allocator, which CUDA does not use here, waits too.
`test_a_stream_of_copies_ends_after_them` shows these."""


@pytest.mark.again("tests/sim/test_sim_laws.py::test_weights_are_those_of_the_cpu")
@pytest.mark.parametrize(("scenario", "world_size"), [(tiers, 1), (saved, 1)])
def test_no_line_that_waits_can_go(scenario, world_size, tmp_path):
    ranks = run_sim(world_size, without_each, scenario, world_size, str(tmp_path), max_us=0)
    for fates in ranks:
        print(fates)
    for fates in ranks:
        survivors = [site for site, fate in fates.items() if not fate]
        assert all(s.startswith(BY_CHANCE) or s in LIFETIMES for s in survivors), fates
        assert len(fates) > 2, "the lines were found"
