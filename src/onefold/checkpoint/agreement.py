"""Errors of checkpoints, and how ranks share them: if one rank fails, every rank raises."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TypeVar

import torch

from onefold.errors import CheckpointError, OnefoldError, listed
from onefold.wire import together as agreed
from onefold.wire.collectives import Group
from onefold.wire.together import Judge

T = TypeVar("T")
Raised = TypeVar("Raised", bound=BaseException)

LOAD_ANOTHER = "the disk or a copy has damaged it; load an earlier checkpoint"


NOT_OF_BYTES = (OnefoldError, MemoryError, torch.OutOfMemoryError)
"""Errors of reading that do not tell that bytes mean nothing: they stay as they are."""


class Damaged(CheckpointError):
    """A file differs from the file that was saved. An earlier checkpoint may still load."""


def damage(what: str, got: object, *, hint: str = LOAD_ANOTHER) -> Damaged:
    """Return the error of a file that differs from the file that was saved."""
    return Damaged(what, got, hint=hint)


@contextmanager
def believing(what: str) -> Iterator[None]:
    """Around the use of values that were saved: raise `CheckpointError` if they are not `what`."""
    try:
        yield
    except NOT_OF_BYTES:
        raise
    except Exception as error:
        got = f"{type(error).__name__}: {str(error)[:200]}" if str(error) else type(error).__name__
        hint = "it is damaged, or this is no checkpoint"
        raise CheckpointError(what, got, hint=hint) from error


def shape_mismatches(
    wanted: Mapping[str, Sequence[int]], saved: Mapping[str, Sequence[int]], where: str
) -> list[str]:
    """Return a line for each wanted name that was saved with another shape, or not at all."""
    return [
        f"{name}: {list(shape)} in the module, "
        f"{list(saved[name]) if name in saved else 'not'} in the {where}"
        for name, shape in wanted.items()
        if name not in saved or list(saved[name]) != list(shape)
    ]


def refuse_mismatches(what: str, mismatches: list[str], *, hint: str) -> None:
    """Raise one `CheckpointError` with all mismatches, if there are any."""
    if mismatches:
        raise CheckpointError(what, "\n  " + "\n  ".join(listed(mismatches)), hint=hint)


def together(group: Group, act: Callable[[], T]) -> T:
    """See `onefold.wire.together.together`; errors of the system are `CheckpointError`s."""
    return agreed.together(group, _on_disk(act), CheckpointError)


def first(group: Group, act: Callable[[], T]) -> T:
    return agreed.first(group, _on_disk(act), CheckpointError)


def collect(group: Group, act: Callable[[], T], judge: Judge | None = None) -> list[T]:
    return agreed.collect(group, _on_disk(act), CheckpointError, judge)


def same_directory(group: Group, act: Callable[[], str | list[str]], *, hint: str) -> None:
    """Raise `CheckpointError` on every rank unless `act` returns the same path on all."""
    agreed.same(group, _on_disk(act), "directory", hint=hint, kind=CheckpointError)


def _on_disk(act: Callable[[], T]) -> Callable[[], T]:
    def run() -> T:
        try:
            return act()
        except OSError as error:
            raise as_checkpoint_error(error) from error.__cause__

    return run


def as_checkpoint_error(error: Raised) -> Raised | CheckpointError:
    """Return an error of the system as a `CheckpointError`, and any other error unchanged."""
    if not isinstance(error, OSError) or isinstance(error, OnefoldError):
        return error
    path = f" ({str(error.filename)!r})" if error.filename else ""
    wrapped = CheckpointError(
        "the disk to work",
        f"{type(error).__name__}: {error.strerror or error}{path}",
        hint="free space, check the disk and the rights of this user, and save again; "
        "checkpoints that are complete are untouched",
    )
    wrapped.__cause__ = error
    return wrapped


def describe(error: Exception) -> str:
    """Return an error as text for other ranks; the type is named where it is not ours."""
    error = as_checkpoint_error(error)
    return str(error) if isinstance(error, OnefoldError) else f"{type(error).__name__}: {error}"
