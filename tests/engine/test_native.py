"""The C kernel of Adam: one function of each element, whoever computes it and however it is cut."""

from __future__ import annotations

import itertools
import math
from shutil import which
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import onefold
from onefold import Offload
from onefold.engine import adam_kernel as native
from onefold.engine import blocked_adam as adam
from onefold.engine.adam_kernel import AdamKernel, Flats
from onefold.wire.kernels import compiling
from onefold.wire.kernels.library import library
from tests.support.models import Model, next_token_loss, token_batches
from tests.support.ranks import run_ranks, seeded
from tests.support.rows import again_but
from tests.support.training import Job, assert_close, assert_same_bits, run_job, train_plain

BF16 = torch.bfloat16
OPTIONS = {
    "lr": 1e-3, "beta1": 0.9, "beta2": 0.999, "eps": 1e-8, "weight_decay": 0.1,
    "maximize": False, "is_decoupled": True,
}  # fmt: skip
VARIANTS = [
    {"weight_decay": decay, "maximize": maximize, "is_decoupled": is_decoupled}
    for decay, maximize, is_decoupled in itertools.product((0.0, 0.1), (False, True), (True, False))
]
ODD = [0.0, -0.0, 1e-40, -1e-45, 3e38, math.inf, -math.inf, math.nan]


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> list[AdamKernel]:
    """Every loop of the source that lies here that this CPU runs, the fastest first."""
    if which("cc") is None:
        pytest.skip("needs a C compiler")
    path = tmp_path_factory.mktemp("native") / "kernel.so"
    assert compiling.compile_library(["cc"], path) == ""
    found = AdamKernel.offered_by(library(path))
    if not found:
        pytest.skip("this CPU has no fma")
    return found


def flats(numel: int, *, grad: torch.dtype = BF16, seed: int = 0) -> Flats:
    """As after some steps, gradients over many magnitudes."""
    generator = torch.Generator().manual_seed(seed)
    p, m, g, size = (torch.randn(numel, generator=generator) for _ in range(4))
    g = (g * 10 ** (2 * size)).to(grad)
    return Flats(p, 0.01 * m, 1e-4 * m**2, g, torch.zeros(numel, dtype=BF16))


def cloned(flat: Flats) -> Flats:
    return Flats(*(one.clone() for one in flat))


def piece(flat: Flats, start: int, stop: int) -> Flats:
    return Flats(*(one[start:stop] for one in flat))


def bits(tensor: Tensor) -> Tensor:
    """To compare NaN with NaN, and -0 not with 0; which NaN it is, nobody says."""
    narrow = tensor.masked_fill(tensor.isnan(), math.nan)
    return narrow.view(torch.int16 if tensor.dtype == BF16 else torch.int32)


def assert_same(got: Flats, wanted: Flats) -> None:
    for name, a, b in zip(Flats._fields, got, wanted, strict=True):
        assert torch.equal(bits(a), bits(b)), name


def torch_step(flat: Flats, options: dict[str, Any], steps: int) -> None:
    """The same by torch's own kernel, between two casts."""
    fused = torch._fused_adamw_ if options["is_decoupled"] else torch._fused_adam_
    rest = {name: value for name, value in options.items() if name != "is_decoupled"}
    lists = [[one] for one in (flat.param, flat.grad.float(), flat.exp_avg, flat.exp_avg_sq)]
    rest |= {"amsgrad": False, "grad_scale": None, "found_inf": None}
    fused(*lists, [], [torch.tensor(float(steps))], **rest)
    flat.weight.copy_(flat.param)


# one element


@again_but(
    "bf16-{'weight_decay': 0.0, 'maximize': False, 'is_decoupled': True}",
    "bf16-{'weight_decay': 0.0, 'maximize': True, 'is_decoupled': False}",
    "bf16-{'weight_decay': 0.1, 'maximize': True, 'is_decoupled': True}",
    "fp32-{'weight_decay': 0.0, 'maximize': False, 'is_decoupled': False}",
    "fp32-{'weight_decay': 0.0, 'maximize': True, 'is_decoupled': True}",
    "fp32-{'weight_decay': 0.1, 'maximize': False, 'is_decoupled': True}",
    "fp32-{'weight_decay': 0.1, 'maximize': False, 'is_decoupled': False}",
    "fp32-{'weight_decay': 0.1, 'maximize': True, 'is_decoupled': False}",
)
@pytest.mark.parametrize("variant", VARIANTS, ids=str)
@pytest.mark.parametrize("grad", [BF16, torch.float32], ids=["bf16", "fp32"])
def test_steps_follow_the_papers_in_double_precision(compiled, variant, grad):
    options = OPTIONS | variant
    flat = flats(1003, grad=grad)
    p, m, v = (one.double() for one in flat[:3])
    largest = m.abs()
    lr, decay, eps = options["lr"], options["weight_decay"], options["eps"]
    beta1, beta2 = options["beta1"], options["beta2"]
    for steps in range(1, 6):
        flat.grad.copy_(flats(1003, grad=grad, seed=steps).grad)
        g = -flat.grad.double() if options["maximize"] else flat.grad.double()
        if options["is_decoupled"]:
            p = p - lr * decay * p
        else:
            g = g + decay * p
        largest = torch.maximum(largest, g.abs())
        m, v = beta1 * m + (1 - beta1) * g, beta2 * v + (1 - beta2) * g**2
        p = p - lr * (m / (1 - beta1**steps)) / ((v / (1 - beta2**steps)).sqrt() + eps)
        compiled[0].step(flat, options, steps)
    torch.testing.assert_close(flat.param.double(), p, rtol=1e-6, atol=1e-6)
    assert ((flat.exp_avg - m).abs() <= 1e-6 * largest).all()  # of opposite signs they cancel
    torch.testing.assert_close(flat.exp_avg_sq.double(), v, rtol=2e-6, atol=0)


def test_weights_are_rounded_to_the_nearest_ties_to_even(compiled):
    """Every bf16 value, and what lies just below, at and just above the middle to the next."""
    high = torch.arange(-(2**15), 2**15, dtype=torch.int32) << 16
    param = torch.cat([high + low for low in (0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF)])
    param = param.view(torch.float32)
    zero = torch.zeros_like(param)
    flat = Flats(param, zero, zero.clone(), zero.to(BF16), torch.zeros_like(param, dtype=BF16))
    compiled[0].step(flat, OPTIONS | {"lr": 0.0}, 1)
    assert torch.equal(bits(flat.weight), bits(param.to(BF16)))


@pytest.mark.parametrize("change", [lambda m: m.to(BF16), lambda m: m[:-1]])
def test_moments_that_the_kernel_would_write_past_are_refused(compiled, change):
    flat = flats(100)
    with pytest.raises(TypeError, match="moments"):
        compiled[0].step(flat._replace(exp_avg_sq=change(flat.exp_avg_sq)), OPTIONS, 3)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_gradient_that_is_no_number_spoils_its_own_element_alone(compiled, value):
    flat, wanted = flats(100), flats(100)
    flat.grad[37] = value
    for one in (flat, wanted):
        compiled[0].step(one, OPTIONS, 3)
    assert flat.param[37].isnan()
    assert flat.weight[37].isnan()
    rest = [range(37), range(38, 100)]
    for part in rest:
        assert_same(piece(flat, part.start, part.stop), piece(wanted, part.start, part.stop))


# cuts


@settings(max_examples=200)
@given(
    numel=st.integers(0, 300), cuts=st.lists(st.integers(0, 300), max_size=4),
    grad=st.sampled_from([BF16, torch.float32]), variant=st.sampled_from(VARIANTS),
    steps=st.integers(1, 100_000),
    odd=st.lists(st.tuples(st.integers(0, 3), st.integers(0, 299), st.sampled_from(ODD))),
    shift=st.integers(0, 20),
)  # fmt: skip
def test_any_cut_at_any_address_by_any_instruction_set_has_the_same_bits(
    compiled, numel, cuts, grad, variant, steps, odd, shift
):
    wanted = flats(numel, grad=grad)
    for stream, index, value in odd:
        if index < numel:
            wanted[stream][index] = abs(value) if stream == 2 else value
    before = cloned(wanted)
    compiled[0].step(wanted, OPTIONS | variant, steps)
    edges = sorted({0, numel, *(cut for cut in cuts if cut < numel)})
    for kernel in compiled:
        moved = flats(numel + shift, grad=grad)
        got = piece(moved, shift, numel + shift)
        for to, value in zip(got, before, strict=True):
            to.copy_(value)
        for start, stop in itertools.pairwise(edges):
            kernel.step(piece(got, start, stop), OPTIONS | variant, steps)
        assert_same(got, wanted)


@pytest.mark.parametrize("threads", [2, 3, 5])
def test_any_number_of_threads_has_the_same_bits(compiled, threads):
    numel = threads * native.SHARE_NUMEL + 77
    one, several = flats(numel), flats(numel)
    compiled[0].step(one, OPTIONS, 7)
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        compiled[0].step(several, OPTIONS, 7)
    finally:
        torch.set_num_threads(before)
    assert_same(several, one)


# beside torch


@pytest.mark.parametrize("variant", VARIANTS, ids=str)
@pytest.mark.parametrize("numel", [1, 15, 1003, 4096])
def test_torchs_fused_kernel_comes_to_the_same_within_rounding(compiled, variant, numel):
    got, wanted = flats(numel), flats(numel)
    for steps in range(1, 4):
        compiled[0].step(got, OPTIONS | variant, steps)
        torch_step(wanted, OPTIONS | variant, steps)
    for a, b in zip(got[:3], wanted[:3], strict=True):
        torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-8)


@pytest.mark.skipif(
    torch.backends.cpu.get_cpu_capability() not in ("AVX2", "AVX512"),
    reason="elsewhere torch's compiler may fuse other operations",
)
@pytest.mark.parametrize("variant", VARIANTS, ids=str)
def test_on_x86_whole_vectors_have_the_bits_of_torchs_fused_kernel(compiled, variant):
    got, wanted = flats(1 << 16), flats(1 << 16)
    for steps in range(1, 6):
        compiled[0].step(got, OPTIONS | variant, steps)
        torch_step(wanted, OPTIONS | variant, steps)
    assert_same(got, wanted)


def test_what_was_stepped_counts_as_changed_in_place(compiled):
    """So that autograd refuses to go backward through a weight that was stepped meanwhile."""
    flat = flats(8)
    versions = [one._version for one in flat]
    compiled[0].step(flat, OPTIONS, 1)
    changed = [one._version > version for one, version in zip(flat, versions, strict=True)]
    assert changed == [True, True, True, False, True]


def test_a_gradient_may_be_an_expanded_one(compiled):
    half = torch.tensor(0.5)
    got, wanted = (flats(64)._replace(grad=g) for g in (half.expand(64), half.repeat(64)))
    for one in (got, wanted):
        compiled[0].step(one, OPTIONS, 1)
    assert_same(got, wanted)


# the engine


@again_but("Adam-bf16-native", "Adam-fp32-torch", "AdamW-bf16-torch")
@pytest.mark.parametrize("way", ["native", "torch"])
@pytest.mark.parametrize("dtype", [torch.float32, BF16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("kind", [torch.optim.Adam, torch.optim.AdamW])
def test_stages_and_tiers_agree_bitwise_with_the_kernel_and_without(
    way, dtype, kind, tmp_path, request, monkeypatch
):
    found = request.getfixturevalue("compiled")[0] if way == "native" else None
    monkeypatch.setattr(adam, "kernel", lambda: found)

    def optimizer(parameters):
        return kind(parameters, lr=1e-2, weight_decay=0.1)

    def job(offload: Any = None) -> Job:
        options = {"offload": offload}
        return Job(
            lambda: Model().to(dtype), token_batches(), next_token_loss, optimizer, options=options
        )

    wanted = run_job(job(), 3, 0)
    for stage in (1, 3):
        assert_same_bits(run_job(job(), 3, stage), wanted)
    for tier in ("cpu", "disk"):
        assert_same_bits(run_job(job(Offload(optimizer=tier, disk=tmp_path)), 3, 3), wanted)
    if dtype == torch.float32:
        assert_close(wanted, train_plain(job()))


def test_each_unit_and_group_is_one_call(compiled, monkeypatch):
    calls: list[int] = []

    class Counting:
        takes = staticmethod(AdamKernel.takes)

        def step(self, flat: Flats, options: Any, steps: float) -> None:
            calls.append(len(flat.param))
            compiled[0].step(flat, options, steps)

    monkeypatch.setattr(adam, "kernel", Counting)

    def step(rank: int) -> int:
        module = seeded(Model).to(BF16)
        decay = [p for p in module.parameters() if p.dim() > 1]
        plain = [p for p in module.parameters() if p.dim() == 1]
        optimizer = torch.optim.AdamW([{"params": decay}, {"params": plain, "weight_decay": 0.0}])
        onefold.shard(module, optimizer, stage=3)
        next_token_loss(module, token_batches()[0]).backward()
        optimizer.step()
        return len(onefold.report(module).units)

    assert run_ranks(2, step)[0] == 5
    assert len(calls) == 2 * 9  # five units have matrices, four of them vectors
