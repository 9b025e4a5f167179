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

import json
import random
import sys
import zlib
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_iter

from onefold.checkpoint.held import (
    Held,
    OwnTensors,
    held_groups,
    named_groups,
    own_state_of,
    plain,
    state_held_by,
)
from onefold.checkpoint.listing import (
    GRAD,
    MASTER,
    MODEL,
    PARTIAL,
    Extents,
)
from onefold.checkpoint.safetensors import bytes_of
from onefold.checkpoint.stages import RankNames, ShardedModel, join_names
from onefold.engine.engine import Engine
from onefold.errors import CheckpointError
from onefold.tier import accelerator


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


def random_states(engine: Engine) -> dict[str, Any]:
    """Return the states of the generators that dropout, shuffling and augmentation draw from."""
    version, words, gauss = random.getstate()
    states: dict[str, Any] = {"torch": torch.get_rng_state()}
    states["python"] = (version, torch.tensor(words, dtype=torch.int64), gauss)
    device = engine.context.store.device
    if device.type != "cpu":
        states[device.type] = accelerator.rng_state(device)
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        kind, keys, *rest = numpy.random.get_state()
        states["numpy"] = (kind, torch.tensor(keys.tolist()), *rest)
    return states


def restore_random_states(engine: Engine, states: dict[str, Any]) -> None:
    """Set the generators to the states that `random_states` returned."""
    torch.set_rng_state(states["torch"])
    version, words, gauss = states["python"]
    random.setstate((version, tuple(_numbers(words)), gauss))
    device = engine.context.store.device
    if device.type != "cpu" and device.type in states:
        accelerator.set_rng_state(states[device.type], device)
    numpy = sys.modules.get("numpy")
    if numpy is not None and "numpy" in states:
        kind, keys, *rest = states["numpy"]
        numpy.random.set_state((kind, _numbers(keys), *rest))


def _numbers(words: Any) -> list[int]:
    """Return the words of a generator: of format 1 they are a list, else a tensor."""
    return words.tolist() if isinstance(words, Tensor) else words


Claims = dict[tuple[str, Extents], int]
"""What a rank could write as well as others: names and offsets, with bytes."""


@dataclass(frozen=True, slots=True)
class Facts:
    """The facts of one rank that all ranks compare before anything is written."""

    choices: tuple[object, ...]  # path, wait, keep
    buffers: dict[str, int]  # checksums
    claims: Claims
    groups: list[dict[str, Any]]  # of the parts of one optimizer, where stages have parts
    names: RankNames


@dataclass(frozen=True, slots=True)
class Contents:
    """All that this rank holds, as views of its tensors, before ranks agree who writes what.

    `own`: the state of this rank alone, as JSON. `groups`: param groups, with names.
    """

    rank: int
    held: list[Held]
    own: dict[str, Any]
    groups: list[dict[str, Any]]
    buffers: dict[str, Tensor]
    names: RankNames

    @staticmethod
    def from_models(models: Sequence[ShardedModel], extra: Any) -> Contents:
        """Collect the state of all modules of this rank as that of one, and `extra`.

        Raises `CheckpointError` for values that no load could read.
        """
        names = RankNames(
            {alias: name for model in models for alias, name in model.aliases().items()},
            {name: tie for model in models for name, tie in model.ties().items()},
        )
        first = models[0]
        is_stage = first.number is not None
        inside = OwnTensors(first.rank)
        saved = [model.without_copies() if is_stage else model for model in models]
        held = [held for model in saved for held in state_held_by(model, inside)]
        if is_stage:
            _check_stages(held)
        groups = merge_groups([named_groups(model) for model in saved])
        own_groups = held_groups(groups, inside)
        held += [] if is_stage else own_groups  # those of stages are joined first
        own_extra = plain(extra)
        if any(isinstance(value, DTensor) for value in tree_iter(own_extra)):
            got = "a shard of a tensor (DTensor)"
            hint = "averages of onefold.ema are saved with the module; full_tensor() makes a "
            hint += "plain tensor of another shard"
            raise CheckpointError("extra to hold values of this rank alone", got, hint=hint)
        own: dict[str, Any] = {"extra": inside.encoded(own_extra, "extra")}
        states: dict[str, Any] = {"random": random_states(first.engine)}
        states["modules"] = [own_state_of(model) for model in models]
        own |= {key: inside.encoded(state, key) for key, state in states.items()}
        buffers = {name: b for model in models for name, b in model.buffers().items()}
        return Contents(first.rank, [*held, *inside.held], own, groups, buffers, names)

    @property
    def own_nbytes(self) -> int:
        """Bytes that this rank writes in any case."""
        return sum(held.nbytes for held in self.held if held.writes)

    def facts(self, choices: tuple[object, ...], *, is_pipeline: bool) -> Facts:
        """Return what this rank's contents are compared by; mostly the same on all ranks."""
        claims = {held.key: held.nbytes for held in self.held if held.writes is None}
        groups = self.groups if is_pipeline else []
        prints = fingerprints(self.buffers)
        return Facts(choices, prints, claims, groups, self.names)

    def agreed(self, everyone: Sequence[Facts], *, is_pipeline: bool) -> RankState:
        """Return what this rank writes.

        These are its buffers, too, where ranks have different ones. Param groups of a pipeline hold
        the parameters of all stages.
        """
        prints = [facts.buffers for facts in _distinct(everyone)]
        inside = OwnTensors(self.rank, len(self.held))
        differing = {
            name: buffer
            for name, buffer in self.buffers.items()
            if len({of_rank[name] for of_rank in prints if name in of_rank}) > 1
        }
        own = {**self.own, "buffers": inside.encoded(differing, "buffers")}
        dealt = _dealt(everyone, self.rank)
        written = [h for h in self.held if h.writes or (h.writes is None and h.key in dealt)]
        aliases: dict[str, str] = {}
        if self.rank == 0:
            if is_pipeline:
                written += held_groups(merge_groups([f.groups for f in everyone]), inside)
            joined = join_names(facts.names for facts in _distinct(everyone))
            aliases = {f"{MODEL}.{alias}": f"{MODEL}.{name}" for alias, name in joined.items()}
        return RankState(self.rank, [*written, *inside.held], own, aliases)


@dataclass(frozen=True, slots=True)
class RankState:
    """What one rank writes. `aliases`: other names of tied weights, each with the saved one."""

    rank: int
    held: list[Held]
    own: dict[str, Any]
    aliases: dict[str, str]


def _distinct(everyone: Sequence[Facts]) -> Sequence[Facts]:
    """The facts of all ranks, or of one where they are the same: see `Group.gather`."""
    return everyone[:1] if all(facts is everyone[0] for facts in everyone) else everyone


def claimed_nbytes(everyone: Sequence[Facts]) -> int:
    """Bytes of what several ranks hold: one of them writes it."""
    claims = {key: n for facts in _distinct(everyone) for key, n in facts.claims.items()}
    return sum(claims.values())


def _dealt(everyone: Sequence[Facts], rank: int) -> set[tuple[str, Extents]]:
    """Return what a rank writes of all that several ranks hold: they take turns."""
    if len(_distinct(everyone)) == 1:
        ranks, claims = len(everyone), everyone[0].claims
        return {key for turn, key in enumerate(claims) if turn % ranks == rank}
    holders = defaultdict[tuple[str, Extents], list[int]](list)
    for number, facts in enumerate(everyone):
        for key in facts.claims:
            holders[key].append(number)
    return {key for turn, (key, of) in enumerate(holders.items()) if of[turn % len(of)] == rank}


def _check_stages(held: Sequence[Held]) -> None:
    """Raise `CheckpointError` for a name in two modules, and for gradients of micro-batches."""
    if any(each.path[0] in (GRAD, PARTIAL) for each in held):
        got = "gradients that no optimizer has stepped"
        hint = "call optimizer.step() and zero_grad() first"
        raise CheckpointError("a pipeline that is saved between steps", got, hint=hint)
    names = Counter(each.path for each in held if each.path[0] in (MODEL, MASTER))
    twice = min((path[1] for path, count in names.items() if count > 1), default=None)
    if twice is not None:
        hint = "give each stage the names of the whole model, such as blocks.7.weight"
        raise CheckpointError("names that differ", f"{twice!r} in two stages", hint=hint)


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
