"""`onefold inspect`: list the contents of a checkpoint, and verify its bytes."""

from __future__ import annotations

import argparse
import json
import sys
from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from onefold.app.cli.arguments import SubParsers, add_json
from onefold.text import columns, counted, finite, show, wrapped

if TYPE_CHECKING:
    from onefold.checkpoint.offline import InspectedRow, Inspection

MAX_DEPTH = 2
"""Levels of dicts in `extra` that are shown."""

DESCRIPTION = """\
List the contents of a checkpoint: every parameter with its shape and its saved state, the step,
the ranks that saved it, and the `extra` of rank 0. Of a directory of checkpoints it shows the
newest complete one."""


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

    from onefold.checkpoint.offline import inspect

    found = inspect(Path(arguments.checkpoint), verify=arguments.verify)
    if arguments.json:
        print(json.dumps(as_json(found)))
    else:
        show(as_text(found), sys.stdout)
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
        "extra": _plain(found.extra),
        "others": found.other_names,
        "tensors": [
            {
                "name": row.name, "kind": row.kind, "shape": list(row.shape), "dtype": row.dtype,
                "nbytes": row.nbytes, "pieces": row.pieces,
            }
            for row in found.rows
        ],
    }  # fmt: skip


def as_text(found: Inspection) -> list[str]:
    """Return a heading, a line for each parameter, and sums."""
    manifest = found.found.manifest
    lines = [str(found.found.path)]
    if manifest is None:
        lines.append("written by torch.distributed.checkpoint: no step, no checksums")
    else:
        ranks = counted(manifest.world_size, "rank")
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
        lines.append(f"extra: {_shown(found.extra)}")
    lines += [f"passed over {each}" for each in found.found.passed_over]
    return [*(part for line in lines for part in wrapped(line)), "", *_table(found)]


def _shown(value: Any, depth: int = 0) -> str:
    """Write plain values as they are, the keys of dicts, and the shapes of tensors."""
    if isinstance(value, dict) and depth < MAX_DEPTH:
        inside = (f"{key}={_shown(each, depth + 1)}" for key, each in value.items())
        return ", ".join(inside) if depth == 0 else f"{{{', '.join(inside)}}}"
    plain = _plain(value)
    if isinstance(value, dict | list | tuple):
        return f"{type(value).__name__} of {len(value)}"
    return repr(plain) if plain is value else plain


def _plain(value: Any) -> Any:
    """Return a value for JSON: tensors as text, by dtype and shape."""
    if isinstance(value, dict):
        return {str(key): _plain(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(each) for each in value]
    if value is None or isinstance(value, bool | int | float | str):
        return finite(value)
    shape = getattr(value, "shape", None)
    if shape is None:
        return repr(value)
    return f"{str(value.dtype).removeprefix('torch.')} [{', '.join(map(str, shape))}]"


def _table(found: Inspection) -> list[str]:
    by_name: dict[str, list[InspectedRow]] = {}
    for row in found.rows:
        by_name.setdefault(row.name, []).append(row)
    kinds = {name: _kinds(rows) for name, rows in by_name.items()}
    usual = Counter(kinds.values()).most_common(1)
    cells, notes = [("name", "shape", "dtype", "bytes")], list[str]()
    for name, rows in by_name.items():
        first = _first(rows)
        shape = "x".join(map(str, first.shape)) or "scalar"
        nbytes = sum(row.nbytes for row in rows)
        if kinds[name] != usual[0][0]:
            notes.append(f"{name} has {kinds[name]}")
        cells.append((name, shape, first.dtype, f"{nbytes:,d}"))
    weights = sum(row.nbytes for row in found.rows if row.kind == "weight")
    cells.append(("all weights", "", "", f"{weights:,d}"))
    cells.append((counted(len(found.files), "file"), "", "", f"{sum(found.files.values()):,d}"))
    head = [f"saved of each parameter: {kinds}" for kinds, _ in usual]
    head += [f"but {notes[0]}"] if len(notes) == 1 else [f"but: {'; '.join(notes)}"] * bool(notes)
    return [*(part for line in head for part in wrapped(line)), "", *columns(cells, "<><>")]


def _kinds(rows: list[InspectedRow]) -> str:
    first = _first(rows)
    others = (f" {row.dtype}" if row.dtype != first.dtype else "" for row in rows)
    return ", ".join(row.kind + other for row, other in zip(rows, others, strict=True))


def _first(rows: list[InspectedRow]) -> InspectedRow:
    return next((row for row in rows if row.kind == "weight"), rows[0])
