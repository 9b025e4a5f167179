"""Bytes that torch holds while a module runs: every storage from its making to its last reference.

Works on `meta` as on real tensors, by watching operations, so it sees what autograd and the module
keep, and not what a kernel takes and returns inside one call.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple
from weakref import ref

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter
from torch.utils.flop_counter import flop_registry, sdpa_backward_flop_count, sdpa_flop_count

from onefold.errors import OnefoldError
from onefold.planner.meta_cache import MetaCache, key_of

ATEN = torch.ops.aten


class Untraceable(OnefoldError):
    """A forward whose course depends on values, of which a trace has none."""


class WorkDone(NamedTuple):
    """What one operation does: FLOPs of a product, or of attention, or else bytes that it moves;
    and `drawn`, random numbers, as of dropout.
    """

    flops: float = 0.0
    attention_flops: float = 0.0
    nbytes: float = 0.0
    drawn: float = 0.0


class Storages(TorchDispatchMode):
    """Counts storages that operations make; `on_work` is told what each does."""

    def __init__(
        self, device_type: str = "cpu", on_work: Callable[[WorkDone], None] | None = None
    ) -> None:
        super().__init__()
        self.now = 0
        self.is_loss = False  # what is made now belongs to logits and loss
        self._device_type = device_type
        self._on_work = on_work
        self._logits = 0
        self._peak = self._peak_logits = 0
        self._held: dict[int, object] = {}
        self._remembered: MetaCache[WorkDone] = MetaCache()
        self._scalars: dict[int, str] = {}  # which operation made a tensor of one element

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Count inside; kernels are those of the device that is meant."""
        with _Kernels(self._device_type), self:
            yield

    def ignore(self, tensor: Tensor) -> None:
        """Do not count the tensor's bytes: somebody else does."""
        storage = tensor.untyped_storage()
        key = storage._cdata
        self._held[key] = ref(storage, lambda _, key=key: self._held.pop(key, None))

    def take_peak(self) -> tuple[int, int]:
        """The most bytes since the last call, and how many of them were logits and loss."""
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
        with torch._C.DisableTorchFunction():  # what is asked of tensors here is no operation
            out, done = self._run(func, args, kwargs)
        if self._on_work is not None:
            self._on_work(done)
        return out

    def _run(self, func: Any, args: Any, kwargs: Any) -> tuple[Any, WorkDone]:
        """What the operation gives, counted, and its work: run, or remembered."""
        # collectives do not say that they give back what they were given
        may_alias = func._schema.is_mutable or func.namespace != "aten"
        key = None if may_alias else key_of(func, args, kwargs)
        again = None if key is None else self._remembered.recall(key)
        if again is not None:
            for tensor in again[0] if type(again[0]) is tuple else again[:1]:
                self._count(tensor, func)
            return again
        out = func(*args, **kwargs)
        given = _storages((args, kwargs))
        for tensor in tree_iter(out):
            if not isinstance(tensor, Tensor):
                continue
            if not may_alias or tensor.untyped_storage()._cdata not in given:
                self._count(tensor, func)
        done = work_of_call(func, args, kwargs, out)
        if key is not None:
            self._remembered.note(key, given, out, done)
        return out, done

    def _count(self, tensor: Tensor, func: Any) -> None:
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in self._held:
            return
        nbytes, is_logits = storage.nbytes(), self.is_loss
        if nbytes <= 8:
            self._scalars[key] = func._overloadpacket.__name__

        def gone(_: object) -> None:
            if self._held.pop(key, None) is not None:
                self.now -= nbytes
                self._logits -= nbytes if is_logits else 0
            self._scalars.pop(key, None)

        self._held[key] = ref(storage, gone)
        self.now += nbytes
        self._logits += nbytes if is_logits else 0
        if self.now > self._peak:
            self._peak, self._peak_logits = self.now, self._logits

    def _guess(self, tensor: Tensor) -> bool:
        """Answers for questions that models ask of masks and of overflow: nothing is out of order.

        "Are all ...?" is yes and "is any ...?" no. Everything else depends on the data.
        """
        asked = self._scalars.get(tensor.untyped_storage()._cdata, "a tensor")
        if asked in ("all", "any", "isnan", "isinf", "is_nonzero"):
            return asked == "all"
        raise Untraceable(f"the forward looks at the value of {asked}")


def work_of_call(func: Any, args: Any, kwargs: Any, out: Any) -> WorkDone:
    """What one call of an operation has done, which gave `out`."""
    attention = _ATTENTION_FLOPS.get(func)
    products = flop_registry.get(func._overloadpacket)
    if attention is not None:
        return WorkDone(attention_flops=float(attention(*args)))
    if products is not None:
        return WorkDone(flops=float(products(*args, **kwargs, out_val=out)))
    moved = [t.nbytes for t in tree_iter((args, kwargs, out)) if isinstance(t, Tensor)]
    made = next((t.numel() for t in tree_iter(out) if isinstance(t, Tensor)), 0)
    draws = torch.Tag.nondeterministic_seeded in func.tags
    return WorkDone(nbytes=float(sum(moved)), drawn=float(made) if draws else 0.0)


def _storages(values: Any) -> set[int]:
    """The storages of all tensors in nested arguments."""
    return {t.untyped_storage()._cdata for t in tree_iter(values) if isinstance(t, Tensor)}


def _attention_flops(query: Tensor, key: Tensor, value: Tensor, *_: Any, **__: Any) -> int:
    return sdpa_flop_count(tuple(query.shape), _as_many(key, query), _as_many(value, query))


def _attention_backward_flops(
    grad: Tensor, query: Tensor, key: Tensor, value: Tensor, *_: Any, **__: Any
) -> int:
    shapes = tuple(grad.shape), tuple(query.shape), _as_many(key, query), _as_many(value, query)
    return sdpa_backward_flop_count(*shapes)


def _as_many(tensor: Tensor, query: Tensor) -> tuple[int, ...]:
    """The shape as if it had the query's heads, of which several may share one."""
    rows, _, positions, width = tensor.shape
    return rows, query.shape[1], positions, width


_ATTENTION_FLOPS = {
    ATEN._scaled_dot_product_flash_attention_for_cpu.default: _attention_flops,
    ATEN._scaled_dot_product_flash_attention_for_cpu_backward.default: _attention_backward_flops,
}


_GROUPED = (F.grouped_mm, torch._grouped_mm)


class _Kernels(TorchFunctionMode):
    """On `meta` torch writes attention out as products; devices run one kernel that keeps less.

    The CPU's kernel stands for all of them: output and a log-sum of each row are what it keeps.
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
            given: dict[str, Any] = {**dict(zip(names, args, strict=False)), **options}
            if self._has_kernel(given):
                return self._run(given)
        if func in _GROUPED and args[0].is_meta and args[0].dim() == 2 and args[1].dim() == 3:
            return args[0] @ args[1][0]  # on `meta` for bf16 alone; rows of all groups count once
        return func(*args, **options)

    def _has_kernel(self, given: dict[str, Any]) -> bool:
        query, mask = given["query"], given.get("attn_mask")
        if not query.is_meta or query.dim() != 4:
            return False
        if self._device_type == "cpu" and given.get("dropout_p", 0.0) > 0:
            return False
        return mask is None or not mask.requires_grad

    @staticmethod
    def _run(given: dict[str, Any]) -> Tensor:
        query, mask = given["query"], given.get("attn_mask")
        if mask is not None and mask.dtype is torch.bool:
            mask = torch.zeros_like(mask, dtype=query.dtype)
        out = ATEN._scaled_dot_product_flash_attention_for_cpu(
            query, given["key"], given["value"], 0.0,
            given.get("is_causal", False), attn_mask=mask, scale=given.get("scale"),
        )  # fmt: skip
        return out[0]
