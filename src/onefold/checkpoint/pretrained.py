"""Weights alone, in the format that Hugging Face reads and writes: safetensors and a config.json.

Every rank writes its own rows into files whose layout all of them know, and reads its own rows
back: no rank ever holds more than one parameter's rows besides its own shard.
"""

from __future__ import annotations

import json
import os
import warnings
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from onefold.checkpoint.contents import SavedState, config_of, persistent_buffers, wait_steps
from onefold.checkpoint.directory import Draft
from onefold.checkpoint.safetensors import (
    INDEX,
    MAX_SHARD_NBYTES,
    OffsetWriter,
    Output,
    PretrainedFiles,
    TensorEntry,
    index_of,
    plan_outputs,
)
from onefold.checkpoint.storage import bytes_of
from onefold.checkpoint.together import check_same, together
from onefold.engine.engine import Engine
from onefold.engine.registry import ENGINE, engine_of
from onefold.errors import CheckpointError, expected, listed
from onefold.layout.cut import Box
from onefold.unit.init import PROMISED


def save_pretrained(
    module: nn.Module,
    directory: str | os.PathLike[str],
    *,
    max_shard_nbytes: int = MAX_SHARD_NBYTES,
) -> None:
    """Write a sharded module's weights as `AutoModel.from_pretrained` reads them. A collective.

    safetensors files of at most `max_shard_nbytes`, an index if there are several, `config.json`
    if the module has a `config`. Weights in their own dtype; tied ones once, persistent buffers as
    rank 0 has them. Complete or absent, as `onefold.save`.

    Raises: CheckpointError, on every rank: the directory exists or cannot be written.
    """
    engine = engine_of(module)

    def look() -> str:
        draft = Draft(Path(os.path.abspath(directory)))
        wait_steps(engine)
        if engine.group.rank == 0:
            draft.check()
        return str(draft.target)

    paths = together(engine.group, look)
    check_same(paths, "directory", hint="every rank writes into the same files")
    draft = Draft(Path(paths[0]))
    subject = SavedState(engine, module, [])
    outputs = plan_outputs(_entries(subject), max_shard_nbytes)

    def begin() -> None:
        if engine.group.rank == 0:
            draft.begin()
            for output in outputs:
                output.create(draft.folder)

    try:
        together(engine.group, begin)
        together(engine.group, lambda: _write_own(subject, draft.folder, outputs))
        together(engine.group, lambda: _finish(engine, module, draft, outputs))
    except BaseException:
        if engine.group.rank == 0:
            draft.abandon()
        raise


def _entries(subject: SavedState) -> list[TensorEntry]:
    """Every tensor once, in the module's order."""
    by_name = {p.fqn: p for p in subject.parameters()}
    found = [
        TensorEntry(name, by_name[name].slot.shape, by_name[name].unit.dtype)
        for name, _ in subject.module.named_parameters()
    ]
    buffers = subject.buffers()
    return found + [TensorEntry(name, tuple(b.shape), b.dtype) for name, b in buffers.items()]


def _write_own(subject: SavedState, folder: Path, outputs: list[Output]) -> None:
    """This rank's rows of every parameter; of what other ranks hold as well, its share."""
    writer = OffsetWriter(folder, outputs)
    group, context = subject.engine.group, subject.engine.context
    nodes, node = group.world_size // context.world_size, group.rank // context.world_size
    try:
        for index, parameter in enumerate(subject.parameters()):
            is_whole = context.rest_world == 1 or parameter.slot.replicated
            copies, mine = (group.world_size, group.rank) if is_whole else (nodes, node)
            if index % copies != mine:
                continue
            rows = parameter.local.detach().cpu().contiguous()
            done, own = 0, bytes_of(rows)
            for start, stop in parameter.slot.spans(context.rest_rank):
                nbytes = (stop - start) * rows.itemsize
                writer.write(parameter.fqn, start * rows.itemsize, own[done : done + nbytes])
                done += nbytes
        if group.rank == 0:
            for name, buffer in subject.buffers().items():
                writer.write(name, 0, bytes_of(buffer.detach().cpu().contiguous()))
        writer.finish()
    finally:
        writer.close()


def _finish(engine: Engine, module: nn.Module, draft: Draft, outputs: list[Output]) -> None:
    if engine.group.rank > 0:
        return
    write_small_files(draft.folder, outputs, config_of(module))
    generation = getattr(module, "generation_config", None)
    if generation is not None and callable(getattr(generation, "save_pretrained", None)):
        generation.save_pretrained(draft.folder)
    draft.publish()


def write_small_files(folder: Path, outputs: list[Output], config: dict[str, Any] | None) -> None:
    """The index, if there are several files, and the configuration, if there is one."""
    if len(outputs) > 1:
        (folder / INDEX).write_text(index_of(outputs))
    if config is not None:
        (folder / "config.json").write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")


def load_pretrained(module: nn.Module, directory: str | os.PathLike[str]) -> nn.Module:
    """Fill a module from safetensors files; each rank reads its own byte ranges.

    A sharded module is filled in place, a collective. A module that is not sharded yet, usually
    built under `torch.device("meta")`, remembers the files: `onefold.shard` then reads each rank's
    rows straight into its shard, so that the module never exists whole anywhere.

    Names are those of the module's state dict; of a tied weight any of its names will do. dtypes
    may differ. Names that only the files have are told in a warning.

    Raises: CheckpointError: no safetensors files, a damaged one, names that are missing or shapes
        that differ, all in one message; on every rank alike for a sharded module.
    """
    if ENGINE not in module.__dict__:
        module.__dict__[PROMISED] = Pretrained(module, Path(os.path.abspath(directory)))
        return module
    engine = engine_of(module)
    found: list[Pretrained] = []

    def look() -> None:
        wait_steps(engine)
        found.append(Pretrained(module, Path(os.path.abspath(directory))))

    together(engine.group, look)
    subject = SavedState(engine, module, [])
    together(engine.group, lambda: _fill(subject, found[0]))
    return module


@torch.no_grad()
def _fill(subject: SavedState, values: Pretrained) -> None:
    for parameter in subject.parameters():
        rank = subject.engine.context.rest_rank
        values.fill(parameter.fqn, parameter.slot.box(rank), parameter.stepped)
    for unit in subject.engine.units:
        unit.replaced()
    for name, buffer in subject.buffers().items():
        values.fill(name, None, buffer)


class Pretrained:
    """Values that a module's parameters and persistent buffers will have, by name."""

    def __init__(self, module: nn.Module, directory: Path) -> None:
        self._files = PretrainedFiles(directory)
        self._names: dict[str, str] = {}  # name in the module: name in the files
        wanted = _groups_of_names(module)
        problems = []
        for names, shape in wanted:
            found = next((name for name in names if name in self._files.places), None)
            if found is None:
                problems.append(f"{names[0]}: {list(shape)} in the module, not in the files")
            elif self._files.shape(found) != shape:
                theirs = list(self._files.shape(found))
                problems.append(f"{names[0]}: {list(shape)} in the module, {theirs} in the files")
            else:
                self._names |= dict.fromkeys(names, found)
        if problems:
            raise CheckpointError(
                expected(
                    f"the files in {str(directory)!r} to have what the module has",
                    "\n  " + "\n  ".join(listed(problems)),
                    hint="build the module from the config.json beside them",
                )
            )
        known = {name for names, _ in wanted for name in names}
        known.update(name for name, _ in module.named_buffers())  # also those that are computed
        unused = sorted(self._files.places.keys() - known)
        if unused:
            told = ", ".join(listed(unused))
            warnings.warn(f"not in the module, so not loaded: {told}", stacklevel=3)

    def __contains__(self, name: str) -> bool:
        return name in self._names

    def fill(self, name: str, box: Box | None, out: Tensor) -> None:
        """Copy a box of `name`, or all of it, into `out`."""
        found = self._names[name]
        if out.numel():
            out.copy_(self._files.box(found, box or ((0,) * out.dim(), tuple(out.shape))))


def _groups_of_names(module: nn.Module) -> list[tuple[list[str], tuple[int, ...]]]:
    """For every parameter and persistent buffer all its names, and its shape."""
    by_id: dict[int, tuple[list[str], tuple[int, ...]]] = {}
    named = module.named_parameters(remove_duplicate=False)
    for name, tensor in chain(named, persistent_buffers(module, all_names=True)):
        by_id.setdefault(id(tensor), ([], tuple(tensor.shape)))[0].append(name)
    return list(by_id.values())
