"""What saves of a sharded Trainer need: its shards, each rank its own, and whole weights on rank 0.

checkpoint-40/model.safetensors ...   Trainer's own files
checkpoint-40/optimizer.pt            param groups, and which checkpoint below they belong to;
                                      torch refuses it by name where no `Callback` was built
checkpoint-40/onefold/                what onefold.save writes; loads at any world size
.onefold-state-40/                    the same, until Trainer has made its folder

Code that runs on rank 0 alone, as Trainer's save does, gets whole weights: ranks write their rows
side by side into one file. Rank 0 maps that file and deletes its name: the bytes live as long as
rank 0 needs them, whatever ends the process. Until weights change, `module.state_dict()` on rank 0
then has plain tensors, so `save_pretrained`, `torch.save` and Trainer's own save work unchanged, in
the memory of one tensor at a time.
"""

from __future__ import annotations

import json
import re
import shutil
import warnings
from collections.abc import Iterator
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any
from weakref import ref

import torch
from safetensors import safe_open
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from onefold.adapters.hf.events import meet
from onefold.checkpoint.agreement import first, together
from onefold.checkpoint.directory import read_manifest
from onefold.checkpoint.pretrained import write_pretrained
from onefold.checkpoint.safetensors import MAX_SHARD_NBYTES
from onefold.checkpoint.save import save
from onefold.checkpoint.stages import ShardedModel
from onefold.engine.adapters import AdaptersAtHand
from onefold.engine.engine import Engine
from onefold.engine.registry import engine_of
from onefold.errors import CheckpointError, StateError, WireError
from onefold.resume import load

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
        known = [folder for folder in folders if folder.is_dir()]
        saved = next((folder for folder in known if _id_of(folder) == mark["id"]), None)
        if saved is None:
            raise CheckpointError(
                f"the folder {FOLDER!r} of the checkpoint to resume, saved in {mark['folder']!r}",
                f"no such state in {', '.join(map(str, known)) or 'any folder'}",
                hint="set TrainingArguments(resume_from_checkpoint=) to the path that train() "
                "gets, or use onefold.hf.TrainerMixin, which knows it",
            )
        load(saved, self._model, self._optimizer)


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


WHOLE = "_onefold_whole_weights"
"""The attribute of a module that holds its `WholeWeights`."""

_FOLDER = ".onefold-weights"


class WholeWeights:
    """The weights of one sharded module as rank 0 has them whole, while they are unchanged."""

    def __init__(self, module: nn.Module, folder: Path) -> None:
        self._alive = ref(module)
        self._folder = folder / _FOLDER
        self._edits = -1
        self._values: dict[str, Tensor] = {}  # by every name of the state dict; on rank 0

    @staticmethod
    def from_folder(module: nn.Module, folder: Path) -> WholeWeights:
        """Return the module's own, after installing it at the first call.

        `folder` must be on a file system that all ranks see.
        """
        whole = module.__dict__.get(WHOLE)
        if whole is None:
            whole = module.__dict__[WHOLE] = WholeWeights(module, folder)
            module.register_state_dict_post_hook(partial(whole.show))  # torch marks the hook
            engine_of(module).facts.about(AdaptersAtHand).ask(whole.is_current)
            if callable(getattr(module, "save_pretrained", None)):
                module.__dict__["save_pretrained"] = whole.save_pretrained
        whole._folder = folder / _FOLDER
        return whole

    @property
    def _module(self) -> Any:
        module = self._alive()
        assert module is not None, "weights outlived their module"
        return module

    def is_current(self) -> bool:
        """True if the weights have not changed since `bring`, or no rank has to send any."""
        module = self._module
        return not _has_shards(module) or self._edits == _edits(engine_of(module))

    def bring(self) -> None:
        """Bring whole weights to rank 0, unless it has them. A collective.

        For a model with adapters these are the parameters that PEFT saves, without their base.
        """
        module = self._module
        engine = engine_of(module)
        if all(meet(engine, "save_model or save_pretrained", self.is_current())):
            return
        self.drop()
        names = _wanted(module, engine)
        first(engine.group, lambda: shutil.rmtree(self._folder, ignore_errors=True))
        model = ShardedModel(engine, module, names=names)
        write_pretrained(model, self._folder, MAX_SHARD_NBYTES)
        first(engine.group, lambda: self._map_files(module))
        self._edits = _edits(engine)

    def drop(self) -> None:
        """Forget the values, and give back the bytes on the disk."""
        self._values, self._edits = {}, -1

    def drop_if_stale(self) -> None:
        """Forget values that no longer are the module's."""
        if self._values and not self.is_current():
            self.drop()

    def show(self, _: nn.Module, state: dict[str, Any], *__: object) -> None:
        """Put whole values in place of sharded ones, in the module's `state_dict()`."""
        if not self._values or not self.is_current():
            return
        for name, value in state.items():
            is_shard = isinstance(value, DTensor) and not isinstance(value, nn.Parameter)
            if is_shard and name in self._values:
                state[name] = self._values[name]

    def save_pretrained(self, *args: Any, **kwargs: Any) -> Any:
        """Save the module: with whole weights on rank 0; a collective without them."""
        module = self._module
        group = engine_of(module).group

        def save() -> Any:
            return type(module).save_pretrained(module, *args, **kwargs)

        if kwargs.get("state_dict") is not None or not _has_shards(module):
            return save()
        if self.is_current():
            return save() if group.rank == 0 else None
        try:
            self.bring()  # from here on: every rank has called
        except WireError as error:
            wanted = "every rank in save_pretrained, as rank 0 has no whole weights, or older ones"
            got = "this rank alone"
            hint = "call save_pretrained on every rank; for trainer.save_model() before or in "
            hint += "the middle of training derive the trainer from onefold.hf.TrainerMixin"
            raise StateError(wanted, got, where=f"rank {group.rank}", hint=hint) from error
        return together(group, lambda: save() if group.rank == 0 else None)

    def _map_files(self, module: nn.Module) -> None:
        tensors: dict[str, Tensor] = {}
        with ExitStack() as files:
            for path in sorted(self._folder.glob("*.safetensors")):
                file = files.enter_context(safe_open(path, "pt"))
                tensors |= {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        fqns = engine_of(module).by_sharded
        named = module.named_parameters(remove_duplicate=False)
        names = {name: fqns[id(parameter)].fqn for name, parameter in named}
        self._values = {name: tensors[fqn] for name, fqn in names.items() if fqn in tensors}
        shutil.rmtree(self._folder, ignore_errors=True)


def is_peft(module: nn.Module) -> bool:
    """True for a model that PEFT has wrapped, whose base is not saved."""
    has_adapters = isinstance(getattr(module, "peft_config", None), dict)
    return has_adapters and callable(getattr(module, "get_base_model", None))


def _wanted(module: nn.Module, engine: Engine) -> frozenset[str] | None:
    """Return the fqns of the parameters to save; None: of all. A collective for adapters."""
    if not is_peft(module):
        return None
    return frozenset(first(engine.group, lambda: _adapter_names(module)))


def _adapter_names(module: nn.Module) -> list[str]:
    """Return the fqns that PEFT's own filter keeps of any adapter, and those that train."""
    from peft import get_peft_model_state_dict

    state = module.state_dict(keep_vars=True)
    adapters: Any = getattr(module, "peft_config", {})
    kept = {
        id(value)
        for adapter in adapters
        for value in get_peft_model_state_dict(
            module, state_dict=dict(state), adapter_name=adapter
        ).values()
    }
    known = {id(p.sharded): p.fqn for unit in engine_of(module).units for p in unit.parameters}
    trains = [name for name, p in module.named_parameters() if p.requires_grad]
    return sorted({fqn for key, fqn in known.items() if key in kept} | set(trains))


def _has_shards(module: nn.Module) -> bool:
    return any(isinstance(parameter, DTensor) for parameter in module.parameters())


def _edits(engine: Engine) -> int:
    return sum(unit.edits.at_rest() for unit in engine.units)
