"""Run a module's forward under autocast, as Accelerate wraps the model of a DDP run."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

import torch
from accelerate.utils import convert_to_fp32
from torch import nn


class _Autocast:
    """Enters autocast before each forward of one module, and leaves it with fp32 outputs."""

    def __init__(self, device_type: str, dtype: torch.dtype, options: dict[str, Any]) -> None:
        self._device_type = device_type
        self._dtype = dtype
        self._options = options
        self._open: list[AbstractContextManager[Any]] = []  # of forwards inside one another

    def enter(self, *_: object) -> None:
        context = torch.autocast(self._device_type, self._dtype, **self._options)
        context.__enter__()
        self._open.append(context)

    def leave(self, _module: nn.Module, _args: Any, output: Any) -> Any:
        if self._open:  # empty where an earlier hook of this forward has raised
            self._open.pop().__exit__(None, None, None)
        return convert_to_fp32(output)


def run_under_autocast(
    module: nn.Module, device_type: str, dtype: torch.dtype, options: dict[str, Any]
) -> None:
    """Compute the module's forward under `torch.autocast(..., **options)`; its outputs are fp32."""
    autocast = _Autocast(device_type, dtype, options)
    module.register_forward_pre_hook(autocast.enter)
    module.register_forward_hook(autocast.leave, always_call=True)


def cast_outputs(module: nn.Module) -> None:
    """Cast the module's outputs to fp32, as Accelerate does where it computes in a narrower one."""
    module.register_forward_hook(lambda _module, _args, outputs: convert_to_fp32(outputs))
