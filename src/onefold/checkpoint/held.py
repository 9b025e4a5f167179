"""What one rank holds of the state, by name: views of its tensors, and objects as JSON."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from copy import copy
from dataclasses import dataclass, replace
from enum import Enum
from math import prod
from typing import Any

from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_iter

from onefold.checkpoint.listing import (
    COMPANION,
    GRAD,
    MASTER,
    MODEL,
    OPTIM,
    PARTIAL,
    RANK,
    Extents,
    Keys,
)
from onefold.checkpoint.stages import ShardedModel
from onefold.checkpoint.tagged import tagged
from onefold.checkpoint.typed_keys import as_words
from onefold.engine.optimizer_state import common_state
from onefold.engine.own_state import added_state, shared_groups
from onefold.errors import CheckpointError
from onefold.unit.cut_dtensor import offsets_of
from onefold.unit.parameter import UnitParameter
from onefold.unit.unit import unit_of


def plain(value: object) -> Any:
    """Return `value` with `state_dict()` in place of objects that have one; numbers as Python's."""
    if isinstance(value, Enum) and isinstance(value, int | str):
        return value.value
    if type(value).__module__ == "numpy" and getattr(value, "ndim", None) == 0:
        return value.item()  # type: ignore[attr-defined]
    if isinstance(value, dict):
        same = copy(value)  # a Counter, OrderedDict ...: it comes back, or is refused
        dict.update(same, {key: plain(item) for key, item in value.items()})
        return same
    if type(value) in (list, tuple):
        return type(value)(plain(item) for item in value)  # type: ignore[call-arg]
    state_dict = None if isinstance(value, type) else getattr(value, "state_dict", None)
    return plain(state_dict()) if callable(state_dict) else value


@dataclass(frozen=True, slots=True)
class Held:
    """A value of the state: an object, or what this rank holds of a tensor.

    `value`: an object as JSON; or a tensor, all of it or the box at `offsets` of one of `shape`.
    `writes`: True if this rank writes it, None if the ranks that hold it agree on one of them.
    """

    path: Keys
    value: Any
    offsets: Extents = ()
    shape: Extents = ()
    writes: bool | None = True

    @property
    def name(self) -> str:
        return ".".join(map(str, self.path))

    @property
    def key(self) -> tuple[str, Extents]:
        return self.name, self.offsets

    @property
    def nbytes(self) -> int:
        return self.value.nbytes if isinstance(self.value, Tensor) else 0


class OwnTensors:
    """Gives the tensors inside of values their names, each once."""

    def __init__(self, rank: int, start: int = 0) -> None:
        self.held: list[Held] = []
        self._rank, self._start = rank, start
        self._known: dict[int, tuple[str, Tensor]] = {}  # with each tensor, so its id is its own

    def encoded(self, value: Any, where: str) -> Any:
        """Return a value as JSON. Raises `CheckpointError` if it cannot be saved."""
        return tagged(value, where, self._name_of)

    def _name_of(self, tensor: Tensor) -> str:
        if id(tensor) not in self._known:
            path = (RANK, f"{self._rank}.{self._start + len(self.held)}")
            self.held.append(_whole_value(path, tensor, self))
            self._known[id(tensor)] = self.held[-1].name, tensor
        return self._known[id(tensor)][0]


def state_held_by(model: ShardedModel, inside: OwnTensors) -> Iterator[Held]:
    """Yield this rank's part of the state that all ranks share, as views."""
    rows = {
        parameter: _RowsOf(parameter, number, is_first=model.is_first)
        for number, parameter in enumerate(model.parameters())
    }
    for parameter, own in rows.items():
        yield from own.pieces_at((MODEL, parameter.fqn), parameter.local)
        if unit_of(parameter).master is not None:
            yield from own.pieces_at((MASTER, parameter.fqn), parameter.stepped)
    if model.is_first:
        yield from _of_first_rank(model, inside)
    for optimizer in model.optimizers:
        for parameter in model.stepped_by(optimizer):
            entry = optimizer.state.get(parameter.sharded)
            if entry and parameter in rows:
                yield from _optimizer_state(model, parameter, entry, rows[parameter], inside)
    yield from _gradients_of(model, rows, inside)
    for key, averages in model.companion_rows().items():
        for parameter, average in averages:
            yield from rows[parameter].pieces_at((COMPANION, key, parameter.fqn), average)


def _gradients_of(
    model: ShardedModel, rows: dict[UnitParameter, _RowsOf], inside: OwnTensors
) -> Iterator[Held]:
    """Yield gradients since the last step: means of all ranks, and partial ones of this rank."""
    for unit in model.engine.units:
        means, partial = unit.gradient.accumulated()
        for parameter, mean in means.items():
            yield from rows[parameter].pieces_at((GRAD, parameter.fqn), mean)
        for parameter, grad in partial.items():
            yield _whole_value((PARTIAL, str(model.rank), parameter.fqn), grad, inside)


def _of_first_rank(model: ShardedModel, inside: OwnTensors) -> Iterator[Held]:
    """Yield what the first rank of a module writes for all of them."""
    for name, buffer in (model.buffers() | model.notes()).items():
        yield _whole_value((MODEL, name), buffer, inside)
    for name, part in model.extra_states().items():
        for path, value in _leaves((MODEL, name), part.get_extra_state()):
            yield _whole_value(path, value, inside)


def _optimizer_state(
    model: ShardedModel, parameter: UnitParameter, entry: dict[str, Any], rows: _RowsOf,
    inside: OwnTensors,
) -> Iterator[Held]:  # fmt: skip
    """Yield an optimizer's state of one parameter: rows like the weight's, and all else."""
    fqn = parameter.fqn
    words = _worded(entry, model, f"the state of {fqn!r}")
    for path, value in _leaves((OPTIM, "state", fqn), words):
        is_shard = isinstance(value, DTensor) and value._spec.shape == parameter.shape
        if is_shard and parameter.holds_own_rows(value):
            yield from rows.pieces_at(path, value._local_tensor)
        else:
            yield from _claimed(path, value, inside)


class _RowsOf:
    """What this rank holds of tensors like one parameter; ranks that hold the same take turns."""

    def __init__(self, parameter: UnitParameter, number: int, *, is_first: bool) -> None:
        self._offsets, _ = parameter.box
        self._parameter, self._turn = parameter, number
        context, model = parameter.spec.context, parameter.model
        known = context.routes.group.world_size * (1 if model is None else model.mesh.size())
        # else ranks of an axis that its meshes leave out hold the same: experts beside cut layers
        self._knows_all_holders = known == context.everyone.world_size
        self._is_first = is_first

    def pieces_at(self, path: Keys, own: Tensor) -> Iterator[Held]:
        """Yield own rows, if there are any; rank 0 has those of a tensor without elements."""
        shape = self._parameter.shape
        if own.numel():
            writes = self._parameter.is_writer(self._turn) if self._knows_all_holders else None
            self._turn += 1
            yield Held(path, own.detach(), self._offsets, shape, writes)
        elif not prod(shape):
            yield Held(path, own.detach(), self._offsets, shape, self._is_first)


def _whole_value(path: Keys, value: Any, inside: OwnTensors) -> Held:
    """Return an object, or a tensor that this rank writes whole."""
    if not isinstance(value, Tensor):
        return Held(path, inside.encoded(value, ".".join(map(str, path))))
    own = (value._local_tensor if isinstance(value, DTensor) else value).detach()
    return Held(path, own, (0,) * own.dim(), tuple(own.shape))


def _claimed(path: Keys, value: Any, inside: OwnTensors) -> Iterator[Held]:
    """Yield a value, if this rank has a part of it, that any rank with the same part may write."""
    held = _whole_value(path, value, inside)
    if isinstance(value, DTensor):
        if not held.value.numel() and prod(value.shape):
            return
        held = replace(held, offsets=offsets_of(value), shape=tuple(value.shape))
    yield replace(held, writes=None)


def _leaves(path: Keys, value: Any) -> Iterator[tuple[Keys, Any]]:
    """Yield the values in dicts, and in lists that hold tensors, each with its nested keys."""
    if isinstance(value, dict):
        for key, inside in value.items():
            yield from _leaves((*path, str(key)), inside)
    elif isinstance(value, list | tuple) and any(isinstance(v, Tensor) for v in tree_iter(value)):
        for index, inside in enumerate(value):
            yield from _leaves((*path, index), inside)
    else:
        yield path, value


def named_groups(model: ShardedModel) -> list[dict[str, Any]]:
    """Return the param groups of all optimizers, with names in place of parameters."""
    groups = [group for optimizer in model.optimizers for group in shared_groups(optimizer)]
    return [_group_by_names(group, model) for group in groups]


def held_groups(groups: Sequence[dict[str, Any]], inside: OwnTensors) -> list[Held]:
    named = [((OPTIM, "param_groups", index), group) for index, group in enumerate(groups)]
    leaves = [leaf for path, group in named for leaf in _leaves(path, group)]
    return [held for path, value in leaves for held in _claimed(path, value, inside)]


def _group_by_names(group: dict[str, Any], model: ShardedModel) -> dict[str, Any]:
    names = [model.parameter(tensor).fqn for tensor in group["params"]]
    names = [name for name in names if name not in model.left_out]
    choices = {key: value for key, value in group.items() if key != "params"}
    return {**_worded(choices, model, "a param group"), "params": names}


def _worded(state: dict[Any, Any], model: ShardedModel, where: str) -> dict[str, Any]:
    """Return a state of plain values under keys that are words."""
    words: dict[str, Any] = as_words(plain(state), model.name_of, where)
    return words


def own_state_of(model: ShardedModel) -> dict[str, Any]:
    """Return the state of this rank alone: that of no parameter, and that of companions."""
    companions = model.engine.companions.alive().items()
    own = [plain(added_state(optimizer)) for optimizer in model.optimizers]
    if any(isinstance(value, DTensor) for value in tree_iter(own)):
        wanted = "numbers and tensors of its own in an optimizer's state_dict()"
        hint = "keep tensors like a parameter in optimizer.state[parameter]"
        raise CheckpointError(wanted, "a shard of a parameter (DTensor)", hint=hint)
    return {
        "own": own,
        "common": [_worded(common_state(o.state), model, "its state") for o in model.optimizers],
        "companions": {key: plain(companion.rank_state()) for key, companion in companions},
    }
