"""What offloading has to reach, from what was measured: arithmetic and parsing only, no torch."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from contest.summary import PEAK, STEADY, WALL, Round, Spread, ratio

MOVED_NBYTES = 12
"""Bytes an element that an fp32 AdamW step reads: weight and two moments. It writes as many."""

PAIRS = {2: ("cpu",), 3: ("cpu", "disk")}
"""Stages, and the tiers in which both libraries have them."""


@dataclass(frozen=True, slots=True)
class Bound:
    """A ratio, taken round by round, and between what its median has to lie."""

    what: str
    spread: Spread
    at_least: float | None = None
    at_most: float | None = None

    @property
    def wanted(self) -> str:
        """The bound in words."""
        if self.at_least is None:
            return f"<= {self.at_most:g}"
        if self.at_most is None:
            return f">= {self.at_least:g}"
        return f"{self.at_least:g} to {self.at_most:g}"

    @property
    def holds(self) -> bool:
        """True if the median lies there."""
        median = self.spread.median
        is_low = self.at_least is not None and median < self.at_least
        is_high = self.at_most is not None and median > self.at_most
        return not (is_low or is_high)

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        spread = self.spread
        return {
            "what": self.what, "median": spread.median, "low": spread.low, "high": spread.high,
            "wanted": self.wanted, "holds": self.holds,
        }  # fmt: skip


@dataclass(frozen=True, slots=True)
class Transfer:
    """Bytes moved, both ways together, and how long it took."""

    nbytes: int
    seconds: float

    @property
    def rate(self) -> float:
        """Bytes a second."""
        return self.nbytes / self.seconds


def fio_transfer(told: str) -> Transfer:
    """What `fio --group_reporting --output-format=json` has moved."""
    (job,) = json.loads(told[told.index("{") :])["jobs"]  # warnings may come first
    ways = [job["read"], job["write"]]
    milliseconds = max(way["runtime"] for way in ways)
    return Transfer(sum(way["io_bytes"] for way in ways), milliseconds / 1000)


def disk_counts(told: str) -> tuple[int, int]:
    """Bytes that a process had the disk read and write, from the text of its /proc/self/io."""
    counts = dict(line.split(": ") for line in told.splitlines())
    return int(counts["read_bytes"]), int(counts["write_bytes"])


def disk_bounds(case: dict[str, Any]) -> list[Bound]:
    """A step from disk: its rate beside the disk's own, its bytes beside the formula's."""
    rounds = case["rounds"]
    formula = MOVED_NBYTES * case["numel"] * case["steps"]
    rates = [2 * formula / each["seconds"] / (each["disk_rate"]) for each in rounds]
    found = [Bound(f"{case['name']}: GB/s / {case['disk']}", Spread.of(rates), at_least=0.85)]
    for way in ("read", "written"):
        counted = [each[f"{way}_nbytes"] / formula for each in rounds]
        what = f"{case['name']}: bytes {way} / formula"
        found.append(Bound(what, Spread.of(counted), at_least=0.98, at_most=1.02))
    return found


def step_bounds(case: dict[str, Any], base: str, ours: dict[str, str]) -> list[Bound]:
    """Steps in CPU memory: all move the same bytes, so ratios of rates are those of seconds.

    `ours` names our contestants and, where it has one, the peer's that takes the same gradients.
    """
    found = []
    seconds: dict[str, list[float]] = case["seconds"]
    for name, peer in ours.items():
        for other, at_least in ((base, 0.8), (peer, 1.8)):
            if name in seconds and other in seconds:
                ratios = _over(seconds[other], seconds[name])
                what = f"{case['name']}: {name} / {other}"
                found.append(Bound(what, Spread.of(ratios), at_least=at_least))
    return found


def hiding_bounds(rounds: list[dict[str, float]]) -> list[Bound]:
    """Seconds of a step that its optimizer adds, in the background over settled at once."""
    settled = [each["settled, clipped"] - each["device, clipped"] for each in rounds]
    hidden = [each["overlapped, clipped"] - each["device, clipped"] for each in rounds]
    early = [each["in backward"] - each["device"] for each in rounds]
    return [
        Bound("exposed: overlapped / settled", Spread.of(_over(hidden, settled)), at_most=0.4),
        Bound("exposed: in backward / settled", Spread.of(_over(early, settled)), at_most=0.4),
    ]


def peer_bounds(rounds: list[Round]) -> list[Bound]:
    """Beside DeepSpeed in the same stage and tier."""
    found = []
    for stage, tiers in PAIRS.items():
        for tier in tiers:
            ours, peer = f"onefold {stage} {tier}", f"deepspeed {stage} {tier}"
            for what, measure, at_most in (
                ("step, wall", WALL, 0.6), ("step, CPU-seconds", STEADY, 0.6), ("peak", PEAK, 0.5),
            ):  # fmt: skip
                spread = ratio(rounds, ours, peer, measure)
                if spread is not None:
                    found.append(Bound(f"{ours} / {peer}: {what}", spread, at_most=at_most))
    return found


def error_line(message: str) -> str:
    """The last line of a traceback: what went wrong."""
    lines = [line.strip() for line in message.strip().splitlines() if line.strip()]
    told = (line for line in reversed(lines) if ": " in line or "Error" in line)
    return next(told, lines[-1] if lines else "")[:300]


def big_row(told: dict[str, Any]) -> dict[str, Any]:
    """What is kept of the JSON that `onefold train` prints."""
    peaks = [rank["resident_peak"] for rank in told["memory"]]
    return {
        "clip": told["job"]["clip"], "losses": told["losses"], "seconds": told["seconds"],
        "numel": told["num_parameters"], "resident_peak": peaks,
        "peak_per_parameter": max(peaks) / told["num_parameters"],
    }  # fmt: skip


def _over(these: Iterable[float], those: Iterable[float]) -> list[float]:
    return [a / b for a, b in zip(these, those, strict=True)]
