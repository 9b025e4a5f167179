"""The frame of a generated program: its process, its notes, and how two runs are compared.

A printed script begins with the text of this file, so it imports torch and Onefold alone.
"""

from __future__ import annotations

import sys
import tempfile
import threading
import traceback
import warnings
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from safetensors.torch import save_model
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)

import onefold

ROWS, WIDTH = 72, 8
BATCHES_OF_LEG = 100  # a leg's first batch does not depend on how many the one before took
BUILDING = threading.RLock()  # ranks that are threads share the generator of random numbers

Value = Tensor | float | None
Operation = Callable[["Process"], None]


@dataclass(frozen=True)
class Leg:
    """A part of a program between two checkpoints: its ranks, arguments of `shard`, operations."""

    world_size: int
    options: dict[str, Any]
    operations: Sequence[Operation]


@dataclass(frozen=True)
class Program:
    """A module, its optimizers and what happens to them.

    Args:
        build: returns the module.
        optimizers: returns the optimizers of the module.
        legs: each begins where the one before ended, from its checkpoint.
        schedule: returns a learning rate scheduler of an optimizer.
        decay: of a moving average that every step updates.
        dtype: of the module and of its batches.
    """

    build: Callable[[], nn.Module]
    optimizers: Callable[[nn.Module], list[torch.optim.Optimizer]]
    legs: Sequence[Leg]
    schedule: Callable[[torch.optim.Optimizer], Any] | None = None
    decay: float | None = None
    dtype: torch.dtype = torch.float32

    def process(self, folder: str, kind: Any = None, **place: Any) -> Process:
        """A process of the program, of this kind of `Process`."""
        return (kind or Process)(self, folder, **place)


@dataclass
class Process:
    """One rank of a program, or the plain process, which computes the rows of all ranks.

    Args:
        folder: of checkpoints and of the disk tier.
        shift: the plain process multiplies initial weights by one plus noise of this size.
    """

    program: Program
    folder: str
    is_plain: bool = False
    rank: int = 0
    shift: float = 0.0
    leg: int = 0
    batches: int = 0
    updates: int = 0  # of the average
    noted: int = 0
    seen: dict[str, Value] = field(default_factory=dict)
    hooks: list[Any] = field(default_factory=list)
    schedules: list[Any] = field(default_factory=list)
    average: Any = None
    islands: Any = None

    model: nn.Module = field(init=False)
    optimizers: list[torch.optim.Optimizer] = field(init=False)

    @property
    def world_size(self) -> int:
        return self.program.legs[self.leg].world_size

    @property
    def num_parts(self) -> int:
        """Parts of a batch: ranks of a tensor parallel group compute the same rows."""
        return self.world_size // self.program.legs[self.leg].options.get("tp", 1)

    @property
    def rows(self) -> int:
        """Of a batch: those of 1 to 3 micro-batches divide by the ranks."""
        return ROWS if self.world_size <= 4 else 6 * self.world_size

    @property
    def parameters(self) -> list[nn.Parameter]:
        return list(self.model.parameters())

    @property
    def keeps_gradients(self) -> bool:
        """False where steps inside backward free gradients before anybody reads them."""
        return "step_in_backward=True" not in str(self.program.legs[self.leg].options)

    @property
    def freezes_in_bytes(self) -> bool:
        """True where frozen weights rest, and are in state dicts, as bytes of a codec."""
        precision = self.program.legs[self.leg].options.get("precision")
        return getattr(precision, "frozen", None) is not None

    # legs

    def run_leg(self, leg: int) -> None:
        """Build or resume, run the operations, and save unless this leg is the last."""
        self.leg, self.batches, self.noted = leg, leg * BATCHES_OF_LEG, 0
        options = self.program.legs[leg].options
        if leg == 0 or not self.is_plain:
            whole = self._build(seed=leg)
            if not self.is_plain:
                self._shard(options, whole)
        elif self.is_plain:
            self._forget()
        parameters = self.parameters
        for operation in self.program.legs[leg].operations:
            operation(self)
        # a stream may keep weights whole, a Trainer may build the module anew
        changes = {"trainer"} if self.is_plain else {"stream", "trainer"}
        changes &= self.program.legs[leg].options.keys()
        now = parameters if changes else self.parameters
        if any(a is not b for a, b in zip(parameters, now, strict=True)):
            raise RuntimeError("a parameter was replaced")  # as torch does for a tied module
        if leg + 1 < len(self.program.legs):
            self.model.zero_grad()
        if not self.is_plain and leg + 1 < len(self.program.legs):
            self.save(self.checkpoint(leg))

    def checkpoint(self, leg: int) -> str:
        return f"{self.folder}/leg{leg}"

    def _build(self, seed: int) -> nn.Module:
        """Build the module, which may be on meta: returns one with values."""
        with BUILDING:
            torch.manual_seed(seed)
            self.model = self.program.build()
            if self.program.dtype != torch.float32:
                self.model.to(self.program.dtype)
            if self.shift:
                for parameter in self.model.parameters():
                    if parameter.is_floating_point() or parameter.is_complex():
                        noise = self.shift * torch.randn_like(parameter)
                        parameter.data.mul_(1 + noise)
            whole = self.model
            if not self.is_plain and "meta" in self.program.legs[self.leg].options:
                with torch.device("meta"):
                    self.model = self.program.build()
                if self.program.dtype != torch.float32:
                    self.model.to(self.program.dtype)
        if not self.is_plain and dist.is_initialized():
            dist.barrier()  # a recomputation of one rank sets the generator that threads share
        self.optimizers = self.program.optimizers(self.model)
        if self.program.schedule is not None:
            self.schedules = [self.program.schedule(optimizer) for optimizer in self.optimizers]
        if self.is_plain and self.program.decay is not None:
            self.average = [parameter.detach().clone() for parameter in self.parameters]
        return whole

    def _shard(self, options: dict[str, Any], whole: nn.Module) -> None:
        options = dict(options)
        meta = None if self.leg else options.get("meta")
        options.pop("meta", None)
        if meta == "before":
            self._load_values(whole)
        if "trainer" in options:  # it shards the module itself
            return
        if "stream" in options:
            onefold.stream(self.model, **self._in_folder(options["stream"]))
            return
        for name, axes in (("nodes", "node rank"), ("islands", "island rank"), ("tp", "tp dp")):
            if name in options:
                number = options.pop(name)
                options["mesh"] = self._mesh(number, axes)
        onefold.shard(self.model, self.optimizers, **self._in_folder(options))
        if meta == "after":
            self._load_values(whole)
        if "mesh" in options and "island" in str(self.program.legs[self.leg].options):
            average = partial(torch.optim.SGD, lr=1.0)
            self.islands = onefold.islands(self.model, self.optimizers, every=1, outer=average)
        if self.program.decay is not None:
            self.average = onefold.ema(self.model, self.program.decay)
        if self.leg:
            extra = self.load(self.checkpoint(self.leg - 1))
            for schedule, state in zip(self.schedules, extra["schedules"], strict=True):
                schedule.load_state_dict(state)

    def _load_values(self, whole: nn.Module) -> None:
        """Fill a module that was built on meta from a file of another with values."""
        if self.rank == 0:
            Path(f"{self.folder}/values").mkdir()
            save_model(whole, f"{self.folder}/values/model.safetensors")
        if dist.is_initialized():
            dist.barrier()
        onefold.load_pretrained(self.model, f"{self.folder}/values")

    def save(self, folder: str) -> None:
        extra = {"schedules": [schedule.state_dict() for schedule in self.schedules]}
        onefold.save(folder, self.model, self.optimizers, extra=extra)

    def load(self, folder: str) -> Any:
        """Load a checkpoint, on all ranks: threads share the generator that each sets again."""
        extra = onefold.load(folder, self.model, self.optimizers)
        if dist.is_initialized():
            dist.barrier()
        return extra

    def _in_folder(self, options: dict[str, Any]) -> dict[str, Any]:
        offload = options.get("offload")
        if isinstance(offload, str):
            return {**options, "offload": offload.replace("FOLDER", self.folder)}
        if isinstance(offload, onefold.Offload) and offload.disk is not None:
            return {**options, "offload": replace(offload, disk=self.folder)}
        return options

    def _mesh(self, number: int, axes: str) -> Any:
        """Two axes, or the part of them that `shard` takes; tensor parallel layers are cut."""
        others = self.world_size // number
        if axes == "tp dp":
            mesh = init_device_mesh("cpu", (others, number), mesh_dim_names=("dp", "tp"))
            for block in self.model.modules():
                if {"up", "down"} <= dict(block.named_children()).keys():
                    cut = {"up": ColwiseParallel(), "down": RowwiseParallel()}
                    parallelize_module(block, mesh["tp"], cut)
            self.optimizers = self.program.optimizers(self.model)  # its weights are new tensors
            return mesh["dp"]
        mesh = init_device_mesh("cpu", (number, others), mesh_dim_names=tuple(axes.split()))
        return mesh["rank"] if axes == "island rank" else mesh

    def _forget(self) -> None:
        """Do to the plain module what a new process with a checkpoint does: hooks do not last."""
        for hook in self.hooks:
            hook.remove()
        self.hooks.clear()
        with BUILDING:
            torch.manual_seed(self.leg)
            other = self.program.build()
        for mine, new in zip(self.model.parameters(), other.parameters(), strict=True):
            mine.requires_grad_(new.requires_grad)

    # parts of operations

    def batch(self) -> Tensor:
        """The next global batch."""
        self.batches += 1
        generator = torch.Generator().manual_seed(self.batches)
        return torch.randn(self.rows, WIDTH, generator=generator).to(self.program.dtype)

    def parts(self, batch: Tensor) -> list[Tensor]:
        """What this process computes of a batch: its rank's rows, or those of each rank."""
        parts = list(batch.chunk(self.num_parts))
        return parts if self.is_plain else [parts[self.rank * self.num_parts // self.world_size]]

    def loss(self, batch: Tensor, model: Callable[[Tensor], Tensor] | None = None) -> Tensor:
        """The mean loss of this process's rows."""
        model = self.model if model is None else model
        losses = [(model(part).float() - 1).square().mean() for part in self.parts(batch)]
        return self.mean(losses)

    def mean(self, losses: list[Tensor]) -> Tensor:
        """The loss of rows whose parts have these."""
        return sum(losses[1:], losses[0]) / len(losses)

    def rounding(self) -> AbstractContextManager[None]:
        """Weights are those of a forward in the block: a run with noise rounds them."""
        return nullcontext()

    def accumulating(self, is_last: bool) -> AbstractContextManager[None]:
        return nullcontext() if self.is_plain or is_last else onefold.accumulate(self.model)

    def unsharded(self, writeback: bool = False) -> AbstractContextManager[None]:
        return (
            nullcontext() if self.is_plain else onefold.unsharded(self.model, writeback=writeback)
        )

    def step(self, zero: bool | None = True) -> None:
        """Step, and clear gradients: to None, to zeros (False), or not at all (None).

        Steps in backward clear them at once.
        """
        for optimizer in self.optimizers:
            optimizer.step()
        for schedule in self.schedules:
            schedule.step()
        self.clear(zero)
        if self.average is not None:
            self._update_average()

    def clear(self, zero: bool | None = True) -> None:
        zero = zero if self.keeps_gradients else True
        for optimizer in self.optimizers:
            if zero is not None:
                optimizer.zero_grad(set_to_none=zero)

    @torch.no_grad()
    def _update_average(self) -> None:
        if not self.is_plain:
            self.average.update()
            return
        decay = self.program.decay if self.updates else 0.0
        self.updates += 1
        for mean, parameter in zip(self.average, self.parameters, strict=True):
            if parameter.is_floating_point() or parameter.is_complex():
                mean.lerp_(parameter, 1 - decay)

    # notes

    def note(self, name: str, value: Value) -> None:
        """Keep a value that is the same on every rank, in full; shards are gathered."""
        if isinstance(value, DTensor):
            value = value.full_tensor()
        if isinstance(value, Tensor) and (value.is_floating_point() or value.is_complex()):
            wide = torch.complex128 if value.is_complex() else torch.float64
            # masters are wider than plain torch's; with a graph it would be the values of a forward
            value = value.detach().to(wide)
        self.noted += 1
        self.seen[f"{self.leg}.{self.noted} {name}"] = (
            value.detach().clone() if isinstance(value, Tensor) else value
        )

    def note_mean(self, name: str, value: Tensor) -> None:
        """Keep the mean over ranks of a value, such as a loss."""
        value = value.detach().clone()
        if not self.is_plain and self.world_size > 1:
            dist.all_reduce(value)
            value /= self.world_size
        self.note(name, value)


# runs


def run_plain(program: Program, folder: str, shift: float = 0.0) -> dict[str, Value]:
    """The program in one process, without Onefold: its notes."""
    process = program.process(folder, is_plain=True, shift=shift)
    for leg in range(len(program.legs)):
        process.run_leg(leg)
    return process.seen


def run_rank(rank: int, program: Program, folder: str, leg: int) -> dict[str, Value]:
    """One leg on one rank: its notes."""
    process = program.process(folder, rank=rank)
    process.run_leg(leg)
    return process.seen


def differences(got: dict[str, Value], wanted: dict[str, Value], bounds: dict[str, float]) -> list:
    """Sentences on notes that differ by more than their bound, which is 0 by default."""
    if list(got) != list(wanted):
        return [f"other notes: {sorted(set(got) ^ set(wanted))[:4]}"]
    lines = []
    for name, value in wanted.items():
        mine = got[name]
        if not isinstance(value, Tensor) or not isinstance(mine, Tensor):
            if mine is not value and mine != value:
                lines.append(f"{name} is {mine}, expected {value}")
        elif mine.shape != value.shape or mine.dtype != value.dtype:
            lines.append(
                f"{name} is {mine.dtype} {tuple(mine.shape)}, "
                f"expected {value.dtype} {tuple(value.shape)}"
            )
        elif (off := distance(mine, value)) > bounds.get(name, 0.0):
            lines.append(f"{name} differs by {off:.3g}, at most {bounds.get(name, 0.0):.3g} wanted")
    return lines


def distance(one: Value, other: Value) -> float:
    """The largest absolute difference of two tensors; infinite where one alone is not finite."""
    if not isinstance(one, Tensor) or not isinstance(other, Tensor) or not one.numel():
        return 0.0
    wide = torch.complex128 if one.is_complex() else torch.float64
    off = (one.to(wide) - other.to(wide)).abs()
    return torch.where(one == other, 0.0, off.nan_to_num(torch.inf)).max().item()


# a script of its own: ranks are gloo processes


def main(program: Program, bound: float) -> None:
    """Run plain and sharded, and print what differs by more than `bound`."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        wanted = run_plain(program, folder)
        got: dict[str, Value] = {}
        for number, leg in enumerate(program.legs):
            url, arguments = f"file://{folder}/store{number}", (program, folder, number)
            mp.start_processes(_process, (leg.world_size, url, *arguments), leg.world_size,
                               start_method="fork")  # fmt: skip
            got |= torch.load(f"{folder}/notes{number}")
    lines = differences(got, wanted, dict.fromkeys(wanted, bound))
    print(*lines[:20] or ["right"], sep="\n")
    sys.exit(1 if lines else 0)


def _process(rank: int, world_size: int, url: str, *arguments: Any) -> None:
    dist.init_process_group("gloo", url, rank=rank, world_size=world_size)
    try:
        notes = run_rank(rank, *arguments)
    except BaseException:
        traceback.print_exc()
        raise
    if rank == 0:
        torch.save(notes, f"{arguments[1]}/notes{arguments[2]}")
    dist.barrier()
    dist.destroy_process_group()
