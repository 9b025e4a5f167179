"""`onefold doctor`: what this machine has, and which of its limits would bite."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any, TextIO

from onefold.cli.arguments import SubParsers, add_json
from onefold.cli.failures import is_rank
from onefold.cli.launch import measure_as_rank, measure_in_ranks

if TYPE_CHECKING:
    from onefold.tools.machine import HostReport

DESCRIPTION = """\
Measure memory, disk and the link between two local ranks, and list versions, backends and limits
that would bite. Takes a few seconds. Under torchrun it measures the link between the ranks that
are there."""

LINK_RANKS = 2


def add_to(commands: SubParsers) -> None:
    """Add the command's flags."""
    summary = "what this machine has, and what would bite"
    parser = commands.add_parser("doctor", help=summary, description=DESCRIPTION)
    parser.set_defaults(run=run)
    add_json(parser)


def run(arguments: argparse.Namespace, argv: Sequence[str]) -> int:
    """Measure this host here, and the link in ranks of its own."""
    from onefold.tools.machine import describe, measure_link

    if is_rank():
        code, link = 0, measure_as_rank(measure_link)
        if link is None:
            return 0
        machine = describe()
    else:
        machine = describe()
        code, link = measure_in_ranks(argv, LINK_RANKS)
    _print(machine, link, sys.stdout, is_json=arguments.json)
    return code


def _print(
    machine: HostReport, link: dict[str, Any] | None, stream: TextIO, *, is_json: bool
) -> None:
    if is_json:
        print(json.dumps({**asdict(machine), "link": link}), file=stream)
        return
    from onefold.host import in_bytes

    def line(name: str, *parts: str) -> None:
        print(f"{name:26s}{', '.join(parts)}", file=stream)

    line("versions", *(f"{name} {number}" for name, number in machine.versions.items()))
    line("system", machine.system, f"{machine.cores} cores", f"{machine.threads} torch threads")
    line("memory", in_bytes(machine.memory_total), f"{in_bytes(machine.memory_free)} free",
         f"copies {in_bytes(machine.copy_per_s)}/s")  # fmt: skip
    line(f"disk {machine.disk_folder}", f"{in_bytes(machine.disk_free)} free",
         f"writes {in_bytes(machine.disk_write_per_s)}/s")  # fmt: skip
    if link is not None:
        speed = f"gathers {in_bytes(link['received_per_s'])}/s"
        line("link", f"{link['backend']} between {link['world_size']} ranks", speed)
    else:
        line("link", "not measured: the ranks failed")
    line("backends", *(f"{name} {'yes' if has else 'no'}"
                       for name, has in machine.backends.items()))  # fmt: skip
    line("GPUs", *(machine.gpus or ["none"]))
    print(file=stream)
    for limit in machine.limits:
        hint = f"   hint: {limit.hint}" if limit.hint else ""
        line(limit.name, f"{limit.value}{hint}")
