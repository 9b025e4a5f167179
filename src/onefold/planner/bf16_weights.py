"""The same way to train with weights in bf16: what it needs compared with fp32 weights."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from onefold.planner.search import Row, Search
from onefold.planner.trace import Trace
from onefold.recipe import Member
from onefold.text import format_bytes

LEAST_SHARE = 0.01
"""A smaller part of a device's bytes is not worth a line."""


@dataclass(frozen=True, slots=True)
class BF16Weights:
    """Bytes by place of bf16 weights with fp32 masters, and of fp32 weights computing in bf16."""

    needs: dict[str, int]
    needs_now: dict[str, int]

    @property
    def saved(self) -> int:
        """Bytes of a device."""
        return self.needs_now["device"] - self.needs["device"]

    def line(self, how: str) -> str:
        """Say what is saved; `how` to load such weights."""
        places = {"host": "host memory", "disk": "disk"}
        more = {place: self.needs[place] - self.needs_now[place] for place in places}
        words = [f"{format_bytes(n)} more {places[place]}" for place, n in more.items() if n > 0]
        also = f", and {' and '.join(words)} of a node" if words else ""
        return (
            f"weights loaded in bf16 need {format_bytes(self.needs['device'])} of a device with "
            f"their fp32 masters, {format_bytes(self.saved)} less than fp32 weights with "
            f'precision="bf16"{also}: {how}'
        )


def bf16_weights(search: Search, row: Row) -> BF16Weights | None:
    """Return what bf16 weights would need at `row`; None where they save nothing.

    That is where weights are narrow, or do not compute in bf16, or where gradients and masters in
    fp32 take what is saved. Clusters of several kinds and model axes are not compared.
    """
    if search.axes.are_used or search.kinds:
        return None
    if not any(_is_wide(member) for unit in search.one_row.units for member in unit.members):
        return None
    search = replace(search, wires=(row.wire,))
    two = search.two_rows
    narrow = replace(
        search, one_row=narrowed(search.one_row), two_rows=None if two is None else narrowed(two)
    )
    both = [each.row(row.stage, row.offload, row.rows).needs for each in (narrow, search)]
    found = BF16Weights(*both)
    return found if found.saved > LEAST_SHARE * found.needs_now["device"] else None


def narrowed(trace: Trace) -> Trace:
    """Return the same micro-batch with bf16 weights: activations are those of the compute dtype."""
    units = [
        replace(
            unit,
            members=tuple(
                replace(member, dtype=torch.bfloat16) if _is_wide(member) else member
                for member in unit.members
            ),
        )
        for unit in trace.units
    ]
    return replace(trace, units=tuple(units))


def _is_wide(member: Member) -> bool:
    return member.dtype == torch.float32 and member.compute_dtype == torch.bfloat16
