"""The byte GPT on any axes, for tests: its stages, cut over tensor ranks, with split sequences.

Axes of two ranks each are enough for every mesh: it gives some of them to data and sequence, one to
tensors and one to the pipeline.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.distributed.tensor import DTensor
from torch.nn import functional as F

import onefold
from onefold.engine.registry import engine_of
from onefold.planner.models.gpt import GPT, GPTConfig, GPTStage
from onefold.planner.models.parallel import parallelize_gpt
from tests.support.ranks import seeded

ROWS, LENGTH, MICROBATCHES, LR = 8, 8, 2, 1e-3
SIZES = GPTConfig(num_layers=2, width=16, num_heads=4, lr=LR)
Named = dict[str, Tensor]


@dataclass(frozen=True)
class Axes:
    """The lengths of a mesh: powers of two, of pp, cp and tp at most 2."""

    pp: int = 1
    dp: int = 1
    cp: int = 1
    tp: int = 1

    @property
    def world_size(self) -> int:
        return self.pp * self.dp * self.cp * self.tp

    def __str__(self) -> str:
        return f"pp{self.pp} dp{self.dp} cp{self.cp} tp{self.tp}"


class Places:
    """The ranks of this world on every mesh. A collective."""

    def __init__(self) -> None:
        self.letters = "xyz"[: dist.get_world_size().bit_length() - 1]
        lengths = (1, *(2 for _ in self.letters))
        self.root = init_device_mesh("cpu", lengths, mesh_dim_names=("one", *self.letters))
        heads = (self.letters[:count] for count in range(2, len(self.letters) + 1))
        self.flat = {head: self.root[tuple(head)]._flatten() for head in heads}

    def of(self, axes: Axes) -> Place:
        """This rank's place: the first axes are those of data and sequence."""
        num_data = (axes.dp * axes.cp).bit_length() - 1
        data, free = self.letters[:num_data], list(self.letters[num_data:])
        named = {axis: self.root[free.pop(0)] for axis in ("tp", "pp") if getattr(axes, axis) > 1}
        if axes.cp > 1:
            named["cp"] = self.root[data[-1]]
        return Place(axes, self.flat.get(data) or self.root[data or "one"], named)


@dataclass(frozen=True)
class Place:
    """A rank on one mesh."""

    axes: Axes
    data: DeviceMesh
    named: dict[str, DeviceMesh]

    def rank(self, axis: str) -> int:
        if axis == "dp":
            return self.data.get_local_rank() // self.axes.cp
        return self.named[axis].get_local_rank() if axis in self.named else 0


def gpt(dtype: torch.dtype = torch.float32, seed: int = 0, **sizes: Any) -> GPT:
    return seeded(lambda: GPT(replace(SIZES, **sizes), LENGTH), seed=seed).to(dtype)


def batch(step: int) -> tuple[Tensor, Tensor]:
    """Bytes [ROWS, LENGTH], of few kinds, and the next ones."""
    made = torch.Generator().manual_seed(step)
    rows = torch.randint(0, 16, (ROWS, LENGTH + 1), generator=made)
    return rows[:, :-1].contiguous(), rows[:, 1:].contiguous()


def loss_of(logits: Tensor, targets: Tensor) -> Tensor:
    """What these tokens add to the mean over all of a batch."""
    total = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum")
    return total / (ROWS * LENGTH)


def whole(tensor: Any) -> Tensor:
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().clone()


def state_of(module: nn.Module, optimizer: torch.optim.Optimizer) -> Named:
    """Whole weights, masters, moments and step counts, by name."""
    found = Named()
    for unit in engine_of(module).units:
        for each in unit.parameters:
            found[f"{each.fqn} weight"] = whole(each.sharded)
            found[f"{each.fqn} master"] = whole(each.wrap(each.stepped))
            for key, value in optimizer.state[each.sharded].items():
                found[f"{each.fqn} {key}"] = whole(value)
    return found


def of_all(state: Named, mesh: DeviceMesh) -> Named:
    """The states of all stages as one."""
    everyone: list[Named] = [{} for _ in range(mesh.size())]
    dist.all_gather_object(everyone, state, group=mesh.get_group())
    return {name: value for each in everyone for name, value in each.items()}


def check_bits(found: Named, wanted: Named, about: str) -> None:
    assert found.keys() == wanted.keys(), about
    for name, value in wanted.items():
        assert bits(found[name]) == bits(value), f"{about}: {name}"


def bits(tensor: Tensor) -> tuple[torch.dtype, torch.Size, bytes]:
    flat = tensor.contiguous().view(-1).view(torch.uint8)
    return tensor.dtype, tensor.shape, flat.numpy().tobytes()


class Run:
    """The part of a model that this rank has, and its optimizer."""

    def __init__(self, place: Place, stage: int, model: GPT, **choices: Any) -> None:
        self.place, axes = place, place.axes
        self.part: nn.Module = model
        if axes.pp > 1:
            self.part = GPTStage(model, place.rank("pp"), axes.pp)
        if axes.tp > 1:
            parallelize_gpt(self.part, place.named["tp"])
        self.optimizer = torch.optim.AdamW(self.part.parameters(), lr=LR)
        onefold.shard(self.part, self.optimizer, stage=stage, mesh=place.data, **choices)
        if axes.cp > 1:
            self.split = onefold.split_sequence(
                self.part, place.named["cp"], inputs=axes.pp == 1
            ).split
        else:
            self.split = lambda tensor: tensor
        if axes.pp > 1:
            group = place.named["pp"].get_group()
            self.stage = PipelineStage(
                self.part, place.rank("pp"), axes.pp, torch.device("cpu"), group=group
            )
            schedule = Schedule1F1B(self.stage, MICROBATCHES, loss_fn=self._loss, scale_grads=False)
            self.schedule = onefold.pipeline(schedule, tied=[])

    def _loss(self, logits: Tensor, targets: Tensor) -> Tensor:
        return loss_of(logits, targets) * self.place.data.size()  # gradients are averaged

    def backward(self, step: int) -> None:
        dp, axes = self.place.rank("dp"), self.place.axes
        inputs, targets = (each.chunk(axes.dp)[dp] for each in batch(step))
        if axes.pp == 1:
            self._loss(self.part(inputs), self.split(targets)).backward()
        elif self.stage.is_first:
            positions = self.split(torch.arange(LENGTH).expand_as(inputs)).contiguous()
            self.schedule.step(self.split(inputs), position_ids=positions)
        else:
            self.schedule.step(target=self.split(targets))

    def update(self) -> None:
        self.optimizer.step()
        self.optimizer.zero_grad()

    def norm(self) -> float:
        """The norm of all gradients, which stay as they are."""
        return float(onefold.clip_grad_norm_(self.part, float("inf")))

    def grads(self) -> Named:
        return {name: whole(p.grad) for name, p in self.part.named_parameters()}

    def weights(self) -> Named:
        return {name: whole(p) for name, p in self.part.named_parameters()}


def alone(dtype: torch.dtype, steps: int) -> Iterator[tuple[Named, Named]]:
    """Gradients and weights of each step in one plain process that has the whole model."""
    model = gpt(dtype)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR)
    for step in range(steps):
        inputs, targets = batch(step)
        loss_of(model(inputs), targets).backward()
        grads = {name: whole(p.grad) for name, p in model.named_parameters()}
        optimizer.step()
        optimizer.zero_grad()
        yield grads, {name: whole(p) for name, p in model.named_parameters()}
