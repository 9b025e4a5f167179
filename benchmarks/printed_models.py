"""Models of several kinds that take tokens, for `onefold plan --model printed_models:NAME`.

Each function returns a small module: tokens [rows, positions], int64 below 256, to logits.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

VOCAB = 256
ENCODER = {
    "hidden_size": 96, "intermediate_size": 256, "num_hidden_layers": 4, "num_attention_heads": 4,
}  # fmt: skip


class Answers(nn.Module):
    """A model of transformers, of which only the logits [..., classes] leave."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, tokens: Tensor) -> Tensor:
        """Call the model with tokens."""
        return self.model(input_ids=tokens).logits


class Both(Answers):
    """An encoder and a decoder, which read the same tokens."""

    def forward(self, tokens: Tensor) -> Tensor:
        """Call the model with tokens for both sides."""
        return self.model(input_ids=tokens, decoder_input_ids=tokens, use_cache=False).logits


class Pictures(Answers):
    """A model of images: tokens are the bytes of 3 colours, 16 x 16 points a row."""

    def forward(self, tokens: Tensor) -> Tensor:
        """Call the model with the rows as images."""
        points = tokens[:, : 3 * 16 * 16].to(torch.float32).view(-1, 3, 16, 16) / VOCAB
        return self.model(pixel_values=points.to(next(self.parameters()).dtype)).logits


class Waves(nn.Module):
    """Convolutions over bytes with batch norms, which have buffers, and a group norm."""

    def __init__(self, width: int, depth: int) -> None:
        super().__init__()
        self.table = nn.Embedding(VOCAB, width)
        self.blocks = nn.ModuleList(
            nn.Sequential(
                nn.Conv1d(width, 2 * width, 5, padding=2),
                nn.BatchNorm1d(2 * width),
                nn.GELU(),
                nn.Conv1d(2 * width, width, 3, padding=1, groups=2),
            )
            for _ in range(depth)
        )
        self.norm = nn.GroupNorm(4, width)
        self.head = nn.Linear(width, VOCAB)

    def forward(self, tokens: Tensor) -> Tensor:
        """Add each block's waves to those before."""
        x = self.table(tokens).transpose(1, 2)
        for block in self.blocks:
            x = x + block(x)
        return self.head(self.norm(x).transpose(1, 2))


def _of_transformers(model: str, config: str, **sizes: Any) -> nn.Module:
    import transformers

    return getattr(transformers, model)(getattr(transformers, config)(**sizes))


def bert() -> nn.Module:
    """Return an encoder that fills in words."""
    sizes = {**ENCODER, "vocab_size": VOCAB, "max_position_embeddings": 128}
    return Answers(_of_transformers("BertForMaskedLM", "BertConfig", **sizes))


def minilm() -> nn.Module:
    """Return an encoder with the shape of MiniLM, narrow and deep, that sorts texts."""
    sizes = {**ENCODER, "hidden_size": 48, "intermediate_size": 192, "num_hidden_layers": 8}
    return Answers(
        _of_transformers(
            "BertForSequenceClassification", "BertConfig", **sizes, vocab_size=4 * VOCAB,
            max_position_embeddings=128,
        )
    )  # fmt: skip


def vit() -> nn.Module:
    """Return a classifier of images."""
    sizes = {**ENCODER, "image_size": 16, "patch_size": 4, "num_labels": 10}
    return Pictures(_of_transformers("ViTForImageClassification", "ViTConfig", **sizes))


def t5() -> nn.Module:
    """Return an encoder and a decoder that share their table."""
    sizes = {"d_model": 96, "d_kv": 24, "d_ff": 256, "num_layers": 3, "num_heads": 4}
    both = _of_transformers(
        "T5ForConditionalGeneration", "T5Config", **sizes, vocab_size=VOCAB,
        decoder_start_token_id=0,
    )  # fmt: skip
    return Both(both)


def waves() -> nn.Module:
    """Return convolutions and norms."""
    return Waves(64, 5)
