"""The tables of a composed run: a line for each axis, and one for each rank of the pipeline."""

from __future__ import annotations

from collections.abc import Iterator

from onefold.planner.composition import Composition, RankPlan
from onefold.planner.planned_axes import MESSAGES
from onefold.text import columns, exact_bytes, format_bytes, format_seconds, format_share, wrapped


def mesh_words(made: Composition) -> str:
    """Return the mesh as people write it: "pp 2 x dp 4 x tp 2"."""
    return " x ".join(f"{name} {size}" for name, size in mesh_of(made).items())


def mesh_of(made: Composition) -> dict[str, int]:
    """Return the sizes of the mesh by name, the outermost first; dp is always there."""
    sizes = {"pp": made.axes.pp, "dp": made.dp, "cp": made.axes.cp, "tp": made.axes.tp}
    return {name: size for name, size in sizes.items() if size > 1 or name == "dp"}


def axis_lines(made: Composition, stage: int) -> Iterator[str]:
    """Yield the tables of the way to take, at `stage`."""
    has_times = made.lines[0].seconds is not None
    heads = ["axis", "ranks", "sent", *["waits", "of the step"] * has_times, ""]
    rows = [heads]
    for line in made.lines:
        cells = [line.axis, f"{line.ranks:,d}", format_bytes(line.nbytes)]
        if line.seconds is not None and line.share is not None:
            cells += [format_seconds(line.seconds), format_share(line.share)]
        rows.append([*cells, _about(made, line.axis)])
    yield from ("", *wrapped(f"stage {stage} on {mesh_words(made)}, a step of one rank:"))
    yield from columns(rows, ">" * (len(heads) - 1) + "<")
    if made.axes.pp > 1:
        yield from _pipeline(made)


def _about(made: Composition, axis: str) -> str:
    if axis != "pp":
        return MESSAGES[axis]
    share = made.axes.bubble_share(made.num_micro)
    return f"{MESSAGES[axis]}; bubble {format_share(share)}"


def _pipeline(made: Composition) -> Iterator[str]:
    """Yield a line for each rank.

    Weights are kept through a step or freed after each use; gradients are reduced once, or each
    micro-batch's.
    """
    rows = [["rank", "blocks", "parameters", "in flight", "memory", "weights", "reduced"]]
    for rank in made.ranks:
        mark = "*" if rank.rank == made.fullest else ""
        rows.append([
            f"{mark}{rank.rank}", _ranges(rank.blocks), f"{rank.numel:,d}", f"{rank.in_flight:g}",
            format_bytes(rank.forecast.memory_nbytes),
            *_window(rank),
        ])  # fmt: skip
    micro = f"{made.num_micro:,d} micro-batch{'es' * (made.num_micro > 1)}"
    yield from ("", f"ranks of the pipeline, {micro} a step; *: the fullest")
    yield from columns(rows, ">>>>><<")
    if made.window is not None:
        limit = f'"{exact_bytes(made.window)}"' if made.window else "0"
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
    found: list[list[int]] = []
    for block in blocks:
        if found and found[-1][1] + 1 == block:
            found[-1][1] = block
        else:
            found.append([block, block])
    return ", ".join(str(a) if a == b else f"{a}-{b}" for a, b in found)
