"""Errors of checkpoints, and how ranks share them: if one rank fails, every rank raises."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar, cast

from onefold.errors import CheckpointError, OnefoldError, expected, listed
from onefold.wire.collectives import Group

T = TypeVar("T")

LOAD_ANOTHER = "the disk or a copy has damaged it; load an earlier checkpoint"


class Damaged(CheckpointError):
    """A file differs from the file that was saved. An earlier checkpoint may still load."""


def refusal(what: str, got: object, *, hint: str) -> CheckpointError:
    """Return the error `expected WHAT, got GOT`."""
    return CheckpointError(expected(what, got, hint=hint))


def damage(what: str, got: object, *, hint: str = LOAD_ANOTHER) -> Damaged:
    """Return the error of a file that differs from the file that was saved."""
    return Damaged(expected(what, got, hint=hint))


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
        raise refusal(what, "\n  " + "\n  ".join(listed(mismatches)), hint=hint)


@dataclass(frozen=True, slots=True)
class RankVerdict:
    """What one rank sends to the others: its result, or the message of its error."""

    result: object
    problem: str | None
    is_damaged: bool


def together(group: Group, act: Callable[[], T]) -> T:
    """Run `act` on every rank and return this rank's result. A collective.

    If `act` raises on any rank, every rank raises: its own error, or a `CheckpointError` with the
    rank and message of the first rank that failed. This includes errors of the system (a full disk)
    and of the user's code, which would otherwise leave the other ranks waiting.
    """
    own: list[T] = []
    gather_together(group, lambda: own.append(act()))
    return own[0]


def on_rank_0(group: Group, act: Callable[[], object]) -> None:
    """Run `act` on rank 0 alone; if it raises, every rank raises. A collective."""
    together(group, lambda: act() if group.rank == 0 else None)


def gather_together(group: Group, act: Callable[[], T]) -> list[T]:
    """Run `act` as `together` does, and return every rank's result in rank order."""
    problem: Exception | None = None
    result: object = None
    try:
        result = act()
    except Exception as error:
        problem = as_checkpoint_error(error)
    message = None if problem is None else describe(problem)
    own = RankVerdict(result, message, isinstance(problem, Damaged))
    found = [own] if group.world_size == 1 else group.all_gather_object(own)
    verdicts = cast("list[RankVerdict]", found)
    is_damaged = any(each.is_damaged for each in verdicts)
    for rank, each in enumerate(verdicts):
        if each.problem is not None:
            if problem is not None and not is_damaged:
                raise problem
            raise (Damaged if is_damaged else CheckpointError)(f"rank {rank}: {each.problem}")
    return [cast("T", each.result) for each in verdicts]


def check_same(values: list[T], what: str, *, hint: str) -> None:
    """Raise `CheckpointError` unless all ranks passed the same value."""
    for rank, value in enumerate(values):
        if value != values[0]:
            got = f"{values[0]!r} on rank 0 and {value!r} on rank {rank}"
            raise refusal(f"the same {what} on every rank", got, hint=hint)


def as_checkpoint_error(error: Exception) -> Exception:
    """Return an error of the system as a `CheckpointError`, and any other error unchanged."""
    if not isinstance(error, OSError) or isinstance(error, OnefoldError):
        return error
    path = f" ({str(error.filename)!r})" if error.filename else ""
    wrapped = refusal(
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
