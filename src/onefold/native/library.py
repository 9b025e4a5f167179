"""The library of the C kernels, where it was compiled: found and loaded.

Each kernel is there once for each instruction set. `onefold_<kernel>_name(index)` names those that
this CPU runs, the fastest first, and NULL after the last; calls take the index.
"""

from __future__ import annotations

import ctypes
from functools import cache
from pathlib import Path

from onefold.native.compiling import library_path


def opened(path: Path) -> ctypes.CDLL | None:
    """A library, or None if there is none that can be loaded."""
    try:
        return ctypes.CDLL(str(path))
    except OSError:
        return None


def names(library: ctypes.CDLL, kernel: str) -> list[str]:
    """Of the instruction sets of a kernel that this CPU runs, the fastest first."""
    name = getattr(library, f"onefold_{kernel}_name", None)
    if name is None:
        return []
    name.restype, name.argtypes = ctypes.c_char_p, [ctypes.c_int]
    found: list[str] = []
    while word := name(len(found)):
        found.append(word.decode())
    return found


@cache
def library() -> ctypes.CDLL | None:
    """The one compiled from the sources that lie here, loaded at the first call."""
    return opened(library_path())
