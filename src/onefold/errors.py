"""The exceptions of Onefold. Every one is an `OnefoldError`.

    OnefoldError
      ConfigError(ValueError)   a choice that cannot work: unknown word, wrong module, wrong mesh
      StateError(RuntimeError)  the right call at the wrong moment, or state changed behind our back
      WireError(RuntimeError)   a collective failed, timed out, or a peer diverged or died
      TierError(OSError)        memory or disk refused
      CheckpointError           a checkpoint is missing, torn or of another model

An error builds its message from what was expected, what came, where (rank, parameter) and a hint.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Self, TypeVar, overload


class OnefoldError(Exception):
    """Base of all errors raised on purpose by Onefold.

    Args:
        wanted: what was expected; without `got`, the whole message, as another rank sent it.
        got: what came instead.
        hint: what to do about it.
        where: the rank, unit or file, where one is meant.
    """

    @overload
    def __init__(self, wanted: str, /) -> None: ...

    @overload
    def __init__(self, wanted: str, got: object, /, *, hint: str, where: str = "") -> None: ...

    def __init__(self, wanted: str, *got: object, **more: str) -> None:
        super().__init__(expected(wanted, *got, **more) if got or more else wanted)


class ConfigError(OnefoldError, ValueError):
    """A choice that cannot work: an unknown keyword, the wrong module, mesh or optimizer."""


class StateError(OnefoldError, RuntimeError):
    """A call at the wrong moment, or sharded state that was changed from outside."""


class WireError(OnefoldError, RuntimeError):
    """A collective failed, timed out, or ranks called different ones."""


class TierError(OnefoldError, OSError):
    """Device, host or disk memory could not be had or used.

    `errno`, `path`, `offset` and `nbytes` say what the system refused, where one request is meant.
    """

    path: str | None = None
    offset: int | None = None
    nbytes: int | None = None

    def at(self, cause: OSError, path: str, offset: int | None, nbytes: int | None) -> Self:
        """Keep that `cause` ended a request for `nbytes` at `offset` of a file on `path`."""
        self.errno, self.path, self.offset, self.nbytes = cause.errno, path, offset, nbytes
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), self.args, {**self.__dict__, "errno": self.errno}


class CheckpointError(OnefoldError):
    """A checkpoint is missing, incomplete, damaged or belongs to another model."""


@dataclass(frozen=True, slots=True)
class Failure:
    """The error of one rank, as the other ranks raise it."""

    kind: type[OnefoldError]
    text: str

    @staticmethod
    def from_error(error: BaseException, rank: int, kind: type[OnefoldError]) -> Failure:
        """Name the rank; errors that are not ours become a `kind` that names their type."""
        if isinstance(error, OnefoldError):
            return Failure(type(error), f"rank {rank}: {error}")
        text = f": {error}" if str(error) else ""
        return Failure(kind, f"rank {rank}: {type(error).__name__}{text}")

    def error(self) -> OnefoldError:
        """The error to raise."""
        return as_agreed(self.kind(self.text))


_AGREED = "_onefold_agreed"
"""The attribute of an error that every rank of a call raises."""

Raised = TypeVar("Raised", bound=BaseException)


def as_agreed(error: Raised) -> Raised:
    """Mark an error that every rank of a call raises: nobody waits for this rank."""
    error.__dict__[_AGREED] = True
    return error


def is_agreed(error: BaseException) -> bool:
    """True if every rank of the call raises this error, or one for it."""
    return _AGREED in error.__dict__


def listed(lines: list[str], *, most: int = 20) -> list[str]:
    """The first lines of a long list, and how many more there are."""
    more = len(lines) - most
    return lines[:most] + [f"and {more} more"] * (more > 0)


def expected(what: str, got: object, *, where: str = "", hint: str) -> str:
    """One message in the house style: `expected X, got Y (where)` and a hint line."""
    place = f" ({where})" if where else ""
    return f"expected {what}, got {got}{place}\nhint: {hint}"
