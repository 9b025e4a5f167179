"""`onefold export`: a checkpoint's weights as safetensors, on any machine."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence

from onefold.app.cli.arguments import SubParsers, add_json
from onefold.errors import ConfigError
from onefold.text import parse_nbytes

DTYPES = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}

DESCRIPTION = """\
Write the weights of a checkpoint as safetensors, which `AutoModel.from_pretrained` opens. One
process, a few MB of memory, no GPU; every byte that is read is verified."""


def add_to(commands: SubParsers) -> None:
    """Add the command's flags."""
    summary = "write a checkpoint's weights as safetensors"
    parser = commands.add_parser("export", help=summary, description=DESCRIPTION)
    parser.set_defaults(run=run)
    parser.add_argument("checkpoint", metavar="CKPT", help="a checkpoint, or a directory of them")
    parser.add_argument("out", metavar="OUT", help="a folder that does not exist yet")
    parser.add_argument("--dtype", help=f"{', '.join(DTYPES)} (default: that of each weight)")
    parser.add_argument(
        "--max-shard-size", default="5GB", metavar="SIZE", help="the largest file, as in 500MB"
    )
    add_json(parser)


def run(arguments: argparse.Namespace, _: Sequence[str]) -> int:
    """Export, and print the written files."""
    nbytes = parse_nbytes("--max-shard-size", arguments.max_shard_size)
    if arguments.dtype not in (None, *DTYPES):
        wanted, hint = f"--dtype {', '.join(DTYPES)}", "leave it out to keep the weights' own"
        raise ConfigError(wanted, repr(arguments.dtype), hint=hint)
    import torch

    from onefold.checkpoint.offline import export

    dtype = None if arguments.dtype is None else getattr(torch, DTYPES[arguments.dtype])
    done = export(arguments.checkpoint, arguments.out, dtype=dtype, max_shard_nbytes=nbytes)
    files = {output.name: output.nbytes for output in done.outputs}
    if arguments.json:
        head = {"source": str(done.source), "step": done.step, "tensors": done.num_tensors}
        print(json.dumps({**head, "files": files}))
    else:
        print(f"{done.source}, step {done.step:,d}: {done.num_tensors:,d} tensors")
        for name, size in files.items():
            print(f"{arguments.out}/{name}  {size:,d} bytes")
    return 0
