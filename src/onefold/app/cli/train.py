"""`onefold train`: train a byte GPT, or any module, on a folder of text, sharded over ranks."""

import argparse
import sys
from collections.abc import Sequence
from dataclasses import asdict, fields
from functools import partial
from typing import Any

from onefold.app.cli import config_file
from onefold.app.cli.arguments import (
    PROFILE,
    SubParsers,
    add_command,
    natural,
    or_auto,
    positive,
    print_result,
    real,
    share,
    weights,
    word_or_number,
)
from onefold.app.cli.launch import default_ranks, end_with_launcher, is_rank, launch, world_size_of
from onefold.app.train.job import Job

DEFAULTS = Job()

DESCRIPTION = """\
Train a byte-level GPT, or a module of yours, sharded over ranks. Without arguments: two local CPU
ranks (or one for each GPU), stage 3, on the source of Python's standard library, in about half a
minute. Under torchrun it uses the ranks of torchrun.

  onefold train
  onefold train --model config.json --data DIR --stage 2 --precision bf16
  onefold train --offload disk:/fast/disk --checkpoint runs --resume"""


def add_to(commands: SubParsers) -> None:
    """Add the command's flags."""
    summary = "train a byte GPT or your module, sharded"
    add = add_command(commands, "train", run_train, summary, DESCRIPTION)
    add(config_file.FLAG, metavar="FILE", help=config_file.HELP)
    titles = ("memory", "model and data", "ranks and speed", "checkpoints and reports")
    memory, task, ranks, page = (partial(add, group=title) for title in titles)
    # fmt: off
    memory("--stage", type=word_or_number, default=3, help="0 replicates, 1 shards optimizer "
        "state, 2 also gradients, 3 also parameters; auto: the lowest that fits")
    memory("--offload", metavar="optimizer|cpu|disk:PATH", help="keep optimizer states, or "
        "parameters too, in CPU memory, or all in files on a disk; with --clip 0 units step inside "
        "backward")
    memory("--fraction", type=or_auto(share), metavar="F", help="share of the optimizer state to "
        "offload, or auto (default: all)")
    memory("--shares", type=or_auto(weights), metavar="W,W,...|auto", help="how much state each "
        "rank holds, as weights in rank order; auto: as even as the free memory allows (default: "
        "all the same)")
    memory("--recompute", action="store_true", help="activation checkpointing: recompute "
        "blocks in backward instead of keeping their activations")
    memory("--precision", help="fp32, bf16 or fp16 compute; masters and sums stay fp32 (default: "
        "the parameters' own)")
    task("--model", default=DEFAULTS.model, metavar="NAME|DIR|config.json|module:function",
        help="tiny, mini, small, large (0.9, 5, 57, 1000 M parameters), llama-8b, llama-70b, "
        "mixtral-8x7b, qwen3-30b-a3b; a folder of safetensors files, for its weights; a Hugging "
        "Face config, for random ones; or a function of a module from byte tokens to logits")
    task("--dtype", metavar="fp32|bf16|fp16", help="dtype of the weights; masters of narrow ones "
        "are fp32 (default: that of the configuration, else fp32)")
    task("--data", metavar="DIR", help="folder of text files (default: the standard library)")
    task("--steps", type=positive, default=DEFAULTS.steps, help="optimizer steps")
    task("--batch", type=positive, default=8, help="rows of one rank in a micro-batch")
    task("--seq", type=positive, default=DEFAULTS.seq, help="bytes in a row")
    task("--accumulate", type=positive, default=DEFAULTS.accumulate, help="micro-batches in a step")
    task("--lr", type=partial(real, above=0), help="peak learning rate (default: depends on the "
        "model)")
    task("--clip", type=partial(real, least=0), default=DEFAULTS.clip, help="largest gradient "
        "norm, 0 for any")
    task("--seed", type=natural, default=DEFAULTS.seed, help="of initial weights, batches and text")
    task("--sample", type=natural, default=DEFAULTS.sample, help="bytes of text at the end")
    ranks("--ranks", type=positive, help="local processes to start (default: one for each GPU, or "
        "2)")
    ranks("--rows", type=or_auto(weights), metavar="auto|W,W", help="rows of a step that each rank "
        "takes: auto, by measured speed, or one weight a rank, such as 3,1 (default: equal)")
    ranks("--tp", type=positive, default=1, metavar="N", help="ranks that share each layer (tensor "
        "parallel)")
    ranks("--pp", type=positive, default=1, metavar="N", help="pipeline ranks, each with some of "
        "the blocks; --accumulate is the number of micro-batches")
    ranks("--cp", type=positive, default=1, metavar="N", help="ranks that share each row (sequence "
        "parallel)")
    ranks("--wire", metavar="NAME", help="messages between hosts: hybrid, replicas (exact); "
        "recommended, zero++, zero++diff (fewer bytes)")
    ranks("--compile", action="store_true", help="run blocks through torch.compile in training; "
        "the first step compiles, for up to a minute")
    page("--checkpoint", metavar="DIR", help="save there after the last step, and when interrupted "
        "(SIGTERM, Ctrl-C)")
    page("--every", type=positive, metavar="N", help="save after every N steps as well")
    page("--keep", type=positive, metavar="K", default=DEFAULTS.keep, help="newest checkpoints to "
        "keep")
    page("--resume", action="store_true", help="continue from the newest complete checkpoint in "
        "DIR, if there is one")
    page("--report", metavar="DIR", help="write a page about the run there: memory, timeline, loss")
    page("--profile", metavar="DIR", help=PROFILE)
    # fmt: on


def run_train(arguments: argparse.Namespace, argv: Sequence[str]) -> int:
    """Launch the ranks, or be one."""
    if is_rank():
        return _train_rank(arguments, job_of(arguments, world_size_of(arguments.ranks)))
    from onefold.app.train.loop import preflight

    ranks = arguments.ranks or max(default_ranks(), job_of(arguments, 1).model_ranks)
    job = job_of(arguments, ranks)
    preflight(job, ranks)
    return launch([*argv, f"--ranks={ranks}"], ranks, passes_stops_on=job.checkpoint is not None)


def job_of(arguments: argparse.Namespace, world_size: int) -> Job:
    """Return the run that the flags describe, on so many ranks."""
    flags = {**vars(arguments), "row_shares": arguments.rows, "rows": None}
    names = [field.name for field in fields(Job) if flags.get(field.name) is not None]
    chosen: dict[str, Any] = {name: flags[name] for name in names}
    num_data = max(1, world_size // Job(**chosen).model_ranks)
    return Job(**chosen, rows=arguments.batch * num_data * arguments.accumulate)


def _train_rank(arguments: argparse.Namespace, job: Job) -> int:
    end_with_launcher()
    from onefold.app.cli.console import display, result_lines
    from onefold.app.train.checkpoints import Interrupted
    from onefold.app.train.loop import preflight, train
    from onefold.app.train.run_record import TrainObserver
    from onefold.tier.host import versions
    from onefold.wire.world import joined

    with joined() as world:
        is_first = world.rank == 0
        stream = sys.stderr if arguments.json else sys.stdout
        corpus = preflight(job, world.world_size)
        if is_first:
            config_file.save_copy(arguments, job.checkpoint, job.report)
        try:
            with display(stream) if is_first else TrainObserver() as observer:
                result = train(job, world, observer, corpus)
        except Interrupted as stop:
            if is_first:
                print(f"onefold train: {stop}; --resume goes on there", file=sys.stderr, flush=True)
            return 128 + stop.number
    if is_first:
        head = {"job": asdict(job), "ranks": world.world_size, "versions": versions()}
        print_result(arguments, {**head, **asdict(result)}, result_lines(result))
    return 0
