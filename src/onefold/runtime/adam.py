"""Adam and AdamW for narrow weights with fp32 masters, in blocks that stay in the cache.

The optimizer's own step would want all gradients in fp32 first, a pass of its own and 4 bytes per
element, and the masters rounded afterwards, another pass. Here each block is widened, stepped by
torch's fused kernel and rounded before the next is touched: 28 bytes of traffic an element (bf16
gradient in, master and two moments in and out, bf16 weight out) and one block of extra memory. The
kernel is the same and pieces are multiples of its vector width, so the bits are the same too.
"""

from __future__ import annotations

import copy
import threading
from typing import Any

import torch
from torch import Tensor
from torch.optim import Adam, AdamW, Optimizer

CPU_BLOCK_NUMEL = 512 * 1024
"""Measured best of 64 Ki to 1 Mi: a block stays in the cache, and the calls for it do not show."""
DEVICE_BLOCK_NUMEL = 64 * 1024 * 1024
"""Elsewhere only the extra memory counts, and launches should be few."""


MOMENTS = ("exp_avg", "exp_avg_sq")


def frozen(value: Any) -> Any:
    """A hyper-parameter that a scheduler cannot change before the step is over."""
    return value.detach().clone() if isinstance(value, Tensor) else copy.copy(value)


class BlockedAdam:
    """The update of one parameter group: what `torch.optim.Adam` or `AdamW` would do with it."""

    def __init__(self, group: dict[str, Any], *, is_decoupled: bool) -> None:
        beta1, beta2 = group["betas"]
        self._scratch = threading.local()  # several workers may step blocks
        self._update = torch._fused_adamw_ if is_decoupled else torch._fused_adam_
        self._options = {
            "lr": frozen(group["lr"]),
            "beta1": beta1, "beta2": beta2, "eps": group["eps"],
            "weight_decay": group["weight_decay"], "maximize": group["maximize"],
            "amsgrad": False, "grad_scale": None, "found_inf": None,
        }  # fmt: skip

    @staticmethod
    def of(optimizer: Optimizer, group: dict[str, Any]) -> BlockedAdam | None:
        """The rule of a group; None where the class's own step does something else."""
        if type(optimizer) not in (Adam, AdamW) or group["amsgrad"]:
            return None
        scaler = (getattr(optimizer, name, None) for name in ("grad_scale", "found_inf"))
        if any(value is not None for value in scaler):  # the class's kernel is to unscale
            return None
        is_open = group["fused"] is None and not group["foreach"]
        if not (is_open or group["fused"]) or group["differentiable"] or group["capturable"]:
            return None
        return BlockedAdam(group, is_decoupled=group["decoupled_weight_decay"])

    def start(self, moments: dict[str, Tensor]) -> dict[str, Any]:
        """The state before the first step, in the room of `moments`, which are set to zero."""
        device = next(iter(moments.values())).device
        step = torch.zeros((), dtype=torch.float32, device=device)
        return {"step": step} | {name: room.zero_() for name, room in moments.items()}

    def step(self, stepped: Tensor, grad: Tensor, weight: Tensor, state: dict[str, Any]) -> None:
        """Step `stepped` [numel] by `grad` [numel] of its dtype or a narrower one, in place.

        `weight` is `stepped`, or a narrower tensor into which it is rounded. `state` is the
        optimizer's of `stepped`; made here at the first step, under its names.
        """
        if not state:
            state |= self.start({name: torch.empty_like(stepped) for name in MOMENTS})
        state["step"] += 1
        moments = (state["exp_avg"], state["exp_avg_sq"])
        if grad.dtype == stepped.dtype and weight is stepped:
            self._step_piece(stepped, grad, *moments, state["step"])
            return
        block = CPU_BLOCK_NUMEL if stepped.device.type == "cpu" else DEVICE_BLOCK_NUMEL
        widened = self._scratch_for(stepped, min(block, len(stepped)))
        flats = (stepped, grad, weight, *moments)
        for p, g, w, m, v in zip(*(flat.split(block) for flat in flats), strict=True):
            wide = widened[: len(g)].copy_(g)
            self._step_piece(p, wide, m, v, state["step"])
            w.copy_(p)

    def _step_piece(self, p: Tensor, g: Tensor, m: Tensor, v: Tensor, steps: Tensor) -> None:
        self._update([p], [g], [m], [v], [], [steps], **self._options)

    def _scratch_for(self, stepped: Tensor, numel: int) -> Tensor:
        """Uninitialised, like `stepped`, of at least `numel`: one for all pieces on a thread."""
        found: Tensor | None = getattr(self._scratch, "tensor", None)
        is_alike = found is not None and (found.dtype, found.device) == (
            stepped.dtype,
            stepped.device,
        )
        if found is None or not is_alike or len(found) < numel:
            found = self._scratch.tensor = stepped.new_empty(numel)
        return found
