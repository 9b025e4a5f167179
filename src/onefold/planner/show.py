"""The tables of a plan: every way to train, and on several nodes what each wire would give."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from onefold.planner.search import GROUPS, Row
from onefold.planner.sizes import format_bytes

HEADS = {
    "parameters": "params", "gradients": "grads", "optimizer": "optim", "activations": "activ",
    "logits": "logits", "gather window": "window", "second shard": "second", "buffers": "buffers",
}  # fmt: skip


class ShownRequest(Protocol):
    """The part of a request that tables show."""

    @property
    def nodes(self) -> int: ...
    @property
    def world_size(self) -> int: ...


class Planned(Protocol):
    """A plan, as its tables need it."""

    @property
    def request(self) -> ShownRequest: ...
    @property
    def rows(self) -> Sequence[Row]: ...
    @property
    def wires(self) -> Sequence[Row]: ...
    @property
    def best(self) -> Row | None: ...
    @property
    def closest(self) -> Row: ...
    @property
    def machine(self) -> str: ...
    @property
    def numel(self) -> int: ...


def table(plan: Planned) -> list[str]:
    """One line a row, columns as wide as they must be; wires where there are several nodes."""
    has_wires = plan.request.nodes > 1 or any(not row.wire.wire.is_plain for row in plan.rows)
    groups = [group for group in GROUPS if group != "second shard" or has_wires]
    heads = ["stage", "offload", *["wire"] * has_wires, "rows", *(HEADS[each] for each in groups)]
    heads += ["device", "host", "disk", "fits", "sent/step", *["to nodes"] * has_wires]
    heads += ["step", "tokens/s", "bound"] if plan.machine else []
    return _aligned([heads, *(_cells(row, plan, groups, has_wires) for row in plan.rows)])


def _cells(row: Row, plan: Planned, groups: Sequence[str], has_wires: bool) -> list[str]:
    needs = row.needs
    mark = "*" if row is plan.best else ""
    cells = [f"{mark}{row.stage}", row.offload, *[_name(row)] * has_wires, str(row.rows)]
    cells += [_short(row.groups[group]) for group in groups]
    cells += [_short(needs[place]) for place in ("device", "host", "disk")]
    cells += [_fits(row), _short(row.sent_nbytes), *[_short(row.between_nbytes)] * has_wires]
    if plan.machine and row.step is not None:
        cells += [_seconds(row.step.seconds), f"{row.step.tokens_per_s:,.0f}", row.step.bound]
    return cells


def wire_lines(plan: Planned) -> list[str]:
    """The way to take on every wire: bytes a parameter, of all ranks together, and seconds."""
    if not plan.wires:
        return []
    taken = plan.best or plan.closest
    heads = ["wire", "between nodes, B/param", "inside, B/param", "device", "fits"]
    heads += ["step", "tokens/s"] if plan.machine else []
    lines = [heads, *(_wire_cells(row, plan, taken) for row in plan.wires)]
    numbers = _aligned(lines)
    ends = ["", *(f"  {_remark(row, taken)}" for row in plan.wires)]
    tier = f", offload {taken.offload}," if taken.offload != "none" else ""
    said = f"stage {taken.stage}{tier} on each wire (weights + gradients; of all ranks together):"
    return ["", said, *((a + b).rstrip() for a, b in zip(numbers, ends, strict=True))]


def _wire_cells(row: Row, plan: Planned, taken: Row) -> list[str]:
    world, sent = plan.request.world_size, row.forecast.sent_by_link
    each = [f"{sent[link, what] * world / plan.numel:.3f}"
            for link in ("between", "inside") for what in ("weights", "gradients")]  # fmt: skip
    mark = "*" if row.wire == taken.wire else ""
    cells = [mark + row.wire.name, f"{each[0]} + {each[1]}", f"{each[2]} + {each[3]}"]
    cells += [_short(row.needs["device"]), _fits(row)]
    if plan.machine and row.step is not None:
        cells += [_seconds(row.step.seconds), f"{row.step.tokens_per_s:,.0f}"]
    return cells


def _remark(row: Row, taken: Row) -> str:
    words = ["lossy"] if row.wire.is_lossy else []
    if row.step is not None and taken.step is not None and row.wire != taken.wire:
        words.append(f"{taken.step.seconds / row.step.seconds:.2f} x as fast")
    return ", ".join(words)


def _name(row: Row) -> str:
    return row.wire.name if row.wire.is_preset else "Wire"


def _fits(row: Row) -> str:
    worst = max(row.missing.values())
    return f"+{format_bytes(-row.missing['device'])}" if row.fits else f"no, -{format_bytes(worst)}"


def _aligned(lines: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(len(line[i]) for line in lines) for i in range(len(lines[0]))]
    return ["  ".join(c.rjust(w) for c, w in zip(line, widths, strict=True)) for line in lines]


def _short(nbytes: int) -> str:
    return format_bytes(nbytes) if nbytes else "-"


def _seconds(seconds: float) -> str:
    return f"{seconds * 1e3:.3g} ms" if seconds < 1 else f"{seconds:.2f} s"
