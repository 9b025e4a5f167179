"""Ask all ranks whether the gradients of a module are finite."""

from __future__ import annotations

import torch

from onefold.engine.engine import Engine


def are_gradients_finite(engine: Engine) -> bool:
    """Return False if a gradient is not finite on some rank: then on all. A collective.

    A rank sees its own rows only, so it asks the others. A GPU's host waits for the answer. This
    reads the gradients as they are now, also where they were cleared, zeroed or unscaled since the
    reduction, or stepped by another optimizer.
    """
    if not engine.units:
        return True
    is_bad = torch.zeros(1, device=engine.context.store.device)
    for unit in engine.units:
        for parameter in unit.parameters:
            rows = parameter.own_grad()
            if rows is not None:
                for bound in torch.aminmax(rows):  # both are NaN if an element is
                    is_bad += bound.isfinite().logical_not()
    engine.context.everyone.all_reduce_max(is_bad)
    is_finite = not is_bad.item()
    for unit in engine.units if not is_finite else ():
        unit.gradient.reduction.feedback.forget(unit.parameters)
    return is_finite
