"""Elementwise optimizers on flat runs.

A *run* is a stretch of one unit's flat buffer whose parameters are in the same optimizer group,
all have a gradient, and have been stepped equally often: one tensor, so one fused call. Normally a
unit and group is one run; a parameter that got no gradient splits it, as it must not be stepped.
Runs are cut anew only when that changes, and their state with them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from onefold.engine.blocked_adam import BlockedAdam
from onefold.engine.blocks import Segment, UnitStep
from onefold.engine.rules import Rule, is_moment, state_after_first_step
from onefold.errors import ConfigError, expected
from onefold.unit.parameter import UnitParameter
from onefold.unit.unit import Unit

State = dict[str, Any]


@dataclass(slots=True, eq=False)
class FlatGroup:
    """Neighbouring parameters of one unit, stepped as one flat tensor."""

    parameters: list[UnitParameter]
    start: int  # in the unit's flat buffers
    weight: Tensor  # [numel], a view of the unit's weight
    tensor: nn.Parameter  # [numel], a view of the unit's weight or master
    state: State = field(default_factory=dict)

    def view(self, value: Tensor, parameter: UnitParameter) -> Tensor:
        """The parameter's rows in a flat state tensor of the run."""
        start = self.view_start(parameter)
        return value[start : start + parameter.local.numel()].view(parameter.local.shape)

    def view_start(self, parameter: UnitParameter) -> int:
        """Where the parameter's rows start in a flat tensor of the run."""
        return parameter.slot.shard_offsets[parameter.unit.context.rest_rank] - self.start

    def is_elementwise(self, value: object) -> bool:
        return isinstance(value, Tensor) and value.shape == self.tensor.shape


class FlatStep:
    """Groups of faces become runs, and back."""

    def __init__(self) -> None:
        self._keys: dict[Unit, object] = {}  # how each unit's runs are cut
        self._runs: dict[Unit, list[list[FlatGroup]]] = {}  # by group
        self._by_tensor: dict[Tensor, FlatGroup] = {}  # those that the class's own step sees
        self._imported: dict[UnitParameter, State] = {}
        self._shown: dict[UnitParameter, State] = {}
        self.rounded: set[Unit] = set()
        self.own: list[Tensor] = []  # flat states [own rows of a unit] to be stepped as they lie

    def import_state(self, parameter: UnitParameter, state: State) -> None:
        """Cut per-parameter state to own rows; runs take it over at the next step."""
        self._split(parameter.unit)
        self._imported[parameter] = {
            name: _own_rows(parameter, name, value) for name, value in state.items()
        }

    def forget(self) -> None:
        """Drop every run, and what its parameters were shown."""
        self._by_tensor, self._runs, self._keys = {}, {}, {}
        self._imported.clear()
        self._shown.clear()
        self.own.clear()

    def kept_here(self, parameters: Sequence[UnitParameter]) -> list[UnitParameter]:
        """All: every rank keeps own rows."""
        return list(parameters)

    def enter(self, groups: list[list[UnitParameter]], rules: Sequence[Rule]) -> list[list[Tensor]]:
        """One tensor for each run, its `.grad` a slice of the unit's reduced gradient.

        Some runs are stepped here instead, so that the class's own step passes over them: those of
        units that are stepped in blocks, which this begins, and those whose rule is better at it
        than the class, which are left without `.grad`.
        """
        stand_ins: list[list[Tensor]] = [[] for _ in groups]
        self._by_tensor, left = {}, set[Unit]()
        self.rounded.clear()
        with torch._C.DisableTorchFunctionSubclass(), torch.no_grad():
            for unit, members in _by_unit(groups).items():
                if unit.steps_in_blocks:
                    self.begin(unit, members, rules)
                    continue
                for own, runs, rule in zip(
                    stand_ins, self._runs_of(unit, members), rules, strict=True
                ):
                    for run in runs:
                        own.append(run.tensor)
                        self._by_tensor[run.tensor] = run
                        if not self._step_at_once(run, rule):
                            left.add(unit)
        self.rounded -= left
        self.own.clear()
        return stand_ins

    def _step_at_once(self, run: FlatGroup, rule: Rule) -> bool:
        """Step a run, and round it into its weight, if its rule does that better than the class."""
        unit, grad, stepped = run.parameters[0].unit, _run_grad(run), run.tensor.detach()
        weight = stepped if unit.master is None else run.weight
        if isinstance(rule, BlockedAdam) and rule.steps_at_once(stepped, grad, weight):
            rule.step(stepped, grad, weight, run.state)
            self.rounded.add(unit)
            return True
        run.tensor.grad = grad.to(stepped.dtype)
        return False

    def begin(self, unit: Unit, members: list[list[UnitParameter]], rules: Sequence[Rule]) -> None:
        """Step some parameters of a unit, by group, in the background."""
        segments: list[Segment] = []
        unit.join_step()  # of another optimizer's part: runs may be cut anew
        with torch._C.DisableTorchFunctionSubclass(), torch.no_grad():
            for runs, rule in zip(self._runs_of(unit, members), rules, strict=True):
                segments += [_segment(run, rule) for run in runs]
        unit.pending = UnitStep(unit, segments)

    def state_of(self, stand_in: Tensor) -> State | None:
        return self._by_tensor[stand_in].state

    def leave(self, state: dict[Tensor, State]) -> dict[UnitParameter, State]:
        """Show each parameter its slices; views are made once, the step changes them in place."""
        for run in self._by_tensor.values():
            run.tensor.grad = None
            after = state.get(run.tensor, {})
            if after is not run.state:
                run.state = after
                self._shown.pop(run.parameters[0], None)
        for runs in (runs for unit in self._runs.values() for runs in unit):
            for run in runs:
                if not self._is_shown(run):
                    for parameter in run.parameters:
                        self._shown[parameter] = _show(run, parameter)
        return self._shown

    def recover(self) -> None:
        """Clear the gradients of faces whose stand-in was cleared after a step that raised."""
        for run in self._by_tensor.values():
            if run.tensor.grad is None:
                for parameter in run.parameters:
                    parameter.sharded.grad = None
            run.tensor.grad = None

    def _is_shown(self, run: FlatGroup) -> bool:
        shown = self._shown.get(run.parameters[0])
        return shown is not None and shown.keys() == run.state.keys()

    # cutting

    def _runs_of(self, unit: Unit, members: list[list[UnitParameter]]) -> list[list[FlatGroup]]:
        """The runs of a unit by group, cut anew if other parameters are stepped than last time."""
        key = [[(id(p), _is_flat(p)) for p in group] for group in members]
        if self._keys.get(unit) != key:
            self._split(unit)
            self._runs[unit] = [self._cut_unit(unit, group) for group in members]
            self._keys[unit] = key
        return self._runs[unit]

    def _split(self, unit: Unit) -> None:
        """Give every parameter its part of the runs' state, so that runs can be cut anew."""
        self._keys.pop(unit, None)
        for run in (run for runs in self._runs.pop(unit, []) for run in runs):
            for parameter in run.parameters:
                self._imported[parameter] = {
                    name: run.view(value, parameter) if run.is_elementwise(value) else value
                    for name, value in run.state.items()
                }

    def _cut_unit(self, unit: Unit, members: list[UnitParameter]) -> list[FlatGroup]:
        index = {parameter: i for i, parameter in enumerate(unit.parameters)}
        runs: list[list[UnitParameter]] = []
        for parameter in sorted(members, key=index.__getitem__):
            joins = (
                bool(runs)
                and index[runs[-1][-1]] + 1 == index[parameter]
                and _is_flat(runs[-1][-1])
                and _is_flat(parameter)
                and self._signature(runs[-1][-1]) == self._signature(parameter)
            )
            runs[-1].append(parameter) if joins else runs.append([parameter])
        return [self._make_run(unit, parameters) for parameters in runs]

    def _taken_over(self, run: FlatGroup, rows: dict[UnitParameter, Tensor]) -> Tensor | None:
        """One state of a run where it lies, if it lies as a run's in a tensor that is ours."""
        first = rows[run.parameters[0]]
        if run.parameters[0].unit.steps_in_blocks:  # its states have their place
            return None
        for flat in self.own:
            if flat.untyped_storage().data_ptr() == first.untyped_storage().data_ptr():
                joined = flat[run.start : run.start + run.tensor.numel()]
                if len(joined) == run.tensor.numel() and all(
                    run.view(joined, p).data_ptr() == row.data_ptr() for p, row in rows.items()
                ):
                    return joined
        return None

    def _signature(self, parameter: UnitParameter) -> object:
        """What must agree for parameters to share a run: names, kinds, and values but rows."""
        state = self._imported.get(parameter, {})
        return [
            (name, "rows" if _is_rows(parameter, name, value) else _plain(value))
            for name, value in sorted(state.items())
        ]

    def _make_run(self, unit: Unit, parameters: list[UnitParameter]) -> FlatGroup:
        rank = unit.context.rest_rank
        first, last = (unit.parameters.index(p) for p in (parameters[0], parameters[-1]))
        start, stop = unit.rest.span(first, last, rank)
        if not _is_flat(parameters[0]):  # its gradient has no gap behind it
            stop = start + parameters[0].local.numel()
        weight, stepped = unit.weight.tensor[start:stop], unit.stepped[start:stop]
        run = FlatGroup(parameters, start, weight, nn.Parameter(stepped))
        states = {p: self._imported.get(p, {}) for p in parameters}
        for name, value in states[parameters[0]].items():
            if not _is_rows(parameters[0], name, value):
                if isinstance(value, Tensor):
                    value = value.cpu().clone() if unit.steps_in_blocks else value.clone()
                run.state[name] = value
                continue
            rows = {p: state[name] for p, state in states.items()}
            own = self._taken_over(run, rows)
            run.state[name] = _joined(run, rows, name) if own is None else own
        for parameter in parameters:
            self._imported.pop(parameter, None)
            self._shown.pop(parameter, None)
        return run


def _joined(run: FlatGroup, rows: dict[UnitParameter, Tensor], name: str) -> Tensor:
    """One state of a run as one flat tensor, where such states of its unit rest."""
    first, unit = rows[run.parameters[0]], run.parameters[0].unit
    if unit.steps_in_blocks:
        unit.make_moments({name: first.dtype})
        joined = unit.moments[name].tensor.data[run.start : run.start + run.tensor.numel()]
    else:
        joined = torch.zeros(run.tensor.numel(), dtype=first.dtype, device=first.device)
    for parameter, row in rows.items():
        view = run.view(joined, parameter)
        if view.data_ptr() != row.data_ptr():
            view.copy_(row)
    return joined


def _by_unit(groups: list[list[UnitParameter]]) -> dict[Unit, list[list[UnitParameter]]]:
    """For each unit, in the order of the module, its parameters by group."""
    found: dict[Unit, list[list[UnitParameter]]] = {}
    for index, group in enumerate(groups):
        for parameter in group:
            found.setdefault(parameter.unit, [[] for _ in groups])[index].append(parameter)
    return found


def _segment(run: FlatGroup, rule: Rule) -> Segment:
    """What a unit's step needs to know of a run; at the first step, where its states will be."""
    unit, dtype = run.parameters[0].unit, run.tensor.dtype
    is_new = not run.state
    if is_new:
        probed = state_after_first_step(rule, dtype)
        unit.make_moments({name: v.dtype for name, v in probed.items() if is_moment(v)})
        for name, value in probed.items():
            if is_moment(value):
                flat = unit.moments[name].tensor.data
                run.state[name] = flat[run.start : run.start + run.tensor.numel()]
            else:
                run.state[name] = value
    moments = tuple(name for name, value in run.state.items() if run.is_elementwise(value))
    owner = unit.gradient.reduced
    return Segment(run.start, _run_grad(run), rule, moments, run.state, is_new, owner)


def _is_flat(parameter: UnitParameter) -> bool:
    """True if the gradient is a slice of its unit's flat reduced gradient."""
    gradient = parameter.unit.gradient
    return gradient.reduced is not None and parameter.sharded.grad is gradient.shown.get(parameter)


def _run_grad(run: FlatGroup) -> Tensor:
    """The run's mean gradient [numel], in the dtype in which it was reduced."""
    unit = run.parameters[0].unit
    if _is_flat(run.parameters[0]) and unit.gradient.reduced is not None:
        return unit.gradient.reduced.tensor[run.start : run.start + run.tensor.numel()]
    parameter = run.parameters[0]  # a gradient that lies elsewhere makes a run of its own
    assert parameter.sharded.grad is not None, "a parameter without gradient is stepped"
    return parameter.unwrap(parameter.sharded.grad).reshape(-1)


def _show(run: FlatGroup, parameter: UnitParameter) -> State:
    return {
        name: parameter.wrap(run.view(value, parameter)) if run.is_elementwise(value) else value
        for name, value in run.state.items()
    }


NUMBERS = ("step", "mu_product", "eta", "mu")
"""States of torch's optimizers that are one number, also where the parameter is one."""


def _is_rows(parameter: UnitParameter, name: str, value: object) -> bool:
    return (
        isinstance(value, Tensor)
        and value.shape == parameter.local.shape
        and (value.dim() > 0 or (parameter.slot.replicated and name not in NUMBERS))
    )


def _plain(value: object) -> object:
    return value.item() if isinstance(value, Tensor) else value


def _own_rows(parameter: UnitParameter, name: str, value: object) -> object:
    """A state value as this rank keeps it: own rows of a tensor like the parameter, or itself."""
    if not isinstance(value, Tensor):
        return value
    shape = tuple(value.shape)
    if shape == parameter.slot.shape and shape != ():
        return parameter.unwrap(value.detach()).to(parameter.unit.stepped.dtype)
    if value.numel() == 1:
        return value.detach().clone()
    raise cannot_cut(parameter.fqn, name, parameter.slot.shape, shape)


def cannot_cut(fqn: str, name: str, wanted: Sequence[int], got: Sequence[int]) -> ConfigError:
    """The error for optimizer state that is neither like its parameter nor a number."""
    return ConfigError(
        expected(
            f"optimizer state {name!r} of {fqn!r} to have shape {list(wanted)} or one element",
            f"shape {list(got)}",
            hint="shard before the first step, or clear optimizer.state",
        )
    )
