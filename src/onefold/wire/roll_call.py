"""Roll call: ask every rank where it is, once a rank has waited long.

A thread on every rank looks at the group's store twice a second. A rank that has waited for some
seconds asks; every rank answers with the line of the user's code that it is in and, if it waits for
a collective, with the name of that. If no rank can go on, all of them raise the list at once. If
one is busy elsewhere, those that wait raise the list at the timeout. See docs/adr/0019.
"""

import json
import os
import pickle
import sys
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from types import FrameType
from weakref import finalize

from torch.distributed.distributed_c10d import Store

from onefold.errors import Failure, OnefoldError, expected
from onefold.wire.frames import Stacks, describe, is_in_torch_collective, place_in
from onefold.wire.lanes import Lane
from onefold.wire.launcher import store_holder

POLL_S = 0.5
"""How often a rank looks whether another one asks."""

PATIENCE_S = 2.0
"""A rank that has waited this long asks the others where they are."""

LEFT_S = 3.0
"""Ranks that do not answer for so long, after a connection broke, have ended. If all others have
answered, one poll is enough for the last: somebody has ended."""

SKIPPED = "; a layer that some ranks skip (layerdrop) needs stage 0 to 2, or one unit around it"
"""A hint where a rank waits for weights: at stage 3 every rank gathers every unit."""

LINGER_S = 1.0
"""A rank that fails alone stays so long at most: the others may learn it from its store."""


@dataclass(slots=True)
class Waiting:
    """A collective that this rank's own thread waits for."""

    label: str
    phase: str
    lane: str
    number: int  # of the collective on its lane
    thread: int


@dataclass(frozen=True, slots=True)
class Answer:
    """Where one rank is."""

    text: str
    is_stuck: bool = False  # in a collective, of ours or of torch
    lane: str | None = None
    number: int = 0
    issued: Mapping[str, int] = field(default_factory=dict)  # by lane


def find_deadlock(answers: list[Answer | None], *, is_whole_job: bool) -> bool:
    """True if every rank waits, and each for a collective that some waiting rank has not begun.

    At least one rank must wait for a collective of ours. A rank in a collective of torch waits for
    ranks of any group: they are all among those that answered only if these are the whole job.
    """
    waiting = [answer for answer in answers if answer is not None and answer.is_stuck]
    ours = [answer for answer in waiting if answer.lane is not None]
    if len(waiting) < len(answers) or not ours or (len(ours) < len(waiting) and not is_whole_job):
        return False
    return all(
        any(other.issued.get(answer.lane, answer.number) < answer.number for other in waiting)
        for answer in ours
        if answer.lane is not None
    )


class RollCall:
    """This rank's part in the roll calls of one group of ranks, until `owner` is collected.

    Attributes:
        lanes: to the ranks of every group that takes part.
        verdict: the list of where all ranks are, once it is certain that none of them can go on.
        table: the same list from when they were last asked; "" if they were not.
        is_in_call: True inside of a call that ranks may fail in alone (save, load ...).
        gone: the ranks that have ended, in words, once a rank has lost its connection to them.
    """

    def __init__(
        self, store: Store, rank: int, world_size: int, owner: object, *, is_whole_job: bool
    ) -> None:
        """`is_whole_job`: the ranks are all ranks of torch's world."""
        self.lanes: list[Lane] = []
        self.verdict: str | None = None
        self.table = ""
        self.is_in_call = False
        self._announced: tuple[int, Failure] | None = None  # in which call
        self.gone: str | None = None
        self._store, self._rank, self._world_size = store, rank, world_size
        self._waiting: Waiting | None = None
        self._is_whole_job = is_whole_job
        self._call = 0  # every rank counts them
        self._calls = self._turns = 0
        self._heard = [0] * world_size  # the turn of each rank's last answer
        self._before: tuple[int, int] | None = None
        self._last: list[Answer | None] = []
        self._stacks = Stacks()
        self._quit = threading.Event()
        thread = threading.Thread(target=self._answer_peers, daemon=True, name="onefold-roll-call")
        thread.start()
        # a thread inside the store must not meet an interpreter that shuts down
        finalize(owner, self._stop, thread)

    @property
    def failure(self) -> Failure | None:
        """What another rank has announced in the call that this one is in."""
        call, failure = self._announced or (0, None)
        return failure if self.is_in_call and call == self._call else None

    def wait_for(self, waiting: Waiting | None) -> None:
        """Tell others which collective this rank waits for; None: none."""
        self._waiting = waiting

    def begin_call(self) -> None:
        """All ranks begin the same call."""
        self._call += 1
        self.is_in_call = True

    def end_call(self) -> None:
        """The call is over on this rank."""
        self.is_in_call = False

    def announce(self, failure: Failure) -> None:
        """Tell the ranks that are in this call; wait a moment until they know."""
        self.is_in_call = False
        key, known = f"failed/{self._call}", f"knows/{self._call}"
        with suppress(RuntimeError):  # the store's host has ended
            self._store.set(key, pickle.dumps(failure).hex())
            until = time.monotonic() + LINGER_S
            while self._store.add(known, 0) + 1 < self._world_size and time.monotonic() < until:
                time.sleep(LINGER_S / 20)

    def read_failure(self) -> Failure | None:
        """The failure that a rank has announced in the call that this one is in, looked up now."""
        call = self._call  # the user's thread may begin the next one meanwhile
        key = f"failed/{call}"
        try:
            if not self.is_in_call or not self._store.check([key]):
                return None
            self._store.add(f"knows/{call}", 1)
            failure: Failure = pickle.loads(bytes.fromhex(self._store.get(key).decode()))
        except RuntimeError:
            return None
        self._announced = call, failure
        return failure

    def find_gone(self) -> str:
        """Name the ranks that have ended, once a connection broke; "" if that cannot be told.

        A rank that ends with its interpreter leaves a note. One that is killed does not answer.
        """
        try:
            self.gone = self.gone or self._read_gone() or self._ask_who_is_left()
            self._store.set("gone", self.gone)
            self._store.add("asked", 1)  # so that all look
        except RuntimeError:
            return self.gone or f"{store_holder()} ended, which held the store of the ranks"
        return self.gone

    def _ask_who_is_left(self) -> str:
        """The notes of ranks that have ended, or else those that do not answer."""
        store, others = self._store, [r for r in range(self._world_size) if r != self._rank]
        turns = {rank: self._read_turn(rank) for rank in others}
        store.add("asked", 1)
        begun = time.monotonic()
        while True:
            if said := self._read_gone():
                return said
            notes = {r: store.get(f"ended/{r}").decode() for r in others if self._has(f"ended/{r}")}
            if notes:
                return "; ".join(f"rank {rank} ended: {note}" for rank, note in notes.items())
            silent = [rank for rank in others if self._read_turn(rank) == turns[rank]]
            waited = time.monotonic() - begun
            if not silent or waited > (LEFT_S if len(silent) > 1 else POLL_S):
                return "; ".join(f"rank {rank} ended without a word" for rank in silent)
            time.sleep(POLL_S / 10)

    def _read_turn(self, rank: int) -> int:
        """The number of the turn in which a rank answered last."""
        key = f"at/{rank}"
        return json.loads(self._store.get(key))[0] if self._has(key) else 0

    def _read_gone(self) -> str:
        return self._store.get("gone").decode() if self._has("gone") else ""

    def _has(self, key: str) -> bool:
        return self._store.check([key])

    def last_words(self) -> str:
        """The list that another rank may have left before it ended."""
        return self.read_verdict() or self.table

    def _stop(self, thread: threading.Thread) -> None:
        error = last_error()
        if error is not None and not isinstance(error, OnefoldError) and "gloo" in str(error):
            # of a collective that torch or the user began, where nothing else could be raised
            os.write(2, f"onefold: {self.find_gone()}\n".encode())
        with suppress(RuntimeError):  # the store's host has ended
            self._store.set(f"ended/{self._rank}", _why_it_ends())
        for lane in self.lanes:
            lane.cut()
        self._quit.set()
        if thread is not threading.current_thread():
            thread.join(2 * POLL_S)

    def _answer_peers(self) -> None:
        while not self._quit.wait(POLL_S):
            try:
                self._turn()
            except RuntimeError:  # the store's host has ended
                return

    def _turn(self) -> None:
        self._turns += 1
        if self.is_in_call and self.failure is None:
            self.read_failure()
        is_stuck = self._is_stuck()
        calls = self._store.add("asked", int(is_stuck))
        if calls != self._calls:
            self._calls = calls
            self.gone = self.gone or self._read_gone() or None
            answer = asdict(self._answer_stuck(is_stuck))
            self._store.set(f"at/{self._rank}", json.dumps([self._turns, answer]))
        if is_stuck and self.verdict is None:
            verdict = self.read_verdict() or self._listen()
            if verdict is not None:
                if self._waiting is None:  # this rank is inside torch, where nothing can be raised
                    os.write(2, f"onefold: {self.no_rank_can_go_on(verdict)}\n".encode())
                self._wait_until_all_know()
                self.verdict = verdict

    def _listen(self) -> str | None:
        """Read all answers. Twice the same without hope is a verdict, for every rank."""
        keys = [f"at/{rank}" for rank in range(self._world_size)]
        texts = [self._store.get(key) if self._store.check([key]) else None for key in keys]
        notes = [(0, None) if text is None else json.loads(text) for text in texts]
        answers = [None if facts is None else Answer(**facts) for _, facts in notes]
        self.table = "\n".join(f"  rank {r}: {_text(answer)}" for r, answer in enumerate(answers))
        turns = [turn for turn, _ in notes]
        if all(now > before for now, before in zip(turns, self._heard, strict=True)):
            self._heard = turns
            if answers == self._last and find_deadlock(answers, is_whole_job=self._is_whole_job):
                self._store.set("verdict", self.table)
                return self.table
            self._last = answers
        return None

    def _wait_until_all_know(self) -> None:
        """A rank that ends now would end the waits of others before they know why."""
        self._store.add("know", 1)
        for _ in range(20):
            if self._store.add("know", 0) >= self._world_size or self._quit.wait(PATIENCE_S / 10):
                return

    def read_verdict(self) -> str | None:
        """The verdict of any rank; None if there is none, or no store any more."""
        try:
            return self._store.get("verdict").decode() if self._has("verdict") else None
        except RuntimeError:
            return None

    def _is_stuck(self) -> bool:
        """True if this rank has waited for some time in a collective, of ours or of torch."""
        main = threading.main_thread().ident or 0
        now: tuple[int, int] | None = None
        frame: FrameType | None = None
        if self._waiting is None and self._stacks.may_wait(main):
            frame = sys._current_frames().get(main)
        if frame is not None and is_in_torch_collective(frame):
            now = (id(frame), frame.f_lasti)
        before, self._before = self._before, now
        return self._waiting is not None or (now is not None and now == before)

    def _answer_stuck(self, stuck: bool) -> Answer:
        waiting, issued = self._waiting, {lane.name: lane.issued for lane in self.lanes}
        if waiting is not None:
            return Answer(self._place(waiting), stuck, waiting.lane, waiting.number, issued)
        frame = sys._current_frames().get(threading.main_thread().ident or 0)
        is_theirs = is_in_torch_collective(frame)
        what = "a collective of torch" if is_theirs else "no collective"
        return Answer(f"{what}{place_in(frame)}", stuck and is_theirs, None, 0, issued)

    def no_rank_can_go_on(self, table: str) -> str:
        """The message for ranks that wait for one another; the one that differs has the list."""
        ranks: dict[str, list[str]] = {}
        for line in table.splitlines():
            name, _, place = line.strip().removeprefix("rank ").partition(": ")
            ranks.setdefault(place, []).append(name)
        place, (odd, *_) = min(ranks.items(), key=lambda item: len(item[1]))
        skipped = SKIPPED if any("gather of unit" in place for place in ranks) else ""
        if odd != str(self._rank):
            got = f"rank {odd} elsewhere: {place}"
            hint = f"the error of rank {odd} lists all ranks{skipped}"
            return expected("all ranks in the same collective", got, hint=hint)
        lines = "\n".join(
            f"  rank{'s' * (len(names) > 1)} {', '.join(names)}: {where}"
            for where, names in ranks.items()
        )
        hint = "every rank makes the same calls in the same order: take collectives out of "
        return expected(
            "all ranks in the same collective",
            f"ranks that wait for one another:\n{lines}",
            hint=f"{hint}`if rank == 0:`, and run the same number of steps on every rank{skipped}",
        )

    def place_of(self, waiting: Waiting) -> str:
        """This rank's line of a list that says where all ranks are."""
        return f"  rank {self._rank}: {self._place(waiting)}"

    def doing(self, waiting: Waiting) -> str:
        """A collective, and the call or phase that it belongs to."""
        return describe(waiting.phase, waiting.label, sys._current_frames().get(waiting.thread))

    def _place(self, waiting: Waiting) -> str:
        said = self.doing(waiting).removesuffix(f" on rank {self._rank}")
        return f"{said}{place_in(sys._current_frames().get(waiting.thread))}"


def time_is_up(wanted: str, limit_s: float, table: str) -> str:
    """The message for a rank that has waited as long as it may; `table`: of `RollCall`."""
    hint = "a rank left the loop, runs other code, or is slow: onefold.shard(timeout=) says "
    hint += "how many seconds the others wait"
    got = f"ranks that are elsewhere:\n{table}"
    return expected(f"{wanted} within {limit_s:g} s", got, hint=hint)


def _why_it_ends() -> str:
    """Why this rank takes no part any more, for the others."""
    if threading.main_thread().is_alive():
        return "it has deleted its sharded module"
    error = last_error()
    return f"{type(error).__name__}: {error}".splitlines()[0] if error else "its script is over"


def last_error() -> BaseException | None:
    """The error that the interpreter has printed, once the script is over."""
    return None if threading.main_thread().is_alive() else getattr(sys, "last_value", None)


def _text(answer: Answer | None) -> str:
    if answer is None:
        return "no answer: its process has ended, is stopped, or is not in Python"
    return answer.text
