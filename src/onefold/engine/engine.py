"""The engine of one sharded module: when each unit is whole, when it rests, when it is reduced.

One step, top to bottom (hooks.py calls these verbs; a pipeline schedule could as well):

    begin_forward           the root's forward starts
      enter(unit)           gather it (usually begun by the one before), begin the next
      leave(unit)           it may rest; at stage 3 its whole weights are freed
    end_forward
    begin_backward          autograd reaches the first unit
      enter_backward(call)  whole again; units used later in forward are done and may rest
      on_grad(parameter)    the last gradient of a unit starts its reduction
    end_backward            autograd is done: reduce what is left, wait, show every gradient
    before_step             everything rests; the optimizer steps shards (engine/optimizer.py)
    after_step              masters are published; the next forward gathers them

Units that are offloaded are stepped in blocks in the background (engine/blocks.py): `step` begins
it, or the end of each unit's own backward does (engine/early_steps.py), and whoever needs a unit
waits.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Set
from typing import Protocol
from weakref import WeakSet, ref

import torch
from torch import nn

from onefold.engine.activations import SavedActivations
from onefold.engine.calls import Call, Marks, in_backward
from onefold.engine.early_steps import EarlyStepper, EarlySteps
from onefold.engine.reducer import Reducer
from onefold.engine.schedule import Phase, Schedule
from onefold.engine.structure import check_structure, edited
from onefold.engine.watch import watch_outputs
from onefold.errors import StateError, expected
from onefold.ledger import Kind
from onefold.unit.context import Context
from onefold.unit.gradient import UnitGradient
from onefold.unit.parameter import UnitParameter
from onefold.unit.unit import Unit


class Stepper(EarlyStepper, Protocol):
    """An optimizer's binding, as the engine knows it."""

    def recover(self) -> None:
        """Undo a step that raised, if one did."""
        ...


class Engine:
    """Runs the units of one sharded module through forward, backward and step."""

    def __init__(
        self, module: nn.Module, units: list[Unit], setting: Context, *, stage: int,
        steps_in_backward: bool = False,
    ) -> None:  # fmt: skip
        self.module = ref(module)
        self.units = units
        self.setting = setting
        self.stage = stage
        self.saved: SavedActivations | None = None  # where they leave the device
        self.told = ""  # what was planned, and why
        self.expected_peaks: Callable[..., dict[str, int]] = lambda **_: {}
        self.has_accumulated = False
        self.ledger, self.group = setting.ledger, setting.routes.group
        self.marks = Marks(setting.ledger)
        for unit in units:
            unit.gradient = UnitGradient(unit)
            unit.keeps_bytes = not self.rests_after_backward
        self.gradients = {unit: unit.gradient for unit in units}
        self.by_face = {id(p.face): p for unit in units for p in unit.parameters}
        self.schedule = Schedule([unit for unit in units if not unit.is_tiled])
        self.steppers: WeakSet[Stepper] = WeakSet()
        self.early = EarlySteps(ref(self), is_active=steps_in_backward)
        self.reducer = Reducer(self.gradients, self.early.note_reduced)
        self.forward_depth = self._clock = 0
        self.is_accumulating = self.is_summoned = False
        self._users: Counter[Unit] = Counter()
        self._seen: dict[Unit, set[int]] = {unit: set() for unit in units}
        self._begun: list[Call] = []
        self._open: dict[Unit, WeakSet[Call]] = {unit: WeakSet() for unit in units}
        self._is_backward = False
        self._next: Unit | None = None  # to be gathered once the unit in backward has a gradient
        self._builds_graph = False
        self._is_checked = False
        self._connect()

    def _connect(self) -> None:
        """Give units weak ways back: a deleted module must free its bytes without a collector."""
        engine = ref(self)

        def on_grad(parameter: UnitParameter) -> None:
            alive = engine()
            if alive is not None:
                alive.on_grad(parameter)

        def is_wanted(requires_grad: bool) -> bool:
            alive = engine()
            builds_graph = torch.is_grad_enabled() and requires_grad
            return alive is not None and (builds_graph or alive.forward_depth > 0)

        def on_use(unit: Unit, outputs: object) -> None:
            alive = engine()
            if alive is not None:
                alive.watch_use(unit, outputs)

        for unit in self.units:
            unit.is_wanted, unit.on_demand = is_wanted, on_use
            for parameter in unit.parameters:
                parameter.on_grad = on_grad
                if parameter.tiled is not None:
                    parameter.tiled.on_reduced = self.early.note_reduced

    @property
    def rests_after_forward(self) -> bool:
        """Stage 3: whole weights are freed between forward and backward."""
        return self.stage == 3 and (self.group.world_size > 1 or not self.setting.rests_near)

    @property
    def rests_after_backward(self) -> bool:
        """Stages 1 and 2 keep what they gathered until the step, and its bytes over the step:
        backward's peak has room for them (docs/adr/0006). A local cast is not worth that.
        """
        return self.stage in (0, 3) or self.group.world_size == 1

    # forward

    def begin_forward(self) -> None:
        """The root module's forward starts, or a nested one inside it."""
        if self.forward_depth == 0 and not in_backward():
            if self._is_backward:
                self.abort_backward()
            self.early.check_whole(self.group.rank, (unit.failure for unit in self.units))
            for stepper in list(self.steppers):
                stepper.recover()
            if not self._is_checked:
                self.check_structure()
            for unit, gradient in self.gradients.items():
                gradient.drop_cleared()
                unit.forget()
                unit.gather.begin_early(is_summoned=self.is_summoned)
            self.schedule.begin(self._phase())
            self.marks.begin("forward")
            self._users.clear()
            for seen in self._seen.values():
                seen.clear()
        self.forward_depth += 1

    def end_forward(self) -> None:
        """The root's forward is over, by return or exception: every unit may rest."""
        self.forward_depth = max(0, self.forward_depth - 1)
        if self.forward_depth == 0 and not in_backward():
            self.marks.end()
            self._users.clear()
            for unit in self.units:
                unit.reshard(release=self.rests_after_forward)
            if not torch.is_grad_enabled():  # else backward follows
                self.setting.routes.rest()

    def enter(self, unit: Unit) -> Call:
        """Make `unit` whole for a module's forward and begin the gather of its successor."""
        self._users[unit] += 1
        self._clock += 1
        call = Call(unit, self._clock)
        if self.is_summoned:
            return call
        self._make_whole(unit, self._phase())
        self.marks.enter(call, "recompute" if in_backward() else "forward")
        return call

    def leave(self, call: Call, module: nn.Module | None, num_modules: int) -> None:
        """A module's forward is over; the unit rests when all its modules have run."""
        self.marks.leave(call)
        unit = call.unit
        self._clock += 1
        call.finished = self._clock
        self._users[unit] -= 1
        if in_backward() or self.is_summoned or self._users[unit] > 0:
            return
        seen = self._seen[unit]
        if module is not None:
            seen.add(id(module))
        is_last = len(seen) >= num_modules or self.forward_depth == 0
        if is_last:
            seen.clear()
        unit.reshard(release=is_last and self.rests_after_forward)

    def _phase(self) -> Phase:
        if in_backward():
            return Phase.BACKWARD
        return Phase.FORWARD if torch.is_grad_enabled() else Phase.EVALUATION

    def _make_whole(self, unit: Unit, phase: Phase) -> None:
        successor = self.schedule.enter(unit, phase)
        unit.start_unshard()
        if phase is Phase.BACKWARD and self.prefetches_late:
            self._next = successor
        elif successor is not None:
            successor.start_unshard()
        far = self.schedule.after(successor, phase)
        if far is not None:
            far.start_fetch()
        unit.unshard()

    @property
    def prefetches_late(self) -> bool:
        """On the CPU a gather in backward begins with the first gradient of the unit before it.

        Backward starts with all activations alive; by then some are gone, and the reduction of the
        unit before that is often over, which is the peak. A GPU's queue wants it sooner.
        """
        return self.setting.store.device.type == "cpu"

    def hold_alias(self, tensor: nn.Parameter) -> None:
        """A module gave out a whole weight or a view of one: it stays until backward ends."""
        for unit in self.units:
            if any(parameter.whole is tensor for parameter in unit.parameters):
                unit.hold()

    def hold_hidden(self, unit: Unit) -> None:
        """A forward showed no tensor for backward to come by: if it hid one, weights must stay."""
        # not for recompute, which torch ends by an exception: the call that it repeats is open
        if not in_backward() and self.gradients[unit].trainable():
            unit.hold()

    def watch_use(self, unit: Unit, outputs: object) -> None:
        """Whole weights were used outside the unit's modules: backward must find them whole too."""
        if self._users[unit] == 0 and not self.is_summoned:
            # the next use elsewhere must meet the face again
            is_over = self.forward_depth == 0 and not torch.is_grad_enabled()
            unit.reshard(release=is_over and self.rests_after_forward)
            if is_over:
                self.setting.routes.rest()
        self._clock += 1
        watch_outputs(ref(self), [Call(unit, self._clock)], outputs)

    # backward

    def enter_backward(self, call: Call) -> None:
        """Autograd reaches the outputs of `call`.

        Autograd runs nodes in the reverse order of their creation, so every call that started
        after this one had finished is through with its weights.
        """
        if call.is_begun or self.is_summoned:
            return
        self.begin_backward()
        if torch.is_grad_enabled():  # create_graph: the next graph refers to these weights
            self._builds_graph = True
            call.unit.hold()
        call.is_begun = True
        if call.edits != call.unit.edits_at_rest():
            raise edited(call.unit)
        for later in [other for other in self._begun if other.started > call.finished]:
            self.marks.leave(later)
            self._begun.remove(later)
            later.is_begun = False
            self._open[later.unit].discard(later)
            self._leave_backward(later.unit)
        self._begun.append(call)
        self._make_whole(call.unit, Phase.BACKWARD)
        self.marks.enter(call, "backward")

    def begin_backward(self) -> None:
        """The first node of this module's graph is about to run; `end_backward` is arranged for."""
        if self._is_backward:
            return
        self._is_backward = True
        for gradient in self.gradients.values():
            gradient.begin(is_last=not self.is_accumulating)
        self.schedule.begin(Phase.BACKWARD)
        self.marks.begin("backward")
        engine = ref(self)

        def end() -> None:
            alive = engine()
            if alive is not None:
                alive.end_backward()

        torch.autograd.Variable._execution_engine.queue_callback(end)  # type: ignore[attr-defined]

    def _leave_backward(self, unit: Unit) -> None:
        """Backward is through with one call of `unit`; if it was the last, reduce and rest.

        Every rank meets this point in the same order, also one that used only a part of the unit
        (an expert that got no token) and will never see its last gradient.
        """
        if any(call.unit is unit for call in self._begun):
            return
        is_through = not self._open[unit]  # else it is used again: what is whole stays whole
        if is_through and not self.defers_reduction:
            self.reducer.note_ready(self.gradients[unit])
        unit.reshard(release=self.rests_after_backward and is_through)
        self.early.run()

    def is_through(self, unit: Unit) -> bool:
        """True if the running backward will not use the unit again, as far as calls tell."""
        is_begun = any(call.unit is unit for call in self._begun)
        return not (is_begun or self._open[unit] or self.gradients[unit].fired)

    def expect_backward(self, call: Call) -> None:
        """The outputs of `call` are watched: backward will come by, if it comes at all."""
        self._open[call.unit].add(call)

    @property
    def defers_reduction(self) -> bool:
        """True for a micro-batch that is not the last, where partial gradients rest."""
        return self.is_accumulating and self.stage < 3

    def on_grad(self, parameter: UnitParameter) -> None:
        """Autograd has accumulated into a whole weight's gradient."""
        self.begin_backward()
        self.reducer.poll()
        if self._next is not None:
            successor, self._next = self._next, None
            successor.start_unshard()
        gradient = self.gradients[parameter.unit]
        if gradient.note_fired(parameter) and not self.defers_reduction:
            self.reducer.note_ready(gradient)

    def end_backward(self) -> None:
        """Autograd is done: rest every unit, finish every reduction."""
        self._is_backward, self._next = False, None
        for call in self._begun:
            self.marks.leave(call)
            call.is_begun = False
        self._begun.clear()
        for calls in self._open.values():
            calls.clear()
        for unit in self.units:
            if not self._builds_graph:
                unit.let_go()
            unit.reshard(release=self.rests_after_backward)
        self.has_accumulated |= self.is_accumulating
        if self.defers_reduction:
            for gradient in self.gradients.values():
                gradient.rest_partial()
            self.setting.routes.rest()
        else:
            self.reducer.finish()
            self.early.run()
        self.marks.end()

    def abort_backward(self) -> None:
        """An exception ended backward: forget its gradients, rest everything."""
        self._is_backward, self._next = False, None
        self._begun.clear()
        self.reducer.abort()
        self.early.abort()
        self.rest()

    # step

    def rest(self) -> None:
        """All units rest as shards, nothing whole is kept."""
        self._builds_graph = False
        self.forward_depth = 0  # Ctrl-C ends a forward without saying so
        if self.saved is not None:
            self.saved.end_all()
        for unit in self.units:
            unit.let_go()
            unit.reshard(release=True)
            unit.rows.give_back()
        self.setting.routes.rest()

    def before_step(self) -> None:
        """The optimizer is about to step: masters follow edited weights, everything rests."""
        if self._is_backward:
            self.abort_backward()
        self.early.check_whole(self.group.rank, (unit.failure for unit in self.units))
        stepped = self.early.end()
        self.marks.begin("step")
        self.rest()
        for gradient in self.gradients.values():
            gradient.drop_cleared()
        self.reducer.complete()
        for unit in self.units:
            unit.check_untouched()
            if unit not in stepped:
                unit.await_step()  # a failure is told in the next gather, to every rank alike
                unit.refresh_master()

    def after_step(self, optimizer_nbytes: int, rounded: Set[Unit]) -> None:
        """The optimizer has stepped: publish, and close the step's account.

        The weights of `rounded` units follow their masters already.
        """
        self._is_checked = False
        for unit in self.units:
            unit.publish(is_rounded=unit in rounded or unit.steps_in_blocks)
        self.ledger.set(Kind.OPTIMIZER, self.setting.store.name, optimizer_nbytes)
        self.ledger.end_step()
        self.marks.end()

    def check_structure(self) -> None:
        """Raise `StateError` if the module has gained or lost parameters since `shard`."""
        module = self.module()
        if module is not None and not self.is_summoned:
            self._is_checked = True
            check_structure(module, self.by_face, self.group.rank)

    # an engine belongs to one module in one process

    def __deepcopy__(self, memo: object) -> None:
        raise StateError(_NO_COPY)

    def __reduce__(self) -> str:
        raise StateError(_NO_COPY)


_NO_COPY = expected(
    "a module that is not sharded to copy or pickle",
    "a sharded one",
    hint="copy it before onefold.shard, or save it with state_dict() or onefold.save",
)
