"""Stages of a pipeline that are saved and loaded together, as the one model that they are.

Each rank has one stage module, or several. Names are those of the whole model, so a checkpoint
loads at any other split of the axes, and in one process. Optimizers of stages are parts of one:
group I of the checkpoint holds the parameters of group I of every stage.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

from onefold.checkpoint.agreement import refusal, together
from onefold.checkpoint.contents import GRAD, MASTER, MODEL, OPTIM, PARTIAL, ShardedModel
from onefold.engine.registry import engine_of
from onefold.layout.module_tree import uncompiled
from onefold.wire.collectives import Group

Modules = nn.Module | Sequence[nn.Module]
Optimizers = Optimizer | Sequence[Optimizer] | None


@dataclass(frozen=True, slots=True)
class Stages:
    """The modules of this rank, and the group of all ranks that save them together."""

    modules: tuple[nn.Module, ...]
    group: Group
    is_pipeline: bool

    @staticmethod
    def of(modules: Modules) -> Stages:
        """Find the ranks: those of the module, or of all stages that `onefold.pipeline` drives.

        Raises `CheckpointError` for several modules without a pipeline; on every rank, for other
        modules than all stages of a rank, and for axes that do not multiply to the world.
        """
        given = [modules] if isinstance(modules, nn.Module) else list(modules)
        found = tuple(uncompiled(module) for module in given)
        engines = [engine_of(module) for module in found]
        pipeline, everyone = engines[0].pipeline, engines[0].context.everyone
        if pipeline is None and (engines[0].is_undriven or len(found) > 1):
            got = "a stage that no schedule drives" if engines[0].is_undriven else f"{len(found)}"
            hint = "onefold.pipeline(schedule) joins the stages of a pipeline; else one by one"
            raise refusal("one module, without a pipeline", got, hint=hint)
        if pipeline is None or not pipeline.has_parts:
            return Stages(found, everyone, is_pipeline=False)
        world = Group.of(dist.group.WORLD if dist.is_initialized() else None)

        def check() -> None:
            if {engine.pipeline for engine in engines} != {pipeline} or (
                len(set(engines)) != pipeline.num_stages
            ):
                raise refusal(
                    f"all {pipeline.num_stages} stages of this rank", f"{len(found)} modules",
                    hint="onefold.save(directory, [first_stage, second_stage], optimizers)",
                )  # fmt: skip
            ranks = pipeline.group.world_size
            if ranks * everyone.world_size != world.world_size:
                raise refusal(
                    f"a pipeline axis and the ranks of a stage that multiply to {world.world_size}",
                    f"{ranks} and {everyone.world_size}",
                    hint='mesh=mesh["dp"] for onefold.shard, group=mesh["pp"].get_group() for '
                    "PipelineStage",
                )

        together(world, check)
        return Stages(found, world, is_pipeline=True)

    def models(self, optimizers: Optimizers) -> list[ShardedModel]:
        """Return the modules with their optimizers, which must hold parameters of one module."""
        given = list(optimizers) if isinstance(optimizers, list | tuple) else [optimizers]
        number = self.group.rank if self.is_pipeline else None
        return [
            replace(
                ShardedModel.of(engine, module, given if self._is_one else _own(given, engine)),
                number=number,
            )
            for module, engine in ((each, engine_of(each)) for each in self.modules)
        ]

    @property
    def _is_one(self) -> bool:
        return len(self.modules) == 1


def _own(optimizers: Iterable[Any], engine: Any) -> list[Any]:
    """The optimizers that hold a parameter of this module; all that are none."""
    return [
        each
        for each in optimizers
        if not isinstance(each, Optimizer)
        or any(id(t) in engine.by_sharded for group in each.param_groups for t in group["params"])
    ]


def merged(states: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return the state of all modules of a rank as one; param groups are those of `merge_groups`.

    Raises `CheckpointError` for a name in two modules, and for gradients between micro-batches.
    """
    found: dict[str, Any] = {}
    for state in states:
        if GRAD in state or PARTIAL in state:
            raise refusal(
                "a pipeline that is saved between steps",
                "gradients that no optimizer has stepped",
                hint="call optimizer.step() and zero_grad() first",
            )
        for kind in (MODEL, MASTER):
            own, new = found.setdefault(kind, {}), state.get(kind, {})
            twice = own.keys() & new.keys()
            if twice:
                hint = "give each stage the names of the whole model, such as blocks.7.weight"
                raise refusal("names that differ", f"{min(twice)!r} in two stages", hint=hint)
            own.update(new)
        if OPTIM in state:
            optim = found.setdefault(OPTIM, {"state": {}, "param_groups": []})
            optim["state"] |= state[OPTIM]["state"]
            groups = [optim["param_groups"], state[OPTIM]["param_groups"]]
            optim["param_groups"] = merge_groups(groups)
    return {kind: each for kind, each in found.items() if each}


def merge_groups(of_stages: Sequence[Sequence[dict[str, Any]]]) -> list[dict[str, Any]]:
    """Return param groups by number, each with the parameters of all stages."""
    found: list[dict[str, Any]] = []
    for groups in of_stages:
        for index, group in enumerate(groups):
            if index == len(found):
                found.append({**group, "params": []})
            own = cast("list[str]", found[index]["params"])
            own += [name for name in group["params"] if name not in own]
    return found
