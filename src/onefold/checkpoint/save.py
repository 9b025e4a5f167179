"""Save a checkpoint: every rank writes its own pieces, and the last act is a rename.

    prepare   every rank checks its arguments and its state; all refuse if one does
    write     each rank knows what it writes, and copies it into its own files
    finish    each rank waits for the disk; rank 0 writes the manifest and renames the folder

`prepare` and `write` are collectives on the caller's thread. With `wait=False` a thread finishes.
"""

import os
import warnings
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any
from uuid import uuid4

from onefold.checkpoint.agreement import as_checkpoint_error, collect, describe, first, together
from onefold.checkpoint.background import BackgroundThread, Notes, poll
from onefold.checkpoint.checked_files import FileRecord
from onefold.checkpoint.contents import Contents, Facts, RankState, claimed_nbytes, config_of
from onefold.checkpoint.directory import MANIFEST, Draft, Manifest, prune
from onefold.checkpoint.packed_weights import refuse_quantized
from onefold.checkpoint.rank_files import RankFiles
from onefold.checkpoint.stages import Modules, Optimizers, Stages
from onefold.errors import CheckpointError, Failure
from onefold.unit.shortage import explained
from onefold.wire.collectives import Group
from onefold.wire.ticket import DONE, Ticket
from onefold.wire.together import announcing, difference

PENDING = "_onefold_pending_save"
"""The attribute of a module that holds the ticket of its save in the background."""


def save(
    directory: str | os.PathLike[str],
    module: Modules,
    optimizer: Optimizers = None,
    *,
    extra: Any = None,
    wait: bool = True,
    keep: int | None = None,
    frozen: bool = True,
) -> Ticket:
    """Save a sharded module, and its optimizer, as the new checkpoint `directory`. A collective.

    Every rank writes its own pieces to a file system that all ranks see. Nothing is gathered, and
    tensors are copied only on their way to the disk, a few MB at a time. Saved are weights,
    masters, moments, step counts, hyper-parameters, gradients between micro-batches, buffers, the
    random states of every rank, averages of `onefold.ema`, the state of `onefold.islands`, and
    `extra`. The checkpoint loads at any world size, stage and
    precision. Its files are safetensors and JSON; torch's `HuggingFaceStorageReader` reads them.

    Args:
        directory: does not exist yet; appears when everything is on the disk.
        module: the module that was given to `onefold.shard`. Stages that `onefold.pipeline` drives
            are saved as one model: pass this rank's stage, or a list of its stages, whose
            parameters have the names of the whole model.
        optimizer: one or several optimizers of its parameters.
        extra: other state that a run needs, such as the step and the position in the data. Tensors,
            numbers, strings, containers, and objects with a `state_dict()` (schedulers,
            `GradScaler`), which is saved. Each rank has its own; `onefold.load` returns it.
        wait: False returns once the system's page cache has a copy of the state. Training may
            go on; the ticket's `wait()` returns when the checkpoint is durable. A save that fails
            later raises at `wait()`, or at the next `save` or `load` of this module.
        keep: delete all but the newest `keep` checkpoints of the parent directory, this one
            included, after the new files were read back and compared.
        frozen: False leaves out parameters that do not require gradients, such as the base of
            adapters. `onefold.load` then leaves these as they are.

    Returns: a ticket, which is done if `wait`.

    Raises: CheckpointError, on every rank: the directory exists or cannot be written, ranks pass
        different ones, the disk is full or fails, `extra` cannot be saved.
    """
    stages = Stages.from_modules(module)

    def prepare() -> tuple[Draft, Contents, Manifest]:
        if keep is not None and (not isinstance(keep, int) or isinstance(keep, bool) or keep < 1):
            hint = "keep=2 leaves this checkpoint and the one before it"
            raise CheckpointError("keep to be None or at least 1", repr(keep), hint=hint)
        draft = Draft(Path(os.path.abspath(directory)))
        models = [model if frozen else model.trainable() for model in stages.models(optimizer)]
        for model in models:
            hint = "keep the files that it was read from, or save onefold.full_state_dict(module)"
            refuse_quantized(model.parameters(), hint, are_kernels=True)
            model.engine.end_failed()
            model.engine.executor.check_stepped()
        model, engine = models[0], models[0].engine
        if model.rank == 0:
            draft.check()
        return draft, Contents.from_models(models, extra), Manifest(
            save_id=uuid4().hex, step=engine.ledger.steps, stage=engine.recipe.stage.number,
            world_size=stages.group.world_size, optimizers=model.records(),
            config=config_of(model.module), frozen=frozen,
        )  # fmt: skip

    with announcing(stages.data_ranks, CheckpointError), explained(stages.ledger, "onefold.save"):
        finish_pending(stages)
        draft, contents, manifest = together(stages.group, prepare)
        stages.compare_messages()
        choices = (str(draft.target), wait, keep)
        is_pipeline = stages.is_pipeline
        facts = partial(contents.facts, choices, is_pipeline=is_pipeline)
        everyone = collect(stages.group, facts, _differing_choices)
        needed = stages.group.total(contents.own_nbytes) + claimed_nbytes(everyone)

        def begin() -> str:
            draft.begin(needed)
            return manifest.save_id

        manifest = replace(manifest, save_id=first(stages.group, begin))
        files = RankFiles(draft.folder, is_cached=not wait)
        job = _Save(stages.group, draft, files, manifest, keep)
        job.write_state(partial(contents.agreed, everyone, is_pipeline=is_pipeline))
        if wait:
            job.publish()
            return DONE
    thread = BackgroundThread(job.finish_by_notes)
    ticket = Ticket([thread], label=f"save of {job.draft.target.name!r}")
    stages.modules[0].__dict__[PENDING] = ticket
    return ticket


def _differing_choices(group: Group, said: Sequence[Facts]) -> Failure | None:
    hint = "name the directory by the step, not by rank or time"
    choices = [facts.choices for facts in said]
    return difference(group, choices, "directory, wait and keep", hint, CheckpointError)


def finish_pending(stages: Stages) -> None:
    """Wait for this module's save in the background, and raise its error."""
    ticket: Ticket | None = stages.modules[0].__dict__.pop(PENDING, None)
    if ticket is not None:
        together(stages.group, ticket.wait)


@dataclass(frozen=True, slots=True)
class _Save:
    """One save on this rank. It has no tensors: a save in the background keeps none alive."""

    group: Group
    draft: Draft
    files: RankFiles
    manifest: Manifest
    keep: int | None

    def write_state(self, state: Callable[[], RankState]) -> None:
        """Write this rank's state, to the disk or to the page cache. A collective."""
        try:
            together(self.group, lambda: self.files.write_files(state()))
        except BaseException:
            self._abandon()
            raise

    def publish(self) -> None:
        """Wait for all ranks' disks and publish the checkpoint. A collective."""
        try:
            own = together(self.group, self._finish_files)
            records = self.group.gather_at_first(own)
            first(self.group, lambda: self._commit(records))
        except BaseException:
            self._abandon()
            raise

    def _abandon(self) -> None:
        self.files.abandon()
        self.draft.abandon()

    def _finish_files(self) -> dict[str, FileRecord]:
        return self.files.seal_files(verify=self.keep is not None)

    def _commit(self, records: list[dict[str, FileRecord]]) -> None:
        """On rank 0: publish the checkpoint with the files of all ranks."""
        files = {name: record for of_rank in records for name, record in of_rank.items()}
        self.draft.commit(replace(self.manifest, files=files))
        if self.keep is not None:
            try:
                prune(self.draft.target, self.keep)
            except OSError as error:  # the new checkpoint is safe
                warnings.warn(f"old checkpoints were not deleted: {error}", stacklevel=2)

    def finish_by_notes(self) -> None:
        """Finish without collectives, in a thread of each rank."""
        rank, folder = self.group.rank, self.draft.folder
        notes = Notes(folder, rank, self.manifest.save_id)
        try:
            own: dict[str, Any] = {n: asdict(r) for n, r in self._finish_files().items()}
            notes.write_note(f"note-{rank}", {"files": own})
        except Exception as error:
            for writer in self.files.writers:  # a full disk has no room for the note
                (folder / writer.name).unlink(missing_ok=True)
            notes.write_note(f"note-{rank}", {"error": describe(error)})
        if rank > 0:
            done = self.draft.target / MANIFEST
            verdict = poll(
                lambda: {} if done.exists() else notes.read_note("failed"),
                "rank 0 to complete the checkpoint",
            )
            if verdict:
                raise CheckpointError(verdict["error"])
            return
        try:
            self._commit(self._records_of_all(notes))
        except Exception as error:
            self.draft.abandon()
            folder.mkdir(exist_ok=True)
            notes.write_note("failed", {"error": describe(error)})
            raise as_checkpoint_error(error) from error

    def _records_of_all(self, notes: Notes) -> list[dict[str, FileRecord]]:
        """On rank 0: wait for the notes of all ranks, and raise the first error."""
        names = [f"note-{rank}" for rank in range(self.group.world_size)]
        said = [
            poll(lambda name=name: notes.read_note(name), f"rank {rank} to finish its files")
            for rank, name in enumerate(names)
        ]
        for rank, note in enumerate(said):
            if "error" in note:
                raise CheckpointError(f"rank {rank}: {note['error']}")
        for name in names:
            notes.path(name).unlink()
        return [
            {name: FileRecord(**record) for name, record in note["files"].items()} for note in said
        ]
