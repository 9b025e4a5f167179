"""Objects that a module trains with, and that are saved with it: averages and islands."""

from typing import Any, Protocol
from weakref import ref

from torch import Tensor

from onefold.unit.parameter import UnitParameter


class Companion(Protocol):
    """An average of a module, or its islands.

    Attributes:
        word: names its state in checkpoints, with a number where there are several.
        reshards: its state loads at any number of ranks.
    """

    word: str
    reshards: bool

    def saved_rows(self) -> list[tuple[UnitParameter, Tensor]]:
        """Return this rank's rows of parameters: a checkpoint reads them back in place."""
        ...

    def rank_state(self) -> dict[str, Any]:
        """Return the rest of its state on this rank."""
        ...

    def resume(self, state: dict[str, Any]) -> None:
        """Go on from a `rank_state`, after rows were read. May be a collective."""
        ...


class Companions:
    """The companions of one module that are alive, and state that waits for one to come."""

    def __init__(self) -> None:
        self._joined: list[ref[Companion]] = []
        self._waiting: dict[str, dict[str, Any]] = {}

    def alive(self) -> dict[str, Companion]:
        """Return the companions by word and number, such as "average.0"."""
        alive: dict[str, Companion] = {}
        for companion in filter(None, (joined() for joined in self._joined)):
            number = sum(other.word == companion.word for other in alive.values())
            alive[f"{companion.word}.{number}"] = companion
        return alive

    def join(self, companion: Companion) -> dict[str, Any] | None:
        """Save `companion` with the module from now on; return the state that waits for it."""
        self._joined = [joined for joined in self._joined if joined() is not None]
        self._joined.append(ref(companion))
        return self._waiting.pop(next(reversed(self.alive())), None)

    def leave(self, states: dict[str, dict[str, Any]]) -> None:
        """Keep the states that a checkpoint has of companions that the module has not yet."""
        self._waiting = states
