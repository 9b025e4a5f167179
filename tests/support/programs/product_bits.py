"""Products by the kernels for GPUs against decoded matrices: on the GPU named, or interpreted.

python -m tests.support.programs.product_bits cuda
TRITON_INTERPRET=1 python -m tests.support.programs.product_bits
"""

from __future__ import annotations

import sys
from itertools import product

import torch
from torch.nn import functional as F

from onefold.unit import formats, products
from onefold.wire import fused

DEVICE = torch.device(sys.argv[1] if len(sys.argv) > 1 else "cpu")
SHAPES = [(1, 64, 64), (3, 33, 50), (16, 96, 130), (40, 70, 192), (100, 130, 320)]
"""Rows of inputs, outputs, columns: multiples of a tile's, and others."""


def check(word: str, rows: int, outputs: int, columns: int) -> None:
    """The kernel's product is that of the decoded matrix, up to the rounding of bf16."""
    kind = formats.MATRIX_FORMATS[word]
    generator = torch.Generator().manual_seed(rows)
    weight = torch.randn(outputs, columns, generator=generator).to(DEVICE)
    x = torch.randn(rows, columns, generator=generator).to(DEVICE, torch.bfloat16)
    message = torch.empty(kind.nbytes(weight.shape), dtype=torch.uint8, device=DEVICE)
    kind.encode(weight, message)
    (parts,) = kind.matrices(message, weight.shape)
    is_int4 = word.startswith("int4")
    got = products.product(x, parts.payload, parts.table, outputs, is_int4=is_int4)
    assert got is not None, "no kernel ran"
    exact = torch.empty(outputs, columns, device=DEVICE)
    kind.decode(message, exact)
    wanted = F.linear(x.float(), exact)
    error = (got.float() - wanted).abs().max() / wanted.abs().max()
    assert error < 0.01, (word, rows, outputs, columns, float(error))


def main() -> None:
    """Both formats, all shapes."""
    fused.DEVICES = frozenset({DEVICE.type})
    for word, shape in product(("int8 rows", "int4 groups (cuda)"), SHAPES):
        check(word, *shape)


if __name__ == "__main__":
    main()
