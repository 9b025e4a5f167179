"""Messages from one rank that is a thread to one other, which torch's threaded groups lack.

A pipeline sends so between its stages. Import this file before its ranks start.
"""

from __future__ import annotations

import sys
import threading
import time
from collections import defaultdict
from typing import Any

from torch import Tensor
from torch.testing._internal.distributed import multi_threaded_pg as threaded

from tests.support.forking import HANG_S

POLL_S = 0.2
"""How often a rank that waits looks whether another one has failed."""

Address = tuple[str, int, int, int]
"""The group, who sends, who receives, and the tag."""


class Post:
    """All messages of one world; those of one address arrive in the order in which they left."""

    def __init__(self) -> None:
        self.arrived = threading.Condition()
        self.sent = defaultdict[Address, list[Tensor]](list)
        self.asked = defaultdict[Address, int](int)


class Parcel:
    """What torch waits for: a message that was sent (`into` is None), or one to be received."""

    def __init__(self, post: Post, address: Address, number: int, into: Tensor | None) -> None:
        self._post, self._address, self._number, self._into = post, address, number, into

    def wait(self, timeout: Any = None) -> bool:
        if self._into is None:
            return True
        sent, deadline = self._post.sent[self._address], time.monotonic() + HANG_S
        with self._post.arrived:
            while len(sent) <= self._number:
                if threaded.ProcessLocalGroup._terminate.is_set():
                    sys.exit("another rank has failed")
                if time.monotonic() > deadline:
                    raise TimeoutError(f"nothing came from {self._address} in {HANG_S:g} s")
                self._post.arrived.wait(POLL_S)
        self._into.detach().copy_(sent[self._number])
        sent[self._number] = self._into.new_empty(0)
        self._into = None
        return True

    def is_completed(self) -> bool:
        return self._into is None or len(self._post.sent[self._address]) > self._number


def _end_world() -> None:
    """The next world begins without messages of this one, whose groups have the same names."""
    threaded.ProcessLocalGroup._post = Post()
    _reset()


def _send(group: Any, tensors: list[Tensor], to: int, tag: int = 0) -> Parcel:
    post, address = group._post, (group.pg_name, group.rank(), to, tag)
    with post.arrived:
        post.sent[address] += [tensor.detach().clone() for tensor in tensors]
        post.arrived.notify_all()
    return Parcel(post, address, 0, None)


def _recv(group: Any, tensors: list[Tensor], sender: int, tag: int = 0) -> Parcel:
    post, address = group._post, (group.pg_name, sender, group.rank(), tag)
    (tensor,) = tensors
    with post.arrived:
        number, post.asked[address] = post.asked[address], post.asked[address] + 1
    return Parcel(post, address, number, tensor)


threaded.ProcessLocalGroup.send = _send
threaded.ProcessLocalGroup.recv = _recv
# torch 2.15 asks it for `supports_coalescing` before it sends a batch, 2.13 only a group of torch's
threaded.ProcessLocalGroup._get_backend = lambda group, device: group
_reset = threaded.ProcessLocalGroup.reset
threaded.ProcessLocalGroup.reset = _end_world
threaded.ProcessLocalGroup._post = Post()
