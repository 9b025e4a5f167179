"""A plan and a run keep the same units of a pipeline unsharded, given the same free memory."""

from __future__ import annotations

import pytest
import torch

import onefold
from onefold.axes.pipelines.drive import windows_of
from onefold.engine.registry import engine_of
from onefold.planner.composed import ComposedJob, parts_of, pieces_of, rank_trace
from onefold.planner.composition import free_of, stages_of, window_of
from onefold.planner.models.gpt import GPT, GPTConfig, GPTStage
from onefold.planner.planned_axes import Anatomy, ModelAxes
from onefold.planner.trace import Trace, tokens_of, trace
from onefold.recipe import Recipe
from tests.support.free_memory import has_free
from tests.support.ranks import run_ranks, seeded
from tests.support.rows import again_but

SIZES = GPTConfig(num_layers=8, width=64, num_heads=4, lr=1e-3)
SEQ, DATA = 16, 2
MIB = 2**20
Kept = list[set[str]]
"""The parameters that each stage of a rank keeps."""


def planned(free: int, virtual: int, limit: int | None) -> list[Kept]:
    """By rank of a pipeline of two ranks."""
    with torch.device("meta"):
        model = GPT(SIZES, SEQ)
    found = trace(model, tokens_of(1, SEQ))
    axes = ModelAxes(pp=2, virtual=virtual)
    recipe = Recipe(world_size=2 * DATA, local_world_size=2 * DATA)
    job = ComposedJob(axes, Anatomy.dissect(model, found.units), recipe, SEQ, 4)
    return [rank_of(found, job, rank, free, limit) for rank in range(axes.pp)]


def rank_of(found: Trace, job: ComposedJob, rank: int, free: int, limit: int | None) -> Kept:
    recipe = job.axes.data(job.recipe)
    own = rank_trace(found, job, rank, 1)
    resting = 2**40 - free_of(own, recipe, 2**40)
    assert free_of(own, recipe, resting + free) == free
    parts = parts_of(found.units, job, rank)
    pieces = [pieces_of(found.units, job)[part.unit] for part in parts]
    kept = window_of(stages_of(own, recipe, pieces), free, limit)
    return [
        {member.fqn for i in kept if pieces[i] == piece for member in own.units[i].members}
        for piece in dict.fromkeys(pieces)
    ]


def ran(
    virtual: int, frees: list[int], limit: str | None, patch: pytest.MonkeyPatch
) -> list[list[Kept]]:
    """The same of stage modules, for each number of free bytes."""
    now = {"free": 0}
    has_free(patch, lambda: DATA * now["free"])

    def body(_: int, rank: int) -> list[Kept]:
        model = seeded(lambda: GPT(SIZES, SEQ))
        stages = [GPTStage(model, rank + 2 * i, 2 * virtual) for i in range(virtual)]
        engines = [engine_of(onefold.shard(each)) for each in stages]
        found = list[Kept]()
        for free in frees:
            now["free"] = free  # threads set the same
            torch.distributed.barrier()
            windows = windows_of(engines, limit)
            torch.distributed.barrier()
            found.append(
                [
                    {p.fqn for i in window for p in engine.units[i].parameters}
                    for engine, window in zip(engines, windows, strict=True)
                ]
            )
        return found

    return [run_ranks(DATA, body, rank)[0] for rank in (0, 1)]


@again_but("None-1", "2MiB-2")
@pytest.mark.parametrize("virtual", [1, 2])
@pytest.mark.parametrize("limit", [None, "2MiB"])
def test_plans_and_runs_choose_the_same_units(virtual, limit, monkeypatch):
    frees = [0, *(MIB * part // 2 for part in range(1, 16)), 2**40]
    by_rank = ran(virtual, frees, limit, monkeypatch)
    limit_nbytes = None if limit is None else 2 * MIB
    numbers = set[int]()
    for index, free in enumerate(frees):
        wanted = planned(free, virtual, limit_nbytes)
        assert [found[index] for found in by_rank] == wanted, f"{free:,} bytes free"
        numbers.add(len(set.union(*wanted[0])))
    assert len(numbers) > 2, "none were kept, and some, and more"
