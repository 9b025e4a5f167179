"""The tables of a composed run: a line for each axis, and one for each rank of the pipeline."""

from __future__ import annotations

from collections.abc import Iterator

from onefold.planner.composition import Composition, RankPlan
from onefold.planner.planned_axes import MESSAGES
from onefold.text import columns, exact_bytes, format_bytes, format_seconds, format_share, wrapped


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
