"""The tables of a plan: a short one of 80 columns, two wide ones, and every wire."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from onefold.planner.composition import Composition, RankPlan
from onefold.planner.planned_axes import MESSAGES
from onefold.planner.search import GROUPS, Row
from onefold.text import (
    columns,
    common_unit,
    exact_bytes,
    format_bytes,
    format_seconds,
    format_share,
    in_unit,
    wrapped,
)

HEADS = {
    "parameters": "params", "gradients": "grads", "optimizer": "optim", "activations": "activ",
    "logits": "logits", "gather window": "window", "second shard": "second", "buffers": "buffers",
}  # fmt: skip


def short_table(rows: Sequence[Row], best: Row | None) -> list[str]:
    """Return a line for each way: memory of a device, whether it fits, its step, and why."""
    has_offload = any(row.offload != "none" for row in rows)
    has_rows = len({row.rows for row in rows}) > 1
    has_times = rows[0].step is not None
    heads = ["stage", *["offload"] * has_offload, *["rows"] * has_rows, "memory", "fits"]
    lines = [[*heads, *["step"] * has_times, "why"]]
    name, unit = common_unit(max(row.needs["device"] for row in rows))
    for row in rows:
        cells = [f"{'*' if row is best else ''}{row.stage}", *[row.offload] * has_offload]
        cells += [str(row.rows)] * has_rows
        cells += [f"{in_unit(row.needs['device'], unit)} {name}", _fits(row)]
        cells += [format_seconds(row.step.seconds)] if row.step else []
        lines.append([*cells, _why(row, best)])
    numbers = ">" * (has_rows + 2 + has_times)
    return columns(lines, f">{'<' * has_offload}{numbers}<")


def _fits(row: Row) -> str:
    return "no" if not row.fits else "?" if row.unchecked else "yes"


def _why(row: Row, best: Row | None) -> str:
    if not row.fits:
        place, nbytes = max(row.missing.items(), key=lambda pair: pair[1])
        return f"{format_bytes(nbytes)} short" + (f" of {place}" if place != "device" else "")
    if row is best:
        return "the fastest that fits" if row.step else "the simplest that fits"
    if row.unchecked:
        needs = [f"{format_bytes(nbytes)} {place}" for place, nbytes in row.unchecked.items()]
        return f"needs {', '.join(needs)}"
    if row.step and best is not None:
        return f"{row.tokens_per_s / best.tokens_per_s:.2f} x as fast, bound by {row.step.bound}"
    return f"{format_bytes(-row.missing['device'])} free"


def memory_table(rows: Sequence[Row]) -> Iterator[str]:
    """Yield bytes by kind on the device, and those of a node's host and disk, in one unit."""
    name, unit = common_unit(max(nbytes for row in rows for nbytes in row.needs.values()))
    groups = [group for group in GROUPS if any(row.groups[group] for row in rows)]
    lines = [["stage", "offload", *(HEADS[group] for group in groups), "memory", "host", "disk"]]
    for row in rows:
        held = [*(row.groups[group] for group in groups), *row.needs.values()]
        lines.append([str(row.stage), row.offload, *(in_unit(nbytes, unit) for nbytes in held)])
    yield from ("", f"in {name}, of one device at its peak; host and disk of a node:")
    yield from columns(lines, "><>")


def traffic_table(rows: Sequence[Row]) -> Iterator[str]:
    """Yield the bytes that a rank sends in a step, and the speed."""
    name, unit = common_unit(max(row.sent_nbytes for row in rows))
    has_wires = any(row.wire.name != "exact" or row.between_nbytes for row in rows)
    heads = ["stage", "offload", *["wire", "to nodes"] * has_wires, "sent"]
    lines = [[*heads, *(["tokens/s", "bound"] if rows[0].step else [])]]
    for row in rows:
        wire = row.wire.name if row.wire.is_preset else "Wire"
        cells = [str(row.stage), row.offload]
        cells += [wire, in_unit(row.between_nbytes, unit)] if has_wires else []
        cells += [in_unit(row.sent_nbytes, unit)]
        lines.append([*cells, *([f"{row.tokens_per_s:,.0f}", row.step.bound] if row.step else [])])
    yield from ("", f"in {name}, sent by one rank in a step:")
    yield from columns(lines, "><<>" if has_wires else "><>")


def wire_lines(wires: Sequence[Row], taken: Row, numel: int) -> list[str]:
    """Return the way to take on every wire: bytes a parameter, memory and seconds.

    Args:
        wires: the same way on each wire; none: no lines.
        taken: the row of the plan that is to be taken.
        numel: parameters of the model.
    """
    if not wires:
        return []
    heads = ["wire", "between nodes", "inside", "memory", "fits"]
    lines = [[*heads, *["step"] * (taken.step is not None), ""]]
    for row in wires:
        world, sent = row.forecast.recipe.world_size, row.forecast.sent_by_link
        cell = [f"{sent[link, what] * world / numel:.2f}"
                for link in ("between", "inside") for what in ("weights", "gradients")]  # fmt: skip
        mark = "*" if row.wire == taken.wire else ""
        cells = [mark + row.wire.name, f"{cell[0]} + {cell[1]}", f"{cell[2]} + {cell[3]}"]
        cells += [format_bytes(row.needs["device"]), _fits(row)]
        cells += [format_seconds(row.step.seconds)] if row.step else []
        lines.append([*cells, "lossy" if row.wire.is_lossy else ""])
    tier = f", offload {taken.offload}," if taken.offload != "none" else ""
    what = "bytes per parameter of all ranks, weights + gradients"
    title = f"stage {taken.stage}{tier} on each wire: {what}"
    return ["", *wrapped(title), *columns(lines, ">")]


# the tables of a composed run: a line for each axis, and one for each rank of the pipeline


def mesh_words(composition: Composition) -> str:
    """Return the mesh as people write it: "pp 2 x dp 4 x tp 2"."""
    return " x ".join(f"{name} {size}" for name, size in mesh_of(composition).items())


def mesh_of(composition: Composition) -> dict[str, int]:
    """Return the sizes of the mesh by name, the outermost first; dp is always there."""
    sizes = {
        "pp": composition.axes.pp,
        "dp": composition.dp,
        "cp": composition.axes.cp,
        "tp": composition.axes.tp,
    }
    return {name: size for name, size in sizes.items() if size > 1 or name == "dp"}


def axis_lines(composition: Composition, stage: int) -> Iterator[str]:
    """Yield the tables of the way to take, at `stage`."""
    has_times = composition.lines[0].seconds is not None
    heads = ["axis", "ranks", "sent", *["waits", "of the step"] * has_times, ""]
    rows = [heads]
    for line in composition.lines:
        cells = [line.axis, f"{line.ranks:,d}", format_bytes(line.nbytes)]
        if line.seconds is not None and line.share is not None:
            cells += [format_seconds(line.seconds), format_share(line.share)]
        rows.append([*cells, _about(composition, line.axis)])
    yield from ("", *wrapped(f"stage {stage} on {mesh_words(composition)}, a step of one rank:"))
    yield from columns(rows, ">" * (len(heads) - 1) + "<")
    if composition.axes.pp > 1:
        yield from _pipeline(composition)


def _about(composition: Composition, axis: str) -> str:
    if axis != "pp":
        return MESSAGES[axis]
    share = composition.axes.bubble_share(composition.num_micro)
    return f"{MESSAGES[axis]}; bubble {format_share(share)}"


def _pipeline(composition: Composition) -> Iterator[str]:
    """Yield a line for each rank.

    Weights are kept through a step or freed after each use; gradients are reduced once, or each
    micro-batch's.
    """
    rows = [["rank", "blocks", "parameters", "in flight", "memory", "weights", "reduced"]]
    for rank in composition.ranks:
        mark = "*" if rank.rank == composition.fullest else ""
        rows.append([
            f"{mark}{rank.rank}", _ranges(rank.blocks), f"{rank.numel:,d}", f"{rank.in_flight:g}",
            format_bytes(rank.forecast.memory_nbytes),
            *_window(rank),
        ])  # fmt: skip
    micro = f"{composition.num_micro:,d} micro-batch{'es' * (composition.num_micro > 1)}"
    yield from ("", f"ranks of the pipeline, {micro} a step; *: the fullest")
    yield from columns(rows, ">>>>><<")
    if composition.window is not None:
        limit = f'"{exact_bytes(composition.window)}"' if composition.window else "0"
        said = "leaves room for activations: by itself it would keep more"
        yield from wrapped(f"onefold.pipeline(schedule, window={limit}) {said}")


def _window(rank: RankPlan) -> tuple[str, str]:
    """Say what happens to weights and gradients, by the number of units where they differ."""
    window = rank.window
    if window.units is not None:
        share = f"{len(window.units)} of {len(rank.work.units)}"
        return f"{share} kept", f"{share} once"
    return "kept" if window.keeps else "freed", "once" if window.sums else "each"


def _ranges(blocks: tuple[int, ...]) -> str:
    """Write positions as ranges: "0-3, 8-11"."""
    ranges: list[list[int]] = []
    for block in blocks:
        if ranges and ranges[-1][1] + 1 == block:
            ranges[-1][1] = block
        else:
            ranges.append([block, block])
    return ", ".join(str(a) if a == b else f"{a}-{b}" for a, b in ranges)
