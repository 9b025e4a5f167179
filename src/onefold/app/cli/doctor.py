"""`onefold doctor`: check this machine's hardware, speeds and limits before a run."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from onefold.app.cli.arguments import SubParsers, add_json, real, whole
from onefold.app.cli.failures import is_rank
from onefold.app.cli.launch import measure_as_rank, measure_in_ranks, world_size_of
from onefold.text import counted, show, wrapped

if TYPE_CHECKING:
    from onefold.app.tools.machine import Check
    from onefold.wire.world import World

DESCRIPTION = """\
Measure memory, disk and the link between local ranks, and check versions, backends and limits.
A line begins with ok, warn (a run may be slow or end early) or fail (it cannot start: exit code 1);
the remedy is below. Then a table of the ranks: free memory, speed of matrix products and copies,
slowest link; and the shares of rows and states that they suggest. Takes a few seconds. Under
torchrun it measures the ranks that are there.

  torchrun --nproc-per-node 8 -m onefold doctor"""

LINK_RANKS = 2


def add_to(commands: SubParsers) -> None:
    """Add the command's flags."""
    summary = "check hardware, speeds and limits before a run"
    parser = commands.add_parser("doctor", help=summary, description=DESCRIPTION)
    parser.set_defaults(run=run)
    add = parser.add_argument
    add("--ranks", metavar="N", help=f"local CPU ranks to measure (default: {LINK_RANKS})")
    add("--timeout", default="60", metavar="SECONDS", help="name ranks that do not answer by then")
    add_json(parser)


def run(arguments: argparse.Namespace, argv: Sequence[str]) -> int:
    """Measure this host here, and its ranks beside one another in processes of their own."""
    ranks = None if arguments.ranks is None else whole("--ranks", arguments.ranks, least=1)
    timeout = real("--timeout", arguments.timeout, above=0)
    from onefold.app.tools.machine import FAIL, checks, describe

    code = 0
    if is_rank():
        world_size_of(ranks)
        measured = _as_rank(timeout)
        if measured is None:
            return 0
        machine = describe()
    else:
        machine = describe()
        code, measured = measure_in_ranks(argv, ranks or LINK_RANKS)
    link = None if measured is None else measured["link"]
    found = checks(machine, link)
    if arguments.json:
        facts = {**asdict(machine), "link": link, "checks": [asdict(each) for each in found]}
        del facts["limits"]  # checks too
        print(json.dumps({**facts, "job": measured and measured["job"]}))
    else:
        show([*_lines(found), *_rank_lines(measured)], sys.stdout)
    return code or int(any(each.level == FAIL for each in found))


def _as_rank(timeout: float) -> dict[str, Any] | None:
    """Measure as one rank of several; None on all but the one that prints."""
    from onefold.app.tools.machine import link_facts
    from onefold.app.tools.rank_speeds import check_presence, job_speeds

    check_presence(timeout)

    def measure(world: World) -> dict[str, Any]:
        job = job_speeds(world, timeout)
        return {"job": job.as_dict(), "link": link_facts(world)}

    return measure_as_rank(measure)


def _rank_lines(measured: dict[str, Any] | None) -> list[str]:
    if measured is None:
        return []
    from onefold.app.tools.rank_speeds import JobSpeeds

    return list(JobSpeeds.from_dict(measured["job"]).lines())


def _lines(found: Sequence[Check]) -> Iterator[str]:
    """Yield each check, with its remedy below, and the number of warnings and failures."""
    for each in found:
        yield from wrapped(f"{each.level:6}{each.name:26}{each.value}", " " * 32)
        if each.remedy:
            yield from wrapped(f"      remedy: {each.remedy}", " " * 14)
    warnings, failures = (sum(each.level == level for each in found) for level in ("warn", "fail"))
    yield f"\n{counted(warnings, 'warning')}, {counted(failures, 'failure')}"
