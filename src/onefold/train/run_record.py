"""What `onefold train --report DIR` keeps of a run, and writes at its end."""

from __future__ import annotations

import platform
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from math import nan

from torch import nn

import onefold
from onefold.host import memory_nbytes, usable_cores, versions
from onefold.mesh.world import World
from onefold.recording.files import write
from onefold.recording.recorder import Recording
from onefold.recording.run_report import Fact, RunReport, Training
from onefold.recording.step_record import StepRecord
from onefold.train.job import Job
from onefold.train.prediction import Prediction

WARM_STEPS = 2
"""Steps before the one that is recorded: buffers and optimizer states are made in them."""


class Recorded:
    """Watches one step of a run: the third, or the last of a shorter one."""

    def __init__(self, job: Job, module: nn.Module, first: int) -> None:
        self.job = job
        self.module = module
        self.number = min(first + WARM_STEPS, job.steps - 1)
        self.recording: Recording | None = None

    @contextmanager
    def around_step(self, step: int) -> Iterator[None]:
        """Around every step."""
        if self.job.report is None or step != self.number:
            yield
            return
        with onefold.record(self.module) as self.recording:
            yield


@dataclass(frozen=True, slots=True)
class Course:
    """How the run went, on this rank."""

    losses: list[float]
    seconds: list[float]  # of each step
    first_step: int
    held_out: float = nan
    num_parameters: int = 0
    resident_peak_nbytes: int = 0
    predicted: Prediction | None = None


def write_report(recorded: Recorded, world: World, course: Course) -> str:
    """Write the report on rank 0; where it is, or empty if no step was recorded. A collective."""
    job, recording = recorded.job, recorded.recording
    if job.report is None or recording is None:
        return ""
    gathered = world.gather((recording.step, course.resident_peak_nbytes))
    page = ""
    if world.rank == 0:
        page = str(write(job.report, _report(recorded, world, course, gathered),
                         [record for record, _ in gathered]))  # fmt: skip
    return world.gather(page)[0]


def _report(
    recorded: Recorded, world: World, course: Course, gathered: list[tuple[StepRecord, int]]
) -> RunReport:
    told = onefold.report(recorded.module)
    report = RunReport.of(
        [record for record, _ in gathered],
        about=_about(recorded.job, world, course, told.offload),
        units=told.units,
        recorded=recorded.number + 1,
        resident=[nbytes for _, nbytes in gathered],
    )
    training = Training(
        course.first_step, tuple(course.losses), tuple(course.seconds),
        recorded.job.tokens_per_step, course.held_out,
    )  # fmt: skip
    machine: dict[str, Fact] = {
        "system": f"{platform.system()} {platform.machine()}",
        "device": str(world.device),
        "cores": usable_cores(),
        "memory_nbytes": memory_nbytes()[0],
    }
    plan = None if course.predicted is None else course.predicted.as_plan(told.stage)
    about = {"training": training, "machine": machine, "versions": dict(versions())}
    return replace(report, plan=plan, **about)


def _about(job: Job, world: World, course: Course, planned: str) -> dict[str, Fact]:
    return {
        "model": job.model,
        "parameters": course.num_parameters,
        "stage": job.stage,
        "ranks": world.world_size,
        "precision": job.precision or "the parameters' own",
        **({"offload": job.offload, "planned": planned} if job.offload else {}),
        "data": job.data or "Python's standard library",
        "steps": job.steps,
        "batch": f"{job.batch} rows of {job.seq} bytes",
        **({"micro-batches": job.accumulate} if job.accumulate > 1 else {}),
        **({"recompute": "every block"} if job.recompute else {}),
        "clip": job.clip or "off",
        "seed": job.seed,
    }
