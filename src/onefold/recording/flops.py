"""Count the model FLOPs of a step: watch the operations of one forward that trains.

[Note: model FLOPs] Each matrix product of the forward has one product of as many FLOPs in backward
for each operand that needs a gradient. Operands know that while the forward runs, so one forward
gives the count of the step: frozen weights have no gradient, experts compute for the tokens that
they got, and what a backward computes again does not count. The formulas are those of torch's
`FlopCounterMode`. That class itself would have to stay on through backward, where nothing of ours
surrounds the user's call; and the planner's trace on `meta` needs the module before `shard`, has no
routing of tokens, and counts recomputation. A causal mask does not halve attention, as in the
papers (PaLM, arXiv 2204.02311, appendix B).
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry, sdpa_flop_count

_KINDS = (Tensor, nn.Parameter, DTensor)

_NAMESPACES = ("aten", "prim", "prims", "profiler", "c10d", "_c10d_functional",
               "_c10d_functional_autograd", "_dtensor")  # fmt: skip
"""Operations whose products are known. An operation of another library may compute anything."""

_PRODUCT = re.compile("(mm|mv|linear)_?$|rnn|lstm|gru|trilinear|attention|conv(olution|_|[0-9])")
"""Names of operations of torch that multiply matrices, with a formula or without."""


def attention_flops(query: Tensor, key: Tensor, value: Tensor, *_: Any, **__: Any) -> int:
    """Count the forward of a fused attention kernel on [B, heads, positions, width]."""
    return sdpa_flop_count(tuple(query.shape), as_many(key, query), as_many(value, query))


def as_many(tensor: Tensor, query: Tensor) -> tuple[int, ...]:
    """Return the shape with as many heads as the query has; several may share one."""
    rows, _, positions, width = tensor.shape
    return rows, query.shape[1], positions, width


def _grouped_flops(rows: Tensor, weights: Tensor, *_: Any, **__: Any) -> int:
    """Each row [K] meets the weights [..., K, N] of one group."""
    return 2 * rows.numel() * weights.shape[-1]


_FORMULAS: dict[str, Callable[..., int]] = {
    "aten._scaled_dot_product_flash_attention_for_cpu": attention_flops,
    "aten._grouped_mm": _grouped_flops,
    "transformers.grouped_mm_fallback": _grouped_flops,
}
"""Formulas that torch does not have."""


class FlopCounter(TorchDispatchMode):
    """Counts the model FLOPs of the forward that runs inside, forward and backward together.

    Results of operations are the same. `by_dtype` has the FLOPs of this rank by the dtype of the
    operands; a product of DTensors counts once over the ranks of their mesh. `is_known` is False
    after a product whose backward cannot be told: with gradients off, of a kernel without a
    formula, or of another kind of tensor.
    """

    supports_higher_order_operators = True

    def __init__(self) -> None:
        super().__init__()
        self.by_dtype: dict[torch.dtype, float] = {}
        self.is_known = True

    @property
    def flops(self) -> float:
        """FLOPs of all dtypes; 0 where they are not known."""
        return sum(self.by_dtype.values()) if self.is_known else 0.0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        packet = getattr(func, "_overloadpacket", func)
        name = str(packet)
        formula = _FORMULAS.get(name) or flop_registry.get(packet)
        is_other = any(kind not in _KINDS for kind in types)
        if formula is None:
            is_free = getattr(func, "namespace", "") in _NAMESPACES and not _PRODUCT.search(name)
            self.is_known &= is_free
        elif is_other or not torch.is_grad_enabled():
            self.is_known = False
        if is_other:
            return NotImplemented  # the tensors' own class runs it
        out = func(*args, **kwargs)
        if formula is not None and self.is_known:
            first = next(arg for arg in args if isinstance(arg, Tensor))
            flops = formula(*args, **kwargs, out_val=out) * (1 + _gradient_products(name, args))
            flops /= first.device_mesh.size() if isinstance(first, DTensor) else 1
            self.by_dtype[first.dtype] = self.by_dtype.get(first.dtype, 0.0) + flops
        return out


def _gradient_products(name: str, args: tuple[Any, ...]) -> float:
    """Return the products of backward, in products of the forward."""
    if "attention" in name:  # two products: of queries and keys, of these scores and values
        query, key, value = (tensor.requires_grad for tensor in args[:3])
        return (query + key + (query or key) + value) / 2
    operands = args[1:3] if "addmm" in name or "baddbmm" in name else args[:2]
    return sum(operand.requires_grad for operand in operands)
