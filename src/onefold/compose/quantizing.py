"""Quantize weights in place, before they are planned.

quantize_frozen         frozen weights of plain Linears, in a codec of the wire: Precision.frozen
quantize_for_products   matrices that modules multiply with, in formats of torch's kernels

For a plan a module on `meta` is quantized without values: inside `without_reading`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import cast

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from onefold.engine.joining import replace_parameters
from onefold.errors import ConfigError
from onefold.layout.cut import Box
from onefold.layout.module_tree import ModuleTree
from onefold.layout.packed import QuantizedWeight
from onefold.layout.units import Owned, owned_parameters
from onefold.unit.formats import described, encode
from onefold.unit.promises import Values, forget, promise, promised_values

FORMAT_WORDS = {
    ("int8", "cpu"): "int8 rows",
    ("int8", "cuda"): "int8 rows",
    ("int4", "cpu"): "int4 groups",
    ("int4", "cuda"): "int4 groups (cuda)",
}
"""Formats by what a user asks for, and by the type of the device that computes."""


@dataclass(frozen=True, slots=True)
class KeptExact:
    """A weight of two or more dimensions that rests exact, and the reason."""

    fqn: str
    reason: str


def quantize_frozen(tree: ModuleTree, optimizers: Sequence[Optimizer], word: str) -> None:
    """Replace each frozen weight of plain Linears by its bytes, in modules and optimizers."""
    values = QuantizedValues.promised_to(tree)
    for owned in owned_parameters(tree):
        parameter = owned.parameter
        is_frozen_matrix = parameter.dim() == 2 and not parameter.requires_grad
        if not is_frozen_matrix or owned.is_packed or not parameter.is_floating_point():
            continue
        if not all(isinstance(part, nn.Linear) and name == "weight" for part, name in owned.owners):
            continue
        about = described(parameter, word)
        if values is not None and owned.fqn in values:
            values.add(owned.fqn, about)
            quantized = _replace(owned, about)
        elif parameter.is_meta:
            raise _without_values(owned.fqn, "Precision(frozen=)")
        else:
            quantized = _replace(owned, _quantized(parameter, about))
        for optimizer in optimizers:
            replace_parameters(optimizer, {id(parameter): quantized}, [parameter])


def quantize_for_products(
    module: nn.Module, rest: str, device_type: str = "cpu"
) -> list[KeptExact]:
    """Replace each matrix that modules multiply with by its bytes; return weights kept exact.

    Matrices of nn.Linear, of transformers' Conv1D (transposed), and its stacks of experts. A
    module on `meta` that will read them from files (`onefold.load_pretrained`) has them quantized
    while they are read: no more than one is exact in memory. All others are quantized one by one.

    Args:
        module: one that is not sharded yet.
        rest: "int8" or "int4".
        device_type: of the device that computes.

    Raises:
        ConfigError: another word or device, or a matrix on `meta` that no file was promised for.
    """
    word = FORMAT_WORDS.get((rest, device_type))
    if word is None:
        hint = "rest=None keeps weights exact"
        got = f"{rest!r} on {device_type}"
        raise ConfigError("int8 or int4, on cpu or cuda", got, hint=hint)
    tree = ModuleTree.from_root(module)
    values = QuantizedValues.promised_to(tree)
    kept: list[KeptExact] = []
    for owned in owned_parameters(tree):
        parameter = owned.parameter
        if parameter.dim() < 2 or owned.is_packed:
            continue
        why = _why_exact(owned)
        about = None if why else described(
            parameter, word, is_multiplied=True, is_transposed=_is_conv1d(owned)
        )  # fmt: skip
        if about is None or about.nbytes >= parameter.nbytes:
            kept.append(KeptExact(owned.fqn, why or f"too small: {rest} would need more bytes"))
        elif values is not None and owned.fqn in values:
            values.add(owned.fqn, about)
            _replace(owned, about)
        elif parameter.is_meta:
            raise _without_values(owned.fqn, f"rest={rest!r}")
        else:
            _replace(owned, _quantized(parameter, about))
    return kept


@contextmanager
def without_reading(tree: ModuleTree) -> Iterator[None]:
    """Let weights on `meta` be quantized by their shapes alone: a plan reads no values."""
    promise(tree.root, cast("Values", _Unread()))
    yield
    forget(tree)


class _Unread:
    """Promises the values of every weight."""

    def __contains__(self, name: str) -> bool:
        return True


class QuantizedValues:
    """Values that are quantized while they are read: one weight at a time is exact in memory."""

    def __init__(self, values: Values) -> None:
        self._values = values
        self._quantized: dict[str, QuantizedWeight] = {}

    @staticmethod
    def promised_to(tree: ModuleTree) -> QuantizedValues | None:
        """Take the place of the values that a module was promised; None without any."""
        values = promised_values(tree)
        if values is None:
            return None
        quantized = QuantizedValues(values)
        forget(tree)
        promise(tree.root, quantized)
        return quantized

    @property
    def directory(self) -> Path:
        return self._values.directory

    def where(self, name: str) -> tuple[Path, int, str]:
        """See `Values`."""
        return self._values.where(name)

    def add(self, name: str, about: QuantizedWeight) -> None:
        """Quantize this weight, as described, while it is read."""
        self._quantized[name] = about

    def __contains__(self, name: str) -> bool:
        return name in self._values

    def fill(self, name: str, box: Box | None, out: Tensor) -> None:
        """See `Values`: a box of a quantized weight is one of its message."""
        about = self._quantized.get(name)
        if about is None:
            self._values.fill(name, box, out)
            return
        exact = torch.empty(about.shape_of_numbers, dtype=about.dtype_of_numbers)
        self._values.fill(name, None, exact)
        (start,), (length,) = box or ((0,), (len(about),))
        out.copy_(encode(about, exact)[start : start + length])


def _why_exact(owned: Owned) -> str:
    """The reason for which a weight stays exact; none for one that may be quantized."""
    kinds = sorted({type(part).__name__ for part, _ in owned.owners})
    if not owned.parameter.is_floating_point():
        return f"dtype {owned.parameter.dtype}"
    if any(isinstance(part, nn.Embedding) for part, _ in owned.owners):
        is_tied = len(kinds) > 1
        return "an embedding, which shares it with the head" if is_tied else "an embedding"
    is_of_linears = all(isinstance(part, nn.Linear) and n == "weight" for part, n in owned.owners)
    if is_of_linears or _is_conv1d(owned) or _is_stack_of_experts(owned):
        return ""
    return f"a weight of {', '.join(kinds)}"


def _is_conv1d(owned: Owned) -> bool:
    return all(type(p).__name__ == "Conv1D" and n == "weight" for p, n in owned.owners)


def _is_stack_of_experts(owned: Owned) -> bool:
    """True for [experts, out, in], or [experts, in, out], of transformers' experts."""
    return owned.parameter.dim() == 3 and all(
        type(part).__name__.endswith("Experts") for part, _ in owned.owners
    )


def _quantized(parameter: nn.Parameter, about: QuantizedWeight) -> QuantizedWeight:
    return about.over(encode(about, parameter))


def _replace(owned: Owned, quantized: QuantizedWeight) -> QuantizedWeight:
    for part, name in owned.owners:
        part._parameters[name] = quantized
    return quantized


def _without_values(fqn: str, argument: str) -> ConfigError:
    got = "one on the meta device, or one that load_pretrained has promised"
    hint = f"load the module on the CPU, or leave {argument} out"
    return ConfigError(f"weight {fqn!r} to have its values before it is quantized", got, hint=hint)
