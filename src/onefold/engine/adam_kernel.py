"""Call the C kernel of wire/kernels/adam.c, where it was compiled and this CPU runs it.

See docs/adr/0010.
"""

import ctypes
import math
from collections.abc import Mapping
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import increment_version

from onefold.wire.kernels.library import Kernel

SHARE_NUMEL = 128 * 1024
"""Elements per thread at least: stepping them takes several times as long as a thread's start."""


class Flats(NamedTuple):
    """The tensors that a step reads and writes, each [numel] and contiguous in CPU memory."""

    param: Tensor  # fp32
    exp_avg: Tensor  # fp32
    exp_avg_sq: Tensor  # fp32
    grad: Tensor  # fp32 or bf16
    weight: Tensor  # bf16, receives `param` rounded


class _Step(ctypes.Structure):
    """`struct adam_step`."""

    _fields_ = [
        (name, ctypes.c_float)
        for name in (
            "shrink", "decay", "sign", "mean_rate", "square_keep", "square_rate", "square_bias",
            "eps", "rate",
        )
    ]  # fmt: skip


class _Flats(ctypes.Structure):
    """`struct adam_flats`."""

    _fields_ = [
        ("numel", ctypes.c_int64),
        *((name, ctypes.c_void_p) for name in Flats._fields),
        ("grad_is_bf16", ctypes.c_int32),
    ]


class AdamKernel(Kernel):
    """One of the library's loops: AdamW and Adam in one pass, the same bits for every cut."""

    word = "adam"

    def __init__(self, library: ctypes.CDLL, index: int, name: str) -> None:
        super().__init__(library, index, name)
        pointer = ctypes.c_void_p
        self._call = self._function("onefold_adam", pointer, pointer, ctypes.c_int)

    @staticmethod
    def takes(stepped: Tensor, grad: Tensor, weight: Tensor) -> bool:
        """True if the library has a loop for tensors like these."""
        return (
            stepped.dtype == torch.float32
            and grad.dtype in (torch.float32, torch.bfloat16)
            and weight.dtype == torch.bfloat16
            and stepped.device.type == grad.device.type == weight.device.type == "cpu"
        )

    def step(self, flats: Flats, options: Mapping[str, Any], steps: float) -> None:
        """Step in place, on as many threads as torch's kernels take on this one.

        `options` are the arguments of `torch._fused_adamw_`, and `is_decoupled`; `steps` counts
        this step.
        """
        numel = len(flats.param)
        if any(t.dtype != torch.float32 or len(t) != numel for t in flats[:3]):
            raise TypeError("moments are not like the parameter")  # it would write past them
        flats = flats._replace(grad=flats.grad.contiguous())  # the others always are
        numbers = _numbers(options, steps)
        addresses = [flat.data_ptr() for flat in flats]
        tensors = _Flats(numel, *addresses, flats.grad.dtype == torch.bfloat16)
        threads = max(1, min(torch.get_num_threads(), numel // SHARE_NUMEL))
        self._call(self._index, ctypes.addressof(numbers), ctypes.addressof(tensors), threads)
        increment_version([flats.param, flats.exp_avg, flats.exp_avg_sq, flats.weight])


def _numbers(options: Mapping[str, Any], steps: float) -> _Step:
    """Return the kernel's factors, computed in double precision like torch's and rounded once."""
    lr, decay = float(options["lr"]), float(options["weight_decay"])
    beta1, beta2 = float(options["beta1"]), float(options["beta2"])
    is_decoupled = options["is_decoupled"]
    return _Step(
        shrink=1 - lr * decay if is_decoupled else 1,
        decay=0 if is_decoupled else decay,
        sign=-1 if options["maximize"] else 1,
        mean_rate=1 - beta1,
        square_keep=beta2,
        square_rate=1 - beta2,
        square_bias=math.sqrt(1 - beta2**steps),
        eps=options["eps"],
        rate=-(lr / (1 - beta1**steps)),
    )


@cache
def kernel() -> AdamKernel | None:
    """Return the kernel to use, if there is one."""
    return AdamKernel.fastest()
