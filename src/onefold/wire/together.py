"""If one rank raises, all raise.

    together     run on every rank: its own result
    collect      the same, and every rank's result
    first        run on rank 0: its result on every rank
    same         the same, and compare what ranks return
    announcing   around a call: ranks that wait inside learn that this one fails
    refusing     before ranks have met: those that wait for this one learn that it fails

The rank that fails raises its own error, whatever it is. The others raise an `OnefoldError` that
names the rank, of the same class if the error is ours.
"""

import pickle
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from itertools import zip_longest
from typing import Any, TypeVar

import torch.distributed as dist
from torch.distributed.distributed_c10d import Store

from onefold.errors import Failure, OnefoldError, WireError, as_agreed, expected, is_agreed
from onefold.wire.collectives import Group, named
from onefold.wire.launcher import store_holder
from onefold.wire.roll_call import LINGER_S

T = TypeVar("T")

Judge = Callable[[Group, list[Any]], Failure | None]
"""Finds what is wrong with the results of all ranks of a group."""


def together(
    groups: Group | Sequence[Group], act: Callable[[], T], kind: type[OnefoldError] = WireError
) -> T:
    """Run `act` on every rank, and return this rank's result. A collective.

    Args:
        groups: the ranks; of several groups, such as the axes of a mesh, each passes on what it
            has learned from those before.
        act: no collective.
        kind: the class of errors on other ranks, for errors that are not Onefold's.
    """
    results: list[T] = []
    collect(groups, lambda: results.append(act()), kind)
    return results[0]


def first(group: Group, act: Callable[[], T], kind: type[OnefoldError] = WireError) -> T:
    """Run `act` on rank 0 alone, and return its result on every rank. A collective."""
    said, own = _said(act if group.rank == 0 else _nothing, group, kind)
    try:
        return _result(group.take_first(said), own)
    finally:
        del own  # its traceback refers to this frame


def collect(
    groups: Group | Sequence[Group], act: Callable[[], T],
    kind: type[OnefoldError] = WireError, judge: Judge | None = None,
) -> list[T]:  # fmt: skip
    """Run `act` as `together` does; return the results of the first group, in rank order."""
    axes = [groups] if isinstance(groups, Group) else groups
    said, own = _said(act, axes[0], kind)
    results: list[T] = []
    for axis in axes:
        answers: list[Any] = axis.gather(said)
        results = results or answers
        if not isinstance(said, Failure):
            failure = next((answer for answer in answers if isinstance(answer, Failure)), None)
            said = failure or (judge and judge(axis, answers)) or said
    try:
        _result(said, own)
    finally:
        del own  # its traceback refers to this frame
    return results


def _nothing() -> None:
    return None


def _said(
    act: Callable[[], Any], group: Group, kind: type[OnefoldError]
) -> tuple[Any, BaseException | None]:
    """What `act` returns, or its failure as the others raise it; and its error."""
    try:
        return act(), None
    except BaseException as error:
        return failure_of(error, group, kind), error


def _result(said: Any, own: BaseException | None) -> Any:
    """Raise this rank's own error, or that of another rank; return what was said."""
    if own is not None:
        try:
            raise as_agreed(own)
        finally:
            del own  # its traceback refers to this frame
    if isinstance(said, Failure):
        raise said.error()
    return said


def same(
    groups: Group | Sequence[Group], describe: Callable[[], T], what: str, *, hint: str,
    kind: type[OnefoldError],
) -> list[T]:  # fmt: skip
    """Collect what ranks `describe`, a value or a list of facts; all raise if one differs."""
    return collect(
        groups, describe, kind, lambda axis, said: difference(axis, said, what, hint, kind)
    )


def difference(
    group: Group, said: Sequence[Any], what: str, hint: str, kind: type[OnefoldError]
) -> Failure | None:
    """The first fact in which a rank differs from this one; None if all are the same."""
    mine = said[group.rank]
    for rank, theirs in enumerate(said):
        if theirs != mine:
            own, other = mine, theirs
            if isinstance(mine, list):
                pairs = zip_longest(mine, theirs, fillvalue="nothing")
                own, other = next(pair for pair in pairs if pair[0] != pair[1])
            numbers = group.global_ranks()
            got = f"{own!r} on rank {numbers[group.rank]} but {other!r} on rank {numbers[rank]}"
            return Failure(kind, expected(f"the same {what} on every rank", got, hint=hint))
    return None


@contextmanager
def announcing(group: Group, kind: type[OnefoldError] = WireError) -> Iterator[None]:
    """Tell ranks that wait inside the block if this rank fails there alone, and why.

    They raise within a second. All ranks enter the same blocks in the same order. Errors that ranks
    agreed on need no news, and failed waits have theirs.
    """
    roll_call = None if group.peers is None else group.peers.roll_call
    if roll_call is None or roll_call.is_in_call:
        yield
        return
    roll_call.begin_call()
    try:
        yield
    except BaseException as error:
        if not is_agreed(error) and not isinstance(error, WireError):
            roll_call.announce(failure_of(error, group, kind))
        raise
    finally:
        roll_call.end_call()


def failure_of(error: BaseException, group: Group, kind: type[OnefoldError]) -> Failure:
    """This rank's error as the others raise it."""
    return Failure.from_error(error, group.global_ranks()[group.rank], kind)


@contextmanager
def refusing() -> Iterator[None]:
    """Tell ranks that wait to meet this one if it fails in the block, and why.

    All ranks enter the same blocks in the same order; those that wait look for `read_refusal`.
    """
    with named(f"the store of {store_holder()} to answer"):
        if store := _store_of_world():
            store.add(f"onefold/calls/{dist.get_rank()}", 1)
    try:
        yield
    except BaseException as error:
        # errors that ranks agreed on need no news, and failed waits have theirs
        is_news = not is_agreed(error) and not isinstance(error, WireError)
        if is_news and (store := _store_of_world()):
            with suppress(RuntimeError):  # the store's host has ended
                _leave_failure(store, Failure.from_error(error, dist.get_rank(), WireError))
        raise


def _leave_failure(store: Store, failure: Failure) -> None:
    """Leave a failure in the store; wait a moment until all know."""
    call = _call_of(store)
    store.set(f"{call}/{dist.get_rank()}", pickle.dumps(failure).hex())
    until = time.monotonic() + LINGER_S  # the others may learn it from its store
    known = store.add(call, 1)
    while known < dist.get_world_size() and time.monotonic() < until:
        time.sleep(LINGER_S / 20)
        known = store.add(call, 0)


def read_refusal(group: Group) -> Failure | None:
    """The failure of a rank of the group that refuses to meet the others in this call."""
    store = _store_of_world()
    call = "" if store is None else _call_of(store)
    if store is None or store.add(call, 0) == 0:  # ranks that refuse, and those that know of one
        return None
    for key in (f"{call}/{rank}" for rank in group.global_ranks()):
        if store.check([key]):
            store.add(call, 1)
            return pickle.loads(bytes.fromhex(store.get(key).decode()))
    return None


def _call_of(store: Store) -> str:
    return f"onefold/refused/{store.add(f'onefold/calls/{dist.get_rank()}', 0)}"


def _store_of_world() -> Store | None:
    """The store that all ranks share; None for a process alone, and for test doubles."""
    world = dist.group.WORLD if dist.is_available() and dist.is_initialized() else None
    if world is None or "gloo" not in dist.get_backend_config(world):
        return None
    return world.get_group_store()
