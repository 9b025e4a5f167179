"""Read a checkpoint: this rank's part of each tensor, in file order, through the checksums.

A `Source` holds shapes, dtypes and places that agree (see metadata.py). No rank waits for another.
"""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Set
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from itertools import groupby
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from onefold.checkpoint.archives import HEAD_NBYTES, bytes_of, elements_of, extent_of, strides_of
from onefold.checkpoint.checked_files import BlockReader, FileRecord
from onefold.checkpoint.directory import METADATA, Found, Manifest
from onefold.checkpoint.metadata import (
    COMPANION,
    MASTER,
    MODEL,
    OPTIM,
    RANK,
    Extents,
    Keys,
    Piece,
    Place,
    SavedTensor,
    read_listing,
)
from onefold.checkpoint.unpickling import NOT_OF_BYTES, as_damage, read_object
from onefold.errors import CheckpointError


@dataclass(frozen=True, slots=True)
class Source:
    """A checkpoint whose parts agree: what `onefold.load`, `inspect` and `export` read.

    `paths`: the nested keys of each name. `aliases`: other names of tied weights, each with the
    first one, where `spread_ties` has found them. `lists`: the names that `unstack` put in place of
    that of a stacked parameter.
    """

    found: Found
    files: Mapping[str, FileRecord]
    tensors: dict[str, SavedTensor]
    objects: dict[str, Place]
    paths: dict[str, Keys]
    aliases: dict[str, str] = field(default_factory=dict)
    lists: dict[str, list[str]] = field(default_factory=dict)

    @property
    def path(self) -> Path:
        return self.found.path

    @property
    def manifest(self) -> Manifest | None:
        return self.found.manifest

    @property
    def saved_ranks(self) -> int:
        """How many ranks have saved a state of their own; 1 of another library."""
        return max(1, sum(name.startswith(f"{RANK}.") for name in self.objects))

    def reader(self, file: str, ranges: Iterable[tuple[int, int]]) -> BlockReader:
        """Open a file of the checkpoint to read `ranges` of it."""
        return BlockReader(self.path / file, self.files[file], ranges)

    def read_object(self, name: str) -> Any:
        """Read an object as data."""
        place = self.objects[name]
        with self.reader(place.file, [place.range]) as reader:
            return read_object(bytes(reader.read(place.start, place.length)), name)

    def rank_state(self, rank: int) -> dict[str, Any]:
        """Read the state of one rank alone; {} in another library's checkpoint."""
        name = f"{RANK}.{rank}"
        if name not in self.objects:
            return {}
        with self.believing(name):
            (state,) = self.read_object(name)
            kinds = {"extra": object, "random": dict, "buffers": dict, "modules": list}
            wrong = [key for key, kind in kinds.items() if not isinstance(state.get(key), kind)]
            if wrong and wrong != ["modules"]:  # earlier versions had none
                raise ValueError(f"no {wrong[0]!r} in it")
            if not all(isinstance(each, dict) for each in state.get("modules", ())):
                raise ValueError("'modules' are no dicts")
        return dict(state)

    @contextmanager
    def believing(self, what: str) -> Iterator[None]:
        """Around the use of values that were saved: raise `CheckpointError` if they are no such."""
        try:
            yield
        except NOT_OF_BYTES:
            raise
        except Exception as error:
            raise as_damage(error, f"{what} of checkpoint {str(self.path)!r}") from error

    def fill(self, wanted: Mapping[str, Tensor]) -> None:
        """Read tensors in place, by name; of DTensors this rank's pieces. Files come in order."""
        parts = [part for name, value in wanted.items() for part in self._parts(name, value)]
        parts.sort(key=lambda part: (part.piece.place.file, part.piece.place.start))
        for file, of_file in groupby(parts, key=lambda part: part.piece.place.file):
            own = list(of_file)
            with self.reader(file, [part.range for part in own]) as reader:
                for part in own:
                    part.read(reader)

    def _parts(self, name: str, value: Tensor) -> Iterator[_Part]:
        saved, own, offsets = self.tensors[name], value.detach(), (0,) * value.dim()
        if saved.shape != tuple(value.shape):
            got, hint = list(saved.shape), "the checkpoint is of another module"
            raise CheckpointError(f"{name!r} of shape {list(value.shape)}", got, hint=hint)
        if isinstance(own, DTensor):
            chunks = own.__create_chunk_list__()  # type: ignore[attr-defined]
            own = own._local_tensor
            offsets = tuple(chunks[0].offsets) if chunks else offsets
        if saved.row is not None:
            own, offsets = own.unsqueeze(0), (saved.row, *offsets)
        for piece in saved.pieces:
            bounds = zip(offsets, own.shape, piece.offsets, piece.sizes, strict=True)
            spans = [(max(a, b), min(a + n, b + m)) for a, n, b, m in bounds]
            if own.numel() and all(start < stop for start, stop in spans):
                inside = [
                    start - begin for (start, _), begin in zip(spans, piece.offsets, strict=True)
                ]
                index = [slice(a - at, b - at) for (a, b), at in zip(spans, offsets, strict=True)]
                yield _Part(piece, saved.dtype, tuple(inside), own[tuple(index)])


@dataclass(frozen=True, slots=True)
class _Part:
    """A box of one piece that goes into `target`. `first`: where it begins in the piece."""

    piece: Piece
    dtype: torch.dtype
    first: Extents
    target: Tensor

    @property
    def _is_rows(self) -> bool:
        return tuple(self.target.shape[1:]) == self.piece.sizes[1:]

    @property
    def range(self) -> tuple[int, int]:
        """The bytes of the file that hold it, with room for the archive's headers."""
        start, stop = self.piece.place.range
        if not self.first or not self._is_rows:
            return start, stop
        row_nbytes = prod(self.piece.sizes[1:]) * self.dtype.itemsize
        start += self.first[0] * row_nbytes
        return start, min(start + HEAD_NBYTES + self.target.shape[0] * row_nbytes, stop)

    def read(self, reader: BlockReader) -> None:
        start, strides = elements_of(reader, self.piece, self.dtype)
        target, sizes = self.target, self.piece.sizes
        if strides != strides_of(sizes) or not self._is_rows:
            whole = torch.empty(extent_of(sizes, strides), dtype=self.dtype)
            reader.read_into(start, bytes_of(whole))
            box = zip(self.first, target.shape, strict=True)
            index = tuple(slice(first, first + length) for first, length in box)
            target.copy_(whole.as_strided(sizes, strides)[index])
            return
        if sizes:
            start += self.first[0] * prod(sizes[1:]) * self.dtype.itemsize
        is_alike = target.dtype == self.dtype and target.device.type == "cpu"
        part = target if is_alike and target.is_contiguous() else None
        rows = torch.empty(tuple(target.shape), dtype=self.dtype) if part is None else part
        reader.read_into(start, bytes_of(rows))
        if part is None:
            target.copy_(rows)


def open_source(checkpoint: Found) -> Source:
    """Read names, shapes and places, and compare them with each other and with the files.

    Raises `CheckpointError`: no metadata, damage, or parts that contradict each other.
    """
    path, manifest = checkpoint.path, checkpoint.manifest
    if manifest is None:
        entries = [entry for entry in os.scandir(path) if entry.is_file()]
        files = {entry.name: FileRecord(entry.stat().st_size, "") for entry in entries}
    else:
        files = manifest.files
    what = f"file {METADATA!r} of {str(path)!r} to be torch.distributed.checkpoint's"
    if METADATA not in files:
        raise CheckpointError(what, "no such file", hint="this is no checkpoint, or a part of one")
    with BlockReader(path / METADATA, files[METADATA]) as reader:
        data = bytes(reader.read(0, reader.nbytes))
    listing = read_listing(data, files, what)
    if manifest is None and listing.is_ours:
        wanted = f"file 'manifest.json' in checkpoint {str(path)!r}, which onefold has saved"
        hint = "the file was deleted, so nothing can be verified; load an earlier checkpoint"
        raise CheckpointError(wanted, "no such file", hint=hint)
    return Source(checkpoint, files, listing.tensors, listing.objects, listing.paths)


# tied weights


def first_names(source: Source) -> dict[str, str]:
    """Return, for each tensor, the first name of the same bytes: its own if it has its own."""
    first = dict[Place, str]()
    return {
        name: first.setdefault(saved.pieces[0].place, name) if saved.pieces else name
        for name, saved in source.tensors.items()
    }


def spread_ties(source: Source) -> Source:
    """Give each name of a weight its master and optimizer state: any of them can be loaded."""
    prefix = f"{MODEL}."
    others = {
        alias.removeprefix(prefix): name.removeprefix(prefix)
        for alias, name in first_names(source).items()
        if alias != name and alias.startswith(prefix) and name.startswith(prefix)
    }
    belonging = defaultdict[str, list[tuple[str, Keys]]](list)
    for name, path in source.paths.items() if others else ():
        if path[:2] == (OPTIM, "state") or (path[0] == COMPANION and len(path) > 2):
            belonging[path[2]].append((name, path))
    tensors, objects, paths = dict(source.tensors), dict(source.objects), dict(source.paths)
    for alias, first in others.items():
        known = [(name, (*path[:2], alias, *path[3:])) for name, path in belonging[first]]
        for name, path in [(f"{MASTER}.{first}", (MASTER, alias)), *known]:
            target = ".".join(map(str, path))
            if name in source.paths and paths.setdefault(target, path) is path:
                if name in tensors:
                    tensors[target] = tensors[name]
                else:
                    objects[target] = objects[name]
    return replace(source, tensors=tensors, objects=objects, paths=paths, aliases=others)


# experts given as a list


def unstack(source: Source, fqns: Set[str]) -> Source:
    """Give each expert of a list its rows of the stack that an expert axis saved.

    `fqns`: the parameters of the module. Raises `CheckpointError` for a state of another shape
    than the stacked parameter, whose rows belong to no expert.
    """
    lists = dict[str, list[str]]()
    for name, saved in source.tensors.items():
        kind, *keys = source.paths[name]
        before, mark, after = str(keys[-1] if keys else "").rpartition("stacked.")
        num = saved.shape[0] if mark and saved.shape else 0
        if kind == MODEL and 0 < num <= len(fqns):  # a file may name any number
            rows = [f"{before}{number}.{after}" for number in range(num)]
            if fqns >= {*rows}:
                lists[keys[-1]] = rows
    if not lists:
        return source
    tensors, objects, paths = {}, {}, {}
    for name, path in source.paths.items():
        index = next((i for i, key in enumerate(path) if key in lists), 0)
        saved = source.tensors.get(name)
        for row, fqn in enumerate(lists[path[index]] if index else [""]):
            own = (*path[:index], fqn, *path[index + 1 :]) if index else path
            target = ".".join(map(str, own)) if index else name
            paths[target] = own
            if saved is None:
                objects[target] = source.objects[name]
            elif not index or saved.shape == ():
                tensors[target] = saved
            elif saved.shape == source.tensors[f"{MODEL}.{path[index]}"].shape:
                tensors[target] = replace(saved, shape=saved.shape[1:], row=row)
            else:
                wanted = f"a state of the shape of {path[index]!r}, for experts in a list"
                hint = "stack them here too: onefold.experts.ExpertParallel(experts, None)"
                raise CheckpointError(wanted, f"{name!r} of {list(saved.shape)}", hint=hint)
    return replace(source, tensors=tensors, objects=objects, paths=paths, lists=lists)
