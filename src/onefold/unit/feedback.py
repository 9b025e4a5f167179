"""What coded gradients have rounded off, kept by whoever sent them, for the next message.

    message = code(gradient + owed)         owed = gradient + owed - what was read of the message

However many steps there are, what was read then sums to all gradients but for what is owed last:
rounding delays, it does not lose. Every hop that codes has its own: this rank's messages to others.

Owed is what was rounded off gradients that were stepped by. It is forgotten with gradients that are
not: cleared without a step, dropped with their backward, not finite (what is left of those may be
as large as anything), and where weights were read anew. A rank that did not use a parameter sends
zeros for it and owes what it owed: nobody may read them.

Sources: 1-bit SGD (Seide et al., Interspeech 2014, section 3), which named it; EF-SGD (Karimireddy
et al., arXiv 1901.09847, section 4), which shows that it converges as without rounding.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

import torch

from onefold.ledger import Kind
from onefold.unit.buffer import Buffer
from onefold.wire.transport import ErrorFeedback

if TYPE_CHECKING:
    from onefold.unit.context import Context
    from onefold.unit.parameter import UnitParameter

Region = tuple["UnitParameter", int] | None
"""Of a message: which parameter, and which of its regions; None for what is not fed back now."""


class Feedback:
    """What a unit's messages owe, fp32: made with the first of them that is coded."""

    def __init__(self, setting: Context) -> None:
        self._setting = setting
        self._owed: dict[tuple[UnitParameter, str, int], Buffer] = {}

    def of(self, hop: str, regions: Sequence[Region]) -> ErrorFeedback | None:
        """What a transport asks for the `regions` of a message; None where nothing is fed back."""
        if not self._setting.routes.feeds_back:
            return None

        def owed(index: int, numel: int) -> torch.Tensor | None:
            region = regions[index]
            if region is None:
                return None
            parameter, part = region
            key = (parameter, hop, part)
            if key not in self._owed:
                store, ledger = self._setting.store, self._setting.ledger
                self._owed[key] = Buffer(numel, torch.float32, Kind.FEEDBACK, store, ledger)
                self._owed[key].tensor.zero_()
            return self._owed[key].tensor

        return owed

    def forget(self, parameters: Iterable[UnitParameter]) -> None:
        """Owe nothing for them."""
        forgotten = set(parameters)
        for key in [key for key in self._owed if key[0] in forgotten]:
            del self._owed[key]
