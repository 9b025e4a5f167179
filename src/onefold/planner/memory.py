"""The bytes that a rank will hold and send: the engine's own schedule, on byte counters.

`forecast` plays one optimizer step in its steady state, from `zero_grad` to `zero_grad`. Resting
state is a closed form (layout/flat.py). Unsharded weights, gradients and message buffers come and
go as the schedule decides (engine/schedule.py), activations as the trace recorded them. The peak is
the largest sum of all three.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import prod

from torch import nn

from onefold.config import Offload, Placement, Precision, stage_of
from onefold.engine.policy import UnitFacts, policy_of
from onefold.engine.run_facts import RunHistory
from onefold.engine.schedule import Schedule
from onefold.engine.walks import Noted
from onefold.layout.units import UnitPlan
from onefold.planner.byte_executor import ByteCounter, ByteExecutor, Holding, Moment
from onefold.planner.message_counts import PlannedUnit, planned_unit
from onefold.planner.replay import Replay, plain_events
from onefold.planner.trace import Trace
from onefold.planner.work import Event, UnitWork, Work
from onefold.recipe import Member, Recipe, UnitRecipe
from onefold.text import format_bytes

LINKS = ("inside", "between")

WAYS: tuple[tuple[int, str], ...] = (
    (0, "none"), (1, "none"), (2, "none"), (3, "none"),
    (1, "optimizer"), (2, "optimizer"), (3, "optimizer"), (3, "cpu"), (3, "disk"),
)  # fmt: skip
"""Stages and offloads, from the fastest to the one that needs least memory."""

OFFLOADS = {
    "none": Offload(),
    "optimizer": Offload(optimizer="cpu"),
    "cpu": Offload(optimizer="cpu", parameters="cpu"),
    "disk": Offload(optimizer="disk", parameters="disk", disk="."),
}
"""The tiers by the words of `--offload`. A plan needs no folder."""


@dataclass(frozen=True, slots=True)
class Forecast:
    """The bytes that one rank will hold and send. Tiers are `device`, `cpu` and `disk`.

    peak: the moment at which the device holds most (with CPU memory, where the CPU computes).
    peaks: the most bytes by tier.
    most: the most bytes by kind and tier.
    timeline: every moment, if requested.
    sent: bytes of a step by collective, with the names of a report: "gather", "reduce_scatter", and
        on two axes each "inside" and "between"; of many ranks with "padding" as well.
    """

    recipe: Recipe
    peak: Moment
    peaks: dict[str, int]
    most: Holding
    resting: Holding
    timeline: tuple[Moment, ...]
    sent: dict[str, int]

    @property
    def sent_nbytes(self) -> int:
        """Bytes that this rank sends in a step."""
        return sum(self.sent.values())

    @property
    def sent_by_link(self) -> dict[tuple[str, str], float]:
        """Bytes of a step, "inside" the node or "between" nodes, of "weights" or "gradients".

        Two axes count each link by itself; replicas gather means of gradients between nodes. Else
        every rank sends its pieces straight to all others, in whatever node; an all-gather of GPUs
        goes round in a ring instead.
        """
        recipe, sent = self.recipe, self.sent
        ranks, near = recipe.world_size, min(recipe.local_world_size, recipe.world_size)
        far = (ranks - near) / max(1, ranks - 1)
        by_link = {(link, what): 0.0 for link in LINKS for what in ("weights", "gradients")}
        for name, nbytes in sent.items():
            is_gather = name.startswith("gather")
            means = not recipe.is_sharded or (recipe.are_replicas and name.endswith("between"))
            what = "weights" if is_gather and not means else "gradients"
            is_ring = is_gather and recipe.device_type != "cpu"
            by_name = {"between": 1.0, "inside": 0.0}.get(name.rpartition(" ")[2])
            share = far / (near if is_ring else 1) if by_name is None else by_name
            by_link["between", what] += share * nbytes
            by_link["inside", what] += (1 - share) * nbytes
        return by_link

    @property
    def between_nbytes(self) -> float:
        """Bytes of a step that leave the node."""
        return sum(n for (link, _), n in self.sent_by_link.items() if link == "between")

    @property
    def memory_nbytes(self) -> int:
        """The most that the memory which computes holds at a time."""
        return self.peak.memory_nbytes(self.recipe.device_type)

    def by_place(self, ranks: int) -> dict[str, int]:
        """Return bytes by place: of one device, and of one host and its disk for `ranks` ranks.

        Where the CPU computes, device and host are one memory, of which each rank has its share.
        """
        cpu, disk = self.peaks.get("cpu", 0), self.peaks.get("disk", 0)
        if self.recipe.device_type == "cpu":
            return {"device": self.memory_nbytes, "host": 0, "disk": disk * ranks}
        return {"device": self.peaks["device"], "host": cpu * ranks, "disk": disk * ranks}


def forecast(
    trace: Trace, recipe: Recipe, *, accumulate: int = 1, has_timeline: bool = False,
    window: frozenset[int] | None = None, rank: int | None = None,
    shown: tuple[int, bool] = (0, False),
) -> Forecast:  # fmt: skip
    """Play one step of `accumulate` micro-batches, each as in `trace`.

    `window`: the units that a pipeline's schedule keeps. `rank`: whose share of the states is
    played; None: the largest. `shown`: bytes of `onefold.unsharded` after the step, and if
    gradients are kept until then.
    """
    units = [planned_unit(unit, recipe, rank) for unit in trace.units]
    facts = facts_of(units, recipe)
    counter = ByteCounter(recipe.device_type, has_timeline=has_timeline)
    schedule = Schedule(policy_of(recipe), facts)
    is_far = recipe.offloaded_units([unit.numel for unit in units])
    executor = ByteExecutor(recipe, units, is_far, counter)
    executor.rest(schedule.policy, trace.batch_nbytes, trace.buffers_nbytes)
    resting = counter.now
    trained = [sum(map(bool, unit.partials)) for unit in units]
    replay = Replay(trace.events, schedule, trained, window)
    replay.learn(accumulate)
    for micro in range(accumulate):
        counter.enter("forward", "")
        replay.micro_batch(executor, is_last=micro + 1 == accumulate)
    executor.step()
    if shown[0]:
        executor.show(*shown)
    return Forecast(
        recipe, counter.peak, counter.peaks, counter.most, resting, tuple(counter.timeline),
        {name: nbytes for name, nbytes in executor.sent.items() if nbytes},
    )  # fmt: skip


def facts_of(units: Sequence[PlannedUnit], recipe: Recipe) -> list[UnitFacts]:
    """Return the facts on which the schedule of these units depends."""
    is_far = recipe.offloaded_units([unit.numel for unit in units])
    return [
        UnitFacts(
            nbytes=unit.unsharded + unit.decoded, is_resident=unit.unsharded == 0,
            is_offloaded=far or not recipe.rests_near,
        )
        for unit, far in zip(units, is_far, strict=True)
    ]  # fmt: skip


# bytes without a forward: of a sharded module's states, and of a model that cannot be traced


def estimated(plans: Sequence[UnitPlan], tokens: int, precision: Precision) -> Trace:
    """Estimate the activations and the work of `tokens` tokens of one micro-batch."""
    units: list[UnitWork] = []
    kept: list[int] = []
    for plan in plans:
        members = tuple(owned.member(precision.compute) for owned in plan.members)
        nbytes = flops = 0
        for member, owned in zip(members, plan.members, strict=True):
            is_table = any(isinstance(owner, nn.Embedding) for owner, _ in owned.owners)
            if len(member.shape) == 2:
                width = member.shape[1] if is_table else sum(member.shape)
                nbytes += member.compute_itemsize * width
                flops += 0 if is_table else 2 * prod(member.shape)
        work = float(tokens * flops)
        units.append(_work_of(plan.name, members, Work(work), Work(2 * work)))
        kept.append(tokens * nbytes)
    joined = [index > 0 and plan.joins(plans[index - 1]) for index, plan in enumerate(plans)]
    return _trace(units, kept, 8 * tokens, joined)


def bare(units: Sequence[UnitRecipe], events: Sequence[Event] = ()) -> Trace:
    """Trace a micro-batch without activations: only the engine's own bytes, which are exact.

    `events`: those of a run; by default each unit is used once, in order.
    """
    works = [
        replace(_work_of(unit.name, unit.members, Work(), Work()), data_ranks=unit.ranks)
        for unit in units
    ]
    # a unit with a mesh of its own is a part of the block before, which stays unsharded around it
    joined = [unit.is_joined or (i > 0 and unit.ranks > 0) for i, unit in enumerate(units)]
    plain = _trace(works, [0] * len(works), 0, joined)
    return replace(plain, events=tuple(events)) if events else plain


def _work_of(name: str, members: tuple[Member, ...], forward: Work, backward: Work) -> UnitWork:
    return UnitWork(name, sum(member.numel for member in members), forward, backward, members)


def _trace(units: list[UnitWork], kept: list[int], batch_nbytes: int, joined: list[bool]) -> Trace:
    trained = [[i for i, member in enumerate(u.members) if member.requires_grad] for u in units]
    return Trace(tuple(units), tuple(plain_events(kept, trained, joined)), batch_nbytes, 0)


# the bytes that an engine should hold


def needs_of(recipe: Recipe, *, micro_batches: int = 1, rank: int | None = None) -> dict[str, int]:
    """Return the most bytes of each memory on a rank; None: the one with the largest share.

    Activations are left out. Where the CPU computes, "cpu" counts the bytes of "device", too.
    """
    step = forecast(bare(recipe.units), recipe, accumulate=micro_batches, rank=rank)
    if recipe.device_type == "cpu":
        return {"cpu": step.memory_nbytes, "disk": step.peaks.get("disk", 0)}
    return {tier: step.peaks.get(tier, 0) for tier in ("device", "cpu", "disk")}


def peaks_of(recipe: Recipe, rank: int | None, history: RunHistory) -> dict[str, int]:
    """Return the most bytes of each kind in CPU and device memory, and of all ("all")."""
    known = (event for event in history.events if event.unit < len(recipe.units))
    trace = bare(recipe.units, [_event(event) for event in known])
    is_cut = recipe.stage.gradient is Placement.SHARD and not recipe.has_hops
    rests = recipe.world_size == 1 or is_cut  # a later backward finds the mean of the first
    accumulates = history.accumulates or (history.repeats and rests)
    step = forecast(
        trace,
        recipe,
        accumulate=1 + accumulates,
        rank=rank,
        shown=(history.most_shown, history.shows_grads),
    )
    kinds = _without_disk(step.most)
    kinds["all"] = step.peaks["device"] + step.peaks.get("cpu", 0)
    resting = _without_disk(step.resting)
    stays = resting.get("unsharded", 0)
    kinds["unsharded"] = max(kinds.get("unsharded", 0), history.most_kept)
    kinds["all"] = max(kinds["all"], sum(resting.values()) - stays + history.most_kept)
    return kinds


def smallest_change(recipe: Recipe, shortage: int) -> str:
    """Describe the nearest way to train that holds `shortage` bytes less, and of which kinds."""
    trace = bare(recipe.units)
    now = _at_peak(trace, recipe)
    for number, name in WAYS:
        other = replace(recipe, stage=stage_of(number), offload=OFFLOADS[name])
        if number < recipe.stage.number or other == recipe:
            continue
        then = _at_peak(trace, other)
        saved = now.total() - then.total()
        if saved >= shortage:
            word = "disk:PATH" if name == "disk" else name
            tiers = f', offload="{word}"' if name != "none" else ""
            kinds = [f"{kind} {format_bytes(n)}" for kind, n in (now - then).most_common()]
            kinds += [f"{kind} {format_bytes(n)} more" for kind, n in (then - now).most_common()]
            return f"stage={number}{tiers} holds {format_bytes(saved)} less: {', '.join(kinds)}"
    return "smaller micro-batches, recompute or more ranks: states alone cannot give as much"


def _at_peak(trace: Trace, recipe: Recipe) -> Counter[str]:
    """Return bytes of the memory that computes by kind, each with its unsharded copies."""
    kinds = Counter[str]()
    for kind, nbytes in forecast(trace, recipe).peak.by_kind(recipe.device_type).items():
        kinds[{"unsharded": "weight", "partial_grad": "grad"}.get(kind, kind)] += nbytes
    return kinds


def _without_disk(held: Holding) -> dict[str, int]:
    """Return bytes by kind in CPU and device memory."""
    kinds: dict[str, int] = {}
    for (kind, tier), nbytes in held.items():
        if tier != "disk":
            kinds[kind] = kinds.get(kind, 0) + nbytes
    return kinds


def _event(noted: Noted) -> Event:
    """Return an event of a run, as a trace without activations has it."""
    kind, unit, call, module, num_modules = noted
    return Event(kind, unit, call, module=module, num_modules=num_modules)
