"""Refuse engines, arguments, models and optimizers with which a sharded Trainer would go wrong.

Every rank has the same arguments, so every rank raises the same error, before anything is sharded.
`accelerate launch` activates FSDP and DeepSpeed by environment variables, which a script does not
show. So an error names the argument, the variable or the file that an engine came from.
"""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from onefold.config import precision_of
from onefold.errors import ConfigError
from onefold.wire import launcher

COMPUTE = {"no": None, "fp16": torch.float16, "bf16": torch.bfloat16}
"""The dtype of a forward under autocast, by Accelerate's `mixed_precision`."""

_ENGINES = (
    ("FSDP", "ACCELERATE_USE_FSDP", "fsdp_plugin"),
    ("DeepSpeed", "ACCELERATE_USE_DEEPSPEED", "deepspeed_plugins"),
    ("Megatron-LM", "ACCELERATE_USE_MEGATRON_LM", "megatron_lm_plugin"),
)
"""Name, environment variable, and attribute of Accelerate's state."""

_ON = ("1", "on", "t", "true", "y", "yes")
_DETAILS = ("FSDP_VERSION", "ACCELERATE_DEEPSPEED_CONFIG_FILE")
"""Variables of `accelerate launch` that say more about an engine."""


def refuse_other_engines(accelerator: Any = None, arguments: Any = None) -> None:
    """Raise `ConfigError` if another library or a `ParallelismConfig` is configured to shard.

    The message names the argument, environment variable or file that it came from.

    Args:
        accelerator: an `accelerate.Accelerator`, its `state`, or None.
        arguments: a `transformers.TrainingArguments`, or None.
    """
    state = getattr(accelerator, "state", accelerator)
    for engine, source in _active(state, arguments):
        got = f"{engine} as well, from {source}"
        hint = "remove that setting. Run `accelerate launch` with a configuration whose "
        hint += f"distributed_type is MULTI_GPU or MULTI_CPU, or torchrun, without {engine}"
        raise ConfigError("onefold to be the only one to shard the model", got, hint=hint)


def refuse_device_map(model: Any) -> None:
    """Raise `ConfigError` if transformers has loaded a model in pieces on several devices."""
    places = getattr(model, "hf_device_map", None) or {}
    devices = sorted({str(device) for device in places.values()})
    if len(devices) > 1 or devices in (["cpu"], ["disk"]):
        got = f"a {type(model).__name__} that device_map spread over {', '.join(devices)}"
        hint = "leave device_map out of from_pretrained: onefold.shard(offload=) places weights"
        raise ConfigError("a model that lies on one device, or on `meta`", got, hint=hint)


def _active(state: Any, arguments: Any) -> Iterator[tuple[str, str]]:
    """Yield active engines with the places that activated them, the most telling place first."""
    for name, engine in (("deepspeed", "DeepSpeed"), ("fsdp", "FSDP")):
        setting = getattr(arguments, name, None)
        if setting:
            yield engine, f"TrainingArguments({name}={setting!r})"
    for engine, variable, _ in _ENGINES:
        if os.environ.get(variable, "").lower() in _ON:
            yield engine, _describe(engine, variable)
    for engine, _, attribute in _ENGINES:
        if getattr(state, attribute, None) is not None:
            yield engine, f"Accelerator({attribute}=...)"
    axes = getattr(state, "parallelism_config", None)
    if axes is not None and axes.total_size > 1:
        yield "a ParallelismConfig", "Accelerator(parallelism_config=...)"


def _describe(engine: str, variable: str) -> str:
    """Name the variable, what others add to it, and the file that sets it by default."""
    word = engine.upper().replace("-LM", "")
    names = [variable] + [name for name in _DETAILS if word in name and name in os.environ]
    place = f"the environment ({', '.join(f'{name}={os.environ[name]}' for name in names)})"
    file, line = _default_file(), f"distributed_type: {engine.upper().replace('-', '_')}"
    if file is not None and os.access(file, os.R_OK) and line in file.read_text("utf-8"):
        place += f", which `accelerate launch` sets from {str(file)!r}"
    return place


def _default_file() -> Path | None:
    """Return where `accelerate config` writes its configuration."""
    try:
        from accelerate.commands.config import default_config_file
    except ImportError:
        return None
    return Path(default_config_file)


def check_arguments(args: Any) -> None:
    """Raise `ConfigError` for a choice of `TrainingArguments` that sharding does not honour."""
    for is_set, argument, hint in _unsupported(args):
        if is_set:
            raise ConfigError("arguments that a sharded Trainer honours", argument, hint=hint)


def _unsupported(args: Any) -> Iterator[tuple[bool, str, str]]:
    launched, is_parallel = launcher.world_size(), args.world_size > 1
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
        bool(args.auto_find_batch_size) and is_parallel,
        "auto_find_batch_size=True on several ranks: one rank may run out of memory alone",
        "set per_device_train_batch_size; onefold.plan(model, world_size=...) predicts what fits",
    )
    yield (
        bool(args.save_on_each_node) and is_parallel,
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
        got = f"{strangers} tensors that the model does not have"
        if not strangers:
            got = f"frozen ones such as {frozen[0]!r}, and not {missing[0]!r}"
        wanted = f"Trainer(optimizers=...) with a {type(optimizer).__name__} that holds the "
        hint = "build the optimizer after the last change of the model (get_peft_model, "
        hint += "resize_token_embeddings, to), or leave it to the Trainer"
        raise ConfigError(f"{wanted}model's parameters to train", got, hint=hint)


def autocast_of(mixed_precision: str, precision: object) -> torch.dtype | None:
    """Return the dtype for autocast, None without it, from the Trainer's and the callback's choice.

    Raises `ConfigError` where they disagree, or for a mixed precision that cannot be honoured.
    """
    if mixed_precision == "no":
        return None
    wanted, compute = COMPUTE.get(mixed_precision), precision_of(precision).compute
    if compute not in (None, wanted):
        got = f"{mixed_precision}=True in TrainingArguments (or ACCELERATE_MIXED_PRECISION), and "
        got += f"precision={precision!r} in onefold.hf.Callback"
        hint = "give the same one to both, or leave one out"
        raise ConfigError("one mixed precision", got, hint=hint)
    if mixed_precision == "bf16":
        return wanted if compute is None else None
    got = f"{mixed_precision}=True in TrainingArguments: Accelerate's loss scaler decides on "
    got += "each rank alone whether a step is skipped"
    hint = "bf16=True; or train in a loop of your own with precision='fp16' and "
    hint += "onefold.GradScaler"
    raise ConfigError("mixed precision that all ranks can step in together", got, hint=hint)
