"""One handle for all work that finishes later: collectives, copies, disk requests.

Whoever starts asynchronous work gives the caller a `Ticket`; whoever needs the result calls
`wait()`. A ticket owns the buffers of its work until then, so nothing else has to keep them alive.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from operator import methodcaller
from typing import Protocol

from onefold.errors import OnefoldError, WireError

_IS_COMPLETED = methodcaller("is_completed")


class Waitable(Protocol):
    """Work that a ticket can wait for: `torch.distributed.Work` fits."""

    def wait(self) -> object: ...
    def is_completed(self) -> bool: ...


class Ticket:
    """Asynchronous work plus the step that finishes it on the caller's thread.

    `finish` runs once, inside the first `wait()` that sees all `works` complete: unpacking,
    summing, making the compute stream wait. Errors of the work become `WireError` with `label`, a
    string or a function that formats one.
    """

    __slots__ = ("_finish", "_label", "_works")

    def __init__(
        self,
        works: Sequence[Waitable] = (),
        finish: Callable[[], None] | None = None,
        label: str | Callable[[], str] = "",
    ) -> None:
        self._works: Sequence[Waitable] = works
        self._finish = finish
        self._label = label

    def then(self, finish: Callable[[], None]) -> Ticket:
        """Return the same work with one more step at its end, on the caller's thread."""
        before = self._finish

        def both() -> None:
            if before is not None:
                before()
            finish()

        return Ticket(self._works, both, self._label)

    @property
    def works(self) -> Sequence[Waitable]:
        """The works that nobody has waited for yet."""
        return self._works

    @property
    def done(self) -> bool:
        """True when `wait()` would not block."""
        return all(map(_IS_COMPLETED, self._works))

    def wait(self) -> None:
        """Block until the work is complete and finished. Calling it again does nothing.

        A wait that Ctrl-C interrupts does not count: the next one waits for the same works.
        """
        try:
            for work in self._works:
                work.wait()
        except Exception as error:
            self._works, self._finish = (), None
            if isinstance(error, OnefoldError) or not isinstance(error, RuntimeError):
                raise
            raise self._failed(error) from error
        finish, self._works, self._finish = self._finish, (), None
        if finish is not None:
            finish()

    def _failed(self, error: RuntimeError) -> WireError:
        label = self._label if isinstance(self._label, str) else self._label()
        return WireError(
            f"expected {label} to complete, got: {str(error).splitlines()[0]}\n"
            "hint: a peer died, left the training loop early, or called other collectives; "
            "look for the first error among the other ranks"
        )


DONE = Ticket()
"""A ticket of work that is complete."""
