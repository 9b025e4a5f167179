"""The state of a sharded optimizer, as users read, save and load it.

Where units are stepped in the background, readers wait (`WaitingState`).

`optimizer.state_dict()` of a sharded optimizer holds this rank's part alone. Rows are DTensors,
which keep the place of the rank that made them. States of whole matrices are plain tensors on the
owner of a matrix: the other ranks' state dicts name the owner instead. So another rank's state is
recognised where it is loaded (`own_state`), and pickling it warns.
"""

from __future__ import annotations

import warnings
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache, partial
from typing import Any
from weakref import WeakMethod, ref

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torch.utils._python_dispatch import is_traceable_wrapper_subclass
from torch.utils._pytree import tree_iter

from onefold.engine.engine import Engine
from onefold.engine.flat_groups import NUMBERS
from onefold.engine.rules import State
from onefold.errors import StateError
from onefold.unit.logical import DetachedShard, LogicalTensor, dtensor_over
from onefold.unit.parameter import UnitParameter

KEPT_BY, OF_RANKS = "onefold_kept_by", "onefold_of_ranks"
"""Keys in a state dict, in place of a parameter's state: a rank, and the number of ranks. With the
state itself: the same, but ranks are negative. All ranks have the same keys, as torch expects of
`full_state_dict=True`: else `set_optimizer_state_dict` ends in a KeyError."""

NO_STEP = -1.0
"""Stands for the steps of a state that counts none, such as Muon's."""


def name_keeper(parameter: UnitParameter, rank: int) -> dict[str, Any]:
    """Return what stands for the state of a parameter whose state `rank` keeps.

    Adafactor looks for a step count in each state that it loads.
    """
    ranks = parameter.unit.context.rest_world
    return {KEPT_BY: _Keeper(rank), OF_RANKS: ranks, "step": torch.zeros(())}


class _Keeper(int):
    """The rank that keeps a state, in a state dict. Pickling it warns: the state is not there."""

    def __deepcopy__(self, memo: dict[int, object]) -> _Keeper:
        return self

    def __reduce_ex__(self, protocol: Any) -> Any:
        _warn_of_keepers()
        return complex, (int(self), 0)  # the only class of numbers that `weights_only` rebuilds


@cache
def _warn_of_keepers() -> None:
    """Warn, once per process, that a file gets the whole matrices of one rank alone."""
    warnings.warn(
        "this optimizer's state dict holds the matrices that one rank steps, and names the ranks "
        "of the others, also from get_optimizer_state_dict with full_state_dict=True. No other "
        "rank can load it. Use onefold.save and onefold.load.",
        stacklevel=4,  # of the line that calls torch.save
    )


def own_state(parameter: UnitParameter, state: Mapping[str, Any]) -> dict[str, Any]:
    """Return the state of a parameter that was loaded, without the name of its keeper.

    Raises `StateError` for rows or a keeper that are not those of this rank and layout. Plain
    tensors of all rows, as from one process, fit everywhere.
    """
    context = parameter.unit.context
    keeper, world_size = state.get(KEPT_BY), state.get(OF_RANKS, 0)
    if world_size < 0:
        return unnamed(state)
    if keeper is not None and (keeper == context.rest_rank or world_size != context.rest_world):
        got = f"one of {world_size} ranks, where rank {int(keeper.real)} keeps it"
        raise _another_ranks(parameter, got)
    for name, value in state.items():
        if isinstance(value, DTensor) and not parameter.holds_own_rows(value):
            place, ranks = value.device_mesh.get_coordinate() or (), value.device_mesh.size()
            where = ", ".join(map(str, place))
            got = f"{name!r} with the rows of rank {where} of {ranks} ranks"
            raise _another_ranks(parameter, got)
    return {} if keeper is not None else dict(state)


def unnamed(state: Mapping[str, Any]) -> dict[str, Any]:
    """Return a state without the name of its keeper."""
    names = {KEPT_BY, OF_RANKS} | ({"step"} if state.get("step") == NO_STEP else set())
    return {name: value for name, value in state.items() if name not in names}


class OwnStates:
    """What an optimizer gives out by `state_dict`, and takes by `load_state_dict`."""

    def __init__(
        self,
        find: Callable[[Tensor], UnitParameter | None],
        keeper_of: Callable[[UnitParameter], int | None],
    ) -> None:
        """`find` a tensor's parameter; `keeper_of`: the one rank that keeps its state."""
        self._find, self._keeper_of = find, keeper_of

    def register(self, optimizer: Optimizer) -> None:
        """Watch what is saved and loaded from now on."""
        optimizer.register_state_dict_post_hook(self._name_keepers)
        own = partial(self._load_own, ref(optimizer))
        setattr(optimizer, "load_state_dict", own)  # noqa: B010

    def _load_own(
        self, find: Callable[[], Optimizer | None], state_dict: Mapping[str, Any]
    ) -> None:
        """Let the class load this rank's state, without names of keepers, which it may look for.

        Raises `StateError` for another rank's state, before anything is loaded.
        """
        optimizer = find()
        assert optimizer is not None, "a method of an optimizer that is gone"
        states = dict(state_dict.get("state", {}))
        for number, parameter in self._numbered(optimizer, state_dict):
            own = own_state(parameter, states.pop(number, {}))
            states |= {number: own} if own else {}
        type(optimizer).load_state_dict(optimizer, {**state_dict, "state": states})

    def _name_keepers(self, optimizer: Optimizer, state_dict: dict[str, Any]) -> None:
        """Note, in place of a state that another rank keeps, which rank that is.

        Shards are given out as those that warn when they are pickled.
        """
        state = state_dict["state"]
        given = set[int]()
        for number, parameter in self._numbered(optimizer, state_dict) if state else ():
            keeper, own = self._keeper_of(parameter), state.get(number)
            is_elsewhere = keeper not in (None, parameter.unit.context.rank)
            if own:
                state[number] = {name: _given_out(value, given) for name, value in own.items()}
                if keeper is not None:
                    ranks = parameter.unit.context.rest_world
                    names = {KEPT_BY: keeper, OF_RANKS: -ranks, "step": torch.full((), NO_STEP)}
                    state[number] = names | state[number]
            elif is_elsewhere:
                state[number] = name_keeper(parameter, keeper)

    def _numbered(
        self, optimizer: Optimizer, state_dict: Mapping[str, Any]
    ) -> Iterator[tuple[Any, UnitParameter]]:
        """Yield the optimizer's sharded parameters, and their keys in a state dict."""
        groups = state_dict.get("param_groups", ())
        for saved, group in zip(groups, optimizer.param_groups, strict=False):
            for number, tensor in zip(saved["params"], group["params"], strict=False):
                parameter = self._find(tensor)
                if parameter is not None:
                    yield number, parameter


def _given_out(value: Any, given: set[int]) -> Any:
    """Return a value as it leaves in a state dict; `given`: the ids of tensors that left before.

    Parameters of a flat group share a step counter: plain torch, which would count it once for each
    of them, gets one for each.
    """
    if isinstance(value, LogicalTensor):
        return dtensor_over(DetachedShard, value._local_tensor, value._spec)
    if isinstance(value, Tensor) and id(value) in given:
        return value.clone()
    given.add(id(value))
    return value


def _another_ranks(parameter: UnitParameter, got: str) -> StateError:
    context = parameter.unit.context
    wanted = f"the optimizer state that rank {context.rest_rank} of {context.rest_world} keeps of "
    wanted += f"parameter {parameter.fqn!r}"
    hint = "optimizer.state_dict() is one rank's part. Save with onefold.save and load with "
    hint += "onefold.load; or, for optimizers such as AdamW, use get_optimizer_state_dict and "
    hint += "set_optimizer_state_dict of torch.distributed.checkpoint.state_dict with "
    hint += "StateDictOptions(full_state_dict=True)"
    return StateError(wanted, got, where=context.where, hint=hint)


def stepped_state(
    state: Mapping[Tensor, State], engines: Sequence[Engine], refresh: Callable[[], None]
) -> defaultdict[Tensor, State]:
    """Return the state as users read it; readers wait where steps run in the background."""
    if any(unit.steps_in_blocks for engine in engines for unit in engine.units):
        return WaitingState(state, engines, refresh)
    return defaultdict(dict, state)


def common_state(state: Mapping[Any, Any]) -> dict[Any, Any]:
    """Return the state that belongs to no parameter: its keys are words."""
    return {key: value for key, value in dict.items(state) if not isinstance(key, Tensor)}  # type: ignore[arg-type]


def state_nbytes(state: dict[Tensor, State], engine: Engine) -> int:
    """Return the bytes of per-element state, once per storage, without the units' moments."""
    counted = {
        buffer.tensor.untyped_storage().data_ptr()
        for unit in engine.units
        for buffer in unit.moments.values()
    }
    storages: dict[int, int] = {}
    for tensor, entry in state.items():
        if id(tensor) not in engine.by_sharded:
            continue
        kept = [(n, v) for n, own in entry.items() for v in _tensors_of(own)]
        with torch._C.DisableTorchFunctionSubclass():  # a shard would ask DTensor for its shape
            is_number = tensor.dim() == 0
            moments = [v for n, v in kept if v.dim() > 0 or (is_number and n not in NUMBERS)]
        for value in moments:
            for part in _parts_of(getattr(value, "_local_tensor", value)):
                storage = part.untyped_storage()
                storages[storage.data_ptr()] = storage.nbytes()
    return sum(nbytes for start, nbytes in storages.items() if start not in counted)


def _tensors_of(value: Any) -> list[Tensor]:
    """Return a value of a state if it is a tensor, or the tensors in its lists."""
    return (
        [value]
        if isinstance(value, Tensor)
        else [v for v in tree_iter(value) if isinstance(v, Tensor)]
    )


def _parts_of(state: Tensor) -> list[Tensor]:
    """Return the tensors of which a low-bit state consists: codes and scales."""
    if not is_traceable_wrapper_subclass(state):
        return [state]
    return [getattr(state, name) for name in state.__tensor_flatten__()[0]]


class WaitingState(defaultdict[Tensor, State]):
    """An optimizer's state; every way to read it waits for the steps that run.

    `refresh`, a method, then puts the numbers of these steps in the state.
    """

    def __init__(
        self, state: Mapping[Tensor, State], engines: Sequence[Engine], refresh: Callable[[], None]
    ) -> None:
        super().__init__(dict, state)
        self._engines = [ref(engine) for engine in engines]
        self._refresh = WeakMethod(refresh)

    def _wait(self) -> None:
        for engine in filter(None, (alive() for alive in self._engines)):
            for unit in engine.units:
                unit.wait_step()
        refresh = self._refresh()
        if refresh is not None:
            refresh()

    def __iter__(self) -> Iterator[Tensor]:
        self._wait()  # so that a copy, dict(state), waits too
        return super().__iter__()

    def __getitem__(self, tensor: Tensor) -> State:
        self._wait()
        return super().__getitem__(tensor)

    def get(self, tensor: Tensor, default: Any = None) -> Any:
        self._wait()
        return super().get(tensor, default)

    def items(self) -> Any:
        self._wait()
        return super().items()

    def values(self) -> Any:
        self._wait()
        return super().values()

    def __reduce__(self) -> Any:
        self._wait()
        return (defaultdict, (dict, dict(self)))
