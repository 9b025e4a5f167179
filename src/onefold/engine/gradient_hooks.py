"""Run the users' post-accumulate hooks of sharded parameters, also those that step an optimizer.

Autograd never meets a sharded parameter, and a reduction lands at another moment on each rank. So
hooks wait for the end of the backward: then no unit needs its weights, nothing is under way, and a
collective in a hook meets those of other ranks. They run from the last unit to the first, within a
unit in the order of its parameters. As with autograd, a hook sees its own gradient and those whose
hooks have run. Gradients whose hooks follow show as None until then.

In one process modules may compute with the parameters that users see. There autograd itself calls
the hooks, and a step in one of them changes weights inside the backward.
"""

from collections.abc import Callable, Iterable, Sequence

import torch

from onefold.engine.schedule import Schedule
from onefold.engine.watch import in_backward
from onefold.unit import refusals, user_hooks
from onefold.unit.parameter import UnitParameter
from onefold.unit.unit import Unit, unit_of


class GradientHooks:
    """The hooks of one module that wait for their turn."""

    def __init__(self) -> None:
        self.due: dict[UnitParameter, None] = {}
        self.turn: UnitParameter | None = None  # whose hooks run now
        self._is_early = False  # onefold steps their unit next, inside the backward
        self._turns: dict[Unit, int] = {}  # of the units whose hooks run
        self._hooked: set[UnitParameter] = set()
        self.edits: dict[int, int] = {}  # by unit, before a step in backward

    def forget(self) -> None:
        """Backward has failed."""
        self.due.clear()
        self.edits.clear()

    def run_due(self, units: Sequence[Unit]) -> None:
        """Run all hooks that are due, if there are some: the backward is over."""
        self._turns = {unit: turn for turn, unit in enumerate(reversed(units))}
        self._run_hooked(sorted(self.due, key=lambda p: (self._turns[unit_of(p)], p.index)))

    def run_early(self, unit: Unit) -> None:
        """Run the hooks of a unit that backward steps next."""
        self._is_early = True
        try:
            self._run_hooked([parameter for parameter in unit.parameters if parameter in self.due])
        finally:
            self._is_early = False

    def _run_hooked(self, hooked: Sequence[UnitParameter]) -> None:
        self._hooked = set(hooked)
        for parameter in hooked:
            del self.due[parameter]
            unit_of(parameter).gradient.held_back.hold(parameter)
        try:
            for parameter in hooked:
                self.turn = parameter
                unit_of(parameter).gradient.held_back.show(parameter)
                with torch.no_grad():
                    user_hooks.call(parameter)
        finally:
            self.turn = None
            for parameter in hooked:  # after an error
                unit_of(parameter).gradient.held_back.show(parameter)
            self._hooked.clear()
            self._turns.clear()

    # a step in a hook

    def begin_step(
        self, held: Callable[[], Iterable[UnitParameter]], units: Sequence[Unit], schedule: Schedule
    ) -> bool:
        """An optimizer with the parameters `held` steps; True: inside a backward, till `end_step`.

        Raises `StateError` if its gradients are not complete.
        """
        if self.turn is not None:
            self._check_turn(held(), self.turn)
        if not (schedule.is_backward and in_backward()):
            return False
        index = {unit: number for number, unit in enumerate(units)}
        own = [parameter for parameter in held() if unit_of(parameter) in index]
        for parameter in own:
            unit, where = unit_of(parameter), parameter.spec.context.where
            if not parameter.spec.computes_on_sharded:
                raise refusals.STEP_INSIDE(parameter.fqn, where=where)
            has_arrived = schedule.reductions.has_arrived(index[unit], id(parameter))
            if _shows(parameter) and not has_arrived:
                raise refusals.STEPPED_TOO_EARLY(parameter.fqn, "of another parameter", where=where)
        for unit in dict.fromkeys(unit_of(parameter) for parameter in own):
            unit.check_untouched()
            unit.refresh_master()
            self.edits[index[unit]] = unit.edits.at_rest()
        return True

    def _check_turn(self, held: Iterable[UnitParameter], turn: UnitParameter) -> None:
        """Raise `StateError` if the hook of `turn` steps parameters too early.

        Of a hook that is still to come, a gradient from before this backward is a part of a sum.
        Without a hook, autograd would bring the gradients of units that follow after the step.
        """
        where = turn.spec.context.where
        if self._is_early:
            raise refusals.STEP_INSIDE(turn.fqn, where=where)
        now = self._turns[unit_of(turn)]
        for parameter in held:
            gradient = unit_of(parameter).gradient
            is_early = parameter in gradient.held_back and parameter in gradient.earlier
            if parameter not in self._hooked and self._turns.get(unit_of(parameter), now) > now:
                is_early = _shows(parameter) and not gradient.is_unused
            if is_early:
                raise refusals.STEPPED_TOO_EARLY(parameter.fqn, f"of {turn.fqn!r}", where=where)

    def end_step(self, units: Sequence[Unit], schedule: Schedule) -> None:
        """The step that `edits` tells of is over: backward is through with its weights."""
        edits, self.edits = self.edits, {}
        for index, before in edits.items():
            for call in schedule.open_calls.calls_of(index):
                call.note_edits(call.edits + units[index].edits.at_rest() - before)


def _shows(parameter: UnitParameter) -> bool:
    with torch._C.DisableTorchFunctionSubclass():
        return parameter.sharded._grad is not None
