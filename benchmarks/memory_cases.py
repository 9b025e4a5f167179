"""The models and settings on which predicted and measured memory are compared."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from onefold.planner.models.loader import build_model
from onefold.planner.trace import Inputs

BATCH = 4


@dataclass(frozen=True)
class Model:
    """How to build one on the CPU, and rows of its inputs."""

    build: Callable[[], nn.Module]
    inputs: Callable[[int], Inputs]
    recompute: Callable[[nn.Module], None] | None = None


@dataclass(frozen=True)
class Case:
    """One model in one setting."""

    model: str
    stage: int
    ranks: int
    precision: str | None = None
    accumulate: int = 1
    recompute: bool = False
    offload: str | None = None
    options: dict[str, Any] = field(default_factory=dict[str, Any])

    def __str__(self) -> str:
        words = [self.model, f"stage {self.stage}", f"{self.ranks} ranks", self.precision or "fp32"]
        words += [f"accumulate {self.accumulate}"] * (self.accumulate > 1)
        words += ["recompute"] * self.recompute + [str(self.offload)] * bool(self.offload)
        return ", ".join(words)


def _tokens(batch: int, seq: int, vocab: int) -> Tensor:
    return torch.randint(vocab, (batch, seq))


def _config(kind: str, name: str, **options: Any) -> Callable[[], nn.Module]:
    """A Hugging Face model of random weights."""

    def build() -> nn.Module:
        import transformers

        config = getattr(transformers, f"{kind}Config")(**options)
        config.use_cache = False
        return getattr(transformers, name)(config)

    return build


def _text(batch: int) -> Inputs:
    tokens = _tokens(batch, 96, 1000)
    return {"input_ids": tokens, "labels": tokens}


def _images(batch: int) -> Inputs:
    return {"pixel_values": torch.randn(batch, 3, 64, 64), "labels": torch.zeros(batch).long()}


def _switch(module: nn.Module) -> None:
    module.gradient_checkpointing_enable()  # type: ignore[operator]


def _recompute_blocks(module: nn.Module) -> None:
    module.recomputes = True  # type: ignore[assignment]


class ConvNet(nn.Module):
    """A small residual network: convolutions, batch norms, pooling."""

    def __init__(self, width: int = 64, depth: int = 6, classes: int = 100) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, width, 3, padding=1)
        self.blocks = nn.ModuleList(
            nn.Sequential(
                nn.Conv2d(width, width, 3, padding=1, bias=False), nn.BatchNorm2d(width), nn.ReLU(),
                nn.Conv2d(width, width, 3, padding=1, bias=False), nn.BatchNorm2d(width),
            )
            for _ in range(depth)
        )  # fmt: skip
        self.head = nn.Linear(width * 64, classes)

    def forward(self, images: Tensor) -> Tensor:
        x = self.stem(images)
        for block in self.blocks:
            x = F.relu(x + block(x))
        return self.head(F.adaptive_avg_pool2d(x, 8).flatten(1))


class Experts(nn.Module):
    """A layer of experts of fixed capacity, each a feed-forward network of its own tokens."""

    def __init__(self, width: int, num_experts: int) -> None:
        super().__init__()
        self.router = nn.Linear(width, num_experts)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))
            for _ in range(num_experts)
        )

    def forward(self, x: Tensor) -> Tensor:
        flat = x.flatten(0, -2)
        weights = self.router(flat).softmax(-1)
        capacity = 2 * len(flat) // len(self.experts)
        out = torch.zeros_like(flat)
        for index, expert in enumerate(self.experts):
            share, rows = weights[:, index].topk(capacity)
            out = out.index_add(0, rows, (expert(flat[rows]) * share[:, None]).to(out.dtype))
        return x + out.view_as(x)


class Mixture(nn.Module):
    """Layers of experts between an embedding and a head."""

    def __init__(self, width: int = 128, depth: int = 4, num_experts: int = 8) -> None:
        super().__init__()
        self.tokens = nn.Embedding(1000, width)
        self.layers = nn.ModuleList(Experts(width, num_experts) for _ in range(depth))
        self.head = nn.Linear(width, 1000)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tokens(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


_TEXT = {"vocab_size": 1000, "hidden_size": 256, "num_hidden_layers": 4, "num_attention_heads": 4}

MODELS: dict[str, Model] = {
    "gpt": Model(
        lambda: build_model("mini", 96), lambda b: (_tokens(b, 96, 256),), _recompute_blocks
    ),
    "llama": Model(
        _config("Llama", "LlamaForCausalLM", intermediate_size=688, num_key_value_heads=2, **_TEXT),
        _text, _switch,
    ),
    "bert": Model(
        _config("Bert", "BertForMaskedLM", intermediate_size=1024, **_TEXT), _text, _switch
    ),
    "t5": Model(
        _config("T5", "T5ForConditionalGeneration", vocab_size=1000, d_model=256, d_kv=64,
                d_ff=1024, num_layers=3, num_heads=4, decoder_start_token_id=0),
        _text, _switch,
    ),
    "vit": Model(
        _config("ViT", "ViTForImageClassification", hidden_size=256, num_hidden_layers=4,
                num_attention_heads=4, intermediate_size=1024, image_size=64, patch_size=8),
        _images, _switch,
    ),
    "mixtral": Model(
        _config("Mixtral", "MixtralForCausalLM", intermediate_size=512, num_key_value_heads=2,
                num_local_experts=4, num_experts_per_tok=2, **_TEXT),
        _text, _switch,
    ),
    "moe": Model(Mixture, lambda b: (_tokens(b, 96, 1000),)),
    "conv": Model(ConvNet, lambda b: (torch.randn(b, 3, 32, 32),)),
}  # fmt: skip
