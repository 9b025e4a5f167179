"""What processes are forked from has no thread that is ending, whose locks they would inherit."""

from __future__ import annotations

import threading
import time

import pytest
import torch
from torch.nn import functional as F

from tests.support import forking
from tests.support.commands import Command
from tests.support.forking import TASKS, await_ended_threads
from tests.support.ranks import run_processes


def multiply() -> None:
    x, w = torch.randn(12, 6, 16, requires_grad=True), torch.randn(33, 16, requires_grad=True)
    F.linear(x, w).sum().backward()


def test_threads_that_have_ended_are_gone():
    await_ended_threads()  # what stays is known from here on
    for _ in range(20):
        threads = [threading.Thread(target=multiply) for _ in range(4)]
        for thread in threads:
            thread.start()
        ids = {thread.native_id for thread in threads}
        for thread in threads:
            thread.join()
        await_ended_threads()
        assert not ids & {int(task.name) for task in TASKS.iterdir()}


def test_a_thread_that_runs_is_not_waited_for():
    over, begun = threading.Event(), threading.Event()

    def run() -> None:
        begun.set()
        over.wait(60)

    thread = threading.Thread(target=run)
    thread.start()
    begun.wait(60)
    await_ended_threads()
    assert thread.native_id not in forking._staying, "it was taken for one that ends"
    over.set()
    thread.join()


def _multiplies(rank: int) -> None:
    multiply()


@pytest.mark.process
def test_forked_ranks_multiply_right_after_threads_did():
    for _ in range(5):
        threads = [threading.Thread(target=multiply) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        run_processes(2, _multiplies)


def sleep_on() -> None:
    time.sleep(60)


def test_a_command_that_hangs_says_in_which_line():
    command = Command(sleep_on, ["sleep"], None, 0.5, forks_ranks=False)
    with pytest.raises(TimeoutError, match="in sleep_on"):
        command.end()
