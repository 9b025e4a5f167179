"""One handle for everything that finishes later: collectives, copies, disk requests.

Whoever starts asynchronous work gives the caller a `Ticket`; whoever needs the result calls
`wait()`. A ticket owns the buffers of its work until then, so nothing else has to keep them alive.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from onefold.errors import OnefoldError, WireError


class Waitable(Protocol):
    """What a ticket can wait for: `torch.distributed.Work` fits."""

    def wait(self) -> object: ...
    def is_completed(self) -> bool: ...


class Ticket:
    """Asynchronous work plus the step that finishes it on the caller's thread.

    `finish` runs once, inside the first `wait()`, after all `works` are complete: unpacking,
    summing, making the compute stream wait. Errors of the work become `WireError` with `label`.
    """

    __slots__ = ("_finish", "_label", "_works")

    def __init__(
        self,
        works: Sequence[Waitable] = (),
        finish: Callable[[], None] | None = None,
        label: str = "",
    ) -> None:
        self._works: Sequence[Waitable] = works
        self._finish = finish
        self._label = label

    def then(self, finish: Callable[[], None]) -> Ticket:
        """The same work with one more step at its end, on the caller's thread."""
        before = self._finish

        def both() -> None:
            if before is not None:
                before()
            finish()

        return Ticket(self._works, both, self._label)

    @property
    def works(self) -> Sequence[Waitable]:
        """What is still to be waited for."""
        return self._works

    @property
    def done(self) -> bool:
        """True when `wait()` would not block."""
        return all(work.is_completed() for work in self._works)

    def wait(self) -> None:
        """Block until the work is complete and finished. Calling it again does nothing."""
        works, self._works = self._works, ()
        finish, self._finish = self._finish, None
        try:
            for work in works:
                work.wait()
        except OnefoldError:
            raise
        except RuntimeError as error:
            raise WireError(
                f"expected {self._label} to complete, got: {str(error).splitlines()[0]}\n"
                "hint: a peer died, left the training loop early, or called other collectives; "
                "look for the first error among the other ranks"
            ) from error
        if finish is not None:
            finish()


DONE = Ticket()
"""A ticket of work that needed no time."""
