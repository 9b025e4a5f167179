"""The choices of `onefold generate` as a frozen value. Imports no torch: `--help` reads it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerateJob:
    """One run of `onefold generate`. Sizes are bytes."""

    model: str
    prompt: str
    rest: str | None = None  # "int8" or "int4"; None: exact
    budget: int | None = None  # of device memory for weights; None: what is free
    offload: str | None = "cpu"  # "disk:PATH", "disk" (the model's files); None: the device
    max_new_tokens: int = 64
    lookup: bool = False  # propose tokens from the prompt and the text so far
    kv_budget: int | None = None  # of memory for keys and values; None: all of them in memory
    temperature: float | None = None  # 0: always the likeliest token; None: as the model's kind
    seed: int = 0

    @property
    def folders(self) -> list[str]:
        """The folders of the disk tier; none without one."""
        word, _, paths = (self.offload or "").partition(":")
        return [path for path in paths.split(":") if path] if word == "disk" else []
