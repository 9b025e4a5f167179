"""Folders of checkpoints: write one aside and rename it when complete, find them, delete old ones.

runs/step-00000010            complete: a checkpoint gets its name last
runs/.step-00000020.writing   a save in progress, or one that was killed; never loaded
runs/.step-00000005.deleting  an old checkpoint that is being deleted

Ranks write their own files (see listing.py). The `manifest.json` has the size and the checksums of
each, the step, the world size and the optimizers' classes.
"""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import time
import zlib
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from importlib import import_module
from pathlib import Path
from typing import Any, get_args, get_origin, get_type_hints

import torch

from onefold.checkpoint.agreement import LOAD_ANOTHER, NOT_OF_BYTES
from onefold.checkpoint.checked_files import BLOCK_NBYTES, FileRecord, check_size, nbytes_of
from onefold.checkpoint.listing import PeerFormat
from onefold.checkpoint.safetensors import RANK_STEM, SUFFIX
from onefold.errors import CheckpointError


@dataclass(slots=True)
class Draft:
    """A checkpoint that is being written, in a hidden folder beside its target.

    The rank that begins it locks the folder. The lock ends with the process, however that ends, so
    a save in progress is never taken for one that was killed.
    """

    target: Path
    _lock: int = -1

    @property
    def folder(self) -> Path:
        return self.target.parent / f".{self.target.name}.writing"

    def check(self) -> None:
        """Raise `CheckpointError` if the target exists."""
        if os.path.lexists(self.target):
            got = "a file or folder of that name"
            hint = "a checkpoint is never overwritten: save under a new name, or delete it"
            raise CheckpointError(f"{str(self.target)!r} not to exist yet", got, hint=hint)

    def begin(self, nbytes: int = 0) -> None:
        """Create the folder, after deleting the folder of a save that was killed.

        Raises `CheckpointError` if the disk has less than `nbytes` free, if this user may not
        write there, or if another save of this name is in progress.
        """
        try:
            self.target.parent.mkdir(parents=True, exist_ok=True)
            if self.folder.exists() and not _remove_unlocked(self.folder):
                got = "a save of that name that goes on"
                hint = "wait for its ticket, or save under another name"
                raise CheckpointError(f"nobody to be writing {str(self.target)!r}", got, hint=hint)
            room = os.statvfs(self.target.parent)
            free = room.f_bavail * room.f_frsize
            if free < nbytes:
                wanted = f"{nbytes:,} free bytes for checkpoint {str(self.target)!r}"
                hint = "delete something, save with keep=, or save to another disk; "
                hint += "checkpoints that are complete are untouched"
                raise CheckpointError(wanted, f"{free:,}", hint=hint)
            self.folder.mkdir()
            self._lock = os.open(self.folder, os.O_RDONLY)
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            raise CheckpointError(
                f"to write checkpoints in {str(self.target.parent)!r}",
                f"{type(error).__name__}: {error.strerror}",
                hint="save to a directory that this user may write, on a disk with room",
            ) from error

    def commit(self, manifest: Manifest) -> None:
        """Write the manifest and publish: all or nothing, also if the machine stops here."""
        for name, record in manifest.files.items():  # does this rank see the others' files?
            check_size(self.folder / name, record)
        (self.folder / MANIFEST).write_bytes(manifest.encode())
        self.publish()

    def publish(self) -> None:
        """Sync every file and the folder to the disk, then rename the folder to the target."""
        for path in self.folder.iterdir():
            _sync(path)
        _sync(self.folder)
        self.folder.rename(self.target)
        _sync(self.target.parent)
        self._unlock()

    def abandon(self) -> None:
        """Delete the folder of a save that failed, unless another save holds it."""
        if self._lock >= 0:
            shutil.rmtree(self.folder, ignore_errors=True)
        self._unlock()

    def _unlock(self) -> None:
        lock, self._lock = self._lock, -1
        if lock >= 0:
            os.close(lock)


@dataclass(frozen=True, slots=True)
class Found:
    """A checkpoint, and why newer folders beside it were not taken.

    `manifest`: None of another program, so nothing can be verified. `peer`: the format of another
    program, or an earlier one of ours; None: format 2.
    """

    path: Path
    manifest: Manifest | None
    peer: PeerFormat | None = None
    passed_over: list[str] = field(default_factory=list)  # "NAME: why", newest first


Peers = Sequence[PeerFormat]
"""Formats of other programs that are looked for, in order."""


def find(directory: Path, peers: Peers = ()) -> list[Found]:
    """Return `directory` if it is a checkpoint, else the complete ones in it, newest first.

    Raises `CheckpointError` if there is none, with the folders found and why they do not do.
    """
    if not directory.exists():
        raise _none(directory, "nothing there")
    if _is_checkpoint(directory, peers):
        return [_complete(directory, peers)]
    complete, broken = look_in(directory, peers)
    if not complete:
        raise _none(directory, "; ".join(broken) or "no checkpoint in it")
    return complete


def look_in(directory: Path, peers: Peers) -> tuple[list[Found], list[str]]:
    """Return complete checkpoints, newest first, and "NAME: why" of what is none.

    `directory` may be a checkpoint itself, or missing. Raises `CheckpointError` for a file.
    """
    if not directory.exists():
        return [], []
    if not directory.is_dir() and _peer_of(directory, peers) is None:
        raise _none(directory, "a file")
    if not _is_checkpoint(directory, peers):
        return _checkpoints_in(directory, peers)
    try:
        return [_complete(directory, peers)], []
    except CheckpointError as error:
        return [], [f"{directory.name}: {str(error).splitlines()[0]}"]


def files_of(path: Path) -> list[Path]:
    """Return the files of a folder, or the file."""
    return [path] if path.is_file() else [each for each in path.iterdir() if each.is_file()]


def _is_checkpoint(directory: Path, peers: Peers) -> bool:
    is_ours = (directory / MANIFEST).exists() or _has_rank_files(directory)
    return is_ours or _peer_of(directory, peers) is not None


def _has_rank_files(folder: Path) -> bool:
    return any(folder.glob(f"{RANK_STEM}*{SUFFIX}"))


def _peer_of(folder: Path, peers: Peers) -> PeerFormat | None:
    return next((peer for peer in peers if peer.is_format_of(folder)), None)


def _checkpoints_in(directory: Path, peers: Peers) -> tuple[list[Found], list[str]]:
    """Return complete checkpoints, newest first, and "NAME: why" of the other folders."""
    complete: list[tuple[int, str, Found]] = []
    broken: list[str] = []
    for path in sorted(directory.iterdir(), reverse=True):
        if path.name.startswith(".") or not path.is_dir():
            continue
        try:
            found = _complete(path, peers)
        except (CheckpointError, OSError) as error:
            broken.append(f"{path.name}: {str(error).splitlines()[0]}")
        else:
            manifest = found.manifest
            if manifest is None:
                why = f"no {MANIFEST}, so it cannot be verified"
                if found.peer is not None:
                    why = f"of {found.peer.writer}, which loads where this folder itself is passed"
                broken.append(f"{path.name}: {why}")
            else:
                checkpoint = replace(found, passed_over=broken)
                complete.append((manifest.step, manifest.saved_at, checkpoint))
    complete.sort(key=lambda entry: entry[:2], reverse=True)
    return [checkpoint for _, _, checkpoint in complete], broken


def _complete(folder: Path, peers: Peers) -> Found:
    """Return a complete checkpoint, with its manifest unless another program has written it.

    Raises `CheckpointError` if a file is missing or short. Contents are verified when read.
    """
    peer = _peer_of(folder, peers)
    if not (folder / MANIFEST).exists():
        if peer is not None:
            return Found(folder, None, peer)
        if not _has_rank_files(folder):
            raise _none(folder, "no checkpoint in it")
    manifest = read_manifest(folder)
    for name, record in manifest.files.items():
        check_size(folder / name, record)
    return Found(folder, manifest, peer if manifest.format < FORMAT else None)


def prune(newest: Path, keep: int) -> None:
    """Delete the oldest complete checkpoints beside `newest` until `keep` are left with it.

    Also deletes the hidden folders of killed saves and deletions. Links, incomplete checkpoints and
    folders that cannot be read stay.
    """
    for path in newest.parent.iterdir():
        if path.name.startswith(".") and path.suffix in (".writing", ".deleting"):
            _remove_unlocked(path)
    complete, _ = _checkpoints_in(newest.parent, ())
    paths = [checkpoint.path for checkpoint in complete]
    others = [path for path in paths if path != newest and not path.is_symlink()]
    for path in reversed(others[keep - 1 :]):  # the oldest first
        leaving = path.parent / f".{path.name}.deleting"
        path.rename(leaving)
        shutil.rmtree(leaving, ignore_errors=True)


def _remove_unlocked(folder: Path) -> bool:
    """Delete a folder unless a living process locks it. Return True if it is gone."""
    try:
        lock = os.open(folder, os.O_RDONLY)
    except OSError:
        return not folder.exists()
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        shutil.rmtree(folder, ignore_errors=True)
    except OSError:  # locked
        return False
    finally:
        os.close(lock)
    return not folder.exists()


def _sync(path: Path) -> None:
    """Wait until the disk has a file's bytes, or a folder's names."""
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def _none(directory: Path, got: str) -> CheckpointError:
    wanted = f"a checkpoint, or a directory of checkpoints, at {str(directory)!r}"
    hint = "pass the directory that onefold.save wrote, or its parent"
    return CheckpointError(wanted, got, hint=hint)


MANIFEST = "manifest.json"
FORMAT = 2


@dataclass(frozen=True, slots=True)
class OptimizerRecord:
    """One optimizer: its class, and its number of param groups."""

    kind: str  # module and name of the class
    num_groups: int

    def __str__(self) -> str:
        return f"{self.kind} of {self.num_groups} param group{'s' * (self.num_groups != 1)}"


def _now() -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())


def _versions() -> dict[str, str]:
    return {"onefold": str(import_module("onefold").__version__), "torch": str(torch.__version__)}


@dataclass(frozen=True, slots=True)
class Manifest:
    """The facts about a checkpoint besides its tensors."""

    save_id: str
    step: int  # optimizer steps done
    stage: int
    world_size: int
    optimizers: list[OptimizerRecord]
    files: dict[str, FileRecord] = field(default_factory=dict)
    saved_at: str = field(default_factory=_now)  # UTC
    versions: dict[str, str] = field(default_factory=_versions)
    config: dict[str, Any] | None = None  # of a Hugging Face model
    frozen: bool = True  # False: without parameters that did not require gradients
    format: int = FORMAT

    def encode(self) -> bytes:
        """Return JSON on two lines: the checksum, and the text that it covers."""
        body = json.dumps(asdict(self), separators=(",", ":"))
        return f"{_head(body)}\n{body}}}\n".encode()


def read_manifest(folder: Path) -> Manifest:
    """Read a checkpoint's manifest. Raises `CheckpointError`: missing, damaged or newer."""
    path = folder / MANIFEST
    what = f"file {MANIFEST!r} of checkpoint {str(folder)!r} as it was saved"
    try:
        nbytes_of(path)
        text = path.read_bytes().decode()
    except FileNotFoundError:
        wanted = f"file {MANIFEST!r} in checkpoint {str(folder)!r}"
        got = "no such file: its save did not finish, or the file was deleted"
        raise CheckpointError(wanted, got, hint="load an earlier checkpoint") from None
    except (OSError, UnicodeDecodeError) as error:
        raise CheckpointError(what, error, hint=LOAD_ANOTHER) from error
    head, _, rest = text.partition("\n")
    body = rest.removesuffix("}\n")
    if body == rest or head != _head(body):
        raise CheckpointError(what, "other bytes", hint=LOAD_ANOTHER)
    try:
        fields = json.loads(body)
        if type(fields["format"]) is int and fields["format"] > FORMAT:
            got = f"format {fields['format']}, saved by {fields['versions']}"
            hint = "install that version of onefold"
            raise CheckpointError(f"a checkpoint of format {FORMAT} or older", got, hint=hint)
        return _checked_manifest(fields)
    except NOT_OF_BYTES:
        raise
    except Exception as error:
        got = f"{type(error).__name__}: {str(error)[:200]}"
        raise CheckpointError(what, got, hint=LOAD_ANOTHER) from error


def _checked_manifest(fields: dict[str, Any]) -> Manifest:
    """Return a manifest whose fields have their types, with plain names of files."""
    files = {name: FileRecord(**record) for name, record in fields["files"].items()}
    optimizers = [OptimizerRecord(**record) for record in fields["optimizers"]]
    manifest = Manifest(**fields | {"files": files, "optimizers": optimizers})
    for value in (manifest, *files.values(), *optimizers):
        for name, hint in get_type_hints(type(value)).items():
            got, parts = getattr(value, name), get_args(hint) if "|" in str(hint) else (hint,)
            kinds = tuple(get_origin(part) or part for part in parts)
            if not isinstance(got, kinds) or (hint is int and type(got) is not int):
                raise TypeError(f"{name} to be {hint}, got {str(got)[:80]}")
    json.dumps(fields, ensure_ascii=False).encode()  # characters that no console can show
    numbers = (manifest.step, manifest.stage, manifest.world_size - 1, manifest.format)
    if min(*numbers, *(record.nbytes for record in files.values())) < 0:
        raise ValueError("a negative number")
    for name, record in files.items():
        if "/" in name or name in (".", "..") or not (name.isascii() and name.isprintable()):
            raise ValueError(f"a file outside of the folder: {name[:80]!r}")
        if len(record.blocks) != 8 * -(-record.nbytes // BLOCK_NBYTES):
            raise ValueError(f"{len(record.blocks) // 8} checksums of {name!r}")
    return manifest


def _head(body: str) -> str:
    return f'{{"crc32":"{zlib.crc32(body.encode()):08x}","manifest":'
