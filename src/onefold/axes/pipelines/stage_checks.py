"""Check a schedule and its stages before it is driven: on every rank the same error.

Each rank examines its own stages. Ranks then exchange what they found over the pipeline axis and
over the data axis.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist

from onefold.axes.pipelines.driver import is_driven
from onefold.engine.engine import Engine
from onefold.engine.registry import find_engine
from onefold.errors import ConfigError
from onefold.wire.collectives import Group


def engines_of(stages: Sequence[Any], *, splits: bool) -> dict[int, Engine]:
    """Return the engine of each stage's module, by stage. Raises `ConfigError`."""
    engines = dict[int, Engine]()
    for stage in stages:
        where = f"stage {stage.stage_index}, rank {stage.group_rank} of the pipeline"
        engine = find_engine(stage.submod)
        if engine is None:
            got = f"a {type(stage.submod).__name__} that it has not sharded"
            hint = 'onefold.shard(stage_module, optimizer, mesh=mesh["dp"]), then onefold.pipeline'
            raise ConfigError(
                "a stage module that onefold.shard has sharded", got, where=where, hint=hint
            )
        if is_driven(stage):
            hint = "call onefold.pipeline once for each schedule; build a new stage for another one"
            raise ConfigError(
                "a stage that no schedule drives yet", "one in use", where=where, hint=hint
            )
        tiled = [unit.name for unit in engine.units if unit.is_tiled]
        if splits and tiled:
            hint = "take a schedule with whole backwards, or leave Offload(tile=) out"
            raise ConfigError(
                "whole weights, for a schedule that runs backwards of weights apart",
                f"unit {tiled[0]!r}, which is gathered in row blocks",
                where=where,
                hint=hint,
            )
        _check_axes(stage, engine, where)
        engines[stage.stage_index] = engine
    _check_shared(engines)
    return engines


def _check_axes(stage: Any, engine: Engine, where: str) -> None:
    """Raise `ConfigError` unless the pipeline axis and the data axis meet in this rank alone."""
    handle = engine.group.handle
    if handle is None:
        return
    rows = dist.get_process_group_ranks(stage.group or dist.group.WORLD)
    columns = dist.get_process_group_ranks(handle)
    common = sorted(set(rows) & set(columns))
    hint = 'init_device_mesh(device, (pp, dp), mesh_dim_names=("pp", "dp")): ' + (
        'group=mesh["pp"].get_group() for PipelineStage, mesh=mesh["dp"] for onefold.shard'
    )
    if common != [dist.get_rank()]:
        got = f"ranks {common} in both: pipeline {rows}, data {columns}"
        raise ConfigError("axes that share this rank alone", got, where=where, hint=hint)
    if dist.get_world_size() % (len(rows) * len(columns)):
        got = (
            f"a pipeline of {len(rows)} times {len(columns)} data ranks of {dist.get_world_size()}"
        )
        raise ConfigError("axes whose lengths multiply to the world", got, where=where, hint=hint)


def _check_shared(engines: Mapping[int, Engine]) -> None:
    """Raise `ConfigError` if two stages of this rank hold the same parameter object."""
    seen = dict[int, tuple[int, str]]()
    for stage, engine in engines.items():
        for key, parameter in engine.by_sharded.items():
            if key in seen:
                raise shared(parameter.fqn, seen[key][0], stage)
            seen[key] = stage, parameter.fqn


def shared(fqn: str, first: int, second: int) -> ConfigError:
    """The error for a parameter that two stages share without saying so."""
    return ConfigError(
        f"parameter {fqn!r} on one stage alone",
        f"a copy on stage {first} and one on stage {second}, whose gradients nobody adds",
        hint=f"onefold.pipeline(schedule, tied=[{fqn!r}]) adds them; tied=[] if they are "
        "different parameters",
    )


def check_undeclared(engines: Mapping[int, Engine], group: Group) -> None:
    """Raise `ConfigError` if a few parameters of two stages have the same name and values.

    A collective of the pipeline group and of each data group. Stages that are copies of one another
    (built from the same seed) share more than half of their values by name: not a tie.
    """
    mine = {stage: _fingerprints(engine) for stage, engine in engines.items()}
    stages = dict(sorted(pair for of_rank in group.gather(mine) for pair in of_rank.items()))
    for first, ours in stages.items():
        for second, theirs in stages.items():
            same = [fqn for fqn, print_ in ours.items() if _alike(print_, theirs.get(fqn))]
            if second > first and same and 2 * len(same) <= max(len(ours), len(theirs)):
                raise shared(same[0], first, second)


def _fingerprints(engine: Engine) -> dict[str, tuple[Any, ...]]:
    """Shape, sum and sum of squares of each parameter, but for those whose values are all equal."""
    prints = dict[str, tuple[Any, ...]]()
    sums = list[tuple[float, float, float, float]]()
    parameters = [
        parameter
        for unit in engine.units if unit.weight.far is None
        for parameter in unit.parameters
    ]  # fmt: skip
    with torch.no_grad():
        for parameter in parameters:
            rows = parameter.local.detach().double()
            low, high = (rows.min(), rows.max()) if rows.numel() else (torch.inf, -torch.inf)
            sums.append((float(rows.sum()), float(rows.square().sum()), float(low), float(high)))
    by_rank = engine.group.gather(sums) if engine.context.rest_world > 1 else [sums]
    for index, parameter in enumerate(parameters):
        sums_, squares, lows, highs = zip(*(rank_sums[index] for rank_sums in by_rank), strict=True)
        if min(lows) < max(highs):
            prints[parameter.fqn] = parameter.slot.shape, sum(sums_), sum(squares)
    return prints


def _alike(own: tuple[Any, ...], other: tuple[Any, ...] | None) -> bool:
    if other is None or own[0] != other[0]:
        return False
    return all(
        abs(a - b) <= 1e-9 * max(abs(a), abs(b)) for a, b in zip(own[1:], other[1:], strict=True)
    )
