"""Record one step of `onefold train --report DIR`, and write its report at the end of the run."""

from __future__ import annotations

import platform
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

from torch import nn

import onefold
from onefold.app.train.course import TrainResult
from onefold.app.train.job import Job
from onefold.recording.record_files import write
from onefold.recording.recorder import Recording
from onefold.recording.run_report import Fact, RunReport, Training
from onefold.tier.host import memory_nbytes, usable_cores, versions
from onefold.wire.world import World

WARM_STEPS = 2
"""Steps before the one that is recorded: they allocate buffers and optimizer states."""


class RunRecorder:
    """Records one step of a run: the third, or the last of a shorter one."""

    def __init__(self, job: Job, module: nn.Module, first: int) -> None:
        self.job = job
        self.module = module
        self.number = min(first + WARM_STEPS, job.steps - 1)
        self.recording: Recording | None = None

    @contextmanager
    def around_step(self, step: int) -> Iterator[None]:
        """Record the step in the block, if it is the chosen one."""
        if self.job.report is None or step != self.number:
            yield
            return
        with onefold.record(self.module) as self.recording:
            yield


def write_report(
    recorder: RunRecorder, world: World, result: TrainResult, step_seconds: Sequence[float]
) -> str:
    """Write the report on rank 0; return its path, or nothing without a step. A collective."""
    job, recording = recorder.job, recorder.recording
    if job.report is None or recording is None:
        return ""
    records = world.gather(recording.step)
    if world.rank > 0:
        return world.gather("")[0]
    own = onefold.report(recorder.module)
    sizes = {"parameters": result.num_parameters, "ranks": world.world_size}
    about = {"model": job.model, **sizes, **_about(job), "stage": own.stage}
    if job.offload:
        about["planned"] = own.offload
    report = RunReport.of(
        records, about=about, units=own.units, recorded=recorder.number + 1,
        resident=[memory.resident_peak for memory in result.memory],
    )  # fmt: skip
    report = replace(
        report,
        training=Training(
            result.first_step, tuple(result.losses), tuple(step_seconds), job.tokens_per_step,
            result.held_out,
        ),
        machine={
            "system": f"{platform.system()} {platform.machine()}",
            "device": str(world.device),
            "cores": usable_cores(),
            "memory_nbytes": memory_nbytes()[0],
        },
        versions=dict(versions()),
        plan=None if result.predicted is None else result.predicted.as_plan(own.stage),
        stage0=result.stage0,
    )  # fmt: skip
    return world.gather(str(write(job.report, report, records)))[0]


def _about(job: Job) -> dict[str, Fact]:
    """Return the choices of a run, as the page shows them."""
    return {
        "stage": job.stage,
        "precision": job.precision or "the parameters' own",
        **({"offload": job.offload} if job.offload else {}),
        "data": job.data or "Python's standard library",
        "steps": job.steps,
        "batch": f"{job.rows} rows of {job.seq} bytes",
        **({"micro-batches": job.accumulate} if job.accumulate > 1 else {}),
        **({"recompute": "every block"} if job.recompute else {}),
        **({"compile": "every block"} if job.compile else {}),
        "clip": job.clip or "off",
        "seed": job.seed,
    }
