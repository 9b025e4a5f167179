"""The memory in which the means of a unit's gradients rest."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from onefold.layout.cut import Range
from onefold.layout.ledger import Kind
from onefold.layout.rows import split_at
from onefold.unit.buffer import Buffer
from onefold.unit.spec import UnitSpec


@dataclass(frozen=True, slots=True)
class MeanRows:
    """The memory at rest of some parameters' means."""

    flat: Tensor  # the unit's buffer of reduced gradients
    rows: list[Tensor]  # of each parameter, flat
    fresh: list[bool]  # True: the mean replaces the rows; False: it is added to them


class MeanBuffer:
    """One flat buffer with a row for each parameter. It has its bytes while there are gradients."""

    def __init__(self, spec: UnitSpec, spans: Sequence[Range], *, keeps_bytes: bool) -> None:
        """`spans`: own rows of each parameter; `keeps_bytes`: from one step to the next."""
        self._spec = spec
        self._numels = split_at(spans, spec.rest.shard_numels[spec.context.rest_rank])
        self._keeps_bytes = keeps_bytes
        self._buffer: Buffer | None = None
        self._gaps: Tensor | None = None  # int64: elements that no reduction writes

    @property
    def held(self) -> Buffer | None:
        """The buffer, if it has its bytes."""
        buffer = self._buffer
        return buffer if buffer is not None and buffer.is_held else None

    def allocate(self) -> tuple[Tensor, Sequence[Tensor]]:
        """Give the buffer its bytes, if it has none; return it and its rows, all flat."""
        context, buffer = self._spec.context, self._buffer
        if buffer is None or not buffer.is_held:
            if buffer is None:
                buffer = self._buffer = Buffer(
                    sum(self._numels), self._spec.dtype, Kind.GRAD, context.store, context.ledger,
                    is_brief=not self._keeps_bytes,
                )  # fmt: skip
            buffer.reallocate()
            if self._gaps is None:
                gaps = self._spec.rest.gaps(context.rest_rank)
                self._gaps = torch.tensor(gaps, dtype=torch.int64, device=context.store.device)
            buffer.tensor.index_fill_(0, self._gaps, 0)  # optimizers read gaps, too
        return buffer.tensor, buffer.parts(self._numels)[1::2]

    def row(self, index: int) -> Tensor:
        """The flat row of one parameter."""
        assert self._buffer is not None, "a reduced gradient is used before it has a buffer"
        return self._buffer.parts(self._numels)[2 * index + 1]

    def free(self) -> None:
        """No `.grad` shows a row any more: free the bytes, unless the next backward needs them.

        Where a user kept a gradient, the buffer is the user's from now on.
        """
        if self._buffer is not None and self._buffer.num_users > 1:
            self._buffer = None
        elif self._buffer is not None and not self._keeps_bytes:
            self._buffer.release()

    def hand_over(self) -> None:
        """Leave the bytes to a step that reads them."""
        self._buffer = None
