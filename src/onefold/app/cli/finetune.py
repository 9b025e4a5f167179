"""`onefold finetune`: fine-tune the model of a folder on the rows of a file, sharded over ranks."""

import argparse
import logging
import sys
import warnings
from collections.abc import Callable, Sequence
from dataclasses import asdict, fields
from functools import partial
from pathlib import Path
from typing import Any, TextIO

from onefold.app.cli import config_file
from onefold.app.cli.arguments import (
    PROFILE,
    SubParsers,
    add_command,
    natural,
    one_of,
    positive,
    print_result,
    real,
    share,
    word_or_number,
)
from onefold.app.cli.launch import default_ranks, end_with_launcher, is_rank, launch, world_size_of
from onefold.app.finetune.choices import AUTO, FinetuneJob
from onefold.app.finetune.trl_flags import spellings
from onefold.errors import ConfigError

DEFAULTS: dict[str, Any] = {field.name: field.default for field in fields(FinetuneJob)}

DESCRIPTION = """\
Fine-tune a language model on rows of JSON, sharded over all GPUs of this machine, or over CPU
ranks. The plan chooses stage, offload and recompute before any weight is read, and each rank
reads its own rows of the files. Needs transformers, accelerate, trl, peft and
datasets.

  onefold finetune --model DIR --data chats.jsonl --out tuned --steps 10
  onefold finetune --model DIR --data chats.jsonl --out tuned --lora 16 --merge
  onefold finetune --model DIR --data chats.jsonl --out tuned --checkpoint runs --resume

A row is {"text": ...}, {"prompt": ..., "completion": ...} or {"messages": [...]}. Under torchrun
the command uses the ranks of torchrun."""


class _ResumeFrom(argparse.Action):
    """`--resume` under TRL's name, which takes no folder here."""

    def __call__(
        self, parser: argparse.ArgumentParser, namespace: argparse.Namespace, values: Any,
        option_string: str | None = None,
    ) -> None:  # fmt: skip
        if values is not None:
            folder = Path(values)
            parent = folder.parent if folder.name.startswith("checkpoint-") else folder
            hint = f"--checkpoint {parent} --resume continues from the newest checkpoint there"
            raise ConfigError(f"{option_string} without a folder", repr(values), hint=hint)
        setattr(namespace, self.dest, True)


def add_to(commands: SubParsers) -> None:
    """Add the command's flags."""
    summary = "fine-tune a model of a folder on your rows"
    add = add_command(
        commands, "finetune", run_finetune, summary, DESCRIPTION, spellings=spellings()
    )
    add(config_file.FLAG, metavar="FILE", help=config_file.HELP)
    titles = ("model and data", "memory", "training")
    task, memory, loop = (partial(add, group=title) for title in titles)
    words = {name: DEFAULTS[name] for name in DEFAULTS}
    # fmt: off
    task("--model", "--model_name_or_path", required=True, metavar="DIR", help="a folder with "
        "config.json, safetensors files and a tokenizer")
    task("--data", "--dataset_name", required=True, metavar="FILE", help="a file of JSON lines")
    task("--out", "--output_dir", required=True, metavar="DIR", help="a new folder for the model, "
        "or the adapter, and the tokenizer")
    task("--lora", type=natural, default=words["lora"], metavar="R", help="train adapters of this "
        "rank on all Linears, and no weight of the model; 0 trains all weights")
    task("--merge", action="store_true", help="write the model with the adapter added as well, "
        "into OUT-merged")
    task("--held-out", type=share, default=words["held_out"], metavar="F", help="share of the rows "
        "that only measure the loss, 256 rows at most")
    task("--sample", type=natural, default=words["sample"], metavar="N", help="tokens of the "
        "answer that the model writes before and after")
    memory("--stage", type=word_or_number, default=AUTO, help="0 replicates, 1 shards optimizer "
        "state, 2 also gradients, 3 also parameters; auto: as `onefold plan` chooses")
    memory("--offload", default=AUTO, metavar="auto|none|optimizer|cpu|disk:PATH", help="keep "
        "optimizer states, or parameters too, in CPU memory, or all in files on a disk")
    memory("--recompute", action="store_true", help="recompute blocks in backward; without this "
        "flag only where nothing fits otherwise")
    memory("--precision", type=one_of(("fp32", "bf16"), "bf16 computes in half the bytes"),
        metavar="fp32|bf16", help="compute; masters and sums stay fp32 (default: bf16 on GPUs, "
        "fp32 on CPUs)")
    memory("--rest", type=one_of(("int8", "int4"), "int8 loses least"), metavar="int8|int4",
        help="quantize the frozen base of adapters")
    loop("--seq", "--max_length", type=positive, default=words["seq"], help="tokens of a row; "
        "longer rows are cut")
    loop("--batch", "--per_device_train_batch_size", type=positive, default=words["batch"],
        help="rows of one rank in a micro-batch")
    loop("--accumulate", "--gradient_accumulation_steps", type=positive,
        default=words["accumulate"], help="micro-batches in a step")
    loop("--lr", "--learning_rate", type=partial(real, above=0), help="peak learning rate "
        "(default: 2e-5, and 2e-4 with --lora)")
    loop("--epochs", "--num_train_epochs", type=partial(real, above=0), default=words["epochs"],
        help="times that each row is seen")
    loop("--steps", "--max_steps", type=positive, help="optimizer steps, in place of --epochs; 10 "
        "are a smoke run")
    loop("--packing", action="store_true", help="put several rows into one of --seq tokens")
    loop("--clip", type=partial(real, least=0), default=words["clip"], help="largest gradient "
        "norm, 0 for any")
    loop("--seed", type=natural, default=words["seed"], help="of adapters and the order of rows")
    loop("--ranks", type=positive, help="local processes to start (default: one for each GPU, or "
        "2)")
    loop("--report-to", default=words["report_to"], metavar="NAME", help="a tracker, as in "
        "transformers: tensorboard, wandb")
    loop("--report", metavar="DIR", help="write a page about the third step there")
    loop("--profile", metavar="DIR", help=PROFILE)
    # fmt: on
    _add_checkpoint_flags(partial(add, group="checkpoints"))


def _add_checkpoint_flags(add: Callable[..., Any]) -> None:
    add(
        "--checkpoint",
        metavar="DIR",
        help="save there after the last step, and when interrupted (SIGTERM, Ctrl-C)",
    )
    add("--every", type=positive, metavar="N", help="save after every N steps as well")
    add(
        "--keep",
        type=positive,
        metavar="K",
        default=DEFAULTS["keep"],
        help="newest checkpoints to keep",
    )
    add(
        "--resume",
        action="store_true",
        help="continue from the newest complete checkpoint in DIR, on any number of ranks",
    )
    add(
        "--resume_from_checkpoint",
        action=_ResumeFrom,
        nargs="?",
        dest="resume",
        default=False,
        metavar="DIR",
        help="the same as --resume, without DIR: --checkpoint names the folder",
    )


def run_finetune(arguments: argparse.Namespace, argv: Sequence[str]) -> int:
    """Launch the ranks, or be one."""
    job = job_of(arguments)
    if is_rank():
        return _finetune_rank(arguments, job)
    from onefold.app.finetune.tuning import preflight

    preflight(job)
    ranks = arguments.ranks or default_ranks()
    return launch([*argv, f"--ranks={ranks}"], ranks, passes_stops_on=job.checkpoint is not None)


def job_of(arguments: argparse.Namespace) -> FinetuneJob:
    """Return the run that the flags describe."""
    flags = dict(vars(arguments))
    flags["offload"] = None if flags["offload"] == "none" else flags["offload"]
    chosen = {
        name: flags[name] for name in DEFAULTS if name == "offload" or flags[name] is not None
    }
    return FinetuneJob(**chosen)


def _quieten() -> None:
    """Keep remarks of other libraries that a user of this command can do nothing about."""
    logging.getLogger("bitsandbytes").setLevel(logging.ERROR)  # of kernels that nothing here uses
    warnings.filterwarnings("ignore", message=".*gradient_checkpointing.*")  # a new name, from TRL
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()


def _finetune_rank(arguments: argparse.Namespace, job: FinetuneJob) -> int:
    world_size_of(arguments.ranks)
    end_with_launcher()
    import signal

    _quieten()
    from onefold.app.cli.console import finetune_display, finetune_lines
    from onefold.app.finetune.progress import FinetuneObserver
    from onefold.app.finetune.tuning import finetune, preflight
    from onefold.tier.host import versions
    from onefold.wire.world import joined

    with joined() as world:
        is_first = world.rank == 0
        rows = preflight(job)
        stream: TextIO = sys.stderr if arguments.json else sys.stdout
        with finetune_display(stream) if is_first else FinetuneObserver() as observer:
            result = finetune(job, rows, world, observer)
    if is_first:
        config_file.save_copy(arguments, job.checkpoint, None if result.stopped_by else job.out)
    if result.stopped_by:
        if is_first:
            name = signal.Signals(result.stopped_by).name
            line = f"stopped by {name} after step {result.steps}, saved in {job.checkpoint}"
            print(f"onefold finetune: {line}; --resume goes on there", file=sys.stderr, flush=True)
        return 128 + result.stopped_by
    if is_first:
        head = {"job": asdict(job), "ranks": world.world_size, "versions": versions()}
        print_result(arguments, {**head, **asdict(result)}, finetune_lines(result))
    return 0
