"""Find and load the library of the C kernels, where it was compiled, and list its kernels.

Each kernel is there once for each instruction set. `onefold_<kernel>_name(index)` names those that
this CPU runs, the fastest first, and NULL after the last; calls take the index.
"""

import ctypes
from functools import cache
from pathlib import Path
from typing import Any, ClassVar, Self

from onefold.wire.kernels.compiling import library_path


@cache
def library(path: Path | None = None) -> ctypes.CDLL | None:
    """The library at `path`, by default the one of these sources; None if none can be loaded."""
    try:
        return ctypes.CDLL(str(path or library_path()))
    except OSError:
        return None


class Kernel:
    """One kernel of the library, compiled for one instruction set."""

    word: ClassVar[str]  # of its functions: onefold_<word>_name

    def __init__(self, library: ctypes.CDLL, index: int, name: str) -> None:
        self.name = name  # of the instruction set
        self._library = library
        self._index = index

    def _function(self, name: str, *arguments: Any) -> Any:
        """A function of the library, which takes the kernel's index and then `arguments`."""
        call = getattr(self._library, name)
        call.restype, call.argtypes = None, [ctypes.c_int, *arguments]
        return call

    @classmethod
    def offered_by(cls, library: ctypes.CDLL | None) -> list[Self]:
        """Those of a library that this CPU runs, the fastest first."""
        name = getattr(library, f"onefold_{cls.word}_name", None)
        if library is None or name is None:
            return []
        name.restype, name.argtypes = ctypes.c_char_p, [ctypes.c_int]
        kernels: list[Self] = []
        while word := name(len(kernels)):
            kernels.append(cls(library, len(kernels), word.decode()))
        return kernels

    @classmethod
    def fastest(cls) -> Self | None:
        """The one to use, if there is one."""
        return next(iter(cls.offered_by(library())), None)
