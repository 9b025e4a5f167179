"""How the C files become a shared library: run while a wheel or an editable install is built.

Only the standard library is imported, as nothing else is there yet (hatch_build.py runs this file).
"""

import os
import subprocess
import tempfile
import zlib
from collections.abc import Sequence
from pathlib import Path

FOLDER = Path(__file__).parent

WIDTH, TAIL = 32, 4.0  # of the rotation (wire/codec.py)
MAX_GROUP = 4096  # elements that share a scale
LARGEST_INT8, LARGEST_INT4, SMALLEST_SCALE = 127.0, 7.0, 2.0**-126  # see wire/codec.py

NUMBERS = {
    "WIDTH": f"{WIDTH}", "TAIL": f"{TAIL}f", "MAX_GROUP": f"{MAX_GROUP}",
    "LARGEST_INT8": f"{LARGEST_INT8}f", "LARGEST_INT4": f"{LARGEST_INT4}f",
    "SMALLEST_SCALE": f"{SMALLEST_SCALE}f",
}  # fmt: skip
"""Numbers that C and torch compute with: the sources get them from here."""

FLAGS = (
    "-std=c11", "-O3", "-fPIC", "-shared", "-pthread", "-ffp-contract=off", "-fno-math-errno",
    *(f"-D{name}={value}" for name, value in NUMBERS.items()),
)  # fmt: skip
"""The sources say why; nothing for the CPU at hand: the library itself looks which one it is on."""

TIMEOUT_S = 120


def library_path() -> Path:
    """Where the library is that was compiled from the sources as they are now, if it was.

    Its name carries a checksum of sources and flags: one from before an edit or an update is not
    found.
    """
    checksum = zlib.crc32(" ".join(FLAGS).encode())
    for source in sorted(FOLDER.glob("*.[ch]")):
        checksum = zlib.crc32(source.read_bytes(), checksum)
    return FOLDER / f"libonefold-{checksum:08x}.so"


def compile_library(compiler: Sequence[str], path: Path) -> str:
    """Compile the sources to `path`, whole or not at all. Returns why that failed, or nothing."""
    sources = [str(source) for source in sorted(FOLDER.glob("*.c"))]
    with tempfile.TemporaryDirectory(dir=path.parent, prefix=".compiling_") as folder:
        library = Path(folder, path.name)
        command = [*compiler, *FLAGS, *sources, "-o", str(library), "-lm"]
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S)
        except (OSError, subprocess.TimeoutExpired) as error:
            return str(error)
        if done.returncode != 0:
            return done.stderr or f"{command[0]} ended with status {done.returncode}"
        os.replace(library, path)  # a process that has the old one loaded keeps it
    return ""
