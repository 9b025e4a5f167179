"""Bytes by kind and tier while a step is played back, and the moments in which most are held."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

Holding = dict[tuple[str, str], int]
"""Bytes by (kind, tier); kinds are those of `onefold.ledger.Kind`, and `logits`."""

ACTIVATION, LOGITS = "activation", "logits"


@dataclass(frozen=True, slots=True)
class Moment:
    """What is held in one moment of a step."""

    phase: str  # forward, loss, backward or step
    unit: str
    held: Holding

    def nbytes(self, tier: str) -> int:
        """Bytes in one tier."""
        return sum(n for (_, place), n in self.held.items() if place == tier)

    def memory_nbytes(self, device_type: str) -> int:
        """Bytes in the memory that computes: the CPU's holds its own tier too."""
        return self.nbytes("device") + (self.nbytes("cpu") if device_type == "cpu" else 0)


class ByteCounter:
    """What is held now; the most of each kind, of each tier, and of all at a time."""

    def __init__(self, device_type: str) -> None:
        self.keeps_all = False
        self.timeline: list[Moment] = []
        self.peak: Moment | None = None
        self.peaks: dict[str, int] = {}
        self.most: Holding = {}
        self.phase = "forward"
        self.unit = ""
        self.torch: tuple[int, int] = (0, 0)  # what torch holds, and how much of it is logits
        self._shares_memory = device_type == "cpu"
        self._highest = -1
        self._totals: Counter[str] = Counter()  # by tier
        self._now: Counter[tuple[str, str]] = Counter()

    @property
    def on_device(self) -> int:
        """Bytes on the device, without torch's own."""
        return self._totals["device"]

    @property
    def now(self) -> Holding:
        """Bytes by kind and tier, without torch's own."""
        return {place: nbytes for place, nbytes in self._now.items() if nbytes}

    def add(self, kind: str, nbytes: int, tier: str = "device") -> None:
        """Hold `nbytes` more (negative: less) of a kind."""
        place = (kind, tier)
        now = self._now[place] = self._now[place] + nbytes
        self._totals[tier] += nbytes
        if now > self.most.get(place, 0):
            self.most[place] = now

    def see(self) -> None:
        """Note this moment."""
        torch_nbytes, logits = self.torch
        for kind, nbytes in ((ACTIVATION, torch_nbytes - logits), (LOGITS, logits)):
            if nbytes > self.most.get((kind, "device"), 0):
                self.most[kind, "device"] = nbytes
        for tier, nbytes in self._totals.items():
            total = nbytes + (torch_nbytes if tier == "device" else 0)
            self.peaks[tier] = max(total, self.peaks.get(tier, 0))
        shared = self._totals["cpu"] if self._shares_memory else 0
        highest = self._totals["device"] + torch_nbytes + shared
        if not self.keeps_all and highest <= self._highest:
            return
        held = self.now
        held |= {(ACTIVATION, "device"): torch_nbytes - logits} if torch_nbytes > logits else {}
        held |= {(LOGITS, "device"): logits} if logits else {}
        moment = Moment(self.phase, self.unit, held)
        if self.keeps_all:
            self.timeline.append(moment)
        if highest > self._highest:
            self._highest, self.peak = highest, moment


class KeptBuffers:
    """Buffers of messages over one link: on the CPU kept until the next message took what it can
    use, see `onefold.wire.exchange.Buffers`.
    """

    def __init__(self, held: ByteCounter, device_type: str) -> None:
        self._held = held
        self._keeps = device_type == "cpu"
        self._spare: Counter[int] = Counter()  # by length, of the message that was read last

    def take(self, buffers: tuple[int, ...]) -> None:
        """A message begins."""
        if not buffers:
            return
        wanted = Counter(buffers)
        self._held.add("wire", _sum(wanted - self._spare))
        self._spare -= wanted

    def give(self, buffers: tuple[int, ...]) -> None:
        """And has been read."""
        if not buffers:
            return
        self._held.add("wire", -_sum(self._spare))
        self._spare = Counter(buffers)
        if not self._keeps:
            self.clear()

    def clear(self) -> None:
        """Free what is kept."""
        self._held.add("wire", -_sum(self._spare))
        self._spare = Counter()


def _sum(buffers: Counter[int]) -> int:
    """Bytes of all buffers, counted by length."""
    return sum(nbytes * count for nbytes, count in buffers.items())
