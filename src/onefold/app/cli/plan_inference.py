"""`onefold plan --inference`: does a streamed model fit, where do weights rest, how fast is it?"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from onefold.app.cli.arguments import whole
from onefold.errors import ConfigError
from onefold.text import (
    columns,
    counted,
    exact_bytes,
    format_bytes,
    format_rate,
    format_seconds,
    parse_nbytes,
    shell_lines,
    show,
    wrapped,
)
from onefold.tier.host import no_garbage

if TYPE_CHECKING:
    from onefold.inference.pass_plan import InferenceAsk, InferencePlan
    from onefold.planner.planning import Cluster

BUDGET_SHARE = 0.75
"""The share of a rank's memory that is for weights, where no budget is given: as in `stream`."""

LINKS = {"disk": "disk", "host": "CPU memory", "ranks": "other ranks"}

OWN = {"budget": None, "rest": None, "context": "2048"}
"""Flags of `--inference` alone, and their defaults."""

TRAINING = {"accumulate": "1", "precision": None, "stage": "auto", "wire": "auto",
            "recompute": False, "calibrate": False, "wide": False, "seq": "1024",
            "nodes": "1", "tp": "1", "pp": "1", "virtual": "1", "cp": "1", "ep": "1"}  # fmt: skip
"""Flags that mean nothing to inference, and their defaults."""


def check_flags(arguments: argparse.Namespace) -> None:
    """Refuse flags of the other kind of plan."""
    given, is_inference = vars(arguments), arguments.inference
    for name, default in (TRAINING if is_inference else OWN).items():
        if given[name] != default:
            wanted = f"--{name} {'without' if is_inference else 'beside'} --inference"
            got = "both" if is_inference else f"--{name} alone"
            raise ConfigError(wanted, got, hint=f"leave --{name} out")


def run_inference(arguments: argparse.Namespace, cluster: Cluster) -> int:
    """Plan, and print. Exit code 2 where it does not fit."""
    with no_garbage():
        from onefold.app.generate.sources import found, skeleton
        from onefold.inference.pass_plan import plan_inference

    ways = _ways(arguments, cluster)
    with found(arguments.model) as source:
        import torch

        with torch.device("meta"):
            module = skeleton(source)
    made: InferencePlan | None = None
    for index, ask in enumerate(ways):
        try:
            made = plan_inference(module, ask)
        except ConfigError:
            if index + 1 == len(ways):
                raise
            continue
        if made.fits:
            break
    assert made is not None, "the last way was planned, or has raised"
    name = source.name
    if arguments.json:
        print(json.dumps(as_dict(made, name)))
    else:
        show(as_text(made, name), sys.stdout)
    return 0 if made.fits else 2


def _ways(arguments: argparse.Namespace, cluster: Cluster) -> list[InferenceAsk]:
    """Return the ways to try, the fastest tier first."""
    from onefold.app.cli.generate import RESTS
    from onefold.inference.pass_plan import InferenceAsk

    rest: str | None = arguments.rest
    if rest is not None and rest not in RESTS:
        hint = "int8 loses least; leave --rest out for exact weights"
        raise ConfigError(f"--rest to be {' or '.join(RESTS)}", repr(rest), hint=hint)
    word, _, path = arguments.offload.partition(":")
    tiers: list[str | None] = [None, "cpu", "disk"]
    if word == "auto":
        tiers = tiers if cluster.device_type != "cpu" else [None, "disk"]
    elif word in ("none", "cpu", "disk"):
        tiers = [None if word == "none" else word]
    else:
        hint = "auto takes the fastest that fits"
        got = repr(arguments.offload)
        raise ConfigError("--offload to be auto, none, cpu or disk", got, hint=hint)
    memory: Any = cluster.memory
    budget = None if arguments.budget is None else parse_nbytes("--budget", arguments.budget)
    batch = None
    if arguments.batch not in ("1", "auto"):
        batch = whole("--batch", arguments.batch, least=1)
    machine: Any = cluster.machine
    if machine is None and arguments.gpus is None and cluster.device_type == "cpu":
        from onefold.app.generate.here import this_machine

        folders = path.split(":") if path else [tempfile.gettempdir()]
        if not all(Path(folder).is_dir() for folder in folders):
            got = repr(arguments.offload)
            hint = "create the folder first, or write --offload disk"
            raise ConfigError("--offload disk:PATH with a folder", got, hint=hint)
        machine = this_machine(cluster.ranks, folders if "disk" in tiers else [])
    ask = InferenceAsk(
        budget=budget or int(BUDGET_SHARE * memory), rest=rest, offload=None, ranks=cluster.ranks,
        device_type=cluster.device_type,
        context=whole("--context", arguments.context, least=1), batch=batch, memory=memory,
        host_memory=_of_rank(cluster.host_memory, cluster.ranks),
        disk=_of_rank(cluster.disk, cluster.ranks), machine=machine,
    )  # fmt: skip
    return [replace(ask, offload=tier) for tier in tiers]


def _of_rank(size: Any, ranks: int) -> int | None:
    return None if size is None else int(size) // ranks


def as_dict(made: InferencePlan, name: str) -> dict[str, Any]:
    """Return all numbers, for programs."""
    from dataclasses import asdict

    ask = made.ask
    return {
        "model": name, "parameters": made.numel, "fits": made.fits, "missing": made.missing,
        "ranks": ask.ranks, "device_type": ask.device_type, "budget": ask.budget,
        "rest": ask.rest, "offload": ask.offload or "none", "context": ask.context,
        "memory": ask.memory, "at_rest": made.held.at_rest, "read_a_pass": made.held.read,
        "peak": made.held.peak, "stay": made.held.stay, "num_stay": made.num_stay,
        "units": len(made.recipe.units), "kv_nbytes_a_token": made.kv_nbytes,
        "one": asdict(made.one), "best": asdict(made.best), "link": made.link,
        "machine": ask.machine.name if ask.machine else None, "estimates": made.estimates,
        "command": command(made, name),
    }  # fmt: skip


def command(made: InferencePlan, name: str) -> str:
    """Return the command that runs the plan."""
    ask = made.ask
    tier = "disk:PATH" if ask.offload == "disk" else ask.offload or "none"
    words = ["onefold generate", f"--model {name}", "--prompt TEXT"]
    words += [f"--budget {exact_bytes(ask.budget)}"]
    words += [f"--rest {ask.rest}"] if ask.rest else []
    return " ".join([*words, f"--offload {tier}", f"--ranks {ask.ranks}"])


def as_text(made: InferencePlan, name: str) -> Iterator[str]:
    """Yield a heading, facts and a table of batches, in 80 columns."""
    ask, held = made.ask, made.held
    where = "the CPU" if ask.device_type == "cpu" else "GPUs"
    yield from wrapped(f"{name}: {made.numel:,d} parameters, {counted(ask.ranks, 'rank')} on "
                       f"{where}, {format_bytes(ask.memory)} each")  # fmt: skip
    tiers = {None: "on the device", "cpu": "in CPU memory", "disk": "on disk"}
    rest = "exact" if ask.rest is None else ask.rest
    kept = f"{made.num_stay} of {counted(len(made.recipe.units), 'unit')} stay"
    read = (
        f"{format_bytes(held.read)} from {LINKS[made.link]}"
        if made.link
        else "nothing: all is there"
    )
    facts = [
        ("fits", _verdict(made)),
        ("weights rest", f"{tiers[ask.offload]}, {rest}: {format_bytes(held.at_rest)} a rank"),
        ("budget", f"{format_bytes(ask.budget)}: {kept}, {format_bytes(held.stay)}"),
        ("a pass reads", f"{read}{', on each rank' if ask.ranks > 1 else ''}"),
        ("weights hold", f"{format_bytes(held.peak)} at the peak"),
        ("KV cache", f"{format_bytes(made.kv_nbytes)} a token" if made.kv_nbytes else
         "none: a pass computes the whole context again"),
    ]  # fmt: skip
    yield from (line for row in facts for line in wrapped(f"{row[0]:14}{row[1]}", " " * 14))
    lines = [("batch", "memory", "a pass", "tokens/s", "bound by")]
    for each in dict.fromkeys((made.one, made.best)):
        times = format_seconds(each.seconds) if each.seconds else "?"
        speed = f"{each.tokens_per_s:,.2f}" if each.seconds else "?"
        lines.append((f"{each.batch:,d}", format_bytes(each.memory), times, speed, each.bound))
    yield from ("", f"at {ask.context:,d} tokens of context:", *columns(lines, ">"))
    yield from (part for note in _notes(made) for part in wrapped(note))
    words = command(made, name).split(" --")
    yield from ("", *shell_lines([words[0], *(f"--{word}" for word in words[1:])]))


def _verdict(made: InferencePlan) -> str:
    if not made.fits:
        short = ", ".join(f"{format_bytes(n)} short of {p}" for p, n in made.missing.items())
        return f"no: {short}"
    return f"yes: {format_bytes(made.one.memory)} of {format_bytes(made.ask.memory)} at batch 1"


def _notes(made: InferencePlan) -> Iterator[str]:
    machine = made.ask.machine
    if machine is None:
        yield "?: no times without --cluster MACHINE"
    elif machine.name == "this machine":
        disk = f", disk {format_rate(machine.disk_rate)}" if made.ask.offload == "disk" else ""
        yield f"measured here: memory {format_rate(machine.memory_rate)}{disk}, for a rank"
    else:
        yield f"times are those of {machine.name}'s data sheet, with the shares that runs reach"
    if made.best.batch > 1 and made.ask.batch is None:
        yield f"{made.best.batch:,d} sequences: twice as many do not fit, or gain less than 5 %"
    for estimate in made.estimates:
        yield f"estimated: {estimate}"
