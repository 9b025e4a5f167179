"""The engine of one sharded module: torch announces events, a schedule decides, an executor acts.

    hooks.py     torch calls module hooks and autograd hooks
    engine.py    turns them into events of this module; checks that weights have not changed
    schedule.py  returns the actions that follow
    executor.py     executes them on units (unit/), whose messages go over the wire (wire/)

The step of an offloaded unit runs in blocks in the background (blocks.py); its next use waits.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Set
from contextlib import contextmanager
from dataclasses import replace
from typing import Any
from weakref import ref

import torch
from torch import nn

from onefold.engine import captured
from onefold.engine.activations import saved_activations_of
from onefold.engine.companions import Companions
from onefold.engine.driving import Drive
from onefold.engine.executor import Arrivals, Executor, Stepper, facts_of
from onefold.engine.pipelined import STAGES, Pipeline, warn_undriven
from onefold.engine.policy import policy_of
from onefold.engine.run_facts import Marks, RunFacts
from onefold.engine.schedule import Schedule
from onefold.engine.structure import follow
from onefold.engine.walks import Call, Phase
from onefold.engine.watch import announce_end, in_backward, recomputes, tensors_in, watch_outputs
from onefold.layout.module_tree import Membership
from onefold.recipe import Recipe
from onefold.unit import refusals
from onefold.unit.context import Context
from onefold.unit.gradient import UnitGradient
from onefold.unit.parameter import UnitParameter
from onefold.unit.unit import Unit, UnitState


class Engine:
    """Runs the units of one sharded module through forward, backward and step."""

    def __init__(
        self, module: nn.Module, build: Callable[[Engine], list[Unit]], context: Context, *,
        recipe: Recipe, facts: RunFacts,
        build_adapters: Callable[[Engine], list[Unit]] = lambda _: [],
    ) -> None:  # fmt: skip
        """`build` makes the units, `build_adapters` those of parameters that join later."""
        self.module = ref(module)
        self.build_adapters = build_adapters
        self.context = context
        self.recipe = recipe
        self.facts = facts
        self.is_inference = recipe.inference is not None  # the module evaluates only
        self.is_undriven = False  # a stage of a schedule that no `onefold.pipeline` drives
        self.pipeline: Pipeline | None = None  # whose schedule drives the micro-batches
        self.rounds_gradients = context.routes.rounds_gradients  # or a stage of the pipeline does
        self.ledger, self.group = context.ledger, context.routes.group
        self.marks = Marks(context.ledger, context.phase)
        policy = self.policy = policy_of(recipe)
        units = self.units = build(self)  # units refer to the engine, weakly
        self.saved = saved_activations_of(module, units, context)
        self.schedule = Schedule(policy, [facts_of(unit) for unit in units])
        self.schedule.keep(frozenset(i for i, unit in enumerate(recipe.units) if unit.stays))
        self.executor = Executor(self.schedule, units, context.routes.rest)
        self.by_sharded = {id(p.sharded): p for unit in units for p in unit.parameters}
        self._index: dict[object, int] = {unit: index for index, unit in enumerate(units)}
        self.companions = Companions()  # averages and islands
        self._members = Membership()
        self._arrivals = Arrivals(self.schedule, self.executor, self._index)
        self._is_torn = False  # a backward failed after it stepped units
        self._has_failed = self._is_checked = False  # a backward, and nothing has ended it yet
        self.may_capture = context.store.device.type != "cpu"

    # drivers

    def drive(self, drive: Drive) -> None:
        """Follow a driver's choices from now on."""
        self.executor.do(self.schedule.drive(drive))

    @contextmanager
    def driven(self, **choices: Any) -> Iterator[None]:
        """Follow these choices in this block, and those from before it after it."""
        before = {name: getattr(self.schedule.driven, name) for name in choices}
        self.drive(replace(self.schedule.driven, **choices))
        try:
            yield
        finally:
            self.drive(replace(self.schedule.driven, **before))

    # for units (`UnitOwner`); see also `on_grad`

    def is_wanted(self, requires_grad: bool) -> bool:
        """True if an operation on a sharded parameter needs the unsharded one."""
        is_in_forward = self.schedule.forward_depth > 0 or recomputes()
        return is_in_forward or (requires_grad and torch.is_grad_enabled())

    def unshard_for_use(self, unit: Unit) -> None:
        """An operation outside the unit's modules needs unsharded parameters now."""
        self.executor.do(self.schedule.show(self._index[unit], is_recorded=torch.is_grad_enabled()))

    def on_use(self, unit: Unit, outputs: object) -> None:
        """Note that such an operation is over: backward must find the unit unsharded, too."""
        call, actions = self.schedule.use(self._index[unit], is_recorded=torch.is_grad_enabled())
        self.executor.do(actions)
        call.note_edits(unit.edits.at_rest())
        watch_outputs(ref(self), [call], list(tensors_in(outputs)))

    def note_hooked(self, parameter: UnitParameter) -> None:
        """Note that a parameter with users' hooks has its reduced gradient."""
        self.executor.hooks.due[parameter] = None

    def note_reduced(self, gradient: UnitGradient) -> None:
        """Note that a tiled weight's gradient is complete."""
        self.executor.do(self.schedule.note_reduced(self._index[gradient.unit]))

    @property
    def is_unsharded(self) -> bool:
        """True inside `onefold.unsharded`: modules show editable unsharded parameters."""
        return self.schedule.driven.is_suspended

    # forward

    def is_settled(self, indices: Iterable[int]) -> bool:
        """True if modules show the unsharded weights of these units for good."""
        units, kept = self.units, self.schedule.driven.keeps
        return all(i in kept and units[i].state is UnitState.UNSHARDED for i in indices)

    def are_shown(self, indices: Iterable[int]) -> bool:
        """True if modules show unsharded or editable weights of these units now."""
        return all([self.units[i].state is not UnitState.RESTING for i in indices])

    def _phase(self) -> Phase:
        if in_backward() and not self.is_inference:
            return Phase.BACKWARD
        trains = torch.is_grad_enabled() and not self.is_inference
        return Phase.FORWARD if trains else Phase.EVALUATION

    def begin_forward(self) -> None:
        """The root module's forward starts, or a nested one inside it."""
        phase, schedule = self._phase(), self.schedule
        if schedule.forward_depth == 0 and phase is not Phase.BACKWARD:
            self.prepare()
            self.marks.begin("forward", lane=phase)
        self.executor.do(schedule.begin_forward(phase))

    def prepare(self) -> None:
        """Weights are about to be used: end whatever failed, follow the module and gradients."""
        self.end_failed()
        if self.may_capture:
            captured.begin_forward(self)
        for stepper in list(self.executor.steppers):
            stepper.recover()
        self._follow()
        for unit in self.units:
            unit.gradient.drop_cleared()
            unit.forget()

    def note_structure(self) -> None:
        """The module tree may have changed: follow it. A collective where it has."""
        self._is_checked = False
        self._follow()

    def _follow(self) -> None:
        if not self._is_checked and not self.is_unsharded:
            module = self.module()
            if module is not None and self._members.keys_in(module) != self.by_sharded.keys():
                follow(self)
            self._is_checked = True
            may_be_stage = STAGES in sys.modules and not self.schedule.driven.walks_apart
            self.is_undriven = may_be_stage and warn_undriven(self.policy)

    def join_pipeline(self, pipeline: Pipeline) -> None:
        """The module is a stage: norms and checkpoints are those of the whole model."""
        self.pipeline = pipeline
        self.rounds_gradients = self.rounds_gradients or pipeline.rounds

    def end_forward(self) -> None:
        """The root's forward is over, by return or exception."""
        phase = self._phase()
        self.executor.do(self.schedule.end_forward(phase))
        if self.schedule.forward_depth == 0 and phase is not Phase.BACKWARD:
            self.marks.end()

    def enter(self, index: int) -> Call:
        """A module that uses unit `index` starts: its weights are unsharded on return."""
        phase = self._phase()
        if self.schedule.forward_depth == 0 and phase is not Phase.BACKWARD:
            self.prepare() if self.schedule.is_backward else self._follow()  # a part is called
        call, actions = self.schedule.enter(index, phase)
        call.note_edits(self.units[index].edits.at_rest())
        self.executor.do(actions)
        if not self.is_unsharded:
            verb = "recompute" if phase is Phase.BACKWARD else "forward"
            self.marks.enter(call, verb, self.units[index].name)
        return call

    def leave(self, call: Call, module: nn.Module | None, num_modules: int) -> None:
        """A module's forward is over; reshard the unit once all its modules have run."""
        self.marks.leave(call)
        key = None if module is None else id(module)
        self.executor.do(self.schedule.leave(call, key, num_modules, is_recompute=in_backward()))

    def hold_alias(self, tensor: nn.Parameter) -> None:
        """A module returned an unsharded weight or a view of one: keep it until backward ends."""
        for index, unit in enumerate(self.units):
            if any(parameter.unsharded is tensor for parameter in unit.parameters):
                self.schedule.hold(index)

    def hold_hidden(self, index: int) -> None:
        """A forward returned no tensor that could announce its backward: keep the weights.

        Not in recompute, which torch ends by an exception: the call that it repeats is open.
        """
        if not in_backward() and self.units[index].gradient.trainable():
            self.schedule.hold(index)

    # backward

    def begin_backward(self) -> None:
        """The first node of this module's graph is about to run; queue `end_backward`."""
        if self._has_failed:  # a part without hooks was called since: a unit that stays
            self.end_failed()
        if self.schedule.is_backward:
            return
        for unit in self.units:
            unit.gradient.begin()
        self.facts.begin_backward(is_first=not any([u.gradient.earlier for u in self.units]))
        actions = self.schedule.begin_backward(self._trained())
        self.marks.begin("backward", lane=Phase.BACKWARD)
        is_watched = self.ledger.observer is not None or self.saved is not None
        self._arrivals.begin(is_watched=is_watched)
        self.executor.do(actions)
        if not self.schedule.driven.joins_backwards:
            announce_end(ref(self))

    def _trained(self) -> list[int]:
        """Parameters of each unit that have gradients to reduce."""
        return [len(unit.gradient.trainable()) for unit in self.units]

    def expect_backward(self, call: Call) -> None:
        """Note that backward, if it runs, will announce `call`: its outputs are watched."""
        self.schedule.expect_backward(call)

    def enter_backward(self, call: Call) -> None:
        """Autograd reaches the outputs of `call`: its unit's weights are unsharded on return."""
        unit, is_inside = self.units[call.unit], self.is_unsharded
        if is_inside and not unit.is_there():
            raise refusals.EARLY_FORWARD(unit.name, where=unit.context.where)
        if is_inside or self.schedule.open_calls.has_begun(call):
            return
        self._arrivals.count()
        if call.edits != unit.edits.at_rest():
            raise refusals.CHANGED(unit.name, where=unit.context.where)
        actions = self.schedule.enter_backward(call, builds_graph=torch.is_grad_enabled())
        self.marks.leave(*self.schedule.ended)
        self.executor.do(actions)
        self.marks.enter(call, "backward", unit.name)

    def on_grad(self, parameter: UnitParameter, unit: Unit) -> None:
        """Autograd has accumulated into an unsharded weight's gradient."""
        if not self.schedule.is_backward or self._has_failed:
            self.begin_backward()
        self._arrivals.add(parameter, unit)

    def end_backward(self) -> None:
        """Autograd is done: reshard every unit, finish every reduction."""
        self._arrivals.count()
        reductions, driven = self.schedule.reductions, self.schedule.driven
        defers = reductions.defers
        self.facts.end_backward(accumulates=not driven.is_last)
        actions = self.schedule.end_backward()
        self.marks.leave(*self.schedule.ended)
        gradients = [unit.gradient for unit in self.units]
        for index in range(len(gradients)) if defers else driven.rests:
            gradients[index].rest_partial()
        self.executor.do(actions)
        if not defers:
            reductions.note_unused({i for i, grad in enumerate(gradients) if grad.is_unused})
        self.marks.end()
        if self.executor.hooks.due and not driven.walks_apart:  # a pipeline runs them at its end
            self.executor.hooks.run_due(self.units)

    def leave_failed_backward(self) -> None:
        """An exception ended backward: show parameters without its gradients until the abort."""
        self._has_failed = self.schedule.is_backward
        self._arrivals.note()
        self.ledger.fail()
        if self.schedule.is_backward and not self.is_unsharded:
            for unit in self.units:
                unit.gradient.discard()
                unit.reshard(release=False)

    def abort_backward(self) -> None:
        """An exception ended backward: drop its gradients, reshard every unit."""
        self._has_failed = False
        self._is_torn = self._is_torn or bool(self.schedule.early_steps)
        self.executor.take_stepped()
        self.executor.hooks.forget()
        for unit in self.units:
            unit.gradient.discard()
        self.executor.do(self.schedule.abort_backward())
        self.executor.drain()
        for unit in self.units:
            unit.gradient.lose()
        self.rest()
        self.marks.end()

    # step

    def rest(self) -> None:
        """Reshard all units; keep nothing unsharded."""
        if self.saved is not None:
            self.saved.end_all()
        self.executor.do(self.schedule.rest())
        for unit in self.units:
            unit.rows.give_back()

    def complete(self) -> None:
        """Reduce gradients of an accumulation that ended without its last micro-batch."""
        for unit in self.units:
            unit.gradient.check_whole()
        if any(unit.gradient.partial or unit.gradient.reduction.waits for unit in self.units):
            self.executor.do(self.schedule.complete(self._trained()))
            self.executor.hooks.run_due(self.units)

    def start_reductions(self) -> None:
        """Begin to reduce what rests, whatever batches each rank used; an end waits for it."""
        for gradient in (unit.gradient for unit in self.units):
            gradient.check_whole()
            gradient.drop_cleared()
        self.executor.do(self.schedule.start(self._trained()))

    def before_step(self, stepper: Stepper) -> None:
        """An optimizer is about to step: reshard all units, bring edited weights to masters."""
        hooks, schedule = self.executor.hooks, self.schedule
        is_early = hooks.turn or schedule.is_backward
        self._arrivals.count()
        if is_early and hooks.begin_step(stepper.held, self.units, schedule):
            return
        self.end_failed()
        if self.may_capture:
            captured.begin_step(self, stepper.optimizer)
        stepped = self.executor.take_stepped(stepper)
        self.marks.begin("step")
        self.rest()
        for unit in self.units:
            unit.gradient.drop_cleared()
        self.complete()
        self.context.compare_logs()
        for index, unit in enumerate(self.units):
            unit.check_untouched()
            if index not in stepped:
                unit.join_step()  # the next gather raises a failure, on every rank alike
                unit.refresh_master()

    def after_step(self, stepped: Set[Unit], rounded: Set[Unit]) -> None:
        """An optimizer has stepped its units: round masters into weights.

        The weights of `rounded` units follow their masters already. Units of other optimizers are
        as they were: a graph that needs these alone can still run backward.
        """
        self._is_checked = False
        self.facts.end_step()
        for unit in self.units:
            if unit in stepped:
                unit.publish(is_rounded=unit in rounded or unit.steps_in_blocks)
        if self.executor.hooks.edits:
            self.executor.hooks.end_step(self.units, self.schedule)
        else:
            self.schedule.stepped()
            self.marks.end()

    def recut(self, context: Context, recipe: Recipe) -> None:
        """Go on under other shares, to which units have moved their rows already."""
        self.context, self.recipe = context, recipe
        self.facts.shares.append((recipe, context.rank))
        if self.saved is not None:
            self.saved.keep([unit.weight.tensor for unit in self.units])

    def add(self, units: list[Unit]) -> None:
        """Run more units, of parameters that joined the module; nothing is unsharded now."""
        self.schedule.add([facts_of(unit) for unit in units])
        for unit in units:
            self._index[unit] = len(self.units)
            self.units.append(unit)  # the list of `executor`, too
            self.by_sharded |= {id(p.sharded): p for p in unit.parameters}
        if self.saved is not None:
            self.saved.keep([unit.weight.tensor for unit in units])

    def end_failed(self) -> None:
        """End a backward that failed; raise if it had stepped some of the units.

        Raise the error of the tier where a tier was the reason, else `StateError`.
        """
        if self.schedule.is_backward:
            self.abort_backward()
        if self._is_torn:
            for failure in filter(None, [unit.failure for unit in self.units]):
                raise failure
            raise refusals.TORN(where=f"rank {self.group.rank}")

    def mend(self) -> None:
        """Note that all weights were loaded anew: no backward has torn them, or stepped some."""
        if self.schedule.is_backward:
            self.abort_backward()
        self.executor.take_stepped()
        self._is_torn = False

    # an engine belongs to one module in one process

    def __deepcopy__(self, memo: object) -> None:
        raise refusals.MODULE_COPY()

    def __reduce__(self) -> str:
        raise refusals.MODULE_COPY()
