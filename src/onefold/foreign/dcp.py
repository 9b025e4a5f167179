"""Folders of torch.distributed.checkpoint (DCP), and of Onefold's format 1, which is DCP's.

`.metadata` lists names, shapes and places. Each piece is a zip archive of `torch.save`.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from typing import Any

from onefold.checkpoint.checked_files import BlockReader, FileRecord
from onefold.checkpoint.listing import (
    Extents,
    Listing,
    ModuleNames,
    Piece,
    PieceFile,
    PieceStore,
    Place,
    Wanted,
)
from onefold.checkpoint.mosaics import strides_of
from onefold.errors import CheckpointError
from onefold.foreign.archives import HEAD_NBYTES, elements_of, read_strided
from onefold.foreign.arranging import arrange
from onefold.foreign.metadata import read_metadata
from onefold.foreign.unpickling import read_object

METADATA = ".metadata"
"""The file by which torch recognises a checkpoint."""


@dataclass(frozen=True, slots=True)
class DcpFormat:
    """Folders with a `.metadata`."""

    writer: str = "torch.distributed.checkpoint"

    def is_format_of(self, folder: Path) -> bool:
        """True if there is a `.metadata`."""
        return (folder / METADATA).exists()

    def open_listing(
        self, folder: Path, files: Mapping[str, FileRecord], *, is_verified: bool
    ) -> tuple[Listing, PieceStore]:
        """See `PeerFormat`."""
        what = f"file {METADATA!r} of {str(folder)!r} to be {self.writer}'s"
        if METADATA not in files:
            hint = "this is no checkpoint, or a part of one"
            raise CheckpointError(what, "no such file", hint=hint)
        with BlockReader(folder / METADATA, files[METADATA]) as reader:
            data = bytes(reader.read_checked(0, reader.nbytes))
        listing, is_ours = read_metadata(data, files, what)
        if is_ours and not is_verified:
            wanted = f"file 'manifest.json' in checkpoint {str(folder)!r}, which onefold has saved"
            hint = "the file was deleted, so nothing can be verified; load an earlier checkpoint"
            raise CheckpointError(wanted, "no such file", hint=hint)
        return listing, _DcpStore(folder, files)

    def arrange(
        self, listing: Listing, store: PieceStore, names: ModuleNames | None
    ) -> tuple[Listing, PieceStore]:
        """See `PeerFormat`."""
        return arrange(listing, store, names)


@dataclass(frozen=True, slots=True)
class _DcpStore:
    """See `PieceStore`."""

    folder: Path
    files: Mapping[str, FileRecord]

    @contextmanager
    def open_file(self, file: str, wanted: Sequence[Wanted]) -> Iterator[PieceFile]:
        ranges = list(map(_range_of, wanted))
        with BlockReader(self.folder / file, self.files[file], ranges) as reader:
            yield _DcpFile(reader)

    def read_object(self, listed: Place) -> Any:
        with BlockReader(self.folder / listed.file, self.files[listed.file]) as reader:
            name = f"an object at byte {listed.start} of {listed.file}"
            return read_object(bytes(reader.read_checked(listed.start, listed.length)), name)


@dataclass(frozen=True, slots=True)
class _DcpFile:
    """See `PieceFile`."""

    reader: BlockReader
    places: dict[Piece, tuple[int, Extents]] = field(default_factory=dict)

    def read_elements(self, wanted: Wanted, out: memoryview) -> None:
        piece, dtype, first, _ = wanted
        if piece not in self.places:
            self.places[piece] = elements_of(self.reader, piece, dtype)
        start, strides = self.places[piece]
        if strides == strides_of(piece.sizes):
            self.reader.read_into(start + first * dtype.itemsize, out)
        else:
            read_strided(self.reader, start, strides, wanted, out)


def _range_of(wanted: Wanted) -> tuple[int, int]:
    """Return the bytes of the file that hold elements, with room for the archive's headers."""
    start, stop = wanted.piece.place.range
    if wanted.numel == prod(wanted.piece.sizes):
        return start, stop
    start += wanted.first * wanted.dtype.itemsize
    return start, min(start + HEAD_NBYTES + wanted.numel * wanted.dtype.itemsize, stop)
