"""How adam.c becomes a shared library: run while a wheel or an editable install is built.

Only the standard library is imported, as nothing else is there yet (hatch_build.py runs this file).
"""

from __future__ import annotations

import os
import subprocess
import tempfile
import zlib
from collections.abc import Sequence
from pathlib import Path

SOURCE = Path(__file__).with_name("adam.c")

FLAGS = ("-std=c11", "-O3", "-fPIC", "-shared", "-pthread", "-ffp-contract=off", "-fno-math-errno")
"""adam.c says why; nothing for the CPU at hand, as the library itself looks which one it is on."""

TIMEOUT_S = 120


def library_path() -> Path:
    """Where the library is that was compiled from the source as it is now, if it was.

    Its name carries a checksum of source and flags: one from before an edit or an update is not
    found.
    """
    checksum = zlib.crc32(" ".join(FLAGS).encode(), zlib.crc32(SOURCE.read_bytes()))
    return SOURCE.with_name(f"libonefold_adam-{checksum:08x}.so")


def compile_library(compiler: Sequence[str], path: Path) -> str:
    """Compile adam.c to `path`, whole or not at all. Returns why that failed, or nothing."""
    with tempfile.TemporaryDirectory(dir=path.parent, prefix=".compiling_") as folder:
        made = Path(folder, path.name)
        command = [*compiler, *FLAGS, str(SOURCE), "-o", str(made), "-lm"]
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S)
        except (OSError, subprocess.TimeoutExpired) as error:
            return str(error)
        if done.returncode != 0:
            return done.stderr or f"{command[0]} ended with status {done.returncode}"
        os.replace(made, path)  # a process that has the old one loaded keeps it
    return ""
