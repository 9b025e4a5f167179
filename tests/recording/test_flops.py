"""Model FLOPs: one watched forward tells what forward and backward take, as torch counts both."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

import onefold
from onefold.planner.machines import known_machines, peak_of
from onefold.planner.models.loader import build_model
from onefold.recording.flops import FlopCounter
from tests.support.ranks import run_ranks, seeded

TOKENS = torch.arange(32).view(2, 16) % 8


@pytest.fixture(autouse=True)
def _nothing_was_compiled(monkeypatch):
    """Other tests of this process compile, after which nothing is counted."""
    from torch._dynamo.utils import counters

    monkeypatch.setitem(counters, "frames", type(counters["frames"])())


def both(module: nn.Module, run: Callable[[nn.Module], torch.Tensor]) -> tuple[float, float]:
    """The FLOPs by one watched forward, and by torch over forward and backward."""
    with FlopCounter() as counter:
        run(module)
    with FlopCounterMode(display=False) as torchs:
        run(module).backward()
    assert counter.is_known
    return counter.flops, torchs.get_total_flops()


def hf(name: str, **choices: Any) -> nn.Module:
    transformers = pytest.importorskip("transformers")
    config = getattr(transformers, f"{name}Config")(
        vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=2,
        num_attention_heads=4, attn_implementation="eager", **choices,
    )  # fmt: skip
    kind = "ForMaskedLM" if name == "Bert" else "ForCausalLM"
    return getattr(transformers, name + kind)(config)


def hf_loss(module: nn.Module) -> torch.Tensor:
    return module(input_ids=TOKENS, labels=TOKENS).loss


def lora() -> nn.Module:
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(r=4, target_modules=["q_proj", "down_proj"], task_type="CAUSAL_LM")
    return peft.get_peft_model(hf("Llama", num_key_value_heads=2), config)


def preset() -> nn.Module:
    return build_model("tiny", 16)


def loss_of_logits(module: nn.Module) -> torch.Tensor:
    with sdpa_kernel(SDPBackend.MATH):  # torch has no formula for the CPU's own kernel
        return module(TOKENS).float().square().mean()


def convolutions() -> nn.Module:
    return nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Conv2d(4, 8, 3))


CASES: dict[str, tuple[Callable[[], nn.Module], Callable[[nn.Module], torch.Tensor]]] = {
    "Llama": (lambda: hf("Llama", num_key_value_heads=2), hf_loss),
    "a preset": (preset, loss_of_logits),
    "Mixtral": (
        lambda: hf(
            "Mixtral", num_key_value_heads=2, num_local_experts=4, experts_implementation="eager"
        ),
        hf_loss,
    ),
    "BERT": (lambda: hf("Bert"), hf_loss),
    "LoRA": (lora, hf_loss),
    "convolutions": (convolutions, lambda module: module(torch.ones(2, 3, 9, 9)).sum()),
}


@pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing` is deprecated")  # PEFT's call
@pytest.mark.parametrize("name", CASES)
def test_one_forward_tells_what_torch_counts_in_forward_and_backward(name):
    build, run = CASES[name]
    ours, torchs = both(seeded(build), run)
    assert ours == torchs > 0


def test_frozen_weights_have_no_gradient_and_the_first_of_them_no_backward_at_all():
    module = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8))
    product = 2 * 4 * 8 * 8
    module[0].requires_grad_(False)
    module[2].requires_grad_(False)
    ours, torchs = both(module, lambda module: module(torch.ones(4, 8)).sum())
    assert ours == torchs == (1 + 2 + 2) * product  # nothing below the second needs a gradient


def test_recomputation_does_not_count():
    module = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    rows = torch.ones(4, 8, requires_grad=True)

    def again(module: nn.Module) -> torch.Tensor:
        return checkpoint(module, rows, use_reentrant=False).sum()

    ours, torchs = both(module, again)
    plain, _ = both(module, lambda module: module(rows).sum())
    assert ours == plain < torchs


@pytest.mark.parametrize("kernel", ["sdpa", "grouped_mm"])
def test_the_count_is_that_of_the_model_whichever_kernel_computes_it(kernel):
    def count(**choices: str) -> float:
        config = {"num_key_value_heads": 2, "num_local_experts": 4, **choices}
        module = hf("Mixtral", **{k: v for k, v in config.items() if k != "attn"})
        if "attn" in choices:
            module.set_attn_implementation(choices["attn"])
        with FlopCounter() as counter:
            hf_loss(module)
        return counter.flops

    fused = {"sdpa": {"attn": "sdpa"}, "grouped_mm": {"experts_implementation": "grouped_mm"}}
    plain = {"experts_implementation": "eager"}
    assert count(**plain) == count(**{**plain, **fused[kernel]}) > 0


class Hidden(torch.autograd.Function):
    """A product whose backward is its own affair."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return x @ w

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        return grad, None


class Custom(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return Hidden.apply(super().forward(x), self.weight)


@pytest.mark.parametrize(
    "build",
    [lambda: Custom(8, 8), lambda: nn.Sequential(nn.LSTM(8, 8)), lambda: nn.Bilinear(8, 8, 8)],
    ids=["a function", "a kernel", "a product without a formula"],
)
def test_where_backward_cannot_be_told_there_is_no_count(build):
    module = build()
    rows = [torch.ones(4, 8)] * (2 if isinstance(module, nn.Bilinear) else 1)
    with FlopCounter() as counter:
        module(*rows)
    assert not counter.is_known
    assert counter.flops == 0


def train(module: nn.Module, steps: int, watch: bool) -> tuple[list[Any], dict[str, float]]:
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-2)
    onefold.shard(module, optimizer, stage=3)
    numbers: dict[str, float] = {}
    for step in range(steps):
        for tokens in (TOKENS, TOKENS[:, :8]) if step % 2 else (TOKENS,):
            module(tokens).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        numbers = onefold.report(module).scalars() if watch else {}
    return [p.to_local().clone() for p in module.parameters()], numbers


def test_a_run_has_flops_a_second_and_the_bits_of_a_run_without():
    def body(rank: int) -> None:
        wanted, _ = train(seeded(preset), 4, watch=False)
        module = seeded(preset)
        got, numbers = train(module, 4, watch=True)
        assert all(map(torch.equal, wanted, got))
        with FlopCounter() as counter:
            seeded(preset)(TOKENS)
        per_token = numbers["model_flops_per_s"] / numbers["tokens_per_s"]
        assert per_token == pytest.approx(counter.flops / TOKENS.numel(), rel=0.05)
        assert "mfu" not in numbers  # of a CPU

    run_ranks(2, body)


def test_batches_of_two_shapes_have_their_own_flops():
    """Attention makes a token of a long row cost more than one of a short row."""
    module, short = seeded(preset), TOKENS[:, :2]
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-2)
    onefold.shard(module, optimizer, stage=0)
    numbers: dict[str, float] = {}
    for _ in range(4):
        for tokens in (TOKENS, short, short, short):
            module(tokens).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        numbers = onefold.report(module).scalars()
    counts = []
    for tokens in (TOKENS, short):
        with FlopCounter() as counter:
            seeded(preset)(tokens)
        counts.append(counter.flops)
    per_token = numbers["model_flops_per_s"] / numbers["tokens_per_s"]
    tokens_of_a_step = TOKENS.numel() + 3 * short.numel()
    assert per_token * tokens_of_a_step == pytest.approx(counts[0] + 3 * counts[1], rel=1e-6)


def test_a_forward_that_fails_is_counted_anew_and_no_mode_stays_on():
    module = seeded(lambda: nn.Sequential(nn.Embedding(8, 8), nn.Linear(8, 8)))
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    onefold.shard(module, optimizer)
    fails = False

    def fail(*_: object) -> None:
        if fails:
            raise ZeroDivisionError

    module[1].register_forward_hook(fail)
    for step in range(4):
        fails = step == 1
        if fails:
            with pytest.raises(ZeroDivisionError):
                module(TOKENS)
            assert torch._C._len_torch_dispatch_stack() == 0
            continue
        module(TOKENS).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        numbers = onefold.report(module).scalars()
    product = 2 * TOKENS.numel() * 8 * 8
    per_token = numbers["model_flops_per_s"] / numbers["tokens_per_s"]
    assert per_token == pytest.approx(3 * product / TOKENS.numel())


def test_a_compiled_model_has_no_count(monkeypatch):
    from torch._dynamo.utils import counters

    monkeypatch.setitem(counters, "frames", type(counters["frames"])({"total": 1}))
    _, numbers = train(seeded(preset), 3, watch=True)
    assert "tokens_per_s" in numbers
    assert "model_flops_per_s" not in numbers


@pytest.mark.parametrize(
    ("name", "machine"),
    [("NVIDIA H200", "h200"), ("NVIDIA A100-SXM4-80GB", "a100-80"), ("NVIDIA A10", "a10"),
     ("NVIDIA A100 80GB PCIe", "a100-80"), ("NVIDIA H100 80GB HBM3", "h100-80"),
     ("NVIDIA GeForce RTX 4090", "rtx-4090"), ("AMD Instinct MI300X", "mi300x")],
)  # fmt: skip
def test_a_gpu_is_known_by_the_name_that_torch_has_for_it(name, machine):
    assert peak_of(name, "bf16") == known_machines()[machine].flops["bf16"]


@pytest.mark.parametrize("name", ["NVIDIA A10G", "NVIDIA H100 PCIe", "NVIDIA H200 NVL", "cpu",
                                  "NVIDIA GeForce RTX 4090 Laptop GPU"])  # fmt: skip
def test_a_gpu_with_other_peaks_is_not_taken_for_one_with_a_like_name(name):
    assert peak_of(name, "bf16") == float("inf")


def test_mfu_is_the_share_of_the_peak_of_the_dtype(monkeypatch):
    from onefold import api
    from onefold.recording.meter import Rates

    monkeypatch.setattr(api.accelerator, "model", lambda device: ("NVIDIA H200", 0))
    rates = Rates(0.0, 1.0, 98.9e12, torch.bfloat16)
    assert api._share_of_peak(rates, torch.device("cuda")) == pytest.approx(0.1)
    assert api._share_of_peak(rates, torch.device("cpu")) == 0
    eighth = rates._replace(dtype=torch.float8_e4m3fn)
    assert api._share_of_peak(eighth, torch.device("cuda")) == pytest.approx(0.05, rel=1e-3)
    double = rates._replace(dtype=torch.float64)
    assert api._share_of_peak(double, torch.device("cuda")) == 0, "no sheet's peak is in the table"
