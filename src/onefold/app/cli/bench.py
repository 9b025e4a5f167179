"""`onefold bench`: measure this machine's bandwidths, and how much of them the engine reaches."""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from onefold.app.cli.arguments import RawHelpFormatter, SubParsers, add_json, real, whole
from onefold.app.cli.failures import is_rank
from onefold.app.cli.launch import measure_as_rank, measure_in_ranks
from onefold.errors import ConfigError
from onefold.text import columns, format_bytes, format_share, show, three_digits, wrapped

if TYPE_CHECKING:
    from onefold.app.tools.bandwidth import Ask, Measured

DESCRIPTION = """\
Measure how fast this machine moves bytes, and the engine's share of that.

  disk  reads, writes and half of each past the page cache, and AdamW with all
        state on disk
  cpu   a copy in memory, torch's fused AdamW, and the engine's step of states
        in CPU memory
  link  an exchange, gathers and reductions between two local ranks, as bytes
        that one rank receives; and copies to a GPU and back"""

LINK_RANKS = 2
MIB = 2**20


def add_to(commands: SubParsers) -> None:
    """Add the command's flags."""
    summary = "measure disk, memory or link, and the engine's share"
    parser = commands.add_parser("bench", help=summary, description=DESCRIPTION,
                                 formatter_class=RawHelpFormatter)  # fmt: skip
    parser.set_defaults(run=run)
    add = parser.add_argument
    add("target", choices=("disk", "cpu", "link"), help="the measured traffic")
    add("--path", action="append", metavar="DIR", help="folder on the disk to measure; given "
        "again, several together (default: TMPDIR)")  # fmt: skip
    add("--mib", help="state on the disk, one tensor, or one gathered buffer, in MiB; more than "
        "the CPU's caches hold (default: 96, 64 or 32)")  # fmt: skip
    add("--seconds", default="5", help="time to measure for, about")
    add("--threads", help="threads of all but the engine's step, which has its own "
        "(default: as many as the engine)")  # fmt: skip
    add_json(parser)


def run(arguments: argparse.Namespace, argv: Sequence[str]) -> int:
    """Measure, and print a table or JSON."""
    target: str = arguments.target
    seconds = real("--seconds", arguments.seconds, above=0)
    mib = None if arguments.mib is None else whole("--mib", arguments.mib, least=1)
    threads = None if arguments.threads is None else whole("--threads", arguments.threads, least=1)
    check_target(target, has_paths=bool(arguments.path))
    from onefold.app.tools.bandwidth import Ask, measure_cpu, measure_disk

    ask = Ask(seconds, mib and mib * MIB, threads)
    code = 0
    if target == "cpu":
        found = measure_cpu(ask)
    elif target == "disk":
        found = measure_disk([Path(p) for p in arguments.path or [tempfile.gettempdir()]], ask)
    else:
        found, code = measure_link_as_rank(ask) if is_rank() else _measure_link(ask, argv)
    if found is not None:
        if arguments.json:
            print(json.dumps(found))
        else:
            show(as_text(found), sys.stdout)
    return code


def check_target(target: str, *, has_paths: bool) -> None:
    """Refuse flags and launchers that do not go with a target."""
    if has_paths and target != "disk":
        hint = "leave --path out, or measure a disk"
        raise ConfigError("--path only with disk", f"it with {target}", hint=hint)
    if is_rank() and target != "link":
        got, hint = "a rank of a launcher", "run it without torchrun"
        raise ConfigError(f"bench {target} in one process", got, hint=hint)


def _measure_link(ask: Ask, argv: Sequence[str]) -> tuple[Measured | None, int]:
    """Launch ranks; return their result with the copies to a GPU, or None, and the exit code."""
    from onefold.app.tools.bandwidth import LINK_TENSORS, check_memory, measure_copies

    check_memory(LINK_RANKS * LINK_TENSORS * (ask.nbytes or 0))
    copies = measure_copies(ask)
    code, found = measure_in_ranks(argv, LINK_RANKS)
    if code or found is None:
        return None, code or 1
    return {**found, "rates": found["rates"] | copies}, 0


def measure_link_as_rank(ask: Ask) -> tuple[Measured | None, int]:
    """Measure among the ranks of a launcher; return the result where it is to be printed."""
    from onefold.app.tools.bandwidth import measure_link

    return measure_as_rank(lambda world: measure_link(world, ask)), 0


def as_text(found: Measured) -> Iterator[str]:
    """Yield the lines of a table for people."""
    if found["target"] == "link":
        who, where = f"{found['ranks']} ranks over {found['backend']}", "gathered"
    else:
        who = f"the engine's step has its own {found['engine_threads']}"
        where = "of state on disk" if found["target"] == "disk" else "in one tensor"
    yield f"{format_bytes(found['nbytes'])} {where}; threads: {found['threads']}; {who}"
    yield from (f"path: {each['path']}" for each in found.get("paths", []))
    yield f"medians of {found['rounds']} rounds, in {found['seconds']:.1f} s"
    yield ""
    rows = [("", "GB/s", "low-high", "params/s", "share")]
    for name, rate in found["rates"].items():
        low, middle, high = (
            three_digits(rate[key] / 1e9) for key in ("lowest", "bytes_per_s", "highest")
        )
        stepped, share = rate["parameters_per_s"], rate["share"]
        steps = "" if stepped is None else f"{three_digits(stepped / 1e6)} M"
        part = "" if share is None else f"{format_share(share)} of {rate['of']}"
        rows.append((name, middle, f"{low}-{high}", steps, part))
    yield from columns(rows, "<>>><")
    if "wear" in found:
        written = format_bytes(found["wear"]["written_per_day"])
        yield f"\nwear: steps without a pause write {written} a day"
    yield from (line for note in found["notes"] for line in wrapped(f"note: {note}"))
