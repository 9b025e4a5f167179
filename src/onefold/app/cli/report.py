"""`onefold report DIR`: write the page of a recorded run again, and print a summary."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from onefold.app.cli.arguments import SubParsers, add_json

if TYPE_CHECKING:
    from onefold.recording.run_report import RunReport

DESCRIPTION = """\
Write index.html from the report.json of `onefold train --report DIR` or Recording.save, and print
the time, peak bytes and bytes sent of the recorded step."""

MAX_COLUMNS = 4
"""Ranks in the table. Of more ranks it shows the first ones."""


def add_to(commands: SubParsers) -> None:
    """Add the command's flags."""
    summary = "draw the page of a recorded run"
    parser = commands.add_parser("report", help=summary, description=DESCRIPTION)
    parser.set_defaults(run=run)
    parser.add_argument("directory", metavar="DIR", help="the folder that has report.json")
    add_json(parser)


def run(arguments: argparse.Namespace, _: Sequence[str]) -> int:
    """Write the page; print the table, or the JSON."""
    from pathlib import Path

    from onefold.recording.record_files import draw, read

    report = read(arguments.directory)
    page = str(draw(Path(arguments.directory), report))
    if arguments.json:
        print(json.dumps(as_json(report, page)))
    else:
        print_summary(report, page)
    return 0


def as_json(report: RunReport, page: str) -> dict[str, Any]:
    """Return the sums, for programs. The step itself is in report.json."""
    data = report.as_json()
    return {
        "page": page,
        **{name: data[name] for name in ("about", "recorded", "ranks", "plan", "written_at")},
        "seconds": report.step.seconds,
        "sent": data["step"]["sent"],
        "losses": data["training"]["losses"] if data["training"] else [],
    }


def print_summary(report: RunReport, page: str) -> None:
    """Print a heading, a table of the recorded step by rank, and the page's path."""
    from onefold.recording.words import KINDS
    from onefold.text import (
        columns,
        common_unit,
        format_bytes,
        format_seconds,
        format_share,
        in_unit,
        show,
        wrapped,
    )

    shown = report.ranks[:MAX_COLUMNS]
    head = "step" if report.recorded is None else f"step {report.recorded:,d}"
    rows = [
        [head, *(f"rank {line.rank}" for line in shown)],
        ["time", *(format_seconds(line.seconds) for line in shown)],
        ["waiting", *(format_share(line.wait_share) for line in shown)],
        ["sent", *(format_bytes(line.sent_nbytes) for line in shown)],
    ]
    peaks = {
        f"peak on {tier}": [line.peak_by_tier.get(tier, 0) for line in shown]
        for tier in dict.fromkeys(tier for line in shown for tier in line.peak_by_tier)
    }
    kinds = {f"  {word}": [line.peak_by_kind.get(kind, 0) for line in shown]
             for kind, word in KINDS.items()}  # fmt: skip
    name, unit = common_unit(max((nbytes for each in peaks.values() for nbytes in each), default=0))
    rows.append([f"memory in {name}", *[""] * len(shown)])
    for row, nbytes in (peaks | kinds).items():
        if any(nbytes):
            rows.append([row, *(in_unit(each, unit) for each in nbytes)])
    heading = [*wrapped(report.title), *wrapped(report.diagnosis)]
    notes = [f"(the first {len(shown)} of {len(report.ranks)} ranks; --json has all)"]
    notes *= len(report.ranks) > len(shown)
    show([*heading, *columns(rows, "<>"), *notes, f"page: {page}"], sys.stdout)
