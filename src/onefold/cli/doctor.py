"""`onefold doctor`: list this machine's hardware and speeds, and limits that would hurt a run."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from onefold.cli.arguments import SubParsers, add_json
from onefold.cli.failures import is_rank
from onefold.cli.launch import measure_as_rank, measure_in_ranks

if TYPE_CHECKING:
    from onefold.tools.machine import HostReport

DESCRIPTION = """\
Measure memory, disk and the link between two local ranks, and list versions, backends and limits
that would hurt a run. Takes a few seconds. Under torchrun it measures the link between the
ranks that are there."""

LINK_RANKS = 2


def add_to(commands: SubParsers) -> None:
    """Add the command's flags."""
    summary = "list hardware, speeds, and limits that would hurt a run"
    parser = commands.add_parser("doctor", help=summary, description=DESCRIPTION)
    parser.set_defaults(run=run)
    add_json(parser)


def run(arguments: argparse.Namespace, argv: Sequence[str]) -> int:
    """Measure this host here, and the link in ranks of its own."""
    from onefold.tools.machine import describe, link_facts

    code = 0
    if is_rank():
        link = measure_as_rank(link_facts)
        if link is None:
            return 0
        machine = describe()
    else:
        machine = describe()
        code, link = measure_in_ranks(argv, LINK_RANKS)
    if arguments.json:
        print(json.dumps({**asdict(machine), "link": link}))
    else:
        print("\n".join(_lines(machine, link)))
    return code


def _lines(machine: HostReport, link: dict[str, Any] | None) -> Iterator[str]:
    """Yield a line for each fact, and the hint of each limit that hurts below."""
    from onefold.host import in_bytes

    speed = "not measured: the ranks failed"
    if link is not None:
        speed = f"{link['backend']} between {link['world_size']} ranks, "
        speed += f"gathers {in_bytes(link['received_per_s'])}/s"
    memory = f"{in_bytes(machine.memory_total)}, {in_bytes(machine.memory_free)} free"
    facts = {
        "versions": ", ".join(f"{name} {number}" for name, number in machine.versions.items()),
        "system": f"{machine.system}, {machine.cores} cores, {machine.threads} torch threads",
        "memory": f"{memory}, copies {in_bytes(machine.copy_per_s)}/s",
        "disk": f"{in_bytes(machine.disk_free)} free, writes "
        f"{in_bytes(machine.disk_write_per_s)}/s: {machine.disk_folder}",
        "link": speed,
        "backends": ", ".join(f"{name} {'yes' if has else 'no'}"
                              for name, has in machine.backends.items()),
        "GPUs": ", ".join(machine.gpus) or "none",
    }  # fmt: skip
    yield from (f"{name:26s}{value}" for name, value in facts.items())
    yield ""
    for limit in machine.limits:
        yield f"{limit.name:26s}{limit.value}"
        if limit.hint:
            yield f"  hint: {limit.hint}"
