"""Read a checkpoint: this rank's part of each tensor, in file order, through the checksums.

A `Source` holds shapes, dtypes and places that agree (see listing.py), of whichever format. No rank
waits for another.
"""

from __future__ import annotations

import warnings
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field, replace
from itertools import groupby
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from onefold.checkpoint.agreement import believing
from onefold.checkpoint.checked_files import BlockReader, FileRecord
from onefold.checkpoint.directory import FORMAT, Found, Manifest, files_of
from onefold.checkpoint.listing import (
    COMPANION,
    EXTRA,
    MASTER,
    MODEL,
    OPTIM,
    RANK,
    Extents,
    Keys,
    Listing,
    ModuleNames,
    Piece,
    PieceFile,
    PieceStore,
    SavedTensor,
    Wanted,
    nested,
    read_listing,
)
from onefold.checkpoint.safetensors import bytes_of
from onefold.checkpoint.tagged import untagged
from onefold.errors import CheckpointError, listed
from onefold.layout.cut import Box
from onefold.unit.cut_dtensor import offsets_of

MOST_EXTRA = 1 << 20
"""Elements of a tensor that comes back as a part of `extra`."""


@dataclass(frozen=True, slots=True)
class Source:
    """A checkpoint whose parts agree: what `onefold.load`, `inspect` and `export` read.

    `store` reads what the other members name. `lists`: the names that `unstack` put in place of
    that of a stacked parameter. For the rest see `Listing`.
    """

    found: Found
    files: Mapping[str, FileRecord]
    store: PieceStore
    tensors: dict[str, SavedTensor]
    objects: dict[str, Any]
    paths: dict[str, Keys]
    aliases: dict[str, str]
    lists: dict[str, list[str]] = field(default_factory=dict)

    @property
    def path(self) -> Path:
        return self.found.path

    @property
    def manifest(self) -> Manifest | None:
        return self.found.manifest

    @property
    def step(self) -> int | None:
        """The optimizer steps that were done; None where another program has not said."""
        name = f"{EXTRA}.global_steps"
        if self.manifest is not None:
            return self.manifest.step
        step = self.read_object(name) if name in self.objects else None
        return step if isinstance(step, int) else None

    @property
    def saved_ranks(self) -> int:
        """How many ranks have saved a state of their own; 1 of another library."""
        return max(1, len([name for name in self.objects if name.startswith(f"{RANK}.")]))

    def read_object(self, name: str) -> Any:
        """Read an object, with the tensors inside of it."""
        with self.believing(f"{name!r}"):
            return self.store.read_object(self.objects[name])

    def rank_state(self, rank: int) -> dict[str, Any]:
        """Read the state of one rank alone; {} in another library's checkpoint."""
        name = f"{RANK}.{rank}"
        if name not in self.objects:
            return {}
        with self.believing(name):
            state = self.read_object(name)
            if isinstance(state, tuple):  # of format 1, where torch took it for one object
                (state,) = state
            kinds = {"extra": object, "random": dict, "buffers": dict, "modules": list}
            wrong = [key for key, kind in kinds.items() if not isinstance(state.get(key), kind)]
            if wrong and wrong != ["modules"]:  # earlier versions had none
                raise ValueError(f"no {wrong[0]!r} in it")
            if not all(isinstance(each, dict) for each in state.get("modules", ())):
                raise ValueError("'modules' are no dicts")
        return dict(state)

    def arranged(self, names: ModuleNames | None) -> Source:
        """Return another program's checkpoint under our keys; one of ours as it is."""
        peer = self.found.peer
        if peer is None or self.manifest is not None:
            return self
        listing = Listing(self.tensors, self.objects, self.paths, self.aliases)
        with self.believing("the names"):
            listing, store = peer.arrange(listing, self.store, names)
        named = listing.tensors, listing.objects, listing.paths, listing.aliases
        return Source(self.found, self.files, store, *named)

    def saved_extra(self) -> Any:
        """Read what rank 0 passed to `onefold.save`, or what another program has saved."""
        return self.extra() if self.manifest is None else self.rank_state(0).get("extra")

    def extra(self) -> dict[str, Any]:
        """Read what is neither weight nor optimizer, nested as it was saved.

        A warning lists tensors that are too large to be a state, and objects that cannot be read.
        """
        values: dict[str, Any] = {}
        left: list[str] = []
        for name, path in self.paths.items():
            if path[0] != EXTRA:
                continue
            saved = self.tensors.get(name)
            if saved is not None and prod(saved.shape) > MOST_EXTRA:
                left.append(f"{name.removeprefix(f'{EXTRA}.')} of {list(saved.shape)}")
                continue
            try:
                values[name] = self.read_object(name) if saved is None else self._small(name)
            except CheckpointError as error:
                left.append(f"{name.removeprefix(f'{EXTRA}.')}: {str(error).splitlines()[0]}")
        if left:
            warnings.warn(f"not loaded: {'; '.join(listed(left))}", stacklevel=6)
        paths = {name: self.paths[name][1:] for name in values}
        with self.believing("the names"):
            return nested(values, paths)

    def _small(self, name: str) -> Tensor:
        value = torch.empty(self.tensors[name].shape, dtype=self.tensors[name].dtype)
        self.fill({name: value})
        return value

    def believing(self, what: str) -> AbstractContextManager[None]:
        """See `agreement.believing`: `what` is a part of this checkpoint."""
        return believing(f"{what} of checkpoint {str(self.path)!r}")

    def read_box(self, name: str, box: Box) -> Tensor:
        """Read a box of a tensor."""
        own = torch.empty(box[1], dtype=self.tensors[name].dtype)
        read_parts(self.store, list(_parts_of_box(self.tensors[name], own, box[0])))
        return own

    def fill(self, wanted: Mapping[str, Tensor]) -> None:
        """Read tensors in place, by name; of DTensors this rank's pieces. Files come in order."""
        named = wanted.items()
        read_parts(
            self.store,
            [p for name, v in named for p in _parts_of_tensor(name, self.tensors[name], v)],
        )


def _parts_of_tensor(name: str, saved: SavedTensor, value: Tensor) -> Iterator[_Part]:
    """Yield the boxes of pieces that make up `value`, or this rank's piece of it."""
    own, offsets = value, (0,) * len(saved.shape)
    if not isinstance(value, DTensor):
        shape = value.shape
    else:  # whose own methods would ask who waits for it
        own, shape, offsets = value._local_tensor, value._spec.shape, offsets_of(value)
    if saved.shape != tuple(shape):
        got, hint = list(saved.shape), "the checkpoint is of another module"
        raise CheckpointError(f"{name!r} of shape {list(shape)}", got, hint=hint)
    own = own.detach()
    if saved.row is not None:
        own, offsets = own.unsqueeze(0), (saved.row, *offsets)
    yield from _parts_of_box(saved, own, offsets)


def _parts_of_box(saved: SavedTensor, own: Tensor, offsets: Extents) -> Iterator[_Part]:
    """Yield the boxes of pieces that make up `own`, which begins at `offsets` of the tensor."""
    if not own.numel():
        return
    for piece in saved.pieces:
        first, index = [], []
        for at, length, begin, extent in zip(
            offsets, own.shape, piece.offsets, piece.sizes, strict=True
        ):
            start, stop = max(at, begin), min(at + length, begin + extent)
            first.append(start - begin)
            index.append(slice(start - at, stop - at))
        if not [part for part in index if part.start >= part.stop]:
            yield _Part(piece, saved.dtype, tuple(first), own[tuple(index)])


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
    def wanted(self) -> Wanted:
        """The elements to read: rows, or all of a piece that is cut in other dimensions."""
        if not self.first or not self._is_rows:
            return Wanted(self.piece, self.dtype, 0, prod(self.piece.sizes))
        start = self.first[0] * prod(self.piece.sizes[1:])
        return Wanted(self.piece, self.dtype, start, self.target.numel())

    def read(self, file: PieceFile) -> None:
        target = self.target
        if not self._is_rows:
            whole = torch.empty(self.piece.sizes, dtype=self.dtype)
            file.read_elements(self.wanted, bytes_of(whole))
            box = zip(self.first, target.shape, strict=True)
            target.copy_(whole[tuple(slice(first, first + length) for first, length in box)])
            return
        is_alike = target.dtype == self.dtype and target.device.type == "cpu"
        is_direct = is_alike and target.is_contiguous()
        rows = target if is_direct else torch.empty(tuple(target.shape), dtype=self.dtype)
        file.read_elements(self.wanted, bytes_of(rows))
        if not is_direct:
            target.copy_(rows)


def read_parts(store: PieceStore, parts: Iterable[_Part]) -> None:
    """Read boxes of pieces in the order of their places, each file once."""
    ordered = sorted(parts, key=lambda part: (part.piece.place.file, part.piece.place.start))
    for file, of_file in groupby(ordered, key=lambda part: part.piece.place.file):
        own = list(of_file)
        with store.open_file(file, [part.wanted for part in own]) as opened:
            for part in own:
                part.read(opened)


def open_source(found: Found) -> Source:
    """Read names, shapes and places, and compare them with each other and with the files.

    Raises `CheckpointError`: damage, or parts that contradict each other.
    """
    path, manifest = found.path, found.manifest
    if manifest is None:
        files = {p.name: FileRecord(p.stat().st_size, "") for p in files_of(path)}
    else:
        files = manifest.files
    if found.peer is not None:
        is_verified = manifest is not None
        listing, store = found.peer.open_listing(path, files, is_verified=is_verified)
    elif manifest is None or manifest.format < FORMAT:
        wanted = f"checkpoint {str(path)!r} with all its files"
        got = "one of format 1 without the list of its tensors"
        raise CheckpointError(wanted, got, hint="load an earlier checkpoint")
    else:
        listing = read_listing(path, files, manifest.world_size)
        store = _RankStore(path, files, listing.tensors)
    named = listing.tensors, listing.objects, listing.paths, listing.aliases
    return Source(found, files, store, *named)


@dataclass(frozen=True, slots=True)
class _RankStore:
    """The files of a checkpoint of format 2."""

    path: Path
    files: Mapping[str, FileRecord]
    tensors: Mapping[str, SavedTensor]

    @contextmanager
    def open_file(self, file: str, wanted: Sequence[Wanted]) -> Iterator[PieceFile]:
        ranges = [(start, start + nbytes) for start, nbytes in map(_bytes_of_file, wanted)]
        with BlockReader(self.path / file, self.files[file], ranges) as reader:
            yield _RankFile(reader)

    def read_object(self, listed: Any) -> Any:
        known: dict[str, Tensor] = {}

        def tensor_of(name: str) -> Tensor:
            if name not in known:
                saved = self.tensors[name]
                known[name] = torch.empty(saved.shape, dtype=saved.dtype)
                read_parts(self, _parts_of_tensor(name, saved, known[name]))
            return known[name]

        return untagged(listed, tensor_of)


@dataclass(frozen=True, slots=True)
class _RankFile:
    reader: BlockReader

    def read_elements(self, wanted: Wanted, out: memoryview) -> None:
        start, _ = _bytes_of_file(wanted)
        self.reader.read_into(start, out)


def _bytes_of_file(wanted: Wanted) -> tuple[int, int]:
    """Return where elements begin in their file, and how many bytes they are."""
    itemsize = wanted.dtype.itemsize
    return wanted.piece.place.start + wanted.first * itemsize, wanted.numel * itemsize


# tied weights


def spread_ties(source: Source) -> Source:
    """Give each name of a weight its master and optimizer state: any of them can be loaded."""
    others = source.aliases
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
    return replace(source, tensors=tensors, objects=objects, paths=paths)


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
