"""One tree of keys out of the files that another program has written side by side.

Each part is put at some keys: a file of torch.save, a folder of safetensors files or of DCP, a JSON
file. Tensors keep their places, so rows are read by byte range.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field, replace
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from onefold.checkpoint.agreement import believing
from onefold.checkpoint.checked_files import FileRecord
from onefold.checkpoint.listing import (
    OFFSETS_KEY,
    PIECES_KEY,
    Keys,
    Listing,
    Piece,
    PieceFile,
    PieceStore,
    Place,
    SavedTensor,
    Wanted,
    extents,
    tiles,
)
from onefold.checkpoint.safetensors import DTYPES, PretrainedFiles, bytes_of
from onefold.errors import CheckpointError
from onefold.foreign.archives import extent_of, strides_of
from onefold.foreign.arranging import Known
from onefold.foreign.torch_files import StoredShard, StoredTensor, Unread, read_archive

WRITER = "torch's HuggingFaceStorageWriter"


@dataclass(slots=True)
class Tree:
    """Names, keys and places of a checkpoint of several parts; see `Listing` and `PieceStore`."""

    folder: Path
    tensors: dict[str, SavedTensor] = field(default_factory=dict)
    objects: dict[str, Any] = field(default_factory=dict)
    paths: dict[str, Keys] = field(default_factory=dict)
    stored: dict[tuple[str, int, tuple[int, ...]], StoredTensor] = field(default_factory=dict)
    stores: dict[str, PieceStore] = field(default_factory=dict)  # of folders inside

    @property
    def listing(self) -> Listing:
        return Listing(self.tensors, self.objects, self.paths)

    def add_archive(self, file: str, keys: Keys) -> None:
        """Add a file of torch.save."""
        self._add(read_archive(self.folder / file), keys, file)

    def add_json(self, file: str, keys: Keys) -> None:
        """Add a JSON file, as one object."""
        with believing(f"file {file!r} to be JSON"):
            self._name(keys, Known(json.loads((self.folder / file).read_text())))

    def add_safetensors(self, keys: Keys) -> None:
        """Add the safetensors files of the folder."""
        files = PretrainedFiles(self.folder)
        for name in files.places:
            path, start, _ = files.where(name)
            sizes, dtype = files.shape(name), DTYPES[files.code(name)]
            stored = StoredTensor(dtype, sizes, strides_of(sizes), start)
            self._leaf((*keys, name), stored, path.name)

    def add_folder(self, inside: str, listing: Listing, store: PieceStore, keys: Keys) -> None:
        """Add a folder that another reader has listed."""
        self.stores[inside] = store
        for name, path in listing.paths.items():
            new = self._free((*keys, *path))
            if name in listing.tensors:
                saved = listing.tensors[name]
                moved = (
                    replace(p, place=replace(p.place, file=f"{inside}/{p.place.file}"))
                    for p in saved.pieces
                )
                self.tensors[new] = replace(saved, pieces=tuple(moved))
            else:
                self.objects[new] = (inside, listing.objects[name])

    def add_shards(self, keys: Keys) -> None:
        """Add safetensors files of torch's HuggingFaceStorageWriter, one a rank."""
        pieces = defaultdict[str, list[tuple[tuple[int, ...], str, StoredTensor]]](list)
        for path in sorted(self.folder.glob("*.safetensors")):
            with believing(f"file {path.name!r} to be one of {WRITER}"):
                nbytes = path.stat().st_size
                with path.open("rb") as file:
                    length = int.from_bytes(file.read(8), "little")
                    header = json.loads(file.read(min(length, nbytes)))
                about = json.loads(header.pop("__metadata__")[PIECES_KEY])
                for name, entry in header.items():
                    sizes, dtype = extents(entry["shape"]), DTYPES[entry["dtype"]]
                    start, end = extents(entry["data_offsets"])
                    if end - start != prod(sizes) * dtype.itemsize or 8 + length + end > nbytes:
                        raise ValueError(f"bytes {start} to {end} of {name[:80]!r}")
                    stored = StoredTensor(dtype, sizes, strides_of(sizes), 8 + length + start)
                    offsets = extents(about[name][OFFSETS_KEY])
                    pieces[name].append((offsets, path.name, stored))
        for name, of in pieces.items():
            ends = [tuple(map(sum, zip(at, each.sizes, strict=True))) for at, _, each in of]
            shape = tuple(map(max, zip(*ends, strict=True)))
            self._pieces((*keys, name), shape, of)

    def add_rank_files(self, files: Sequence[str], keys: Keys) -> None:
        """Add one file a rank, in their order: shards are pieces of one tensor."""
        shards = defaultdict[Keys, list[tuple[tuple[int, ...], str, StoredTensor]]](list)
        shapes: dict[Keys, tuple[int, ...]] = {}
        for rank, file in enumerate(files):
            for path, leaf in _leaves(read_archive(self.folder / file), keys):
                if not isinstance(leaf, StoredShard):
                    if rank == 0:
                        self._leaf(path, leaf, file)
                elif leaf.dim is not None or rank == 0:
                    shapes[path] = leaf.shape
                    offsets = [0] * len(leaf.shape)
                    if leaf.dim is not None:
                        rows = leaf.shape[leaf.dim]
                        offsets[leaf.dim] = min(rows, rank * -(-rows // len(files)))
                    shards[path].append((tuple(offsets), file, leaf.local))
        for path, of in shards.items():
            self._pieces(path, shapes[path], of)

    def _add(self, value: Any, keys: Keys, file: str) -> None:
        for path, leaf in _leaves(value, keys):
            self._leaf(path, leaf, file)

    def _leaf(self, keys: Keys, leaf: Any, file: str) -> None:
        if isinstance(leaf, StoredTensor):
            self._pieces(keys, leaf.sizes, [((0,) * len(leaf.sizes), file, leaf)])
        elif isinstance(leaf, StoredShard):
            wanted = f"whole tensors in {file!r}"
            hint = "load the folder, with the files of all ranks"
            raise CheckpointError(wanted, f"one rank's rows of {'.'.join(map(str, keys))!r}",
                                  hint=hint)  # fmt: skip
        else:
            self._name(keys, leaf if isinstance(leaf, Unread) else Known(leaf))

    def _pieces(
        self, keys: Keys, shape: tuple[int, ...],
        of: Sequence[tuple[tuple[int, ...], str, StoredTensor]],
    ) -> None:  # fmt: skip
        """Note a tensor, of pieces that cover it once."""
        name = self._free(keys)
        dtypes = {stored.dtype for _, _, stored in of}
        if len(dtypes) > 1 or not tiles([(at, each.sizes) for at, _, each in of], shape):
            hint = "files of a rank are missing, or of another run"
            wanted = f"pieces that cover {name!r} of {list(shape)} once"
            raise CheckpointError(wanted, f"{len(of)} others", hint=hint)
        pieces = []
        for offsets, file, stored in of:
            extent = extent_of(stored.sizes, stored.strides) * stored.dtype.itemsize
            if extent:
                pieces.append(Piece(offsets, stored.sizes, Place(file, stored.start, extent)))
                self.stored[file, stored.start, stored.sizes] = stored
        self.tensors[name] = SavedTensor(shape, dtypes.pop(), tuple(pieces))

    def _name(self, keys: Keys, value: Any) -> None:
        self.objects[self._free(keys)] = value

    def _free(self, keys: Keys) -> str:
        """Return a name for keys that no other keys have."""
        name = ".".join(map(str, keys))
        if name in self.paths:
            raise CheckpointError("keys that differ in a checkpoint", f"{name[:80]!r} twice",
                                  hint="download or save it again")  # fmt: skip
        self.paths[name] = keys
        return name

    # reading

    @contextmanager
    def open_file(self, file: str, wanted: Sequence[Wanted]) -> Iterator[PieceFile]:
        """See `PieceStore`."""
        inside, _, rest = file.rpartition("/")
        if inside in self.stores:
            own = [w._replace(piece=_inside(w.piece, rest)) for w in wanted]
            opened: AbstractContextManager[PieceFile] = self.stores[inside].open_file(rest, own)
            with opened as reader:
                yield _Inside(reader, rest)
            return
        path = self.folder / file
        nbytes = path.stat().st_size
        mapped = torch.UntypedStorage.from_file(str(path), shared=False, nbytes=nbytes)
        yield _Mapped(mapped, self.stored, file)

    def read_object(self, listed: Any) -> Any:
        """See `PieceStore`."""
        if isinstance(listed, Known):
            return listed.value
        if isinstance(listed, Unread):
            hint = "load the file with torch.load, if you trust it"
            raise CheckpointError("plain values and tensors", f"a {listed.kind}", hint=hint)
        inside, token = listed
        return self.stores[inside].read_object(token)


def _leaves(value: Any, keys: Keys) -> Iterator[tuple[Keys, Any]]:
    """Yield tensors and dicts one by one, and anything else as one object."""
    if isinstance(value, dict) and value and all(type(key) in (str, int) for key in value):
        for key, item in value.items():
            yield from _leaves(item, (*keys, key))
    elif isinstance(value, list | tuple) and (_has_tensors(value) or _has_dicts(value)):
        for index, item in enumerate(value):
            yield from _leaves(item, (*keys, index))
    else:
        yield keys, value


def _has_tensors(value: Any) -> bool:
    if isinstance(value, dict):
        return any(map(_has_tensors, value.values()))
    if isinstance(value, list | tuple):
        return any(map(_has_tensors, value))
    return isinstance(value, StoredTensor | StoredShard)


def _has_dicts(value: list[Any] | tuple[Any, ...]) -> bool:
    return bool(value) and all(isinstance(item, dict) for item in value)


def _inside(piece: Piece, file: str) -> Piece:
    return replace(piece, place=replace(piece.place, file=file))


@dataclass(frozen=True, slots=True)
class _Inside:
    """A file of a folder inside; see `PieceFile`."""

    reader: PieceFile
    file: str

    def read_elements(self, wanted: Wanted, out: memoryview) -> None:
        self.reader.read_elements(wanted._replace(piece=_inside(wanted.piece, self.file)), out)


@dataclass(frozen=True, slots=True)
class _Mapped:
    """A file whose pages are read as they are used; see `PieceFile`."""

    storage: Any
    stored: dict[tuple[str, int, tuple[int, ...]], StoredTensor]
    file: str

    def read_elements(self, wanted: Wanted, out: memoryview) -> None:
        piece, dtype, first, numel = wanted
        stored = self.stored[self.file, piece.place.start, piece.sizes]
        flat = torch.empty(0, dtype=torch.uint8).set_(self.storage)
        if stored.strides == strides_of(stored.sizes):
            start = stored.start + first * dtype.itemsize
            out[:] = bytes_of(flat[start : start + numel * dtype.itemsize])
            return
        extent = extent_of(stored.sizes, stored.strides) * dtype.itemsize
        own = flat[stored.start : stored.start + extent].clone().view(dtype)
        elements: Tensor = own.as_strided(stored.sizes, stored.strides).reshape(-1)
        out[:] = bytes_of(elements[first : first + numel].contiguous())


def file_records(folder: Path) -> dict[str, FileRecord]:
    """Return the files of a folder, without checksums."""
    return {p.name: FileRecord(p.stat().st_size, "") for p in folder.iterdir() if p.is_file()}
