"""What autograd saves in forward leaves for another tier, and is back before backward needs it.

    pack      autograd saves a tensor: the stretch of memory under it is noted, once for all views
    leave     newer stretches came: the oldest of the window is written, and its memory is free
    reach     backward comes by: what lies before it in forward's order begins to come back
    bring     its memory is there again, for as long as backward holds it

At each moment of forward one window of the newest bytes rests near and another is on its way out;
at each moment of backward one window lies near that backward has not reached. What is newest when
forward ends therefore never left, and is what backward wants first. Each stretch is written once at
most, and read once: what came back stays, as a second backward (`retain_graph`) will want it.

Autograd does not compare versions of what a hook packed, and a copy that is made in the background
could be of either version; so `unpack` compares them, with a tensor that shares the counter and has
no bytes. Changes that torch does not count (`.data`) are not noticed here either.

Hooks on saved tensors nest, and torch asks the innermost alone: inside torch.utils.checkpoint only
the inputs of a block come here, and what a user's own hooks pack never does. Recompute happens in
backward, where nothing leaves. Source: ZeRO-Infinity, arXiv 2104.07857, section 5.1.2.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from threading import Lock
from typing import Protocol
from weakref import WeakValueDictionary, ref

import torch
from torch import Tensor, nn
from torch.autograd.graph import increment_version, saved_tensors_hooks
from torch.multiprocessing.reductions import StorageWeakRef

from onefold.errors import StateError, TierError, expected
from onefold.tier.area import Lease
from onefold.tier.scratch import Scratch, Transfer

_LINE = 64
"""Stretches begin at multiples of this in their storage, and so do storages in memory: a kernel
that depends on how its operands are aligned finds them as they were."""


@dataclass(frozen=True, slots=True)
class Limits:
    """Bytes that decide what leaves, and when.

    `least`: a smaller stretch stays. To move one costs 0.2-0.3 ms beside its bytes (measured, of
    64 KiB), which is what these take at 1 GB/s; the many small tensors of a transformer (statistics
    of norms) are about a hundredth of its bytes.
    `window`: of the newest bytes, of those on their way out, and of those that came back early.
    """

    least: int = 256 << 10
    window: int = 64 << 20


class Packed(Protocol):
    """What a graph holds in place of a tensor."""

    def unpack(self) -> Tensor: ...


class SavedBytes:
    """A stretch of a storage that autograd has saved: near, on its way, or far.

    Held by the views that were packed of it; when the graph lets go of those, its place is free.
    """

    __slots__ = (
        "__weakref__", "_counter", "_lease", "_lock", "_near", "_reading", "_storage", "_version",
        "_writing", "is_reached", "nbytes", "stays", "walk",
    )  # fmt: skip

    def __init__(self, near: Tensor, counter: Tensor, walk: Walk) -> None:
        self._near: Tensor | None = near  # [nbytes, uint8]; its storage_offset is in bytes
        self._storage = StorageWeakRef(near.untyped_storage())  # so that no other gets its address
        self._counter, self._version = counter, counter._version
        self._lease: Lease | None = None
        self._writing: Transfer | None = None
        self._reading: tuple[Tensor, Transfer] | None = None
        self._lock = Lock()
        self.stays = False  # backward is close: what is near is not let go of
        self.is_reached = False  # by backward
        self.nbytes = len(near)
        self.walk = walk

    def is_same(self, counter: Tensor) -> bool:
        """True if the bytes are still those that were saved, and `counter` would tell a change.

        Parts of one storage may have counters of their own (`unsafe_chunk`, in recurrent cells):
        then equal versions say nothing. torch shows only by counting whether two are one.
        """
        if self._counter._version != self._version:
            return False
        with torch.autograd._unsafe_preserve_version_counter(self._counter):
            increment_version(self._counter)
            return counter._version != self._version

    def leave(self, scratch: Scratch) -> Transfer | None:
        """Begin to write; the memory goes when that is over. Raises `TierError` without room."""
        with self._lock:
            if self.stays or self._near is None or self._writing is not None:
                return None
            mine = ref(self)

            def written() -> None:
                alive = mine()
                if alive is not None:
                    alive._let_go()

            self._lease = scratch.take(self.nbytes)
            self._writing = scratch.write(self._lease, self._near, written)
            return self._writing

    def _let_go(self) -> None:
        near = None
        with self._lock:
            if not self.stays:
                near, self._near = self._near, None
        del near  # outside of the lock: a storage may go with it

    def come(self, scratch: Scratch) -> None:
        """Begin to be near: stay if it has not left, else begin to read."""
        with self._lock:
            self.stays = True
            if self._near is None and self._reading is None:
                assert self._lease is not None, "what is not near has been written"
                self._reading = scratch.read(self._lease, self.nbytes)
            elif self._writing is not None and not self._writing.is_completed():
                self._writing.abandon()

    def bring(self, scratch: Scratch) -> Tensor:
        """The bytes [nbytes, uint8], near from now on. Raises `TierError`."""
        self.come(scratch)
        with self._lock:
            near, writing, reading = self._near, self._writing, self._reading
        if near is not None:
            if writing is not None and writing.is_completed():
                writing.wait()  # for its error: a disk that fails is not to be found out later
            return near
        assert reading is not None, "what is not near is on its way"
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
    """What one forward saved, in order. Backward walks it in reverse, and a window runs ahead."""

    def __init__(self, scratch: Scratch, window: int) -> None:
        self.scratch = scratch
        self._window = window
        self._waiting: list[ref[SavedBytes]] = []  # backward is not close to them yet
        self._ahead: list[ref[SavedBytes]] = []  # near, or about to be, and not reached
        self._lock = Lock()

    def append(self, saved: SavedBytes) -> None:
        """Forward has saved these bytes."""
        self._waiting.append(ref(saved))

    def reach(self, saved: SavedBytes) -> None:
        """Backward needs these bytes now, and soon what was saved before them."""
        if saved.is_reached:
            return
        with self._lock:
            saved.is_reached = True
            saved.come(self.scratch)
            ahead = [each for each in _alive(self._ahead) if not each.is_reached]
            nbytes = sum(each.nbytes for each in ahead)
            while self._waiting and nbytes < self._window:
                for each in _alive([self._waiting.pop()]):
                    if not each.is_reached:
                        each.come(self.scratch)
                        ahead.append(each)
                        nbytes += each.nbytes
            self._ahead = [ref(each) for each in ahead]


def _alive(known: Iterable[ref[SavedBytes]]) -> list[SavedBytes]:
    return [saved for saved in (each() for each in known) if saved is not None]


class SavedView:
    """A tensor that autograd saved, of bytes that may leave. Its bytes outlive their storage."""

    __slots__ = ("_counter", "_dtype", "_saved", "_shape", "_start", "_stride", "_version")

    def __init__(self, saved: SavedBytes, tensor: Tensor, start: int, counter: Tensor) -> None:
        self._saved = saved
        self._counter, self._version = counter, counter._version
        self._dtype, self._shape, self._stride = tensor.dtype, tensor.shape, tensor.stride()
        self._start = start  # in bytes, from the beginning of the stretch

    def unpack(self) -> Tensor:
        """The tensor as it was saved: bits, strides, and alignment."""
        _check_version(self._counter, self._version, self._shape)
        walk = self._saved.walk
        walk.reach(self._saved)
        near = self._saved.bring(walk.scratch)
        offset = (near.storage_offset() + self._start) // self._dtype.itemsize
        view = torch.empty(0, dtype=self._dtype, device=near.device)
        return view.set_(near.untyped_storage(), offset, self._shape, self._stride)


class SavedEntry:
    """A tensor that stays where it is: its graph may hold it, but not its own node."""

    __slots__ = ("_tensor", "_version")

    def __init__(self, tensor: Tensor) -> None:
        self._tensor, self._version = tensor.detach(), tensor._version

    def unpack(self) -> Tensor:
        """The tensor."""
        _check_version(self._tensor, self._version, self._tensor.shape)
        return self._tensor


def _check_version(counter: Tensor, version: int, shape: torch.Size) -> None:
    """Raise where autograd would: it leaves that to hooks, where there are any."""
    if counter._version != version:
        raise StateError(
            expected(
                f"a tensor {list(shape)} that backward needs to be as forward saved it "
                f"(version {version})",
                f"one modified by an inplace operation since (version {counter._version})",
                hint="clone it before changing it, or change it out of place; "
                "torch.autograd.set_detect_anomaly(True) shows where it was computed",
            )
        )


def _unpack(packed: Packed) -> Tensor:
    return packed.unpack()


class SavedActivations:
    """Takes what autograd saves while the root module runs, and sends the older bytes away.

    Belongs to one module, whose forwards run on one thread at a time; backward may run on others.
    """

    def __init__(
        self, scratch: Scratch, device: torch.device, weights: Iterable[Tensor] = (),
        module: nn.Module | None = None, limits: Limits | None = None,
    ) -> None:  # fmt: skip
        """`weights`: buffers that stay, whatever views of them are saved. So do those of `module`.

        `device`: what lies elsewhere stays there.
        """
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

    def begin(self) -> None:
        """A forward of the root begins: from now on autograd asks here, if it builds a graph.

        Nothing leaves in evaluation, nor in the recompute of a root that is checkpointed itself.
        """
        hooks = None
        is_nested = any(each is not None for each in self._begun)
        if torch.is_grad_enabled() and not is_nested and not _in_backward():
            hooks = saved_tensors_hooks(self.pack, _unpack)
            buffers = (each for named in self._named for each in named.values())
            addresses = {_address(each) for each in buffers if each is not None}
            self._staying = addresses | self._weights
            self._walk = Walk(self._scratch, self.limits.window)
            hooks.__enter__()
        self._begun.append(hooks)

    def end(self) -> None:
        """The forward is over, by return or exception; it is no error if none has begun."""
        hooks = self._begun.pop() if self._begun else None
        if hooks is not None:
            hooks.__exit__()

    def end_all(self) -> None:
        """End what is left of forwards that were interrupted, outside of any forward."""
        while self._begun:
            self.end()

    def pack(self, tensor: Tensor) -> Packed:
        """What the graph shall hold instead of `tensor`. Raises `TierError`, also of older writes.

        Waits, if a window of bytes is on its way out already: memory must not grow with the model.
        """
        with torch._C.DisableTorchFunctionSubclass():
            stretch = self._stretch(tensor)
            if stretch is None:
                return SavedEntry(tensor)
            start, stop = stretch
            key = (_address(tensor), start, stop, tensor._version)
            counter = tensor.detach()
            counter.data = self._nothing  # keeps the counter, and lets go of the bytes
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
        """The bytes of the storage that `tensor` needs, or None if it stays.

        Views that need half of a storage stand for all of it, so that parts of one projection,
        interleaved in its rows, go together and once. A batch cut from a data set goes alone.
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
        """True for bytes and strides, and nothing else, on the device that computes."""
        return (
            type(tensor) is Tensor
            and tensor.device == self._device
            and tensor.layout is torch.strided
            and not (tensor.is_quantized or tensor.is_nested or tensor.is_conj() or tensor.is_neg())
            and not _in_backward()
        )

    def _enlist(self, saved: SavedBytes) -> None:
        """The newest bytes push older ones out of the window."""
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
        """Wait until so many more bytes may be on their way out, but for one stretch alone."""
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
                if saved() is not None:  # else its graph is gone, and nobody misses the bytes
                    raise


def _address(tensor: Tensor) -> int:
    """The identity of a storage, whatever bytes it has just now."""
    return tensor.untyped_storage()._cdata


def _in_backward() -> bool:
    return torch._C._current_graph_task_id() != -1
