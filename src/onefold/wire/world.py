"""Join the ranks that a launcher started, and leave them in every case."""

import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist

from onefold.wire import launcher
from onefold.wire.collectives import Group
from onefold.wire.devices import take_own_device, variable_for
from onefold.wire.ranks import start_group, with_hosts

TIMEOUT_S = 120
"""Seconds after which a rank without its peers gives up."""

SPARE_S = 10
"""Seconds beyond the timeout, in which the backend may raise its own error."""


@dataclass(frozen=True, slots=True)
class World:
    """One rank among its peers."""

    group: Group
    device: torch.device

    @property
    def rank(self) -> int:
        return self.group.rank

    @property
    def world_size(self) -> int:
        return self.group.world_size

    def mean(self, values: list[float]) -> list[float]:
        """Return the mean over ranks of each number. A collective."""
        columns = zip(*self.group.gather(values), strict=True)
        return [sum(column) / self.world_size for column in columns]


@contextmanager
def joined(*, use_gpus: bool = True) -> Iterator[World]:
    """Initialise the process group as the launcher describes it, for this rank's device.

    Raises `ConfigError` without a launcher's environment, and `WireError` if the ranks do not find
    each other.
    """
    launcher.check()
    device = take_own_device() if use_gpus else torch.device("cpu")
    timeout = timedelta(seconds=TIMEOUT_S)

    def no_answer() -> str:
        return launcher.not_met("no answer", timeout, variable_for(device))

    with ending_process(TIMEOUT_S + SPARE_S, no_answer):
        start_group(device, timeout)
    try:
        yield World(with_hosts(Group.from_handle(dist.group.WORLD)), device)
    finally:
        dist.destroy_process_group()


@contextmanager
def ending_process(seconds: float, why: Callable[[], str]) -> Iterator[None]:
    """End this process with a message and exit code 1 if the block takes longer.

    gloo's listening side ignores its timeout: after 230 s it still waited for a peer.
    """

    def end() -> None:
        os.write(2, f"onefold: {why()}\n".encode())
        os._exit(1)

    timer = threading.Timer(seconds, end)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
