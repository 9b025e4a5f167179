"""Count Python calls: they do not depend on the load of the machine, as times do."""

from __future__ import annotations

import gc
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from types import CodeType, FrameType

import torch

import onefold

OWN, TORCH = (f"{Path(str(module.__file__)).parent}/" for module in (onefold, torch))


@dataclass(frozen=True)
class Calls:
    """Functions that were called: for each thread, their code in the order of the calls."""

    threads: list[list[CodeType]]

    def within(self, folder: str = "") -> list[list[str]]:
        """Return the files of the functions that lie below a folder, a call each."""
        files = ([code.co_filename for code in codes] for codes in self.threads)
        return [[file for file in called if file.startswith(folder)] for called in files]

    def num_within(self, folder: str = "") -> int:
        """Return how many calls are of functions in files below a folder."""
        return sum(map(len, self.within(folder)))

    def summary(self) -> dict[str, int]:
        """Return calls by owner, own files, and own calls in another file than the one before."""
        own = self.within(OWN)
        num_own, num_torch = self.num_within(OWN), self.num_within(TORCH)
        return {
            "own": num_own,
            "torch": num_torch,
            "others": self.num_within() - num_own - num_torch,
            "own files": len({file for files in own for file in files}),
            "changes of own file": sum(a != b for files in own for a, b in pairwise(files)),
        }


class CallCounter:
    """Counts the calls of the thread that asks, and with `every_thread` those of later threads."""

    def __init__(self, *, every_thread: bool = False) -> None:
        self._local, self._threads = threading.local(), list[list[CodeType]]()
        self._is_counting = False
        if every_thread:
            threading.setprofile(self._note)

    def of(self, work: Callable[[], object]) -> Calls:
        """Call `work` and return its calls; garbage waits, as finalizers are calls, too."""
        self._local, self._threads = threading.local(), []
        gc.collect()
        gc.disable()
        before = sys.getprofile()
        self._is_counting = True
        sys.setprofile(self._note)
        try:
            work()
        finally:
            sys.setprofile(before)
            self._is_counting = False
            gc.enable()
        return Calls(self._threads)

    def _note(self, frame: FrameType, event: str, _: object) -> None:
        if event != "call" or not self._is_counting:
            return
        codes = getattr(self._local, "codes", None)
        if codes is None:
            codes = self._local.codes = []
            self._threads.append(codes)
        codes.append(frame.f_code)
