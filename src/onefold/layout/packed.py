"""Find packed weights: the bytes of a quantized base, and the side tables that decode them.

    Params4bit   bytes [n/2, 1]     tables in its QuantState: absmax, code, and the nested ones
    Int8Params   bytes [out, in]    table SCB [out] in the MatmulLtState of its module

Both are bitsandbytes' classes, known by name: nothing is imported for this. Bytes and tables become
frozen parameters of a unit: cut over the ranks, gathered and saved like all others, but never cast.
A table lies in the `__dict__` of a state object, where kernels look for it, and not in a module.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any
from weakref import ReferenceType, ref

import torch
from torch import Tensor, nn

Place = tuple[dict[str, Any], str]
"""A dict, and the key under which modules or kernels find a tensor in it."""

_TABLES_4BIT = {
    "absmax": ("absmax",),
    "quant_map": ("code",),
    "nested_offset": ("offset",),
    "nested_absmax": ("state2", "absmax"),
    "nested_quant_map": ("state2", "code"),
}
"""Names of tables as bitsandbytes' state dicts have them: attributes that lead to each of them."""


@dataclass(frozen=True, slots=True)
class SideTable:
    """One side table of a packed weight: its fqn, values and place; `read` finds it anew."""

    fqn: str
    values: Tensor
    place: Place
    read: Callable[[], Tensor | None]


class QuantizedWeight(nn.Parameter):
    """The bytes [nbytes] of a frozen weight that Onefold has quantized, and what they decode to."""

    word: str  # of the format
    shape_of_numbers: torch.Size
    dtype_of_numbers: torch.dtype
    is_multiplied = False  # modules multiply with the bytes, rather than with decoded numbers
    is_transposed = False  # the bytes are of the transposed matrix: [out, in] of [in, out]

    @staticmethod
    def describing(
        message: Tensor, word: str, numbers: Tensor, *, is_multiplied: bool = False,
        is_transposed: bool = False,
    ) -> QuantizedWeight:  # fmt: skip
        """Describe a message of `numbers`."""
        weight = QuantizedWeight(message, requires_grad=False)
        weight.word = word
        weight.shape_of_numbers, weight.dtype_of_numbers = numbers.shape, numbers.dtype
        weight.is_multiplied, weight.is_transposed = is_multiplied, is_transposed
        return weight

    def over(self, message: Tensor) -> QuantizedWeight:
        """The same description of other bytes."""
        weight = QuantizedWeight(message, requires_grad=False)
        vars(weight).update(vars(self))
        return weight


def is_packed(parameter: Tensor) -> bool:
    """True for a parameter of a class that holds quantized bytes, or is about to."""
    return isinstance(parameter, QuantizedWeight) or is_4bit(parameter) or is_int8(parameter)


def is_4bit(parameter: Tensor) -> bool:
    """True for `bitsandbytes.nn.Params4bit`."""
    return _is_of_bitsandbytes(parameter, "Params4bit")


def is_int8(parameter: Tensor) -> bool:
    """True for `bitsandbytes.nn.Int8Params`."""
    return _is_of_bitsandbytes(parameter, "Int8Params")


def _is_of_bitsandbytes(parameter: Tensor, name: str) -> bool:
    kind = type(parameter)
    return kind.__name__ == name and kind.__module__.startswith("bitsandbytes.")


def other_places(module: nn.Module, name: str) -> list[Place]:
    """Where kernels look for a packed weight, besides the module's parameters."""
    weight, state = module._parameters[name], _matmul_state(module)
    if weight is None or state is None or not is_int8(weight):
        return []
    return [(vars(state), "CB")]


def tables_of(module: nn.Module, name: str, fqn: str) -> list[SideTable]:
    """The side tables of a weight, in its order in state dicts; none of a plain one.

    `fqn` is that of the weight `name` of the module.
    """
    weight = module._parameters[name]
    if weight is None or not (is_4bit(weight) or is_int8(weight)):
        return []
    paths = {"SCB": ("SCB",)} if is_int8(weight) else _TABLES_4BIT
    prefix = f"{fqn.rpartition('.')[0]}." if is_int8(weight) else f"{fqn}."
    tables: list[SideTable] = []
    for key, path in paths.items():
        read = _Reader(ref(module), name, path)
        place, values = read.place(), read()
        if place is not None and isinstance(values, Tensor):
            tables.append(SideTable(f"{prefix}{key}".lstrip("."), values, place, read))
    return tables


def attributes_of(weight: Tensor) -> dict[str, Any]:
    """The attributes that modules expect of a packed weight.

    Without its module, which would keep the engine alive, and its int8 tables, which are elsewhere.
    """
    gone = ("CB", "SCB", "module")
    return {key: None if key in gone else value for key, value in vars(weight).items()}


def prepare_module(module: nn.Module, weight: Tensor) -> None:
    """Let a module of a packed weight keep no copy of its tables, and never pack it anew.

    bitsandbytes repacks 4-bit weights on CPUs with AVX512-BF16 where they are evaluated. It rounds
    their tables to bf16 for good, and its kernel for them has no backward.
    """
    own = vars(module)
    if is_4bit(weight):
        if "quant_state" in own:
            own["quant_state"] = vars(weight)["quant_state"]
        if "support_avx512bf16_for_cpu" in own:
            own["support_avx512bf16_for_cpu"] = False


def problem_of(weight: Tensor, owners: list[tuple[nn.Module, str]]) -> tuple[str, str] | None:
    """Say what a packed weight lacks that sharding needs, and a remedy; None if it can be sharded.

    The values of a weight that bitsandbytes has not quantized yet are still wide.
    """
    own = vars(weight)
    if isinstance(weight, QuantizedWeight):
        return None
    if own.get("has_fp16_weights"):
        return (
            "an Int8Params with has_fp16_weights=True, which is quantized again in each forward",
            "build Linear8bitLt with has_fp16_weights=False, or train a plain nn.Linear",
        )
    if is_int8(weight) and any(_matmul_state(module) is None for module, _ in owners):
        return (
            f"an Int8Params in a {type(owners[0][0]).__name__}",
            "only the weights of Linear8bitLt can be stored in int8",
        )
    if weight.is_meta:
        return (
            f"a {type(weight).__name__} on meta, which has no bytes to cut",
            "build the model on the CPU of every process, without torch.device('meta'): "
            "from_pretrained(..., quantization_config=) packs it there, then call onefold.shard",
        )
    tables = tables_of(*owners[0], fqn="")
    if not tables or (weight.dtype.itemsize > 1 and not own.get("bnb_quantized")):
        return (
            f"a {type(weight).__name__} that is not quantized yet",
            "bitsandbytes quantizes in module.to(device): call it before onefold.shard",
        )
    if getattr(own.get("quant_state"), "packing_format_for_cpu", False):
        return (
            "bytes that bitsandbytes repacked for an evaluation on this CPU, which is lossy",
            "load the model again, and evaluate it after onefold.shard",
        )
    return None


def _matmul_state(module: nn.Module) -> Any:
    """The MatmulLtState of a Linear8bitLt; None of another module."""
    state = vars(module).get("state")
    return state if type(state).__name__ == "MatmulLtState" else None


@dataclass(frozen=True, slots=True)
class _Reader:
    """Finds one table of a weight anew: the weight may be another one by then, as after a merge."""

    module: ReferenceType[nn.Module]
    name: str
    path: tuple[str, ...]

    def __call__(self) -> Tensor | None:
        module, place = self.module(), self.place()
        if module is None or place is None:
            return None
        weight = module._parameters.get(self.name)
        if weight is not None and vars(weight).get("SCB") is not None:  # before the first forward
            return vars(weight)["SCB"]
        return place[0].get(place[1])

    def place(self) -> Place | None:
        """Where kernels look for the table."""
        module = self.module()
        if module is None:
            return None
        holder = _matmul_state(module)
        if holder is None:
            holder = getattr(module._parameters.get(self.name), "quant_state", None)
        for step in self.path[:-1]:
            holder = None if holder is None else vars(holder).get(step)
        return None if holder is None else (vars(holder), self.path[-1])
