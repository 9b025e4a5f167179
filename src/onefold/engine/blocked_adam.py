"""Adam and AdamW for narrow weights with fp32 masters, in one pass over memory.

The optimizer's own step needs three passes: widen all gradients to fp32 (4 more bytes per element),
step, round the masters into the weights. Here an element moves 28 bytes once (bf16 gradient in,
master and two moments in and out, bf16 weight out), in one of two ways:

    native     bf16 in CPU memory, where the C kernel was compiled: one loop (wire/kernels/adam.c).
               On x86 it has the bits of torch's kernel, elsewhere maybe not. So dtypes and the
               device choose it, never a tier or a stage, which must agree bitwise.
    in blocks  otherwise: each block is widened, stepped by torch's fused kernel and rounded before
               the next, with one block of extra memory. Blocks are multiples of that kernel's
               vector width, so the bits are those of one call.

torch's kernel steps fp32 weights: they need no conversion.
"""

from __future__ import annotations

import copy
import threading
from typing import Any

import torch
from torch import Tensor
from torch.optim import Adam, AdamW, Optimizer

from onefold.engine.adam_kernel import AdamKernel, Flats, kernel

CPU_BLOCK_NUMEL = 512 * 1024
"""The fastest of 64 Ki to 1 Mi, measured: a block stays in the cache, and calls cost little."""
DEVICE_BLOCK_NUMEL = 64 * 1024 * 1024
"""On other devices the only limit is the extra memory, and launches should be few."""

MOMENTS = ("exp_avg", "exp_avg_sq")


def block_numel(device_type: str) -> int:
    """Elements of one block, where narrow gradients are widened. The planner counts them, too."""
    return CPU_BLOCK_NUMEL if device_type == "cpu" else DEVICE_BLOCK_NUMEL


def widens(weight: torch.dtype, device_type: str) -> bool:
    """True if a step widens gradients of `weight`, narrower than its master, block by block.

    The C kernel, where it was compiled here, reads them as they are.
    """
    return not (device_type == "cpu" and weight == torch.bfloat16 and kernel() is not None)


def frozen(value: Any) -> Any:
    """Copy a hyper-parameter, so that a scheduler cannot change it before the step is over."""
    return value.detach().clone() if isinstance(value, Tensor) else copy.copy(value)


class BlockedAdam:
    """The update of one parameter group, as `torch.optim.Adam` or `AdamW` does it."""

    takes_numbers_near = True
    """True if the states that are one number lie with the weights, as kernels read them."""

    def __init__(self, group: dict[str, Any], *, is_decoupled: bool) -> None:
        beta1, beta2 = group["betas"]
        self._scratch = threading.local()  # several workers may step blocks
        self._kernel: AdamKernel | None = kernel()
        self._is_decoupled = is_decoupled
        self._update = torch._fused_adamw_ if is_decoupled else torch._fused_adam_
        self._options = {
            "lr": frozen(group["lr"]),
            "beta1": beta1, "beta2": beta2, "eps": group["eps"],
            "weight_decay": group["weight_decay"], "maximize": group["maximize"],
            "amsgrad": False, "grad_scale": None, "found_inf": None,
        }  # fmt: skip

    @staticmethod
    def if_alike(optimizer: Optimizer, group: dict[str, Any]) -> BlockedAdam | None:
        """Return the rule of a group; None where the class's own step does something else."""
        if type(optimizer) not in (Adam, AdamW) or group["amsgrad"]:
            return None
        scaler = (getattr(optimizer, name, None) for name in ("grad_scale", "found_inf"))
        if any(value is not None for value in scaler):  # the class's kernel unscales
            return None
        is_open = group["fused"] is None and not group["foreach"]
        if not (is_open or group["fused"]) or group["differentiable"] or group["capturable"]:
            return None
        return BlockedAdam(group, is_decoupled=group["decoupled_weight_decay"])

    def start(self, moments: dict[str, Tensor]) -> dict[str, Any]:
        """Return the state before the first step, in the memory of `moments`, set to zero."""
        device = next(iter(moments.values())).device
        step = torch.zeros((), dtype=torch.float32, device=device)
        return {"step": step} | {name: moment.zero_() for name, moment in moments.items()}

    def steps_at_once(self, stepped: Tensor, grad: Tensor, weight: Tensor) -> bool:
        """True if `step` is faster than the class's own, and needs less memory."""
        if weight is stepped:  # nothing is rounded
            return False
        return grad.dtype == weight.dtype or self._native(stepped, grad, weight) is not None

    def _native(self, stepped: Tensor, grad: Tensor, weight: Tensor) -> AdamKernel | None:
        kernel = self._kernel
        return kernel if kernel is not None and kernel.takes(stepped, grad, weight) else None

    def step(self, stepped: Tensor, grad: Tensor, weight: Tensor, state: dict[str, Any]) -> None:
        """Step `stepped` [numel] by `grad` [numel] of its dtype or a narrower one, in place.

        `weight` is `stepped`, or a narrower tensor into which it is rounded. `state` is that of
        torch's class; the first step fills it.
        """
        if not state:
            state |= self.start({name: torch.empty_like(stepped) for name in MOMENTS})
        state["step"] += 1
        moments = (state["exp_avg"], state["exp_avg_sq"])
        native = self._native(stepped, grad, weight)
        if native is not None:
            flats = Flats(stepped, *moments, grad, weight)
            options = self._options | {"is_decoupled": self._is_decoupled}
            native.step(flats, options, state["step"].item())
            return
        if grad.dtype == stepped.dtype and weight is stepped:
            self._step_piece(stepped, grad, *moments, state["step"])
            return
        block = block_numel(stepped.device.type)
        widened = self._scratch_for(stepped, min(block, len(stepped)))
        flats = (stepped, grad, weight, *moments)
        for p, g, w, m, v in zip(*(flat.split(block) for flat in flats), strict=True):
            wide = widened[: len(g)].copy_(g)
            self._step_piece(p, wide, m, v, state["step"])
            w.copy_(p)

    def _step_piece(self, p: Tensor, g: Tensor, m: Tensor, v: Tensor, steps: Tensor) -> None:
        self._update([p], [g], [m], [v], [], [steps], **self._options)

    def _scratch_for(self, stepped: Tensor, numel: int) -> Tensor:
        """Return memory like `stepped` of at least `numel`, uninitialised: one a thread."""
        kind = (stepped.dtype, stepped.device)
        scratch: Tensor | None = getattr(self._scratch, "tensor", None)
        if scratch is None or (scratch.dtype, scratch.device) != kind or len(scratch) < numel:
            scratch = self._scratch.tensor = stepped.new_empty(numel)
        return scratch
