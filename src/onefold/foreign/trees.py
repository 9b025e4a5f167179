"""One tree of keys out of the files that another program has written side by side.

Each part is put at some keys: a file of torch.save, a folder of safetensors files or of DCP, a JSON
file. Tensors keep their places, so rows are read by byte range.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field, replace
from math import prod
from pathlib import Path
from typing import Any

from onefold.checkpoint.agreement import believing
from onefold.checkpoint.checked_files import BlockReader, FileRecord, nbytes_of
from onefold.checkpoint.listing import (
    MODEL,
    OFFSETS_KEY,
    PIECES_KEY,
    DictNumber,
    Extents,
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
from onefold.checkpoint.mosaics import strides_of
from onefold.checkpoint.safetensors import DTYPES, PretrainedFiles
from onefold.errors import CheckpointError
from onefold.foreign.archives import extent_of, read_strided
from onefold.foreign.arranging import Known
from onefold.foreign.torch_files import StoredShard, StoredTensor, Unread, read_archive

WRITER = "torch's HuggingFaceStorageWriter"


@dataclass(frozen=True, slots=True)
class StridedPlace(Place):
    """Bytes in which elements do not follow each other. `strides`: in elements."""

    strides: Extents


def piece_of(stored: StoredTensor, file: str, offsets: Extents) -> Piece:
    """Return a tensor of a file as a piece that begins at `offsets` of a larger one."""
    sizes, strides = stored.sizes, stored.strides
    length = extent_of(sizes, strides) * stored.dtype.itemsize
    is_rows = all(
        s == 1 or a == b for s, a, b in zip(sizes, strides, strides_of(sizes), strict=True)
    )
    if is_rows:
        return Piece(offsets, sizes, Place(file, stored.start, length))
    return Piece(offsets, sizes, StridedPlace(file, stored.start, length, strides))


@dataclass(slots=True)
class Tree:
    """Names, keys and places of a checkpoint of several parts; see `Listing` and `PieceStore`."""

    folder: Path
    tensors: dict[str, SavedTensor] = field(default_factory=dict)
    objects: dict[str, Any] = field(default_factory=dict)
    paths: dict[str, Keys] = field(default_factory=dict)
    aliases: dict[str, str] = field(default_factory=dict)
    stores: dict[str, PieceStore] = field(default_factory=dict)  # of folders inside

    @property
    def listing(self) -> Listing:
        return Listing(self.tensors, self.objects, self.paths, self.aliases)

    def add_archive(self, file: str, keys: Keys) -> None:
        """Add a file of torch.save."""
        self.add(keys, read_archive(self.folder / file), file)

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
            if name in listing.tensors:
                saved = listing.tensors[name]
                pieces = [_inside(piece, f"{inside}/{piece.place.file}") for piece in saved.pieces]
                self.put((*keys, *path), replace(saved, pieces=tuple(pieces)))
            else:
                self._name((*keys, *path), (inside, listing.objects[name]))

    def add_shards(self, keys: Keys) -> None:
        """Add safetensors files of torch's HuggingFaceStorageWriter, one a rank."""
        pieces = defaultdict[str, list[tuple[Extents, str, StoredTensor]]](list)
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
            self._join((*keys, name), shape, of)

    def add_rank_files(self, files: Sequence[str], keys: Keys) -> None:
        """Add one file a rank, in their order: shards are pieces of one tensor."""
        shards = defaultdict[Keys, list[tuple[Extents, str, StoredTensor]]](list)
        shapes: dict[Keys, Extents] = {}
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
            self._join(path, shapes[path], of)

    def add(self, keys: Keys, value: Any, file: str = "") -> None:
        """Add a value of a file: a tensor, a place of one, or what may hold some."""
        for path, leaf in _leaves(value, keys):
            self._leaf(path, leaf, file)

    def put(self, keys: Keys, saved: SavedTensor) -> None:
        """Add a tensor whose pieces cover it."""
        self.tensors[self._free(keys)] = saved

    def tie(self, shared: Mapping[str, str]) -> None:
        """Give tied weights their other names. Raises `ValueError` for a name of nothing."""
        for alias, name in shared.items():
            first = self.tensors.get(f"{MODEL}.{name}")
            if first is None or alias in shared.values():
                raise ValueError(f"{str(alias)[:80]!r} as another name of {str(name)[:80]!r}")
            self.put((MODEL, alias), first)
            self.aliases[alias] = name

    def _leaf(self, keys: Keys, leaf: Any, file: str) -> None:
        if isinstance(leaf, SavedTensor):
            self.put(keys, leaf)
        elif isinstance(leaf, StoredTensor):
            if extent_of(leaf.sizes, leaf.strides) < prod(leaf.sizes):
                self._name(keys, Unread("tensor whose elements share memory"))
            else:
                self._join(keys, leaf.sizes, [((0,) * len(leaf.sizes), file, leaf)])
        elif isinstance(leaf, StoredShard):
            wanted = f"whole tensors in {file!r}"
            hint = "load the folder, with the files of all ranks"
            raise CheckpointError(wanted, f"one rank's rows of {'.'.join(map(str, keys))!r}",
                                  hint=hint)  # fmt: skip
        else:
            self._name(keys, leaf if isinstance(leaf, Unread) else Known(leaf))

    def _join(
        self, keys: Keys, shape: Extents, of: Sequence[tuple[Extents, str, StoredTensor]]
    ) -> None:
        """Note a tensor, of pieces that cover it once. Ranks without rows have empty ones."""
        pieces = [piece_of(each, file, at) for at, file, each in of if prod(each.sizes)]
        dtypes = {stored.dtype for _, _, stored in of}
        if len(dtypes) > 1 or not tiles([(p.offsets, p.sizes) for p in pieces], shape):
            hint = "files of a rank are missing, or of another run"
            name = ".".join(map(str, keys))
            wanted = f"pieces that cover {name!r} of {list(shape)} once"
            raise CheckpointError(wanted, f"{len(of)} others", hint=hint)
        self.put(keys, SavedTensor(shape, dtypes.pop(), tuple(pieces)))

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
        record = FileRecord(nbytes_of(path), "")
        with BlockReader(path, record, list(map(_range_of, wanted))) as blocks:
            yield _TreeFile(blocks)

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
            yield from _leaves(item, (*keys, DictNumber(key) if type(key) is int else key))
    elif isinstance(value, list | tuple) and (_has_parts(value) or _has_dicts(value)):
        for index, item in enumerate(value):
            yield from _leaves(item, (*keys, index))
    else:
        is_odd = isinstance(value, dict | set) and _has_parts(value)
        yield keys, Unread(f"{type(value).__name__} of tensors") if is_odd else value


def _has_parts(value: Any) -> bool:
    """True if a value holds what is no plain value."""
    if isinstance(value, dict):
        return any(map(_has_parts, value.values())) or any(map(_has_parts, value))
    if isinstance(value, list | tuple | set):
        return any(map(_has_parts, value))
    return isinstance(value, StoredTensor | StoredShard | Unread)


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
class _TreeFile:
    """See `PieceFile`."""

    reader: BlockReader

    def read_elements(self, wanted: Wanted, out: memoryview) -> None:
        place = wanted.piece.place
        if isinstance(place, StridedPlace):
            read_strided(self.reader, place.start, place.strides, wanted, out)
        else:
            self.reader.read_into(_range_of(wanted)[0], out)


def _range_of(wanted: Wanted) -> tuple[int, int]:
    """Return the bytes of the file that are read for elements."""
    place = wanted.piece.place
    if isinstance(place, StridedPlace):
        return place.range
    start = place.start + wanted.first * wanted.dtype.itemsize
    return start, start + wanted.numel * wanted.dtype.itemsize


def file_records(folder: Path) -> dict[str, FileRecord]:
    """Return the files of a folder, without checksums."""
    return {p.name: FileRecord(p.stat().st_size, "") for p in folder.iterdir() if p.is_file()}
