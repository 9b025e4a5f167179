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
from collections.abc import Sequence
from copy import copy
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_iter

from onefold.checkpoint.archives import bytes_of
from onefold.checkpoint.metadata import COMPANION, GRAD, MASTER, MODEL, OPTIM, PARTIAL, RANK
from onefold.checkpoint.stages import RankNames, ShardedModel, join_names
from onefold.checkpoint.typed_keys import as_words
from onefold.checkpoint.unpickling import NOT_OF_BYTES, read_object
from onefold.engine.engine import Engine
from onefold.engine.optimizer_state import common_state
from onefold.engine.own_state import added_state, shared_groups, unsavable
from onefold.errors import CheckpointError
from onefold.tier import accelerator


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
    if all(p.is_floating_point() and p.itemsize > 1 for p in module.parameters()):
        config.pop("quantization_config", None)  # they were dequantized while they were read
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
    except NOT_OF_BYTES:
        raise
    except Exception as error:
        wanted = f"{name!r} to hold values that can be saved"
        hint = "pass tensors, numbers, strings, lists, dicts, or objects with state_dict()"
        raise CheckpointError(wanted, f"{type(error).__name__}: {error}", hint=hint) from error
    read_object(written.getvalue(), name)


def plain(value: object) -> Any:
    """Return `value` with `state_dict()` in place of objects that have one; numbers as Python's."""
    if isinstance(value, Enum) and isinstance(value, int | str):
        return value.value
    if type(value).__module__ == "numpy" and getattr(value, "ndim", None) == 0:
        return value.item()  # type: ignore[attr-defined]
    if isinstance(value, dict):
        same = copy(value)  # a Counter, OrderedDict ...: it comes back, or is refused
        dict.update(same, {key: plain(item) for key, item in value.items()})
        return same
    if type(value) in (list, tuple):
        return type(value)(plain(item) for item in value)  # type: ignore[call-arg]
    state_dict = None if isinstance(value, type) else getattr(value, "state_dict", None)
    return plain(state_dict()) if callable(state_dict) else value


def random_states(engine: Engine) -> dict[str, Any]:
    """Return the states of the generators that dropout, shuffling and augmentation draw from."""
    states: dict[str, Any] = {"torch": torch.get_rng_state(), "python": random.getstate()}
    device = engine.context.store.device
    if device.type != "cpu":
        states[device.type] = accelerator.rng_state(device)
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
        accelerator.set_rng_state(states[device.type], device)
    numpy = sys.modules.get("numpy")
    if numpy is not None and "numpy" in states:
        numpy.random.set_state(tuple(states["numpy"]))


@dataclass(frozen=True, slots=True)
class Facts:
    """The facts of one rank that all ranks compare before anything is written."""

    choices: tuple[object, ...]  # path, wait, keep
    save_id: str
    buffers: dict[str, int]  # checksums
    nbytes: int
    groups: list[dict[str, Any]]  # of the parts of one optimizer, where stages have parts
    names: RankNames


@dataclass(frozen=True, slots=True)
class Contents:
    """All that this rank saves: views of its tensors, nested as torch's planner takes them.

    `aliases`: other names of tied weights on all ranks, each with the one that is saved.
    """

    state: dict[str, Any]
    buffers: dict[str, Tensor]
    names: RankNames
    aliases: dict[str, str] = field(default_factory=dict)

    @staticmethod
    def of(models: Sequence[ShardedModel], extra: Any) -> Contents:
        """Collect the state of all modules of this rank as that of one, and `extra`.

        Raises `CheckpointError` for values that no load could read.
        """
        names = RankNames(
            {alias: name for model in models for alias, name in model.aliases().items()},
            {name: tie for model in models for name, tie in model.ties().items()},
        )
        first = models[0]
        is_stage = first.number is not None
        states = [_state_of(model.without_copies() if is_stage else model) for model in models]
        state = _merged(states) if is_stage else states[0]
        check_readable(state)
        own_extra = plain(extra)
        if any(isinstance(value, DTensor) for value in tree_iter(own_extra)):
            got = "a shard of a tensor (DTensor)"
            hint = "averages of onefold.ema are saved with the module; full_tensor() makes a "
            hint += "plain tensor of another shard"
            raise CheckpointError("extra to hold values of this rank alone", got, hint=hint)
        own = {"extra": own_extra, "random": random_states(first.engine), "buffers": {}}
        own["modules"] = [_rank_state(model) for model in models]
        try:
            check_readable((own,), "extra")  # a tuple is checked as one object
        except CheckpointError as error:
            other = unsavable(own_extra, "extra")
            if other:
                hint = "pass tensors, numbers, strings, lists, dicts, or objects with state_dict()"
                raise CheckpointError("`extra` of plain values", other, hint=hint) from error
            raise
        state[RANK] = {str(first.rank): (own,)}  # and torch's planner takes it as one
        buffers = {name: b for model in models for name, b in model.buffers().items()}
        return Contents(state, buffers, names)

    def facts(self, choices: tuple[object, ...], save_id: str, *, is_pipeline: bool) -> Facts:
        """Return what this rank's contents are compared by."""
        nbytes = own_nbytes({kind: of for kind, of in self.state.items() if kind != RANK})
        groups = self.state.get(OPTIM, {}).get("param_groups", []) if is_pipeline else []
        return Facts(choices, save_id, fingerprints(self.buffers), nbytes, groups, self.names)

    def agreed(self, everyone: Sequence[Facts], *, is_pipeline: bool) -> Contents:
        """Return these contents with this rank's buffers, where ranks have different ones.

        Param groups of a pipeline hold the parameters of all stages.
        """
        prints = [facts.buffers for facts in everyone]
        ((rank, (own,)),) = self.state[RANK].items()
        differing = {
            name: buffer
            for name, buffer in self.buffers.items()
            if len({of_rank[name] for of_rank in prints if name in of_rank}) > 1
        }
        state = self.state | {RANK: {rank: ({**own, "buffers": differing},)}}
        if is_pipeline and OPTIM in state:
            groups = merge_groups([facts.groups for facts in everyone])
            state[OPTIM] = {**state[OPTIM], "param_groups": groups}
        aliases = join_names(facts.names for facts in everyone)
        aliases = {f"{MODEL}.{alias}": f"{MODEL}.{name}" for alias, name in aliases.items()}
        return replace(self, state=state, aliases=aliases)


def _merged(states: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return the state of all modules of a rank as one; param groups are those of `merge_groups`.

    Raises `CheckpointError` for a name in two modules, and for gradients between micro-batches.
    """
    whole: dict[str, Any] = {}
    for state in states:
        if GRAD in state or PARTIAL in state:
            got = "gradients that no optimizer has stepped"
            hint = "call optimizer.step() and zero_grad() first"
            raise CheckpointError("a pipeline that is saved between steps", got, hint=hint)
        for kind in (MODEL, MASTER):
            own, new = whole.setdefault(kind, {}), state.get(kind, {})
            twice = own.keys() & new.keys()
            if twice:
                hint = "give each stage the names of the whole model, such as blocks.7.weight"
                raise CheckpointError(
                    "names that differ", f"{min(twice)!r} in two stages", hint=hint
                )
            own.update(new)
        for key, rows in state.get(COMPANION, {}).items():
            whole.setdefault(COMPANION, {}).setdefault(key, {}).update(rows)
        if OPTIM in state:
            optim = whole.setdefault(OPTIM, {"state": {}, "param_groups": []})
            optim["state"] |= state[OPTIM]["state"]
            groups = [optim["param_groups"], state[OPTIM]["param_groups"]]
            optim["param_groups"] = merge_groups(groups)
    return {kind: entries for kind, entries in whole.items() if entries}


def merge_groups(of_stages: Sequence[Sequence[dict[str, Any]]]) -> list[dict[str, Any]]:
    """Return param groups by number, each with the parameters of all stages."""
    joined: list[dict[str, Any]] = []
    for groups in of_stages:
        for index, group in enumerate(groups):
            if index == len(joined):
                joined.append({**group, "params": []})
            own = cast("list[str]", joined[index]["params"])
            own += [name for name in group["params"] if name not in own]
    return joined


def _state_of(model: ShardedModel) -> dict[str, Any]:
    """Return this rank's part of the shared state, as views, nested as torch's state dicts are.

    Every rank returns tensors that all ranks hold (stage 0, scalars); torch's planner lets one rank
    write each.
    """
    weights: dict[str, Any] = {}
    master: dict[str, Any] = {}
    for parameter in model.parameters():
        weights[parameter.fqn] = parameter.wrap(parameter.local.detach())
        if parameter.unit.master is not None:
            master[parameter.fqn] = parameter.wrap(parameter.stepped)
    notes = model.notes()
    if model.is_first:
        weights |= model.buffers() | notes
        weights |= {name: part.get_extra_state() for name, part in model.extra_states().items()}
    saved: dict[str, Any] = {MODEL: weights}
    if master:
        saved[MASTER] = master
    if model.optimizers:
        state = {
            parameter.fqn: _worded(entry, model, f"the state of {parameter.fqn!r}")
            for optimizer in model.optimizers
            for parameter in model.stepped_by(optimizer)
            if parameter.fqn not in model.left_out
            if (entry := optimizer.state.get(parameter.sharded))
        }
        groups = [group for optimizer in model.optimizers for group in shared_groups(optimizer)]
        saved[OPTIM] = {"state": state, "param_groups": [_named(group, model) for group in groups]}
    for unit in model.engine.units:
        means, partial = unit.gradient.accumulated()
        for parameter, mean in means.items():
            saved.setdefault(GRAD, {})[parameter.fqn] = parameter.wrap(mean)
        for parameter, grad in partial.items():
            own = saved.setdefault(PARTIAL, {}).setdefault(str(model.rank), {})
            own[parameter.fqn] = grad
    for key, rows in model.companion_rows().items():
        saved.setdefault(COMPANION, {})[key] = {p.fqn: p.wrap(own) for p, own in rows}
    return saved


def _named(group: dict[str, Any], model: ShardedModel) -> dict[str, Any]:
    """Return a param group with names in place of parameters."""
    names = [model.parameter(tensor).fqn for tensor in group["params"]]
    names = [name for name in names if name not in model.left_out]
    choices = {key: value for key, value in group.items() if key != "params"}
    return {**_worded(choices, model, "a param group"), "params": names}


def _worded(state: dict[Any, Any], model: ShardedModel, where: str) -> dict[str, Any]:
    """Return a state of plain values under keys that are words."""
    words: dict[str, Any] = as_words(plain(state), model.name_of, where)
    return words


def _rank_state(model: ShardedModel) -> dict[str, Any]:
    """Return the state of this rank alone: that of no parameter, and that of companions."""
    companions = model.engine.companions.alive().items()
    own = [plain(added_state(optimizer)) for optimizer in model.optimizers]
    if any(isinstance(value, DTensor) for value in tree_iter(own)):
        wanted = "numbers and tensors of its own in an optimizer's state_dict()"
        hint = "keep tensors like a parameter in optimizer.state[parameter]"
        raise CheckpointError(wanted, "a shard of a parameter (DTensor)", hint=hint)
    return {
        "own": own,
        "common": [_worded(common_state(o.state), model, "its state") for o in model.optimizers],
        "companions": {key: plain(companion.rank_state()) for key, companion in companions},
    }
