"""Saving: every rank writes its own pieces, and the last thing that happens is a rename.

    agree       same directory on every rank, nothing there yet, everything can be saved
    write       torch's planner deals out pieces; each rank copies its own into one file
    finish      each rank waits for the disk; the first writes the manifest and renames

The first two are collectives on the caller's thread. With `wait=False` the third is a thread's, and
ranks leave each other notes in the draft's folder: collectives belong to the training loop.
"""

from __future__ import annotations

import json
import os
import threading
import time
import traceback
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any
from uuid import uuid4

import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException

from onefold.checkpoint import contents
from onefold.checkpoint import manifest as manifests
from onefold.checkpoint.blocks import FileRecord
from onefold.checkpoint.contents import MODEL, RANK, SavedState
from onefold.checkpoint.directory import Draft, prune
from onefold.checkpoint.manifest import Manifest
from onefold.checkpoint.storage import WritePlanner, Writer
from onefold.checkpoint.together import as_checkpoint_error, check_same, together
from onefold.collecting import no_garbage
from onefold.engine.engine import Engine
from onefold.engine.registry import engine_of
from onefold.errors import CheckpointError, OnefoldError, expected
from onefold.ticket import DONE, Ticket

NOTES_TIMEOUT_S = 600.0
ENDING_TIMEOUT_S = 30.0
"""So long after its own part is done, a save in the background gives up on the other ranks; the
second once the script is over."""

PENDING = "_onefold_pending_save"
"""The attribute of a module that holds the ticket of a save that goes on in the background."""


def save(
    directory: str | os.PathLike[str],
    module: nn.Module,
    optimizer: object = None,
    *,
    extra: object = None,
    wait: bool = True,
    keep: int | None = None,
) -> Ticket:
    """Save a sharded module, and its optimizer, as the new checkpoint `directory`. A collective.

    Every rank writes its own pieces, to a file system that all ranks see; nothing is gathered, and
    no tensor is copied but on its way to the disk, a few MB at a time. Saved are weights, masters,
    moments, step counts, hyper-parameters, gradients between micro-batches, buffers, the random
    states of every rank, and `extra`. The checkpoint loads at any world size, stage and precision,
    and with `torch.distributed.checkpoint` alone.

    Args:
        directory: does not exist yet; appears at once when everything is on the disk.
        module: what was given to `onefold.shard`.
        optimizer: one or several optimizers of its parameters.
        extra: what else a run needs to go on: the step, the position in the data. Tensors, numbers,
            strings, containers, and objects with a `state_dict()` (schedulers, `GradScaler`), which
            is taken. Each rank's own; `onefold.load` returns it.
        wait: False returns once the state has been copied to the system's page cache: training may
            go on, the ticket's `wait()` returns when the checkpoint is durable. A save that fails
            meanwhile raises at `wait()`, or at the next `save` or `load` of this module.
        keep: of the checkpoints beside this one, delete all but the newest `keep`, this one
            included, after what was written has been read back and compared.

    Returns: a ticket; one of a save that is over if `wait`.

    Raises: CheckpointError, on every rank: the directory exists or cannot be written, ranks pass
        different ones, the disk is full or fails, `extra` cannot be saved.
    """
    engine = engine_of(module)
    finish_pending(module, engine)
    job = _agree(engine, _Asked(directory, module, optimizer, extra, wait, keep))
    writer = _write(engine, job, is_cached=not wait)
    finishing = _Finishing(engine, job.draft, writer, job.manifest, keep)
    if wait:
        finishing.now()
        return DONE
    ticket = finishing.in_background()
    module.__dict__[PENDING] = ticket
    return ticket


def finish_pending(module: nn.Module, engine: Engine) -> None:
    """Wait for a save of this module that goes on in the background; its error is raised here."""
    ticket: Ticket | None = module.__dict__.pop(PENDING, None)
    if ticket is not None:
        together(engine.group, ticket.wait)


@dataclass(frozen=True, slots=True)
class _Asked:
    """What `save` was given on this rank."""

    directory: str | os.PathLike[str]
    module: nn.Module
    optimizer: object
    extra: object
    wait: bool
    keep: int | None


@dataclass(frozen=True, slots=True)
class _WriteJob:
    """A save that every rank can do."""

    draft: Draft
    subject: SavedState
    state: dict[str, Any]
    manifest: Manifest


@dataclass(frozen=True, slots=True)
class _Told:
    """What a rank tells the others before anything is written."""

    choices: tuple[str, bool, int | None]  # path, wait, keep
    buffers: dict[str, int]  # checksums
    nbytes: int
    save_id: str


def _agree(engine: Engine, asked: _Asked) -> _WriteJob:
    """Look at what could go wrong; refuse on every rank before anything is written."""
    jobs: list[_WriteJob] = []

    def look() -> _Told:
        keep = asked.keep
        if keep is not None and (not isinstance(keep, int) or isinstance(keep, bool) or keep < 1):
            hint = "keep=2 leaves this checkpoint and the one before it"
            raise CheckpointError(expected("keep to be None or at least 1", repr(keep), hint=hint))
        draft = Draft(Path(os.path.abspath(asked.directory)))
        subject = SavedState.of(engine, asked.module, asked.optimizer)
        contents.wait_steps(engine)
        if engine.group.rank == 0:
            draft.check()
        state = contents.collect(subject)
        contents.check_readable(state)
        nbytes = contents.own_nbytes(state)
        own = contents.of_rank(subject, asked.extra)
        state[RANK] = {str(engine.group.rank): (own,)}  # a tuple is one object to torch's planner
        manifest = Manifest(
            save_id=uuid4().hex, step=engine.ledger.steps, stage=engine.recipe.stage.number,
            world_size=engine.group.world_size, optimizers=subject.records(),
            config=contents.config_of(asked.module), **manifests.stamp(),
        )  # fmt: skip
        jobs.append(_WriteJob(draft, subject, state, manifest))
        choices = (str(draft.target), asked.wait, keep)
        return _Told(choices, contents.fingerprints(subject.buffers()), nbytes, manifest.save_id)

    everyone = together(engine.group, look)
    first, job = everyone[0], jobs[0]
    choices = [told.choices for told in everyone]
    check_same(choices, "directory, wait and keep", hint="name it by the step, not by rank or time")

    def begin() -> None:
        if engine.group.rank == 0:
            job.draft.begin()
            _check_room(job.draft, sum(told.nbytes for told in everyone) // _copies(engine))

    together(engine.group, begin)
    ((own,),) = job.state[RANK].values()
    for name, buffer in job.subject.buffers().items():
        if any(told.buffers[name] != first.buffers[name] for told in everyone):
            own["buffers"][name] = buffer
    return replace(job, manifest=replace(job.manifest, save_id=first.save_id))


def _copies(engine: Engine) -> int:
    """How many ranks hold, and count, the same bytes."""
    return engine.group.world_size // engine.context.rest_world


def _check_room(draft: Draft, nbytes: int) -> None:
    room = os.statvfs(draft.folder)
    free = room.f_bavail * room.f_frsize
    if free < nbytes:
        draft.abandon()
        raise CheckpointError(
            expected(
                f"{nbytes:,} free bytes for checkpoint {str(draft.target)!r}",
                f"{free:,}",
                hint="delete something, save with keep=, or save to another disk; "
                "checkpoints that are complete are untouched",
            )
        )


def _write(engine: Engine, job: _WriteJob, *, is_cached: bool) -> Writer:
    """Plan together, and write this rank's pieces, to the disk or to the system's page cache."""
    names = job.subject.aliases().items()
    aliases = {f"{MODEL}.{alias}": f"{MODEL}.{name}" for alias, name in names}
    writer = Writer(job.draft.folder, aliases, is_cached=is_cached)
    try:
        with planning():
            dcp.save(
                job.state, storage_writer=writer, planner=WritePlanner(),
                process_group=engine.group.handle, no_dist=engine.group.handle is None,
            )  # fmt: skip
    except BaseException as error:
        writer.files.abandon()
        if engine.group.rank == 0:
            job.draft.abandon()
        if isinstance(error, CheckpointException):
            raise first_failure(error) from error
        raise
    return writer


class _Finishing:
    """The part of a save that waits for disks: inline, or in a thread of its own."""

    def __init__(
        self, engine: Engine, draft: Draft, writer: Writer, manifest: Manifest, keep: int | None
    ) -> None:
        self.group = engine.group
        self.draft = draft
        self.writer = writer
        self.manifest = manifest
        self.keep = keep

    def now(self) -> None:
        """Finish together with the other ranks, by collectives."""
        try:
            records = together(self.group, self._own_records)
            together(self.group, lambda: self._commit(records))
        except BaseException:
            self.writer.files.abandon()
            if self.group.rank == 0:
                self.draft.abandon()
            raise

    def _own_records(self) -> dict[str, FileRecord]:
        return self.writer.files.finish(verify=self.keep is not None)

    def _commit(self, records: list[dict[str, FileRecord]]) -> None:
        """On the first rank, with what all ranks have written: make it a checkpoint."""
        if self.group.rank == 0:
            files = {name: record for of_rank in records for name, record in of_rank.items()}
            self.draft.commit(replace(self.manifest, files=files))
            if self.keep is not None:
                try:
                    prune(self.draft.target, self.keep)
                except OSError as error:  # what was saved is safe
                    warnings.warn(f"old checkpoints were not deleted: {error}", stacklevel=2)

    # in the background

    def in_background(self) -> Ticket:
        """Finish in a thread; the ticket raises what went wrong on any rank."""
        work = _Thread(self._by_notes)
        return Ticket([work], label=f"save of {self.draft.target.name!r}")

    def _by_notes(self) -> None:
        rank = self.group.rank
        try:
            told: dict[str, Any] = {"files": {n: asdict(r) for n, r in self._own_records().items()}}
        except Exception as error:
            for writer in self.writer.files.writers:  # a full disk has no room for the note
                (self.draft.folder / writer.name).unlink(missing_ok=True)
            told = {"error": _said(error)}
        self._leave(f"note-{rank}", told)
        if rank > 0:
            self._await_verdict()
            return
        try:
            notes = [self._await_note(other) for other in range(self.group.world_size)]
            for other, note in enumerate(notes):
                if "error" in note:
                    raise CheckpointError(f"rank {other}: {note['error']}")
                self._path(f"note-{other}").unlink()
            files = [note["files"].items() for note in notes]
            self._commit([{name: FileRecord(**record) for name, record in own} for own in files])
        except Exception as error:
            self.draft.abandon()
            self.draft.folder.mkdir(exist_ok=True)
            self._leave("failed", {"error": _said(error)})
            raise as_checkpoint_error(error) from error

    def _path(self, name: str) -> Path:
        return self.draft.folder / f"{name}.json"

    def _leave(self, name: str, told: dict[str, Any]) -> None:
        """Write a note so that it appears whole."""
        new = self._path(f"{name}-{self.group.rank}-new")
        new.write_text(json.dumps({"save_id": self.manifest.save_id, **told}))
        new.rename(self._path(name))

    def _read(self, name: str) -> dict[str, Any] | None:
        try:
            told = json.loads(self._path(name).read_text())
        except FileNotFoundError:
            return None
        return told if told["save_id"] == self.manifest.save_id else None

    def _await_note(self, rank: int) -> dict[str, Any]:
        for _ in _patiently(f"rank {rank} to finish its files"):
            told = self._read(f"note-{rank}")
            if told is not None:
                return told
        raise AssertionError("waiting ends by an answer or an error")

    def _await_verdict(self) -> None:
        for _ in _patiently("rank 0 to complete the checkpoint"):
            if (self.draft.target / manifests.NAME).exists():
                return
            told = self._read("failed")
            if told is not None:
                raise CheckpointError(told["error"])


def _patiently(what: str) -> Iterator[None]:
    """Yield ever more slowly, until the time is up."""
    start, pause, waited = time.monotonic(), 0.001, 0.0
    while waited < (NOTES_TIMEOUT_S if _is_running() else ENDING_TIMEOUT_S):
        yield
        waited = time.monotonic() - start
        time.sleep(pause)
        pause = min(2 * pause, 0.1)
    raise CheckpointError(
        expected(
            f"{what} within {waited:.0f} s",
            "nothing",
            hint="a rank died or its disk hangs; look for the first error among the other ranks",
        )
    )


def _is_running() -> bool:
    """False once the script is over and the interpreter only waits for threads."""
    return threading.main_thread().is_alive()


def _said(error: Exception) -> str:
    if isinstance(error, OnefoldError | OSError):
        return str(as_checkpoint_error(error))
    return f"{type(error).__name__}: {error}"


class _Thread:
    """Work of a ticket in a thread, which the interpreter waits for when it ends."""

    def __init__(self, run: Any) -> None:
        self._error: BaseException | None = None
        self._run = run
        self._thread = threading.Thread(target=self._keep_error, name="onefold-save")
        self._thread.start()

    def _keep_error(self) -> None:
        try:
            self._run()
        except BaseException as error:
            self._error = error
            if not _is_running():  # nobody will ask
                traceback.print_exception(error)

    def wait(self) -> None:
        self._thread.join()
        if self._error is not None:
            raise self._error

    def is_completed(self) -> bool:
        return not self._thread.is_alive()


@contextmanager
def planning() -> Iterator[None]:
    """Around torch's planner: thousands of small objects, none of them in a cycle.

    Without the collector, which they would set going over everything the process holds (0.25 of
    0.6 s for 300 parameters), and without torch's remark that there is no process group.
    """
    with no_garbage(), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is", UserWarning)
        yield


def first_failure(error: CheckpointException) -> BaseException:
    """What the first rank that failed raised, as an error of ours."""
    rank, (cause, _) = min(error.failures.items())
    if isinstance(cause, CheckpointError):
        return type(cause)(f"rank {rank}: {cause}")
    if isinstance(cause, Exception):
        return CheckpointError(f"rank {rank}: {_said(cause)}")
    return cause
