"""Count bytes by kind and tier while a step is played, and keep the moment of the peak."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

Holding = dict[tuple[str, str], int]
"""Bytes by (kind, tier); kinds are those of `onefold.layout.ledger.Kind`, and `logits`."""

ACTIVATION, LOGITS = "activation", "logits"


@dataclass(frozen=True, slots=True)
class Moment:
    """The bytes of one moment of a step."""

    phase: str  # forward, loss, backward or step
    unit: str
    held: Holding

    def memory_nbytes(self, device_type: str) -> int:
        """Return the bytes in the memory that computes: the CPU's holds its own tier too."""
        tiers = ("device", "cpu") if device_type == "cpu" else ("device",)
        return sum(nbytes for (_, tier), nbytes in self.held.items() if tier in tiers)


class ByteCounter:
    """The bytes of now; the most of each kind, of each tier, and of all at a time."""

    def __init__(self, device_type: str, *, has_timeline: bool = False) -> None:
        self.timeline: list[Moment] = []
        self.peak = Moment("", "", {})
        self.peaks: dict[str, int] = {}
        self.most: Holding = {}
        self._phase, self._unit = "forward", ""
        self._torch: tuple[int, int] = (0, 0)  # activations, and how much of them is logits
        self._has_timeline = has_timeline
        self._shares_memory = device_type == "cpu"
        self._highest = -1
        self._totals: Counter[str] = Counter()  # by tier
        self._now: Counter[tuple[str, str]] = Counter()

    @property
    def on_device(self) -> int:
        """Bytes on the device, without activations."""
        return self._totals["device"]

    @property
    def now(self) -> Holding:
        """Bytes by kind and tier, without activations."""
        return {place: nbytes for place, nbytes in self._now.items() if nbytes}

    def add(self, kind: str, nbytes: int, tier: str = "device") -> None:
        """Hold `nbytes` more (negative: less) of a kind."""
        place = (kind, tier)
        now = self._now[place] = self._now[place] + nbytes
        self._totals[tier] += nbytes
        if now > self.most.get(place, 0):
            self.most[place] = now

    def enter(self, phase: str | None = None, unit: str | None = None) -> None:
        """Moments belong to this phase and unit from now on; None: as before."""
        self._phase = self._phase if phase is None else phase
        self._unit = self._unit if unit is None else unit

    def note_torch(self, activations: int, logits: int) -> None:
        """Torch holds so many bytes now; `logits` of them are the model's outputs."""
        self._torch = activations, logits

    def see(self) -> None:
        """Note this moment."""
        activations, logits = self._torch
        for kind, nbytes in ((ACTIVATION, activations - logits), (LOGITS, logits)):
            if nbytes > self.most.get((kind, "device"), 0):
                self.most[kind, "device"] = nbytes
        for tier, nbytes in self._totals.items():
            total = nbytes + (activations if tier == "device" else 0)
            self.peaks[tier] = max(total, self.peaks.get(tier, 0))
        shared = self._totals["cpu"] if self._shares_memory else 0
        highest = self._totals["device"] + activations + shared
        if not self._has_timeline and highest <= self._highest:
            return
        held = self.now
        held |= {(ACTIVATION, "device"): activations - logits} if activations > logits else {}
        held |= {(LOGITS, "device"): logits} if logits else {}
        moment = Moment(self._phase, self._unit, held)
        if self._has_timeline:
            self.timeline.append(moment)
        if highest > self._highest:
            self._highest, self.peak = highest, moment
