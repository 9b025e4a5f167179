"""A digest a step tells whether ranks began the same messages, where no lane compares them before.

The host of a device waits for no message, so its ranks cannot meet before one (`Peers.agree`). Each
rank logs what it begins in a group. Ranks exchange a digest of their logs, and whether one of them
could not read its weights: three numbers, on a stream of their own.
"""

from __future__ import annotations

from contextlib import nullcontext
from itertools import zip_longest
from typing import Any, NamedTuple, Protocol
from zlib import crc32

import torch

from onefold.errors import TierError, WireError
from onefold.tier import accelerator
from onefold.wire.watching import DeviceWatch

MOST_LOGGED = 1024
"""Messages of one digest: a loop without an optimizer exchanges one as often."""

_LABEL = "the digest of a step"


class LoggedRanks(Protocol):
    """The ranks of a group (`onefold.wire.collectives.Group`)."""

    @property
    def rank(self) -> int: ...
    @property
    def watch(self) -> DeviceWatch | None: ...
    def all_reduce_max(self, tensor: torch.Tensor, label: str) -> None: ...
    def gather(self, value: Any) -> list[Any]: ...
    def global_ranks(self) -> list[int]: ...


class _Exchanged(NamedTuple):
    """A digest on its way to the host, and what this rank knows about it."""

    log: list[str]
    failure: TierError | None
    numbers: accelerator.Fetched


class StepDigest:
    """What this rank has begun in one group since the last exchange, and whether it has failed."""

    def __init__(self) -> None:
        self._failure: TierError | None = None
        self._log: list[str] = []
        self._exchanged: _Exchanged | None = None
        self._stream: accelerator.Stream | None = None

    def log_message(self, message: str, ranks: LoggedRanks, device: torch.device) -> None:
        """A message begins: a collective and its unit, in words that are the same on every rank."""
        self._log.append(message)
        if len(self._log) == MOST_LOGGED:
            self.compare_logs(ranks, device, waits=False)

    def tell_failure(self, failure: TierError) -> None:
        """Tell all ranks, by the next digest, why rows of this rank were not in a message."""
        self._failure = failure

    def compare_logs(self, ranks: LoggedRanks, device: torch.device, *, waits: bool) -> None:
        """Begin to exchange a digest, and judge that of the call before; with `waits`, this one.

        A device that is at most one step behind has the digest before ready; a CPU has this one.
        All ranks call it at the same places, so all of them raise in the same call: `TierError` if
        one could not read its weights, `WireError` if they began other messages.
        """
        before, self._exchanged = self._exchanged, None
        if self._log or waits:
            self._exchanged = self._exchange_digest(ranks, device)
        self._judge(ranks, before)
        if waits or device.type == "cpu":
            now, self._exchanged = self._exchanged, None
            self._judge(ranks, now)

    def _exchange_digest(self, ranks: LoggedRanks, device: torch.device) -> _Exchanged:
        log, failure = self._log, self._failure
        self._log, self._failure = [], None
        digest = crc32(repr(log).encode())
        if self._stream is None and device.type != "cpu":
            self._stream = accelerator.new(device)
        with self._stream or nullcontext():
            # ranks agree where the largest digest is the smallest one
            numbers = accelerator.sent([digest, -digest, failure is not None], torch.int64, device)
            ranks.all_reduce_max(numbers, _LABEL)
            fetched = accelerator.Fetched(numbers)
        if ranks.watch is not None and fetched.arrived is not None:
            ranks.watch.note(fetched.arrived, _LABEL, device)
        return _Exchanged(log, failure, fetched)

    def _judge(self, ranks: LoggedRanks, exchanged: _Exchanged | None) -> None:
        if exchanged is None:
            return
        largest, smallest, has_failed = exchanged.numbers.read().tolist()
        if ranks.watch is not None:
            ranks.watch.check()  # it may have ended this exchange
        if has_failed:
            raise first_failure(ranks, exchanged.failure)
        if largest != -smallest:
            raise _first_difference(ranks, exchanged.log)


def first_failure(ranks: LoggedRanks, failure: TierError | None) -> TierError:
    """The error of this rank, or of the first rank that has one. A collective."""
    texts = ranks.gather(None if failure is None else str(failure))
    return failure or TierError(next(text for text in texts if text is not None))


def _first_difference(ranks: LoggedRanks, log: list[str]) -> WireError:
    """The error for the first message that another rank did not begin. A collective."""
    logs, numbers = ranks.gather(log), ranks.global_ranks()
    at = next(i for i, begun in enumerate(zip_longest(*logs)) if len(set(begun)) > 1)
    begun = [log[at] if at < len(log) else "no message" for log in logs]
    mine = begun[ranks.rank]
    rank = next(rank for rank, other in enumerate(begun) if other != mine)
    hint = "all ranks must use units, and run backward through them, in the same order; a branch "
    hint += "that only some ranks take (layerdrop) has to be inside one unit (`units=`)"
    wanted, got = f"{mine} on every rank", f"{begun[rank]} on rank {numbers[rank]}"
    return WireError(wanted, got, where=f"rank {numbers[ranks.rank]}", hint=hint)
