"""Compile the simulated device, once for each version of its source and of torch."""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
import subprocess
import sysconfig
from functools import cache
from pathlib import Path

import torch
from torch.utils.cpp_extension import include_paths, library_paths

SOURCE = Path(__file__).with_name("device.cpp")
FOLDER = Path(__file__).parents[2] / "build" / "sim"
# -O1: kernels are torch's own, and the compiler takes long for torch's headers as it is
FLAGS = ("-std=c++20", "-O1", "-fPIC", "-shared", "-w", "-DTORCH_EXTENSION_NAME=device")
LIBRARIES = ("torch", "torch_cpu", "torch_python", "c10")


def missing() -> str | None:
    """What is missing to compile it; None if nothing is."""
    if _compiler() is None:
        return "a C++ compiler (CXX, c++ or g++)"
    if not (Path(sysconfig.get_paths()["include"]) / "Python.h").exists():
        return "Python.h (the headers of this Python)"
    return None


@cache
def built() -> Path:
    """The compiled device. Other processes that want it at the same time wait for the first."""
    compiler = _compiler()
    command = [str(compiler), *FLAGS, *(f"-I{path}" for path in _includes()), str(SOURCE)]
    command += [f"-L{path}" for path in library_paths()]
    command += [f"-Wl,-rpath,{path}" for path in library_paths()]
    command += [f"-l{name}" for name in LIBRARIES]
    facts = (torch.__version__, sysconfig.get_platform(), *command)
    digest = hashlib.sha256(SOURCE.read_bytes() + repr(facts).encode()).hexdigest()[:16]
    library = FOLDER / digest / "device.so"
    if library.exists():
        return library
    library.parent.mkdir(parents=True, exist_ok=True)
    with (FOLDER / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not library.exists():
            part = library.with_suffix(".part")
            run = subprocess.run([*command, "-o", str(part)], capture_output=True, text=True)
            assert run.returncode == 0, run.stderr[-4000:]
            part.rename(library)
            for old in FOLDER.iterdir():
                if old.is_dir() and old != library.parent:
                    shutil.rmtree(old)
    return library


def _compiler() -> str | None:
    named = (os.environ.get("CXX"), "c++", "g++")
    return next((found for name in named if name and (found := shutil.which(name))), None)


def _includes() -> list[str]:
    return [*include_paths(), sysconfig.get_paths()["include"]]
