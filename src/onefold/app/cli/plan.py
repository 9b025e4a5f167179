"""`onefold plan`: predict bytes and step times of every way to train a model, without a run."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from onefold.app.cli.arguments import SubParsers, add_json, whole, word_or_number
from onefold.app.cli.launch import default_ranks
from onefold.app.cli.plan_inference import check_flags, run_inference
from onefold.errors import ConfigError
from onefold.text import columns, format_seconds, format_share, parse_nbytes, show
from onefold.tier.host import no_garbage

if TYPE_CHECKING:
    from onefold.planner.planned_axes import ModelAxes
    from onefold.planner.planning import Cluster
    from onefold.planner.result import Plan

DESCRIPTION = """\
List every way to train a model on these devices: bytes per device, host and disk, whether they
fit, bytes sent, the time of a step, and the command for the best way. Nothing is run: one
micro-batch is traced without values. With --calibrate CPU ranks of this machine are measured
first, and step times are theirs. Without arguments: the tiny preset on this machine.

  onefold plan --model config.json --gpus 8 --nodes 8 --mem 80GiB --seq 4096 --precision bf16"""

CURVE = (1, 2, 4, 8, 16, 32, 64, 128)
"""Points of the scaling curve, as multiples of the world size of the plan."""
MAX_DEVICES = 16_384
STATE_NBYTES = 12
"""Bytes of a checkpoint per parameter: master and two moments."""


def add_to(commands: SubParsers) -> None:
    """Add the command's flags."""
    parser = commands.add_parser(
        "plan", help="will it fit, which stage, how fast", description=DESCRIPTION
    )
    parser.set_defaults(run=run)
    add = parser.add_argument
    # fmt: off
    add("--model", default="tiny", metavar="NAME|config.json|module:function",
        help="a preset, a Hugging Face config, or a function that returns a module")
    add("--gpus", metavar="N", help="GPUs of a node (default: those of this machine)")
    add("--ranks", metavar="N", help="plan for N processes of a node on the CPU instead")
    add("--nodes", default="1", metavar="M", help="machines")
    add("--mem", metavar="SIZE", help="memory of a GPU, or of all ranks of a node, as in 80GiB")
    add("--host-mem", metavar="SIZE", help="CPU memory of a node (default: what is free here, for "
        "the GPUs of this machine; else it is not checked)")
    add("--disk", metavar="SIZE", help="free disk of a node (default: it is not checked)")
    add("--seq", default="1024", help="tokens of a row")
    add("--batch", default="1", help="rows of one rank in a micro-batch; auto: as many as fit")
    add("--accumulate", default="1", help="micro-batches of a step")
    add("--precision", help="fp32, bf16 or fp16 (default: the parameters' own)")
    add("--stage", default="auto", help="0 to 3, or all of them")
    add("--offload", default="auto", metavar="none|optimizer|cpu|disk", help="or all of them")
    add("--wire", metavar="NAME", default="auto", help="messages between nodes: exact, hybrid, "
        "replicas; recommended, zero++, zero++diff (lossy). auto: the best of the exact ones, and "
        "the gain of the others")
    add("--recompute", action="store_true", help="run blocks again in backward")
    add("--tp", default="1", metavar="N", help="ranks of a tensor axis, neighbours in a node")
    add("--pp", default="1", metavar="N", help="ranks of a pipeline; --accumulate is its number of "
        "micro-batches")
    add("--virtual", default="1", metavar="N", help="pieces of the model on each rank of the "
        "pipeline, interleaved")
    add("--cp", default="1", metavar="N", help="ranks of a context axis, which cut sequences")
    add("--ep", default="1", metavar="N", help="ranks of dp x cp that share the experts")
    add("--cluster", metavar="MACHINE", help="predict step times on such machines, and how they "
        "scale: a100-40, a100-80, h100-80, h200, b200 ... With counts, all devices there are, also "
        "of several kinds: \"8xh100-80 + 16xa100-40\"")
    add("--calibrate", nargs="?", const=True, default=False, metavar="MODEL", help="measure CPU "
        "ranks here and predict their step times; with the name of a smaller model, measure that")
    add("--inference", action="store_true", help="plan `onefold generate` instead: passes over "
        "weights that stream, at batch 1 and at the best batch")
    add("--budget", metavar="SIZE", help="with --inference: memory of a rank for weights (default: "
        "three quarters of it)")
    add("--rest", metavar="int8|int4", help="with --inference: pack the matrices where they rest")
    add("--context", default="2048", help="with --inference: tokens of a sequence")
    add("--wide", action="store_true", help="print memory by kind, bytes sent and tokens/s as well")
    # fmt: on
    add_json(parser)


def run(arguments: argparse.Namespace, _: Sequence[str]) -> int:
    """Plan, and print. Exit code 2 where nothing fits."""
    check_flags(arguments)
    if arguments.inference:
        return run_inference(arguments, _cluster(arguments))
    _check_calibrate(arguments)
    with no_garbage():  # importing torch makes half a million objects
        from onefold.planner.planning import plan

    batch: Any = arguments.batch
    if batch != "auto":
        batch = whole("--batch", arguments.batch, least=1)
    made = plan(
        arguments.model,
        cluster=_kinds(arguments) or _cluster(arguments),
        seq=whole("--seq", arguments.seq, least=1),
        batch=batch,
        accumulate=whole("--accumulate", arguments.accumulate, least=1),
        precision=arguments.precision,
        stage=word_or_number(arguments.stage),
        offload=None if arguments.offload == "none" else arguments.offload,
        wire=arguments.wire,
        recompute=arguments.recompute,
        calibrate=arguments.calibrate,
        axes=_axes(arguments),
    )
    has_curve = arguments.cluster and not made.search.axes.are_used and made.mixed is None
    curve = _curve(made) if has_curve else []
    if arguments.json:
        print(json.dumps({**made.as_dict(), "scaling": curve}))
    else:
        show([*made.lines(is_wide=arguments.wide), *_curve_lines(curve)], sys.stdout)
    if not made.fits and not arguments.json:
        print("onefold plan: nothing fits", file=sys.stderr)
    return 0 if made.fits else 2


def _axes(arguments: argparse.Namespace) -> ModelAxes:
    from onefold.planner.planned_axes import ModelAxes

    names = ("tp", "pp", "cp", "ep", "virtual")
    return ModelAxes(**{name: whole(f"--{name}", vars(arguments)[name], least=1) for name in names})


def _check_calibrate(arguments: argparse.Namespace) -> None:
    """Refuse flags of other machines: a calibration holds for CPU ranks of this machine."""
    if arguments.calibrate is False:
        return
    others = {"--gpus": arguments.gpus, "--cluster": arguments.cluster}
    given = [flag for flag, value in others.items() if value is not None]
    if given:
        wanted = "--calibrate for the CPU ranks of this machine"
        hint = "leave one of the two out; --ranks N sets the number of ranks"
        raise ConfigError(wanted, f"it beside {given[0]}", hint=hint)


def _kinds(arguments: argparse.Namespace) -> tuple[Cluster, ...]:
    """Return the devices that `--cluster` counts; none where it names a machine, or is absent."""
    from onefold.planner.clusters import names_kinds, parsed

    if arguments.cluster is None or not names_kinds(arguments.cluster):
        return ()
    others = {"--gpus": arguments.gpus, "--ranks": arguments.ranks, "--mem": arguments.mem}
    others["--nodes"] = None if arguments.nodes == "1" else arguments.nodes
    given = [flag for flag, value in others.items() if value is not None]
    if given:
        hint = f"leave {given[0]} out: nodes and memory are those of the machines"
        raise ConfigError("--cluster with counts alone", f"{given[0]} too", hint=hint)
    host_memory, disk = _size("--host-mem", arguments.host_mem), _size("--disk", arguments.disk)
    return parsed(arguments.cluster, host_memory=host_memory, disk=disk)


def _cluster(arguments: argparse.Namespace) -> Cluster:
    """Return the devices of the flags, or of this machine."""
    import torch

    from onefold.planner.machines import machine_of
    from onefold.planner.planning import Cluster
    from onefold.tier.host import free_host_nbytes

    counts = {"--gpus": arguments.gpus, "--ranks": arguments.ranks}
    given = [(flag, text) for flag, text in counts.items() if text is not None]
    if len(given) > 1:
        hint = "--ranks plans for processes on the CPU"
        raise ConfigError("--gpus or --ranks", "both", hint=hint)
    machine = None if arguments.cluster is None else machine_of(arguments.cluster)
    has_gpus = torch.accelerator.is_available()
    has_machine = arguments.gpus is not None or machine is not None
    on_gpus = arguments.ranks is None and (has_machine or has_gpus)
    if given:
        count = whole(*given[0], least=1)
    else:
        count = default_ranks() if machine is None else machine.ranks_per_node
    memory, host_memory = _size("--mem", arguments.mem), _size("--host-mem", arguments.host_mem)
    if host_memory is None and on_gpus and not has_machine:
        host_memory = free_host_nbytes()
    if not on_gpus:
        memory = (memory or free_host_nbytes()) // count
    elif memory is None and machine is not None:
        memory = int(machine.memory_nbytes)
    elif memory is None and has_gpus:
        memory = torch.accelerator.get_memory_info()[1]
    elif memory is None:
        hint = "--mem 80GiB, or --cluster h100-80"
        raise ConfigError("--mem beside --gpus", "none", hint=hint)
    return Cluster(
        ranks=count,
        nodes=whole("--nodes", arguments.nodes, least=1),
        device_type="cuda" if on_gpus else "cpu",
        memory=memory,
        host_memory=host_memory,
        disk=_size("--disk", arguments.disk),
        machine=machine,
    )


def _size(flag: str, text: str | None) -> int | None:
    return None if text is None else parse_nbytes(flag, text)


def _curve(made: Plan) -> list[dict[str, float]]:
    """Return the tokens/s per device of the best plan on more and more nodes, and its goodput."""
    from onefold.planner.simulate import goodput, scaling_curve

    row, search, machine = made.best, made.search, made.search.machine
    if row is None or machine is None:
        return []
    worlds = [made.world_size * factor for factor in CURVE]
    worlds = [world for world in worlds if world <= MAX_DEVICES]
    work = search.trace_of(row.rows).work(row.rows * search.tokens)
    found: list[dict[str, float]] = []
    recipe, conditions = row.forecast.recipe, search.conditions
    for point in scaling_curve(work, recipe, machine, worlds, conditions):
        world, step = point.world_size, point.step
        written = STATE_NBYTES * made.numel / world / machine.disk_rate
        useful = goodput(step.seconds, world_size=world, checkpoint_seconds=written)
        found.append(
            {"devices": world, "seconds": step.seconds,
             "tokens_per_s_per_device": step.tokens_per_s / world, "efficiency": point.efficiency,
             "useful_share": useful.share, "steps_between_checkpoints": useful.steps}
        )  # fmt: skip
    return found


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
