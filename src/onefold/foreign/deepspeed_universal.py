"""Universal folders of DeepSpeed: `zero/NAME/KEY.pt` has each state of a parameter as a whole.

Folders of stage 3 keep bare flat tensors, whose shapes the model states list, and no step.
"""

from __future__ import annotations

import os
from collections.abc import Set
from math import prod
from pathlib import Path
from typing import Any

from onefold.checkpoint.listing import MODEL, OPTIM, Extents, SavedTensor
from onefold.errors import CheckpointError
from onefold.foreign.deepspeed_files import OPTIMIZER_NAMES, ModelStates, named
from onefold.foreign.flat_pieces import joined_runs, run_of
from onefold.foreign.torch_files import StoredTensor, read_archive
from onefold.foreign.trees import Tree
from onefold.foreign.zero_partitions import STEP, add_groups

UNIVERSAL, OPTIMIZER_FILE, FP32_FILE, PARAM = "zero", "optimizer_state.pt", "fp32.pt", "param"


def add_universal(tree: Tree, model: ModelStates) -> None:
    """Add the weights that are trained, their optimizer states, and the param groups."""
    folder = tree.folder / UNIVERSAL
    known = {entry.name for entry in os.scandir(folder) if entry.is_dir()}
    for name, shape in model.shapes.items():
        if name not in known:
            wanted = f"a folder {name[:80]!r} in {str(folder)!r}"
            hint = "convert the checkpoint again: a part of the universal folder is missing"
            raise CheckpointError(wanted, "none", hint=hint)
        _add_parameter(tree, folder / name, name, shape)
    others = known - {*model.shapes, *model.module, *model.frozen, *model.shared}
    for name in sorted(others):  # frozen weights and buffers, as Onefold exports them
        weight = f"{UNIVERSAL}/{name}/{FP32_FILE}"
        tree.add((MODEL, name), _value(tree, weight), weight)
    file = f"{UNIVERSAL}/{OPTIMIZER_FILE}"
    states = named(_archive_in(tree, file, OPTIMIZER_NAMES), "the optimizer")
    own = named(states.get("optimizer_state_dict") or {"state": {}}, "optimizer states")["state"]
    numbers = {
        index: {key: v for key, v in of.items() if isinstance(v, StoredTensor) and v.sizes == ()}
        for index, of in own.items()
    }
    add_groups(tree, model, states["param_groups"], numbers, file)


def _add_parameter(tree: Tree, folder: Path, name: str, shape: Extents) -> None:
    for entry in sorted(os.listdir(folder)):
        key, file = entry.removesuffix(".pt"), f"{UNIVERSAL}/{name}/{entry}"
        keys = (MODEL, name) if entry == FP32_FILE else (OPTIM, "state", name, key)
        saved = _value(tree, file)
        tree.add(keys, saved if key == STEP else _shaped(saved, file, shape), file)


def _value(tree: Tree, file: str) -> Any:
    saved = _archive_in(tree, file)
    return saved[PARAM] if isinstance(saved, dict) else saved


def _shaped(saved: Any, file: str, shape: Extents) -> StoredTensor | SavedTensor:
    """Return the tensor of a file, in the shape of its parameter, or a single number."""
    if not isinstance(saved, StoredTensor) or saved.sizes not in (shape, (), (prod(shape),)):
        got = list(saved.sizes) if isinstance(saved, StoredTensor) else "no tensor"
        raise ValueError(f"{got} in {file!r} for shape {list(shape)}")
    if saved.sizes in (shape, ()):
        return saved
    return joined_runs(file, shape, saved.dtype, [run_of(saved, file, 0, prod(shape))])


def _archive_in(tree: Tree, file: str, classes: Set[str] = frozenset()) -> Any:
    return read_archive(tree.folder / file, classes)
