"""Make a sharded module one that Accelerate and TRL take as it is, without a wrapper of their own.

Accelerate returns a module that carries `_is_accelerate_prepared` unchanged, and calls `no_sync` of
any module that has one for micro-batches that are not the last of a step. It then leaves autocast
out, which `run_under_autocast` does in its place.

TRL passes `model.get_output_embeddings().weight` to an autograd function of its own. A sharded
parameter is a DTensor, of which TRL takes `full_tensor()`. A replicated one has no such mark, and
autograd would leave its gradient where no reduction finds it: so the head shows a view of the
parameter that computes. `adopt_trainer` brings a trainer of TRL to its sharded model: frozen
models, generation, inference servers.
"""

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import partial
from typing import Any
from weakref import ReferenceType, ref

import torch
from torch import nn

from onefold.adapters.hf.conflicts import refuse_device_map
from onefold.api import accumulate, shard, unsharded
from onefold.engine.registry import engine_of, is_sharded
from onefold.errors import StateError
from onefold.inference.stream import generating
from onefold.unit.dtensors import ReplicatedParameter, ShardedParameter
from onefold.unit.forms import Form
from onefold.unit.parameter import take_form
from onefold.versions import warn_if_untested

PREPARED = "_is_accelerate_prepared"
"""Read by `Accelerator.prepare_model`, which otherwise wraps a module."""


def adopt_frozen(model: nn.Module, **shard_arguments: Any) -> nn.Module:
    """Shard a model for evaluation alone, in place. A collective.

    Accelerate and TRL then use the module as it is, instead of a copy on every rank. Pass it where
    a trainer takes `ref_model` or `teacher_model`.

    Args:
        model: a plain module. Its parameters stop requiring gradients, and it is set to `eval()`.
        shard_arguments: those of `onefold.shard`; the stage is 3 by default.

    Returns:
        The same module.

    Raises:
        ConfigError: the model cannot be sharded, as it is spread over devices already.

    Example:
        >>> reference = onefold.hf.adopt_frozen(AutoModelForCausalLM.from_pretrained(name))
        >>> trainer = DPOTrainer(model, ref_model=reference, args=args, train_dataset=pairs)
    """
    refuse_device_map(model)
    model.eval().requires_grad_(False)
    return mark_prepared(shard(model, None, **shard_arguments))


def mark_prepared(module: nn.Module) -> nn.Module:
    """Let Accelerate use a sharded module as it is. Calling it again changes nothing.

    Accelerate's `no_sync`, `accumulate` and `backward` then work, and its `unwrap_model` returns
    this module. Raises `StateError` for a module that is not sharded.
    """
    engine_of(module)
    marks = module.__dict__
    if PREPARED not in marks:
        _show_heads(module)
    marks[PREPARED] = True
    marks["no_sync"] = partial(_no_sync, ref(module))
    marks["join_hook"] = _refuse_join
    return module


def _refuse_join(**_: object) -> None:
    """`join_hook` of the module: `torch.distributed.algorithms.Join` and Accelerate call it."""
    got = "join_uneven_inputs with a sharded module, whose ranks need each other's shards"
    hint = "leave it out: Accelerate has even_batches=True, a DataLoader drop_last=True"
    raise StateError("as many batches on every rank", got, hint=hint)


def _no_sync(alive: ReferenceType[nn.Module]) -> AbstractContextManager[None]:
    module = alive()
    if module is None:
        wanted = "the sharded module to be alive in no_sync"
        hint = "keep the module as long as it is trained"
        raise StateError(wanted, "a module that was deleted", hint=hint)
    return accumulate(module)


# autocast


class _Autocast:
    """Enters autocast before each forward of one module, and leaves it with fp32 outputs."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        self._make = partial(torch.autocast, *arguments, **options)
        self._open: list[AbstractContextManager[Any]] = []  # of forwards inside one another

    def enter(self, *_: object) -> None:
        self._open.append(self._make())
        self._open[-1].__enter__()

    def leave(self, *_: object) -> None:
        if self._open:  # empty where an earlier hook of this forward has raised
            self._open.pop().__exit__(None, None, None)


def run_under_autocast(
    module: nn.Module, device_type: str, dtype: torch.dtype, options: dict[str, Any]
) -> None:
    """Compute the module's forward under `torch.autocast(..., **options)`; its outputs are fp32."""
    autocast = _Autocast(device_type, dtype, **options)
    module.register_forward_pre_hook(autocast.enter)
    module.register_forward_hook(autocast.leave, always_call=True)
    cast_outputs(module)


def cast_outputs(module: nn.Module) -> None:
    """Cast the module's outputs to fp32, as Accelerate does where it computes in a narrower one."""
    from accelerate.utils import convert_to_fp32

    module.register_forward_hook(lambda _module, _args, outputs: convert_to_fp32(outputs))


# output heads


def _show_heads(module: nn.Module) -> None:
    """Prepare every language model in `module` whose head is replicated, before its forward."""
    for part in module.modules():
        find: Any = getattr(type(part), "get_output_embeddings", None)
        head = find(part) if callable(find) else None
        if isinstance(head, nn.Module) and _is_replicated(head):
            part.register_forward_pre_hook(partial(_show_weight, ref(head)))
            part.register_forward_hook(partial(_hide_weight, ref(head)), always_call=True)


def _is_replicated(head: nn.Module) -> bool:
    return isinstance(head._parameters.get("weight"), ReplicatedParameter)


def _show_weight(alive: ReferenceType[nn.Module], *_: object) -> None:
    """Show the weight by an attribute of the head that comes before its parameter."""
    head = alive()
    if head is not None and torch.is_grad_enabled() and _is_replicated(head):
        weight: Any = head._parameters["weight"]
        if weight.requires_grad:
            head.__dict__["weight"] = weight.view_as(weight)


def _hide_weight(alive: ReferenceType[nn.Module], *_: object) -> None:
    head = alive()
    if head is not None:
        head.__dict__.pop("weight", None)


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
                shown.enter_context(_gathered_data(params[0], _device(model)))
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


@contextmanager
def _gathered_data(parameter: Any, device: torch.device) -> Iterator[None]:
    """Let `parameter.data` be the unsharded value, on `device`. A collective."""
    parameter._onefold_full = parameter.detach().to(device).full_tensor()
    take_form(Form.GATHERED, (parameter,))
    try:
        yield
    finally:
        take_form(Form.SHARDED, (parameter,))
        del parameter._onefold_full


def _device(model: nn.Module | None) -> torch.device:
    """The device on which a sharded model computes, wherever its weights rest."""
    return torch.device("cpu") if model is None else engine_of(model).context.store.device
