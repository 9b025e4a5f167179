"""Compute dtypes, masters and the loss scale."""

from __future__ import annotations

import collections
import contextlib
import copy
from collections.abc import Callable
from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn import functional as F
from torch.nn.utils import parametrizations
from torch.nn.utils.rnn import pack_padded_sequence
from torch.profiler import ProfilerActivity, profile
from torch.utils.checkpoint import checkpoint

import onefold
from onefold.engine import blocked_adam as adam
from onefold.engine.registry import engine_of
from onefold.errors import WireError
from onefold.unit import dtensors
from tests.support.models import Model, next_token_loss, token_batches
from tests.support.programs.blocks import By
from tests.support.ranks import every_rank, run_ranks, seeded
from tests.support.rows import again_but, worlds_in_turn
from tests.support.training import Job, assert_same_bits, cut, run_job, train_plain


@again_but("3-precision2")
@worlds_in_turn
@pytest.mark.parametrize("precision", ["bf16", "fp16", onefold.Precision(compute=torch.bfloat16)])
@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_stages_agree_bitwise_in_mixed_precision_and_follow_fp32(precision, world_size):
    job = Job(Model, token_batches(), next_token_loss, options={"precision": precision})
    runs = [run_job(job, world_size, stage) for stage in (0, 1, 2, 3)]
    for run in runs[1:]:
        assert_same_bits(run, runs[0])
    wanted = train_plain(job)
    torch.testing.assert_close(runs[0].losses, wanted.losses, rtol=2e-2, atol=0)
    assert all(weight.dtype == torch.float32 for weight in runs[0].weights.values())


@pytest.mark.parametrize("stage", [0, 1, 3])
def test_a_bf16_module_keeps_its_dtype_and_steps_an_fp32_master(stage):
    """Steps far below bf16's resolution add up in the master; in bf16 alone they would vanish."""

    def train(rank):
        weight = nn.Parameter(torch.full((64, 2), 256.0, dtype=torch.bfloat16))
        module = By(lambda self, x: (self.weight * x).sum(), weight=weight)
        optimizer = torch.optim.SGD(module.parameters(), lr=0.25)
        onefold.shard(module, optimizer, stage=stage)
        for _ in range(8):
            module(torch.ones((), dtype=torch.bfloat16)).backward()
            assert module.weight.dtype == torch.bfloat16
            assert module.weight.grad.dtype == torch.bfloat16
            torch.nn.utils.clip_grad_norm_(module.parameters(), 1e9)
            optimizer.step()
            optimizer.zero_grad()
        with onefold.unsharded(module):
            return module.weight.detach().clone()

    for weight in run_ranks(2, train):
        assert weight.dtype == torch.bfloat16
        assert torch.equal(weight, torch.full((64, 2), 254.0, dtype=torch.bfloat16))


@worlds_in_turn
@pytest.mark.parametrize(
    "edit",
    [
        lambda p: p.data.mul_(0.5),
        lambda p: p.data.copy_(p.detach() * 0.5),
        lambda p: p.mul_(0.5),
        lambda p: torch._foreach_mul_([p], 0.5),
        lambda p: p.detach().mul_(0.5),
    ],
)
@pytest.mark.parametrize(("world_size", "stage"), [(1, 0), (1, 3), (2, 0), (2, 3)])
@every_rank()
def test_masters_follow_edits_of_resting_weights(rank, edit, world_size, stage):
    """A master that did not would bring the old values back with the next step."""
    module = nn.Linear(8, 8, bias=False).to(torch.bfloat16)
    with torch.no_grad():
        module.weight.copy_(torch.arange(64.0).view(8, 8))
    optimizer = torch.optim.AdamW(module.parameters(), lr=0.0)
    onefold.shard(module, optimizer, stage=stage)
    for wanted in (1.0, 0.5):
        module(torch.ones(2, 8, dtype=torch.bfloat16)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        with onefold.unsharded(module):
            weight = module.weight.detach().float().clone()
        assert torch.equal(weight, wanted * torch.arange(64.0).view(8, 8))
        with torch.no_grad():
            edit(module.weight)


def test_a_copy_of_a_resting_weight_is_an_ordinary_parameter():
    module = nn.Linear(8, 8, bias=False).to(torch.bfloat16)
    onefold.shard(module, torch.optim.AdamW(module.parameters()))
    copied = copy.deepcopy(module.weight)
    assert type(copied) is nn.Parameter
    assert copied.data_ptr() != module.weight.data_ptr()
    assert torch.equal(copied, module.weight)


@worlds_in_turn
@pytest.mark.parametrize(("world_size", "stage"), [(1, 3), (2, 0), (2, 2), (2, 3)])
@pytest.mark.parametrize("way", ["data", "no_grad"])
@every_rank()
def test_masters_follow_edits_made_inside_forward(rank, world_size, stage, way):
    class Clamped(nn.Linear):
        def forward(self, x):
            if way == "data":
                self.weight.data.clamp_(-0.5, 0.5)
            else:
                with torch.no_grad():
                    self.weight.clamp_(-0.5, 0.5)
            return super().forward(x)

    module = Clamped(8, 8, bias=False).to(torch.bfloat16)
    nn.init.ones_(module.weight)
    optimizer = torch.optim.AdamW(module.parameters(), lr=0.0)
    onefold.shard(module, optimizer, stage=stage)
    for _ in range(2):
        module(torch.ones(2, 8, dtype=torch.bfloat16)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        with onefold.unsharded(module):
            assert torch.equal(module.weight, torch.full_like(module.weight, 0.5))


class Reading(nn.Module):
    """Reads the weight of a layer outside of the layer, as a tied head does."""

    def __init__(self, way: str, recompute: Callable[..., Tensor] | None) -> None:
        super().__init__()
        self.first, self.inner, self.way, self.recompute = (
            nn.Linear(8, 8),
            nn.Linear(8, 8),
            way,
            recompute,
        )
        self.inner.requires_grad_(way != "frozen")

    def read(self, x: Tensor) -> Tensor:
        with torch.set_grad_enabled(self.way != "no_grad"):
            read = torch.tanh(F.linear(x, self.inner.weight))
        return x * read

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        return self.read(x) if self.recompute is None else self.recompute(self.read, x)


RECOMPUTE = {
    "reentrant": partial(checkpoint, use_reentrant=True),
    "other": partial(checkpoint, use_reentrant=False),
    "nested": lambda read, x: checkpoint(
        partial(checkpoint, read, use_reentrant=True), x, use_reentrant=True
    ),
}


@worlds_in_turn
@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize("recompute", RECOMPUTE)
@pytest.mark.parametrize("way", ["trained", "frozen", "no_grad"])
@every_rank()
def test_a_read_that_is_computed_again_sees_what_its_forward_saw(
    rank, way, recompute, stage, world_size
):
    """Autograd turns gradients off around a reentrant block in another: weights were fp32 there."""

    def gradient(recompute):
        module = seeded(lambda: Reading(way, recompute))
        units = [module.first, module.inner]
        onefold.shard(module, stage=stage, precision="bf16", units=lambda part: part in units)
        module(torch.linspace(-1, 1, 32).view(4, 8)).float().square().mean().backward()
        return module.first.weight.grad.full_tensor()

    assert torch.equal(gradient(RECOMPUTE[recompute]), gradient(None))


@worlds_in_turn
@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("way", ["frozen", "no_grad"])
@every_rank()
def test_a_product_with_activations_outside_of_a_forward_is_that_of_the_layer(
    rank, way, stage, world_size
):
    """They have the compute dtype, and torch multiplies no others. Sums read weights at rest."""
    module, out, grads = seeded(lambda: Reading(way, None)), [], []
    units = [module.first, module.inner]
    onefold.shard(module, stage=stage, precision="bf16", units=lambda part: part in units)
    x, inner = torch.linspace(-1, 1, 32).view(4, 8), module.inner
    for layer in (inner, lambda hidden: F.linear(hidden, inner.weight, inner.bias)):
        with torch.set_grad_enabled(way == "frozen"):
            hidden = module.first(x)
            out.append(layer(hidden))
        if way == "frozen":
            out[-1].square().mean().backward()
            grads.append(module.first.weight.grad.norm().item())
            module.zero_grad()
    assert torch.equal(*out)
    assert len(set(grads)) <= 1
    with torch.no_grad():
        assert (hidden[0] + inner.bias).dtype == torch.float32
        with pytest.raises(RuntimeError, match="dtype"):
            F.linear(hidden.double(), inner.weight)


def test_a_named_error_of_a_read_beside_activations_is_raised_itself(monkeypatch):
    """Another try would send messages that the other ranks do not expect."""
    module = seeded(lambda: Reading("no_grad", None))
    onefold.shard(module, precision="bf16", units=lambda part: part is module.inner)

    def fail(*_):
        raise WireError("a gather of weights", "rank 1 ended", hint="see its error")

    with torch.no_grad():
        hidden = torch.ones(4, 8, dtype=torch.bfloat16)
        monkeypatch.setattr(dtensors, "run_sharded", fail)
        with pytest.raises(WireError, match="rank 1 ended"):
            F.linear(hidden, module.inner.weight)


@pytest.mark.parametrize(("world_size", "stage"), [(2, 0), (2, 3)])
@every_rank()
def test_looking_at_weights_in_lists_is_no_edit(rank, world_size, stage):
    module = nn.Linear(8, 8)
    onefold.shard(module, stage=stage, precision="bf16")
    loss = module(torch.ones(2, 8)).sum()
    with torch.no_grad():
        torch._foreach_norm(list(module.parameters()))
    loss.backward()


def test_one_group_may_hold_weights_with_masters_of_different_dtypes():
    wide = onefold.Precision(master=torch.float64)
    modules = [nn.Linear(16, 16).to(torch.bfloat16), nn.Linear(4, 4).to(torch.bfloat16)]
    both = [p for module in modules for p in module.parameters()]
    optimizer = torch.optim.AdamW(both, lr=0.1)
    onefold.shard(modules[0], optimizer)
    onefold.shard(modules[1], optimizer, precision=wide)
    before = [parameter.detach().clone() for parameter in both]
    for module in modules:
        module(torch.ones(1, module.in_features, dtype=torch.bfloat16)).sum().backward()
    optimizer.step()
    moved = [not torch.equal(b, p) for b, p in zip(before, both, strict=True)]
    assert all(moved)


def test_a_grad_scale_left_to_the_optimizer_is_used():
    def stepped(scale):
        torch.manual_seed(0)
        module = nn.Linear(8, 8, bias=False).to(torch.bfloat16)
        optimizer = torch.optim.AdamW(module.parameters(), lr=0.5, eps=1.0, fused=True)
        onefold.shard(module, optimizer)
        optimizer.grad_scale = scale
        module(torch.ones(2, 8, dtype=torch.bfloat16)).sum().backward()
        optimizer.step()
        return module.weight.detach()

    assert not torch.equal(stepped(torch.tensor(4.0)), stepped(None))


class Sum(nn.Module):
    """The gradient of each element is its factor, whatever the weights are."""

    def __init__(self, *numels):
        super().__init__()
        self.weights = nn.ParameterList(torch.randn(n).to(torch.bfloat16) for n in numels)

    def forward(self, factors):
        return sum((w * f).sum() for w, f in zip(self.weights, factors, strict=True))


def factors_of(module, step):
    generator = torch.Generator().manual_seed(step)
    return [torch.randn(w.shape, generator=generator).to(w.dtype) for w in module.weights]


def two_groups(parameters, **options):
    first, *others = parameters
    return torch.optim.AdamW(
        [{"params": [first]}, {"params": others, "lr": 3e-2, "betas": (0.8, 0.9)}], **options
    )


@worlds_in_turn
@pytest.mark.parametrize(
    "build",
    [
        partial(torch.optim.AdamW, weight_decay=0.1),
        partial(torch.optim.Adam, weight_decay=0.1, maximize=True),
        partial(torch.optim.AdamW, lr=torch.tensor(1e-2)),
        partial(torch.optim.AdamW, amsgrad=True),  # no blocks: the class's own step
        two_groups,
    ],
)
@pytest.mark.parametrize(("world_size", "stage"), [(1, 1), (2, 0), (2, 2), (3, 3)])
def test_narrow_weights_are_stepped_with_the_bits_of_torchs_fused_step_on_masters(
    build, world_size, stage, monkeypatch
):
    monkeypatch.setattr(adam, "CPU_BLOCK_NUMEL", 64)
    numels = (1000, 48, 7)

    def train(rank):
        module = seeded(Sum, *numels)
        optimizer = build(module.parameters())
        onefold.shard(module, optimizer, stage=stage)
        for step in range(3):
            with onefold.unsharded(module):
                factors = factors_of(module, step)
            module(factors).backward()
            optimizer.step()
            optimizer.zero_grad()
        with onefold.unsharded(module):
            return [weight.detach().clone() for weight in module.weights]

    plain = seeded(Sum, *numels)
    masters = [weight.detach().float().requires_grad_() for weight in plain.weights]
    optimizer = build(masters, fused=True)
    for step in range(3):
        for master, factor in zip(masters, factors_of(plain, step), strict=True):
            master.grad = factor.float()
        optimizer.step()
    for weights in run_ranks(world_size, train):
        for weight, master in zip(weights, masters, strict=True):
            assert torch.equal(weight, master.detach().to(torch.bfloat16))


def test_a_step_in_blocks_takes_one_block_of_memory_not_a_copy_of_the_gradients(monkeypatch):
    monkeypatch.setattr(adam, "kernel", lambda: None)  # which takes none
    numel = 8 * adam.CPU_BLOCK_NUMEL
    master, weight = torch.zeros(numel), torch.zeros(numel, dtype=torch.bfloat16)
    optimizer = torch.optim.AdamW([torch.zeros(1)])
    rule = adam.BlockedAdam.if_alike(optimizer, optimizer.param_groups[0])
    state = {}
    rule.step(master, torch.ones_like(weight), weight, state)
    grad = torch.ones_like(weight)
    with profile(
        activities=[ProfilerActivity.CPU], profile_memory=True, acc_events=True
    ) as profiled:
        rule.step(master, grad, weight, state)
    taken = sum(max(0, event.self_cpu_memory_usage) for event in profiled.key_averages())
    assert taken < 1.1 * 4 * adam.CPU_BLOCK_NUMEL


@pytest.mark.parametrize("stage", [0, 1, 3])
@every_rank(2)
def test_masters_follow_a_loaded_state_dict(rank, stage):
    module = nn.Linear(8, 8, bias=False).to(torch.bfloat16)
    optimizer = torch.optim.SGD(module.parameters(), lr=1.0)
    onefold.shard(module, optimizer, stage=stage)
    loaded = torch.arange(64.0).view(8, 8).to(torch.bfloat16)
    module.load_state_dict({"weight": loaded})
    module(torch.zeros(2, 8, dtype=torch.bfloat16)).sum().backward()
    optimizer.step()
    with onefold.unsharded(module):
        assert torch.equal(module.weight, loaded)


@again_but("0-0-GradScaler0", "2-0-GradScaler1", "2-3-GradScaler0")
@worlds_in_turn
@pytest.mark.parametrize("scaler_class", [onefold.GradScaler, torch.amp.GradScaler])
@pytest.mark.parametrize("stage", [0, 1, 3])
@pytest.mark.parametrize("overflowing_rank", [0, 2])
def test_an_overflow_on_one_rank_skips_the_step_on_all(scaler_class, stage, overflowing_rank):
    def train(rank):
        module = seeded(Model)
        optimizer = torch.optim.AdamW(module.parameters(), lr=1e-2)
        onefold.shard(module, optimizer, stage=stage, precision="fp16")
        scaler = scaler_class(device="cpu", init_scale=256.0)
        scales, weights = [], []
        for step, batch in enumerate(token_batches()):
            loss = next_token_loss(module, cut(batch, 3)[rank])
            if step == 1 and rank == overflowing_rank:
                loss = loss * torch.tensor(float("inf"))
            scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            torch.nn.utils.clip_grad_norm_(module.parameters(), 1.0)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            scales.append(scaler.get_scale())
            with onefold.unsharded(module):
                weights.append(module.head.weight.detach().clone())
        assert scales == [256.0, 128.0, 128.0]
        assert not torch.equal(weights[0], module_start)
        assert torch.equal(weights[1], weights[0])
        assert not torch.equal(weights[2], weights[1])
        assert weights[2].isfinite().all()
        return weights[2]

    module_start = seeded(Model).head.weight.detach()
    results = run_ranks(3, train)
    assert torch.equal(results[0], results[1])
    assert torch.equal(results[0], results[2])


def test_a_scale_reaches_ranks_that_hold_no_rows():
    def train(rank):
        scale, weight = nn.Parameter(torch.ones(())), nn.Parameter(torch.ones(1, 4))
        module = By(
            lambda self, x: (self.scale * self.weight * x).sum(), scale=scale, weight=weight
        )
        optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
        onefold.shard(module, optimizer, stage=3)
        scaler = onefold.GradScaler("cpu", init_scale=4.0)
        scaler.scale(module(torch.tensor(float("inf") if rank == 1 else 1.0))).backward()
        scaler.step(optimizer)
        scaler.update()
        return scaler.get_scale(), module.weight.full_tensor()

    for scale, weight in run_ranks(3, train):
        assert scale == 2.0
        assert torch.equal(weight, torch.ones(1, 4))


def test_buffers_are_cast_only_when_asked():
    class WithBuffer(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(4, 4)
            self.register_buffer("mean", torch.ones(4))

        def forward(self, x):
            return self.linear(x) + self.mean.to(x.dtype)

    kept = onefold.shard(WithBuffer(), precision="bf16")
    assert kept.mean.dtype == torch.float32
    precision = onefold.Precision(compute=torch.bfloat16, buffers=torch.bfloat16)
    cast = onefold.shard(WithBuffer(), precision=precision)
    assert cast.mean.dtype == torch.bfloat16
    assert cast(torch.ones(2, 4)).dtype == torch.bfloat16


def test_faces_show_masters_and_compute_sees_the_compute_dtype():
    def run(rank):
        seen = {}
        module = seeded(Model)
        onefold.shard(module, stage=3, precision="bf16")
        module.head.register_forward_pre_hook(
            lambda m, args: seen.update(weight=m.weight.dtype, x=args[0].dtype)
        )
        next_token_loss(module, token_batches()[0]).backward()
        assert seen == {"weight": torch.bfloat16, "x": torch.bfloat16}
        assert isinstance(module.head.weight, DTensor)
        assert module.head.weight.dtype == module.head.weight.grad.dtype == torch.float32

    run_ranks(2, run)
    assert not dist.is_initialized()


@pytest.mark.parametrize(
    ("choice", "hint"), [("bf61", "did you mean 'bf16'"), (16, "None"), ("int8", "hint:")]
)
def test_an_unknown_precision_is_refused_with_the_nearest_name(choice, hint):
    with pytest.raises(onefold.ConfigError, match=hint):
        onefold.shard(nn.Linear(2, 2), precision=choice)


def test_a_precision_of_integers_is_refused():
    with pytest.raises(onefold.ConfigError, match=r"Precision\.compute"):
        onefold.Precision(compute=torch.int8)


class Whitened(nn.Module):
    """A norm of a user's own, with statistics that follow the input."""

    def __init__(self, width):
        super().__init__()
        self.scale = nn.Parameter(torch.linspace(0.5, 1.5, width).view(1, -1, 1, 1))
        self.register_buffer("center", torch.zeros(1, width, 1, 1))
        self.register_buffer("share", torch.tensor(0.1))

    def forward(self, x):
        if self.training:
            mean = x.detach().float().mean((0, 2, 3), keepdim=True)
            self.center += self.share * (mean - self.center)
        return (x - self.center) * self.scale


class FrozenNorm(nn.Module):
    """Batch norm of a detector: no parameters, and operations that widen what they are given."""

    def __init__(self, width):
        super().__init__()
        self.register_buffer("weight", torch.linspace(0.5, 1.5, width))
        self.register_buffer("running_mean", torch.linspace(-0.1, 0.1, width))

    def forward(self, x):
        return (x - self.running_mean.view(1, -1, 1, 1)) * self.weight.view(1, -1, 1, 1)


NORMS = {
    "batch norm": nn.BatchNorm2d,
    "batch norm without weights": partial(nn.BatchNorm2d, affine=False),
    "instance norm": partial(nn.InstanceNorm2d, affine=True, track_running_stats=True),
    "own": Whitened,
    "frozen": FrozenNorm,
}


class Conv(nn.Module):
    """Two blocks with a norm between narrow weights, which take no wider input."""

    def __init__(self, norm):
        super().__init__()
        blocks = (
            nn.Sequential(nn.Conv2d(4, 4, 3, padding=1), norm(4), nn.Conv2d(4, 4, 3, padding=1))
            for _ in range(2)
        )
        self.blocks = nn.ModuleList(blocks)

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return x


def conv_steps(module, batches, context, average):
    """Two steps of SGD and one evaluation: the outputs, weights and buffers afterwards."""
    optimizer, outputs = torch.optim.SGD(module.parameters(), lr=0.1), list[Tensor]()
    if average is None:
        onefold.shard(module, optimizer, **context)
    for index, batch in enumerate(batches):
        module.train(index < 2)
        with torch.autocast("cpu", context) if average else contextlib.nullcontext():
            outputs.append(module(batch))
        if index < 2:
            outputs[-1].float().square().mean().backward()
            if average is not None:
                for parameter in module.parameters():
                    average(parameter.grad)
            optimizer.step()
            optimizer.zero_grad()
    return [output.detach() for output in outputs]


@worlds_in_turn
@pytest.mark.parametrize(("world_size", "stage"), [(1, 0), (3, 0), (3, 1), (3, 3)])
@pytest.mark.parametrize("norm", NORMS)
@every_rank()
def test_norms_with_statistics_compute_as_under_autocast(rank, norm, world_size, stage):
    """Statistics and weights of norms stay in fp32; what a norm returns is narrow again."""
    generator = torch.Generator().manual_seed(rank)
    batches = torch.randn(3, 3, 4, 5, 5, generator=generator)
    plain, module = (seeded(Conv, NORMS[norm]) for _ in range(2))

    def average(grad):
        dist.all_reduce(grad)
        grad /= world_size

    wanted = conv_steps(plain, batches, torch.bfloat16, average)
    context = {"precision": "bf16", "stage": stage}
    outputs = conv_steps(module, batches, context, None)
    assert torch.equal(outputs[0], wanted[0].bfloat16())
    torch.testing.assert_close(outputs, [w.bfloat16() for w in wanted], rtol=0.02, atol=0.02)
    for name, buffer in plain.named_buffers():
        own = module.get_buffer(name)
        assert own.dtype == buffer.dtype
        torch.testing.assert_close(own, buffer, rtol=1e-3, atol=1e-4)
    with onefold.unsharded(module):
        for name, weight in plain.named_parameters():
            own = module.get_parameter(name)
            torch.testing.assert_close(own, weight, rtol=1e-3, atol=1e-3)


def test_weights_of_norms_are_gathered_and_reduced_in_their_own_dtype():
    def prices(rank):
        module = onefold.shard(seeded(Conv, nn.BatchNorm2d), stage=3, precision="bf16")
        names = {unit.name: unit.compute_dtype for unit in engine_of(module).units}
        module(torch.randn(2, 4, 5, 5)).sum().backward()
        norm = module.blocks[0][1].weight.grad
        assert norm.dtype == torch.float32
        return names

    narrow, wide = torch.bfloat16, torch.float32
    assert run_ranks(2, prices)[0] == {
        "blocks.0": narrow,
        "blocks.0 (float32, not cast)": wide,
        "blocks.1": narrow,
        "blocks.1 (float32, not cast)": wide,
    }


@pytest.mark.parametrize("buffers", [torch.bfloat16, None])
def test_norms_are_cast_with_their_statistics(buffers):
    """Buffers that are as narrow as the weights compute with them, as in a module that was cast."""
    choice = onefold.Precision(compute=torch.bfloat16, buffers=buffers)
    module = seeded(Conv, nn.BatchNorm2d)
    onefold.shard(module if buffers else module.bfloat16(), stage=3, precision=choice)
    assert {unit.compute_dtype for unit in engine_of(module).units} == {torch.bfloat16}
    module(torch.randn(2, 4, 5, 5)).sum().backward()


def test_statistics_are_at_least_as_wide_as_the_weights_of_the_forward():
    module = onefold.shard(seeded(Conv, nn.BatchNorm2d).bfloat16(), precision="fp32")
    assert module.blocks[0][1].running_mean.dtype == torch.float32
    assert module(torch.randn(2, 4, 5, 5)).dtype == torch.float32


@worlds_in_turn
@pytest.mark.parametrize("make", [parametrizations.spectral_norm, parametrizations.orthogonal])
@pytest.mark.parametrize(("world_size", "stage"), [(1, 3), (3, 0), (3, 3)])
@every_rank()
def test_weights_computed_from_fp32_buffers_are_computed_in_fp32(rank, make, world_size, stage):
    def build():
        return nn.Sequential(make(nn.Linear(6, 5)), nn.Tanh(), nn.Linear(5, 2))

    module, wide = seeded(build), seeded(build)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    onefold.shard(module, optimizer, stage=stage, precision="bf16")
    x = torch.randn(4, 6, generator=torch.Generator().manual_seed(0)).bfloat16()
    inner = F.linear(x, wide[0].weight.bfloat16(), wide[0].bias.bfloat16())
    wanted = F.linear(inner.tanh(), *(p.bfloat16() for p in wide[2].parameters()))
    output = module(x)
    assert torch.equal(output, wanted)
    for loss in (output, wanted):
        loss.float().square().mean().backward()
    optimizer.step()
    with torch.no_grad(), onefold.unsharded(module):
        for ours, p in zip(module.parameters(), wide.parameters(), strict=True):
            torch.testing.assert_close(ours, p - 0.1 * p.grad, rtol=1e-6, atol=1e-7)
    for ours, theirs in zip(module.buffers(), wide.buffers(), strict=True):
        assert ours.dtype == torch.float32
        assert torch.equal(ours, theirs)


def test_the_older_spectral_norm_is_refused_by_name_under_precision():
    module = nn.Sequential(torch.nn.utils.spectral_norm(nn.Linear(3, 3)))
    with pytest.raises(onefold.ConfigError, match=r"(?s)utils\.spectral_norm.*hint: .*parametriz"):
        onefold.shard(module, stage=3, precision="bf16")
    onefold.shard(module, stage=3)(torch.randn(2, 3)).sum().backward()


@worlds_in_turn
@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize("stage", [0, 3])
def test_packed_sequences_and_named_tuples_are_cast_as_tensors_are(stage, world_size):
    Named = collections.namedtuple("Named", "values order")

    def forward(self, packed, named):
        return self.rnn(packed)[0].data.sum() + self.head(named.values)[named.order].sum()

    def compute(rank):
        build = lambda: By(forward, rnn=nn.GRU(6, 5, batch_first=True), head=nn.Linear(6, 2))
        module, plain = seeded(build), seeded(build).bfloat16()
        generator = torch.Generator().manual_seed(rank)
        x, named = torch.randn(3, 4, 6, generator=generator), torch.randn(3, 6, generator=generator)
        lengths, order = torch.tensor([2, 4, 1]), torch.tensor([2, 0, 1])
        onefold.shard(module, stage=stage, precision="bf16")
        loss, wanted = (
            net(
                pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False),
                Named(y, order),
            )
            for net, x, y in ((module, x, named), (plain, x.bfloat16(), named.bfloat16()))
        )
        assert torch.equal(loss, wanted)
        loss.backward()

    run_ranks(world_size, compute)


@pytest.mark.parametrize("word", ["fp8", "FP8", "float8_e4m3fn"])
def test_float8_is_refused_with_the_reason(word):
    with pytest.raises(onefold.ConfigError, match="there is no training in float8"):
        onefold.shard(nn.Linear(2, 2), precision=word)
