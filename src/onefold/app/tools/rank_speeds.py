"""Measure the ranks of a job beside one another, and say how to share work among them.

Each rank measures itself and posts its answer in the job's store. Then ranks meet in pairs, in
rounds in which each rank has one partner (the circle method of round-robin tournaments). Ranks that
do not answer are named by all others.
"""

from __future__ import annotations

import json
import os
import socket
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore, Store

from onefold.errors import OnefoldError, expected, listed
from onefold.fit.bounds import RankMemory
from onefold.fit.rates import copy, exchange, in_rounds, products
from onefold.fit.shares import PARTS, weights_of
from onefold.layout.row_split import RankTime, rows_of
from onefold.text import columns, format_bytes, format_rate, wrapped
from onefold.tier import accelerator
from onefold.tier.host import free_host_nbytes
from onefold.wire.ranks import local_place
from onefold.wire.world import World, ending_process

OWN_SECONDS = 0.6
TOLERANCE = 0.1
"""Ranks that differ by less share evenly: a short measurement says no more."""
POLL_S, GRACE_S = 0.02, 2.0
AGENT_STORE = "TORCHELASTIC_USE_AGENT_STORE"


class AbsentRanksError(OnefoldError):
    """Ranks did not answer. It is no `WireError`: that would pass for an echo of their failure."""


@dataclass(frozen=True, slots=True)
class RankSpeeds:
    """One rank: bytes, and per second products' operations and bytes of copies in its memory."""

    rank: int
    host: str
    device: str
    free_nbytes: int  # of the memory that computes, for this rank
    free_host_nbytes: int  # of its host, for all ranks there
    flops_per_s: float
    copied_per_s: float


@dataclass(frozen=True, slots=True)
class JobSpeeds:
    """All ranks, and the bytes per second between each two of them, one way while both send."""

    ranks: tuple[RankSpeeds, ...]
    links: tuple[tuple[float, ...], ...]  # 0 on the diagonal

    @property
    def slowest_pair(self) -> tuple[int, int] | None:
        """The two ranks with the slowest link; None of a single rank."""
        pairs = [(a, b) for b in range(len(self.links)) for a in range(b)]
        return min(pairs, key=lambda pair: self.links[pair[0]][pair[1]], default=None)

    @property
    def row_shares(self) -> tuple[int, ...] | None:
        """Weights of the rows of a batch, one a rank, by speed; None: all the same."""
        speeds = [rank.flops_per_s for rank in self.ranks]
        if _are_alike(speeds):
            return None
        return weights_of(rows_of([RankTime(0.0, 1 / speed) for speed in speeds], PARTS))

    @property
    def state_shares(self) -> tuple[int, ...] | None:
        """Weights of the states, one a rank, by free memory; None: all the same."""
        free = [rank.free_nbytes for rank in self.ranks]
        return None if _are_alike(free) else weights_of([rank / sum(free) for rank in free])

    def as_dict(self) -> dict[str, Any]:
        """Return plain dicts and numbers, for JSON."""
        pair = self.slowest_pair
        return {
            "ranks": [asdict(rank) for rank in self.ranks],
            "links": [list(row) for row in self.links],
            "slowest_pair": None if pair is None else list(pair),
            "row_shares": self.row_shares and list(self.row_shares),
            "shares": self.state_shares and list(self.state_shares),
        }

    @staticmethod
    def from_dict(plain: dict[str, Any]) -> JobSpeeds:
        """Rebuild from `as_dict`, or from JSON of it."""
        ranks = tuple(RankSpeeds(**rank) for rank in plain["ranks"])
        return JobSpeeds(ranks, tuple(tuple(row) for row in plain["links"]))

    def lines(self) -> Iterator[str]:
        """Yield a table of the ranks, the slowest pair, and the shares."""
        yield ""
        yield from columns([
            ("rank", "host", "device", "free", "host free", "products", "copies", "slowest link"),
            *map(self._cells, self.ranks),
        ], "><<>")  # fmt: skip
        pair = self.slowest_pair
        if pair is not None:
            rate = format_rate(self.links[pair[0]][pair[1]])
            yield from wrapped(f"slowest pair: ranks {pair[0]} and {pair[1]}, {rate} each way")
        rows, states = self.row_shares, self.state_shares
        for title, flag, weights in (
            ("rows by speed", "--rows", rows), ("states by free memory", "--shares", states),
        ):  # fmt: skip
            yield f"{title}: {'' if weights else 'the same on all ranks'}".rstrip()
            if weights:
                yield f"  onefold train {flag} {','.join(map(str, weights))}"

    def _cells(self, speeds: RankSpeeds) -> tuple[str, ...]:
        own = [rate for rank, rate in enumerate(self.links[speeds.rank]) if rank != speeds.rank]
        return (
            str(speeds.rank), speeds.host, speeds.device, format_bytes(speeds.free_nbytes),
            format_bytes(speeds.free_host_nbytes), f"{speeds.flops_per_s / 1e9:,.0f} GFLOP/s",
            format_rate(speeds.copied_per_s), format_rate(min(own)) if own else "",
        )  # fmt: skip


def _are_alike(values: Sequence[float]) -> bool:
    return min(values) >= (1 - TOLERANCE) * max(values)


def check_presence(timeout: float) -> None:
    """Wait until every rank of a launcher with a store has come; name those that have not.

    Ranks that torchrun or `onefold` launched have such a store before they have a process group.
    """
    names = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    if os.environ.get(AGENT_STORE) != "True" or any(name not in os.environ for name in names):
        return
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    store = dist.TCPStore(address, port, is_master=False, timeout=timedelta(seconds=timeout))
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    board = _Board(PrefixStore(f"onefold/doctor/{attempt}", store), rank, world_size, timeout)
    board.post("here", "")
    board.read_answers("here")


def job_speeds(world: World, timeout: float) -> JobSpeeds:
    """Measure all ranks, and the links between them. A collective.

    Args:
        world: the ranks.
        timeout: seconds for each of the two parts.

    Raises:
        AbsentRanksError: ranks that did not answer, by number.
    """
    handle = world.group.handle
    if world.world_size == 1 or handle is None:
        return JobSpeeds((_own_speeds(world),), ((0.0,),))
    board = _Board(handle.get_group_store(), world.rank, world.world_size, timeout)
    board.post("ready", "")
    board.read_answers("ready")  # ranks of a host begin together, as in a step
    board.post("speeds", json.dumps(asdict(_own_speeds(world))))
    ranks = tuple(RankSpeeds(**json.loads(answer)) for answer in board.read_answers("speeds"))
    with ending_process(timeout, lambda: _no_answer(board.absent(), timeout)):
        try:
            own = _own_links(world)
        except RuntimeError as error:  # of a peer that has ended
            raise AbsentRanksError(_no_answer(board.absent(), timeout)) from error
    board.post("links", json.dumps(own))
    rows = [json.loads(answer) for answer in board.read_answers("links")]
    everyone = range(world.world_size)
    links = tuple(tuple(min(rows[a][b], rows[b][a]) for b in everyone) for a in everyone)
    return JobSpeeds(ranks, links)


class _Board:
    """Answers of all ranks in a store."""

    def __init__(self, store: Store, rank: int, world_size: int, timeout: float) -> None:
        self._store, self._rank, self._ranks = store, rank, range(world_size)
        self._timeout = timeout

    def post(self, topic: str, answer: str) -> None:
        """Post this rank's answer."""
        self._store.set(self._key(topic, self._rank), answer)

    def read_answers(self, topic: str) -> list[str]:
        """Return the answers of all ranks. Raises `AbsentRanksError` with the ranks without one."""
        try:
            missing = self._missing(topic, self._timeout)
            if not missing:
                return [self._store.get(self._key(topic, rank)).decode() for rank in self._ranks]
        except RuntimeError as error:
            message = f"the store of the job: {str(error).splitlines()[0]}"
            hint = "its host has ended: read the output of the launcher there"
            raise AbsentRanksError("answers of all ranks", message, hint=hint) from error
        raise AbsentRanksError(_no_answer(missing, self._timeout))

    def absent(self) -> list[int]:
        """Ask who is still there, as every rank does whose rounds do not end, and return the rest.

        They all ask at about the same time: they have begun together.
        """
        self.post("asks", "")
        return self._missing("asks", GRACE_S)

    def _missing(self, topic: str, seconds: float) -> list[int]:
        """Wait for the answers of all ranks; return the ranks without one."""
        deadline = time.monotonic() + seconds
        keys = [self._key(topic, rank) for rank in self._ranks]
        while not self._store.check(keys):
            if time.monotonic() > deadline:
                return [rank for rank in self._ranks if not self._store.check([keys[rank]])]
            time.sleep(POLL_S)
        return []

    @staticmethod
    def _key(topic: str, rank: int) -> str:
        return f"onefold/speeds/{topic}/{rank}"


def _no_answer(ranks: Sequence[int], timeout: float) -> str:
    names = ", ".join(listed([f"rank {rank}" for rank in ranks])) or "any rank of another"
    return expected(
        f"an answer of every rank within {timeout:g} s", f"none from {names}",
        hint="look at its process and host: it has ended, is stopped, or has no network; "
        "--timeout SECONDS waits longer",
    )  # fmt: skip


def _own_speeds(world: World) -> RankSpeeds:
    """Measure products and copies of this rank, while the others measure theirs."""
    device = world.device
    rates = in_rounds([products(device), copy(device)], OWN_SECONDS)
    name = "cpu" if device.type == "cpu" else accelerator.model(device)[0]
    memory = RankMemory(device, local_place(world.group)[1], world.group)
    return RankSpeeds(
        world.rank, socket.gethostname(), name, memory.free(),
        free_host_nbytes(), rates["products"].per_s, rates["copy"].per_s,
    )  # fmt: skip


def rounds_of(world_size: int) -> list[list[int | None]]:
    """Return for each round the partner of each rank, None for a rank that rests.

    Each two ranks meet once.
    """
    places = list(range(world_size + world_size % 2))
    rounds: list[list[int | None]] = []
    for _ in range(len(places) - 1):
        partners: list[int | None] = [None] * len(places)
        for first, second in zip(places, reversed(places), strict=True):
            partners[first] = second if second < world_size else None
        rounds.append(partners[:world_size])
        places[1:] = [places[-1], *places[1:-1]]
    return rounds


def _own_links(world: World) -> list[float]:
    """Return the bytes per second from this rank to each other; 0 to itself."""
    rates = [0.0] * world.world_size
    for partners in rounds_of(world.world_size):
        partner = partners[world.rank]
        peers = [] if partner is None else [partner]
        found = in_rounds([exchange(world.group, world.device, peers)])  # as many on each rank
        if partner is not None:
            rates[partner] = found["exchange"].per_s
    return rates
