"""Where each name of a checkpoint goes in a sharded module and its optimizers."""

from __future__ import annotations

import warnings
from collections import defaultdict
from collections.abc import Sequence, Set
from typing import Any

import torch
from torch import Tensor

from onefold.checkpoint.agreement import refuse_mismatches, shape_mismatches
from onefold.checkpoint.growing import make_room, sized_by_modules
from onefold.checkpoint.listing import (
    COMPANION,
    GRAD,
    MASTER,
    MODEL,
    OPTIM,
    PARTIAL,
    RANK,
    Keys,
    SavedTensor,
    nested,
)
from onefold.checkpoint.source import Source
from onefold.checkpoint.stages import ShardedModel, restore_group
from onefold.checkpoint.typed_keys import as_keys
from onefold.engine.joining import bind
from onefold.engine.optimizer import OptimizerBinding
from onefold.engine.own_state import give_back
from onefold.errors import CheckpointError
from onefold.unit.parameter import UnitParameter
from onefold.unit.unit import Unit, unit_of


class Targets:
    """The tensors and objects that this rank reads of one checkpoint, and their use afterwards.

    Raises `CheckpointError` for a checkpoint of another module, with all mismatches, of other param
    groups, or of islands on another number of ranks.
    """

    def __init__(
        self, model: ShardedModel, source: Source, state: dict[str, Any], elsewhere: Set[str],
        num_ranks: int,
    ) -> None:  # fmt: skip
        """`state`: that of this rank alone, of this module. `num_ranks`: that load together.

        `elsewhere`: names of all stages of a pipeline, of which this module is one.
        """
        self.model, self.source = model, source
        self._state, self._elsewhere = state, elsewhere
        self._is_same_world = source.saved_ranks == num_ranks
        paths = source.paths.items()
        self._names = source.paths.keys()
        self._states = {n: p[2:] for n, p in paths if p[:2] == (OPTIM, "state")}
        self._groups = {n: p for n, p in paths if p[:2] == (OPTIM, "param_groups")}
        self._prefix = self._find_prefix()
        self._extra_paths = self._find_extra_states()
        self._values: dict[str, Any] = {}
        self._stepped: dict[str, Tensor] = {}  # as an optimizer steps it; those kept here, by name
        everyone = model.engine.context.everyone
        # each rank goes on with its own partial gradients, or all of them are averaged
        is_whole = everyone is model.engine.group  # no model axis has cut partial gradients
        keeps = is_whole and not model.engine.recipe.shards_parameters
        self._keeps_partials = source.saved_ranks == everyone.world_size and keeps
        self._refuse_other_module(self._model_mismatches() + self._optimizer_mismatches())
        with source.believing("the param groups and companions"):
            self._saved_groups = self._read_groups() if model.optimizers else []
            self._compare_groups()
            self._compare_companions()

    def _find_prefix(self) -> str:
        """Return the prefix of weights' names: `model.`, or none in a plain state dict."""
        fqns = [p.fqn for p in self.model.parameters()]
        under_model = sum(f"{MODEL}.{fqn}" in self._names for fqn in fqns)
        return "" if sum(fqn in self._names for fqn in fqns) > under_model else f"{MODEL}."

    def _find_extra_states(self) -> dict[str, Keys]:
        """Return, for each name of a module's extra state, the state's name and keys inside it."""
        known = self.model.extra_states()
        skipped = 1 if self._prefix else 0
        paths = {
            name: path[skipped:] or (name.removeprefix(self._prefix),)
            for name, path in self.source.paths.items()
        }
        return {name: path for name, path in paths.items() if path[0] in known}

    # mismatches

    def _refuse_other_module(self, mismatches: list[str]) -> None:
        refuse_mismatches(
            f"checkpoint {str(self.source.path)!r} to match the module and its optimizers",
            mismatches,
            hint="build the module and optimizers as for the run that saved it; "
            "without an optimizer only the weights are loaded",
        )

    def _model_mismatches(self) -> list[str]:
        wanted = {p.fqn: p.shape for p in self.model.parameters()}
        wanted |= {name: tuple(value.shape) for name, value in self.model.buffers().items()}
        saved = {name: tensor.shape for name, tensor in self._saved_tensors().items()}
        for name in sized_by_modules(self.model.module):
            if name in saved:
                wanted[name] = tuple(saved[name])
        known = wanted.keys() | self.model.aliases().keys() | self.model.notes().keys()
        known |= self._elsewhere
        ours = tuple(f"{kind}." for kind in (MASTER, OPTIM, GRAD, PARTIAL, COMPANION, RANK))
        return shape_mismatches(wanted, saved, "checkpoint") + [
            f"{name.removeprefix(self._prefix)}: in the checkpoint, not in the module"
            for name in self._names
            if name.startswith(self._prefix)
            and (self._prefix or not name.startswith(ours))
            and name not in self._extra_paths
            and name.removeprefix(self._prefix) not in known
        ]

    def _saved_tensors(self) -> dict[str, SavedTensor]:
        """Return the tensors of the checkpoint by their names in the module."""
        return {
            name.removeprefix(self._prefix): saved
            for name, saved in self.source.tensors.items()
            if name.startswith(self._prefix)
        }

    def _optimizer_mismatches(self) -> list[str]:
        if not self.model.optimizers:
            return []
        if not any(name.startswith(f"{OPTIM}.") for name in self._names):
            return ["an optimizer to load, none in the checkpoint"]
        manifest = self.source.manifest
        ours = [str(record) for record in self.model.records()]
        theirs = [str(r) for r in manifest.optimizers] if manifest else ours
        if ours != theirs:
            return [f"optimizers: {', '.join(ours)} to load, {', '.join(theirs)} in the checkpoint"]
        return []

    def _read_groups(self) -> list[dict[str, Any]]:
        """Return the saved param groups: hyper-parameters, and the names of parameters."""
        unnumbered = [name for name, path in self._groups.items() if not isinstance(path[2], int)]
        self._refuse_other_module(
            [f"{name}: param groups by number are wanted" for name in unnumbered]
        )
        values = self._read_named(self._groups, self.model.engine.context.store.device)
        groups = _nested(values, self._groups).get(OPTIM, {})
        groups = [{"params": [], **group} for group in groups.get("param_groups", [])]
        lists = self.source.lists
        for group in groups:
            group["params"] = [own for name in group["params"] for own in lists.get(name, [name])]
        return groups

    def _compare_groups(self) -> None:
        """Raise `CheckpointError` unless param groups hold the parameters they were saved with."""
        if not self.model.optimizers:
            return
        ours, theirs = self.model.groups(), self._saved_groups
        if len(ours) != len(theirs):
            self._refuse_other_module(
                [f"{len(ours)} param groups to load, {len(theirs)} in the checkpoint"]
            )
        mismatches = []
        for index, (group, saved) in enumerate(zip(ours, theirs, strict=True)):
            here = {self.model.parameter(tensor).fqn for tensor in group["params"]}
            here -= self.source.aliases.keys()  # the group of the first name has them
            there = set(saved["params"]) - (self._elsewhere - here) - self.model.aliases().keys()
            mismatches += [f"{n}: in param group {index} here alone" for n in sorted(here - there)]
            mismatches += [
                f"{n}: in param group {index} of the checkpoint alone" for n in sorted(there - here)
            ]
        self._refuse_other_module(mismatches)

    def _compare_companions(self) -> None:
        """Raise `CheckpointError` for islands that another number of ranks has saved."""
        alive = self.model.engine.companions.alive()
        for key in () if self._is_same_world else self._state.get("companions", {}):
            if key in alive and not alive[key].reshards:
                got = f"{self.source.saved_ranks} ranks"
                raise CheckpointError(
                    f"{key!r} saved by as many ranks as load it", got,
                    where=f"rank {self.model.rank}",
                    hint="load before onefold.islands: then islands start from the weights",
                )  # fmt: skip

    # reading

    def _read_named(
        self, names: Sequence[str] | Keys | dict[str, Any], device: torch.device | None = None
    ) -> dict[str, Any]:
        """Read objects, and small tensors, by name; to `device` unless they are numbers."""
        saved = {name: self.source.tensors[name] for name in names if name in self.source.tensors}
        tensors = {name: _empty(t, device if t.shape else None) for name, t in saved.items()}
        self.source.fill(tensors)
        return {n: tensors[n] if n in tensors else self.source.read_object(n) for n in names}

    def read_values(self) -> None:
        """Read weights and buffers in place, gradients and optimizer states as new tensors."""
        saved = {name: (tuple(t.shape), t.dtype) for name, t in self._saved_tensors().items()}
        self._refuse_other_module(make_room(self.model.module, saved, "checkpoint"))
        wanted = self._tensors()
        self.source.fill({name: value for name, value in wanted.items() if value is not None})
        objects = [name for name, value in wanted.items() if value is None]
        self._values = wanted | self._read_named([*objects, *self._extra_paths])

    def _tensors(self) -> dict[str, Any]:
        """Return tensors to read into, by name; None for an object."""
        wanted: dict[str, Any] = {}
        for parameter in self.model.parameters():
            wanted[self._source_of(parameter)] = parameter.wrap(parameter.stepped)
            for name in self._gradients(parameter):
                wanted[name] = self._gradient_target(name, parameter)
        for name, (parameter, _) in self._copies().items():
            wanted[name] = parameter.wrap(torch.empty_like(parameter.stepped))
        for name, buffer in self.model.buffers().items():
            wanted[self._prefix + name] = buffer
        for key, rows in self.model.companion_rows().items():
            named = {f"{COMPANION}.{key}.{p.fqn}": p.wrap(own) for p, own in rows}
            wanted |= {name: own for name, own in named.items() if name in self.source.tensors}
        return wanted | self._states_to_read()

    def _states_to_read(self) -> dict[str, Any]:
        """Return tensors to read states of optimizers into, by name; None for an object."""
        wanted: dict[str, Any] = {}
        by_fqn: defaultdict[str, list[str]] = defaultdict(list)
        for name, (fqn, *_) in self._states.items():
            by_fqn[fqn].append(name)
        for optimizer in self.model.optimizers:
            flats: dict[tuple[Unit, Any], Tensor] = {}
            exact: list[Tensor] = []
            binding = bind(optimizer, self.model.engine)
            binding.forget(optimizer)  # free the old moments before the new ones take memory
            for parameter in binding.kept_here(self.model.stepped_by(optimizer)):
                self._stepped[parameter.fqn] = binding.stand_in(parameter)
                for name in by_fqn[parameter.fqn]:
                    wanted[name] = value = self._state_target(name, parameter, binding, flats)
                    if value is not None and self._was_stepped_alike(parameter):
                        exact.append(value)
            binding.take_over(list(flats.values()) if binding.is_flat else exact)
        return wanted

    def _copies(self) -> dict[str, tuple[UnitParameter, str]]:
        """Return other names of tied weights for which the checkpoint has bytes of their own.

        Stages of a pipeline have saved them, or a module whose weights were not tied.
        """
        if not self.model.optimizers:
            return {}
        first = self.source.aliases
        by_fqn = {parameter.fqn: parameter for parameter in self.model.parameters()}
        return {
            self._source_of(by_fqn[fqn], alias): (by_fqn[fqn], alias)
            for alias, fqn in self.model.aliases().items()
            if self._prefix + alias in self._names
            and first.get(alias, alias) != first.get(fqn, fqn)
        }

    def _source_of(self, parameter: UnitParameter, fqn: str | None = None) -> str:
        """Return the weight's name if it has the dtype that is stepped, else its master's."""
        fqn = fqn or parameter.fqn
        weight, master = self._prefix + fqn, f"{MASTER}.{fqn}"
        is_alike = self.source.tensors[weight].dtype == unit_of(parameter).stepped.dtype
        return weight if is_alike or master not in self.source.tensors else master

    def _was_stepped_alike(self, parameter: UnitParameter) -> bool:
        """True if a weight, or its master, was stepped in the dtype in which it will be."""
        tensors, weight = self.source.tensors, self._prefix + parameter.fqn
        saved = tensors.get(f"{MASTER}.{parameter.fqn}", tensors[weight])
        return saved.dtype == unit_of(parameter).stepped.dtype

    def _gradients(self, parameter: UnitParameter) -> list[str]:
        """Return the names of a parameter's gradients: the mean, and partials of own or all ranks.

        They are part of the run, so they are read together with an optimizer.
        """
        if not self.model.optimizers:
            return []
        ranks = range(self.source.saved_ranks)
        ranks = [self.model.rank % len(ranks)] if self._keeps_partials else ranks
        partial = [f"{PARTIAL}.{rank}.{parameter.fqn}" for rank in ranks]
        return [n for n in (f"{GRAD}.{parameter.fqn}", *partial) if n in self.source.tensors]

    def _is_kept_partial(self, name: str) -> bool:
        return self._keeps_partials and name.startswith(f"{PARTIAL}.")

    def _gradient_target(self, name: str, parameter: UnitParameter) -> Tensor:
        unit = unit_of(parameter)
        if self._is_kept_partial(name):
            options = {"dtype": unit.compute_dtype, "device": unit.context.store.device}
            return torch.empty(parameter.slot.shape, **options)
        return parameter.wrap(torch.empty_like(parameter.local, requires_grad=False))

    def _state_target(
        self, name: str, parameter: UnitParameter, binding: OptimizerBinding,
        flats: dict[tuple[Unit, Any], Tensor],
    ) -> Tensor | None:  # fmt: skip
        """Return room for one state: rows of a unit's flat tensor that is stepped, or a tensor."""
        saved = self.source.tensors.get(name)
        if saved is None:
            return None
        is_like_weight = saved.shape == parameter.shape != ()
        unit = unit_of(parameter)
        if not is_like_weight or not binding.is_flat:
            return _empty(saved, unit.context.store.device)
        key = self._states[name][1:]
        if unit.steps_in_blocks and len(key) == 1:  # into the unit's own moments
            binding.keep(parameter, key[0])
            unit.make_moments({key[0]: unit.stepped.dtype})
            flats[unit, key] = unit.moments[key[0]].tensor
        if (unit, key) not in flats:
            flats[unit, key] = _blank(unit, binding)
        return parameter.wrap(parameter.own_rows(flats[unit, key]))

    # afterwards

    def deliver(self) -> None:
        """Hand the values that were read to the engine, the module and the optimizers."""
        engine, values = self.model.engine, self._values
        self._refuse_other_module(
            [
                f"{alias}: other values than {parameter.fqn}, with which the module ties it"
                for name, (parameter, alias) in self._copies().items()
                if not torch.equal(parameter.unwrap(values[name]), parameter.stepped)
            ]
        )
        for unit in engine.units:
            unit.replaced()
            unit.forget()
        engine.mend()
        with self.source.believing("the extra state of modules"):
            extra_states = _nested(values, self._extra_paths)
        for name, part in self.model.extra_states().items():
            if name in extra_states:
                part.set_extra_state(extra_states[name])
        if self.source.manifest is not None:
            engine.ledger.resume(self.source.manifest.step)
        for unit in engine.units:
            self._restore_gradients(unit)
        with self.source.believing("the optimizers' state"):
            self._restore_optimizers()
        self._values = {}

    def resume(self) -> None:
        """Hand on the state of this rank alone: that of no parameter, and that of companions.

        A collective where islands resume.
        """
        with self.source.believing("the state of this rank"):
            self._resume()

    def _resume(self) -> None:
        common = self._state.get("common", ())
        for optimizer, entries in zip(self.model.optimizers, common, strict=False):
            for key, value in as_keys(entries, self._stepped.get).items():
                optimizer.state[key] = value
        own = iter(self._state.get("own", ()))
        for optimizer in self.model.optimizers:
            give_back(optimizer, next(own, {}))
        companions = self.model.engine.companions
        alive, waiting = companions.alive(), dict[str, dict[str, Any]]()
        companions.leave(waiting)
        for key, saved in self._state.get("companions", {}).items():
            if key in alive:
                alive[key].resume(saved)
            elif self._is_same_world and not self._has_rows(key):
                waiting[key] = saved
            elif self.model.rank == 0:
                warnings.warn(
                    f"{key!r} of the checkpoint is not loaded. hint: call onefold.ema before "
                    "onefold.load; islands resume at the number of ranks that saved them",
                    stacklevel=8,
                )

    def _has_rows(self, key: str) -> bool:
        return any(name.startswith(f"{COMPANION}.{key}.") for name in self._names)

    def _restore_optimizers(self) -> None:
        for group, saved in zip(self.model.groups(), self._saved_groups, strict=False):
            restore_group(group, as_keys(saved, self._stepped.get))
        states = _nested(self._values, self._states)
        for optimizer in self.model.optimizers:
            for parameter in self.model.stepped_by(optimizer):
                optimizer.state.pop(parameter.sharded, None)
                if parameter.fqn in states:
                    entry = as_keys(states[parameter.fqn], self._stepped.get)
                    optimizer.state[parameter.sharded] = entry

    def _restore_gradients(self, unit: Unit) -> None:
        means: dict[UnitParameter, Tensor] = {}
        partial: dict[UnitParameter, Tensor] = {}
        for parameter in unit.parameters:
            for name in self._gradients(parameter):
                if self._is_kept_partial(name):
                    partial[parameter] = self._values[name]
                    continue
                own = parameter.unwrap(self._values[name])
                if name.startswith(f"{PARTIAL}."):
                    own = own / self.source.saved_ranks
                means[parameter] = means[parameter] + own if parameter in means else own
        unit.gradient.restore(means, partial)


def _empty(saved: SavedTensor, device: torch.device | None = None) -> Tensor:
    return torch.empty(saved.shape, dtype=saved.dtype, device=device)


def _blank(unit: Unit, binding: OptimizerBinding) -> Tensor:
    """Return room for one state of a unit's parameters, up to the last that the optimizer holds.

    Parameters of one param group lie together. Parameters of none, such as frozen ones, come last.
    """
    held = [i for i, p in enumerate(unit.parameters) if binding.holds(p)]
    return unit.stepped.new_empty(unit.rest.span(0, held[-1], unit.context.rest_rank)[1])


def _nested(values: dict[str, Any], paths: dict[str, Keys]) -> dict[str, Any]:
    """Return the values that have a path, in nested containers as they were saved."""
    own = {name: path for name, path in paths.items() if name in values}
    return nested({name: values[name] for name in own}, own)
