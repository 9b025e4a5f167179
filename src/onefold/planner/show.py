"""The tables of a plan: every way to train, and on several nodes every wire."""

from __future__ import annotations

from collections.abc import Sequence

from onefold.planner.search import GROUPS, Row
from onefold.planner.sizes import format_bytes

HEADS = {
    "parameters": "params", "gradients": "grads", "optimizer": "optim", "activations": "activ",
    "logits": "logits", "gather window": "window", "second shard": "second", "buffers": "buffers",
}  # fmt: skip


def table(rows: Sequence[Row], best: Row | None) -> list[str]:
    """Return one line a row; wires if there are several nodes, times if there is a machine."""
    nodes = rows[0].forecast.recipe.nodes
    has_wires = nodes > 1 or any(not row.wire.wire.is_plain for row in rows)
    groups = [group for group in GROUPS if group != "second shard" or has_wires]
    heads = ["stage", "offload", *["wire"] * has_wires, "rows", *(HEADS[each] for each in groups)]
    heads += ["device", "host", "disk", "fits", "sent/step", *["to nodes"] * has_wires]
    heads += ["step", "tokens/s", "bound"] if rows[0].step else []
    lines = [heads]
    for row in rows:
        mark = "*" if row is best else ""
        name = row.wire.name if row.wire.is_preset else "Wire"
        cells = [f"{mark}{row.stage}", row.offload, *[name] * has_wires, str(row.rows)]
        cells += [_short(row.groups[group]) for group in groups]
        cells += [_short(row.needs[place]) for place in ("device", "host", "disk")]
        cells += [_fits(row), _short(row.sent_nbytes)]
        cells += [_short(row.between_nbytes)] * has_wires + _times(row)
        lines.append([*cells, row.step.bound] if row.step else cells)
    return _aligned(lines)


def wire_lines(wires: Sequence[Row], taken: Row, numel: int) -> list[str]:
    """Return the way to take on every wire: bytes a parameter, of all ranks together, and seconds.

    Args:
        wires: the same way on each wire; none: no lines.
        taken: the row of the plan that is to be taken.
        numel: parameters of the model.
    """
    if not wires:
        return []
    heads = ["wire", "between nodes, B/param", "inside, B/param", "device", "fits"]
    lines = [heads + (["step", "tokens/s"] if taken.step else [])]
    for row in wires:
        world, sent = row.forecast.recipe.world_size, row.forecast.sent_by_link
        each = [f"{sent[link, what] * world / numel:.3f}"
                for link in ("between", "inside") for what in ("weights", "gradients")]  # fmt: skip
        mark = "*" if row.wire == taken.wire else ""
        cells = [mark + row.wire.name, f"{each[0]} + {each[1]}", f"{each[2]} + {each[3]}"]
        lines.append([*cells, _short(row.needs["device"]), _fits(row), *_times(row)])
    ends = ["", *(f"  {_remark(row, taken)}" for row in wires)]
    tier = f", offload {taken.offload}," if taken.offload != "none" else ""
    title = f"stage {taken.stage}{tier} on each wire (weights + gradients; of all ranks together):"
    return ["", title, *((a + b).rstrip() for a, b in zip(_aligned(lines), ends, strict=True))]


def _remark(row: Row, taken: Row) -> str:
    words = ["lossy"] if row.wire.is_lossy else []
    if row.step is not None and taken.step is not None and row.wire != taken.wire:
        words.append(f"{taken.step.seconds / row.step.seconds:.2f} x as fast")
    return ", ".join(words)


def _times(row: Row) -> list[str]:
    if row.step is None:
        return []
    seconds = row.step.seconds
    step = f"{seconds * 1e3:.3g} ms" if seconds < 1 else f"{seconds:.2f} s"
    return [step, f"{row.step.tokens_per_s:,.0f}"]


def _fits(row: Row) -> str:
    worst = max(row.missing.values())
    return f"+{format_bytes(-row.missing['device'])}" if row.fits else f"no, -{format_bytes(worst)}"


def _aligned(lines: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(len(line[i]) for line in lines) for i in range(len(lines[0]))]
    return ["  ".join(c.rjust(w) for c, w in zip(line, widths, strict=True)) for line in lines]


def _short(nbytes: int) -> str:
    return format_bytes(nbytes) if nbytes else "-"
