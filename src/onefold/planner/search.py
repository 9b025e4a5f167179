"""Which stage, which tiers, how many rows: every way to train, which fit, the best of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from onefold.config import stage_of
from onefold.errors import ConfigError
from onefold.planner.conditions import Conditions
from onefold.planner.machines import Machine
from onefold.planner.memory import Forecast, forecast
from onefold.planner.simulate import StepTime, simulate
from onefold.planner.strategies import OFFLOADS
from onefold.planner.trace import Trace
from onefold.planner.wires import Candidate
from onefold.planner.work import ModelWork, UnitWork
from onefold.recipe import Recipe
from onefold.wire_config import EXACT, Wire

EXACT_WIRE = Candidate(EXACT, Wire())

GROUPS = {
    "parameters": ("weight",),
    "gradients": ("grad", "partial_grad", "feedback"),
    "optimizer": ("master", "optimizer"),
    "activations": ("activation",),
    "logits": ("logits",),
    "gather window": ("unsharded",),
    "second shard": ("secondary",),
    "buffers": ("wire", "staging", "buffer", "batch"),
}
"""What people call the ledger's kinds."""


@dataclass(frozen=True, slots=True)
class Capacity:
    """Bytes there are: on each device, and on each host and its disk for all its ranks (None: not
    asked about).
    """

    device: int
    host: int | None = None
    disk: int | None = None


@dataclass(frozen=True, slots=True)
class Row:
    """One way to train, what it needs, and whether that is there."""

    stage: int
    offload: str
    rows: int  # of one micro-batch on one rank
    forecast: Forecast
    room: Capacity
    step: StepTime | None
    wire: Candidate = EXACT_WIRE

    @property
    def needs(self) -> dict[str, int]:
        """Bytes by place: of one device, and of one host for all its ranks.

        Where the CPU computes, device and host are one memory, of which each rank has its share.
        """
        recipe = self.forecast.recipe
        ranks = min(recipe.local_world_size, recipe.world_size)
        cpu, disk = self.forecast.peaks.get("cpu", 0), self.forecast.peaks.get("disk", 0)
        if recipe.device_type == "cpu":
            return {"device": self.forecast.memory_nbytes, "host": 0, "disk": disk * ranks}
        return {"device": self.forecast.peaks["device"], "host": cpu * ranks, "disk": disk * ranks}

    @property
    def missing(self) -> dict[str, int]:
        """Bytes that are not there, by place; negative: free. Not of places nobody asked about."""
        room = {"device": self.room.device, "host": self.room.host, "disk": self.room.disk}
        return {
            place: self.needs[place] - there for place, there in room.items() if there is not None
        }

    @property
    def fits(self) -> bool:
        """True if nothing is missing."""
        return all(nbytes <= 0 for nbytes in self.missing.values())

    @property
    def groups(self) -> dict[str, int]:
        """Bytes on the device at the peak, by what they are for."""
        places = ("device", "cpu") if self.forecast.recipe.device_type == "cpu" else ("device",)
        held = self.forecast.peak.held
        return {
            group: sum(held.get((kind, place), 0) for kind in kinds for place in places)
            for group, kinds in GROUPS.items()
        }

    @property
    def sent_nbytes(self) -> int:
        """Bytes that one rank sends in a step."""
        return self.forecast.sent_nbytes

    @property
    def between_nbytes(self) -> int:
        """Those of them that leave its node."""
        return round(self.forecast.between_nbytes)


@dataclass(frozen=True, slots=True)
class Search:
    """A model and a cluster to search ways for.

    `two` is the trace of one row more than `one` has. `recipe` has the ranks, the device and the
    precision; each way brings its own stage, tiers and wire, one of `wires`.
    """

    one: Trace
    two: Trace | None
    recipe: Recipe
    room: Capacity
    machine: Machine | None
    tokens: int  # of one row
    wires: tuple[Candidate, ...] = (EXACT_WIRE,)
    accumulate: int = 1  # micro-batches of a step

    def row(self, stage: int, offload: str, rows: int) -> Row:
        """One way, with micro-batches of `rows` rows, on the wire that suits it best."""
        return preferred(self.over(self.wires, stage, offload, rows))

    def over(self, wires: Sequence[Candidate], stage: int, offload: str, rows: int) -> list[Row]:
        """One way on each of several wires that it can have; `ConfigError` if that is none."""
        found: dict[Recipe, Row] = {}
        refused: ConfigError | None = None
        way = replace(self.recipe, stage=stage_of(stage), offload=OFFLOADS[offload])
        for wire in wires:
            try:
                recipe = wire.fit(way)
            except ConfigError as error:
                refused = refused or error
                continue
            if recipe not in found:
                found[recipe] = self._row(wire, recipe, offload, rows)
        if refused is not None and not found:
            raise refused
        return list(found.values())

    def _row(self, wire: Candidate, recipe: Recipe, offload: str, rows: int) -> Row:
        trace = self.trace_of(rows)
        found = forecast(trace, recipe, accumulate=self.accumulate)
        step = None
        if self.machine is not None:
            work = work_of(trace, rows * self.tokens)
            step = simulate(work, recipe, self.machine, self.conditions)
        return Row(recipe.stage.number, offload, rows, found, self.room, step, wire)

    @property
    def conditions(self) -> Conditions:
        """The micro-batches, and the dtype of products and messages."""
        compute = self.recipe.precision.compute
        first = next((member for unit in self.one.units for member in unit.members), None)
        itemsize = compute.itemsize if compute else first.itemsize if first else 4
        return Conditions(
            accumulate=self.accumulate, dtype=DTYPES.get(itemsize, "fp32"),
            weight_itemsize=itemsize, grad_itemsize=itemsize,
        )  # fmt: skip

    def trace_of(self, rows: int) -> Trace:
        """The trace of that many rows; those of one and two rows tell all others."""
        if self.two is None:
            return self.one
        return extrapolated(self.one, self.two, rows)

    def largest(self, stage: int, offload: str) -> Row:
        """With as many rows as fit: of the powers of two, as kernels like them. A wire that keeps
        less for the node may have room for more rows.
        """
        found = self.over(self.wires, stage, offload, 1)
        return preferred([self._grown(row) for row in found])

    def _grown(self, best: Row) -> Row:
        while best.fits and self.two is not None and best.rows < MAX_ROWS:
            (more,) = self.over((best.wire,), best.stage, best.offload, 2 * best.rows)
            if not more.fits:
                break
            best = more
        return best


MAX_ROWS = 4096
DTYPES = {2: "bf16", 4: "fp32"}
"""dtype of matrix products by the bytes of an element."""


def preferred(rows: Sequence[Row]) -> Row:
    """Of one way on several wires: the fastest that fits, or what sends least between nodes for
    each row; of several alike the first, which is the simplest. Where none fits, the one that
    misses least.
    """
    fitting = [row for row in rows if row.fits]
    if not fitting:
        return nearest(rows)
    if all(row.step is not None for row in fitting):
        best = best_of(fitting)
        assert best is not None, "what fits has a best"
        return best
    return min(fitting, key=lambda row: row.between_nbytes / row.rows)


def best_of(rows: Sequence[Row]) -> Row | None:
    """The fastest that fits; of those within a percent the first, which is the simplest."""
    fitting = [row for row in rows if row.fits]
    timed = [row for row in fitting if row.step is not None]
    if not timed:
        return fitting[0] if fitting else None
    fastest = max(_speed(row) for row in timed)
    return next(row for row in timed if _speed(row) >= 0.99 * fastest)


def _speed(row: Row) -> float:
    return row.step.tokens_per_s if row.step is not None else 0.0


def nearest(rows: Sequence[Row]) -> Row:
    """Of rows of which none fits, the one that misses least."""
    return min(rows, key=lambda row: sum(max(0, n) for n in row.missing.values()))


def extrapolated(one: Trace, two: Trace, rows: int) -> Trace:
    """The trace of `rows` rows, from those of one and of two: bytes and work grow by the row."""
    if rows == 1:
        return one

    def line(a: float, b: float) -> float:
        return a + (b - a) * (rows - 1)

    events = tuple(
        replace(
            first, now=int(line(first.now, second.now)), peak=int(line(first.peak, second.peak)),
            logits=int(line(first.logits, second.logits)),
        )
        for first, second in zip(one.events, two.events, strict=True)
    )  # fmt: skip
    units = tuple(a.scaled(b, rows) for a, b in zip(one.units, two.units, strict=True))
    batch = int(line(one.batch_nbytes, two.batch_nbytes))
    return Trace(units, events, batch, one.buffers_nbytes)


def work_of(trace: Trace, tokens: int) -> ModelWork:
    """What a micro-batch computes, for the simulator; recompute is in its backward."""
    return ModelWork(
        units=tuple(
            UnitWork(
                name=unit.name,
                numel=unit.numel,
                forward_flops=unit.forward.flops,
                forward_nbytes=unit.forward.nbytes,
                backward_flops=unit.backward.flops,
                backward_nbytes=unit.backward.nbytes,
                num_kernels=unit.forward.num_kernels + unit.backward.num_kernels,
                forward_attention_flops=unit.forward.attention_flops,
                backward_attention_flops=unit.backward.attention_flops,
                forward_drawn=unit.forward.drawn,
                backward_drawn=unit.backward.drawn,
            )
            for unit in trace.units
        ),
        tokens=tokens,
    )
