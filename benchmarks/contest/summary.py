"""From what the ranks measured to ratios, targets and verdicts: arithmetic only, no torch.

A *round* is one run of every engine, one after the other. Ratios are taken inside a round, so that
what the machine did at the time touches both sides; the median over the rounds is quoted.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from statistics import median
from typing import Any

Round = dict[str, list[dict[str, Any]]]
"""Engine name -> what each rank measured."""

STEADY, WALL, PEAK = "cpu_seconds", "wall_seconds", "peak"
LOSS_TOLERANCE = {"fp32": 1e-4, "bf16": 3e-2}


@dataclass(frozen=True, slots=True)
class Spread:
    """A median over rounds and its extremes."""

    median: float
    low: float
    high: float

    @staticmethod
    def of(values: list[float]) -> Spread:
        return Spread(median(values), min(values), max(values))

    def __str__(self) -> str:
        return f"{self.median:.2f} [{self.low:.2f}-{self.high:.2f}]"


@dataclass(frozen=True, slots=True)
class Target:
    """What a ratio has to reach."""

    ours: str
    peer: str
    measure: str  # "step" or "peak"
    at_most: float
    size: str | None = None  # None: every size
    malloc: str | None = None
    ranks: int | None = None

    def applies(self, case: dict[str, Any]) -> bool:
        """True for a case this target is about."""
        return (
            case["device"] == "cpu"
            and self.size in (None, case["size"])
            and self.malloc in (None, case["malloc"])
            and self.ranks in (None, case["ranks"])
        )


TARGETS = (
    *(Target(f"onefold {stage}", "ddp", "step", 1.00, size="small") for stage in (0, 1, 2)),
    Target("onefold 3", "ddp", "step", 1.10, size="small"),
    Target("onefold 3", "fsdp2 reshard", "step", 0.75),
    Target("onefold 2", "fsdp2 keep", "step", 0.75),
    *(Target(f"onefold {stage}", f"deepspeed {stage}", "step", 0.70) for stage in (1, 2, 3)),
    Target("onefold 3", "fsdp2 reshard", "peak", 0.50, size="small", malloc="default"),
    Target("onefold 3", "deepspeed 3", "peak", 0.40, size="small", malloc="default"),
    Target("onefold 3", "fsdp2 reshard", "peak", 0.88, size="small", malloc="mmap"),
    Target("onefold 3", "deepspeed 3", "peak", 0.45, size="small", malloc="mmap"),
    Target("onefold 0", "plain", "step", 1.02, ranks=1),
)


def measured(ranks: list[dict[str, Any]], what: str) -> float:
    """One number of a run: the slowest rank's time, all ranks' CPU-seconds, the largest peak."""
    if what == WALL:
        return max(rank[WALL] for rank in ranks)
    if what == STEADY:
        return sum(rank[STEADY] for rank in ranks)
    if what == "sent":
        return ranks[0]["sent_nbytes"] / len(ranks) / ranks[0]["numel"]
    return max(rank[f"{what}_nbytes"] for rank in ranks) / ranks[0]["numel"]


def values(rounds: list[Round], engine: str, what: str) -> list[float]:
    """A number of an engine, round by round."""
    return [measured(found[engine], what) for found in rounds if engine in found]


def ratio(rounds: list[Round], ours: str, peer: str, what: str) -> Spread | None:
    """Ours over the peer's, taken round by round."""
    both = [found for found in rounds if ours in found and peer in found]
    if not both:
        return None
    return Spread.of([measured(r[ours], what) / measured(r[peer], what) for r in both])


@dataclass(frozen=True, slots=True)
class Verdict:
    """A target, what was reached, and whether it holds."""

    target: Target
    cpu: Spread | None  # for "step": CPU-seconds, the steadier measure
    wall: Spread | None
    peak: Spread | None
    holds: bool


def verdicts(case: dict[str, Any], rounds: list[Round]) -> list[Verdict]:
    """Every target that this case can judge. A step target holds in CPU-seconds."""
    found = []
    for target in TARGETS:
        if not target.applies(case):
            continue
        pair = (rounds, target.ours, target.peer)
        if target.measure == "peak":
            peak = ratio(*pair, PEAK)
            if peak:
                found.append(Verdict(target, None, None, peak, peak.median <= target.at_most))
            continue
        cpu, wall = ratio(*pair, STEADY), ratio(*pair, WALL)
        if cpu and wall:
            found.append(Verdict(target, cpu, wall, None, cpu.median <= target.at_most))
    return found


def engines_of(rounds: list[Round]) -> list[str]:
    """Every engine that finished a run, the base first."""
    names = sorted({engine for found in rounds for engine in found})
    base = base_of(names)
    return [base, *(name for name in names if name != base)]


def base_of(found: Collection[str]) -> str:
    """The engine to which the others of a round are compared."""
    return next((name for name in ("ddp", "plain") if name in found), min(found))


def talks(engine: str, found: Round) -> bool:
    """False for plain processes side by side: compute alone, each with losses of its own."""
    return engine != "plain" or len(found[engine]) == 1


def curve(ranks: list[dict[str, Any]]) -> list[float]:
    """The loss of each step, averaged over the ranks."""
    return [sum(step) / len(step) for step in zip(*(r["losses"] for r in ranks), strict=True)]


def distance(losses: list[float], reference: list[float]) -> float:
    """The largest relative distance over the steps that both have."""
    return max(abs(a - b) / abs(b) for a, b in zip(losses, reference, strict=False))


def disagreement(rounds: list[Round]) -> dict[str, float]:
    """For each engine the largest relative distance of its losses from those of the base."""
    reference = curve(rounds[0][base_of(rounds[0])])
    return {
        engine: max(
            distance(curve(found[engine]), reference) for found in rounds if engine in found
        )
        for engine in engines_of(rounds)
        if all(talks(engine, found) for found in rounds if engine in found)
    }
