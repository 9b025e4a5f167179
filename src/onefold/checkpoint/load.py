"""Loading: each rank reads its own pieces, from whichever ranks wrote them, to where they rest.

choose      the newest complete checkpoint, the same on every rank
compare     names, shapes, optimizers; all that does not match in one message, nothing changed
read        torch's planner finds the pieces; each is verified as it is read
settle      weights follow masters, optimizers get their states, generators go on
"""

from __future__ import annotations

import os
import warnings
from pathlib import Path
from typing import Any

import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException

from onefold.checkpoint.blocks import Damaged
from onefold.checkpoint.contents import RANK, SavedState, restore_random_states, wait_steps
from onefold.checkpoint.directory import Found, find
from onefold.checkpoint.save import finish_pending, first_failure, planning
from onefold.checkpoint.storage import Reader, ReadPlanner, read_metadata
from onefold.checkpoint.targets import Targets
from onefold.checkpoint.together import check_same, together
from onefold.engine.registry import engine_of


def load(directory: str | os.PathLike[str], module: nn.Module, optimizer: object = None) -> Any:
    """Load a checkpoint into a sharded module, and its optimizer, in place. A collective.

    World size, stage, precision and units may be others than those it was saved at: every rank
    reads its own rows of every parameter, and nothing else. At the same world size the run goes on
    bit for bit. Random states are those of the saved rank of the same number, if there was one.

    Args:
        directory: a checkpoint, or a directory of checkpoints, of which the newest complete one is
            taken; a warning says which were passed over and why. Checkpoints that
            `torch.distributed.checkpoint` has written load as well, but cannot be verified.
        module: what was given to `onefold.shard`.
        optimizer: as it was given to `onefold.save`; None loads the weights alone.

    Returns: the `extra` that the rank of the same number saved (of rank r modulo the saved world).

    Raises: CheckpointError, on every rank, naming the file or the parameter: nothing to load,
        another model or optimizer, a newer format, damaged files. Before values are read nothing
        is changed; where reading finds damage, older checkpoints of the directory are tried, and
        without one the module is left with a mixture that must not be trained.
    """
    engine = engine_of(module)
    finish_pending(module, engine)
    subjects: list[SavedState] = []

    def look() -> tuple[str, list[Found]]:
        path = Path(os.path.abspath(directory))
        subjects.append(SavedState.of(engine, module, optimizer))
        wait_steps(engine)
        return str(path), find(path) if engine.group.rank == 0 else []

    everyone = together(engine.group, look)
    paths = [path for path, _ in everyone]
    check_same(paths, "directory", hint="every rank loads from the same place")
    candidates, subject = everyone[0][1], subjects[0]
    passed_over = list(candidates[0].passed_over)
    for found in candidates:
        try:
            extra = _load(subject, found)
        except Damaged as error:
            if found is candidates[-1]:
                raise
            passed_over.append(f"{found.path.name}: {str(error).splitlines()[0]}")
            continue
        if passed_over and subject.rank == 0:
            told = "; ".join(passed_over)
            warnings.warn(f"loaded {found.path.name}, passed over {told}", stacklevel=2)
        return extra
    raise AssertionError("there is at least one candidate, and the last returns or raises")


def _load(subject: SavedState, found: Found) -> Any:
    """Load one checkpoint; returns this rank's `extra`."""
    group = subject.engine.group
    plans: list[Targets] = []
    together(group, lambda: plans.append(_targets(subject, found)))
    targets = plans[0]
    objects = _read(subject, found, targets, targets.objects())
    together(group, lambda: targets.compare(objects))
    rooms: list[dict[str, Any]] = []
    together(group, lambda: rooms.append(targets.tensors()))
    tensors = _read(subject, found, targets, rooms[0])
    together(group, lambda: targets.finish(objects, tensors))
    own = objects.get(f"{RANK}.{targets.own_rank}")
    if own is None:  # saved by another library
        return None
    (of_rank,) = own
    if targets.own_rank == subject.rank:
        restore_random_states(subject.engine, of_rank["random"])
        buffers = subject.buffers()
        for name, value in of_rank["buffers"].items():
            buffers[name].copy_(value)
    return of_rank["extra"]


def _targets(subject: SavedState, found: Found) -> Targets:
    metadata = read_metadata(found.path, found.manifest)
    return Targets(subject, found, metadata)


def _read(
    subject: SavedState, found: Found, targets: Targets, wanted: dict[str, Any]
) -> dict[str, Any]:
    """Read by name: tensors in place, objects as new values."""
    handle = subject.engine.group.handle
    try:
        with planning():
            dcp.load(
                wanted,
                storage_reader=Reader(found.path, found.manifest, targets.metadata),
                planner=ReadPlanner(), process_group=handle, no_dist=handle is None,
            )  # fmt: skip
    except CheckpointException as error:
        raise first_failure(error) from error
    return wanted
