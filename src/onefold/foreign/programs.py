"""Which files each program writes, and at which keys their contents are put.

A program is a row of `PROGRAMS`. Arranging finds weights and optimizers in the keys by itself, so
keys are only names for what comes back as `extra`. See docs/adr/0036.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from zipfile import is_zipfile

from onefold.checkpoint.checked_files import FileRecord
from onefold.checkpoint.listing import Keys, Listing, ModuleNames, PieceStore
from onefold.errors import CheckpointError
from onefold.foreign.arranging import arrange
from onefold.foreign.dcp import METADATA, DcpFormat
from onefold.foreign.renamed import under_module_names
from onefold.foreign.trees import WRITER, Tree, file_records

WEIGHTS = "model"


@dataclass(frozen=True, slots=True)
class ProgramPart:
    """Files of a program by a pattern, and the keys of what is in them.

    `kind`: "archive" of torch.save, "json", "safetensors", a "dcp" folder, or files of all ranks:
    "ranks" of torch.save, "shards" of safetensors. The stem of an archive is a key more where its
    pattern has a star.
    """

    pattern: str
    kind: str
    keys: Keys
    is_needed: bool = False


@dataclass(frozen=True, slots=True)
class ProgramFormat:
    """Folders of one program, as files side by side. `marks`: patterns that all are there."""

    writer: str
    marks: tuple[str, ...]
    parts: tuple[ProgramPart, ...]

    def is_format_of(self, folder: Path) -> bool:
        """True if the files that mark the program are there."""
        return folder.is_dir() and all(any(folder.glob(mark)) for mark in self.marks)

    def open_listing(
        self, folder: Path, files: Mapping[str, FileRecord], *, is_verified: bool
    ) -> tuple[Listing, PieceStore]:
        """See `PeerFormat`."""
        tree = Tree(folder)
        for part in self.parts:
            found = [folder] if part.pattern == "." else sorted(folder.glob(part.pattern))
            found = [path for path in found if path.is_dir() == (part.kind == "dcp")]
            if part.is_needed and not found:
                wanted = f"{part.pattern!r} in {str(folder)!r}, which {self.writer} writes"
                hint = "this is a part of a checkpoint; copy all of its files"
                raise CheckpointError(wanted, "no such file", hint=hint)
            if found and part.kind in _ADD_ALL:
                _ADD_ALL[part.kind](tree, found, part.keys)
                continue
            for path in found:
                keys = (*part.keys, path.stem) if "*" in part.pattern else part.keys
                _ADD[part.kind](tree, path, keys)
        return tree.listing, tree

    def arrange(
        self, listing: Listing, store: PieceStore, names: ModuleNames | None
    ) -> tuple[Listing, PieceStore]:
        """See `PeerFormat`."""
        if names is not None and names.module is not None:
            listing = under_module_names(listing, (WEIGHTS,), names.module, names.weights)
        return arrange(listing, store, names)


def _add_archive(tree: Tree, path: Path, keys: Keys) -> None:
    tree.add_archive(path.name, keys)


def _add_json(tree: Tree, path: Path, keys: Keys) -> None:
    tree.add_json(path.name, keys)


def _add_dcp(tree: Tree, path: Path, keys: Keys) -> None:
    inside = "." if path == tree.folder else path.name
    listing, store = DcpFormat().open_listing(path, file_records(path), is_verified=False)
    tree.add_folder(inside, listing, store, keys)


def _add_safetensors(tree: Tree, _: Sequence[Path], keys: Keys) -> None:
    tree.add_safetensors(keys)


def _add_shards(tree: Tree, _: Sequence[Path], keys: Keys) -> None:
    tree.add_shards(keys)


def _add_ranks(tree: Tree, paths: Sequence[Path], keys: Keys) -> None:
    """Add files named ..._world_size_N_rank_R.pt in the order of their ranks."""
    found = {int(path.stem.rpartition("_")[2]): path.name for path in paths}
    number = int(paths[0].stem.split("_")[-3])
    missing = sorted(set(range(number)) - found.keys())
    if missing or len(found) != number:
        wanted = f"files of {number} ranks in {str(tree.folder)!r}"
        hint = "copy the files of all ranks"
        got = f"none of rank {missing[0]}" if missing else f"{len(found)}"
        raise CheckpointError(wanted, got, hint=hint)
    tree.add_rank_files([found[rank] for rank in range(number)], keys)


_ADD_ALL: dict[str, Callable[[Tree, Sequence[Path], Keys], None]] = {
    "safetensors": _add_safetensors, "shards": _add_shards, "ranks": _add_ranks,
}  # fmt: skip
_ADD: dict[str, Callable[[Tree, Path, Keys], None]] = {
    "archive": _add_archive, "json": _add_json, "dcp": _add_dcp,
}  # fmt: skip

_HF_WEIGHTS = (
    ProgramPart("*.safetensors", "safetensors", (WEIGHTS,)),
    ProgramPart("pytorch_model.bin", "archive", (WEIGHTS,)),
)
_ACCELERATES = (
    *_HF_WEIGHTS,
    ProgramPart("pytorch_model_fsdp.bin", "archive", (WEIGHTS,)),
    ProgramPart("pytorch_model_fsdp_*", "dcp", ()),
    ProgramPart("optimizer_*", "dcp", ()),
    ProgramPart("optimizer*.bin", "archive", ("optimizer",)),
)
"""What Accelerate saves for its own users, and for Trainer with FSDP."""
PROGRAMS: Sequence[ProgramFormat] = (
    ProgramFormat("transformers' Trainer", ("trainer_state.json",), (
        *_ACCELERATES,
        ProgramPart("optimizer.pt", "archive", ("optimizer",)),
        ProgramPart("scheduler.pt", "archive", ("scheduler",)),
        ProgramPart("trainer_state.json", "json", ("trainer_state",)),
        ProgramPart("rng_state*.pth", "archive", ("random_states",)),
    )),
    ProgramFormat("Accelerate", ("random_states_*.pkl",), (
        *_ACCELERATES,
        ProgramPart("scheduler*.bin", "archive", ("schedulers",)),
        ProgramPart("random_states_*.pkl", "archive", ("random_states",)),
    )),
    ProgramFormat("files of each rank, as verl", ("model_world_size_*_rank_*.pt",), (
        ProgramPart("model_world_size_*_rank_*.pt", "ranks", (WEIGHTS,)),
        ProgramPart("optim_world_size_*_rank_*.pt", "ranks", ("optimizer",)),
        ProgramPart("extra_state_world_size_*_rank_0.pt", "archive", ("extra_state",)),
    )),
    ProgramFormat(WRITER, ("shard-*-model-*.safetensors",), (
        ProgramPart("*.safetensors", "shards", (WEIGHTS,)),
    )),
    ProgramFormat("Lightning", ("meta.pt", METADATA), (
        ProgramPart(".", "dcp", ()),
        ProgramPart("meta.pt", "archive", ()),
    )),
    ProgramFormat("safetensors files, as transformers", ("model*.safetensors",), _HF_WEIGHTS),
)  # fmt: skip
"""Programs that write several files, in the order in which they are looked for."""


ENDINGS = {".pt", ".pth", ".bin", ".ckpt"}


@dataclass(frozen=True, slots=True)
class ArchiveFormat:
    """One file of torch.save: of Lightning, or of a script of one's own."""

    writer: str = "torch.save"

    def is_format_of(self, folder: Path) -> bool:
        """True for a zip archive, or a file that is called like one of torch.save."""
        return folder.is_file() and (folder.suffix in ENDINGS or is_zipfile(folder))

    def open_listing(
        self, folder: Path, files: Mapping[str, FileRecord], *, is_verified: bool
    ) -> tuple[Listing, PieceStore]:
        """See `PeerFormat`."""
        tree = Tree(folder.parent)
        tree.add_archive(folder.name, ())
        return tree.listing, tree

    def arrange(
        self, listing: Listing, store: PieceStore, names: ModuleNames | None
    ) -> tuple[Listing, PieceStore]:
        """See `PeerFormat`."""
        return arrange(listing, store, names)
