"""Stages on meshes of eight processes, three axes of two each, equal one process.

Smaller meshes are drawn, on ranks that are threads: tests/support/programs/meshes.py.
"""

from __future__ import annotations

import gc
import itertools
import math
import warnings
from collections import defaultdict
from dataclasses import dataclass
from hashlib import sha1

import pytest
import torch

from tests.support.composed import Axes, Named, Place, Places, Run, alone, gpt
from tests.support.ranks import run_processes

pytestmark = pytest.mark.process
WORLD, STAGES, STEPS = 8, range(4), 2
MESHES = [
    axes
    for lengths in itertools.product((1, 2), repeat=4)
    if (axes := Axes(*lengths)).world_size == WORLD
]
LIMITS = {torch.float32: 1e-6, torch.float64: 1e-12}
Case = tuple[Axes, torch.dtype, int]


def cases() -> list[Case]:
    """In fp32 stage 3 and another one; in fp64 one, on half of the meshes."""
    return [
        (axes, dtype, stage)
        for number, axes in enumerate(MESHES)
        for dtype, stages in (
            (torch.float32, {number % 3, max(STAGES)}),
            (torch.float64, {number} if number % 2 else set()),
        )
        for stage in sorted(stages)
    ]


@dataclass(frozen=True)
class Found:
    """What one rank found: relative errors, and digests of whole tensors."""

    axes: Axes
    pp: int
    dtype: torch.dtype
    stage: int
    grads: float
    norm: float
    weights: float
    bits: str

    def problems(self) -> list[str]:
        limit = LIMITS[self.dtype]
        errors = {"gradients": self.grads, "norm": self.norm, f"{STEPS} steps": self.weights}
        where = f"{self.axes} stage {self.stage} {self.dtype}"
        return [f"{where}: {name} {off:.1e}" for name, off in errors.items() if not off <= limit]


def error(found: Named, wanted: Named) -> float:
    """The largest relative error of a tensor."""
    return max(float((found[n] - wanted[n]).norm() / wanted[n].norm()) for n in found)


def digest(*named: Named) -> str:
    made = sha1()
    for name, tensor in itertools.chain(*(each.items() for each in named)):
        made.update(name.encode() + tensor.numpy().tobytes())
    return made.hexdigest()


def measure(
    place: Place, stage: int, dtype: torch.dtype, wanted: list[tuple[Named, Named]]
) -> Found:
    """One step; in fp32 at stage 3 `STEPS`. As stages have the same bits, so would others."""
    run = Run(place, stage, gpt(dtype))
    run.backward(0)
    grads = run.grads()
    norm = math.hypot(*(float(each.norm()) for each in wanted[0][0].values()))
    norm_off = weights_off = 0.0
    if dtype == torch.float64:
        norm_off = abs(run.norm() - norm) / norm
        bits = digest(grads)
    else:
        run.update()
        bits = digest(grads, run.weights())
        for step in range(1, STEPS if stage == max(STAGES) else 0):
            run.backward(step)
            run.update()
            weights_off = error(run.weights(), wanted[-1][1]) if step + 1 == STEPS else math.inf
    grads_off = error(grads, wanted[0][0])
    return Found(place.axes, place.rank("pp"), dtype, stage, grads_off, norm_off, weights_off, bits)


def measure_all(rank: int, folder: str) -> None:
    warnings.simplefilter("error")
    places, found = Places(), list[Found]()
    wanted = {dtype: list(alone(dtype, STEPS)) for dtype in LIMITS}
    for axes, dtype, stage in cases():
        found.append(measure(places.of(axes), stage, dtype, wanted[dtype]))
        gc.collect()  # lest each run leaves its threads
    torch.save(found, f"{folder}/{rank}")


def test_every_stage_on_every_mesh_is_one_process_and_stages_have_the_same_bits(tmp_path):
    run_processes(WORLD, measure_all, str(tmp_path), start_method="forkserver")
    found: list[Found] = [
        each
        for rank in range(WORLD)
        for each in torch.load(tmp_path / str(rank), weights_only=False)
    ]
    assert len(found) == sum(axes.world_size for axes, _, _ in cases())
    problems = [problem for each in found for problem in each.problems()]
    bits = defaultdict[tuple[Axes, int, torch.dtype], set[str]](set)
    for each in found:  # tensors are whole: only ranks of the pipeline have others
        reduces_each_micro_batch = each.axes.pp > 1 and each.stage == 2  # and sums ranks first
        if not reduces_each_micro_batch:
            bits[each.axes, each.pp, each.dtype].add(each.bits)
    problems += [f"{key}: stages differ" for key, several in bits.items() if len(several) > 1]
    assert not problems, "\n".join(problems)
    ((grads, _),) = alone(torch.float64, 1)
    assert error({name: 2 * grad for name, grad in grads.items()}, grads) == 1  # a wrong divisor
