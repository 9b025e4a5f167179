"""The adopted models of one accelerator: `save_state`, `load_state` and `get_state_dict`.

    OUTPUT/onefold/0/save-00000001    shards of the first adopted model and its optimizers
    OUTPUT/optimizer.bin              hyper-parameters alone
    OUTPUT/...                        the rest, as Accelerate writes it

Accelerate calls hooks before it saves or loads (`register_save_state_pre_hook`), on all ranks. They
do the work, and take sharded models off the lists that Accelerate works through afterwards. It has
no such list for optimizers, so `LocalState` makes their part of that work an empty one.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final
from weakref import ReferenceType, ref

from torch import nn
from torch.optim import Optimizer

from onefold.checkpoint import agreement
from onefold.checkpoint.directory import prune
from onefold.checkpoint.full import full_state_dict
from onefold.checkpoint.load import load
from onefold.checkpoint.save import save
from onefold.compose.checks import as_list
from onefold.engine.registry import engine_of, is_sharded

_ATTRIBUTE: Final = "_onefold_adopted"
_FOLDER: Final = "onefold"
_ELSEWHERE: Final = "onefold_saved_beside"
"""The key of an optimizer's state dict whose states are in a checkpoint of shards."""


class LocalState:
    """Lets a sharded optimizer's state stay where it is while Accelerate saves or loads it.

    After `note_elsewhere`, the next `state_dict()` has hyper-parameters alone.
    Loading such a dict changes them alone, so that no state is copied, cast or moved.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        self.optimizer = ref(optimizer)
        self._is_elsewhere = bool(optimizer.state)  # `prepare` will send the state round, once
        self._kept: Any = None
        optimizer.register_state_dict_post_hook(self._after_state_dict)
        optimizer.register_load_state_dict_pre_hook(self._before_load)
        optimizer.register_load_state_dict_post_hook(self._after_load)
        optimizer.register_step_pre_hook(self._before_step)

    def note_elsewhere(self) -> None:
        """The state is saved: leave it out of the next `state_dict()`."""
        self._is_elsewhere = True

    def _after_state_dict(self, optimizer: Optimizer, state_dict: dict[str, Any]) -> dict[str, Any]:
        if not self._is_elsewhere:
            return state_dict
        self._is_elsewhere = False
        return {**state_dict, "state": {}, _ELSEWHERE: True}

    def _before_load(self, optimizer: Optimizer, state_dict: dict[str, Any]) -> None:
        if _ELSEWHERE in state_dict:
            self._kept = optimizer.state

    def _after_load(self, optimizer: Optimizer) -> None:
        kept, self._kept = self._kept, None
        if kept is not None:
            optimizer.state = kept

    def _before_step(self, *_: object) -> None:
        self._is_elsewhere = False


@dataclass(frozen=True, slots=True)
class _Adopted:
    """One model and its optimizers; it keeps none of them alive."""

    model: ReferenceType[nn.Module]
    states: tuple[LocalState, ...]

    def alive(self) -> tuple[nn.Module | None, list[Optimizer]]:
        """Return the model, None if it is gone, and its optimizers."""
        optimizers = (state.optimizer() for state in self.states)
        return self.model(), [optimizer for optimizer in optimizers if optimizer is not None]


class _LastHook:
    """Keeps one hook of an accelerator the last one: hooks of users work on all models."""

    def __init__(self, register: Callable[[Any], Any], hook: Callable[..., None]) -> None:
        self._register, self._hook = register, hook
        self._handle = register(hook)

    def register(self, hook: Callable[..., None]) -> Any:
        """Register a hook of the user before ours."""
        handle = self._register(hook)
        self._handle.remove()
        self._handle = self._register(self._hook)
        return handle


class AdoptedModels:
    """The sharded models of one accelerator, in the order in which they were adopted."""

    def __init__(self, accelerator: Any) -> None:
        self._adopted: list[_Adopted] = []
        self._gather_others = accelerator.get_state_dict
        accelerator.get_state_dict = self.get_state_dict
        saving = _LastHook(accelerator.register_save_state_pre_hook, self._save)
        loading = _LastHook(accelerator.register_load_state_pre_hook, self._load)
        accelerator.register_save_state_pre_hook = saving.register
        accelerator.register_load_state_pre_hook = loading.register

    @staticmethod
    def of(accelerator: Any) -> AdoptedModels:
        """Return the accelerator's own; the first call makes it."""
        if _ATTRIBUTE not in accelerator.__dict__:
            accelerator.__dict__[_ATTRIBUTE] = AdoptedModels(accelerator)
        return accelerator.__dict__[_ATTRIBUTE]

    def add(self, model: nn.Module, optimizer: object) -> None:
        """Save and load one more sharded model, with its optimizers."""
        states = tuple(LocalState(part) for part in as_list(optimizer))
        self._adopted.append(_Adopted(ref(model), states))

    def get_state_dict(self, model: nn.Module, unwrap: bool = True) -> dict[str, Any]:
        """Gather a sharded model's tensors on rank 0, {} elsewhere; a collective.

        Of other models, and for `save_state` (`unwrap=False`), return what Accelerate does.
        """
        if unwrap and is_sharded(model):
            return full_state_dict(model)
        return self._gather_others(model, unwrap=unwrap)

    def _save(self, models: list[nn.Module], weights: list[Any], output_dir: str) -> None:
        """Save every adopted model. A collective."""
        for number, adopted in enumerate(self._adopted):
            model, optimizers = adopted.alive()
            if model is None or not _has(models, model):
                continue
            group = engine_of(model).group
            folder = Path(output_dir) / _FOLDER / str(number)
            before = agreement.first(group, lambda folder=folder: _saves(folder))
            target = folder / f"save-{before[-1][0] + 1 if before else 1:08}"
            save(target, model, optimizers)
            agreement.first(group, lambda target=target: prune(target, keep=1))
            for state in adopted.states:
                state.note_elsewhere()
        if len(weights) == len(models):  # else another hook has sorted them out
            pairs = zip(weights, models, strict=True)
            weights[:] = [state for state, model in pairs if not is_sharded(model)]

    def _load(self, models: list[nn.Module], input_dir: str) -> None:
        """Load every adopted model, and leave the others to Accelerate. A collective."""
        for number, adopted in enumerate(self._adopted):
            model, optimizers = adopted.alive()
            if model is None:
                continue
            folder = Path(input_dir) / _FOLDER / str(number)
            saves = agreement.first(engine_of(model).group, lambda folder=folder: _saves(folder))
            if saves or _has(models, model):  # a hook may have taken out a model that it has loaded
                load(folder / saves[-1][1] if saves else folder, model, optimizers)
        models[:] = [model for model in models if not is_sharded(model)]


def _has(models: list[nn.Module], model: nn.Module) -> bool:
    return any(other is model for other in models)


def _saves(folder: Path) -> list[tuple[int, str]]:
    """Return the complete saves in a folder, by number: one, unless a save was killed."""
    names = [path.name for path in folder.glob("save-*")]
    return sorted((int(name.removeprefix("save-")), name) for name in names)
