"""Start short-lived CPU ranks on this machine for a measurement."""

import json
import os
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from onefold.errors import ConfigError, expected
from onefold.wire.interfaces import loopback

ASKED, ANSWER, FAILED = "asked.json", "answer.json", "failed.txt"
STARTED_BY = "ONEFOLD_STARTED_BY"
"""Environment variable with the number of the process whose end ends the rank."""
LIMIT_S = 300


def run_local(entry: str, asked: Mapping[str, Any], *, ranks: int, threads: int) -> dict[str, Any]:
    """Call `entry` ("module:function") in fresh CPU ranks; return the answer of rank 0.

    The function gets a folder, reads `ASKED` there and writes `ANSWER`. A rank that cannot writes
    the reason to `FAILED`, which is raised here as `ConfigError`.
    """
    with tempfile.TemporaryDirectory(prefix="onefold_") as name:
        folder = Path(name)
        (folder / ASKED).write_text(json.dumps(asked))
        module, _, function = entry.partition(":")
        code = f"import sys; from {module} import {function}; sys.exit({function}(sys.argv[1]))"
        command = [sys.executable, "-P", "-c", code, name]
        with (folder / "stderr").open("w") as stderr:
            started = [
                subprocess.Popen(command, env=environment, stdout=stderr, stderr=stderr)
                for environment in _environments(ranks, threads)
            ]
            try:
                _await(started)
            finally:
                for process in started:
                    process.kill()
                    process.wait()
        if not (folder / ANSWER).exists():
            raise ConfigError(_reason(folder, ranks))
        return json.loads((folder / ANSWER).read_text())


def end_with(pid: int) -> None:
    """End this process once its parent `pid` is gone."""

    def watch() -> None:
        while os.getppid() == pid:
            time.sleep(1)
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


def end_with_starter() -> None:
    """End a rank of `run_local` once the process that started it is gone."""
    if STARTED_BY in os.environ:
        end_with(int(os.environ[STARTED_BY]))


def _await(started: list[subprocess.Popen[bytes]]) -> None:
    """Wait until all ranks have succeeded or one has failed, for which the others would wait."""
    deadline = time.monotonic() + LIMIT_S
    while time.monotonic() < deadline:
        codes = [process.poll() for process in started]
        if any(codes) or None not in codes:
            return
        time.sleep(0.05)


def _reason(folder: Path, ranks: int) -> str:
    failed = folder / FAILED
    if failed.exists():
        return failed.read_text()
    lines = (folder / "stderr").read_text().strip().splitlines()
    got = lines[-1] if lines else f"none within {LIMIT_S} s"
    hint = "the model must fit into memory once for each rank; a smaller one gives rates as well"
    return expected(f"{ranks} ranks of a calibration to end well", got, hint=hint)


def _environments(ranks: int, threads: int) -> list[dict[str, str]]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    common = {
        **loopback(), **os.environ, "WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(ranks),
        "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "OMP_NUM_THREADS": str(threads),
        "CUDA_VISIBLE_DEVICES": "", STARTED_BY: str(os.getpid()),
    }  # fmt: skip
    return [{**common, "RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(ranks)]
