"""Training over a split sequence is that of one process, whatever the mesh and the stage."""

from __future__ import annotations

import gc
import time
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import onefold
from onefold.errors import ConfigError, StateError, WireError
from tests.support.ranks import run_processes, run_ranks, seeded
from tests.support.rows import again_but

VOCAB, WIDTH, LENGTH = 32, 12, 12


class Block(nn.Module):
    """Attention of any number of heads, then a feed-forward layer."""

    def __init__(self, heads: int, kv_heads: int, causal: bool) -> None:
        super().__init__()
        self.heads, self.kv_heads, self.causal = heads, kv_heads, causal
        self.norm = nn.LayerNorm(WIDTH)
        self.qkv = nn.Linear(WIDTH, (heads + 2 * kv_heads) * 4)
        self.out = nn.Linear(heads * 4, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 20), nn.Linear(20, WIDTH)

    def forward(self, x: Tensor, mask: Tensor | None) -> Tensor:
        rows, positions, _ = x.shape
        heads = self.qkv(self.norm(x)).view(rows, positions, -1, 4).transpose(1, 2)
        q, k, v = heads.split([self.heads, self.kv_heads, self.kv_heads], 1)
        mixed = F.scaled_dot_product_attention(
            q, k, v, mask, is_causal=self.causal and mask is None, enable_gqa=True
        )
        x = x + self.out(mixed.transpose(1, 2).reshape(rows, positions, -1))
        return x + self.down(F.gelu(self.up(x)))


class Net(nn.Module):
    """Tokens to logits, in fp64."""

    def __init__(
        self, heads: int = 4, kv_heads: int = 2, causal: bool = True, recompute: bool | None = None
    ) -> None:
        super().__init__()
        self.recompute = recompute  # None: not; else whether reentrant
        self.tokens, self.places = nn.Embedding(VOCAB, WIDTH), nn.Embedding(64, WIDTH)
        self.blocks = nn.ModuleList(Block(heads, kv_heads, causal) for _ in range(2))
        self.head = nn.Linear(WIDTH, VOCAB, bias=False)
        self.double()

    def forward(
        self, tokens: Tensor, position_ids: Tensor | None = None, mask: Tensor | None = None
    ) -> Tensor:
        if position_ids is None:
            position_ids = torch.arange(tokens.shape[1], device=tokens.device)
        x = self.tokens(tokens) + self.places(position_ids)
        for block in self.blocks:
            if self.recompute is None:
                x = block(x, mask)
            else:
                x = checkpoint(block, x, mask, use_reentrant=self.recompute)
        return self.head(x)


@dataclass
class Work:
    """What to train on: rows, labels of each position's own token (they are shifted), a model."""

    build: Callable[[], nn.Module] = Net
    length: int = LENGTH
    ignored: dict[int, slice] = field(default_factory=dict)  # positions without targets, by row
    given: dict[str, Tensor] = field(default_factory=dict)
    shift: bool = True
    steps: int = 0
    stage: int = 3
    is_flat: bool = False  # onefold.shard over one axis of all ranks, or over both
    is_split_first: bool = False

    def batch(self) -> tuple[Tensor, Tensor]:
        generator = torch.Generator().manual_seed(5)
        tokens = torch.randint(0, VOCAB, (4, self.length), generator=generator)
        labels = tokens.clone()
        for row, where in self.ignored.items():
            labels[row, where] = -100
        return tokens, labels


UNEVEN = {0: slice(0, 7), 1: slice(None), 3: slice(2, None)}
"""Ranks with many targets, few and none, in every mesh."""


def loss_sum(logits: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")


def gradients(model: nn.Module) -> dict[str, Tensor]:
    return {name: whole(p.grad) for name, p in model.named_parameters() if p.grad is not None}


def whole(tensor: Any) -> Tensor:
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor.clone()


def alone(work: Work) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Gradients of the first step and weights after the last, in one process."""
    model = seeded(work.build)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    tokens, labels = work.batch()
    if work.shift:
        labels = F.pad(labels[:, 1:], (0, 1), value=-100)
    first: dict[str, Tensor] = {}
    for _ in range(max(work.steps, 1)):
        logits = model(tokens, **work.given)
        (loss_sum(logits, labels) / (labels != -100).sum()).backward()
        first = first or gradients(model)
        optimizer.step()
        optimizer.zero_grad()
    return first, {name: p.detach().clone() for name, p in model.named_parameters()}


def together(
    rank: int, work: Work, dp: int, cp: int, device: str = "cpu"
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """The same on dp x cp ranks."""
    mesh = init_device_mesh(device, (dp, cp), mesh_dim_names=("dp", "cp"))
    model = seeded(work.build)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    data = mesh["dp", "cp"]._flatten("data") if work.is_flat else mesh["dp", "cp"]
    split = partial(onefold.split_sequence, model, mesh["cp"])
    sequence = split() if work.is_split_first else None
    onefold.shard(model, optimizer, stage=work.stage, mesh=data)
    sequence = sequence or split()
    own = mesh["dp"].get_local_rank()
    tokens, labels = (each.chunk(dp)[own].to(device) for each in work.batch())
    given = {name: each.chunk(dp)[own].to(device) for name, each in work.given.items()}
    mine = sequence.labels(labels, shift=work.shift)
    first: dict[str, Tensor] = {}
    for _ in range(max(work.steps, 1)):
        logits = model(tokens, **given)
        onefold.weigh(loss_sum(logits, mine), (mine != -100).sum()).backward()
        first = first or gradients(model)
        optimizer.step()
        optimizer.zero_grad()
    with onefold.unsharded(model):
        return first, {name: p.detach().clone() for name, p in model.named_parameters()}


def compare(work: Work, dp: int, cp: int, relative: float = 1e-12) -> None:
    wanted, weights = alone(work)
    for first, last in run_ranks(dp * cp, together, work, dp, cp):
        assert_close(first, wanted, relative)
        if work.steps:
            assert_close(last, weights, 1e-6)


def assert_close(got: dict[str, Tensor], wanted: dict[str, Tensor], relative: float) -> None:
    assert got.keys() == wanted.keys()
    for name, other in wanted.items():
        scale = other.abs().max().clamp_min(1e-3).item()
        torch.testing.assert_close(got[name], other, rtol=0, atol=relative * scale, msg=name)


MESHES = [(1, 1), (1, 4), (2, 3)]


@again_but("1-1", "2-3")
@pytest.mark.parametrize(("dp", "cp"), MESHES)
def test_gradients_are_those_of_one_process_with_unequal_numbers_of_targets(dp, cp):
    compare(Work(ignored=UNEVEN, is_flat=dp == 1), dp, cp)


@again_but("3")
@pytest.mark.parametrize("stage", [0, 3])
def test_every_stage_has_the_weights_of_one_process_after_twenty_steps(stage):
    compare(Work(ignored=UNEVEN, steps=20, stage=stage), 2, 2)


@pytest.mark.filterwarnings("error:ranks .* got the same first batch")
def test_a_module_may_be_split_before_it_is_sharded_and_no_rank_looks_like_another():
    compare(Work(is_split_first=True), 2, 2)
    compare(Work(), 2, 2)


class Columns(nn.Module):
    """Queries, keys and values from layers of their own, whose heads tensor parallelism cuts."""

    def __init__(self, heads: int = 4) -> None:
        super().__init__()
        self.heads = heads
        self.q, self.k, self.v = (nn.Linear(WIDTH, 4 * heads) for _ in range(3))
        self.out = nn.Linear(4 * heads, WIDTH, bias=False)
        self.double()

    def forward(self, x: Tensor, position_ids: Tensor | None = None) -> Tensor:
        q, k, v = (
            part(x).unflatten(-1, (-1, 4)).transpose(1, 2) for part in (self.q, self.k, self.v)
        )
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(mixed.transpose(1, 2).flatten(2))


def test_heads_that_tensor_parallelism_has_cut_are_cut_again():
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        RowwiseParallel,
        parallelize_module,
    )  # fmt: skip

    x = torch.randn(
        2, LENGTH, WIDTH, dtype=torch.float64, generator=torch.Generator().manual_seed(2)
    )
    model = seeded(Columns)
    (model(x).square().sum() / 5).backward()
    wanted = gradients(model)

    def body(rank: int) -> dict[str, Tensor]:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("cp", "tp"))
        model = seeded(Columns)
        plan = {name: ColwiseParallel() for name in "qkv"} | {"out": RowwiseParallel()}
        parallelize_module(model, mesh["tp"], plan)
        onefold.split_sequence(model, mesh["cp"])
        onefold.weigh(model(x).square().sum(), 5 * mesh.get_local_rank("cp")).backward()
        found = gradients(model)
        for grad in found.values():
            dist.all_reduce(grad, group=mesh.get_group("cp"))
            grad /= 2
        return found

    for got in run_ranks(4, body):
        assert_close(got, wanted, 1e-12)


def saved_nbytes(rank: int, heads: int, length: int) -> int:
    """Bytes that autograd keeps for backward, without weights."""
    model = seeded(partial(Net, heads, heads))
    sequence = onefold.split_sequence(model)
    weights = {p.untyped_storage().data_ptr() for p in model.parameters()}
    kept: dict[int, Tensor] = {}

    def pack(tensor: Tensor) -> Tensor:
        kept[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    tokens = torch.arange(length)[None] % VOCAB
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        loss_sum(model(tokens), sequence.labels(tokens)).backward()
    return sum(
        tensor.untyped_storage().nbytes() for at, tensor in kept.items() if at not in weights
    )


def test_each_rank_keeps_its_share_of_the_activations():
    """And once more the outputs of attention, which it has by heads and by positions."""
    (whole,) = run_ranks(1, saved_nbytes, 4, 64)
    outputs = 2 * 4 * 4 * 64 * 8  # layers, heads, width, positions, bytes
    for parts in (2, 4):
        for nbytes in run_ranks(parts, saved_nbytes, 4, 64):
            assert nbytes <= (whole + outputs) / parts * 1.05


@pytest.mark.parametrize("cp", [4])
@pytest.mark.parametrize("length", [5, 13])
def test_lengths_that_ranks_do_not_divide_end_in_padding_without_targets(cp, length):
    """Of 5 positions over 4 ranks the last rank has padding alone."""
    compare(Work(length=length), 1, cp)


@again_but("13")
@pytest.mark.parametrize("length", [12, 13])
def test_an_encoder_with_padded_rows_and_labels_of_its_own_positions(length):
    mask = torch.ones(4, 1, 1, length, dtype=torch.bool)
    mask[0, ..., :3], mask[2, ..., -4:] = False, False
    build = partial(Net, causal=False)
    ignored = {0: slice(0, 3), 2: slice(-4, None)}
    compare(Work(build, length, ignored, {"mask": mask}, shift=False), 2, 2)
    causal = mask & torch.ones(length, length, dtype=torch.bool).tril() | torch.eye(length).bool()
    compare(Work(length=length, ignored=ignored, given={"mask": causal}), 1, 3)


def test_positions_that_begin_again_are_cut_with_their_tokens():
    positions = (torch.arange(LENGTH) % 5)[None].expand(4, -1)
    compare(Work(given={"position_ids": positions}), 2, 2)


def test_half_precision_is_close_to_one_process():
    def losses(rank: int, cp: int, precision: str | None) -> Tensor:
        model = seeded(partial(Net, 3, 3)).float()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        onefold.shard(model, optimizer, precision=precision)
        sequence = onefold.split_sequence(model)
        tokens, _ = Work().batch()
        found, mine = [], sequence.labels(tokens)
        for _ in range(4):
            loss = onefold.weigh(loss_sum(model(tokens).float(), mine), (mine != -100).sum())
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            found.append(loss.detach())
        return torch.stack(found)

    for precision, relative in ((None, 1e-5), ("bf16", 2e-2)):
        (wanted,) = run_ranks(1, losses, 1, precision)
        got = torch.stack(run_ranks(2, losses, 2, precision)).mean(0)
        torch.testing.assert_close(got, wanted, rtol=relative, atol=0)


def test_micro_batches_are_weighed_by_the_tokens_of_the_whole_step():
    work = Work(ignored=UNEVEN)
    wanted, _ = alone(work)

    def body(rank: int) -> dict[str, Tensor]:
        model = seeded(Net)
        onefold.shard(model, stage=2)
        sequence = onefold.split_sequence(model)
        tokens, labels = work.batch()
        mine = sequence.labels(labels)
        count = (mine != -100).sum()
        with onefold.accumulate(model):
            onefold.weigh(loss_sum(model(tokens[:1]), mine[:1]), count).backward()
        onefold.weigh(loss_sum(model(tokens[1:]), mine[1:]), count).backward()
        return gradients(model)

    for got in run_ranks(2, body):
        assert_close(got, wanted, 1e-12)


@pytest.mark.parametrize("factor", [2.0, 0.5])
def test_another_divisor_does_not_pass(factor, monkeypatch):
    from onefold.mixed import sampler

    right = sampler.mean_count
    monkeypatch.setattr(sampler, "mean_count", lambda *given: right(*given) * factor)
    with pytest.raises(AssertionError):
        compare(Work(ignored=UNEVEN), 1, 2)


def test_gathered_outputs_are_whole_and_their_gradients_add_up():
    """Each rank has the same loss of the whole rows; weighed, that is the loss of one process."""
    tokens, _ = Work(length=13).batch()
    model = seeded(Net)
    logits = model(tokens)
    (logits.square().sum() / 4).backward()
    wanted = gradients(model)

    def body(rank: int) -> tuple[dict[str, Tensor], Tensor]:
        model = seeded(Net)
        onefold.shard(model)
        sequence = onefold.split_sequence(model)
        everything = sequence.gather(model(tokens), length=13)
        onefold.weigh(everything.square().sum(), 4).backward()
        return gradients(model), everything.detach()

    for got, everything in run_ranks(3, body):
        torch.testing.assert_close(everything, logits.detach(), rtol=0, atol=1e-12)
        assert_close(got, wanted, 1e-12)


def test_a_handle_keeps_neither_module_nor_buffers():
    def body(rank: int) -> bool:
        model = seeded(Net)
        onefold.shard(model)
        sequence = onefold.split_sequence(model)
        tokens, _ = Work().batch()
        model(tokens).sum().backward()
        engine = weakref.ref(model.__dict__["_onefold_engine"])
        del model
        gc.collect()
        sequence.remove()
        return engine() is None

    assert run_ranks(2, body) == [True, True]


def test_a_removed_split_leaves_the_module_as_it_was():
    tokens, _ = Work().batch()
    wanted = seeded(Net)(tokens)

    def body(rank: int) -> list[Tensor]:
        model = seeded(Net)
        with onefold.split_sequence(model) as sequence:
            own = model(tokens)
            with pytest.raises(IndexError):
                model(tokens + VOCAB)  # a forward that fails leaves the mode
            q = torch.randn(1, 1, 3, 2)
            assert F.scaled_dot_product_attention(q, q, q).shape == q.shape
            again = sequence.gather(model(tokens))
        assert own.shape[1] == LENGTH // 2
        onefold.split_sequence(model).remove()
        return [model(tokens), again]

    for found in run_ranks(2, body):
        for each in found:
            torch.testing.assert_close(each, wanted, rtol=0, atol=1e-12)


def test_a_stage_of_a_pipeline_gets_pieces_that_its_caller_cuts():
    tokens, labels = Work().batch()
    wanted, _ = alone(Work())

    def body(rank: int) -> dict[str, Tensor]:
        model = seeded(Net)
        onefold.shard(model)
        sequence = onefold.split_sequence(model, inputs=False)
        positions = sequence.split(torch.arange(LENGTH)[None])
        mine = sequence.labels(labels)
        logits = model(sequence.split(tokens), positions)
        onefold.weigh(loss_sum(logits, mine), (mine != -100).sum()).backward()
        with pytest.raises(ConfigError, match="a length that 2 ranks divide"):
            sequence.split(tokens[:, :-1])
        return gradients(model)

    for got in run_ranks(2, body):
        assert_close(got, wanted, 1e-12)


def test_weighed_losses_without_any_tokens_are_zero():
    def body(rank: int) -> tuple[float, float]:
        none = onefold.weigh(torch.zeros(()), 0).item()
        return none, onefold.weigh(torch.tensor(6.0), 3 * rank).item()

    assert run_ranks(2, body) == [(0.0, 4.0), (0.0, 4.0)]
    assert onefold.weigh(torch.tensor(6.0), torch.tensor(3)).item() == 2.0
    for dtype in (torch.float16, torch.bfloat16, torch.float64):
        loss = onefold.weigh(torch.tensor(60_000.0, dtype=dtype), 120_000)
        assert loss.item() == pytest.approx(0.5, rel=5e-3)
        assert loss.dtype is (dtype if dtype is torch.float64 else torch.float32)


@pytest.mark.process
def test_a_rank_that_leaves_the_others_in_attention_ends_them_with_a_named_error():
    run_processes(2, leave)


def leave(rank: int) -> None:
    group = dist.new_group(timeout=timedelta(seconds=2))
    model = Net()
    onefold.split_sequence(model, group)
    tokens, _ = Work().batch()
    model(tokens)
    if rank == 1:
        time.sleep(4)
        return
    began = time.monotonic()
    with pytest.raises(WireError, match="an all-to-all of attention over a split sequence"):
        model(tokens)
    assert time.monotonic() - began < 60


class Wrong(nn.Module):
    """A module with a part that mixes positions, or a forward of another form."""

    def __init__(self, part: nn.Module) -> None:
        super().__init__()
        self.part = part

    def forward(self, tokens: Tensor, position_ids: Tensor | None = None) -> Tensor:
        return self.part(tokens)


class Functional(nn.Module):
    def forward(self, x: Tensor, position_ids: Tensor | None = None) -> Tensor:
        weights = [torch.zeros(3 * 4, 4), torch.zeros(12), None, None, False, 0.0]
        return F.multi_head_attention_forward(
            x, x, x, 4, 2, *weights, torch.zeros(4, 4), torch.zeros(4), need_weights=False
        )[0]


def mesh_of_two() -> Any:
    return init_device_mesh("cpu", (2, 1), mesh_dim_names=("cp", "dp"))


def tokens_of(length: int = LENGTH) -> Tensor:
    return torch.arange(2 * length).reshape(2, length) % VOCAB


def call(model: nn.Module, given: Tensor, mesh: Any = None) -> None:
    onefold.split_sequence(model, mesh)
    model(given)


def call_wrong(part: nn.Module, given: Tensor) -> None:
    call(Wrong(part), given)


def split_twice() -> None:
    model = Net()
    onefold.split_sequence(model)
    onefold.split_sequence(model.blocks[0], inputs=False)
    onefold.split_sequence(model)


def split_beside_shard() -> None:
    model, mesh = Net(), mesh_of_two()
    onefold.shard(model, mesh=mesh["dp"])
    call(model, tokens_of(), mesh["cp"])


def split_tensors() -> None:
    from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

    model, mesh = Net(), mesh_of_two()
    parallelize_module(model.blocks[0].up, mesh["cp"], ColwiseParallel())
    onefold.split_sequence(model, mesh["cp"])


@pytest.mark.parametrize(
    ("run", "error", "message"),
    [
        (lambda: call(Net(), tokens_of(1)), ConfigError, "at least 2 positions"),
        (lambda: onefold.split_sequence(Net(), mesh_of_two()), ConfigError, "a mesh of one axis"),
        (lambda: onefold.split_sequence(Net(), "cp"), ConfigError, "DeviceMesh"),
        (lambda: onefold.split_sequence(nn.Linear(2, 2)), ConfigError, "'position_ids'"),
        (lambda: call(Net(), torch.zeros(3)), ConfigError, "[rows, positions]"),
        (
            lambda: call(Net(), torch.zeros(1, 2, 3, 4)),
            ConfigError,
            "shape [1, 2, 3, 4]",
        ),
        (
            lambda: call(Net(), tokens_of() + dist.get_rank()),
            ConfigError,
            "the same whole rows",
        ),
        (
            lambda: call(Net(), tokens_of(12 + 2 * dist.get_rank())),
            ConfigError,
            "[[2, 12], [2, 14]]",
        ),
        (
            lambda: call(Net(causal=False), tokens_of(13)),
            StateError,
            "1 of which are padding",
        ),
        (lambda: call_wrong(nn.GRU(4, 4), torch.zeros(2, 4, 4)), ConfigError, "nn.GRU at 'part'"),
        (
            lambda: call_wrong(nn.MultiheadAttention(4, 2), torch.zeros(2, 4, 4)),
            ConfigError,
            "Multih",
        ),
        (lambda: call_wrong(nn.Conv1d(4, 4, 3), torch.zeros(2, 4, 4)), ConfigError, "nn.Conv1d"),
        (lambda: call_wrong(Functional(), torch.zeros(2, 4, 4)), ConfigError, "MultiheadAttention"),
        (lambda: call_wrong(nn.Linear(4, 4), torch.zeros(2, 4, 4)), StateError, "no call in Wrong"),
        (split_twice, ConfigError, "a module that is not split yet"),
        (split_beside_shard, ConfigError, "[0] without [1]|[1] without [0]"),
        (split_tensors, ConfigError, "at parameter 'blocks.0.up.weight'"),
    ],
    ids=range(17),
)
def test_bad_input_is_a_named_error_on_every_rank(run, error, message):
    def body(rank: int) -> str:
        with pytest.raises(error) as caught:
            run()
        return str(caught.value)

    for told in run_ranks(2, body):
        assert any(part in told for part in message.split("|")), told
        assert "\nhint: " in told
