"""Describe one micro-batch of a model on one rank: its products and memory traffic, unit by unit.

A trace of the module gives a `ModelWork`; the simulator reads it. No torch here.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class UnitWork:
    """One unit: parameters that travel together, and the work between two gathers.

    FLOPs count a multiply-add as two. `backward_*` does not include recompute, which is a share of
    forward and belongs to the `Run`. `*_attention_flops` are those of a fused attention kernel,
    which runs at a speed of its own; where they are 0 attention is counted in `*_flops`. `*_drawn`
    are random numbers, as of dropout.
    """

    name: str
    numel: int  # parameters
    forward_flops: float  # of matrix products
    forward_nbytes: float  # memory traffic of everything else (0: not known)
    backward_flops: float
    backward_nbytes: float
    num_kernels: int = 0  # launches of one forward and backward (0: not known)
    forward_attention_flops: float = 0.0
    backward_attention_flops: float = 0.0
    forward_drawn: float = 0.0
    backward_drawn: float = 0.0
    is_narrowed: bool = True  # False: its products stay in bf16 where the run's are in fp8
    is_recomputed: bool = True  # where the run recomputes at all


@dataclass(frozen=True, slots=True)
class ModelWork:
    """All units in forward order, and the tokens that one rank sees in one micro-batch."""

    units: tuple[UnitWork, ...]
    tokens: int

    @property
    def numel(self) -> int:
        """Parameters of the model."""
        return sum(unit.numel for unit in self.units)

    @property
    def model_flops(self) -> float:
        """FLOPs of one forward and backward without recompute, as executed."""
        return sum(
            unit.forward_flops
            + unit.backward_flops
            + unit.forward_attention_flops
            + unit.backward_attention_flops
            for unit in self.units
        )
