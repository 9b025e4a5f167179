"""Track free bytes of a growing area, from which a step takes leases.

Activations take as many places in every step, in the same order, and return them in reverse. So an
area grows to the need of one step and is reused. A place is free again when the last reference to
its lease is gone.
"""

from __future__ import annotations

from bisect import bisect, insort
from collections import deque
from collections.abc import Callable
from threading import Lock

from onefold.layout.ledger import Kind, Ledger


class Lease:
    """Bytes of one file or arena of an area; free again when the lease is collected."""

    __slots__ = ("_area", "ground", "nbytes", "offset")

    def __init__(self, area: Area, ground: int, offset: int, nbytes: int) -> None:
        self._area = area
        self.ground = ground
        self.offset = offset
        self.nbytes = nbytes

    def __del__(self) -> None:
        self._area.give(self)


class Area:
    """Free bytes of several grounds (files, arenas). Offsets and lengths are whole pages."""

    def __init__(self, tier: str, ledger: Ledger, kind: Kind = Kind.ACTIVATION) -> None:
        self._tier = tier
        self._kind = kind
        self._ledger = ledger
        self._free: list[list[tuple[int, int]]] = []  # of each ground: (start, stop), in order
        self._lock = Lock()
        # a lease may end in a garbage collection inside one of our own locked lines, so it only
        # queues its bytes here, and `lease` reads the queue
        self._given: deque[tuple[int, int, int]] = deque()

    def add(self, ground: int, start: int, nbytes: int) -> None:
        """Add `nbytes` of a ground, from `start`."""
        self._given.append((ground, start, nbytes))

    def give(self, lease: Lease) -> None:
        """End a lease."""
        self._ledger.add(self._kind, self._tier, -lease.nbytes, is_mapped=True)
        self._given.append((lease.ground, lease.offset, lease.nbytes))

    def lease(self, nbytes: int, first: int = 0) -> Lease | None:
        """Lease the smallest free stretch that fits: of ground `first`, or of the next with one."""
        with self._lock:
            while self._given:
                self._join(*self._given.popleft())
            num_grounds = len(self._free)
            for ground in ((first + turn) % num_grounds for turn in range(num_grounds)):
                start = self._cut_stretch(self._free[ground], nbytes)
                if start is not None:
                    self._ledger.add(self._kind, self._tier, nbytes, is_mapped=True)
                    return Lease(self, ground, start, nbytes)
        return None

    def take_or_grow(
        self, nbytes: int, first: int, grow: Callable[[], tuple[int, int, int]]
    ) -> Lease:
        """Lease `nbytes`, adding the (ground, start, nbytes) of `grow` where no stretch is free."""
        while (lease := self.lease(nbytes, first)) is None:
            self.add(*grow())
        return lease

    def _cut_stretch(self, free: list[tuple[int, int]], nbytes: int) -> int | None:
        fitting = [(stop - start, start) for start, stop in free if stop - start >= nbytes]
        if not fitting:
            return None
        length, start = min(fitting)
        at = bisect(free, (start, start))
        free[at : at + 1] = [(start + nbytes, start + length)] if length > nbytes else []
        return start

    def _join(self, ground: int, start: int, nbytes: int) -> None:
        """Add a free stretch, merged with its neighbours."""
        while len(self._free) <= ground:
            self._free.append([])
        free, stop = self._free[ground], start + nbytes
        at = bisect(free, (start, stop))
        if at < len(free) and free[at][0] == stop:
            stop = free.pop(at)[1]
        if at > 0 and free[at - 1][1] == start:
            start = free.pop(at - 1)[0]
        insort(free, (start, stop))
