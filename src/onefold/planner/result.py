"""A plan: every way to train a model on a cluster, which fit, the one to take, and why.

It prints as a table, turns into plain dicts for JSON, and knows the command and the line of Python
that carry it out.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from onefold.planner.calibration import Calibration
from onefold.planner.search import Row, Search
from onefold.planner.show import table, wire_lines
from onefold.planner.sizes import format_bytes


@dataclass(frozen=True, slots=True)
class Request:
    """What was asked, in the words that `onefold train` and `onefold.shard` take."""

    model: str
    ranks: int  # per node
    nodes: int
    seq: int
    precision: str | None
    accumulate: int
    recompute: bool
    folder: str = "PATH"

    @property
    def world_size(self) -> int:
        """Ranks."""
        return self.ranks * self.nodes


@dataclass(frozen=True, slots=True)
class Plan:
    """Rows are ways to train; `best` is the one to take, None where none fits.

    `estimates` names what is not exact; `search` finds further rows; `calibration` is what step
    times rest on, where they are this machine's; `wires` is the way to take on every wire, exact
    and lossy, where that was left open.
    """

    request: Request
    search: Search
    rows: tuple[Row, ...]
    best: Row | None
    closest: Row
    estimates: tuple[str, ...]
    calibration: Calibration | None = None
    wires: tuple[Row, ...] = ()

    @property
    def numel(self) -> int:
        """Parameters of the model."""
        return self.search.one.numel

    @property
    def machine(self) -> str:
        """What step times hold for; empty where none are told."""
        return self.search.machine.name if self.search.machine else ""

    @property
    def fits(self) -> bool:
        """True if there is a way."""
        return self.best is not None

    @property
    def stage(self) -> int | None:
        """Of the way to take."""
        return None if self.best is None else self.best.stage

    @property
    def offload(self) -> str | None:
        """Of the way to take: what `onefold.shard(offload=)` takes."""
        row = self.best or self.closest
        if row.offload == "none":
            return None
        return f"disk:{self.request.folder}" if row.offload == "disk" else row.offload

    def explain(self) -> list[str]:
        """Which is the first way that fits, what the one before it misses, and what to do."""
        lines: list[str] = []
        before: Row | None = None
        for row in self.rows:
            if row.fits:
                lines.append("; ".join([_verdict(row)] if before is None else
                                       [_verdict(before), _verdict(row)]))  # fmt: skip
                break
            before = row
        else:
            lines.append(f"nothing fits; the nearest: {_verdict(self.closest)}")
            lines.append(_advice(self))
        if self.best is not None:
            lines.append(f"take {_named(self.best)}: {_reason(self)}")
            lines += _wire_notes(self)
        lines += [f"estimated, not exact: {part}" for part in self.estimates]
        return lines

    @property
    def command(self) -> str:
        """What carries the plan out in a shell, on every node."""
        row, request = self.best or self.closest, self.request
        batch = row.rows * request.world_size * request.accumulate
        words = ["onefold train"]
        if request.nodes > 1:
            words = [f"torchrun --nnodes {request.nodes} --nproc-per-node {request.ranks} "
                     "--rdzv-backend c10d --rdzv-endpoint HOST:29500 -m onefold train"]  # fmt: skip
        words += [f"--model {request.model}", f"--stage {row.stage}", f"--batch {batch}"]
        words += [f"--seq {request.seq}"]
        words += [f"--precision {request.precision}"] * bool(request.precision)
        words += [f"--offload {self.offload}"] * bool(self.offload)
        words += [f"--wire {row.wire.name}"] * (row.wire.is_preset and not row.wire.wire.is_plain)
        words += [f"--accumulate {request.accumulate}"] * (request.accumulate > 1)
        words += ["--recompute"] * request.recompute
        words += [f"--ranks {request.ranks}"] * (request.nodes == 1)
        return " ".join(words)

    @property
    def line(self) -> str:
        """What carries it out in a script."""
        row, options = self.best or self.closest, ""
        options += f', precision="{self.request.precision}"' if self.request.precision else ""
        options += f', offload="{self.offload}"' if self.offload else ""
        if not row.wire.wire.is_plain:
            name = row.wire.name
            options += f', wire="{name}"' if row.wire.is_preset else f", wire=onefold.{name}"
        return f"onefold.shard(model, optimizer, stage={row.stage}{options})"

    def as_dict(self) -> dict[str, Any]:
        """Plain dicts and numbers, for JSON."""
        return {
            "model": self.request.model,
            "parameters": self.numel,
            "world_size": self.request.world_size,
            "fits": self.fits,
            "best": None if self.best is None else _plain(self.best),
            "rows": [_plain(row) for row in self.rows],
            "wires": [_plain(row) for row in self.wires],
            "explanation": self.explain(),
            "estimates": list(self.estimates),
            "machine": self.machine,
            "calibration": self.calibration.as_dict() if self.calibration else None,
            "command": self.command,
            "line": self.line,
        }

    def __str__(self) -> str:
        request = self.request
        ranks = f"{request.world_size} ranks" if request.world_size > 1 else "1 rank"
        head = (
            f"{request.model}: {self.numel:,d} parameters, {ranks}, "
            f"{self.rows[0].rows if len({r.rows for r in self.rows}) == 1 else 'as many as fit'} "
            f"rows of {request.seq} tokens a rank"
        )
        if request.accumulate > 1:
            head += f" x {request.accumulate} micro-batches"
        measured = self.calibration.lines() if self.calibration else []
        if request.nodes > 1:
            head += f", {request.nodes} nodes"
        lines = [head, "", *table(self), "", *self.explain(), *measured, *wire_lines(self), ""]
        return "\n".join([*lines, f"  {self.command}", f"  {self.line}"])


def _named(row: Row) -> str:
    where = {"none": "", "optimizer": " with the optimizer in CPU memory",
             "cpu": " with states and parameters in CPU memory",
             "disk": " with states and parameters on disk"}  # fmt: skip
    return f"stage {row.stage}{where[row.offload]}"


PLACES = {"device": "", "host": " of host memory", "disk": " of disk"}


def _verdict(row: Row) -> str:
    short = {place: nbytes for place, nbytes in row.missing.items() if nbytes > 0}
    if short:
        missing = " and ".join(f"{format_bytes(n)}{PLACES[place]}" for place, n in short.items())
        return f"{_named(row)} does not fit by {missing}"
    return f"{_named(row)} fits with {format_bytes(-row.missing['device'])} free"


def _reason(plan: Plan) -> str:
    row = plan.best
    assert row is not None, "a reason for nothing"
    if row.step is None:
        return "the simplest that fits"
    return (
        f"the fastest that fits ({row.step.tokens_per_s:,.0f} tokens/s, bound by {row.step.bound})"
    )


def _wire_notes(plan: Plan) -> list[str]:
    """What a wire asks of whoever carries the plan out, and what it does not do here."""
    row, nodes = plan.best, plan.request.nodes
    assert row is not None, "notes on nothing"
    if row.wire.wire.is_plain:
        return []
    if nodes == 1 and row.forecast.recipe.wire.is_plain:
        return [
            f"wire {row.wire.name} is an exact one on a single node, which keeps all for itself"
        ]
    lines = [f"wire {row.wire.name} rounds what it sends: compare losses"] * row.wire.is_lossy
    if not row.wire.is_preset:
        lines.append("onefold train has no name for this wire; the line below does it in a script")
    return lines


def _advice(plan: Plan) -> str:
    row, request = plan.closest, plan.request
    ways = ["more devices"]
    if row.rows > 1:
        ways.insert(0, "fewer rows in a micro-batch (--batch)")
    if not request.recompute:
        ways.insert(0, "--recompute")
    if request.precision is None:
        ways.insert(0, "--precision bf16")
    return (
        f"it would need {format_bytes(row.needs['device'])} on each device; {', '.join(ways)} help"
    )


def _plain(row: Row) -> dict[str, Any]:
    step = row.step
    return {
        "stage": row.stage,
        "offload": row.offload,
        "rows": row.rows,
        "fits": row.fits,
        "nbytes": row.needs,
        "missing_nbytes": row.missing,
        "device_nbytes": row.groups,
        "at_peak": {"phase": row.forecast.peak.phase, "unit": row.forecast.peak.unit},
        "wire": row.wire.name,
        "lossy": row.wire.is_lossy,
        "sent_nbytes": row.sent_nbytes,
        "sent_between_nodes_nbytes": row.between_nbytes,
        "seconds": None if step is None else step.seconds,
        "tokens_per_s": None if step is None else step.tokens_per_s,
        "bound": None if step is None else step.bound,
    }
