"""`onefold doctor`: check this machine's hardware, speeds and limits before a run."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from functools import partial
from typing import TYPE_CHECKING, Any

from onefold.app.cli.arguments import SubParsers, add_command, positive, print_result, real
from onefold.app.cli.launch import is_rank, measure_as_rank, measure_in_ranks, world_size_of
from onefold.text import counted, wrapped

if TYPE_CHECKING:
    from onefold.app.tools.machine import Check
    from onefold.wire.world import World

DESCRIPTION = """\
Measure memory, disk and the link between local ranks, and check versions,
backends and limits; with nvidia-ml-py also NVLink, PCIe lanes and clocks
of GPUs. A line begins with ok, warn (a run may be slow or end
early) or fail (it cannot start: exit code 1); the remedy is below. Then a
table of the ranks: free memory, speed of matrix products and copies, slowest
link; and the shares of rows and states that they suggest. Takes a few seconds.
Under torchrun it measures the ranks of torchrun.

  torchrun --nproc-per-node 8 -m onefold doctor"""

LINK_RANKS = 2


def add_to(commands: SubParsers) -> None:
    """Add the command's flags."""
    summary = "check hardware, speeds and limits before a run"
    add = add_command(commands, "doctor", run_doctor, summary, DESCRIPTION)
    add("--ranks", type=positive, metavar="N",
        help=f"local CPU ranks to measure (default: {LINK_RANKS})")  # fmt: skip
    add("--timeout", type=partial(real, above=0), default=60, metavar="SECONDS",
        help="name ranks that do not answer by then")  # fmt: skip


def run_doctor(arguments: argparse.Namespace, argv: Sequence[str]) -> int:
    """Measure this host here, and its ranks beside one another in processes of their own."""
    from onefold.app.tools.machine import FAIL, checks, describe

    code = 0
    if is_rank():
        world_size_of(arguments.ranks)
        measured = _as_rank(arguments.timeout)
        if measured is None:
            return 0
        machine = describe()
    else:
        machine = describe()
        code, measured = measure_in_ranks(argv, arguments.ranks or LINK_RANKS)
    link = measured and measured["link"]
    verdicts = checks(machine, link)
    facts = {**asdict(machine), "link": link, "checks": [asdict(check) for check in verdicts]}
    del facts["limits"]  # checks too
    lines = [*_lines(verdicts), *_rank_lines(measured)]
    print_result(arguments, {**facts, "job": measured and measured["job"]}, lines)
    return code or int(any(check.level == FAIL for check in verdicts))


def _as_rank(timeout: float) -> dict[str, Any] | None:
    """Measure as one rank of several; None on all but the one that prints."""
    from onefold.app.tools.machine import link_facts
    from onefold.app.tools.rank_speeds import check_presence, job_speeds

    check_presence(timeout)

    def measure(world: World) -> dict[str, Any]:
        job = job_speeds(world, timeout)
        return {"job": job.as_dict(), "link": link_facts(world)}

    return measure_as_rank(measure)


def _rank_lines(measured: dict[str, Any] | None) -> Iterator[str]:
    if measured is not None:
        from onefold.app.tools.rank_speeds import JobSpeeds

        yield from JobSpeeds.from_dict(measured["job"]).lines()


def _lines(checks: Sequence[Check]) -> Iterator[str]:
    """Yield each check, with its remedy below, and the number of warnings and failures."""
    for check in checks:
        yield from wrapped(f"{check.level:6}{check.name:26}{check.value}", " " * 32)
        if check.remedy:
            yield from wrapped(f"      remedy: {check.remedy}", " " * 14)
    levels = [check.level for check in checks]
    warnings, failures = levels.count("warn"), levels.count("fail")
    yield f"\n{counted(warnings, 'warning')}, {counted(failures, 'failure')}"
