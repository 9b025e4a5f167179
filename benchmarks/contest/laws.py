"""What the engine's own ledger has to say, held against closed forms: bytes held and bytes sent."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from contest.case import Case
from contest.summary import Round
from onefold.planner.models.gpt import GPT

FP32, BF16 = 4, 2
HELD_AT_MOST = 1.03
"""Of the formula: pieces are padded, gradients travel with flags."""
SENT_AT_MOST = 1.001
"""Of the lower bound; rows that do not divide by the ranks are sent by whoever has them."""


@dataclass(frozen=True, slots=True)
class Law:
    """One closed form, in bytes per parameter, and what the ledger says."""

    engine: str
    what: str
    wanted: float
    found: float
    at_most: float

    @property
    def ratio(self) -> float:
        """Found over wanted."""
        return self.found / self.wanted

    @property
    def holds(self) -> bool:
        """True if the ledger does not exceed the closed form by more than is allowed."""
        return self.ratio <= self.at_most


def laws(case: Case, found: Round) -> list[Law]:
    """The laws of every stage of ours that ran, on more than one rank."""
    if case.ranks == 1:
        return []
    judged = []
    for stage in range(4):
        engine = f"onefold {stage}"
        ledgers = [rank["ledger"] for rank in found.get(engine, [])]
        if not ledgers or not all(ledgers):
            continue
        numel = found[engine][0]["numel"]
        sent = sum(
            ledger[f"sent {way}"] for ledger in ledgers for way in ("gather", "reduce_scatter")
        )
        wanted, per_rank = sent_nbytes(case, stage), sent / case.ranks / numel
        judged.append(Law(engine, "sent", wanted, per_rank, SENT_AT_MOST))
        if stage == 3:
            peak = max(ledger["peak"] for ledger in ledgers) / numel
            judged.append(Law(engine, "peak", held_nbytes(case) / numel, peak, HELD_AT_MOST))
    return judged


def sent_nbytes(case: Case, stage: int) -> float:
    """Lower bound of a rank and step, bytes per parameter: one gather and one reduction of each.

    Stage 2 reduces every micro-batch; stage 3 also gathers twice (forward, backward) for it.
    Gradients travel in the compute dtype; at stage 0 their mean is gathered in fp32.
    """
    compute = BF16 if case.dtype == "bf16" else FP32
    share = (case.ranks - 1) / case.ranks
    if stage == 0:
        return share * (compute + FP32)
    return share * compute * {1: 2, 2: 1 + case.accumulate, 3: 3 * case.accumulate}[stage]


def held_nbytes(case: Case) -> float:
    """Peak of stage 3: states, two whole units and one unit's gradients, without activations."""
    compute = BF16 if case.dtype == "bf16" else FP32
    with torch.device("meta"):
        model = GPT(case.shape.config, case.shape.positions)
    numel = sum(p.numel() for p in model.parameters())
    block = max(sum(p.numel() for p in part.parameters()) for part in model.blocks)
    return 4 * FP32 * numel / case.ranks + 3 * compute * block
