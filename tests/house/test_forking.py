"""What processes are forked from has no thread that is ending, whose locks they would inherit."""

from __future__ import annotations

import os
import sys
import threading
import time
from functools import partial

import pytest
import torch
from torch.nn import functional as F

from tests.support import forking
from tests.support.commands import Command, Forked, RankMaker
from tests.support.forking import HANG_S, TASKS, await_ended_threads
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


def _adds_on_two_threads() -> None:
    torch.set_num_threads(2)
    x = torch.ones(2_000_000)
    (x + x).sum()


@pytest.mark.process
def test_a_fork_uses_several_threads_right_after_this_process_did():
    before = torch.get_num_threads()
    _adds_on_two_threads()
    torch.set_num_threads(before)
    command = Command(_adds_on_two_threads, ["add"], None, 60.0, forks_ranks=False)
    assert command.end().returncode == 0


HELD = threading.Lock()
RANK = """
import os, sys
from tests.house.test_forking import HELD
print(os.getppid() == int(os.environ["LAUNCHER"]), HELD.acquire(timeout=0), flush=True)
"""


def _launches(script: str) -> int:
    """A launcher, a thread of which holds a lock when it starts a rank."""
    maker = RankMaker()
    HELD.acquire()
    env = {**os.environ, "OMP_NUM_THREADS": "1", "LAUNCHER": str(os.getpid())}
    rank = Forked(maker.fork([sys.executable, script], env, 1, 2), [script])
    return rank.wait(60)


@pytest.mark.process
def test_a_rank_is_its_launchers_child_and_has_none_of_its_locks(tmp_path):
    script = tmp_path / "rank.py"
    script.write_text(RANK)
    body = partial(_launches, str(script))
    done = Command(body, ["launch"], None, HANG_S, forks_ranks=False).end()
    assert (done.returncode, done.stdout) == (0, "True True\n"), done.stderr


def sleep_on() -> None:
    time.sleep(60)


def test_a_command_that_hangs_says_in_which_line():
    command = Command(sleep_on, ["sleep"], None, 0.5, forks_ranks=False)
    with pytest.raises(TimeoutError, match="in sleep_on"):
        command.end()
