"""Bring a raw Accelerate loop to a sharded model: `onefold.hf.adopt`."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch.distributed as dist
from torch import nn

from onefold.adapters.hf.accelerate_state import AdoptedModels
from onefold.adapters.hf.conflicts import COMPUTE, refuse_device_map, refuse_other_engines
from onefold.adapters.hf.whole_weights import WholeWeights
from onefold.adapters.hf.wrap import (
    cast_outputs,
    is_prepared,
    mark_prepared,
    run_under_autocast,
)
from onefold.adapters.versions import warn_if_untested
from onefold.api import shard
from onefold.config import precision_of
from onefold.engine.precision import GradScaler
from onefold.engine.registry import engine_of
from onefold.errors import ConfigError

if TYPE_CHECKING:
    from accelerate import Accelerator


def adopt(
    accelerator: Accelerator, model: nn.Module, optimizer: Any = None, **shard_arguments: Any
) -> tuple[nn.Module, Any]:
    """Shard a model for an Accelerate loop, in place. A collective, before `prepare`.

    Afterwards `accelerator.prepare(model, optimizer, loader, scheduler)` returns this module as it
    is. `accumulate`, `backward`, `clip_grad_norm_`, schedulers and `gather_for_metrics` work as
    with one process for each device. `save_state` and `load_state` write and read shards, at any
    world size and stage; every rank calls them.

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
        The same model and the same optimizer.

    Raises:
        ConfigError: another engine is active, `mixed_precision` and `precision` disagree, or the
            accelerator is to do what it would skip (fp8, fp16 on a CPU, torch.compile).

    Example:
        >>> accelerator = Accelerator(gradient_accumulation_steps=4)
        >>> onefold.hf.adopt(accelerator, model, optimizer, stage=3)
        >>> model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    """
    warn_if_untested("accelerate")
    _check(accelerator, model, optimizer)
    precision = shard_arguments.get("precision")
    _check_precision(accelerator, precision)
    shard(model, optimizer, **shard_arguments)
    _check_ranks(accelerator, model)
    mark_prepared(model)
    _honour_precision(accelerator, model, precision)
    WholeWeights.of(model, Path(accelerator.project_dir or "."))
    AdoptedModels.of(accelerator).add(model, optimizer)
    return model, optimizer


def _check(accelerator: Any, model: Any, optimizer: Any) -> None:
    """Raise `ConfigError` for arguments that are not those of a plain loop before `prepare`."""
    from accelerate import Accelerator
    from accelerate.optimizer import AcceleratedOptimizer

    if not isinstance(accelerator, Accelerator):
        raise ConfigError(
            "an accelerate.Accelerator",
            f"a {type(accelerator).__name__}",
            hint="onefold.hf.adopt(accelerator, model, optimizer). A model that is not trained "
            "needs no accelerator: onefold.hf.adopt_frozen(model). For a trainer of TRL: "
            "onefold.hf.adopt_trainer(trainer)",
        )
    refuse_other_engines(accelerator)
    refuse_device_map(model)
    optimizers = optimizer if isinstance(optimizer, list | tuple) else [optimizer]
    is_late = isinstance(model, nn.Module) and is_prepared(model)
    if is_late or any(isinstance(o, AcceleratedOptimizer) for o in optimizers):
        raise ConfigError(
            "a model and an optimizer that are not prepared yet",
            f"a {type(model).__name__} or its optimizer after accelerator.prepare",
            hint="call onefold.hf.adopt before accelerator.prepare",
        )
    plugin = accelerator.state.dynamo_plugin
    backend = plugin.backend.value if plugin is not None else "NO"
    if backend != "NO":
        raise ConfigError(
            "an Accelerator that leaves torch.compile out",
            f"dynamo_backend={backend} ({_source('ACCELERATE_DYNAMO_BACKEND', backend)})",
            hint="leave dynamo_backend out, and compile blocks yourself: block.compile()",
        )


def _check_precision(accelerator: Any, precision: Any) -> None:
    """Raise `ConfigError` unless the accelerator's and `shard`'s precision mean the same."""
    mixed = accelerator.mixed_precision
    source = _source("ACCELERATE_MIXED_PRECISION", mixed)
    if mixed not in COMPUTE:
        raise ConfigError(
            "mixed_precision 'no', 'bf16' or 'fp16'",
            f"{mixed!r} ({source})",
            hint="use one of these; onefold.Wire has narrower messages",
        )
    if mixed == "fp16" and accelerator.device.type == "cpu":
        raise ConfigError(
            "mixed_precision 'no' or 'bf16' on a CPU",
            f"'fp16', which Accelerate ignores there ({source})",
            hint="mixed_precision='bf16'; or 'no' with precision='fp16' and onefold.GradScaler",
        )
    wanted, compute = COMPUTE[mixed], precision_of(precision).compute
    if wanted is not None and compute not in (None, wanted):
        raise ConfigError(
            f"precision to mean the same as mixed_precision={mixed!r} ({source})",
            f"precision={precision!r}",
            hint="leave one of the two out",
        )


def _source(variable: str, value: str) -> str:
    """Name where a setting of the accelerator came from: an argument goes before a variable."""
    if os.environ.get(variable, "").lower() == value.lower():
        return f"the environment variable {variable}={os.environ[variable]}"
    return "an argument of Accelerator"


def _check_ranks(accelerator: Any, model: nn.Module) -> None:
    """Raise `ConfigError` unless Accelerate knows of all ranks, and of the same device."""
    num_ranks = dist.get_world_size() if dist.is_initialized() else 1
    if num_ranks != accelerator.num_processes:
        raise ConfigError(
            f"an Accelerator with num_processes={num_ranks}, the number of ranks",
            f"one with num_processes={accelerator.num_processes}, which would deal the same "
            "rows to all of them",
            hint="set LOCAL_RANK, and on CPUs write Accelerator(cpu=True)",
        )
    device = engine_of(model).context.store.device
    if device.type != accelerator.device.type:
        raise ConfigError(
            f"the model on {accelerator.device}, the accelerator's device",
            f"one on {device}",
            hint="move the model to accelerator.device before onefold.hf.adopt",
        )


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
