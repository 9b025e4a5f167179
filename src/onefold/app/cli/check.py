"""`onefold check`: compare all stages with one process, on the tiny GPT or a user's module."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING

from onefold.app.cli.arguments import SubParsers, add_command, natural, positive, print_result
from onefold.app.cli.launch import end_with_launcher, is_rank, launch, world_size_of
from onefold.text import columns, wrapped

if TYPE_CHECKING:
    from onefold.app.tools.parity import StageVerdict, Verdict

DESCRIPTION = """\
Train a module in one process and at stages 0-3, on the same batches. Stages must be
bitwise identical to one another, and within 1e-6 of one process in each step. The exit code is 1
if they are not.

  onefold check
  onefold check package.models:build --ranks 3"""


def add_to(commands: SubParsers) -> None:
    """Add the command's flags."""
    summary = "compare every stage with one process, on your module"
    add = add_command(commands, "check", run_check, summary, DESCRIPTION)
    add("model", nargs="?", metavar="module:function", help="called without arguments; returns a "
        "module from byte tokens to logits, or (module, batch, loss_fn) (default: the tiny "
        "GPT)")  # fmt: skip
    add("--ranks", type=positive, default=2, help="local processes to start")
    add("--steps", type=positive, default=3, help="optimizer steps of each run")
    add("--seed", type=natural, default=0, help="of initial weights and synthetic tokens")


def run_check(arguments: argparse.Namespace, argv: Sequence[str]) -> int:
    """Launch the ranks, or compare as one of them."""
    model: str | None = arguments.model
    if not is_rank():
        if model is not None:
            from onefold.planner.models.loader import load_function

            load_function(model)
        return launch(argv, arguments.ranks)
    world_size_of(arguments.ranks if "--ranks" in argv else None)
    end_with_launcher()
    from onefold.app.tools.parity import check
    from onefold.wire.world import joined

    with joined() as world:
        verdict = check(model, steps=arguments.steps, seed=arguments.seed, world=world)
        if world.rank == 0:
            facts = {"passes": verdict.passes, **asdict(verdict)}
            print_result(arguments, facts, verdict_lines(verdict))
        sys.stdout.flush()
        world.group.gather(None)  # the launcher ends rank 0 as soon as another rank returns 1
    return 0 if verdict.passes else 1


def verdict_lines(verdict: Verdict) -> Iterator[str]:
    """Yield a row for each stage, then every difference once, with the stages that have it."""
    yield (
        f"{verdict.num_parameters:,d} parameters, {verdict.steps} steps, "
        f"{verdict.world_size} ranks against one process, relative"
    )
    heads = ("", "loss is off by", "weights by", "against stage 0", "")
    yield from columns([heads, *map(_stage_cells, verdict.stages)], "<>>><")
    stages: dict[str, list[str]] = {}
    for stage in verdict.stages:
        for fault in _faults(stage):
            stages.setdefault(fault, []).append(str(stage.stage))
    for fault, numbers in stages.items():
        yield from wrapped(f"stage {', '.join(numbers)}: {fault}")
    if verdict.passes:
        yield "all stages agree"
    elif verdict.hint:
        yield f"hint: {verdict.hint}"


def _stage_cells(stage: StageVerdict) -> tuple[str, ...]:
    weights = f"{stage.weights.relative:.1e}" if stage.weights else "same"
    bits = "same" if stage.bits is None and stage.same_losses else "DIFFER"
    verdict = "ok" if stage.passes else "FAILS"
    return f"stage {stage.stage}", f"{stage.loss_relative:.1e}", weights, bits, verdict


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
