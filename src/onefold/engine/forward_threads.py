"""Run several forwards side by side: each halts where it is told to, while one of them runs.

A forward is a call stack, so a forward that halts needs a thread. One thread runs at a time, so the
order is fixed. It has the settings of the thread that made it: autocast, device, stream. For the
schedule all of them are one walk over the units. See docs/adr/0026.
"""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from contextvars import copy_context
from threading import Semaphore, Thread, local
from typing import Any, Generic, TypeVar

import torch

from onefold.tier import accelerator

Entry = TypeVar("Entry")


class ThreadStack(local, Generic[Entry]):
    """A stack that each thread has for itself, as forwards of several threads run by turns."""

    def __init__(self) -> None:
        self.entries: list[Entry] = []


class _Ended(Exception):
    """Another forward has failed: this one ends, too."""


class ForwardThread(Thread):
    """One forward, which runs between two halts while the caller waits."""

    def __init__(self, forward: Callable[[], Any]) -> None:
        super().__init__(name="onefold forward", daemon=True)
        self._result: Any = None
        self.is_over = False
        self._forward = forward
        self._go, self._halted = Semaphore(0), Semaphore(0)
        self._error: BaseException | None = None
        self._asked: Callable[[], None] | None = None
        self._refused: BaseException | None = None  # the error of what was asked
        self._is_ending = False
        self._context, self._enter = copy_context(), _settings()

    def run(self) -> None:
        OF_THREAD.forward = self
        self._go.acquire()
        try:
            if not self._is_ending:
                with ExitStack() as stack:
                    self._enter(stack)
                    self._result = self._context.run(self._forward)
        except _Ended:
            pass
        except BaseException as error:
            self._error = error
        self.is_over = True
        self._halted.release()

    def take_result(self) -> Any:
        """Return what the forward has returned, and keep it no longer."""
        result, self._result = self._result, None
        return result

    def resume(self) -> None:
        """Run to the next halt, or to the end. Raises the error of the forward."""
        self._switch()
        while self._asked is not None:
            request, self._asked = self._asked, None
            try:
                request()
            except BaseException as error:
                self._refused = error
            self._switch()
        if self._error is not None:
            raise self._error

    def _switch(self) -> None:
        self._go.release()
        self._halted.acquire()

    def halt(self) -> None:
        """Let the caller run on; return when it resumes this thread."""
        self._halted.release()
        self._go.acquire()
        if self._is_ending:
            raise _Ended

    def ask(self, request: Callable[[], None]) -> None:
        """Have the caller run `request`, as a group of ranks may belong to its thread."""
        if self._is_ending:
            request()
            return
        self._asked = request
        self.halt()
        refused, self._refused = self._refused, None
        if refused is not None:
            raise refused

    def end(self) -> None:
        """End the forward where it halts, and the thread."""
        self._is_ending = True
        self._go.release()
        self.join()


@contextmanager
def thread_of(forward: Callable[[], Any]) -> Iterator[ForwardThread]:
    """Make a thread for a forward. Both end with the block."""
    thread = ForwardThread(forward)
    thread.start()
    try:
        yield thread
    finally:
        thread.end()


class _OfThread(local):
    forward: ForwardThread | None = None


OF_THREAD = _OfThread()
"""Has the `forward` that this thread runs; None outside of them."""


def _settings() -> Callable[[ExitStack], None]:
    """Note the settings that a thread has for itself; return how to enter them in another one."""
    threads, records, default = (
        torch.get_num_threads(), torch.is_grad_enabled(), torch.get_default_device()
    )  # fmt: skip
    casts = [
        (kind, torch.get_autocast_dtype(kind))
        for kind in ("cpu", accelerator.kind())
        if kind is not None and torch.is_autocast_enabled(kind)
    ]
    take_device = accelerator.thread_state()

    def enter(stack: ExitStack) -> None:
        torch.set_num_threads(threads)
        stack.enter_context(torch.set_grad_enabled(records))
        if default.type != "cpu":
            stack.enter_context(default)
        take_device()
        for kind, dtype in casts:  # the cache of casts would join two graphs
            stack.enter_context(torch.autocast(kind, dtype, cache_enabled=False))

    return enter
