"""Where each name of a checkpoint goes in a sharded module and its optimizers."""

from __future__ import annotations

import warnings
from collections import defaultdict
from collections.abc import Mapping, Set
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint._nested_dict import unflatten_state_dict
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

from onefold.checkpoint import contents
from onefold.checkpoint.agreement import refuse_mismatches, shape_mismatches
from onefold.checkpoint.contents import COMPANION, GRAD, MASTER, MODEL, OPTIM, PARTIAL, RANK
from onefold.checkpoint.directory import Found
from onefold.checkpoint.stages import ShardedModel
from onefold.engine.joining import bind
from onefold.engine.optimizer import OptimizerBinding
from onefold.errors import CheckpointError
from onefold.unit.parameter import UnitParameter
from onefold.unit.unit import Unit

Keys = tuple[Any, ...]
"""The nested keys of a name, as in ("optim", "state", FQN, KEY)."""


class Targets:
    """The tensors and objects that this rank reads of one checkpoint, and their use afterwards.

    Raises `CheckpointError` for a checkpoint of another module, with all mismatches.
    """

    def __init__(
        self, model: ShardedModel, checkpoint: Found, metadata: Metadata,
        elsewhere: Set[str] = frozenset(), others: Mapping[str, str] = MappingProxyType({}),
    ) -> None:  # fmt: skip
        """`elsewhere`: names of all stages of a pipeline, of which this module is one.

        `others`: names of weights that the checkpoint has under another, first name.
        """
        self.model = model
        self._elsewhere = elsewhere
        self._others = others
        self.manifest = checkpoint.manifest
        self.metadata = metadata
        self._path = checkpoint.path
        self._names = metadata.state_dict_metadata
        notes = metadata.planner_data or {}
        self._paths = {name: contents.path_of(name, notes.get(name, ())) for name in self._names}
        self._states = {n: p[2:] for n, p in self._paths.items() if p[:2] == (OPTIM, "state")}
        self._groups = {n: p for n, p in self._paths.items() if p[:2] == (OPTIM, "param_groups")}
        self._prefix = self._find_prefix()
        self._extra_paths = self._find_extra_states()
        self.saved_ranks = max(1, sum(name.startswith(f"{RANK}.") for name in self._names))
        self.own_rank = model.rank % self.saved_ranks
        engine = model.engine
        is_same_world = self.saved_ranks == engine.context.everyone.world_size
        # each rank goes on with its own partial gradients, or all of them are averaged
        is_whole = (
            engine.context.everyone is engine.group
        )  # no model axis has cut partial gradients
        keeps = is_whole and not engine.recipe.shards_parameters
        self._keeps_partials = is_same_world and keeps
        self._refuse(self._model_mismatches() + self._optimizer_mismatches())

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
            for name, path in self._paths.items()
        }
        return {name: path for name, path in paths.items() if path[0] in known}

    # mismatches

    def _refuse(self, mismatches: list[str]) -> None:
        refuse_mismatches(
            f"checkpoint {str(self._path)!r} to match the module and its optimizers",
            mismatches,
            hint="build the module and optimizers as for the run that saved it; "
            "without an optimizer only the weights are loaded",
        )

    def _model_mismatches(self) -> list[str]:
        wanted = {p.fqn: p.shape for p in self.model.parameters()}
        wanted |= {name: tuple(value.shape) for name, value in self.model.buffers().items()}
        saved = {
            name.removeprefix(self._prefix): tuple(saved.size)
            for name, saved in self._names.items()
            if isinstance(saved, TensorStorageMetadata) and name.startswith(self._prefix)
        }
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

    def _optimizer_mismatches(self) -> list[str]:
        if not self.model.optimizers:
            return []
        if not any(name.startswith(f"{OPTIM}.") for name in self._names):
            return ["an optimizer to load, none in the checkpoint"]
        ours = [str(record) for record in self.model.records()]
        theirs = [str(r) for r in self.manifest.optimizers] if self.manifest else ours
        if ours != theirs:
            return [f"optimizers: {', '.join(ours)} to load, {', '.join(theirs)} in the checkpoint"]
        return []

    def compare(self, objects: dict[str, Any]) -> None:
        """Raise `CheckpointError` unless param groups hold the parameters they were saved with."""
        if not self.model.optimizers:
            return
        ours, theirs = self.model.groups(), self._saved_groups(objects)
        if len(ours) != len(theirs):
            self._refuse([f"{len(ours)} param groups to load, {len(theirs)} in the checkpoint"])
        mismatches = []
        for index, (group, saved) in enumerate(zip(ours, theirs, strict=True)):
            here = {self.model.parameter(tensor).fqn for tensor in group["params"]}
            here -= self._others.keys()  # the group of the first name has them
            there = set(saved["params"]) - (self._elsewhere - here) - self.model.aliases().keys()
            mismatches += [f"{n}: in param group {index} here alone" for n in sorted(here - there)]
            mismatches += [
                f"{n}: in param group {index} of the checkpoint alone" for n in sorted(there - here)
            ]
        self._refuse(mismatches)

    def compare_companions(self, state: dict[str, Any], *, is_same_world: bool) -> None:
        """Raise `CheckpointError` for islands that another number of ranks has saved."""
        alive = self.model.engine.companions.alive()
        for key in [] if is_same_world else state.get("companions", {}):
            if key in alive and not alive[key].reshards:
                raise CheckpointError(
                    f"{key!r} saved by as many ranks as load it", f"{self.saved_ranks} ranks",
                    where=f"rank {self.model.rank}",
                    hint="load before onefold.islands: then islands start from the weights",
                )  # fmt: skip

    def _saved_groups(self, objects: dict[str, Any]) -> list[dict[str, Any]]:
        """Return the saved param groups: hyper-parameters, and the names of parameters."""
        unnumbered = [name for name, path in self._groups.items() if not isinstance(path[2], int)]
        self._refuse([f"{name}: param groups by number are wanted" for name in unnumbered])
        return _nested(objects, self._groups).get(OPTIM, {}).get("param_groups", [])

    # reading

    def objects(self) -> dict[str, Any]:
        """Return the names that are read before tensors: hyper-parameters, this rank's own."""
        groups = self._groups if self.model.optimizers else {}
        wanted = [*self._extra_paths, f"{RANK}.{self.own_rank}", *groups]
        return {
            name: _empty(saved) if isinstance(saved, TensorStorageMetadata) else None
            for name in wanted
            if (saved := self._names.get(name)) is not None
        }

    def tensors(self) -> dict[str, Any]:
        """Return tensors to read into, by name: weights and buffers in place, the others new."""
        wanted: dict[str, Any] = {}
        for parameter in self.model.parameters():
            wanted[self._source(parameter)] = parameter.wrap(parameter.stepped)
            for name in self._gradients(parameter):
                wanted[name] = self._gradient_target(name, parameter)
        for name, (parameter, _) in self._copies().items():
            wanted[name] = parameter.wrap(torch.empty_like(parameter.stepped))
        for name, buffer in self.model.buffers().items():
            wanted[self._prefix + name] = buffer
        for key, rows in self.model.companion_rows().items():
            named = {f"{COMPANION}.{key}.{p.fqn}": p.wrap(own) for p, own in rows}
            wanted |= {name: own for name, own in named.items() if name in self._names}
        by_fqn: defaultdict[str, list[str]] = defaultdict(list)
        for name, (fqn, *_) in self._states.items():
            by_fqn[fqn].append(name)
        for optimizer in self.model.optimizers:
            flats: dict[tuple[Unit, Any], Tensor] = {}
            binding = bind(optimizer, self.model.engine)
            binding.forget(optimizer)  # free the old moments before the new ones take memory
            for parameter in binding.kept_here(self.model.stepped_by(optimizer)):
                for name in by_fqn[parameter.fqn]:
                    wanted[name] = self._state_target(name, parameter, binding, flats)
            binding.take_over(list(flats.values()))
        return wanted

    def _copies(self) -> dict[str, tuple[UnitParameter, str]]:
        """Return other names of tied weights for which the checkpoint has bytes of their own.

        Stages of a pipeline have saved them, or a module whose weights were not tied.
        """
        if not self.model.optimizers:
            return {}
        by_fqn = {parameter.fqn: parameter for parameter in self.model.parameters()}
        return {
            self._source(by_fqn[fqn], alias): (by_fqn[fqn], alias)
            for alias, fqn in self.model.aliases().items()
            if self._prefix + alias in self._names
            and self._others.get(alias, alias) != self._others.get(fqn, fqn)
        }

    def _source(self, parameter: UnitParameter, fqn: str | None = None) -> str:
        """Return the weight's name if it has the dtype that is stepped, else its master's."""
        fqn = fqn or parameter.fqn
        weight, master = self._prefix + fqn, f"{MASTER}.{fqn}"
        saved = self._names[weight]
        assert isinstance(saved, TensorStorageMetadata), "mismatches were refused"
        is_alike = saved.properties.dtype == parameter.unit.stepped.dtype
        return weight if is_alike or master not in self._names else master

    def _gradients(self, parameter: UnitParameter) -> list[str]:
        """Return the names of a parameter's gradients: the mean, and partials of own or all ranks.

        They are part of the run, so they are read together with an optimizer.
        """
        if not self.model.optimizers:
            return []
        ranks = [self.own_rank] if self._keeps_partials else range(self.saved_ranks)
        partial = [f"{PARTIAL}.{rank}.{parameter.fqn}" for rank in ranks]
        return [n for n in (f"{GRAD}.{parameter.fqn}", *partial) if n in self._names]

    def _is_kept_partial(self, name: str) -> bool:
        return self._keeps_partials and name.startswith(f"{PARTIAL}.")

    def _gradient_target(self, name: str, parameter: UnitParameter) -> Tensor:
        unit = parameter.unit
        if self._is_kept_partial(name):
            options = {"dtype": unit.compute_dtype, "device": unit.context.store.device}
            return torch.empty(parameter.slot.shape, **options)
        return parameter.wrap(torch.empty_like(parameter.local, requires_grad=False))

    def _state_target(
        self, name: str, parameter: UnitParameter, binding: OptimizerBinding,
        flats: dict[tuple[Unit, Any], Tensor],
    ) -> Tensor | None:  # fmt: skip
        """Return room for one state: rows of a unit's flat tensor that is stepped, or a tensor."""
        saved = self._names[name]
        if not isinstance(saved, TensorStorageMetadata):
            return None
        is_like_weight = tuple(saved.size) == parameter.shape != ()
        unit = parameter.unit
        if not is_like_weight or not binding.is_flat:
            return _empty(saved, unit.context.store.device)
        key = self._states[name][1:]
        if unit.steps_in_blocks and len(key) == 1:  # into the unit's own moments
            unit.make_moments({key[0]: unit.stepped.dtype})
            flats[unit, key] = unit.moments[key[0]].tensor
        if (unit, key) not in flats:
            flats[unit, key] = _blank(unit, binding)
        return parameter.wrap(parameter.own_rows(flats[unit, key]))

    # afterwards

    def finish(self, objects: dict[str, Any], tensors: dict[str, Any]) -> None:
        """Hand the values that were read to the engine, the module and the optimizers."""
        engine = self.model.engine
        self._refuse(
            [
                f"{alias}: other values than {parameter.fqn}, with which the module ties it"
                for name, (parameter, alias) in self._copies().items()
                if not torch.equal(parameter.unwrap(tensors[name]), parameter.stepped)
            ]
        )
        for unit in engine.units:
            unit.replaced()
            unit.forget()
        engine.mend()
        extra_states = _nested(objects, self._extra_paths)
        for name, part in self.model.extra_states().items():
            if name in extra_states:
                part.set_extra_state(extra_states[name])
        if self.manifest is not None:
            engine.ledger.resume(self.manifest.step)
        for unit in engine.units:
            self._restore_gradients(unit, tensors)
        if self.model.optimizers:
            self._restore_optimizers(objects, tensors)

    def resume(self, state: dict[str, Any], *, is_same_world: bool) -> None:
        """Hand on the state of this rank alone, see `ShardedModel.rank_state`.

        A collective where islands resume.
        """
        for optimizer, common in zip(self.model.optimizers, state.get("common", ()), strict=False):
            for key, value in common.items():
                optimizer.state[key] = value
        companions = self.model.engine.companions
        alive, waiting = companions.alive(), dict[str, dict[str, Any]]()
        companions.leave(waiting)
        for key, saved in state.get("companions", {}).items():
            if key in alive:
                alive[key].resume(saved)
            elif is_same_world and not self._has_rows(key):
                waiting[key] = saved
            elif self.model.rank == 0:
                warnings.warn(
                    f"{key!r} of the checkpoint is not loaded. hint: call onefold.ema before "
                    "onefold.load; islands resume at the number of ranks that saved them",
                    stacklevel=6,
                )

    def _has_rows(self, key: str) -> bool:
        return any(name.startswith(f"{COMPANION}.{key}.") for name in self._names)

    def _restore_optimizers(self, objects: dict[str, Any], tensors: dict[str, Any]) -> None:
        for group, saved in zip(self.model.groups(), self._saved_groups(objects), strict=True):
            _restore_group(group, saved)
        states = _nested(tensors, self._states)
        for optimizer in self.model.optimizers:
            for parameter in self.model.stepped_by(optimizer):
                optimizer.state.pop(parameter.sharded, None)
                if parameter.fqn in states:
                    optimizer.state[parameter.sharded] = states[parameter.fqn]

    def _restore_gradients(self, unit: Unit, tensors: dict[str, Any]) -> None:
        means: dict[UnitParameter, Tensor] = {}
        partial: dict[UnitParameter, Tensor] = {}
        for parameter in unit.parameters:
            for name in self._gradients(parameter):
                if self._is_kept_partial(name):
                    partial[parameter] = tensors[name]
                    continue
                own = parameter.unwrap(tensors[name])
                if name.startswith(f"{PARTIAL}."):
                    own = own / self.saved_ranks
                means[parameter] = means[parameter] + own if parameter in means else own
        unit.gradient.restore(means, partial)


def _empty(saved: TensorStorageMetadata, device: torch.device | None = None) -> Tensor:
    return torch.empty(tuple(saved.size), dtype=saved.properties.dtype, device=device)


def _blank(unit: Unit, binding: OptimizerBinding) -> Tensor:
    """Return room for one state of a unit's parameters, up to the last that the optimizer holds.

    Parameters of one param group lie together. Parameters of none, such as frozen ones, come last.
    """
    rank = unit.context.rest_rank
    held = [i for i, p in enumerate(unit.parameters) if binding.holds(p)]
    flat = unit.stepped.new_empty(unit.rest.span(0, held[-1], rank)[1])
    gaps = torch.tensor(unit.rest.gaps(rank), dtype=torch.int64)
    return flat.index_fill_(0, gaps[gaps < len(flat)].to(flat.device), 0)


def _nested(values: dict[str, Any], paths: dict[str, Keys]) -> dict[str, Any]:
    """Return the values that have a path, in nested containers as they were saved."""
    own = {name: path for name, path in paths.items() if name in values}
    return unflatten_state_dict({name: values[name] for name in own}, own)


def _restore_group(group: dict[str, Any], saved: dict[str, Any]) -> None:
    for key, value in saved.items():
        if key == "params":
            continue
        now = group.get(key)
        if isinstance(now, Tensor):
            now.fill_(value) if not isinstance(value, Tensor) else now.copy_(value)
        else:
            group[key] = value.item() if isinstance(value, Tensor) and now is not None else value
