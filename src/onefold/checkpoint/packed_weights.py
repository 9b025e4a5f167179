"""Packed weights in state dicts: their side tables, and the notes that say how they are packed."""

import json
from collections.abc import Iterable

import torch
from torch import Tensor

from onefold.errors import CheckpointError
from onefold.unit.parameter import UnitParameter

OFFSET = ".nested_offset"
NOTE = ".quant_state.bitsandbytes__"


def is_offset(name: str) -> bool:
    """True for a table that the format keeps inside a note."""
    return name.endswith(OFFSET)


def is_note(name: str) -> bool:
    """True for a note that says how a 4-bit weight is packed."""
    return NOTE in name


def offset_of(note: str) -> str:
    """Return the name of the table that a note has inside."""
    return note.partition(NOTE)[0] + OFFSET


def packed_among(names: Iterable[str]) -> set[str]:
    """Return the names of packed weights, tables and notes in a state dict: they are never cast."""
    known = set(names)
    weights = {name.partition(NOTE)[0] for name in known if is_note(name)}
    weights |= {
        f"{prefix}{key}"
        for name in known
        for prefix, word, rest in [name.rpartition("weight_format")]
        if word and not rest
        for key in ("weight", "SCB")
    }
    return {n for n in known if n in weights or is_note(n) or n.rpartition(".")[0] in weights}


def notes_of(parameters: Iterable[UnitParameter]) -> dict[str, Tensor]:
    """Return the notes of packed weights, by name."""
    notes: dict[str, Tensor] = {}
    for parameter in parameters:
        if not parameter.spec.is_packed or parameter.is_table:
            continue
        state = vars(parameter.sharded).get("quant_state")
        if state is None:
            prefix = parameter.fqn.rpartition(".")[0]
            notes[f"{prefix}.weight_format".lstrip(".")] = torch.tensor(0, dtype=torch.uint8)
            continue
        values = state.as_dict(packed=True)
        notes |= {
            f"{parameter.fqn}.{key}": value
            for key, value in values.items()
            if key.startswith("quant_state.")
        }
    return notes


def offset_in(note: Tensor) -> float:
    """Return the `nested_offset` of a note [bytes]."""
    return float(json.loads(bytes(note.tolist()))["nested_offset"])


def refuse_quantized(
    parameters: Iterable[UnitParameter], hint: str, *, are_kernels: bool = False
) -> None:
    """Raise `CheckpointError` for frozen weights in a codec that other libraries do not read.

    `are_kernels`: alone for bytes that the kernels of another processor would not read.
    """
    for parameter in parameters:
        if parameter.decoded is not None and parameter.decoded.is_multiplied >= are_kernels:
            argument = "rest=" if parameter.decoded.is_multiplied else "Precision(frozen=)"
            wanted = f"parameter {parameter.fqn!r} to be a plain tensor, or packed by bitsandbytes"
            got = f"one that {argument} has quantized"
            raise CheckpointError(wanted, got, hint=f"{hint}, which decodes it")
