"""How a rank's failure reaches the user.

Ranks that our launcher started print no errors: each leaves what it raised in the file that torch's
elastic agent names, and the launcher prints the one that the others follow from.
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

from onefold.cli.arguments import one_line
from onefold.errors import OnefoldError, WireError

LAUNCHER = "ONEFOLD_LAUNCHER_PID"
"""Environment variable by which our launcher makes itself known to its ranks."""


def is_rank() -> bool:
    """True in a process that a launcher started, ours or torchrun."""
    return "RANK" in os.environ


@dataclass(frozen=True, slots=True)
class Failure:
    """What a rank left behind. `is_echo`: it failed because a peer had."""

    rank: int
    code: int
    line: str  # empty: the rank has said it itself
    trace: str  # of what is not an error of ours
    is_echo: bool


def record_failure(error: BaseException | None, code: int) -> bool:
    """Leave a rank's failure to the launcher that started it; False if that is not ours.

    None is a command that found what it looked for, and has said so.
    """
    path = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if not is_rank() or LAUNCHER not in os.environ or not path:
        return False
    is_ours = error is None or isinstance(error, OnefoldError | BrokenPipeError)
    line = "" if error is None else one_line(error)
    failure = Failure(
        rank=int(os.environ["RANK"]),
        code=code,
        line=line if is_ours else f"{type(error).__name__}: {line}",
        trace="" if is_ours else "".join(traceback.format_exception(error)),
        is_echo=isinstance(error, WireError) or "gloo" in str(error) or "NCCL" in str(error),
    )
    now = {"timestamp": str(int(time.time())), "py_callstack": failure.trace}
    told = {"message": {"message": failure.line, "extraInfo": now}, "onefold": asdict(failure)}
    Path(path).write_text(json.dumps(told))  # in the form that torch reads
    return True


def tell(prog: str, folder: str, exit_codes: dict[int, int]) -> int:
    """Print the failure that the others follow from; the exit code.

    `folder` holds the ranks' files; `exit_codes` are those of ranks that ended, negative: a signal.
    """
    killed = {rank: -code for rank, code in exit_codes.items() if code < 0 and -code != SIGTERM}
    failures = [
        Failure(**told["onefold"])
        for path in Path(folder).rglob("error.json")
        if "onefold" in (told := json.loads(path.read_text()))
    ]
    failures.sort(key=lambda failure: (failure.is_echo, -failure.code, failure.rank))
    if failures and not (failures[0].is_echo and killed):
        first = failures[0]
        if not first.line:
            return first.code
        leave_line()
        where = "" if first.code == 2 else f"rank {first.rank}: "
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
    """Give the terminal its cursor back, below a bar that a killed rank has left."""
    if sys.stderr.isatty():
        print("\x1b[?25h", file=sys.stderr)
