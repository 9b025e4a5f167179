"""Text to tokens and back, through a tokenizer or with bytes as tokens; and bytes from a module."""

import codecs
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from onefold.errors import ConfigError
from onefold.planner.models.gpt import VOCAB
from onefold.planner.models.loader import logits_of

TEMPERATURE = 0.5
"""Below 1 prefers likely bytes; a small model is readable only well below it."""


class Bytes:
    """One token for each byte of UTF-8."""

    name = "bytes"

    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def ids_of(self, text: str) -> list[int]:
        return list(text.encode())

    def text(self, tokens: Sequence[int], *, is_last: bool = False) -> str:
        """A token that is no byte is a replacement character."""
        joined = b"".join(bytes([token]) if token < 256 else b"\xff" for token in tokens)
        return self._decoder.decode(joined, is_last)


class Words:
    """The tokens of a Hugging Face tokenizer."""

    name = "tokens"

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._waiting: list[int] = []  # since the last line of text was complete
        self._shown = ""  # of their text

    def ids_of(self, text: str) -> list[int]:
        tokens: list[int] = self._tokenizer(text)["input_ids"]
        if not tokens:
            raise ConfigError("a prompt of one token", repr(text), hint="write a word")
        return tokens

    def text(self, tokens: Sequence[int], *, is_last: bool = False) -> str:
        """A character may need several tokens, and a space depends on the next."""
        self._waiting += tokens
        whole: str = self._tokenizer.decode(self._waiting, skip_special_tokens=True)
        if whole.endswith("\ufffd") and not is_last:
            return ""
        more, self._shown = whole[len(self._shown) :], whole
        if whole.endswith("\n"):
            self._waiting, self._shown = [], ""
        return more


Tokens = Bytes | Words
"""Text as tokens. `ids_of` returns those of a prompt. `text` is called with the tokens of one text,
and returns what further tokens complete of it: the rest with the last ones."""


class Streamer:
    """Receives tokens from `generate(streamer=)`: first the prompt, which is passed over."""

    def __init__(self, tokens: Tokens, show: Callable[[str], object]) -> None:
        self.tokens: list[int] = []
        self.text = ""
        self._codec = tokens
        self._show = show
        self._has_prompt = False

    def put(self, value: Tensor) -> None:
        """Take further tokens [n] or [1, n]."""
        if not self._has_prompt:
            self._has_prompt = True
            return
        self.add(value.reshape(-1).tolist())

    def add(self, tokens: list[int], *, is_last: bool = False) -> None:
        """Show the text of further tokens."""
        self.tokens += tokens
        more = self._codec.text(tokens, is_last=is_last)
        self.text += more
        if more:
            self._show(more)

    def end(self) -> None:
        """Show what was held back for a token that did not come."""
        self.add([], is_last=True)


def printable(text: str) -> str:
    """Escape characters that would steer a terminal."""
    return "".join(
        char if char.isprintable() or char in "\n\t" else char.encode("unicode_escape").decode()
        for char in text
    )


def one_line(text: bytes) -> str:
    """Return bytes as printable ASCII, with all others escaped."""
    return text.decode("utf-8", "replace").encode("unicode_escape").decode("ascii")


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
