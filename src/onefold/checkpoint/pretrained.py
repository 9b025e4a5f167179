"""Save and load weights alone, as Hugging Face does: safetensors files and a config.json.

Every rank writes its own rows into files whose layout all ranks know, and reads its own rows back.
No rank holds more than one parameter's rows besides its own shard.
"""

from __future__ import annotations

import json
import os
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from onefold.checkpoint import safetensors
from onefold.checkpoint.agreement import (
    first,
    same_directory,
    together,
)
from onefold.checkpoint.contents import config_of
from onefold.checkpoint.directory import Draft
from onefold.checkpoint.mosaics import Mosaic, Move
from onefold.checkpoint.names_in_files import ignored, tied_source, written_as
from onefold.checkpoint.packed_weights import is_offset, refuse_quantized
from onefold.checkpoint.promised_values import Pretrained
from onefold.checkpoint.stages import ShardedModel
from onefold.engine.registry import engine_of, find_engine
from onefold.errors import CheckpointError, StateError
from onefold.layout import packed
from onefold.layout.cut import Box, spans_of
from onefold.layout.module_tree import uncompiled
from onefold.unit.decoded import DecodedWeight
from onefold.unit.promises import promise
from onefold.unit.unit import unit_of


def save_pretrained(
    module: nn.Module,
    directory: str | os.PathLike[str],
    *,
    max_shard_nbytes: int = safetensors.MAX_SHARD_NBYTES,
    original_names: bool = True,
) -> None:
    """Write a sharded module's weights as `AutoModel.from_pretrained` reads them. A collective.

    Writes safetensors files of at most `max_shard_nbytes`, an index if there are several, and
    `config.json` if the module has a `config`. Weights keep their dtype; tied weights are written
    once; persistent buffers are those of rank 0. Complete or absent, as `onefold.save`.

    Args:
        module: one that `shard` has sharded.
        directory: a new folder.
        max_shard_nbytes: bytes of a file, at most, unless one tensor has more.
        original_names: of a model of transformers write the names and layouts that its own
            `save_pretrained` would write, which other programs read. False: the module's names.

    Raises: CheckpointError, on every rank: the directory exists or cannot be written.
    """
    plain = uncompiled(module)
    model = ShardedModel(engine_of(plain), plain)
    write_pretrained(model, directory, max_shard_nbytes, original_names=original_names)


def write_pretrained(
    model: ShardedModel, directory: str | os.PathLike[str], max_shard_nbytes: int,
    *, original_names: bool = True,
) -> None:  # fmt: skip
    """See `save_pretrained`. With `model.names` this writes those parameters, and no buffers."""
    everyone = model.engine.context.everyone

    def prepare() -> str:
        hint = "save the module inside `with onefold.unsharded(module):`"
        refuse_quantized(model.parameters(), hint)
        draft = Draft(Path(os.path.abspath(directory)))
        model.wait_steps()
        if model.rank == 0:
            draft.check()
        return str(draft.target)

    same_directory(everyone, prepare, hint="every rank writes into the same files")
    model.engine.context.compare_logs(waits=True)  # mixed weights would replace good ones
    draft = Draft(Path(os.path.abspath(directory)))
    written = together(everyone, lambda: _Written.from_model(model, original_names=original_names))
    outputs = safetensors.plan_outputs(written.entries, max_shard_nbytes)

    def publish() -> None:
        write_small_files(draft.folder, outputs, config_of(model.module))
        generation = getattr(model.module, "generation_config", None)
        save_generation = getattr(generation, "save_pretrained", None)
        if callable(save_generation):
            save_generation(draft.folder)
        draft.publish()

    try:
        first(everyone, lambda: begin(draft, outputs))
        together(everyone, lambda: _write_own(model, draft.folder, outputs, written))
        first(everyone, publish)
    except BaseException:
        draft.abandon()
        raise


def begin(draft: Draft, outputs: list[safetensors.Output]) -> None:
    """Create the folder, and every file in full length."""
    draft.begin()
    for output in outputs:
        output.create(draft.folder)


def write_small_files(
    folder: Path, outputs: list[safetensors.Output], config: dict[str, Any] | None
) -> None:
    """Write the index, if there are several files, and the configuration, if there is one."""
    if len(outputs) > 1:
        (folder / safetensors.INDEX).write_text(safetensors.index_of(outputs))
    if config is not None:
        (folder / "config.json").write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")


@dataclass(frozen=True, slots=True)
class _Written:
    """What files hold: tensors under their names, and how each of the module's gets there.

    `moves`: by name in the module, the name in the files, the shape there, and the boxes.
    """

    entries: list[safetensors.TensorEntry]
    moves: dict[str, list[tuple[safetensors.TensorEntry, Move]]]

    @staticmethod
    def from_model(model: ShardedModel, *, original_names: bool) -> _Written:
        """Lay out every tensor once: parameters in the module's order, then buffers."""
        module, by_name = model.module, {p.fqn: p for p in model.parameters()}
        tensors: dict[str, Mosaic] = {}
        for fqn in _names_of(model):
            if fqn in by_name:
                name = tied_source(module, fqn) if original_names else fqn
                tensors[name] = Mosaic.blank(fqn, by_name[fqn].shape, unit_of(by_name[fqn]).dtype)
        for name, buffer in _buffers(model).items():
            tensors[name] = Mosaic.blank(name, tuple(buffer.shape), buffer.dtype)
        is_whole = model.names is None and not any(p.spec.is_packed for p in model.parameters())
        if original_names and is_whole:
            for name in ignored(module, "_keys_to_ignore_on_save"):
                tensors.pop(name, None)
            tensors = written_as(module, tensors)
        entries, moves = [], defaultdict[str, list[Any]](list)
        for name, mosaic in tensors.items():
            entry = safetensors.TensorEntry(name, tuple(mosaic.shape), mosaic.dtype)
            entries.append(entry)
            for move in mosaic.moves():
                moves[move.source].append((entry, move))
        return _Written(entries, moves)

    def write_box(
        self, writer: safetensors.OffsetWriter, name: str, box: Box, rows: Tensor
    ) -> None:
        """Write a box of one of the module's tensors to its places in files."""
        for entry, whole in self.moves.get(name, ()):
            move = whole.of_rows(box)
            if move is None:
                continue
            at = zip(*move.origin, box[0], strict=True)
            part = rows[tuple(slice(start - own, start - own + n) for start, n, own in at)]
            write_box(writer, entry, move.box, move.shaped(part))


def write_box(
    writer: safetensors.OffsetWriter, entry: safetensors.TensorEntry, box: Box, values: Tensor
) -> None:
    """Write the values of a box of a tensor."""
    values = values.contiguous()
    done, data = 0, safetensors.bytes_of(values)
    for start, stop in spans_of(box, entry.shape):
        nbytes = (stop - start) * values.itemsize
        writer.write_at(entry.name, start * values.itemsize, data[done : done + nbytes])
        done += nbytes


def _buffers(model: ShardedModel) -> dict[str, Tensor]:
    """Return the buffers and notes that are saved: none with `model.names`."""
    return {} if model.names is not None else model.buffers() | model.notes()


def _names_of(model: ShardedModel) -> Iterator[str]:
    """Yield the names of parameters in the module's order, then those of side tables."""
    for name, _ in model.module.named_parameters():
        yield name
    for parameter in model.parameters():
        if parameter.is_table and not is_offset(parameter.fqn):
            yield parameter.fqn


def _write_own(
    model: ShardedModel, folder: Path, outputs: list[safetensors.Output], written: _Written
) -> None:
    """Write this rank's rows; ranks that hold the same rows take parameters in turn."""
    with safetensors.OffsetWriter(folder, outputs) as writer:
        for index, parameter in enumerate(model.parameters()):
            if not parameter.is_writer(index) or is_offset(parameter.fqn):
                continue
            rows = parameter.local.detach().cpu().contiguous()
            box = parameter.box
            written.write_box(writer, parameter.fqn, box, rows.reshape(box[1]))
        if model.rank == 0:
            for name, buffer in _buffers(model).items():
                whole = ((0,) * buffer.dim(), tuple(buffer.shape))
                written.write_box(writer, name, whole, buffer.detach().cpu())
        writer.flush_to_disk()


def load_pretrained(
    module: nn.Module, directory: str | os.PathLike[str], *, strict: bool = True
) -> nn.Module:
    """Fill a module from safetensors files; each rank reads its own byte ranges.

    A sharded module is filled in place, a collective. A module that is not sharded yet, usually
    built under `torch.device("meta")`, remembers the files: `onefold.shard` then reads each rank's
    rows into its shard, so no process ever holds the whole module.

    Names are those of the module's state dict. A tied weight may have any of its names. dtypes may
    differ. A warning lists names that only the files have. Numbers of 8 bits with scales are
    dequantized while they are read: FP8 in blocks, rows or one piece, INT8 in rows.

    Args:
        module: sharded or not.
        directory: a folder of safetensors files.
        strict: False leaves out tensors that no file has, and lists them in a warning. Those on
            `meta` are initialized by `shard`; others keep their values.

    Raises: CheckpointError: no safetensors files, a damaged one, another quantized format, or names
        that are missing and shapes that differ, all in one message; on every rank for a sharded
        module.
    """
    plain = uncompiled(module)
    engine = find_engine(plain)
    if engine is None:
        _refuse_packed(plain)
        folder = Path(os.path.abspath(directory))
        values = Pretrained(plain, folder, strict=strict)
        promise(plain, values)
        values.loaded()
        return module
    model = ShardedModel(engine, plain)

    def prepare() -> Pretrained:
        model.wait_steps()
        return Pretrained(plain, Path(os.path.abspath(directory)), model, strict=strict)

    everyone = model.engine.context.everyone
    values = together(everyone, prepare)
    engine.context.compare_logs(waits=True)  # of weights that go now
    together(everyone, lambda: _fill(model, values))
    values.loaded()
    return module


def _refuse_packed(module: nn.Module) -> None:
    """Raise `CheckpointError` for a quantized module that is not sharded yet."""
    for name, parameter in module.named_parameters():
        if packed.is_packed(parameter):
            wanted = f"parameter {name!r} to be a plain tensor, or sharded"
            hint = "quantized weights have their values when from_pretrained returns; to load "
            hint += "others, call onefold.load_pretrained after onefold.shard"
            raise CheckpointError(wanted, f"a {type(parameter).__name__}", hint=hint)


@torch.no_grad()
def _fill(model: ShardedModel, values: Pretrained) -> None:
    for parameter in model.parameters():
        if parameter.fqn in values or is_offset(parameter.fqn):
            values.fill(parameter.fqn, parameter.box, parameter.stepped)
    for unit in model.engine.units:
        unit.replaced()
    for name, buffer in model.buffers().items():
        if name in values:
            values.fill(name, None, buffer)


def full_state_dict(
    module: nn.Module, *, rank0_only: bool = True, cpu: bool = True
) -> dict[str, Any]:
    """Gather the state dict of a sharded module as plain tensors.

    A collective: every rank calls it, at every stage. Parameters are gathered one at a time, so a
    rank that gets nothing never holds more than one of them.

    Args:
        module: one that `shard` has sharded.
        rank0_only: give the values to rank 0 alone; the other ranks get {}.
        cpu: put the tensors into CPU memory.

    Returns:
        By the names of `module.state_dict()`: tensors of the unsharded shapes, in the dtype of the
        parameters, that share no memory with the module. Tied parameters share one tensor.

    Raises:
        StateError: the module is not sharded, or modules show unsharded parameters now.
        WireError: another rank makes another call.

    Example:
        >>> values = onefold.full_state_dict(model)
        >>> if rank == 0:
        ...     torch.save(values, "model.pt")
    """
    module = uncompiled(module)
    engine = engine_of(module)
    if engine.is_unsharded:
        wanted = "full_state_dict outside of onefold.unsharded"
        hint = "inside, module.state_dict() has plain tensors already"
        raise StateError(wanted, "a call inside it", where=f"rank {engine.group.rank}", hint=hint)
    shown = module.state_dict(keep_vars=True)  # without values that hooks would put in place
    everyone = engine.context.everyone
    everyone.gather(len(shown))  # a rank that is elsewhere is named here, not inside torch
    is_wanted = everyone.rank == 0 or not rank0_only
    owners = {name: id(p) for name, p in module.named_parameters(remove_duplicate=False)}
    packed = {
        key: parameter.decoded
        for key, parameter in engine.by_sharded.items()
        if parameter.decoded is not None and parameter.decoded.is_multiplied
    }
    state: dict[str, Any] = {}
    gathered: dict[int, Any] = {}
    for name, value in shown.items():
        owner = owners.get(name, id(value))
        if owner not in gathered:
            gathered[owner] = _plain_entry(value, packed.get(owner), is_wanted=is_wanted, cpu=cpu)
        if is_wanted:
            state[name] = gathered[owner]
    return state


def _plain_entry(value: Any, decoded: DecodedWeight | None, *, is_wanted: bool, cpu: bool) -> Any:
    """An entry of a state dict on its own; None where nobody wants it."""
    if not isinstance(value, torch.Tensor):  # of get_extra_state()
        return value
    value = value.detach()
    full = value.full_tensor() if isinstance(value, DTensor) else value
    if not is_wanted:
        return None
    if decoded is not None:
        return decoded.plain(full).to("cpu" if cpu else full.device)
    # a gathered tensor is nobody else's, but for a world of one
    return full.to("cpu" if cpu else full.device, copy=True)
