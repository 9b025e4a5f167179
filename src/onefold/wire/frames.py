"""Tell from a thread's frames which call it is in, and at which line of the user's code."""

import faulthandler
import linecache
import os
import sys
import sysconfig
import tempfile
import threading
import time
from contextlib import suppress
from itertools import takewhile
from pathlib import Path
from types import FrameType
from weakref import finalize

import torch

from onefold.wire.lanes import CALL

RAN_S = 0.05
"""CPU seconds between two looks at a thread, half a second apart, that show that it has run."""

_OWN = str(Path(__file__).parents[1]) + os.sep
_TORCH = str(Path(torch.__file__).parent) + os.sep
_WAIT_FOR_RANKS = (
    "_functional_collectives.py", "distributed_c10d.py", "_collective_utils.py", "_redistribute.py",
)  # fmt: skip
_MODULE_CALL = os.path.join("torch", "nn", "modules", "module.py")
_STANDARD = sysconfig.get_paths()["stdlib"] + os.sep
_INSTALLED = sysconfig.get_paths()["purelib"] + os.sep


class Stacks:
    """Tells which threads wait in a collective of torch, without making objects of their frames.

    CPython 3.11 makes a frame object also of a frame that its thread is clearing, while a tensor's
    destructor has released the lock: the object dangles, and reading it may crash. A thread that
    waits clears nothing, so only such a thread's frames are asked for.

    `faulthandler` says which do, without objects. It reads the states of all threads, and one that
    a thread of autograd or gloo is making, without the lock, has no frames: reading address 8 ended
    a rank of CPython 3.11.7. So it is asked only while none of these threads runs.
    """

    def __init__(self) -> None:
        self._ran_s: dict[int, float] = {}  # CPU time of a thread until the last question
        self._file: int | None = None
        if sys.version_info < (3, 12):
            with tempfile.TemporaryFile() as file:
                self._file = os.dup(file.fileno())
            finalize(self, os.close, self._file).atexit = False  # the thread may still look

    def may_wait(self, thread: int) -> bool:
        """True if the thread is in a collective of torch, or if its frames may be asked for.

        A thread that has run since the last question does not wait: its stack is not looked at.
        """
        clock = getattr(time, "pthread_getcpuclockid", None)  # not on macOS
        if clock is not None:
            ran_s = time.clock_gettime(clock(thread))
            before_s, self._ran_s[thread] = self._ran_s.get(thread, ran_s), ran_s
            if ran_s - before_s > RAN_S:
                return False
        if self._file is None:
            return True
        if native_runs():
            return False
        os.lseek(self._file, 0, os.SEEK_SET)
        os.ftruncate(self._file, 0)
        faulthandler.dump_traceback(self._file, all_threads=True)
        dump = os.pread(self._file, os.fstat(self._file).st_size, 0).decode()
        for part in dump.split("\n\n"):
            head, *calls = part.splitlines()
            if f"0x{thread:016x} " in head:
                paths = (call.split('"')[1] for call in calls if '"' in call)
                inside = takewhile(lambda path: path.startswith(_TORCH), paths)
                return any(path.endswith(_WAIT_FOR_RANKS) for path in inside)
        return False


def native_runs(tasks: Path = Path("/proc/self/task")) -> bool:
    """True if a thread that Python has not started runs, or is to run; False without a /proc."""
    ours = {str(thread.native_id) for thread in threading.enumerate()}
    for task in os.listdir(tasks) if tasks.is_dir() else ():
        if task not in ours:
            with suppress(OSError):  # it has ended
                state = (tasks / task / "stat").read_text().rpartition(")")[2].split()[0]
                if state == "R":
                    return True
    return False


def describe(phase: str, label: str, frame: FrameType | None) -> str:
    """Name a collective by the call that it belongs to."""
    if phase != CALL:
        return f"{'evaluation forward' if phase == 'evaluation' else phase}, {label}"
    called = None
    while frame is not None:  # the outermost function of ours that the user's frame leads to
        if frame.f_code.co_filename.startswith(_OWN):
            called = frame.f_code.co_name.strip("_")
        elif called is not None and not _is_plumbing(frame):
            break
        frame = frame.f_back
    return f"onefold.{called}, {label}" if called else label


def _is_plumbing(frame: FrameType) -> bool:
    return frame.f_code.co_filename.startswith((_TORCH, _STANDARD))


def place_in(frame: FrameType | None) -> str:
    """The line of the user's code that led here: of the loop rather than of a module's forward."""
    own: FrameType | None = None
    installed: FrameType | None = None
    while frame is not None:
        file = frame.f_code.co_filename
        if file.endswith(_MODULE_CALL):
            own = installed = None
        elif file.startswith(_INSTALLED):
            installed = installed or frame
        elif not file.startswith((_OWN, _TORCH, _STANDARD, "<")):
            own = own or frame
        frame = frame.f_back
    chosen = own or installed
    if chosen is None:
        return ""
    file, line = chosen.f_code.co_filename, _line_of(chosen)
    source = linecache.getline(file, line).strip()
    return f", {Path(file).name}:{line}" + (f" `{source}`" if source else "")


def _line_of(frame: FrameType) -> int:
    """The line that a frame is in, or the last one before code that has none.

    The end of an `except ... as error` deletes the name: CPython gives that code no line.
    """
    line: int | None = frame.f_lineno
    lines = [n for start, _, n in frame.f_code.co_lines() if start <= frame.f_lasti and n]
    return line or (lines[-1] if lines else frame.f_code.co_firstlineno)


def is_in_torch_collective(frame: FrameType | None) -> bool:
    """True if torch's innermost call is one that waits for other ranks."""
    while frame is not None and frame.f_code.co_filename.startswith(_TORCH):
        if frame.f_code.co_filename.endswith(_WAIT_FOR_RANKS):
            return True
        frame = frame.f_back
    return False
