"""Generate text with a module, byte by byte."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import nn

from onefold.planner.models.gpt import VOCAB
from onefold.planner.models.loader import logits_of

TEMPERATURE = 0.5
"""Below 1 prefers likely bytes; a small model is readable only well below it."""


@torch.no_grad()
def sampled_bytes(
    module: nn.Module, prompt: Sequence[int], *, most: int, longest: int, seed: int,
    device: torch.device, temperature: float = TEMPERATURE,
) -> Iterator[int]:  # fmt: skip
    """Yield `most` bytes that follow a prompt, each from one forward over the last `longest` bytes.

    With `longest` 0 each forward takes all bytes. At temperature 0 the likeliest byte is taken. A
    collective where the module is sharded: every rank draws the same numbers.
    """
    generator = torch.Generator().manual_seed(seed)
    written = list(prompt)
    for _ in range(most):
        tokens = torch.tensor([written[-longest:]], device=device)
        logits = logits_of(module, tokens)[0, -1, :VOCAB].float().cpu()
        if temperature > 0:
            chances = torch.softmax(logits / temperature, dim=0)
            written.append(int(torch.multinomial(chances, 1, generator=generator)))
        else:
            written.append(int(logits.argmax()))
        yield written[-1]


def one_line(text: bytes) -> str:
    """Return bytes as printable ASCII, with all others escaped."""
    return text.decode("utf-8", "replace").encode("unicode_escape").decode("ascii")
