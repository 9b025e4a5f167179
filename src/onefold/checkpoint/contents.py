"""The state that a checkpoint holds of a sharded module and its optimizers, by name.

    model.FQN                   weights at rest and persistent buffers, in their own dtype
    master.FQN                  fp32 masters of narrower weights
    optim.state.FQN.KEY         moments and step counts
    optim.param_groups.I.KEY    hyper-parameters; `params` are names
    grad.FQN                    the mean of the gradients since the last step, between micro-batches
    partial.R.FQN               gradients of rank R that no reduction has averaged yet
    companion.WORD.I.FQN        averages of `onefold.ema`
    rank.R                      the state of rank R alone: random generators, `extra`, its buffers,
                                the optimizers' state of no parameter, islands, counts of averages

The names of `model` and `optim` are those of `torch.distributed.checkpoint.state_dict`.
"""

from __future__ import annotations

import io
import json
import random
import sys
import zlib
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_iter

from onefold.checkpoint.storage import bytes_of, read_object
from onefold.engine.engine import Engine
from onefold.errors import CheckpointError
from onefold.unit.parameter import UnitParameter

MODEL, MASTER, OPTIM, RANK = "model", "master", "optim", "rank"
GRAD, PARTIAL, COMPANION = "grad", "partial", "companion"
EXTRA_STATE = "_extra_state"

TIE = "_onefold_tie"
"""The attribute of a sharded parameter that several stages of a pipeline hold: a `TiedCopy`."""


@dataclass(frozen=True, slots=True)
class TiedCopy:
    """One copy of a weight that stages share. `key`: the same for all copies."""

    key: str
    is_copy: bool  # False: the first one


def path_of(name: str, note: Sequence[Any]) -> tuple[Any, ...]:
    """Return the nested keys of a name: the note of torch's planner, or else read from the name.

    ("optim", "state", FQN, KEY ...) and ("optim", "param_groups", INDEX, KEY ...) have four or
    more. The index stays a string where it is no number.
    """
    state, groups = f"{OPTIM}.state.", f"{OPTIM}.param_groups."
    if len(note) < 4 and name.startswith(state):
        fqn, _, key = name.removeprefix(state).rpartition(".")
        return (OPTIM, "state", fqn, key)
    if len(note) < 4 and name.startswith(groups):
        index, _, key = name.removeprefix(groups).partition(".")
        return (OPTIM, "param_groups", int(index) if index.isdecimal() else index, key)
    return tuple(note) or (name,)


def own_nbytes(state: object) -> int:
    """Return the bytes of this rank's tensors in a nested state."""
    tensors = (tensor for tensor in tree_iter(state) if isinstance(tensor, Tensor))
    own = (tensor._local_tensor if isinstance(tensor, DTensor) else tensor for tensor in tensors)
    return sum(tensor.nbytes for tensor in own)


def config_of(module: nn.Module) -> dict[str, Any] | None:
    """Return a Hugging Face model's configuration as JSON values, with its class and dtype."""
    to_json = getattr(getattr(module, "config", None), "to_json_string", None)
    if not callable(to_json):
        return None
    config = json.loads(str(to_json(use_diff=False)))
    dtypes = {str(p.dtype).removeprefix("torch.") for p in module.parameters()}
    config["architectures"] = [type(module).__name__]
    if len(dtypes) == 1:
        config["dtype"] = dtypes.pop()
    return config


def fingerprints(buffers: dict[str, Tensor]) -> dict[str, int]:
    """Return a checksum of each buffer: ranks compare them to find buffers that differ."""
    return {
        name: zlib.crc32(bytes_of(buffer.detach().cpu().contiguous()))
        for name, buffer in buffers.items()
    }


def check_readable(state: object, name: str = "") -> None:
    """Raise `CheckpointError` for a value that could not be read again without running code."""
    if isinstance(state, Tensor | str | int | float | bool | None):
        return
    if isinstance(state, dict):
        for key, value in state.items():
            check_readable(value, f"{name}.{key}".lstrip("."))
        return
    written = io.BytesIO()
    try:
        torch.save(state, written)
    except Exception as error:
        raise CheckpointError(
            f"{name!r} to hold values that can be saved",
            f"{type(error).__name__}: {error}",
            hint="pass tensors, numbers, strings, lists, dicts, or objects with state_dict()",
        ) from error
    written.seek(0)
    read_object(written, name)


def plain(value: object) -> Any:
    """Return `value` with `state_dict()` in place of objects that have one; numpy's numbers too."""
    if type(value).__module__ == "numpy" and getattr(value, "ndim", None) == 0:
        return value.item()  # type: ignore[attr-defined]
    if isinstance(value, dict):
        return {key: plain(item) for key, item in value.items()}
    if type(value) in (list, tuple):
        return type(value)(plain(item) for item in value)  # type: ignore[call-arg]
    state_dict = getattr(value, "state_dict", None)
    return plain(state_dict()) if callable(state_dict) else value


def random_states(engine: Engine) -> dict[str, Any]:
    """Return the states of the generators that dropout, shuffling and augmentation draw from."""
    states: dict[str, Any] = {"torch": torch.get_rng_state(), "python": random.getstate()}
    device = engine.context.store.device
    if device.type != "cpu":
        states[device.type] = torch.get_device_module(device).get_rng_state(device)
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        kind, keys, *rest = numpy.random.get_state()
        states["numpy"] = (kind, keys.tolist(), *rest)
    return states


def restore_random_states(engine: Engine, states: dict[str, Any]) -> None:
    """Set the generators to the states that `random_states` returned."""
    torch.set_rng_state(states["torch"])
    version, inner, gauss = states["python"]
    random.setstate((version, tuple(inner), gauss))
    device = engine.context.store.device
    if device.type != "cpu" and device.type in states:
        torch.get_device_module(device).set_rng_state(states[device.type], device)
    numpy = sys.modules.get("numpy")
    if numpy is not None and "numpy" in states:
        numpy.random.set_state(tuple(states["numpy"]))


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


@dataclass(frozen=True, slots=True)
class RankNames:
    """The other names of weights on one rank: inside its modules, and over stages."""

    aliases: dict[str, str]
    copies: dict[str, TiedCopy]


def join_names(of_ranks: Iterable[RankNames]) -> dict[str, str]:
    """Return the other names of all weights, each with the name under which it is saved."""
    ranks = list(of_ranks)
    first = {
        tie.key: name for rank in ranks for name, tie in rank.copies.items() if not tie.is_copy
    }
    names = {
        name: first[tie.key]
        for rank in ranks
        for name, tie in rank.copies.items()
        if tie.key in first and name != first[tie.key]
    }
    for rank in ranks:
        names |= {alias: names.get(name, name) for alias, name in rank.aliases.items()}
    return names


def first_names(metadata: Metadata) -> dict[str, str]:
    """Return, for each name, the first one of the same bytes: its own if it has its own bytes."""
    by_place: dict[tuple[str, int], str] = {}
    return {
        index.fqn: by_place.setdefault((info.relative_path, info.offset), index.fqn)
        for index, info in metadata.storage_data.items()
    }


def spread_ties(metadata: Metadata) -> dict[str, str]:
    """Give each name of a weight its master and optimizer state, so that any of them can be loaded.

    Changes `metadata`, which was read. Returns the other names, each with the first one.
    """
    prefix = f"{MODEL}."
    others = {
        alias.removeprefix(prefix): name.removeprefix(prefix)
        for alias, name in first_names(metadata).items()
        if alias != name and alias.startswith(prefix) and name.startswith(prefix)
    }
    if not others:
        return others
    notes = metadata.planner_data = metadata.planner_data or {}
    belonging = defaultdict[str, list[tuple[str, tuple[object, ...]]]](list)
    for name in metadata.state_dict_metadata:
        path = path_of(name, notes.get(name, ()))
        if path[:2] == (OPTIM, "state") or path[0] == COMPANION:
            belonging[path[2]].append((name, path))
    pieces = defaultdict[str, list[MetadataIndex]](list)
    for index in metadata.storage_data:
        pieces[index.fqn].append(index)
    for alias, first in others.items():
        paths = [(name, (*path[:2], alias, *path[3:])) for name, path in belonging[first]]
        for name, path in [(f"{MASTER}.{first}", (MASTER, alias)), *paths]:
            target = ".".join(map(str, path))
            if name in metadata.state_dict_metadata and target not in metadata.state_dict_metadata:
                metadata.state_dict_metadata[target] = metadata.state_dict_metadata[name]
                notes[target] = path
                for index in pieces[name]:
                    place = metadata.storage_data[index]
                    metadata.storage_data[replace(index, fqn=target)] = place
    return others
