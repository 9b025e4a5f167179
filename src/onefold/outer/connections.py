"""Connections between the ranks of different islands: gloo, on the CPU, one group per parcel.

A group whose peer has gone fails for good. It is left, and islands that go on connect anew.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor
from torch.distributed.distributed_c10d import (
    AllgatherOptions,
    BroadcastOptions,
    PrefixStore,
    ProcessGroupGloo,
    Store,
)

from onefold.errors import WireError, expected
from onefold.outer.parcels import Owners

_GLOO: Any = ProcessGroupGloo  # whose stubs lack some names
_LOOK = timedelta(seconds=0.25)


@dataclass(frozen=True, slots=True)
class Station:
    """Where one rank stands: its store to meet others, its number, the address peers dial."""

    store: Store
    rank: int
    address: str = ""  # "": gloo's choice, or GLOO_SOCKET_IFNAME


class IslandLinks:
    """The groups of this rank among the islands that take part now."""

    def __init__(self, station: Station, name: str, place: tuple[int, int], timeout: float) -> None:
        """`place`: the position of this island among those that take part, and their number."""
        self._station, self._name, self._timeout = station, name, timeout
        self._position, self._size = place
        self._groups: dict[Owners, Any] = {}
        self._works: list[Any] = []  # of groups that were left: gloo still uses their buffers

    def connect(self, everyone: Iterable[Owners]) -> None:
        """Connect the groups with these owners. A collective of their islands.

        Raises `WireError` if a peer does not come within the timeout.
        """
        if self._size == 1:
            return
        wanted = sorted(set(everyone) - self._groups.keys())
        within(self._timeout, lambda: [self._connect(owners) for owners in wanted])

    def _connect(self, owners: Owners) -> None:
        store, rank = self._station.store.clone(), self._position  # type: ignore[attr-defined]
        prefix = PrefixStore(f"{self._name}/{'-'.join(map(str, owners))}", store)
        limit = timedelta(seconds=self._timeout)
        if not self._station.address:
            self._groups[owners] = ProcessGroupGloo(prefix, rank, self._size, limit)
            return
        options = _GLOO._Options()
        options._devices = [_GLOO.create_device(hostname=self._station.address)]
        options._timeout = limit
        self._groups[owners] = ProcessGroupGloo(prefix, rank, self._size, options)

    def gather(self, owners: Owners, message: Tensor) -> Arriving:
        """Begin to send a message to the other owners, who send one of the same length."""
        if self._size == 1:
            return Arriving([], [message])
        received = torch.empty(self._size * len(message), dtype=torch.uint8)
        options = AllgatherOptions()
        options.asyncOp = True
        work = self._groups[owners]._allgather_base(received, message, options)
        self._works.append((work, received, message))
        return Arriving([work], list(received.split(len(message))))

    def broadcast(self, owners: Owners, message: Tensor, source: int) -> Arriving:
        """Begin to send the message of the island at position `source` to the other owners."""
        if self._size == 1:
            return Arriving([], [message])
        options = BroadcastOptions()
        options.rootRank, options.rootTensor, options.asyncOp = source, 0, True
        work = self._groups[owners].broadcast([message], options)
        self._works.append((work, message))
        return Arriving([work], [message])

    def sent_nbytes(self, message: Tensor) -> int:
        """Bytes that an exchange of a message sends from this rank."""
        return (self._size - 1) * len(message)

    def forget(self) -> None:
        """Free the buffers of messages that are complete."""
        self._works = [work for work in self._works if not work[0].is_completed()]

    @property
    def is_busy(self) -> bool:
        """True while gloo uses a buffer of ours."""
        self.forget()
        return bool(self._works)


@dataclass(frozen=True, slots=True)
class Arriving:
    """Messages under way: one of each island, in their order."""

    works: list[Any]
    messages: list[Tensor]

    def wait(self, deadline: float, has_failed: Callable[[], bool]) -> None:
        """Wait until they are there; `WireError` at the deadline, or where a peer has gone.

        `has_failed` is asked now and then: True where waiting has become useless.
        """
        for work in self.works:
            while True:
                try:
                    work.wait(_LOOK)
                    break
                except RuntimeError as error:
                    if work.is_completed():
                        raise WireError(_lost(str(error).splitlines()[0])) from error
                    if time.monotonic() > deadline:
                        raise WireError(_lost("none within the timeout")) from error
                    if has_failed():
                        raise WireError(_lost("another island gave up")) from error


def within(timeout: float, act: Callable[[], object]) -> None:
    """Call `act` in a thread that is left behind if it takes longer than `timeout` seconds.

    gloo's listening side ignores its own timeout.
    """
    failed: list[Exception] = []

    def run() -> None:
        try:
            act()
        except Exception as error:
            failed.append(error)

    thread = threading.Thread(target=run, daemon=True, name="onefold-islands-connect")
    thread.start()
    thread.join(timeout)
    if thread.is_alive():
        raise WireError(_lost(f"no connection within {timeout:g} s"))
    if failed:
        raise WireError(_lost(str(failed[0]).splitlines()[0])) from failed[0]


def _lost(got: str) -> str:
    return expected(
        "a message of every island that takes part", got,
        hint="the round is repeated without islands that do not answer",
    )  # fmt: skip
