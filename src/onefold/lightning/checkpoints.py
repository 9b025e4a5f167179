"""Checkpoints of both strategies: directories of `onefold.save`, with Lightning's own state inside.

The new directory is complete before it takes its name. A checkpoint of the same name, which
Lightning writes again and again (`last.ckpt`), stays until then:

    last.ckpt          the checkpoint
    .last.ckpt.new     its successor, complete; `read` takes it if a kill left no last.ckpt
    .last.ckpt.old     its predecessor, about to be deleted
"""

from __future__ import annotations

import io
import os
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from onefold.checkpoint.agreement import on_rank_0, refusal
from onefold.checkpoint.load import load
from onefold.checkpoint.save import save
from onefold.engine.registry import engine_of

_KEY = "lightning"


def write(
    path: Path, module: nn.Module, optimizers: Sequence[Optimizer], rest: dict[str, Any]
) -> None:
    """Save a sharded module, its optimizers, and the rest of rank 0. A collective.

    Raises:
        CheckpointError: on every rank, and a checkpoint of the same name stays.
    """
    group = engine_of(module).group
    draft = _beside(path, "new")
    extra: dict[str, bytes] = {}

    def prepare() -> None:
        extra[_KEY] = _packed(rest)
        _remove(draft)

    on_rank_0(group, prepare)
    save(draft, module, list(optimizers) or None, extra=extra)
    on_rank_0(group, lambda: _replace(path, draft))


def read(
    path: Path, module: nn.Module, optimizers: Sequence[Optimizer], *, weights_only: bool | None
) -> dict[str, Any]:
    """Load a sharded module and its optimizers in place; return the rest. A collective.

    Args:
        path: a directory that `write` has written, at any number of ranks and stage.
        module: the module that was sharded.
        optimizers: none of them to load the weights alone.
        weights_only: see `torch.load`; of the rest alone.

    Raises:
        CheckpointError: on every rank; no such checkpoint, or one of another model.
    """
    group = engine_of(module).group
    draft = _beside(path, "new")
    found = draft if draft.exists() and not path.exists() else path
    extra = load(found, module, list(optimizers) or None)
    mine = extra.get(_KEY) if isinstance(extra, dict) else None
    packed = group.all_gather_object(mine)[0] if group.world_size > 1 else mine  # of rank 0
    if not isinstance(packed, bytes):
        raise refusal(
            f"a checkpoint of Lightning at {str(path)!r}",
            "one without Lightning's own state",
            hint="onefold.load reads it into a sharded module",
        )
    return torch.load(io.BytesIO(packed), map_location="cpu", weights_only=weights_only)


def _beside(path: Path, role: str) -> Path:
    return path.with_name(f".{path.name}.{role}")


def _packed(rest: dict[str, Any]) -> bytes:
    written = io.BytesIO()
    torch.save(rest, written)
    return written.getvalue()


def _replace(path: Path, draft: Path) -> None:
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
