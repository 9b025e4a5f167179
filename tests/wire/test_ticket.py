"""Tickets: each work is waited for, and the last step runs once."""

from __future__ import annotations

import pytest

from onefold.errors import TierError, WireError
from onefold.wire.ticket import DONE, Ticket


class Work:
    """Raises the given errors, one a wait, and is complete after them."""

    def __init__(self, *errors: BaseException) -> None:
        self.errors = list(errors)
        self.num_waits = 0

    def wait(self) -> None:
        self.num_waits += 1
        if self.errors:
            raise self.errors.pop(0)

    def is_completed(self) -> bool:
        return not self.errors and self.num_waits > 0


def test_the_last_step_runs_once_after_all_works():
    works, steps = [Work(), Work()], []
    ticket = Ticket(works, lambda: steps.append("unpack")).then(lambda: steps.append("show"))
    assert not ticket.done
    ticket.wait()
    ticket.wait()
    assert ticket.done
    assert steps == ["unpack", "show"]
    assert [work.num_waits for work in works] == [1, 1]
    DONE.wait()
    assert DONE.done


def test_a_wait_that_is_interrupted_is_waited_for_again():
    works, steps = [Work(), Work(KeyboardInterrupt()), Work()], []
    ticket = Ticket(works, lambda: steps.append("unpack"))
    with pytest.raises(KeyboardInterrupt):
        ticket.wait()
    assert not ticket.done
    assert steps == []
    ticket.wait()
    assert all(work.is_completed() for work in works)
    assert ticket.done
    assert steps == ["unpack"]


def test_a_failed_wait_names_the_work_and_leaves_nothing_to_wait_for():
    labels = []

    def label() -> str:
        labels.append("made")
        return "gather of unit 'head'"

    ticket = Ticket([Work(RuntimeError("peer gone\nat some line"))], label=label)
    assert labels == []
    with pytest.raises(
        WireError, match="expected gather of unit 'head' to complete, got: peer gon"
    ):
        ticket.wait()
    ticket.wait()
    with pytest.raises(TierError, match="full"):
        Ticket([Work(TierError("full"))]).wait()
