"""Tiers change where state sleeps and when it is stepped, and nothing else: law 1, bit for bit."""

from __future__ import annotations

import errno
import gc
import os
import threading
import time
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional as F

import onefold
from onefold import ConfigError, Offload, StateError, TierError
from onefold.engine import blocks
from onefold.engine.registry import engine_of
from onefold.tier.disk import DiskStore, SwapFile
from onefold.tier.store import GRAIN_NUMEL
from tests.support.free_memory import has_free
from tests.support.older_torch import offloads_adagrad
from tests.support.ranks import every_rank, run_processes, run_ranks, seeded
from tests.support.rows import again_but, worlds_in_turn

WIDTH = 96


class Tower(nn.Module):
    """Blocks with a tied, a frozen and an unused parameter; a few blocks of elements a unit."""

    def __init__(self, depth: int = 3) -> None:
        super().__init__()
        self.embed = nn.Embedding(64, WIDTH)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 131), nn.GELU(),
                          nn.Linear(131, WIDTH))
            for _ in range(depth)
        )  # fmt: skip
        self.head = nn.Linear(WIDTH, 64, bias=False)
        self.head.weight = self.embed.weight
        self.unused = nn.Parameter(torch.ones(5))
        self.scale = nn.Parameter(torch.tensor(1.0))
        self.blocks[0][1].weight.requires_grad_(False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = x + block(x)
        return self.head(x) * self.scale


def loss_of(module: nn.Module, tokens: Tensor) -> Tensor:
    logits = module(tokens)
    return F.cross_entropy(logits[:, :-1].flatten(0, 1).float(), tokens[:, 1:].flatten())


def batches(steps: int, seed: int = 1) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(0, 64, (6, 7), generator=generator) for _ in range(steps)]


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Several blocks for each unit, as of large models."""
    for name in ("BLOCK_NUMEL", "LINK_BLOCK_NUMEL"):
        monkeypatch.setattr(blocks, name, GRAIN_NUMEL)


@dataclass
class Outcome:
    losses: list[float]
    tensors: dict[str, Tensor]

    def assert_same(self, other: Outcome) -> None:
        assert self.losses == other.losses
        assert self.tensors.keys() == other.tensors.keys()
        for name, tensor in self.tensors.items():
            assert torch.equal(tensor, other.tensors[name]), name


def adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-2)


def build(
    offload: Any, *, stage: int = 3, optimizer: Callable[..., Any] = adamw,
    dtype: torch.dtype | None = None, precision: Any = None, depth: int = 3,
) -> tuple[nn.Module, Any]:  # fmt: skip
    module = seeded(Tower, depth)
    if dtype is not None:
        module.to(dtype)
    decayed = [p for p in module.parameters() if p.dim() > 1]
    others = [p for p in module.parameters() if p.dim() <= 1]
    made = optimizer([{"params": decayed}, {"params": others, "weight_decay": 0.0}])
    onefold.shard(module, made, stage=stage, offload=offload, precision=precision)
    return module, made


def train(
    module: nn.Module, optimizer: Any, data: list[Tensor], *, clip: float | None = None
) -> list[float]:
    rank, world = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    losses: list[float] = []
    for batch in data:
        loss = loss_of(module, batch.chunk(world)[rank])
        loss.backward()
        if clip is not None:
            nn.utils.clip_grad_norm_(module.parameters(), clip)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def outcome(module: nn.Module, optimizer: Any, losses: list[float]) -> Outcome:
    """Every weight, master and moment, whole."""
    found: dict[str, Tensor] = {}
    for unit in engine_of(module).units:
        unit.wait_step()
        for p in unit.parameters:
            found[p.fqn] = whole(p.wrap(p.local.detach()))
            found[f"{p.fqn} stepped"] = whole(p.wrap(p.stepped))
            for key, value in optimizer.state.get(p.sharded, {}).items():
                found[f"{p.fqn} {key}"] = whole(value)
    return Outcome(losses, found)


def wait_step(module: nn.Module) -> None:
    for unit in engine_of(module).units:
        unit.wait_step()


def resting(module: nn.Module) -> int:
    """Bytes of state, without the slots, of which there are as many as happened to be used."""
    wait_step(module)
    report = onefold.report(module)
    return report.total.now - report.nbytes("staging")


def whole(value: Any) -> Tensor:
    if isinstance(value, dist.tensor.DTensor):
        value = value.full_tensor()
    return value.detach().clone() if isinstance(value, Tensor) else torch.tensor(value)


def run(
    offload: Any, steps: int = 3, *, clip: float | None = None, **options: Any
) -> Callable[[int], Outcome]:
    def body(rank: int) -> Outcome:
        module, optimizer = build(offload, **options)
        return outcome(module, optimizer, train(module, optimizer, batches(steps), clip=clip))

    return body


def same_as_on_device(world_size: int, *offloads: Any, **options: Any) -> None:
    wanted = run_ranks(world_size, run(None, **options))
    for offload in offloads:
        for a, b in zip(wanted, run_ranks(world_size, run(offload, **options)), strict=True):
            a.assert_same(b)


# parity


@again_but("2-3", "3-2")
@worlds_in_turn
@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_optimizer_states_in_any_tier_give_the_bits_of_the_device(world_size, stage, tmp_path):
    """With and without clipping in turn: each meets every world size and every stage."""
    clip = 0.1 if (world_size + stage) % 2 else None
    offloads = [Offload(optimizer=tier, disk=tmp_path) for tier in ("cpu", "disk")]
    same_as_on_device(world_size, *offloads, stage=stage, clip=clip)


@again_but("3")
@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_parameters_in_any_tier_give_the_bits_of_the_device(world_size, tmp_path):
    tiers = ("cpu", "disk")
    offloads = [Offload(states, rows, disk=tmp_path) for states in tiers for rows in tiers]
    same_as_on_device(world_size, *offloads, clip=0.1)


@again_but("double-3")
@worlds_in_turn
@pytest.mark.parametrize("world_size", [1, 2, 3])
@pytest.mark.parametrize(
    "options", [{"dtype": torch.bfloat16}, {"precision": "bf16"}, {"dtype": torch.float64}],
    ids=["masters", "compute", "double"],
)  # fmt: skip
def test_tiers_keep_the_bits_in_every_precision(world_size, options, tmp_path):
    same_as_on_device(world_size, "optimizer", f"disk:{tmp_path}", **options)


@again_but("1-1-None", "3-3-None")
@worlds_in_turn
@pytest.mark.parametrize(
    ("world_size", "stage", "dtype"),
    [(1, 1, None), (1, 3, torch.bfloat16), (2, 1, torch.bfloat16), (2, 2, None), (3, 1, None),
     (3, 3, None), (3, 3, torch.bfloat16)],
)  # fmt: skip
def test_units_stepped_inside_backward_come_to_the_same_bits(world_size, stage, dtype, tmp_path):
    """Any two of world size, stage and dtype meet, in either tier."""
    offloads = [Offload(tier, disk=tmp_path, step_in_backward=True) for tier in ("cpu", "disk")]
    same_as_on_device(world_size, *offloads, stage=stage, dtype=dtype)


@settings(max_examples=12)
@given(
    numel=st.integers(1, 3 * GRAIN_NUMEL), rows=st.integers(1, 7),
    world_size=st.sampled_from([1, 2, 3]), fraction=st.sampled_from([0.3, 1.0]),
    several=st.booleans(),
)  # fmt: skip
def test_any_shape_cut_in_blocks_and_stripes_comes_to_the_same_bits(
    numel, rows, world_size, fraction, several, tmp_path_factory
):
    folder = tmp_path_factory.mktemp("disk")
    paths = [folder, folder] if several else [folder]
    offload = Offload("disk", "disk", disk=paths, fraction=fraction)

    def body(rank: int, offload: Any) -> list[Tensor]:
        module = seeded(lambda: nn.Sequential(nn.Linear(rows, numel // 64 + 1), nn.Linear(
            numel // 64 + 1, rows)))  # fmt: skip
        optimizer = adamw(module.parameters())
        onefold.shard(module, optimizer, units=list(module), offload=offload)
        for _ in range(2):
            module(torch.ones(2, rows)).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        return [whole(p) for p in module.parameters()]

    wanted = run_ranks(world_size, body, None)
    for a, b in zip(wanted, run_ranks(world_size, body, offload), strict=True):
        assert all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


OPTIMIZERS: list[Any] = [
    ("SGD", {}), ("SGD", {"momentum": 0.9, "nesterov": True}), ("Adam", {"amsgrad": True}),
    ("Adam", {"foreach": False, "fused": False}), ("NAdam", {}), ("RAdam", {}), ("Adamax", {}),
    pytest.param("Adagrad", {"initial_accumulator_value": 0.1}, marks=offloads_adagrad),
    ("Adadelta", {}),
    ("RMSprop", {"momentum": 0.5, "centered": True}), ("Rprop", {}), ("ASGD", {}),
]  # fmt: skip


@again_but("SGD-options1", "Adam-options2", "RAdam-options5", "Adadelta-options8", "ASGD-options11")
@pytest.mark.parametrize(("name", "options"), OPTIMIZERS)
def test_every_elementwise_optimizer_of_torch_steps_from_disk(name, options, tmp_path):
    def optimizer(groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
        groups = [{k: v for k, v in group.items() if k == "params"} for group in groups]
        return getattr(torch.optim, name)(groups, lr=1e-2, **options)

    early = Offload("disk", disk=tmp_path, step_in_backward=True)
    same_as_on_device(2, f"disk:{tmp_path}", early, optimizer=optimizer)


def test_a_schedule_may_change_the_rate_while_the_step_still_runs(tmp_path):
    def body(rank: int, offload: Any) -> list[Tensor]:
        module, optimizer = build(offload, optimizer=lambda groups: torch.optim.AdamW(
            groups, lr=torch.tensor(1e-2)))  # fmt: skip
        for batch in batches(3):
            loss_of(module, batch.chunk(2)[rank]).backward()
            optimizer.step()
            for group in optimizer.param_groups:
                group["lr"].mul_(0.1)
            optimizer.zero_grad()
        return [whole(p) for p in module.parameters()]

    for offload in ("optimizer", f"disk:{tmp_path}"):
        for a, b in zip(run_ranks(2, body, None)[0], run_ranks(2, body, offload)[0], strict=True):
            assert torch.equal(a, b)


def test_accumulated_micro_batches_are_stepped_once(tmp_path):
    def body(rank: int, offload: Any) -> Outcome:
        module, optimizer = build(offload)
        losses: list[float] = []
        for first, last in (batches(4)[:2], batches(4)[2:]):
            with onefold.accumulate(module):
                loss_of(module, first.chunk(2)[rank]).backward()
            loss_of(module, last.chunk(2)[rank]).backward()
            optimizer.step()
            optimizer.zero_grad()
        return outcome(module, optimizer, losses)

    wanted = run_ranks(2, body, None)
    early = Offload("disk", "disk", disk=tmp_path, step_in_backward=True)
    for offload in ("optimizer", f"disk:{tmp_path}", early):
        for a, b in zip(wanted, run_ranks(2, body, offload), strict=True):
            a.assert_same(b)


# a slow tier: nothing may look before it is due


class SlowStore(DiskStore):
    """A disk that takes its time."""

    seconds = 0.02

    def allocate(self, numel: int, dtype: torch.dtype, *, is_brief: bool = False) -> Any:
        extent = super().allocate(numel, dtype)
        for file in self.files:
            file.__class__ = SlowFile
        return extent


class SlowFile(SwapFile):
    def write_block(self, offset: int, source: memoryview) -> None:
        time.sleep(SlowStore.seconds)
        super().write_block(offset, source)


@pytest.fixture
def slow_disk(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> str:
    monkeypatch.setattr("onefold.compose.tiers.DiskStore", SlowStore)
    return f"disk:{tmp_path}"


def test_step_returns_before_the_tier_has_everything(slow_disk):
    def body(rank: int) -> bool:
        module, optimizer = build(slow_disk)
        loss_of(module, batches(1)[0].chunk(2)[rank]).backward()
        optimizer.step()
        pending = [unit.pending for unit in engine_of(module).units if unit.pending is not None]
        return any(not each.is_completed() for each in pending)

    assert all(run_ranks(2, body))


READS: dict[str, Callable[[nn.Module, Any], Any]] = {
    "state_dict": lambda module, _: module.state_dict()["embed.weight"],
    "detach": lambda module, _: module.embed.weight.detach(),
    "data": lambda module, _: module.embed.weight.data,
    "to_local": lambda module, _: module.embed.weight.to_local(),
    "full_tensor": lambda module, _: module.embed.weight.full_tensor(),
    "arithmetic": lambda module, _: (module.embed.weight * 1).detach(),
    "moments": lambda module, optimizer: optimizer.state[module.embed.weight]["exp_avg"],
    "optimizer.state_dict": lambda _, optimizer: optimizer.state_dict()["state"][0]["exp_avg"],
    "evaluation": lambda module, _: _evaluated(module),
    "unsharded": lambda module, _: _unsharded(module),
}  # fmt: skip


@torch.no_grad()
def _evaluated(module: nn.Module) -> Tensor:
    return module(batches(1)[0])


def _unsharded(module: nn.Module) -> Tensor:
    with onefold.unsharded(module):
        return module.embed.weight.detach().clone()


@again_but("state_dict", "to_local", "moments", "unsharded")
@pytest.mark.parametrize("read", READS)
def test_whatever_reads_state_right_after_step_sees_it_stepped(read, slow_disk):
    def body(rank: int, offload: Any) -> Tensor:
        module, optimizer = build(offload)
        loss_of(module, batches(1)[0].chunk(2)[rank]).backward()
        optimizer.step()
        value = READS[read](module, optimizer)
        return (value.to_local() if isinstance(value, dist.tensor.DTensor) else value).clone()

    for a, b in zip(run_ranks(2, body, None), run_ranks(2, body, slow_disk), strict=True):
        assert torch.equal(a, b)


@again_but("2")
@pytest.mark.parametrize("world_size", [1, 2])
def test_gradients_zeroed_in_place_right_after_step_are_still_those_that_were_stepped(
    world_size, slow_disk
):
    def body(rank: int, offload: Any) -> Outcome:
        module, optimizer = build(offload)
        for batch in batches(2):
            loss_of(module, batch.chunk(world_size)[rank]).backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=False)
        return outcome(module, optimizer, [])

    wanted = run_ranks(world_size, body, None)
    for a, b in zip(wanted, run_ranks(world_size, body, slow_disk), strict=True):
        a.assert_same(b)


def test_edits_of_resting_parameters_reach_the_next_forward(tmp_path):
    def body(rank: int, offload: Any) -> Outcome:
        module, optimizer = build(offload)
        losses = train(module, optimizer, batches(1))
        with torch.no_grad():
            module.head.weight.mul_(0.5)
            module.blocks[1][1].weight.copy_(torch.ones_like(module.blocks[1][1].weight))
        losses += train(module, optimizer, batches(1, seed=5))
        with onefold.unsharded(module, writeback=True), torch.no_grad():
            module.blocks[2][3].weight.add_(0.25)
        losses += train(module, optimizer, batches(1, seed=6))
        return outcome(module, optimizer, losses)

    for options in ("optimizer", f"disk:{tmp_path}"):
        for a, b in zip(run_ranks(2, body, None), run_ranks(2, body, options), strict=True):
            a.assert_same(b)


# steps in backward: what they take away is an error to use


def early(path: Path) -> Offload:
    return Offload("disk", "disk", disk=path, step_in_backward=True)


@every_rank(2)
def test_a_backward_that_failed_after_it_stepped_a_unit_is_not_saved(rank, tmp_path):
    def fail(grad):
        raise ZeroDivisionError

    module, optimizer = build(early(tmp_path))
    train(module, optimizer, batches(1))
    module.embed.register_forward_hook(lambda *args: args[-1].register_hook(fail) and None)
    with pytest.raises(ZeroDivisionError):
        loss_of(module, batches(1)[0].chunk(2)[rank]).backward()
    with pytest.raises(StateError, match="some weights are stepped and others are not"):
        onefold.save(tmp_path / "half", module, optimizer)


@every_rank(2)
def test_a_gradient_that_was_stepped_by_in_backward_is_an_error_to_read(rank, tmp_path):
    module, optimizer = build(early(tmp_path))
    loss_of(module, batches(1)[0].chunk(2)[rank]).backward()
    with pytest.raises(StateError, match="step_in_backward"):
        nn.utils.clip_grad_norm_(module.parameters(), 1.0)
    with pytest.raises(StateError, match=r"embed\.weight"):
        module.embed.weight.grad  # noqa: B018
    optimizer.step()
    assert module.embed.weight.grad is None
    assert module.unused.grad is None
    train(module, optimizer, batches(1))


@every_rank(2)
def test_a_second_backward_after_units_were_stepped_is_refused(rank, tmp_path):
    module, _ = build(early(tmp_path))
    loss_of(module, batches(1)[0].chunk(2)[rank]).backward()
    with pytest.raises(StateError, match="accumulate"):
        loss_of(module, batches(1)[0].chunk(2)[rank]).backward()


@every_rank(2)
def test_a_backward_that_fails_half_way_leaves_a_module_that_must_be_loaded(rank, tmp_path):
    class Fails(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Tensor:
            raise ValueError("half way")

    module, optimizer = build(early(tmp_path), depth=5)
    train(module, optimizer, batches(1))
    onefold.save(tmp_path / "saved", module, optimizer)
    hook = module.blocks[1].register_forward_hook(lambda *args: Fails.apply(args[-1]))
    with pytest.raises(ValueError, match="half way"):
        train(module, optimizer, batches(1))
    hook.remove()
    with pytest.raises(StateError, match=r"onefold\.load"):
        train(module, optimizer, batches(1))
    onefold.load(tmp_path / "saved", module, optimizer)
    train(module, optimizer, batches(1))


@again_but("True")
@pytest.mark.parametrize("in_backward", [False, True])
def test_edits_of_narrow_weights_reach_their_masters(in_backward, tmp_path):
    def body(rank: int, offload: Any) -> Outcome:
        module, optimizer = build(offload, dtype=torch.bfloat16)
        losses = train(module, optimizer, batches(1))
        with torch.no_grad():
            module.load_state_dict({k: v * 0.5 for k, v in module.state_dict().items()})
        return outcome(module, optimizer, losses + train(module, optimizer, batches(2, seed=4)))

    offload = Offload("disk", "disk", disk=tmp_path, step_in_backward=in_backward)
    for a, b in zip(run_ranks(2, body, None), run_ranks(2, body, offload), strict=True):
        a.assert_same(b)


def test_two_optimizers_step_one_unit_in_turn(slow_disk):
    def body(rank: int, offload: Any) -> list[Tensor]:
        module = seeded(Tower)
        weights = [p for p in module.parameters() if p.dim() > 1]
        others = [p for p in module.parameters() if p.dim() <= 1]
        pair = [adamw(weights), torch.optim.SGD(others, lr=0.1, momentum=0.9)]
        onefold.shard(module, pair, offload=offload)
        for batch in batches(3):
            loss_of(module, batch.chunk(2)[rank]).backward()
            for optimizer in pair:
                optimizer.step()
                optimizer.zero_grad()
        return [whole(p) for p in module.parameters()]

    early = Offload("disk", "disk", disk=slow_disk.partition(":")[2], step_in_backward=True)
    for offload in (slow_disk, early):
        for a, b in zip(run_ranks(2, body, None), run_ranks(2, body, offload), strict=True):
            assert all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


def test_two_optimizers_with_one_name_for_a_state_of_one_weight_are_refused(slow_disk):
    """Both would step one moment. The next optimizer after one that is gone begins anew."""

    def sgd(module: nn.Module, momentum: float) -> torch.optim.Optimizer:
        return torch.optim.SGD(module.parameters(), lr=0.1, momentum=momentum)

    def body(rank: int, offload: Any) -> list[Tensor]:
        module = seeded(Tower)
        first = sgd(module, 0.9)
        onefold.shard(module, first, offload=offload)
        parts = [batch.chunk(2)[rank] for batch in batches(3)]
        train(module, first, parts[0])
        other = sgd(module, 0.5)
        if offload is not None:
            with pytest.raises(StateError, match=r"'momentum_buffer' of 'scale'.*offload"):
                train(module, other, parts[1])
            onefold.save(folder / "one", module, first)
            onefold.load(folder / "one", module, first)
            with pytest.raises(StateError, match="one optimizer with a state"):
                train(module, other, parts[1])
            module.zero_grad()
        train(module, torch.optim.Adam(module.parameters()), parts[1])  # of other names
        del first
        gc.collect()
        train(module, other, parts[2])
        return [whole(p) for p in module.parameters()]

    def train(module: nn.Module, optimizer: torch.optim.Optimizer, batch: Tensor) -> None:
        loss_of(module, batch).backward()
        optimizer.step()
        optimizer.zero_grad()

    folder = Path(slow_disk.partition(":")[2])
    for a, b in zip(run_ranks(2, body, None), run_ranks(2, body, slow_disk), strict=True):
        assert all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


@pytest.mark.parametrize("way", ["backwards", "closures", "save"])
@every_rank(2)
def test_one_of_two_optimizers_cannot_step_what_backward_has_stepped_for_both(rank, way, tmp_path):
    module = seeded(Tower)
    weights = [p for p in module.parameters() if p.dim() > 1]
    others = [p for p in module.parameters() if p.dim() <= 1]
    pair = [adamw(weights), torch.optim.SGD(others, lr=0.1)]
    onefold.shard(module, pair, offload=Offload("cpu", step_in_backward=True))
    batch = batches(1)[0].chunk(2)[rank]

    def backward() -> Tensor:
        module.zero_grad()
        loss = loss_of(module, batch)
        loss.backward()
        return loss

    with pytest.raises(StateError, match="each optimizer to step once after each backward"):
        if way == "closures":
            for optimizer in pair:
                optimizer.step(backward)
        else:
            backward()
            pair[0].step()
            backward() if way == "backwards" else onefold.save(tmp_path / "saved", module, pair)


@again_but("1")
@pytest.mark.parametrize("num_stepped", [0, 1])
def test_a_load_before_all_optimizers_have_stepped_begins_anew(num_stepped, tmp_path):
    """As after an interrupt between backward and step, or between two steps."""

    def body(rank: int, is_cut: bool) -> list[Tensor]:
        module, folder = seeded(Tower), tmp_path / f"saved {is_cut}"
        weights = [p for p in module.parameters() if p.dim() > 1]
        others = [p for p in module.parameters() if p.dim() <= 1]
        pair = [adamw(weights), torch.optim.SGD(others, lr=0.1)]
        onefold.shard(module, pair, offload=Offload("cpu", step_in_backward=True))

        def step(optimizers: list[torch.optim.Optimizer]) -> None:
            loss_of(module, batches(1)[0].chunk(2)[rank]).backward()
            for optimizer in optimizers:
                optimizer.step()

        step(pair)
        onefold.save(folder, module, pair)
        if is_cut:
            step(pair[:num_stepped])
        onefold.load(folder, module, pair)
        step(pair)
        step(pair)
        return [whole(p) for p in module.parameters()]

    for a, b in zip(run_ranks(2, body, False), run_ranks(2, body, True), strict=True):
        assert all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


def test_a_wait_that_is_interrupted_is_waited_for_again(slow_disk, monkeypatch):
    module, optimizer = build(slow_disk)
    loss_of(module, batches(1)[0]).backward()
    optimizer.step()
    unit = engine_of(module).units[-1]
    real = type(unit.pending).wait

    def interrupted(step: Any) -> None:
        monkeypatch.setattr(type(unit.pending), "wait", real)
        raise KeyboardInterrupt

    monkeypatch.setattr(type(unit.pending), "wait", interrupted)
    with pytest.raises(KeyboardInterrupt):
        unit.wait_step()
    assert unit.pending is not None
    got = outcome(module, optimizer, [])
    wanted, stepped = build(None)
    loss_of(wanted, batches(1)[0]).backward()
    stepped.step()
    got.assert_same(outcome(wanted, stepped, []))


@pytest.mark.parametrize("error", [MemoryError("none left"), ValueError("odd")])
def test_a_step_that_is_cut_short_by_any_error_stays_an_error(error, tmp_path, monkeypatch):
    def body(rank: int) -> None:
        module, optimizer = build(f"disk:{tmp_path}")
        train(module, optimizer, batches(1))
        wait_step(module)
        with monkeypatch.context() as broken:
            broken.setattr(blocks._StepBlock, "_step_segment", fail)
            loss_of(module, batches(1)[0]).backward()
            optimizer.step()
            for unit in engine_of(module).units:
                unit.join_step()
        for _ in range(2):
            with pytest.raises(TierError, match=r"(?s)cut short|run to its end"):
                loss_of(module, batches(1)[0])

    def fail(*_: Any) -> None:
        raise error

    body(0)


# bytes


@every_rank(3)
def test_bytes_rest_in_their_tier_and_are_counted_there(rank, tmp_path):
    module, optimizer = build(f"disk:{tmp_path}", dtype=torch.bfloat16)
    train(module, optimizer, batches(2))
    units = engine_of(module).units
    numel = sum(unit.rest.shard_numel(rank) for unit in units)
    trained = sum(unit.rest.shard_numel(rank) for unit in units if unit.requires_grad())
    memory = onefold.report(module).memory
    assert memory["weight"]["disk"].now == 2 * numel
    assert memory["master"]["disk"].now == 4 * trained
    assert memory["optimizer"]["disk"].now == 8 * trained
    assert all(usage.now == 0 for kind in ("weight", "optimizer")
               for tier, usage in memory[kind].items() if tier != "disk")  # fmt: skip


@every_rank(2)
def test_a_step_moves_twelve_bytes_each_way_and_a_gather_four(rank, tmp_path):
    module = seeded(lambda: nn.Sequential(*(nn.Linear(128, 256, bias=False) if i % 2 == 0 else
                                            nn.Linear(256, 128, bias=False)
                                            for i in range(4))))  # fmt: skip
    optimizer = adamw(module.parameters())
    onefold.shard(module, optimizer, units=list(module), offload=f"disk:{tmp_path}")
    store = engine_of(module).context.tiers.weight
    numel = sum(p.numel() for p in module.parameters()) // 2
    for step in range(3):
        before = store.moved_nbytes
        module(torch.ones(2, 128)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        wait_step(module)
        read, written = (b - a for a, b in zip(before, store.moved_nbytes, strict=True))
        moments = 8 * numel if step else 0  # the first step makes them
        assert written == 12 * numel
        # whole in forward and again in backward, but for the last unit, and the step
        assert read == pytest.approx((4 + 4 - 1 + 4) * numel + moments, rel=0.1)


@again_but("1.0")
@pytest.mark.parametrize("fraction", [0.0, 0.4, 1.0])
def test_a_fraction_of_the_states_leaves_the_device_from_the_last_unit_on(fraction, tmp_path):
    def body(rank: int) -> tuple[list[bool], float]:
        module, optimizer = build(
            Offload("disk", disk=tmp_path, fraction=fraction), stage=2, depth=8
        )
        train(module, optimizer, batches(2))
        memory = onefold.report(module).memory["optimizer"]
        away = memory["disk"].now if "disk" in memory else 0
        share = away / sum(usage.now for usage in memory.values())
        return [unit.is_offloaded for unit in engine_of(module).units], share

    for chosen, share in run_ranks(2, body):
        assert chosen == sorted(chosen)
        assert share == pytest.approx(fraction, abs=0.1)
    same_as_on_device(2, Offload("disk", disk=tmp_path, fraction=fraction), stage=2, depth=8)


@again_but("6200000-0.5")
@pytest.mark.parametrize(("free", "share"), [(1 << 40, 0.0), (1000, 1.0), (6_200_000, 0.5)])
def test_auto_sends_away_what_has_no_room_and_says_why(free, share, tmp_path, monkeypatch):
    has_free(monkeypatch, free)

    def body(rank: int) -> tuple[float, str]:
        module, optimizer = build(Offload("disk", disk=tmp_path, fraction="auto"), stage=2, depth=8)
        train(module, optimizer, batches(1))
        report = onefold.report(module)
        memory = report.memory["optimizer"]
        away = memory["disk"].now if "disk" in memory else 0
        return away / sum(usage.now for usage in memory.values()), str(report)

    for got, told in run_ranks(2, body):
        assert got == pytest.approx(share, abs=0.3 if 0 < share < 1 else 0)
        assert f"{free // 2:,} bytes are free" in told
        assert "have room on the device" in told


def test_a_deleted_module_gives_back_files_and_memory(tmp_path):
    def body(rank: int) -> tuple[Any, dict[str, int], list[int]]:
        module, optimizer = build(f"disk:{tmp_path}")
        train(module, optimizer, batches(2))
        engine = engine_of(module)
        store, ledger = engine.context.tiers.weight, engine.ledger
        files = [file.fd for file in store.files]
        alive = weakref.ref(store)
        wait_step(module)
        del module, optimizer, engine, store
        gc.collect()
        return alive, {str(kind): usage.now for kind, usage in ledger.usage.items()}, files

    gc.collect()
    for alive, held, _ in run_ranks(2, body):
        gc.collect()
        assert alive() is None
        assert not any(held.values()), held


def test_a_module_deleted_right_after_a_step_needs_no_collector(tmp_path):
    module, optimizer = build(f"disk:{tmp_path}")
    train(module, optimizer, batches(2))
    ledger = engine_of(module).ledger
    workers = engine_of(module).context.tiers.steppers
    gc.collect()
    gc.disable()
    try:
        del module, optimizer
        workers.give(lambda: None).await_end()
        for _ in range(100):
            held = {str(k): u.now for k, u in ledger.usage.items()}
            if not any(held.values()):
                break
            time.sleep(0.05)
        assert not any(held.values()), held
    finally:
        gc.enable()


def test_files_are_unlinked_from_the_start(tmp_path):
    def body(rank: int) -> list[str]:
        module, optimizer = build(f"disk:{tmp_path}")
        train(module, optimizer, batches(1))
        return os.listdir(tmp_path)

    assert run_ranks(2, body) == [[], []]


@every_rank(2)
def test_all_room_on_disk_is_taken_before_the_first_step(rank, tmp_path):
    module, optimizer = build(f"disk:{tmp_path}")
    files = engine_of(module).context.tiers.weight.files
    before = [os.fstat(file.fd).st_size for file in files]
    train(module, optimizer, batches(2))
    assert [os.fstat(file.fd).st_size for file in files] == before


@pytest.mark.parametrize("precision", [None, "bf16"])
@pytest.mark.parametrize("tier", [{"parameters": "disk"}, {}, {"fraction": 0.5}])
@every_rank(2)
def test_slots_for_states_on_disk_are_taken_before_the_first_step_as_planned(
    rank, tier, precision, tmp_path
):
    choice = Offload(optimizer="disk", disk=tmp_path, **tier)
    module, optimizer = build(choice, depth=9, precision=precision)
    before = onefold.report(module).memory["staging"]["cpu"].now
    train(module, optimizer, batches(3))
    report = onefold.report(module)
    peak, planned = report.memory["staging"]["cpu"].peak, report.predicted["staging"]
    assert peak == planned
    if "parameters" in tier:  # rows take slots when forward fetches them
        assert 0 < before < peak
    else:
        assert before == peak > 0


def test_slots_do_not_grow_with_the_model(tmp_path):
    def body(rank: int, depth: int) -> int:
        module, optimizer = build(f"disk:{tmp_path}", depth=depth)
        train(module, optimizer, batches(3))
        return onefold.report(module).memory["staging"]["cpu"].peak

    few, many = (run_ranks(2, body, depth)[0] for depth in (4, 16))
    assert many <= 1.5 * few


# checkpoints


@again_but("disk-optimizer")
@pytest.mark.parametrize(("there", "here"), [(None, "disk"), ("disk", None), ("disk", "optimizer")])
def test_a_run_goes_on_in_another_tier_as_if_never_stopped(there, here, tmp_path):
    def tier(choice: str | None) -> str | None:
        return f"disk:{tmp_path}" if choice == "disk" else choice

    def body(rank: int) -> tuple[Outcome, Outcome]:
        module, optimizer = build(tier(there))
        losses = train(module, optimizer, batches(2))
        onefold.save(tmp_path / "saved", module, optimizer)
        losses += train(module, optimizer, batches(2, seed=3))
        wanted = outcome(module, optimizer, losses)
        other, resumed = build(tier(here))
        onefold.load(tmp_path / "saved", other, resumed)
        again = losses[:2] + train(other, resumed, batches(2, seed=3))
        return wanted, outcome(other, resumed, again)

    for wanted, got in run_ranks(2, body):
        wanted.assert_same(got)


@again_but("1-2")
@pytest.mark.parametrize(("there", "here"), [(2, 3), (3, 1), (1, 2)])
def test_state_on_disk_is_loaded_by_any_number_of_ranks(there, here, tmp_path):
    def save(rank: int) -> Outcome:
        module, optimizer = build(f"disk:{tmp_path}", dtype=torch.bfloat16)
        train(module, optimizer, batches(2))
        onefold.save(tmp_path / "saved", module, optimizer)
        return outcome(module, optimizer, [])

    def load(rank: int) -> Outcome:
        module, optimizer = build(f"disk:{tmp_path}", dtype=torch.bfloat16)
        onefold.load(tmp_path / "saved", module, optimizer)
        return outcome(module, optimizer, [])

    wanted = run_ranks(there, save)[0]
    for got in run_ranks(here, load):
        wanted.assert_same(got)


@every_rank(2)
def test_loading_reads_moments_to_where_they_rest(rank, tmp_path):
    module, optimizer = build(f"disk:{tmp_path}")
    train(module, optimizer, batches(2))
    onefold.save(tmp_path / "saved", module, optimizer)
    before = resting(module)
    onefold.load(tmp_path / "saved", module, optimizer)
    train(module, optimizer, batches(1))
    memory = onefold.report(module).memory["optimizer"]
    assert memory.get("device") is None or memory["device"].now == 0
    assert resting(module) == before


# faults


def fails(
    monkeypatch: pytest.MonkeyPatch, name: str, code: int, folder: Path, *, after: int = 0
) -> None:
    """Calls of os.`name` on one rank's file in the folder fail, once some have gone well."""
    real, lock = getattr(os, name), threading.Lock()
    chosen: list[int] = []
    seen: list[int] = []

    def call(fd: int, *args: Any) -> Any:
        with lock:
            if not chosen and os.readlink(f"/proc/self/fd/{fd}").startswith(str(folder)):
                chosen.append(fd)
            is_chosen = chosen == [fd]
            seen.extend([fd] * is_chosen)
            broken = is_chosen and len(seen) > after
        if broken:
            raise OSError(code, os.strerror(code))
        return real(fd, *args)

    monkeypatch.setattr(os, name, call)


@again_but("False-1-preadv", "True-1-pwritev", "True-3-preadv")
@worlds_in_turn
@pytest.mark.parametrize("name", ["preadv", "pwritev"])
@pytest.mark.parametrize("world_size", [1, 2, 3])
@pytest.mark.parametrize("in_backward", [False, True])
def test_a_disk_that_fails_in_a_step_is_the_same_error_on_every_rank(
    name, world_size, in_backward, tmp_path, monkeypatch
):
    fails(monkeypatch, name, errno.EIO, tmp_path, after=30)

    def body(rank: int) -> TierError:
        module, optimizer = build(Offload("disk", "disk", disk=tmp_path,
                                          step_in_backward=in_backward))  # fmt: skip
        with pytest.raises(TierError) as caught:
            for _ in range(30):
                train(module, optimizer, batches(1))
        with pytest.raises(TierError):  # and it stays
            train(module, optimizer, batches(1))
        return caught.value

    errors = run_ranks(world_size, body)
    assert len({str(error) for error in errors}) == 1
    message = str(errors[0])
    for word in ("EIO", str(tmp_path), "offset", "bytes", "rank ", "\nhint: "):
        assert word in message
    broken = [error for error in errors if error.errno is not None]
    assert [e.errno for e in broken] == [errno.EIO]
    assert broken[0].path == str(tmp_path)
    assert broken[0].offset is not None
    assert broken[0].nbytes is not None
    assert os.listdir(tmp_path) == []


def test_the_last_checkpoint_loads_after_the_disk_failed(tmp_path, monkeypatch):
    def body(rank: int) -> list[float]:
        module, optimizer = build(f"disk:{tmp_path}")
        losses = train(module, optimizer, batches(2))
        onefold.save(tmp_path / "saved", module, optimizer)
        losses += train(module, optimizer, batches(1, seed=9))
        wait_step(module)
        return losses

    def failing(rank: int) -> None:
        module, optimizer = build(f"disk:{tmp_path}")
        with pytest.raises(TierError):
            for _ in range(50):
                train(module, optimizer, batches(1))

    def resumed(rank: int) -> list[float]:
        module, optimizer = build(None)
        onefold.load(tmp_path / "saved", module, optimizer)
        return train(module, optimizer, batches(1, seed=9))

    wanted = run_ranks(2, body)
    with monkeypatch.context() as broken:
        fails(broken, "pwritev", errno.EIO, tmp_path, after=20)
        run_ranks(2, failing)
    assert [losses[2:] for losses in wanted] == run_ranks(2, resumed)


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EFBIG, errno.EIO])
def test_a_disk_without_room_is_refused_before_training_on_every_rank(code, tmp_path, monkeypatch):
    fails(monkeypatch, "posix_fallocate", code, tmp_path)

    def body(rank: int) -> None:
        with pytest.raises(TierError, match=errno.errorcode[code]) as caught:
            build(f"disk:{tmp_path}")
        assert str(tmp_path) in str(caught.value)

    run_ranks(2, body)
    assert os.listdir(tmp_path) == []


def test_a_budget_above_what_is_free_is_refused_before_anything_is_taken(tmp_path, monkeypatch):
    import shutil

    class Usage:
        free = 1000

    monkeypatch.setattr(shutil, "disk_usage", lambda _: Usage)
    with pytest.raises(TierError, match=r"free for each of 1 ranks.*\n*hint: free space"):
        build(f"disk:{tmp_path}")
    has_free(monkeypatch, 1000)
    with pytest.raises(TierError, match="of CPU memory"):
        build("cpu")


def test_short_reads_and_writes_are_gone_on_with(tmp_path, monkeypatch):
    wanted = run_ranks(2, run(None))
    for name in ("preadv", "pwritev"):
        real = getattr(os, name)

        def short(fd: int, views: list[Any], offset: int, real: Any = real) -> int:
            (view,) = views
            return real(fd, [view[: max(4096, len(view) // 2 // 4096 * 4096)]], offset)

        monkeypatch.setattr(os, name, short)
    for a, b in zip(wanted, run_ranks(2, run(f"disk:{tmp_path}")), strict=True):
        a.assert_same(b)


def test_a_read_that_ends_early_is_an_error_and_no_garbage(tmp_path, monkeypatch):
    module, optimizer = build(f"disk:{tmp_path}")
    train(module, optimizer, batches(1))
    monkeypatch.setattr(os, "preadv", lambda *_: 0)
    with pytest.raises(TierError, match="only 0 bytes"):
        train(module, optimizer, batches(1))


def test_a_file_system_without_o_direct_is_used_all_the_same(tmp_path, monkeypatch):
    wanted = run_ranks(2, run(None))
    for name in ("preadv", "pwritev"):
        real = getattr(os, name)

        def refuse(fd: int, views: Any, offset: int, real: Any = real) -> int:
            import fcntl

            if fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_DIRECT:
                raise OSError(errno.EINVAL, "no O_DIRECT here")
            return real(fd, views, offset)

        monkeypatch.setattr(os, name, refuse)
    for a, b in zip(wanted, run_ranks(2, run(f"disk:{tmp_path}")), strict=True):
        a.assert_same(b)


def test_a_path_in_memory_is_used_with_a_warning():
    import tempfile

    with (
        tempfile.TemporaryDirectory(dir="/dev/shm") as folder,
        pytest.warns(UserWarning, match="lies in memory"),
    ):
        got = run(f"disk:{folder}")(0)
    got.assert_same(run(None)(0))


@pytest.mark.parametrize("what", ["missing", "file"])
def test_a_path_that_is_no_folder_is_refused_on_every_rank(what, tmp_path):
    path = tmp_path / "there"
    if what == "file":
        path.write_text("")

    def body(rank: int) -> None:
        with pytest.raises(TierError, match=r"there.*\nhint: create it") as caught:
            build(f"disk:{path}")
        assert ("a file" if what == "file" else "nothing there") in str(caught.value)

    run_ranks(2, body)


def test_two_jobs_on_one_path_do_not_meet(tmp_path):
    def body(rank: int) -> list[Outcome]:
        pairs = [build(f"disk:{tmp_path}") for _ in range(2)]
        losses: list[list[float]] = [[], []]
        for batch in batches(3):
            for (module, optimizer), mine in zip(pairs, losses, strict=True):
                mine += train(module, optimizer, [batch])
        return [outcome(*pair, mine) for pair, mine in zip(pairs, losses, strict=True)]

    for (first, second), wanted in zip(run_ranks(2, body), run_ranks(2, run(None)), strict=True):
        wanted.assert_same(first)
        wanted.assert_same(second)


# choices


@pytest.mark.parametrize(
    ("offload", "stage", "word"),
    [
        ("disk", 3, "a folder"), ("disk:", 3, "a folder"), ("cup", 3, "did you mean 'cpu'"),
        ("cpu", 2, "stage=3"), ("disk:/tmp", 1, "stage=3"), ("optimizer", 0, "stage 1, 2 or 3"),
        (3, 3, "offload to be"),
    ],
)  # fmt: skip
def test_an_offload_that_cannot_work_is_refused_with_what_would(offload, stage, word):
    with pytest.raises(ConfigError, match=word) as caught:
        build(offload, stage=stage)
    assert "\nhint: " in str(caught.value)


@pytest.mark.parametrize(
    ("options", "word"),
    [
        ({"optimizer": "gpu"}, "Offload.optimizer"), ({"parameters": "nvme"}, "Offload.parameters"),
        ({"fraction": 1.5}, "fraction"), ({"fraction": True}, "fraction"),
        ({"fraction": float("nan")}, "fraction"), ({"optimizer": "disk"}, "a folder"),
    ],
)  # fmt: skip
def test_an_offload_with_a_part_that_makes_no_sense_is_refused(options, word):
    with pytest.raises(ConfigError, match=word):
        Offload(**options)


def test_steps_in_backward_want_states_off_the_device():
    with pytest.raises(ConfigError, match="step_in_backward"):
        build(Offload(step_in_backward=True))


@every_rank(2)
def test_an_optimizer_of_whole_matrices_is_refused_with_what_would_work(rank, tmp_path):
    with pytest.raises(ConfigError, match="Adafactor"):
        build("optimizer", optimizer=lambda groups: torch.optim.Adafactor(
            [p for group in groups for p in group["params"]]))  # fmt: skip


# real processes


def _trains_from_disk(rank: int, folder: str) -> None:
    module, optimizer = build(f"disk:{folder}")
    got = outcome(module, optimizer, train(module, optimizer, batches(3), clip=0.1))
    module, optimizer = build(None)
    got.assert_same(outcome(module, optimizer, train(module, optimizer, batches(3), clip=0.1)))


def test_real_processes_train_from_disk_bit_for_bit(tmp_path):
    run_processes(2, _trains_from_disk, str(tmp_path))


def _is_killed(rank: int, folder: str) -> None:
    module, optimizer = build(f"disk:{folder}")
    for step, batch in enumerate(batches(50)):
        train(module, optimizer, [batch])
        if step == 3:
            os.kill(os.getpid(), 9)


def test_a_process_that_is_killed_while_it_swaps_leaves_no_file(tmp_path):
    with pytest.raises(Exception, match="SIGKILL"):
        run_processes(2, _is_killed, str(tmp_path))
    assert os.listdir(tmp_path) == []
