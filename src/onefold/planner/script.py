"""The lines of Python that build the model of a plan as the plan assumed it."""

from __future__ import annotations

from pathlib import Path

from torch import nn

from onefold.planner.models.gpt import PRESETS
from onefold.planner.models.loader import config_path, is_config, published, recompute_line

OPTIMIZER = "optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)"
IMPORTS = ("import onefold", "import torch")
ON_MESH = (*IMPORTS, "from torch.distributed.device_mesh import init_device_mesh", "")
"""The first lines of a script whose model the axes have cut already."""
ON_META = 'with torch.device("meta"):'
RANDOM_WEIGHTS = "# weights are random: plan a folder with *.safetensors files to read them"


def preparing_lines(module: nn.Module, *, recomputes: bool) -> tuple[str, ...]:
    """Return the lines of a script that let `model` recompute its blocks, and make `optimizer`."""
    switch = recompute_line(module) if recomputes else ""
    return (*[switch] * bool(switch), OPTIMIZER)


def building_lines(
    name: str | None, module: nn.Module, *, seq: int, dtype: str | None
) -> tuple[str, ...]:
    """Return the lines of a script that make `model`.

    Args:
        name: the model's, as `onefold plan --model` takes it; None: the script has it.
        module: the model that was planned.
        seq: tokens of a row.
        dtype: that of the weights, if one was requested.
    """
    if name is None:
        return (*IMPORTS, "")
    if name in PRESETS or name in published():
        choice = f', dtype="{dtype}"' if dtype else ""
        return (
            *IMPORTS, "from onefold.planner.models.loader import build_model", "", ON_META,
            f'    model = build_model("{name}", {seq}{choice})',
        )  # fmt: skip
    if not is_config(name):
        package, _, function = name.partition(":")
        return (f"import {package}", *IMPORTS, "", f"model = {package}.{function}()")
    return (
        *IMPORTS, "from transformers import AutoConfig, AutoModelForCausalLM", "",
        f"config = AutoConfig.from_pretrained({_quoted(config_path(name))}, use_cache=False)",
        ON_META,
        f"    model = AutoModelForCausalLM.from_config(config, dtype={_dtype_of(module)})",
        f"onefold.load_pretrained(model, {_quoted(name)})" if has_weights(name) else RANDOM_WEIGHTS,
    )  # fmt: skip


def has_weights(name: str) -> bool:
    """Return True for a folder with files of weights."""
    return Path(name).is_dir() and any(Path(name).glob("*.safetensors"))


def trained_name(name: str) -> str:
    """Return the name by which `onefold train` takes a model.

    Of a folder without weights it is that of its configuration.
    """
    is_bare = Path(name).is_dir() and not has_weights(name)
    return str(config_path(name)) if is_bare else name


def _dtype_of(module: nn.Module) -> str:
    """Return the dtype in which a model of transformers was built, as Python."""
    config = getattr(module, "config", None)
    return str(getattr(config, "dtype", None) or next(module.parameters()).dtype)


def _quoted(text: str | Path) -> str:
    """Return a string of Python in double quotes."""
    escaped = str(text).replace("\\", "\\\\").replace('"', '\\"')
    return f'"{escaped}"'
