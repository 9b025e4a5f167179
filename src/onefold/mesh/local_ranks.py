"""Short-lived ranks on this machine for a measurement, from whatever process asks for one."""

from __future__ import annotations

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

ASKED, TOLD, FAILED = "asked.json", "told.json", "failed.txt"
STARTED_BY = "ONEFOLD_STARTED_BY"
"""Environment variable with the number of the process that a rank ends with."""
LIMIT_S = 300


def run_local(
    entry: str, asked: Mapping[str, Any], *, ranks: int, threads: int, folder: Path | None = None
) -> dict[str, Any]:
    """Call `entry` ("module:function") with a folder in fresh CPU ranks; what rank 0 left there.

    The function reads `ASKED` and writes `TOLD`; a rank that cannot writes why to `FAILED`, which
    is raised here as `ConfigError`. `folder` is that of files that `asked` speaks of.
    """
    with tempfile.TemporaryDirectory(prefix="onefold_", dir=folder) as name:
        Path(name, ASKED).write_text(json.dumps(asked))
        module, _, function = entry.partition(":")
        code = f"import sys; from {module} import {function}; sys.exit({function}(sys.argv[1]))"
        command = [sys.executable, "-P", "-c", code, name]
        with Path(name, "stderr").open("w") as stderr:
            started = [
                subprocess.Popen(command, env=each, stdout=stderr, stderr=stderr)
                for each in _environments(ranks, threads)
            ]
            try:
                _await(started)
            finally:
                for process in started:
                    process.kill()
                    process.wait()
        told = Path(name, TOLD)
        if not told.exists():
            raise ConfigError(_why(Path(name), ranks))
        return json.loads(told.read_text())


def end_with(pid: int) -> None:
    """Have this process end when its parent, which is `pid`, is gone, however that was."""

    def watch() -> None:
        while os.getppid() == pid:
            time.sleep(1)
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


def end_with_starter() -> None:
    """Have a rank of `run_local` end with whoever waits for what it tells."""
    if STARTED_BY in os.environ:
        end_with(int(os.environ[STARTED_BY]))


def _await(started: list[subprocess.Popen[bytes]]) -> None:
    """Until all have ended well, or one has not: the others would wait for it."""
    deadline = time.monotonic() + LIMIT_S
    while time.monotonic() < deadline:
        codes = [process.poll() for process in started]
        if any(codes) or None not in codes:
            return
        time.sleep(0.05)


def _why(folder: Path, ranks: int) -> str:
    failed = folder / FAILED
    if failed.exists():
        return failed.read_text()
    lines = (folder / "stderr").read_text().strip().splitlines()
    got = lines[-1] if lines else f"none within {LIMIT_S} s"
    hint = "the model must fit into memory once for each rank; a smaller one tells rates as well"
    return expected(f"{ranks} ranks of a calibration to end well", got, hint=hint)


def _environments(ranks: int, threads: int) -> list[dict[str, str]]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    common = {
        **os.environ, "WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(ranks),
        "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "OMP_NUM_THREADS": str(threads),
        "CUDA_VISIBLE_DEVICES": "", STARTED_BY: str(os.getpid()),
    }  # fmt: skip
    loopback = [name for _, name in socket.if_nameindex() if name in ("lo", "lo0")]
    if loopback:
        common.setdefault("GLOO_SOCKET_IFNAME", loopback[0])
    return [{**common, "RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(ranks)]
