"""Activations that autograd saves in forward move to another tier, and come back for backward.

    pack    autograd saves a tensor: note the stretch of its storage, once for all views of it
    leave   newer stretches came: write the oldest of the window, then free its memory
    reach   backward needs a stretch: begin to read the stretches that forward saved before it
    bring   wait until its bytes are near, and keep them while backward holds them

At each moment of forward, one window of the newest bytes rests near and another is being written.
At each moment of backward, one window is near that backward has not reached. The newest bytes at
the end of forward never leave, and backward needs them first. Each stretch is written once at most
and read once: it stays after it came back, as a second backward (`retain_graph`) will need it.

Autograd does not compare versions of tensors that a hook packed, and a background copy could be of
either version. So `unpack` compares versions, by a tensor that shares the version counter and has
no bytes. Changes that torch does not count (`.data`) go unnoticed here as well.

Hooks on saved tensors nest, and torch calls the innermost alone. Inside torch.utils.checkpoint only
the inputs of a block come here; tensors that a user's own hooks pack never do. Recompute runs in
backward, where nothing leaves. Source: ZeRO-Infinity, arXiv 2104.07857, section 5.1.2.

[Note: locking] One thread runs a module's forward and owns `SavedActivations`. Backward may run on
other threads, which meet in `Walk` and `SavedBytes`, and workers call back when a write has ended.
Each has a lock. `Walk.reach` takes that of the walk first, then those of stretches, never the other
way round. Under a lock transfers begin, but no thread waits for one. Memory is freed after the lock
is released, because the end of a storage may run other code. Callbacks hold stretches weakly: the
graph alone decides how long a stretch lives, and `__del__` abandons its transfers.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from threading import Lock
from weakref import WeakValueDictionary, ref

import torch
from torch import Tensor, nn
from torch.autograd.graph import increment_version, saved_tensors_hooks
from torch.multiprocessing.reductions import StorageWeakRef

from onefold.compat import untraced
from onefold.engine.watch import in_backward
from onefold.errors import StateError, TierError
from onefold.tier.area import Lease
from onefold.tier.scratch import Scratch, Transfer
from onefold.unit.context import Context
from onefold.unit.unit import Unit

_LINE = 64
"""Stretches begin at multiples of this in their storage, and so do storages in memory. So operands
of kernels come back with their alignment."""


@dataclass(frozen=True, slots=True)
class Limits:
    """Which bytes leave, and when.

    least: a smaller stretch stays. A move costs 0.2-0.3 ms besides its bytes (measured at 64 KiB),
        as long as `least` bytes take at 1 GB/s. The many small tensors of a transformer (statistics
        of norms) are about a hundredth of its bytes.
    window: bytes that are newest, that are being written, and that are read ahead; each at most.
    """

    least: int = 256 << 10
    window: int = 64 << 20


class SavedBytes:
    """A stretch of a storage that autograd has saved: near, on its way, or far.

    The views that were packed hold it. When the graph frees them, its place in the tier is free.
    """

    __slots__ = (
        "__weakref__", "_counter", "_lease", "_lock", "_near", "_reading", "_storage", "_version",
        "_writing", "is_reached", "nbytes", "stays", "walk",
    )  # fmt: skip

    def __init__(self, near: Tensor, counter: Tensor, walk: Walk) -> None:
        self._near: Tensor | None = near  # [nbytes, uint8]; its storage_offset is in bytes
        # keeps the address of the storage from being reused
        self._storage = StorageWeakRef(near.untyped_storage())
        self._counter, self._version = counter, counter._version
        self._lease: Lease | None = None
        self._writing: Transfer | None = None
        self._reading: tuple[Tensor, Transfer] | None = None
        self._lock = Lock()
        self.stays = False  # backward is close: near bytes stay
        self.is_reached = False  # by backward
        self.nbytes = len(near)
        self.walk = walk

    def is_same(self, counter: Tensor) -> bool:
        """True if the bytes are unchanged, and `counter` is the counter of their versions.

        Parts of one storage may have counters of their own (`unsafe_chunk`, in recurrent cells).
        Then equal versions prove nothing. Only counting shows whether two tensors share a counter.
        """
        if self._counter._version != self._version:
            return False
        with torch.autograd._unsafe_preserve_version_counter(self._counter):
            increment_version(self._counter)
            return counter._version != self._version

    def leave(self, scratch: Scratch) -> Transfer | None:
        """Begin to write, and free the memory afterwards. Raises `TierError` without room."""
        with self._lock:
            if self.stays or self._near is None or self._writing is not None:
                return None
            mine = ref(self)

            def written() -> None:
                alive = mine()
                if alive is not None:
                    alive._free()

            self._lease = scratch.lease_place(self.nbytes)
            self._writing = scratch.begin_write(self._lease, self._near, written)
            return self._writing

    def _free(self) -> None:
        near = None
        with self._lock:
            if not self.stays:
                near, self._near = self._near, None
        del near  # see [Note: locking]

    def reach(self, scratch: Scratch) -> None:
        """Backward needs the bytes now: they come near, and are not read ahead again."""
        self.is_reached = True
        self.come(scratch)

    def come(self, scratch: Scratch) -> None:
        """Keep the bytes near if they have not left, else begin to read them."""
        with self._lock:
            self.stays = True
            if self._near is None and self._reading is None:
                assert self._lease is not None, "bytes that are not near have been written"
                self._reading = scratch.begin_read(self._lease, self.nbytes)
            elif self._writing is not None and not self._writing.is_completed():
                self._writing.abandon()

    def bring(self, scratch: Scratch) -> Tensor:
        """Return the bytes [nbytes, uint8], near from now on. Raises `TierError`."""
        self.come(scratch)
        with self._lock:
            near, writing, reading = self._near, self._writing, self._reading
        if near is not None:
            if writing is not None and writing.is_completed():
                writing.wait()  # raises its error: report a failing disk now
            return near
        assert reading is not None, "bytes that are not near are being read"
        near, transfer = reading
        transfer.wait()
        with self._lock:
            self._near, self._reading, self._writing, self._lease = near, None, None, None
        return near

    def __del__(self) -> None:
        if self._writing is not None:
            self._writing.abandon()
        if self._reading is not None:
            self._reading[1].abandon()


class Walk:
    """The stretches that one forward saved, in order. Backward reads them ahead, in reverse."""

    def __init__(self, scratch: Scratch, window: int) -> None:
        self.scratch = scratch
        self._window = window
        self._waiting: list[ref[SavedBytes]] = []  # not read ahead yet
        self._ahead: list[ref[SavedBytes]] = []  # near, or being read, and not reached
        self._lock = Lock()

    def append(self, saved: SavedBytes) -> None:
        """Add the stretch that forward has saved last."""
        self._waiting.append(ref(saved))

    def reach(self, saved: SavedBytes) -> None:
        """Read a stretch that backward needs now, and ahead the stretches saved before it."""
        if saved.is_reached:
            return
        with self._lock:
            saved.reach(self.scratch)
            ahead = [stretch for stretch in _alive(self._ahead) if not stretch.is_reached]
            nbytes = sum(stretch.nbytes for stretch in ahead)
            while self._waiting and nbytes < self._window:
                for stretch in _alive([self._waiting.pop()]):
                    if not stretch.is_reached:
                        stretch.come(self.scratch)
                        ahead.append(stretch)
                        nbytes += stretch.nbytes
            self._ahead = [ref(stretch) for stretch in ahead]


def _alive(known: Iterable[ref[SavedBytes]]) -> list[SavedBytes]:
    """Return the stretches that a graph still refers to."""
    return [saved for saved in (alive() for alive in known) if saved is not None]


class SavedView:
    """Packed: a tensor whose bytes may leave."""

    __slots__ = ("_counter", "_dtype", "_saved", "_shape", "_start", "_stride", "_version")

    def __init__(self, saved: SavedBytes, tensor: Tensor, start: int, counter: Tensor) -> None:
        self._saved = saved
        self._counter, self._version = counter, counter._version
        self._dtype, self._shape, self._stride = tensor.dtype, tensor.shape, tensor.stride()
        self._start = start  # in bytes, from the beginning of the stretch

    def unpack(self) -> Tensor:
        """Return the tensor as it was saved: bits, strides and alignment."""
        _check_version(self._counter, self._version, self._shape)
        walk = self._saved.walk
        walk.reach(self._saved)
        near = self._saved.bring(walk.scratch)
        offset = (near.storage_offset() + self._start) // self._dtype.itemsize
        view = torch.empty(0, dtype=self._dtype, device=near.device)
        return view.set_(near.untyped_storage(), offset, self._shape, self._stride)


class SavedEntry:
    """Packed: a tensor that stays. The graph holds it without the node that made it."""

    __slots__ = ("_tensor", "_version")

    def __init__(self, tensor: Tensor) -> None:
        self._tensor, self._version = tensor.detach(), tensor._version

    def unpack(self) -> Tensor:
        """Return the tensor."""
        _check_version(self._tensor, self._version, self._tensor.shape)
        return self._tensor


def _check_version(counter: Tensor, version: int, shape: torch.Size) -> None:
    """Raise where autograd would raise if no hook had packed the tensor."""
    if counter._version != version:
        raise StateError(
            f"a tensor {list(shape)} that backward needs to be as forward saved it "
            f"(version {version})",
            f"one modified by an inplace operation since (version {counter._version})",
            hint="clone it before changing it, or change it out of place; "
            "torch.autograd.set_detect_anomaly(True) shows where it was computed",
        )


def saved_activations_of(
    module: nn.Module, units: Sequence[Unit], context: Context
) -> SavedActivations | None:
    """Return the mover of a module's activations, if they leave the device."""
    scratch = context.tiers.scratch
    if scratch is None:
        return None
    weights = [buffer.tensor for unit in units for buffer in (unit.weight, unit.unsharded)]
    weights += [weight.tensor for unit in units for weight in unit.decoded]
    return SavedActivations(scratch, context.store.device, weights, module)


class SavedActivations:
    """Packs the tensors that autograd saves while the root module runs, and moves older ones."""

    def __init__(
        self, scratch: Scratch, device: torch.device, weights: Iterable[Tensor] = (),
        module: nn.Module | None = None, limits: Limits | None = None,
    ) -> None:  # fmt: skip
        """Keep `weights`, the buffers of `module` and tensors of other devices where they are."""
        self.limits = limits or Limits()
        self._scratch = scratch
        self._device = device
        self._weights = frozenset(_address(tensor) for tensor in weights)
        self._named = [part._buffers for part in module.modules()] if module is not None else []
        self._staying: set[int] = set()  # storages of weights and of the module's buffers
        self._nothing = torch.empty(0, device=device)
        self._known: WeakValueDictionary[tuple[int, ...], SavedBytes] = WeakValueDictionary()
        self._walk = Walk(scratch, self.limits.window)
        self._newest: deque[tuple[ref[SavedBytes], int]] = deque()
        self._newest_nbytes = 0
        self._leaving: deque[tuple[ref[SavedBytes], Transfer, int]] = deque()
        self._leaving_nbytes = 0
        self._begun: list[saved_tensors_hooks | None] = []

    def keep(self, weights: Iterable[Tensor]) -> None:
        """Keep more weights where they are."""
        self._weights |= {_address(tensor) for tensor in weights}

    def begin(self) -> None:
        """Begin a forward of the root: pack tensors from now on, if autograd builds a graph.

        Nothing leaves in evaluation, or in the recompute of a root that is checkpointed itself.
        """
        hooks = None
        is_nested = any(begun is not None for begun in self._begun)
        if torch.is_grad_enabled() and not is_nested and not in_backward():
            hooks = saved_tensors_hooks(self.pack, _unpack)
            buffers = (buffer for named in self._named for buffer in named.values())
            addresses = {_address(buffer) for buffer in buffers if buffer is not None}
            self._staying = addresses | self._weights
            self._walk = Walk(self._scratch, self.limits.window)
            hooks.__enter__()
        self._begun.append(hooks)

    def end(self) -> None:
        """End the forward, by return or exception; do nothing if none has begun."""
        hooks = self._begun.pop() if self._begun else None
        if hooks is not None:
            hooks.__exit__()

    def end_all(self) -> None:
        """End forwards that were interrupted."""
        while self._begun:
            self.end()

    @untraced  # [Note: torch.compile] in hooks.py
    def pack(self, tensor: Tensor) -> SavedView | SavedEntry:
        """Return an object for the graph to hold instead of `tensor`.

        Waits while a whole window of bytes is being written, so that memory does not grow with the
        model. Raises `TierError`, also for older writes.
        """
        with torch._C.DisableTorchFunctionSubclass():
            stretch = self._stretch(tensor)
            if stretch is None:
                return SavedEntry(tensor)
            start, stop = stretch
            key = (_address(tensor), start, stop, tensor._version)
            counter = tensor.detach()
            counter.data = self._nothing  # keeps the counter, and drops the bytes
            saved = self._known.get(key)
            if saved is None or not saved.is_same(counter):
                near = torch.empty(0, dtype=torch.uint8, device=self._device)
                near.set_(tensor.untyped_storage(), start, (stop - start,), (1,))
                saved = self._known[key] = SavedBytes(near, counter, self._walk)
                del near
                self._enlist(saved)
            first = int(tensor.storage_offset()) * tensor.itemsize
            return SavedView(saved, tensor, first - start, counter)

    def _stretch(self, tensor: Tensor) -> tuple[int, int] | None:
        """Return the first and last byte of the storage to move; None if the tensor stays.

        A view of half of a storage moves all of it: parts of one projection, interleaved in its
        rows, move together and once. A batch cut from a data set moves alone.
        """
        itemsize = tensor.itemsize
        if tensor.numel() * itemsize < self.limits.least or not self._is_plain(tensor):
            return None
        if _address(tensor) in self._staying:
            return None
        whole = int(tensor.untyped_storage().nbytes())
        pairs = zip(tensor.shape, tensor.stride(), strict=True)
        span = (sum((extent - 1) * int(stride) for extent, stride in pairs) + 1) * itemsize
        if 2 * span >= whole:
            start, stop = 0, whole
        else:
            first = int(tensor.storage_offset()) * itemsize
            start, stop = first // _LINE * _LINE, first + span
        return (start, stop) if stop - start >= self.limits.least else None

    def _is_plain(self, tensor: Tensor) -> bool:
        """True for a plain strided tensor on the device that computes, saved in forward."""
        return (
            type(tensor) is Tensor
            and tensor.device == self._device
            and tensor.layout is torch.strided
            and not (tensor.is_quantized or tensor.is_nested or tensor.is_conj() or tensor.is_neg())
            and not in_backward()
        )

    def _enlist(self, saved: SavedBytes) -> None:
        """Add the newest bytes to the window, and write the oldest while it is too full."""
        self._walk.append(saved)
        self._newest.append((ref(saved), saved.nbytes))
        self._newest_nbytes += saved.nbytes
        while self._newest_nbytes > self.limits.window:
            oldest, nbytes = self._newest.popleft()
            self._newest_nbytes -= nbytes
            for alive in _alive([oldest]):
                self._make_room(nbytes)
                transfer = alive.leave(self._scratch)
                if transfer is not None:
                    self._leaving.append((oldest, transfer, nbytes))
                    self._leaving_nbytes += nbytes

    def _make_room(self, nbytes: int) -> None:
        """Wait until a write of `nbytes` fits the window of writes, or is the only write."""
        while self._leaving:
            saved, transfer, oldest = self._leaving[0]
            has_room = self._leaving_nbytes + nbytes <= self.limits.window
            if has_room and not transfer.is_completed():
                return
            self._leaving.popleft()
            self._leaving_nbytes -= oldest
            try:
                transfer.wait()
            except TierError:
                if saved() is not None:  # else its graph is gone, and nothing needs the bytes
                    raise


@untraced
def _unpack(packed: SavedView | SavedEntry) -> Tensor:
    return packed.unpack()


def _address(tensor: Tensor) -> int:
    """Return the identity of a storage, which does not depend on its bytes."""
    return tensor.untyped_storage()._cdata
