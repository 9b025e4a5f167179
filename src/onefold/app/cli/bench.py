"""`onefold bench`: measure this machine's bandwidths, and how much of them the engine reaches."""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from onefold.app.cli.arguments import SubParsers, add_command, positive, print_result, real
from onefold.app.cli.launch import is_rank, measure_as_rank, measure_in_ranks
from onefold.errors import ConfigError
from onefold.text import columns, format_bytes, format_share, three_digits, wrapped
from onefold.tier.host import MIB

if TYPE_CHECKING:
    from onefold.app.tools.bandwidth import Ask, Measured

DESCRIPTION = """\
Measure how fast this machine moves bytes, and the engine's share of that.

  disk  reads, writes and half of each past the page cache, and AdamW with all
        state on disk
  cpu   a copy in memory, torch's fused AdamW, and the engine's step of states
        in CPU memory
  link  an exchange, gathers and reductions between two local ranks, as bytes
        that one rank receives; and copies to a GPU and back

  onefold bench disk --path /fast/disk"""

LINK_RANKS = 2


def add_to(commands: SubParsers) -> None:
    """Add the command's flags."""
    summary = "measure disk, memory or link, and the engine's share"
    add = add_command(commands, "bench", run, summary, DESCRIPTION)
    add("target", choices=("disk", "cpu", "link"), help="the measured traffic")
    add(
        "--path",
        action="append",
        metavar="DIR",
        type=lambda _, text: Path(text),
        help="folder on the disk to measure; given again, several together (default: TMPDIR)",
    )
    add("--mib", type=positive, help="state on the disk, one tensor, or one gathered buffer, in "
        "MiB; more than the CPU's caches hold (default: 96, 64 or 32)")  # fmt: skip
    add("--seconds", type=partial(real, above=0), default=5, help="time to measure for, about")
    add("--threads", type=positive, help="threads of all but the engine's step, which has its own "
        "(default: as many as the engine)")  # fmt: skip


def run(arguments: argparse.Namespace, argv: Sequence[str]) -> int:
    """Measure, and print a table or JSON."""
    check_target(arguments.target, has_paths=bool(arguments.path))
    from onefold.app.tools.bandwidth import Ask, measure_cpu, measure_disk, measure_link

    ask = Ask(arguments.seconds, arguments.mib and arguments.mib * MIB, arguments.threads)
    code = 0
    if arguments.target == "cpu":
        measured = measure_cpu(ask)
    elif arguments.target == "disk":
        measured = measure_disk(arguments.path or [Path(tempfile.gettempdir())], ask)
    elif is_rank():
        measured = measure_as_rank(lambda world: measure_link(world, ask))
    else:
        measured, code = _measure_link(ask, argv)
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


def _measure_link(ask: Ask, argv: Sequence[str]) -> tuple[Measured | None, int]:
    """Launch ranks; return their result with the copies to a GPU, or None, and the exit code."""
    from onefold.app.tools.bandwidth import LINK_TENSORS, check_memory, measure_copies

    check_memory(LINK_RANKS * LINK_TENSORS * (ask.nbytes or 0))
    copies = measure_copies(ask)
    code, measured = measure_in_ranks(argv, LINK_RANKS)
    if code or measured is None:
        return None, code or 1
    return {**measured, "rates": measured["rates"] | copies}, 0


def as_text(measured: Measured) -> Iterator[str]:
    """Yield the lines of a table for people."""
    if measured["target"] == "link":
        who, where = f"{measured['ranks']} ranks over {measured['backend']}", "gathered"
    else:
        who = f"the engine's step has its own {measured['engine_threads']}"
        where = "of state on disk" if measured["target"] == "disk" else "in one tensor"
    yield f"{format_bytes(measured['nbytes'])} {where}; threads: {measured['threads']}; {who}"
    yield from (f"path: {folder['path']}" for folder in measured.get("paths", []))
    yield f"medians of {measured['rounds']} rounds, in {measured['seconds']:.1f} s"
    yield ""
    rows = [("", "GB/s", "low-high", "params/s", "share")]
    for name, rate in measured["rates"].items():
        low, middle, high = (
            three_digits(rate[key] / 1e9) for key in ("lowest", "bytes_per_s", "highest")
        )
        stepped, share = rate["parameters_per_s"], rate["share"]
        steps = "" if stepped is None else f"{three_digits(stepped / 1e6)} M"
        part = "" if share is None else f"{format_share(share)} of {rate['of']}"
        rows.append((name, middle, f"{low}-{high}", steps, part))
    yield from columns(rows, "<>>><")
    if "wear" in measured:
        written = format_bytes(measured["wear"]["written_per_day"])
        yield f"\nwear: steps without a pause write {written} a day"
    yield from (line for note in measured["notes"] for line in wrapped(f"note: {note}"))
