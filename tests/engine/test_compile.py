"""torch.compile: blocks or the whole, before or after `shard`, train as the uncompiled module."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import onefold
from onefold import Offload
from onefold.app.train.job import Job
from onefold.app.train.loop import preflight
from onefold.app.train.loop import train as train_job
from onefold.app.train.run_record import TrainObserver
from onefold.compat import untraced
from onefold.engine.activations import Limits
from onefold.engine.registry import engine_of
from onefold.planner.trace import tokens_of, trace
from onefold.wire.collectives import Group
from onefold.wire.world import World
from tests.support.models import VOCAB, WIDTH, Block, Model, next_token_loss, token_batches
from tests.support.ranks import every_rank, run_ranks, seeded
from tests.support.rows import again_but, worlds_in_turn

pytestmark = [
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf"),
    pytest.mark.filterwarnings("ignore:.*torch.jit.script_method:DeprecationWarning"),
]

STEPS = 4


@pytest.fixture(autouse=True)
def fresh(tmp_path, monkeypatch):
    """No graph of another test, and no file of another run."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "inductor"))
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    yield
    torch._dynamo.reset()


class Counting:
    """A back end that counts the graphs it is given."""

    def __init__(self, name: str = "eager") -> None:
        self.graphs = 0
        self.compile = torch._dynamo.lookup_backend(name)

    def __call__(self, graph: Any, inputs: Any, **options: Any) -> Callable[..., Any]:
        self.graphs += 1
        return self.compile(graph, inputs, **options)


class Straight(nn.Module):
    """No loop around its blocks, a head tied by a function: dynamo sees all of the forward."""

    def __init__(self, recompute: bool | None = None) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.recompute = recompute  # around the second block: None, or `use_reentrant`

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.blocks[0](self.embed(tokens))
        if self.recompute is None or not torch.is_grad_enabled():
            x = self.blocks[1](x)
        else:
            x = checkpoint(self.blocks[1], x, use_reentrant=self.recompute)
        return F.linear(x, self.embed.weight)


class Recomputing(Block):
    """A block that keeps one activation."""

    def __init__(self, use_reentrant: bool) -> None:
        super().__init__()
        self.use_reentrant = use_reentrant

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(super().forward, x, use_reentrant=self.use_reentrant)


small = partial(Model, 2)  # the second of two equal blocks uses the graphs of the first


def with_blocks(build: Callable[[], nn.Module]) -> Model:
    model = small()
    model.blocks = nn.ModuleList(build() for _ in range(2))
    return model


def units(module: nn.Module, **options: Any) -> nn.Module:
    for block in module.blocks:
        block.compile(**options)
    return module


def wrapped_units(module: nn.Module, **options: Any) -> nn.Module:
    for index, block in enumerate(module.blocks):
        module.blocks[index] = torch.compile(block, **options)
    return module


def in_place(module: nn.Module, **options: Any) -> nn.Module:
    module.compile(**options)
    return module


def uncompiled(module: nn.Module, **_: Any) -> nn.Module:
    return module


def train(
    rank: int, build: Callable[[], nn.Module], how: Any, backend: Any, *, first: bool = False,
    accumulate: bool = False, evaluate: bool = False, scale: int = 1, **options: Any,
) -> list[float]:  # fmt: skip
    """Losses of a few steps; `first` compiles before `shard`."""
    module = runs = seeded(build)
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-2, eps=1e-4)
    if first:
        runs = how(module, backend=backend)
        onefold.shard(runs, optimizer, **options)
    else:
        onefold.shard(module, optimizer, **options)
        runs = how(module, backend=backend)
    if module_saved := engine_of(module).saved:
        module_saved.limits = Limits(least=16, window=64)
    losses = []
    for tokens in token_batches(STEPS):
        parts = tokens.chunk(3)[rank].chunk(2 if accumulate else 1)
        for number, part in enumerate(parts, 1):
            with nullcontext() if number == len(parts) else onefold.accumulate(runs):
                loss = next_token_loss(runs, part) / len(parts)
                loss.backward()
        nn.utils.clip_grad_norm_(module.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        if evaluate:
            with torch.no_grad():
                losses.append(next_token_loss(runs, tokens).item())
    return losses


WAYS = [
    *((how, first, 3) for how in (units, wrapped_units, in_place, torch.compile)
      for first in (True, False)),
    *((units, False, stage) for stage in (0, 1, 2)),
    *((torch.compile, True, stage) for stage in (0, 1, 2)),
]  # fmt: skip


def same(ranks: int, build: Any, how: Any, backend: Any, **options: Any) -> None:
    """Compiled and uncompiled losses are equal bit for bit on every rank."""
    wanted = run_ranks(ranks, lambda rank: train(rank, build, uncompiled, None, **options))
    found = run_ranks(ranks, lambda rank: train(rank, build, how, backend, **options))
    assert found == wanted


@again_but(
    "wrapped_units-False-3", "in_place-False-3", "compile-False-3", "units-False-2",
    "compile-True-1",
)  # fmt: skip
@worlds_in_turn
@pytest.mark.parametrize(("how", "first", "stage"), WAYS)
def test_compiled_losses_equal_uncompiled_ones(how, first, stage):
    same(2, small, how, "eager" if first else "aot_eager", first=first, stage=stage)


@again_but("3")
@pytest.mark.parametrize("ranks", [1, 3])
def test_any_number_of_ranks_trains_alike(ranks):
    same(ranks, small, units, "aot_eager", stage=3)


@again_but("units-options2", "compile-options5", "units-options8")
@pytest.mark.parametrize(
    ("how", "options"),
    [
        (torch.compile, {"stage": 1, "offload": "optimizer"}),
        (torch.compile, {"offload": "cpu"}),
        (units, {"offload": "disk"}),
        (units, {"offload": Offload(tile=WIDTH * 33 * 4 - 1)}),
        (torch.compile, {"offload": Offload(tile=WIDTH * 33 * 4 - 1)}),
        (torch.compile, {"precision": "bf16"}),
        (units, {"precision": "bf16", "stage": 0}),
        (torch.compile, {"accumulate": True, "stage": 2, "evaluate": True}),
        (units, {"accumulate": True, "stage": 3, "evaluate": True}),
    ],
)
def test_tiers_precision_accumulation_and_evaluation_change_nothing(how, options, tmp_path):
    if options.get("offload") == "disk":
        options = {**options, "offload": f"disk:{tmp_path}"}
    same(2, small, how, "aot_eager" if how is units else "eager", **options)


def test_activations_leave_the_device_from_compiled_blocks_too(tmp_path):
    same(2, small, units, "aot_eager", offload=Offload(activations="disk", disk=str(tmp_path)))


@again_but("units-True", "compile-False")
@pytest.mark.parametrize("use_reentrant", [True, False])
@pytest.mark.parametrize("how", [units, torch.compile])
def test_recompute_inside_and_around_units_changes_nothing(how, use_reentrant):
    same(2, lambda: with_blocks(lambda: Recomputing(use_reentrant)), how, "aot_eager")
    same(2, lambda: Straight(use_reentrant), how, "eager")


@again_but("Straight-aot_eager-options0", "Straight-eager-options3", "build6-eager-options6")
@pytest.mark.parametrize(
    ("build", "backend", "options"),
    [
        (Straight, "aot_eager", {"stage": 0}), (Straight, "aot_eager", {"stage": 3}),
        (Straight, "eager", {"stage": 1, "precision": "bf16"}),
        (Straight, "eager", {"stage": 3, "precision": "bf16"}),
        (partial(small, tied=True), "eager", {"stage": 0}),
        (partial(small, tied=True), "eager", {"stage": 1}),
        (partial(small, tied=True), "eager", {"stage": 3}),
    ],
)  # fmt: skip
def test_a_weight_that_a_compiled_forward_uses_again_is_gathered_and_not_traced(
    build, backend, options
):
    same(2, build, torch.compile, backend, **options)


def test_a_graph_of_the_plain_module_is_not_used_after_shard():
    def losses(rank, how):
        module = seeded(small)
        runs = how(module, backend="eager")
        next_token_loss(runs, token_batches(1)[0]).backward()
        return train(rank, lambda: module, lambda *_, **__: runs, None, stage=0)

    wanted = run_ranks(2, losses, uncompiled)
    for how in (units, in_place, torch.compile):
        assert run_ranks(2, losses, how) == wanted


# graphs


def graphs_of(how: Any, *, shards: bool, blocks: int = 12, fullgraph: bool = False) -> list[int]:
    """How many graphs there are after each step, and after evaluations and a smaller batch."""
    backend = Counting()
    module = seeded(Model, blocks)
    optimizer = torch.optim.AdamW(module.parameters())
    if shards:
        onefold.shard(module, optimizer, stage=3)
    runs = how(module, backend=backend, fullgraph=fullgraph)
    counts = []
    for rows in (12, 12, 12, 5, 7, 3):
        next_token_loss(runs, token_batches(1, rows)[0]).backward()
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            runs(token_batches(1, rows)[0])
        counts.append(backend.graphs)
    return counts


def test_equal_blocks_share_their_graphs_and_none_is_compiled_again():
    plain = graphs_of(units, shards=False, fullgraph=True)
    assert plain[0] == plain[2] == 2  # one that trains and one without gradients
    torch._dynamo.reset()
    (sharded,) = run_ranks(1, lambda _: graphs_of(units, shards=True, fullgraph=True))
    assert sharded == plain
    torch._dynamo.reset()
    one, other = run_ranks(2, lambda _: graphs_of(units, shards=True, fullgraph=True))
    assert one[0] == one[2]
    assert max(one[-1], other[-1]) <= plain[-1]


def test_the_whole_module_is_not_compiled_again_after_its_first_step():
    for counts in run_ranks(2, lambda _: graphs_of(torch.compile, shards=True)):
        assert counts[0] == counts[2]


class ReadsData(Block):
    """Reads its weight past autograd, which a plain module may do in one graph."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * self.up.weight.data.abs().mean()


class WritesData(Block):
    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.up.weight.data.mul_(0.5)
        return super().forward(x)


@again_but("3-WritesData")
@worlds_in_turn
@pytest.mark.parametrize("kind", [ReadsData, WritesData])
@pytest.mark.parametrize("stage", [0, 3])
def test_data_of_a_weight_is_read_and_written_inside_one_graph(kind, stage):
    def in_one_graph(module, backend):
        return units(module, backend=backend, fullgraph=True)

    same(2, lambda: with_blocks(kind), in_one_graph, "aot_eager", stage=stage)


# code of the user's around the module


def whole_step(rank: int, compiles: Any, stage: int) -> list[float]:
    module = seeded(small)
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-2, eps=1e-4)
    onefold.shard(module, optimizer, stage=stage)

    def step(tokens: Tensor) -> Tensor:
        loss = next_token_loss(module, tokens)
        loss.backward()
        nn.utils.clip_grad_norm_(module.parameters(), 0.1)
        optimizer.step()
        optimizer.zero_grad()
        return loss

    step = compiles(step)
    return [step(tokens.chunk(2)[rank]).item() for tokens in token_batches(STEPS)]


@again_but("3")
@pytest.mark.parametrize("stage", [0, 1, 3])
def test_a_compiled_training_step_ends_its_graphs_at_the_engine(stage):
    wanted = run_ranks(2, whole_step, lambda step: step, stage)
    assert run_ranks(2, whole_step, torch.compile(backend="eager"), stage) == wanted


@every_rank(2)
def test_public_functions_take_the_compiled_module(rank, tmp_path):
    module = seeded(Model)
    compiled = torch.compile(module, backend="eager")
    optimizer = torch.optim.AdamW(module.parameters())
    assert onefold.shard(compiled, optimizer, stage=3) is compiled
    average = onefold.ema(compiled)
    with onefold.accumulate(compiled), onefold.record(compiled):
        next_token_loss(compiled, token_batches()[0]).backward()
    optimizer.step()
    optimizer.zero_grad()
    average.update()
    assert onefold.report(compiled).stage == 3
    names = list(onefold.full_state_dict(compiled, rank0_only=False))
    assert names == list(module.state_dict())
    onefold.save(tmp_path / "step-1", compiled, optimizer)
    onefold.load(tmp_path / "step-1", module, optimizer)
    onefold.save_pretrained(compiled, tmp_path / "weights")
    assert onefold.load_pretrained(compiled, tmp_path / "weights") is compiled
    with torch.no_grad():
        sharded = compiled(token_batches()[0])
        with onefold.unsharded(compiled):
            assert torch.equal(compiled(token_batches()[0]), sharded)
        with average.applied():
            assert torch.equal(compiled(token_batches()[0]), sharded)
    with pytest.raises(onefold.ConfigError, match="not sharded yet"):
        onefold.shard(compiled)


def test_a_plan_sees_the_module_behind_its_compiled_form():
    def refuse(graph, inputs):
        raise AssertionError("a plan compiles nothing")

    wanted = trace(seeded(Model), tokens_of(2, 8))
    for how in (units, wrapped_units, in_place, torch.compile):
        found = trace(how(seeded(Model), backend=refuse), tokens_of(2, 8))
        assert [each.kind for each in found.events] == [each.kind for each in wanted.events]
        assert [unit.name for unit in found.units] == [unit.name for unit in wanted.units]


@every_rank(1)
def test_graphs_do_not_keep_a_deleted_module(rank):
    module = seeded(Model)
    onefold.shard(module, stage=3)
    runs = torch.compile(units(module, backend="aot_eager"), backend="aot_eager")
    next_token_loss(runs, token_batches()[0]).backward()
    engine = weakref.ref(engine_of(module))
    ledger = engine_of(module).ledger
    del module, runs
    gc.collect()
    assert engine() is None
    assert sum(usage.now for usage in ledger.usage.values()) == 0


# inductor


def near(found: list[list[float]], wanted: list[list[float]]) -> None:
    for each, other in zip(found, wanted, strict=True):
        assert each == pytest.approx(other, rel=0, abs=1e-5)


@pytest.mark.again("tests/engine/test_compile.py::test_compiled_losses_equal_uncompiled_ones")
def test_inductor_agrees_to_a_hundred_thousandth(tmp_path):
    def losses(how, build, **options):
        return run_ranks(2, lambda rank: train(rank, build, how, "inductor", **options))

    for options in ({"stage": 0}, {"stage": 3}, {"offload": f"disk:{tmp_path}"}):
        near(losses(units, small, **options), losses(uncompiled, small, **options))
    near(losses(torch.compile, Straight), losses(uncompiled, Straight))


# `onefold train --compile`


@pytest.fixture
def job(tmp_path):
    for number in range(40):
        (tmp_path / f"{number}.txt").write_text(f"This is file number {number}.\n" * 3)
    options = {"steps": 3, "rows": 2, "seq": 16, "sample": 4, "data": str(tmp_path)}
    return Job(model="tests.app.test_training:unseeded_gpt", compile=True, **options)


@pytest.mark.again("tests/engine/test_compile.py::test_compiled_losses_equal_uncompiled_ones")
def test_a_compiled_run_has_the_losses_of_an_uncompiled_one(job, monkeypatch):
    monkeypatch.chdir(Path(__file__).parents[2])
    one = World(Group.from_handle(None), torch.device("cpu"))
    wanted = train_job(replace(job, compile=False), one, TrainObserver())
    found = train_job(job, one, TrainObserver())
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1, (
        "evaluation compiles nothing"
    )
    near([found.losses, [found.held_out]], [wanted.losses, [wanted.held_out]])


def test_a_machine_without_a_compiler_is_told_before_any_rank_starts(job, monkeypatch):
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(onefold.ConfigError, match=r"a C\+\+ compiler for torch.compile, got no"):
        preflight(job, 1)


def test_dynamo_enters_no_function_that_is_untraced():
    """Neither where a trace meets it nor where autograd calls it (torch 2.13.0)."""
    from torch._dynamo.convert_frame import input_codes

    called: list[bool] = []

    @untraced
    def note(_: Tensor) -> None:
        called.append(torch.compiler.is_compiling())

    weight = nn.Parameter(torch.ones(3))
    weight.register_post_accumulate_grad_hook(note)

    def step(x: Tensor) -> None:
        note(x)
        (weight * x).sum().backward()

    torch.compiler.reset()
    before = len(input_codes.seen)
    for _ in range(2):
        torch.compile(step, backend="eager")(torch.ones(3))
    codes = [code() for code in input_codes.seen[before:]]
    entered = {code.co_name for code in codes if code is not None}
    assert "step" in entered
    assert entered.isdisjoint({"note", "call"})
    assert called == [False] * 4
