"""The events and the work of one micro-batch of a model on one rank. No torch here.

`planner/trace.py` counts it on a module; `planner/simulate.py` turns it into seconds.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from onefold.engine.walks import EventKind
from onefold.planner.costs import Cost, LinkGroup, gather_cost

if TYPE_CHECKING:
    from onefold.planner.machines import Machine
    from onefold.recipe import Member


@dataclass(frozen=True, slots=True)
class Event:
    """An event of a schedule, and the bytes that torch held until then."""

    kind: EventKind
    unit: int = -1  # position among the units; -1: none
    call: int = -1  # which forward of a module; of `GRAD`: which parameter; -1: none
    now: int = 0  # activations and temporaries, at the event
    peak: int = 0  # the most of them since the event before
    logits: int = 0  # of `peak`: the module's outputs and tensors that the loss made of them
    module: Hashable = -1  # of `LEAVE`: which module
    num_modules: int = 1  # of `LEAVE`: how many modules use the unit


class Work(NamedTuple):
    """The work of one kernel, or of all kernels of a pass; 0: none, or not known.

    flops: of matrix products; a multiply-add counts as two.
    attention_flops: of a fused attention kernel, which has a speed of its own.
    nbytes: memory traffic of every other kernel.
    """

    flops: float = 0.0
    attention_flops: float = 0.0
    nbytes: float = 0.0
    num_kernels: int = 0

    def plus(self, other: Work, times: float = 1) -> Work:
        """Add `times` the work of `other`."""
        sums: Any = (mine + times * its for mine, its in zip(self, other, strict=True))
        return Work(*sums)

    def at_rows(self, two: Work, rows: int) -> Work:
        """Extrapolate to `rows` rows, where `self` is the work of one row and `two` of two."""
        grown = self.plus(two.plus(self, -1), rows - 1)
        return grown._replace(num_kernels=self.num_kernels)


NO_WORK = Work()


class AxisMessage(NamedTuple):
    """A message of a unit on a model axis: its bytes on this rank, and how often a micro-batch.

    A send is one to the next or previous rank of the pipeline.
    """

    axis: str
    nbytes: float
    group: LinkGroup
    forward: int = 0
    backward: int = 0

    def cost(self, machine: Machine) -> Cost:
        """Return the cost of one message.

        An all-reduce is a reduce-scatter and an all-gather. In an all-to-all each rank sends
        straight to every other one.
        """
        if self.axis == "tp":
            half = gather_cost(self.nbytes, self.group, machine)
            return half.then(half)
        if self.axis == "pp":  # of two ranks, a "gather" sends half
            return gather_cost(2 * self.nbytes, self.group, machine, is_straight=True)
        return gather_cost(self.nbytes, self.group, machine, is_straight=True)

    @property
    def sent(self) -> float:
        """Bytes that this rank sends for one message, by the closed form."""
        ranks = self.group.ranks
        share = (ranks - 1) / ranks
        return self.nbytes * {"tp": 2 * share, "pp": 1.0}.get(self.axis, share)


@dataclass(frozen=True, slots=True)
class UnitWork:
    """One unit: parameters that travel together, and the work between two gathers.

    `backward` of a trace includes recompute; otherwise `Conditions.recompute` adds it.
    """

    name: str
    numel: int  # parameters
    forward: Work = NO_WORK
    backward: Work = NO_WORK
    members: tuple[Member, ...] = ()  # empty where no module is known
    is_narrowed: bool = True  # False: its products stay in bf16 where others are in fp8
    is_recomputed: bool = True  # where blocks are recomputed at all
    messages: tuple[AxisMessage, ...] = ()  # on model axes
    data_ranks: int = 0  # of the data axis, where it is not the recipe's: that of experts

    @property
    def num_kernels(self) -> int:
        """Kernel launches of one forward and backward."""
        return self.forward.num_kernels + self.backward.num_kernels


@dataclass(frozen=True, slots=True)
class ModelWork:
    """All units in forward order, and the tokens of one rank in one micro-batch."""

    units: tuple[UnitWork, ...]
    tokens: int

    @property
    def numel(self) -> int:
        """Parameters of the model."""
        return sum(unit.numel for unit in self.units)
