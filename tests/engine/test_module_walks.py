"""Sharding a module reads its tree a few times, not once for each question."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

import onefold
from onefold.config import Precision
from tests.support.ranks import run_ranks, seeded

MOST_PASSES = 4
MOST_WITH_FROZEN = 5  # units are planned again once frozen weights are quantized


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 8), nn.Linear(8, 4)
        self.register_buffer("scale", torch.ones(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.second(self.first(x)) * self.scale


def model() -> nn.Sequential:
    return nn.Sequential(
        nn.Linear(4, 4), nn.ModuleList([Block() for _ in range(4)]), nn.Linear(4, 4)
    )


@pytest.mark.parametrize("choices", [{"stage": 1}, {}, {"precision": Precision(frozen="int8")}])
def test_shard_passes_over_the_module_tree_at_most_four_times(choices, monkeypatch):
    """A walk over a block counts as a part of a pass; `modules` and `parameters` walk, too."""
    visits: Counter[int] = Counter()
    original: Any = nn.Module.named_modules

    def counted(self: nn.Module, memo: Any = None, *args: Any, **kwargs: Any) -> Iterator[Any]:
        for entry in original(self, memo, *args, **kwargs):
            visits[threading.get_ident()] += memo is None  # else it is a part of a walk
            yield entry

    def body(rank: int) -> None:
        module = seeded(model)
        module[0].requires_grad_(False)
        optimizer = torch.optim.AdamW([p for p in module.parameters() if p.requires_grad])
        num_modules = len(list(module.modules()))
        visits[threading.get_ident()] = 0
        onefold.shard(module, optimizer, **choices)
        most = MOST_WITH_FROZEN if choices.get("precision") else MOST_PASSES
        assert 1 <= visits[threading.get_ident()] / num_modules <= most

    monkeypatch.setattr(nn.Module, "named_modules", counted)
    run_ranks(3, body)
