"""Load a checkpoint: each rank reads its own rows, from whichever ranks wrote them.

choose    the newest complete checkpoint, the same on every rank
compare   names, shapes, optimizers: one message lists all mismatches, and nothing is changed
read      each rank its own rows, from pieces that are verified as they are read
finish    weights follow masters, optimizers get their states, generators are set
"""

import os
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_iter

from onefold.checkpoint.agreement import Damaged, first, same_directory, together
from onefold.checkpoint.contents import restore_random_states
from onefold.checkpoint.directory import Found, Peers, find, look_in
from onefold.checkpoint.listing import MODEL, ModuleNames, OptimizerNames
from onefold.checkpoint.save import finish_pending
from onefold.checkpoint.source import Source, open_source, spread_ties, unstack
from onefold.checkpoint.stages import Modules, Optimizers, ShardedModel, Stages
from onefold.checkpoint.targets import Targets
from onefold.config import STAGES, Placement
from onefold.errors import CheckpointError, is_agreed
from onefold.unit.shortage import explained
from onefold.wire.collectives import Group
from onefold.wire.together import announcing


def load_checkpoint(
    directory: str | os.PathLike[str], module: Modules, optimizer: Optimizers, peers: Peers,
    *, missing_ok: bool,
) -> Any:  # fmt: skip
    """See `onefold.load`. `peers`: formats of other programs that are recognised."""
    stages = Stages.from_modules(module)
    with announcing(stages.data_ranks, CheckpointError), explained(stages.ledger, "onefold.load"):
        finish_pending(stages)
        models = together(stages.group, lambda: stages.models(optimizer))
        stages.compare_messages()
        loading = _Loading(stages.group, models, _names_of(stages, models), peers)
        return _load_newest(loading, directory, missing_ok=missing_ok)


@dataclass(frozen=True, slots=True)
class _Loading:
    """What one call loads into. `elsewhere`: names that the stages of a pipeline have."""

    group: Group
    models: Sequence[ShardedModel]
    elsewhere: frozenset[str]
    peers: Peers


def _names_of(stages: Stages, models: Sequence[ShardedModel]) -> frozenset[str]:
    """The names that stages of a pipeline have, on all ranks; none without a pipeline."""
    if not stages.is_pipeline:
        return frozenset()
    own = [name for model in models for name in model.all_names()]
    return frozenset(name for names in stages.group.gather(own) for name in names)


def _load_newest(loading: _Loading, directory: str | os.PathLike[str], *, missing_ok: bool) -> Any:
    """Load the newest checkpoint that is not damaged, and return this rank's `extra`."""
    group = loading.group
    is_first = group.rank == 0

    def ask() -> list[str]:
        return [os.path.abspath(directory), f"missing_ok={missing_ok}"]

    def look() -> tuple[list[Found], list[str]]:
        path = Path(ask()[0])
        return look_in(path, loading.peers) if missing_ok else (find(path, loading.peers), [])

    same_directory(group, ask, hint="every rank loads from the same place")
    candidates, broken = first(group, look)
    if broken and is_first and not candidates:
        warnings.warn(f"nothing loaded, passed over {'; '.join(broken)}", stacklevel=4)
    if not candidates:
        return {}
    passed_over = list(candidates[0].passed_over)
    for checkpoint in candidates:
        try:
            extra = _load_found(loading, checkpoint)
        except BaseException as error:
            if checkpoint is candidates[-1] or not is_agreed(error):
                raise
            # ranks may have failed in several ways: all try the next one, or none
            if not any(group.gather(isinstance(error, Damaged))):
                raise
            passed_over.append(f"{checkpoint.path.name}: {str(error).splitlines()[0]}")
            continue
        if passed_over and is_first:
            others = "; ".join(passed_over)
            warnings.warn(f"loaded {checkpoint.path.name}, passed over {others}", stacklevel=4)
        return extra
    raise AssertionError("there is at least one candidate, and the last returns or raises")


def _load_found(loading: _Loading, checkpoint: Found) -> Any:
    """Load one checkpoint, and return this rank's `extra`."""
    group, models = loading.group, loading.models
    if checkpoint.manifest is not None and not checkpoint.manifest.frozen:
        models = [model.trainable() for model in models]

    def compare() -> tuple[Source, dict[str, Any], list[Targets]]:
        source, own = open_source(checkpoint), models
        if checkpoint.peer is not None:
            source = source.arranged(_module_names(models))
            if checkpoint.manifest is None:
                own = [_without_base(model, source) for model in models]
        source = spread_ties(source)
        source = unstack(source, {p.fqn for model in models for p in model.parameters()})
        number = models[0].rank % source.saved_ranks
        of_rank = source.rank_state(number)
        _check_own(source, of_rank, models, group)
        states = of_rank.get("modules") or [{}]
        states += states[-1:] * len(models)  # a rank may have more stages than the one that saved
        return source, of_rank, [
            Targets(model, source, state, loading.elsewhere, group.world_size)
            for model, state in zip(own, states, strict=False)
        ]  # fmt: skip

    source, of_rank, targets = together(group, compare)
    together(group, lambda: [target.read_values() for target in targets])
    together(group, lambda: [target.deliver() for target in targets])
    for target in targets:
        target.resume()
    if of_rank and models[0].rank < source.saved_ranks:
        with source.believing("the random states and buffers"):
            restore_random_states(models[0].engine, of_rank["random"])
            buffers = {n: b for model in models for n, b in model.buffers().items()}
            for name, saved in of_rank["buffers"].items():
                if name in buffers:
                    buffers[name].copy_(saved)
    if checkpoint.peer is not None and checkpoint.manifest is None:
        return source.extra()
    return of_rank.get("extra")


def _without_base(model: ShardedModel, source: Source) -> ShardedModel:
    """Leave frozen weights as they are, where another program has saved all others alone.

    So it is with adapters, whose base is elsewhere.
    """
    trained = {p.fqn for p in model.trainable().parameters()}
    frozen = sorted({p.fqn for p in model.parameters()} - trained)
    saved = {path[1] for path in source.paths.values() if path[0] == MODEL}
    if not frozen or not trained or trained - saved or saved & {*frozen}:
        return model
    if model.rank == 0:
        said = (
            f"{len(frozen)} frozen weights are not in the checkpoint, and stay: {frozen[0]!r}, ..."
        )
        warnings.warn(said, stacklevel=6)
    return model.trainable()


def _module_names(models: Sequence[ShardedModel]) -> ModuleNames:
    """Return what a checkpoint of another program is arranged for."""
    weights = {name for model in models for name in model.all_names()}
    weights |= {name for model in models for name in (*model.buffers(), *model.aliases())}
    optimizers = []
    for model in models:
        for optimizer in model.optimizers:
            groups = [
                [model.parameter(tensor).fqn for tensor in group["params"]]
                for group in optimizer.param_groups
            ]
            settings = frozenset(optimizer.defaults)
            optimizers.append(OptimizerNames(type(optimizer).__name__, groups, settings))
    module = models[0].module if len(models) == 1 else None
    return ModuleNames(frozenset(weights), optimizers, module)


def _check_own(
    source: Source, of_rank: dict[str, Any], models: Sequence[ShardedModel], group: Group
) -> None:
    """Raise `CheckpointError` for tensors that a class added, of rows of the ranks that saved.

    Nothing says which rows these are. Ranks that step the same rows have equal ones.
    """
    names = [type(optimizer).__name__ for model in models for optimizer in model.optimizers]
    own, manifest = _own_tensors(of_rank), source.manifest
    if not (names and own and manifest):
        return
    is_cut = models[0].engine.recipe.is_sharded
    was_cut = STAGES[manifest.stage].optimizer is Placement.SHARD
    if is_cut == was_cut and source.saved_ranks == group.world_size:
        return
    for rank in range(source.saved_ranks):
        others = _own_tensors(source.rank_state(rank))
        if len(others) != len(own) or not all(map(torch.equal, own, others)):
            wanted = f"state_dict() of {', '.join(names)} to hold the same tensors on all ranks"
            got = f"a tensor of rows of rank {rank} of {source.saved_ranks}"
            hint = f"load on {source.saved_ranks} ranks, at stage {manifest.stage}; or let the "
            hint += "class keep such tensors in optimizer.state[parameter]"
            raise CheckpointError(wanted, got, hint=hint)


def _own_tensors(of_rank: dict[str, Any]) -> list[Tensor]:
    added = [state.get("own", ()) for state in of_rank.get("modules", ())]
    return [t for t in tree_iter(added) if isinstance(t, Tensor) and t.numel() > 1]
