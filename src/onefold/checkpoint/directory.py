"""Folders of checkpoints: write one aside and rename it when complete, find them, delete old ones.

runs/step-00000010            complete: a checkpoint gets its name last
runs/.step-00000020.writing   a save in progress, or one that was killed; never loaded
runs/.step-00000005.deleting  an old checkpoint that is being deleted
"""

from __future__ import annotations

import fcntl
import os
import shutil
from dataclasses import dataclass, field
from pathlib import Path

from onefold.checkpoint import manifest as manifests
from onefold.checkpoint.agreement import refusal
from onefold.checkpoint.checked_files import check_size
from onefold.checkpoint.manifest import Manifest
from onefold.errors import CheckpointError

METADATA = ".metadata"
"""The file by which `torch.distributed.checkpoint` recognises a checkpoint."""


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
            raise refusal(
                f"{str(self.target)!r} not to exist yet",
                "a file or folder of that name",
                hint="a checkpoint is never overwritten: save under a new name, or delete it",
            )

    def begin(self, nbytes: int = 0) -> None:
        """Create the folder, after deleting the folder of a save that was killed.

        Raises `CheckpointError` if the disk has less than `nbytes` free, if this user may not
        write there, or if another save of this name is in progress.
        """
        try:
            self.target.parent.mkdir(parents=True, exist_ok=True)
            if self.folder.exists() and not _remove_unlocked(self.folder):
                raise refusal(
                    f"nobody to be writing {str(self.target)!r}",
                    "a save of that name that goes on",
                    hint="wait for its ticket, or save under another name",
                )
            room = os.statvfs(self.target.parent)
            free = room.f_bavail * room.f_frsize
            if free < nbytes:
                raise refusal(
                    f"{nbytes:,} free bytes for checkpoint {str(self.target)!r}",
                    f"{free:,}",
                    hint="delete something, save with keep=, or save to another disk; "
                    "checkpoints that are complete are untouched",
                )
            self.folder.mkdir()
            self._lock = os.open(self.folder, os.O_RDONLY)
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            raise refusal(
                f"to write checkpoints in {str(self.target.parent)!r}",
                f"{type(error).__name__}: {error.strerror}",
                hint="save to a directory that this user may write, on a disk with room",
            ) from error

    def commit(self, manifest: Manifest) -> None:
        """Write the manifest and publish: all or nothing, also if the machine stops here."""
        for name, record in manifest.files.items():  # does this rank see the others' files?
            check_size(self.folder / name, record)
        (self.folder / manifests.NAME).write_bytes(manifest.encode())
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
    """A checkpoint, and why newer folders beside it were not taken."""

    path: Path
    manifest: Manifest | None  # None: written by another library, so nothing can be verified
    passed_over: list[str] = field(default_factory=list)  # "NAME: why", newest first


def find(directory: Path) -> list[Found]:
    """Return `directory` if it is a checkpoint, else the complete ones in it, newest first.

    Raises `CheckpointError` if there is none, with the folders found and why they do not do.
    """
    if not directory.is_dir():
        raise _none(directory, "a file" if directory.exists() else "nothing there")
    if any((directory / name).exists() for name in (manifests.NAME, METADATA)):
        return [Found(directory, _complete(directory))]
    complete, broken = _checkpoints_in(directory)
    if not complete:
        raise _none(directory, "; ".join(broken) or "no checkpoint in it")
    return complete


def _checkpoints_in(directory: Path) -> tuple[list[Found], list[str]]:
    """Return complete checkpoints, newest first, and "NAME: why" of the other folders."""
    complete: list[tuple[int, str, Found]] = []
    broken: list[str] = []
    for path in sorted(directory.iterdir(), reverse=True):
        if path.name.startswith(".") or not path.is_dir():
            continue
        try:
            manifest = _complete(path)
        except (CheckpointError, OSError) as error:
            broken.append(f"{path.name}: {str(error).splitlines()[0]}")
        else:
            if manifest is None:
                broken.append(f"{path.name}: no {manifests.NAME}, so it cannot be verified")
            else:
                found = Found(path, manifest, broken)
                complete.append((manifest.step, manifest.saved_at, found))
    complete.sort(key=lambda each: each[:2], reverse=True)
    return [found for _, _, found in complete], broken


def _complete(folder: Path) -> Manifest | None:
    """Return the manifest of a complete checkpoint; None for one of another library.

    Raises `CheckpointError` if a file is missing or short. Contents are verified when read.
    """
    if not (folder / manifests.NAME).exists():
        if (folder / METADATA).exists():
            return None
        if not any(folder.glob("*.distcp")):
            raise _none(folder, "no checkpoint in it")
    manifest = manifests.read(folder)
    for name, record in manifest.files.items():
        check_size(folder / name, record)
    return manifest


def prune(newest: Path, keep: int) -> None:
    """Delete the oldest complete checkpoints beside `newest` until `keep` are left with it.

    Also deletes the hidden folders of killed saves and deletions. Links, incomplete checkpoints and
    folders that cannot be read stay.
    """
    for path in newest.parent.iterdir():
        if path.name.startswith(".") and path.suffix in (".writing", ".deleting"):
            _remove_unlocked(path)
    complete, _ = _checkpoints_in(newest.parent)
    others = [each.path for each in complete if each.path != newest and not each.path.is_symlink()]
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
    return refusal(
        f"a checkpoint, or a directory of checkpoints, at {str(directory)!r}",
        got,
        hint="pass the directory that onefold.save was given, or the one above it",
    )
