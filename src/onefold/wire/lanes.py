"""Lanes: one gloo connection for each phase of a step, so that messages of two phases never meet.

gloo pairs the n-th message of one rank with the n-th of another, whatever they hold, and ends the
process where their sizes differ. If rank 0 saves while rank 1 runs forward, each therefore waits in
a lane of its own; the roll call (wire/roll_call.py) then names both. Within a lane, all ranks
expect the message that followed the last two when they were sent before. A rank that begins another
one meets the others first, in a lane that holds nothing else (`Peers.agree`). The group that the
user gave keeps the user's own collectives and those of `DTensor`. See docs/adr/0019.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Hashable
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import (
    AllgatherOptions,
    AllreduceOptions,
    AllToAllOptions,
    BroadcastOptions,
    PrefixStore,
    ProcessGroupGloo,
    Store,
)

from onefold.errors import WireError

CALL = "call"
"""The phase outside of forward and backward: save, load, unsharded, an optimizer's step."""

AGREEMENT = "agreement"
"""The connection on which ranks compare messages that they did not expect."""

_MOST_EXPECTED = 4096
"""Messages that a lane remembers: for walks that never repeat, it begins anew."""

_LATER = timedelta(minutes=1)

ReduceOp = dist.ReduceOp.RedOpType
MAX = dist.ReduceOp.MAX
ALL_GATHER, ALL_TO_ALL = AllgatherOptions(), AllToAllOptions()
ALL_GATHER.asyncOp = ALL_TO_ALL.asyncOp = True
"""For calls of a backend itself: `torch.distributed`'s functions check as much time again."""

_DESCRIPTORS = "/proc/self/fd"

_CONNECTIONS = {
    CALL: "call",
    "forward": "forward",
    # a rank in one of these never meets a rank in the other: a training forward is between them
    "backward": "backward",
    "evaluation": "backward",
}


@dataclass(slots=True, weakref_slot=True)
class PhaseNow:
    """The phase of one sharded module on this rank; the engine says when one begins."""

    name: str = CALL

    def begin(self, name: str) -> None:
        """Begin a phase: collectives from here on belong to it."""
        self.name = name


@dataclass(slots=True)
class Lane:
    """One connection and the number of collectives that this rank has begun on it."""

    name: str
    backend: Any  # a ProcessGroupGloo, whose stubs lack some calls
    sockets: dict[int, str] = field(default_factory=dict)  # what each descriptor leads to
    issued: int = 0
    _last: tuple[Hashable, Hashable] = (None, None)
    _expected: dict[tuple[Hashable, Hashable], Hashable] = field(default_factory=dict)

    def expects(self, message: Hashable) -> bool:
        """True if `message` followed the last two before; all ranks have seen the same ones."""
        last, expected = self._last, self._expected
        self._last = (last[1], message)
        if expected.get(last) == message:
            return True
        if len(expected) == _MOST_EXPECTED:
            expected.clear()
        expected[last] = message
        return False

    def cut(self) -> None:
        """End what this rank still waits for here: gloo's destructor would wait for it as well.

        gloo has no call for that (`abort` is empty), so its own sockets are shut down.
        """
        for number, inode in self.sockets.items():
            with suppress(OSError):  # closed by now
                if os.readlink(f"{_DESCRIPTORS}/{number}") == inode:
                    with socket.socket(fileno=os.dup(number)) as own:
                        own.getpeername()  # the one that listens has none: gloo does not bear it
                        own.shutdown(socket.SHUT_RDWR)

    def begin(self) -> Any:
        """Count one more collective, which the caller begins on the backend."""
        self.issued += 1
        return self.backend

    def all_reduce(self, tensor: torch.Tensor, kind: ReduceOp) -> dist.Work:
        """Begin to reduce a tensor over the ranks, in place."""
        options = AllreduceOptions()
        options.reduceOp = kind  # type: ignore[assignment]
        return self.begin().allreduce([tensor], options)


class Lanes:
    """The lanes between the ranks of one group. `connect` is a collective."""

    def __init__(self, now: PhaseNow, lanes: dict[str, Lane], size: int) -> None:
        self.all = lanes
        self._now = now
        self.size = size
        self._roots = [_broadcast_options(root) for root in range(size)]

    @staticmethod
    def connect(
        store: Store, name: str, members: tuple[int, int], now: PhaseNow, timeout: timedelta,
        await_all: Callable[[str], None],
    ) -> Lanes:  # fmt: skip
        """Connect this rank with the others; `members` is (rank, world size).

        Raises `WireError` if a rank does not come within `timeout`. `await_all` waits for all ranks
        before each connection, as nothing can be raised in the wait of gloo itself.
        """
        rank, size = members
        lanes, before = {}, _sockets()
        for connection in (*dict.fromkeys(_CONNECTIONS.values()), AGREEMENT):
            prefix = f"{name}/{connection}"
            await_all(prefix)
            try:
                backend = ProcessGroupGloo(PrefixStore(prefix, store), rank, size, timeout)
            except RuntimeError as error:
                raise absent(members, timeout, str(error).splitlines()[0]) from error
            # a wait that ends first can say where every rank is (wire/peers.py)
            backend._set_default_timeout(timeout + _LATER)
            after = _sockets()
            own = {number: inode for number, inode in after.items() if before.get(number) != inode}
            lanes[connection], before = Lane(prefix, backend, own), after
        return Lanes(now, lanes, size)

    @property
    def phase(self) -> str:
        """The phase that collectives begun now belong to."""
        return self._now.name

    @property
    def now(self) -> Lane:
        """The lane of collectives begun now."""
        return self.all[_CONNECTIONS[self._now.name]]

    def broadcast(self, tensor: torch.Tensor, source: int) -> dist.Work:
        return self.now.begin().broadcast([tensor], self._roots[source])

    def all_gather(self, out: torch.Tensor, shard: torch.Tensor) -> dist.Work:
        return self.now.begin()._allgather_base(out, shard, ALL_GATHER)

    def all_to_all(
        self, out: torch.Tensor, sent: torch.Tensor, numels_out: list[int], numels_sent: list[int]
    ) -> dist.Work:
        return self.now.begin().alltoall_base(out, sent, numels_out, numels_sent, ALL_TO_ALL)

    def all_reduce(self, tensor: torch.Tensor, kind: ReduceOp) -> dist.Work:
        return self.now.all_reduce(tensor, kind)


def _sockets() -> dict[int, str]:
    """The sockets of this process, by the numbers of their descriptors; none without /proc."""
    sockets = {}
    with suppress(OSError):
        for number in os.listdir(_DESCRIPTORS):
            with suppress(OSError):  # the descriptor of this search
                if (inode := os.readlink(f"{_DESCRIPTORS}/{number}")).startswith("socket:"):
                    sockets[int(number)] = inode
    return sockets


def absent(members: tuple[int, int], timeout: timedelta, got: str) -> WireError:
    """The error for ranks that do not come in time; `members` is (rank, world size)."""
    rank, size = members
    wanted = f"all {size} ranks in onefold.shard within {timeout.total_seconds():g} s"
    hint = "every rank calls onefold.shard, the same number of times"
    return WireError(wanted, got, where=f"rank {rank}", hint=hint)


def _broadcast_options(root: int) -> BroadcastOptions:
    options = BroadcastOptions()
    options.rootRank, options.rootTensor, options.asyncOp = root, 0, True
    return options
