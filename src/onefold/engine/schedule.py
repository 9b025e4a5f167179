"""Decide when each unit is gathered, freed, reduced and stepped. No torch here.

A schedule takes events and returns actions. It touches nothing: the engine executes them on tensors
(engine/executor.py), the planner on bytes and clocks (planner/*_executor.py). See docs/adr/0017.

One step, event by event (units are numbers, in the order of the module):

    begin_forward    the root's forward starts
      enter          a module that uses a unit starts: gather the unit and the next ones
      leave          the module is done: once all modules of the unit have run, free the unit
    end_forward
    begin_backward   autograd reaches the first unit
      enter_backward the outputs of a call: gather again; units used later in forward are done
      gradient       the last gradient of a unit makes it ready to be reduced
    end_backward     reduce the remaining units, wait for everything
    rest             before the optimizer's step nothing unsharded stays
    stepped          weights have changed: unsharded weights are out of date
    drive            events of another driver than a plain loop follow (engine/driving.py)
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence, Set
from dataclasses import replace

from onefold.engine.driving import NO_UNIT, Action, Drive, Verb
from onefold.engine.policy import Policy, UnitFacts
from onefold.engine.reductions import Reductions
from onefold.engine.walks import Call, EarlySteps, ModuleUses, OpenCalls, Phase, Successors


class Schedule:
    """Decides, under a policy, what to do with each unit at each event of a step."""

    def __init__(self, policy: Policy, units: Sequence[UnitFacts]) -> None:
        self.policy, self.units = policy, units
        self.reductions = Reductions(policy, units)
        self.forward_depth = self._clock = 0
        self.is_backward = self.builds_graph = False
        self.ended: list[Call] = []  # calls that the last event ended in backward
        walked = [i for i, unit in enumerate(units) if not unit.is_tiled]
        self.successors = Successors(walked, is_cyclic=policy.is_cyclic)
        self.uses, self.open_calls = ModuleUses(len(units)), OpenCalls(len(units))
        self._unsharded: set[int] = set()  # unsharded bytes exist, or will soon
        self._fresh: set[int] = set()  # they have the values of the weights at rest
        self._shown: set[int] = set()  # modules see them
        self._lent: set[int] = set()  # of these: for an operation outside of modules
        self.ahead: set[int] = set()  # gathered ahead, and not used since
        self._held = self.open_calls.held
        self._filled: set[int] = set()  # the node's secondary shard is up to date
        self.late: list[int] = []  # to be gathered with the next gradient
        self.early_steps = EarlySteps()
        self.driven = Drive()  # by a plain loop

    def add(self, units: Sequence[UnitFacts]) -> None:
        """More units come, whose state every rank holds: a second hop spreads their gradients."""
        self.policy = replace(self.policy, has_second_hop=True)
        self.units = [*self.units, *units]
        self.reductions.add(self.policy, self.units)
        self.uses.grow(len(units))
        self.open_calls.grow(len(units))

    # drivers

    def drive(self, drive: Drive) -> list[Action]:
        """Follow a driver's choices from now on; free units that it keeps no longer."""
        out: list[Action] = []
        dropped, self.driven = self.driven.keeps - drive.keeps, drive
        for unit in () if drive.frees_in_backward else sorted(dropped):
            self._hide(unit, out, frees=self.policy.frees_after_forward)
        return out

    def keep(self, units: frozenset[int]) -> list[Action]:
        """Leave `units` unsharded until a forward trains, undriven; free others kept so far."""
        return self.drive(replace(self.driven, keeps=units))

    # forward

    def begin_forward(self, phase: Phase) -> list[Action]:
        """The root module's forward starts; a nested one inside it only counts."""
        out: list[Action] = []
        if self.forward_depth == 0 and phase is not Phase.BACKWARD:
            self.successors.begin(phase)
            self.open_calls.begin_walk(self._clock, phase, self.driven)
            self.uses.begin()
            trains = phase is Phase.FORWARD and not self.driven.walks_apart
            if trains and self.driven.keeps:  # training goes on
                out += self.keep(frozenset())
            if self.policy.fills_early:
                for unit in (i for i, facts in enumerate(self.units) if not facts.is_offloaded):
                    self._fill(unit, out)
        self.forward_depth += 1
        return out

    def enter(self, unit: int, phase: Phase) -> tuple[Call, list[Action]]:
        """A module that uses `unit` starts; in `Phase.BACKWARD` it runs again (recompute)."""
        out: list[Action] = []
        self._clock += 1
        self.uses.enter(unit)
        if not self.driven.is_suspended:
            self._unshard(unit, phase, out)
        return self.open_calls.open(unit, self._clock), out

    def leave(
        self, call: Call, module: Hashable, num_modules: int, *, is_recompute: bool
    ) -> list[Action]:
        """A forward is over (`module` None: by an exception): free a unit after its last module."""
        self._clock += 1
        self.open_calls.leave(call, self._clock, module, num_modules)
        unit, out = call.unit, list[Action]()
        if not self.uses.leave(unit) or is_recompute or self.driven.is_suspended:
            return out
        is_last = self.uses.note(unit, module, num_modules) or self.forward_depth == 0
        self._hide(unit, out, frees=is_last and self.policy.frees_after_forward)
        return out

    def end_forward(self, phase: Phase) -> list[Action]:
        """The root's forward is over, by return or exception."""
        out: list[Action] = []
        self.forward_depth = max(0, self.forward_depth - 1)
        if self.forward_depth == 0 and phase is not Phase.BACKWARD:
            self.uses.begin()
            self.open_calls.event_log.end_forward()
            for unit in range(len(self.units)):
                if self.policy.gathers_in_order and unit not in self._fresh:
                    self._gather(unit, out)  # another rank may have used it
                is_next = self.policy.is_cyclic and unit in self.ahead
                self._hide(unit, out, frees=self.policy.frees_after_forward and not is_next)
            if phase is Phase.EVALUATION and not self.policy.is_cyclic:  # else more follows
                out.append((Verb.REST, NO_UNIT))
        return out

    def show(self, unit: int, *, is_recorded: bool) -> list[Action]:
        """An operation outside the unit's modules needs unsharded weights; `use` follows.

        `is_recorded`: a graph will refer to the weights, so they stay until its backward ends.
        """
        out: list[Action] = []
        if not self.driven.is_suspended:
            self._make_room(unit, out)
            self._gather(unit, out)
            out.append((Verb.SHOW, unit))
            self._lent |= {unit} - self._shown
            self._shown.add(unit)
        if is_recorded:
            self._held.hold(unit)
        return out

    def use(self, unit: int, *, is_recorded: bool) -> tuple[Call, list[Action]]:
        """The operation of `show` is over: the next use meets sharded parameters again."""
        self._clock += 1
        out: list[Action] = []
        if not (self.uses.is_running(unit) or self.driven.is_suspended):
            is_over = self.forward_depth == 0 and not is_recorded
            self._hide(unit, out, frees=is_over and self.policy.frees_after_forward)
            if is_over:
                out.append((Verb.REST, NO_UNIT))
        return self.open_calls.open(unit, self._clock, is_module=False), out

    def gather(self, units: Iterable[int]) -> list[Action]:
        """Begin to gather `units` before their modules run."""
        out: list[Action] = []
        for unit in units:
            self._gather(unit, out)
        return out

    def hide(self) -> list[Action]:
        """Let modules see sharded parameters again."""
        out: list[Action] = []
        for unit in range(len(self.units)):
            self._hide(unit, out, frees=False)
        return out

    def hold(self, unit: int) -> None:
        """A graph or an output refers to the unsharded weights: they stay until backward ends."""
        self.open_calls.hold(unit)
        self._held.hold(unit)

    # backward

    def begin_backward(self, trained: Sequence[int]) -> list[Action]:
        """Autograd reaches this module's graph. `trained`: parameters of each unit that train."""
        out: list[Action] = []
        self.is_backward = True
        self.reductions.begin(trained, self.driven.rests, is_last=self.driven.is_last)
        self.successors.begin(Phase.BACKWARD)
        for unit in self._held.recall():
            if unit not in self._fresh:
                out += self.show(unit, is_recorded=False)
                self._hide(unit, out, frees=False)
        return out

    def expect_backward(self, call: Call) -> None:
        """Note that backward, if it runs, will reach `call`: its outputs are watched."""
        self.open_calls.add(call)

    def enter_backward(self, call: Call, *, builds_graph: bool = False) -> list[Action]:
        """Autograd reaches the outputs of `call`.

        Autograd runs nodes in the reverse order of their creation. So every call that started
        after this one had finished is through with its weights.
        """
        out: list[Action] = []
        if builds_graph:  # create_graph: the next graph refers to these weights
            self.builds_graph = True
            self._held.add(call.unit)
        self.ended = self.open_calls.reach(call)
        for later in self.ended:
            self.open_calls.close(later)
            self._leave_backward(later.unit, out)
        self.open_calls.begin(call)
        self._unshard(call.unit, Phase.BACKWARD, out)
        return out

    def _leave_backward(self, unit: int, out: list[Action]) -> None:
        """Backward is through with one call of `unit`; after the last call, reduce and free.

        Ranks meet this point in the same order, also one that used a part of the unit alone.
        """
        if unit in self.open_calls.begun_units():
            return
        is_through = not self.open_calls.has(unit, self.driven)  # else it is used again
        if is_through and not self.reductions.defers:
            self.reductions.note_ready(unit, out)
        self._hide(unit, out, frees=is_through and self.policy.frees_after_backward)
        self._step_reduced(out)

    def gradients(self, unit: int, members: Sequence[int]) -> list[Action]:
        """Autograd has accumulated the gradients of some parameters of `unit`, in this order."""
        out: list[Action] = []
        while self.late:
            self._gather(self.late.pop(0), out, is_ahead=True)
        for member in members if (log := self.open_calls.event_log).is_open else ():
            log.note_gradient(unit, member)
        driven, then = self.driven, list[Action]()
        is_last = self.reductions.note_gradients(unit, members, then, waits=driven.joins_backwards)
        if is_last and self.policy.frees_with_gradients and driven.is_plain:
            self._hide(unit, out, frees=True)  # every node that reads the weights has run
        out += then
        if self.policy.steps_in_backward:
            self._step_reduced(out)
        return out

    def landed(self) -> list[Action]:
        """The reduction of `reductions.may_land` is over: free its gradients and buffers early."""
        out: list[Action] = []
        self.reductions.land(out)
        self._step_reduced(out)
        return out

    def note_reduced(self, unit: int) -> list[Action]:
        """The gradient of a tiled unit is reduced."""
        out: list[Action] = []
        self._step_reduced(out, [unit])
        return out

    def end_backward(self) -> list[Action]:
        """Autograd is done: free units, finish reductions."""
        out: list[Action] = []
        self.open_calls.event_log.end()
        self._end_calls()
        for unit in range(len(self.units)):
            if not (self.builds_graph or self.policy.frees_with_gradients):
                self._held.discard(unit)
            self._hide(unit, out, frees=self.policy.frees_after_backward)
        if self.reductions.defers:
            self.reductions.defer()
        else:
            self.reductions.reduce_rest(out)
            self._step_reduced(out)
        return [*out, (Verb.REST, NO_UNIT)]

    def abort_backward(self) -> list[Action]:
        """An exception ended backward: finish reductions under way on all ranks, drop the rest."""
        out: list[Action] = []
        self._end_calls()
        self.reductions.drain(out)
        self.reductions.forget()
        self.early_steps.forget()
        return out + self.rest()

    def _end_calls(self) -> None:
        self.is_backward = False
        self.late.clear()
        self.ended = self.open_calls.end(self.driven)

    # step

    def complete(self, trained: Sequence[int]) -> list[Action]:
        """Reduce gradients of an accumulation that ended without its last micro-batch."""
        return self._start_all(trained, frozenset(), at_once=False) + self.finish_reductions()

    def start(self, trained: Sequence[int]) -> list[Action]:
        """Begin to reduce what rests, all at once; `finish_reductions` follows."""
        all_rest = self.policy.defers_reduction or self.policy.sums_rest
        others = frozenset(range(0 if all_rest else len(trained))) - self.driven.rests
        return self._start_all(trained, others, at_once=True)

    def _start_all(self, trained: Sequence[int], rests: Set[int], *, at_once: bool) -> list[Action]:
        out: list[Action] = []
        self.reductions.begin(trained, rests, is_last=True)
        self.reductions.start_all(out, at_once=at_once)
        return out

    def finish_reductions(self) -> list[Action]:
        """Finish the reductions of `complete` or `start`."""
        out: list[Action] = []
        self.reductions.drain(out)
        self.reductions.take_averaged()
        return [*out, (Verb.REST, NO_UNIT)]

    def rest(self) -> list[Action]:
        """Free all unsharded weights, before a step, a load or an edit."""
        out: list[Action] = []
        self.builds_graph = False
        self.forward_depth = 0  # Ctrl-C ends a forward without an event
        self._held.clear()
        for unit in range(len(self.units)):
            self._hide(unit, out, frees=True, is_rest=True)
        return [*out, (Verb.REST, NO_UNIT)]

    def stepped(self) -> None:
        """Weights have changed: unsharded weights and secondary shards are out of date."""
        self._fresh.clear()
        self._filled.clear()
        self._held.step()

    def lost(self, unit: int) -> None:
        """An action on the unit failed: its unsharded weights may have any values."""
        self._fresh.discard(unit)
        self._filled.discard(unit)

    # rules

    def _unshard(self, unit: int, phase: Phase, out: list[Action]) -> None:
        """Gather a unit, begin the gathers of the next ones, and fetch the rows of one more."""
        number, ahead = self.policy.prefetch, list[int]()
        if not self.driven.repeats:  # nothing is learned from a walk that is repeated
            there = self.driven.keeps & self._fresh
            ahead = self.successors.enter(unit, phase, number + 1, without=there)
        to_gather, to_fetch = ahead[:number], ahead[number:]
        self.ahead.discard(unit)
        self._make_room(unit, out)
        self._gather(unit, out)
        if phase is Phase.BACKWARD and self.policy.prefetches_late:
            self.late = to_gather
        else:
            for successor in to_gather:
                self._gather(successor, out, is_ahead=True)
        out += [(Verb.FETCH, successor) for successor in to_fetch if successor not in self._fresh]
        out.append((Verb.SHOW, unit))
        self._shown.add(unit)
        self._lent.discard(unit)

    def _gather(self, unit: int, out: list[Action], *, is_ahead: bool = False) -> None:
        if unit in self._fresh or self.units[unit].is_resident:
            return
        if is_ahead:
            if not self._has_room(unit):
                return
            self.ahead.add(unit)
        for due in range(unit + 1) if self.policy.gathers_in_order else (unit,):
            if due in self._fresh or not self.units[due].is_gathered:
                continue
            if self.policy.keeps_second_shard:
                self._fill(due, out)
            self._unsharded.add(due)
            self._fresh.add(due)
            out.append((Verb.GATHER, due))

    def _fill(self, unit: int, out: list[Action]) -> None:
        if unit not in self._filled:
            self._filled.add(unit)
            out.append((Verb.FILL, unit))

    def _has_room(self, unit: int) -> bool:
        cap, units = self.policy.cap, self.units
        return cap is None or sum(units[i].nbytes for i in self._unsharded | {unit}) <= cap

    def _make_room(self, unit: int, out: list[Action]) -> None:
        """Free units that are not in use, gathered ahead or kept, until `unit` fits."""
        if self.policy.cap is None:
            return
        in_use = self.open_calls.begun_units() | self._held | {unit}
        for other in sorted(self._unsharded - in_use):
            if self._has_room(unit):
                return
            if not self.uses.is_running(other) and other not in self.driven.keeps:
                self._free(other, out, Verb.FREE)

    def _hide(self, unit: int, out: list[Action], *, frees: bool, is_rest: bool = False) -> None:
        is_kept = unit in self.driven.keeps and not is_rest
        stays_shown = is_kept and self.policy.is_cyclic and unit not in self._lent
        if frees and not is_kept and unit in self._unsharded and unit not in self._held:
            self._free(unit, out, Verb.INVALIDATE if self.policy.keeps_bytes else Verb.FREE)
        elif unit in self._shown and not stays_shown:
            self._shown.discard(unit)
            out.append((Verb.HIDE, unit))

    def _free(self, unit: int, out: list[Action], verb: Verb) -> None:
        self._shown.discard(unit)
        self._fresh.discard(unit)
        self.ahead.discard(unit)
        if verb is Verb.FREE:
            self._unsharded.discard(unit)
        out.append((verb, unit))

    def _step_reduced(self, out: list[Action], tiled: Sequence[int] = ()) -> None:
        """Step reduced units that backward is through with, a few at a time."""
        if not self.policy.steps_in_backward:
            return
        averaged = [*self.reductions.take_averaged(), *tiled]
        if self.reductions.is_last:
            offloaded = [unit for unit in averaged if self.units[unit].is_offloaded]
            self.early_steps.step(offloaded, self.is_through, out)

    def is_through(self, unit: int) -> bool:
        """True if no call of the running backward will use the unit again."""
        calls, has_fired = self.open_calls, self.reductions.has_fired(unit)
        return not (has_fired or calls.has(unit, self.driven) or unit in calls.begun_units())
