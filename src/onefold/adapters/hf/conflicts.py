"""Refuse FSDP, DeepSpeed and other engines that Accelerate would apply to a sharded model.

`accelerate launch` activates them by environment variables, which a script does not show. So an
error names the argument, the variable or the file that an engine came from.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from onefold.errors import ConfigError

_SWITCHES = {
    "FSDP": "ACCELERATE_USE_FSDP",
    "DeepSpeed": "ACCELERATE_USE_DEEPSPEED",
    "Megatron-LM": "ACCELERATE_USE_MEGATRON_LM",
}
_PLUGINS = {
    "FSDP": "fsdp_plugin",
    "DeepSpeed": "deepspeed_plugins",
    "Megatron-LM": "megatron_lm_plugin",
}
_ON = ("1", "on", "t", "true", "y", "yes")
_DETAILS = ("FSDP_VERSION", "ACCELERATE_DEEPSPEED_CONFIG_FILE")
"""Variables of `accelerate launch` that say more about an engine."""


def refuse_other_engines(accelerator: Any = None, arguments: Any = None) -> None:
    """Raise `ConfigError` if another library is configured to shard, too.

    Args:
        accelerator: an `accelerate.Accelerator`, its `state`, or None.
        arguments: a `transformers.TrainingArguments`, or None.

    Raises:
        ConfigError: FSDP, DeepSpeed, Megatron-LM or a `ParallelismConfig` is active. The message
            names the argument, environment variable or file that it came from.

    Example:
        >>> refuse_other_engines(accelerator)
    """
    state = getattr(accelerator, "state", accelerator)
    for engine, source in _found(state, arguments):
        raise ConfigError(
            "onefold to be the only one to shard the model",
            f"{engine} as well, from {source}",
            hint=f"remove that setting. Run `accelerate launch` with a configuration whose "
            f"distributed_type is MULTI_GPU or MULTI_CPU, or torchrun, without {engine}",
        )


def refuse_device_map(model: Any) -> None:
    """Raise `ConfigError` if a model was loaded in pieces on several devices.

    Args:
        model: any model; one of transformers knows its `hf_device_map`.

    Raises:
        ConfigError: the message lists the devices.
    """
    places = getattr(model, "hf_device_map", None) or {}
    devices = sorted({str(device) for device in places.values()})
    if len(devices) > 1 or devices in (["cpu"], ["disk"]):
        raise ConfigError(
            "a model that lies on one device, or on `meta`",
            f"a {type(model).__name__} that device_map spread over {', '.join(devices)}",
            hint="call from_pretrained without device_map: onefold.shard places every "
            "parameter, and keeps weights off the device with offload=",
        )


def _found(state: Any, arguments: Any) -> Iterator[tuple[str, str]]:
    """Yield active engines with the places that activated them, the most telling place first."""
    for name, engine in (("deepspeed", "DeepSpeed"), ("fsdp", "FSDP")):
        given = getattr(arguments, name, None)
        if given:
            yield engine, f"TrainingArguments({name}={given!r})"
    for engine, variable in _SWITCHES.items():
        if os.environ.get(variable, "").lower() in _ON:
            yield engine, _describe(engine, variable)
    for engine, attribute in _PLUGINS.items():
        if getattr(state, attribute, None) is not None:
            yield engine, f"Accelerator({attribute}=...)"
    axes = getattr(state, "parallelism_config", None)
    if axes is not None and axes.total_size > 1:
        yield "a ParallelismConfig", "Accelerator(parallelism_config=...)"


def _describe(engine: str, variable: str) -> str:
    """Name the variable, what others say beside it, and the file that sets it by default."""
    word = engine.upper().replace("-LM", "")
    names = [variable] + [name for name in _DETAILS if word in name and name in os.environ]
    place = f"the environment ({', '.join(f'{name}={os.environ[name]}' for name in names)})"
    file = _default_file()
    if file is not None and f"distributed_type: {engine.upper().replace('-', '_')}" in _text(file):
        place += f", which `accelerate launch` sets from {str(file)!r}"
    return place


def _default_file() -> Path | None:
    """Return the configuration that `accelerate config` has written, if there is one."""
    try:
        from accelerate.commands.config import default_config_file
    except ImportError:
        return None
    file = Path(default_config_file)
    return file if file.is_file() else None


def _text(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8")
    except OSError:
        return ""
