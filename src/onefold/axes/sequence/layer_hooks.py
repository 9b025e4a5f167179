"""Enter the split attention in a module's forward, and where backward runs parts of it again.

[Note: recompute] Activation checkpointing runs parts of the forward inside backward, outside of
the root's forward. So each module that may hold attention enters the mode there, if no module
around it has. A recomputed function that calls attention in no module would not: torch's check of
recomputed shapes ends it with an error.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from onefold.axes.sequence.attention import AttentionMode, SplitAttention
from onefold.engine.watch import in_backward


class _Entered(threading.local):
    """The module whose forward entered the mode on this thread, and how often."""

    owner: nn.Module | None = None
    depth = 0


class AttentionHooks:
    """Enter and leave the mode; its hooks take no part in graphs."""

    def __init__(self, attention: SplitAttention) -> None:
        self._mode = AttentionMode(attention)
        self._entered = _Entered()

    def enter(self, module: nn.Module) -> None:
        """Enter the mode, unless a module around this one has."""
        state = self._entered
        if state.owner is None:
            self._mode.__enter__()
            state.owner = module
        state.depth += state.owner is module

    def leave(self, module: nn.Module) -> None:
        """Leave it with the module that has entered it, also where its forward failed."""
        state = self._entered
        if state.owner is module:
            state.depth -= 1
            if state.depth == 0:
                state.owner = None
                self._mode.__exit__(None, None, None)

    def install(self, root: nn.Module) -> Iterator[RemovableHandle]:
        """Hook the parts that may hold attention; the root is hooked by the caller."""
        for module in root.modules():
            if module is not root and not _is_plain_leaf(module):
                yield module.register_forward_pre_hook(self._before)
                yield module.register_forward_hook(self._after, always_call=True)

    @torch._disable_dynamo
    def _before(self, module: nn.Module, _: Any) -> None:
        if in_backward():
            self.enter(module)

    @torch._disable_dynamo
    def _after(self, module: nn.Module, *_: Any) -> None:
        self.leave(module)


def _is_plain_leaf(module: nn.Module) -> bool:
    """True for torch's own layers, which call no attention."""
    return type(module).__module__.startswith("torch.nn.") and not any(module.children())
