"""Save and resume runs of `onefold train`, and stop them on request.

The first request to stop ends the run after the step, the second ends the process. A thread
receives them. Python runs signal handlers on the main thread between two instructions, and that
thread may be inside a collective whose peers are gone.
"""

from __future__ import annotations

import os
import shutil
import signal
import socket
import threading
import time
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import nn
from torch.optim import Optimizer

import onefold
from onefold.app.train.job import Job
from onefold.errors import ConfigError
from onefold.recording.page import prepare
from onefold.wire.world import World

STOPS = (signal.SIGTERM, signal.SIGINT)

ECHO_S = 1.0
"""One request may arrive twice: SLURM signals every process of a job, and torchrun passes its own
signal on to its ranks. Within this time after the first, a signal is the same request."""


class Interrupted(Exception):
    """The run has saved and stopped, as a signal requested."""

    def __init__(self, step: int, path: Path, number: int) -> None:
        super().__init__(f"stopped after step {step:,d}, saved as {path}")
        self.number = number  # of the signal


@dataclass(frozen=True, slots=True)
class Resumed:
    """The start of a resumed run."""

    step: int  # steps taken before
    description: str  # the loaded checkpoint, and the skipped ones


def preflight(job: Job) -> None:
    """Refuse a directory in which the run cannot, or should not, save."""
    if job.checkpoint is None:
        if job.every or job.resume:
            flag = "--every" if job.every else "--resume"
            hint = "pass --checkpoint DIR"
            raise ConfigError(f"--checkpoint with {flag}", "none", hint=hint)
        return
    path, flag = Path(job.checkpoint), f"--checkpoint {job.checkpoint!r}"
    if path.exists() and not path.is_dir():
        hint = "each save becomes a folder in it"
        raise ConfigError(f"{flag} to be a directory", "a file", hint=hint)
    saved = sorted(child.name for child in path.glob("step-*"))
    if saved and not job.resume:
        hint = "go on from there with --resume, or save to another directory"
        raise ConfigError(f"{flag} to be empty", f"{saved[-1]} in it", hint=hint)
    prepare(path, "checkpoints")


class Checkpoints:
    """Saves a run's module, optimizer and `extra` when due; loads the newest checkpoint."""

    def __init__(
        self, job: Job, world: World, module: nn.Module, optimizer: Optimizer,
        stateful: dict[str, Any],
    ) -> None:  # fmt: skip
        self._job = job
        self._world = world
        self._module = module
        self._optimizer = optimizer
        self._stateful = stateful  # objects with state_dict and load_state_dict
        self._saved = -1

    def resume(self) -> Resumed | None:
        """Load the newest complete checkpoint, if the job resumes and there is one."""
        job = self._job
        if job.checkpoint is None or not job.resume:
            return None
        has_some = any(Path(job.checkpoint).glob("step-*"))
        if not self._world.group.gather(has_some)[0]:
            return None
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            extra = onefold.load(job.checkpoint, self._module, self._optimizer)
        for name, part in self._stateful.items():
            if name in extra:  # a run without `--rows auto` saves no shares of rows
                part.load_state_dict(extra[name])
        self._saved = extra["step"]
        if self._world.rank == 0:
            _set_aside(Path(job.checkpoint), newer_than=extra["step"])
        skipped = "; ".join(str(warning.message).splitlines()[0] for warning in caught)
        return Resumed(extra["step"], skipped or f"loaded {_step_name(extra['step'])}")

    def after(self, step: int, requests: StopRequests) -> None:
        """Save if a checkpoint is due after `step` steps, or if a signal asked any rank to stop.

        Raises `Interrupted` on every rank after a signal.
        """
        job = self._job
        if job.checkpoint is None:
            return
        number = max(self._world.group.gather(requests.received))
        is_due = step == job.steps or (job.every > 0 and step % job.every == 0)
        if (is_due or number) and self._saved != step:
            self._save(step)
        if number and step < job.steps:
            raise Interrupted(step, Path(job.checkpoint) / _step_name(step), number)

    def _save(self, step: int) -> None:
        path = Path(self._job.checkpoint or "") / _step_name(step)
        extra = {"step": step, **self._stateful}
        onefold.save(path, self._module, self._optimizer, extra=extra, keep=self._job.keep)
        self._saved = step


def _step_name(step: int) -> str:
    return f"step-{step:08d}"


def _set_aside(directory: Path, *, newer_than: int) -> None:
    """Rename checkpoints that failed to load: this run repeats their steps."""
    for path in directory.glob("step-*"):
        number = path.name.removeprefix("step-")
        if number.isdecimal() and int(number) > newer_than:
            aside = directory / f".{path.name}.damaged"
            shutil.rmtree(aside, ignore_errors=True)
            path.rename(aside)


class StopRequests:
    """Inside the block SIGTERM and SIGINT are requests: `received` is the first number, or 0.

    Unless `is_active`, signals keep their handlers.
    """

    def __init__(self, *, is_active: bool) -> None:
        self.received = 0
        self._is_active = is_active
        self._before: dict[int, Any] = {}

    def __enter__(self) -> StopRequests:
        is_main = threading.current_thread() is threading.main_thread()
        if not self._is_active or not is_main:  # only the main thread may set handlers
            return self
        self._sender, self._receiver = socket.socketpair()
        self._sender.setblocking(False)
        signal.set_wakeup_fd(self._sender.fileno(), warn_on_full_buffer=False)
        self._before = {stop: signal.signal(stop, lambda *_: None) for stop in STOPS}
        threading.Thread(target=self._receive, name="onefold-signals", daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._before:
            signal.set_wakeup_fd(-1)
            for stop, handler in self._before.items():
                signal.signal(stop, handler)
            self._sender.close()

    def _receive(self) -> None:
        at = 0.0  # the time of the request
        while number := self._receiver.recv(1):
            if number[0] in STOPS:
                if not self.received:
                    self.received, at = number[0], time.monotonic()
                elif time.monotonic() - at > ECHO_S:
                    os._exit(128 + number[0])
        self._receiver.close()
