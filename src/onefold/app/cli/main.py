"""`onefold COMMAND`: find the command, run it, and turn errors into a line and an exit code.

Exit codes: 0 done, 1 failed (a check that found a difference, too), 2 bad input, 130 interrupted,
141 nobody reads the output.
"""

from __future__ import annotations

import os
import signal
import sys
from contextlib import suppress
from typing import TYPE_CHECKING, NoReturn

if TYPE_CHECKING:
    import argparse
    from collections.abc import Sequence

# All other imports follow once interrupts are handled: they take most of a short run.

INTERRUPTED = 130
UNREAD = 141  # 128 + SIGPIPE


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line `argv`, by default this process's; return the exit code."""
    argv = list(sys.argv[1:] if argv is None else argv)
    if "RANK" in os.environ:
        _run_rank(argv)
    before = signal.signal(signal.SIGINT, lambda *_: _end_interrupted(argv))
    try:
        return _run_command(argv)
    except KeyboardInterrupt:  # after the launcher has ended its ranks
        _end_interrupted(argv)
    finally:
        signal.signal(signal.SIGINT, before)


def command() -> NoReturn:
    """Run the console script: `main`, then exit.

    A plan, and a launcher whose ranks have ended, exit without destroying their objects. That takes
    most of a second for torch, and a second more for 70 billion parameters.
    """
    code = main()
    if sys.argv[1:2] in (["train"], ["finetune"], ["check"], ["plan"], ["generate"]):
        _exit_now(code)
    sys.exit(code)


def _run_rank(argv: list[str]) -> NoReturn:
    """Run a rank that a launcher started."""
    # an interrupt ends a rank at once: the launcher prints the message
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    # gloo's threads may still free tensors, which aborts an interpreter that is shutting down
    _exit_now(_run_command(argv))


def _exit_now(code: int) -> NoReturn:
    """Exit without destroying objects."""
    with suppress(OSError, RuntimeError):  # a closed pipe; in the middle of a print
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(code)


def _end_interrupted(argv: list[str]) -> NoReturn:
    """Exit at once: an exception might be caught, or printed, on its way."""
    with suppress(OSError):
        os.write(2, f"{_prog(argv)}: interrupted\n".encode())
    _exit_now(INTERRUPTED)


def _run_command(argv: list[str]) -> int:
    """Run a command until its output is written; return the exit code."""
    from onefold.app.cli.launch import record_failure

    try:
        arguments = _parse(argv)
        # ranks get the flags of config files, and read none
        code = arguments.run(arguments, [*argv[:1], *arguments.words])
        sys.stdout.flush()
    except BrokenPipeError:  # the reader has left, as `head` does
        code = UNREAD
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # for the rest of the output
    except Exception as error:
        return _print_failure(_prog(argv), error)
    if code:
        record_failure(None, code)
    return code


def _prog(argv: list[str]) -> str:
    return " ".join(["onefold", *(word for word in argv[:1] if word[:1] != "-")])


def _parse(argv: list[str]) -> argparse.Namespace:
    from onefold.errors import ConfigError

    arguments, surplus = _parser().parse_known_args(argv)
    if surplus:
        prog = _prog(argv)
        hint = f"`{prog} --help` lists the arguments"
        if "model" in vars(arguments):
            hint = f"a model goes behind its flag: `{prog} --model {surplus[0]}`"
        raise ConfigError("flags with a value each", " ".join(surplus), hint=hint)
    return arguments


def _parser() -> argparse.ArgumentParser:
    import onefold
    from onefold.app.cli import bench, check, doctor, finetune, generate, plan, read_back, train
    from onefold.app.cli.arguments import Parser

    parser = Parser(
        prog="onefold",
        description="Train PyTorch models that do not fit on one GPU: ZeRO 1-3 in one line.",
        epilog="`onefold COMMAND --help` lists the flags of a command.",
    )
    parser.add_argument("--version", action="version", version=f"onefold {onefold.__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", parser_class=Parser)
    parser.set_defaults(run=lambda *_: parser.print_help() or 0)
    for add in (
        train.add_to, finetune.add_to, plan.add_to, check.add_to, generate.add_to,
        read_back.add_report, doctor.add_to, bench.add_to, read_back.add_checkpoints,
    ):  # fmt: skip
        add(commands)
    return parser


def _print_failure(prog: str, error: Exception) -> int:
    """Print an error; return the exit code."""
    from traceback import print_exception

    from onefold.app.cli.arguments import one_line
    from onefold.app.cli.launch import record_failure
    from onefold.errors import ConfigError, OnefoldError

    code = 2 if isinstance(error, ConfigError) else 1
    if record_failure(error, code):
        return code  # the launcher speaks for all ranks
    if not isinstance(error, OnefoldError):
        print_exception(error)
    elif code == 1 or os.environ.get("LOCAL_RANK", "0") == "0":  # bad input is bad on every rank
        print(f"{prog}: {one_line(error)}", file=sys.stderr)
    return code
