"""`onefold generate`: text from a model that may be larger than memory."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, fields, replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

from onefold.app.cli.arguments import (
    SubParsers,
    add_command,
    natural,
    one_of,
    positive,
    print_result,
    real,
)
from onefold.app.cli.launch import default_ranks, end_with_launcher, is_rank, launch, world_size_of
from onefold.app.train.job import GenerateJob
from onefold.errors import ConfigError
from onefold.text import parse_nbytes

if TYPE_CHECKING:
    from onefold.wire.world import World

DEFAULTS = GenerateJob(model="", prompt="")

DESCRIPTION = """\
Continue a text with a model that may be larger than memory. Weights stay in
CPU memory or in a file, exact or quantized, and stream through at most --budget
bytes of the device. The text goes to stdout token by token; speed, bytes and
memory go to stderr. Without a tokenizer, bytes are the tokens.

  onefold train --checkpoint runs
  onefold generate --model runs --prompt "def "
  onefold generate --model DIR --prompt - --budget 2GiB --offload disk:PATH"""

HANDED_OVER = "ONEFOLD_GENERATE"
"""Environment variable with the folder in which a launcher leaves prompt and weights for ranks."""

packing = one_of(("int8", "int4"), "int8 loses least; leave --rest out for exact weights")
"""The type of `--rest`."""


def add_to(commands: SubParsers) -> None:
    """Add the command's flags."""
    summary = "write text with a model larger than memory"
    add = add_command(commands, "generate", run_generate, summary, DESCRIPTION)
    # fmt: off
    add("--model", required=True, metavar="DIR|config.json|NAME", help="a folder of safetensors "
        "files, or a checkpoint; a Hugging Face config.json, a preset of `onefold train` or "
        "module:function: random weights")
    add("--prompt", required=True, metavar="TEXT|-", help="the text to continue; -: read it from "
        "stdin")
    add("--rest", type=packing, metavar="int8|int4", help="quantize the stored matrices "
        "(default: exact)")
    add("--budget", type=parse_nbytes, metavar="SIZE", help="device memory for weights, as in 2GiB "
        "(default: three quarters of what is free)")
    add("--offload", type=_tier, default=DEFAULTS.offload, metavar="cpu|disk:PATH|disk|none",
        help="where weights are kept: CPU memory, a file in a folder, the files of --model "
        "themselves, or the device")
    add("--ranks", type=positive, help="local processes, which share the weights (default: one for "
        "each GPU, or 1)")
    add("--max-new-tokens", type=positive, metavar="N", default=DEFAULTS.max_new_tokens,
        help="tokens to write, at most")
    add("--temperature", type=partial(real, least=0), help="0 takes the likeliest token; above, "
        "tokens are drawn (default: 0, and 0.5 for a byte GPT)")
    add("--seed", type=natural, default=DEFAULTS.seed, help="of drawn tokens and random weights")
    add("--lookup", action="store_true", help="propose tokens from the text so far: several tokens "
        "a pass where it repeats itself")
    add("--kv-budget", type=parse_nbytes, metavar="SIZE", help="memory for keys and values; "
        "further ones go to the folder of --offload (default: all in memory)")
    # fmt: on


def _tier(flag: str, text: str) -> str | None:
    word, _, path = text.partition(":")
    if word not in ("cpu", "disk", "none") or (path and word != "disk") or text[-1:] == ":":
        wanted = f"{flag} to be cpu, disk:PATH, disk or none"
        raise ConfigError(wanted, repr(text), hint=f"{flag} disk:/fast/disk")
    return None if text == "none" else text


def run_generate(arguments: argparse.Namespace, argv: Sequence[str]) -> int:
    """Generate in this process, or launch the ranks, or be one."""
    job = GenerateJob(**{field.name: vars(arguments)[field.name] for field in fields(GenerateJob)})
    if is_rank():
        return _generate_rank(job, arguments)
    if job.prompt == "-":
        job = replace(job, prompt=sys.stdin.read())
    from onefold.app.generate.run import preflight
    from onefold.app.generate.sources import opened
    from onefold.wire.collectives import Group
    from onefold.wire.devices import take_own_device
    from onefold.wire.world import World

    ranks = arguments.ranks or default_ranks(on_cpu=1)
    with opened(job.model) as source:
        preflight(job, source)
        if ranks == 1:
            return _generate(job, arguments, World(Group.from_handle(None), take_own_device()))
        with _handed_over(job, source.files):
            return launch(argv, ranks)


@contextmanager
def _handed_over(job: GenerateJob, weights: Path | None) -> Iterator[None]:
    """Leave the prompt and the place of the weights for the ranks, which have the same flags."""
    with TemporaryDirectory(prefix="onefold_") as folder:
        places = {"prompt": job.prompt, "weights": weights and str(weights)}
        Path(folder, "places.json").write_text(json.dumps(places))
        os.environ[HANDED_OVER] = folder
        try:
            yield
        finally:
            del os.environ[HANDED_OVER]


def _generate_rank(job: GenerateJob, arguments: argparse.Namespace) -> int:
    world_size_of(arguments.ranks)
    end_with_launcher()
    from onefold.wire.world import joined

    folder = os.environ.get(HANDED_OVER)
    places = json.loads(Path(folder, "places.json").read_text()) if folder else {}
    if not places and job.prompt == "-":
        hint = "--prompt TEXT, or start the ranks with --ranks N"
        raise ConfigError("a prompt for every rank", "--prompt -", hint=hint)
    job = replace(job, prompt=places.get("prompt", job.prompt))
    with joined() as world:
        return _generate(job, arguments, world, places.get("weights"))


def _generate(
    job: GenerateJob, arguments: argparse.Namespace, world: World, weights: str | None = None
) -> int:
    """Generate on this rank; rank 0 prints."""
    from onefold.app.cli.console import fact_lines, generate_heading, writer
    from onefold.app.generate.run import generate, load, preflight
    from onefold.app.generate.sources import opened
    from onefold.text import show
    from onefold.tier.host import versions

    with opened(weights or job.model) as source:
        preflight(job, source)
        loaded = load(job, source)
    if world.rank > 0:
        generate(job, loaded, world, lambda _: None)
        return 0
    print(*generate_heading(job, loaded, world.world_size), sep="\n", file=sys.stderr, flush=True)
    write = writer(sys.stderr if arguments.json else sys.stdout)
    result = generate(job, loaded, world, write)
    write("\n")
    show(fact_lines(result), sys.stderr)
    if arguments.json:
        rates = {
            "tokens_per_s": result.tokens_per_s, "tokens_a_pass": result.tokens_a_pass,
            "link_share": result.link.share(result.passes),
        }  # fmt: skip
        head = {"job": asdict(job), "ranks": world.world_size, "versions": versions()}
        print_result(arguments, {**head, **asdict(result), **rates}, ())
    return 0
