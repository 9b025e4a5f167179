"""Adam and AdamW for narrow weights with fp32 masters, in blocks that stay in the cache.

The optimizer's own step would want all gradients in fp32 first, a pass of its own and 4 bytes per
element, and the masters rounded afterwards, another pass. Here each block is widened, stepped by
torch's fused kernel and rounded before the next is touched: 28 bytes of traffic an element (bf16
gradient in, master and two moments in and out, bf16 weight out) and one block of extra memory. The
kernel is the same and pieces are multiples of its vector width, so the bits are the same too.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.optim import Adam, AdamW, Optimizer

CPU_BLOCK_NUMEL = 512 * 1024
"""Measured best of 64 Ki to 1 Mi: a block stays in the cache, and the calls for it do not show."""
DEVICE_BLOCK_NUMEL = 64 * 1024 * 1024
"""Elsewhere only the extra memory counts, and launches should be few."""


class BlockedAdam:
    """The update of one parameter group: what `torch.optim.Adam` or `AdamW` would do with it."""

    def __init__(self, group: dict[str, Any], *, is_decoupled: bool) -> None:
        beta1, beta2 = group["betas"]
        self._scratch = torch.empty(0)
        self._update = torch._fused_adamw_ if is_decoupled else torch._fused_adam_
        self._options = {
            "lr": group["lr"], "beta1": beta1, "beta2": beta2, "eps": group["eps"],
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

    def step(self, master: Tensor, grad: Tensor, weight: Tensor, state: dict[str, Any]) -> None:
        """Step `master` [numel] fp32 by `grad` [numel] of a narrower dtype; round into `weight`.

        `state` is the optimizer's of the master; made here at the first step, under its names.
        """
        if not state:
            state["step"] = torch.zeros((), dtype=torch.float32, device=master.device)
            state["exp_avg"] = torch.zeros_like(master)
            state["exp_avg_sq"] = torch.zeros_like(master)
        state["step"] += 1
        steps = [state["step"]]
        block = CPU_BLOCK_NUMEL if master.device.type == "cpu" else DEVICE_BLOCK_NUMEL
        widened = self._scratch_for(master, min(block, len(master)))
        flats = (master, grad, weight, state["exp_avg"], state["exp_avg_sq"])
        for p, g, w, m, v in zip(*(flat.split(block) for flat in flats), strict=True):
            wide = widened[: len(g)].copy_(g)
            self._update([p], [wide], [m], [v], [], steps, **self._options)
            w.copy_(p)

    def _scratch_for(self, master: Tensor, numel: int) -> Tensor:
        """Uninitialised, like `master`, of at least `numel`: one for all runs of a step."""
        found = self._scratch
        is_alike = (found.dtype, found.device) == (master.dtype, master.device)
        if not is_alike or len(found) < numel:
            found = self._scratch = master.new_empty(numel)
        return found
