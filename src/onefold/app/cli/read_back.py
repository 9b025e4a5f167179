"""`onefold inspect`, `export` and `report`: read what a run has saved."""

from __future__ import annotations

import argparse
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict
from os.path import commonpath
from pathlib import Path
from typing import TYPE_CHECKING, Any

from onefold.app.cli.arguments import SubParsers, add_command, one_of, print_result
from onefold.errors import ConfigError
from onefold.text import (
    columns,
    common_unit,
    counted,
    finite,
    format_bytes,
    format_seconds,
    format_share,
    in_unit,
    parse_nbytes,
    starred,
    wrapped,
)

if TYPE_CHECKING:
    from onefold.checkpoint.offline import InspectedRow, Inspection
    from onefold.recording.run_report import RunReport

MAX_DEPTH = 2
"""Levels of dicts in `extra` that are shown."""

MAX_COLUMNS = 4
"""Ranks in the table of a report. Of more ranks it shows the first ones."""

LONGEST_NAME = 44
"""Letters of a name for which the table of `inspect` has room next to its other columns."""

DTYPES = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}

INSPECT = """\
List the contents of a checkpoint: every parameter with its shape and its saved state, the step,
the ranks that saved it, and the `extra` of rank 0. Of a directory of checkpoints it shows the
newest complete one.

  onefold inspect runs --verify"""

TARGETS = ("hf", "dcp", "deepspeed-universal")

EXPORT = """\
Write the weights of a checkpoint as safetensors, which `AutoModel.from_pretrained` opens; or, with
--to dcp, weights and optimizer state as torch.distributed.checkpoint saves those of FSDP2; with
--to deepspeed-universal, as DeepSpeed loads them at stages 1 and 2. CKPT may be a folder of
those too. One process, a few MB of memory (dcp: the largest piece; deepspeed-universal: the largest
parameter), no GPU; every byte that Onefold saved is verified.

  onefold export runs OUT --dtype bf16
  onefold export runs --to dcp OUT
  onefold export runs --to deepspeed-universal OUT"""

REPORT = """\
Write index.html from the report.json of `onefold train --report DIR` or Recording.save, and print
the time, peak bytes and bytes sent of the recorded step. With a second run, compare both: print
what differs, and write compare.html into the folder of the second.

  onefold train --report page
  onefold report page
  onefold report before after"""


def add_report(commands: SubParsers) -> None:
    """Add `onefold report`."""
    add = add_command(commands, "report", run_report, "draw the page of a recorded run", REPORT)
    add("directory", metavar="DIR", help="the folder with report.json")
    add("second", metavar="DIR2", nargs="?", help="the folder of a second run, to compare with")


def add_checkpoints(commands: SubParsers) -> None:
    """Add `onefold inspect` and `onefold export`."""
    checkpoint = {"metavar": "CKPT", "help": "a checkpoint, or a directory of them"}
    add = add_command(
        commands, "inspect", run_inspect, "list the contents of a checkpoint", INSPECT
    )
    add("checkpoint", **checkpoint)
    add("--verify", action="store_true", help="read every byte and compare it with its checksum")
    summary = "write a checkpoint for other programs"
    add = add_command(commands, "export", run_export, summary, EXPORT)
    add("checkpoint", **checkpoint)
    add("out", metavar="OUT", help="a folder that does not exist yet")
    dtypes = ", ".join(DTYPES)
    add("--dtype", type=one_of([*DTYPES], "leave it out to keep the weights' own"),
        help=f"{dtypes} (default: that of each weight)")  # fmt: skip
    add("--to", type=one_of(TARGETS, "leave it out for safetensors"), default="hf",
        help="hf: weights as safetensors; dcp: weights and optimizer state as a folder of "
        "torch.distributed.checkpoint; deepspeed-universal: both as DeepSpeed's universal "
        "folder")  # fmt: skip
    add("--max-shard-size", metavar="SIZE", type=parse_nbytes,
        help="the largest file of safetensors, as in 500MB (default: 5GB)")  # fmt: skip


# inspect


def run_inspect(arguments: argparse.Namespace, _: Sequence[str]) -> int:
    """Print the contents of a checkpoint."""
    from onefold.checkpoint.offline import inspect
    from onefold.foreign import PEERS

    contents = inspect(Path(arguments.checkpoint), PEERS, verify=arguments.verify)
    print_result(arguments, inspect_facts(contents), inspect_lines(contents))
    return 0


def inspect_facts(contents: Inspection) -> dict[str, Any]:
    """Return all facts, for programs."""
    manifest = contents.found.manifest
    head = ("step", "stage", "world_size", "saved_at", "versions")
    members = ("name", "kind", "shape", "dtype", "nbytes", "pieces", "tied_to")
    return {
        "path": str(contents.found.path),
        **{name: getattr(manifest, name) if manifest else None for name in head},
        "optimizers": [saved.kind for saved in manifest.optimizers] if manifest else None,
        "verified": contents.is_verified,
        "passed_over": contents.found.passed_over,
        "files": contents.files,
        "extra": _as_json(contents.extra),
        "others": contents.other_names,
        "tensors": [{name: getattr(row, name) for name in members} for row in contents.rows],
    }


def inspect_lines(contents: Inspection) -> list[str]:
    """Return a heading, a line for each parameter, and sums."""
    manifest = contents.found.manifest
    lines = [str(contents.found.path)]
    if manifest is None:
        writer = contents.found.peer.writer if contents.found.peer else "another program"
        lines.append(f"written by {writer}: no step, no checksums")
    else:
        ranks = counted(manifest.world_size, "rank")
        versions = ", ".join(f"{name} {version}" for name, version in manifest.versions.items())
        lines.append(
            f"step {manifest.step:,d}, saved at stage {manifest.stage} by {ranks}, "
            f"{manifest.saved_at} ({versions})"
        )
        how = "no, but all files are there in full length; --verify reads every byte"
        how = "every byte is as it was written" if contents.is_verified else how
        lines.append(f"verified: {how}")
        if manifest.optimizers:
            lines.append("optimizers: " + ", ".join(saved.kind for saved in manifest.optimizers))
        lines.append(f"extra: {_shown(contents.extra)}")
    lines += [f"passed over {name}" for name in contents.found.passed_over]
    return [*(part for line in lines for part in wrapped(line)), "", *_table(contents)]


def _shown(value: Any, depth: int = 0) -> str:
    """Write plain values as they are, the keys of dicts, and the shapes of tensors."""
    if isinstance(value, dict) and depth < MAX_DEPTH:
        inside = ", ".join(f"{key}={_shown(part, depth + 1)}" for key, part in value.items())
        return inside if depth == 0 else f"{{{inside}}}"
    plain = _as_json(value)
    if isinstance(value, dict | list | tuple):
        return f"{type(value).__name__} of {len(value)}"
    return repr(plain) if plain is value else plain


def _as_json(value: Any) -> Any:
    """Return a value for JSON: tensors as text, by dtype and shape."""
    if isinstance(value, dict):
        return {str(key): _as_json(part) for key, part in value.items()}
    if isinstance(value, list | tuple):
        return [_as_json(part) for part in value]
    if value is None or isinstance(value, bool | int | float | str):
        return finite(value)
    shape = getattr(value, "shape", None)
    if shape is None:
        return repr(value)
    return f"{str(value.dtype).removeprefix('torch.')} [{', '.join(map(str, shape))}]"


def _table(contents: Inspection) -> list[str]:
    """Return the weights as a table, a line for those of equal blocks, and sums below it."""
    by_name: dict[str, list[InspectedRow]] = {}
    for row in contents.rows:
        by_name.setdefault(row.name, []).append(row)
    alike: dict[tuple[Any, ...], list[str]] = {}
    for name, rows in by_name.items():
        first, nbytes = _first(rows), sum(row.nbytes for row in rows if not row.tied_to)
        key = (starred(name), first.shape, first.dtype, nbytes, _kinds(rows), first.tied_to)
        alike.setdefault(key, []).append(name)
    shown = {key: names[0] if len(names) == 1 else key[0] for key, names in alike.items()}
    prefix = _common_prefix(list(shown.values()))
    heads = _saved_kinds({shown[key].removeprefix(prefix): key for key in alike}, alike)
    heads += [f"names begin with {prefix}"] if prefix else []
    cells = [("name", "count", "shape", "dtype", "bytes")]
    for key, names in alike.items():
        _, extents, dtype, nbytes, _, tied_to = key
        shape = "x".join(map(str, extents)) or "scalar"
        end = "as above" if tied_to else f"{nbytes * len(names):,d}"
        cells.append((shown[key].removeprefix(prefix), f"{len(names)}", shape, dtype, end))
    own = [row for row in contents.rows if row.kind == "weight" and not row.tied_to]
    count, nbytes = f"{len(own):,d}", f"{sum(row.nbytes for row in own):,d}"
    files = f"{sum(contents.files.values()):,d}"
    sums = [("all weights alone", count, "", "", nbytes),
            ("files", f"{len(contents.files):,d}", "", "", files)]  # fmt: skip
    dtypes = {dtype for *_, dtype, _ in cells[1:]}
    if len(dtypes) == 1:  # one line instead of a column
        heads.append(f"dtype of all weights: {dtypes.pop()}")
        cells, sums = ([(*row[:3], row[4]) for row in part] for part in (cells, sums))
    table = columns([*cells, *sums], "<>><>" if len(cells[0]) == 5 else "<>>>")
    return [*(part for line in heads for part in wrapped(line)), "", *table]


def _saved_kinds(
    shown: dict[str, tuple[Any, ...]], alike: dict[tuple[Any, ...], list[str]]
) -> list[str]:
    """Say which state is saved of most parameters, and of which there is another."""
    counts = Counter[str]()
    for key, names in alike.items():
        counts[key[4]] += 0 if key[5] else len(names)
    lines = [f"saved of each parameter: {kinds}" for kinds, _ in counts.most_common(1)]
    for kinds, _ in counts.most_common()[1:]:
        names = ", ".join(name for name, key in shown.items() if key[4] == kinds and not key[5])
        lines.append(f"saved of {names}: {kinds}")
    lines += [f"{name}: tied to {key[5]}, saved once" for name, key in shown.items() if key[5]]
    return lines


def _common_prefix(names: list[str]) -> str:
    """Return the modules that all names begin with, if the longest name needs their room."""
    if max(map(len, names), default=0) <= LONGEST_NAME:
        return ""
    prefix = commonpath([name.replace(".", "/") for name in names]).replace("/", ".")
    return f"{prefix}." if prefix and prefix not in names else ""


def _kinds(rows: list[InspectedRow]) -> str:
    usual = _first(rows).dtype
    rows = sorted(rows, key=lambda row: (row.kind != "weight", row.kind != "master", row.kind))
    return ", ".join(row.kind + f" {row.dtype}" * (row.dtype != usual) for row in rows)


def _first(rows: list[InspectedRow]) -> InspectedRow:
    return next((row for row in rows if row.kind == "weight"), rows[0])


# export


def run_export(arguments: argparse.Namespace, _: Sequence[str]) -> int:
    """Export, and print the written files."""
    import torch

    dtype = arguments.dtype and getattr(torch, DTYPES[arguments.dtype])
    source, target, size = arguments.checkpoint, arguments.out, arguments.max_shard_size
    if arguments.to != "hf" and size is not None:
        hint = "leave it out: it is for files of safetensors"
        raise ConfigError("--max-shard-size with --to hf", f"--to {arguments.to}", hint=hint)
    if arguments.to == "dcp":
        from onefold.foreign.dcp_export import export_dcp

        done = export_dcp(source, target, dtype=dtype)
    elif arguments.to == "deepspeed-universal":
        from onefold.foreign.deepspeed_export import export_deepspeed

        if dtype is not None:
            hint = "leave it out: DeepSpeed keeps float32, and rounds what it computes with"
            raise ConfigError("--dtype with --to hf or dcp", f"--to {arguments.to}", hint=hint)
        done = export_deepspeed(source, target)
    else:
        from onefold.checkpoint.offline import export
        from onefold.checkpoint.safetensors import MAX_SHARD_NBYTES
        from onefold.foreign import PEERS

        size = MAX_SHARD_NBYTES if size is None else size
        done = export(source, target, PEERS, dtype=dtype, max_shard_nbytes=size)
    head = {"source": str(done.source), "step": done.step, "tensors": done.num_tensors}
    step = "" if done.step is None else f", step {done.step:,d}"
    lines = [f"{done.source}{step}: {done.num_tensors:,d} tensors"]
    lines += [f"{target}/{name}  {nbytes:,d} bytes" for name, nbytes in done.files.items()]
    print_result(arguments, {**head, "files": done.files}, lines)
    return 0


# report


def run_report(arguments: argparse.Namespace, _: Sequence[str]) -> int:
    """Draw the page again; print its sums by rank. The step itself is in report.json."""
    from onefold.recording.page import draw, read_report

    report = read_report(arguments.directory)
    if arguments.second is not None:
        return _compare_runs(arguments, report, read_report(arguments.second))
    page = str(draw(Path(arguments.directory), report))
    data, first = report.as_json(), report.views[0]
    facts = {
        "page": page,
        **{name: data[name] for name in ("about", "plan", "written_at")},
        "recorded": first.recorded,
        "ranks": [asdict(line) for line in report.ranks],
        "seconds": first.line.seconds,
        "sent": first.sent,
        "losses": data["training"]["losses"] if data["training"] else [],
    }
    print_result(arguments, facts, [*report_lines(report), f"page: {page}"])
    return 0


def _compare_runs(arguments: argparse.Namespace, first: RunReport, second: RunReport) -> int:
    """Print two runs next to each other, and draw the page of both."""
    from onefold.recording.page import draw
    from onefold.recording.page_data import compared_rows

    rows = compared_rows(first, second)
    page = str(draw(Path(arguments.second), second, against=first))
    formats = {"s": format_seconds, "B": format_bytes, "share": format_share}
    cells = [["", "first run", "second run", "change"]]
    for name, unit, *values in rows:
        change = "" if not values[0] else _change(values[1] / values[0] - 1)
        known = formats.get(unit, lambda value: f"{value:,.4g}")
        cells.append([name, *map(known, values), change])
    titles = [f"first run: {first.title}", f"second run: {second.title}"]
    facts = {"page": page, "runs": [first.title, second.title], "rows": rows}
    print_result(arguments, facts, [*titles, *columns(cells, "<>"), f"page: {page}"])
    return 0


def report_lines(report: RunReport) -> list[str]:
    """Return a heading, and a table of the recorded step by rank."""
    from onefold.recording.step_record import KINDS

    shown = report.ranks[:MAX_COLUMNS]
    recorded = report.views[0].recorded
    head = "step" if recorded is None else f"step {recorded:,d}"
    rows = [
        [head, *(f"rank {line.rank}" for line in shown)],
        ["time", *(format_seconds(line.seconds) for line in shown)],
        ["waiting", *(format_share(line.wait_share) for line in shown)],
        ["sent", *(format_bytes(line.sent_nbytes) for line in shown)],
    ]
    tiers = dict.fromkeys(tier for line in shown for tier in line.peak_by_tier)
    peaks = {f"peak on {tier}": [line.peak_by_tier.get(tier, 0) for line in shown]
             for tier in tiers}  # fmt: skip
    kinds = {f"  {word}": [line.peak_by_kind.get(kind, 0) for line in shown]
             for kind, word in KINDS.items()}  # fmt: skip
    name, unit = common_unit(max((max(nbytes) for nbytes in peaks.values()), default=0))
    rows.append([f"memory in {name}", *[""] * len(shown)])
    rows += [
        [row, *(in_unit(number, unit) for number in nbytes)]
        for row, nbytes in (peaks | kinds).items()
        if any(nbytes)
    ]
    notes = [f"(the first {len(shown)} of {len(report.ranks)} ranks; --json has all)"]
    notes *= len(report.ranks) > len(shown)
    return [*wrapped(report.title), *wrapped(report.diagnosis), *columns(rows, "<>"), *notes]


def _change(share: float) -> str:
    """Write a change as a percentage with its sign; "" for none."""
    text = format_share(abs(share))
    return "" if text == format_share(0.0) else ("+" if share > 0 else "-") + text
