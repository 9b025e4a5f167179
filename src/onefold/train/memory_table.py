"""The closed form of what a rank holds, and the table that compares it with `onefold.report`.

For fp32 parameters of n elements over N ranks, by ZeRO stage (arXiv 1910.02054, section 5); where
nodes are replicas, N are the ranks of a node:

    stage      weight    grad     AdamW's two moments
    0          4n        4n       8n
    1, 2, 3    4n / N    4n / N   8n / N

Stages differ in when they gather and reduce, not in what rests here between backward and step,
but for the weight of stages 1 and 2, which is beside a whole copy ("unsharded") until the step.
"""

from __future__ import annotations

import resource
from collections.abc import Iterable
from dataclasses import dataclass
from math import prod

from torch import nn

from onefold.recording.report import Report

KINDS: tuple[str, ...] = ("weight", "master", "grad", "optimizer")
"""Kinds of state that rest, and that the closed form knows."""

SHARD_STEP, REPLICA_STEP = 16, 64
"""Elements to which each parameter is rounded up in a shard, and in a replica."""


@dataclass(frozen=True, slots=True)
class ParameterShape:
    """One parameter as the closed form sees it."""

    shape: tuple[int, ...]
    itemsize: int  # bytes of an element

    @staticmethod
    def of(module: nn.Module) -> tuple[ParameterShape, ...]:
        """Every parameter of a module once; the same before and after `onefold.shard`."""
        return tuple(ParameterShape(tuple(p.shape), p.itemsize) for p in module.parameters())


@dataclass(frozen=True, slots=True)
class RankMemory:
    """Bytes that one rank holds at the end of a step, before `zero_grad`, and at the peak."""

    rank: int
    now: dict[str, int]  # by kind
    peak: dict[str, int]
    total_peak: int
    resident_peak: int  # of the whole process, by the system's count
    expected: dict[str, int]  # by kind, from the closed form
    tiers: dict[str, list[str]]  # by kind: where it rests

    @property
    def is_equal(self) -> bool:
        """True if every kind of resting state is what the closed form says, to the byte."""
        return all(self.now.get(kind, 0) == nbytes for kind, nbytes in self.expected.items())


def expected_nbytes(
    shapes: Iterable[ParameterShape], *, world_size: int, shard: int = 0, num_shards: int = 1,
    is_offloaded: bool = False, steps_in_backward: bool = False,
) -> dict[str, int]:  # fmt: skip
    """Bytes by kind that a rank holds of AdamW training in which every parameter has a gradient:
    shard `shard` of `num_shards`, of which stage 0 has one.

    Offloaded states lie as the weights do; units that are stepped in backward keep no gradients.
    """
    totals = dict.fromkeys(KINDS, 0)
    for parameter in shapes:
        numel = prod(parameter.shape)
        if num_shards > 1:
            resting = _round_up(_piece_numel(parameter.shape, num_shards, shard), SHARD_STEP)
        else:
            resting = _round_up(numel, REPLICA_STEP)
        stepped = resting if world_size > 1 else numel  # alone, gradients are autograd's own
        totals["weight"] += resting * parameter.itemsize
        totals["master"] += resting * 4 if parameter.itemsize < 4 else 0
        totals["grad"] += 0 if steps_in_backward else stepped * parameter.itemsize
        moments = resting if is_offloaded else stepped
        totals["optimizer"] += moments * 2 * max(4, parameter.itemsize)
    return totals


def measure(
    shapes: Iterable[ParameterShape], report: Report, *, is_offloaded: bool = False,
    steps_in_backward: bool = False,
) -> RankMemory:  # fmt: skip
    """A rank's report beside its closed form."""
    where = {
        "world_size": report.world_size,
        "shard": report.shard,
        "num_shards": report.num_shards,
    }
    tiers = {kind: [tier for tier, usage in held.items() if usage.now] for kind, held in
             report.memory.items()}  # fmt: skip
    return RankMemory(
        rank=report.rank,
        now={kind: report.nbytes(kind) for kind in report.memory},
        peak={
            kind: sum(usage.peak for usage in tiers.values())
            for kind, tiers in report.memory.items()
        },
        total_peak=report.total.peak,
        resident_peak=resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        expected=expected_nbytes(
            shapes, **where, is_offloaded=is_offloaded, steps_in_backward=steps_in_backward
        ),
        tiers=tiers,
    )


def _piece_numel(shape: tuple[int, ...], num_shards: int, shard: int) -> int:
    """Elements of the rows that `torch.chunk` gives a shard; a 0-dim parameter is in all."""
    if not shape:
        return 1
    per_shard = -(-shape[0] // num_shards)
    rows = max(0, min(per_shard, shape[0] - shard * per_shard))
    return rows * prod(shape[1:])


def _round_up(numel: int, step: int) -> int:
    return -(-numel // step) * step
