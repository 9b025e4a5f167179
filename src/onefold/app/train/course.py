"""Describe the course of a run: its progress, who observes it, and its result."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

from onefold.app.train.checkpoints import Resumed
from onefold.app.train.corpus import Corpus
from onefold.app.train.job import Job
from onefold.app.train.memory_table import MeasuredMemory
from onefold.app.train.prediction import PredictedRun


@dataclass(frozen=True, slots=True)
class Progress:
    """The progress of a run."""

    step: int  # steps taken
    loss: float  # nats per token, mean over ranks, of the last LOG_STEPS
    tokens_per_s: float
    seconds_left: float


class TrainObserver:
    """Receives the events of a run on one rank. This one ignores them."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None: ...

    def started(self, job: Job, corpus: Corpus, num_parameters: int, world_size: int) -> None: ...

    def resumed(self, resumed: Resumed) -> None: ...

    def stepped(self, progress: Progress) -> None: ...

    def trained(self) -> None: ...


@dataclass(frozen=True, slots=True)
class TrainResult:
    """The result of a run; the same on every rank."""

    first_step: int  # steps taken by the run that this one resumed
    losses: list[float]  # per step of this run, nats per token, mean over the global batch
    held_out: float  # nats per token, of the held-out files
    seconds: float  # of the steps alone
    tokens_per_s: float
    text: str  # generated; empty if none was asked for
    num_parameters: int
    offload: str  # the plan for the tiers of rank 0; empty: all on the device
    memory: list[MeasuredMemory]  # per rank
    stage0: dict[str, int]  # bytes by kind that each rank would hold at stage 0
    predicted: PredictedRun | None  # of rank 0; None on others, and without a trace
    report: str  # the page about the run; empty without one, or without a step
