"""Write safetensors files by offset, and read boxes of their tensors.

A file is 8 bytes of header length, a JSON header, and the tensors one after the other. All offsets
follow from names, shapes and dtypes, so each rank writes its own rows to their place.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from onefold.checkpoint.agreement import NOT_OF_BYTES
from onefold.checkpoint.checked_files import BlockReader, nbytes_of
from onefold.errors import CheckpointError
from onefold.layout.cut import Box

CODES = {
    torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16",
    torch.int64: "I64", torch.int32: "I32", torch.int16: "I16", torch.int8: "I8",
    torch.uint64: "U64", torch.uint32: "U32", torch.uint16: "U16",
    torch.uint8: "U8", torch.bool: "BOOL", torch.complex64: "C64",
    torch.float8_e4m3fn: "F8_E4M3", torch.float8_e5m2: "F8_E5M2",
}  # fmt: skip
DTYPES = {code: dtype for dtype, code in CODES.items()}
SUFFIX = ".safetensors"
RANK_STEM = "rank-"
"""The files of `onefold.save` begin so."""
INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
MAX_SHARD_NBYTES = 5_000_000_000
"""Largest output file, unless one tensor is larger."""


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """A tensor to write."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        return prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True, slots=True)
class Output:
    """A file to write: its header, and the offset of each tensor."""

    name: str
    header: bytes
    offsets: dict[str, int]  # from the start of the file
    nbytes: int

    @staticmethod
    def with_header(
        name: str, entries: Iterable[TensorEntry], about: Mapping[str, str] | None = None
    ) -> Output:
        """Lay tensors out one after the other. `about`: more texts for the header."""
        listed: dict[str, object] = {"__metadata__": {"format": "pt", **(about or {})}}
        end = 0
        starts: dict[str, int] = {}
        for entry in entries:
            if entry.dtype not in CODES:
                what = f"{entry.name!r} to have a dtype that safetensors has"
                hint = "cast it, or register it as a buffer that is not persistent"
                raise CheckpointError(what, entry.dtype, hint=hint)
            starts[entry.name] = end
            listed[entry.name] = {
                "dtype": CODES[entry.dtype],
                "shape": list(entry.shape),
                "data_offsets": [end, end + entry.nbytes],
            }
            end += entry.nbytes
        text = json.dumps(listed, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)
        header = len(text).to_bytes(8, "little") + text
        offsets = {name: len(header) + start for name, start in starts.items()}
        return Output(name, header, offsets, len(header) + end)

    def create(self, folder: Path) -> None:
        """Create the file in full length, with its header."""
        with (folder / self.name).open("xb") as file:
            file.write(self.header)
            file.truncate(self.nbytes)


def header_at(reader: BlockReader) -> tuple[dict[str, Any], int]:
    """Return the header of a file that has checksums, and where its tensors begin."""
    head = reader.read_head()
    if 8 + int.from_bytes(head[:8], "little") != len(head):
        raise ValueError(f"a header of {len(head)} bytes that says another length")
    header = json.loads(head[8:])
    if not isinstance(header, dict):
        raise TypeError("a header that is no dict")
    return header, len(head)


def bytes_of(tensor: Tensor) -> memoryview:
    """Return the bytes of a contiguous CPU tensor, without a copy."""
    if tensor.numel() == 0:
        return memoryview(b"")
    flat: Any = tensor.detach().reshape(-1).view(torch.uint8).numpy()
    return memoryview(flat)


def plan_outputs(entries: Iterable[TensorEntry], max_nbytes: int) -> list[Output]:
    """Fill files with tensors in order, each file up to `max_nbytes`."""
    parts: list[list[TensorEntry]] = [[]]
    nbytes = 0
    for entry in entries:
        if parts[-1] and nbytes + entry.nbytes > max_nbytes:
            parts.append([])
            nbytes = 0
        parts[-1].append(entry)
        nbytes += entry.nbytes
    if len(parts) == 1:
        return [Output.with_header(SINGLE, parts[0])]
    names = [f"model-{i:05d}-of-{len(parts):05d}.safetensors" for i in range(1, len(parts) + 1)]
    return [Output.with_header(name, part) for name, part in zip(names, parts, strict=True)]


def index_of(outputs: list[Output]) -> str:
    """Return the JSON that names each tensor's file."""
    places = {name: output.name for output in outputs for name in output.offsets}
    total = sum(output.nbytes - len(output.header) for output in outputs)
    return json.dumps({"metadata": {"total_size": total}, "weight_map": places}, indent=2) + "\n"


class OffsetWriter:
    """Write bytes of tensors into the files of one folder. Use it as a context manager."""

    def __init__(self, folder: Path, outputs: list[Output]) -> None:
        self._folder = folder
        self._places = {
            n: (output.name, at) for output in outputs for n, at in output.offsets.items()
        }
        self._files: dict[str, int] = {}

    def write_at(self, name: str, start: int, data: memoryview) -> None:
        """Write `data` from byte `start` of the tensor `name`."""
        file, offset = self._places[name]
        if file not in self._files:
            self._files[file] = os.open(self._folder / file, os.O_WRONLY)
        done = 0
        while done < len(data):
            done += os.pwrite(self._files[file], data[done:], offset + start + done)

    def flush_to_disk(self) -> None:
        """Wait until the disk has everything."""
        for fd in self._files.values():
            os.fsync(fd)

    def __enter__(self) -> OffsetWriter:
        return self

    def __exit__(self, *_: object) -> None:
        for fd in self._files.values():
            with suppress(OSError):
                os.close(fd)


class PretrainedFiles:
    """Read boxes of the tensors in a folder of safetensors files."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self.places = dict(_places_in(directory))
        self._open: dict[str, safe_open] = {}
        self._headers: dict[Path, tuple[int, dict[str, Any]]] = {}  # and where the tensors begin

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self._slice(name).get_shape())

    def code(self, name: str) -> str:
        """Return the dtype of a tensor, as the format writes it."""
        return str(self._slice(name).get_dtype())

    def box(self, name: str, box: Box) -> Tensor:
        """Return a box of a tensor, or all of a 0-dim one."""
        values = self._slice(name)
        if not values.get_shape():
            return self._file(name).get_tensor(name)
        offsets, sizes = box
        index = tuple(slice(first, first + n) for first, n in zip(offsets, sizes, strict=True))
        return values[index]

    def whole(self, name: str) -> Tensor:
        """Return all of a tensor."""
        with _reading(self._directory / self.places[name]):
            return self._file(name).get_tensor(name)

    def where(self, name: str) -> tuple[Path, int, str]:
        """Return the file of a tensor, the offset of its first byte there, and its dtype's name."""
        path = self._directory / self.places[name]
        if path not in self._headers:
            self._file(name)  # looks at the header
            with path.open("rb") as file:
                length = int.from_bytes(file.read(8), "little")
                self._headers[path] = 8 + length, json.loads(file.read(length))
        start, header = self._headers[path]
        entry = header[name]
        code: str = entry["dtype"]
        name = str(DTYPES.get(code, code)).removeprefix("torch.")
        return path, start + entry["data_offsets"][0], name

    def _file(self, name: str) -> safe_open:
        file = self.places[name]
        if file not in self._open:
            self._open[file] = _opened(self._directory / file)
        return self._open[file]

    def _slice(self, name: str) -> Any:
        file = self._file(name)
        with _reading(self._directory / self.places[name]):
            return file.get_slice(name)


def _indexed(index: Path) -> dict[str, str]:
    """The file of each tensor, by an index."""
    try:
        nbytes_of(index)
        places: dict[str, str] = dict(json.loads(index.read_text())["weight_map"])
        if outside := [
            file for file in places.values() if file != os.path.basename(file) or "\0" in file
        ]:
            raise ValueError(f"a file outside of the folder: {outside[0][:80]!r}")
    except NOT_OF_BYTES:
        raise
    except Exception as error:
        got = f"an {INDEX} that cannot be read: {str(error)[:200]}"
        raise _not_pretrained(index.parent, got) from error
    return places


def _places_in(directory: Path) -> Iterator[tuple[str, str]]:
    """Yield (tensor, file) for each tensor that the folder's index names, or its files hold."""
    if directory.is_file():
        raise _not_pretrained(directory, "a file")
    index = directory / INDEX
    if index.exists():
        places = _indexed(index)
        for file in set(places.values()):
            if not (directory / file).exists():
                raise _not_pretrained(directory, f"no {file}, which {INDEX} names")
        yield from places.items()
        return
    paths = sorted(directory.glob("*.safetensors")) if directory.is_dir() else []
    if not paths:
        raise _not_pretrained(directory, "none")
    if any(file.name.startswith(RANK_STEM) for file in paths):
        got = "a checkpoint of onefold.save, which onefold.load reads"
        raise _not_pretrained(directory, got)
    for file in paths:
        for name in _opened(file).keys():  # noqa: SIM118 - not a dict
            yield name, file.name


def _opened(path: Path) -> safe_open:
    with _reading(path):
        nbytes_of(path)
        return safe_open(path, framework="pt")


@contextmanager
def _reading(path: Path) -> Iterator[None]:
    try:
        yield
    except NOT_OF_BYTES:
        raise
    except Exception as error:  # the class of safetensors' own error cannot be imported
        wanted = f"file {path.name!r} of {str(path.parent)!r} to be in the safetensors format"
        raise CheckpointError(wanted, str(error)[:200], hint="download or save it again") from error


def _not_pretrained(directory: Path, got: str) -> CheckpointError:
    hint = "pass a folder that onefold.save_pretrained or transformers has saved"
    return CheckpointError(f"safetensors files in {str(directory)!r}", got, hint=hint)
