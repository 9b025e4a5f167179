"""Keep the buffers of one message for the next one: the rules, for tensors and for plans.

Units are often alike. Freed memory would be mapped and cleared again page by page, or another
allocation would take its place and the heap would grow. No torch here.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Generic, TypeVar

B = TypeVar("B")


class SpareBuffers(Generic[B]):
    """Buffers that were read last. `count` receives bytes: allocated, or negative where freed."""

    def __init__(self, count: Callable[[int], None]) -> None:
        self._count = count
        self._spare: list[tuple[Hashable, int, B]] = []

    def take(self, kind: Hashable, nbytes: int, allocate: Callable[[], B]) -> B:
        """Return a spare buffer of the same `kind`, or a new one of `nbytes`."""
        for index, (spare, _, buffer) in enumerate(self._spare):
            if spare == kind:
                del self._spare[index]
                return buffer
        buffer = allocate()
        self._count(nbytes)
        return buffer

    def give(self, kind: Hashable, nbytes: int, buffer: B, *, keeps: bool) -> None:
        """Keep a buffer that was read; without `keeps` it is freed."""
        if keeps:
            self._spare.append((kind, nbytes, buffer))
        else:
            self._count(-nbytes)

    def clear(self) -> None:
        """Free the spare buffers."""
        while self._spare:
            self._count(-self._spare.pop()[1])
