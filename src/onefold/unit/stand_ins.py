"""StandIns: what `.grad` shows of a sum that is not a mean yet, between micro-batches.

A partial gradient shows itself, wrapped. A sum that rests in a node, or is under way, has an object
that refuses to be read. Either way users who clear or replace `.grad` are noticed.
"""

from collections.abc import Container, Iterable, Mapping

from torch import Tensor

from onefold.unit import refusals
from onefold.unit.parameter import UnitParameter
from onefold.unit.shown_grads import NoMean


class StandIns:
    """The `.grad` of a unit's parameters whose sums go on. Callers disable torch functions."""

    def __init__(self) -> None:
        self.shown: dict[UnitParameter, Tensor] = {}  # read only, elsewhere
        self._own: set[UnitParameter] = set()  # of these, what was made here: the rest are means

    def show(self, parameter: UnitParameter, stand_in: Tensor | None) -> None:
        """Note what `.grad` shows; if there is a `stand_in`, have it show that."""
        if stand_in is not None:
            parameter.sharded._grad = stand_in
            self._own.add(parameter)
        self.shown[parameter] = parameter.sharded._grad  # type: ignore[assignment]

    def show_partial(self, parameter: UnitParameter, grad: Tensor) -> None:
        """Show a partial gradient [all rows], unless a mean of earlier micro-batches is shown."""
        if parameter.unsharded is not parameter.sharded:
            is_free = parameter.sharded._grad is None
            self.show(parameter, parameter.wrap_partial(grad) if is_free else None)

    def take_back(self, means: Mapping[UnitParameter, Tensor], *, are_sent: bool = False) -> None:
        """Show none but `means`; of sums that `are_sent`, that they are lost until they land."""
        for parameter in self._own:
            shown = self.shown[parameter]
            if parameter.sharded._grad is shown and shown is not means.get(parameter):
                parameter.sharded._grad = parameter.lost_mean if are_sent else None
        self.clear()

    def cleared(self, partial: Iterable[UnitParameter], where: str) -> list[UnitParameter]:
        """Forget, and return, the parameters whose `.grad` users cleared.

        A `.grad` that they made from a stand-in of `partial` becomes the partial gradient. Another
        in the place of a stand-in stays, and means add to it. One in the place of a mean of earlier
        micro-batches raises `StateError`.
        """
        replaced = [p for p, shown in self.shown.items() if p.sharded._grad is not shown]
        cleared = [p for p in replaced if not self._take_assigned(p, partial, where)]
        for parameter in cleared:
            del self.shown[parameter]
            self._own.discard(parameter)
        return cleared

    def _take_assigned(
        self, parameter: UnitParameter, partial: Iterable[UnitParameter], where: str
    ) -> bool:
        assigned = parameter.sharded._grad
        if assigned is not None and parameter not in self._own:
            raise refusals.REPLACED_SUM(parameter.fqn, where=where)
        values = None if assigned is None else parameter.unwrap_partial(assigned)
        if values is None or parameter not in partial:
            return False
        parameter.sharded._grad = None
        parameter.set_partial_grad(values)
        self.show_partial(parameter, values)
        return True

    def check(self, grads: Mapping[UnitParameter, Tensor], means: Container[UnitParameter]) -> None:
        """Raise `StateError` if a gradient stands for a sum that is lost."""
        for parameter, shown in grads.items():
            if isinstance(shown, NoMean) and not (parameter in self.shown or parameter in means):
                shown.refuse()

    def clear(self) -> None:
        """Forget all; `.grad` stays as it is."""
        self.shown.clear()
        self._own.clear()
