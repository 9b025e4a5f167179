"""`onefold.pipeline`: let a schedule of torch.distributed.pipelining drive sharded stages.

Each rank examines its own stages. Ranks then exchange what they found over the pipeline axis and
over the data axis, so every rank raises the same error, before a stage is driven.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar
from weakref import WeakSet
from zlib import crc32

import torch
import torch.distributed as dist
from torch.distributed.pipelining.schedules import (
    BACKWARD_INPUT,
    BACKWARD_WEIGHT,
    UNSHARD,
    PipelineScheduleMulti,
    PipelineScheduleSingle,
    _PipelineScheduleRuntime,
)

from onefold.axes.pipelines.driver import StageDriver, StepsOfRank, Tied, drive, is_driven, ties_of
from onefold.engine.engine import Engine
from onefold.engine.pipelined import PIPELINE, Pipeline
from onefold.engine.registry import find_engine
from onefold.errors import ConfigError
from onefold.fit.kept_units import choose_windows, memory_of, trained_units
from onefold.text import parse_nbytes
from onefold.wire.collectives import Group
from onefold.wire.ranks import Ranks, meet
from onefold.wire.together import same

Schedule = TypeVar("Schedule", bound=PipelineScheduleSingle | PipelineScheduleMulti)

Window = int | str | None


def pipeline(schedule: Schedule, *, window: Window = None, tied: Tied = None) -> Schedule:
    """Let a schedule gather and reduce its sharded stage modules: once for each unit and step.

    A collective: every rank of the pipeline and data axes calls it, once for each schedule, after
    `onefold.shard(stage_module, optimizer, mesh=mesh["dp"])`. Without it a schedule computes the
    same gradients, but each micro-batch gathers at stage 3 and is reduced at every stage.

    Gradients of micro-batches rest on each rank and are reduced once, after the stage's last
    backward. Then the schedule scales them (`scale_grads`, right for losses that are means; pass
    `scale_grads=False` to the schedule for sums, such as `loss_sum / global_tokens`).

    From now on `onefold.clip_grad_norm_`, `onefold.save` and `onefold.load` know that the modules
    are stages: their norm and their checkpoints are those of the whole model.

    Args:
        schedule: GPipe, 1F1B, Interleaved1F1B, LoopedBFS, InterleavedZeroBubble, ZBVZeroBubble or
            another of `torch.distributed.pipelining`, with `PipelineStage`s whose modules are
            sharded, at any stage.
        window: what stays unsharded through the step at stage 3. None: what fits into three
            quarters of the memory that is free now, with its gradients. "8GiB": so many bytes of a
            rank. A number: so many units of each stage module. Units outside the window are
            gathered for each forward and backward, and reduced in each backward (in schedules that
            split backwards once a step).
        tied: names of parameters that several stages share, such as
            `[("embed.weight", "head.weight")]`: the names that the stage modules give it, or one
            name. The copies start from the values of the first stage, and their gradients are
            added once a step. `[]`: none, without a search for undeclared ones.

    Returns:
        The same schedule.

    Raises:
        ConfigError: a stage module that is not sharded, axes that overlap, stages that share a
            parameter without saying so, or ranks that differ; on every rank.

    Example:
        >>> mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "dp"))
        >>> onefold.shard(module, optimizer, stage=3, mesh=mesh["dp"])
        >>> stage = PipelineStage(module, rank, 2, device, group=mesh["pp"].get_group())
        >>> schedule = onefold.pipeline(Schedule1F1B(stage, n_microbatches=8, loss_fn=loss))
        >>> schedule.step(inputs)

    Source: the unsharded weights of a whole step, and one reduction: MaxText's pipelines.
    """
    stages = _stages_of(schedule)
    splits = _splits(schedule)
    group = Group.from_handle(stages[0].group or dist.group.WORLD)
    engines = dict[int, Engine]()

    def check() -> list[str]:
        check_window(window)
        engines.update(engines_of(stages))
        return _facts(schedule, window, tied)

    sharded = [find_engine(stage.submod) for stage in stages]  # where there is a problem, too
    data = [engine.context.everyone for engine in sharded if engine is not None]
    # ranks may have different numbers of stages: those of the same ranks exchange once
    axes = {tuple(axis.global_ranks()): axis for axis in reversed([group, *data])}
    hint = "build the schedule from the same configuration everywhere"
    same(list(axes.values()), check, "schedule and arguments", hint=hint, kind=ConfigError)
    if tied is None:
        check_undeclared(engines, group)
    windows = windows_of(list(engines.values()), window)
    axis = _joined_ranks(stages, engines, group)
    group = axis.group
    run = StepsOfRank(group, ties_of(engines, group, tied), len(stages))
    drivers = {
        index: StageDriver(engine, kept, splits=splits)
        for (index, engine), kept in zip(engines.items(), windows, strict=True)
    }
    has_actions = isinstance(schedule, _PipelineScheduleRuntime)
    setattr(schedule, PIPELINE, axis)
    for stage in stages:
        driver = drivers[stage.stage_index]
        driver.engine.join_pipeline(axis)
        drive(stage, driver, run, gathers=not has_actions)
    if isinstance(schedule, _PipelineScheduleRuntime):
        schedule.register_custom_function(
            UNSHARD,
            lambda action, ctx: drivers[action.stage_index].gather(),  # noqa: ARG005 - torch's
        )
    return schedule


def _joined_ranks(stages: Sequence[Any], engines: Mapping[int, Engine], group: Group) -> Pipeline:
    """Connect the ranks of the axis, so that a wait says where every rank is. A collective."""
    peers = next((peers for e in engines.values() if (peers := e.group.peers)), None)
    timeout = None if peers is None else peers.timeout
    group = meet(Ranks(group), timeout).everyone
    mine = (
        sorted(engines),
        any(engine.units for engine in engines.values()),
        any(stage.is_last for stage in stages),
        any(engine.context.routes.rounds_gradients for engine in engines.values()),
    )
    of_ranks = group.gather(mine)
    ranks = group.global_ranks()

    def part(has: Callable[[Any], bool]) -> Group | None:
        members = [rank for rank, facts in zip(ranks, of_ranks, strict=True) if has(facts)]
        if ranks[group.rank] not in members or len(members) == 1:
            return None
        return group if members == ranks else meet(Ranks(Group.over(members)), timeout).everyone

    places = [
        f"rank {rank} has stage {' and '.join(map(str, facts[0]))}"
        for rank, facts in zip(ranks, of_ranks, strict=True)
    ]
    return Pipeline(
        group, len(stages), WeakSet(engines.values()), ", ".join(places),
        steppers=part(lambda facts: facts[1]), scalers=part(lambda facts: facts[1] or facts[2]),
        rounds=any(facts[3] for facts in of_ranks),
    )  # fmt: skip


def _stages_of(schedule: object) -> list[Any]:
    if isinstance(schedule, PipelineScheduleSingle):
        return [schedule._stage]
    if isinstance(schedule, PipelineScheduleMulti):
        return list(schedule._stages)
    wanted = "a schedule of torch.distributed.pipelining"
    hint = "onefold.pipeline(Schedule1F1B(stage, n_microbatches=8, loss_fn=loss))"
    raise ConfigError(wanted, f"a {type(schedule).__name__}", hint=hint)


def _splits(schedule: PipelineScheduleSingle | PipelineScheduleMulti) -> bool:
    """True if the program has backwards of inputs and of weights apart."""
    program = _program(schedule).values()
    actions = [action for of_rank in program for action in of_rank if action is not None]
    parts = [part for action in actions for part in action.sub_actions or (action,)]
    return any(part.computation_type in (BACKWARD_INPUT, BACKWARD_WEIGHT) for part in parts)


def _program(schedule: Any) -> dict[int, list[Any]]:
    """The actions of all ranks, where the schedule lists them."""
    if isinstance(schedule, _PipelineScheduleRuntime):
        return schedule.pipeline_order_with_comms
    return schedule.pipeline_order or {}


def _facts(schedule: Any, window: Window, tied: Tied) -> list[str]:
    """Describe the run; it must be the same on every rank."""
    return [
        f"a {type(schedule).__name__}",
        f"{schedule._n_microbatches} micro-batches",
        f"scale_grads={schedule.scale_grads}",
        f"window={window!r}",
        f"tied={tied!r}",
        f"a program of actions with digest {crc32(str(_program(schedule)).encode()):08x}",
    ]


def windows_of(engines: Sequence[Engine], window: Window) -> list[frozenset[int]]:
    """Choose the window of each of a rank's stage modules, in their order. A collective.

    Args:
        engines: of the modules, which share the rank's memory.
        window: units of each module, bytes of all of them as text, or None: what fits.
    """
    stages = [trained_units(engine) for engine in engines]
    windows = [stage.everyone for stage in stages]
    chosen = [i for i, engine in enumerate(engines) if engine.recipe.frees_after_forward]
    if isinstance(window, int):
        for i in chosen:
            windows[i] = stages[i].some(window)
    elif chosen:  # stages 0 to 2 hold whole weights anyway
        limit = None if window is None else parse_nbytes("window", window)
        free = min(memory_of(engines[i]).free_on_all() for i in chosen)
        fitting = choose_windows([stages[i] for i in chosen], free, limit)
        for i, units in zip(chosen, fitting, strict=True):
            windows[i] = units
    return windows


def check_window(window: object) -> None:
    """Raise `ConfigError` unless `window` is None, a number of units or bytes as text."""
    is_number = isinstance(window, int) and not isinstance(window, bool) and window >= 0
    if isinstance(window, str):
        parse_nbytes("window", window)
    elif not (window is None or is_number):
        wanted = "window to be a number of units from 0 on, bytes as text, or None"
        hint = 'onefold.pipeline(schedule, window="8GiB"), or no window: what fits'
        raise ConfigError(wanted, repr(window), hint=hint)


def engines_of(stages: Sequence[Any]) -> dict[int, Engine]:
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
        if tiled:
            wanted = "whole weights in the stages of a pipeline"
            got = f"unit {tiled[0]!r}, which is gathered in row blocks"
            raise ConfigError(wanted, got, where=where, hint="leave Offload(tile=) out")
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
    got = f"a copy on stage {first} and one on stage {second}, whose gradients nobody adds"
    hint = f"onefold.pipeline(schedule, tied=[{fqn!r}]) adds them; tied=[] if they are "
    hint += "different parameters"
    return ConfigError(f"parameter {fqn!r} on one stage alone", got, hint=hint)


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
