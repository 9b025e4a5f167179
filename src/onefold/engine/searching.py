"""The closure of an optimizer that searches by its loss, as LBFGS does, on several ranks."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from onefold.wire.collectives import Group


def share_losses(
    group: Group, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    """Let a step's closure return the mean loss of all ranks, so that all search alike."""
    optimizer, *rest = args
    closure = rest[0] if rest else kwargs.get("closure")
    if closure is None or group.world_size == 1:
        return None

    def mean_loss() -> Tensor:
        with torch.enable_grad():
            loss = torch.as_tensor(closure()).detach()
        return group.all_reduced(loss) / group.world_size

    return (optimizer, mean_loss), {k: v for k, v in kwargs.items() if k != "closure"}
