"""`onefold doctor`: check this machine's hardware, speeds and limits before a run."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING

from onefold.cli.arguments import SubParsers, add_json
from onefold.cli.failures import is_rank
from onefold.cli.launch import measure_as_rank, measure_in_ranks
from onefold.text import counted, wrapped

if TYPE_CHECKING:
    from onefold.tools.machine import Check

DESCRIPTION = """\
Measure memory, disk and the link between two local ranks, and check versions, backends and limits.
A line begins with ok, warn (a run may be slow or end early) or fail (it cannot start: exit code 1);
the remedy is below. Takes a few seconds. Under torchrun it measures the link between the ranks that
are there."""

LINK_RANKS = 2


def add_to(commands: SubParsers) -> None:
    """Add the command's flags."""
    summary = "check hardware, speeds and limits before a run"
    parser = commands.add_parser("doctor", help=summary, description=DESCRIPTION)
    parser.set_defaults(run=run)
    add_json(parser)


def run(arguments: argparse.Namespace, argv: Sequence[str]) -> int:
    """Measure this host here, and the link in ranks of its own."""
    from onefold.tools.machine import FAIL, checks, describe, link_facts

    code = 0
    if is_rank():
        link = measure_as_rank(link_facts)
        if link is None:
            return 0
        machine = describe()
    else:
        machine = describe()
        code, link = measure_in_ranks(argv, LINK_RANKS)
    found = checks(machine, link)
    if arguments.json:
        facts = {**asdict(machine), "link": link, "checks": [asdict(each) for each in found]}
        del facts["limits"]  # checks too
        print(json.dumps(facts))
    else:
        print("\n".join(_lines(found)))
    return code or int(any(each.level == FAIL for each in found))


def _lines(found: Sequence[Check]) -> Iterator[str]:
    """Yield each check, with its remedy below, and the number of warnings and failures."""
    for each in found:
        yield from wrapped(f"{each.level:6}{each.name:26}{each.value}", " " * 32)
        if each.remedy:
            yield from wrapped(f"      remedy: {each.remedy}", " " * 14)
    warnings, failures = (sum(each.level == level for each in found) for level in ("warn", "fail"))
    yield f"\n{counted(warnings, 'warning')}, {counted(failures, 'failure')}"
