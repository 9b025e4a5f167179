"""Bring a trainer of TRL to its sharded model: frozen models, generation, inference servers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any
from weakref import ref

import torch
from torch import Tensor, nn

from onefold.adapters.hf.wrap import adopt_frozen
from onefold.adapters.versions import warn_if_untested
from onefold.api import unsharded
from onefold.engine.registry import engine_of, is_sharded
from onefold.errors import StateError
from onefold.inference.stream import generating
from onefold.unit.dtensors import ShardedParameter

BACKEND = "_dist"
"""Where TRL's trainers, and their link to an inference server, hold a `DistributedBackend`."""

_FROZEN = ("ref_model", "teacher_model")


def adopt_trainer(trainer: Any, **shard_arguments: Any) -> Any:
    """Let a trainer of TRL know that its model is sharded. A collective, once it is built.

    Shards the frozen models that the trainer holds: reference, teacher and reward models. Weights
    for an inference server (vLLM) are gathered one by one, tied weights once; those of a model
    with adapters are merged in a full copy. With `ds3_gather_for_generation=True`, TRL's default,
    weights that fit are kept over a generation: see `onefold.generating`.

    Args:
        trainer: built with `onefold.hf.Callback`, or with a model that is sharded already.
        shard_arguments: those of `onefold.shard`, for the frozen models.

    Returns:
        The same trainer.

    Raises:
        StateError: the trainer's model is not sharded.

    Example:
        >>> trainer = GRPOTrainer(model, rewards, args, callbacks=[onefold.hf.Callback(stage=3)])
        >>> onefold.hf.adopt_trainer(trainer).train()
    """
    warn_if_untested("trl", "transformers", "accelerate")
    model = getattr(trainer, "model", None)
    if not is_sharded(model):
        got = f"a {type(trainer).__name__} with a {type(model).__name__} that is not"
        hint = "build the trainer with callbacks=[onefold.hf.Callback(stage=3)]"
        raise StateError("a trainer whose model is sharded", got, hint=hint)
    for name in _FROZEN:
        _freeze(getattr(trainer, name, None), shard_arguments)
    for reward in getattr(trainer, "reward_funcs", None) or []:
        _freeze(reward, shard_arguments)
    keeps = bool(getattr(trainer.args, "ds3_gather_for_generation", True))
    is_batched = bool(getattr(trainer.args, "use_transformers_continuous_batching", False))
    for holder in (trainer, getattr(trainer, "vllm_generation", None)):
        if holder is not None and BACKEND in holder.__dict__:
            setattr(holder, BACKEND, ShardedBackend(model, keeps=keeps, is_batched=is_batched))
    return trainer


def _freeze(model: object, shard_arguments: dict[str, Any]) -> None:
    """Shard a frozen model that is not sharded yet; functions that reward are none."""
    if isinstance(model, nn.Module) and not is_sharded(model):
        adopt_frozen(model, **shard_arguments)


class ShardedBackend:
    """Answers what TRL asks its `DistributedBackend`, for one sharded model.

    TRL reads a parameter's `.data` inside `gather_params([parameter])`: that is where one parameter
    is gathered, on the device, and freed again. All of them at once are gathered to merge adapters.
    """

    zero_stage = 0
    is_zero3 = is_fsdp = False
    fsdp_version = None

    def __init__(self, model: nn.Module, *, keeps: bool, is_batched: bool) -> None:
        """`keeps`: weights are kept over a generation. `is_batched`: by continuous batching."""
        self._model = ref(model)
        self._keeps = keeps
        self._is_batched = is_batched

    @contextmanager
    def gather_params(self, params: Sequence[nn.Parameter]) -> Iterator[None]:
        """Show unsharded values: of one parameter, or of the whole model, to merge adapters.

        Edits are discarded at the end. A collective.
        """
        model = self._model()
        with ExitStack() as shown:
            if len(params) > 1 and model is not None:
                shown.enter_context(unsharded(model))
            elif params and isinstance(params[0], ShardedParameter):
                shown.enter_context(_gathered(params[0], _device(model)))
            yield

    @contextmanager
    def summon_full_params(self, module: nn.Module, **_: Any) -> Iterator[None]:
        """Keep a module's unsharded weights while it generates. A collective.

        Continuous batching gets a full copy: it casts the module, and each rank runs at its own
        pace.
        """
        with ExitStack() as kept:
            if self._keeps and is_sharded(module):
                kept.enter_context(unsharded(module) if self._is_batched else generating(module))
            yield


class _GatheredParameter(ShardedParameter):
    """A sharded parameter whose `.data` is the unsharded value, for a while."""

    _onefold_full: Tensor

    @property
    def data(self) -> Tensor:  # type: ignore[override]
        return self._onefold_full


@contextmanager
def _gathered(parameter: Any, device: torch.device) -> Iterator[None]:
    """Let `parameter.data` be the unsharded value, on `device`. A collective."""
    kind = parameter.__class__
    parameter._onefold_full = parameter.detach().to(device).full_tensor()
    parameter.__class__ = _GatheredParameter
    try:
        yield
    finally:
        parameter.__class__ = kind
        del parameter._onefold_full


def _device(model: nn.Module | None) -> torch.device:
    """The device on which a sharded model computes, wherever its weights rest."""
    return torch.device("cpu") if model is None else engine_of(model).context.store.device
