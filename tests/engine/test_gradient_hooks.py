"""Hooks of gradients that step an optimizer: one for a parameter, for a block or for the model."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import onefold
from onefold.config import Offload
from tests.support.ranks import every_rank, run_ranks, seeded
from tests.support.rows import worlds_in_turn
from tests.support.zoo import whole


class Net(nn.Module):
    """A block runs twice, one is computed again in backward, two weights are tied."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(4, 5)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(5, 6), nn.Tanh(), nn.Linear(6, 5)) for _ in range(2)
        )
        self.norm = nn.LayerNorm(5).requires_grad_(False)
        self.unused = nn.Linear(2, 2)
        self.head = nn.Linear(4, 5)
        self.head.weight = self.embed.weight

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        x = x + self.blocks[0](self.blocks[0](x))
        x = self.norm(x + checkpoint(self.blocks[1], x, use_reentrant=False))
        return F.linear(x[:, :4], self.head.weight)


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.05, momentum=0.9)


def muon(parameters: Any) -> torch.optim.Optimizer:
    """Of matrices, which ranks own whole: each step is a collective."""
    held = list(parameters)
    return (torch.optim.Muon if all(p.dim() == 2 for p in held) else torch.optim.AdamW)(held)


HANDLES: list[Any] = []


@pytest.fixture(autouse=True)
def _removed() -> Iterator[None]:
    """A parameter whose hook holds its optimizer is never collected, in plain torch too."""
    yield
    while HANDLES:
        HANDLES.pop().remove()


def hooked(parameters: list[Any], hook: Callable[[Tensor], object]) -> None:
    HANDLES.extend(p.register_post_accumulate_grad_hook(hook) for p in parameters)


def trained(module: nn.Module) -> list[Any]:
    return [p for p in module.parameters() if p.requires_grad]


def each(module: nn.Module, build: Any = sgd) -> None:
    optimizers = {p: build([p]) for p in trained(module)}

    def step(p: Tensor) -> None:
        optimizers[p].step()
        optimizers[p].zero_grad()

    hooked(trained(module), step)


def by_block(module: Any, build: Any = sgd) -> None:
    for part in [module.embed, *module.blocks]:
        optimizer, missing = build(part.parameters()), set(part.parameters())

        def step(
            p: Tensor, part: Any = part, optimizer: Any = optimizer, missing: set[Any] = missing
        ) -> None:
            missing.discard(p)
            if not missing:
                optimizer.step()
                optimizer.zero_grad()
                missing.update(part.parameters())

        hooked(list(part.parameters()), step)


def whole_model(module: nn.Module, build: Any = sgd) -> None:
    """Each hook steps an optimizer of all: what has a gradient by then is stepped, and cleared."""
    optimizer = build(trained(module))

    def step(p: Any) -> None:
        p.grad.mul_(0.5)
        optimizer.step()
        optimizer.zero_grad()

    hooked(trained(module), step)


def batch(step: int, rank: int) -> Tensor:
    return torch.randn(3, 4, generator=torch.Generator().manual_seed(7 * step + rank))


def train(module: nn.Module, ranks: list[int], steps: int = 3) -> dict[str, Tensor]:
    for step in range(steps):
        torch.stack([module(batch(step, rank)).square().mean() for rank in ranks]).mean().backward()
    return {name: whole(p).detach().float().clone() for name, p in module.named_parameters()}


def compare(
    register: Callable[..., None], world_size: int, *, build: Any = sgd, rel: float = 1e-5,
    **options: Any,
) -> None:  # fmt: skip
    module = seeded(Net)
    register(module, build)
    wanted = train(module, list(range(world_size)))

    def body(rank: int) -> dict[str, Tensor]:
        module = onefold.shard(seeded(Net), **options)
        register(module, build)
        return train(module, [rank])

    for got in run_ranks(world_size, body):
        for name, value in wanted.items():
            torch.testing.assert_close(got[name], value, rtol=rel, atol=rel, msg=name)


@worlds_in_turn
@pytest.mark.parametrize("register", [each, by_block, whole_model])
@pytest.mark.parametrize(("world_size", "stage"), [(1, 3), (3, 0), (2, 1), (3, 2), (3, 3)])
def test_hooks_step_the_weights_that_they_step_in_one_process(register, world_size, stage):
    compare(register, world_size, stage=stage)


@pytest.mark.parametrize(
    "options",
    [
        {"world_size": 1, "offload": "cpu"},
        {"world_size": 3, "offload": "cpu"},
        {"world_size": 2, "offload": "disk"},
        {"world_size": 1, "offload": Offload("cpu", fraction=0.5)},
        {"world_size": 2, "offload": Offload(tile=32)},
        {"world_size": 3, "precision": "bf16", "rel": 0.05},
        {"world_size": 3, "build": muon},
    ],
    ids=["cpu", "cpu, 3", "disk", "a part", "tiles", "bf16", "matrices"],
)
def test_hooks_step_offloaded_narrow_and_whole_weights(options, tmp_path):
    if options.get("offload") == "disk":
        options = {**options, "offload": f"disk:{tmp_path}"}
    compare(each, **options)


def pair() -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 2))


def bare_hooks(module: nn.Module) -> list[torch.optim.Optimizer]:
    """Hooks that do not look for their parameter: `shard` makes new objects of these."""
    optimizers = [sgd([p]) for p in trained(module)]
    for parameter, optimizer in zip(trained(module), optimizers, strict=True):

        def step(_: Tensor, optimizer: Any = optimizer) -> None:
            optimizer.step()
            optimizer.zero_grad()

        hooked([parameter], step)
    return optimizers


@pytest.mark.parametrize(("world_size", "stage"), [(1, 3), (3, 0), (2, 3)])
def test_hooks_registered_before_shard_step_afterwards(world_size, stage):
    module = seeded(pair)
    bare_hooks(module)
    wanted = train(module, list(range(world_size)))

    def body(rank: int) -> dict[str, Tensor]:
        module = seeded(pair)
        onefold.shard(module, bare_hooks(module), stage=stage)
        return train(module, [rank])

    for got in run_ranks(world_size, body):
        for name, value in wanted.items():
            torch.testing.assert_close(got[name], value, rtol=1e-5, atol=1e-5)


@worlds_in_turn
@pytest.mark.parametrize(
    ("world_size", "stage", "is_each"), [(1, 0, True), (2, 1, False), (3, 3, True)]
)
def test_hooks_step_for_each_micro_batch_that_is_reduced(world_size, stage, is_each):
    """As with FSDP2. Where a step has one reduction, hooks run once, with the sum."""

    def loss(module: nn.Module, step: int, ranks: list[int]) -> Tensor:
        return torch.stack([module(batch(step, rank)).square().mean() for rank in ranks]).mean()

    module, ranks = seeded(pair), list(range(world_size))
    if is_each:
        bare_hooks(module)
    loss(module, 0, ranks).backward()
    loss(module, 1, ranks).backward()
    if not is_each:
        sgd(module.parameters()).step()
    wanted = module[0].weight.detach()

    def body(rank: int) -> Tensor:
        module = onefold.shard(seeded(pair), stage=stage)
        each(module)
        with onefold.accumulate(module):
            loss(module, 0, [rank]).backward()
        loss(module, 1, [rank]).backward()
        return whole(module[0].weight).detach().clone()

    for got in run_ranks(world_size, body):
        torch.testing.assert_close(got, wanted)


@pytest.mark.parametrize(("world_size", "stage"), [(1, 3), (2, 0), (3, 3)])
@every_rank()
def test_a_hook_that_steps_parameters_whose_gradients_come_later_is_refused(
    rank, world_size, stage
):
    """In plain torch the second backward would end in an error of autograd."""
    module = onefold.shard(seeded(pair), stage=stage, units=lambda part: True)
    optimizer = sgd(module.parameters())

    def step(_: Tensor) -> None:
        optimizer.step()

    hooked([module[1].bias], step)
    before = whole(module[0].weight).detach().clone()
    with pytest.raises(onefold.StateError, match=r"a step of '0\.(.|\n)*hint: "):
        train(module, [rank], 2)
    assert torch.equal(whole(module[0].weight), before)


@pytest.mark.parametrize(("world_size", "stage"), [(2, 0), (3, 3)])
def test_a_hook_may_step_all_parameters_once_their_gradients_are_there(world_size, stage):
    def register(module: Any, build: Any) -> None:
        optimizer = build(trained(module))

        def step(_: Tensor) -> None:
            optimizer.step()
            optimizer.zero_grad()

        hooked([module.embed.weight], step)

    compare(register, world_size, stage=stage)


@every_rank(3)
def test_a_step_inside_a_backward_is_refused_by_name(rank):
    """It ended the backward without a word: gradients that were to come were dropped."""
    module = onefold.shard(seeded(pair))
    optimizer = sgd(module.parameters())
    module[1].register_full_backward_hook(lambda *_: optimizer.step())
    with pytest.raises(onefold.StateError, match=r"inside a backward(.|\n)*hint: "):
        module(batch(0, rank)).sum().backward()


@pytest.mark.parametrize("steps", [False, True])
def test_hooks_edit_gradients_that_backward_steps_but_step_none(steps):
    def hook(p: Any) -> None:
        p.grad.mul_(0.5)
        if steps:
            optimizers[id(p)].step()

    optimizers: dict[int, torch.optim.Optimizer] = {}

    def run(module: Any, ranks: list[int]) -> Tensor:
        optimizer = sgd(module.parameters())
        optimizers.update({id(p): optimizer for p in module.parameters()})
        hooked(trained(module), hook)
        for step in range(2):
            torch.stack([module(batch(step, r)).square().mean() for r in ranks]).mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        return whole(module[0].weight).detach().clone()

    def body(rank: int) -> Tensor:
        early = Offload("cpu", step_in_backward=True)
        return run(onefold.shard(seeded(pair), offload=early), [rank])

    if steps:
        with pytest.raises(onefold.StateError, match=r"Offload.step_in_backward"):
            run_ranks(2, body)
        return
    wanted = run(seeded(pair), [0, 1])
    for got in run_ranks(2, body):
        torch.testing.assert_close(got, wanted)


@every_rank(2)
def test_an_error_in_a_hook_leaves_all_gradients(rank):
    module = onefold.shard(seeded(pair))
    hooked(trained(module), lambda _: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        module(batch(0, rank)).sum().backward()
    assert all(p.grad is not None for p in module.parameters())


def test_collectives_in_hooks_meet_on_all_ranks():
    """Hooks ran where a reduction happened to land: at another moment on each rank."""

    def body(rank: int) -> list[float]:
        module, norms = onefold.shard(seeded(Net)), list[float]()
        hooked(trained(module), lambda p: norms.append(float(p.grad.norm())))
        train(module, [rank], 1)
        return norms

    first, *others = run_ranks(3, body)
    assert len(first) == 10
    assert all(norms == first for norms in others)
