"""`onefold meet`: the store where islands meet, on a host that all ranks reach."""

from __future__ import annotations

import argparse
import sys
import threading
from collections.abc import Sequence

from onefold.app.cli.arguments import SubParsers, add_command, natural, print_result
from onefold.errors import WireError

DESCRIPTION = """\
Run the store where islands meet, until it is stopped. It keeps a few kilobytes for each run of
`onefold.islands`, and outlives the islands: one that ended can join again."""


def add_to(commands: SubParsers) -> None:
    """Add the command's flags."""
    add = add_command(commands, "meet", run, "run the store where islands meet", DESCRIPTION)
    add("--port", type=natural, default=29400, help="port to listen on; 0: a free one")


def run(arguments: argparse.Namespace, _: Sequence[str]) -> int:
    """Listen until the process is stopped."""
    import torch.distributed as dist

    try:
        store = dist.TCPStore("0.0.0.0", arguments.port, is_master=True, wait_for_workers=False)
    except (RuntimeError, ValueError, OverflowError) as error:
        reason = str(error).splitlines()[0]
        hint = "take another port with --port; 0 takes a free one"
        raise WireError(f"port {arguments.port} to be free", reason, hint=hint) from error
    print_result(arguments, {"port": store.port}, [f"islands meet at port {store.port}"])
    sys.stdout.flush()
    threading.Event().wait()
    return 0
