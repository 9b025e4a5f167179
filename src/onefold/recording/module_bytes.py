"""Measure what a module's forward leaves in memory until backward: its activations."""

import sys
from collections.abc import Callable
from functools import partial
from threading import get_ident
from typing import Any

import torch
from torch import nn

from onefold.compat import untraced


def has_compiled() -> bool:
    """True after torch.compile in this process: what watches operations would compile again."""
    dynamo = sys.modules.get("torch._dynamo.utils")
    return dynamo is not None and bool(dynamo.counters["frames"])


class _Forward:
    """A forward that runs: the bytes when it began, and what the modules inside have left."""

    def __init__(self, began: int) -> None:
        self.began = began
        self.inside: dict[str, float] = {}


class ModuleBytes:
    """Bytes of torch's allocator that remain when a module's forward returns, by module.

    A module's own bytes are without those of the modules inside it. Where a forward drops what the
    modules inside have left, as with activation checkpointing, theirs are scaled to what remains.
    """

    def __init__(self, read: Callable[[], int]) -> None:
        self.nbytes: dict[str, float] = {}
        self._read = read
        self._calls: list[_Forward] = []
        self._thread = get_ident()
        self._handles: list[Any] = []

    def watch(self, module: nn.Module) -> None:
        """Watch a module and all inside. After a compilation in this process it does nothing.

        A hook more would compile a module again.
        """
        if has_compiled():
            return
        for name, part in module.named_modules():
            self._handles += [
                part.register_forward_pre_hook(self._enter),
                part.register_forward_hook(partial(self._leave, name), always_call=True),
            ]

    def remove(self) -> None:
        """End watching."""
        for handle in self._handles:
            handle.remove()

    def _counts(self) -> bool:
        """True in a forward that trains: not in the one that backward repeats."""
        in_backward = torch._C._current_graph_task_id() != -1
        return torch.is_grad_enabled() and not in_backward and get_ident() == self._thread

    @untraced  # [Note: torch.compile] in engine/hooks.py
    def _enter(self, *_: object) -> None:
        if self._counts():
            self._calls.append(_Forward(self._read()))

    @untraced
    def _leave(self, name: str, *_: object) -> None:
        if not self._calls or not self._counts():
            return
        call = self._calls.pop()
        total, inside = self._read() - call.began, sum(call.inside.values())
        share = min(1.0, max(0, total) / inside) if inside > 0 else 0.0
        found = {part: nbytes * share for part, nbytes in call.inside.items()}
        found[name] = found.get(name, 0.0) + max(0.0, total - inside)
        kept = self._calls[-1].inside if self._calls else self.nbytes
        for part, nbytes in found.items():
            kept[part] = kept.get(part, 0.0) + nbytes
