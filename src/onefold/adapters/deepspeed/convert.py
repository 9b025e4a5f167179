"""`onefold.from_deepspeed`: the arguments of `shard` for a DeepSpeed configuration."""

import json
import os
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NoReturn

import torch

from onefold.adapters.deepspeed.keys import KEYS, Fate
from onefold.config import Offload, Precision, nearest_word
from onefold.errors import ConfigError
from onefold.pages import page
from onefold.wire_config import Wire

_PAGE = "docs/coming-from/deepspeed.md"
_ZERO = "zero_optimization"
_DTYPES = {
    "bf16": torch.bfloat16, "bfloat16": torch.bfloat16, "torch.bfloat16": torch.bfloat16,
    "fp16": torch.float16, "float16": torch.float16, "half": torch.float16,
    "torch.float16": torch.float16,
    "fp32": torch.float32, "float32": torch.float32, "float": torch.float32,
    "torch.float32": torch.float32,
}  # fmt: skip
_TIERS = {"none": "device", "cpu": "cpu", "nvme": "disk"}


def from_deepspeed(config: Mapping[str, Any] | str | os.PathLike[str]) -> dict[str, Any]:
    """Return the keyword arguments of `onefold.shard` for a DeepSpeed configuration.

    One warning names every key that is set and becomes no argument, with what stands for it: a line
    of the loop, or nothing. "auto", which Hugging Face fills in, counts as not set;
    `"stage": "auto"` is `stage="auto"`. docs/coming-from/deepspeed.md lists all keys.

    Args:
        config: a dict, the path of a JSON file, or JSON text.

    Returns:
        `stage`, and `precision`, `offload` and `wire` where the configuration has them.

    Raises:
        ConfigError: names the key: unknown, of a wrong type, in conflict with another, or one
            without which another model or another mean of gradients would be trained.

    Example:
        >>> onefold.shard(model, optimizer, **onefold.from_deepspeed("ds_config.json"))
    """
    settings = Settings(dict(_flat(_read_config(config), "")))
    _refuse_settings(settings)
    stage = _stage_of_config(settings)
    wire = _wire(settings, stage)
    ranks = os.environ.get("WORLD_SIZE", "")
    is_one_host = ranks.isdecimal() and ranks == os.environ.get("LOCAL_WORLD_SIZE")
    fitted = _without_nodes(wire) if is_one_host else wire
    arguments = {
        "stage": stage,
        "precision": _precision(settings),
        "offload": _offload(settings, stage),
        "wire": fitted,
    }
    lines = settings.ignored()
    if fitted != wire:
        name = "zero_hpz_partition_size" if wire.secondary == "weights" else "mics_shard_size"
        lines.append(f"{_ZERO}.{name}: none, as the launcher started all ranks on one host")
    if lines:
        warnings.warn(
            "of the DeepSpeed configuration, these keys become no argument of onefold.shard:\n  "
            + "\n  ".join(lines),
            stacklevel=2,
        )
    return {name: value for name, value in arguments.items() if value is not None}


@dataclass(frozen=True, slots=True)
class Settings:
    """The keys that a configuration sets, by dotted name."""

    values: dict[str, Any]

    def get(self, name: str, kind: type | tuple[type, ...], default: Any) -> Any:
        """Return the value of a key; `default` if it is absent, null or "auto"."""
        value = self.values.get(name)
        if value is None or value == "auto":
            return default
        is_flag = isinstance(value, bool)
        if not isinstance(value, kind) or (is_flag and kind is not bool):
            kinds = kind if isinstance(kind, tuple) else (kind,)
            _refuse_value(name, " or ".join(wanted.__name__ for wanted in kinds), value)
        return value

    def flag(self, name: str) -> bool:
        return bool(self.get(name, bool, False))

    def word(self, name: str, known: Mapping[str, Any]) -> Any:
        """Return what the word of a key stands for in `known`; None if it is not set."""
        value = self.get(name, str, None)
        if value is not None and value not in known:
            _refuse_value(name, f"one of {', '.join(map(repr, known))}", value)
        return None if value is None else known[value]

    def ignored(self) -> list[str]:
        """Return a line for each key that is set and becomes no argument."""
        lines, silent = [], []
        for name, value in self.values.items():
            fate = KEYS[name].fate
            if value == "auto" and fate is Fate.ARGUMENT and name != f"{_ZERO}.stage":
                lines.append(f'{name.removesuffix(".*")}: "auto" says nothing yet; pass the value')
            elif _is_off(value) or fate in (Fate.ARGUMENT, Fate.REFUSED):
                continue
            elif fate is Fate.SILENT:
                silent.append(name.removesuffix(".*"))
            else:
                lines.append(f"{name.removesuffix('.*')}: {KEYS[name].here}")
        return [*lines, *([f"without effect here: {', '.join(silent)}"] if silent else [])]


def _is_off(value: Any) -> bool:
    """Return True for a value that asks for nothing."""
    if isinstance(value, dict):
        size = value.get("autotp_size", 2)
        return not value or value.get("enabled") is False or size in (0, 1)
    return value is None or value is False or value in ("auto", [], 0)


def _read_config(config: object) -> dict[str, Any]:
    """Return the configuration as a dict; `ConfigError` for anything else."""
    if isinstance(config, Mapping):
        return dict(config)
    if not isinstance(config, str | os.PathLike):
        got = f"a {type(config).__name__}"
        raise ConfigError("a dict, a path or JSON text", got, hint="see the docstring")
    text = os.fspath(config)
    where = "the JSON text"
    if not text.lstrip().startswith("{"):
        where = repr(text)
        try:
            text = Path(text).read_text(encoding="utf-8")
        except OSError as error:
            wanted = "a DeepSpeed configuration"
            hint = "pass the path of ds_config.json, or a dict"
            raise ConfigError(wanted, f"{error.strerror}", where=where, hint=hint) from error
    try:
        config_dict = json.loads(text, object_pairs_hook=_unique)
    except json.JSONDecodeError as error:
        raise ConfigError("JSON", str(error), where=where, hint="comments are not JSON") from error
    if not isinstance(config_dict, dict):
        got = f"a {type(config_dict).__name__}"
        raise ConfigError("a JSON object", got, where=where, hint='{"...": ...}')
    return config_dict


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    section: dict[str, Any] = {}
    for name, value in pairs:
        if name in section:
            _refuse_value(name, "once", "it twice")
        section[name] = value
    return section


def _flat(section: Mapping[str, Any], prefix: str) -> Iterator[tuple[str, Any]]:
    """Yield dotted names and values; `ConfigError` for names that DeepSpeed does not have."""
    for key, value in section.items():
        name = f"{prefix}{key}"
        if name in KEYS:
            yield name, value
        elif f"{name}.*" in KEYS:
            yield f"{name}.*", value
        elif not any(known.startswith(f"{name}.") for known in KEYS):
            last = {known.removeprefix(prefix).split(".")[0] for known in KEYS
                    if known.startswith(prefix)}  # fmt: skip
            hint = nearest_word(key, last) or f"see {page(_PAGE)}"
            raise ConfigError("a key of DeepSpeed 0.19", repr(name), hint=hint)
        elif value is None or value == "auto":
            continue
        elif isinstance(value, Mapping):
            yield from _flat(value, f"{name}.")
        else:
            _refuse_value(name, "a section {...}", value)


def _refuse_value(name: str, wanted: str, got: object) -> NoReturn:
    hint = "as DeepSpeed's documentation has it"
    raise ConfigError(f"{name!r} to be {wanted}", repr(got), hint=hint)


def _conflict(name: str, wanted: str, got: object, hint: str) -> NoReturn:
    raise ConfigError(f"{wanted} for {name!r}", got, hint=hint)


def _refuse_settings(settings: Settings) -> None:
    harmless = {"gradient_allreduce_op": "mean", "sequence_parallel_size": 1}
    for name, value in settings.values.items():
        is_off = _is_off(value) or value == harmless.get(name)
        if KEYS[name].fate is Fate.REFUSED and not is_off:
            wanted = f"a configuration without {name.removesuffix('.*')!r}"
            raise ConfigError(wanted, repr(value), hint=KEYS[name].here)


def _stage_of_config(settings: Settings) -> Any:
    if settings.values.get(f"{_ZERO}.stage") == "auto":
        return "auto"
    stage = settings.get(f"{_ZERO}.stage", int, 0)
    if stage not in (0, 1, 2, 3):
        _refuse_value(f"{_ZERO}.stage", "0, 1, 2 or 3", stage)
    return stage


def _precision(settings: Settings) -> Any:
    is_bf16 = settings.flag("bf16.enabled") or settings.flag("bfloat16.enabled")
    is_fp16 = settings.flag("fp16.enabled")
    autocast = settings.values.get("torch_autocast.*")
    has_autocast = isinstance(autocast, Mapping) and autocast.get("enabled") is True
    if is_bf16 + is_fp16 + has_autocast > 1:
        hint = "enable one of them"
        _conflict("bf16.enabled", "one precision", "fp16 or torch_autocast as well", hint)
    word = "bf16" if is_bf16 else "fp16" if is_fp16 else None
    names = {"compute": "param_dtype", "reduce": "grad_accum_dtype", "buffers": "buffer_dtype"}
    dtypes = {part: settings.word(f"data_types.{name}", _DTYPES) for part, name in names.items()}
    parts: dict[str, Any] = {part: dtype for part, dtype in dtypes.items() if dtype is not None}
    if not parts:
        return word
    if word:
        parts = {"compute": _DTYPES[word], **parts}
    return Precision(**parts)


def _offload(settings: Settings, stage: Any) -> Any:
    tiers, paths = {}, []
    for part, section, old, stages in (
        ("parameters", "offload_param", "cpu_offload_param", (3,)),
        ("optimizer", "offload_optimizer", "cpu_offload", (1, 2, 3)),
    ):
        name = f"{_ZERO}.{section}.device"
        tier = settings.word(name, _TIERS) or "device"
        if settings.flag(f"{_ZERO}.{old}"):
            if tier != "device":
                _conflict(f"{_ZERO}.{old}", "no second device", tier, f"leave {old} out")
            tier, name = "cpu", f"{_ZERO}.{old}"
        if tier != "device" and stage not in (*stages, "auto"):
            least = "stage 1, 2 or 3" if 1 in stages else "stage 3"
            _conflict(name, least, f"stage {stage}", f"raise {_ZERO}.stage, or leave it out")
        if tier == "disk":
            path_name = f"{_ZERO}.{section}.nvme_path"
            path = settings.get(path_name, (str, os.PathLike), None)
            if path is None:
                _conflict(path_name, "a folder", "none", "name a folder on a fast disk")
            paths += [path] if path not in paths else []
        tiers[part] = tier
    ratio = settings.get(f"{_ZERO}.offload_optimizer.ratio", (int, float), 1.0)
    if not 0 <= ratio <= 1:
        _refuse_value(f"{_ZERO}.offload_optimizer.ratio", "between 0 and 1", ratio)
    if set(tiers.values()) == {"device"}:
        return None
    return Offload(**tiers, fraction=ratio, disk=paths or None)


def _wire(settings: Settings, stage: Any) -> Any:
    size = settings.get(f"{_ZERO}.zero_hpz_partition_size", int, 1)
    mics = settings.get(f"{_ZERO}.mics_shard_size", int, -1)
    flags = {
        "zero_quantized_weights": settings.flag(f"{_ZERO}.zero_quantized_weights"),
        "zero_quantized_gradients": settings.flag(f"{_ZERO}.zero_quantized_gradients"),
        "zero_hpz_partition_size": size > 1,
        "mics_shard_size": mics > 0,
    }
    for name, is_set in flags.items():
        if is_set and stage not in (3, "auto"):
            hint = f"set {_ZERO}.stage to 3, or leave it out"
            _conflict(f"{_ZERO}.{name}", "stage 3", f"stage {stage}", hint)
    weights, gradients, has_second, is_mics = flags.values()
    if has_second and is_mics:
        name, got = f"{_ZERO}.mics_shard_size", f"zero_hpz_partition_size={size}"
        _conflict(name, "no secondary shards of another kind", got, "keep one of them")
    feedback = not _is_off(settings.values.get(f"{_ZERO}.zeropp_loco_param.*"))
    if feedback and not gradients:
        name, hint = f"{_ZERO}.zeropp_loco_param", "it keeps what quantized gradients round off"
        _conflict(name, "zero_quantized_gradients", "exact gradients", hint)
    if weights and gradients and has_second and not feedback:
        return "zero++"  # a name adapts to a single node
    if is_mics and not (weights or gradients):
        return "replicas"
    wire = Wire(
        weights="int8" if weights else "exact", gradients="int4" if gradients else "exact",
        secondary="optimizer" if is_mics else "weights" if has_second else None, feedback=feedback,
    )  # fmt: skip
    return None if wire.is_plain else wire


def _without_nodes(wire: Any) -> Any:
    """Leave out secondary shards inside a node, which the mesh of one host does not have."""
    if not isinstance(wire, Wire) or not wire.secondary:
        return wire
    wire = replace(wire, secondary=None)
    return None if wire.is_plain else wire
