"""Refuse a run on CPU ranks that needs more memory than their host has, before it fills it."""

from __future__ import annotations

from dataclasses import replace

from torch import nn

from onefold.app.train.job import Job
from onefold.config import Offload, precision_of, stage_of
from onefold.errors import ConfigError
from onefold.fit.bounds import RankMemory
from onefold.planner.memory import forecast
from onefold.planner.trace import Trace
from onefold.recipe import Recipe
from onefold.text import counted, format_bytes
from onefold.wire.ranks import local_place
from onefold.wire.world import World


def check_room(
    job: Job, offload: Offload, module: nn.Module, seen: Trace | None, world: World
) -> None:
    """Compare the predicted peak of a rank with its share of the free memory. A collective.

    Nothing is checked on GPUs, with model axes or unequal shares, or without a trace.

    Args:
        job: the run; of stage "auto" the highest is checked.
        offload: its tiers.
        module: the model before `onefold.shard`; what it holds already does not count as missing.
        seen: the trace of rank 0; None on others.
        world: the ranks.

    Raises: ConfigError: on every rank, with the bytes that are needed and free.
    """
    is_plain = job.model_ranks == 1 and job.shares is None and job.row_shares is None
    if world.device.type != "cpu" or not is_plain:
        return
    stage = 3 if job.stage == "auto" else job.stage
    needed = 0
    if seen is not None:
        tiers = replace(offload, fraction=1.0) if offload.fraction == "auto" else offload
        recipe = Recipe(
            stage=stage_of(stage), world_size=world.world_size, offload=tiers,
            precision=precision_of(job.precision),
        )  # fmt: skip
        needed = forecast(seen, recipe, accumulate=job.accumulate).memory_nbytes
    needed = world.group.gather(needed)[0]
    held = sum(tensor.nbytes for tensor in module.parameters() if not tensor.is_meta)
    local_world_size = local_place(world.group)[1]
    free = RankMemory(world.device, local_world_size, world.group).free_on_all() + held
    if needed > free:
        ranks = f"each of {counted(local_world_size, 'rank')} of a host"
        wanted = f"{format_bytes(needed)} of memory for {ranks} at stage {stage}"
        hint = f"`onefold plan --model {job.model} --ranks {local_world_size}` lists what fits; "
        hint += "fewer rows (--batch), --recompute and --offload disk:PATH need less"
        raise ConfigError(wanted, f"{format_bytes(free)} free", hint=hint)
