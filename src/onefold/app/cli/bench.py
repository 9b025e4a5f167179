"""`onefold bench`: measure this machine's bandwidths, and how much of them the engine reaches."""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from onefold.app.cli.arguments import SubParsers, add_command, print_result, real
from onefold.app.cli.launch import is_rank, measure_as_rank, measure_in_ranks
from onefold.errors import ConfigError
from onefold.text import columns, counted, format_share, three_digits, wrapped

if TYPE_CHECKING:
    from onefold.app.tools.bandwidth import Measured

DESCRIPTION = """\
Measure how fast this machine moves bytes, and the engine's share of that.

  disk  reads, writes and half of each past the page cache, AdamW with all
        state on disk, and files that are forced to the disk (durable)
  cpu   copies in memory, products, calls, AdamW, and the engine's step of
        states in CPU memory
  link  an exchange, gathers and reductions between two local ranks, as bytes
        that one rank receives; and copies to a GPU and back

Rates are medians of rounds, after a warm-up, of buffers that exceed the
caches. `onefold doctor` measures the same rates in fewer rounds.

  onefold bench disk --path /fast/disk"""

LINK_RANKS = 2


def add_to(commands: SubParsers) -> None:
    """Add the command's flags."""
    summary = "measure disk, memory or link, and the engine's share"
    add = add_command(commands, "bench", run_bench, summary, DESCRIPTION)
    add("target", choices=("disk", "cpu", "link"), help="the measured traffic")
    add(
        "--path",
        action="append",
        metavar="DIR",
        type=lambda _, text: Path(text),
        help="folder on the disk to measure; given again, several together (default: TMPDIR)",
    )
    add("--seconds", type=partial(real, above=0), default=5, help="time to measure for, about")


def run_bench(arguments: argparse.Namespace, argv: Sequence[str]) -> int:
    """Measure, and print a table or JSON."""
    check_target(arguments.target, has_paths=bool(arguments.path))
    from onefold.app.tools.bandwidth import measure_cpu, measure_disk, measure_link

    code, seconds = 0, arguments.seconds
    if arguments.target == "cpu":
        measured = measure_cpu(seconds)
    elif arguments.target == "disk":
        measured = measure_disk(arguments.path or [Path(tempfile.gettempdir())], seconds)
    elif is_rank():
        measured = measure_as_rank(lambda world: measure_link(world, seconds))
    else:
        measured, code = _measure_link(seconds, argv)
    if measured is not None:
        print_result(arguments, measured, as_text(measured))
    return code


def check_target(target: str, *, has_paths: bool) -> None:
    """Refuse flags and launchers that do not go with a target."""
    if has_paths and target != "disk":
        hint = "leave --path out, or measure a disk"
        raise ConfigError("--path only with disk", f"it with {target}", hint=hint)
    if is_rank() and target != "link":
        got, hint = "a rank of a launcher", "run it without torchrun"
        raise ConfigError(f"bench {target} in one process", got, hint=hint)


def _measure_link(seconds: float, argv: Sequence[str]) -> tuple[Measured | None, int]:
    """Launch ranks; return their result with the copies to a GPU, or None, and the exit code."""
    from onefold.app.tools.bandwidth import measure_copies

    copies = measure_copies(seconds)
    code, measured = measure_in_ranks(argv, LINK_RANKS)
    if code or measured is None:
        return None, code or 1
    return {**measured, "rates": measured["rates"] | copies}, 0


def as_text(measured: Measured) -> Iterator[str]:
    """Yield the lines of a table for people."""
    from onefold.fit.rates import described

    if measured["target"] == "link":
        yield f"{counted(measured['ranks'], 'rank')} over {measured['backend']}"
    yield from (f"path: {path}" for path in measured.get("paths", []))
    rounds = [rate["rounds"] for rate in measured["rates"].values()]
    yield f"medians of {min(rounds)} rounds"
    yield ""
    rows = [("", "rate", "low", "high", "params/s", "share")]
    for name, rate in measured["rates"].items():
        keys = ("per_s", "lowest", "highest")
        middle, low, high = (described(rate[key], rate["unit"]) for key in keys)
        stepped, share = rate["parameters_per_s"], rate["share"]
        steps = f"{three_digits(stepped / 1e6)} M" if stepped else ""
        part = f"{format_share(share)} of {rate['of']}" if share else ""
        rows.append((name, middle, low, high, steps, part))
    yield from columns(rows, "<>>>><")
    yield from (line for note in measured["notes"] for line in wrapped(f"note: {note}"))
