"""Laws of a gradient's phases: steps make each move of the table but for failures, and no other."""

from __future__ import annotations

import itertools
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import onefold
from onefold import Offload, Wire
from onefold.engine.registry import engine_of
from onefold.errors import StateError
from onefold.tier.accelerator import Fetched
from onefold.unit.gradient import UnitGradient
from onefold.unit.gradient_phase import GradientPhase as Phase
from onefold.unit.reduction import OneHop
from tests.support.ranks import run_ranks, seeded
from tests.support.rows import worlds_in_turn

WIDTH = 16
STEPS: dict[str, tuple[int, dict[str, Any]]] = {
    "alone": (1, {"stage": 3}),
    "one hop": (3, {"stage": 3}),
    "all rows everywhere": (3, {"stage": 0}),
    "sums rest in a node": (4, {"stage": 3, "wire": Wire()}),
    "steps in backward": (2, {"stage": 3, "offload": Offload("cpu", step_in_backward=True)}),
    "tiles": (2, {"stage": 3, "offload": Offload(tile=WIDTH * 16)}),
}
MADE = {
    name: set(itertools.pairwise(map(Phase.__getitem__, path.split())))
    for name, path in {
        "alone": "RESTING SENT RESTING",
        "one hop": "RESTING SENT LANDED LATE RESTING",
        "all rows everywhere": "RESTING SENT LANDED FOLLOWING LATE RESTING",
        "sums rest in a node": "RESTING SENT LANDED RESTING SENT LANDED FOLLOWING LATE RESTING",
        "steps in backward": "RESTING SENT LANDED LATE RESTING CONSUMED RESTING",
        "tiles": "RESTING LATE LATE RESTING SENT LANDED LATE",
    }.items()
}


def moves_of(name: str, monkeypatch: pytest.MonkeyPatch) -> set[tuple[Phase, Phase]]:
    """The moves of two steps on all ranks, the first over two micro-batches."""
    world_size, options = STEPS[name]
    moves, enter = set[tuple[Phase, Phase]](), UnitGradient._enter

    def note(gradient: UnitGradient, phase: Phase) -> None:
        moves.add((gradient.phase, phase))
        enter(gradient, phase)

    def train(rank: int) -> None:
        module = seeded(lambda: nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(3))))
        optimizer = torch.optim.AdamW(module.parameters())
        mesh = init_device_mesh("cpu", (2, 2)) if world_size == 4 else None
        onefold.shard(module, optimizer, units=list(module), mesh=mesh, **options)
        is_early = name == "steps in backward"
        for waits in (not is_early, False, False):
            with onefold.accumulate(module) if waits else nullcontext():
                x = torch.full((2, WIDTH), 1.0 + rank)
                module[0](module(x) + module(2 * x)).square().mean().backward()
            if not waits:
                optimizer.step()
                optimizer.zero_grad()
        del optimizer

    with monkeypatch.context() as patch:
        patch.setattr(UnitGradient, "_enter", note)
        run_ranks(world_size, train)
    return moves


@pytest.mark.parametrize("name", STEPS)
def test_a_step_makes_the_moves_that_its_recipe_needs(name, monkeypatch):
    assert moves_of(name, monkeypatch) == MADE[name]


def test_the_table_has_no_move_that_no_step_makes():
    table = {(now, then) for now in Phase for then in now.next}
    of_failures = {move for move in table if Phase.DISCARDING in move}
    assert table - of_failures == set.union(*MADE.values())
    assert {now for now, _ in of_failures} == set(Phase) - {Phase.CONSUMED}


def test_a_move_that_the_table_lacks_names_the_unit_both_phases_and_what_may_come():
    def end_a_step(rank: int) -> None:
        module = nn.Linear(4, 4)
        onefold.shard(module, stage=3)
        gradient = engine_of(module).units[0].gradient
        with pytest.raises(StateError, match=r"SENT, LATE, CONSUMED, .* unit .*RESTING, while"):
            gradient.end_step()
        assert gradient.phase is Phase.RESTING

    run_ranks(2, end_a_step)


@worlds_in_turn
@pytest.mark.parametrize(
    ("stage", "reached"),
    [
        *((3, phase) for phase in (Phase.SENT, Phase.LANDED, Phase.LATE)),
        *((0, phase) for phase in (Phase.SENT, Phase.LANDED, Phase.FOLLOWING, Phase.LATE)),
    ],
)
def test_what_arrives_after_a_failed_backward_is_dropped_from_any_phase(
    stage, reached, monkeypatch
):
    """As on a device, where the host does not wait for counts: a mean stays late until asked."""
    monkeypatch.setattr(OneHop, "users", lambda hop, used: Fetched(hop.counts))

    def fail(rank: int) -> None:
        module = nn.Linear(4, 4)
        onefold.shard(module, torch.optim.SGD(module.parameters(), lr=1.0), stage=stage)
        unit = engine_of(module).units[0]
        gradient, ticket = unit.gradient, None
        with torch.no_grad():
            unit.unshard()
            for parameter in unit.parameters:
                parameter.set_partial_grad(torch.ones(parameter.slot.shape))
                gradient.partial.note([parameter])
            ticket = gradient.start_reduce()
            if reached is not Phase.SENT:
                ticket.wait()
            if reached in (Phase.FOLLOWING, Phase.LATE):
                gradient.follow()
            if reached is Phase.LATE:
                gradient.end_following()
            assert gradient.phase is reached
            gradient.discard()
            assert gradient.phase is Phase.DISCARDING
            ticket.wait()
            gradient.follow()
            gradient.end_following()
            gradient.show_late()
            gradient.lose()
            unit.reshard(release=True)
        assert gradient.phase is Phase.RESTING
        assert [parameter.grad for parameter in module.parameters()] == [None, None]
        assert not gradient.partial

    run_ranks(3, fail)
