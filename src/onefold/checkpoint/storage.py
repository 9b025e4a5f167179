"""Planners, a writer and a reader for `torch.distributed.checkpoint` (DCP).

torch plans pieces and reshards them. This file replaces DCP's defaults in four places: views of
flat buffers are written without a copy, rows are read to where they rest, no pickle runs code, and
every byte passes a checksum. DCP's own reader reads the files. See docs/adr/0007.
"""

from __future__ import annotations

import dataclasses
import io
import pickle
import warnings
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
from torch.distributed.checkpoint import planner as plans
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future
from torch.utils.serialization import config

from onefold.checkpoint.agreement import as_checkpoint_error, damage
from onefold.checkpoint.checked_files import BlockReader, BlockWriter, FileRecord
from onefold.checkpoint.directory import METADATA, Found
from onefold.errors import CheckpointError, Failure, as_agreed
from onefold.tier.host import no_garbage
from onefold.wire.collectives import Group

MARK = "onefold"
"""Marks a checkpoint of Onefold, in `StorageMeta.modules`: it must have a manifest."""

# writing


class WritePlanner(dcp.DefaultSavePlanner):
    """Plan the pieces that have elements, and return their tensors without a copy."""

    def create_local_plan(self) -> plans.SavePlan:
        plan = super().create_local_plan()
        items = [item for item in plan.items if not _is_empty_piece(item)]
        self.plan = dataclasses.replace(plan, items=items)
        return self.plan

    def resolve_data(self, write_item: plans.WriteItem) -> Tensor | io.BytesIO:
        data = super().resolve_data(write_item)
        return _with_own_storage(data.detach()) if isinstance(data, Tensor) else data


def _with_own_storage(tensor: Tensor) -> Tensor:
    """Return the same bytes as a tensor whose storage holds nothing else. Copies only over gaps.

    `torch.save` writes whole storages, and this one may be the flat buffer of a unit.
    """
    if tensor.device.type != "cpu" or tensor.untyped_storage().nbytes() == tensor.nbytes:
        return tensor
    if not tensor.is_contiguous():
        return tensor.contiguous()
    start = tensor.storage_offset() * tensor.itemsize
    own = tensor.untyped_storage()[start : start + tensor.nbytes]
    return torch.empty(0, dtype=tensor.dtype).set_(own, 0, tensor.shape, tensor.stride())


def _is_empty_piece(item: plans.WriteItem) -> bool:
    """Return True for a rank's empty piece of a tensor that has elements."""
    data = item.tensor_data
    if item.type != plans.WriteItemType.SHARD or data is None:
        return False
    return prod(data.chunk.sizes) == 0 and (prod(data.size) > 0 or any(data.chunk.offsets))


class RankFiles(filesystem.FileSystem):
    """The files that one rank writes into one folder. DCP's writer creates them."""

    def __init__(self, folder: Path, *, is_cached: bool) -> None:
        self.folder = folder
        self.is_cached = is_cached
        self.writers: list[BlockWriter] = []

    def create(self, name: str) -> BlockWriter:
        """Create one file."""
        self.writers.append(BlockWriter(self.folder / name, is_cached=self.is_cached))
        return self.writers[-1]

    @contextmanager
    def create_stream(self, path: Any, mode: str) -> Iterator[Any]:
        yield self.create(Path(path).name)

    def finish(self, *, verify: bool = False) -> dict[str, FileRecord]:
        """Wait for the disk. With `verify`, read every file back."""
        try:
            records = {writer.name: writer.finish() for writer in self.writers}
        finally:
            self.abandon()
        if verify:
            for name, record in records.items():
                # without reading ahead: no thread can start while the interpreter exits
                with BlockReader(self.folder / name, record) as reader:
                    reader.verify()
        return records

    def abandon(self) -> None:
        """Close all files without waiting for the disk."""
        for writer in self.writers:
            writer.abandon()


class Writer(dcp.FileSystemWriter):
    """Write one rank's pieces into `files`; `files.finish()` then waits for the disk."""

    def __init__(self, files: RankFiles, aliases: Mapping[str, str]) -> None:
        super().__init__(files.folder, sync_files=False)
        self.files = self.fs = files
        self._aliases = aliases

    def storage_meta(self) -> StorageMeta:
        return StorageMeta(save_id=self.save_id, modules=[MARK])

    def write_data(self, plan: plans.SavePlan, planner: Any) -> Any:
        try:  # every byte has a checksum already; this switch of torch holds for one thread
            with config.patch("save.compute_crc32", False):  # type: ignore[attr-defined]
                return super().write_data(plan, planner)
        except Exception:
            for writer in self.files.writers:
                if writer.failure is not None:
                    raise writer.failure from None
            raise

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Write `.metadata`, which lists a tied weight under all its names."""
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
        metadata.storage_data = {r.index: r.storage_data for r in (*written, *again)}
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
"""All that a `.metadata` refers to. Another reference is an attempt to run code."""


def _member(kind: type[Enum], name: str) -> Enum:
    """Stand in for `getattr`, with which some Pythons pickle a member of an enum."""
    if not (isinstance(kind, type) and issubclass(kind, Enum)):
        raise pickle.UnpicklingError(f"a reference to an attribute of {kind}")
    return kind[name]


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        is_dtype = module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)
        if (module, name) == ("builtins", "getattr"):
            return _member
        if (module, name) in _SAFE or is_dtype:
            return super().find_class(module, name)
        raise CheckpointError(
            f"{METADATA!r} to hold names, shapes and places",
            f"a reference to {module}.{name}, which loading does not call",
            hint="do not trust this checkpoint",
        )


def read_metadata(checkpoint: Found) -> Metadata:
    """Read names, shapes and pieces. Verified if there is a manifest; no code is run."""
    path, manifest = checkpoint.path / METADATA, checkpoint.manifest
    if manifest is not None:
        with BlockReader(path, manifest.files[METADATA]) as reader:
            data = reader.read(0, reader.nbytes)
    else:
        data = path.read_bytes()
    try:
        metadata = _Unpickler(io.BytesIO(data)).load()
        if not isinstance(metadata, Metadata):
            raise TypeError(f"a {type(metadata).__name__}")
    except CheckpointError:
        raise
    except Exception as error:
        raise CheckpointError(
            f"file {path.name!r} of {str(path.parent)!r} to be torch.distributed.checkpoint's",
            f"{type(error).__name__}: {error}",
            hint="it is damaged, or this is no checkpoint",
        ) from error
    if manifest is None and MARK in getattr(metadata.storage_meta, "modules", ()):
        raise CheckpointError(
            f"file 'manifest.json' in checkpoint {str(path.parent)!r}, which onefold has saved",
            "no such file",
            hint="the file was deleted, so nothing can be verified; load an earlier checkpoint",
        )
    return metadata


class ReadPlanner(dcp.DefaultLoadPlanner):
    """Plan by flat names. Objects are read as data, never as code."""

    def __init__(self) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)

    def load_bytes(self, read_item: plans.ReadItem, value: io.BytesIO) -> None:
        self.state_dict[read_item.dest_index.fqn] = read_object(value, read_item.dest_index.fqn)


def read_object(value: io.BytesIO, name: str) -> Any:
    """Read an object that `torch.save` wrote: tensors, numbers, strings and containers."""
    try:
        return torch.load(value, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        raise CheckpointError(
            f"{name!r} to hold tensors, numbers, strings and containers of them",
            str(error).splitlines()[0],
            hint="save plain values, for example an object's state_dict()",
        ) from error


class Reader(dcp.FileSystemReader):
    """Read this rank's pieces in file order, through the manifest's checksums."""

    def __init__(self, checkpoint: Found, metadata: Metadata) -> None:
        super().__init__(checkpoint.path)
        self._checkpoint = checkpoint
        self._metadata = metadata

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        return self._metadata

    def read_data(self, plan: plans.LoadPlan, planner: plans.LoadPlanner) -> Future[None]:
        manifest = self._checkpoint.manifest
        if manifest is None:
            return super().read_data(plan, planner)
        places = [(self.storage_data[item.storage_index], item) for item in plan.items]
        places.sort(key=lambda place: (place[0].relative_path, place[0].offset))
        for name, of_file in groupby(places, key=lambda place: place[0].relative_path):
            pieces = list(of_file)
            announced = [self._range(info, item) for info, item in pieces]
            path = self._checkpoint.path / name
            with BlockReader(path, manifest.files[name], announced) as reader:
                for info, item in pieces:
                    self._read(reader, info, item, planner)
        done: Future[None] = Future()
        done.set_result(None)
        return done

    def _range(self, info: Any, item: plans.ReadItem) -> tuple[int, int]:
        """Return the bytes of the file that hold the wanted rows, with room for archive headers."""
        end = info.offset + info.length
        saved = self._metadata.state_dict_metadata[item.storage_index.fqn]
        if not isinstance(saved, TensorStorageMetadata) or not item.lengths:
            return info.offset, end
        sizes = chunk_of(saved, item.storage_index).sizes
        first, num_rows = item.storage_offsets[0], item.lengths[0]
        if item.lengths[1:] != sizes[1:]:  # a box: the whole piece is read
            return info.offset, end
        row_nbytes = prod(sizes[1:]) * saved.properties.dtype.itemsize
        start = info.offset + first * row_nbytes
        return start, min(start + _HEAD_NBYTES + num_rows * row_nbytes, end)

    def _read(
        self, reader: BlockReader, info: Any, item: plans.ReadItem, planner: plans.LoadPlanner
    ) -> None:
        if item.type == plans.LoadItemType.BYTE_IO:
            planner.load_bytes(item, io.BytesIO(reader.read(info.offset, info.length)))
            return
        target = planner.resolve_tensor(item).detach()
        saved = self._metadata.state_dict_metadata[item.storage_index.fqn]
        assert isinstance(saved, TensorStorageMetadata), "a tensor is read from bytes"
        sizes, dtype = chunk_of(saved, item.storage_index).sizes, saved.properties.dtype
        if prod(item.lengths) == 0:
            return
        start = info.offset + data_offset(reader, info)
        if item.lengths[1:] != sizes[1:]:  # a box of a piece
            whole = torch.empty(sizes, dtype=dtype)
            reader.read_into(start, bytes_of(whole))
            for dim, first in enumerate(item.storage_offsets):
                whole = whole.narrow(dim, first, item.lengths[dim])
            target.copy_(whole)
            return
        if sizes:
            start += item.storage_offsets[0] * prod(sizes[1:]) * dtype.itemsize
        is_alike = target.dtype == dtype and target.device.type == "cpu"
        if is_alike and target.is_contiguous():
            reader.read_into(start, bytes_of(target))
            return
        part = torch.empty(tuple(item.lengths), dtype=dtype)
        reader.read_into(start, bytes_of(part))
        target.copy_(part)


def chunk_of(saved: TensorStorageMetadata, index: MetadataIndex) -> ChunkStorageMetadata:
    """Return the piece of a tensor that `index` names."""
    for chunk in saved.chunks:
        if index.offset is None or chunk.offsets == index.offset:
            return chunk
    raise CheckpointError(
        f"a piece of {index.fqn!r} at {index.offset}",
        f"pieces at {[list(chunk.offsets) for chunk in saved.chunks]}",
        hint="the checkpoint's metadata contradicts itself; load an earlier one",
    )


_ELEMENTS = b"archive/data/0"
"""The record with a tensor's elements, in the zip archive that `torch.save` writes."""

_HEADER_NBYTES, _HEAD_NBYTES = 30, 4096


def data_offset(reader: BlockReader, info: Any) -> int:
    """Return where the elements start in the archive of one tensor, behind a few small records.

    A record is a header (PKWARE APPNOTE 4.3.7), its name, padding and its bytes.
    """
    head = reader.read(info.offset, min(_HEAD_NBYTES, info.length))
    name = head.find(_ELEMENTS)
    header = name - _HEADER_NBYTES
    if header < 0 or head[header : header + 4] != b"PK\3\4":
        raise damage(
            f"a tensor at byte {info.offset} of file {reader.name!r}",
            "other bytes",
            hint="its metadata and its files are of different checkpoints; load an earlier one",
        )
    padding = int.from_bytes(head[header + 28 : header + 30], "little")
    return name + len(_ELEMENTS) + padding


def bytes_of(tensor: Tensor) -> memoryview:
    """Return the bytes of a contiguous CPU tensor, without a copy."""
    if tensor.numel() == 0:
        return memoryview(b"")
    return memoryview(cast("Any", tensor.detach().reshape(-1).view(torch.uint8).numpy()))


@contextmanager
def planning() -> Iterator[None]:
    """Suspend the garbage collector, and torch's warning about a missing process group.

    torch's planner makes thousands of small objects and no cycles. They start collections over
    everything the process holds (0.25 of 0.6 s for 300 parameters).
    """
    with no_garbage(), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is", UserWarning)
        yield


def first_failure(error: CheckpointException, group: Group) -> BaseException:
    """Return this rank's own error, or that of the first rank that failed as the others raise it.

    torch has every rank of a plan fail together.
    """
    rank, (cause, _) = min(error.failures.items())
    if group.rank in error.failures:
        return as_agreed(as_checkpoint_error(error.failures[group.rank][0]))
    return Failure.of(as_checkpoint_error(cause), rank, CheckpointError).error()
