"""The rows of one unit that this rank exchanges with other islands.

Where states are sharded these are the rank's own rows. At stage 0 every rank has all rows. Then
each exchanges a part, cut as stage 1 would cut it, and the ranks of the island gather the result.
Frozen parameters have no part in it.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from onefold.layout.cut import Cut
from onefold.layout.rows import PIECE_NUMEL, round_up
from onefold.outer.parcels import ShareRows
from onefold.unit.parameter import UnitParameter
from onefold.unit.unit import Unit
from onefold.wire.ticket import Ticket

ValuesOf = Callable[[UnitParameter], Tensor | None]
"""A parameter's values as this rank holds them: own rows, or all rows at stage 0."""


class Share:
    """This rank's rows of one unit's trainable parameters, as one flat tensor on the CPU."""

    def __init__(self, unit: Unit) -> None:
        context = unit.context
        self.unit, self._rank, self._world_size = unit, context.rank, context.world_size
        self.parameters = [p for p in unit.parameters if _is_exchanged(p)]
        self.dtype = torch.promote_types(unit.stepped.dtype, torch.float32)
        self._is_gathered = not context.is_sharded and context.world_size > 1
        self.rows, self._numels = list[ShareRows](), [0] * context.world_size
        for parameter in self.parameters:
            cut = self._cut(parameter)
            self.rows.append(ShareRows(cut, self._numels[context.rank]))
            for rank in range(context.world_size):
                self._numels[rank] += round_up(cut.piece_numel(rank), PIECE_NUMEL)

    @property
    def numel(self) -> int:
        """Elements of the flat tensor, gaps included."""
        return self._numels[self._rank]

    def _cut(self, parameter: UnitParameter) -> Cut:
        cut = self.unit.spec.wire.slots[parameter.index].cut
        assert cut is not None, "a parameter has a shape"
        return cut

    def collect(self, values_of: ValuesOf) -> Tensor:
        """Copy this rank's rows of each parameter: [numel] of `dtype`, zeros where it has none."""
        flat = torch.zeros(self.numel, dtype=self.dtype)
        for parameter, rows in zip(self.parameters, self.rows, strict=True):
            values = values_of(parameter)
            if values is not None:
                own = rows.cut.own_view(values, self._rank) if self._is_gathered else values
                flat[rows.offset : rows.offset + own.numel()].copy_(own.reshape(-1))
        return flat

    def spread(self, flat: Tensor, values_of: ValuesOf, keep: float = 0.0) -> None:
        """Write rows back to each parameter, at stage 0 on all ranks of the island (a collective).

        `keep` is the share of the old values that stays.
        """
        flats = self._gathered(flat) if self._is_gathered else {self._rank: flat}
        for rank, of_rank in flats.items():
            at = 0
            for parameter, rows in zip(self.parameters, self.rows, strict=True):
                start, numel = at, rows.cut.piece_numel(rank)
                at += round_up(numel, PIECE_NUMEL)
                values = values_of(parameter)
                if values is None:
                    continue
                place = rows.cut.own_view(values, rank) if self._is_gathered else values
                new = of_rank[start : start + numel].to(place.device).view(place.shape)
                if keep:
                    new = place.to(new).mul_(keep).add_(new, alpha=1 - keep)
                place.copy_(new)

    def _gathered(self, flat: Tensor) -> dict[int, Tensor]:
        """The rows of all ranks of the island."""
        group, device = self.unit.context.transport.group, self.unit.stepped.device
        flats = {
            rank: flat.to(device) if rank == self._rank else flat.new_empty(numel, device=device)
            for rank, numel in enumerate(self._numels)
            if numel
        }
        works = [group.broadcast(each, rank) for rank, each in flats.items()]
        nbytes = (self._world_size - 1) * flat.nbytes
        self.unit.context.ledger.sent("islands inside", nbytes)
        Ticket(works, label=f"gather of averaged rows of {self.unit.name!r}").wait()
        return flats


def _is_exchanged(parameter: UnitParameter) -> bool:
    dtype = parameter.unit.stepped.dtype
    is_number = dtype.is_floating_point or dtype.is_complex
    with torch._C.DisableTorchFunctionSubclass():
        is_trained = parameter.sharded.requires_grad
    return bool(parameter.places) and is_trained and is_number and not parameter.spec.is_packed
