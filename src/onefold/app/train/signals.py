"""Receive requests to stop: the first ends the run after the step, the second ends the process.

A thread receives them. Python runs signal handlers on the main thread between two instructions,
and that thread may be inside a collective whose peers are gone.
"""

from __future__ import annotations

import os
import signal
import socket
import threading
import time
from typing import Any

STOPS = (signal.SIGTERM, signal.SIGINT)

ECHO_S = 1.0
"""One request may arrive twice: SLURM signals every process of a job, and torchrun passes its own
signal on to its ranks. Within this time after the first, a signal is the same request."""


class StopRequests:
    """Inside the block SIGTERM and SIGINT are requests: `received` is the first number, or 0.

    Unless `is_active`, signals keep their handlers.
    """

    def __init__(self, *, is_active: bool) -> None:
        self.received = 0
        self._is_active = is_active
        self._before: dict[int, Any] = {}

    def __enter__(self) -> StopRequests:
        is_main = threading.current_thread() is threading.main_thread()
        if not self._is_active or not is_main:  # only the main thread may set handlers
            return self
        self._sender, self._receiver = socket.socketpair()
        self._sender.setblocking(False)
        signal.set_wakeup_fd(self._sender.fileno(), warn_on_full_buffer=False)
        self._before = {stop: signal.signal(stop, lambda *_: None) for stop in STOPS}
        threading.Thread(target=self._receive, name="onefold-signals", daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._before:
            signal.set_wakeup_fd(-1)
            for stop, handler in self._before.items():
                signal.signal(stop, handler)
            self._sender.close()

    def _receive(self) -> None:
        at = 0.0  # the time of the request
        while number := self._receiver.recv(1):
            if number[0] in STOPS:
                if not self.received:
                    self.received, at = number[0], time.monotonic()
                elif time.monotonic() - at > ECHO_S:
                    os._exit(128 + number[0])
        self._receiver.close()
