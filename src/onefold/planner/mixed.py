"""Split a job over several kinds of devices: rows by speed, states by memory.

    rows     of a micro-batch: those that end the step soonest (layout/row_split.py)
    shares   of the states: even, if they fit; else as even as memory allows, since a rank sends its
             own rows to all others: the largest share sets the pace of the wire

Rows come first, and states take the room that activations, whole units and messages leave. Bytes
are those of planner/memory.py for each kind's fullest rank, times those of planner/simulate.py. All
ranks meet in every collective, so a step takes as long as its slowest rank. See Cephalo (ICS'25)
for the two choices made apart, and Poplar (AAAI'25) for rows.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from math import ceil, inf
from typing import Any, TypeVar

from onefold.errors import ConfigError
from onefold.fit.shares import TRIES, Line, fractions, most_of, settle
from onefold.layout.ranges import Shares
from onefold.layout.row_split import RankTime, rows_of
from onefold.planner.costs import Conditions, LinkGroup, gather_cost
from onefold.planner.machines import Machine
from onefold.planner.memory import Forecast, forecast
from onefold.planner.simulate import StepTime, simulate
from onefold.planner.trace import Trace
from onefold.recipe import Recipe

T = TypeVar("T")

OWN_PARTS = ("compute", "memory", "optimizer")
"""The parts of a step in which a rank waits for no other."""


@dataclass(frozen=True, slots=True)
class DeviceKind:
    """One kind of devices. Its ranks are neighbours, from rank `first` on.

    `room`: bytes of each "device", and of each "host" and its "disk" for all ranks of the host.
    """

    name: str
    first: int
    ranks: int
    local_world_size: int
    room: Mapping[str, int]
    machine: Machine | None


@dataclass(frozen=True, slots=True)
class KindPlan:
    """What the ranks of one kind take. The forecast is that of the fullest of them."""

    kind: DeviceKind
    rows: int  # of the rank with most, in a micro-batch
    share: float  # of all states, of one rank
    forecast: Forecast
    step: StepTime | None

    @property
    def needs(self) -> dict[str, int]:
        """Bytes by place, as in `DeviceKind.room`."""
        return self.forecast.by_place(self.kind.local_world_size)

    @property
    def missing(self) -> dict[str, int]:
        """Bytes that are missing, by place; negative: free."""
        return {place: self.needs[place] - nbytes for place, nbytes in self.kind.room.items()}

    @property
    def at_rest_nbytes(self) -> int:
        """Bytes of state on one rank, over all tiers."""
        rest = ("weight", "master", "optimizer", "grad")
        return sum(n for (kind, _), n in self.forecast.resting.items() if kind in rest)

    def as_dict(self) -> dict[str, Any]:
        """Return plain dicts and numbers, for JSON."""
        kind, step = self.kind, self.step
        return {
            "kind": kind.name, "first_rank": kind.first, "ranks": kind.ranks, "rows": self.rows,
            "share": self.share, "at_rest_nbytes": self.at_rest_nbytes, "nbytes": self.needs,
            **room_facts(self.missing), "sent_nbytes": self.forecast.sent_nbytes,
            "seconds": None if step is None else step.seconds,
        }  # fmt: skip


def room_facts(missing: Mapping[str, int]) -> dict[str, dict[str, int]]:
    """Return the bytes that are missing, and those that are free, by place, for JSON."""
    return {
        "missing_nbytes": {place: max(0, nbytes) for place, nbytes in missing.items()},
        "free_nbytes": {place: max(0, -nbytes) for place, nbytes in missing.items()},
    }


@dataclass(frozen=True, slots=True)
class MixedSplit:
    """A job over all kinds. `rows` of a micro-batch and `weights` of the states: one a rank.

    weights: None where all ranks hold the same. lacks: the states that have no room, as a share.
    """

    kinds: tuple[KindPlan, ...]
    rows: tuple[int, ...]
    weights: tuple[int, ...] | None
    lacks: float = 0.0

    @property
    def fits(self) -> bool:
        """True if nothing is missing on any rank."""
        return all(nbytes <= 0 for plan in self.kinds for nbytes in plan.missing.values())

    @property
    def tightest(self) -> KindPlan:
        """The first kind of those with the fewest free bytes."""
        return max(self.kinds, key=lambda plan: max(plan.missing.values()))

    @property
    def step(self) -> StepTime | None:
        """The step of the slowest kind; `tokens_per_s` counts the rows of all ranks."""
        slowest = max(self.kinds, key=lambda plan: plan.step.seconds if plan.step else inf)
        step, rows = slowest.step, slowest.rows * len(self.rows)
        if step is None:
            return None
        rate = step.tokens_per_s * sum(self.rows) / rows if rows else 0.0
        return replace(step, tokens_per_s=rate)

    def as_dict(self) -> dict[str, Any]:
        """Return plain dicts and numbers, for JSON."""
        step = self.step
        return {
            "fits": self.fits,
            "rows": list(self.rows),
            "shares": None if self.weights is None else list(self.weights),
            "seconds": None if step is None else step.seconds,
            "tightest": {"kind": self.tightest.kind.name, "rank": self.tightest.kind.first},
            "kinds": [plan.as_dict() for plan in self.kinds],
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class MixedJob:
    """One way to train on several kinds: its recipe, and the rows of a rank in the mean.

    near, exact: the trace of a number of rows, extrapolated and exact.
    """

    kinds: tuple[DeviceKind, ...]
    recipe: Recipe
    rows: int
    tokens: int  # of a row
    conditions: Conditions
    near: Callable[[int], Trace]
    exact: Callable[[int], Trace]

    def best(self) -> MixedSplit:
        """Return the split by speed and memory; where no shares fit, those that miss alike."""
        rows = self._rows_by_rank(None)
        lines = [self._bytes_by_place(kind, rows[kind.first]) for kind in self.kinds]
        if any(most_of(of_kind) < 0 for of_kind in lines):  # activations alone are too many
            try:
                rows = self._rows_by_rank([self._most_rows(kind) for kind in self.kinds])
            except ConfigError:
                return self._forecast_rows(rows, None, lacks=1.0)
            lines = [self._bytes_by_place(kind, rows[kind.first]) for kind in self.kinds]
        if not self.recipe.is_sharded:
            return self._forecast_rows(rows, None)
        split = cache(partial(self._forecast_rows, rows))

        def excess(shares: Shares) -> list[float]:
            plans = zip(split(shares).kinds, lines, strict=True)
            return self._by_rank(
                [
                    max((line.excess(plan.needs[line.tier]) for line in of_kind), default=0.0)
                    for plan, of_kind in plans
                ]
            )

        most = self._by_rank([max(0.0, most_of(of_kind)) for of_kind in lines])
        shares, lacks = settle(most, excess)
        return replace(split(shares), lacks=lacks)

    def equal(self) -> MixedSplit:
        """Return the split that gives all ranks the same."""
        return self._forecast_rows((self.rows,) * self.recipe.world_size, None)

    def _by_rank(self, of_kinds: Sequence[T]) -> list[T]:
        """Give every rank what its kind has."""
        pairs = zip(self.kinds, of_kinds, strict=True)
        return [value for kind, value in pairs for _ in range(kind.ranks)]

    def largest(self, split: MixedSplit, *, is_even: bool) -> int | None:
        """Return the parameters of the largest model at these rows, as states and units grow.

        Activations stay. `is_even`: all ranks hold the same. None where no limit is known.
        """
        lines = [self._bytes_by_place(plan.kind, plan.rows) for plan in split.kinds]
        tries = range(1 << 60)  # in steps of 2**-40
        most = bisect_left(
            tries, True, key=lambda n: not self._has_room(lines, (n + 1) / 2**40, is_even=is_even)
        )
        return None if most == len(tries) else int(self.near(self.rows).numel * most / 2**40)

    def more(self, split: MixedSplit) -> dict[str, int]:
        """Return how many further devices of each kind would hold the states without room.

        Every further rank adds as many rows as the others have in the mean.
        """
        counts: dict[str, int] = {}
        for index, plan in enumerate(split.kinds):
            most = most_of(self._bytes_by_place(plan.kind, plan.rows))
            least = ceil(split.lacks / most) if most > 0 else 0
            tries = range(least, least + TRIES) if least else ()
            count = next((n for n in tries if self._with(index, n).best().fits), 0)
            counts |= {plan.kind.name: count} if count else {}
        return counts

    def _with(self, index: int, count: int) -> MixedJob:
        """Return the same job with more devices of a kind."""
        kinds = [
            replace(
                kind, first=kind.first + count * (at > index),
                ranks=kind.ranks + count * (at == index),
            )
            for at, kind in enumerate(self.kinds)
        ]  # fmt: skip
        recipe, world_size = self.recipe, self.recipe.world_size + count
        is_even = recipe.has_hosts and count % recipe.local_world_size == 0  # they fill whole hosts
        recipe = replace(recipe, world_size=world_size, has_hosts=is_even)
        return replace(self, kinds=tuple(kinds), recipe=recipe, exact=self.near)

    def _has_room(self, lines: Sequence[list[Line]], times: float, *, is_even: bool) -> bool:
        most = [most_of(of_kind, times=times) for of_kind in lines]
        if is_even or not self.recipe.is_sharded:
            return min(most) * self.recipe.world_size >= 1
        total = sum(kind.ranks * limit for kind, limit in zip(self.kinds, most, strict=True))
        return min(most) >= 0 and total >= 1

    # rows

    def _rows_by_rank(self, most: list[int] | None) -> tuple[int, ...]:
        """Return the rows of each rank. `most`: of a rank of each kind."""
        times = self._by_rank([self._time(kind) for kind in self.kinds])
        total = self.rows * self.recipe.world_size
        return rows_of(times, total, None if most is None else self._by_rank(most))

    def _time(self, kind: DeviceKind) -> RankTime:
        """Return the time of a rank's own work, from two numbers of rows."""
        if kind.machine is None or any(other.machine is None for other in self.kinds):
            return RankTime(0.0, 1.0)
        seconds = list[float]()
        for rows in (self.rows, 2 * self.rows):
            work = self.near(rows).work(rows * self.tokens)
            step = simulate(work, self.recipe, kind.machine, self.conditions)
            seconds.append(sum(getattr(step, part) for part in OWN_PARTS))
        per_row = max((seconds[1] - seconds[0]) / self.rows, 1e-12)
        return RankTime(max(0.0, seconds[0] - per_row * self.rows), per_row)

    def _most_rows(self, kind: DeviceKind) -> int:
        """Return the most rows with which a rank without states fits."""
        rows = range(1, self.rows * self.recipe.world_size + 1)
        return bisect_left(
            rows, True, key=lambda number: most_of(self._bytes_by_place(kind, number)) < 0
        )

    # states

    def _bytes_by_place(self, kind: DeviceKind, rows: int) -> list[Line]:
        """Return the bytes of a rank of the kind by place, as they grow with its share."""
        world, cuts = self.recipe.world_size, [None, None]
        if self.recipe.is_sharded:
            cuts = [None, (1,) + (0,) * (world - 1)]
        trace = self.near(max(1, rows))  # a rank without rows runs one that counts for nothing
        held = [
            forecast(trace, replace(self.recipe, shares=c), accumulate=self.conditions.accumulate)
            for c in cuts
        ]
        even, most = (step.by_place(kind.local_world_size) for step in held)
        # a larger model of the same rows has no more of these
        rest = ("activation", "logits", "batch", "buffer")
        fixed = sum(n for (what, _), n in held[0].peak.held.items() if what in rest)
        return [
            Line.through(place, free, even[place], most[place], world, fixed * (place == "device"))
            for place, free in kind.room.items()
        ]

    def _forecast_rows(
        self, rows: tuple[int, ...], weights: Shares, lacks: float = 0.0
    ) -> MixedSplit:
        """Forecast the fullest rank of each kind, and time it."""
        recipe, parts = replace(self.recipe, shares=weights), fractions(weights, len(rows))
        shares = [parts[kind.first] if recipe.is_sharded else 1.0 for kind in self.kinds]
        plans, accumulate = list[KindPlan](), self.conditions.accumulate
        machines = self._machines(shares if weights else None)
        for kind, share, machine in zip(self.kinds, shares, machines, strict=True):
            own, step = rows[kind.first], None
            trace = self.exact(max(1, own))
            held = forecast(trace, recipe, accumulate=accumulate, rank=kind.first)
            if machine is not None:
                conditions = replace(self.conditions, share=share if weights else None)
                step = simulate(trace.work(own * self.tokens), recipe, machine, conditions)
            plans.append(KindPlan(kind, own, share, held, step))
        return MixedSplit(tuple(plans), rows, weights, lacks)

    def _machines(self, shares: list[float] | None) -> list[Machine | None]:
        """Return each kind's machine with the links of the kind that a collective waits for."""
        known = [kind.machine for kind in self.kinds if kind.machine is not None]
        if len(known) < len(self.kinds):
            return [None] * len(self.kinds)
        world, burdens = self.recipe.world_size, [1.0] * len(known)
        if shares is not None:  # a rank sends its piece to all others, and receives theirs
            even = (world - 1) / world
            burdens = [max((world - 1) * share, 1 - share) / even for share in shares]
        linked = [
            _with_links(machine, machine, burden)
            for machine, burden in zip(known, burdens, strict=True)
        ]
        nbytes = self.exact(self.rows).numel * self.conditions.weight_itemsize
        group = LinkGroup(world, self.recipe.local_world_size)
        slowest = max(linked, key=lambda machine: gather_cost(nbytes, group, machine).seconds)
        return [_with_links(machine, slowest) for machine in known]


def _with_links(machine: Machine, other: Machine, burden: float = 1.0) -> Machine:
    """Return a machine with the links of another; `burden`: how much slower than they are."""
    efficiency = replace(machine.efficiency, link=other.efficiency.link / burden)
    return replace(machine, inside=other.inside, outside=other.outside, efficiency=efficiency)
