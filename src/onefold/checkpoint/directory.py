"""Where checkpoints lie: written aside and renamed when complete, found again, deleted when old.

runs/step-00000010           complete: it has a manifest, or it would not have its name
runs/.step-00000020.writing  a save that goes on, or one that was cut off; never loaded
runs/.step-00000005.deleting an old one on its way out
"""

from __future__ import annotations

import fcntl
import os
import shutil
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from onefold.checkpoint import manifest as manifests
from onefold.checkpoint.blocks import BlockWriter, check_size
from onefold.checkpoint.manifest import Manifest
from onefold.errors import CheckpointError, expected

METADATA = ".metadata"
"""The file by which `torch.distributed.checkpoint` knows a checkpoint."""


@dataclass(slots=True)
class Draft:
    """A checkpoint that is being written, beside the place where it will be.

    The rank that begins it holds a lock on its folder, which ends with the process however that
    ends: so nobody takes a save that goes on for one that was cut off.
    """

    target: Path
    _lock: int = -1

    @property
    def folder(self) -> Path:
        return self.target.parent / f".{self.target.name}.writing"

    def check(self) -> None:
        """Raise `CheckpointError` if the target exists or cannot be created."""
        if os.path.lexists(self.target):
            raise CheckpointError(
                expected(
                    f"{str(self.target)!r} not to exist yet",
                    "something of that name",
                    hint="a checkpoint is never overwritten: save under a new name, or delete it",
                )
            )

    def begin(self) -> None:
        """Create the folder, empty: what a save that was cut off has left goes."""
        try:
            self.target.parent.mkdir(parents=True, exist_ok=True)
            if self.folder.exists() and not remove_unlocked(self.folder):
                raise CheckpointError(
                    expected(
                        f"nobody to be writing {str(self.target)!r}",
                        "a save of that name that goes on",
                        hint="wait for its ticket, or save under another name",
                    )
                )
            self.folder.mkdir()
            self._lock = os.open(self.folder, os.O_RDONLY)
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            raise CheckpointError(
                expected(
                    f"to write checkpoints in {str(self.target.parent)!r}",
                    f"{type(error).__name__}: {error.strerror}",
                    hint="save to a directory that this user may write, on a disk with room",
                )
            ) from error

    def commit(self, manifest: Manifest) -> None:
        """Make the draft a checkpoint: all or nothing, also if the machine stops here."""
        for name, record in manifest.files.items():  # does this rank see what the others wrote?
            check_size(self.folder / name, record)
        path = self.folder / manifests.NAME
        new = self.folder / f"{manifests.NAME}.new"
        writer = BlockWriter(new)
        try:
            writer.write(manifest.encode())
        finally:
            writer.finish()
        new.rename(path)
        self.publish()

    def publish(self) -> None:
        """Give the folder its name, once everything in it is on the disk."""
        for path in self.folder.iterdir():
            _sync(path)
        _sync(self.folder)
        self.folder.rename(self.target)
        _sync(self.target.parent)
        self._unlock()

    def abandon(self) -> None:
        """Remove the folder of a save that failed, unless another save holds it."""
        if self._lock >= 0:
            shutil.rmtree(self.folder, ignore_errors=True)
        self._unlock()

    def _unlock(self) -> None:
        lock, self._lock = self._lock, -1
        if lock >= 0:
            os.close(lock)


@dataclass(frozen=True, slots=True)
class Found:
    """What a directory holds: the checkpoint to load, and those that cannot be."""

    path: Path
    manifest: Manifest | None  # None: written by another library, so it cannot be verified
    passed_over: list[str] = field(default_factory=list)  # "NAME: why", newest first


def find(directory: Path) -> list[Found]:
    """The checkpoint that `directory` is, or the complete ones that it holds, newest first.

    Raises `CheckpointError` if there is none, saying what is there and why it will not do.
    """
    if not directory.is_dir():
        what = "a file" if directory.exists() else "nothing there"
        raise _none(directory, what)
    if is_checkpoint(directory):
        return [Found(directory, complete(directory))]
    found: list[tuple[int, str, Path, Manifest]] = []
    broken: list[str] = []
    for path in sorted(directory.iterdir(), reverse=True):
        if path.name.startswith(".") or not path.is_dir():
            continue
        try:
            manifest = complete(path)
        except (CheckpointError, OSError) as error:
            broken.append(f"{path.name}: {str(error).splitlines()[0]}")
        else:
            if manifest is None:
                broken.append(f"{path.name}: no {manifests.NAME}, so it cannot be verified")
            else:
                found.append((manifest.step, manifest.saved_at, path, manifest))
    if not found:
        raise _none(directory, "; ".join(broken) or "no checkpoint in it")
    found.sort(key=lambda each: each[:2], reverse=True)
    return [Found(path, manifest, list(broken)) for _, _, path, manifest in found]


def is_checkpoint(folder: Path) -> bool:
    """True for a folder that is a checkpoint itself, complete or not, of ours or of torch."""
    return (folder / manifests.NAME).exists() or (folder / METADATA).exists()


def complete(folder: Path) -> Manifest | None:
    """The manifest of a folder whose files are all there, in full length; None if not of ours.

    Raises `CheckpointError` if something is missing. Contents are verified when they are read.
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

    What saves and deletions that were cut off have left goes too. Others are not touched: links,
    checkpoints that are not complete, and folders that cannot be read.
    """
    for path in newest.parent.iterdir():
        if path.name.startswith(".") and path.suffix in (".writing", ".deleting"):
            remove_unlocked(path)
    others = []
    for path in newest.parent.iterdir():
        if path == newest or path.is_symlink() or path.name.startswith("."):
            continue
        with suppress(CheckpointError, OSError):
            manifest = complete(path) if path.is_dir() else None
            if manifest is not None:
                others.append((manifest.step, manifest.saved_at, path))
    for _, _, path in sorted(others)[: max(0, len(others) - (keep - 1))]:
        leaving = path.parent / f".{path.name}.deleting"
        path.rename(leaving)
        shutil.rmtree(leaving, ignore_errors=True)


def remove_unlocked(folder: Path) -> bool:
    """Delete a folder unless a process that is alive holds its lock; whether it is gone."""
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
    """Have the disk keep a file, or a folder's names."""
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def _none(directory: Path, got: str) -> CheckpointError:
    return CheckpointError(
        expected(
            f"a checkpoint, or a directory of checkpoints, at {str(directory)!r}",
            got,
            hint="pass what onefold.save was given, or the directory above it",
        )
    )
