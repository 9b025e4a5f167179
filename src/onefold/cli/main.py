"""`onefold COMMAND`: finds the command, runs it, turns what it raises into a line and an exit code.

Exit codes: 0 done, 1 failed (a check that found a difference, too), 2 bad input, 130 interrupted.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
import traceback
from collections.abc import Sequence
from contextlib import suppress

import onefold
from onefold.cli import check, doctor, train
from onefold.cli.arguments import Parser, one_line
from onefold.cli.failures import INTERRUPTED, is_rank, record_failure
from onefold.errors import ConfigError, OnefoldError, expected

COMMANDS = {"train": train, "check": check, "doctor": doctor}


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line `argv`; default that of this process. Returns the exit code."""
    argv = list(sys.argv[1:] if argv is None else argv)
    if not is_rank():
        return _run(argv)
    # an interrupt ends a rank at once: whoever launched it says what there is to say
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    code = _run(argv)
    with suppress(OSError):  # a pipe that nobody reads any more
        sys.stdout.flush()
        sys.stderr.flush()
    # gloo's threads may still let go of tensors, which aborts an interpreter that is shutting down
    os._exit(code)


def _run(argv: list[str]) -> int:
    named = [name for name in argv[:1] if name in COMMANDS]
    prog = " ".join(["onefold", *named])
    try:
        arguments, unknown = _parser().parse_known_args(argv)
        if unknown:
            hint = f"`{prog} --help` lists the flags"
            raise ConfigError(expected("flags that it has", " ".join(unknown), hint=hint))
        code = arguments.run(arguments, argv)
    except (Exception, KeyboardInterrupt) as error:
        return _failed(prog, error)
    if code:
        record_failure(None, code)
    return code


def _parser() -> argparse.ArgumentParser:
    parser = Parser(
        prog="onefold",
        description="Every training state exactly once: ZeRO stages 0-3 for plain PyTorch scripts.",
        epilog="`onefold COMMAND --help` lists the flags of a command.",
    )
    parser.add_argument("--version", action="version", version=f"onefold {onefold.__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", parser_class=Parser)
    parser.set_defaults(run=lambda *_: parser.print_help() or 0)
    for command in COMMANDS.values():
        command.add_to(commands)
    return parser


def _failed(prog: str, error: BaseException) -> int:
    """Say what went wrong; the exit code."""
    if isinstance(error, KeyboardInterrupt):
        print(f"{prog}: interrupted", file=sys.stderr)
        return INTERRUPTED
    code = 2 if isinstance(error, ConfigError) else 1
    if record_failure(error, code):
        return code  # the launcher speaks for all ranks
    if not isinstance(error, OnefoldError):
        traceback.print_exception(error)
        return code
    if code == 1 or os.environ.get("LOCAL_RANK", "0") == "0":  # bad input is bad on every rank
        print(f"{prog}: {one_line(error)}", file=sys.stderr)
    return code
