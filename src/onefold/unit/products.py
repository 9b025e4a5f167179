"""Products with quantized matrices on a GPU, where Triton is installed.

Without it a matrix is decoded, and torch multiplies.
"""

from functools import partial
from typing import cast

from torch import Tensor

from onefold.wire.fused import kernels_for


def product(
    x: Tensor, payload: Tensor, table: Tensor, num_outputs: int, *, is_int4: bool
) -> Tensor | None:
    """Return bf16 x [M, K] times a transposed matrix [num_outputs, K]; None without a kernel."""
    kernels = kernels_for(x.device, "triton_products")
    if kernels is None:
        return None
    of_all = partial(kernels.module.product, x, payload, table, num_outputs, is_int4=is_int4)
    return cast("Tensor | None", kernels.attempt("product", of_all))
