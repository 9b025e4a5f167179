"""`onefold report DIR`: draws the page of a recorded run again, and says the most of it here."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from onefold.cli.arguments import SubParsers, add_json

if TYPE_CHECKING:
    from onefold.recording.run_report import RunReport

DESCRIPTION = """\
Draw index.html from the report.json that `onefold train --report DIR` or Recording.save wrote, and
print what a step of that run held, did and sent."""


def add_to(commands: SubParsers) -> None:
    """Add the command's flags."""
    summary = "draw the page of a recorded run"
    parser = commands.add_parser("report", help=summary, description=DESCRIPTION)
    parser.set_defaults(run=run)
    parser.add_argument("directory", metavar="DIR", help="the folder that has report.json")
    add_json(parser)


def run(arguments: argparse.Namespace, _: Sequence[str]) -> int:
    """Draw, and print the table, or the JSON."""
    from pathlib import Path

    from onefold.recording.files import draw, read

    found = read(arguments.directory)
    target = str(draw(Path(arguments.directory), found))
    if arguments.json:
        print(json.dumps(as_json(found, target)))
    else:
        print_summary(found, target)
    return 0


def as_json(found: RunReport, target: str) -> dict[str, Any]:
    """Sums, for programs; report.json has the step itself."""
    told = found.as_json()
    return {
        "page": target,
        **{name: told[name] for name in ("about", "recorded", "ranks", "plan", "written_at")},
        "seconds": found.step.seconds,
        "sent": told["step"]["sent"],
        "losses": told["training"]["losses"] if told["training"] else [],
    }


def print_summary(found: RunReport, target: str) -> None:
    """A heading, a table of the recorded step, where the page is."""
    from rich.console import Console
    from rich.table import Table

    from onefold.recording.kinds import KINDS
    from onefold.recording.markup import bytes_text, seconds_text, share_text

    console = Console(highlight=False, markup=False)
    about, step, shown = found.about, found.step, found.ranks[:4]
    ranks = "1 rank" if step.world_size == 1 else f"{step.world_size:,d} ranks"
    stage = f", stage {about['stage']}" if "stage" in about else ""
    console.print(f"{about.get('model', 'a module')}{stage}, {ranks}", soft_wrap=True)
    number = "" if found.recorded is None else f" {found.recorded:,d}"
    grid = Table(box=None, pad_edge=False, padding=(0, 3, 0, 0))
    grid.add_column(f"step{number}")
    for line in shown:
        grid.add_column(f"rank {line.rank}", justify="right", no_wrap=True)

    def row(name: str, cells: Sequence[str]) -> None:
        if any(cells):
            grid.add_row(name, *cells)

    row("time", [seconds_text(line.seconds) for line in shown])
    row("waiting", [share_text(line.wait_s / max(line.seconds, 1e-9)) for line in shown])
    row("sent", [bytes_text(line.sent_nbytes) for line in shown])
    for tier in dict.fromkeys(tier for line in shown for tier in line.peak_by_tier):
        held = [line.peak_by_tier.get(tier, 0) for line in shown]
        row(f"held at most, {tier}", [bytes_text(nbytes) for nbytes in held])
    for kind, name in KINDS.items():
        held = [line.peak_by_kind.get(kind, 0) for line in shown]
        row(f"  {name}", [bytes_text(nbytes) if nbytes else "" for nbytes in held])
    console.print(grid)
    if len(found.ranks) > len(shown):
        told = f"(the first {len(shown)} of {len(found.ranks)} ranks; --json has all)"
        console.print(told)
    console.print(f"page: {target}", soft_wrap=True)
