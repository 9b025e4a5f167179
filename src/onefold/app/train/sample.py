"""Generate a line of text with a trained module, byte by byte."""

from __future__ import annotations

import torch
from torch import nn

from onefold.planner.models.gpt import VOCAB
from onefold.planner.models.loader import logits_of

TEMPERATURE = 0.5
"""Below 1 prefers likely bytes; a small model is readable only well below it."""


@torch.no_grad()
def generate(
    module: nn.Module, prompt: bytes, *, num_bytes: int, seq: int, seed: int, device: torch.device
) -> str:
    """Return `prompt` and `num_bytes` sampled bytes, as text on one line.

    Each byte is one forward over the last `seq` bytes. A collective where the module is sharded:
    every rank calls it with equal arguments.
    """
    generator = torch.Generator().manual_seed(seed)
    written = list(prompt)
    for _ in range(num_bytes):
        tokens = torch.tensor([written[-seq:]], device=device)
        logits = logits_of(module, tokens)[0, -1, :VOCAB].float().cpu()
        chances = torch.softmax(logits / TEMPERATURE, dim=0)
        written.append(int(torch.multinomial(chances, 1, generator=generator)))
    return one_line(bytes(written))


def one_line(text: bytes) -> str:
    """Return bytes as printable ASCII, with all others escaped."""
    return text.decode("utf-8", "replace").encode("unicode_escape").decode("ascii")
