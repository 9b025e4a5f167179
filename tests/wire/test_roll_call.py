"""A roll call ends only ranks that nothing can help."""

from __future__ import annotations

import faulthandler
import os
import re
import sys
import threading
import time

import pytest
import torch
import torch.distributed as dist
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch.distributed import distributed_c10d

import onefold
from onefold.errors import Failure
from onefold.wire import frames
from onefold.wire.frames import RAN_S, Stacks, place_in
from onefold.wire.roll_call import Answer, RollCall
from onefold.wire.roll_call import find_deadlock as deadlock_of
from tests.support.models import Model, next_token_loss, token_batches
from tests.support.ranks import run_processes, seeded
from tests.support.rows import again_but

SECOND = max(1.0, os.getloadavg()[0] / (os.cpu_count() or 1))
ELSEWHERE = Answer("no collective")


def waits(lane, number, **issued):
    return Answer("", is_stuck=True, lane=lane, number=number, issued=issued)


def find_deadlock(answers, *, is_whole_job=True):
    return deadlock_of(answers, is_whole_job=is_whole_job)


def test_ranks_that_wait_on_two_lanes_for_one_another_cannot_go_on():
    assert find_deadlock(
        [waits("call", 3, call=3, forward=8), waits("forward", 9, call=2, forward=9)]
    )


@pytest.mark.parametrize("world_size", [2, 3])
def test_the_one_rank_that_does_not_answer_is_named_within_a_second(world_size):
    """Of three, rank 1 lives and answers at its next poll."""
    store, owner = dist.HashStore(), threading.Event()
    calls = [
        RollCall(store, r, world_size, owner, is_whole_job=True) for r in range(world_size - 1)
    ]
    begun = time.monotonic()
    assert calls[0].find_gone() == f"rank {world_size - 1} ended without a word"
    assert time.monotonic() - begun < SECOND
    del owner


class _SlowStore(dist.HashStore):
    """Calls back in the middle of a read, as where the process has to wait for a core."""

    during = None

    def get(self, key):
        value = super().get(key)
        if self.during is not None and key.startswith("failed/"):
            self.during()
        return value


def test_a_failure_that_is_read_late_is_none_of_the_next_call():
    store, owner = _SlowStore(), threading.Event()
    here, other = (RollCall(store, r, 2, owner, is_whole_job=True) for r in range(2))
    for each in (here, other):
        each.begin_call()
    other.announce(Failure(onefold.StateError, "of the first call"))
    assert here.read_failure() is not None
    assert here.failure is not None
    store.during = lambda: (here.end_call(), here.begin_call())
    here.read_failure()  # as the thread that looks for it
    store.during = None
    assert here.failure is None
    other.begin_call()
    other.announce(Failure(onefold.StateError, "of the second call"))
    here.read_failure()
    assert "second" in str(here.failure.error())
    del owner


def test_a_rank_that_is_behind_in_a_message_all_have_begun_can_go_on():
    ahead = waits("forward", 10, forward=10, backward=4)
    behind = waits("backward", 4, forward=9, backward=4)  # on its way, over a slow link
    assert not find_deadlock([ahead, behind])


def test_ranks_in_the_same_message_wait_for_the_link_alone():
    assert not find_deadlock([waits("forward", 9, forward=9), waits("forward", 9, forward=9)])


@pytest.mark.parametrize("other", [None, ELSEWHERE])
def test_a_rank_that_is_busy_or_silent_may_come(other):
    assert not find_deadlock([waits("call", 3, call=3), other])


def test_a_rank_inside_torch_cannot_come_where_another_waits_for_it():
    reads = Answer("a collective of torch", is_stuck=True, issued={"forward": 8})
    assert find_deadlock([reads, waits("forward", 9, forward=9)])
    logs = Answer("a collective of torch", is_stuck=True, issued={"forward": 9})
    assert not find_deadlock([logs, waits("forward", 9, forward=9)])
    assert not find_deadlock([reads, reads]), "torch's own to say"


def test_a_rank_inside_torch_may_wait_for_slow_ranks_outside_of_a_group_that_is_a_part_of_the_job():
    """Such as the other ranks of its tensor or pipeline axis, which the roll call does not ask."""
    inside_torch = Answer("a collective of torch", is_stuck=True, issued={"forward": 8})
    for late in (1, 2):
        answers = [inside_torch] * late + [waits("forward", 9, forward=9)] * 2
        assert find_deadlock(answers)
        assert not find_deadlock(answers, is_whole_job=False)
    crossed = [waits("call", 3, call=3, forward=8), waits("forward", 9, call=2, forward=9)]
    assert find_deadlock(crossed, is_whole_job=False), "all wait for ranks of this group"


@settings(suppress_health_check=[HealthCheck.too_slow])  # on a busy machine
@given(st.integers(2, 5), st.data())
def test_ranks_that_run_one_program_are_never_taken_for_lost(world_size, data):
    """Whatever the lead of some over others: the last one waits for what all have begun."""
    program = data.draw(st.lists(st.sampled_from("abc"), min_size=1, max_size=12))
    answers = []
    for _ in range(world_size):
        begun = data.draw(st.integers(1, len(program)))
        awaited = data.draw(st.integers(1, begun))
        lane, issued = program[awaited - 1], {x: program[:begun].count(x) for x in "abc"}
        answers.append(waits(lane, program[:awaited].count(lane), **issued))
    assert not find_deadlock(answers)


def _come_late(rank, how):
    module = seeded(Model)
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-2)
    onefold.shard(module, optimizer, stage=3, timeout=60)
    for step, batch in enumerate(token_batches(3)):
        if rank == 1 and step == 1:
            if how == "sleeps":
                time.sleep(6)
            if how == "computes":
                end = time.monotonic() + 6
                while time.monotonic() < end:
                    torch.ones(300, 300) @ torch.ones(300, 300)
        next_token_loss(module, batch).backward()
        optimizer.step()
        optimizer.zero_grad()
    dist.barrier()


@again_but("computes")
@pytest.mark.process
@pytest.mark.parametrize("how", ["sleeps", "computes"])
def test_a_slow_rank_is_waited_for(how):
    run_processes(3, _come_late, how)


def test_a_place_without_a_line_is_that_of_the_line_before():
    """CPython frees the name of an `except` clause in code that belongs to no line."""
    places = []

    class Slow:
        def __del__(self):
            frame = sys._getframe(1)
            places.append(place_in(frame))

    def fail():
        kept = Slow()
        raise ValueError(kept is None)

    def caught(is_verbose):
        try:
            fail()
        except ValueError as error:
            assert error.args == (False,)
            if is_verbose:
                print("more")

    caught(False)
    (place,) = places
    assert re.fullmatch(r", test_roll_call\.py:\d+ `\S.*`", place)


def test_stacks_are_not_read_while_a_thread_that_python_has_not_started_runs(tmp_path, monkeypatch):
    """It may be making its state, in which CPython 3.11's dump reads address 8."""
    ours = [thread.native_id for thread in threading.enumerate()]
    for number, state in [(1, "S"), *((each, "R") for each in ours)]:
        (tmp_path / str(number)).mkdir()
        (tmp_path / str(number) / "stat").write_text(f"{number} (a) name) {state} 0 0")
    assert not frames.native_runs(tmp_path)
    (tmp_path / "1" / "stat").write_text("1 (a) name) R 0 0")
    (tmp_path / "2").mkdir()  # it has ended
    assert frames.native_runs(tmp_path)
    assert not frames.native_runs(tmp_path / "none")
    monkeypatch.setattr(frames, "native_runs", lambda: True)
    monkeypatch.setattr(faulthandler, "dump_traceback", None)
    thread = threading.main_thread().ident
    assert thread is not None
    assert Stacks().may_wait(thread) == (sys.version_info >= (3, 12))


def test_a_thread_is_seen_to_wait_in_torch_alone(monkeypatch):
    """Its stack is read without frame objects, of which CPython 3.11 may leave dangling ones.

    A thread that has run since the last look does not wait, wherever it is.
    """
    monkeypatch.setattr(frames, "native_runs", lambda: False)
    thread = threading.main_thread().ident
    assert thread is not None
    assert Stacks().may_wait(thread) == (sys.version_info >= (3, 12))
    waits, seen = list[bool](), list[bool]()
    if not hasattr(time, "pthread_getcpuclockid"):
        pytest.skip("this system has no clock of one thread")
    clock = time.pthread_getcpuclockid(thread)

    def look() -> None:
        while not waits:
            time.sleep(0.001)
        stacks = Stacks()
        first, begun = stacks.may_wait(thread), time.clock_gettime(clock)
        while time.clock_gettime(clock) < begun + 2 * RAN_S:
            time.sleep(0.001)
        seen.extend((first, stacks.may_wait(thread)))

    looks = threading.Thread(target=look)
    looks.start()
    source = "waits += [True]\nwhile not seen: pass"  # as in the file in which torch waits
    exec(compile(source, distributed_c10d.__file__, "exec"), {"waits": waits, "seen": seen})
    looks.join()
    assert seen == [True, False]
