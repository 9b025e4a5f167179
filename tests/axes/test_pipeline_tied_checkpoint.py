"""A weight that stages share is saved once, and moves between pipelines and one process."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.pipelining import PipelineStage

import onefold
from onefold.checkpoint.offline import inspect
from onefold.engine.pipelined import TIE
from onefold.errors import CheckpointError
from onefold.planner.models.gpt import GPT, GPTStage
from tests.support.composed import LR, Named, batch, check_bits, gpt, loss_of, of_all, state_of
from tests.support.pipelines import MICROBATCHES, ROWS, SCHEDULES, WIDTH, Block, mesh_of
from tests.support.programs.meshes import EACH_ONE
from tests.support.ranks import run_processes, seeded

pytestmark = pytest.mark.process
FIRST, LAST = "tokens.weight", "head.weight"
KINDS = {"1F1B": 3, "ZBVZeroBubble": 1}  # with stages; one rank of the second has both copies
STEPS = 2


def made(*, seed: int = 0, is_tied: bool = True) -> GPT:
    return gpt(torch.bfloat16, seed, num_layers=4, is_tied=is_tied)


class Pipe:
    """A rank's stages of the GPT, their optimizers, and a schedule of 2 x 2 ranks."""

    def __init__(self, kind: str, mesh: DeviceMesh, seed: int = 0) -> None:
        self.mesh, rank = mesh, mesh.get_local_rank("pp")
        num = 2 if kind in EACH_ONE else 4
        mine = [rank] if kind in EACH_ONE else [rank, num - 1 - rank]
        whole = made(seed=seed)
        copy = nn.Parameter(whole.head.weight.detach().clone())
        whole.head.weight = copy  # one process has one parameter, a stage has a copy
        self.modules = [GPTStage(whole, index, num) for index in mine]
        self.optimizers, self.stages = [], []
        for index, module in zip(mine, self.modules, strict=True):
            self.optimizers.append(torch.optim.AdamW(module.parameters(), lr=LR))
            onefold.shard(module, self.optimizers[-1], stage=KINDS[kind], mesh=mesh["dp"])
            group = mesh["pp"].get_group()
            self.stages.append(PipelineStage(module, index, num, torch.device("cpu"), group=group))
        stages: Any = self.stages[0] if kind in EACH_ONE else self.stages
        schedule = SCHEDULES[kind](stages, MICROBATCHES, loss_fn=loss_of)
        self.schedule = onefold.pipeline(schedule, tied=[(FIRST, LAST)])

    def train(self) -> None:
        dp = self.mesh.get_local_rank("dp")
        for step in range(STEPS):
            inputs, targets = (each.chunk(2)[dp] for each in batch(step))
            given = (inputs,) if any(stage.is_first for stage in self.stages) else ()
            is_last = any(stage.is_last for stage in self.stages)
            self.schedule.step(*given, **({"target": targets} if is_last else {}))
            for optimizer in self.optimizers:
                optimizer.step()
                optimizer.zero_grad()

    def save(self, folder: Path) -> None:
        onefold.save(folder, self.modules, self.optimizers)

    def load(self, folder: Path) -> None:
        onefold.load(folder, self.modules, self.optimizers)

    def state(self) -> Named:
        """The state of the whole model. Both copies of the shared weight are the same."""
        own = Named()
        for module, optimizer in zip(self.modules, self.optimizers, strict=True):
            own |= state_of(module, optimizer)
        return one_of(of_all(own, self.mesh["pp"]))


def one_of(state: Named) -> Named:
    copies = {name: state.pop(name) for name in list(state) if name.startswith(LAST)}
    first = {name.replace(FIRST, LAST): value for name, value in state.items() if FIRST in name}
    check_bits(copies, first, "copies")
    return state


class Alone:
    """The GPT in one process."""

    def __init__(self, seed: int = 0, *, is_tied: bool = True) -> None:
        self.module = made(seed=seed, is_tied=is_tied)
        self.optimizer = torch.optim.AdamW(self.module.parameters(), lr=LR)
        onefold.shard(self.module, self.optimizer)

    def train(self) -> None:
        for step in range(STEPS):
            inputs, targets = batch(step)
            loss_of(self.module(inputs), targets).backward()
            self.optimizer.step()
            self.optimizer.zero_grad()

    def state(self) -> Named:
        return state_of(self.module, self.optimizer)


def move(rank: int, folder: Path) -> None:
    warnings.simplefilter("error")
    warnings.filterwarnings("ignore", "Logical operators 'and' and 'or' are deprecated")
    mesh = mesh_of(2, 2)
    for kind in KINDS:
        pipe = Pipe(kind, mesh)
        pipe.train()
        state = pipe.state()
        if rank == 0:
            torch.save(state, folder / f"{kind}.pt")
        pipe.save(folder / kind)
        for module in pipe.modules:  # as before ties were noted
            for parameter in module.parameters():
                parameter.__dict__.pop(TIE, None)
        pipe.save(folder / f"{kind}, twice")
    for kind in KINDS:
        for name in ("one", *KINDS, *(f"{each}, twice" for each in KINDS)):
            other = Pipe(kind, mesh, seed=1)
            other.load(folder / name)
            wanted = torch.load(folder / f"{name.partition(',')[0]}.pt")
            check_bits(other.state(), wanted, f"from {name} to {kind}")


@pytest.mark.again(
    "tests/axes/test_pipeline_checkpoint.py::test_checkpoints_move_between_pipelines_ranks_of_data_and_one_process"
)
def test_its_states_move_both_ways_and_are_written_once(tmp_path):
    alone = Alone()
    alone.train()
    torch.save(alone.state(), tmp_path / "one.pt")
    onefold.save(tmp_path / "one", alone.module, alone.optimizer)
    run_processes(4, move, tmp_path)
    for kind in KINDS:
        for name in (kind, f"{kind}, twice"):
            other = Alone(seed=1)
            onefold.load(tmp_path / name, other.module, other.optimizer)
            check_bits(other.state(), torch.load(tmp_path / f"{kind}.pt"), name)
        once = [row.name for row in inspect(tmp_path / kind, verify=True).rows]
        assert once.count(LAST) == 1  # its weight, which lies where that of the first one does
        assert once.count(FIRST) == len(("weight", "master", "exp_avg", "exp_avg_sq", "step"))
        nbytes = [
            sum(path.stat().st_size for path in (tmp_path / name).iterdir())
            for name in (kind, f"{kind}, twice")
        ]
        assert nbytes[1] - nbytes[0] > 14 * other.module.head.weight.numel()


def test_weights_that_differ_do_not_load_as_one(tmp_path):
    apart, tied = Alone(is_tied=False), Alone()
    apart.train()
    onefold.save(tmp_path / "apart", apart.module, apart.optimizer)
    with pytest.raises(CheckpointError, match=f"{LAST}: other values than {FIRST}"):
        onefold.load(tmp_path / "apart", tied.module, tied.optimizer)


class Stage(nn.Module):
    """A stage of four, of which the first and the last call a weight the same."""

    def __init__(self, index: int) -> None:
        super().__init__()
        self.table = nn.Embedding(5, WIDTH) if index in (0, 3) else None
        self.blocks = nn.ModuleDict({str(index): Block()})
        self.index = index

    def forward(self, x: Tensor) -> Tensor:
        x = x if self.table is None or self.index else self.table(x)
        x = next(iter(self.blocks.values()))(x)
        return x if self.table is None or not self.index else x @ self.table.weight.T


def one_name(rank: int, folder: str) -> None:
    mesh, states = mesh_of(2, 1), list[Named]()
    for seed in (0, 1):
        mine = [rank, 3 - rank]
        modules = [seeded(Stage, index, seed=seed) for index in mine]
        optimizers = [torch.optim.AdamW(module.parameters(), lr=LR) for module in modules]
        stages = [
            PipelineStage(module, index, 4, torch.device("cpu"), group=mesh["pp"].get_group())
            for index, module in zip(mine, modules, strict=True)
        ]
        for module, optimizer in zip(modules, optimizers, strict=True):
            onefold.shard(module, optimizer, mesh=mesh["dp"])
        schedule = SCHEDULES["ZBVZeroBubble"](stages, MICROBATCHES, loss_fn=mean_square)
        onefold.pipeline(schedule, tied=["table.weight"])
        if seed == 0:
            words = torch.arange(2 * ROWS) % 5
            schedule.step(
                *((words,) if rank == 0 else ()), **({"target": words} if rank == 0 else {})
            )
            for optimizer in optimizers:
                optimizer.step()
            onefold.save(f"{folder}/saved", modules, optimizers)
        else:
            onefold.load(f"{folder}/saved", modules, optimizers)
        states.append(
            {
                f"{index} {name}": value
                for index, module, optimizer in zip(mine, modules, optimizers, strict=True)
                for name, value in state_of(module, optimizer).items()
            }
        )
    check_bits(states[1], states[0], "two stages of a rank")
    if rank == 0:
        check_bits(
            {"": states[0]["0 table.weight exp_avg"]},
            {"": states[0]["3 table.weight exp_avg"]},
            "copies",
        )


def mean_square(output: Tensor, target: Tensor) -> Tensor:
    return output.square().mean() + target.sum() * 0


def test_two_stages_of_a_rank_may_call_it_the_same(tmp_path):
    run_processes(2, one_name, str(tmp_path))
