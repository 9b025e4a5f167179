"""`onefold meet`: the store where islands meet, on a host that all ranks reach."""

from __future__ import annotations

import argparse
import json
import threading
from collections.abc import Sequence

from onefold.app.cli.arguments import SubParsers, add_json
from onefold.errors import WireError

DESCRIPTION = """\
Run the store where islands meet, until it is stopped. It keeps a few kilobytes for each run of
`onefold.islands`, and outlives the islands: one that ended can join again."""


def add_to(commands: SubParsers) -> None:
    """Add the command's flags."""
    summary = "run the store where islands meet"
    parser = commands.add_parser("meet", help=summary, description=DESCRIPTION)
    parser.set_defaults(run=run)
    parser.add_argument("--port", type=int, default=29400, help="port to listen on; 0: a free one")
    add_json(parser)


def run(arguments: argparse.Namespace, _: Sequence[str]) -> int:
    """Listen until the process is stopped."""
    import torch.distributed as dist

    try:
        store = dist.TCPStore("0.0.0.0", arguments.port, is_master=True, wait_for_workers=False)
    except (RuntimeError, ValueError, OverflowError) as error:
        reason = str(error).splitlines()[0]
        hint = "take another port with --port; 0 takes a free one"
        raise WireError(f"port {arguments.port} to be free", reason, hint=hint) from error
    if arguments.json:
        print(json.dumps({"port": store.port}), flush=True)
    else:
        print(f"islands meet at port {store.port}", flush=True)
    threading.Event().wait()
    return 0
