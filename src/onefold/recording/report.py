"""`onefold.report`: what a sharded module holds and sends, as a value that prints as a table."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from onefold.ledger import Ledger, Traffic, Usage

if TYPE_CHECKING:  # a page of a report is drawn without torch
    from onefold.unit.unit import Unit

TOLERANCE = 0.05
"""Share by which a peak may differ from what was predicted before a report says so."""

AT_MOST = ("staging", "partial_grad", "wire")
"""Kinds of which a plan tells the most there can be: links and threads that are fast need less."""


@dataclass(frozen=True, slots=True)
class UnitLine:
    """One unit of the plan: how many parameters travel together and how large they are."""

    name: str
    num_parameters: int
    numel: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class Report:
    """Bytes and traffic of one sharded module on this rank.

    It holds shard `shard` of `num_shards`: one a rank, or, where nodes are replicas, one a rank of
    a node; at stage 0 everything is one shard.
    `memory[kind][tier]` is bytes now and at the peak; kinds are those of `onefold.ledger.Kind`.
    `traffic[collective]` and `last_step[collective]` count calls and bytes sent from this rank:
    `skipped` of the `steps` were not taken, as coded gradients were not finite.
    `offload` says what was planned for the tiers, and why; empty where all is on the device.
    `predicted[kind]` is the peak that a plan of the module tells, over CPU and device memory
    ("all": of all kinds at a time), once steps are taken.
    `gather` and `reduce_scatter` are the table of docs/memory.md, `control` is the flags and
    0-dim parameters that ride along, `whole_matrix` is what matrix optimizers exchange.
    """

    stage: int
    rank: int
    world_size: int
    shard: int
    num_shards: int
    steps: int
    skipped: int
    offload: str
    memory: dict[str, dict[str, Usage]]
    total: Usage
    predicted: dict[str, int]
    traffic: dict[str, Traffic]
    last_step: dict[str, Traffic]
    units: tuple[UnitLine, ...]

    def nbytes(self, kind: str) -> int:
        """Bytes of one kind held now, over all tiers."""
        return sum(usage.now for usage in self.memory.get(kind, {}).values())

    def differing(self) -> dict[str, tuple[int, int]]:
        """Kinds whose peak is more than 5 % off: predicted and measured bytes.

        Kinds of which there is little do not count: 1 % of all.
        """
        measured = {
            kind: sum(usage.peak for tier, usage in tiers.items() if tier != "disk")
            for kind, tiers in self.memory.items()
        } | {"all": self.total.peak - self._disk_peak}
        unused = {
            kind: max(0, self.predicted.get(kind, 0) - measured.get(kind, 0)) for kind in AT_MOST
        }
        unused["all"] = sum(unused.values())
        little = self.predicted.get("all", 0) / 100
        return {
            kind: (self.predicted.get(kind, 0), held)
            for kind, held in measured.items()
            if abs(held - self.predicted.get(kind, 0))
            > max(little, TOLERANCE * held) + unused.get(kind, 0)
        }

    @property
    def _disk_peak(self) -> int:
        """Bytes in files: they rest, so what is there now was there at the peak."""
        return sum(tiers["disk"].now for tiers in self.memory.values() if "disk" in tiers)

    @property
    def verdict(self) -> str:
        """Predicted beside measured, in a sentence."""
        off = self.differing()
        if not off:
            return f"predicted {self.predicted['all']:,d} at the peak: within 5 %, each kind too"
        kinds = ", ".join(f"{k} {wanted:,d} but {got:,d}" for k, (wanted, got) in off.items())
        return f"predicted peaks are more than 5 % off: {kinds}"

    def as_dict(self) -> dict[str, Any]:
        """Plain dicts and numbers, for JSON."""
        return asdict(self)

    def __str__(self) -> str:
        lines = [f"stage {self.stage}, rank {self.rank} of {self.world_size}, {self.steps} steps"]
        lines += [f"{self.skipped} steps skipped: gradients not finite"] * bool(self.skipped)
        lines += [f"planned: {self.offload}"] * bool(self.offload)
        lines += ["kind           tier          now bytes         peak bytes"]
        for kind, tiers in self.memory.items():
            lines += [
                f"{kind:14s} {tier:8s} {usage.now:14,d} {usage.peak:18,d}"
                for tier, usage in tiers.items()
            ]
        lines += [f"{'all':14s} {'':8s} {self.total.now:14,d} {self.total.peak:18,d}"]
        lines += [self.verdict] if self.steps else []
        lines += ["collective          calls     bytes sent   last step"]
        for name, traffic in self.traffic.items():
            last = self.last_step.get(name, Traffic()).sent_nbytes
            lines += [f"{name:16s} {traffic.calls:8d} {traffic.sent_nbytes:14,d} {last:11,d}"]
        return "\n".join(lines)


def unit_lines(units: Iterable[Unit]) -> tuple[UnitLine, ...]:
    """How a module was cut into units, in the order of their use."""
    return tuple(
        UnitLine(
            unit.name,
            len(unit.parameters),
            numel := sum(parameter.slot.numel for parameter in unit.parameters),
            numel * unit.dtype.itemsize,
        )
        for unit in units
    )


def snapshot(ledger: Ledger) -> dict[str, dict[str, Usage]]:
    """A copy of the ledger's usage by kind, then tier."""
    memory: dict[str, dict[str, Usage]] = {}
    for (kind, tier), usage in ledger.usage.items():
        memory.setdefault(str(kind), {})[tier] = Usage(usage.now, usage.peak)
    return memory


def copied(traffic: dict[str, Traffic]) -> dict[str, Traffic]:
    """Traffic that later collectives do not change."""
    return {name: Traffic(now.calls, now.sent_nbytes) for name, now in traffic.items()}
