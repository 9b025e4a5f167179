"""`onefold generate`: text from a model that may be larger than memory."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

from onefold.app.cli.arguments import SubParsers, add_json, real, whole
from onefold.app.cli.failures import is_rank
from onefold.app.cli.launch import end_with_launcher, launch, world_size_of
from onefold.app.generate.request import GenerateJob
from onefold.errors import ConfigError
from onefold.text import finite, parse_nbytes

if TYPE_CHECKING:
    from onefold.wire.world import World

DEFAULTS = GenerateJob(model="", prompt="")

DESCRIPTION = """\
Continue a text with a model that may be larger than memory. Weights rest in
CPU memory or in a file, exact or packed, and stream through at most --budget
bytes of the device. The text goes to stdout as it comes; speed, bytes and
memory go to stderr. Without a tokenizer, bytes are the tokens.

  onefold train --checkpoint runs
  onefold generate --model runs --prompt "def "
  onefold generate --model DIR --prompt - --budget 2GiB --offload disk:PATH"""

HANDED_OVER = "ONEFOLD_GENERATE"
"""Environment variable with the folder in which a launcher leaves prompt and weights for ranks."""

RESTS = ("int8", "int4")


def add_to(commands: SubParsers) -> None:
    """Add the command's flags."""
    from onefold.app.cli.arguments import RawHelpFormatter

    summary = "write text with a model larger than memory"
    parser = commands.add_parser(
        "generate", help=summary, description=DESCRIPTION, formatter_class=RawHelpFormatter
    )
    parser.set_defaults(run=run)
    add = parser.add_argument
    # fmt: off
    add("--model", required=True, metavar="DIR|config.json|NAME", help="a folder of safetensors "
        "files, or a checkpoint; a Hugging Face config.json, a preset or module:function: random "
        "weights")
    add("--prompt", required=True, metavar="TEXT|-", help="the text to continue; -: read it from "
        "stdin")
    add("--rest", metavar="int8|int4", help="pack the matrices where they rest (default: exact)")
    add("--budget", metavar="SIZE", help="device memory for weights, as in 2GiB (default: three "
        "quarters of what is free)")
    add("--offload", default=DEFAULTS.offload, metavar="cpu|disk:PATH|disk|none", help="where "
        "weights rest: CPU memory, a file in a folder, the files of --model themselves, or the "
        "device")
    add("--ranks", help="local processes, which share the weights (default: one for each GPU, or "
        "1)")
    add("--max-new-tokens", metavar="N", default=str(DEFAULTS.max_new_tokens), help="tokens to "
        "write, at most")
    add("--temperature", help="0 takes the likeliest token; above, tokens are drawn (default: 0, "
        "and 0.5 for a byte GPT)")
    add("--seed", default=str(DEFAULTS.seed), help="of drawn tokens and random weights")
    add("--lookup", action="store_true", help="propose tokens from the text so far: several tokens "
        "a pass where it repeats itself")
    add("--kv-budget", metavar="SIZE", help="memory for keys and values; further ones rest in the "
        "folder of --offload (default: all in memory)")
    # fmt: on
    add_json(parser)


def run(arguments: argparse.Namespace, argv: Sequence[str]) -> int:
    """Generate in this process, or launch the ranks, or be one."""
    given = arguments.ranks
    ranks = None if given is None else whole("--ranks", given, least=1)
    job = job_of(arguments)
    if is_rank():
        return _run_rank(job, ranks, is_json=arguments.json)
    if job.prompt == "-":
        job = job_of(arguments, sys.stdin.read())
    from onefold.app.generate.run import preflight
    from onefold.app.generate.sources import found

    ranks = _default_ranks() if ranks is None else ranks
    with found(job.model) as source:
        preflight(job, source)
        if ranks == 1:
            return _generate(job, None, is_json=arguments.json)
        with _handed_over(job, source.files):
            return launch(argv, ranks)


def job_of(arguments: argparse.Namespace, prompt: str | None = None) -> GenerateJob:
    """Return the run that the flags describe; `prompt`: what stdin held."""
    given = vars(arguments)
    rest: str | None = given["rest"]
    if rest is not None and rest not in RESTS:
        hint = "int8 loses least; leave --rest out for exact weights"
        raise ConfigError(f"--rest to be {' or '.join(RESTS)}", repr(rest), hint=hint)
    offload: str = given["offload"]
    word, _, path = offload.partition(":")
    if word not in ("cpu", "disk", "none") or (path and word != "disk") or offload[-1:] == ":":
        hint = "--offload disk:/fast/disk"
        raise ConfigError("--offload to be cpu, disk:PATH, disk or none", repr(offload), hint=hint)
    heat = given["temperature"]
    sizes = {name: _size(f"--{name.replace('_', '-')}", given[name])
             for name in ("budget", "kv_budget")}  # fmt: skip
    return GenerateJob(
        model=given["model"],
        prompt=given["prompt"] if prompt is None else prompt,
        rest=rest,
        offload=None if offload == "none" else offload,
        max_new_tokens=whole("--max-new-tokens", given["max_new_tokens"], least=1),
        lookup=given["lookup"],
        temperature=None if heat is None else real("--temperature", heat, least=0),
        seed=whole("--seed", given["seed"], least=0),
        **sizes,
    )


def _size(flag: str, text: str | None) -> int | None:
    return None if text is None else parse_nbytes(flag, text)


def _default_ranks() -> int:
    import torch

    return torch.accelerator.device_count() or 1


@contextmanager
def _handed_over(job: GenerateJob, weights: Path | None) -> Iterator[None]:
    """Leave the prompt and the place of the weights for the ranks, which have the same flags."""
    with TemporaryDirectory(prefix="onefold_") as folder:
        given = {"prompt": job.prompt, "weights": None if weights is None else str(weights)}
        Path(folder, "given.json").write_text(json.dumps(given))
        os.environ[HANDED_OVER] = folder
        try:
            yield
        finally:
            del os.environ[HANDED_OVER]


def _run_rank(job: GenerateJob, ranks: int | None, *, is_json: bool) -> int:
    world_size_of(ranks)
    end_with_launcher()
    from dataclasses import replace

    from onefold.wire.world import joined

    folder = os.environ.get(HANDED_OVER)
    given = json.loads(Path(folder, "given.json").read_text()) if folder else {}
    if not given and job.prompt == "-":
        hint = "--prompt TEXT, or start the ranks with --ranks N"
        raise ConfigError("a prompt for every rank", "--prompt -", hint=hint)
    job = replace(job, prompt=given.get("prompt", job.prompt))
    with joined() as world:
        return _generate(job, world, is_json=is_json, weights=given.get("weights"))


def _generate(
    job: GenerateJob, world: World | None, *, is_json: bool, weights: str | None = None
) -> int:
    """Generate on this rank; rank 0 prints."""
    from onefold.app.cli.generated import heading, print_facts, writer
    from onefold.app.generate.run import generate, load, preflight
    from onefold.app.generate.sources import found
    from onefold.wire.devices import take_own_device

    is_first = world is None or world.rank == 0
    if world is None:
        take_own_device()
    with found(weights or job.model) as source:
        preflight(job, source)
        loaded = load(job, source)
    if is_first:
        print(*heading(job, loaded, 1 if world is None else world.world_size), sep="\n",
              file=sys.stderr, flush=True)  # fmt: skip
    show = writer(sys.stderr if is_json else sys.stdout) if is_first else lambda _: None
    result = generate(job, loaded, world, show)
    if is_first:
        show("\n")
        print_facts(result, sys.stderr)
    if is_first and is_json:
        from onefold.tier.host import versions

        head = {"job": asdict(job), "ranks": 1 if world is None else world.world_size}
        rates = {
            "tokens_per_s": result.tokens_per_s, "tokens_a_pass": result.tokens_a_pass,
            "link_share": result.link.share(result.passes),
        }  # fmt: skip
        print(json.dumps(finite({**head, **asdict(result), **rates, "versions": versions()})))
    return 0
