"""What torch's functions do to a sharded tensor: the tables by which they are dispatched."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

_WRITES = {
    "__iadd__", "__isub__", "__imul__", "__itruediv__", "__ifloordiv__", "__imod__", "__ipow__",
    "__iand__", "__ior__", "__ixor__", "__ilshift__", "__irshift__", "__setitem__",
}  # fmt: skip
"""Operators that write in place, as all functions do whose name ends with one underscore."""

_ELEMENTWISE = "copy add sub mul div true_divide pow lerp addcmul addcdiv clamp masked_fill where"
ELEMENTWISE = {f"{name}_" for name in _ELEMENTWISE.split()}
ELEMENTWISE |= {"__iadd__", "__isub__", "__imul__", "__itruediv__", "__ipow__"}
"""Writes whose plain operands are cut like the tensor that is written to."""

NEW = {Tensor.new_empty, Tensor.new_zeros, Tensor.new_ones, Tensor.new_full, Tensor.new_tensor}
"""They make plain tensors, as for a hidden state, which no rank shares with others."""

_DRAWS = "normal uniform bernoulli exponential log_normal cauchy geometric random"
FILLS = {f"{name}_" for name in _DRAWS.split()} | {"eye", "rand_like", "randn_like"}
FILLS |= {"constant_", "kaiming_uniform_"}  # of nn.init: by name, as libraries replace them
"""Functions that set, or return, all elements. Each rank draws those of the whole tensor and keeps
its own: with equal generators the values are those of one process, and no rank repeats another's.
"""

REFUSALS = (
    "unevenly sharded",
    "sharded dimension",
    "Sharding propagation failed",
    "not supported for tensor subclasses",
    "does not have a sharding strategy",
)
"""Words of errors of DTensor for what it does not define on these rows."""

SHAPED = {Tensor.view_as, Tensor.reshape_as, Tensor.expand_as}
"""They need the shape alone of their second operand."""

_VIEWS = {
    "__getitem__", "__iter__", "select", "narrow", "view", "reshape", "flatten", "unflatten",
    "ravel", "t", "transpose", "permute", "movedim", "moveaxis", "swapaxes", "swapdims", "adjoint",
    "unbind", "chunk", "split", "split_with_sizes", "tensor_split", "hsplit", "vsplit", "dsplit",
    "squeeze", "unsqueeze", "diagonal", "expand", "broadcast_to", "unfold",
    "as_strided", "view_as_real", "real", "imag",
}  # fmt: skip

_BOUNDS = {
    "max", "min", "amax", "amin", "aminmax", "argmax", "argmin", "median", "nanmedian",
    "_foreach_max", "fmax", "fmin",
}  # fmt: skip
_NORMS = {"norm", "vector_norm", "linalg_vector_norm", "linalg_norm", "_foreach_norm"}


def fills(func: Callable[..., Any]) -> bool:
    """True for functions that set, or return, all elements."""
    return getattr(func, "__name__", "") in FILLS


def writes(func: Callable[..., Any]) -> bool:
    """True for functions that change their first argument in place."""
    name = getattr(func, "__name__", "")
    return name in _WRITES or (name.endswith("_") and not name.endswith("__"))


def has_no_identity(
    func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> bool:
    """True for reductions that are not defined on an empty shard."""
    if getattr(func, "__name__", "") in _BOUNDS:
        return True
    orders = [a for a in (*args, *kwargs.values()) if isinstance(a, int | float | str)]
    return is_norm(func) and any(str(order) in ("inf", "-inf") for order in orders)


def is_norm(func: Callable[..., Any]) -> bool:
    """True for functions that compute the norm of a tensor, or of each of a list."""
    return getattr(func, "__name__", "") in _NORMS


def is_view(func: Callable[..., Any]) -> bool:
    """True for functions whose result shares memory with their first argument."""
    getter = getattr(getattr(func, "__self__", None), "__name__", "")
    return getattr(func, "__name__", "") in _VIEWS or getter in _COMPUTED_GETTERS


READS = {
    Tensor.item, Tensor.tolist, Tensor.numpy, Tensor.__float__, Tensor.__int__, Tensor.__bool__,
    Tensor.__index__, Tensor.__complex__, Tensor.__format__, Tensor.__array__, Tensor.__dlpack__,
}  # fmt: skip
"""They read numbers of the whole tensor."""

SET_DATA = Tensor.data.__set__  # type: ignore[attr-defined]
GET_DATA = Tensor.data.__get__  # type: ignore[attr-defined]
_COMPUTED_GETTERS = {"T", "H", "mT", "mH", "real", "imag"}
VALUES = {
    Tensor.detach, Tensor.__repr__, Tensor.__format__, Tensor.data_ptr, Tensor.untyped_storage,
    Tensor.__deepcopy__, Tensor.__reduce_ex__, Tensor.zero_, Tensor.copy_, Tensor.fill_,
    GET_DATA, SET_DATA,
}  # fmt: skip
"""The passive functions that read or write values: a step in the background must be over."""

_PASSIVE = VALUES | NEW | {
    Tensor.size, Tensor.dim, Tensor.numel, Tensor.nelement, Tensor.stride, Tensor.element_size,
    Tensor.is_contiguous, Tensor.is_floating_point, Tensor.is_complex, Tensor.requires_grad_,
    Tensor.register_hook, Tensor.register_post_accumulate_grad_hook, Tensor.get_device,
    Tensor.__len__, Tensor.__hash__, Tensor.storage_offset, Tensor.is_shared, Tensor._is_view,
    Tensor.is_same_size, Tensor.is_signed, torch.is_floating_point, torch.is_complex, torch.numel,
    torch.is_tensor, torch.result_type, torch.empty_like, torch.zeros_like, torch.ones_like,
    torch.full_like,
}  # fmt: skip
"""Functions that need own rows at most, or write in place."""


def is_passive(func: Callable[..., Any]) -> bool:
    """True for attribute access and bookkeeping: a sharded parameter answers by itself."""
    name = getattr(func, "__name__", "")
    if name in ("__get__", "__set__", "__delete__"):
        return getattr(getattr(func, "__self__", None), "__name__", "") not in _COMPUTED_GETTERS
    return func in _PASSIVE


def is_list(index: Any) -> bool:
    """True for an index by numbers or flags, which DTensor does not define beside plain tensors."""
    parts = index if isinstance(index, tuple) else (index,)
    return any(isinstance(part, list | Tensor) for part in parts)
