"""The ledger: every byte the engine holds or sends, by kind, now and at its peak.

An object, never a global: each sharded module has its own. Buffers enter and leave it where they
are allocated and freed, transports where they send: `onefold.report` reads sums, not guesses.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from enum import StrEnum
from threading import RLock
from weakref import finalize

from onefold.layout.observer import Observer, joined, members_of


class Kind(StrEnum):
    """What a byte is for."""

    WEIGHT = "weight"  # the parameter at rest: this rank's shard, or the replica
    MASTER = "master"  # fp32 copy of a narrower weight
    SECONDARY = "secondary"  # the weights a rank keeps for its node
    UNSHARDED = "unsharded"  # gathered whole weights
    GRAD = "grad"  # the reduced gradient: shard, or replica at stage 0
    PARTIAL_GRAD = "partial_grad"  # this rank's gradient, not yet reduced
    FEEDBACK = "feedback"  # what quantized gradients have rounded off, for the next message
    OPTIMIZER = "optimizer"  # exp_avg, exp_avg_sq and their like
    AVERAGE = "ema"  # of weights over the steps, by `onefold.ema`
    ANCHOR = "anchor"  # the weights that islands agreed on last, by `onefold.islands`
    ACTIVATION = "activation"  # what backward needs of forward, where it was moved off the device
    CACHE = "kv_cache"  # keys and values of past tokens, in generation
    STAGING = "staging"  # slots through which bytes pass to and from far tiers
    WIRE = "wire"  # receive and staging buffers of collectives


@dataclass(slots=True)
class Usage:
    """Bytes of one kind in one tier."""

    now: int = 0
    peak: int = 0


@dataclass(slots=True)
class Traffic:
    """What one kind of collective has sent from this rank."""

    calls: int = 0
    sent_nbytes: int = 0

    def since(self, before: Traffic) -> Traffic:
        return Traffic(self.calls - before.calls, self.sent_nbytes - before.sent_nbytes)


def padding_of(collective: str) -> str:
    """The name of a collective's padding: "gather padding between" of "gather between"."""
    verb, _, where = collective.partition(" ")
    return f"{verb} padding {where}".rstrip()


@dataclass(slots=True)
class Ledger:
    """Bytes held by (kind, tier) and bytes sent by collective."""

    usage: dict[tuple[Kind, str], Usage] = field(default_factory=dict[tuple[Kind, str], Usage])
    traffic: dict[str, Traffic] = field(default_factory=dict[str, Traffic])
    last_step: dict[str, Traffic] = field(default_factory=dict[str, Traffic])
    steps: int = 0
    loaded_steps: int = 0  # of them, before `onefold.load`: their traffic is not known
    skipped: int = 0  # of them, as quantized gradients were not finite
    total: Usage = field(default_factory=Usage)
    advise: Callable[[int], str] | None = None  # what would hold so many bytes less
    mapped: int = 0  # of the bytes held now: those that malloc, or a device's allocator, has not
    rank: str = "this rank"  # its number, for errors
    handed_out: Callable[[], int] | None = None  # by a device's allocator, to all tensors
    observer: Observer | None = None  # who watches the running step
    # for errors: what runs now and of which unit, such as "in forward"; behind them what was held
    # when it failed. A list that its writers fill, as a call for each of them would cost a step
    running: list[str] = field(default_factory=lambda: ["before the first forward", ""])
    # `traffic` where the last step began and ended, and who has stepped in it
    _begun: dict[str, Traffic] = field(default_factory=dict[str, Traffic])
    _ended: dict[str, Traffic] = field(default_factory=dict[str, Traffic])
    _stepped: set[int] = field(default_factory=set[int])
    # workers take slots; and a garbage collection in a locked line may end leases of its own
    _counting: RLock = field(default_factory=RLock)

    def add(self, kind: Kind, tier: str, nbytes: int, *, is_mapped: bool = False) -> None:
        """Count `nbytes` as allocated (negative: freed).

        `is_mapped` says that they were had from the system itself, not from torch's allocator.
        """
        with self._counting:
            usage = self.usage.get((kind, tier))
            if usage is None:
                usage = self.usage[kind, tier] = Usage()
            usage.now += nbytes
            if usage.now > usage.peak:
                usage.peak = usage.now
            total = self.total
            total.now += nbytes
            if total.now > total.peak:
                total.peak = total.now
            if is_mapped:
                self.mapped += nbytes
            if self.observer is not None:
                self.observer.held(kind, tier, usage.now)

    def sent(self, collective: str, nbytes: int, calls: int = 1) -> None:
        """Count `calls` collectives that send `nbytes` from this rank."""
        traffic = self.traffic.get(collective)
        if traffic is None:
            traffic = self.traffic[collective] = Traffic()
        traffic.calls += calls
        traffic.sent_nbytes += nbytes

    def describe(self) -> str:
        """What is held now by tier and kind, most first: "weight 64, grad 32 bytes on device"."""
        tiers: dict[str, list[tuple[int, str]]] = {}
        for (kind, tier), usage in list(self.usage.items()):
            if usage.now:
                tiers.setdefault(tier, []).append((-usage.now, kind))
        return "; ".join(
            ", ".join(f"{kind} {-nbytes:,}" for nbytes, kind in sorted(held)) + f" bytes on {tier}"
            for tier, held in tiers.items()
        ) or "nothing"  # fmt: skip

    def fail(self) -> None:
        """A backward has failed, and what it holds will be freed before its error can be seen."""
        self.running[2:] = [self.status()]

    def status(self) -> str:
        """What runs and what is held, in a line each; of a backward that failed, as it was then."""
        phase, unit, *at_failure = self.running
        if at_failure:
            return at_failure[0]
        of_unit = f" of unit {unit!r}" if unit else ""
        line = f"{phase}{of_unit}\nonefold holds, besides activations, {self.describe()}"
        if self.handed_out is None:
            return line
        own = sum(usage.now for (_, tier), usage in self.usage.items() if tier == "device")
        return f"{line}; other tensors, such as activations, {self.handed_out() - own:,} bytes"

    def watch(self, observer: Observer) -> None:
        """Let `observer` hear of this module, beside those that do already."""
        self.observer = joined([*members_of(self.observer), observer])

    def unwatch(self, observer: Observer) -> None:
        """Let it hear no more."""
        self.observer = joined([o for o in members_of(self.observer) if o is not observer])

    def resume(self, steps: int) -> None:
        """Go on after so many optimizer steps of the run that was loaded; count traffic anew."""
        self.steps = self.loaded_steps = steps
        self.forget_traffic()

    def skip_step(self) -> None:
        """Count a step that no rank takes."""
        self.skipped += 1

    def begin_backward(self) -> None:
        """Note that gradients are new: the next optimizer step is not part of the last one."""
        self._stepped.clear()

    def end_step(self, optimizer: object) -> None:
        """Count an optimizer step, and as `last_step` what was sent since the one before.

        Several optimizers that each step once after a backward are one step.
        """
        if not self._stepped or id(optimizer) in self._stepped:
            self.steps += 1
            self._stepped.clear()
            self._begun = self._ended
        self._stepped.add(id(optimizer))
        nothing, traffic = Traffic(), self.traffic.items()
        self._ended = {name: now.since(nothing) for name, now in traffic}
        self.last_step = {name: now.since(self._begun.get(name, nothing)) for name, now in traffic}

    def forget_traffic(self) -> None:
        """Start counting anew; `shard` calls it so that set-up is not counted as training."""
        self.traffic.clear()
        self.last_step = {}
        self._begun, self._ended = {}, {}


class Account:
    """The bytes of one kind that an owner holds, as the ledger counts them.

    They leave the ledger when the owner is gone. Nothing runs when the interpreter exits.
    """

    def __init__(
        self, owner: object, kind: Kind, tier: str, ledger: Ledger, *, is_mapped: bool = False
    ) -> None:
        self._kind = kind
        self._tier = tier
        self._ledger = ledger
        self._is_mapped = is_mapped
        self.nbytes = 0
        finalize(owner, self.set, 0).atexit = False

    def set(self, nbytes: int) -> None:
        """Count `nbytes` from now on."""
        self.add(nbytes - self.nbytes)

    def add(self, nbytes: int) -> None:
        """Count `nbytes` more."""
        self.nbytes += nbytes
        self._ledger.add(self._kind, self._tier, nbytes, is_mapped=self._is_mapped)
