"""The bytes that a rank will hold, moment by moment: the engine's own schedule, on byte counters.

`forecast` plays one optimizer step in its steady state, from `zero_grad` to `zero_grad`. Resting
state is a closed form (layout/flat.py). Unsharded weights, gradients and message buffers come and
go as the schedule says (engine/schedule.py), activations as the trace says. The peak is the largest
sum of all three at any moment.
"""

from __future__ import annotations

from dataclasses import dataclass

from onefold.engine.policy import policy_of
from onefold.engine.schedule import Schedule
from onefold.planner.byte_counter import ByteCounter, Holding, Moment
from onefold.planner.byte_hands import ByteHands, facts_of
from onefold.planner.replay import Replay
from onefold.planner.trace import Trace
from onefold.planner.traffic import planned_unit
from onefold.recipe import Recipe

LINKS = ("inside", "between")


@dataclass(frozen=True, slots=True)
class Forecast:
    """What rank 0 will hold and send. Tiers are `device`, `cpu` and `disk`.

    `peak` is the moment at which the device (where it is the CPU: device and CPU memory, which are
    one) holds most; `peaks` the most by tier, `most` the most by kind and tier. `timeline` has
    every moment, if it was asked for. `sent`: bytes of a step by collective, named as a report
    names them: "gather", "reduce_scatter", and on two axes each "inside" and "between".
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
        """Bytes of a step ("inside" the node or "between" nodes, of "weights" or "gradients").

        On two axes these are counted by themselves; what replicas gather are means of gradients.
        On one axis every rank sends its pieces straight to all others, in whatever node; an
        all-gather of GPUs goes round in a ring instead.
        """
        recipe, sent = self.recipe, self.sent
        ranks, near = recipe.world_size, min(recipe.local_world_size, recipe.world_size)
        far = (ranks - near) / max(1, ranks - 1) if not recipe.collective_suffix else 0.0
        found = {(link, what): 0.0 for link in LINKS for what in ("weights", "gradients")}
        for name, nbytes in sent.items():
            is_gather = name.startswith("gather")
            means = not recipe.is_sharded or (recipe.are_replicas and name.endswith("between"))
            what = "weights" if is_gather and not means else "gradients"
            is_ring = is_gather and recipe.device_type != "cpu"
            share = float(name.endswith("between")) or far / (near if is_ring else 1)
            found["between", what] += share * nbytes
            found["inside", what] += (1 - share) * nbytes
        return found

    @property
    def between_nbytes(self) -> float:
        """Bytes of a step that leave the node."""
        return sum(n for (link, _), n in self.sent_by_link.items() if link == "between")

    @property
    def memory_nbytes(self) -> int:
        """The most that the memory which computes holds at a time."""
        return self.peak.memory_nbytes(self.recipe.device_type)

    def most_of(self, kind: str) -> int:
        """The most of one kind, over all tiers."""
        return sum(nbytes for (each, _), nbytes in self.most.items() if each == kind)


def forecast(
    trace: Trace, recipe: Recipe, *, accumulate: int = 1, has_timeline: bool = False
) -> Forecast:
    """Play one step of `trace`, of `accumulate` micro-batches."""
    units = [planned_unit(unit, recipe) for unit in trace.units]
    chosen = recipe.offloaded_units([unit.numel for unit in units])
    held = ByteCounter(recipe.device_type)
    held.keeps_all = has_timeline
    facts = [
        facts_of(unit, recipe, is_far=is_far) for unit, is_far in zip(units, chosen, strict=True)
    ]
    schedule = Schedule(policy_of(recipe), facts)
    hands = ByteHands(recipe, units, list(chosen), held)
    hands.rest(schedule.policy, trace.batch_nbytes, trace.buffers_nbytes)
    resting = held.now
    replay = Replay(trace, schedule, [sum(map(bool, unit.partials)) for unit in units])
    replay.learn(accumulate)
    for micro in range(accumulate):
        held.phase, held.unit = "forward", ""
        for event, actions in replay.micro_batch(is_last=micro + 1 == accumulate):
            hands.follow(event, actions, schedule)
    hands.step()
    assert held.peak is not None, "a step without a moment"
    return Forecast(
        recipe, held.peak, held.peaks, held.most, resting, tuple(held.timeline),
        {name: nbytes for name, nbytes in hands.sent.items() if nbytes},
    )  # fmt: skip
