"""`onefold plan --inference`: does a streamed model fit, where do weights rest, how fast is it?"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Any

from onefold.app.cli.arguments import first_set, print_result
from onefold.errors import ConfigError
from onefold.text import (
    columns,
    counted,
    exact_bytes,
    format_bytes,
    format_seconds,
    shell_lines,
    wrapped,
)
from onefold.tier.host import no_garbage

if TYPE_CHECKING:
    from onefold.inference.pass_plan import InferenceAsk, InferencePlan
    from onefold.planner.clusters import Cluster

BUDGET_SHARE = 0.75
"""The share of a rank's memory that is for weights, where no budget is given: as in `stream`."""

LINKS = {"disk": "disk", "host": "CPU memory", "ranks": "other ranks"}

OWN = ("budget", "rest", "context")
"""Flags of `--inference` alone."""

TRAINING = ("accumulate", "precision", "dtype", "stage", "wire", "recompute", "wide", "seq",
            "nodes", "tp", "pp", "virtual", "cp", "ep")  # fmt: skip
"""Flags that mean nothing to inference."""


def check_flags(arguments: argparse.Namespace) -> None:
    """Refuse flags of the other kind of plan."""
    is_inference = arguments.inference
    if (name := first_set(arguments, TRAINING if is_inference else OWN)) is not None:
        wanted = f"--{name} {'without' if is_inference else 'with'} --inference"
        got = "both" if is_inference else f"--{name} alone"
        raise ConfigError(wanted, got, hint=f"leave --{name} out")


def run_inference(arguments: argparse.Namespace, cluster: Cluster) -> int:
    """Plan, and print. Exit code 2 where it does not fit."""
    with no_garbage():
        from onefold.app.generate.sources import opened, skeleton
        from onefold.inference.pass_plan import plan_inference
        from onefold.planner.models.loader import left_out

    requests = _requests(arguments, cluster)
    with opened(arguments.model) as source:
        import torch

        with torch.device("meta"):
            module = skeleton(source)
    plan: InferencePlan | None = None
    for request in requests:
        try:
            plan = plan_inference(module, request)
        except ConfigError:
            if request is requests[-1]:
                raise
            continue
        if plan.fits:
            break
    assert plan is not None, "the last request was planned, or has raised"
    if source.config is not None:
        notes = left_out(str(source.config), module)
        plan = replace(plan, estimates=(*plan.estimates, *notes))
    print_result(arguments, as_dict(plan, source.name), as_text(plan, source.name))
    return 0 if plan.fits else 2


def _requests(arguments: argparse.Namespace, cluster: Any) -> list[InferenceAsk]:
    """Return the plans to try, the fastest tier first."""
    from onefold.inference.pass_plan import InferenceAsk

    word = arguments.offload.partition(":")[0]
    tiers = {"auto": [None, "cpu", "disk"], "none": [None], "cpu": ["cpu"], "disk": ["disk"]}
    if word not in tiers:
        hint = "auto takes the fastest that fits"
        got = repr(arguments.offload)
        raise ConfigError("--offload to be auto, none, cpu or disk", got, hint=hint)
    on_cpu = cluster.device_type == "cpu"
    tried = [tier for tier in tiers[word] if word != "auto" or tier != "cpu" or not on_cpu]
    memory = cluster.memory
    request = InferenceAsk(
        budget=arguments.budget or int(BUDGET_SHARE * memory), rest=arguments.rest, offload=None,
        ranks=cluster.ranks, device_type=cluster.device_type, context=arguments.context,
        batch=None if arguments.batch in (1, "auto") else arguments.batch, memory=memory,
        host_memory=_of_rank(cluster.host_memory, cluster.ranks),
        disk=_of_rank(cluster.disk, cluster.ranks), machine=cluster.machine,
    )  # fmt: skip
    return [replace(request, offload=tier) for tier in tried]


def _of_rank(size: int | None, ranks: int) -> int | None:
    return None if size is None else size // ranks


def as_dict(plan: InferencePlan, name: str) -> dict[str, Any]:
    """Return all numbers, for programs."""
    ask = plan.ask
    return {
        "model": name, "parameters": plan.numel, "fits": plan.fits, "missing": plan.missing,
        "ranks": ask.ranks, "device_type": ask.device_type, "budget": ask.budget,
        "rest": ask.rest, "offload": ask.offload or "none", "context": ask.context,
        "memory": ask.memory, "at_rest": plan.held.at_rest, "read_a_pass": plan.held.read,
        "peak": plan.held.peak, "stay": plan.held.stay, "num_stay": plan.num_stay,
        "units": len(plan.recipe.units), "kv_nbytes_a_token": plan.kv_nbytes,
        "one": asdict(plan.one), "best": asdict(plan.best), "link": plan.link,
        "machine": ask.machine.name if ask.machine else None, "estimates": plan.estimates,
        "command": command(plan, name),
    }  # fmt: skip


def command(plan: InferencePlan, name: str) -> str:
    """Return the command that runs the plan."""
    ask = plan.ask
    tier = "disk:PATH" if ask.offload == "disk" else ask.offload or "none"
    words = ["onefold generate", f"--model {name}", "--prompt TEXT"]
    words += [f"--budget {exact_bytes(ask.budget)}"]
    words += [f"--rest {ask.rest}"] if ask.rest else []
    return " ".join([*words, f"--offload {tier}", f"--ranks {ask.ranks}"])


def as_text(plan: InferencePlan, name: str) -> Iterator[str]:
    """Yield a heading, facts and a table of batches, in 80 columns."""
    ask, held = plan.ask, plan.held
    where = "the CPU" if ask.device_type == "cpu" else "GPUs"
    yield from wrapped(f"{name}: {plan.numel:,d} parameters, {counted(ask.ranks, 'rank')} on "
                       f"{where}, {format_bytes(ask.memory)} each")  # fmt: skip
    tiers = {None: "on the device", "cpu": "in CPU memory", "disk": "on disk"}
    rest = "exact" if ask.rest is None else ask.rest
    kept = f"{plan.num_stay} of {counted(len(plan.recipe.units), 'unit')} stay"
    source = f"{format_bytes(held.read)} from {LINKS[plan.link]}" if plan.link else ""
    read = source or "nothing: all is there"
    facts = [
        ("fits", _verdict(plan)),
        ("weights rest", f"{tiers[ask.offload]}, {rest}: {format_bytes(held.at_rest)} a rank"),
        ("budget", f"{format_bytes(ask.budget)}: {kept}, {format_bytes(held.stay)}"),
        ("a pass reads", f"{read}{', on each rank' if ask.ranks > 1 else ''}"),
        ("weights hold", f"{format_bytes(held.peak)} at the peak"),
        ("KV cache", f"{format_bytes(plan.kv_nbytes)} a token" if plan.kv_nbytes else
         "not known, and not counted" if not plan.is_traced else
         "none: a pass computes the whole context again"),
    ]  # fmt: skip
    yield from (line for row in facts for line in wrapped(f"{row[0]:14}{row[1]}", " " * 14))
    has_times = ask.device_type != "cpu"
    lines = [("batch", "memory", *("a pass", "tokens/s", "bound by") * has_times)]
    for batch in dict.fromkeys((plan.one, plan.best)):
        times = format_seconds(batch.seconds) if batch.seconds else "?"
        speed = f"{batch.tokens_per_s:,.2f}" if batch.seconds else "?"
        cells = f"{batch.batch:,d}", format_bytes(batch.memory)
        lines.append((*cells, *(times, speed, batch.bound) * has_times))
    yield from ("", f"at {ask.context:,d} tokens of context:", *columns(lines, ">"))
    yield from (part for note in _notes(plan) for part in wrapped(note))
    words = command(plan, name).split(" --")
    yield from ("", *shell_lines([words[0], *(f"--{word}" for word in words[1:])]))


def _verdict(plan: InferencePlan) -> str:
    if not plan.fits:
        short = ", ".join(f"{format_bytes(n)} short of {p}" for p, n in plan.missing.items())
        return f"no: {short}"
    return f"yes: {format_bytes(plan.one.memory)} of {format_bytes(plan.ask.memory)} at batch 1"


def _notes(plan: InferencePlan) -> Iterator[str]:
    from onefold.inference.pass_plan import MAX_BATCH

    machine = plan.ask.machine
    if machine is not None:
        yield f"times are those of {machine.name}'s data sheet, with the shares that runs reach"
    elif plan.ask.device_type != "cpu":
        yield "?: no times without --gpu MACHINE"
    if plan.best.batch > 1 and plan.ask.batch is None:
        why = "twice as many do not fit, or gain less than 5 %"
        if plan.ask.device_type == "cpu":
            why = f"the largest power of two that fits, up to {MAX_BATCH:,d}"
        yield f"{plan.best.batch:,d} sequences: {why}"
    for estimate in plan.estimates:
        yield f"estimated: {estimate}"
