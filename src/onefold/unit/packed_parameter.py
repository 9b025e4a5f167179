"""Parameters of packed weights: bytes at rest, in messages and unsharded, and never cast.

PackedParameter      a library's class holds the bytes, or a side table of theirs (bitsandbytes)
QuantizedParameter   bytes of Onefold's own formats, and a DecodedWeight for their numbers
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from weakref import ref

import torch
from torch import Tensor, nn

from onefold.layout import packed
from onefold.layout.units import Owned
from onefold.unit.context import UnitInUse, UnitSpec
from onefold.unit.decoded import DecodedWeight
from onefold.unit.forms import Form, Forms
from onefold.unit.parameter import UnitParameter, take_form
from onefold.unit.quantized_bytes import QuantizedBytes


def class_of(owned: Owned) -> type[UnitParameter]:
    """The class for a parameter, by what it holds."""
    if isinstance(owned.parameter, packed.QuantizedWeight):
        return QuantizedParameter
    return PackedParameter if owned.is_packed else UnitParameter


class PackedParameter(UnitParameter):
    """A packed weight of a library, or a side table of one."""

    def __init__(
        self, unit: UnitInUse, spec: UnitSpec, index: int, weight: Tensor, owned: Owned
    ) -> None:
        super().__init__(unit, spec, index, weight, owned)
        self._read_table = None if owned.table is None else owned.table.read
        self.is_table = owned.table is not None
        self._attributes: dict[str, Any] = {}  # that modules expect
        self._library: type[Tensor] = nn.Parameter

    def current(self) -> Tensor | None:
        """See `UnitParameter.current`."""
        return super().current() if self._read_table is None else self._read_table()

    def attributes_on(self, parameter: nn.Parameter) -> dict[str, Any]:
        """What modules expect of each of its forms."""
        return self._attributes

    def build(self, original: nn.Parameter, full: Callable[[int, tuple[int, ...]], Tensor]) -> None:
        """See `UnitParameter.build`."""
        self._library, self._attributes = type(original), packed.attributes_of(original)
        vars(original).update(self._attributes)
        super().build(original, full)

    def _forms_over(self, view: Tensor, stale: Form) -> Forms:
        return Forms(Form.LIBRARY, stale, self._library)

    def plain(self, view: Tensor) -> nn.Parameter:
        """See `UnitParameter.plain`."""
        parameter = super().plain(view)
        take_form(Form.LIBRARY, (parameter,), self._library)
        return parameter


class QuantizedParameter(UnitParameter):
    """A frozen weight that Onefold has quantized: reading its numbers is all that users may do."""

    _numbers: DecodedWeight

    def attributes_on(self, parameter: nn.Parameter) -> dict[str, Any]:
        """What modules expect of each of its forms."""
        return self._numbers.attributes if self._numbers.is_multiplied else {}

    def build(self, original: nn.Parameter, full: Callable[[int, tuple[int, ...]], Tensor]) -> None:
        """See `UnitParameter.build`; `original` is a `QuantizedWeight`."""
        assert isinstance(original, packed.QuantizedWeight), "another class was planned for it"
        message = full(self.slot.full_offset, self.slot.shape)
        self.decoded = self._numbers = DecodedWeight(
            original, message, self.spec.context, self.label
        )
        super().build(original, full)

    def _computed(self, view: Tensor) -> Tensor:
        return self._numbers.shown

    def _forms_over(self, view: Tensor, stale: Form) -> Forms:
        is_matrix = self._numbers.is_multiplied
        return Forms(Form.MATRIX, stale) if is_matrix else super()._forms_over(view, stale)

    def plain(self, view: Tensor) -> nn.Parameter:
        """The numbers of the bytes in `view`, in memory of their own."""
        return nn.Parameter(self._numbers.plain(view), requires_grad=False)

    def rows_of(self, plain: Tensor | None) -> Tensor | None:
        """Own rows of the message of numbers; see `UnitParameter.rows_of`."""
        if plain is not None and plain.shape == self._numbers.shape:
            plain = self._numbers.message_of(plain)
        return super().rows_of(plain)

    # edits: refused

    @property
    def shown_local(self) -> Tensor:
        """Own rows, which refuse edits."""
        return self._guarded(self.local)

    def _guarded(self, own: Tensor) -> Tensor:
        return QuantizedBytes.over_view(own, tuple(self.local.shape), ref(self))

    def shown_sharded(self) -> Tensor:
        """The sharded parameter as a tensor that refuses edits."""
        if self.is_dtensor:
            return self.sharded
        with torch._C.DisableTorchFunctionSubclass():  # a detached tensor shares its version
            return self._guarded(self.sharded.detach())

    def detached(self) -> Tensor:
        """See `UnitParameter.detached`."""
        return super().detached() if self.is_dtensor else self.shown_sharded()

    def note_unsharded_data(self) -> None:
        """Reading `.data` begins no edit."""

    def keep_edits(self) -> None:
        """Refuse edits that a forward made to numbers."""
        self.unit.forget_edit(self)  # said once
        raise self.touched("an edit of quantized numbers in a forward")
