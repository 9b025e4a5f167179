"""Profile three steps of each rank: `onefold train --profile DIR`, `onefold finetune` likewise."""

from collections.abc import Callable

import torch
from torch.profiler import profile

from onefold.recording.page import prepare
from onefold.recording.third_step import WARM_STEPS
from onefold.tier import accelerator

STEPS = 3
"""Steps of a trace."""


class StepProfile:
    """A trace of torch.profiler, and a snapshot of a GPU's memory with the history that led to it.

    `profile-rank0.json.gz` opens in Perfetto, `memory-rank0.pickle` at pytorch.org/memory_viz.
    The first steps are left out, and the step after them, which a report records.

    Args:
        directory: where the files go; None profiles nothing.
        rank: of this process, in the names of the files.
        device: whose memory is recorded; CPUs have no such record.
        first: steps that an earlier run took.
        steps: steps in all.
    """

    def __init__(
        self, directory: str | None, *, rank: int, device: torch.device, first: int, steps: int
    ) -> None:
        self._directory, self._rank, self._device = directory, rank, device
        begin = max(first, min(first + WARM_STEPS + 1, steps - STEPS))
        self._steps = range(begin, min(begin + STEPS, steps))
        self._running: profile | None = None
        self._write_memory: Callable[[str], None] | None = None

    @property
    def note(self) -> str:
        """The line for the terminal; empty without a directory."""
        if self._directory is None:
            return ""
        steps = f"steps {self._steps.start + 1} to {self._steps.stop}"
        has_memory = self._device.type == "cuda"
        memory = "a memory snapshot" if has_memory else "no memory snapshot: only GPUs have one"
        return f"torch.profiler traces {steps} into {self._directory}; {memory}"

    def begin(self, step: int) -> None:
        """A step begins, after so many others."""
        if self._directory is not None and step == self._steps.start:
            self._write_memory = accelerator.record_memory(self._device)
            # torch 2.11 warns without `acc_events`, which means nothing in one cycle
            self._running = profile(record_shapes=True, profile_memory=True, acc_events=True)
            self._running.start()

    def end(self, step: int) -> None:
        """A step ends, after so many others: with the last one the files are written."""
        running = self._running
        if running is None or self._directory is None or step + 1 < self._steps.stop:
            return
        accelerator.synchronize(self._device)
        running.stop()
        self._running = None
        folder = prepare(self._directory, "a profile")
        running.export_chrome_trace(str(folder / f"profile-rank{self._rank}.json.gz"))
        if self._write_memory is not None:
            self._write_memory(str(folder / f"memory-rank{self._rank}.pickle"))
