"""Code frozen weights of plain Linears in place, before they are planned: `Precision.frozen`."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn
from torch.optim import Optimizer

from onefold.engine.joining import replace_parameters
from onefold.errors import ConfigError, expected
from onefold.layout.packed import CodedWeight
from onefold.layout.units import Owned, owned_parameters
from onefold.unit.init import PROMISED
from onefold.wire.codec import Codec, codec_of


def code_frozen(module: nn.Module, optimizers: Sequence[Optimizer], word: str) -> None:
    """Replace each frozen weight of plain Linears by its bytes, in modules and optimizers."""
    codec = codec_of(word)
    for owned in owned_parameters(module):
        if not _can_be_coded(owned):
            continue
        if owned.parameter.is_meta or PROMISED in module.__dict__:
            raise ConfigError(
                expected(
                    f"frozen weight {owned.fqn!r} to have its values before it is coded",
                    "one on the meta device, or one that load_pretrained has promised",
                    hint="load the module on the CPU, or leave Precision(frozen=) out",
                )
            )
        coded = _coded(owned.parameter, codec, word)
        for part, name in owned.owners:
            part._parameters[name] = coded
        for each in optimizers:
            replace_parameters(each, {id(owned.parameter): coded}, [owned.parameter])


def _can_be_coded(owned: Owned) -> bool:
    parameter = owned.parameter
    is_frozen_matrix = parameter.dim() == 2 and not parameter.requires_grad
    return (
        is_frozen_matrix
        and parameter.is_floating_point()
        and not owned.is_packed
        and all(isinstance(part, nn.Linear) and name == "weight" for part, name in owned.owners)
    )


def _coded(parameter: nn.Parameter, codec: Codec, word: str) -> CodedWeight:
    values = parameter.detach()
    message = torch.empty(codec.nbytes(values.numel()), dtype=torch.uint8, device=values.device)
    codec.encode(values.reshape(-1), message)
    return CodedWeight.of(message, word, values)
