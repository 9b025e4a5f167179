"""Do ranks of a program take other branches? Plain torch, which computes the rows of all, tells."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

from torch import Tensor, nn

from tests.support.programs.drawing import Drawn
from tests.support.programs.frame import Process


@dataclass
class Traced(Process):
    """The plain process, with the modules that each call of a root calls."""

    calls: list[list[int]] = field(default_factory=list)
    groups: list[tuple[int, int]] = field(default_factory=list)
    depth: int = 0

    def parts(self, batch: Tensor) -> list[Tensor]:
        """The rows of each rank; as many calls follow."""
        parts = super().parts(batch)
        self.groups.append((len(self.calls), len(parts)))
        return parts

    def call(self, original: Callable[..., Any], module: nn.Module, *args: Any, **more: Any) -> Any:
        if self.depth == 0:
            self.calls.append([])
        self.calls[-1].append(id(module))
        self.depth += 1
        try:
            return original(module, *args, **more)
        finally:
            self.depth -= 1


def takes_other_branches(drawn: Drawn) -> bool:
    """True if rows of one rank call other modules, or in another order, than those of another."""
    with tempfile.TemporaryDirectory() as folder:
        process = Traced(drawn.program(), folder, is_plain=True)
        original = nn.Module.__call__

        def call(module: nn.Module, *args: Any, **more: Any) -> Any:
            return process.call(original, module, *args, **more)

        with mock.patch.object(nn.Module, "__call__", call):
            for leg in range(len(drawn.legs)):
                process.run_leg(leg)
    return any(
        calls != process.calls[start]
        for start, number in process.groups
        for calls in process.calls[start : start + number]
    )
