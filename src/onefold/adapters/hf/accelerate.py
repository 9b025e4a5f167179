"""Bring a raw Accelerate loop to a sharded model: `onefold.hf.adopt`.

`save_state` of an accelerator writes:

    OUTPUT/onefold/0/save-00000001    shards of the first adopted model and its optimizers
    OUTPUT/optimizer.bin              hyper-parameters alone
    OUTPUT/...                        the rest, as Accelerate writes it

Accelerate calls hooks before it saves or loads (`register_save_state_pre_hook`), on all ranks. They
do the work, and take sharded models off the lists that Accelerate works through afterwards. It has
no such list for optimizers, so `LocalState` makes their part of that work an empty one.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final
from weakref import ReferenceType, ref

from torch import nn
from torch.optim import Optimizer

from onefold.adapters.hf.conflicts import COMPUTE, refuse_device_map, refuse_other_engines
from onefold.adapters.hf.saving import WholeWeights
from onefold.adapters.hf.wrap import PREPARED, cast_outputs, mark_prepared, run_under_autocast
from onefold.api import shard
from onefold.checkpoint import agreement
from onefold.checkpoint.directory import prune
from onefold.checkpoint.pretrained import full_state_dict
from onefold.checkpoint.save import save
from onefold.compose.checks import as_list
from onefold.config import precision_of
from onefold.engine.precision import GradScaler
from onefold.engine.registry import engine_of, is_sharded
from onefold.errors import ConfigError
from onefold.resume import load
from onefold.versions import warn_if_untested
from onefold.wire.ranks import num_processes

if TYPE_CHECKING:
    from accelerate import Accelerator
    from accelerate.optimizer import AcceleratedOptimizer

_ATTRIBUTE: Final = "_onefold_adopted"
_FOLDER: Final = "onefold"
_ELSEWHERE: Final = "onefold_saved_beside"
"""The key of an optimizer's state dict whose states are in a checkpoint of shards."""


def adopt(
    accelerator: Accelerator, model: nn.Module, optimizer: Any = None, **shard_arguments: Any
) -> tuple[nn.Module, Any]:
    """Shard a model for an Accelerate loop, in place. A collective, before `prepare`.

    The optimizer is returned prepared, and the module is one that Accelerate uses as it is: prepare
    the loader and the scheduler. `accelerator.prepare` returns both unchanged. `accumulate`,
    `backward`, `clip_grad_norm_`, schedulers and `gather_for_metrics` work as with one process for
    each device. `save_state` and `load_state` write and read shards, at any world size and stage;
    every rank calls them.

    `accelerator.get_state_dict(model)` and `save_model` gather unsharded tensors on rank 0, as with
    FSDP: every rank calls them, and the others get {}. Every rank calls the `save_pretrained` of a
    model of transformers too; without `state_dict=` it writes a file into `project_dir` meanwhile.

    For this, `adopt` gives the accelerator a `get_state_dict` of its own, and for fp16 a `scaler`
    whose verdict all ranks share.

    Args:
        accelerator: without FSDP, DeepSpeed or another engine.
        model: a plain module. Reference models: see `adopt_frozen`.
        optimizer: built on the model's parameters, not yet prepared; or a list of optimizers; or
            None for a model that is not trained.
        shard_arguments: those of `onefold.shard`. With `mixed_precision="bf16"` or "fp16" forward
            runs under autocast, as with Accelerate alone. The same `precision` here computes with
            weights of that dtype instead: they travel in half the bytes.

    Returns:
        The same model, and the optimizer as `accelerator.prepare` wraps it. An optimizer that is
        not prepared would step in every micro-batch.

    Raises:
        ConfigError: another engine is active, `mixed_precision` and `precision` disagree, or the
            accelerator is to do what it would skip (fp8, fp16 on a CPU, torch.compile).

    Example:
        >>> accelerator = Accelerator(gradient_accumulation_steps=4)
        >>> model, optimizer = onefold.hf.adopt(accelerator, model, optimizer, stage=3)
        >>> loader = accelerator.prepare(loader)
    """
    warn_if_untested("accelerate")
    _check_plain_loop(accelerator, model, optimizer)
    precision = shard_arguments.get("precision")
    _check_precision(accelerator, precision)
    shard(model, optimizer, **shard_arguments)
    _check_ranks(accelerator, model)
    mark_prepared(model)
    _honour_precision(accelerator, model, precision)
    WholeWeights.from_folder(model, Path(accelerator.project_dir or "."))
    adopted = AdoptedModels.from_accelerator(accelerator)
    adopted.add(model, optimizer)
    prepared = [adopted.prepare_optimizer(part) for part in as_list(optimizer)]
    accelerator.prepare_model(model)
    if isinstance(optimizer, list | tuple):
        return model, prepared
    return model, prepared[0] if prepared else None


def _check_plain_loop(accelerator: Any, model: Any, optimizer: Any) -> None:
    """Raise `ConfigError` for arguments that are not those of a plain loop before `prepare`."""
    from accelerate import Accelerator
    from accelerate.optimizer import AcceleratedOptimizer

    if not isinstance(accelerator, Accelerator):
        hint = "onefold.hf.adopt(accelerator, model, optimizer). A model that is not trained "
        hint += "needs no accelerator: onefold.hf.adopt_frozen(model). For a trainer of TRL: "
        hint += "onefold.hf.adopt_trainer(trainer)"
        raise ConfigError("an accelerate.Accelerator", f"a {type(accelerator).__name__}", hint=hint)
    refuse_other_engines(accelerator)
    refuse_device_map(model)
    optimizers = optimizer if isinstance(optimizer, list | tuple) else [optimizer]
    is_late = isinstance(model, nn.Module) and bool(model.__dict__.get(PREPARED))
    if is_late or any(isinstance(o, AcceleratedOptimizer) for o in optimizers):
        got = f"a {type(model).__name__} or its optimizer after accelerator.prepare"
        hint = "call onefold.hf.adopt before accelerator.prepare"
        raise ConfigError("a model and an optimizer that are not prepared yet", got, hint=hint)
    plugin = accelerator.state.dynamo_plugin
    backend = plugin.backend.value if plugin is not None else "NO"
    if backend != "NO":
        got = f"dynamo_backend={backend} ({_source('ACCELERATE_DYNAMO_BACKEND', backend)})"
        hint = "leave dynamo_backend out, and compile blocks yourself: block.compile()"
        raise ConfigError("an Accelerator that leaves torch.compile out", got, hint=hint)


def _check_precision(accelerator: Any, precision: Any) -> None:
    """Raise `ConfigError` unless the accelerator's and `shard`'s precision mean the same."""
    mixed = accelerator.mixed_precision
    source = _source("ACCELERATE_MIXED_PRECISION", mixed)
    if mixed not in COMPUTE:
        wanted = "mixed_precision 'no', 'bf16' or 'fp16'"
        hint = "use one of these; onefold.Wire has narrower messages"
        raise ConfigError(wanted, f"{mixed!r} ({source})", hint=hint)
    if mixed == "fp16" and accelerator.device.type == "cpu":
        wanted = "mixed_precision 'no' or 'bf16' on a CPU"
        hint = "mixed_precision='bf16'; or 'no' with precision='fp16' and onefold.GradScaler"
        raise ConfigError(wanted, f"'fp16', which Accelerate ignores there ({source})", hint=hint)
    dtype, compute = COMPUTE[mixed], precision_of(precision).compute
    if dtype is not None and compute not in (None, dtype):
        wanted = f"precision to mean the same as mixed_precision={mixed!r} ({source})"
        raise ConfigError(wanted, f"precision={precision!r}", hint="leave one of the two out")


def _source(variable: str, value: str) -> str:
    """Name where a setting of the accelerator came from: an argument goes before a variable."""
    if os.environ.get(variable, "").lower() == value.lower():
        return f"the environment variable {variable}={os.environ[variable]}"
    return "an argument of Accelerator"


def _check_ranks(accelerator: Any, model: nn.Module) -> None:
    """Raise `ConfigError` unless Accelerate knows of all ranks, and of the same device."""
    num_ranks = num_processes()
    if num_ranks != accelerator.num_processes:
        wanted = f"an Accelerator with num_processes={num_ranks}, the number of ranks"
        got = f"num_processes={accelerator.num_processes}, which would deal all ranks the same rows"
        hint = "set LOCAL_RANK, and on CPUs write Accelerator(cpu=True)"
        raise ConfigError(wanted, got, hint=hint)
    device = engine_of(model).context.store.device
    if device.type != accelerator.device.type:
        wanted = f"the model on {accelerator.device}, the accelerator's device"
        hint = "move the model to accelerator.device before onefold.hf.adopt"
        raise ConfigError(wanted, f"one on {device}", hint=hint)


def _honour_precision(accelerator: Any, model: nn.Module, precision: Any) -> None:
    """Do for mixed precision what Accelerate leaves out for a module that is prepared."""
    if accelerator.scaler is not None and not isinstance(accelerator.scaler, GradScaler):
        handler = accelerator.scaler_handler
        options = handler.to_kwargs() if handler is not None else {}
        accelerator.scaler = GradScaler(accelerator.device.type, **options)
    dtype = COMPUTE[accelerator.mixed_precision]
    if dtype is None:
        return
    if precision is not None:
        cast_outputs(model)
        return
    handler = accelerator.autocast_handler
    options = handler.to_kwargs() if handler is not None else {}
    run_under_autocast(model, accelerator.device.type, dtype, options)


# saving and loading


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
        self._adopted: list[tuple[ReferenceType[nn.Module], list[LocalState]]] = []
        self._prepared: list[AcceleratedOptimizer] = []
        self._gather_others, self._prepare = (
            accelerator.get_state_dict,
            accelerator.prepare_optimizer,
        )
        accelerator.get_state_dict = self.get_state_dict
        accelerator.prepare_optimizer = self.prepare_optimizer
        saving = _LastHook(accelerator.register_save_state_pre_hook, self._save_models)
        loading = _LastHook(accelerator.register_load_state_pre_hook, self._load_models)
        accelerator.register_save_state_pre_hook = saving.register
        accelerator.register_load_state_pre_hook = loading.register

    @staticmethod
    def from_accelerator(accelerator: Any) -> AdoptedModels:
        """Return the accelerator's own; the first call makes it."""
        if _ATTRIBUTE not in accelerator.__dict__:
            accelerator.__dict__[_ATTRIBUTE] = AdoptedModels(accelerator)
        return accelerator.__dict__[_ATTRIBUTE]

    def add(self, model: nn.Module, optimizer: object) -> None:
        """Save and load one more sharded model, with its optimizers."""
        self._adopted.append((ref(model), [LocalState(part) for part in as_list(optimizer)]))

    def prepare_optimizer(self, optimizer: Any, device_placement: bool | None = None) -> Any:
        """Wrap an optimizer as Accelerate does; return the same wrapper for the same optimizer."""
        known = [one for one in self._prepared if optimizer in (one, one.optimizer)]
        if known:
            return self._prepare(known[0], device_placement)  # which notes it, and wraps no more
        wrapper = self._prepare(optimizer, device_placement)
        setattr(wrapper, PREPARED, True)
        self._prepared.append(wrapper)
        return wrapper

    def get_state_dict(self, model: nn.Module, unwrap: bool = True) -> dict[str, Any]:
        """Gather a sharded model's tensors on rank 0, {} elsewhere; a collective.

        Of other models, and for `save_state` (`unwrap=False`), return what Accelerate does.
        """
        if unwrap and is_sharded(model):
            return full_state_dict(model)
        return self._gather_others(model, unwrap=unwrap)

    def _alive(self, directory: str) -> Iterator[tuple[nn.Module, list[LocalState], Path]]:
        """Yield the models that are alive, with their optimizers and the folder of each."""
        for number, (alive, states) in enumerate(self._adopted):
            model = alive()
            if model is not None:
                yield model, states, Path(directory) / _FOLDER / str(number)

    def _save_models(self, models: list[nn.Module], weights: list[Any], output_dir: str) -> None:
        """Save every adopted model. A collective."""
        for model, states, folder in self._alive(output_dir):
            if model not in models:
                continue
            group = engine_of(model).group
            before = agreement.first(group, partial(_saves, folder))
            target = folder / f"save-{before[-1][0] + 1 if before else 1:08}"
            save(target, model, _optimizers_of(states))
            agreement.first(group, partial(prune, target, keep=1))
            for state in states:
                state.note_elsewhere()
        if len(weights) == len(models):  # else another hook has sorted them out
            pairs = zip(weights, models, strict=True)
            weights[:] = [state for state, model in pairs if not is_sharded(model)]

    def _load_models(self, models: list[nn.Module], input_dir: str) -> None:
        """Load every adopted model, and leave the others to Accelerate. A collective."""
        for model, states, folder in self._alive(input_dir):
            saves = agreement.first(engine_of(model).group, partial(_saves, folder))
            if saves or model in models:  # a hook may have taken out a model that it has loaded
                load(folder / saves[-1][1] if saves else folder, model, _optimizers_of(states))
        models[:] = [model for model in models if not is_sharded(model)]


def _optimizers_of(states: list[LocalState]) -> list[Optimizer]:
    alive = (state.optimizer() for state in states)
    return [optimizer for optimizer in alive if optimizer is not None]


def _saves(folder: Path) -> list[tuple[int, str]]:
    """Return the complete saves in a folder, by number: one, unless a save was killed."""
    names = [path.name for path in folder.glob("save-*")]
    return sorted((int(name.removeprefix("save-")), name) for name in names)
