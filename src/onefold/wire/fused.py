"""Messages of a GPU by one launch each, where Triton is installed (kernels/triton_kernels.py).

Without it, and for other dtypes, torch's operations take their place: the same bits, by some
hundreds of launches. A kernel that does not compile is reported once, and not tried again.
"""

import logging
from collections.abc import Callable, Sequence
from functools import cache
from importlib import import_module
from itertools import pairwise
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from onefold.tier.accelerator import sent
from onefold.wire.codec import LARGEST, Codec
from onefold.wire.kernels.compiling import SMALLEST_SCALE, TAIL

LOG = logging.getLogger(__name__)
Result = TypeVar("Result")

PROGRAM_NUMEL = 2048
"""Elements of one program: enough bytes to keep a processor's memory busy."""

SUM_NUMEL = 1024
"""Elements of a row where nothing is quantized."""

DEVICES = frozenset({"cuda"})
"""Kinds of devices that run the kernels. A test adds the CPU, where Triton interprets them."""

DTYPES = (torch.float32, torch.bfloat16)


class MessageRow(NamedTuple):
    """One part of messages of `ranks`: addresses and strides in bytes, as the kernels read them."""

    is_quantized: int
    numel: int
    scales: int
    payload: int
    values: int
    other: int = 0
    is_narrow: int = 0
    is_fresh: int = 0
    ranks: int = 1
    message_stride: int = 0
    values_stride: int = 0
    other_stride: int = 0


def address(tensor: Tensor, start: int = 0) -> int:
    """The address of an element of a flat tensor."""
    return tensor.data_ptr() + start * tensor.itemsize


class Kernels:
    """Launches the kernels for tables of rows."""

    def __init__(self, module: Any) -> None:
        self.module = module
        self._plans: dict[tuple[object, ...], tuple[Tensor, int]] = {}
        self.is_broken = False

    def run_kernel(
        self, name: str, rows: Sequence[MessageRow], device: torch.device, group: int,
        numbers: Sequence[Any] = (), **constants: Any,
    ) -> bool:  # fmt: skip
        """Launch a kernel over rows, in groups of elements; False if it could not begin."""
        block = 1 << (group - 1).bit_length()
        constants |= {"group": group, "block": block, "rows": max(1, PROGRAM_NUMEL // block)}

        def begin() -> bool:
            plan, programs = self._plan([row.numel for row in rows], constants, device)
            table = sent([number for row in rows for number in row], torch.int64, device)
            kernel, most = getattr(self.module, name), max([row.ranks for row in rows], default=1)
            grid = (programs, most)
            self.module.launch(kernel, grid, table, plan, *numbers, **constants)
            return True

        return self.attempt(name, begin) is True

    def attempt(self, name: str, begin: Callable[[], Result]) -> Result | None:
        """Return what `begin` does; None if a kernel has failed, this one or one before."""
        if self.is_broken:
            return None
        try:
            return begin()
        except Exception as error:  # of Triton, its compiler or its driver
            self.is_broken = True
            LOG.warning("torch's operations replace kernel %r, which failed: %s", name, error)
            return None

    def _plan(
        self, numels: list[int], constants: dict[str, Any], device: torch.device
    ) -> tuple[Tensor, int]:
        """For each program its row, and the first of its groups; the number of programs."""
        group, rows = constants["group"], constants["rows"]
        key = (device, group, *numels)
        if key not in self._plans:
            if len(self._plans) > 1024:  # sizes that never repeat
                self._plans.clear()
            programs = [
                number
                for row, numel in enumerate(numels)
                for first in range(0, -(-numel // group), rows)
                for number in (row, first)
            ]
            plan = torch.tensor(programs, dtype=torch.int32).to(device)
            self._plans[key] = plan, len(programs) // 2
        return self._plans[key]


@cache
def _load_kernels(name: str) -> Kernels | None:
    try:
        return Kernels(import_module(f"onefold.wire.kernels.{name}"))
    except (ImportError, AttributeError) as error:  # absent, or another version of Triton
        LOG.warning("torch's operations replace the kernels of a GPU: %s", error)
        return None


def kernels_for(device: torch.device, name: str = "triton_kernels") -> Kernels | None:
    """The kernels of a module of wire/kernels for a device, if it runs them."""
    return _load_kernels(name) if device.type in DEVICES else None


class FusedCodec:
    """A codec's messages, of fp32 and bf16, by one launch each."""

    def __init__(self, codec: Codec) -> None:
        self.codec = codec
        self._constants = {
            "is_int4": codec.word == "int4", "is_rotated": codec.is_rotated, "tail": TAIL,
        }  # fmt: skip

    def row(self, numel: int, message: int, *, is_quantized: bool, **others: int) -> MessageRow:
        """The row of a part whose message is at this address."""
        payload = message + 2 * -(-numel // self.codec.group) * is_quantized
        return MessageRow(int(is_quantized), numel, message, payload, **others)

    def encode(
        self,
        rows: Sequence[MessageRow],
        device: torch.device,
        dtype: torch.dtype,
        *,
        has_base: bool,
    ) -> bool:
        """Write a message whose exact parts have `dtype`; False if nothing was begun."""
        return self._run_kernel(
            "encode", rows, device, dtype, largest=LARGEST[self.codec.word],
            smallest=SMALLEST_SCALE, has_base=has_base,
        )  # fmt: skip

    def decode(
        self, rows: Sequence[MessageRow], device: torch.device, dtype: torch.dtype, *, adds: bool
    ) -> bool:
        """Read messages into values of `dtype`, or add them; False if nothing was begun."""
        return self._run_kernel("decode", rows, device, dtype, adds=adds)

    def average(
        self, rows: Sequence[MessageRow], device: torch.device, dtype: torch.dtype,
        into: torch.dtype, numbers: tuple[int, int, int, int, float],
    ) -> bool:  # fmt: skip
        """Sum the messages of `numbers`: ranks, this rank, bytes of a message and of the own one,
        and the scale.
        """
        into_bf16 = into == torch.bfloat16
        return self._run_kernel("average", rows, device, dtype, numbers, into_bf16=into_bf16)

    def _run_kernel(
        self, name: str, rows: Sequence[MessageRow], device: torch.device, dtype: torch.dtype,
        numbers: Sequence[Any] = (), **constants: Any,
    ) -> bool:  # fmt: skip
        kernels = kernels_for(device)
        if kernels is None or dtype not in DTYPES:
            return False
        constants |= {**self._constants, "is_bf16": dtype == torch.bfloat16}
        return kernels.run_kernel(name, rows, device, self.codec.group, numbers, **constants)


def mean(
    means: Sequence[tuple[Sequence[Tensor] | Tensor, Tensor, bool]],
    scale: float,
    dtype: torch.dtype,
) -> bool:
    """Set each target to the scaled sum of its parts, in rank order in fp32, by one launch.

    Parts are rows of a matrix, or tensors that lie as regularly. `dtype`: of the sum. False if
    nothing was begun: other dtypes, other places, or no kernels.
    """
    parts, target, _ = means[0]
    kernels = kernels_for(target.device)
    if kernels is None or dtype != torch.float32:
        return False
    kinds, targets = {parts[0].dtype for parts, _, _ in means}, {one.dtype for _, one, _ in means}
    if not kinds | targets <= set(DTYPES) or len(kinds) > 1 or len(targets) > 1:
        return False
    ranks, rows = len(parts), list[MessageRow]()
    for parts, into, is_fresh in means:
        stride = _stride(parts)
        if stride is None:
            return False
        numel, places = into.numel(), (address(parts[0]), 0, address(into))
        rows.append(MessageRow(0, numel, stride, *places, is_fresh=int(is_fresh)))
    return kernels.run_kernel(
        "mean", rows, target.device, SUM_NUMEL, (ranks, scale),
        is_bf16=torch.bfloat16 in kinds, into_bf16=torch.bfloat16 in targets,
    )  # fmt: skip


def _stride(parts: Sequence[Tensor] | Tensor) -> int | None:
    """Bytes from each part to the next; None where they differ."""
    if isinstance(parts, Tensor):
        return parts.stride(0) * parts.itemsize
    places = [*map(address, parts)]
    stride = places[-1] - places[-2] if len(places) > 1 else 0
    is_regular = all(stop - start == stride for start, stop in pairwise(places))
    return stride if is_regular else None


def adopt(weight: Tensor, master: Tensor) -> bool:
    """Take edited bf16 weights [numel] into their fp32 master in one pass; False without a kernel.

    It reads 6 bytes an element, and writes those that differ. torch's operations move 38.
    """
    kernels = kernels_for(master.device)
    if kernels is None or (weight.dtype, master.dtype) != (torch.bfloat16, torch.float32):
        return False

    def begin() -> bool:
        programs = -(-weight.numel() // PROGRAM_NUMEL)
        flat, numel = weight.view(torch.uint16), weight.numel()
        kernel, launch = kernels.module.adopt, kernels.module.launch
        launch(kernel, (programs, 1), flat, master, numel, block=PROGRAM_NUMEL)
        return True

    return kernels.attempt("adopt", begin) is True
