"""`onefold.report`: what a sharded module holds and sends, as a value that prints as a table."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from onefold.ledger import Ledger, Traffic, Usage


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

    `memory[kind][tier]` is bytes now and at the peak; kinds are those of `onefold.ledger.Kind`.
    `traffic[collective]` and `last_step[collective]` count calls and bytes sent from this rank:
    `offload` says what was planned for the tiers, and why; empty where all is on the device.
    `gather` and `reduce_scatter` are the table of docs/memory.md, `control` is the flags and
    0-dim parameters that ride along, `whole_matrix` is what matrix optimizers exchange.
    """

    stage: int
    rank: int
    world_size: int
    steps: int
    offload: str
    memory: dict[str, dict[str, Usage]]
    total: Usage
    traffic: dict[str, Traffic]
    last_step: dict[str, Traffic]
    units: tuple[UnitLine, ...]

    def nbytes(self, kind: str) -> int:
        """Bytes of one kind held now, over all tiers."""
        return sum(usage.now for usage in self.memory.get(kind, {}).values())

    def as_dict(self) -> dict[str, Any]:
        """Plain dicts and numbers, for JSON."""
        return asdict(self)

    def __str__(self) -> str:
        lines = [f"stage {self.stage}, rank {self.rank} of {self.world_size}, {self.steps} steps"]
        lines += [f"planned: {self.offload}"] * bool(self.offload)
        lines += ["kind           tier          now bytes         peak bytes"]
        for kind, tiers in self.memory.items():
            lines += [
                f"{kind:14s} {tier:8s} {usage.now:14,d} {usage.peak:18,d}"
                for tier, usage in tiers.items()
            ]
        lines += [f"{'all':14s} {'':8s} {self.total.now:14,d} {self.total.peak:18,d}"]
        lines += ["collective          calls     bytes sent   last step"]
        for name, traffic in self.traffic.items():
            last = self.last_step.get(name, Traffic()).sent_nbytes
            lines += [f"{name:16s} {traffic.calls:8d} {traffic.sent_nbytes:14,d} {last:11,d}"]
        return "\n".join(lines)


def snapshot(ledger: Ledger) -> dict[str, dict[str, Usage]]:
    """A copy of the ledger's usage by kind, then tier."""
    memory: dict[str, dict[str, Usage]] = {}
    for (kind, tier), usage in ledger.usage.items():
        memory.setdefault(str(kind), {})[tier] = Usage(usage.now, usage.peak)
    return memory


def copied(traffic: dict[str, Traffic]) -> dict[str, Traffic]:
    """Traffic that later collectives do not change."""
    return {name: Traffic(now.calls, now.sent_nbytes) for name, now in traffic.items()}
