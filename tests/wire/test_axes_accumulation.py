"""Micro-batches on meshes of two axes: what rests inside a node is kept, cleared or forgotten."""

from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import onefold
from onefold import StateError, TierError, Wire
from onefold.engine.registry import engine_of
from tests.checkpoint.test_axes_checkpoint import close, start, step, whole_weights
from tests.support.models import Model, next_token_loss, token_batches
from tests.support.ranks import run_ranks, seeded
from tests.support.rows import again_but, worlds_in_turn

PLACES = [(3, "weights"), (3, "gradients"), (3, "optimizer"), (2, None), (2, "optimizer")]
WORLD = 4
BATCHES = token_batches(4, rows=24)


def backward(module, rows, rank, world, *, waits=False):
    """One micro-batch; `world` 1 is a plain module."""
    with onefold.accumulate(module) if waits and world > 1 else nullcontext():
        next_token_loss(module, rows.chunk(world)[rank]).backward()


def keeping_gradients_then_clearing(rank, world, module, optimizer):
    """Gradients are kept over two steps; in the third, the first micro-batch is thrown away."""
    for index, batch in enumerate(BATCHES):
        first, last = batch.chunk(2)
        backward(module, first, rank, world, waits=True)
        if index == 2:
            optimizer.zero_grad()
        backward(module, last, rank, world)
        optimizer.step()


def freezing_amid(rank, world, module, optimizer):
    """A weight trains in the first micro-batch of each step and not in the last."""
    for batch in BATCHES[:3]:
        first, last = batch.chunk(2)
        backward(module, first, rank, world, waits=True)
        module.blocks[0].up.weight.requires_grad_(False)
        backward(module, last, rank, world)
        optimizer.step()
        optimizer.zero_grad()
        module.blocks[0].up.weight.requires_grad_(True)


@again_but(
    "3-weights-freezing_amid", "3-gradients-freezing_amid",
    "2-None-keeping_gradients_then_clearing", "2-optimizer-freezing_amid",
)  # fmt: skip
@worlds_in_turn
@pytest.mark.parametrize("loop", [keeping_gradients_then_clearing, freezing_amid])
@pytest.mark.parametrize(("stage", "secondary"), PLACES)
def test_loops_that_change_their_mind_agree_with_one_process(loop, stage, secondary):
    plain = seeded(lambda: Model(2, tied=True))
    loop(0, 1, plain, torch.optim.AdamW(plain.parameters(), lr=1e-2))

    def body(rank):
        module, optimizer = start((2, 2), stage, Wire(secondary=secondary))
        loop(rank, WORLD, module, optimizer)
        return whole_weights(module)

    for got in run_ranks(WORLD, body):
        close(got, dict(plain.named_parameters()))


class Branch(nn.Module):
    def __init__(self):
        super().__init__()
        self.one, self.other = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x, takes_one):
        return (self.one(x) if takes_one else self.other(x)).square().mean()


@again_but("False-3-gradients", "True-3-weights", "True-2-None", "True-2-optimizer")
@worlds_in_turn
@pytest.mark.parametrize(("stage", "secondary"), PLACES)
@pytest.mark.parametrize("clears", [False, True])
def test_what_an_early_micro_batch_of_one_node_used_is_kept_or_cleared(stage, secondary, clears):
    """Rank 0 alone uses `one`, in the first of three micro-batches; two others follow."""

    def train(rank, world, module, optimizer):
        rows = torch.arange(96.0).view(3, 4, 8) / 96
        for _ in range(2):
            for micro in range(3):
                waits = micro < 2 and world > 1
                with onefold.accumulate(module) if waits else nullcontext():
                    for each in [rank] if world > 1 else range(WORLD):
                        loss = module(rows[micro, each : each + 1], micro == 0 and each == 0)
                        (loss / (1 if world > 1 else WORLD)).backward()
                if micro == 1 and clears:
                    optimizer.zero_grad()
            optimizer.step()
            if world > 1:
                assert (module.one.weight.grad is None) == clears
            optimizer.zero_grad()

    plain = seeded(Branch)
    train(0, 1, plain, torch.optim.AdamW(plain.parameters(), lr=1e-2))

    def body(rank):
        module = seeded(Branch)
        optimizer = torch.optim.AdamW(module.parameters(), lr=1e-2)
        mesh = init_device_mesh("cpu", (2, 2))
        wire = Wire(secondary=secondary)
        onefold.shard(module, optimizer, stage=stage, mesh=mesh, wire=wire, units=[module])
        train(rank, WORLD, module, optimizer)
        return whole_weights(module)

    for got in run_ranks(WORLD, body):
        close(got, dict(plain.named_parameters()))


class _Failing(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        raise ArithmeticError("as asked")


@again_but("shape0-3-gradients-step", "None-1-None-backward", "shape5-2-optimizer-backward")
@worlds_in_turn
@pytest.mark.parametrize("goes_on", ["backward", "step"])
@pytest.mark.parametrize(
    ("shape", "stage", "secondary"),
    [
        ((2, 2), 3, "gradients"),
        ((2, 2), 2, None),
        ((2, 2), 1, None),
        (None, 1, None),
        ((2, 2), 3, "optimizer"),
        ((2, 2), 2, "optimizer"),
        ((2, 2), 1, "optimizer"),
    ],
)
def test_sums_that_a_failed_backward_has_torn_are_an_error_until_they_are_cleared(
    shape, stage, secondary, goes_on
):
    """Micro-batch 2 of 3 fails; once cleared, the step is what it is without the failure."""

    def body(rank):
        module, optimizer = start(shape, stage, Wire(secondary=secondary))
        first, second, last = BATCHES[0].chunk(3)
        backward(module, first, rank, WORLD, waits=True)
        hook = module.blocks[0].register_forward_hook(lambda *args: _Failing.apply(args[-1]))
        with pytest.raises(ArithmeticError):
            backward(module, second, rank, WORLD, waits=True)
        hook.remove()
        with pytest.raises(StateError, match="the gradient of '"):
            if goes_on == "step":
                optimizer.step()
            else:
                backward(module, last, rank, WORLD)
        with pytest.raises(StateError, match="failed backward"):
            module.embed.weight.grad.norm()
        optimizer.zero_grad()
        step(rank, WORLD, module, optimizer, [first, second, last])
        return whole_weights(module)

    def alone(rank):
        module, optimizer = start(shape, stage, Wire(secondary=secondary))
        step(rank, WORLD, module, optimizer, BATCHES[0].chunk(3))
        return whole_weights(module)

    for got, wanted in zip(run_ranks(WORLD, body), run_ranks(WORLD, alone), strict=True):
        close(got, wanted, 0)


def test_a_failed_backward_whose_gradients_were_cleared_is_forgotten():
    """The usual way to leave a batch out: catch, clear, go on."""

    def body(rank):
        module, optimizer = start((2, 2), 3, Wire(secondary="gradients"))
        backward(module, BATCHES[0], rank, WORLD, waits=True)
        hook = module.blocks[0].register_forward_hook(lambda *args: _Failing.apply(args[-1]))
        with pytest.raises(ArithmeticError):
            backward(module, BATCHES[1], rank, WORLD)
        hook.remove()
        optimizer.zero_grad()
        backward(module, BATCHES[2], rank, WORLD)
        assert module.embed.weight.grad.norm().item() > 0
        optimizer.step()

    run_ranks(WORLD, body)


USES = {
    "clip": lambda module: nn.utils.clip_grad_norm_(module.parameters(), 1.0),
    "read": lambda module: module.embed.weight.grad.norm().item(),
    "own rows": lambda module: module.embed.weight.grad.to_local(),
    "zero in place": lambda module: [p.grad.zero_() for p in module.parameters()],
}


@again_but("optimizer")
@pytest.mark.parametrize("secondary", ["gradients", "optimizer"])
def test_sums_of_one_node_are_an_error_to_whoever_reads_or_changes_them(secondary):
    """Before the last micro-batch; afterwards gradients are those of a run that did not try."""

    def body(rank):
        module, optimizer = start((2, 2), 3, Wire(secondary=secondary))
        for index, batch in enumerate(BATCHES[:2]):
            for micro in batch.chunk(2):
                backward(module, micro, rank, WORLD, waits=True)
                assert module.embed.weight.grad.shape == module.embed.weight.shape
                for use in USES.values() if index == 0 else ():
                    with pytest.raises(StateError, match="before the last micro-batch"):
                        use(module)
            backward(module, batch, rank, WORLD)
            nn.utils.clip_grad_norm_(module.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
        return whole_weights(module)

    plain = seeded(lambda: Model(2, tied=True))
    optimizer = torch.optim.AdamW(plain.parameters(), lr=1e-2)
    for batch in BATCHES[:2]:
        for micro in [*batch.chunk(2), batch]:
            backward(plain, micro, 0, 1)
        nn.utils.clip_grad_norm_(plain.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    for got in run_ranks(WORLD, body):
        close(got, dict(plain.named_parameters()))


def test_replicas_stay_the_same_after_a_backward_that_failed():
    """A first hop was under way: what it added is no mean of all nodes, until they have talked."""

    def body(rank):
        module, optimizer = start((2, 2), 3, Wire(secondary="optimizer"))
        backward(module, first, rank, WORLD)
        hook = module.blocks[0].register_forward_hook(lambda *args: _Failing.apply(args[-1]))
        with pytest.raises(ArithmeticError):
            backward(module, last, rank, WORLD)
        hook.remove()
        with pytest.raises(StateError, match="failed backward"):
            optimizer.step()
        optimizer.zero_grad()
        step(rank, WORLD, module, optimizer, [first, last])
        return whole_weights(module)

    def alone(rank):
        module, optimizer = start((2, 2), 3, Wire(secondary="optimizer"))
        step(rank, WORLD, module, optimizer, [first, last])
        return whole_weights(module)

    first, last = BATCHES[0].chunk(2)
    (wanted, *_), results = run_ranks(WORLD, alone), run_ranks(WORLD, body)
    for found in results:
        close(found, wanted, 0)


@again_but("optimizer")
@pytest.mark.parametrize("secondary", ["gradients", "optimizer"])
def test_a_tier_that_fails_on_one_rank_is_an_error_on_all_that_gather_with_it(secondary):
    """Nodes that are replicas gather by themselves: there its node is told, and no other waits."""

    def body(rank):
        wire = Wire(secondary=secondary)
        module, optimizer = start((2, 2), 3, wire, offload="optimizer")
        step(rank, WORLD, module, optimizer, [BATCHES[0]])
        unit = engine_of(module).units[0]
        unit.join_step()
        if rank == 1:
            unit.failure = TierError("expected a disk, got none\nhint: a new one")
        if rank < 2 or secondary == "gradients":
            with pytest.raises(TierError, match="expected a disk"):
                module(BATCHES[1])
        else:
            module(BATCHES[1])

    run_ranks(WORLD, body)
