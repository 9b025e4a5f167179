"""Load a checkpoint: each rank reads its own rows, from whichever ranks wrote them.

choose    the newest complete checkpoint, the same on every rank
compare   names, shapes, optimizers: one message lists all mismatches, and nothing is changed
read      torch's planner finds the pieces; each is verified as it is read
finish    weights follow masters, optimizers get their states, generators are set
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException

from onefold.checkpoint.agreement import Damaged, collect, together
from onefold.checkpoint.contents import RANK, restore_random_states, spread_ties
from onefold.checkpoint.directory import Found, find
from onefold.checkpoint.save import finish_pending
from onefold.checkpoint.stages import Modules, Optimizers, ShardedModel, Stages
from onefold.checkpoint.storage import Reader, ReadPlanner, first_failure, planning, read_metadata
from onefold.checkpoint.targets import Targets
from onefold.engine.registry import engine_of
from onefold.errors import CheckpointError, Failure, is_agreed
from onefold.wire.collectives import Group
from onefold.wire.together import announcing, difference


def load(directory: str | os.PathLike[str], module: Modules, optimizer: Optimizers = None) -> Any:
    """Load a checkpoint into a sharded module, and its optimizer, in place. A collective.

    World size, stage, precision and units may differ from those of the save: every rank reads its
    own rows of every parameter, and nothing else. At the same world size the run goes on bit for
    bit. A rank gets the random states of the saved rank of the same number, if there was one.

    Args:
        directory: a checkpoint, or a directory of checkpoints, whose newest complete one is loaded;
            a warning lists the others that were passed over, and why. Checkpoints that
            `torch.distributed.checkpoint` has written load too, but cannot be verified.
        module: the module that was given to `onefold.shard`; of a pipeline as in `onefold.save`.
            The checkpoint may have been saved with or without one.
        optimizer: as it was given to `onefold.save`; None loads the weights alone.

    Returns: the `extra` that the rank of the same number saved (of rank r modulo the saved world).

    Raises: CheckpointError, on every rank, with the file or the parameter: nothing to load, another
        model or optimizer, a newer format, damaged files. Nothing is changed before tensors are
        read. If tensors are damaged, older checkpoints of the directory are tried; without one the
        module holds a mixture of old and new values, and must not be trained.
    """
    stages = Stages.of(module)
    with announcing(engine_of(stages.modules[0]).group, CheckpointError):
        finish_pending(stages)
        return _load_newest(directory, stages, optimizer)


def _load_newest(directory: str | os.PathLike[str], stages: Stages, optimizer: Optimizers) -> Any:
    """Load the newest checkpoint that is not damaged, and return this rank's `extra`."""
    group = stages.group

    def prepare() -> tuple[str, list[ShardedModel]]:
        path = os.path.abspath(directory)
        models = stages.models(optimizer)
        for model in models:
            model.wait_steps()
        return path, models

    path, models = together(group, prepare)
    is_first = group.rank == 0
    everyone = collect(
        group, lambda: (path, find(Path(path)) if is_first else []), _differing_directory
    )
    candidates = everyone[0][1]
    passed_over = list(candidates[0].passed_over)
    for checkpoint in candidates:
        try:
            extra = _load(stages, models, checkpoint)
        except BaseException as error:
            if checkpoint is candidates[-1] or not is_agreed(error):
                raise
            # ranks may have failed in several ways: all try the next one, or none
            if not any(group.gather(isinstance(error, Damaged))):
                raise
            passed_over.append(f"{checkpoint.path.name}: {str(error).splitlines()[0]}")
            continue
        if passed_over and is_first:
            others = "; ".join(passed_over)
            warnings.warn(f"loaded {checkpoint.path.name}, passed over {others}", stacklevel=3)
        return extra
    raise AssertionError("there is at least one candidate, and the last returns or raises")


def _differing_directory(group: Group, said: Sequence[tuple[str, list[Found]]]) -> Failure | None:
    hint, paths = "every rank loads from the same place", [path for path, _ in said]
    return difference(group, paths, "directory", hint, CheckpointError)


def _load(stages: Stages, models: list[ShardedModel], checkpoint: Found) -> Any:
    """Load one checkpoint, and return this rank's `extra`."""
    group = stages.group
    if checkpoint.manifest is not None and not checkpoint.manifest.frozen:
        models = [model.trainable() for model in models]
    elsewhere = _names_of_stages(stages, models)

    def aim() -> list[Targets]:
        metadata = read_metadata(checkpoint)
        others = spread_ties(metadata)
        return [Targets(model, checkpoint, metadata, elsewhere, others) for model in models]

    targets = together(group, aim)
    reader = Reader(checkpoint, targets[0].metadata)
    objects = _read(group, reader, _union(target.objects() for target in targets))
    (of_rank,) = objects.get(f"{RANK}.{targets[0].own_rank}") or ({},)
    states = of_rank.get("modules") or [{}]
    states += states[-1:] * len(targets)  # a rank may have more stages than the one that saved
    pairs = list(zip(targets, states, strict=False))
    is_same_world = targets[0].saved_ranks == group.world_size

    def compare() -> None:
        for target, state in pairs:
            target.compare(objects)
            target.compare_companions(state, is_same_world=is_same_world)

    together(group, compare)
    own_tensors = together(group, lambda: [target.tensors() for target in targets])
    tensors = _read_parts(group, reader, own_tensors)
    together(
        group,
        lambda: [target.finish(objects, own) for target, own in zip(targets, tensors, strict=True)],
    )
    for target, state in pairs:
        target.resume(state, is_same_world=is_same_world)
    if of_rank and targets[0].own_rank == group.rank:
        _restore_random_and_buffers(models, of_rank)
    return of_rank.get("extra")  # None of another library


def _restore_random_and_buffers(models: list[ShardedModel], of_rank: dict[str, Any]) -> None:
    restore_random_states(models[0].engine, of_rank["random"])
    for model in models:
        for name, buffer in model.buffers().items():
            if name in of_rank["buffers"]:
                buffer.copy_(of_rank["buffers"][name])


def _names_of_stages(stages: Stages, models: list[ShardedModel]) -> set[str]:
    """The names that stages of a pipeline have, on all ranks; none without a pipeline."""
    if not stages.is_pipeline:
        return set()
    own = [name for model in models for name in model.all_names()]
    return {name for names in stages.group.gather(own) for name in names}


def _union(parts: Iterable[dict[str, Any]]) -> dict[str, Any]:
    return {name: value for part in parts for name, value in part.items()}


def _read_parts(group: Group, reader: Reader, parts: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Read by name for each module of a rank. Stages may call a weight that they share the same."""
    values = _read(group, reader, _union(parts))
    for part in parts:
        for name, own in part.items():
            if not isinstance(own, Tensor):
                part[name] = values[name]
            elif own is not values[name]:
                own.copy_(values[name])
    return parts


def _read(group: Group, reader: Reader, wanted: dict[str, Any]) -> dict[str, Any]:
    """Read by name: tensors in place, objects as new values."""
    try:
        with planning():
            dcp.load(
                wanted, storage_reader=reader, planner=ReadPlanner(),
                process_group=group.handle, no_dist=group.handle is None,
            )  # fmt: skip
    except CheckpointException as error:
        raise first_failure(error, group) from error
    return wanted
