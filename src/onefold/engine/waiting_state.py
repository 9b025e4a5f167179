"""An optimizer's state whose readers wait for steps that run in the background."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import Any
from weakref import ref

from torch import Tensor

from onefold.engine.engine import Engine

State = dict[str, Any]


def stepped_state(
    state: Mapping[Tensor, State], engines: Sequence[Engine]
) -> defaultdict[Tensor, State]:
    """Return the state as users read it; readers wait where steps run in the background."""
    if any(unit.steps_in_blocks for engine in engines for unit in engine.units):
        return WaitingState(state, engines)
    return defaultdict(dict, state)


def common_state(state: Mapping[Any, Any]) -> dict[Any, Any]:
    """Return the state that belongs to no parameter: its keys are words."""
    return {key: value for key, value in dict.items(state) if not isinstance(key, Tensor)}  # type: ignore[arg-type]


class WaitingState(defaultdict[Tensor, State]):
    """An optimizer's state; every way to read it waits for the steps that run."""

    def __init__(self, state: Mapping[Tensor, State], engines: Sequence[Engine]) -> None:
        super().__init__(dict, state)
        self._engines = [ref(engine) for engine in engines]

    def _wait(self) -> None:
        for engine in filter(None, (alive() for alive in self._engines)):
            for unit in engine.units:
                unit.wait_step()

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
