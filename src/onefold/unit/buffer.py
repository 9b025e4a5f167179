"""A flat buffer with an owner: allocated in a tier, counted in the ledger, refilled."""

import sys
from collections.abc import Sequence
from functools import cache

import torch
from torch import Tensor

from onefold.layout.ledger import Account, Kind, Ledger
from onefold.tier.store import Allocation, Store
from onefold.unit.shortage import explaining


@cache
def _own_references() -> int:
    """References to a storage object that no user keeps, counted as `Buffer.num_users` does."""
    tensor = torch.empty(0)
    storage = tensor.untyped_storage()
    return sys.getrefcount(storage)


class Buffer:
    """One flat tensor of one kind of state, counted from its allocation to its release.

    `release` frees the bytes and keeps the storage object. Views that autograd saved are valid
    again after `reallocate`, once the caller has filled the buffer anew. `far` moves its blocks; it
    is None if the tensor itself may be computed on.
    """

    def __init__(
        self,
        numel: int,
        dtype: torch.dtype,
        kind: Kind,
        store: Store,
        ledger: Ledger,
        *,
        is_brief: bool = False,
        is_counted: bool = True,
    ) -> None:
        """`is_counted` False: nobody touches the bytes, which take no memory, before `release`."""
        self._kind = kind
        self._ledger = ledger
        self._nbytes = numel * dtype.itemsize
        self.tier = store.name
        with explaining(ledger, self._nbytes, kind, self.tier):
            self._allocation = store.allocate(numel, dtype, is_brief=is_brief)
        self.tensor, self.far = self._allocation.tensor, self._allocation.far
        self._nbytes = self.tensor.nbytes
        is_mapped = self._allocation.is_mapped
        self._account = Account(self, kind, self.tier, ledger, is_mapped=is_mapped)
        self.is_held = True  # the buffer has its bytes
        if is_counted:
            self._account.set(self._nbytes)
        self._numels: list[int] = []
        _own_references()  # counted now: inside a transform torch.func would wrap its tensor
        self._parts: Sequence[Tensor] = ()

    @property
    def num_users(self) -> int:
        """The number of tensors that share the bytes: this buffer's own one, and those of users.

        A storage object that a user keeps counts, too. Python has one object for each storage.
        """
        storage = self.tensor.untyped_storage()
        num_tensors = torch._C._storage_Use_Count(storage._cdata) - 1 - len(self._parts)
        return num_tensors + sys.getrefcount(storage) - _own_references()

    def view(self, start: int, shape: tuple[int, ...]) -> Tensor:
        """A view [shape] from element `start`, with a version counter of its own.

        Autograd does not take a refill of the buffer for an in-place change. A user's edit of one
        parameter counts for that parameter only.
        """
        numel = 1
        for extent in shape:
            numel *= extent
        return self.tensor[start : start + numel].view(shape).data

    def parts(self, numels: list[int]) -> Sequence[Tensor]:
        """Split the buffer into views of `numels` elements each, one behind the other.

        The views are kept for the next call with the same list object.
        """
        if self._numels is not numels:
            with torch.inference_mode(False):
                self._parts = self.tensor.split_with_sizes(numels)
            self._numels = numels
        return self._parts

    def release(self) -> None:
        """Free the bytes; views of the buffer may not be read until `reallocate`."""
        if self.is_held:
            self.is_held = False
            self._allocation.release()
            self._account.set(0)

    def recut(self, numel: int, store: Store) -> Allocation:
        """Hold `numel` zeros from now on; return the allocation of the values before.

        Its `discard` frees the place of the values in the tier.
        """
        before, self._nbytes = self._allocation, numel * self.tensor.itemsize
        with explaining(self._ledger, self._nbytes, self._kind, self.tier):
            self._allocation = store.allocate(numel, self.tensor.dtype)
        self.tensor, self.far = self._allocation.tensor, self._allocation.far
        self._numels, self._parts = [], ()
        self._account.set(self.tensor.nbytes)
        if self.far is None:  # else the place in the file is new, and reads as zeros
            self.tensor.zero_()
        return before

    def reallocate(self) -> None:
        """Give the storage its bytes again, uninitialised."""
        if not self.is_held:
            try:
                self._allocation.restore()
            except Exception:
                with explaining(self._ledger, self._nbytes, self._kind, self.tier):
                    raise
            self.is_held = True
            self._account.set(self._nbytes)
