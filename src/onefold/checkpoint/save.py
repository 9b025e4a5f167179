"""Save a checkpoint: every rank writes its own pieces, and the last act is a rename.

    prepare   every rank checks its arguments and its state; all refuse if one does
    write     torch's planner deals out pieces; each rank copies its own into one file
    finish    each rank waits for the disk; rank 0 writes the manifest and renames the folder

`prepare` and `write` are collectives on the caller's thread. With `wait=False` a thread finishes.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any
from uuid import uuid4

import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException

from onefold.checkpoint import contents
from onefold.checkpoint import manifest as manifests
from onefold.checkpoint.agreement import (
    as_checkpoint_error,
    collect,
    describe,
    first,
    refusal,
    together,
)
from onefold.checkpoint.background import BackgroundThread, Notes, poll
from onefold.checkpoint.checked_files import FileRecord
from onefold.checkpoint.contents import MODEL, OPTIM, RANK, ShardedModel
from onefold.checkpoint.directory import Draft, prune
from onefold.checkpoint.manifest import Manifest
from onefold.checkpoint.stages import Modules, Optimizers, Stages, merge_groups, merged
from onefold.checkpoint.storage import RankFiles, WritePlanner, Writer
from onefold.checkpoint.tied_names import RankNames, join_names
from onefold.engine.engine import Engine
from onefold.engine.registry import engine_of
from onefold.errors import CheckpointError, Failure, as_agreed
from onefold.tier.host import no_garbage
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
    random states of every rank, and `extra`. The checkpoint loads at any world size, stage and
    precision, and with `torch.distributed.checkpoint` alone.

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
    stages = Stages.of(module)

    def prepare() -> tuple[_Save, list[ShardedModel], dict[str, Any]]:
        if keep is not None and (not isinstance(keep, int) or isinstance(keep, bool) or keep < 1):
            hint = "keep=2 leaves this checkpoint and the one before it"
            raise refusal("keep to be None or at least 1", repr(keep), hint=hint)
        draft = Draft(Path(os.path.abspath(directory)))
        models = [each if frozen else each.trainable() for each in stages.models(optimizer)]
        for each in models:
            _refuse_multiplied(each)
            each.wait_steps()
        names = RankNames(
            {alias: name for each in models for alias, name in each.aliases().items()},
            {name: tie for each in models for name, tie in each.ties().items()},
        )
        if stages.is_pipeline:
            models = [each.without_copies() for each in models]
        first, engine = models[0], models[0].engine
        if first.rank == 0:
            draft.check()
        states = [contents.collect(each) for each in models]
        state = merged(states) if stages.is_pipeline else states[0]
        contents.check_readable(state)
        own = contents.plain(extra)
        contents.check_readable((own,), "extra")  # a tuple is checked as one object
        own = {"extra": own, "random": contents.random_states(engine), "buffers": {}}
        state[RANK] = {str(first.rank): (own,)}  # and torch's planner takes it as one
        manifest = Manifest(
            save_id=uuid4().hex, step=engine.ledger.steps, stage=engine.recipe.stage.number,
            world_size=stages.group.world_size, optimizers=first.records(),
            config=contents.config_of(first.module), frozen=frozen,
        )  # fmt: skip
        files = RankFiles(draft.folder, is_cached=not wait)
        return _Save(stages, draft, files, manifest, keep, names), models, state

    with announcing(engine_of(stages.modules[0]).group, CheckpointError):
        finish_pending(stages)
        job, models, state = together(stages.group, prepare)
        job.agree(models, state)
        job.write(state)
        if wait:
            job.finish()
            return DONE
    thread = BackgroundThread(job.finish_by_notes)
    ticket = Ticket([thread], label=f"save of {job.draft.target.name!r}")
    stages.modules[0].__dict__[PENDING] = ticket
    return ticket


def _refuse_multiplied(model: ShardedModel) -> None:
    """Raise `CheckpointError` for bytes that the kernels of another processor would not read."""
    for parameter in model.parameters():
        if parameter.decoded is not None and parameter.decoded.is_multiplied:
            raise refusal(
                f"parameter {parameter.fqn!r} to be a plain tensor, or packed by bitsandbytes",
                "one that rest= has packed for this processor",
                hint="keep the files that it was read from, or save "
                "onefold.full_state_dict(module), which decodes it",
            )


def finish_pending(stages: Stages) -> None:
    """Wait for this module's save in the background, and raise its error."""
    ticket: Ticket | None = stages.modules[0].__dict__.pop(PENDING, None)
    if ticket is not None:
        together(stages.group, ticket.wait)


@dataclass(frozen=True, slots=True)
class _Summary:
    """The facts that ranks compare before anything is written."""

    choices: tuple[str, bool, int | None]  # path, wait, keep
    buffers: dict[str, int]  # checksums
    nbytes: int
    save_id: str
    groups: list[dict[str, Any]]  # of the parts of one optimizer, where stages have parts
    names: RankNames


@dataclass(slots=True)
class _Save:
    """One save on this rank. It has no tensors: a save in the background keeps none alive."""

    stages: Stages
    draft: Draft
    files: RankFiles
    manifest: Manifest
    keep: int | None
    names: RankNames
    aliases: dict[str, str] = field(default_factory=dict)  # of all ranks

    @property
    def group(self) -> Group:
        return self.stages.group

    def agree(self, models: Sequence[ShardedModel], state: dict[str, Any]) -> None:
        """Compare all ranks' summaries, and create the folder if the disk has room. A collective.

        Adds to `state` the buffers of this rank if ranks have different ones, and the parameters of
        other stages to the param groups.
        """
        buffers = {name: each for model in models for name, each in model.buffers().items()}
        ((own,),) = state[RANK].values()
        groups = state[OPTIM]["param_groups"] if self.stages.is_pipeline and OPTIM in state else []

        def summary() -> _Summary:
            choices = (str(self.draft.target), self.files.is_cached, self.keep)
            nbytes = contents.own_nbytes({k: v for k, v in state.items() if k != RANK})
            prints = contents.fingerprints(buffers)
            return _Summary(choices, prints, nbytes, self.manifest.save_id, groups, self.names)

        def judge(group: Group, said: Sequence[_Summary]) -> Failure | None:
            choices = [rank.choices for rank in said]
            hint = "name the directory by the step, not by rank or time"
            return difference(group, choices, "directory, wait and keep", hint, CheckpointError)

        everyone = collect(self.group, summary, judge)
        needed = sum(each.nbytes for each in everyone) // _copies(models[0].engine)
        first(self.group, lambda: self.draft.begin(needed))
        self.manifest = replace(self.manifest, save_id=everyone[0].save_id)
        for name, buffer in buffers.items():
            if len({each.buffers[name] for each in everyone if name in each.buffers}) > 1:
                own["buffers"][name] = buffer
        self.aliases = join_names(each.names for each in everyone)
        if groups:
            state[OPTIM]["param_groups"] = merge_groups([each.groups for each in everyone])

    def write(self, state: dict[str, Any]) -> None:
        """Plan together and write this rank's pieces, to the disk or to the page cache."""
        aliases = {f"{MODEL}.{alias}": f"{MODEL}.{name}" for alias, name in self.aliases.items()}
        handle = self.group.handle
        try:
            with planning():
                dcp.save(
                    state, storage_writer=Writer(self.files, aliases), planner=WritePlanner(),
                    process_group=handle, no_dist=handle is None,
                )  # fmt: skip
        except BaseException as error:
            self._abandon()
            if isinstance(error, CheckpointException):
                raise first_failure(error, self.group) from error
            raise

    def finish(self) -> None:
        """Wait for all ranks' disks and publish the checkpoint. A collective."""
        try:
            records = collect(self.group, self._finish_files)
            first(self.group, lambda: self._commit(records))
        except BaseException:
            self._abandon()
            raise

    def _abandon(self) -> None:
        self.files.abandon()
        self.draft.abandon()

    def _finish_files(self) -> dict[str, FileRecord]:
        return self.files.finish(verify=self.keep is not None)

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
            notes.write(f"note-{rank}", {"files": own})
        except Exception as error:
            for writer in self.files.writers:  # a full disk has no room for the note
                (folder / writer.name).unlink(missing_ok=True)
            notes.write(f"note-{rank}", {"error": describe(error)})
        if rank > 0:
            done = self.draft.target / manifests.NAME
            verdict = poll(
                lambda: {} if done.exists() else notes.read("failed"),
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
            notes.write("failed", {"error": describe(error)})
            raise as_checkpoint_error(error) from error

    def _records_of_all(self, notes: Notes) -> list[dict[str, FileRecord]]:
        """On rank 0: wait for the notes of all ranks, and raise the first error."""
        names = [f"note-{rank}" for rank in range(self.group.world_size)]
        found = [
            poll(lambda name=name: notes.read(name), f"rank {rank} to finish its files")
            for rank, name in enumerate(names)
        ]
        for rank, note in enumerate(found):
            if "error" in note:
                raise CheckpointError(f"rank {rank}: {note['error']}")
        for name in names:
            notes.path(name).unlink()
        return [
            {name: FileRecord(**record) for name, record in note["files"].items()} for note in found
        ]


def _copies(engine: Engine) -> int:
    """Return how many ranks hold, and count, the same bytes."""
    return engine.group.world_size // engine.context.rest_world


@contextmanager
def planning() -> Iterator[None]:
    """Suspend the garbage collector, and torch's warning about a missing process group.

    torch's planner makes thousands of small objects and no cycles. They start collections over
    everything the process holds (0.25 of 0.6 s for 300 parameters).
    """
    with no_garbage(), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is", UserWarning)
        yield


def first_failure(error: CheckpointException, group: Group) -> BaseException:
    """Return this rank's own error, or that of the first rank that failed as the others raise it.

    torch has every rank of a plan fail together.
    """
    rank, (cause, _) = min(error.failures.items())
    if group.rank in error.failures:
        return as_agreed(as_checkpoint_error(error.failures[group.rank][0]))
    return Failure.of(as_checkpoint_error(cause), rank, CheckpointError).error()
