"""Copies of weights from CPU memory to an accelerator, beside its computing stream."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor


class CopyStream:
    """One stream for copies, as a context in which copies and messages begin.

    The stream starts behind all that computes by then, as it fills memory that was in use. Copies
    of page-locked memory run while the device computes and the host goes on.
    """

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.Stream(device)

    def __enter__(self) -> None:
        self._stream.wait_stream(torch.accelerator.current_stream(self._stream.device))
        self._stream.__enter__()

    def __exit__(self, *error: object) -> None:
        self._stream.__exit__(*error)

    def copy(self, into: Sequence[Tensor], sources: Sequence[Tensor]) -> None:
        """Begin to copy each source; nobody may change or free it before `ended`."""
        torch._foreach_copy_(list(into), list(sources), non_blocking=True)

    def mark(self) -> Callable[[], None]:
        """Return a function that waits, on the host, for all copies that have begun.

        The host waits at the first use of the weights, while the device computes with others. So
        the sources may be edited, stepped or reused afterwards.
        """
        done = torch.Event(self._stream.device)
        done.record(self._stream)
        return done.synchronize
