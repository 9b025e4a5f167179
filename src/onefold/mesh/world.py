"""Join the ranks that a launcher started, and leave them in every case."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import TypeVar

import torch
import torch.distributed as dist

from onefold.errors import ConfigError, WireError, expected
from onefold.mesh.devices import backends_for, take_own_device
from onefold.mesh.interfaces import GLOO, use_link_to_hosts
from onefold.wire.collectives import Group

T = TypeVar("T")

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

    def gather(self, value: T) -> list[T]:
        """Return the small value of every rank, in rank order. A collective."""
        return self.group.gather(value)

    def mean(self, values: list[float]) -> list[float]:
        """Return the mean over ranks of each number. A collective."""
        columns = zip(*self.gather(values), strict=True)
        return [sum(column) / self.world_size for column in columns]


@contextmanager
def joined(*, use_gpus: bool = True) -> Iterator[World]:
    """Initialise the process group as the launcher describes it, for this rank's device.

    Raises `ConfigError` without a launcher's environment, and `WireError` if the ranks do not find
    each other.
    """
    _check_launcher()
    device = take_own_device() if use_gpus else torch.device("cpu")
    if device.type == "cpu":
        use_link_to_hosts()
    variable = "NCCL_SOCKET_IFNAME" if device.type == "cuda" else GLOO
    try:
        with ending_process(TIMEOUT_S + SPARE_S, lambda: _not_met("no answer", variable)):
            dist.init_process_group(backends_for(device), timeout=timedelta(seconds=TIMEOUT_S))
    except RuntimeError as error:  # of the store, of gloo, of NCCL
        raise WireError(_not_met(str(error).splitlines()[0], variable)) from error
    try:
        yield World(Group.of(dist.group.WORLD), device)
    finally:
        dist.destroy_process_group()


def _check_launcher() -> None:
    names = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    missing = [name for name in names if name not in os.environ]
    if missing:
        wanted = f"{', '.join(names)} in the environment of a rank"
        hint = "launch ranks with torchrun, or unset RANK to have them launched"
        raise ConfigError(expected(wanted, f"no {', '.join(missing)}", hint=hint))


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


def _not_met(got: str, variable: str) -> str:
    rank, world_size = os.environ["RANK"], os.environ["WORLD_SIZE"]
    interface = os.environ.get(variable) or "not set"
    hint = f"start every host; {variable} names the interface that leads to the others "
    return expected(
        f"rank {rank} to meet the other ranks, {world_size} in all, within {TIMEOUT_S} s",
        f"{got} ({variable} is {interface})",
        hint=hint + "(docs/guides/clusters.md)",
    )
