"""How the message of a gather is cut, and where own rows and tags lie in it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from onefold.layout.cut import Range
from onefold.layout.rows import Slot, split_at
from onefold.unit.weights import UnitWeights
from onefold.wire.cut import MessageLayout


def tags_of(world_size: int) -> Slot:
    """The region of a message in which each rank has one element; it carries no state."""
    return Slot("", (world_size,), 0, tuple((rank, rank + 1) for rank in range(world_size)), ())


@dataclass(frozen=True, slots=True)
class GatherPlan:
    """One hop's message: how it is cut, and where own rows and tags lie in it."""

    layout: MessageLayout | None  # None: a world of one
    message: list[int]  # splits the message at own rows, then at the tags (`split_at`)
    shard: list[int]  # splits the shard at the same rows
    own_tag: int
    coded: list[int]  # numbers of the rows that a coding transport codes
    exact: list[int]  # numbers of the other rows

    @staticmethod
    def of(
        layout: MessageLayout | None, tags: Range, own_tag: int, starts: Sequence[int],
        slots: Sequence[Slot], weights: UnitWeights,
    ) -> GatherPlan:  # fmt: skip
        """Plan a message that has own rows of `slots` from `starts` on, and tags at its end."""
        rank = weights.context.rest_rank
        numels = [slot.piece_numel(rank) for slot in slots]
        near = [slot.shard_offsets[rank] for slot in slots]
        at, shard = (
            [(start, start + numel) for start, numel in zip(these, numels, strict=True)]
            for these in (starts, near)
        )
        return GatherPlan(
            layout,
            split_at([*at, tags], tags[1]),
            split_at(shard, len(weights.weight.tensor)),
            own_tag,
            [number for number, slot in enumerate(slots) if not slot.replicated],
            [number for number, slot in enumerate(slots) if slot.replicated],
        )
