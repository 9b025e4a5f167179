"""When `onefold train` saves, where it goes on, and how it ends when it is asked to."""

from __future__ import annotations

import shutil
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import nn
from torch.optim import Optimizer

import onefold
from onefold.errors import ConfigError, expected
from onefold.mesh.world import World
from onefold.train.job import Job
from onefold.train.signals import StopRequests


class Interrupted(Exception):
    """A run was asked to stop, has saved, and has stopped."""

    def __init__(self, step: int, path: Path, number: int) -> None:
        super().__init__(f"stopped after step {step:,d}, saved as {path}")
        self.number = number  # of the signal


@dataclass(frozen=True, slots=True)
class Resumed:
    """Where a run goes on."""

    step: int  # steps that were done
    told: str  # for people: the checkpoint, and those that were passed over


def preflight(job: Job) -> None:
    """Refuse a directory that the run could not, or should not, save in."""
    if job.checkpoint is None:
        if job.every or job.resume:
            flag = "--every" if job.every else "--resume"
            hint = "pass --checkpoint DIR"
            raise ConfigError(expected(f"--checkpoint beside {flag}", "none", hint=hint))
        return
    path = Path(job.checkpoint)
    if path.exists() and not path.is_dir():
        what = f"--checkpoint {job.checkpoint!r} to be a directory"
        raise ConfigError(expected(what, "a file", hint="each save becomes a folder in it"))
    held = sorted(child.name for child in path.glob("step-*")) if path.is_dir() else []
    if held and not job.resume:
        raise ConfigError(
            expected(
                f"--checkpoint {job.checkpoint!r} to be empty",
                f"{held[-1]} in it",
                hint="go on from there with --resume, or save to another directory",
            )
        )


class Checkpoints:
    """Saves a run's module, optimizer and `extra` when it is due; loads the newest to go on."""

    def __init__(
        self,
        job: Job,
        world: World,
        module: nn.Module,
        optimizer: Optimizer,
        stateful: dict[str, Any],
    ) -> None:
        self._job = job
        self._world = world
        self._module = module
        self._optimizer = optimizer
        self._stateful = stateful  # objects with state_dict and load_state_dict
        self._saved = -1

    def resume(self) -> Resumed | None:
        """Load the newest complete checkpoint, if the job wants that and there is one."""
        job = self._job
        if job.checkpoint is None or not job.resume:
            return None
        if not self._world.gather(_holds_some(Path(job.checkpoint)))[0]:
            return None
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            extra = onefold.load(job.checkpoint, self._module, self._optimizer)
        for name, each in self._stateful.items():
            each.load_state_dict(extra[name])
        self._saved = extra["step"]
        if self._world.rank == 0:
            _set_aside(Path(job.checkpoint), newer_than=extra["step"])
        told = "; ".join(str(each.message).splitlines()[0] for each in caught)
        return Resumed(extra["step"], told or f"loaded {_name(extra['step'])}")

    def after(self, step: int, requests: StopRequests) -> None:
        """`step` steps are done: save if it is time, or if any rank was asked to stop.

        Raises `Interrupted` in the second case, on every rank.
        """
        job = self._job
        if job.checkpoint is None:
            return
        number = max(self._world.gather(requests.received))
        is_due = step == job.steps or (job.every > 0 and step % job.every == 0)
        if (is_due or number) and self._saved != step:
            self._save(step)
        if number and step < job.steps:
            raise Interrupted(step, Path(job.checkpoint) / _name(step), number)

    def _save(self, step: int) -> None:
        path = Path(self._job.checkpoint or "") / _name(step)
        extra = {"step": step, **self._stateful}
        onefold.save(path, self._module, self._optimizer, extra=extra, keep=self._job.keep)
        self._saved = step


def _name(step: int) -> str:
    return f"step-{step:08d}"


def _set_aside(directory: Path, *, newer_than: int) -> None:
    """Hide checkpoints that could not be loaded: this run will come to their steps again."""
    for path in directory.glob("step-*"):
        number = path.name.removeprefix("step-")
        if number.isdecimal() and int(number) > newer_than:
            aside = directory / f".{path.name}.damaged"
            shutil.rmtree(aside, ignore_errors=True)
            path.rename(aside)


def _holds_some(directory: Path) -> bool:
    """False for a directory in which no checkpoint was ever completed."""
    return directory.is_dir() and any(directory.glob("step-*"))
