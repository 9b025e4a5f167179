"""Add a LoRA adapter to the weights of its base, file by file: no process holds the whole model."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from onefold.errors import CheckpointError

ADAPTER = "adapter_model.safetensors"
_PREFIX = "base_model.model."


def merge_adapter(base: Path, adapter: Path, out: Path) -> None:
    """Write the files of `base` with the adapter's products added. It needs one file's memory.

    Sums are computed in fp32, and rounded to the dtype of the base.

    Args:
        base: a folder of safetensors files.
        adapter: a folder that PEFT's `save_pretrained` wrote, of LoRA on Linears alone.
        out: a new folder; `from_pretrained` opens it.

    Raises: CheckpointError: the adapter changes a weight that no file of `base` has.
    """
    config = json.loads((adapter / "adapter_config.json").read_text())
    changes = _changes(load_file(adapter / ADAPTER), config)
    draft = out.with_name(f".{out.name}.draft")
    shutil.rmtree(draft, ignore_errors=True)
    draft.mkdir(parents=True)
    done: set[str] = set()
    for path in sorted(base.iterdir()):
        if path.suffix == ".safetensors":
            done |= _merge_file(path, changes, draft / path.name)
        elif path.is_file() and path.suffix in (".json", ".txt", ".model", ".jinja"):
            shutil.copyfile(path, draft / path.name)
    left = sorted(changes.keys() - done)
    if left:
        shutil.rmtree(draft)
        hint = "load base and adapter with PEFT, and call merge_and_unload"
        wanted = f"the weights that the adapter changes in the files of {str(base)!r}"
        raise CheckpointError(wanted, f"no {left[0]!r}", hint=hint)
    draft.rename(out)


def _changes(state: dict[str, Tensor], config: dict[str, Any]) -> dict[str, tuple[Tensor, Tensor]]:
    """Return the two factors of each changed weight; the scale is in the second one."""
    scale = config["lora_alpha"] / config["r"]
    factors: dict[str, tuple[Tensor, Tensor]] = {}
    for name, down in state.items():
        if name.endswith(".lora_A.weight"):
            up = state[name.replace(".lora_A.", ".lora_B.")]
            module = name.removeprefix(_PREFIX).removesuffix(".lora_A.weight")
            factors[f"{module}.weight"] = (down.float(), up.float() * scale)
    return factors


def _merge_file(path: Path, changes: dict[str, tuple[Tensor, Tensor]], out: Path) -> set[str]:
    tensors = load_file(path)
    with safe_open(path, "pt") as file:
        metadata = file.metadata()
    mine = tensors.keys() & changes.keys()
    for name in mine:
        down, up = changes[name]
        exact = torch.addmm(tensors[name].float(), up, down)
        tensors[name] = exact.to(tensors[name].dtype)
    save_file(tensors, out, metadata)
    return mine
