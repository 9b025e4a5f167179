"""What a checkpoint holds: names, shapes and places. They are compared, and none is believed.

Its format is that of docs/adr/0007.

Each rank has written two files. `rank-00000.safetensors` has its tensors and pieces of tensors, one
after the other. Under DCP_SHARDING_INFO its header says where each piece begins, in the form that
torch's `HuggingFaceStorageReader` reads, and the shape of the whole tensor. `rank-00000.json` has
all that is no tensor:

    objects   name -> value, with types and tensors as in tagged.py; "rank.0" is this rank's own
    paths     name -> nested keys, where they do not follow from the name (`path_of`)
    aliases   another name of a tied weight -> the name under which it is saved
    dtypes    name -> dtype, of tensors whose bytes are saved as U8 in one more dimension
"""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from itertools import product
from math import prod
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import torch
from torch import nn

from onefold.checkpoint.agreement import believing
from onefold.checkpoint.checked_files import BlockReader, FileRecord
from onefold.checkpoint.safetensors import DTYPES, SUFFIX, header_at

MODEL, MASTER, OPTIM, RANK = "model", "master", "optim", "rank"
GRAD, PARTIAL, COMPANION = "grad", "partial", "companion"
EXTRA = "extra"

OFFSETS_KEY, SHAPE_KEY = "saved_offsets", "shape"
PIECES_KEY = "DCP_SHARDING_INFO"
OBJECTS, PATHS, ALIASES, RAW_DTYPES = "objects", "paths", "aliases", "dtypes"

Keys = tuple[Any, ...]
"""The nested keys of a name, as in ("optim", "state", FQN, KEY)."""


class DictNumber(int):
    """A number that is a key of a dict. A plain one among `Keys` is an index of a list."""


Extents = tuple[int, ...]

MOST_CUTS = 8
"""Dimensions of one tensor that pieces may cut."""


@dataclass(frozen=True, slots=True)
class Place:
    """Bytes of a file that hold a piece."""

    file: str
    start: int
    length: int

    @property
    def range(self) -> tuple[int, int]:
        return self.start, self.start + self.length


@dataclass(frozen=True, slots=True)
class Piece:
    """A box of a tensor, and where it lies."""

    offsets: Extents
    sizes: Extents
    place: Place


@dataclass(frozen=True, slots=True)
class SavedTensor:
    """A tensor: pieces cover it exactly. `row`: that of a stack, whose pieces they are then."""

    shape: Extents
    dtype: torch.dtype
    pieces: tuple[Piece, ...]
    row: int | None = None


@dataclass(frozen=True, slots=True)
class Listing:
    """Names that agree with each other, and with the files.

    `objects`: what its `PieceStore` reads of each. `paths`: the nested keys of each name.
    `aliases`: other names of tied weights, each with the first one, both without `model.`.
    """

    tensors: dict[str, SavedTensor]
    objects: dict[str, Any]
    paths: dict[str, Keys]
    aliases: dict[str, str] = field(default_factory=dict)


class Wanted(NamedTuple):
    """Elements of a piece, in row-major order: `numel` from number `first` on."""

    piece: Piece
    dtype: torch.dtype
    first: int
    numel: int


class PieceFile(Protocol):
    """An open file with pieces."""

    def read_elements(self, wanted: Wanted, out: memoryview) -> None:
        """Fill `out` with the bytes of elements."""
        ...


class PieceStore(Protocol):
    """How the pieces and objects of one checkpoint are read."""

    def open_file(self, file: str, wanted: Sequence[Wanted]) -> AbstractContextManager[PieceFile]:
        """Open a file to read `wanted`, which comes in the order of places."""
        ...

    def read_object(self, listed: Any) -> Any:
        """Return an object, by what `Listing.objects` has of it."""
        ...


@dataclass(frozen=True, slots=True)
class OptimizerNames:
    """An optimizer: its class, the names in each param group, and the settings that it has."""

    kind: str
    groups: list[list[str]]
    settings: frozenset[str]


@dataclass(frozen=True, slots=True)
class ModuleNames:
    """What a checkpoint is loaded into: all names of weights and buffers, and its optimizers.

    `module`: None for stages of a pipeline, which are several.
    """

    weights: frozenset[str]
    optimizers: list[OptimizerNames]
    module: nn.Module | None = None


class PeerFormat(Protocol):
    """Checkpoints that another program writes. `onefold.foreign` has them; `api` hands them in."""

    @property
    def writer(self) -> str:
        """The program, as `onefold inspect` shows it."""
        ...

    def is_format_of(self, folder: Path) -> bool:
        """True if the folder is one of this format, by the names of its files."""
        ...

    def open_listing(
        self, folder: Path, files: Mapping[str, FileRecord], *, is_verified: bool
    ) -> tuple[Listing, PieceStore]:
        """Read what a checkpoint holds. Raises `CheckpointError` where it contradicts itself.

        `is_verified`: a manifest of ours has checksums of `files`.
        """
        ...

    def arrange(
        self, listing: Listing, store: PieceStore, names: ModuleNames | None
    ) -> tuple[Listing, PieceStore]:
        """Return the content under our keys, for a module of these names; the rest under EXTRA.

        Raises `CheckpointError`: another module or optimizer. `names`: None where there is none.
        """
        ...


def path_of(name: str, num_names: int) -> Keys:
    """Return the nested keys of a name, where nothing else is said of it.

    ("optim", "state", FQN, KEY) and ("optim", "param_groups", INDEX, KEY) have four, and others
    two. The index stays a string where it is no number.
    """
    state, groups = f"{OPTIM}.state.", f"{OPTIM}.param_groups."
    if name.startswith(state):
        fqn, _, key = name.removeprefix(state).rpartition(".")
        return (OPTIM, "state", fqn, key)
    if name.startswith(groups):
        index, _, key = name.removeprefix(groups).partition(".")
        is_number = index.isdecimal() and len(index) < 10 and int(index) < num_names
        return (OPTIM, "param_groups", int(index) if is_number else index, key)
    kind, dot, rest = name.partition(".")
    return (kind, rest) if dot else (name,)


def checked_path(keys: Any, name: Any, num_names: int) -> Keys:
    """Return keys that were saved for a name. Raises `TypeError` if they are none."""
    if not isinstance(name, str) or not isinstance(keys, tuple) or len(keys) > 64:
        raise TypeError("names that are none")
    for key in keys:
        if type(key) is not str and not (type(key) is int and 0 <= key < num_names):
            raise TypeError(f"keys of {name[:80]!r} that are none")
    return keys


class _Nest(dict[Any, Any]):
    """A container in the making, by key or index."""

    def filled(self) -> dict[Any, Any] | list[Any]:
        """Return it as it was saved: a list, if all its keys are indices."""
        own = {key: v.filled() if isinstance(v, _Nest) else v for key, v in self.items()}
        if all(type(key) is int for key in own):
            return [own.get(index) for index in range(max(own) + 1)]
        return {int(key) if isinstance(key, DictNumber) else key: v for key, v in own.items()}


def nested(values: Mapping[str, Any], paths: Mapping[str, Keys]) -> dict[Any, Any]:
    """Return values by name in dicts and lists, as they were saved.

    Raises `TypeError` for keys inside of a value.
    """
    root = _Nest()
    for name, value in values.items():
        inside = root
        *above, last = paths[name]
        for key in above:
            inside = inside.setdefault(key, _Nest())
            if not isinstance(inside, _Nest):
                raise TypeError(f"{name[:80]!r} inside of a value")
        inside[last] = value
    return {key: v.filled() if isinstance(v, _Nest) else v for key, v in root.items()}


def tiles(boxes: Sequence[tuple[Extents, Extents]], shape: Extents) -> bool:
    """True if boxes, of offsets and sizes, cover a tensor of `shape` exactly once.

    Sums the signed corners of the boxes: all but those of the tensor cancel each other.
    """
    num_dims = len(shape)
    if [box for box in boxes if len(box[0]) != num_dims or len(box[1]) != num_dims]:
        return False
    if not prod(shape):
        return not any([prod(sizes) for _, sizes in boxes])
    if shape and not [box for box in boxes if any(box[0][1:]) or box[1][1:] != shape[1:]]:
        end = 0  # rows, as ranks cut them
        for (start, *_), (length, *_) in sorted(boxes):
            if start != end or not length:
                return False
            end += length
        return end == shape[0]
    cut = [dim for dim in range(len(shape)) if any(box[1][dim] != shape[dim] for box in boxes)]
    whole = ((0,) * len(shape), shape)
    corners = Counter[Extents]()
    for sign, (offsets, sizes) in [(-1, whole), *((1, box) for box in boxes)]:
        if len(cut) > MOST_CUTS or any(offsets[d] for d in range(len(shape)) if d not in cut):
            return False
        bounds = [((1, offsets[dim]), (-1, offsets[dim] + sizes[dim])) for dim in cut]
        for corner in product(*bounds):
            at = tuple(bound for _, bound in corner)
            corners[at] += sign * prod(direction for direction, _ in corner)
    return not any(corners.values())


# format 2


def read_listing(folder: Path, files: Mapping[str, FileRecord], num_ranks: int) -> Listing:
    """Read all headers and JSON files, of so many ranks.

    Raises `CheckpointError` where they contradict anything.
    """
    pieces = defaultdict[str, list[_Listed]](list)
    said = _JsonFiles()
    for file, record in files.items():
        what = f"file {file!r} of checkpoint {str(folder)!r} to list what it holds"
        with BlockReader(folder / file, record) as reader, believing(what):
            if file.endswith(SUFFIX):
                for listed in _listed_in(file, reader):
                    pieces[listed.name].append(listed)
            else:
                said.add(json.loads(reader.read_checked(0, reader.nbytes)))
    with believing(f"the files of checkpoint {str(folder)!r} to agree"):
        own = [name for name in said.objects if name.startswith(f"{RANK}.")]
        if len(own) != num_ranks or {f"{RANK}.{rank}" for rank in range(num_ranks)} != {*own}:
            raise ValueError(f"states of {len(own)} ranks of {num_ranks}")
        return _joined(pieces, said)


class _Listed(NamedTuple):
    """A piece, as the header of its file describes it."""

    name: str
    dtype: torch.dtype
    shape: Extents
    piece: Piece


@dataclass(frozen=True, slots=True)
class _JsonFiles:
    """What the JSON files say, each name once."""

    objects: dict[str, Any] = field(default_factory=dict)
    paths: dict[str, Any] = field(default_factory=dict)
    aliases: dict[str, Any] = field(default_factory=dict)
    dtypes: dict[str, Any] = field(default_factory=dict)

    def add(self, document: Any) -> None:
        for key in (OBJECTS, PATHS, ALIASES, RAW_DTYPES):
            known, new = getattr(self, key), document.get(key, {})
            twice = known.keys() & new.keys()
            if any(known[name] != new[name] for name in twice) or (key == OBJECTS and twice):
                raise ValueError(f"{min(twice)[:80]!r}, which another file has")
            known.update(new)


def _listed_in(file: str, reader: BlockReader) -> Iterator[_Listed]:
    """Yield the pieces of a file, whose bytes fill it."""
    header, begin = header_at(reader)
    about = json.loads(header.pop("__metadata__")[PIECES_KEY])
    end = 0
    for name, entry in sorted(header.items(), key=lambda item: item[1]["data_offsets"]):
        sizes, offsets = extents(entry["shape"]), extents(about[name][OFFSETS_KEY])
        dtype = DTYPES[entry["dtype"]]
        length = prod(sizes) * dtype.itemsize
        if entry["data_offsets"] != [end, end + length]:
            got = f"bytes {str(entry['data_offsets'])[:80]}"
            raise ValueError(f"{got} for {list(sizes)} of {name[:80]!r} behind byte {end}")
        place = Place(file, begin + end, length)
        end += length
        yield _Listed(name, dtype, extents(about[name][SHAPE_KEY]), Piece(offsets, sizes, place))
    if begin + end != reader.nbytes:
        raise ValueError(f"{reader.nbytes} bytes, of which tensors fill {begin + end}")


def extents(value: Any) -> Extents:
    """Return sizes, offsets or strides: up to 64 numbers that are not negative."""
    if not isinstance(value, list | tuple) or len(value) > 64:
        raise TypeError("no shape")
    for number in value:
        if type(number) is not int or not 0 <= number < 1 << 62:
            raise ValueError(f"a shape of {str(value[:8])[:80]}")
    return tuple(value)


def _joined(pieces: Mapping[str, Sequence[_Listed]], said: _JsonFiles) -> Listing:
    """Return the tensors that pieces of all files make up, and all other names."""
    tensors = {name: _tensor_of(name, of, said.dtypes.get(name)) for name, of in pieces.items()}
    num_names = len(tensors) + len(said.objects) + len(said.aliases)
    names = [*tensors, *said.objects]
    if len(set(names)) < len(names):
        raise ValueError("a name that is a tensor and an object")
    paths = {
        name: checked_path(tuple(said.paths[name]), name, num_names)
        if name in said.paths
        else path_of(name, num_names)
        for name in names
    }
    aliases = dict[str, str]()
    prefix = f"{MODEL}."
    for alias, name in said.aliases.items():
        if alias in paths or not alias.startswith(prefix) or not name.startswith(prefix):
            raise ValueError(f"{alias[:80]!r} as another name of {str(name)[:80]!r}")
        aliases[alias.removeprefix(prefix)] = name.removeprefix(prefix)
    for alias, name in said.aliases.items():
        tensors[alias], paths[alias] = tensors[name], path_of(alias, num_names)
    return Listing(tensors, said.objects, paths, aliases)


def _tensor_of(name: str, listed: Sequence[_Listed], raw: str | None) -> SavedTensor:
    """Return the tensor that pieces make up. `raw`: its dtype, if its bytes were saved."""
    _, dtype, shape, _ = listed[0]
    if [other for other in listed if other.dtype != dtype or other.shape != shape]:
        raise ValueError(f"pieces of {name[:80]!r} of several shapes or dtypes")
    pieces = [piece for *_, piece in listed]
    if raw is not None:
        dtype = getattr(torch, raw)
        if not isinstance(dtype, torch.dtype) or shape[-1:] != (dtype.itemsize,):
            raise ValueError(f"bytes of {name[:80]!r} as {raw[:80]!r}")
        if any(piece.sizes[-1:] != shape[-1:] for piece in pieces):
            raise ValueError(f"pieces of elements of {name[:80]!r}")
        shape = shape[:-1]
        pieces = [replace(p, offsets=p.offsets[:-1], sizes=p.sizes[:-1]) for p in pieces]
    if not tiles([(piece.offsets, piece.sizes) for piece in pieces], shape):
        raise ValueError(f"pieces that do not cover {name[:80]!r} of {list(shape)} once")
    return SavedTensor(shape, dtype, tuple([piece for piece in pieces if prod(piece.sizes)]))
