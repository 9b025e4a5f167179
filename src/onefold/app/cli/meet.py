"""`onefold meet`: the store where islands meet, on a host that all ranks reach."""

import argparse
import os
import sys
import threading
from collections.abc import Sequence

from onefold.app.cli.arguments import SubParsers, add_command, natural, print_result
from onefold.errors import ConfigError, WireError

DESCRIPTION = """\
Run the store where islands meet, until it is stopped. It keeps a few kilobytes for each run of
`onefold.islands`, and outlives the islands: one that ended can join again. It listens at --host
alone. Where that is no address of this host alone, ONEFOLD_SECRET must be set: only ranks with the
same one reach the store.

  ONEFOLD_SECRET=... onefold meet --host 10.0.0.1"""


def add_to(commands: SubParsers) -> None:
    """Add the command's flags."""
    add = add_command(commands, "meet", run, "run the store where islands meet", DESCRIPTION)
    add("--host", default="127.0.0.1", help="address to listen at, one of this host")
    add("--port", type=natural, default=29400, help="port to listen on; 0: a free one")


def run(arguments: argparse.Namespace, _: Sequence[str]) -> int:
    """Listen until the process is stopped."""
    from onefold.outer.gate import SECRET, open_store

    host = arguments.host
    if not host.startswith("127.") and not os.environ.get(SECRET):
        hint = f"{SECRET}=... onefold meet --host {host}, and the same {SECRET} on all ranks"
        raise ConfigError(f"a shared secret in {SECRET}, to listen at {host}", "none", hint=hint)
    try:
        store, port = open_store(host, arguments.port)
    except (OSError, RuntimeError, ValueError, OverflowError) as error:
        reason = str(error).splitlines()[0]
        hint = "take another port with --port; 0 takes a free one"
        wanted = f"port {arguments.port} of {host} to be free"
        raise WireError(wanted, reason, hint=hint) from error
    print_result(arguments, {"port": port}, [f"islands meet at {host}, port {port}"])
    sys.stdout.flush()
    threading.Event().wait()
    del store
    return 0
