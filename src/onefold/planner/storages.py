"""Count the bytes that torch holds while a module runs: every storage, as long as it is referenced.

This works on `meta` as on real tensors, as it watches operations. It sees everything that autograd
and the module keep, but no memory that a kernel takes and returns inside one call.
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any
from weakref import ref

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter
from torch.utils.flop_counter import flop_registry, sdpa_backward_flop_count

from onefold.errors import OnefoldError
from onefold.planner.work import Work
from onefold.recording.flops import as_many, attention_flops

Key = tuple[Any, ...]

_TENSORS = (Tensor, nn.Parameter)
_PLAIN = (
    bool, int, float, str, type(None),
    torch.dtype, torch.device, torch.layout, torch.memory_format,
)  # fmt: skip


class MetaCache:
    """The outputs and the work of operations, by operation and arguments."""

    def __init__(self) -> None:
        self._known: dict[Key, tuple[tuple[Tensor, ...], bool, Work]] = {}

    def recall(self, key: Key) -> tuple[Any, Work] | None:
        """Return new tensors like the outputs, and the work; None if they are not known."""
        known = self._known.get(key)
        if known is None:
            return None
        likes, is_one, work = known
        outputs = tuple(map(_like, likes))
        return outputs[0] if is_one else outputs, work

    def keep(self, key: Key, inputs: set[int], out: Any, work: Work) -> None:
        """Remember outputs, unless they share storages or lie in the storages of `inputs`."""
        is_one = isinstance(out, Tensor)
        outs = (out,) if is_one else out
        if type(outs) is tuple and all(map(_has_own_storage, outs)):
            storages = {tensor.untyped_storage()._cdata for tensor in outs}
            if len(storages - inputs) == len(outs):
                self._known[key] = tuple(map(_like, outs)), is_one, work


def _like(tensor: Tensor) -> Tensor:
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")


def _has_own_storage(value: object) -> bool:
    """Return True for a plain tensor over the whole of a storage."""
    if type(value) is not Tensor or not _is_plain(value) or value.storage_offset() != 0:
        return False
    return value.untyped_storage().nbytes() == _like(value).untyped_storage().nbytes()


def key_of(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Key | None:
    """Describe a call; None if its result depends on more than shapes and plain values."""
    key, named = _described_values(args), _described_values(kwargs.values())
    return None if key is None or named is None else (func, key, *kwargs, named)


def _described_values(values: Iterable[Any]) -> Key | None:
    parts: list[Any] = []
    for value in values:
        kind = type(value)
        if kind in _TENSORS and _is_plain(value):
            parts.append((tuple(value.shape), value.stride(), value.storage_offset(), value.dtype))
        elif kind in _PLAIN:
            parts.append((kind, value))  # 1, 1.0 and True are equal, and not the same
        elif kind in (tuple, list) and (inner := _described_values(value)) is not None:
            parts.append((kind, inner))
        else:
            return None
    return tuple(parts)


def _is_plain(tensor: Tensor) -> bool:
    """Return True if shape, strides and dtype describe the tensor completely."""
    is_strided = tensor.is_meta and tensor.layout is torch.strided
    return is_strided and not tensor.is_conj() and not tensor.is_neg()


# storages


ATEN = torch.ops.aten


class Untraceable(OnefoldError):
    """A forward that depends on the values of tensors, which a trace does not have."""


class Storages(TorchDispatchMode):
    """Counts the storages that operations make, and passes the work of each to `on_work`."""

    def __init__(
        self, device_type: str = "cpu", on_work: Callable[[Work], None] | None = None
    ) -> None:
        super().__init__()
        self.now = 0
        self._is_loss = False
        self._device_type = device_type
        self._on_work = on_work
        self._logits = 0
        self._peak = self._peak_logits = 0
        self._alive: dict[int, object] = {}
        self._cache = MetaCache()
        self._scalars: dict[int, str] = {}  # which operation made a tensor of one element

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Count inside, with attention kernels as those of the device."""
        with _Kernels(self._device_type), self:
            yield

    def count_as(self, *, is_loss: bool) -> None:
        """Count new storages as those of logits and loss, or as others."""
        self._is_loss = is_loss

    def ignore(self, tensor: Tensor) -> None:
        """Leave out the tensor's bytes, which are counted elsewhere."""
        storage = tensor.untyped_storage()
        key = storage._cdata
        self._alive[key] = ref(storage, lambda _, key=key: self._alive.pop(key, None))

    def take_peak(self) -> tuple[int, int]:
        """Return the most bytes since the last call, and how many of them are logits and loss."""
        taken = self._peak, self._peak_logits
        self._peak, self._peak_logits = self.now, self._logits
        return taken

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func is ATEN._local_scalar_dense.default and args[0].is_meta:
            return self._guess(args[0])
        kwargs = kwargs or {}
        if func.is_view:
            return func(*args, **kwargs)
        with torch._C.DisableTorchFunction():  # questions about tensors here are no operations
            out, work = self._run_or_recall(func, args, kwargs)
        if self._on_work is not None:
            self._on_work(work)
        return out

    def _run_or_recall(self, func: Any, args: Any, kwargs: Any) -> tuple[Any, Work]:
        """Return the operation's outputs, counted, and its work: run, or remembered."""
        # the schema of a collective does not say that it returns its arguments
        may_alias = func._schema.is_mutable or func.namespace != "aten"
        key = None if may_alias else key_of(func, args, kwargs)
        known = None if key is None else self._cache.recall(key)
        if known is not None:
            for tensor in known[0] if type(known[0]) is tuple else known[:1]:
                self._count_bytes(tensor, func, args)
            return known
        out = func(*args, **kwargs)
        tensors = (t for t in tree_iter((args, kwargs)) if isinstance(t, Tensor))
        inputs = {t.untyped_storage()._cdata for t in tensors}
        for tensor in tree_iter(out):
            if not isinstance(tensor, Tensor):
                continue
            if not may_alias or tensor.untyped_storage()._cdata not in inputs:
                self._count_bytes(tensor, func, args)
        work = work_of_call(func, args, kwargs, out)
        if key is not None:
            self._cache.keep(key, inputs, out, work)
        return out, work

    def _count_bytes(self, tensor: Tensor, func: Any, args: tuple[Any, ...]) -> None:
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in self._alive:
            return
        nbytes, is_logits = storage.nbytes(), self._is_loss
        if nbytes <= 8:
            self._scalars[key] = self._origin(func._overloadpacket.__name__, args)

        def gone(_: object) -> None:
            if self._alive.pop(key, None) is not None:
                self.now -= nbytes
                self._logits -= nbytes if is_logits else 0
            self._scalars.pop(key, None)

        self._alive[key] = ref(storage, gone)
        self.now += nbytes
        self._logits += nbytes if is_logits else 0
        if self.now > self._peak:
            self._peak, self._peak_logits = self.now, self._logits

    def _origin(self, name: str, args: tuple[Any, ...]) -> str:
        """Name the operation; `mask.sum() == mask.numel()`, as transformers asks, is `all`."""
        first = args[0] if args and isinstance(args[0], Tensor) else None
        if name == "sum" and first is not None and first.dtype is torch.bool:
            return f"sum of {first.numel()}"
        if name == "eq" and first is not None:
            asked = self._scalars.get(first.untyped_storage()._cdata)
            return "all" if asked == f"sum of {args[1]}" else name
        return name

    def _guess(self, tensor: Tensor) -> bool:
        """Answer a question that models ask of masks and of overflow: nothing is out of order.

        "Are all ...?" is yes and "is any ...?" no. Everything else depends on values.
        """
        origin = self._scalars.get(tensor.untyped_storage()._cdata, "a tensor")
        if origin in ("all", "any", "isnan", "isinf", "is_nonzero"):
            return origin == "all"
        raise Untraceable(f"the forward depends on the value of {origin}")


def work_of_call(func: Any, args: Any, kwargs: Any, out: Any) -> Work:
    """Return the work of one call of an operation, whose outputs are `out`."""
    attention = _ATTENTION_FLOPS.get(func)
    products = flop_registry.get(func._overloadpacket)
    if attention is not None:
        return Work(attention_flops=float(attention(*args)), num_kernels=1)
    if products is not None:
        return Work(flops=float(products(*args, **kwargs, out_val=out)), num_kernels=1)
    moved = [t.nbytes for t in tree_iter((args, kwargs, out)) if isinstance(t, Tensor)]
    return Work(nbytes=float(sum(moved)), num_kernels=1)


def _attention_backward_flops(
    grad: Tensor, query: Tensor, key: Tensor, value: Tensor, *_: Any
) -> int:
    shapes = tuple(query.shape), as_many(key, query), as_many(value, query)
    return sdpa_backward_flop_count(tuple(grad.shape), *shapes)


_ATTENTION_FLOPS = {
    ATEN._scaled_dot_product_flash_attention_for_cpu.default: attention_flops,
    ATEN._scaled_dot_product_flash_attention_for_cpu_backward.default: _attention_backward_flops,
}
_GROUPED = (F.grouped_mm, torch._grouped_mm)


class _Kernels(TorchFunctionMode):
    """Replaces attention on `meta`, which torch writes out as products, by the fused kernel.

    The CPU's kernel stands for those of all devices: they keep the output and a log-sum a row.
    """

    def __init__(self, device_type: str) -> None:
        super().__init__()
        self._device_type = device_type

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        options = dict(kwargs or {})
        if func is F.scaled_dot_product_attention:
            names = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal")
            attention: dict[str, Any] = {**dict(zip(names, args, strict=False)), **options}
            if self._has_kernel(attention):
                return _fused_attention(attention)
        if func in _GROUPED and args[0].is_meta and args[0].dim() == 2 and args[1].dim() == 3:
            return args[0] @ args[1][0]  # on `meta` for bf16 alone; rows of all groups count once
        return func(*args, **options)

    def _has_kernel(self, attention: dict[str, Any]) -> bool:
        query, mask = attention["query"], attention.get("attn_mask")
        if not query.is_meta or query.dim() != 4:
            return False
        is_wider = query.shape[-1] != attention["value"].shape[-1]
        if self._device_type == "cpu" and (is_wider or attention.get("dropout_p", 0.0) > 0):
            return False
        return mask is None or not mask.requires_grad


def _fused_attention(attention: dict[str, Any]) -> Tensor:
    query, mask = attention["query"], attention.get("attn_mask")
    if mask is not None and mask.dtype is torch.bool:
        mask = torch.zeros_like(mask, dtype=query.dtype)
    value: Tensor = attention["value"]
    width = value.shape[-1]
    if width < query.shape[-1]:  # multi-head latent attention; the kernel's values are as wide
        value = F.pad(value, (0, query.shape[-1] - width))
    return ATEN._scaled_dot_product_flash_attention_for_cpu(
        query, attention["key"], value, 0.0, attention.get("is_causal", False),
        attn_mask=mask, scale=attention.get("scale"),
    )[0][..., :width]  # fmt: skip
