"""Run initialisers on whole tensors, without the memory of a whole module.

[Note: values that are computed twice]
Each operation runs once, on real tensors, in the order of the program, so that draws are those of a
plain module. The values of large tensors are then dropped. Their operations are kept, with the
state of the generator before each draw, and run again where somebody wants the values. ADR 30
compares this with keeping each rank's rows.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from contextlib import ExitStack
from dataclasses import dataclass, field
from itertools import count
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from onefold.errors import ConfigError
from onefold.tier import accelerator
from onefold.tier.device import PAGES_NBYTES, return_free_memory

LEAST_NBYTES = 1 << 14
"""Smaller tensors keep their values: the state of a CPU generator has 5,056 bytes."""

EMPTY = {
    "empty", "empty_like", "empty_strided", "empty_permuted", "new_empty", "new_empty_strided",
}  # fmt: skip
FACTORIES = EMPTY | {
    "zeros", "ones", "full", "rand", "randn", "normal", "zeros_like", "ones_like", "full_like",
    "rand_like", "randn_like", "new_zeros", "new_ones", "new_full", "clone",
}  # fmt: skip
"""Operations whose results are dropped. Results of others live as in any program."""
OVERWRITES = {
    "normal_", "uniform_", "zero_", "fill_", "copy_", "exponential_", "log_normal_", "random_",
}  # fmt: skip
"""Operations in place that do not read the tensor that they write."""
READERS = {Tensor.__deepcopy__, Tensor.numpy, Tensor.tolist, Tensor.__array__}
"""Methods that read memory, but are no operations."""


@dataclass(slots=True, eq=False)
class _Memory:
    """The memory of a large tensor, and the operations that wrote into it."""

    nbytes: int
    device: torch.device
    weak: StorageWeakRef
    storage: torch.UntypedStorage | None  # where values may be dropped
    is_given: bool = False
    is_written: bool = False
    is_read: bool = False  # by an operation on another one
    log: list[_Operation] = field(default_factory=list)

    def note(self, operation: _Operation) -> None:
        """Keep an operation that has written here; forget those that it makes needless."""
        if operation.overwrites is self and not self.is_read:
            self.log.clear()
        for memory in operation.reads:
            memory.is_read = memory.is_read or memory is not self
        self.log.append(operation)
        self.is_written = True

    def history(self) -> list[_Operation]:
        """Return all operations that lead to the values, in their order."""
        needed: dict[int, _Operation] = {}
        open_ends = [(self, sys.maxsize)]
        while open_ends:
            memory, end = open_ends.pop()
            earlier = [operation for operation in memory.log if operation.number < end]
            wholes = [i for i, each in enumerate(earlier) if each.overwrites is memory]
            for operation in earlier[wholes[-1] if wholes else 0 :]:
                if operation.number not in needed:
                    needed[operation.number] = operation
                    open_ends += [(read, operation.number) for read in operation.reads]
        return [needed[number] for number in sorted(needed)]


@dataclass(frozen=True, slots=True)
class _View:
    """A tensor in a memory that may be gone when the operation runs again."""

    memory: _Memory
    dtype: torch.dtype
    shape: torch.Size
    stride: tuple[int, ...]
    offset: int

    @staticmethod
    def over_tensor(memory: _Memory, tensor: Tensor) -> _View:
        offset = int(tensor.storage_offset())
        return _View(memory, tensor.dtype, tensor.shape, tensor.stride(), offset)

    def over(self, storages: dict[_Memory, torch.UntypedStorage]) -> Tensor:
        memory = self.memory
        if memory not in storages:
            storages[memory] = torch.UntypedStorage(memory.nbytes, device=memory.device)
        blank = torch.empty(0, dtype=self.dtype, device=memory.device)
        return blank.set_(storages[memory], self.offset, self.shape, self.stride)


@dataclass(slots=True, eq=False)
class _Operation:
    """An operation, with all that it needs to run again."""

    number: int
    func: Any
    args: Any  # views of memories; small tensors and generators as they were
    kwargs: dict[str, Any]
    reads: list[_Memory]
    overwrites: _Memory | None
    results: list[tuple[int, _View]] = field(default_factory=list)

    def perform(self, storages: dict[_Memory, torch.UntypedStorage]) -> None:
        def real(value: Any) -> Any:
            return value.over(storages) if isinstance(value, _View) else _cloned(value)

        args, kwargs = tree_map(real, (self.args, self.kwargs))
        found = tree_leaves(self.func(*args, **kwargs))
        for index, view in self.results:
            view.over(storages).copy_(found[index])


class Deferred(TorchDispatchMode):
    """Inside, values of large tensors come and go; afterwards `settle` computes each once more.

    Draws come from copies of the generators as they were when the object was made; `advance` moves
    the generators themselves.
    """

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self._memories: dict[int, _Memory] = {}
        self._live: set[_Memory] = set()  # whose values may be dropped, and are not
        self._numbers = count()
        self._generators: dict[torch.device, torch.Generator] = {}
        self._states = {torch.device("cpu"): torch.get_rng_state()}
        if device.type != "cpu":
            self._states[device] = accelerator.rng_state(device)
        self._device = device
        self._others = ExitStack()
        self._freed = 0  # bytes, since free pages were last returned

    def __enter__(self) -> Deferred:
        self._others.enter_context(_Readers(self))
        self._others.enter_context(self._device)
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self._others.close()
        self._drop(())

    def blank(self, like: Tensor, *, is_given: bool = False) -> Tensor:
        """Make a tensor without values: NaN where nothing writes, zero for integers.

        `is_given`: nobody wants its values, so operations that would write them do not run.
        """
        shape = getattr(like, "shape_of_numbers", like.shape)
        dtype = getattr(like, "dtype_of_numbers", like.dtype)
        tensor = torch.empty(shape, dtype=dtype, device=self._device)
        self._empty(tensor).is_given = is_given
        return tensor

    def is_unset(self, tensor: Tensor) -> bool:
        """True for a tensor into which nothing was written."""
        memory = self._memory_of(tensor) if tensor.numel() else None
        return has_nan(tensor) if memory is None else not memory.is_written

    def settle(self, tensor: Tensor) -> bool:
        """Let a tensor have its values, for good; False for one that always had them."""
        found = self._restore([tensor])
        for memory in found:
            self._live.discard(memory)
            memory.storage = None  # operations refer to it in circles
            del self._memories[tensor.untyped_storage()._cdata]
        return bool(found)

    def advance(self) -> None:
        """Move the generators to where they are after a plain module was built."""
        for where, generator in self._generators.items():
            if where.type == "cpu":
                torch.set_rng_state(generator.get_state())
            else:
                accelerator.set_rng_state(generator.get_state(), where)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs, name = dict(kwargs or {}), func.overloadpacket.__name__
        inputs = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        into = [self._memory_of(tensor) for tensor in _written(func, args, kwargs)]
        written = [memory for memory in into if memory is not None]
        if into and name.endswith("_") and all(memory and memory.is_given for memory in into):
            return args[0]
        known = [memory for memory in map(self._memory_of, inputs) if memory is not None]
        over = None
        if written and name in OVERWRITES and known.count(written[0]) == 1:
            is_whole = args[0].numel() * args[0].itemsize == written[0].nbytes
            over = written[0] if is_whole else None
        self._restore(inputs, but=over)
        func, kwargs = self._drawing(func, kwargs, inputs)
        before = {key: _cloned(value) for key, value in kwargs.items()}
        reads = [memory for memory in known if memory is not over]
        operation: _Operation | None = None
        if written:
            operation = self._described_call(func, args, before, reads, over)
        out = func(*args, **kwargs)
        for memory in written:
            assert operation is not None, "it was described before it ran"
            memory.note(operation)
        mine = {tensor.untyped_storage()._cdata for tensor in inputs if _is_strided(tensor)}
        for index, tensor in enumerate(tree_leaves(out)):
            is_new = _is_strided(tensor) and tensor.untyped_storage()._cdata not in mine
            if is_new and tensor.untyped_storage().nbytes() >= LEAST_NBYTES:
                if name in EMPTY:
                    self._empty(tensor)
                    continue
                if operation is None:
                    operation = self._described_call(func, args, before, reads, None)
                memory = self._know(tensor, may_drop=name in FACTORIES)
                operation.results.append((index, _View.over_tensor(memory, tensor)))
                memory.note(operation)
                known.append(memory)
            elif is_new and name in EMPTY:
                tensor.fill_(_blank_of(tensor))
        self._drop(known)
        return out

    def _drawing(
        self, func: Any, kwargs: dict[str, Any], inputs: list[Tensor]
    ) -> tuple[Any, dict[str, Any]]:
        """Return the same draw from this object's generator."""
        device = kwargs.get("device") or (inputs[0].device if inputs else torch.device("cpu"))
        is_draw = torch.Tag.nondeterministic_seeded in func.tags and device.type != "meta"
        if not is_draw or kwargs.get("generator") is not None:
            return func, kwargs
        try:
            func, _ = with_generator(func)
        except RuntimeError as error:
            wanted = "initializers to draw by operations that take a generator"
            hint = "build the module on a real device"
            raise ConfigError(wanted, str(func), hint=hint) from error
        where = next(known for known in self._states if known.type == device.type)
        if where not in self._generators:
            self._generators[where] = torch.Generator(where).set_state(self._states[where])
        return func, {**kwargs, "generator": self._generators[where]}

    def _described_call(
        self, func: Any, args: Any, kwargs: Any, reads: list[_Memory], over: _Memory | None
    ) -> _Operation:
        def kept(value: Any) -> Any:
            if not isinstance(value, Tensor):
                return value
            memory = self._memory_of(value)
            return value.clone() if memory is None else _View.over_tensor(memory, value)

        kept_args, kept_kwargs = tree_map(kept, (args, kwargs))
        return _Operation(next(self._numbers), func, kept_args, kept_kwargs, reads, over)

    def _memory_of(self, tensor: Tensor) -> _Memory | None:
        if not _is_strided(tensor):
            return None
        memory = self._memories.get(tensor.untyped_storage()._cdata)
        return None if memory is None or memory.weak.expired() else memory

    def _know(self, tensor: Tensor, *, may_drop: bool) -> _Memory:
        """Keep the operations of a tensor from now on."""
        storage = tensor.untyped_storage()
        may_drop = may_drop and storage.nbytes() >= LEAST_NBYTES and storage.resizable()
        weak = StorageWeakRef(storage)
        memory = _Memory(storage.nbytes(), tensor.device, weak, storage if may_drop else None)
        self._memories[storage._cdata] = memory
        if may_drop:
            self._live.add(memory)
        return memory

    def _empty(self, tensor: Tensor) -> _Memory:
        """Know a new tensor that has no values: reading it would show that."""
        memory = self._know(tensor, may_drop=True)
        args = (_View.over_tensor(memory, tensor), _blank_of(tensor))
        number, fill = next(self._numbers), torch.ops.aten.fill_.Scalar
        memory.log.append(_Operation(number, fill, args, {}, [], memory))
        if memory.storage is None:
            tensor.data.fill_(args[1])  # which does not count as a write
        else:
            memory.storage.resize_(0)
            self._live.discard(memory)
        return memory

    def _restore(self, tensors: Iterable[Tensor], but: _Memory | None = None) -> list[_Memory]:
        """Compute dropped values; return the memories. That of `but` is about to be overwritten."""
        memories = [memory for memory in map(self._memory_of, tensors) if memory is not None]
        for memory in memories:
            storage = memory.storage
            if storage is None or storage.nbytes() == memory.nbytes:
                continue
            storage.resize_(memory.nbytes)
            self._live.add(memory)
            if memory is not but:
                storages = {memory: storage}
                for operation in memory.history():
                    operation.perform(storages)
        return memories

    def _drop(self, kept: Iterable[_Memory]) -> None:
        """Drop the values of all large tensors but those of the last operation."""
        for memory in self._live.difference(kept):
            if memory.storage is not None:
                memory.storage.resize_(0)
                self._freed += memory.nbytes
        self._live.intersection_update(kept)
        if self._freed >= PAGES_NBYTES:  # small blocks between keep glibc from returning them
            return_free_memory()
            self._freed = 0


class _Readers(TorchFunctionMode):
    """Gives a tensor its values for good before a method looks at its memory."""

    def __init__(self, deferred: Deferred) -> None:
        super().__init__()
        self._deferred = deferred

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func in READERS and isinstance(args[0], Tensor):
            torch.ops.aten.alias(args[0])  # an operation, which restores it
            self._deferred.settle(args[0])
        return func(*args, **(kwargs or {}))


def _written(func: Any, args: Any, kwargs: dict[str, Any]) -> list[Tensor]:
    """The tensors whose values an operation changes."""
    if torch.Tag.inplace_view in func.tags:
        return []
    found: list[Tensor] = []
    for index, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            value = args[index] if index < len(args) else kwargs.get(argument.name)
            found += [leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor)]
    return found


def with_generator(func: Any) -> tuple[Any, int]:
    """Return the operation that takes a generator besides, and the place of that argument.

    Raises `RuntimeError` for an operation that takes none, as dropout.
    """
    wanted = [argument.name for argument in func._schema.arguments if argument.name != "generator"]
    packet = func.overloadpacket
    others = (getattr(packet, name) for name in packet.overloads())
    for other in (func, *others):
        names = [argument.name for argument in other._schema.arguments]
        if "generator" in names and [name for name in names if name != "generator"] == wanted:
            return other, names.index("generator")
    raise RuntimeError(f"{func} takes no generator")


def _cloned(value: Any) -> Any:
    """A generator as it is now; another value itself."""
    return value.clone_state() if isinstance(value, torch.Generator) else value


def _is_strided(value: Any) -> bool:
    return isinstance(value, Tensor) and value.layout is torch.strided and not value.is_meta


def _blank_of(tensor: Tensor) -> float:
    return float("nan") if tensor.is_floating_point() or tensor.is_complex() else 0


def has_nan(tensor: Tensor) -> bool:
    """Sum first, without a temporary as large as a mask; opposite infinities need a second test."""
    if not tensor.is_floating_point() or tensor.itemsize == 1:
        return False
    return bool(tensor.sum().isnan()) and bool(tensor.isnan().any())
