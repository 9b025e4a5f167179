"""Execute a schedule's actions on the units of one module: tensors, messages, background steps.

See docs/adr/0017.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Protocol
from weakref import WeakSet

import torch
from torch._C._functorch import peek_interpreter_stack
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack
from torch.optim import Optimizer
from torch.utils._python_dispatch import (
    _disable_current_modes,
    _get_current_dispatch_mode_stack,
)

from onefold.engine.driving import Action, Verb
from onefold.engine.forward_threads import OF_THREAD
from onefold.engine.gradient_hooks import GradientHooks
from onefold.engine.policy import UnitFacts
from onefold.engine.schedule import Schedule
from onefold.unit import refusals
from onefold.unit.parameter import UnitParameter
from onefold.unit.shortage import explain
from onefold.unit.unit import Unit
from onefold.wire.ticket import Ticket


class Stepper(Protocol):
    """An optimizer's binding, as the engine knows it."""

    @property
    def optimizer(self) -> Optimizer | None:
        """The optimizer, while it is alive."""
        ...

    def step_early(self, unit: Unit) -> bool:
        """Begin to step the parameters of a unit that the optimizer holds; False if none has to."""
        ...

    def recover(self) -> None:
        """Undo a step that raised, if one did."""
        ...

    def held(self) -> list[UnitParameter]:
        """Return the sharded parameters that the optimizer holds."""
        ...


class Executor:
    """Does to each unit what a schedule's actions say."""

    def __init__(
        self, schedule: Schedule, units: Sequence[Unit], free_wire: Callable[[], None]
    ) -> None:
        """`free_wire` frees the buffers that transports keep for their next message."""
        self.schedule = schedule
        self.units = units
        self.free_wire = free_wire
        self.steppers: WeakSet[Stepper] = WeakSet()
        self._early: WeakSet[Stepper] = WeakSet()  # the last backward has stepped for these
        self._owing: WeakSet[Stepper] = WeakSet()  # so it has, and only others' `step` came since
        self._tickets: dict[int, Ticket] = {}  # of reductions, by unit
        self.hooks = GradientHooks()

    def do(self, actions: Sequence[Action]) -> None:
        """Execute actions in order. Where one raises, the rest are skipped.

        A forward in a thread of its own has its driver do so: the group of ranks may belong to it.
        Selective checkpointing sees none of it: recompute would want the same gathers again.
        """
        if not actions:
            return
        if torch._C._len_torch_dispatch_stack() and _counts_for_recompute():
            with _disable_current_modes():
                self.do(actions)
            return
        thread = OF_THREAD.forward
        if thread is not None:
            thread.ask(partial(self._execute, actions))
        elif peek_interpreter_stack() is None:  # no transform of torch.func
            self._execute(actions)
        else:
            with temporarily_clear_interpreter_stack():  # else buffers would end with a transform
                self._execute(actions)

    def _execute(self, actions: Iterable[Action]) -> None:
        verb, index, is_recording = Verb.REST, -1, torch.is_grad_enabled()
        torch._C._set_grad_enabled(False)  # no graph records what is moved
        try:
            for verb, index in actions:
                of_unit = _OF_UNIT.get(verb)
                if of_unit is None:
                    _METHODS[verb](self, index)
                else:
                    of_unit(self.units[index])
        except BaseException as error:
            unit = self.units[index]
            explain(error, unit.context.ledger, f"{verb.name.lower()} of unit {unit.name!r}")
            self.schedule.lost(index)
            raise
        finally:
            torch._C._set_grad_enabled(is_recording)

    def has_landed(self, index: int) -> bool:
        """True if the first hop of the unit's reduction is over."""
        ticket = self._tickets.get(index)
        return ticket is not None and ticket.done

    def drain(self) -> None:
        """Wait for reductions whose wait was interrupted: other ranks take part in them."""
        for index in list(self._tickets):
            self._land(index)

    def take_stepped(self, stepper: Stepper | None = None) -> set[int]:
        """Return the units that backward has stepped; their gradients may be read again.

        `stepper` calls `step` now; without one, backward has failed or weights were loaded. Others
        for which backward has stepped have to follow before the next backward.
        """
        self._owing.update(self._early)
        self._early.clear()
        if stepper is None:
            self._owing.clear()
        else:
            self._owing.discard(stepper)
        stepped = self.schedule.early_steps.take_stepped()
        for index in stepped:
            self.units[index].gradient.end_step()
        return stepped

    def check_stepped(self) -> None:
        """Raise `StateError` if backward stepped for an optimizer that has not stepped since."""
        if self._owing:
            unit = self.units[0]
            raise refusals.STEPPED_FOR_BOTH(unit.name, where=unit.context.where)

    def _fill(self, index: int) -> None:
        self.units[index].gather.begin_early(is_unsharded=self.schedule.driven.is_suspended)

    def _reduce(self, index: int) -> None:
        self._tickets[index] = self.units[index].gradient.start_reduce()

    def _land(self, index: int) -> None:
        ticket = self._tickets.get(index)
        if ticket is not None:
            ticket.wait()
            del self._tickets[index]

    def _finish(self, index: int) -> None:
        self.units[index].gradient.end_following()

    def _rest(self) -> None:
        """Nothing is under way: the host may wait once for the device."""
        for unit in self.units:
            unit.gradient.show_late()
        self.free_wire()

    def _step(self, index: int) -> None:
        unit, steppers = self.units[index], list(self.steppers)
        unit.gradient.show_late()
        if self.hooks.due:
            self.hooks.run_early(unit)
        if not steppers or unit.gradient.is_unused:
            self.schedule.early_steps.skip(index)
            return
        self.check_stepped()
        unit.join_step()
        unit.refresh_master()
        self._early.update([stepper for stepper in steppers if stepper.step_early(unit)])
        unit.gradient.consume()


class Arrivals:
    """The gradients of one unit that are not counted yet, as work for each would be felt.

    Autograd announces every gradient. Between the first and the last one of a unit there is nothing
    to decide where no message is under way, no gather waits for a gradient, and nobody else counts
    bytes meanwhile. Then all but the last are only collected here.
    """

    def __init__(self, schedule: Schedule, executor: Executor, index: Mapping[object, int]) -> None:
        """`index`: numbers of units in the schedule."""
        self._schedule, self._executor, self._index = schedule, executor, index
        self._may_wait = False  # in this backward
        self._unit: Unit | None = None
        self._parameters: dict[UnitParameter, None] = {}
        self._num_needed = 0  # gradients of the unit that this backward still brings

    def begin(self, *, is_watched: bool) -> None:
        """A backward begins. `is_watched`: somebody looks, or counts, between two gradients."""
        is_logged = self._schedule.open_calls.event_log.is_open
        is_offloaded = any([unit.steps_in_blocks for unit in self._executor.units])
        self._may_wait = not (is_watched or is_logged or is_offloaded)

    def add(self, parameter: UnitParameter, unit: Unit) -> None:
        """Autograd has accumulated a gradient."""
        schedule, reductions = self._schedule, self._schedule.reductions
        is_quiet = self._may_wait and reductions.may_land is None and not schedule.late
        if not is_quiet and self._unit is None:
            self._count(unit, [parameter])
            return
        if unit is not self._unit:
            self.count()
            self._unit, self._num_needed = unit, reductions.num_missing(self._index[unit])
        self._parameters[parameter] = None
        if not is_quiet or len(self._parameters) >= self._num_needed:
            self.count()

    def count(self) -> None:
        """Count what has arrived, and act on it."""
        unit, parameters = self._take()
        if unit is not None:
            self._count(unit, parameters)

    def note(self) -> None:
        """Count what has arrived: its backward has failed."""
        unit, parameters = self._take()
        if unit is not None:
            unit.gradient.partial.note(parameters)

    def _take(self) -> tuple[Unit | None, list[UnitParameter]]:
        unit, parameters = self._unit, [*self._parameters]
        self._unit = None
        self._parameters.clear()
        return unit, parameters

    def _count(self, unit: Unit, parameters: Sequence[UnitParameter]) -> None:
        schedule, executor = self._schedule, self._executor
        flying = schedule.reductions.may_land
        try:
            if flying is not None and executor.has_landed(flying):
                executor.do(schedule.landed())
        finally:  # a gradient that nobody noted would be added to that of the next backward
            unit.gradient.partial.note(parameters)
        if actions := schedule.gradients(self._index[unit], [*map(id, parameters)]):
            executor.do(actions)


def facts_of(unit: Unit) -> UnitFacts:
    """Return the facts about a unit that a schedule decides by."""
    return UnitFacts(
        nbytes=sum(buffer.tensor.nbytes for buffer in (unit.unsharded, *unit.decoded)),
        is_resident=unit.is_resident,
        is_tiled=unit.is_tiled,
        is_offloaded=unit.steps_in_blocks,
        keeps_sums=unit.context.is_sharded,
    )


_OF_UNIT: Mapping[Verb, Callable[[Unit], None]] = {
    Verb.FETCH: Unit.start_fetch,
    Verb.GATHER: Unit.start_unshard,
    Verb.SHOW: Unit.unshard,
    Verb.HIDE: partial(Unit.reshard, release=False),
    Verb.FREE: partial(Unit.reshard, release=True),
    Verb.INVALIDATE: partial(Unit.reshard, release=True, keeps_bytes=True),
    Verb.KEEP_SUMS: lambda unit: unit.gradient.keep_sums(),
    Verb.FOLLOW: lambda unit: unit.gradient.follow(),
    Verb.WAIT_STEP: Unit.join_step,
}

_METHODS: Mapping[Verb, Callable[[Executor, int], None]] = {
    Verb.FILL: Executor._fill,
    Verb.REDUCE: Executor._reduce,
    Verb.LAND: Executor._land,
    Verb.FINISH: Executor._finish,
    Verb.STEP: Executor._step,
    Verb.REST: lambda executor, _: executor._rest(),
}


def _counts_for_recompute() -> bool:
    """True inside a region of torch's selective checkpointing, which counts every operation."""
    modes = _get_current_dispatch_mode_stack()
    return any(type(mode).__module__ == "torch.utils.checkpoint" for mode in modes)
