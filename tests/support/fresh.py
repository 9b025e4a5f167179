"""Scripts whose interpreter ends as a user's does: forks of one process that is no test's.

It has imported torch and Onefold, three seconds of a core, once for all scripts. A fork of the
tests' own process could not end so: it would end what pytest began.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from tests.support.forking import HANG_S

START = """
import json, os, signal, sys
import torch, torch._dynamo, onefold.api
folder, timeout_s, count = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
codes = []
for number in range(count):
    pid = os.fork()
    if pid == 0:
        break
    codes.append(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
else:
    open(f"{folder}/codes", "w").write(json.dumps(codes))
    os._exit(0)
signal.alarm(timeout_s)
for stream, name in ((1, "out"), (2, "err")):
    os.dup2(os.open(f"{folder}/{number}.{name}", os.O_CREAT | os.O_WRONLY), stream)
exec(compile(open(f"{folder}/{number}.py").read(), f"{number}.py", "exec"))
"""


def run_scripts(scripts: Sequence[str]) -> list[subprocess.CompletedProcess[str]]:
    """Each script in `__main__` of a process of its own, up to its end; in order."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for number, script in enumerate(scripts):
            (folder / f"{number}.py").write_text(script)
        command = [sys.executable, "-c", START, name, str(int(HANG_S)), str(len(scripts))]
        subprocess.run(command, check=True, timeout=HANG_S * (1 + len(scripts)))
        codes = json.loads((folder / "codes").read_text())
        return [
            subprocess.CompletedProcess(
                script, code, *((folder / f"{number}.{end}").read_text() for end in ("out", "err"))
            )
            for number, (script, code) in enumerate(zip(scripts, codes, strict=True))
        ]
