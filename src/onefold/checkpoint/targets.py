"""Where each name of a checkpoint goes in a sharded module and its optimizers."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint._nested_dict import unflatten_state_dict
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

from onefold.checkpoint.contents import (
    GRAD,
    MASTER,
    MODEL,
    OPTIM,
    PARTIAL,
    RANK,
    SavedState,
    state_path,
)
from onefold.checkpoint.directory import Found
from onefold.checkpoint.manifest import Manifest
from onefold.engine.joining import bind
from onefold.engine.optimizer import OptimizerBinding
from onefold.errors import CheckpointError, expected, listed
from onefold.unit.parameter import UnitParameter
from onefold.unit.unit import Unit


class Targets:
    """What is read of one checkpoint on this rank, and what happens to it then.

    Raises `CheckpointError` for a checkpoint of another module, with all that does not match.
    """

    def __init__(self, subject: SavedState, found: Found, metadata: Metadata) -> None:
        self.subject = subject
        self.manifest: Manifest | None = found.manifest
        self.metadata = metadata
        self._names = metadata.state_dict_metadata
        self._name = str(found.path)
        self._prefix = self._find_prefix()
        self._paths = self._optimizer_paths()
        self._extra_paths = self._extra_state_paths()
        self.saved_ranks = max(1, sum(name.startswith(f"{RANK}.") for name in self._names))
        self.own_rank = subject.rank % self.saved_ranks
        self._refuse(self._model_mismatches() + self._optimizer_mismatches())

    # names

    def _find_prefix(self) -> str:
        """What weights' names start with: `model.` here and in torch's tutorials, or nothing."""
        fqns = [p.fqn for p in self.subject.parameters()]
        under_model = sum(f"{MODEL}.{fqn}" in self._names for fqn in fqns)
        return "" if sum(fqn in self._names for fqn in fqns) > under_model else f"{MODEL}."

    def _optimizer_paths(self) -> dict[str, tuple[Any, ...]]:
        """For each name of an optimizer's state: ("optim", "state", FQN, KEY ...)."""
        told = self.metadata.planner_data or {}
        paths = {name: state_path(name, told.get(name, ())) for name in self._names}
        return {name: path for name, path in paths.items() if path is not None}

    def _extra_state_paths(self) -> dict[str, tuple[Any, ...]]:
        """For each name of a module's extra state: the state's name, and keys inside it."""
        told = self.metadata.planner_data or {}
        known = self.subject.extra_states()
        found = {}
        for name in self._names:
            path = tuple(told.get(name, ()))[1 if self._prefix else 0 :]
            path = path or (name.removeprefix(self._prefix),)
            if path[0] in known:
                found[name] = path
        return found

    # mismatches

    def _refuse(self, mismatches: list[str]) -> None:
        if not mismatches:
            return
        raise CheckpointError(
            expected(
                f"checkpoint {self._name!r} to match the module and its optimizers",
                "\n  " + "\n  ".join(listed(mismatches)),
                hint="build the module and optimizers as for the run that saved it; "
                "without an optimizer only the weights are loaded",
            )
        )

    def _model_mismatches(self) -> list[str]:
        wanted = {p.fqn: list(p.slot.shape) for p in self.subject.parameters()}
        wanted |= {name: list(value.shape) for name, value in self.subject.buffers().items()}
        found = []
        for name, shape in wanted.items():
            saved = self._names.get(self._prefix + name)
            if not isinstance(saved, TensorStorageMetadata):
                found.append(f"{name}: {shape} in the module, not in the checkpoint")
            elif list(saved.size) != shape:
                found.append(f"{name}: {shape} in the module, {list(saved.size)} in the checkpoint")
        known = wanted.keys() | self.subject.aliases().keys()
        found += [
            f"{name}: in the checkpoint, not in the module"
            for name in self._model_names()
            if name not in known
        ]
        return found

    def _model_names(self) -> list[str]:
        ours = tuple(f"{kind}." for kind in (MASTER, OPTIM, GRAD, PARTIAL, RANK))
        return [
            name.removeprefix(self._prefix)
            for name in self._names
            if name.startswith(self._prefix)
            and (self._prefix or not name.startswith(ours))
            and name not in self._extra_paths
        ]

    def _optimizer_mismatches(self) -> list[str]:
        if not self.subject.optimizers:
            return []
        if not any(name.startswith(f"{OPTIM}.") for name in self._names):
            return ["an optimizer to load, none in the checkpoint"]
        if self.manifest is None:
            return []
        ours = [str(record) for record in self.subject.records()]
        theirs = [str(record) for record in self.manifest.optimizers]
        if ours != theirs:
            return [f"optimizers: {', '.join(ours)} to load, {', '.join(theirs)} in the checkpoint"]
        return []

    def compare(self, objects: dict[str, Any]) -> None:
        """Raise `CheckpointError` unless param groups hold the parameters they were saved with."""
        if not self.subject.optimizers:
            return
        ours, theirs = self.subject.groups(), self._groups(objects)
        if len(ours) != len(theirs):
            self._refuse([f"{len(ours)} param groups to load, {len(theirs)} in the checkpoint"])
        mismatches = []
        for index, (group, saved) in enumerate(zip(ours, theirs, strict=True)):
            here = {self.subject.parameter(tensor).fqn for tensor in group["params"]}
            there = set(saved["params"])
            mismatches += [f"{n}: in param group {index} here alone" for n in sorted(here - there)]
            mismatches += [
                f"{n}: in param group {index} of the checkpoint alone" for n in sorted(there - here)
            ]
        self._refuse(mismatches)

    def _groups(self, objects: dict[str, Any]) -> list[dict[str, Any]]:
        """The saved param groups, hyper-parameters and names of parameters."""
        prefix = f"{OPTIM}.param_groups."
        told = self.metadata.planner_data or {}
        paths: dict[str, tuple[Any, ...]] = {}
        for name in objects:
            if name.startswith(prefix):
                index, _, key = name.removeprefix(prefix).partition(".")
                paths[name] = tuple(told.get(name, ()))[1:]
                if len(paths[name]) < 3:  # told by its name alone
                    if not index.isdecimal():
                        self._refuse([f"{name}: param groups by number are wanted"])
                    paths[name] = ("param_groups", int(index), key)
        return _nested(objects, paths).get("param_groups", [])

    # what to read

    def objects(self) -> dict[str, Any]:
        """Names of what is small and needed before tensors: hyper-parameters, this rank's own."""
        wanted = [*self._extra_paths, f"{RANK}.{self.own_rank}"]
        if self.subject.optimizers:
            wanted += [name for name in self._names if name.startswith(f"{OPTIM}.param_groups.")]
        return {
            name: self._empty(saved) if isinstance(saved, TensorStorageMetadata) else None
            for name in wanted
            if (saved := self._names.get(name)) is not None
        }

    def tensors(self) -> dict[str, Any]:
        """Where tensors go, by name: weights and buffers in place, optimizer states to new ones."""
        wanted: dict[str, Any] = {}
        for parameter in self.subject.parameters():
            wanted[self._source(parameter)] = parameter.wrap(parameter.stepped)
            for name in self._gradients(parameter):
                wanted[name] = self._gradient_target(name, parameter)
        for name, buffer in self.subject.buffers().items():
            wanted[self._prefix + name] = buffer
        if self.subject.optimizers:
            wanted |= self._states()
        return wanted

    def _source(self, parameter: UnitParameter) -> str:
        """The weight itself if it is of the dtype to be filled, else its wider master."""
        weight, master = self._prefix + parameter.fqn, f"{MASTER}.{parameter.fqn}"
        saved = self._names[weight]
        assert isinstance(saved, TensorStorageMetadata), "mismatches were refused"
        is_alike = saved.properties.dtype == parameter.unit.stepped.dtype
        return weight if is_alike or master not in self._names else master

    def _gradients(self, parameter: UnitParameter) -> list[str]:
        """Names of gradients between micro-batches: the mean, partials of own or of all ranks."""
        if not self.subject.optimizers:  # weights alone are wanted
            return []
        mean = f"{GRAD}.{parameter.fqn}"
        ranks = range(self.saved_ranks)
        partial = [f"{PARTIAL}.{rank}.{parameter.fqn}" for rank in ranks]
        if self._keeps_partials:
            partial = partial[self.own_rank : self.own_rank + 1]
        return [name for name in (mean, *partial) if name in self._names]

    @property
    def _keeps_partials(self) -> bool:
        """Each rank goes on with its own; else all of them are averaged where they rest."""
        is_same_world = self.saved_ranks == self.subject.engine.group.world_size
        return is_same_world and not self.subject.engine.recipe.shards_parameters

    def _gradient_target(self, name: str, parameter: UnitParameter) -> Tensor:
        unit = parameter.unit
        if name.startswith(f"{PARTIAL}.") and self._keeps_partials:
            options = {"dtype": unit.compute_dtype, "device": unit.context.store.device}
            return torch.empty(parameter.slot.shape, **options)
        return parameter.wrap(torch.empty_like(parameter.local, requires_grad=False))

    def _restore_gradients(self, tensors: dict[str, Any]) -> None:
        for unit in self.subject.engine.units:
            means: dict[UnitParameter, Tensor] = {}
            partial: dict[UnitParameter, Tensor] = {}
            for parameter in unit.parameters:
                for name in self._gradients(parameter):
                    value = tensors[name]
                    if not name.startswith(f"{PARTIAL}."):
                        means[parameter] = parameter.unwrap(value)
                    elif self._keeps_partials:
                        partial[parameter] = value
                    else:
                        share = parameter.unwrap(value) / self.saved_ranks
                        before = means.get(parameter)
                        means[parameter] = share if before is None else before + share
            unit.gradient.restore(means, partial)

    def _states(self) -> dict[str, Any]:
        by_fqn: defaultdict[str, list[str]] = defaultdict(list)
        for name, path in self._paths.items():
            by_fqn[path[2]].append(name)
        wanted: dict[str, Any] = {}
        for optimizer in self.subject.optimizers:
            flats: dict[tuple[Unit, Any], Tensor] = {}
            binding = bind(optimizer, self.subject.engine)
            binding.forget(optimizer)  # or the old moments and the new ones would be held at once
            held = [p for p, owner in self.subject.states() if owner is optimizer]
            for parameter in binding.kept_here(held):
                for name in by_fqn[parameter.fqn]:
                    wanted[name] = self._state_target(name, parameter, binding, flats)
            binding.take_over(list(flats.values()))
        return wanted

    def _state_target(
        self, name: str, parameter: UnitParameter, binding: OptimizerBinding,
        flats: dict[tuple[Unit, Any], Tensor],
    ) -> Tensor | None:  # fmt: skip
        """Room for one state: rows of a flat tensor a unit, as it will be stepped, or a whole."""
        saved = self._names[name]
        if not isinstance(saved, TensorStorageMetadata):
            return None
        is_like_weight = tuple(saved.size) == parameter.slot.shape != ()
        unit = parameter.unit
        if not is_like_weight or not binding.is_elementwise:
            return self._empty(saved, unit.context.store.device)
        key = (unit, self._paths[name][3:])
        if unit.steps_in_blocks and len(key[1]) == 1:  # to where such states of the unit rest
            unit.make_moments({key[1][0]: unit.stepped.dtype})
            flats[key] = unit.moments[key[1][0]].tensor
        if key not in flats:
            flats[key] = _blank(unit, binding)
        rank = unit.context.rest_rank
        start = parameter.slot.shard_offsets[rank]
        rows = flats[key][start : start + parameter.local.numel()].view(parameter.local.shape)
        return parameter.wrap(rows)

    @staticmethod
    def _empty(saved: TensorStorageMetadata, device: torch.device | None = None) -> Tensor:
        return torch.empty(tuple(saved.size), dtype=saved.properties.dtype, device=device)

    # afterwards

    def finish(self, objects: dict[str, Any], tensors: dict[str, Any]) -> None:
        """Everything has been read: let the engine and the optimizers know."""
        engine = self.subject.engine
        for unit in engine.units:
            unit.replaced()
            unit.forget()
        engine.mend()
        extra_states = _nested(objects, self._extra_paths)
        for name, part in self.subject.extra_states().items():
            if name in extra_states:
                part.set_extra_state(extra_states[name])
        if self.manifest is not None:
            engine.ledger.steps = self.manifest.step
        self._restore_gradients(tensors)
        if not self.subject.optimizers:
            return
        for group, saved in zip(self.subject.groups(), self._groups(objects), strict=True):
            _restore_group(group, saved)
        paths = {name: path[2:] for name, path in self._paths.items()}
        states = _nested(tensors, paths)
        for parameter, optimizer in self.subject.states():
            optimizer.state.pop(parameter.sharded, None)
            if parameter.fqn in states:
                optimizer.state[parameter.sharded] = states[parameter.fqn]


def _blank(unit: Unit, binding: OptimizerBinding) -> Tensor:
    """Room for one state of a unit's parameters, up to the last that the optimizer holds.

    Those of one param group lie together, and those of none, as frozen ones, behind all others.
    """
    rank = unit.context.rest_rank
    held = [i for i, p in enumerate(unit.parameters) if binding.holds(p)]
    flat = unit.stepped.new_empty(unit.rest.span(0, held[-1], rank)[1])
    gaps = torch.tensor(unit.rest.gaps(rank), dtype=torch.int64)
    return flat.index_fill_(0, gaps[gaps < len(flat)].to(flat.device), 0)


def _nested(values: dict[str, Any], paths: dict[str, tuple[Any, ...]]) -> dict[str, Any]:
    """Those values that have a path, as the nested containers that they were saved from."""
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
