"""Products with quantized matrices on a GPU, where Triton is installed.

Without it a matrix is decoded, and torch multiplies.
"""

from __future__ import annotations

import logging
from functools import cache
from typing import Any

from torch import Tensor

LOG = logging.getLogger(__name__)

DEVICES = frozenset({"cuda"})
"""Kinds of devices that run the kernels. A test adds the CPU, where Triton interprets them."""


class _Products:
    def __init__(self, module: Any) -> None:
        self.module: Any = module


@cache
def _load() -> _Products:
    try:
        from onefold.wire.kernels import triton_products
    except (ImportError, AttributeError) as error:  # absent, or another version of Triton
        LOG.warning("quantized weights are decoded for each product: %s", error)
        return _Products(None)
    return _Products(triton_products)


def product(
    x: Tensor, payload: Tensor, table: Tensor, num_outputs: int, *, is_int4: bool
) -> Tensor | None:
    """Return bf16 x [M, K] times a transposed matrix [num_outputs, K]; None without a kernel.

    A kernel that does not compile is reported once, and not tried again.
    """
    if x.device.type not in DEVICES:
        return None
    products = _load()
    if products.module is None:
        return None
    try:
        result: Tensor = products.module.product(x, payload, table, num_outputs, is_int4=is_int4)
    except Exception as error:  # of Triton, its compiler or its driver
        products.module = None
        LOG.warning("quantized weights are decoded for each product: %s", error)
        return None
    return result
