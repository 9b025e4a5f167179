"""The values in safetensors files of a module's parameters and persistent buffers, by name."""

from __future__ import annotations

import re
import warnings
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from onefold.checkpoint import safetensors
from onefold.checkpoint.agreement import refuse_mismatches, shape_mismatches
from onefold.checkpoint.growing import HINT_SIZED, make_room, sized_by_modules
from onefold.checkpoint.mosaics import Move
from onefold.checkpoint.names_in_files import find_names, ignored, remember_rules
from onefold.checkpoint.packed_weights import is_note, is_offset, offset_in, offset_of
from onefold.checkpoint.scales import QuantizedFiles
from onefold.checkpoint.stages import ShardedModel, persistent_buffers
from onefold.errors import CheckpointError, listed
from onefold.layout import packed
from onefold.layout.cut import Box

HINT_MISSING = "build the module from the config.json next to them; strict=False initializes "
HINT_MISSING += "what no file has"


class Pretrained:
    """The values in a folder's files; see `load_pretrained`.

    `model`: the module's engine, where it is sharded already; it has side tables and notes, too.
    """

    def __init__(
        self, module: nn.Module, directory: Path, model: ShardedModel | None = None, *,
        strict: bool = True,
    ) -> None:  # fmt: skip
        self.directory = directory
        self._module = module
        self._files = safetensors.PretrainedFiles(directory)
        quantized = QuantizedFiles(directory, self._files, is_packed=_is_packed(module, model))
        tables = [p for p in model.parameters() if p.is_table] if model else []
        groups = [([p.fqn], p.slot.shape, False) for p in tables if not is_offset(p.fqn)]
        groups = [*_groups_of_names(module), *groups]
        self._found = find_names(
            module, chain.from_iterable(names for names, *_ in groups), quantized
        )
        self._names: dict[str, str] = {}  # name in the module: the one that is looked up
        self._quantized = quantized
        self._scales: dict[str, Any] = {}  # by name in the files
        self._moves: dict[str, list[Move]] = {}
        wanted: dict[str, tuple[int, ...]] = {}
        saved: dict[str, tuple[int, ...]] = {}
        sized = {n: s for n in sized_by_modules(module) if (s := self._saved(n)) is not None}
        for names, shape, is_wide in groups:
            wanted[names[0]] = sized[names[0]][0] if names[0] in sized else shape
            known = next((name for name in names if name in self._found), None)
            if known is not None:
                self._names |= dict.fromkeys(names, known)
                for source in self._found.sources(known) if is_wide else ():
                    scales = quantized.scales_of(source)
                    if scales is not None:
                        self._scales[source] = scales
                saved[names[0]] = self._shape(known)
        self._leave_out(module, wanted, saved, strict=strict)
        self._check_notes(module, model, wanted, saved)
        sizing = make_room(module, sized, "files")
        refuse_mismatches(f"buffers as in {str(directory)!r}", sizing, hint=HINT_SIZED)
        self._names |= {name: name for name in sized}
        self._warn_of_unused(module, model, quantized)

    def _leave_out(
        self, module: nn.Module, wanted: dict[str, tuple[int, ...]],
        saved: dict[str, tuple[int, ...]], *, strict: bool,
    ) -> None:  # fmt: skip
        """Leave out what no file has: computed tensors in silence, others in one warning."""
        absent = sorted(wanted.keys() - saved.keys())
        computed = [re.compile(text) for text in ignored(module, "_keys_to_ignore_on_load_missing")]
        drawn = [name for name in absent if not any(rule.search(name) for rule in computed)]
        for name in absent:
            if name not in drawn or not strict:
                del wanted[name]
        if drawn and not strict:
            names = ", ".join(listed(drawn))
            warnings.warn(f"not in the files, so not loaded: {names}", stacklevel=4)

    def _check_notes(
        self, module: nn.Module, model: ShardedModel | None, wanted: dict[str, tuple[int, ...]],
        saved: dict[str, tuple[int, ...]],
    ) -> None:  # fmt: skip
        notes = model.notes() if model else {}
        missing = [n for n in notes if is_note(n) and n not in self._files.places]
        refuse_mismatches(
            f"the files in {str(self.directory)!r} to have the parameters of the module",
            shape_mismatches(wanted, saved, "files")
            + [f"{name}: in the module, not in the files" for name in missing],
            hint=HINT_MISSING,
        )
        self._notes = {offset_of(name): name for name in notes if is_note(name)}

    def _warn_of_unused(
        self, module: nn.Module, model: ShardedModel | None, quantized: QuantizedFiles
    ) -> None:
        known = {name for name, _ in module.named_buffers()}  # those of the files are computed
        known |= (model.notes().keys() if model else set()) | self._names.keys() | quantized.beside
        rules = [re.compile(text) for text in ignored(module, "_keys_to_ignore_on_load_unexpected")]
        unused = sorted(
            name for name in self._found.unknown
            if name not in known and not any(rule.search(name) for rule in rules)
        )  # fmt: skip
        if unused:
            names = ", ".join(listed(unused))
            warnings.warn(f"not in the module, so not loaded: {names}", stacklevel=4)

    def _shape(self, known: str) -> tuple[int, ...]:
        if known in self._found.plain:
            return self._quantized.shape(self._found.plain[known])
        if known in self._found.mosaics:
            return tuple(self._found.mosaics[known].shape)
        return tuple(self._found.computed[known].values(self._quantized).shape)

    def _saved(self, name: str) -> tuple[tuple[int, ...], torch.dtype] | None:
        """Return shape and dtype of a tensor in the files; None where they lack it."""
        if name not in self._files.places:
            return None
        code = self._files.where(name)[2]
        return self._files.shape(name), getattr(torch, code, torch.float32)

    def loaded(self) -> None:
        """Note that the module has these values now."""
        remember_rules(self._module, self._found)

    def __contains__(self, name: str) -> bool:
        return name in self._names

    def __deepcopy__(self, memo: object) -> Pretrained:
        """Copies of a module, as a plan makes them, read the same files."""
        return self

    def where(self, name: str) -> tuple[Path, int, str]:
        """Return the file of a tensor, the offset of its first byte there, and its dtype's name."""
        known = self._names[name]
        if known not in self._found.plain and known not in self._files.places:
            path, offset, dtype = self._files.where(self._found.sources(known)[0])
            return path, offset, f"{dtype} in another layout"
        saved_name = self._found.plain.get(known, known)
        path, offset, dtype = self._files.where(saved_name)
        return path, offset, f"{dtype} with scales" if saved_name in self._scales else dtype

    def fill(self, name: str, box: Box | None, out: Tensor) -> None:
        """Copy a box of `name`, or all of it, into `out`."""
        if is_offset(name):
            self._fill_note(self._notes[name], out)
            return
        if not out.numel():
            return
        known = self._names[name]
        box = box or ((0,) * out.dim(), tuple(out.shape))
        if known in self._found.mosaics:
            self._fill_mosaic(known, box, out)
        elif known in self._found.computed:
            index = tuple(slice(first, first + n) for first, n in zip(*box, strict=True))
            out.copy_(self._found.computed[known].values(self._quantized)[index])
        else:
            out.copy_(self._exact_rows(self._found.plain.get(known, known), box))

    def _fill_mosaic(self, known: str, box: Box, out: Tensor) -> None:
        if known not in self._moves:
            self._moves[known] = list(self._found.mosaics[known].moves())
        for whole in self._moves[known]:
            move = whole.within(box)
            if move is None:
                continue
            at = zip(*move.box, box[0], strict=True)
            target = out[tuple(slice(start - own, start - own + n) for start, n, own in at)]
            target.copy_(move.shaped(self._exact_rows(move.source, move.origin)))

    def _exact_rows(self, saved_name: str, box: Box) -> Tensor:
        """Read a box of a tensor in the files, in exact numbers."""
        scales = self._scales.get(saved_name)
        if scales is None:
            return self._files.box(saved_name, box)
        return scales.decoded(self._files, saved_name, box)

    def _fill_note(self, note: str, out: Tensor) -> None:
        length = self._files.shape(note)
        try:
            out.fill_(offset_in(self._files.box(note, ((0,), length))))
        except (KeyError, TypeError, ValueError) as error:
            wanted = f"{note!r} to be a note of bitsandbytes"
            raise CheckpointError(wanted, error, hint="download or save it again") from error


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
