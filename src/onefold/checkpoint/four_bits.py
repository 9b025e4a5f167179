"""Read numbers of 4 bits, two in a byte of the files, as the weights that they stand for.

    NAME_blocks, NAME_scales            MXFP4: 32 numbers share a power of two (OCP MX, 5.3.3)
    NAME, NAME.absmax, NAME.quant_map   nf4 and fp4 of bitsandbytes: a table of 16 numbers, and the
    NAME.quant_state.bitsandbytes__nf4  largest magnitude of each block, maybe packed itself

Each rank reads the bytes of its own rows.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch import Tensor

from onefold.checkpoint.safetensors import PretrainedFiles
from onefold.errors import CheckpointError
from onefold.layout.cut import Box

E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
"""The numbers of a 4 bit float, by their code."""
BLOCKS, SCALES, STATE = "_blocks", "_scales", ".quant_state.bitsandbytes__"
EXPONENT_BIAS = 127


@dataclass(frozen=True, slots=True)
class Mxfp4:
    """Experts [E, rows, groups, 16] of bytes, with a scale a group; the weight is [E, in, rows]."""

    blocks: str
    scales: str
    shape: tuple[int, ...]

    @property
    def names(self) -> tuple[str, ...]:
        return self.blocks, self.scales

    def decoded(self, files: PretrainedFiles, name: str, box: Box) -> Tensor:
        """Return a box of the weight in fp32; read whole groups of its own rows."""
        (expert, column, row), (experts, columns, rows) = box
        width = 2 * files.shape(self.blocks)[-1]
        group = column // width
        groups = -(-(column + columns) // width) - group
        at, sizes = (expert, row, group), (experts, rows, groups)
        packed = files.box(self.blocks, ((*at, 0), (*sizes, width // 2)))
        exponents = files.box(self.scales, (at, sizes)).to(torch.int32) - EXPONENT_BIAS
        numbers = torch.tensor(E2M1)[torch.stack([packed & 15, packed >> 4], -1).long()]
        exact = torch.ldexp(numbers.flatten(-2), exponents.unsqueeze(-1)).flatten(-2)
        return exact.narrow(-1, column - group * width, columns).mT


@dataclass(frozen=True, slots=True)
class FourBits:
    """A weight that bitsandbytes packed by rows, first number in the high half of a byte."""

    packed: str
    shape: tuple[int, ...]
    about: dict[str, Any]
    names: tuple[str, ...]  # beside the packed bytes

    def decoded(self, files: PretrainedFiles, name: str, box: Box) -> Tensor:
        """Return a box of the weight in fp32; read whole rows."""
        (row, *others), (rows, *lengths) = box
        width = prod(self.shape[1:])
        first, stop = row * width, (row + rows) * width
        bytes_first, bytes_stop = first // 2, -(-stop // 2)
        (_, *tail) = files.shape(self.packed)
        at = ((bytes_first, *(0 for _ in tail)), (bytes_stop - bytes_first, *tail))
        packed = files.box(self.packed, at).flatten()
        codes = torch.stack([packed >> 4, packed & 15], -1).flatten().long()
        codes = codes[first - 2 * bytes_first :][: stop - first]
        numbers = files.whole(f"{self.packed}.quant_map").float()[codes]
        block = int(self.about["blocksize"])
        begin = first // block
        largest = self._largest(files, begin, -(-stop // block))
        spread = largest.repeat_interleave(block)[first - begin * block :][: stop - first]
        exact = (numbers * spread).reshape(rows, *self.shape[1:])
        for dim, (at_dim, length) in enumerate(zip(others, lengths, strict=True), start=1):
            exact = exact.narrow(dim, at_dim, length)
        return exact

    def _largest(self, files: PretrainedFiles, first: int, stop: int) -> Tensor:
        """Return the largest magnitudes of blocks `first` to `stop`."""
        absmax = files.box(f"{self.packed}.absmax", ((first,), (stop - first,)))
        if "nested_blocksize" not in self.about:
            return absmax.float()
        block = int(self.about["nested_blocksize"])
        nested = files.whole(f"{self.packed}.nested_absmax").float()
        numbers = files.whole(f"{self.packed}.nested_quant_map").float()[absmax.long()]
        spread = nested.repeat_interleave(block)[first:stop]
        return numbers * spread + float(self.about["nested_offset"])


def find_packed(files: PretrainedFiles) -> Iterator[tuple[str, Mxfp4 | FourBits]]:
    """Yield the weights that are packed in files, by the names that they have unpacked.

    Raises: CheckpointError: parts that do not fit one another.
    """
    places = files.places
    for name in places:
        base = name.removesuffix(BLOCKS)
        if name.endswith(BLOCKS) and f"{base}{SCALES}" in places:
            *shape, groups, half = files.shape(name)
            if len(shape) != 2 or [*shape, groups] != [*files.shape(f"{base}{SCALES}")]:
                raise _refused_packed(name, f"blocks of shape {[*shape, groups, half]}")
            yield base, Mxfp4(name, f"{base}{SCALES}", (shape[0], 2 * groups * half, shape[1]))
        elif STATE in name:
            yield name.partition(STATE)[0], _four_bits(files, name)


def _four_bits(files: PretrainedFiles, state: str) -> FourBits:
    base = state.partition(STATE)[0]
    try:
        about = json.loads(bytes(files.whole(state).tolist()))
        shape, block = tuple(map(int, about["shape"])), int(about["blocksize"])
        numel, parts = prod(shape), [f"{base}.absmax", f"{base}.quant_map"]
        if "nested_blocksize" in about:
            parts += [f"{base}.nested_absmax", f"{base}.nested_quant_map"]
        fits = prod(files.shape(base)) * 2 in (numel, numel + 1) and block > 0 and min(shape) > 0
        fits = fits and files.shape(parts[0]) == (-(-numel // block),)
        fits = fits and files.shape(parts[1]) == (16,)
    except (KeyError, TypeError, ValueError) as error:
        raise _refused_packed(base, f"a note that cannot be read: {str(error)[:80]}") from error
    if not fits:
        raise _refused_packed(
            base, f"{prod(files.shape(base))} bytes for a weight of {list(shape)}"
        )
    return FourBits(base, shape, about, (state, *parts))


def _refused_packed(name: str, got: str) -> CheckpointError:
    wanted = f"the parts of {name!r} in the files to be numbers of 4 bits with scales"
    return CheckpointError(wanted, got, hint="download or save the folder again")
