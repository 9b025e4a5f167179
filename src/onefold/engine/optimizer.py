"""Step sharded state with an unchanged `torch.optim.Optimizer`.

The user's optimizer keeps its object, class, groups and hooks. Its groups hold sharded parameters.
Around each `step` the binding replaces them by tensors that the class's own code steps:

    elementwise classes   flat groups: neighbouring parameters of a unit in one tensor, so that a
                          unit and an optimizer group are one fused call (engine/flat_groups.py)
    all others            unsharded parameters, each on the rank that owns it (engine/matrix.py)

Afterwards the groups hold sharded parameters again. `optimizer.state[parameter]` shows the moments
like the parameter, so state dicts, schedulers and checkpoints see ordinary per-parameter state.
"""

import operator
from collections import ChainMap, OrderedDict, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any
from weakref import ref

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from onefold.compat import untraced
from onefold.engine.bare_step import BareStep
from onefold.engine.behaviour import behaviour_of, moments_of_group
from onefold.engine.blocks import reserve_slots
from onefold.engine.coupled import Replaced, evaluate_closure, rows_of_ranks, share_losses
from onefold.engine.engine import Engine
from onefold.engine.flat_groups import FlatStep, with_numbers_on
from onefold.engine.looks import Looks
from onefold.engine.matrix import MatrixStep
from onefold.engine.optimizer_state import (
    OwnStates,
    common_state,
    own_state,
    state_nbytes,
    stepped_state,
)
from onefold.engine.precision import is_step_sound
from onefold.engine.rules import Rule, State, may_fuse, rule_of, same_entry, whole_matrices
from onefold.engine.step_checks import check_trains
from onefold.engine.swaps import watch_swaps
from onefold.layout.ledger import Account, Kind
from onefold.unit.parameter import UnitParameter, with_gradient
from onefold.unit.shortage import explain
from onefold.unit.unit import Unit, unit_of


class OptimizerBinding:
    """Binds one optimizer to the engines whose parameters it holds."""

    def __init__(self, optimizer: Optimizer, engine: Engine) -> None:
        self.engines: list[Engine] = []
        self._state_bytes: dict[Engine, Account] = {}
        self._counted: list[Any] = []  # states whose bytes are known
        behaviour = behaviour_of(optimizer)
        self.is_flat = behaviour.is_flat(engine.recipe.rest_world)
        # its closure runs in the midst of a step, so it steps the sharded parameters themselves
        self._searches = behaviour.searches
        rows = rows_of_ranks(engine) if behaviour.adds else None
        self._strategy: FlatStep | MatrixStep = (
            FlatStep(rows, behaviour.reads) if self.is_flat else MatrixStep()
        )
        self._bare = BareStep()
        self._looks = Looks(optimizer, behaviour.reads if self.is_flat else frozenset())
        self._shown: dict[Tensor, State] = {}
        self._common: dict[Any, Any] = {}  # state that belongs to no parameter
        self._is_entered = False
        self._restore: list[tuple[State, State]] = []
        self._group_of: dict[int, int] | None = None  # by id, while units are stepped in backward
        self._optimizer = ref(optimizer)
        self._pre = optimizer.register_step_pre_hook(self.before_step)
        self._post = optimizer.register_step_post_hook(self.after_step)
        # not kept here: a cycle would keep deleted modules until the collector runs
        OwnStates(self.parameter, self._strategy.keeper_of).register(optimizer)
        self.stand_innermost(optimizer)
        watch_swaps(optimizer, self)
        self.join(optimizer, engine)

    def join(self, optimizer: Optimizer, engine: Engine) -> None:
        """Step the parameters of one more engine as well."""
        self._check_tiers(optimizer, engine)
        self.engines.append(engine)
        self._counted = []  # those of the new engine are not
        self._state_bytes[engine] = Account(
            self, Kind.OPTIMIZER, engine.context.store.name, engine.ledger
        )
        engine.executor.steppers.add(self)
        self._reserve(optimizer)
        self._predict(optimizer, engine)
        tensors = [tensor for group in optimizer.param_groups for tensor in group["params"]]
        held = filter(None, map(self.parameter, tensors))
        self.kept_here([p for p in held if p.sharded.requires_grad])

    def _check_tiers(self, optimizer: Optimizer, engine: Engine) -> None:
        for group in [] if self.is_flat else optimizer.param_groups:
            for parameter in filter(None, map(engine.by_sharded.get, map(id, group["params"]))):
                if parameter.model is not None and not parameter.model.is_replicated:
                    raise whole_matrices(parameter.fqn, str(parameter.model), optimizer)

    def _reserve(self, optimizer: Optimizer) -> None:
        """Allocate offloaded states, and their slots, before the first step."""
        stepped = dict[Unit, None]()
        for group in optimizer.param_groups if self.is_flat else []:
            own = filter(None, map(self.parameter, group["params"]))
            trained = dict.fromkeys(unit_of(p) for p in own if p.sharded.requires_grad)
            held = {unit: None for unit in trained if unit.steps_in_blocks}
            dtypes = {unit.stepped.dtype for unit in held}
            wanted = {dtype: moments_of_group(optimizer, group, dtype) for dtype in dtypes}
            for unit in held:
                unit.make_moments(wanted[unit.stepped.dtype])
            stepped |= held
        reserve_slots(stepped)

    def _predict(self, optimizer: Optimizer, engine: Engine) -> None:
        """Predict the bytes of an optimizer that was built after `shard`, by the largest unit."""
        units = [unit for unit in engine.units if unit.gradient.trainable()]
        if not (self.is_flat and units):
            return
        largest, moments = max(units, key=lambda unit: unit.gather.full_numel), dict[str, Any]()
        for group in optimizer.param_groups:
            own = filter(None, map(self.parameter, group["params"]))
            if any(unit_of(p) is largest for p in own):
                moments |= moments_of_group(optimizer, group, largest.stepped.dtype)
        if len(moments) > engine.recipe.num_moments:
            engine.recut(engine.context, replace(engine.recipe, num_moments=len(moments)))

    def stand_innermost(self, optimizer: Optimizer) -> None:
        """Keep the user's own step hooks outside the swap: they see sharded parameters."""
        before: OrderedDict[int, Any] = optimizer._optimizer_step_pre_hooks  # type: ignore[assignment]
        after: OrderedDict[int, Any] = optimizer._optimizer_step_post_hooks  # type: ignore[assignment]
        before.move_to_end(self._pre.id)
        after.move_to_end(self._post.id, last=False)

    def parameter(self, tensor: Tensor) -> UnitParameter | None:
        return self._known().get(id(tensor))

    def _known(self) -> Mapping[int, UnitParameter]:
        """Return the sharded parameters of all engines, by the identity of their tensors."""
        own = [engine.by_sharded for engine in self.engines]
        return own[0] if len(own) == 1 else ChainMap(*own)

    def kept_here(self, parameters: Sequence[UnitParameter]) -> list[UnitParameter]:
        """Return those of the optimizer's parameters whose state this rank keeps."""
        return self._strategy.kept_here(parameters)

    def keep(self, parameter: UnitParameter, name: str) -> None:
        """Note that a state is read into its unit's moments."""
        if isinstance(self._strategy, FlatStep):
            self._strategy.keep([parameter], [name])

    def stand_in(self, parameter: UnitParameter) -> Tensor:
        """Return the object that a step sees of a parameter; the sharded one of flat groups."""
        if self._searches or not isinstance(self._strategy, MatrixStep):
            return parameter.sharded
        return self._strategy.stand_in(parameter)

    def holds(self, parameter: UnitParameter) -> bool:
        """True if the parameter is in one of the optimizer's groups."""
        optimizer = self._optimizer()
        groups = optimizer.param_groups if optimizer is not None else []
        return any(tensor is parameter.sharded for group in groups for tensor in group["params"])

    def held(self) -> list[UnitParameter]:
        """Return the sharded parameters in the optimizer's groups."""
        optimizer = self._optimizer()
        groups = optimizer.param_groups if optimizer is not None else []
        held = (self.parameter(tensor) for group in groups for tensor in group["params"])
        return [parameter for parameter in held if parameter is not None]

    def forget(self, optimizer: Optimizer) -> None:
        """Free the optimizer's state of sharded parameters, before other state is read."""
        self._strategy.forget()
        self._shown, self._counted, self._group_of = {}, [], None
        for tensor in [tensor for tensor in optimizer.state if self.parameter(tensor) is not None]:
            del optimizer.state[tensor]

    @property
    def optimizer(self) -> Optimizer | None:
        """The optimizer, while it is alive."""
        return self._optimizer()

    def follow_cut(self, optimizer: Optimizer, engine: Engine, flats: Sequence[Tensor]) -> None:
        """Count and step states that were cut anew: views of `flats`, see `take_over`."""
        self.take_over(flats)
        self._reserve(optimizer)
        self._state_bytes[engine].set(state_nbytes(optimizer.state, engine))

    def take_over(self, states: Sequence[Tensor]) -> None:
        """Step states that will be assigned in place: without a copy, in their own dtypes.

        Those of flat groups are views of `states` [own rows of a unit], laid out as its weight,
        which nothing else may use; those of whole matrices are `states`.
        """
        self._strategy.take_over(states)

    # around the class's own step

    @untraced  # [Note: torch.compile] in hooks.py
    def before_step(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: State) -> Replaced:
        """Replace sharded parameters by the tensors to step. Runs after every other pre-hook."""
        if self._is_entered:  # a subclass's step that calls its base class's
            return None
        if self._searches:
            return share_losses(self.engines[0].group, args, kwargs)
        self._group_of = None
        has_closure = len(args) > 1 or kwargs
        replaced = evaluate_closure(args, kwargs, self.engines[0].ledger) if has_closure else None
        for engine in self.engines:
            engine.before_step(self)
        if self._begin_bare(optimizer):
            return replaced
        self._import_changed(optimizer)
        self._look_again(optimizer)
        rounding = [engine for engine in self.engines if engine.rounds_gradients]
        is_sound = not rounding or is_step_sound(rounding)
        groups: list[list[UnitParameter]] = []
        foreign, known = list[list[Tensor]](), self._known()  # foreign: of no engine
        for group in optimizer.param_groups:
            own = [owner for tensor in group["params"] if (owner := known.get(id(tensor)))]
            groups.append(with_gradient(own if is_sound else []))
            foreign.append([tensor for tensor in group["params"] if id(tensor) not in known])
        if not any(groups):
            check_trains(optimizer, self.engines)
        stand_ins = self._stand_ins(optimizer, groups)
        self._common = common_state(optimizer.state)
        state = _seen_state(optimizer.state, self._common, stand_ins, foreign)
        self._restore = [(group, dict(group)) for group in optimizer.param_groups]
        for group, mine, others in zip(optimizer.param_groups, stand_ins, foreign, strict=True):
            group["params"] = [*mine, *others]
            if may_fuse(optimizer, group, mine.values()):
                group["fused"] = True
        optimizer.state = state
        self._is_entered = True
        self._show_all(optimizer)
        if replaced:
            replaced[0][1].expect([tensor for group in stand_ins for tensor in group])
        return replaced

    def _begin_bare(self, optimizer: Optimizer) -> bool:
        """Begin a step that replaces nothing, where one rank can step parameters themselves."""
        may_be_bare = self.is_flat and self.engines[0].group.world_size == 1
        self._is_entered = may_be_bare and self._bare.begin(optimizer, self._known())
        return self._is_entered

    def _look_again(self, optimizer: Optimizer) -> None:
        """Find what the class looks for in parameters now: it may be another than at `shard`."""
        if self._looks.have_changed(optimizer):
            reads = self._looks.judge(optimizer, self.engines, is_flat=self.is_flat)
            if isinstance(self._strategy, FlatStep):
                self._strategy.note_attributes(reads)

    def _show_all(self, optimizer: Optimizer) -> None:
        """Let a class that knows parameters by identity or position find all of them."""
        if not self._looks.finds or not isinstance(self._strategy, MatrixStep):
            return
        pairs: list[tuple[UnitParameter, nn.Parameter]] = []
        for group, before in self._restore:
            known = [(tensor, self.parameter(tensor)) for tensor in before["params"]]
            shown = {id(t): (p, self._strategy.stand_in(p)) for t, p in known if p}
            group["params"] = [shown[id(t)][1] if id(t) in shown else t for t, _ in known]
            pairs += shown.values()
        self._looks.show(optimizer, pairs)

    @untraced
    def after_step(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: State) -> None:
        """Put sharded parameters back. Runs before every other post-hook."""
        if self._searches:
            self._count_search(optimizer)
        if not self._is_entered:
            return
        self._put_back(optimizer)
        stepped = optimizer.state
        if bare := self._bare.units and self._bare.end():
            self._count_states({k: v for k, v in dict.items(stepped) if isinstance(k, Tensor)})
            self._end_step(bare, set())
            return
        shown = self._strategy.leave(stepped)
        state: defaultdict[Tensor, State] = defaultdict(dict)
        units, known = set[Unit](), self._known()
        for group in optimizer.param_groups:
            for tensor in group["params"]:
                parameter = known.get(id(tensor))
                if parameter is not None:
                    unit: Any = parameter.find_unit() or parameter.unit
                    units.add(unit)
                entry = shown.get(parameter) if parameter else stepped.get(tensor)
                if entry:
                    state[tensor] = entry
        self._shown, self._common = _copied(state), common_state(stepped)
        optimizer.state = stepped_state({**state, **self._common}, self.engines, self._refresh)
        self._count_states(state)
        self._end_step(units, self._strategy.rounded)

    def _end_step(self, stepped: set[Unit], rounded: set[Unit]) -> None:
        for engine in self.engines:
            engine.ledger.end_step(self)
            engine.after_step(stepped, rounded)

    def _count_search(self, optimizer: Optimizer) -> None:
        """End a step that has edited the sharded parameters, as a user does."""
        for engine in self.engines:
            engine.before_step(self)
            self._state_bytes[engine].set(state_nbytes(optimizer.state, engine))
            engine.ledger.end_step(self)
            engine.after_step(set(), set())

    def step_early(self, unit: Unit) -> bool:
        """Begin to step the optimizer's parameters of a unit, during a backward; see `Stepper`."""
        optimizer = self._optimizer()
        if optimizer is None or not isinstance(self._strategy, FlatStep):
            return False
        groups = optimizer.param_groups
        if self._group_of is None:  # the first unit of a backward: the optimizer may have changed
            self._import_changed(optimizer)
            self._look_again(optimizer)
            self._group_of = {id(t): i for i, group in enumerate(groups) for t in group["params"]}
        members: list[list[UnitParameter]] = [[] for _ in groups]
        for parameter in unit.parameters:
            index = self._group_of.get(id(parameter.sharded))
            if index is not None and _grad(parameter) is not None:
                members[index].append(parameter)
        if any(members):
            self._strategy.begin(unit, members, self._rules(optimizer))
            unit.publish(is_rounded=True)
        return any(members)

    def recover(self) -> None:
        """Put sharded parameters back after a step that raised, without gradients cleared since."""
        optimizer = self._optimizer()
        if self._bare.units:
            self._bare.end()
            self._is_entered = False
        elif self._is_entered and optimizer is not None:
            self._strategy.recover()
            self._put_back(optimizer)
            shown = {**_copied(self._shown), **self._common}
            optimizer.state = stepped_state(shown, self.engines, self._refresh)

    def _put_back(self, optimizer: Optimizer) -> None:
        self._is_entered = False
        self._looks.put_back(optimizer)
        for group, before in self._restore:
            group["params"] = before["params"]
            if "fused" in before:
                group["fused"] = before["fused"]
        self._restore = []

    def _rules(self, optimizer: Optimizer) -> list[Rule]:
        if not self.is_flat:
            return []
        return [rule_of(optimizer, group) for group in optimizer.param_groups]

    def _stand_ins(self, optimizer: Optimizer, groups: list[list[UnitParameter]]) -> Any:
        try:
            return self._strategy.enter(groups, self._rules(optimizer))
        except BaseException as error:
            explain(error, self.engines[0].ledger)
            raise

    # state

    def _import_changed(self, optimizer: Optimizer) -> None:
        """Import state that was loaded, cleared or edited since the last step."""
        state = optimizer.state
        if len(state) == len(self._shown) + len(self._common) and all(
            same_entry(dict.get(state, tensor), entry) for tensor, entry in self._shown.items()
        ):
            return
        for group in optimizer.param_groups:
            fuses = may_fuse(optimizer, group)
            for tensor in group["params"]:
                parameter = self.parameter(tensor)
                if parameter is not None:
                    own = own_state(parameter, dict.get(state, tensor, {}))
                    if fuses:  # torch leaves numbers on the CPU: the user asked for no fused step
                        own = with_numbers_on(parameter.local.device, own)
                    self._strategy.import_state(parameter, own)
        self._common = common_state(state)
        self._shown = _copied({k: v for k, v in dict.items(state) if k not in self._common})

    def _refresh(self) -> None:
        """Show the numbers of steps that ran in the background and are over."""
        if isinstance(self._strategy, FlatStep):
            changed = self._strategy.catch_up()
            self._shown |= _copied({p.sharded: state for p, state in changed.items()})

    def _count_states(self, state: dict[Tensor, State]) -> None:
        """Count the bytes of states, unless all are those that were counted; dicts, lists grow."""
        values = [value for entry in state.values() for value in entry.values()]
        known, self._counted = self._counted, values
        is_known = len(known) == len(values) and all(map(operator.is_, known, values))
        if is_known and not any(issubclass(kind, dict | list) for kind in set(map(type, values))):
            return
        for engine in self.engines:
            self._state_bytes[engine].set(state_nbytes(state, engine))


def _grad(parameter: UnitParameter) -> Tensor | None:
    with torch._C.DisableTorchFunctionSubclass():
        return parameter.sharded._grad


def _seen_state(
    state: Mapping[Tensor, State], common: State, stand_ins: Any, foreign: list[list[Tensor]]
) -> defaultdict[Tensor, State]:
    """Return the state that the class's own step sees."""
    others = {tensor for group in foreign for tensor in group} & state.keys()
    seen: defaultdict[Any, State] = defaultdict(dict, common)
    seen.update({tensor: state[tensor] for tensor in others})
    for group in stand_ins:
        seen.update({tensor: kept for tensor, kept in group.items() if kept})
    return seen


def _copied(state: Mapping[Tensor, State]) -> dict[Tensor, State]:
    """Copy the entries: a user may replace the values in those of the optimizer."""
    return {tensor: dict(entry) for tensor, entry in dict.items(state)}  # type: ignore[arg-type]
