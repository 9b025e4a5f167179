"""Find modules that compute with running statistics, such as batch norm, by their tensors.

Their kernels take a bf16 input with fp32 statistics, and then want fp32 weights: under
`torch.autocast` both stay in fp32. Nothing runs to find that out, and no class is named.
"""

from typing import Protocol

import torch
from torch import nn
from torch.nn.parameter import is_lazy
from torch.nn.utils.parametrize import ParametrizationList
from torch.nn.utils.spectral_norm import SpectralNorm

from onefold.errors import ConfigError


class Dtypes(Protocol):
    """Those of `onefold.Precision`: of compute, and of buffers that are cast."""

    @property
    def compute(self) -> torch.dtype | None: ...
    @property
    def buffers(self) -> torch.dtype | None: ...


def statistics_dtype(module: nn.Module) -> torch.dtype | None:
    """Return the dtype of a module's running statistics; None for another module.

    Statistics are floating-point buffers with one number for each channel. So all tensors of such a
    module, at least two, hold as many numbers. Scalars, which count or weigh steps, may be there.
    So are vectors with which a parametrization computes a weight (spectral norm, torch 2.13).
    """
    if isinstance(module, ParametrizationList):
        found = {b.dtype for b in module.buffers() if b.dim() and b.is_floating_point()}
        return found.pop() if len(found) == 1 else None
    tensors = [t for t in module._buffers.values() if t is not None and not is_lazy(t)]
    buffers = [tensor for tensor in tensors if tensor.is_floating_point()]
    numbers = [t for t in (*buffers, *module._parameters.values()) if t is not None and t.dim()]
    dtypes = {buffer.dtype for buffer in buffers if buffer.dim()}
    is_by_channel = len(numbers) > 1 and len({tensor.numel() for tensor in numbers}) == 1
    return dtypes.pop() if is_by_channel and len(dtypes) == 1 else None


def keeps_dtype(module: nn.Module, precision: Dtypes | None) -> bool:
    """True if the module's parameters are not cast, as its statistics stay in a wider dtype.

    Raises `ConfigError` for a hook that computes a weight from narrow and wider tensors.
    """
    if precision is None or precision.compute is None:
        return False
    if any(isinstance(hook, SpectralNorm) for hook in module._forward_pre_hooks.values()):
        hint = "torch.nn.utils.parametrizations.spectral_norm, or precision=None"
        got = "torch.nn.utils.spectral_norm, whose vectors stay in another dtype"
        raise ConfigError("weights that are computed in one dtype under precision=", got, hint=hint)
    dtype = statistics_dtype(module)
    return dtype is not None and (precision.buffers or dtype).itemsize > precision.compute.itemsize


def buffers_dtype(module: nn.Module, precision: Dtypes) -> torch.dtype | None:
    """Return the dtype to which the module's floating-point buffers are cast; None leaves them.

    Statistics that are narrower than the weights of the forward are widened: kernels refuse them.
    """
    dtype, compute = statistics_dtype(module), precision.compute
    is_narrow = dtype is not None and compute is not None and dtype.itemsize < compute.itemsize
    return precision.buffers or (compute if is_narrow else None)
