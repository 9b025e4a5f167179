"""Write the two files of one rank: a header and the bytes of tensors as they rest, and JSON."""

import json
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor

from onefold.checkpoint.checked_files import BlockReader, BlockWriter, FileRecord
from onefold.checkpoint.contents import RankState
from onefold.checkpoint.held import Held
from onefold.checkpoint.listing import (
    ALIASES,
    OBJECTS,
    OFFSETS_KEY,
    PATHS,
    PIECES_KEY,
    RANK,
    RAW_DTYPES,
    SHAPE_KEY,
    path_of,
)
from onefold.checkpoint.safetensors import CODES, RANK_STEM, SUFFIX, Output, TensorEntry, bytes_of

PART_NBYTES = 16 << 20
"""The most bytes of a tensor on a device that are copied to memory at a time."""


class RankFiles:
    """The files that one rank writes into one folder."""

    def __init__(self, folder: Path, *, is_cached: bool) -> None:
        self.folder = folder
        self.is_cached = is_cached
        self.writers: list[BlockWriter] = []

    def write_files(self, state: RankState) -> None:
        """Write all that this rank saves. Tensors are copied only where they are not in memory."""
        stem = f"{RANK_STEM}{state.rank:05d}"
        tensors = [held for held in state.held if isinstance(held.value, Tensor)]
        # wide elements first, so each tensor begins at a multiple of its element's size
        tensors.sort(key=lambda held: -held.value.itemsize)
        file = self._create(f"{stem}{SUFFIX}")
        file.write_head(_header_of(file.name, tensors))
        for held in tensors:
            for part in _parts_of(held.value):
                file.write_checked(part)
        self._create(f"{stem}.json").write_checked(json.dumps(_document_of(state)).encode())

    def _create(self, name: str) -> BlockWriter:
        self.writers.append(BlockWriter(self.folder / name, is_cached=self.is_cached))
        return self.writers[-1]

    def seal_files(self, *, verify: bool = False) -> dict[str, FileRecord]:
        """Wait for the disk. With `verify`, read every file back."""
        try:
            records = {writer.name: writer.seal() for writer in self.writers}
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


def _header_of(file: str, tensors: list[Held]) -> bytes:
    """Return the header of a file with these tensors, one after the other."""
    entries: list[TensorEntry] = []
    about: dict[str, dict[str, list[int]]] = {}
    for held in tensors:
        own, more = held.value, () if held.value.dtype in CODES else (held.value.itemsize,)
        dtype = torch.uint8 if more else own.dtype
        entries.append(TensorEntry(held.name, (*own.shape, *more), dtype))
        offsets = [*held.offsets, *(0 for _ in more)]
        about[held.name] = {OFFSETS_KEY: offsets, SHAPE_KEY: [*held.shape, *more]}
    return Output.with_header(
        file, entries, {PIECES_KEY: json.dumps(about, separators=(",", ":"))}
    ).header


def _parts_of(tensor: Tensor) -> Iterator[memoryview]:
    """Yield the bytes of a tensor in order; of one on a device a few MB at a time."""
    whole = tensor.contiguous()
    if whole.device.type == "cpu":
        yield bytes_of(whole)
        return
    flat, step = whole.reshape(-1), max(1, PART_NBYTES // whole.itemsize)
    for start in range(0, flat.numel(), step):
        yield bytes_of(flat[start : start + step].cpu())


def _document_of(state: RankState) -> dict[str, object]:
    """Return all that is no tensor, for JSON; see listing.py."""
    objects = {h.name: h.value for h in state.held if not isinstance(h.value, Tensor)}
    num_names = 1 << 30  # of all ranks: no number of a param group is as large
    document = {
        OBJECTS: objects | {f"{RANK}.{state.rank}": state.own},
        PATHS: {h.name: h.path for h in state.held if h.path != path_of(h.name, num_names)},
        ALIASES: state.aliases,
        RAW_DTYPES: {
            held.name: str(held.value.dtype).removeprefix("torch.")
            for held in state.held
            if isinstance(held.value, Tensor) and held.value.dtype not in CODES
        },
    }
    return {key: value for key, value in document.items() if value}
