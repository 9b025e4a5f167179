"""`onefold plan`: predict bytes and step times of every way to train a model, without a run."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from onefold.app.cli.arguments import (
    SubParsers,
    add_command,
    or_auto,
    positive,
    print_result,
    word_or_number,
)
from onefold.app.cli.generate import packing
from onefold.app.cli.launch import default_ranks
from onefold.app.cli.plan_inference import check_flags, run_inference
from onefold.errors import ConfigError
from onefold.text import columns, format_seconds, format_share, parse_nbytes
from onefold.tier.host import no_garbage

if TYPE_CHECKING:
    from onefold.planner.result import Plan

DESCRIPTION = """\
Predict the peak memory and the messages of every stage and offload on these
devices, show which of them fit, and print the command for the best one. Nothing
is trained: one micro-batch is traced without allocating memory. With --gpu, step
times are estimated from data sheets; CPU ranks have none. Without arguments: the
tiny preset on this machine.

  onefold plan --model llama-8b --gpu h100-80
  onefold plan --model config.json --gpus 8 --nodes 8 --mem 80GiB --seq 4096"""

DEVICES = ("gpus", "ranks", "nodes", "mem", "host_mem", "disk", "machines")
CHOICES = ("cluster", "seq", "batch", "accumulate", "precision", "dtype", "stage", "offload",
           "wire", "recompute")  # fmt: skip
"""Flags that are arguments of `onefold.plan`."""

AXES = {
    "tp": "tensor-parallel ranks, neighbors in a node",
    "pp": "pipeline ranks; --accumulate is the number of micro-batches",
    "virtual": "interleaved pieces of the model on each pipeline rank",
    "cp": "context-parallel ranks, which split sequences",
    "ep": "ranks of dp x cp that divide the experts",
}

CURVE = (1, 2, 4, 8, 16, 32, 64, 128)
"""Points of the scaling curve, as multiples of the world size of the plan."""
MAX_DEVICES = 16_384
STATE_NBYTES = 12
"""Bytes of a checkpoint per parameter: master and two moments."""


def add_to(commands: SubParsers) -> None:
    """Add the command's flags."""
    add = add_command(commands, "plan", run_plan, "will it fit, which stage, how fast", DESCRIPTION)
    # fmt: off
    add("--model", default="tiny", metavar="NAME|config.json|module:function",
        help="a preset, a Hugging Face config, or a function that returns a module; presets: "
        "llama-8b, llama-70b, mixtral-8x7b, qwen3-30b-a3b, and those of `onefold train`")
    add("--gpus", type=positive, metavar="N", help="GPUs of a node (default: those of this "
        "machine)")
    add("--ranks", type=positive, metavar="N", help="plan for N processes of a node on the CPU "
        "instead")
    add("--nodes", type=positive, default=1, metavar="M", help="machines")
    add("--mem", type=parse_nbytes, metavar="SIZE", help="memory of a GPU, or of all ranks of a "
        "node, as in 80GiB")
    add("--host-mem", type=parse_nbytes, metavar="SIZE", help="CPU memory of a node (default: what "
        "is free here, for the GPUs of this machine; else it is not checked)")
    add("--disk", type=parse_nbytes, metavar="SIZE", help="free disk of a node (default: it is not "
        "checked)")
    add("--seq", type=positive, default=1024, help="tokens of a row")
    add("--batch", type=or_auto(positive), default=1, help="rows of one rank in a micro-batch; "
        "auto: as many as fit")
    add("--accumulate", type=positive, default=1, help="micro-batches of a step")
    add("--precision", help="fp32, bf16 or fp16 (default: the parameters' own)")
    add("--dtype", metavar="fp32|bf16|fp16", help="dtype of the weights; masters of narrow ones "
        "are fp32 (default: that of the configuration, else fp32)")
    add("--stage", type=word_or_number, default="auto", help="0 to 3, or all of them")
    add("--offload", default="auto", metavar="none|optimizer|cpu|disk", help="or all of them")
    add("--wire", metavar="NAME", default="auto", help="messages between nodes: exact, hybrid, "
        "replicas; recommended, zero++, zero++diff (lossy). auto: the best of the exact ones, and "
        "the gain of the others")
    add("--recompute", action="store_true", help="activation checkpointing: recompute blocks")
    for axis, meaning in AXES.items():
        add(f"--{axis}", type=positive, default=1, metavar="N", help=meaning)
    add("--gpu", "--cluster", dest="cluster", metavar="MACHINE", type=_machine, help="predict "
        "step times on these GPUs, and how they scale: a100-80, h100-80, mi300x, rtx-4090 ... "
        "With counts, all devices of a cluster, even of several kinds: \"8xh100-80 + 16xa100-40\"")
    add("--machines", metavar="FILE", help="a TOML file of more GPUs for --gpu, in the form of "
        "onefold/planner/machines.toml")
    add("--inference", action="store_true", help="plan `onefold generate` instead: passes over "
        "weights that stream, at batch 1 and at the best batch")
    add("--budget", type=parse_nbytes, metavar="SIZE", help="with --inference: memory of a rank "
        "for weights (default: three quarters of it)")
    add("--rest", type=packing, metavar="int8|int4", help="with --inference: quantize the "
        "stored matrices")
    add("--context", type=positive, default=2048, help="with --inference: tokens of a sequence")
    add("--wide", action="store_true", help="print memory by kind, bytes sent, "
        "tokens/s and the speed on more devices as well")
    # fmt: on


def _machine(flag: str, text: str) -> str:
    """Return the name of a machine, or of several, which is no number of GPUs."""
    if text.isdecimal():
        wanted = f"{flag} to name a machine, such as h100-80"
        raise ConfigError(wanted, repr(text), hint=f"did you mean --gpus {text}?")
    return text


def run_plan(arguments: argparse.Namespace, _: Sequence[str]) -> int:
    """Plan, and print. Exit code 2 where nothing fits."""
    check_flags(arguments)
    flags = vars(arguments)
    devices = {name: flags[name] for name in DEVICES}
    if arguments.inference:
        from onefold.planner.clusters import Devices

        cluster = Devices(**devices).on(arguments.cluster, default_ranks())
        return run_inference(arguments, cluster)
    with no_garbage():  # importing torch makes half a million objects
        from onefold.planner.planned_axes import ModelAxes
        from onefold.planner.planning import plan

    result = plan(
        arguments.model,
        world_size=default_ranks(),
        axes=ModelAxes(**{axis: flags[axis] for axis in AXES}),
        **devices,
        **{name: flags[name] for name in CHOICES},
    )
    has_curve = arguments.cluster and not result.search.axes.are_used and result.mixed is None
    curve = _curve(result) if has_curve and (arguments.wide or arguments.json) else []
    facts = {**result.as_dict(), "scaling": curve} if arguments.json else {}
    lines = (*result.lines(is_wide=arguments.wide), *_curve_lines(curve))
    print_result(arguments, facts, lines)
    if not result.fits and not arguments.json:
        print("onefold plan: nothing fits", file=sys.stderr)
    return 0 if result.fits else 2


def _curve(plan: Plan) -> list[dict[str, float]]:
    """Return the tokens/s per device of the best plan on more and more nodes, and its goodput."""
    from onefold.planner.simulate import goodput, scaling_curve

    row, search, machine = plan.best, plan.search, plan.search.machine
    if row is None or machine is None:
        return []
    worlds = [plan.world_size * factor for factor in CURVE]
    worlds = [world for world in worlds if world <= MAX_DEVICES]
    work = search.trace_of(row.rows).work(row.rows * search.tokens)
    curve: list[dict[str, float]] = []
    recipe, conditions = row.forecast.recipe, search.conditions
    for point in scaling_curve(work, recipe, machine, worlds, conditions):
        world, step = point.world_size, point.step
        written = STATE_NBYTES * plan.numel / world / machine.disk_rate
        useful = goodput(step.seconds, world_size=world, checkpoint_seconds=written)
        curve.append(
            {"devices": world, "seconds": step.seconds,
             "tokens_per_s_per_device": step.tokens_per_s / world, "efficiency": point.efficiency,
             "useful_share": useful.share, "steps_between_checkpoints": useful.steps}
        )  # fmt: skip
    return curve


def _curve_lines(curve: list[dict[str, float]]) -> Iterator[str]:
    if not curve:
        return
    heads = ("devices", "step", "tokens/s per device", "efficiency", "useful", "save every")
    lines = [
        (f"{point['devices']:,.0f}", format_seconds(point["seconds"]),
         f"{point['tokens_per_s_per_device']:,.0f}", format_share(point['efficiency']),
         format_share(point['useful_share']), f"{point['steps_between_checkpoints']:,.0f} steps")
        for point in curve
    ]  # fmt: skip
    yield from ("", "the same rows a rank on more devices:", *columns([heads, *lines], ">"))
    yield "useful: share of the time that failures and saves leave, at the best interval"
