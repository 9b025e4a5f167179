"""The elements of a tensor, inside the zip archive that `torch.save` wrote of it."""

from math import prod

import torch

from onefold.checkpoint.agreement import NOT_OF_BYTES, damage
from onefold.checkpoint.checked_files import BlockReader
from onefold.checkpoint.listing import Extents, Piece, Wanted
from onefold.checkpoint.safetensors import bytes_of
from onefold.foreign.metadata import sizes_of
from onefold.foreign.unpickling import read_pickle

_HEADER_NBYTES, HEAD_NBYTES = 30, 4096
_PICKLE, _ELEMENTS = b"archive/data.pkl", b"archive/data/0"
"""The records of a tensor: its description, and its elements. Small records lie between."""

STORAGES = {
    f"torch.{name}Storage": dtype
    for name, dtype in {
        "Double": torch.float64, "Float": torch.float32, "Half": torch.float16,
        "BFloat16": torch.bfloat16, "Long": torch.int64, "Int": torch.int32, "Short": torch.int16,
        "Char": torch.int8, "Byte": torch.uint8, "Bool": torch.bool,
        "ComplexDouble": torch.complex128, "ComplexFloat": torch.complex64,
    }.items()
}  # fmt: skip
_TENSOR_V2, _TENSOR_V3 = (f"torch._utils._rebuild_tensor_v{version}" for version in (2, 3))
_ARCHIVE_NAMES = {
    *STORAGES, _TENSOR_V2, _TENSOR_V3, "collections.OrderedDict", "torch.storage.UntypedStorage",
}  # fmt: skip


def elements_of(reader: BlockReader, piece: Piece, dtype: torch.dtype) -> tuple[int, Extents]:
    """Return where the elements of a piece start in its file, and their strides.

    A record is a header (PKWARE APPNOTE 4.3.7), its name, padding and its bytes. Raises `Damaged`
    unless the archive holds one tensor of this shape and dtype.
    """
    place = piece.place
    head = bytes(reader.read_checked(place.start, min(HEAD_NBYTES, place.length)))
    what = f"a tensor at byte {place.start} of file {reader.name!r}"
    hint = "its metadata and its files are of different checkpoints; load an earlier one"
    description, start = (_record(head, name) for name in (_PICKLE, _ELEMENTS))
    if description is None or start is None:
        raise damage(what, "other bytes", hint=hint)
    tensor = read_pickle(head[description:], _ARCHIVE_NAMES, what)
    try:
        storage, first, sizes, strides, *more = tensor.arguments
        _, kind, _, _, numel = storage.arguments
        saved = more[2] if tensor.kind == _TENSOR_V3 else STORAGES[kind.name]
        sizes, strides = sizes_of(sizes), sizes_of(strides)
        is_inside = first + extent_of(sizes, strides) <= numel
    except NOT_OF_BYTES:
        raise
    except Exception as error:
        raise damage(what, "another object", hint=hint) from error
    if sizes != piece.sizes or saved != dtype or not is_inside or len(strides) != len(sizes):
        got = f"one of shape {list(sizes)} and {saved}"
        raise damage(f"{what} of shape {list(piece.sizes)} and {dtype}", got, hint=hint)
    start += place.start + first * dtype.itemsize
    if (
        not 0 <= first <= numel
        or start + extent_of(sizes, strides) * dtype.itemsize > place.range[1]
    ):
        raise damage(what, f"{place.length} bytes", hint=hint)
    return start, strides


def _record(head: bytes, name: bytes) -> int | None:
    """Return where the bytes of a record start; None if there is none of that name."""
    found = head.find(name)
    header = found - _HEADER_NBYTES
    if header < 0 or head[header : header + 4] != b"PK\3\4":
        return None
    return found + len(name) + int.from_bytes(head[header + 28 : header + 30], "little")


def read_strided(
    reader: BlockReader, start: int, strides: Extents, wanted: Wanted, out: memoryview
) -> None:
    """Read elements of a piece that lie `strides` apart, from byte `start` of the piece on."""
    sizes, dtype = wanted.piece.sizes, wanted.dtype
    whole = torch.empty(extent_of(sizes, strides), dtype=dtype)
    reader.read_into(start, bytes_of(whole))
    elements = whole.as_strided(sizes, strides).reshape(-1)
    out[:] = bytes_of(elements[wanted.first : wanted.first + wanted.numel].contiguous())


def extent_of(sizes: Extents, strides: Extents) -> int:
    """Return the number of elements from the first to the last one."""
    if not prod(sizes):
        return 0
    return 1 + sum((size - 1) * stride for size, stride in zip(sizes, strides, strict=True))
