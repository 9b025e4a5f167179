"""A port at which ranks will meet, for runs that are told an address."""

from __future__ import annotations

import random
import socket

LOWEST, HIGHEST = 10_000, 32_767
"""Below the ports that a system gives to sockets that ask for none (Linux: from 32,768 on)."""

_SYSTEM = random.SystemRandom()  # the seed of a test would give each worker the same port


def free_port() -> int:
    """A port that no process listens on and that no connection is given meanwhile.

    One of the system's choice (`bind` to 0) is free for the next connection as soon as it is let
    go, and a first rank listens seconds later: ranks then met a stranger, once in a run of CI.
    """
    while True:
        port = _SYSTEM.randint(LOWEST, HIGHEST)
        with socket.socket() as probe:
            try:
                probe.bind(("", port))
            except OSError:
                continue
            return port
