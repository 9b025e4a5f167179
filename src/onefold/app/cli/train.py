"""`onefold train`: train a byte GPT, or any module, on a folder of text, sharded over ranks."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from math import prod
from typing import Any

from onefold.app.cli.arguments import SubParsers, add_json, real, share, whole, word_or_number
from onefold.app.cli.failures import is_rank
from onefold.app.cli.launch import default_ranks, end_with_launcher, launch, world_size_of
from onefold.app.train.job import Job
from onefold.text import finite

DEFAULTS = Job()
AXES = ("tp", "pp", "cp")

DESCRIPTION = """\
Train a byte-level GPT, or a module of yours, sharded over ranks. Without arguments: two local CPU
ranks (or one for each GPU), stage 3, on the source of Python's standard library, in about half a
minute. Under torchrun it joins the ranks that are there."""


def add_to(commands: SubParsers) -> None:
    """Add the command's flags."""
    summary = "train a byte GPT or your module, sharded"
    parser = commands.add_parser("train", help=summary, description=DESCRIPTION)
    parser.set_defaults(run=run)
    add = parser.add_argument
    # fmt: off
    add("--stage", default="3", help="0 replicates, 1 shards optimizer state, 2 also gradients, "
        "3 also parameters; auto: the lowest that fits")
    add("--offload", metavar="optimizer|cpu|disk:PATH", help="keep optimizer states, or parameters "
        "too, in CPU memory, or all in files on a disk; with --clip 0 units step inside backward")
    add("--fraction", metavar="F", help="share of the optimizer state to offload, or auto "
        "(default: all)")
    add("--shares", metavar="W,W,...|auto", help="how much state each rank holds, as weights in "
        "rank order; auto: as even as the free memory allows (default: all the same)")
    add("--recompute", action="store_true", help="run blocks again in backward instead of keeping "
        "their activations")
    add("--compile", action="store_true", help="run blocks through torch.compile in training; the "
        "first step compiles, for up to a minute")
    add("--ranks", help="local processes to start (default: one for each GPU, or 2)")
    add("--model", default=DEFAULTS.model, metavar="NAME|config.json|module:function",
        help="tiny, mini, small, large (0.9, 5, 57, 1000 M parameters), a Hugging Face config, "
        "or a function that returns a module from byte tokens to logits")
    add("--data", metavar="DIR", help="folder of text files (default: the standard library)")
    add("--steps", default=str(DEFAULTS.steps), help="optimizer steps")
    add("--batch", default="8", help="rows of one rank in a micro-batch")
    add("--rows", metavar="auto|W,W", help="rows of a step that each rank takes: auto, by measured "
        "speed, or one weight a rank, such as 3,1 (default: equal)")
    add("--seq", default=str(DEFAULTS.seq), help="bytes in a row")
    add("--accumulate", default=str(DEFAULTS.accumulate), help="micro-batches in a step")
    add("--tp", default="1", metavar="N", help="ranks that share each layer (tensor parallel)")
    add("--pp", default="1", metavar="N", help="ranks that have blocks one after the other "
        "(pipeline); --accumulate gives its micro-batches")
    add("--cp", default="1", metavar="N", help="ranks that share each row (sequence parallel)")
    add("--precision", help="fp32, bf16 or fp16 compute; masters and sums stay fp32 "
        "(default: the parameters' own)")
    add("--wire", metavar="NAME", help="messages between hosts: hybrid, replicas (exact); "
        "recommended, zero++, zero++diff (fewer bytes)")
    add("--lr", help="peak learning rate (default: depends on the model)")
    add("--clip", default=str(DEFAULTS.clip), help="largest gradient norm, 0 for any")
    add("--seed", default=str(DEFAULTS.seed), help="of initial weights, batches and text")
    add("--sample", default=str(DEFAULTS.sample), help="bytes of text to write at the end")
    add("--checkpoint", metavar="DIR", help="save there after the last step, and when interrupted "
        "(SIGTERM, Ctrl-C)")
    add("--every", metavar="N", help="save after every N steps as well")
    add("--keep", metavar="K", default=str(DEFAULTS.keep), help="newest checkpoints to keep")
    add("--resume", action="store_true", help="continue from the newest complete checkpoint in "
        "DIR, if there is one")
    add("--report", metavar="DIR", help="write a page about the run there: memory and timeline of "
        "one step, loss, bytes sent")
    # fmt: on
    add_json(parser)


def run(arguments: argparse.Namespace, argv: Sequence[str]) -> int:
    """Launch the ranks, or be one."""
    given = arguments.ranks
    ranks = None if given is None else whole("--ranks", given, least=1)
    if is_rank():
        return _run_rank(job_of(arguments, world_size_of(ranks)), is_json=arguments.json)
    job_of(arguments, 1)  # bad flags end here, before torch is imported
    from onefold.app.train.loop import preflight

    if ranks is None:
        ranks = max(default_ranks(), _model_ranks({n: int(vars(arguments)[n]) for n in AXES}))
    job = job_of(arguments, ranks)
    preflight(job, ranks)
    return launch(argv, ranks, passes_stops_on=job.checkpoint is not None)


def job_of(arguments: argparse.Namespace, world_size: int) -> Job:
    """Return the run that the flags describe, on so many ranks."""
    given = vars(arguments)
    rows = whole("--batch", given["batch"], least=1)
    least = {"steps": 1, "seq": 1, "accumulate": 1, "seed": 0, "sample": 0, "keep": 1,
             "tp": 1, "pp": 1, "cp": 1}  # fmt: skip
    checked: dict[str, Any] = {
        name: whole(f"--{name}", given[name], least=number) for name, number in least.items()
    }
    texts = ("model", "data", "offload", "recompute", "compile", "precision", "wire", "checkpoint",
             "report", "resume")  # fmt: skip
    fraction = given["fraction"]
    if fraction != "auto":
        fraction = 1.0 if fraction is None else share("--fraction", fraction)
    return Job(
        **{name: given[name] for name in texts},
        **checked,
        rows=rows * max(1, world_size // _model_ranks(checked)) * checked["accumulate"],
        row_shares=_weights("--rows", given["rows"]),
        stage=word_or_number(given["stage"]),
        fraction=fraction,
        shares=_weights("--shares", given["shares"]),
        lr=None if given["lr"] is None else real("--lr", given["lr"], above=0),
        clip=real("--clip", given["clip"], least=0),
        every=0 if given["every"] is None else whole("--every", given["every"], least=1),
    )


def _weights(flag: str, text: str | None) -> str | tuple[float, ...] | None:
    """Read "3,1" as weights; integers keep their ratios exactly."""
    if text is None or text == "auto":
        return text
    numbers = [real(flag, each, least=0) for each in text.split(",")]
    return tuple(int(each) if each == int(each) else each for each in numbers)


def _model_ranks(checked: Mapping[str, int]) -> int:
    return prod(checked[name] for name in AXES)


def _run_rank(job: Job, *, is_json: bool) -> int:
    end_with_launcher()
    from onefold.app.cli.console import display, print_result
    from onefold.app.train.checkpoints import Interrupted
    from onefold.app.train.course import TrainObserver
    from onefold.app.train.loop import train
    from onefold.tier.host import versions
    from onefold.wire.world import joined

    with joined() as world:
        is_first = world.rank == 0
        stream = sys.stderr if is_json else sys.stdout
        try:
            with display(stream) if is_first else TrainObserver() as observer:
                result = train(job, world, observer)
        except Interrupted as stop:
            if is_first:
                print(f"onefold train: {stop}; --resume goes on there", file=sys.stderr, flush=True)
            return 128 + stop.number
    if is_first and is_json:
        head = {"job": asdict(job), "ranks": world.world_size, "versions": versions()}
        print(json.dumps(finite({**head, **asdict(result)})))
    elif is_first:
        print_result(result, stream)
    return 0
