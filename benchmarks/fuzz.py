"""Fuzz the readers of checkpoints and weight files: any bytes are accepted or a `CheckpointError`.

    python benchmarks/fuzz.py --inputs 1000 --seed 1             a mutator of our own
    python benchmarks/fuzz.py --inputs 1000 --atheris --only json     libFuzzer, guided by coverage

Every input has 5 seconds and 8 GiB of addresses. An input that ends otherwise is written to
`--keep` and printed. Readers: header, json, manifest, safetensors; and `onefold.load` of a
checkpoint whose JSON or data changed, with checksums that are right. Each reader gets
`--inputs`, in a process of its own, so a crash is counted too. `--record` adds a run for each
reader to a file in `results`.
"""

from __future__ import annotations

import argparse
import os
import random
import resource
import shutil
import signal
import sys
import time
import warnings
import zlib
from collections.abc import Callable
from dataclasses import replace
from importlib import import_module
from mmap import mmap
from pathlib import Path
from tempfile import TemporaryDirectory
from types import FunctionType
from typing import Any

import torch
from contest.results import append_run

import onefold
from onefold.checkpoint import directory, listing, safetensors, tagged
from onefold.checkpoint.checked_files import BLOCK_NBYTES, FileRecord
from onefold.checkpoint.directory import find, read_manifest
from onefold.checkpoint.listing import read_listing
from onefold.checkpoint.safetensors import SUFFIX, PretrainedFiles
from onefold.checkpoint.source import open_source
from onefold.errors import CheckpointError

LIMIT_S, LIMIT_NBYTES = 5, 8 << 30
NUMBERS = (0, 1, 0x7F, 0x80, 0xFF, 0x7FFFFFFF, 0xFFFFFFFF, 1 << 62, (1 << 64) - 1)

Read = Callable[[bytes], object]


def readers(folder: Path) -> dict[str, tuple[bytes, Read]]:
    """Return, for each reader, good bytes and a call that reads others."""
    module = torch.nn.Sequential(torch.nn.Linear(16, 16), torch.nn.Linear(16, 2))
    optimizer = torch.optim.AdamW(module.parameters())
    onefold.shard(module, optimizer)
    module(torch.ones(2, 16)).sum().backward()
    optimizer.step()
    onefold.save(folder / "run", module, optimizer, extra={"step": 1, "names": ["a", "b"]})
    onefold.save_pretrained(module, folder / "weights")
    source = open_source(find(folder / "run")[0])
    good = source.manifest
    assert good is not None, "onefold.save writes one"
    changed = folder / "changed"
    changed.mkdir()
    names = {"data": f"rank-00000{SUFFIX}", "json": "rank-00000.json"}
    data, document = ((folder / "run" / name).read_bytes() for name in names.values())

    def manifest(body: bytes) -> object:
        head = f'{{"crc32":"{zlib.crc32(body):08x}","manifest":\n'.encode()
        (changed / "manifest.json").write_bytes(head + body + b"}\n")
        return read_manifest(changed)

    def weights(file: bytes) -> object:
        (changed / "model.safetensors").write_bytes(file)
        files = PretrainedFiles(changed)
        return [
            files.box(name, ((0,) * len(s), s)) for name in files.places if (s := files.shape(name))
        ]

    def replaced(name: str, path: Path, data: bytes) -> dict[str, FileRecord]:
        blocks = (data[at : at + BLOCK_NBYTES] for at in range(0, len(data), BLOCK_NBYTES))
        length = min(len(data), 8 + int.from_bytes(data[:8], "little"))
        head = f"{length}:{zlib.crc32(data[:length]):08x}"
        record = FileRecord(len(data), "".join(f"{zlib.crc32(b):08x}" for b in blocks), head)
        (path / name).write_bytes(data)
        return {**source.files, name: record}

    def reading(kind: str, *, loads: bool) -> Read:
        path = folder / f"{kind}-{loads}"
        shutil.copytree(folder / "run", path)

        def read(data: bytes) -> object:
            files = replaced(names[kind], path, data)
            if not loads:
                return read_listing(path, files, 1)
            (path / "manifest.json").write_bytes(replace(good, files=files).encode())
            return onefold.load(path, module, optimizer)

        return read

    body = (folder / "run" / "manifest.json").read_bytes().partition(b"\n")[2].removesuffix(b"}\n")
    return {
        "header": (data, reading("data", loads=False)),
        "json": (document, reading("json", loads=False)),
        "manifest": (body, manifest),
        "load json": (document, reading("json", loads=True)),
        "load data": (data, reading("data", loads=True)),
        "safetensors": ((folder / "weights" / "model.safetensors").read_bytes(), weights),
    }


def mutated(good: bytes, draw: random.Random) -> bytes:
    """Change a few bytes: flip, insert, delete, copy, cut, or write a number."""
    data = bytearray(good)
    for _ in range(draw.choice((1, 1, 1, 2, 4, 16))):
        at = draw.randrange(len(data) + 1) if draw.random() < 0.5 else draw.randrange(
            min(len(data), 600) + 1
        )  # fmt: skip
        end = min(len(data), at + draw.choice((1, 1, 2, 4, 8, 64)))
        kind = draw.randrange(7)
        if kind == 0 and at < len(data):
            data[at] ^= 1 << draw.randrange(8)
        elif kind == 1:
            data[at:end] = draw.randbytes(end - at)
        elif kind == 2:
            del data[at:end]
        elif kind == 3:
            data[at:at] = draw.randbytes(draw.choice((1, 2, 8)))
        elif kind == 4:
            other = draw.randrange(len(data) + 1)
            data[at:end] = data[other : other + draw.choice((1, 8, 64))]
        elif kind == 5:
            size = draw.choice((1, 2, 4, 8))
            number = draw.choice(NUMBERS) & ((1 << 8 * size) - 1)
            data[at : at + size] = number.to_bytes(size, draw.choice(("little", "big")))
        else:
            del data[draw.randrange(len(data) + 1) :]
    return bytes(data)


class Tally:
    """Counts how inputs ended, in memory that the parent of a process can read."""

    ENDS = ("accepted", "refused", "wrong", "slowest_ms")

    def __init__(self) -> None:
        self._memory = memoryview(mmap(-1, 8 * len(self.ENDS))).cast("Q")

    def add(self, end: str, seconds: float) -> None:
        """Count one input."""
        self._memory[self.ENDS.index(end)] += 1
        self._memory[-1] = max(self._memory[-1], round(seconds * 1e3))

    @property
    def counts(self) -> dict[str, int]:
        """Counts by end, and the milliseconds of the slowest input."""
        return dict(zip(self.ENDS, self._memory, strict=True))


class Attempts:
    """Reads inputs with one reader, counts their ends, and keeps the wrong ones."""

    def __init__(self, name: str, read: Read, keep: Path, tally: Tally) -> None:
        self._name, self._read, self._keep, self._tally = name, read, keep, tally

    def __call__(self, data: bytes) -> None:
        began = time.monotonic()
        end = attempt(self._read, data)
        is_right = end in ("accepted", "refused")
        self._tally.add(end if is_right else "wrong", time.monotonic() - began)
        if not is_right:
            self._keep.mkdir(exist_ok=True)
            path = self._keep / f"{self._name.replace(' ', '-')}-{zlib.crc32(data):08x}"
            path.write_bytes(data)
            print(f"{path}: {end}", flush=True)


def attempt(read: Read, data: bytes) -> str:
    """Read one input; return "accepted", "refused", or what went wrong."""
    signal.alarm(LIMIT_S)
    try:
        read(data)
    except CheckpointError:
        return "refused"
    except BaseException as error:
        return f"{type(error).__name__}: {str(error)[:200]}"
    finally:
        signal.alarm(0)
    return "accepted"


def late(*_: object) -> None:
    raise TimeoutError(f"longer than {LIMIT_S} s")


def with_atheris(good: bytes, inputs: int, seed: int, attempts: Attempts) -> None:
    """Let libFuzzer find inputs from a good one; it ends the process."""
    atheris: Any = import_module("atheris")
    for module in (listing, tagged, directory, safetensors):
        for value in vars(module).values():
            if isinstance(value, FunctionType) and value.__module__ == module.__name__:
                atheris.instrument_func(value)
    with TemporaryDirectory() as corpus:
        Path(corpus, "good").write_bytes(good)
        limits = f"-max_len={2 * len(good)}", "-handle_alrm=0"
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # its progress
        atheris.Setup([sys.argv[0], f"-runs={inputs}", f"-seed={seed}", *limits, corpus], attempts)
        atheris.Fuzz()


def fuzz(good: bytes, attempts: Attempts, arguments: argparse.Namespace) -> None:
    """In a child: read inputs, within a limit of memory."""
    signal.signal(signal.SIGALRM, late)
    resource.setrlimit(resource.RLIMIT_AS, (LIMIT_NBYTES, LIMIT_NBYTES))
    if arguments.atheris:
        with_atheris(good, arguments.inputs, arguments.seed, attempts)
    draw = random.Random(arguments.seed)
    for _ in range(arguments.inputs):
        attempts(mutated(good, draw))


def main() -> int:
    """Fuzz each reader; exit 1 if an input went wrong or a process crashed."""
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("--inputs", type=int, default=1000, help="for each reader")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--only", nargs="*", default=[], help="names of readers")
    parser.add_argument("--keep", type=Path, default=Path("fuzzed"))
    parser.add_argument("--atheris", action="store_true", help="guided by coverage")
    parser.add_argument("--record", default="", help="name of a file in results")
    arguments = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    wrong = 0
    with TemporaryDirectory(dir="/dev/shm" if Path("/dev/shm").is_dir() else None) as folder:
        for name, (good, read) in readers(Path(folder)).items():
            if arguments.only and name not in arguments.only:
                continue
            tally, began = Tally(), time.monotonic()
            child = os.fork()
            if child == 0:
                fuzz(good, Attempts(name, read, arguments.keep, tally), arguments)
                os._exit(0)
            code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
            counts = tally.counts
            inputs = sum(counts.values()) - counts["slowest_ms"]
            wrong += counts["wrong"] + bool(code)
            run = {"reader": name, "by": "atheris" if arguments.atheris else "mutator"}
            run |= {"seed": arguments.seed, "inputs": inputs, **counts, "exit_code": code}
            print(run, f"{time.monotonic() - began:.0f} s", flush=True)
            if arguments.record:
                append_run(arguments.record, run)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
