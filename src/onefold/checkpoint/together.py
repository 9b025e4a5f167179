"""One verdict for all ranks: what one of them refuses, none of them does."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar, cast

from onefold.checkpoint.blocks import Damaged
from onefold.errors import CheckpointError, OnefoldError, expected
from onefold.wire.collectives import Group

T = TypeVar("T")


def together(group: Group, act: Callable[[], T]) -> list[T]:
    """Run `act` on every rank; what each returned, in rank order. A collective.

    If any rank raised, every rank does: its own error, or a `CheckpointError` with the first
    other's message and rank. Errors of the system count as well: a full disk, a file not readable;
    and so do mistakes, which would otherwise leave the other ranks waiting.
    """
    problem: Exception | None = None
    mine: object = None
    try:
        mine = act()
    except Exception as error:
        problem = as_checkpoint_error(error)
    said = f"{type(problem).__name__}: {problem}"
    if problem is None or isinstance(problem, OnefoldError):
        said = str(problem)
    told = RankVerdict(mine, said if problem else None, isinstance(problem, Damaged))
    found = [told] if group.world_size == 1 else group.all_gather_object(told)
    verdicts = cast("list[RankVerdict]", found)
    is_damaged = any(each.is_damaged for each in verdicts)
    for rank, each in enumerate(verdicts):
        if each.problem is not None:
            if problem is not None and not is_damaged:
                raise problem
            raise (Damaged if is_damaged else CheckpointError)(f"rank {rank}: {each.problem}")
    return [cast("T", each.result) for each in verdicts]


def check_same(everyone: list[T], what: str, *, hint: str) -> None:
    """Raise `CheckpointError` unless all ranks have told the same."""
    for rank, told in enumerate(everyone):
        if told != everyone[0]:
            got = f"{everyone[0]!r} on rank 0 and {told!r} on rank {rank}"
            raise CheckpointError(expected(f"the same {what} on every rank", got, hint=hint))


@dataclass(frozen=True, slots=True)
class RankVerdict:
    """What one rank tells the others."""

    result: object
    problem: str | None
    is_damaged: bool


def as_checkpoint_error(error: Exception) -> Exception:
    """An error of the system as one of ours; ours, and mistakes, as they are."""
    if not isinstance(error, OSError) or isinstance(error, OnefoldError):
        return error
    place = getattr(error, "filename", None)
    said = getattr(error, "strerror", None) or error
    wrapped = CheckpointError(
        f"expected the disk to work, got {type(error).__name__}: {said}"
        + (f" ({str(place)!r})" if place else "")
        + "\nhint: free space, check the disk and the rights of this user, and save again; "
        "checkpoints that are complete are untouched"
    )
    wrapped.__cause__ = error
    return wrapped
