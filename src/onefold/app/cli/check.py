"""`onefold check`: compare all stages with one process, on the tiny GPT or a user's module."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, TextIO

from onefold.app.cli.arguments import SubParsers, add_json, whole
from onefold.app.cli.failures import is_rank
from onefold.app.cli.launch import end_with_launcher, launch, world_size_of
from onefold.text import finite, wrapped

if TYPE_CHECKING:
    from onefold.app.tools.parity import StageVerdict, Verdict

DESCRIPTION = """\
Train a module in one process and at stages 0-3, on the same batches. Stages must give the same
bits as one another, and agree with the one process to 1e-6 per step. The exit code is 1 if not."""


def add_to(commands: SubParsers) -> None:
    """Add the command's flags."""
    summary = "compare every stage with one process, on your module"
    parser = commands.add_parser("check", help=summary, description=DESCRIPTION)
    parser.set_defaults(run=run)
    parser.add_argument(
        "model", nargs="?", metavar="module:function",
        help="called without arguments; returns a module from byte tokens to logits, or (module, "
        "batch, loss_fn) (default: the tiny GPT)",
    )  # fmt: skip
    parser.add_argument("--ranks", default="2", help="local processes to start")
    parser.add_argument("--steps", default="3", help="optimizer steps of each run")
    parser.add_argument("--seed", default="0", help="of initial weights and synthetic tokens")
    add_json(parser)


def run(arguments: argparse.Namespace, argv: Sequence[str]) -> int:
    """Launch the ranks, or compare as one of them."""
    steps = whole("--steps", arguments.steps, least=1)
    seed = whole("--seed", arguments.seed, least=0)
    ranks = whole("--ranks", arguments.ranks, least=1)
    model: str | None = arguments.model
    if not is_rank():
        if model is not None:
            from onefold.planner.models.loader import load_function

            load_function(model)
        return launch(argv, ranks)
    world_size_of(ranks if "--ranks" in argv else None)
    end_with_launcher()
    from onefold.app.tools.parity import check
    from onefold.wire.world import joined

    with joined() as world:
        verdict = check(model, steps=steps, seed=seed, world=world)
        if world.rank == 0 and arguments.json:
            print(json.dumps(finite({"passes": verdict.passes, **asdict(verdict)})))
        elif world.rank == 0:
            print_verdict(verdict, sys.stdout)
        sys.stdout.flush()
        world.gather(None)  # the launcher ends rank 0 as soon as another rank returns 1
    return 0 if verdict.passes else 1


def print_verdict(verdict: Verdict, stream: TextIO) -> None:
    """Print a row for each stage, then every difference."""
    print(
        f"{verdict.num_parameters:,d} parameters, {verdict.steps} steps, "
        f"{verdict.world_size} ranks against one process, relative",
        f"{'':10s}{'loss is off by':>18s}{'weights by':>18s}{'bits of stage 0':>18s}",
        *(_row(stage) for stage in verdict.stages),
        *_fault_lines(verdict),
        sep="\n",
        file=stream,
    )
    if verdict.passes:
        print("all stages agree", file=stream)
    elif verdict.hint:
        print(f"hint: {verdict.hint}", file=stream)


def _row(stage: StageVerdict) -> str:
    loss = f"{stage.loss_relative:.1e}"
    weights = f"{stage.weights.relative:.1e}" if stage.weights else "same"
    bits = "same" if stage.bits is None and stage.same_losses else "DIFFER"
    verdict = "ok" if stage.passes else "FAILS"
    return f"stage {stage.stage:<4d}{loss:>18s}{weights:>18s}{bits:>18s}   {verdict}"


def _fault_lines(verdict: Verdict) -> list[str]:
    """List every fault once, with the stages that have it."""
    stages: dict[str, list[str]] = {}
    for stage in verdict.stages:
        for fault in _faults(stage):
            stages.setdefault(fault, []).append(str(stage.stage))
    texts = [f"stage {', '.join(numbers)}: {fault}" for fault, numbers in stages.items()]
    return [line for text in texts for line in wrapped(text)]


def _faults(stage: StageVerdict) -> Iterator[str]:
    if not stage.loss_is_close:
        yield f"losses are off from one process by {stage.loss_relative:.1e}, relative"
    compared = {"one process": None if stage.weights_are_close else stage.weights,
                "stage 0": stage.bits}  # fmt: skip
    for other, worst in compared.items():
        if worst is not None:
            yield (
                f"{worst.parameter!r} differs most from {other}: by {worst.largest:.1e}, "
                f"{worst.relative:.1e} of its largest value ({worst.num_differing} parameters "
                "differ)"
            )
    if stage.bits is None and not stage.same_losses:
        yield "losses differ from stage 0, though the weights are the same"
    if stage.rank_differs:
        yield f"{stage.rank_differs!r} is not the same on every rank"
