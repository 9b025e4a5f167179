"""Where ranks that are threads meet for a collective, in place of torch's own meeting.

torch's waits on two conditions, one for rank 0 and one for the others, and makes a future for each
rank. Here the last rank that comes does the work, and each of the others waits for one lock.
"""

from __future__ import annotations

import sys
import threading
from itertools import accumulate
from typing import Any

import torch
from torch.testing._internal.distributed import multi_threaded_pg as threaded


class Meeting:
    """One collective of one group."""

    def __init__(self, world_size: int, collective: Any, group: Any) -> None:
        self._collective, self._group = collective, group
        self._data: list[Any] = [None] * world_size
        self._to_come = world_size
        self._lock = threading.Lock()
        self._waiting: list[threading.Lock] = []
        self._start_cond = self._done_cond = self  # what torch notifies when a rank has failed

    def join(self, rank: int, data: Any) -> Any:
        mine = threading.Lock()
        mine.acquire()
        with self._lock:
            self._data[rank] = data
            self._to_come -= 1
            is_last = not self._to_come
            ends = self._group._terminate.is_set()
            if not (is_last or ends):
                self._waiting.append(mine)
        if not ends:
            if is_last:
                self._collective.work(self._data)
                with self:
                    self.notify_all()
            else:
                mine.acquire()
        if self._group._terminate.is_set():
            sys.exit("another rank has failed")
        return threaded.ret_work(data)

    def __enter__(self) -> None:
        self._lock.acquire()

    def __exit__(self, *_: object) -> None:
        self._lock.release()

    def notify_all(self) -> None:
        while self._waiting:
            self._waiting.pop().release()

    notify = notify_all


def _work_of_all_to_all(_: object, data: list[Any]) -> None:
    """torch's looks up where pieces begin once for each pair of ranks, by tensors of sums."""
    with torch.no_grad():
        sent = [_pieces(each[1].detach(), each[3], len(data)) for each in data]
        for rank, (received, _sent, sizes, _sent_sizes) in enumerate(data):
            for piece, pieces in zip(
                _pieces(received.detach(), sizes, len(data)), sent, strict=True
            ):
                piece.copy_(pieces[rank])


def _pieces(buffer: torch.Tensor, sizes: list[int] | None, world_size: int) -> list[torch.Tensor]:
    lengths = sizes or [buffer.shape[0] // world_size] * world_size
    return [
        buffer[end - length : end] for length, end in zip(lengths, accumulate(lengths), strict=True)
    ]


threaded.Collective = Meeting
threaded.AllToAllBase.work = _work_of_all_to_all
