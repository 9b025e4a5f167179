"""`onefold inspect`: list the contents of a checkpoint, and verify its bytes."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from onefold.cli.arguments import SubParsers, add_json

if TYPE_CHECKING:
    from onefold.checkpoint.inspect import Inspection

DESCRIPTION = """\
List the contents of a checkpoint: every parameter with its shape and its saved state, the step,
and the ranks that saved it. Of a directory of checkpoints it shows the newest complete one."""


def add_to(commands: SubParsers) -> None:
    """Add the command's flags."""
    summary = "list the contents of a checkpoint"
    parser = commands.add_parser("inspect", help=summary, description=DESCRIPTION)
    parser.set_defaults(run=run)
    parser.add_argument("checkpoint", metavar="CKPT", help="a checkpoint, or a directory of them")
    parser.add_argument("--verify", action="store_true",
                        help="read every byte and compare it with its checksum")  # fmt: skip
    add_json(parser)


def run(arguments: argparse.Namespace, _: Sequence[str]) -> int:
    """Print the table, or the JSON."""
    from pathlib import Path

    from onefold.checkpoint.inspect import inspect

    found = inspect(Path(arguments.checkpoint), verify=arguments.verify)
    print(json.dumps(as_json(found)) if arguments.json else as_text(found))
    return 0


def as_json(found: Inspection) -> dict[str, Any]:
    """Return all facts, for programs."""
    manifest = found.found.manifest
    head = ("step", "stage", "world_size", "saved_at", "versions")
    return {
        "path": str(found.found.path),
        **{name: getattr(manifest, name) if manifest else None for name in head},
        "optimizers": [each.kind for each in manifest.optimizers] if manifest else None,
        "verified": found.is_verified,
        "passed_over": found.found.passed_over,
        "files": found.files,
        "others": found.other_names,
        "tensors": [
            {
                "name": row.name, "kind": row.kind, "shape": list(row.shape), "dtype": row.dtype,
                "nbytes": row.nbytes, "pieces": row.pieces,
            }
            for row in found.rows
        ],
    }  # fmt: skip


def as_text(found: Inspection) -> str:
    """Return a heading, a line for each parameter, and sums."""
    manifest = found.found.manifest
    lines = [str(found.found.path)]
    if manifest is None:
        lines.append("written by torch.distributed.checkpoint: no step, no checksums")
    else:
        ranks = "1 rank" if manifest.world_size == 1 else f"{manifest.world_size} ranks"
        versions = ", ".join(f"{name} {version}" for name, version in manifest.versions.items())
        lines.append(
            f"step {manifest.step:,d}, saved at stage {manifest.stage} by {ranks}, "
            f"{manifest.saved_at} ({versions})"
        )
        how = "every byte is as it was written" if found.is_verified else (
            "no, but all files are there in full length; --verify reads every byte"
        )  # fmt: skip
        lines.append(f"verified: {how}")
        if manifest.optimizers:
            lines.append("optimizers: " + ", ".join(each.kind for each in manifest.optimizers))
    lines += [f"passed over {each}" for each in found.found.passed_over]
    return "\n".join([*lines, "", *_table(found)])


def _table(found: Inspection) -> list[str]:
    by_name: dict[str, list[Any]] = {}
    for row in found.rows:
        by_name.setdefault(row.name, []).append(row)
    cells = [("name", "shape", "dtype", "kept", "bytes")]
    for name, rows in by_name.items():
        first = next((row for row in rows if row.kind == "weight"), rows[0])
        shape = "x".join(map(str, first.shape)) or "scalar"
        others = [f" {row.dtype}" if row.dtype != first.dtype else "" for row in rows]
        kinds = ", ".join(row.kind + other for row, other in zip(rows, others, strict=True))
        nbytes = sum(row.nbytes for row in rows)
        cells.append((name, shape, first.dtype, kinds, f"{nbytes:,d}"))
    weights = sum(row.nbytes for row in found.rows if row.kind == "weight")
    cells.append(("all weights", "", "", "", f"{weights:,d}"))
    cells.append((f"{len(found.files)} files", "", "", "", f"{sum(found.files.values()):,d}"))
    widths = [max(len(row[column]) for row in cells) for column in range(5)]
    sides = "<><<>"
    return [
        "  ".join(f"{c:{s}{w}s}" for c, s, w in zip(row, sides, widths, strict=True)).rstrip()
        for row in cells
    ]
