"""`onefold.report`: bytes and traffic of a sharded module, as a value that prints as a table."""

from __future__ import annotations

from collections.abc import Iterable
from copy import copy
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from onefold.layout.ledger import Ledger, Traffic, Usage
from onefold.text import columns, common_unit, counted, format_bytes, format_share, in_unit

if TYPE_CHECKING:  # `onefold report` writes a page without torch
    from onefold.unit.unit import Unit

TOLERANCE = 0.05
"""A report names the peaks that differ from the prediction by more than this share."""

UPPER_BOUNDS = {
    "staging": "blocks of the step were free again sooner",
    "partial_grad": "gradients were reduced before the next ones came",
    "wire": "messages ended before the next ones began",
}
"""Kinds that a plan predicts as an upper bound, and why a run needs less."""


@dataclass(frozen=True, slots=True)
class UnitLine:
    """One unit: parameters that travel together, and their size."""

    name: str
    num_parameters: int
    numel: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class Report:
    """Bytes and traffic of one sharded module on this rank.

    Attributes:
        shard: this rank's shard of `num_shards`. Where nodes are replicas, each local rank has one;
            at stage 0 there is one in all.
        loaded_steps: steps of them that were taken before the last `onefold.load`.
        skipped: steps that were not taken, because quantized gradients were not finite.
        offload: the plan for the tiers with its reason; empty if all is on the device.
        notes: messages that the run could save, and how.
        memory: `memory[kind][tier]` is bytes now and at the peak, by `onefold.layout.ledger.Kind`.
        predicted: predicted peak by kind over CPU and device memory, and for "all" together; empty
            before the first step.
        traffic: calls and bytes sent from this rank since `onefold.shard` or `onefold.load`, by
            collective. `gather` and `reduce_scatter`
            are those of docs/concepts/memory.md, `control` is flags and 0-dim parameters,
            `whole_matrix` is the matrices that matrix optimizers exchange, `optimizer_sum` the sums
            that Prodigy and D-Adaptation take over all elements.
        last_step: the same for the last step.
        is_inference: the module evaluates alone (`onefold.stream`).
        row_shares: the part of the rows of a global batch that each rank should take, in rank
            order; they add up to 1. Equal until `onefold.mixed.RowSampler.follow` measures speeds.
        shares: the weight of each rank's share of the state; None where all hold the same.
        waiting_share: the part of the time of the last steps, at most 10, that the training thread
            waited for messages and background steps (on a GPU: that its host did). The first
            report after a step starts to measure; None until the next step has ended.
        tokens_per_s: tokens of this rank a second in these steps; None for modules that take none.
        model_flops_per_s: FLOP/s of matrix products in these steps, forward and backward, without
            those of a recompute; None where they are not known, see docs/guides/report-page.md.
        mfu: their share of the dense peak of the GPU; None on devices whose peak is not known.
    """

    stage: int
    rank: int
    world_size: int
    shard: int
    num_shards: int
    steps: int
    skipped: int
    offload: str
    notes: tuple[str, ...]
    memory: dict[str, dict[str, Usage]]
    total: Usage
    predicted: dict[str, int]
    traffic: dict[str, Traffic]
    last_step: dict[str, Traffic]
    units: tuple[UnitLine, ...]
    is_inference: bool = False
    loaded_steps: int = 0
    row_shares: tuple[float, ...] = ()
    shares: tuple[int, ...] | None = None
    waiting_share: float | None = None
    tokens_per_s: float | None = None
    model_flops_per_s: float | None = None
    mfu: float | None = None

    @property
    def title(self) -> str:
        """The use of the module, in two words."""
        return "streamed for inference" if self.is_inference else f"stage {self.stage}"

    @property
    def memory_peak(self) -> int:
        """Peak bytes of all kinds together, without files: these rest, and were as large then."""
        on_disk = sum(tiers["disk"].now for tiers in self.memory.values() if "disk" in tiers)
        return self.total.peak - on_disk

    def nbytes(self, kind: str) -> int:
        """Bytes of one kind now, over all tiers."""
        return sum(usage.now for usage in self.memory.get(kind, {}).values())

    def differing(self) -> dict[str, tuple[int, int]]:
        """Return predicted and measured bytes of the kinds whose peak is more than 5 % off.

        A difference below 1 % of all predicted bytes does not count. Kinds of `UPPER_BOUNDS` may
        need less than predicted, and so may all kinds together by the bytes of these kinds.
        """
        measured = {kind: self._peak(kind) for kind in self.memory} | {"all": self.memory_peak}
        below = {kind: self.predicted.get(kind, 0) for kind in UPPER_BOUNDS}
        below["all"] = sum(below.values())  # at the peak of all, a kind may be far below its own
        smallest = self.predicted.get("all", 0) / 100
        off: dict[str, tuple[int, int]] = {}
        for kind, got in measured.items():
            wanted = self.predicted.get(kind, 0)
            allowed = max(smallest, TOLERANCE * got)
            if not wanted - allowed - below.get(kind, 0) <= got <= wanted + allowed:
                off[kind] = wanted, got
        return off

    def _peak(self, kind: str) -> int:
        tiers = self.memory.get(kind, {})
        return sum(usage.peak for tier, usage in tiers.items() if tier != "disk")

    @property
    def verdict(self) -> str:
        """Compare predicted with measured peaks in a sentence."""
        off = self.differing()
        if not off:
            wanted, got = self.predicted["all"], self.memory_peak
            peak = format_bytes(wanted)
            tiers = {tier for of_kind in self.memory.values() for tier in of_kind}
            besides = " besides disk" * ("disk" in tiers)
            if wanted <= (1 + TOLERANCE) * got:
                return f"predicted {peak} at the peak{besides}: within 5 %, each kind too"
            surplus = {k: self.predicted.get(k, 0) - self._peak(k) for k in UPPER_BOUNDS}
            kind = max(surplus, key=surplus.__getitem__)
            why = f"{kind} needed less, as {UPPER_BOUNDS[kind]}"
            if surplus[kind] <= 0:
                why = "kinds peaked at different moments, as messages ended early"
            if self.steps == 1 and self.nbytes("optimizer"):
                why = "the first backward runs without optimizer states"
            return f"predicted at most {peak}, held {format_bytes(got)}{besides}: {why}"
        pairs = {kind: tuple(map(format_bytes, pair)) for kind, pair in off.items()}
        kinds = ", ".join(f"{kind} {wanted} but {got}" for kind, (wanted, got) in pairs.items())
        return f"predicted peaks are more than 5 % off: {kinds}"

    def scalars(self) -> dict[str, float]:
        """Return numbers for a dashboard: peak bytes, bytes sent in the last step, and rates.

        The first report after a step starts to measure. From the next step on there are
        "waiting_share", "tokens_per_s", "model_flops_per_s" and, on known GPUs, "mfu" of the last
        steps, at most 10. Other reports, before or between, change nothing.

        Example:
            >>> for step, batch in enumerate(loader):
            ...     train_step(model, batch)
            ...     if step % 10 == 0:
            ...         wandb.log(onefold.report(model).scalars(), step=step)
        """
        sent = sum(traffic.sent_nbytes for traffic in self.last_step.values())
        names = ("waiting_share", "tokens_per_s", "model_flops_per_s", "mfu")
        rates = {name: getattr(self, name) for name in names}
        known = {name: rate for name, rate in rates.items() if rate is not None}
        return {"peak_bytes": self.memory_peak, "sent_bytes": sent, **known}

    def as_dict(self) -> dict[str, Any]:
        """Convert to plain dicts and numbers, for JSON."""
        return asdict(self)

    def __str__(self) -> str:
        lines = [f"{self.title}, rank {self.rank} of {self.world_size}, {self.steps} steps"]
        lines[0] += f", {self.loaded_steps} before the load" * bool(self.loaded_steps)
        lines += [f"{self.skipped} steps skipped: gradients not finite"] * bool(self.skipped)
        lines += [f"shares: {' : '.join(map(str, self.shares))}"] if self.shares else []
        lines += [f"planned: {self.offload}"] * bool(self.offload)
        lines += [f"note: {note}" for note in self.notes]
        if len(set(self.row_shares)) > 1:
            lines += [f"rows by speed: {', '.join(map(format_share, self.row_shares))}"]
        usages = [(kind, tier, usage) for kind, tiers in self.memory.items()
                  for tier, usage in tiers.items()]  # fmt: skip
        name, unit = common_unit(self.total.peak)
        held = [
            (kind, tier, in_unit(usage.now, unit), in_unit(usage.peak, unit))
            for kind, tier, usage in [*usages, ("all", "", self.total)]
        ]
        lines += columns([(f"memory in {name}", "tier", "now", "peak"), *held], "<<>")
        own_steps = self.steps - self.loaded_steps
        lines += [self.verdict] if own_steps else []
        sent = [
            (kind, f"{traffic.calls:,d}", in_unit(traffic.sent_nbytes, unit),
             in_unit(self.last_step.get(kind, Traffic()).sent_nbytes, unit))
            for kind, traffic in self.traffic.items()
        ]  # fmt: skip
        since = counted(own_steps, "step") if self.loaded_steps else "all steps"
        heads = [(f"sent in {name}", "calls", since, "last step")]
        lines += columns([*heads, *sent] if sent else [], "<>")
        return "\n".join(lines)


def unit_lines(units: Iterable[Unit]) -> tuple[UnitLine, ...]:
    """Describe the units of a module in the order of their use."""
    return tuple(
        UnitLine(
            _title_of(unit),
            len(unit.parameters),
            numel := sum(parameter.slot.numel for parameter in unit.parameters),
            numel * unit.dtype.itemsize,
        )
        for unit in units
    )


def _title_of(unit: Unit) -> str:
    """Return a unit's name; that of its first parameter does not stand for all of them."""
    more = len(unit.parameters) - 1
    is_first = more > 0 and any(unit.name == parameter.fqn for parameter in unit.parameters)
    return f"{unit.name} and {more} more" if is_first else unit.name


def snapshot(ledger: Ledger) -> dict[str, dict[str, Usage]]:
    """Copy the ledger's usage, by kind and tier."""
    memory: dict[str, dict[str, Usage]] = {}
    for (kind, tier), usage in ledger.usage.items():
        memory.setdefault(str(kind), {})[tier] = copy(usage)
    return memory
