"""What a mean over ranks loses to codecs: NMSE, the lost power over the mean's own.

    python benchmarks/codec_errors.py

4 nodes of 8 ranks each have a gradient: 0.3 times what all share, plus noise of variance 1 of their
own. Two hops: inside a node every rank sends its values, the node's mean is taken in fp32; between
nodes every node sends its mean. In the ring, a sum that is passed on is encoded anew at each of 31
hops.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

from onefold.wire.codec import Codec, codec_of

NODES, LOCAL = 4, 8
SIGNAL, NOISE = 0.3, 1.0
NUMEL = 1 << 18
ROW = 64  # elements of a row of the row-scaled data: several rows share a scale

SCHEMES = {
    "int8 both hops": ("int8", "int8"),
    "exact inside, int8 between": ("exact", "int8"),
    "int8 inside, int4 between": ("int8", "int4"),
    "int8+h inside, int4+h between": ("int8+h", "int4+h"),
    "int4 both hops": ("int4", "int4"),
    "int4+h both hops": ("int4+h", "int4+h"),
}
RING = "int4 in a ring of 31 hops"


def normal(*shape: int, generator: torch.Generator) -> Tensor:
    """Of variance 1."""
    return torch.randn(*shape, generator=generator)


def student(*shape: int, generator: torch.Generator) -> Tensor:
    """Student's t with 3 degrees of freedom, of variance 1: the tails of real gradients."""
    chi = sum(torch.randn(*shape, generator=generator).square() for _ in range(3))
    return torch.randn(*shape, generator=generator) / torch.as_tensor(chi).sqrt()


def row_scaled(*shape: int, generator: torch.Generator) -> Tensor:
    """Normal, rows of different size, the same rows on every rank (log-normal, sigma 1)."""
    scale = torch.randn(NUMEL // ROW, 1, generator=torch.Generator().manual_seed(1)).exp()
    values = torch.randn(*shape, generator=generator).view(*shape[:-1], -1, ROW) * scale
    return values.view(*shape) / scale.square().mean().sqrt()


DATA: dict[str, Callable[..., Tensor]] = {
    "gaussian": normal, "student-t3": student, "row-scaled": row_scaled,
}  # fmt: skip


def gradients(name: str) -> Tensor:
    """[nodes, local, numel], fp32."""
    generator = torch.Generator().manual_seed(0)
    shared = DATA[name](NUMEL, generator=generator)
    own = DATA[name](NODES, LOCAL, NUMEL, generator=generator)
    return SIGNAL * shared + NOISE * own


def sent(codec: Codec, values: Tensor) -> Tensor:
    """What arrives of values [n]."""
    message = torch.empty(codec.nbytes(len(values)), dtype=torch.uint8)
    codec.encode(values, message)
    out = torch.empty_like(values)
    codec.decode(message, out)
    return out


def two_hops(given: Tensor, inside: Codec, between: Codec) -> Tensor:
    """The mean over all ranks [n] of gradients [nodes, local, n]."""
    nodes = [torch.stack([sent(inside, one) for one in node]).mean(0) for node in given]
    return torch.stack([sent(between, one) for one in nodes]).mean(0)


def ring(given: Tensor, codec: Codec) -> Tensor:
    """The same mean, the sum of all ranks so far sent on at each hop."""
    ranks = given.flatten(0, 1)
    total = ranks[0]
    for _, own in pairwise(ranks):
        total = sent(codec, total) + own
    return total / len(ranks)


def nmse(got: Tensor, given: Tensor) -> float:
    """Lost power of a mean over its own."""
    exact = given.double().mean((0, 1))
    return ((got - exact).square().sum() / exact.square().sum()).item()


def measured() -> dict[str, dict[str, float]]:
    """NMSE of every scheme on every kind of data."""
    found: dict[str, dict[str, float]] = {name: {} for name in (*SCHEMES, RING)}
    for kind in DATA:
        given = gradients(kind)
        for name, (inside, between) in SCHEMES.items():
            got = two_hops(given, codec_of(inside), codec_of(between))
            found[name][kind] = nmse(got, given)
        found[RING][kind] = nmse(ring(given, codec_of("int4")), given)
    return found


def show(console: Console, found: dict[str, dict[str, float]]) -> None:
    """The table of errors."""
    table = Table("scheme", *DATA, title=f"NMSE of the mean of {NODES} x {LOCAL} ranks")
    for name, errors in found.items():
        table.add_row(name, *(f"{errors[kind]:.1e}" for kind in DATA))
    console.print(table)


if __name__ == "__main__":
    torch.set_num_threads(1)
    show(Console(), measured())
