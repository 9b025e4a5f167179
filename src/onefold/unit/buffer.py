"""A flat buffer with an owner: allocated in a tier, counted in the ledger, refilled."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from onefold.errors import TierError, expected
from onefold.ledger import Kind, Ledger
from onefold.tier.store import Far, Store


class Buffer:
    """One flat tensor of one kind of state, counted from its allocation to its release.

    `release` frees the bytes but keeps the storage object, so views that autograd saved stay valid
    once `reallocate` has given the storage bytes again. Whoever reallocates refills before use.
    """

    __slots__ = (
        "__weakref__", "_allocation", "_held", "_kind", "_ledger", "_nbytes", "_tier", "tensor",
    )  # fmt: skip

    def __init__(
        self,
        numel: int,
        dtype: torch.dtype,
        kind: Kind,
        store: Store,
        ledger: Ledger,
        *,
        is_brief: bool = False,
    ) -> None:
        self._held = False  # until there is something to hold
        self._kind = kind
        self._tier = store.name
        self._ledger = ledger
        self._nbytes = numel * dtype.itemsize
        with self._telling():
            self._allocation = store.allocate(numel, dtype, is_brief=is_brief)
        self.tensor = self._allocation.tensor
        self._nbytes = self.tensor.nbytes
        self._held = True
        self._count(self._nbytes)

    @contextmanager
    def _telling(self) -> Iterator[None]:
        """Where there is no room: say what was asked for, what is held, and what would fit."""
        try:
            yield
        except (RuntimeError, MemoryError, TierError) as error:  # torch's own are RuntimeErrors
            advise = self._ledger.advise
            advice = advise(self._nbytes) if advise else "more ranks, a higher stage, or offload"
            raise TierError(
                expected(
                    f"room for {self._nbytes:,} bytes of {self._kind} in {self._tier} memory, "
                    f"beside what is held: {self._ledger.told()} bytes",
                    str(error).splitlines()[0],
                    hint=advice,
                )
            ) from error

    @property
    def tier(self) -> str:
        """The name of the tier in which it rests."""
        return self._tier

    @property
    def far(self) -> Far | None:
        """How blocks of it are moved, if it rests where nobody computes."""
        return self._allocation.far

    @property
    def is_held(self) -> bool:
        """True while the buffer has its bytes."""
        return self._held

    @property
    def num_users(self) -> int:
        """How many tensors share the bytes, this buffer's own among them."""
        return torch._C._storage_Use_Count(self.tensor.untyped_storage()._cdata) - 1

    def view(self, start: int, shape: tuple[int, ...]) -> Tensor:
        """A view [shape] from element `start`, with a version counter of its own.

        Refilling the buffer therefore does not look like an in-place change to autograd, while a
        user's change of one parameter can be told from its neighbours'.
        """
        numel = 1
        for extent in shape:
            numel *= extent
        return self.tensor[start : start + numel].view(shape).data

    def release(self) -> None:
        """Free the bytes; views of the buffer may not be read until `reallocate`."""
        if self._held:
            self._held = False
            self._allocation.release()
            self._count(-self._nbytes)

    def reallocate(self) -> None:
        """Give the storage its bytes again, uninitialised."""
        if not self._held:
            with self._telling():
                self._allocation.restore()
            self._held = True
            self._count(self._nbytes)

    def _count(self, nbytes: int) -> None:
        is_mapped = self._allocation.is_mapped
        self._ledger.add(self._kind, self._tier, nbytes, is_mapped=is_mapped)

    def __del__(self) -> None:
        if self._held:
            self._held = False
            self._count(-self._nbytes)
