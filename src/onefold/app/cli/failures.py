"""Report a rank's failure to the user.

Ranks of our launcher print no errors. Each writes its error to the file that torch's elastic agent
names, and the launcher prints the error that caused the others.
"""

from __future__ import annotations

import json
import os
import sys
import time
import traceback
from dataclasses import asdict, dataclass
from pathlib import Path
from signal import SIGKILL, SIGTERM, Signals

from onefold.app.cli.arguments import one_line
from onefold.errors import OnefoldError, WireError

LAUNCHER = "ONEFOLD_LAUNCHER_PID"
"""Environment variable with the process number of our launcher."""


def is_rank() -> bool:
    """True in a process that a launcher started: ours, or any that sets torch's variables."""
    return "RANK" in os.environ or os.environ.get("WORLD_SIZE", "") not in ("", "1")


@dataclass(frozen=True, slots=True)
class RankFailure:
    """The failure of a rank. `is_echo`: a failed peer caused it."""

    rank: int
    code: int
    line: str  # empty: the rank has printed it
    trace: str  # of errors that are not ours
    is_echo: bool


def record_failure(error: BaseException | None, code: int) -> bool:
    """Write a rank's failure for our launcher; return False if another one started the rank.

    Without an error, the command has printed its findings, as a failed check.
    """
    path = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if "RANK" not in os.environ or LAUNCHER not in os.environ or not path:
        return False
    is_ours = error is None or isinstance(error, OnefoldError)
    line = "" if error is None else one_line(error)
    failure = RankFailure(
        rank=int(os.environ["RANK"]),
        code=code,
        line=line if is_ours else f"{type(error).__name__}: {line}",
        trace="" if is_ours else "".join(traceback.format_exception(error)),
        is_echo=isinstance(error, WireError) or "gloo" in str(error) or "NCCL" in str(error),
    )
    now = {"timestamp": str(int(time.time())), "py_callstack": failure.trace}
    error_file = {"message": {"message": failure.line, "extraInfo": now}}  # torch's format
    Path(path).write_text(json.dumps({**error_file, "onefold": asdict(failure)}))
    return True


def print_failure(prog: str, folder: str, exit_codes: dict[int, int]) -> int:
    """Print the failure that caused the others; return its exit code.

    `folder` holds the ranks' files. `exit_codes` are negative where a signal ended the rank.
    """
    killed = {rank: -code for rank, code in exit_codes.items() if code < 0 and -code != SIGTERM}
    failures = [
        RankFailure(**found["onefold"])
        for path in Path(folder).rglob("error.json")
        if "onefold" in (found := json.loads(path.read_text()))
    ]
    failures.sort(key=lambda failure: (failure.is_echo, -failure.code, failure.rank))
    if failures and not (failures[0].is_echo and killed):
        first = failures[0]
        if not first.line:
            return first.code
        leave_line()
        where = "" if first.code == 2 else f"rank {first.rank}: "  # bad input is bad on all ranks
        print(f"{first.trace}{prog}: {where}{first.line}", file=sys.stderr)
        return first.code
    leave_line()
    rank, code = next(iter((killed or exit_codes).items()))
    ending = f"by {Signals(code).name}" if killed else f"with exit code {code}"
    hint = " (hint: the system may be out of memory)" if code == SIGKILL else ""
    print(f"{prog}: expected every rank to finish, rank {rank} ended {ending}{hint}",
          file=sys.stderr)  # fmt: skip
    return 1


def leave_line() -> None:
    """Show the cursor again, below the progress bar of a killed rank."""
    if sys.stderr.isatty():
        print("\x1b[?25h", file=sys.stderr)
