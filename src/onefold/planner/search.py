"""Try every stage, offload, wire and number of rows: which fit, and which is the best."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from onefold.config import stage_of
from onefold.errors import ConfigError
from onefold.fit.communicators import nbytes_of, planned_sizes
from onefold.planner.composed import ComposedJob
from onefold.planner.composition import Composition, compose
from onefold.planner.costs import Conditions
from onefold.planner.machines import Machine
from onefold.planner.memory import OFFLOADS, Forecast, forecast
from onefold.planner.mixed import DeviceKind, MixedJob, MixedSplit, room_facts
from onefold.planner.planned_axes import Anatomy, ModelAxes
from onefold.planner.simulate import StepTime, simulate
from onefold.planner.trace import Trace
from onefold.recipe import Recipe
from onefold.wire_config import EXACT, PRESETS, Wire, resolve_wire, wire_of

GROUPS = {
    "parameters": ("weight",),
    "gradients": ("grad", "partial_grad", "feedback"),
    "optimizer": ("master", "optimizer"),
    "activations": ("activation",),
    "logits": ("logits",),
    "gather window": ("unsharded",),
    "secondary shards": ("secondary",),
    "buffers": ("wire", "staging", "buffer", "batch"),
}
"""The ledger's kinds by the names that people use."""

MAX_ROWS = 4096
DTYPES = {2: "bf16", 4: "fp32"}
"""dtype of matrix products by the bytes of an element."""


EXACT_NAMES = ("exact", "hybrid", "replicas")
"""The presets that "auto" chooses from: they send every number as it is."""


@dataclass(frozen=True, slots=True)
class Candidate:
    """A wire of the request; a preset adapts to the stage and the mesh."""

    name: str  # a preset's, or the repr of another `Wire`
    wire: Wire
    adapts: bool = True

    @property
    def is_preset(self) -> bool:
        """True if `onefold train --wire` knows it."""
        return self.name in PRESETS

    @property
    def is_lossy(self) -> bool:
        """True if a message is quantized."""
        wire = self.wire
        return wire.rounds_gradients or {wire.weights_inside, wire.weights_between} != {EXACT}

    def fit(self, recipe: Recipe) -> Recipe:
        """Put the wire into a recipe; `ConfigError` where `onefold.shard` would refuse it.

        Nodes are an axis of the mesh where the wire asks for them. A wire that does not leaves even
        hosts to the engine.
        """
        if recipe.world_size == 1:
            return replace(recipe, wire=Wire(), has_axes=False, has_hosts=False)
        near = recipe.local_world_size
        has_axes = 1 < near < recipe.world_size and not self.wire.is_plain
        wire = resolve_wire(
            self.wire, recipe.stage, recipe.offload, has_axes=has_axes, adapts=self.adapts
        )
        has_hosts = recipe.has_hosts and self.wire.is_plain
        has_axes &= recipe.is_sharded
        return replace(recipe, wire=wire, has_axes=has_axes, has_hosts=has_hosts)


EXACT_WIRE = Candidate(EXACT, Wire())


def candidates(choice: object, *, nodes: int) -> tuple[Candidate, ...]:
    """Return the wires to try: for "auto" on several nodes all exact presets."""
    if choice == "auto":
        names = EXACT_NAMES if nodes > 1 else EXACT_NAMES[:1]
        return tuple(Candidate(name, PRESETS[name]) for name in names)
    if isinstance(choice, str) and choice not in PRESETS:
        hint = "wire='auto' compares all presets"
        words = f"wire to be auto, {', '.join(PRESETS)} or a Wire"
        raise ConfigError(words, repr(choice), hint=hint)
    wire = wire_of(choice)
    name = next((name for name, preset in PRESETS.items() if preset == wire), repr(wire))
    return (Candidate(name, wire, adapts=not isinstance(choice, Wire)),)


def lossy() -> tuple[Candidate, ...]:
    """Return the presets with quantized messages. A plan compares them; people choose them."""
    every = (Candidate(name, wire) for name, wire in PRESETS.items())
    return tuple(candidate for candidate in every if candidate.is_lossy)


@dataclass(frozen=True, slots=True)
class Row:
    """One way to train, and the bytes and seconds that it takes.

    With model axes the forecast is that of the rank of the pipeline that holds most, on several
    kinds of devices that of the tightest rank, with the room of its kind.
    """

    stage: int
    offload: str
    rows: int  # of one micro-batch on one rank; on several kinds in the mean
    forecast: Forecast
    needs: dict[str, int]  # bytes by place, as in `Search.room`
    room: Mapping[str, int]
    step: StepTime | None
    wire: Candidate
    composed: Composition | None = None  # with model axes
    mixed: MixedSplit | None = None  # over several kinds of devices

    @property
    def missing(self) -> dict[str, int]:
        """Bytes that are missing, by place; negative: free."""
        return {place: self.needs[place] - nbytes for place, nbytes in self.room.items()}

    @property
    def fits(self) -> bool:
        """True if nothing is missing."""
        return all(nbytes <= 0 for nbytes in self.missing.values())

    @property
    def unchecked(self) -> dict[str, int]:
        """Needed bytes of places whose bytes are not known."""
        return {place: n for place, n in self.needs.items() if n and place not in self.room}

    @property
    def groups(self) -> dict[str, int]:
        """Bytes on the device at the peak, by purpose."""
        tiers = ("device", "cpu") if self.forecast.recipe.device_type == "cpu" else ("device",)
        held = self.forecast.peak.held
        return {
            group: sum(held.get((kind, tier), 0) for kind in kinds for tier in tiers)
            for group, kinds in GROUPS.items()
        }

    @property
    def communicators(self) -> list[int]:
        """The ranks of each communicator of a rank; CPU ranks have none."""
        recipe = self.forecast.recipe
        sizes = planned_sizes(recipe, self.composed.axes.sizes if self.composed else None)
        return [] if recipe.device_type == "cpu" else sizes

    @property
    def tokens_per_s(self) -> float:
        """Tokens per second of all ranks; 0 where no machine was named."""
        return self.step.tokens_per_s if self.step is not None else 0.0

    def as_dict(self) -> dict[str, Any]:
        """Return plain dicts and numbers, for JSON."""
        step = self.step
        return {
            "stage": self.stage,
            "offload": self.offload,
            "rows": self.rows,
            "fits": self.fits,
            "nbytes": self.needs,
            **room_facts(self.missing),
            "device_nbytes": self.groups,
            "communicators": len(self.communicators),
            "communicator_nbytes": nbytes_of(self.communicators),
            "at_peak": {"phase": self.forecast.peak.phase, "unit": self.forecast.peak.unit},
            "wire": self.wire.name,
            "lossy": self.wire.is_lossy,
            "sent_nbytes": self.forecast.sent_nbytes,
            "sent_between_nodes_nbytes": round(self.forecast.between_nbytes),
            "seconds": None if step is None else step.seconds,
            "tokens_per_s": None if step is None else step.tokens_per_s,
            "bound": None if step is None else step.bound,
            **({"composition": self.composed.as_dict()} if self.composed else {}),
            **({"mixed": self.mixed.as_dict()} if self.mixed else {}),
        }


@dataclass(frozen=True, slots=True)
class Search:
    """A model and a cluster, for which ways to train are tried.

    one_row, two_rows: traces of micro-batches of one row and of two; if `two_rows` is None, the
        first is of all rows.
    recipe: the ranks, the device and the precision. Each way adds its stage, offload and wire.
    room: bytes of each "device", and of each "host" and its "disk" for all its ranks; a place that
        is left out is not checked.
    axes, anatomy: model axes, and the parts of the model that they cut.
    kinds, exact: several kinds of devices, for which `room` and `machine` are those of the first.
    """

    one_row: Trace
    two_rows: Trace | None
    recipe: Recipe
    room: Mapping[str, int]
    machine: Machine | None
    tokens: int  # of one row
    wires: tuple[Candidate, ...] = (EXACT_WIRE,)
    accumulate: int = 1  # micro-batches of a step
    axes: ModelAxes = field(default_factory=ModelAxes)
    anatomy: Anatomy = field(default_factory=Anatomy)
    kinds: tuple[DeviceKind, ...] = ()  # of devices, where there are several
    exact: Callable[[int], Trace] | None = None  # the trace of so many rows

    def row(self, stage: int, offload: str, rows: int) -> Row:
        """Try micro-batches of `rows` rows, on the best wire for them."""
        return preferred(self.over(self.wires, stage, offload, rows))

    def over(self, wires: Sequence[Candidate], stage: int, offload: str, rows: int) -> list[Row]:
        """Try each wire that such a recipe can have; `ConfigError` if there is none."""
        tried: dict[Recipe, Row] = {}
        refused: ConfigError | None = None
        rank = self.axes.data(self.recipe)
        way = replace(rank, stage=stage_of(stage), offload=OFFLOADS[offload])
        for wire in wires:
            try:
                recipe = wire.fit(way)
            except ConfigError as error:
                refused = refused or error
                continue
            if recipe not in tried:
                tried[recipe] = self._row(wire, recipe, offload, rows)
        if refused is not None and not tried:
            raise refused
        return list(tried.values())

    def _row(self, wire: Candidate, recipe: Recipe, offload: str, rows: int) -> Row:
        trace, composition, mixed = self.trace_of(rows), None, None
        room, step, near = self.room, None, self.recipe.local_world_size
        if self.axes.are_used:
            job = ComposedJob(
                self.axes, self.anatomy, self.recipe, rows * self.tokens, self.conditions.itemsize,
                self.room.get("device"), self.machine, self.conditions,
            )  # fmt: skip
            composition, step = compose(trace, job, recipe)
            held = composition.ranks[composition.fullest].forecast
        elif self.kinds:
            mixed = self.job(recipe, rows).best()
            kind, held, step = mixed.tightest.kind, mixed.tightest.forecast, mixed.step
            room, near = kind.room, kind.local_world_size
        else:
            held = forecast(trace, recipe, accumulate=self.accumulate)
            near = min(near, recipe.world_size)
            if self.machine is not None:
                work = trace.work(rows * self.tokens)
                step = simulate(work, recipe, self.machine, self.conditions)
        needs, stage = held.by_place(near), recipe.stage.number
        return Row(stage, offload, rows, held, needs, room, step, wire, composition, mixed)

    def job(self, recipe: Recipe, rows: int) -> MixedJob:
        """Return the job of `rows` rows a rank in the mean on all kinds of devices."""
        exact = self.exact or self.trace_of
        recipe = replace(recipe, shares=None)
        return MixedJob(
            kinds=self.kinds, recipe=recipe, rows=rows, tokens=self.tokens,
            conditions=self.conditions, near=self.trace_of, exact=exact,
        )  # fmt: skip

    @property
    def conditions(self) -> Conditions:
        """The micro-batches, and the dtype of products and messages."""
        compute = self.recipe.precision.compute
        first = next((member for unit in self.one_row.units for member in unit.members), None)
        itemsize = compute.itemsize if compute else first.itemsize if first else 4
        return Conditions(
            accumulate=self.accumulate, dtype=DTYPES.get(itemsize, "fp32"),
            weight_itemsize=itemsize, grad_itemsize=itemsize,
        )  # fmt: skip

    def trace_of(self, rows: int) -> Trace:
        """Return the trace of that many rows."""
        return self.one_row if self.two_rows is None else self.one_row.at_rows(self.two_rows, rows)

    def largest(self, stage: int, offload: str) -> Row:
        """Try as many rows as fit, on every wire: some leave room for more."""
        rows = self.over(self.wires, stage, offload, 1)
        return preferred([self._grown(row) for row in rows])

    def _grown(self, best: Row) -> Row:
        least, most = best.rows, None
        while best.fits and self.two_rows is not None and least < MAX_ROWS and most != least + 1:
            rows = 2 * least if most is None else (least + most) // 2
            (more,) = self.over((best.wire,), best.stage, best.offload, rows)
            least, most, best = (rows, most, more) if more.fits else (least, rows, best)
        return best


def preferred(rows: Sequence[Row]) -> Row:
    """Choose among wires the fastest that fits, or the one that sends least between nodes a row.

    Of equal ones it is the first, which is the simplest. Where none fits, see `nearest`.
    """
    best = best_of(rows)
    if best is None:
        return nearest(rows)
    if best.step is not None:
        return best
    fitting = (row for row in rows if row.fits)
    return min(fitting, key=lambda row: row.forecast.between_nbytes / row.rows)


def best_of(rows: Sequence[Row]) -> Row | None:
    """Choose the fastest that fits; of those within a percent the first, which is the simplest."""
    fitting = [row for row in rows if row.fits]
    fastest = max((row.tokens_per_s for row in fitting), default=0.0)
    return next((row for row in fitting if row.tokens_per_s >= 0.99 * fastest), None)


def nearest(rows: Sequence[Row]) -> Row:
    """Choose, of rows of which none fits, the one that misses the fewest bytes."""
    return min(rows, key=lambda row: sum(max(0, n) for n in row.missing.values()))
