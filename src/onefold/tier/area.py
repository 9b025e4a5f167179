"""Which bytes of a growing area are free: leases that come and go within a step.

What a store allocates stays until the end, at its place. What backward needs of forward is another
matter: every step takes as many places as the one before, in the same order, and lets go of them in
reverse. So an area grows to what one step needs, and is used over and over. A place is a lease: it
is free again when its last holder lets go of it.
"""

from __future__ import annotations

from bisect import bisect, insort
from collections import deque
from threading import Lock

from onefold.ledger import Kind, Ledger


class Lease:
    """A stretch of one ground of an area; free again when nobody holds the lease any more."""

    __slots__ = ("_area", "ground", "nbytes", "offset")

    def __init__(self, area: Area, ground: int, offset: int, nbytes: int) -> None:
        self._area = area
        self.ground = ground
        self.offset = offset
        self.nbytes = nbytes

    def __del__(self) -> None:
        self._area.give(self)


class Area:
    """Which bytes of some grounds (files, arenas) are free. Offsets and lengths are whole pages."""

    def __init__(self, tier: str, ledger: Ledger) -> None:
        self._tier = tier
        self._ledger = ledger
        self._free: list[list[tuple[int, int]]] = []  # of each ground: (start, stop), in order
        self._lock = Lock()
        # leases end wherever the last reference goes, which may be a garbage collection inside
        # one of our own locked lines: so they only leave a note, and `take` reads it
        self._given: deque[tuple[int, int, int]] = deque()

    def add(self, ground: int, start: int, nbytes: int) -> None:
        """There are `nbytes` more of a ground, from `start`."""
        self._given.append((ground, start, nbytes))

    def give(self, lease: Lease) -> None:
        """A lease has ended."""
        self._ledger.add(Kind.ACTIVATION, self._tier, -lease.nbytes, is_mapped=True)
        self._given.append((lease.ground, lease.offset, lease.nbytes))

    def take(self, nbytes: int, first: int = 0) -> Lease | None:
        """The smallest free stretch that fits, of ground `first` if it has one, or of the next."""
        with self._lock:
            while self._given:
                self._join(*self._given.popleft())
            num_grounds = len(self._free)
            for ground in ((first + turn) % num_grounds for turn in range(num_grounds)):
                start = self._cut(self._free[ground], nbytes)
                if start is not None:
                    self._ledger.add(Kind.ACTIVATION, self._tier, nbytes, is_mapped=True)
                    return Lease(self, ground, start, nbytes)
        return None

    def _cut(self, free: list[tuple[int, int]], nbytes: int) -> int | None:
        fitting = [(stop - start, start) for start, stop in free if stop - start >= nbytes]
        if not fitting:
            return None
        length, start = min(fitting)
        at = bisect(free, (start, start))
        free[at : at + 1] = [(start + nbytes, start + length)] if length > nbytes else []
        return start

    def _join(self, ground: int, start: int, nbytes: int) -> None:
        """Add a free stretch; with its neighbours it becomes one."""
        while len(self._free) <= ground:
            self._free.append([])
        free, stop = self._free[ground], start + nbytes
        at = bisect(free, (start, stop))
        if at < len(free) and free[at][0] == stop:
            stop = free.pop(at)[1]
        if at > 0 and free[at - 1][1] == start:
            start = free.pop(at - 1)[0]
        insort(free, (start, stop))
