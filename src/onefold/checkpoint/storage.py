"""`torch.distributed.checkpoint`'s seams, filled: planners that copy nothing, files with checksums.

Plans, placement of pieces and resharding are torch's. Ours are what its defaults leave open: views
of flat buffers are written from where they lie, own pieces are read to where they rest, no pickle
runs code, every byte passes a checksum. What is written is what torch's own reader reads.
"""

from __future__ import annotations

import dataclasses
import io
import pickle
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from enum import Enum
from itertools import groupby
from math import prod
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint import filesystem
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import (
    LoadItemType,
    LoadPlan,
    LoadPlanner,
    ReadItem,
    SavePlan,
    WriteItem,
    WriteItemType,
)
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future
from torch.utils.serialization import config

from onefold.checkpoint.blocks import BlockReader, Damaged, Files
from onefold.checkpoint.directory import METADATA
from onefold.checkpoint.manifest import Manifest
from onefold.errors import CheckpointError, expected

MARK = "onefold"
"""In `StorageMeta.modules` of a checkpoint of ours, which must have a manifest."""

# writing


class WritePlanner(dcp.DefaultSavePlanner):
    """Plans the pieces that have elements, and hands them out without copying."""

    def create_local_plan(self) -> SavePlan:
        plan = super().create_local_plan()
        items = [item for item in plan.items if not _is_empty_piece(item)]
        self.plan = dataclasses.replace(plan, items=items)
        return self.plan

    def resolve_data(self, write_item: WriteItem) -> Tensor | io.BytesIO:
        data = super().resolve_data(write_item)
        return lying_alone(data.detach()) if isinstance(data, Tensor) else data


def lying_alone(tensor: Tensor) -> Tensor:
    """The same bytes as a tensor whose storage has no others; a copy only if they have gaps."""
    if tensor.device.type != "cpu" or tensor.untyped_storage().nbytes() == tensor.nbytes:
        return tensor
    if not tensor.is_contiguous():
        return tensor.contiguous()
    start = tensor.storage_offset() * tensor.itemsize
    own = tensor.untyped_storage()[start : start + tensor.nbytes]
    return torch.empty(0, dtype=tensor.dtype).set_(own, 0, tensor.shape, tensor.stride())


def _is_empty_piece(item: WriteItem) -> bool:
    """True for a rank's piece without elements of a tensor that has some."""
    data = item.tensor_data
    if item.type != WriteItemType.SHARD or data is None:
        return False
    return prod(data.chunk.sizes) == 0 and (prod(data.size) > 0 or any(data.chunk.offsets))


class _Streams(filesystem.FileSystem):
    """Creates the files of one rank as streams that note their checksums."""

    def __init__(self, files: Files) -> None:
        self.files = files

    @contextmanager
    def create_stream(self, path: Any, mode: str) -> Iterator[Any]:
        yield self.files.create(Path(path).name)


class Writer(dcp.FileSystemWriter):
    """Writes one rank's pieces; `files.finish()` afterwards waits for the disk."""

    def __init__(self, folder: Path, aliases: Mapping[str, str], *, is_cached: bool) -> None:
        super().__init__(folder, sync_files=False)
        self.files = Files(folder, is_cached)
        self.fs = _Streams(self.files)
        self._aliases = aliases

    def storage_meta(self) -> StorageMeta:
        return StorageMeta(save_id=self.save_id, modules=[MARK])

    def write_data(self, plan: SavePlan, planner: Any) -> Any:
        try:  # our checksums cover every byte; torch's switch for those in archives is a thread's
            with config.patch("save.compute_crc32", False):  # type: ignore[attr-defined]
                return super().write_data(plan, planner)
        except Exception:
            for writer in self.files.writers:
                if writer.failure is not None:
                    raise writer.failure from None
            raise

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Write `.metadata`; a tied weight goes by all its names, and lies there once."""
        written = [result for of_rank in results for result in of_rank]
        again = []
        for alias, name in self._aliases.items():
            metadata.state_dict_metadata[alias] = metadata.state_dict_metadata[name]
            if metadata.planner_data is not None:
                metadata.planner_data[alias] = tuple(alias.split(".", 1))
            again += [
                dataclasses.replace(result, index=dataclasses.replace(result.index, fqn=alias))
                for result in written
                if result.index.fqn == name
            ]
        metadata.version = filesystem.CURRENT_DCP_VERSION
        metadata.storage_data = {each.index: each.storage_data for each in [*written, *again]}
        metadata.storage_meta = self.storage_meta()
        pickle.dump(metadata, self.files.create(METADATA))


# reading

_MODULES = "torch.distributed.checkpoint"
_SAFE = {
    (f"{_MODULES}.metadata", name)
    for name in (
        "BytesStorageMetadata", "ChunkStorageMetadata", "Metadata", "MetadataIndex", "StorageMeta",
        "TensorProperties", "TensorStorageMetadata", "_MEM_FORMAT_ENCODING",
    )
} | {
    (f"{_MODULES}.filesystem", "_StorageInfo"),
    ("torch", "Size"), ("torch", "device"), ("torch.serialization", "_get_layout"),
    ("collections", "OrderedDict"), ("builtins", "set"),
    ("pathlib", "PosixPath"), ("pathlib", "PurePosixPath"),
}  # fmt: skip
"""What a `.metadata` consists of; anything else in one is an attempt to run code."""


def _member(kind: type[Enum], name: str) -> Enum:
    """`getattr` of an enum's member, and of nothing else."""
    if not (isinstance(kind, type) and issubclass(kind, Enum)):
        raise pickle.UnpicklingError(f"a reference to an attribute of {kind}")
    return kind[name]


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        is_dtype = module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)
        if (module, name) == ("builtins", "getattr"):  # by which some Pythons store enum members
            return _member
        if (module, name) in _SAFE or is_dtype:
            return super().find_class(module, name)
        raise CheckpointError(
            expected(
                f"{METADATA!r} to hold names, shapes and places",
                f"a reference to {module}.{name}, which loading will not call",
                hint="do not trust this checkpoint",
            )
        )


def read_metadata(folder: Path, manifest: Manifest | None) -> Metadata:
    """Names, shapes and pieces; verified where there is a manifest, and never run as code."""
    path = folder / METADATA
    if manifest is not None:
        with BlockReader(path, manifest.files[METADATA]) as reader:
            data = reader.read()
    else:
        data = path.read_bytes()
    try:
        found = _Unpickler(io.BytesIO(data)).load()
    except CheckpointError:
        raise
    except Exception as error:
        raise _not_metadata(path, f"{type(error).__name__}: {error}") from error
    if not isinstance(found, Metadata):
        raise _not_metadata(path, f"a {type(found).__name__}")
    if manifest is None and MARK in getattr(found.storage_meta, "modules", ()):
        raise CheckpointError(
            expected(
                f"file 'manifest.json' in checkpoint {str(folder)!r}",
                "none, though onefold has saved it",
                hint="the file was deleted, so nothing can be verified; load an earlier checkpoint",
            )
        )
    return found


def _not_metadata(path: Path, got: str) -> CheckpointError:
    return CheckpointError(
        expected(
            f"file {path.name!r} of {str(path.parent)!r} to be torch.distributed.checkpoint's",
            got,
            hint="it is damaged, or this is no checkpoint",
        )
    )


class ReadPlanner(dcp.DefaultLoadPlanner):
    """Plans by flat names; objects are read as data, never as code."""

    def __init__(self) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        self.state_dict[read_item.dest_index.fqn] = read_object(value, read_item.dest_index.fqn)


def read_object(value: io.BytesIO, name: str) -> Any:
    """An object that was saved with `torch.save`: tensors, numbers, strings and containers."""
    try:
        return torch.load(value, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        raise CheckpointError(
            expected(
                f"{name!r} to hold tensors, numbers, strings and containers of them",
                str(error).splitlines()[0],
                hint="save plain values, for example an object's state_dict()",
            )
        ) from error


class Reader(dcp.FileSystemReader):
    """Reads own pieces, in the order in which they lie, through the manifest's checksums."""

    def __init__(self, folder: Path, manifest: Manifest | None, metadata: Metadata) -> None:
        super().__init__(folder)
        self._folder = folder
        self._manifest = manifest
        self._metadata = metadata

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        return self._metadata

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        if self._manifest is None:
            return super().read_data(plan, planner)
        items = sorted(((self.storage_data[i.storage_index], i) for i in plan.items), key=_place)
        for name, of_file in groupby(items, key=lambda each: each[0].relative_path):
            record = self._manifest.files[name]
            pieces = list(of_file)
            announced = [self._stretch(info, item) for info, item in pieces]
            with BlockReader(self._folder / name, record, announced) as stream:
                for info, item in pieces:
                    self._read(stream, info, item, planner)
        done: Future[None] = Future()
        done.set_result(None)
        return done

    def _stretch(self, info: Any, item: ReadItem) -> tuple[int, int]:
        """Where in its file a piece's wanted rows lie, give or take the archive's small records."""
        found = self._metadata.state_dict_metadata[item.storage_index.fqn]
        if not isinstance(found, TensorStorageMetadata) or not item.lengths:
            return info.offset, info.offset + info.length
        sizes = chunk_of(found, item.storage_index).sizes
        if item.lengths[1:] != sizes[1:]:  # a box is read out of the whole piece
            return info.offset, info.offset + info.length
        row_nbytes = prod(sizes[1:]) * found.properties.dtype.itemsize
        start = info.offset + item.storage_offsets[0] * row_nbytes
        stop = start + _HEAD_NBYTES + item.lengths[0] * row_nbytes
        end = info.offset + info.length
        return (start if item.storage_offsets[0] else info.offset), min(stop, end)

    def _read(self, stream: BlockReader, info: Any, item: ReadItem, planner: LoadPlanner) -> None:
        if item.type == LoadItemType.BYTE_IO:
            stream.seek(info.offset)
            planner.load_bytes(item, io.BytesIO(stream.read(info.length)))
            return
        target = planner.resolve_tensor(item).detach()
        found = self._metadata.state_dict_metadata[item.storage_index.fqn]
        assert isinstance(found, TensorStorageMetadata), "a tensor is read from bytes"
        sizes = chunk_of(found, item.storage_index).sizes
        if prod(item.lengths) == 0:
            return
        start = info.offset + data_offset(stream, info)
        is_rows = item.lengths[1:] == sizes[1:]
        if not is_rows:
            whole = torch.empty(sizes, dtype=found.properties.dtype)
            _read_into(stream, start, whole)
            window = tuple(
                slice(offset, offset + length)
                for offset, length in zip(item.storage_offsets, item.lengths, strict=True)
            )
            target.copy_(whole[window])
            return
        row_nbytes = prod(sizes[1:]) * found.properties.dtype.itemsize
        start += (item.storage_offsets[0] if sizes else 0) * row_nbytes
        is_alike = target.dtype == found.properties.dtype and target.device.type == "cpu"
        if is_alike and target.is_contiguous():
            _read_into(stream, start, target)
            return
        part = torch.empty(tuple(item.lengths), dtype=found.properties.dtype)
        _read_into(stream, start, part)
        target.copy_(part)


def _place(each: tuple[Any, ReadItem]) -> tuple[str, int]:
    return each[0].relative_path, each[0].offset


def chunk_of(found: TensorStorageMetadata, index: MetadataIndex) -> ChunkStorageMetadata:
    """The piece of a tensor that `index` names."""
    for chunk in found.chunks:
        if index.offset is None or chunk.offsets == index.offset:
            return chunk
    raise CheckpointError(
        expected(
            f"a piece of {index.fqn!r} at {index.offset}",
            f"pieces at {[list(chunk.offsets) for chunk in found.chunks]}",
            hint="the checkpoint's metadata contradicts itself; load an earlier one",
        )
    )


_ELEMENTS = b"archive/data/0"
"""The record of a zip archive in which `torch.save` to a stream puts a tensor's elements."""

_HEADER_NBYTES, _HEAD_NBYTES = 30, 4096


def data_offset(stream: BlockReader, info: Any) -> int:
    """Where the elements start in what `torch.save` made of one tensor: behind a few small records.

    A record is a header (PKWARE APPNOTE 4.3.7), its name, padding and its bytes.
    """
    stream.seek(info.offset)
    head = stream.read(min(_HEAD_NBYTES, info.length))
    name = head.find(_ELEMENTS)
    header = name - _HEADER_NBYTES
    if header < 0 or head[header : header + 4] != b"PK\3\4":
        raise Damaged(
            expected(
                f"a tensor at byte {info.offset} of file {stream.name!r}",
                "something else",
                hint="its metadata and its files are of different checkpoints; load an earlier one",
            )
        )
    padding = int.from_bytes(head[header + 28 : header + 30], "little")
    return name + len(_ELEMENTS) + padding


def _read_into(stream: BlockReader, offset: int, tensor: Tensor) -> None:
    """Fill a contiguous CPU tensor with its bytes."""
    stream.read_at(offset, bytes_of(tensor))


def bytes_of(tensor: Tensor) -> memoryview:
    """The bytes of a contiguous CPU tensor, where they lie."""
    if tensor.numel() == 0:
        return memoryview(b"")
    return memoryview(cast("Any", tensor.detach().reshape(-1).view(torch.uint8).numpy()))
