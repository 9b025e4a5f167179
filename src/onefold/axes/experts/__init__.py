"""Mixture-of-experts layers whose experts lie on other ranks of an axis.

    experts = onefold.experts.distribute(model, mesh["expert"])
    onefold.shard(model, optimizer, units=dict.fromkeys(experts, mesh["replica"]))

Names are resolved on first use.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from onefold.axes.experts.balance import balance_loss
    from onefold.axes.experts.layer import ExpertParallel, distribute

_HOMES = {
    "ExpertParallel": "onefold.axes.experts.layer",
    "balance_loss": "onefold.axes.experts.balance",
    "distribute": "onefold.axes.experts.layer",
}

__all__ = ["ExpertParallel", "balance_loss", "distribute"]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'onefold.experts' has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return list(__all__)
