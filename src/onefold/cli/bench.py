"""`onefold bench`: measure this machine's bandwidths, and how much of them the engine reaches."""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, TextIO

from onefold.cli.arguments import SubParsers, add_json, real, whole
from onefold.cli.failures import is_rank
from onefold.cli.launch import measure_as_rank, measure_in_ranks
from onefold.errors import ConfigError, expected

if TYPE_CHECKING:
    from rich.text import Text

    from onefold.tools.bandwidth import Ask, Bandwidths, Rate, Wear

DESCRIPTION = """\
Measure how fast this machine moves bytes, and how much of that the engine reaches.

  disk  reads, writes and half of each past the page cache, and AdamW with all state on disk
  cpu   memory, torch's fused AdamW, and the engine's step of states in CPU memory
  link  gathers and reductions between two local ranks, and copies to a GPU and back"""

TARGETS = ("disk", "cpu", "link")
LINK_RANKS = 2
LINK_TENSORS = 6
"""Most buffers of the gathered length on one rank."""

MIB = 2**20


def add_to(commands: SubParsers) -> None:
    """Add the command's flags."""
    summary = "measure disk, memory or link, and what the engine reaches"
    parser = commands.add_parser("bench", help=summary, description=DESCRIPTION,
                                 formatter_class=argparse.RawDescriptionHelpFormatter)  # fmt: skip
    parser.set_defaults(run=run)
    parser.add_argument("target", choices=TARGETS, help="what to measure")
    parser.add_argument("--path", action="append", metavar="DIR", help="folder on the disk to "
                        "measure; given again, several together (default: TMPDIR)")  # fmt: skip
    parser.add_argument("--mib", help="state on the disk, one tensor, or one gathered buffer, in "
                        "MiB (default: what suits the seconds)")  # fmt: skip
    parser.add_argument("--seconds", default="5", help="time to measure for, about (default: 5)")
    parser.add_argument("--threads", help="of all but the engine's step, which has its own "
                        "(default: as many as the engine)")  # fmt: skip
    add_json(parser)


def run(arguments: argparse.Namespace, argv: Sequence[str]) -> int:
    """Measure, and print a table or JSON."""
    target: str = arguments.target
    paths = [Path(path) for path in arguments.path or [tempfile.gettempdir()]]
    seconds = real("--seconds", arguments.seconds, above=0)
    mib = None if arguments.mib is None else whole("--mib", arguments.mib, least=1)
    threads = None if arguments.threads is None else whole("--threads", arguments.threads, least=1)
    _check_target(target, has_paths=bool(arguments.path))
    from onefold.tools.bandwidth import Ask

    ask = Ask(seconds, mib and mib * MIB, threads)
    if target == "link" and is_rank():
        found, code = _measure_as_rank(ask), 0
    else:
        with _waiting(f"measuring {target}, about {seconds:.0f} s", sys.stderr):
            found, code = _measure(target, paths, ask, argv)
    if found is not None:
        show(found, sys.stdout, is_json=arguments.json)
    return code


def _check_target(target: str, *, has_paths: bool) -> None:
    if has_paths and target != "disk":
        hint = "leave --path out, or measure a disk"
        raise ConfigError(expected("--path only with disk", f"it with {target}", hint=hint))
    if is_rank() and target != "link":
        got, hint = "a rank of a launcher", "run it without torchrun"
        raise ConfigError(expected(f"bench {target} in one process", got, hint=hint))


def _measure(
    target: str, paths: Sequence[Path], ask: Ask, argv: Sequence[str]
) -> tuple[Bandwidths | None, int]:
    """Return a result, or the exit code of ranks that failed."""
    from onefold.tools.bandwidth import Bandwidths, check_memory, measure_cpu

    if target == "cpu":
        return measure_cpu(ask), 0
    if target == "disk":
        from onefold.tools.bandwidth_disk import measure_disk

        return measure_disk(paths, ask), 0
    from onefold.tools.bandwidth_link import measure_copies

    check_memory(LINK_RANKS * LINK_TENSORS * (ask.nbytes or 0))
    copies, notes = measure_copies(ask)
    code, fields = measure_in_ranks(argv, LINK_RANKS)
    if code or fields is None:
        return None, code or 1
    found = Bandwidths.from_rank(fields)
    return replace(found, rates=found.rates | copies, notes=found.notes + notes), 0


def _measure_as_rank(ask: Ask) -> Bandwidths | None:
    from onefold.tools.bandwidth_link import measure_wire

    return measure_as_rank(lambda world: measure_wire(world, ask))


@contextmanager
def _waiting(text: str, stream: TextIO) -> Iterator[None]:
    """Show a line at a terminal while the block runs; the next output overwrites it."""
    if not stream.isatty():
        yield
        return
    print(text, end="\r", file=stream, flush=True)
    try:
        yield
    finally:
        print("\x1b[K", end="", file=stream, flush=True)


# output

BAR_WIDTH = 8
GOOD, FAIR = 0.9, 0.7
"""Shares that are shown in green, and in yellow."""


def show(found: Bandwidths, stream: TextIO, *, is_json: bool) -> None:
    """Print the result as JSON, or a table for people."""
    if is_json:
        print(json.dumps(asdict(found)), file=stream, flush=True)
        return
    from rich.console import Console

    console = Console(file=stream, highlight=False, markup=False, soft_wrap=True)
    console.print(*_heading(found), sep="\n", end="\n\n")
    head = f"{'':24s}{'GB/s':>6s}{'low-high':>11s}{'params/s':>9s}{'share':>7s}"
    console.print(head, style="dim")
    marks = "\u2501\u2578" if console.is_terminal and not console.options.ascii_only else "= "
    group = ""
    for rate in found.rates.values():
        console.print(_row(rate, found.rates, marks, names_group=rate.group != group))
        group = rate.group
    if found.wear is not None:
        console.print()
        console.print(*_wear(found.wear), sep="\n")
    if found.notes:
        console.print()
    for note in found.notes:
        console.print(f"note: {note}", style="yellow")


def _heading(found: Bandwidths) -> Iterator[str]:
    from onefold.host import in_bytes

    for each in found.paths:
        how = "past the page cache (O_DIRECT)" if each.is_direct else "through the page cache"
        yield f"{each.path}: {'in memory (tmpfs), ' if each.is_memory else ''}{how}"
    amount = in_bytes(found.nbytes)
    threads = "1 thread" if found.threads == 1 else f"{found.threads} threads"
    if found.target == "disk":
        yield f"{amount} of state, requests of 4 MiB from {threads}"
        yield "plain loop: preadv and pwritev from huge pages, whose requests need no cutting"
    elif found.target == "cpu":
        yield f"tensors of {amount}, {threads}; a step moves 28 bytes per parameter"
    else:
        yield f"{found.ranks} ranks over {found.backend}, {threads} each, {amount} gathered"
        yield "rates are what one rank receives"
    yield f"medians of {found.rounds} rounds, in {found.seconds:.1f} s"


def _row(rate: Rate, rates: dict[str, Rate], marks: str, *, names_group: bool) -> Text:
    """One rate: numbers, and a bar of its share."""
    from rich.text import Text

    scale = f"{_short(rate.lowest / 1e9)}-{_short(rate.highest / 1e9)}"
    steps = rate.parameters_per_s
    row = Text(f"{rate.group if names_group else '':9s}")
    row.append(f"{rate.way:15s}")
    row.append(f"{_short(rate.bytes_per_s / 1e9):>6s}", style="bold")
    row.append(f"{scale:>11s}", style="dim")
    row.append(f"{'' if steps is None else _short(steps / 1e6) + ' M':>9s}")
    if rate.share is not None:
        ceiling = rates[rate.of]
        style = "green" if rate.share >= GOOD else "yellow" if rate.share >= FAIR else "red"
        halves = min(round(rate.share * 2 * BAR_WIDTH), 2 * BAR_WIDTH)
        bar = marks[0] * (halves // 2) + marks[1] * (halves % 2)
        row.append(f"{rate.share:7.0%} ", style="bold")
        row.append(f"{bar:{BAR_WIDTH}s}", style=style)
        row.append(f" of {ceiling.way if ceiling.group == rate.group else ceiling.group}", "dim")
    row.rstrip()
    return row


def _wear(wear: Wear) -> Iterator[str]:
    yield (f"a step reads {wear.read_per_parameter:.1f} and writes "
           f"{wear.written_per_parameter:.1f} bytes per parameter, as the files count")  # fmt: skip
    yield f"wear: steps without a pause write {wear.written_per_day / 1e12:.1f} TB a day"


def _short(number: float) -> str:
    """Three digits, or as many as there are."""
    return f"{number:,.{0 if number >= 100 else 1 if number >= 10 else 2}f}"
