"""Read numbers of 8 bits, which files keep with scales, as the weights that they stand for.

    NAME_scale_inv     float8, a scale for each block of 128 x 128 (DeepSeek-V3, Qwen3-FP8), or one
    NAME_scale         float8 or int8, one scale, one for each row, or one for each block
    SCB                int8, the largest magnitude of each row, for 127 (bitsandbytes)

Numbers of 4 bits: four_bits.py. Other formats are refused by the name of a parameter. Each rank
reads the scales of its own box.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from onefold.checkpoint.four_bits import FourBits, Mxfp4, find_packed
from onefold.checkpoint.safetensors import PretrainedFiles
from onefold.errors import CheckpointError, listed
from onefold.layout.cut import Box

BYTES = {"F8_E4M3", "F8_E5M2", "I8"}
"""Codes of dtypes that are read with a scale."""
WIDE = {"F64", "F32", "F16", "BF16", "C64"}
METHODS = {"fp8", "fbgemm_fp8", "compressed-tensors", "bitsandbytes", "modelopt", "mxfp4"}
"""Methods of a `quantization_config` that may write the formats above."""
HINT = "dequantize the weights with the library that wrote them, and save them in bf16"


@dataclass(frozen=True, slots=True)
class Scales:
    """Where the scales of one weight lie, and how many of its elements share one."""

    name: str
    shape: tuple[int, ...]  # of the scales in their file
    blocks: tuple[int, ...]  # elements that share a scale, by dimension of the weight
    factor: float = 1.0

    def decoded(self, files: PretrainedFiles, name: str, box: Box) -> Tensor:
        """Return a box of a weight in fp32; read its own bytes, and the scales for them."""
        dims = list(zip(*box, self.blocks, strict=True))  # first, length, block
        firsts = [first // block for first, _, block in dims]
        counts = [-(-(first + n) // block) - first // block for first, n, block in dims]
        used = len(self.shape)
        scales = files.box(self.name, (tuple(firsts[:used]), tuple(counts[:used]))).float()
        scales = scales.reshape(counts)
        for dim, (first, length, block) in enumerate(dims):
            if counts[dim] > 1:
                scales = scales.repeat_interleave(block, dim).narrow(dim, first % block, length)
        return files.box(name, box).float().mul_(scales).mul_(self.factor)


class QuantizedFiles:
    """What a folder says about quantized weights: its scales, and its `quantization_config`."""

    def __init__(self, directory: Path, files: PretrainedFiles, *, is_packed: bool = False) -> None:
        self._files = files
        self._config = _config_of(directory)
        method = self._config.get("quant_method")
        self._packed = {} if is_packed else dict(find_packed(files))
        self.beside = set() if is_packed else set(filter(self._is_beside, files.places))
        """Names in the files of numbers that belong to a weight: scales, shapes, formats."""
        for packed in self._packed.values():
            self.beside.update(packed.names)
        if self._config and method not in METHODS and not is_packed:
            wanted = f"weights in {str(directory)!r} that are exact, or in 8 bits with scales"
            got = f"a quantization_config of the method {method!r} in config.json"
            raise CheckpointError(wanted, got, hint=HINT)

    @property
    def places(self) -> list[str]:
        """The names of weights: packed ones as they are called without their packing."""
        return sorted((self._files.places.keys() | self._packed.keys()) - self.beside)

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of a weight, unpacked."""
        packed = self._packed.get(name)
        return self._files.shape(name) if packed is None else packed.shape

    def whole(self, name: str) -> Tensor:
        """Return all of a weight, in exact numbers."""
        scales, shape = self.scales_of(name), self.shape(name)
        if scales is None:
            return self._files.whole(name)
        return scales.decoded(self._files, name, ((0,) * len(shape), shape))

    def _is_beside(self, name: str) -> bool:
        for ending in ("_scale_inv", "_scale"):
            if name.endswith(ending) and name.removesuffix(ending) in self._files.places:
                return True
        prefix, _, last = name.rpartition(".")
        if last in ("SCB", "weight_format"):
            return f"{prefix}.weight".lstrip(".") in self._files.places
        return False

    def scales_of(self, name: str) -> Scales | Mxfp4 | FourBits | None:
        """Return what decodes a weight; None for one that is exact in the files.

        Raises: CheckpointError: numbers without scales, or a format that is not read.
        """
        if name in self._packed:
            return self._packed[name]
        code, shape = self._files.code(name), self._files.shape(name)
        if code in WIDE:
            return None
        places = self._files.places
        prefix = name.rpartition(".")[0]
        scb = f"{prefix}.SCB".lstrip(".")
        known = {f"{name}_scale_inv", f"{name}_scale"}
        near = (f"{name}_", f"{name}.")
        others = [other for other in places if other.startswith(near) and other not in known]
        others = [other for other in others if not other.endswith(("_shape", "_format"))]
        found = [other for other in (*sorted(known), scb) if other in places]
        if code not in BYTES or others or len(found) != 1:
            beside = ", ".join(listed([*found, *others])) or "no scales"
            raise _refused_scales(name, f"{code} numbers with {beside}")
        (scale,) = found
        blocks = self._scale_blocks(shape, self._files.shape(scale), is_rows=scale == scb)
        if blocks is None:
            said = f"scales of shape {list(self._files.shape(scale))} in {scale!r}"
            raise _refused_scales(name, f"{said} for a weight of shape {list(shape)}")
        if self._files.code(scale) not in WIDE:
            raise _refused_scales(name, f"{self._files.code(scale)} scales in {scale!r}")
        if scale == scb:
            layout = f"{prefix}.weight_format".lstrip(".")
            is_rows = layout not in places or not self._files.box(layout, ((0,), (1,))).any()
            if code != "I8" or not is_rows:
                raise _refused_scales(name, f"{code} numbers that are not in rows")
        return Scales(scale, self._files.shape(scale), blocks, 1 / 127 if scale == scb else 1.0)

    def _scale_blocks(
        self, shape: tuple[int, ...], scales: tuple[int, ...], *, is_rows: bool
    ) -> tuple[int, ...] | None:
        """The elements that share a scale, by dimension; None for shapes that do not fit."""
        per_row = (*(1 for _ in shape[:-1]), max(*shape[-1:], 1))
        if is_rows:
            return per_row if scales == shape[:-1] else None
        if set(scales) <= {1}:  # one for all
            return tuple(max(length, 1) for length in shape)
        if scales in (shape[:-1], (*shape[:-1], 1)):
            return per_row
        block = self._config.get("weight_block_size") or self._block_structure() or (128, 128)
        blocks = (*(1 for _ in shape[:-2]), *block)
        if len(scales) != len(shape) or len(blocks) != len(shape):
            return None
        fits = all(
            -(-length // block) == count
            for length, block, count in zip(shape, blocks, scales, strict=True)
        )
        return blocks if fits else None

    def _block_structure(self) -> tuple[int, ...] | None:
        """The blocks of compressed-tensors' only group of weights."""
        groups = self._config.get("config_groups")
        found = [group.get("weights") or {} for group in groups.values()] if groups else []
        return found[0].get("block_structure") if len(found) == 1 else None


def _config_of(directory: Path) -> dict[str, Any]:
    """The `quantization_config` of a folder's config.json; {} if there is none."""
    try:
        config = json.loads((directory / "config.json").read_text())
    except (OSError, ValueError):
        return {}
    found = config if isinstance(config, dict) else {}
    said = found.get("quantization_config") or found.get("compression_config")
    if said is not None and not isinstance(said, dict):
        return {"quant_method": str(said)[:80]}
    return said or {}


def _refused_scales(name: str, got: str) -> CheckpointError:
    wanted = f"{name!r} in the files to be exact, or in 8 bits with scales"
    return CheckpointError(wanted, got, hint=HINT)
