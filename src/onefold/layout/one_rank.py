"""Units of the only process, whose weights stay on its device. See docs/adr/0040."""

from collections.abc import Sequence

import torch
from torch import nn

from onefold.layout.units import UnitPlan

BUCKET_NBYTES = 16 << 20
"""Bytes of a unit of the only process: gradients of so many weights are widened at once."""


def of_one_rank(
    plans: Sequence[UnitPlan], root: nn.Module, most_nbytes: int = BUCKET_NBYTES
) -> list[UnitPlan]:
    """Put units together that no message moves: the root brings all of them at once.

    Blocks of one rank have nothing to wait for, and each event of a unit costs the host. Units of
    packed weights stay, as they are decoded where they are used.
    """
    modules, joined = [root], list[UnitPlan]()
    open_by_kind: dict[tuple[torch.dtype, bool, bool], UnitPlan] = {}
    for plan in plans:
        if plan.is_packed or plan.is_quantized or plan.is_multiplied:
            joined.append(plan)
            continue
        key = plan.dtype, plan.is_trained, plan.keeps_dtype
        bucket = open_by_kind.get(key)
        if bucket is None or bucket.nbytes + plan.nbytes > most_nbytes:
            bucket = open_by_kind[key] = UnitPlan(plan.name, modules)
            joined.append(bucket)
        bucket.members += plan.members
        bucket.parts += [module for module in plan.modules if module is not root]
    return joined
