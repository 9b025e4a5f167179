"""Record the third step of a loop that a library drives: Trainer's, TRL's or Lightning's."""

import os
from contextlib import ExitStack
from typing import Any

from torch import nn

from onefold.engine.registry import engine_of
from onefold.recording.page import prepare
from onefold.recording.recorder import Recording, record

WARM_STEPS = 2
"""Steps before the first that is recorded: they allocate buffers and optimizer states."""


class ThirdStep:
    """Records a step on rank 0, and writes the files of `Recording.save` at its end.

    Args:
        directory: where to write; None records nothing.

    Raises `ConfigError` if the directory cannot be written to.
    """

    def __init__(self, directory: str | os.PathLike[str] | None) -> None:
        self._directory = None if directory is None else prepare(directory)
        self._wanted: int | None = None  # steps before the one to record
        self._open: tuple[ExitStack, Recording] | None = None

    def begin(self, module: nn.Module, taken: int, steps: int = 1 << 62) -> None:
        """A step begins, or goes on with another micro-batch; `taken` and `steps`: of the run."""
        if self._directory is None or engine_of(module).group.rank > 0:
            return
        if self._wanted is None:
            self._wanted = min(taken + WARM_STEPS, max(taken, steps - 1))
        if taken == self._wanted and self._open is None:
            stack = ExitStack()
            self._open = stack, stack.enter_context(record(module))

    def end(self) -> None:
        """The step is over: write its page."""
        recording = self.close()
        if recording is not None:
            self._wanted = -1
            recording.save(self._directory or "")

    def close(self) -> Any:
        """Stop, also in a step that has failed; return the recording, if one was open."""
        opened, self._open = self._open, None
        if opened is None:
            return None
        opened[0].close()
        return opened[1]
