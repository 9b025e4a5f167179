"""Export and inspect checkpoints without a module or a process group, a few MB at a time."""

import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import groupby
from math import prod
from pathlib import Path
from typing import Any

import torch

from onefold.checkpoint import safetensors
from onefold.checkpoint.agreement import as_checkpoint_error
from onefold.checkpoint.checked_files import BlockReader
from onefold.checkpoint.directory import Draft, Found, Peers, files_of, find
from onefold.checkpoint.listing import (
    COMPANION,
    GRAD,
    MASTER,
    MODEL,
    OPTIM,
    PARTIAL,
    RANK,
    Keys,
    Piece,
    PieceFile,
    SavedTensor,
    Wanted,
)
from onefold.checkpoint.mosaics import Mosaic
from onefold.checkpoint.names_in_files import empty_model, ignored, tied_source, written_as
from onefold.checkpoint.packed_weights import is_offset, packed_among
from onefold.checkpoint.pretrained import begin, write_box, write_small_files
from onefold.checkpoint.source import Source, open_source
from onefold.errors import CheckpointError
from onefold.layout.cut import spans_of

PART_NBYTES = 8 << 20
"""The most bytes of a piece that are in memory at a time."""


@dataclass(frozen=True, slots=True)
class Exported:
    """The checkpoint that was exported, and the files that were written, with their bytes."""

    source: Path
    step: int | None  # None: another program has not said
    files: dict[str, int]
    num_tensors: int


def export(
    source: str | os.PathLike[str],
    target: str | os.PathLike[str],
    peers: Peers = (),
    *,
    dtype: torch.dtype | None = None,
    max_shard_nbytes: int = safetensors.MAX_SHARD_NBYTES,
) -> Exported:
    """Write the weights of a checkpoint as `AutoModel.from_pretrained` reads them.

    With transformers, names and layouts are those that it writes for the model of the checkpoint's
    configuration; else those of the module.

    Needs one process and no process group. Every byte read passes its checksum, if Onefold has
    saved it. `dtype` casts
    floating-point weights, from masters where they are wider; None keeps the weights' dtype. Tied
    weights are written once; `config.json` is written if the checkpoint has one.

    Raises: CheckpointError: nothing to export, damage, a target that exists, a full disk.
    """
    saved = open_exported(Path(source), peers)
    config = saved.manifest.config if saved.manifest is not None else None
    weights, moved = _in_files(config, dict(weights_of(saved, dtype)))
    entries = [*weights.values(), *(entry for entry, _ in moved)]
    outputs = safetensors.plan_outputs(entries, max_shard_nbytes)
    draft = Draft(Path(os.path.abspath(target)))
    draft.check()
    try:
        begin(draft, outputs)
        with safetensors.OffsetWriter(draft.folder, outputs) as writer:
            for name, pieces in groupby(
                _pieces_in_order(saved, weights), lambda entry: entry[1].place.file
            ):
                own = list(pieces)
                wanted = [_all_of(piece, saved.tensors[fqn].dtype) for fqn, piece in own]
                with saved.store.open_file(name, wanted) as file:
                    for fqn, piece in own:
                        _copy_piece(file, piece, saved.tensors[fqn], weights[fqn], writer)
            for entry, mosaic in moved:
                for move in mosaic.moves():
                    values = saved.read_box(move.source, move.origin).to(entry.dtype)
                    write_box(writer, entry, move.box, move.shaped(values))
            writer.flush_to_disk()
        write_small_files(draft.folder, outputs, config)
        draft.publish()
    except (OSError, CheckpointError) as error:
        draft.abandon()
        raise as_checkpoint_error(error) from error
    files = {output.name: output.nbytes for output in outputs}
    return Exported(saved.path, saved.step, files, len(entries))


def _in_files(
    config: dict[str, Any] | None, weights: dict[str, safetensors.TensorEntry]
) -> tuple[dict[str, safetensors.TensorEntry], list[tuple[safetensors.TensorEntry, Mosaic]]]:
    """Return weights under the names that transformers gives them, and those in another layout.

    Without transformers, or a configuration of its, weights keep the names of the module.
    """
    module = empty_model(config)
    if module is None:
        return weights, []
    named = {
        tied_source(module, entry.name): Mosaic.blank(name, entry.shape, entry.dtype)
        for name, entry in weights.items()
    }
    for name in ignored(module, "_keys_to_ignore_on_save"):
        named.pop(name, None)
    plain, moved = dict[str, safetensors.TensorEntry](), []
    for name, mosaic in written_as(module, named).items():
        entry = safetensors.TensorEntry(name, tuple(mosaic.shape), mosaic.dtype)
        source = mosaic.whole_source
        if source is not None and source not in plain:
            plain[source] = entry
        else:
            moved.append((entry, mosaic))
    return plain, moved


def open_exported(directory: Path, peers: Peers) -> Source:
    """Open the checkpoint `directory`, or the newest complete one in it, to export it."""
    return _opened(directory, peers).arranged(None)


def _opened(directory: Path, peers: Peers) -> Source:
    try:
        return open_source(find(Path(os.path.abspath(directory)), peers)[0])
    except OSError as error:
        raise as_checkpoint_error(error) from error


def weights_of(
    source: Source, dtype: torch.dtype | None
) -> Iterator[tuple[str, safetensors.TensorEntry]]:
    """Yield every weight and buffer once, with the name in the checkpoint to read it from."""
    packed = packed_among(source.paths)
    for name, saved in source.tensors.items():
        shown = name.removeprefix(f"{MODEL}.")
        if shown == name or shown in source.aliases:
            continue
        if name in packed and is_offset(name):  # a note has it
            continue
        casts = saved.dtype.is_floating_point and name not in packed
        wanted = dtype if dtype is not None and casts else saved.dtype
        master = f"{MASTER}.{shown}"
        is_wider = master in source.tensors and wanted.itemsize > saved.dtype.itemsize
        entry = safetensors.TensorEntry(shown, saved.shape, wanted)
        yield master if is_wider else name, entry


def _pieces_in_order(source: Source, names: Iterable[str]) -> list[tuple[str, Piece]]:
    """Return the pieces of tensors in file order, each with the tensor's name."""
    pieces = [(name, piece) for name in names for piece in source.tensors[name].pieces]
    return sorted(pieces, key=lambda entry: (entry[1].place.file, entry[1].place.start))


def _all_of(piece: Piece, dtype: torch.dtype) -> Wanted:
    return Wanted(piece, dtype, 0, prod(piece.sizes))


def _copy_piece(
    file: PieceFile, piece: Piece, saved: SavedTensor, entry: safetensors.TensorEntry,
    writer: safetensors.OffsetWriter,
) -> None:  # fmt: skip
    step, done = max(1, PART_NBYTES // saved.dtype.itemsize), 0
    for first, stop in spans_of((piece.offsets, piece.sizes), saved.shape):
        for at in range(first, stop, step):
            part = torch.empty(min(step, stop - at), dtype=saved.dtype)
            wanted = Wanted(piece, saved.dtype, done, part.numel())
            file.read_elements(wanted, safetensors.bytes_of(part))
            done += part.numel()
            data = safetensors.bytes_of(part.to(entry.dtype))
            writer.write_at(entry.name, at * entry.dtype.itemsize, data)


@dataclass(frozen=True, slots=True)
class InspectedRow:
    """One tensor of a checkpoint."""

    name: str
    kind: str  # "weight", "master", or the key under which an optimizer keeps it
    shape: tuple[int, ...]
    dtype: str
    nbytes: int
    pieces: int
    tied_to: str = ""  # the name under which the same tensor is saved


@dataclass(frozen=True, slots=True)
class Inspection:
    """The contents of a checkpoint."""

    found: Found
    rows: list[InspectedRow]
    other_names: list[str]  # of objects that are no tensors
    extra: Any  # that rank 0 passed to `onefold.save`
    files: dict[str, int]  # bytes
    is_verified: bool


def inspect(directory: Path, peers: Peers = (), *, verify: bool) -> Inspection:
    """Inspect the checkpoint `directory`, or the newest complete one in it.

    With `verify`, read every byte and compare it with its checksum.

    Raises: CheckpointError: nothing there, or damaged, with the file's name.
    """
    source = _opened(directory, peers).arranged(None)
    manifest = source.manifest
    if verify and manifest is not None:
        for name, record in manifest.files.items():
            with BlockReader(source.path / name, record, [(0, record.nbytes)]) as reader:
                reader.verify()
    named = [(source.paths[name], saved) for name, saved in source.tensors.items()]
    tied = source.aliases
    tensors = [_row(keys, saved, tied) for keys, saved in named if keys[0] != RANK]  # of objects
    is_verified = verify and manifest is not None
    extra = source.saved_extra()
    files = {p.name: p.stat().st_size for p in sorted(files_of(source.path))}
    return Inspection(source.found, tensors, [*source.objects], extra, files, is_verified)


def _row(keys: Keys, saved: SavedTensor, tied: Mapping[str, str]) -> InspectedRow:
    name, kind = _parameter_and_kind(keys)
    tied_to = tied.get(name, "") if kind == "weight" else ""
    dtype = str(saved.dtype).removeprefix("torch.")
    nbytes = prod(saved.shape) * saved.dtype.itemsize
    return InspectedRow(name, kind, saved.shape, dtype, nbytes, len(saved.pieces), tied_to)


def _parameter_and_kind(keys: Keys) -> tuple[str, str]:
    """Return the parameter that a tensor belongs to, and its kind."""
    if keys[:2] == (OPTIM, "state"):
        return str(keys[2]), ".".join(map(str, keys[3:]))
    if keys[0] == COMPANION and len(keys) > 2:
        return str(keys[2]), str(keys[1])
    kinds = {MODEL: "weight", MASTER: "master", GRAD: GRAD, PARTIAL: PARTIAL, OPTIM: OPTIM}
    name = ".".join(map(str, keys))
    kind, dot, rest = name.partition(".")
    return (rest, kinds[kind]) if dot and kind in kinds else (name, "weight")
