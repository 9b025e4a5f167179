"""Refuse `TrainingArguments`, models and optimizers with which a sharded Trainer would go wrong.

Every rank has the same arguments, so every rank raises the same error, before anything is sharded.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from onefold.adapters.hf.prepared import COMPUTE
from onefold.config import precision_of
from onefold.errors import ConfigError
from onefold.wire import launcher


def check_arguments(args: Any) -> None:
    """Raise `ConfigError` for a choice of `TrainingArguments` that sharding does not honour."""
    for is_set, argument, hint in _unsupported(args):
        if is_set:
            raise ConfigError("arguments that a sharded Trainer honours", argument, hint=hint)


def _unsupported(args: Any) -> Iterator[tuple[bool, str, str]]:
    launched = launcher.world_size()
    yield (
        args.world_size != launched,
        f"a Trainer that sees {args.world_size} of the {launched} ranks that were launched",
        "set LOCAL_RANK, and on CPUs TrainingArguments(use_cpu=True): else Accelerate takes each "
        "rank for a process of its own",
    )
    yield (
        args.n_gpu > 1,
        f"one process for {args.n_gpu} GPUs, for which Trainer uses DataParallel",
        f"run the script as `torchrun --nproc-per-node={args.n_gpu} script.py`, or show it one GPU "
        "by CUDA_VISIBLE_DEVICES",
    )
    yield (
        bool(args.torch_compile),
        "torch_compile=True, which compiles around the whole model",
        "leave it out, and call block.compile() on the model's blocks before the Trainer",
    )
    for name in ("bf16_full_eval", "fp16_full_eval"):
        yield (
            bool(getattr(args, name)),
            f"{name}=True, which would cast sharded parameters to evaluate",
            f"leave it out; onefold.hf.Callback(precision={name[:4]!r}) computes in that dtype",
        )
    yield (
        bool(args.auto_find_batch_size) and args.world_size > 1,
        "auto_find_batch_size=True on several ranks: one rank may run out of memory alone",
        "set per_device_train_batch_size; onefold.plan(model, world_size=...) predicts what fits",
    )
    yield (
        bool(args.save_on_each_node) and args.world_size > 1,
        "save_on_each_node=True: all ranks write one checkpoint together",
        "leave it out, and let output_dir be on a file system that every node sees",
    )


def check_optimizer(model: nn.Module, optimizer: Optimizer | None) -> None:
    """Raise `ConfigError` for an optimizer that was built before the model changed.

    PEFT freezes the parameters that such an optimizer holds, and adds others that it lacks.
    """
    if optimizer is None:
        return
    names = {id(p): name for name, p in model.named_parameters()}
    held = {id(p) for group in optimizer.param_groups for p in group["params"]}
    frozen = [n for n, p in model.named_parameters() if id(p) in held and not p.requires_grad]
    missing = [n for n, p in model.named_parameters() if id(p) not in held and p.requires_grad]
    strangers = len(held - names.keys())
    if strangers or (frozen and missing):
        got = (
            f"{strangers} tensors that the model does not have"
            if strangers
            else f"frozen ones such as {frozen[0]!r}, and not {missing[0]!r}"
        )
        raise ConfigError(
            f"Trainer(optimizers=...) with a {type(optimizer).__name__} that holds the model's "
            "parameters to train",
            got,
            hint="build the optimizer after the last change of the model (get_peft_model, "
            "resize_token_embeddings, to), or leave it to the Trainer",
        )


def autocast_of(mixed_precision: str, precision: object) -> torch.dtype | None:
    """Return the dtype for autocast, None without it, from the Trainer's and the callback's choice.

    Raises `ConfigError` where they disagree, or for a mixed precision that cannot be honoured.
    """
    if mixed_precision == "no":
        return None
    wanted, compute = COMPUTE.get(mixed_precision), precision_of(precision).compute
    if compute not in (None, wanted):
        raise ConfigError(
            "one mixed precision",
            f"{mixed_precision}=True in TrainingArguments (or ACCELERATE_MIXED_PRECISION), and "
            f"precision={precision!r} in onefold.hf.Callback",
            hint="give the same one to both, or leave one out",
        )
    if mixed_precision == "bf16":
        return wanted if compute is None else None
    raise ConfigError(
        "mixed precision that all ranks can step in together",
        f"{mixed_precision}=True in TrainingArguments: Accelerate's loss scaler decides on "
        "each rank alone whether a step is skipped",
        hint="bf16=True; or train in a loop of your own with precision='fp16' and "
        "onefold.GradScaler",
    )
