"""Save and load weights alone, as Hugging Face does: safetensors files and a config.json.

Every rank writes its own rows into files whose layout all ranks know, and reads its own rows back.
No rank holds more than one parameter's rows besides its own shard.
"""

from __future__ import annotations

import json
import os
import warnings
from collections.abc import Iterator
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from onefold.checkpoint import safetensors
from onefold.checkpoint.agreement import (
    first,
    refuse_mismatches,
    same_directory,
    shape_mismatches,
    together,
)
from onefold.checkpoint.contents import config_of
from onefold.checkpoint.directory import Draft
from onefold.checkpoint.growing import HINT_SIZED, make_room, sized_by_modules
from onefold.checkpoint.packed_weights import (
    is_note,
    is_offset,
    offset_in,
    offset_of,
    refuse_quantized,
)
from onefold.checkpoint.scales import QuantizedFiles, Scales
from onefold.checkpoint.stages import ShardedModel, persistent_buffers
from onefold.engine.registry import engine_of, find_engine
from onefold.errors import CheckpointError, StateError, listed
from onefold.layout import packed
from onefold.layout.cut import Box, spans_of
from onefold.layout.module_tree import uncompiled
from onefold.unit.decoded import DecodedWeight
from onefold.unit.init import PROMISED


def save_pretrained(
    module: nn.Module,
    directory: str | os.PathLike[str],
    *,
    max_shard_nbytes: int = safetensors.MAX_SHARD_NBYTES,
) -> None:
    """Write a sharded module's weights as `AutoModel.from_pretrained` reads them. A collective.

    Writes safetensors files of at most `max_shard_nbytes`, an index if there are several, and
    `config.json` if the module has a `config`. Weights keep their dtype; tied weights are written
    once; persistent buffers are those of rank 0. Complete or absent, as `onefold.save`.

    Raises: CheckpointError, on every rank: the directory exists or cannot be written.
    """
    plain = uncompiled(module)
    write_pretrained(ShardedModel(engine_of(plain), plain), directory, max_shard_nbytes)


def write_pretrained(
    model: ShardedModel, directory: str | os.PathLike[str], max_shard_nbytes: int
) -> None:
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
    outputs = safetensors.plan_outputs(_entries(model), max_shard_nbytes)

    def publish() -> None:
        write_small_files(draft.folder, outputs, config_of(model.module))
        generation = getattr(model.module, "generation_config", None)
        save_generation = getattr(generation, "save_pretrained", None)
        if callable(save_generation):
            save_generation(draft.folder)
        draft.publish()

    try:
        first(everyone, lambda: begin(draft, outputs))
        together(everyone, lambda: _write_own(model, draft.folder, outputs))
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


def _entries(model: ShardedModel) -> list[safetensors.TensorEntry]:
    """Return every tensor once, in the module's order."""
    by_name = {p.fqn: p for p in model.parameters()}
    entries = [
        safetensors.TensorEntry(name, by_name[name].shape, by_name[name].unit.dtype)
        for name in _names_of(model)
        if name in by_name
    ]
    buffers = {} if model.names is not None else model.buffers() | model.notes()
    return entries + [
        safetensors.TensorEntry(name, tuple(b.shape), b.dtype) for name, b in buffers.items()
    ]


def _names_of(model: ShardedModel) -> Iterator[str]:
    """Yield the names of parameters in the module's order, then those of side tables."""
    for name, _ in model.module.named_parameters():
        yield name
    for parameter in model.parameters():
        if parameter.is_table and not is_offset(parameter.fqn):
            yield parameter.fqn


def _write_own(model: ShardedModel, folder: Path, outputs: list[safetensors.Output]) -> None:
    """Write this rank's rows; ranks that hold the same rows take parameters in turn."""
    with safetensors.OffsetWriter(folder, outputs) as writer:
        for index, parameter in enumerate(model.parameters()):
            if not parameter.is_writer(index) or is_offset(parameter.fqn):
                continue
            rows = parameter.local.detach().cpu().contiguous()
            done, data = 0, safetensors.bytes_of(rows)
            for start, stop in spans_of(parameter.box, parameter.shape):
                nbytes = (stop - start) * rows.itemsize
                writer.write(parameter.fqn, start * rows.itemsize, data[done : done + nbytes])
                done += nbytes
        buffers = {} if model.names is not None else model.buffers() | model.notes()
        if model.rank == 0:
            for name, buffer in buffers.items():
                writer.write(name, 0, safetensors.bytes_of(buffer.detach().cpu().contiguous()))
        writer.finish()


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
        plain.__dict__[PROMISED] = Pretrained(plain, folder, strict=strict)
        return module
    model = ShardedModel(engine, plain)

    def prepare() -> Pretrained:
        model.wait_steps()
        return Pretrained(plain, Path(os.path.abspath(directory)), model, strict=strict)

    everyone = model.engine.context.everyone
    values = together(everyone, prepare)
    engine.context.compare_logs(waits=True)  # of weights that go now
    together(everyone, lambda: _fill(model, values))
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


class Pretrained:
    """The values in safetensors files of a module's parameters and persistent buffers, by name.

    `model`: the module's engine, where it is sharded already; it has side tables and notes, too.
    """

    def __init__(
        self, module: nn.Module, directory: Path, model: ShardedModel | None = None, *,
        strict: bool = True,
    ) -> None:  # fmt: skip
        self.directory = directory
        self._files = safetensors.PretrainedFiles(directory)
        self._names: dict[str, str] = {}  # name in the module: name in the files
        self._scales: dict[str, Scales] = {}  # by name in the files
        quantized = QuantizedFiles(directory, self._files, is_packed=_is_packed(module, model))
        wanted: dict[str, tuple[int, ...]] = {}
        saved: dict[str, tuple[int, ...]] = {}
        tables = [p for p in model.parameters() if p.is_table] if model else []
        groups = [([p.fqn], p.slot.shape, False) for p in tables if not is_offset(p.fqn)]
        sized = {n: s for n in sized_by_modules(module) if (s := self._saved(n)) is not None}
        for names, shape, is_wide in [*_groups_of_names(module), *groups]:
            wanted[names[0]] = sized[names[0]][0] if names[0] in sized else shape
            saved_name = next((name for name in names if name in self._files.places), None)
            if saved_name is not None:
                saved[names[0]] = self._files.shape(saved_name)
                self._names |= dict.fromkeys(names, saved_name)
                scales = quantized.scales_of(saved_name) if is_wide else None
                if scales is not None:
                    self._scales[saved_name] = scales
        if not strict and (absent := sorted(wanted.keys() - saved.keys())):
            wanted = {name: shape for name, shape in wanted.items() if name in saved}
            names = ", ".join(listed(absent))
            warnings.warn(f"not in the files, so not loaded: {names}", stacklevel=3)
        notes = model.notes() if model else {}
        missing = [n for n in notes if is_note(n) and n not in self._files.places]
        refuse_mismatches(
            f"the files in {str(directory)!r} to have the parameters of the module",
            shape_mismatches(wanted, saved, "files")
            + [f"{name}: in the module, not in the files" for name in missing],
            hint="build the module from the config.json next to them",
        )
        sizing = make_room(module, sized, "files")
        refuse_mismatches(f"buffers as in {str(directory)!r}", sizing, hint=HINT_SIZED)
        self._names |= {name: name for name in sized}
        self._notes = {offset_of(name): name for name in notes if is_note(name)}
        computed = {name for name, _ in module.named_buffers()}
        used = self._names.keys() | notes.keys() | {scales.name for scales in self._scales.values()}
        unused = sorted(self._files.places.keys() - used - computed)
        if unused:
            names = ", ".join(listed(unused))
            warnings.warn(f"not in the module, so not loaded: {names}", stacklevel=3)

    def _saved(self, name: str) -> tuple[tuple[int, ...], torch.dtype] | None:
        """Return shape and dtype of a tensor in the files; None where they lack it."""
        if name not in self._files.places:
            return None
        return self._files.shape(name), getattr(torch, self._files.where(name)[2], torch.float32)

    def __contains__(self, name: str) -> bool:
        return name in self._names

    def __deepcopy__(self, memo: object) -> Pretrained:
        """Copies of a module, as a plan makes them, read the same files."""
        return self

    def where(self, name: str) -> tuple[Path, int, str]:
        """Return the file of a tensor, the offset of its first byte there, and its dtype's name."""
        path, offset, dtype = self._files.where(self._names[name])
        is_exact = self._names[name] not in self._scales
        return path, offset, dtype if is_exact else f"{dtype} with scales"

    def fill(self, name: str, box: Box | None, out: Tensor) -> None:
        """Copy a box of `name`, or all of it, into `out`."""
        if is_offset(name):
            note = self._notes[name]
            length = self._files.shape(note)
            try:
                out.fill_(offset_in(self._files.box(note, ((0,), length))))
            except (KeyError, TypeError, ValueError) as error:
                got, hint = error, "download or save it again"
                raise CheckpointError(
                    f"{note!r} to be a note of bitsandbytes", got, hint=hint
                ) from error
            return
        saved_name = self._names[name]
        if out.numel():
            box = box or ((0,) * out.dim(), tuple(out.shape))
            scales = self._scales.get(saved_name)
            exact = scales.decoded(self._files, saved_name, box) if scales else None
            out.copy_(self._files.box(saved_name, box) if exact is None else exact)


def _is_packed(module: nn.Module, model: ShardedModel | None) -> bool:
    """True for a module with packed weights, whose files have their bytes."""
    if model is None:
        return any(packed.is_packed(parameter) for parameter in module.parameters())
    return any(parameter.spec.is_packed for parameter in model.parameters())


def _groups_of_names(module: nn.Module) -> list[tuple[list[str], tuple[int, ...], bool]]:
    """Return all names, the shape, and whether it has wide numbers, of each stored tensor."""
    by_id: dict[int, tuple[list[str], tuple[int, ...], bool]] = {}
    named = module.named_parameters(remove_duplicate=False)
    for name, tensor in chain(named, persistent_buffers(module, all_names=True)):
        is_wide = tensor.is_floating_point() and tensor.itemsize > 1
        by_id.setdefault(id(tensor), ([], tuple(tensor.shape), is_wide))[0].append(name)
    return list(by_id.values())


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
            gathered[owner] = _plain(value, packed.get(owner), is_wanted=is_wanted, cpu=cpu)
        if is_wanted:
            state[name] = gathered[owner]
    return state


def _plain(value: Any, decoded: DecodedWeight | None, *, is_wanted: bool, cpu: bool) -> Any:
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
