"""Write a checkpoint as a universal folder, which DeepSpeed 0.19 loads at stages 1 and 2.

`engine.load_checkpoint(PARENT, tag=NAME)` reads it, with `"checkpoint": {"load_universal": true}`.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from onefold.checkpoint.agreement import as_checkpoint_error
from onefold.checkpoint.directory import Draft
from onefold.checkpoint.listing import OPTIM
from onefold.checkpoint.offline import Exported, open_exported, weights_of
from onefold.checkpoint.source import Source
from onefold.errors import CheckpointError
from onefold.foreign import PEERS
from onefold.foreign.deepspeed_universal import FP32_FILE, OPTIMIZER_FILE, PARAM, UNIVERSAL
from onefold.foreign.zero_partitions import STEP

VERSION = "0.19.8"
"""The version of DeepSpeed whose folders these are."""

_MODEL_FILE = "mp_rank_00_model_states.pt"


def export_deepspeed(source: str | os.PathLike[str], target: str | os.PathLike[str]) -> Exported:
    """Write weights in float32, buffers, optimizer state, param groups and `extra`.

    Needs one process, no process group, and memory for the largest parameter. A dict that was given
    to `onefold.save(extra=)` becomes the client state. Tied weights are written once.

    Raises: CheckpointError: nothing to export, no optimizer, parameters of one param group at
        several steps, a name that is no folder's, damage, a target that exists, a full disk.
    """
    saved = open_exported(Path(source), PEERS)
    content = _Content.from_source(saved)
    draft = Draft(Path(os.path.abspath(target)))
    draft.check()
    try:
        draft.begin()
        writer = _FolderWriter(draft.folder)
        _write_content(content, writer)
        draft.publish()
    except BaseException as error:
        draft.abandon()
        raise as_checkpoint_error(error) from error
    return Exported(
        saved.path, saved.step, dict(sorted(writer.files.items())), len(content.weights)
    )


@dataclass(slots=True)
class _Content:
    """What the folder will have: names of weights, of states by weight and key, and groups."""

    source: Source
    weights: dict[str, str]
    states: dict[str, dict[str, str]] = field(default_factory=dict)
    groups: list[dict[str, Any]] = field(default_factory=list)

    @classmethod
    def from_source(cls, source: Source) -> _Content:
        """Return the content of a checkpoint. Raises `CheckpointError` where no folder can be."""
        weights = {entry.name: read for read, entry in weights_of(source, torch.float32)}
        content = cls(source, weights, {name: {} for name in weights})
        groups = dict[int, dict[str, Any]]()
        for name, (kind, *keys) in source.paths.items():
            if kind != OPTIM or len(keys) != 3 or keys[1] in source.aliases:
                continue
            if keys[0] == "param_groups":
                groups.setdefault(keys[1], {})[keys[2]] = source.read_object(name)
            elif keys[1] in weights:
                content.states[keys[1]][keys[2]] = name
            else:
                raise _refused_export(source, f"a weight for state {name[:80]!r}", "none")
        content.groups = [groups[index] for index in sorted(groups)]
        content._check_content()
        return content

    def _check_content(self) -> None:
        names = [*self.weights, *(key for of in self.states.values() for key in of)]
        for name in names:
            if not _is_file_name(name):
                raise _refused_export(
                    self.source, "names that are names of folders", repr(name[:80])
                )
        if not self.groups:
            raise _refused_export(
                self.source, "an optimizer, which DeepSpeed resumes", "weights alone"
            )
        for index, group in enumerate(self.groups):
            wanted = f"one step for all parameters of param group {index}, as DeepSpeed keeps it"
            kinds = {frozenset(self.states[name]) for name in group["params"]}
            steps = {self.step_of(name) for name in group["params"]}
            if len(kinds) > 1 or len(steps) > 1:
                raise _refused_export(self.source, wanted, f"steps {sorted(steps)}")

    def step_of(self, name: str) -> float:
        """Return the step of a parameter; 0 for one that was not stepped."""
        key = self.states[name].get(STEP)
        return 0.0 if key is None else float(self.read_whole(key))

    def read_whole(self, name: str) -> Tensor:
        """Read a tensor as a whole."""
        if name not in self.source.tensors:
            return torch.as_tensor(self.source.read_object(name))
        saved = self.source.tensors[name]
        value = torch.empty(saved.shape, dtype=saved.dtype)
        self.source.fill({name: value})
        return value.float() if value.is_floating_point() else value


def _refused_export(source: Source, wanted: str, got: str) -> CheckpointError:
    hint = "--to dcp writes weights and states of any name and step"
    return CheckpointError(f"{wanted}, in {str(source.path)!r}", got, hint=hint)


def _is_file_name(name: Any) -> bool:
    is_text = isinstance(name, str) and name.isprintable() and 0 < len(name) < 250
    return is_text and "/" not in name and name not in (".", "..", "fp32", OPTIMIZER_FILE)


@dataclass(frozen=True, slots=True)
class _FolderWriter:
    """Writes files, and notes their bytes."""

    folder: Path
    files: dict[str, int] = field(default_factory=dict)

    def write(self, file: str, value: Any) -> None:
        path = self.folder / file
        path.parent.mkdir(parents=True, exist_ok=True)
        with open(path, "wb") as out:
            torch.save(value, out)
            out.flush()
            os.fsync(out.fileno())
        self.files[file] = path.stat().st_size


def _write_content(content: _Content, writer: _FolderWriter) -> None:
    trained = {name for group in content.groups for name in group["params"]}
    for name, read in content.weights.items():
        more = {"cat_dim": 0} if name in trained else {}
        writer.write(f"{UNIVERSAL}/{name}/{FP32_FILE}", {PARAM: content.read_whole(read), **more})
        for key, state in content.states[name].items():
            value = content.read_whole(state)
            whole = value if key == STEP else {PARAM: value, **more}
            writer.write(f"{UNIVERSAL}/{name}/{key}.pt", whole)
    groups = [{**group, "params": [index]} for index, group in enumerate(content.groups)]
    states = {"param_groups": groups, "ds_version": VERSION}
    writer.write(f"{UNIVERSAL}/{OPTIMIZER_FILE}", states)
    writer.write(_MODEL_FILE, _model_states(content))


def _model_states(content: _Content) -> dict[str, Any]:
    """Return the file of model states, without the weights: DeepSpeed reads these by name."""
    source, tensors = content.source, content.source.tensors
    shapes = [
        {name: torch.Size(tensors[content.weights[name]].shape) for name in group["params"]}
        for group in content.groups
    ]
    extra = source.saved_extra()
    client = (
        {k: v for k, v in extra.items() if isinstance(k, str)} if isinstance(extra, Mapping) else {}
    )
    return {
        "global_steps": source.step or 0, "global_samples": 0, "skipped_steps": 0, **client,
        "module": {}, "buffer_names": [], "optimizer": None, "param_shapes": shapes,
        "frozen_param_shapes": None, "frozen_param_fragments": None,
        "shared_params": dict(source.aliases), "dp_world_size": 1, "mp_world_size": 1,
        "ds_version": VERSION,
    }  # fmt: skip
