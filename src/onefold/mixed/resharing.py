"""`onefold.mixed.reshare`: other shares at a step boundary, without a restart.

    agree      every rank: shares, room, and the names of what moves; an error here changes nothing
    move       unit by unit: own rows of weights, masters, moments, averages, gradients
    follow     parameters show the new rows; gathers, reductions and optimizers follow

Parameters, optimizers and averages stay the same objects. See docs/adr/0025.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from onefold.engine.engine import Engine
from onefold.engine.registry import engine_of
from onefold.engine.watch import in_backward
from onefold.errors import ConfigError, StateError
from onefold.fit.bounds import RankMemory
from onefold.fit.shares import AUTO, SharesChoice, choose, is_auto, unless_even, weights_of
from onefold.layout.ledger import Kind
from onefold.layout.ranges import Shares
from onefold.mixed.moving import Entry, OptimizerStates, Rows, move
from onefold.recipe import Recipe
from onefold.unit.context import Context, UnitSpec
from onefold.unit.cut_dtensor import WeightedMesh
from onefold.unit.parameter import UnitParameter
from onefold.unit.unit import Unit
from onefold.wire.ranks import local_place
from onefold.wire.together import announcing, collect, same


def reshare(module: nn.Module, shares: SharesChoice = AUTO) -> None:
    """Change how much state each rank holds, between two steps. A collective.

    Rows move straight from the rank that held them to the rank that holds them now, and no other
    row is sent. Weights, masters, moments, averages of `onefold.ema`, gradients of micro-batches
    and error feedback follow. The run goes on as if it had had these shares from the start: bit
    for bit where messages are exact and gradients are not clipped. The module's parameters and the
    optimizers stay the same objects. Gradients that were stepped by are cleared.

    Args:
        module: one that `shard` has sharded, at stage 1 to 3.
        shares: as in `onefold.shard`: None, "auto" or one weight a rank.

    Raises:
        ConfigError: shares that mean nothing, or differ between ranks. Nothing has changed.
        StateError: inside forward, backward, `unsharded`, `generating` or `applied`; or a module
            whose state cannot move. Nothing has changed.
        TierError: a rank has no room for its share. Nothing has changed.

    Example:
        >>> optimizer.step()
        >>> optimizer.zero_grad()
        >>> onefold.mixed.reshare(model, [3, 1])  # rank 0 holds three quarters from now on

    Source: disjoint moves between ranks, as ElasWave (arXiv 2510.00606) reshards interleaved ZeRO.
    """
    engine = engine_of(module)
    group, hint = engine.group, "call onefold.mixed.reshare with the same shares on every rank"
    with announcing(group):
        weights, *_ = same(
            group, lambda: _checked_values(engine, shares), "`shares`", hint=hint, kind=ConfigError
        )
        ready = _rest(engine)
        recipe = _recipe(engine, weights)
        if recipe.shares != engine.recipe.shares:
            _Reshare.prepare_for(engine, ready, recipe, collect(group, ready.notes)).move_all()


def _checked_values(engine: Engine, shares: object) -> Shares | str:
    """Put the argument into values."""
    weights = AUTO if is_auto(shares) else None if shares is None else weights_of(shares)
    _check_state(engine)
    ranks = engine.recipe.shard_world
    if isinstance(weights, tuple) and len(weights) != ranks:
        wanted = f"`shares` with one weight for each of {ranks} ranks"
        raise ConfigError(wanted, repr(shares), hint="in rank order")
    return weights if isinstance(weights, str) else unless_even(weights)


def _check_state(engine: Engine) -> None:
    """Raise `StateError` where rows cannot move, or not now."""
    recipe, routes, got = engine.recipe, engine.context.routes, ""
    anchors = [usage.now for (kind, _), usage in engine.ledger.usage.items() if kind is Kind.ANCHOR]
    if engine.schedule.forward_depth > 0 or in_backward() or engine.schedule.is_backward:
        got = "a call inside forward or backward"
    elif engine.is_unsharded or engine.schedule.driven.keeps:
        got = "a call inside `onefold.unsharded`, `onefold.generating` or `onefold.stream`"
    elif not recipe.is_sharded:
        got = "stage 0, where every rank holds all state"
    elif engine.is_inference:
        got = "a module that onefold.stream runs"
    elif engine.context.meshes or engine.context.everyone is not engine.group:
        got = "a module that tensor parallelism has cut before"
    elif (routes.reduce_hops or routes.replicas) and routes.feeds_back:
        got = "Wire(feedback=True) on a mesh of two axes, whose residuals belong to the cut"
    elif any(anchors):
        got = "a module of onefold.islands, whose anchors other islands know by their cut"
    if got:
        where = f"rank {engine.group.rank}"
        hint = "between two steps, at stage 1 to 3; or load a checkpoint under other shares"
        raise StateError("a module whose rows may move", got, where=where, hint=hint)


def _recipe(engine: Engine, weights: Shares | str) -> Recipe:
    """The recipe under other shares, for which every rank has room. A collective."""
    held: dict[str, int] = {}
    is_cpu = engine.recipe.device_type == "cpu"
    for (_, tier), usage in engine.ledger.usage.items():
        place = "cpu" if is_cpu and tier == "device" else tier
        held[place] = held.get(place, 0) + usage.now
    measures = isinstance(weights, str)
    wanted = replace(engine.recipe, shares=None if isinstance(weights, str) else weights)
    memory = RankMemory(engine.context.store.device, local_place(engine.group)[1], engine.group)
    return choose(wanted, engine.facts.forecaster.needs_of, memory, held, is_auto=measures)[0]


@dataclass(frozen=True, slots=True)
class _Ready:
    """A module at rest, and the states of its optimizers."""

    states: list[OptimizerStates]
    gradients: dict[Unit, tuple[dict[UnitParameter, Tensor], dict[UnitParameter, Tensor]]]

    def notes(self) -> tuple[list[dict[str, Entry]], list[str]]:
        """What this rank has of each parameter, beside its weight, by name."""
        means = [p.fqn for gradients, _ in self.gradients.values() for p in gradients]
        return [states.describe() for states in self.states], means


def _rest(engine: Engine) -> _Ready:
    """Let every unit rest; a collective where adapters came, or sums of a node wait."""
    engine.note_structure()
    engine.rest()
    if any(unit.gradient.reduction.waits for unit in engine.units):
        engine.complete()
    for unit in engine.units:
        unit.wait_step()
        unit.check_untouched()
        unit.refresh_master()
        unit.gradient.drop_cleared()
    gradients = {unit: unit.gradient.accumulated() for unit in _moving(engine)}
    return _Ready(OptimizerStates.all_of(engine), gradients)


def _moving(engine: Engine) -> list[Unit]:
    """The units whose rows move: not experts on a mesh of their own, nor late adapters."""
    context = engine.context
    return [unit for unit in engine.units if unit.context is context]


@dataclass(frozen=True, slots=True)
class _Reshare:
    """One change of shares, which all ranks have agreed on."""

    engine: Engine
    ready: _Ready
    recipe: Recipe
    context: Context
    entries: list[dict[str, Entry]]  # by optimizer and fqn: what each parameter has
    means: frozenset[str]  # parameters with a mean gradient

    @staticmethod
    def prepare_for(engine: Engine, ready: _Ready, recipe: Recipe, notes: list[Any]) -> _Reshare:
        """Take the notes of the ranks that held rows: a rank without rows counts no steps."""
        old = engine.context
        assert old.mesh is not None, "several ranks see their rows as DTensors"
        base, shares = WeightedMesh.plain(old.mesh), recipe.shares
        mesh = base if shares is None else WeightedMesh.over(base, shares)
        context = replace(old, shares=shares, mesh=mesh)
        first = engine.group.rank - old.rank  # of the ranks that hold this copy
        own = notes[first : first + old.world_size]
        holders = {
            p.fqn: next((r for r in range(old.world_size) if p.slot.piece_numel(r)), old.rank)
            for unit in _moving(engine)
            for p in unit.parameters
        }
        held = {fqn: own[rank] for fqn, rank in holders.items()}
        entries = [
            {fqn: states[at][fqn] for fqn, (states, _) in held.items() if fqn in states[at]}
            for at in range(len(ready.states))
        ]
        means = {fqn for fqn, (_, names) in held.items() if fqn in names}
        return _Reshare(engine, ready, recipe, context, entries, frozenset(means))

    @torch.no_grad()
    def move_all(self) -> None:
        """Move all units, one at a time: each holds its old and new rows together meanwhile."""
        engine, recipe = self.engine, self.recipe
        for states in self.ready.states:
            states.take_states()
        for unit in _moving(engine):
            by_rows = unit.context.routes.gather_hops is not None or unit.is_tiled
            self._move(unit, unit.spec.on(self.context, by_rows=by_rows))
        engine.recut(self.context, recipe)
        for states in self.ready.states:
            states.end_move()

    def _move(self, unit: Unit, spec: UnitSpec) -> None:
        """Move the rows of one unit, and let all that refers to them follow."""
        numel, edits = spec.rest.shard_numel(spec.context.rest_rank), unit.edits.all()
        before = [buffer.tensor for buffer in unit.row_buffers()]
        buffers = unit.row_buffers()[: len(before) - len(unit.moments)]
        stores = [unit.context.tiers.weight] + [unit.state_store] * (len(unit.row_buffers()) - 1)
        left = [b.recut(numel, s) for b, s in zip(unit.row_buffers(), stores, strict=True)]
        items: list[Rows] = []
        for old, buffer in zip(before, buffers, strict=False):
            items += [
                self._moved_rows(spec, p, old[p.span], buffer.tensor) for p in unit.parameters
            ]
        flats = [self._state_rows(unit, spec, at, items) for at in range(len(self.ready.states))]
        means = self._mean_rows(unit, spec, items)
        move(items, self.context, unit.name)
        partials = self.ready.gradients[unit][1]
        rank = spec.context.rank
        residuals = unit.gradient.reduction.feedback.taken(unit.wire, rank)
        unit.gradient.drop_partial()
        unit.recut(spec, edits)
        shaped = {p: mean.view(p.local.shape) for p, mean in means.items()}
        unit.gradient.restore(shaped, partials)
        unit.gradient.reduction.feedback.give(residuals, spec.wire, rank)
        for states, entries, own in zip(self.ready.states, self.entries, flats, strict=True):
            for parameter in unit.parameters:
                if parameter.fqn in entries:
                    states.give(parameter, entries[parameter.fqn], own)
        items.clear()
        for allocation in left:
            allocation.discard()
        unit.forget()

    def _moved_rows(
        self, spec: UnitSpec, parameter: UnitParameter, before: Tensor, after: Tensor
    ) -> Rows:
        """Rows of a parameter before, and their place in a flat tensor of the unit after."""
        slot, rank = spec.rest.slots[parameter.index], spec.context.rest_rank
        start = spec.rest.starts(rank)[parameter.index]
        room = after[start : start + slot.piece_numel(rank)]
        if slot.replicated:
            room.copy_(before)
        return Rows(parameter.slot, slot, before.reshape(-1), room)

    def _state_rows(
        self, unit: Unit, spec: UnitSpec, at: int, items: list[Rows]
    ) -> dict[str, Tensor]:
        """Add the rows of one optimizer's states of a unit; return the flat tensors they go to."""
        states, entries, flats = self.ready.states[at], self.entries[at], dict[str, Tensor]()
        numel = spec.rest.shard_numel(spec.context.rest_rank)
        for parameter in unit.parameters:
            for name, dtype in sorted(entries.get(parameter.fqn, {}).items()):
                if isinstance(dtype, torch.dtype):
                    if name not in flats:
                        flats[name] = states.room(unit, name, dtype, numel)
                    before = states.rows(parameter, name, dtype)
                    items.append(self._moved_rows(spec, parameter, before, flats[name]))
        return flats

    def _mean_rows(
        self, unit: Unit, spec: UnitSpec, items: list[Rows]
    ) -> Mapping[UnitParameter, Tensor]:
        """Add the rows of mean gradients; return those after, by parameter."""
        rank, after, own = spec.context.rest_rank, {}, self.ready.gradients[unit][0]
        for parameter in unit.parameters:
            if parameter.fqn in self.means:
                slot = spec.rest.slots[parameter.index]
                mean = own.get(parameter, parameter.local.new_empty(0)).reshape(-1)
                after[parameter] = mean.new_zeros(slot.piece_numel(rank))
                if slot.replicated:
                    after[parameter].copy_(mean)
                items.append(Rows(parameter.slot, slot, mean, after[parameter]))
        return after
