"""The public functions that find and load a checkpoint, of Onefold or of another program."""

import os
from pathlib import Path
from typing import Any

from onefold.checkpoint.directory import look_in
from onefold.checkpoint.load import load_checkpoint
from onefold.checkpoint.stages import Modules, Optimizers
from onefold.foreign import PEERS


def load(
    directory: str | os.PathLike[str], module: Modules, optimizer: Optimizers = None,
    *, missing_ok: bool = False,
) -> Any:  # fmt: skip
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
        missing_ok: return {} and change nothing where `directory` holds no complete checkpoint: it
            does not exist, is empty, or the first save was killed. A warning lists the folders
            that are no complete checkpoints, and why.

    Returns: the `extra` that the rank of the same number saved (of rank r modulo the saved world).

    Raises: CheckpointError, on every rank, with the file or the parameter: nothing to load, another
        model or optimizer, a newer format, damaged files. Nothing is changed before tensors are
        read. If tensors are damaged, older checkpoints of the directory are tried; without one the
        module holds a mixture of old and new values, and must not be trained.
    """
    return load_checkpoint(directory, module, optimizer, PEERS, missing_ok=missing_ok)


def latest(directory: str | os.PathLike[str]) -> Path | None:
    """Return the newest complete checkpoint of a directory; None if there is none.

    Not a collective. It reads manifests and sizes of files, and no tensor.

    Args:
        directory: a directory of checkpoints, or a checkpoint. It need not exist.

    Raises:
        CheckpointError: a file of that name, or a directory that cannot be read.

    Example:
        >>> path = onefold.latest("runs")
        >>> step = onefold.load(path, model, optimizer)["step"] if path else 0
    """
    complete, _ = look_in(Path(os.path.abspath(directory)), PEERS)
    return complete[0].path if complete else None
