"""The notes beside packed weights in bitsandbytes' format, as `from_pretrained` reads them.

    FQN.quant_state.bitsandbytes__nf4   JSON as bytes: blocksize, dtype, shape, `nested_offset`
    PREFIX.weight_format                0: rows lie one behind the other

The tables themselves are parameters of the engine and have the format's names, but `nested_offset`.
"""

from __future__ import annotations

import json
from collections.abc import Iterable

import torch
from torch import Tensor

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
        for prefix, found, rest in [name.rpartition("weight_format")]
        if found and not rest
        for key in ("weight", "SCB")
    }
    return {n for n in known if n in weights or is_note(n) or n.rpartition(".")[0] in weights}


def notes_of(parameters: Iterable[UnitParameter]) -> dict[str, Tensor]:
    """Return the notes of packed weights, by name."""
    found: dict[str, Tensor] = {}
    for parameter in parameters:
        if not parameter.spec.is_packed or parameter.is_table:
            continue
        state = vars(parameter.sharded).get("quant_state")
        if state is None:
            prefix = parameter.fqn.rpartition(".")[0]
            found[f"{prefix}.weight_format".lstrip(".")] = torch.tensor(0, dtype=torch.uint8)
            continue
        values = state.as_dict(packed=True)
        found |= {
            f"{parameter.fqn}.{key}": value
            for key, value in values.items()
            if key.startswith("quant_state.")
        }
    return found


def offset_in(note: Tensor) -> float:
    """Return the `nested_offset` of a note [bytes]."""
    return float(json.loads(bytes(note.tolist()))["nested_offset"])
