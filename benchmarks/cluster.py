"""`onefold train` on several hosts, as docs/guides/clusters.md has it, and the bytes that it sends.

    python benchmarks/cluster.py [--hosts 2] [--ranks 2] [--rate 1gbit] [flags of onefold train]

The hosts are network namespaces of this machine (benchmarks/hosts.py); each gets the one command
that a user would type there, without any environment variable. Printed are those commands, what
rank 0 writes, and bytes per step: as the ranks' ledgers counted them, and as the hosts' interfaces
did. Exit code 2 where namespaces cannot be made.
"""

from __future__ import annotations

import argparse
import json
import re
import shlex
import sys
from dataclasses import dataclass
from pathlib import Path

from hosts import INTERFACE, Counters, Ended, Hosts, HostsError

TRAIN = ("--model", "tiny", "--steps", "40")
UNTOLD = {"GLOO_SOCKET_IFNAME": None, "NCCL_SOCKET_IFNAME": None}
"""A user's shell says nothing about interfaces: Onefold is to find them."""

TIMEOUT_S = 300
_STEP = re.compile(r"step +([\d,]+) of ([\d,]+) ")


@dataclass(frozen=True, slots=True)
class Mark:
    """The hosts' counters at the moment in which rank 0 told of a step."""

    step: int
    counters: list[Counters]


@dataclass(frozen=True, slots=True)
class PerStep:
    """Bytes that all hosts sent in a step, headers included, over the steps `first` to `last`."""

    first: int
    last: int
    between: float
    inside: float


class Marks:
    """Prints rank 0's lines, and reads all counters at those that tell of a step."""

    def __init__(self, hosts: Hosts) -> None:
        self._hosts = hosts
        self.marks: list[Mark] = []

    def __call__(self, line: str) -> None:
        told = _STEP.match(line)
        if told and told[1] != told[2]:  # behind the last step other things are sent
            counters = [host.counters() for host in self._hosts]
            self.marks.append(Mark(int(told[1].replace(",", "")), counters))
        print(line, flush=True)


def per_step(marks: list[Mark]) -> PerStep | None:
    """Bytes sent in a step between the first mark and the last; None if there are no two."""
    if len(marks) < 2:
        return None
    first, last = marks[0], marks[-1]
    spent = [now - then for now, then in zip(last.counters, first.counters, strict=True)]
    steps = last.step - first.step
    return PerStep(
        first.step,
        last.step,
        sum(each.between.sent_nbytes for each in spent) / steps,
        sum(each.inside.sent_nbytes for each in spent) / steps,
    )


def ledger_nbytes(report: Path) -> int:
    """Bytes that all ranks' ledgers counted as sent in the recorded step of a run."""
    told = json.loads((report / "report.json").read_text())
    return sum(rank["sent_nbytes"] for rank in told["ranks"])


def table(counted: PerStep, ledgers: int) -> list[str]:
    """Both counts, side by side."""
    together = counted.between + counted.inside
    more = f"{together / ledgers - 1:+.1%}: headers, acknowledgements, flags"
    rows = [
        ("bytes sent in a step, all ranks", "between hosts", "inside hosts", "together"),
        ("counted by onefold.report", "", "", f"{ledgers:,d}"),
        (
            "counted at the interfaces",
            *(f"{nbytes:,.0f}" for nbytes in (counted.between, counted.inside, together)),
        ),
    ]
    lines = [f"{name:31}" + "".join(f"{cell:>15}" for cell in cells) for name, *cells in rows]
    lines[-1] += f"   {more}"
    where = f"the hosts' {INTERFACE} and lo, mean of steps {counted.first + 1}-{counted.last}"
    return [*lines, f"({where})"]


def failure(ended: list[Ended]) -> str:
    """What the hosts that failed wrote last; empty if none did."""
    return "\n".join(
        f"host {index} ended with {host.code}:\n{host.err}"
        for index, host in enumerate(ended)
        if host.code
    )


def main() -> int:
    """Run, and print; the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--hosts", type=int, default=2)
    parser.add_argument("--ranks", type=int, default=2, help="per host")
    parser.add_argument("--rate", default="1gbit", help='of each link; "none" does not limit it')
    parser.add_argument("--report", default="build/cluster", help="where the run's page goes")
    options, train = parser.parse_known_args()
    rate = None if options.rate == "none" else options.rate
    command = ("-m", "onefold", "train", *(train or TRAIN), "--report", options.report)
    try:
        with Hosts(options.hosts, rate) as hosts:
            print(f"{len(hosts)} hosts, {rate or 'links as fast as they are'}:")
            for host in hosts:
                typed = shlex.join(hosts.command(host, *command, ranks=options.ranks))
                print(f"{host.address} $ {typed}")
            print(flush=True)
            marks = Marks(hosts)
            ended = hosts.torchrun(
                *command, ranks=options.ranks, env=UNTOLD, timeout_s=TIMEOUT_S, on_line=marks
            )
    except HostsError as error:
        print(f"cluster: {error}", file=sys.stderr)
        return 2
    except TimeoutError as error:
        print(f"cluster: {error}", file=sys.stderr)
        return 1
    if why := failure(ended):
        print(f"cluster: {why}", file=sys.stderr)
        return 1
    if (counted := per_step(marks.marks)) is not None:
        print("", *table(counted, ledger_nbytes(Path(options.report))), sep="\n")
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:  # the hosts are gone already
        sys.exit(130)
