"""Cast the arguments of a unit's forward; agree on all ranks whether gradients are finite."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from onefold.engine.engine import Engine
from onefold.tier import accelerator
from onefold.unit.dtensors import ShardedParameter
from onefold.wire.collectives import Group


def map_tensors(change: Callable[[Tensor], Tensor], values: Any) -> Any:
    """Apply `change` to the tensors in tuples, lists and dicts.

    Objects of other classes (caches, masks) pass through unchanged and keep their identity.
    """
    if isinstance(values, Tensor):
        return change(values)
    if type(values) in (tuple, list):
        return type(values)(map_tensors(change, value) for value in values)
    if type(values) is dict:
        return {key: map_tensors(change, value) for key, value in values.items()}
    return values


def cast_floating(values: Any, dtype: torch.dtype) -> Any:
    """Cast the floating-point tensors in tuples, lists and dicts to `dtype`."""
    return map_tensors(lambda t: t.to(dtype) if t.is_floating_point() else t, values)


class GradScaler(torch.amp.GradScaler):
    """torch's dynamic loss scale, for sharded gradients.

    Each rank sees only its shard of the gradients. An overflow on any rank skips the step, and
    lowers the scale, on every rank. `device` defaults to the accelerator, or to the CPU where
    there is none.
    """

    def __init__(self, device: str | None = None, **options: Any) -> None:
        super().__init__(device or accelerator.kind() or "cpu", **options)

    def _unscale_grads_(
        self, optimizer: torch.optim.Optimizer, inv_scale: Tensor, found_inf: Tensor,
        allow_fp16: bool,
    ) -> dict[torch.device, Tensor]:  # fmt: skip
        by_kind: dict[tuple[torch.device, torch.dtype], list[Tensor]] = defaultdict(list)
        groups: dict[int, Group] = {}
        for parameter in (p for group in optimizer.param_groups for p in group["params"]):
            grad = parameter.grad
            if grad is None:
                continue
            if isinstance(parameter, ShardedParameter):
                owner = parameter.owner()
                if owner is not None:
                    groups[id(owner.group)] = owner.group
                grad = grad._local_tensor if isinstance(grad, DTensor) else grad.detach()
            by_kind[grad.device, grad.dtype].append(grad)
        verdicts: dict[torch.device, Tensor] = {found_inf.device: found_inf.clone()}
        for (device, _), grads in by_kind.items():
            verdict = verdicts.setdefault(device, found_inf.to(device, copy=True))
            with torch.no_grad():
                torch._amp_foreach_non_finite_check_and_unscale_(
                    grads, verdict, inv_scale.to(device)
                )
        for group in groups.values():
            for verdict in verdicts.values():
                group.all_reduce_max(verdict)
        return verdicts


def are_gradients_finite(engine: Engine) -> bool:
    """Return False if a gradient is not finite on some rank: then on all. A collective.

    A rank sees its own rows only, so it asks the others. A GPU's host waits for the answer. This
    reads the gradients as they are now, also where they were cleared, zeroed or unscaled since the
    reduction, or stepped by another optimizer.
    """
    if not engine.units:
        return True
    is_bad = torch.zeros(1, device=engine.context.store.device)
    parameters = (parameter for unit in engine.units for parameter in unit.parameters)
    grads = [rows for p in parameters if (rows := p.own_grad()) is not None and rows.numel()]
    if grads:  # the largest magnitude is NaN if an element is
        largest = torch.stack([n.to(is_bad) for n in torch._foreach_norm(grads, math.inf)])
        is_bad += largest.isfinite().logical_not().any()
    engine.context.everyone.all_reduce_max(is_bad)
    is_finite = not is_bad.item()
    for unit in engine.units if not is_finite else ():
        unit.gradient.reduction.feedback.forget(unit.parameters)
    return is_finite
