"""Checkpoints of both strategies: directories of `onefold.save`, with Lightning's own state inside.

The new directory is complete before it takes its name. A checkpoint of the same name, which
Lightning writes again and again (`last.ckpt`), stays until then:

    last.ckpt          the checkpoint
    .last.ckpt.new     its successor, complete; `read` takes it if a kill left no last.ckpt
    .last.ckpt.old     its predecessor, about to be deleted

`as_file` makes the single file of it that `load_from_checkpoint` reads.
"""

import io
import os
import shutil
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import IO, Any

import torch
from torch import nn
from torch.optim import Optimizer

from onefold.checkpoint.agreement import first
from onefold.checkpoint.directory import find
from onefold.checkpoint.listing import MODEL
from onefold.checkpoint.save import save
from onefold.checkpoint.source import open_source
from onefold.engine.registry import engine_of
from onefold.errors import CheckpointError
from onefold.foreign import PEERS
from onefold.resume import load

_KEY = "lightning"
_TIED = "tied"


def save_folder(
    path: Path, module: nn.Module, optimizers: Sequence[Optimizer], rest: dict[str, Any]
) -> None:
    """Save a sharded module, its optimizers, and the rest of rank 0. A collective.

    Where it fails, every rank raises `CheckpointError`, and a checkpoint of the same name stays.
    """
    group = engine_of(module).group
    draft = _beside(path, "new")
    known = engine_of(module).by_sharded
    named = module.named_parameters(remove_duplicate=False)
    fqns = {name: known[id(p)].fqn for name, p in named if id(p) in known}
    tied = {name: fqn for name, fqn in fqns.items() if name != fqn}  # and where each is saved
    extra: dict[str, Any] = {_TIED: tied}

    def prepare() -> None:
        file = io.BytesIO()
        torch.save(rest, file)
        extra[_KEY] = file.getvalue()
        _remove(draft)

    first(group, prepare)
    save(draft, module, list(optimizers) or None, extra=extra)
    first(group, lambda: _replace_folder(path, draft))


def load_folder(
    path: Path, module: nn.Module, optimizers: Sequence[Optimizer], *, weights_only: bool | None,
    prepare: Callable[[dict[str, Any]], None] = lambda _: None,
) -> dict[str, Any]:  # fmt: skip
    """Load a sharded module and its optimizers, if any, in place; return the rest. A collective.

    The directory may be of any number of ranks and stage. `weights_only`: see `torch.load`, of the
    rest alone. `prepare` gets the rest before anything is loaded. Raises `CheckpointError` on every
    rank.
    """
    group = engine_of(module).group
    draft = _beside(path, "new")
    source = draft if draft.exists() and not path.exists() else path

    def own() -> bytes:
        extra = open_source(find(source.absolute(), PEERS)[0]).rank_state(0).get("extra")
        if not isinstance(extra, dict) or not isinstance(extra.get(_KEY), bytes):
            raise _of_another(path)
        return extra[_KEY]

    packed = io.BytesIO(first(group, own))
    rest = torch.load(packed, map_location="cpu", weights_only=weights_only)
    prepare(rest)
    load(source, module, list(optimizers) or None)
    return rest


def as_file(path: str | os.PathLike[str], *, weights_only: bool | None = None) -> IO[bytes]:
    """Open a directory checkpoint as the single file that `load_from_checkpoint` reads.

    Needs one process, and memory for the weights. Optimizer states stay behind.

    Args:
        path: a directory that a Trainer with `Strategy` has written.
        weights_only: see `torch.load`; of Lightning's own state, as hyper-parameters.

    Raises:
        CheckpointError: no such checkpoint, or a damaged one.

    Example:
        >>> with onefold.lightning.as_file("last.ckpt") as file:
        ...     module = MyModule.load_from_checkpoint(file)
    """
    source = open_source(find(Path(path).absolute(), PEERS)[0])
    extra = source.rank_state(0).get("extra")
    if not isinstance(extra, dict) or _KEY not in extra:
        raise _of_another(Path(path))
    weights = {
        name: torch.empty(saved.shape, dtype=saved.dtype)
        for name, saved in source.tensors.items()
        if name.startswith(f"{MODEL}.")
    }
    source.fill(weights)
    state = {name.removeprefix(f"{MODEL}."): value for name, value in weights.items()}
    state |= {name: state[first] for name, first in extra.get(_TIED, {}).items()}
    rest = torch.load(io.BytesIO(extra[_KEY]), map_location="cpu", weights_only=weights_only)
    file = tempfile.TemporaryFile()  # noqa: SIM115 - the caller closes it
    torch.save(rest | {"state_dict": state}, file)
    file.seek(0)
    return file


def _of_another(path: Path) -> CheckpointError:
    got = "one without Lightning's own state"
    hint = "onefold.load reads it into a sharded module"
    return CheckpointError(f"a checkpoint of Lightning at {str(path)!r}", got, hint=hint)


def _beside(path: Path, role: str) -> Path:
    return path.with_name(f".{path.name}.{role}")


def _replace_folder(path: Path, draft: Path) -> None:
    old = _beside(path, "old")
    _remove(old)
    if os.path.lexists(path):
        path.rename(old)
    draft.rename(path)
    _remove(old)


def _remove(path: Path) -> None:
    """Delete a file, a link or a directory, if there is one."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
