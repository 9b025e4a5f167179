"""Pipelines for tests: blocks over (pp, dp) ranks, beside one process that has all of them."""

from __future__ import annotations

import gc
from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.pipelining import PipelineStage
from torch.distributed.tensor import DTensor

import onefold
from onefold.engine.driving import Verb
from onefold.engine.registry import engine_of
from tests.support.programs.meshes import BACK, EACH_ONE, EACH_TWO
from tests.support.ranks import seeded

SCHEDULES: dict[str, Any] = {**EACH_ONE, **EACH_TWO}
WIDTH, LAYERS, MICROBATCHES, ROWS = 12, 4, 4, 8


class Block(nn.Module):
    """A residual block whose weights, norm included, all train."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 2 * WIDTH)
        self.down = nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.nn.functional.gelu(self.up(self.norm(x))))


def blocks(dtype: torch.dtype = torch.float32, *, layers: int = LAYERS) -> nn.Sequential:
    """All blocks of the model, from seed 0."""
    return seeded(lambda: nn.Sequential(*(Block() for _ in range(layers)))).to(dtype)


def rows(num: int, dtype: torch.dtype = torch.float32, *, seed: int = 5) -> tuple[Tensor, Tensor]:
    """Inputs and targets of `num` data ranks."""
    shape = (2, num, ROWS, WIDTH)
    made = seeded(lambda: torch.randn(shape, dtype=torch.float64), seed=seed).to(dtype)
    return made[0], made[1]


def mean_loss(output: Tensor, target: Tensor) -> Tensor:
    return (output.float() if output.dtype.itemsize < 4 else output).sub(target).pow(2).mean()


def mesh_of(pp: int, dp: int, device: str = "cpu") -> DeviceMesh:
    return init_device_mesh(device, (pp, dp), mesh_dim_names=("pp", "dp"))


class Pipe:
    """One rank's stages of a pipeline, sharded and driven."""

    def __init__(
        self, kind: str, stage: int, mesh: DeviceMesh, *, model: nn.Sequential | None = None,
        drives: bool = True, window: Any = None, tied: Any = (), loss: Any = mean_loss,
        scale_grads: bool = True, lr: float = 1e-3, **options: Any,
    ) -> None:  # fmt: skip
        gc.collect()  # a pipe is a cycle: the last one keeps its connections and their threads
        self.mesh = mesh
        pp, size = mesh["pp"].get_local_rank(), mesh["pp"].size()
        num = size * (1 if kind in EACH_ONE else 2)
        mine = [pp] if kind in EACH_ONE else [pp, num - 1 - pp if kind in BACK else pp + size]
        whole = model if model is not None else blocks()
        per = len(whole) // num
        self.modules = {i: whole[i * per : (i + 1) * per] for i in mine}  # under their names
        self.optimizers = []
        self.stages = []
        for i, module in self.modules.items():
            optimizer = torch.optim.AdamW(module.parameters(), lr=lr)
            onefold.shard(module, optimizer, stage=stage, mesh=mesh["dp"], **options)
            self.optimizers.append(optimizer)
            group, device = mesh["pp"].get_group(), next(module.parameters()).device
            self.stages.append(PipelineStage(module, i, num, device, group=group))
        stages = self.stages[0] if kind in EACH_ONE else self.stages
        self.schedule = SCHEDULES[kind](stages, MICROBATCHES, loss_fn=loss, scale_grads=scale_grads)
        if drives:
            assert onefold.pipeline(self.schedule, window=window, tied=tied) is self.schedule
        self.counts: Counter[tuple[int, Verb, int]] = Counter()
        for i, module in self.modules.items():
            self._count(i, engine_of(module).executor)

    def _count(self, stage: int, executor: Any) -> None:
        do = executor.do

        def counted(actions: Iterable[Any]) -> None:
            listed = list(actions)
            self.counts.update((stage, verb, unit) for verb, unit in listed)
            do(listed)

        executor.do = counted

    def per_unit(self, verb: Verb, stage: int | None = None) -> list[int]:
        """How often each unit had `verb` since the last step, sorted and without repeats."""
        found = [n for (i, v, _), n in self.counts.items() if v is verb and stage in (None, i)]
        return sorted(set(found))

    def step(self, inputs: Tensor, targets: Tensor, *, call: str = "step") -> None:
        """Run the schedule once on this data rank's rows."""
        self.counts.clear()
        dp = self.mesh["dp"].get_local_rank()
        arguments = [inputs[dp]] if any(each.is_first for each in self.stages) else []
        target = {"target": targets[dp]} if any(each.is_last for each in self.stages) else {}
        getattr(self.schedule, call)(*arguments, **target)

    def clear(self) -> None:
        for optimizer in self.optimizers:
            optimizer.zero_grad()

    def update(self) -> None:
        for optimizer in self.optimizers:
            optimizer.step()
        self.clear()

    def tensors(self, of: Callable[[nn.Parameter], Any]) -> dict[str, Tensor]:
        """`of` each parameter, whole, under its name in the model."""
        found = {}
        for module in self.modules.values():
            for name, parameter in module.named_parameters():
                value = of(parameter)
                whole = value.full_tensor() if isinstance(value, DTensor) else value
                found[name] = whole.detach().clone()
        return found

    def grads(self) -> dict[str, Tensor]:
        return self.tensors(lambda parameter: parameter.grad)

    def weights(self) -> dict[str, Tensor]:
        return self.tensors(lambda parameter: parameter)


def assert_near(found: dict[str, Tensor], wanted: nn.Module, of: str, tolerance: float) -> None:
    """Compare with "grad" or "data" of one process's model: relative error of each tensor."""
    for name, tensor in found.items():
        reference = getattr(wanted.get_parameter(name), of)
        error = ((tensor - reference).norm() / reference.norm()).item()
        assert error <= tolerance, f"{name}: {of} differs by {error:.1e} from one process"


def plain_backward(model: nn.Module, inputs: Tensor, targets: Tensor) -> None:
    """The gradient of the mean over all data ranks' rows, in one process."""
    model.zero_grad()
    mean_loss(model(inputs.flatten(0, 1)), targets.flatten(0, 1)).backward()
