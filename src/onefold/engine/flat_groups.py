"""Elementwise optimizers step flat groups.

A *flat group* is a stretch of one unit's flat buffers that one fused call steps. Its parameters are
neighbours in the unit, share an optimizer group, all have a gradient, and have been stepped equally
often. Normally a unit and an optimizer group make one flat group. A parameter without a gradient
splits it, as that parameter must not be stepped. Flat groups, and their states, are cut again only
when this changes.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from onefold.engine.blocked_adam import BlockedAdam
from onefold.engine.blocks import Segment, UnitStep
from onefold.engine.rules import (
    ClassRule,
    Rule,
    State,
    attributes_of,
    begun_at_zero,
    is_moment,
    same_entry,
    state_after_first_step,
)
from onefold.errors import ConfigError
from onefold.layout.model_axes import local_of
from onefold.unit.parameter import UnitParameter
from onefold.unit.unit import Unit, unit_of


@dataclass(slots=True, eq=False)
class FlatGroup:
    """Neighbouring parameters of one unit, stepped as one flat tensor."""

    parameters: list[UnitParameter]
    start: int  # in the unit's flat buffers
    weight: Tensor  # [numel], a view of the unit's weight
    tensor: Tensor  # [numel], a leaf, a view of the unit's weight or master
    state: State = field(default_factory=dict)
    shown: State = field(default_factory=dict)  # the values that its parameters' states show

    @property
    def unit(self) -> Unit:
        unit: Any = self.parameters[0].unit  # asked often: `unit_of` would be a call more
        return unit  # type: ignore[no-any-return]

    def part(self, flat: Tensor) -> Tensor:
        """Return the group's stretch of a flat tensor of the unit; shorter where that ends."""
        return flat[self.start : self.start + self.tensor.numel()]

    def rows(self, value: Tensor, parameter: UnitParameter) -> Tensor:
        """Return the parameter's rows in a flat tensor of the group."""
        start = parameter.span.start - self.start
        return value[start : start + parameter.local.numel()].view(parameter.local.shape)

    def gaps(self) -> Tensor:
        """Return its elements that belong to no parameter [num], int64."""
        gaps = torch.tensor(self.unit.rest.gaps(self.unit.context.rest_rank), dtype=torch.int64)
        gaps = gaps.to(self.tensor.device) - self.start
        return gaps[(gaps >= 0) & (gaps < self.tensor.numel())]

    def is_flat(self, value: object) -> bool:
        """True for a state with one element for each of the weight's."""
        return isinstance(value, Tensor) and value.shape == self.tensor.shape

    def grad(self, unit: Unit) -> Tensor:
        """Return the mean gradient [numel], in the dtype in which the group's unit reduced it."""
        reduced = unit.gradient.reduced
        if reduced is not None and all(unit.gradient.show_means(self.parameters[:1])):
            return self.part(reduced.tensor)
        (parameter,) = self.parameters  # a gradient that lies elsewhere makes a group of its own
        assert parameter.sharded.grad is not None, "a parameter without gradient is stepped"
        return parameter.unwrap(parameter.sharded.grad).reshape(-1)

    def shown_state(self, parameter: UnitParameter) -> State:
        """Return the state of one parameter, its flat entries as views like the parameter."""
        return {
            name: parameter.wrap(self.rows(value, parameter)) if self.is_flat(value) else value
            for name, value in self.state.items()
        }


class FlatStep:
    """Replaces sharded parameters by flat groups while an elementwise optimizer steps."""

    def __init__(
        self, rows: type[Tensor] | None = None, reads: frozenset[str] = frozenset()
    ) -> None:
        self._reads = reads  # attributes of parameters: those of a flat group have the same
        self._rows = rows  # how the class's own step sees weights and states; None: as tensors
        # for each unit, the parameters for which it was cut, and its flat groups by optimizer group
        self._cuts: dict[Unit, tuple[object, list[list[FlatGroup]]]] = {}
        self._entered: dict[Tensor, FlatGroup] = {}  # by the tensor that the class's own step sees
        self._imported: dict[UnitParameter, State] = {}
        self._shown: dict[UnitParameter, State] = {}
        self.rounded: set[Unit] = set()
        self._is_behind = False  # steps began whose values the states do not show yet
        self._own: list[Tensor] = []  # flat states [own rows of a unit], to be stepped in place

    def import_state(self, parameter: UnitParameter, state: State) -> None:
        """Cut per-parameter state to own rows; flat groups take it over at the next step."""
        self._split_states(unit_of(parameter))
        own = {name: _own_rows(parameter, name, value) for name, value in state.items()}
        self._imported[parameter] = own
        self._shown[parameter] = {  # until a flat group takes it over
            name: parameter.wrap(value)
            if isinstance(value, Tensor) and _is_rows(parameter, name, value)
            else value
            for name, value in own.items()
        }

    def note_attributes(self, names: frozenset[str]) -> None:
        """The class reads these attributes of parameters from now on."""
        self._reads = names

    def forget(self) -> None:
        """Drop every flat group, and the states of its parameters."""
        for kept in (self._entered, self._cuts, self._imported, self._shown, self._own):
            kept.clear()

    def kept_here(self, parameters: Sequence[UnitParameter]) -> list[UnitParameter]:
        """Return all: every rank keeps the states of its own rows."""
        return list(parameters)

    def keeper_of(self, parameter: UnitParameter) -> int | None:
        """Return None: every rank keeps the states of its own rows."""
        return None

    def enter(
        self, groups: list[list[UnitParameter]], rules: Sequence[Rule]
    ) -> list[dict[Tensor, State]]:
        """Return one tensor and its state for each flat group, by optimizer group.

        The tensor's `.grad` is a slice of the unit's reduced gradient. Two kinds of flat groups are
        stepped here, so that the class's own step passes over them. Units that are stepped in
        blocks begin to step in the background. Groups that the rule steps better than the class
        keep their tensor, without `.grad`.
        """
        stand_ins: list[dict[Tensor, State]] = [{} for _ in groups]
        left = set[Unit]()
        self._entered.clear()
        self.rounded.clear()
        with torch._C.DisableTorchFunctionSubclass(), torch.no_grad():
            for unit, members in _by_unit(groups).items():
                if unit.steps_in_blocks:
                    self.begin(unit, members, rules)
                    continue
                cut = self._flat_groups(unit, members, rules)
                for tensors, flats, rule in zip(stand_ins, cut, rules, strict=True):
                    for flat in flats:
                        kind = self._rows
                        tensors[flat.tensor] = flat.state if kind is None else _seen(flat, kind)
                        self._entered[flat.tensor] = flat
                        if not self._step_at_once(unit, flat, rule):
                            left.add(unit)
        self.rounded -= left
        self._own.clear()
        return stand_ins

    def _step_at_once(self, unit: Unit, flat: FlatGroup, rule: Rule) -> bool:
        """Step and round a flat group if its rule does that better than the class."""
        grad, stepped = flat.grad(unit), flat.tensor.detach()
        weight = stepped if unit.master is None else flat.weight
        if isinstance(rule, BlockedAdam) and rule.steps_at_once(stepped, grad, weight):
            rule.step(stepped, grad, weight, flat.state)
            self.rounded.add(unit)
            return True
        grad = grad.to(stepped.dtype)
        flat.tensor.grad = grad if self._rows is None else grad.as_subclass(self._rows)
        return False

    def take_over(self, flats: Sequence[Tensor]) -> None:
        self._own += flats

    def begin(self, unit: Unit, members: list[list[UnitParameter]], rules: Sequence[Rule]) -> None:
        """Begin to step parameters of a unit, by optimizer group, in the background."""
        segments: list[Segment] = []
        unit.join_step()  # of another optimizer's parameters: this one may cut states again
        with torch._C.DisableTorchFunctionSubclass(), torch.no_grad():
            for flats, rule in zip(self._flat_groups(unit, members, rules), rules, strict=True):
                segments += [self._segment(flat, self._rule(rule, flat)) for flat in flats]
        unit.begin_step(UnitStep(unit, segments))
        self._is_behind = True

    def keep(self, parameters: Sequence[UnitParameter], names: Iterable[str]) -> None:
        """Note that states of parameters lie in moments; raise `StateError` if another's do."""
        for name in names:
            for parameter in parameters:
                unit_of(parameter).keep_moment(parameter, name, self)

    def _segment(self, flat: FlatGroup, rule: Rule) -> Segment:
        """Return the part of a unit's background step that steps a flat group.

        Before the first step, its states are placed in the unit's moments.
        """
        unit, is_new = flat.unit, not flat.state
        if is_new:
            probed = state_after_first_step(rule, flat.tensor.dtype)
            moments = {name: value.dtype for name, value in probed.items() if is_moment(value)}
            self.keep(flat.parameters, moments)
            unit.make_moments(moments)
            placed = {name: flat.part(unit.moments[name].tensor.data) for name in moments}
            flat.state.update(probed | placed)
        flats = tuple(name for name, value in flat.state.items() if flat.is_flat(value))
        owner = unit.gradient.reduced
        return Segment(flat.start, flat.grad(unit), rule, flats, flat.state, is_new, owner)

    def _rule(self, rule: Rule, flat: FlatGroup) -> Rule:
        """Return a rule that reads the attributes of the group's parameters."""
        if not self._reads or not isinstance(rule, ClassRule):
            return rule
        return rule.with_attributes(attributes_of(flat.tensor, self._reads))

    def leave(self, state: dict[Tensor, State]) -> dict[UnitParameter, State]:
        """Return each parameter's state; views are made again where a step replaced a value."""
        for flat in self._entered.values():
            flat.tensor.grad = None
            after = state.get(flat.tensor, {})
            if after is not flat.state:
                flat.state = after
                if self._rows is not None:
                    flat.state = _seen(flat, Tensor)
                self._shown.pop(flat.parameters[0], None)
        self._show_replaced()
        return self._shown

    def catch_up(self) -> dict[UnitParameter, State]:
        """Steps in the background are over: return the parameters' states that they changed."""
        is_behind, self._is_behind = self._is_behind, False
        return self._show_replaced() if is_behind else {}

    def _show_replaced(self) -> dict[UnitParameter, State]:
        """Show values that steps have replaced; return the parameters' states that changed."""
        changed: dict[UnitParameter, State] = {}
        for flat in (flat for _, cut in self._cuts.values() for flats in cut for flat in flats):
            if flat.parameters[0] not in self._shown or not same_entry(flat.state, flat.shown):
                flat.shown = dict(flat.state)
                for parameter in flat.parameters:
                    changed[parameter] = self._shown.setdefault(parameter, {})
                    changed[parameter].clear()
                    changed[parameter].update(flat.shown_state(parameter))
        return changed

    def recover(self) -> None:
        """Clear gradients of parameters whose tensor was cleared after a step that raised."""
        for flat in self._entered.values():
            if flat.tensor.grad is None:
                for parameter in flat.parameters:
                    parameter.sharded.grad = None
            flat.tensor.grad = None

    # cutting

    def _flat_groups(
        self, unit: Unit, members: list[list[UnitParameter]], rules: Sequence[Rule]
    ) -> list[list[FlatGroup]]:
        """Return the unit's flat groups, cut again if other parameters are stepped than before."""
        shows = unit.gradient.show_means
        key = [
            (shows(group), group, self._reads and [*map(self._attributes, group)])
            for group in members
        ]
        known = self._cuts.get(unit)
        if known is None or known[0] != key:
            self._split_states(unit)
            cut = [self._cut_states(unit, *group) for group in zip(members, rules, strict=True)]
            known = self._cuts[unit] = key, cut
        return known[1]

    def _split_states(self, unit: Unit) -> None:
        """Give every parameter its part of the states, so that the unit can be cut again."""
        _, cut = self._cuts.pop(unit, (None, []))
        for flat in (flat for flats in cut for flat in flats):
            for parameter in flat.parameters:
                self._imported[parameter] = {
                    name: flat.rows(value, parameter) if flat.is_flat(value) else value
                    for name, value in flat.state.items()
                }

    def _cut_states(self, unit: Unit, members: list[UnitParameter], rule: Rule) -> list[FlatGroup]:
        index = {parameter: i for i, parameter in enumerate(unit.parameters)}
        shows = dict(zip(members, unit.gradient.show_means(members), strict=True))
        stretches: list[list[UnitParameter]] = []
        for parameter in sorted(members, key=index.__getitem__):
            last = stretches[-1][-1] if stretches else parameter
            joins = index[last] + 1 == index[parameter] and shows[last] and shows[parameter]
            joins = joins and self._signature(last) == self._signature(parameter)
            stretches[-1].append(parameter) if joins else stretches.append([parameter])
        return [self._make(unit, parameters, rule) for parameters in stretches]

    def _signature(self, parameter: UnitParameter) -> object:
        """Return the part of a state that must be equal in a group: all values except rows."""
        state = self._imported.get(parameter, {})
        own = self._reads and self._attributes(parameter)
        return own, [
            (name, "rows" if _is_rows(parameter, name, value) else _plain_number(value))
            for name, value in sorted(state.items())
        ]

    def _attributes(self, parameter: UnitParameter) -> str:
        """Write down the attributes that the class reads."""
        return repr(attributes_of(parameter.sharded, sorted(self._reads)))

    def _make(self, unit: Unit, parameters: list[UnitParameter], rule: Rule) -> FlatGroup:
        rank = unit.context.rest_rank
        first, last = (unit.parameters.index(p) for p in (parameters[0], parameters[-1]))
        start, stop = unit.rest.span(first, last, rank)
        if not all(unit.gradient.show_means(parameters[:1])):  # its gradient has no gap behind it
            stop = start + parameters[0].local.numel()
        weight, stepped = unit.weight.tensor[start:stop], unit.stepped[start:stop]
        shown: Tensor = nn.Parameter(stepped)
        if self._rows is not None:
            shown = stepped.as_subclass(self._rows).requires_grad_()
        vars(shown).update(attributes_of(parameters[0].sharded, self._reads))
        flat = FlatGroup(parameters, start, weight, shown)
        states = {p: self._imported.get(p, {}) for p in parameters}
        begun = begun_at_zero(rule, stepped.dtype) if self._rows and states[parameters[0]] else {}
        for name, value in states[parameters[0]].items():
            if _is_rows(parameters[0], name, value):
                rows = {p: state[name] for p, state in states.items()}
                flat.state[name] = self._joined(flat, name, rows, begun.get(name, 0))
            elif isinstance(value, Tensor):
                flat.state[name] = value.cpu().clone() if unit.steps_in_blocks else value.clone()
            else:
                flat.state[name] = value
        for parameter in parameters:
            self._imported.pop(parameter, None)
            self._shown.pop(parameter, None)
        return flat

    def _joined(
        self, flat: FlatGroup, name: str, rows: dict[UnitParameter, Tensor], between: float
    ) -> Tensor:
        """Return one state as one flat tensor: in the unit's moments, in `own`, or a new one.

        `between`: the value of elements that belong to no parameter.
        """
        first, unit = rows[flat.parameters[0]], flat.unit
        if unit.steps_in_blocks:
            self.keep(flat.parameters, [name])
            unit.make_moments({name: first.dtype})
            joined = flat.part(unit.moments[name].tensor.data)
        else:
            storage = first.untyped_storage().data_ptr()
            # empty storages of all dtypes begin at address 0
            own = [t for t in self._own if t.untyped_storage().data_ptr() == storage != 0]
            joined = flat.part(own[0]) if own else first.new_empty(0)
            if len(joined) < flat.tensor.numel():
                joined = first.new_empty(flat.tensor.numel())
            joined.index_fill_(0, flat.gaps(), between)
        for parameter, row in rows.items():
            view = flat.rows(joined, parameter)
            if view.data_ptr() != row.data_ptr():
                view.copy_(row)
        return joined


def _seen(flat: FlatGroup, kind: type[Tensor]) -> State:
    """Return the states of a flat group, their rows as tensors of a class."""
    return {k: v.as_subclass(kind) if flat.is_flat(v) else v for k, v in flat.state.items()}


def _by_unit(groups: list[list[UnitParameter]]) -> dict[Unit, list[list[UnitParameter]]]:
    """Return each unit's parameters by optimizer group, units in the order of the module."""
    by_unit: dict[Unit, list[list[UnitParameter]]] = {}
    for index, group in enumerate(groups):
        for parameter in group:
            unit: Any = parameter.find_unit() or parameter.unit  # which raises: it is gone
            if (members := by_unit.get(unit)) is None:
                members = by_unit[unit] = [[] for _ in groups]
            members[index].append(parameter)
    return by_unit


NUMBERS = ("step", "mu_product", "eta", "mu")
"""States of torch's optimizers that are one number, also where the parameter is one."""


def with_numbers_on(device: torch.device, state: State) -> State:
    """Return a state whose numbers are on the device, where fused steps read and count them."""
    return {
        name: value.to(device) if name in NUMBERS and isinstance(value, Tensor) else value
        for name, value in state.items()
    }


def _is_rows(parameter: UnitParameter, name: str, value: object) -> bool:
    if not isinstance(value, Tensor) or value.shape != parameter.local.shape:
        return False
    return value.dim() > 0 or (parameter.slot.replicated and name not in NUMBERS)


def _plain_number(value: object) -> object:
    return value.item() if isinstance(value, Tensor) else value


def _own_rows(parameter: UnitParameter, name: str, value: object) -> object:
    """Return this rank's rows of a state like the parameter; any other state as it is."""
    if not isinstance(value, Tensor):
        return value
    shape = tuple(value.shape)
    if shape == parameter.shape and shape != ():
        return parameter.unwrap(value.detach()).to(unit_of(parameter).stepped.dtype)
    if value.numel() == 1:
        own = local_of(value.detach()).clone()
        # torch's load_state_dict has narrowed a moment to the dtype of its parameter
        return own.to(unit_of(parameter).stepped.dtype) if _is_rows(parameter, name, own) else own
    raise cannot_cut(parameter.fqn, name, parameter.shape, shape)


def cannot_cut(fqn: str, name: str, wanted: Sequence[int], got: Sequence[int]) -> ConfigError:
    """Return the error for optimizer state that is neither like its parameter nor a number."""
    shape = f"optimizer state {name!r} of {fqn!r} to have shape {list(wanted)} or one element"
    hint = "shard before the first step, or clear optimizer.state"
    return ConfigError(shape, f"shape {list(got)}", hint=hint)
