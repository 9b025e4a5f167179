"""Weights of another program's checkpoint that are in files as transformers keeps them there."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

from torch import Tensor, nn

from onefold.checkpoint.listing import Extents, Keys, Listing, Piece, SavedTensor
from onefold.checkpoint.mosaics import Mosaic, Move, strides_of
from onefold.checkpoint.names_in_files import find_names, remember_rules
from onefold.errors import CheckpointError
from onefold.foreign.torch_files import StoredTensor
from onefold.foreign.trees import piece_of


@dataclass(frozen=True, slots=True)
class _ListedFiles:
    """See `NamedFiles`."""

    tensors: dict[str, SavedTensor]

    @property
    def places(self) -> list[str]:
        return [*self.tensors]

    def shape(self, name: str) -> Extents:
        return self.tensors[name].shape

    def whole(self, name: str) -> Tensor:
        raise CheckpointError(f"{name!r} as it is, or moved", "one that a rule computes with",
                              hint="load the folder with transformers")  # fmt: skip


def under_module_names(
    listing: Listing, where: Keys, module: nn.Module, names: Iterable[str]
) -> Listing:
    """Return a listing whose weights, at keys `where`, have the names and layouts of a module.

    Raises: CheckpointError: see `find_names`; or a rule that does more than move boxes.
    """
    inside = {path[-1]: name for name, path in listing.paths.items()
              if path[:-1] == where and name in listing.tensors}  # fmt: skip
    wanted = set(names)
    if wanted <= inside.keys() or not inside:
        return listing
    files = {file: listing.tensors[name] for file, name in inside.items()}
    found = find_names(module, wanted, _ListedFiles(files))
    found.plain.update(_adapters(module, wanted - found.plain.keys(), files))
    if found.computed:
        _ListedFiles(files).whole(min(found.computed))
    remember_rules(module, found)
    made = {name: files[source] for name, source in found.plain.items()}
    made |= {name: _moved(name, mosaic, files) for name, mosaic in found.mosaics.items()}
    used = {*found.plain.values()}
    made |= {name: files[name] for name in found.unknown if name not in used and name not in made}
    gone = {*inside.values()}
    tensors = {name: v for name, v in listing.tensors.items() if name not in gone}
    paths = {name: path for name, path in listing.paths.items() if name not in gone}
    for name, saved in made.items():
        new = ".".join(map(str, (*where, name)))
        tensors[new], paths[new] = saved, (*where, name)
    return replace(listing, tensors=tensors, paths=paths)


def _adapters(
    module: nn.Module, names: Iterable[str], files: Mapping[str, object]
) -> dict[str, str]:
    """Return names of PEFT's modules, with those in its files, which lack the adapter's own."""
    found = {}
    for adapter in getattr(module, "peft_config", None) or {}:
        for name in names:
            file = name.replace(f".modules_to_save.{adapter}.", ".").replace(f".{adapter}.", ".")
            file = file.removesuffix(f".{adapter}")
            if file != name and file in files:
                found[name] = file
    return found


def _moved(name: str, mosaic: Mosaic, files: dict[str, SavedTensor]) -> SavedTensor:
    """Return a tensor that is made of boxes of others."""
    pieces = [_piece(move, files[move.source]) for move in mosaic.moves()]
    dtypes = {files[tile.source].dtype for tile in mosaic.tiles}
    if len(dtypes) > 1:
        raise ValueError(f"parts of {name!r} of several dtypes")
    return SavedTensor(tuple(mosaic.shape), dtypes.pop(), tuple(pieces))


def _piece(move: Move, saved: SavedTensor) -> Piece:
    """Return what a move takes from a tensor that lies in one file, as rows."""
    (whole,) = saved.pieces
    steps = strides_of(saved.shape)
    first = sum(at * step for at, step in zip(move.origin[0], steps, strict=True))
    strides = tuple(1 if dim is None else steps[dim] for dim in move.dims)
    start = whole.place.start + first * saved.dtype.itemsize
    stored = StoredTensor(saved.dtype, move.box[1], strides, start)
    return piece_of(stored, whole.place.file, move.box[0])
