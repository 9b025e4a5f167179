"""The sharded part of a Trainer's checkpoint: masters, moments and weights, each rank its own.

checkpoint-40/model.safetensors ...   Trainer's own files
checkpoint-40/optimizer.pt            param groups, and which checkpoint below they belong to;
                                      torch refuses it by name where no `Callback` was built
checkpoint-40/onefold/                what onefold.save writes; loads at any world size
.onefold-state-40/                    the same, until Trainer has made its folder
"""

from __future__ import annotations

import json
import re
import shutil
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from onefold.adapters.hf.whole_weights import is_peft
from onefold.checkpoint.agreement import first
from onefold.checkpoint.directory import read_manifest
from onefold.checkpoint.load import load
from onefold.checkpoint.save import save
from onefold.engine.registry import engine_of
from onefold.errors import CheckpointError

FOLDER = "onefold"
_CHECKPOINT = re.compile(r"checkpoint-(\d+)")
_STAGED = ".onefold-state-"
_MARK = "onefold"
"""The key of the first param group by which a loaded `optimizer.pt` names its checkpoint."""
_NEEDS = "onefold_needs"


class ResumeWithOnefoldCallback:
    """Named in `optimizer.pt`, so that a plain Trainer does not go on with moments of zero.

    A Trainer loads that file with `weights_only=True`. torch then refuses classes that are not
    allowed, and its error has the name of this one. `Callback` allows it.
    """

    @classmethod
    def allow(cls) -> None:
        """Let this process load `optimizer.pt` of sharded runs."""
        torch.serialization.add_safe_globals([cls])


def plain_optimizer(optimizer: Any) -> Optimizer:
    """Return the torch optimizer inside Accelerate's wrapper."""
    while isinstance(getattr(optimizer, "optimizer", None), Optimizer):
        optimizer = optimizer.optimizer
    return optimizer


class RunState:
    """Saves the state of one model and its optimizer beside a Trainer's own files."""

    def __init__(self, model: nn.Module, optimizer: Any) -> None:
        self._model = model
        self._optimizer = plain_optimizer(optimizer)
        self.staged: Path | None = None  # between `stage` and `publish`
        self._mark: dict[str, str] | None = None
        self._hook = self._optimizer.register_state_dict_post_hook(self._without_shards)

    def close(self) -> None:
        """Leave the optimizer as it was."""
        self._hook.remove()

    def stage(self, directory: Path, step: int) -> None:
        """Save to a hidden folder of `directory`. A collective. `publish` must follow."""
        group = engine_of(self._model).group
        staged = directory / f"{_STAGED}{step}"
        first(group, lambda: shutil.rmtree(staged, ignore_errors=True))
        save(staged, self._model, self._optimizer, frozen=not is_peft(self._model))
        self.staged = staged
        self._mark = {"id": read_manifest(staged).save_id, "folder": str(directory.absolute())}

    def publish(self, checkpoint: Path) -> None:
        """Move the saved state into a Trainer's checkpoint. A collective."""
        staged, self.staged, self._mark = self.staged, None, None
        if staged is None:
            return

        def move() -> None:
            target = checkpoint / FOLDER
            checkpoint.mkdir(parents=True, exist_ok=True)
            old = checkpoint / f".{FOLDER}.deleting"
            if target.exists():  # of the same step, before a resume from an earlier one
                target.rename(old)
            staged.rename(target)
            shutil.rmtree(old, ignore_errors=True)
            for left in checkpoint.parent.glob(f"{_STAGED}*"):  # by a run that was killed
                shutil.rmtree(left, ignore_errors=True)

        first(engine_of(self._model).group, move)

    def _without_shards(
        self, optimizer: Optimizer, state_dict: dict[str, Any]
    ) -> dict[str, Any] | None:
        """While a checkpoint is being made: hyper-parameters alone, and where the rest is."""
        if self._mark is None:
            return None
        groups = [dict(group) for group in state_dict["param_groups"]]
        groups[0] |= {_MARK: self._mark, _NEEDS: ResumeWithOnefoldCallback}
        return {"state": {}, "param_groups": groups}

    # resume

    def take_mark(self) -> dict[str, str] | None:
        """Return, and remove, what a loaded `optimizer.pt` says about its checkpoint."""
        group = self._optimizer.param_groups[0]
        group.pop(_NEEDS, None)
        return group.pop(_MARK, None)

    def resume(self, mark: dict[str, str], folders: Iterator[Path]) -> None:
        """Load the state that belongs to a mark from one of `folders`. A collective.

        Raises `CheckpointError` if it is in none of them.
        """
        looked: list[str] = []
        for folder in folders:
            if not folder.is_dir():
                continue
            looked.append(str(folder))
            if _id_of(folder) == mark["id"]:
                load(folder, self._model, self._optimizer)
                return
        raise CheckpointError(
            f"the folder {FOLDER!r} of the checkpoint to resume from, saved in {mark['folder']!r}",
            f"no such state in {', '.join(looked) or 'any folder'}",
            hint="set TrainingArguments(resume_from_checkpoint=) to the path that train() "
            "gets, or use onefold.hf.TrainerMixin, which knows it",
        )


def folders_of(*directories: object) -> Iterator[Path]:
    """Yield the folders that may hold a run's state: of a checkpoint, or of all in a directory."""
    for directory in directories:
        if not isinstance(directory, str | Path):
            continue
        path = Path(directory)
        yield path / FOLDER
        yield from sorted(path.glob(f"*/{FOLDER}"))
        yield from sorted(path.glob(f"{_STAGED}*"))


def _id_of(folder: Path) -> str | None:
    try:
        return read_manifest(folder).save_id
    except (CheckpointError, OSError):
        return None


def newest(directory: Path) -> str | None:
    """Return the newest complete checkpoint; warn about those that are passed over."""
    passed_over: list[str] = []
    folders = directory.iterdir() if directory.is_dir() else iter(())
    numbered = [(int(m[1]), p) for p in folders if (m := _CHECKPOINT.fullmatch(p.name))]
    for _, path in sorted(numbered, reverse=True):
        if _is_complete(path):
            if passed_over:
                names = ", ".join(passed_over)
                warnings.warn(
                    f"resume from {path.name}: the save of {names} was interrupted", stacklevel=3
                )
            return str(path)
        passed_over.append(path.name)
    return None


def _is_complete(path: Path) -> bool:
    """True if Trainer wrote its state, its last act, into the folder."""
    try:
        json.loads((path / "trainer_state.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    return (path / FOLDER).is_dir() or not (path / "optimizer.pt").exists()
