"""Load a checkpoint: each rank reads its own rows, from whichever ranks wrote them.

choose    the newest complete checkpoint, the same on every rank
compare   names, shapes, optimizers: one message lists all mismatches, and nothing is changed
read      torch's planner finds the pieces; each is verified as it is read
finish    weights follow masters, optimizers get their states, generators are set
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.optim import Optimizer

from onefold.checkpoint.agreement import Damaged, check_same, gather_together, together
from onefold.checkpoint.contents import RANK, ShardedModel, restore_random_states
from onefold.checkpoint.directory import Found, find
from onefold.checkpoint.save import finish_pending, first_failure, planning
from onefold.checkpoint.storage import Reader, ReadPlanner, read_metadata
from onefold.checkpoint.targets import Targets
from onefold.engine.registry import engine_of
from onefold.layout.units import uncompiled
from onefold.wire.collectives import Group


def load(
    directory: str | os.PathLike[str],
    module: nn.Module,
    optimizer: Optimizer | Sequence[Optimizer] | None = None,
) -> Any:
    """Load a checkpoint into a sharded module, and its optimizer, in place. A collective.

    World size, stage, precision and units may differ from those of the save: every rank reads its
    own rows of every parameter, and nothing else. At the same world size the run goes on bit for
    bit. A rank gets the random states of the saved rank of the same number, if there was one.

    Args:
        directory: a checkpoint, or a directory of checkpoints, whose newest complete one is loaded;
            a warning lists the others that were passed over, and why. Checkpoints that
            `torch.distributed.checkpoint` has written load too, but cannot be verified.
        module: the module that was given to `onefold.shard`.
        optimizer: as it was given to `onefold.save`; None loads the weights alone.

    Returns: the `extra` that the rank of the same number saved (of rank r modulo the saved world).

    Raises: CheckpointError, on every rank, with the file or the parameter: nothing to load, another
        model or optimizer, a newer format, damaged files. Nothing is changed before tensors are
        read. If tensors are damaged, older checkpoints of the directory are tried; without one the
        module holds a mixture of old and new values, and must not be trained.
    """
    module = uncompiled(module)
    engine = engine_of(module)
    finish_pending(module, engine)

    def prepare() -> tuple[str, ShardedModel]:
        path = os.path.abspath(directory)
        model = ShardedModel.of(engine, module, optimizer)
        model.wait_steps()
        return path, model

    path, model = together(engine.context.everyone, prepare)
    everyone = gather_together(
        engine.context.everyone, lambda: (path, find(Path(path)) if model.rank == 0 else [])
    )
    paths = [each for each, _ in everyone]
    check_same(paths, "directory", hint="every rank loads from the same place")
    candidates = everyone[0][1]
    passed_over = list(candidates[0].passed_over)
    for found in candidates:
        try:
            extra = _load(model, found)
        except Damaged as error:
            if found is candidates[-1]:
                raise
            passed_over.append(f"{found.path.name}: {str(error).splitlines()[0]}")
            continue
        if passed_over and model.rank == 0:
            others = "; ".join(passed_over)
            warnings.warn(f"loaded {found.path.name}, passed over {others}", stacklevel=2)
        return extra
    raise AssertionError("there is at least one candidate, and the last returns or raises")


def _load(model: ShardedModel, found: Found) -> Any:
    """Load one checkpoint, and return this rank's `extra`."""
    group = model.engine.context.everyone
    if found.manifest is not None and not found.manifest.frozen:
        model = model.trainable()
    targets = together(group, lambda: Targets(model, found, read_metadata(found)))
    reader = Reader(found, targets.metadata)
    objects = _read(group, reader, targets.objects())
    together(group, lambda: targets.compare(objects))
    tensors = _read(group, reader, together(group, targets.tensors))
    together(group, lambda: targets.finish(objects, tensors))
    own = objects.get(f"{RANK}.{targets.own_rank}")
    if own is None:  # saved by another library
        return None
    (of_rank,) = own
    if targets.own_rank == model.rank:
        restore_random_states(model.engine, of_rank["random"])
        buffers = model.buffers()
        for name, value in of_rank["buffers"].items():
            buffers[name].copy_(value)
    return of_rank["extra"]


def _read(group: Group, reader: Reader, wanted: dict[str, Any]) -> dict[str, Any]:
    """Read by name: tensors in place, objects as new values."""
    try:
        with planning():
            dcp.load(
                wanted, storage_reader=reader, planner=ReadPlanner(),
                process_group=group.handle, no_dist=group.handle is None,
            )  # fmt: skip
    except CheckpointException as error:
        raise first_failure(error) from error
    return wanted
