"""Move rows between ranks when state is cut anew: each rank sends only the rows that it gives up.

A piece of a parameter is a few ranges of its elements (`Slot.spans`). Where a range of a rank's old
piece meets a range of another rank's new piece, these elements travel. All rows of a unit that move
to one rank are one message, whatever their dtypes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain

import torch
from torch import Tensor

from onefold.layout.cut import Range
from onefold.layout.rows import Slot
from onefold.unit.context import Context
from onefold.wire.ticket import Ticket

TRAFFIC = "reshare"
"""The name of these bytes in a report."""


@dataclass(frozen=True, slots=True)
class Rows:
    """One tensor of the shape of a parameter's piece: own rows before, and room for those after."""

    old_slot: Slot
    new_slot: Slot
    before: Tensor  # flat
    after: Tensor


def overlaps(old: Sequence[Range], new: Sequence[Range]) -> list[tuple[int, int, int]]:
    """Where two pieces meet: positions in the old and the new piece, and how many elements.

    >>> overlaps([(0, 4), (8, 12)], [(2, 9)])
    [(2, 0, 2), (4, 6, 1)]
    """
    common: list[tuple[int, int, int]] = []
    i = j = at_old = at_new = 0
    while i < len(old) and j < len(new):
        (a, b), (c, d) = old[i], new[j]
        start, stop = max(a, c), min(b, d)
        if start < stop:
            common.append((at_old + start - a, at_new + start - c, stop - start))
        if b <= d:
            i, at_old = i + 1, at_old + b - a
        else:
            j, at_new = j + 1, at_new + d - c
    return common


def move(items: Sequence[Rows], context: Context, name: str) -> int:
    """Fill the rows after from those before, of all ranks; return the bytes sent. A collective.

    `items` come in the same order on every rank. `name`: of the unit, for errors.
    """
    group, device = context.transport.group, context.store.device
    sent: list[list[Tensor]] = [[] for _ in range(group.world_size)]
    targets: list[list[Tensor]] = [[] for _ in range(group.world_size)]
    for item in items:
        if item.new_slot.replicated:
            continue  # every rank has them
        old, new = item.old_slot.spans(group.rank), item.new_slot.spans(group.rank)
        for at, to, numel in overlaps(old, new):
            item.after[to : to + numel].copy_(item.before[at : at + numel])
        for rank in range(group.world_size):
            if rank != group.rank:
                for at, _, numel in overlaps(old, item.new_slot.spans(rank)):
                    sent[rank].append(_bytes(item.before[at : at + numel]).to(device))
                for _, to, numel in overlaps(item.old_slot.spans(rank), new):
                    targets[rank].append(_bytes(item.after[to : to + numel]))
    nothing = torch.empty(0, dtype=torch.uint8, device=device)
    message = torch.cat([nothing, *chain.from_iterable(sent)])
    numels = [sum(map(len, parts)) for parts in targets]
    received = torch.empty(sum(numels), dtype=torch.uint8, device=device)
    work = group.all_to_all(received, message, numels, [sum(map(len, parts)) for parts in sent])
    label = f"reshare of unit {name!r} on {context.where}"
    Ticket(group.track([work], label), label=label).wait()
    places = list(chain.from_iterable(targets))
    for target, part in zip(places, received.split([len(p) for p in places]), strict=True):
        target.copy_(part)
    context.ledger.sent(TRAFFIC, len(message))
    return len(message)


def _bytes(flat: Tensor) -> Tensor:
    """The bytes of a stretch of a flat tensor, as a view."""
    return flat.view(torch.uint8)
