"""The tables of a plan: a short one of 80 columns, two wide ones, and every wire."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from html import escape
from itertools import groupby
from typing import Any

from onefold.planner.composition import Composition, RankPlan
from onefold.planner.mixed import KindPlan, MixedJob, MixedSplit
from onefold.planner.planned_axes import MESSAGES
from onefold.planner.search import GROUPS, Row, Search
from onefold.text import (
    Table,
    columns,
    common_unit,
    counted,
    exact_bytes,
    format_bytes,
    format_seconds,
    format_share,
    in_unit,
    wrapped,
)

HEADS = {
    "parameters": "params", "gradients": "grads", "optimizer": "optim", "activations": "activ",
    "logits": "logits", "gather window": "window", "secondary shards": "second",
    "buffers": "buffers",
}  # fmt: skip


def short_table(rows: Sequence[Row], best: Row | None) -> list[Table]:
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
        why = _why(row, best)
        if has_rows:  # four digits of rows leave less room
            why = why.removeprefix("needs ").replace("bound by", "by")
        lines.append([*cells, why])
    numbers = ">" * (has_rows + 2 + has_times)
    return columns(lines, f">{'<' * has_offload}{numbers}<")


def html_of(heading: str, rows: Sequence[Row], best: Row | None, script: str) -> str:
    """Return a plan as HTML: a heading, the short table with `best` bold, and a script."""
    heads, *lines = short_table(rows, best)[0].rows
    cells = [f"<tr>{''.join(f'<th>{escape(head)}</th>' for head in heads)}</tr>"]
    for row, line in zip(rows, lines, strict=True):
        weight = ' style="font-weight: bold"' if row is best else ""
        cells.append(f"<tr{weight}>{''.join(f'<td>{escape(cell)}</td>' for cell in line)}</tr>")
    return f"<p>{escape(heading)}</p><table>{''.join(cells)}</table><pre>{escape(script)}</pre>"


def _fits(row: Row) -> str:
    return "no" if not row.fits else "if" if row.unchecked else "yes"


def _why(row: Row, best: Row | None) -> str:
    if not row.fits:
        return _short(row)
    if row is best:
        return "the fastest that fits" if row.step else "the simplest that fits"
    if row.unchecked:
        (first, own), *others = ((p, format_bytes(n)) for p, n in row.unchecked.items())
        return ", ".join([f"needs {first} {own}", *(f"{place} {n}" for place, n in others)])
    if row.step and best is not None:
        return f"{row.tokens_per_s / best.tokens_per_s:.2f} x as fast, bound by {row.step.bound}"
    return f"{format_bytes(-row.missing['device'])} free"


def _short(row: Row | KindPlan) -> str:
    place, nbytes = max(row.missing.items(), key=lambda pair: pair[1])
    return f"{format_bytes(nbytes)} short" + (f" of {place}" if place != "device" else "")


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
    name, unit = common_unit(max(row.forecast.sent_nbytes for row in rows))
    has_wires = any(row.wire.name != "exact" or row.forecast.between_nbytes for row in rows)
    heads = ["stage", "offload", *["wire", "to nodes"] * has_wires, "sent"]
    lines = [[*heads, *(["tokens/s", "bound"] if rows[0].step else [])]]
    for row in rows:
        wire = row.wire.name if row.wire.is_preset else "Wire"
        cells = [str(row.stage), row.offload]
        cells += [wire, in_unit(row.forecast.between_nbytes, unit)] if has_wires else []
        cells += [in_unit(row.forecast.sent_nbytes, unit)]
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
    sizes, names = composition.axes.sizes | {"dp": composition.dp}, ("pp", "dp", "cp", "tp")
    return {name: sizes[name] for name in names if sizes[name] > 1 or name == "dp"}


def axis_lines(composition: Composition, stage: int) -> Iterator[str]:
    """Yield the tables of the way to take, at `stage`."""
    has_times = composition.lines[0].seconds is not None
    heads = ["axis", "ranks", "sent", *["waits", "of the step"] * has_times, ""]
    rows = [heads]
    for line in composition.lines:
        cells = [line.axis, f"{line.ranks:,d}", format_bytes(line.sent_nbytes)]
        if line.seconds is not None and line.share is not None:
            cells += [format_seconds(line.seconds), format_share(line.share)]
        share = format_share(composition.axes.bubble_share(composition.num_micro))
        bubble = f"; bubble {share}" if line.axis == "pp" else ""
        rows.append([*cells, MESSAGES[line.axis] + bubble])
    yield from ("", *wrapped(f"stage {stage} on {mesh_words(composition)}, a step of one rank:"))
    yield from columns(rows, ">" * (len(heads) - 1) + "<")
    if composition.axes.pp > 1:
        yield from _pipeline(composition)


def _pipeline(composition: Composition) -> Iterator[str]:
    """Yield a line for each rank.

    Weights are kept through a step or freed after each use; gradients are reduced once, or each
    micro-batch's.
    """
    rows = [["rank", "blocks", "parameters", "in flight", "memory", "weights", "reduced"]]
    for rank in composition.ranks:
        mark = "*" if rank.rank == composition.fullest else ""
        rows.append([
            f"{mark}{rank.rank}", _ranges(rank.blocks), f"{rank.work.numel:,d}",
            f"{rank.in_flight:g}", format_bytes(rank.forecast.memory_nbytes),
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
    if rank.window and not rank.keeps:
        share = f"{len(rank.window)} of {len(rank.work.units)}"
        return f"{share} kept", f"{share} once"
    return "kept" if rank.keeps else "freed", "once" if rank.sums else "each"


def _ranges(blocks: Iterable[int]) -> str:
    """Write positions as ranges: "0-3, 8-11"."""
    ranges: list[list[int]] = []
    for block in blocks:
        if ranges and ranges[-1][1] + 1 == block:
            ranges[-1][1] = block
        else:
            ranges.append([block, block])
    return ", ".join(str(a) if a == b else f"{a}-{b}" for a, b in ranges)


# a plan on several kinds of devices compared with the equal split


@dataclass(frozen=True, slots=True)
class MixedPlan:
    """The split of a plan, and the split that gives all ranks the same.

    largest, equal_largest: parameters of the largest model at these rows; None: no limit is known.
    fewer_rows: rows of a rank in the mean with which the job fits, where it does not; 0: none.
    more: devices of each kind with which it fits.
    """

    split: MixedSplit
    equal: MixedSplit
    largest: int | None
    equal_largest: int | None
    fewer_rows: int = 0
    more: tuple[tuple[str, int], ...] = ()

    @staticmethod
    def from_row(search: Search, row: Row) -> MixedPlan:
        """Compare the split of a row with the equal one, and look for remedies if it misses."""
        assert row.mixed is not None, "a row on several kinds of devices has a split"
        job, split = search.job(row.forecast.recipe, row.rows), row.mixed
        equal, largest = job.equal(), job.largest(split, is_even=False)
        compared = MixedPlan(split, equal, largest, job.largest(equal, is_even=True))
        if split.fits:
            return compared
        return replace(compared, fewer_rows=_fewer(job), more=tuple(job.more(split).items()))

    def as_dict(self) -> dict[str, Any]:
        """Return plain dicts and numbers, for JSON."""
        return {
            **self.split.as_dict(),
            "largest_parameters": self.largest,
            "equal": {**self.equal.as_dict(), "largest_parameters": self.equal_largest},
            "would_fit": None
            if self.split.fits
            else {"rows": self.fewer_rows, "parameters": self.largest, "more": dict(self.more)},
        }

    @property
    def shares(self) -> str:
        """The weights of all ranks, as Python; empty where all hold the same."""
        return "" if self.split.weights is None else runs_of(self.split.weights)

    def lines(self) -> Iterator[str]:
        """Yield a table of the kinds, the comparison, and the remedies."""
        heads = ("devices", "ranks", "rows", "states", "at rest", "peak", "of", "step")
        yield from ("", "one rank of each kind, at its fullest:")
        yield from columns([heads, *map(self._cells, self.split.kinds)], "<<>")
        yield ""
        tightest = self.split.tightest
        free = -max(tightest.missing.values())
        ends = f"{format_bytes(free)} free" if free >= 0 else f"{format_bytes(-free)} short"
        yield from wrapped(f"tightest: rank {tightest.kind.first} ({tightest.kind.name}), {ends}")
        for line in self._comparison():
            yield from wrapped(line)
        if not self.split.fits:
            yield from wrapped(f"it would fit with {' or with '.join(self._remedies())}")

    def _cells(self, plan: KindPlan) -> tuple[str, ...]:
        kind, step = plan.kind, plan.step
        ranks = range(kind.first, kind.first + kind.ranks)
        return (
            kind.name, _ranges(ranks), _ranges(sorted({self.split.rows[rank] for rank in ranks})),
            format_share(plan.share), format_bytes(plan.at_rest_nbytes),
            format_bytes(plan.needs["device"]), format_bytes(kind.room["device"]),
            format_seconds(step.seconds) if step else "",
        )  # fmt: skip

    def _comparison(self) -> Iterator[str]:
        tightest = self.equal.tightest
        short = f"{_short(tightest)} on {tightest.kind.name}"
        fits = "" if self.equal.fits else f", but {short}"
        step, equal = self.split.step, self.equal.step
        if step is not None and equal is not None:
            times = equal.seconds / step.seconds
            slower = f"{format_seconds(equal.seconds)} a step, {times:.2f} x as long"
            yield f"an equal split takes {slower}{fits}"
        elif fits:
            yield f"an equal split does not fit: {short}"
        if self.largest and self.equal_largest is not None:
            yield (
                f"largest model at these rows: about {_amount(self.largest)} parameters; with an "
                f"equal split {_amount(self.equal_largest)}"
            )

    def _remedies(self) -> list[str]:
        remedies = [f"--batch {self.fewer_rows}"] * (self.fewer_rows > 0)
        remedies += [f"{count} more {name}" for name, count in self.more]
        if self.largest:
            remedies.append(f"a model of about {_amount(self.largest)} parameters")
        return remedies or ["a smaller model"]


def runs_of(numbers: tuple[int, ...]) -> str:
    """Write a list as Python, with repeated numbers as products.

    >>> runs_of((3, 3, 1))
    '[3] * 2 + [1]'
    """
    runs = [(number, len(list(run))) for number, run in groupby(numbers)]
    return " + ".join(f"[{number}] * {n}" if n > 1 else f"[{number}]" for number, n in runs)


def sampler_of(split: MixedSplit) -> str:
    """The line of a script that deals the rows of a split; empty where all ranks take the same."""
    if len(set(split.rows)) == 1:
        return ""
    return (
        f"onefold.mixed.RowSampler(dataset, rows={sum(split.rows)}, shares={runs_of(split.rows)})"
    )


def row_lines(split: MixedSplit) -> list[str]:
    """Say which ranks take how many rows of each micro-batch."""
    counts: list[str] = []
    for rows in dict.fromkeys(split.rows):
        ranks = [rank for rank, own in enumerate(split.rows) if own == rows]
        counts.append(f"{counted(rows, 'row')} on rank{'s' * (len(ranks) > 1)} {_ranges(ranks)}")
    return wrapped(f"rows of each micro-batch: {', '.join(counts)}")


def _amount(numel: int) -> str:
    return f"{numel / 1e9:,.1f} billion" if numel >= 1e9 else f"{numel / 1e6:,.1f} million"


def _fewer(job: MixedJob) -> int:
    """Return the most rows in the mean with which the job fits; 0: none."""
    quick = replace(job, exact=job.near)
    rows = range(1, job.rows)
    most = bisect_left(rows, True, key=lambda n: not replace(quick, rows=n).best().fits)
    while most and not replace(job, rows=most).best().fits:  # an extrapolation is off by a little
        most -= 1
    return most
