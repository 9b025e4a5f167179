"""The only process: its units are brought by the root at once, and nothing else changes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import onefold
from onefold.engine.registry import engine_of
from onefold.layout.module_tree import ModuleTree
from onefold.layout.one_rank import of_one_rank
from onefold.layout.units import plan_units
from onefold.planner.models.gpt import GPT, GPTConfig
from tests.support.models import Model
from tests.support.ranks import run_ranks, seeded

ROWS = torch.arange(12).view(3, 4) % 7


def test_neighbors_of_one_dtype_are_one_unit_up_to_a_number_of_bytes():
    model = Model(num_blocks=3)
    model.blocks[1].requires_grad_(requires_grad=False)
    plans = plan_units(ModuleTree.from_root(model))
    sizes = {plan.name: plan.nbytes for plan in plans}
    whole = of_one_rank(plans, model)
    assert [plan.name for plan in whole] == ["embed.weight", "blocks.1"]
    assert all(plan.modules == [model] for plan in whole)
    assert [o.fqn for plan in whole for o in plan.members if "blocks.1." in o.fqn] == [
        o.fqn for o in whole[1].members
    ]
    assert model not in whole[0].parts
    assert whole[0].parts[0] is model.embed
    few = of_one_rank(plans, model, sizes["blocks.2"] + sizes["norm.weight"])
    assert [plan.name for plan in few] == ["embed.weight", "blocks.1", "blocks.2"]


def test_only_the_only_process_without_offload_has_them():
    def names(rank: int, **choices: Any) -> list[str]:
        model = seeded(Model, 2)
        onefold.shard(model, None, **choices)
        return [unit.name for unit in engine_of(model).units]

    blocks = [name for name in run_ranks(2, names)[0] if name.startswith("blocks")]
    assert blocks == ["blocks.0", "blocks.1"]
    assert names(0) == ["embed.weight"]
    assert set(blocks) < set(names(0, offload="cpu"))
    assert set(blocks) < set(names(0, units=lambda module: type(module).__name__ == "Block"))


class Parts(nn.Module):
    """An encoder and a decoder, each a list of blocks, which a script may call by themselves."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(7, 8)
        self.encoder = nn.Sequential(*(self._block() for _ in range(3)))
        self.decoder = nn.Sequential(*(self._block() for _ in range(3)))
        self.head = nn.Linear(8, 7)

    @staticmethod
    def _block() -> nn.Module:
        return nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 8), nn.Tanh())

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        seen = checkpoint(self.encoder, self.embed(rows), use_reentrant=False)
        return self.head(self.decoder(seen))


def apart(model: nn.Module, rows: torch.Tensor) -> torch.Tensor:
    """The same without a call of the root."""
    return model.head(model.decoder(model.encoder(model.embed(rows))))


def trained(way: Any, **choices: Any) -> list[torch.Tensor]:
    """Losses, gradients and weights of four steps of two micro-batches each."""
    model = seeded(Parts)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    if choices:
        onefold.shard(model, optimizer, **choices)
    seen: list[torch.Tensor] = []
    for step in range(4):
        for micro in range(2):
            rows = (ROWS + step + micro) % 7
            loss = nn.functional.cross_entropy(
                way(model, rows).flatten(0, 1).float(), rows.flatten()
            )
            loss.backward()
            seen.append(loss.detach())
        seen.append(nn.utils.clip_grad_norm_(model.parameters(), 1.0))
        seen += [p.grad.detach().clone() for p in model.parameters() if p.grad is not None]
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            seen.append(way(model, ROWS).float())
    return [*seen, *(p.detach().clone() for p in model.parameters())]


WAYS = {"the root": lambda model, rows: model(rows), "its parts": apart}


@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)
@pytest.mark.parametrize("stage", [0, 3])
def test_a_step_is_that_of_plain_pytorch(way, stage):
    """Gradients bit for bit; a step rounds the ends of one long tensor as those of many."""
    mine, plain = trained(way, stage=stage), trained(way)
    first = 2 + 1 + len([*Parts().parameters()])
    for one, other in zip(mine[:first], plain[:first], strict=True):
        assert torch.equal(one, other)
    for one, other in zip(mine, plain, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)
@pytest.mark.parametrize("stage", [0, 3])
def test_casts_are_those_of_blocks_as_units_bit_for_bit(way, stage):
    mine = trained(way, stage=stage, precision="bf16")
    theirs = trained(way, stage=stage, precision="bf16", units=by_block)
    for one, other in zip(mine, theirs, strict=True):
        assert torch.equal(one, other)


class Hides:
    """An output in which nobody finds a tensor."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.read = lambda: tensor


class Kinds(nn.Module):
    """Blocks that a forward calls in an unusual way, or weights that it uses in one."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind, self.embed = kind, nn.Embedding(7, 8)
        self.blocks = nn.ModuleList(Parts._block() for _ in range(4))
        self.head = nn.Linear(8, 7, bias=False)
        if kind == "tied":
            self.head.weight = self.embed.weight
        elif kind == "frozen":
            self.blocks[1].requires_grad_(requires_grad=False)

    def _called(self, index: int, x: torch.Tensor) -> torch.Tensor:
        block = self.blocks[index]
        if self.kind == "shared":
            return self.blocks[0](block(x))
        if "reentrant" in self.kind:
            x = checkpoint(block, x, use_reentrant=True)
            return checkpoint(self.blocks[0], x, use_reentrant=True) if "shared" in self.kind else x
        if self.kind == "not recorded" and index == 1:
            with torch.no_grad():
                return block(x)
        return x.float() + block(x) if self.kind == "wide between" else block(x)

    def forward(self, rows: torch.Tensor) -> Any:
        x = self.embed(rows)
        for index in range(len(self.blocks)):
            if not (self.kind == "unused" and index == 2):
                x = self._called(index, x)
        if self.kind == "functional":
            return nn.functional.linear(x, self.embed.weight)
        return Hides(self.head(x)) if self.kind == "hidden" else self.head(x)


def gradients(kind: str, how: str, **choices: Any) -> list[torch.Tensor]:
    """Of the second step, whose backward runs in an unusual way."""
    model = seeded(Kinds, kind)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    onefold.shard(model, optimizer, stage=3, **choices)

    def loss_of(rows: torch.Tensor) -> torch.Tensor:
        told = model(rows)
        told = told.read() if isinstance(told, Hides) else told
        return nn.functional.cross_entropy(told.float().flatten(0, 1), rows.flatten())

    loss_of(ROWS).backward()
    optimizer.step()
    optimizer.zero_grad()
    loss = loss_of(ROWS)
    if how == "retained":
        loss.backward(retain_graph=True)
    elif how == "of gradients":
        trained = [p for p in model.parameters() if p.requires_grad]
        first = torch.autograd.grad(loss, trained, create_graph=True, allow_unused=True)
        loss = loss + sum(grad.float().square().sum() for grad in first if grad is not None)
    elif how == "with a part's":
        loss = loss + model.blocks[0](model.embed(ROWS).detach()).float().sum()
    elif how == "of two forwards":
        loss = loss + loss_of((ROWS + 1) % 7)
    elif how == "after an evaluation":
        with torch.no_grad():
            loss_of(ROWS + 0)
    loss.backward()
    return [torch.zeros(1) if p.grad is None else p.grad.float() for p in model.parameters()]


def by_block(module: nn.Module) -> bool:
    return isinstance(module, nn.Sequential) and isinstance(module[0], nn.LayerNorm)


KINDS = ("tied", "frozen", "shared", "not recorded", "wide between", "unused", "functional",
         "hidden")  # fmt: skip
HOWS = ("retained", "of gradients", "with a part's", "of two forwards", "after an evaluation")


@pytest.mark.parametrize("kind", KINDS)
def test_gradients_are_those_of_blocks_as_units_bit_for_bit(kind):
    for how in HOWS:
        if (kind, how) == ("hidden", "of gradients"):
            continue  # nothing announces a backward inside another
        mine = gradients(kind, how, precision="bf16")
        theirs = gradients(kind, how, precision="bf16", units=by_block)
        for one, other in zip(mine, theirs, strict=True):
            assert torch.equal(one, other), how


@pytest.mark.parametrize("kind", ["reentrant", "shared, reentrant"])
def test_gradients_of_a_reentrant_recompute_are_right_up_to_rounding(kind):
    """They come once for each call, and are added in another order than with blocks as units."""

    def flat(how: str, **choices: Any) -> torch.Tensor:
        return torch.cat([grad.flatten() for grad in gradients(kind, how, **choices)])

    for how in ("plain", "retained", "with a part's", "of two forwards"):
        exact = flat(how)
        mine, theirs = (
            float((flat(how, precision="bf16", units=units) - exact).norm() / exact.norm())
            for units in (None, by_block)
        )
        assert mine < 1.3 * theirs < 0.1, how


class Repeats(nn.Module):
    """A part that calls itself."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.mix = nn.LayerNorm(8), nn.Linear(8, 8)

    def forward(self, x: torch.Tensor, times: int = 2) -> torch.Tensor:
        if times > 0:
            x = self(self.mix(self.norm(x)), times - 1)
        return x + self.mix(x)


def test_a_part_without_the_root_may_call_itself_or_fail():
    def gradients_of(**choices: Any) -> list[torch.Tensor]:
        model = seeded(lambda: nn.Sequential(Repeats(), Repeats(), Repeats()))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        onefold.shard(model, optimizer, precision="bf16", **choices)
        x = torch.linspace(-1, 1, 32).view(4, 8)
        for step in range(2):
            with pytest.raises(RuntimeError):
                model[1](x[:, :3])
            loss = (model(x) + model[1](x)).float().square().sum()
            loss.backward()
            if step == 0:
                optimizer.step()
                optimizer.zero_grad()
        hooked = sum(len(part._forward_hooks) for part in model)
        return [torch.tensor(hooked), *(p.grad for p in model.parameters() if p.grad is not None)]

    (num_hooks, *mine) = gradients_of()
    (_, *theirs) = gradients_of(units=lambda part: isinstance(part, Repeats))
    assert num_hooks == 0
    assert len(mine) == len(theirs) == 12
    assert all(map(torch.equal, mine, theirs))


def test_parts_compute_with_editable_weights_too():
    model = seeded(Parts)
    onefold.shard(model, torch.optim.SGD(model.parameters(), lr=0.1), precision="bf16")
    with onefold.unsharded(model), torch.no_grad():
        assert model(ROWS).dtype == torch.float32
        torch.testing.assert_close(model(ROWS), seeded(Parts)(ROWS))


@pytest.mark.parametrize("stage", [0, 3])
def test_narrow_weights_of_a_unit_are_freed_with_its_last_gradient(stage):
    """Of two units: 17 bytes a parameter at the peak; 18, were they freed as backward ends."""
    model = seeded(GPT, GPTConfig(num_layers=4, width=384, num_heads=4, lr=1e-3), 16)
    numel = sum(p.numel() for p in model.parameters())
    optimizer = torch.optim.AdamW(model.parameters())
    onefold.shard(model, optimizer, stage=stage, precision="bf16")
    assert len(engine_of(model).units) == 2
    for _ in range(2):
        model(torch.zeros(1, 16, dtype=torch.int64)).float().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    assert onefold.report(model).total.peak < 17.1 * numel
