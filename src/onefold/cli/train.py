"""`onefold train`: train a byte GPT, or any module, on a folder of text, sharded over ranks."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict

from onefold.cli.arguments import SubParsers, add_json, real, share, whole, word_or_number
from onefold.cli.failures import is_rank
from onefold.cli.launch import default_ranks, end_with_launcher, launch, world_size_of
from onefold.train.job import Job

DEFAULTS = Job()

DESCRIPTION = """\
Train a byte-level GPT, or a module of yours, sharded over ranks. Without arguments: two local CPU
ranks (or one for each GPU), stage 3, on the source of Python's standard library, in about half a
minute. Under torchrun it joins the ranks that are there."""


def add_to(commands: SubParsers) -> None:
    """Add the command's flags."""
    summary = "train a byte GPT or your module, sharded"
    parser = commands.add_parser("train", help=summary, description=DESCRIPTION)
    # help does not show defaults that are set here and SUPPRESSed below
    words = (
        "ranks", "data", "precision", "lr", "checkpoint", "every", "offload", "fraction", "report",
        "wire",
    )  # fmt: skip
    parser.set_defaults(run=run, resume=False, recompute=False, **dict.fromkeys(words))
    add = parser.add_argument
    add("--stage", default="3", help="0 replicates, 1 shards optimizer state, 2 also gradients, "
        "3 also parameters; auto: the lowest that fits")  # fmt: skip
    add("--offload", metavar="optimizer|cpu|disk:PATH", default=argparse.SUPPRESS,
        help="where states rest: optimizer states, or parameters too, in CPU memory, or all in "
        "files on a disk; with --clip 0 units are stepped inside backward")  # fmt: skip
    add("--fraction", metavar="F", default=argparse.SUPPRESS,
        help="share of the optimizer state to offload, or auto (default: all)")  # fmt: skip
    add("--recompute", action="store_true", default=argparse.SUPPRESS,
        help="run blocks again in backward instead of keeping their activations")  # fmt: skip
    add("--ranks", help="local processes to start (default: one for each GPU, or 2)",
        default=argparse.SUPPRESS)  # fmt: skip
    add("--model", default=DEFAULTS.model, metavar="NAME|config.json|module:function",
        help="tiny, mini, small, large (0.9, 5, 57, 1000 M parameters), a Hugging Face config, "
        "or a function that returns a module from byte tokens to logits")  # fmt: skip
    add("--data", metavar="DIR", help="a folder of text files (default: the standard library)",
        default=argparse.SUPPRESS)  # fmt: skip
    add("--steps", default=str(DEFAULTS.steps), help="optimizer steps")
    add("--batch", default=str(DEFAULTS.batch), help="rows in a step, over all ranks")
    add("--seq", default=str(DEFAULTS.seq), help="bytes in a row")
    add(
        "--accumulate",
        default=str(DEFAULTS.accumulate),
        help="micro-batches that a step is cut into",
    )
    add("--precision", help="fp32, bf16 or fp16 compute; masters and sums stay fp32 "
        "(default: the parameters' own)", default=argparse.SUPPRESS)  # fmt: skip
    add("--wire", metavar="NAME", default=argparse.SUPPRESS,
        help="how state travels between hosts: hybrid, replicas (exact); recommended, zero++, "
        "zero++diff (fewer bytes)")  # fmt: skip
    add("--lr", help="peak learning rate (default: what suits the model)",
        default=argparse.SUPPRESS)  # fmt: skip
    add("--clip", default=str(DEFAULTS.clip), help="largest gradient norm, 0 for any")
    add("--seed", default=str(DEFAULTS.seed), help="of initial weights, batches and text")
    add("--sample", default=str(DEFAULTS.sample), help="bytes of text to write at the end")
    add("--checkpoint", metavar="DIR", default=argparse.SUPPRESS,
        help="save there after the last step, and when interrupted (SIGTERM, Ctrl-C)")  # fmt: skip
    add("--every", metavar="N", default=argparse.SUPPRESS, help="save after every N steps as well")
    add("--keep", metavar="K", default=str(DEFAULTS.keep), help="newest checkpoints that stay")
    add("--resume", action="store_true", default=argparse.SUPPRESS,
        help="go on from the newest complete checkpoint in DIR, if there is one")  # fmt: skip
    add("--report", metavar="DIR", default=argparse.SUPPRESS,
        help="write a page about the run there: memory and timeline of one step, loss, "
        "bytes sent")  # fmt: skip
    add_json(parser)


def run(arguments: argparse.Namespace, argv: Sequence[str]) -> int:
    """Launch the ranks, or be one."""
    job = job_of(arguments)
    given = arguments.ranks
    ranks = None if given is None else whole("--ranks", given, least=1)
    if is_rank():
        world_size_of(ranks)
        return _run_rank(job, is_json=arguments.json)
    from onefold.train.loop import preflight

    ranks = default_ranks() if ranks is None else ranks
    preflight(job, ranks)
    return launch(argv, ranks, passes_stops_on=job.checkpoint is not None)


def job_of(arguments: argparse.Namespace) -> Job:
    """Return the run that the flags describe."""
    lr = arguments.lr
    return Job(
        model=arguments.model,
        data=arguments.data,
        stage=word_or_number(arguments.stage),
        offload=arguments.offload,
        fraction=fraction_of(arguments.fraction),
        recompute=arguments.recompute,
        precision=arguments.precision,
        wire=arguments.wire,
        steps=whole("--steps", arguments.steps, least=1),
        batch=whole("--batch", arguments.batch, least=1),
        seq=whole("--seq", arguments.seq, least=1),
        accumulate=whole("--accumulate", arguments.accumulate, least=1),
        lr=None if lr is None else real("--lr", lr, above=0),
        clip=real("--clip", arguments.clip, least=0),
        seed=whole("--seed", arguments.seed, least=0),
        sample=whole("--sample", arguments.sample, least=0),
        checkpoint=arguments.checkpoint,
        report=arguments.report,
        every=0 if arguments.every is None else whole("--every", arguments.every, least=1),
        keep=whole("--keep", arguments.keep, least=1),
        resume=arguments.resume,
    )


def fraction_of(text: str | None) -> float | str:
    """Parse `--fraction`: all without it, a number, or "auto"."""
    if text is None:
        return 1.0
    return text if text == "auto" else share("--fraction", text)


def _run_rank(job: Job, *, is_json: bool) -> int:
    end_with_launcher()
    from onefold.cli.console import Silent, display, finite, print_result
    from onefold.host import versions
    from onefold.mesh.world import joined
    from onefold.train.checkpoints import Interrupted
    from onefold.train.loop import train

    with joined() as world:
        is_first = world.rank == 0
        stream = sys.stderr if is_json else sys.stdout
        try:
            with display(stream) if is_first else Silent() as observer:
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
