"""Mixture-of-experts layers whose experts lie on other ranks of an axis.

experts = onefold.experts.distribute(model, mesh["expert"])
onefold.shard(model, optimizer, units=dict.fromkeys(experts, mesh["replica"]))
"""

from onefold.axes.experts.balance import balance_loss
from onefold.axes.experts.layer import ExpertParallel, distribute

__all__ = ["ExpertParallel", "balance_loss", "distribute"]
