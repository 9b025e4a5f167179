"""Law 4: a checkpoint is about parameters. Save anywhere, load anywhere, go on as if unstopped."""

from __future__ import annotations

import io
import json
import os
import pickle
import random
import resource
import subprocess
import tarfile
import warnings
from collections import Counter, OrderedDict, defaultdict, deque, namedtuple
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Shard
from torch.multiprocessing.reductions import StorageWeakRef

import onefold
from onefold import CheckpointError, StateError
from onefold.checkpoint.directory import find
from onefold.checkpoint.source import open_source
from onefold.checkpoint.targets import Targets
from onefold.engine.registry import engine_of
from onefold.foreign import PEERS
from onefold.foreign.dcp_export import export_dcp
from onefold.foreign.unpickling import read_object, read_pickle
from tests.support.models import Model, next_token_loss, token_batches
from tests.support.ranks import run_processes, run_ranks, seeded
from tests.support.rows import again_but, worlds_in_turn

BATCHES = token_batches(4)
SAVED_AFTER = 2
WORLDS = [1, 2, 3, 4]
STAGES = [0, 1, 2, 3]


@dataclass
class Run:
    """A module, its optimizer and schedule, sharded on this rank."""

    module: nn.Module
    optimizer: torch.optim.Optimizer
    schedule: Any = None
    losses: list[float] = field(default_factory=list)

    def train(self, batches: list[Tensor], *, clip: float | None = 1.0) -> Run:
        rank, world = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
        for batch in batches:
            loss = next_token_loss(self.module, batch.chunk(world)[rank])
            loss.backward()
            if clip is not None:
                nn.utils.clip_grad_norm_(self.module.parameters(), clip)
            self.optimizer.step()
            if self.schedule is not None:
                self.schedule.step()
            self.optimizer.zero_grad()
            mean = loss.detach().clone()
            if world > 1:
                dist.all_reduce(mean)
            self.losses.append(mean.item() / world)
        return self

    def save(self, path: Path, **options: Any) -> Run:
        extra = {"schedule": self.schedule, "step": len(self.losses)}
        onefold.save(path, self.module, self.optimizer, extra=extra, **options)
        return self

    def load(self, path: Path) -> Run:
        extra = onefold.load(path, self.module, self.optimizer)
        if self.schedule is not None:
            self.schedule.load_state_dict(extra["schedule"])
        return self

    def state(self) -> dict[str, Tensor]:
        """Everything by name, whole: weights, masters, moments."""
        engine = engine_of(self.module)
        found: dict[str, Tensor] = {}
        for unit in engine.units:
            for p in unit.parameters:
                found[p.fqn] = whole(p.wrap(p.local.detach()))
                found[f"{p.fqn} stepped"] = whole(p.wrap(p.stepped))
                for key, value in self.optimizer.state.get(p.sharded, {}).items():
                    found[f"{p.fqn} {key}"] = whole(value)
        return found

    def assert_own_rows(self, wanted: dict[str, Tensor]) -> None:
        """This rank's rows of everything are those of `wanted`, without a collective."""
        for p in (p for unit in engine_of(self.module).units for p in unit.parameters):
            entry = self.optimizer.state.get(p.sharded, {})
            held = {p.fqn: p.local, f"{p.fqn} stepped": p.stepped}
            held |= {f"{p.fqn} {key}": getattr(v, "_local_tensor", v) for key, v in entry.items()}
            start, stop = p.slot.cut.ranges[p.unit.context.rest_rank]
            for name, value in held.items():
                rows = wanted[name][start:stop] if wanted[name].dim() else wanted[name]
                assert torch.equal(value, rows), name
            assert held.keys() == {n for n in wanted if n == p.fqn or n.startswith(f"{p.fqn} ")}


def whole(tensor: Tensor) -> Tensor:
    return (
        tensor.full_tensor().clone() if isinstance(tensor, dist.tensor.DTensor) else tensor.clone()
    )


def tied_and_frozen() -> nn.Module:
    module = Model(2, tied=True)
    module.blocks[0].up.weight.requires_grad_(False)
    return module


def start(
    stage: int, *, build: Callable[[], nn.Module] = tied_and_frozen,
    dtype: torch.dtype | None = None, optimizer: Any = torch.optim.AdamW, seed: int = 0,
    **options: Any,
) -> Run:  # fmt: skip
    module = seeded(build, seed=seed)
    if dtype is not None:
        module.to(dtype)
    decayed = [p for p in module.parameters() if p.dim() > 1]
    others = [p for p in module.parameters() if p.dim() <= 1]
    groups = [{"params": decayed, "weight_decay": 0.1}, {"params": others}]
    built = optimizer(groups, lr=1e-2)
    onefold.shard(module, built, stage=stage, **options)
    return Run(module, built, torch.optim.lr_scheduler.StepLR(built, 1, gamma=0.7))


# the matrix


def save_and_go_on(
    rank: int, path: Path, stage: int, dtype: Any
) -> tuple[dict[str, Tensor], list[float], dict[str, Tensor]]:
    run = start(stage, dtype=dtype).train(BATCHES[:SAVED_AFTER])
    run.save(path)
    saved = run.state()
    run.train(BATCHES[SAVED_AFTER:])
    return saved, run.losses[SAVED_AFTER:], run.state()


def load_and_go_on(
    rank: int, path: Path, stage: int, dtype: Any, goes_on: bool, saved: dict[str, Tensor]
) -> tuple[list[float], dict[str, Tensor]]:
    run = start(stage, dtype=dtype, seed=7).load(path)
    run.assert_own_rows(saved)
    if not goes_on:
        return [], {}
    run.train(BATCHES[SAVED_AFTER:])
    return run.losses, run.state()


def assert_equal_states(got: dict[str, Tensor], wanted: dict[str, Tensor]) -> None:
    assert got.keys() == wanted.keys()
    for name, value in wanted.items():
        assert torch.equal(got[name], value), name


EVERYWHERE = [(world, stage) for world in WORLDS for stage in STAGES]


def places_from(world: int, stage: int) -> list[tuple[int, int]]:
    """Every world size, each with another stage: where a run saved at `world` and `stage` goes on.

    Over all of `EVERYWHERE` any three of the two worlds and two stages meet, in 64 loads of the
    256 that there are. A load knows nothing of the save but its world, its stage and its cuts.
    """
    return [(there, (world + stage + there) % len(STAGES)) for there in WORLDS]


@again_but("1-0", "2-3", "4-1")
@worlds_in_turn
@pytest.mark.parametrize(("world", "stage"), EVERYWHERE)
def test_a_run_goes_on_at_any_world_size_and_stage(tmp_path, world, stage):
    """Same bits after loading everywhere; same bits of the continued run at the same world size.

    At other world sizes the continued losses agree to 1e-6, looked at where the stage is the same.
    So do those of stage 0 and of others: clipping at stage 0 sums the norm over whole tensors.
    """
    saved, losses, final = run_ranks(world, save_and_go_on, tmp_path / "a", stage, None)[0]
    for there, other in places_from(world, stage):
        goes_on = there == world or other == stage
        for went_on, ended in run_ranks(
            there, load_and_go_on, tmp_path / "a", other, None, goes_on, saved
        ):
            if there == world and (stage == 0) == (other == 0):
                assert went_on == losses
                assert_equal_states(ended, final)
            elif goes_on:
                assert went_on == pytest.approx(losses, rel=1e-6)


@worlds_in_turn
@pytest.mark.parametrize(("world", "stage"), [(1, 3), (2, 1), (3, 3), (4, 0)])
def test_a_run_in_bf16_goes_on_with_its_masters(tmp_path, world, stage):
    """The same law for narrow weights: they, their masters and moments, and the bits of the run."""
    dtype = torch.bfloat16
    saved, losses, final = run_ranks(world, save_and_go_on, tmp_path / "a", stage, dtype)[0]
    for there, other in {(world, stage), *places_from(world, stage)}:
        goes_on = (there, other) == (world, stage)
        for went_on, ended in run_ranks(
            there, load_and_go_on, tmp_path / "a", other, dtype, goes_on, saved
        ):
            if goes_on:
                assert went_on == losses
                assert_equal_states(ended, final)


@pytest.mark.process
def test_real_processes_resume_as_threads_do(tmp_path):
    expected = run_ranks(2, save_and_go_on, tmp_path / "threads", 3, None)[0][1]
    run_processes(2, save_in_process, tmp_path / "saved")
    run_processes(3, load_in_process, tmp_path / "saved", expected)


def save_in_process(rank: int, path: Path) -> None:
    start(3).train(BATCHES[:SAVED_AFTER]).save(path)


def load_in_process(rank: int, path: Path, losses: list[float]) -> None:
    assert start(2).load(path).train(BATCHES[SAVED_AFTER:]).losses == pytest.approx(
        losses, rel=1e-6
    )


def test_precisions_and_units_may_differ_from_those_of_the_save(tmp_path):
    """bf16 weights with masters load into fp32 weights, and back, through the masters."""

    def body(rank):
        narrow = start(3, dtype=torch.bfloat16).train(BATCHES[:2]).save(tmp_path / "narrow")
        wide = start(1, seed=3).load(tmp_path / "narrow")
        wide.save(tmp_path / "wide")
        back = start(
            2, dtype=torch.bfloat16, seed=4, units=lambda module: isinstance(module, nn.Linear)
        )
        back.load(tmp_path / "wide")
        return narrow.state(), wide.state(), back.state()

    for narrow, wide, back in run_ranks(2, body):
        assert_equal_states(back, narrow)
        for name, value in wide.items():
            wanted = narrow.get(f"{name} stepped", narrow.get(name))
            assert torch.equal(value.float(), wanted.float()), name


def test_without_a_process_group_nothing_else_is_needed(tmp_path):
    run = start(3).train(BATCHES[:2]).save(tmp_path / "a")
    again = start(3, seed=5).load(tmp_path / "a")
    assert_equal_states(again.state(), run.state())
    assert again.train(BATCHES[2:]).losses == run.train(BATCHES[2:]).losses[2:]


@again_but("SGD", "Muon")
@pytest.mark.parametrize("kind", ["SGD", "Adagrad", "Adafactor", "Muon"])
def test_other_optimizers_resume_too(tmp_path, kind):
    """Momentum without second moments; states of odd shapes; whole matrices on their owners."""

    def build():
        return nn.Sequential(nn.Linear(6, 10, bias=False), nn.Linear(10, 5, bias=False))

    def make():
        module = seeded(build)
        options = {"SGD": {"momentum": 0.9}}.get(kind, {})
        optimizer = getattr(torch.optim, kind)(module.parameters(), lr=1e-2, **options)
        onefold.shard(module, optimizer, stage=3)
        return module, optimizer

    def step(module, optimizer, seed):
        generator = torch.Generator().manual_seed(seed)
        module(torch.randn(4, 6, generator=generator)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    def body(rank, world, path, loads):
        module, optimizer = make()
        if loads:
            onefold.load(path, module, optimizer)
        else:
            step(module, optimizer, 1)
            onefold.save(path, module, optimizer)
        step(module, optimizer, 2)
        with onefold.unsharded(module):
            return [p.detach().clone() for p in module.parameters()]

    for world in (1, 2, 3):
        path = tmp_path / f"{world}"
        wanted = run_ranks(world, body, world, path, False)[0]
        for other in (1, 2, 3):
            for got in run_ranks(other, body, other, path, True):
                for a, b in zip(got, wanted, strict=True):
                    torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)
                    assert other != world or torch.equal(a, b)


# everything that belongs to a run


class Noisy(nn.Module):
    """Dropout, a running mean that each rank has for itself, a state of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.norm = nn.BatchNorm1d(4)
        self.register_buffer("scratch", torch.zeros(3), persistent=False)
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return self.norm(nn.functional.dropout(self.layer(x), 0.5)).square().mean()

    def get_extra_state(self) -> object:
        return {"calls": self.calls}

    def set_extra_state(self, state: Any) -> None:
        self.calls = state["calls"]


def test_buffers_extra_state_and_generators_go_on(tmp_path):
    """One process: dropout and Python's and numpy's generators draw what they would have drawn."""
    import numpy

    def make():
        module = seeded(Noisy)
        optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
        onefold.shard(module, optimizer, stage=3)
        return module, optimizer

    def step(module, optimizer):
        loss = module(torch.randn(8, 4))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.item(), random.random(), float(numpy.random.rand())

    module, optimizer = make()
    step(module, optimizer)
    onefold.save(tmp_path / "a", module, optimizer, extra=[1, "two", torch.ones(3)])
    wanted = [step(module, optimizer) for _ in range(2)]
    again, optimizer = make()
    extra = onefold.load(tmp_path / "a", again, optimizer)
    assert extra[:2] == [1, "two"]
    assert torch.equal(extra[2], torch.ones(3))
    assert again.calls == 1
    assert [step(again, optimizer) for _ in range(2)] == wanted
    for name, buffer in module.named_buffers():
        assert torch.equal(dict(again.named_buffers())[name], buffer), name


class Sized(nn.Module):
    """A buffer that gets its size in the first forward, as observers of quantization have it."""

    def __init__(self, is_empty: bool):
        super().__init__()
        self.layer = nn.Linear(8, 4)
        self.register_buffer("seen", torch.empty(0) if is_empty else None)

    def forward(self, x: Tensor) -> Tensor:
        if self.seen is None or not self.seen.numel():
            self.seen = x.detach().mean(0)
        return self.layer(x - self.seen)

    def _load_from_state_dict(self, state: dict[str, Any], prefix: str, *others: Any) -> None:
        if prefix + "seen" in state:
            self.seen = torch.empty_like(state[prefix + "seen"])
        super()._load_from_state_dict(state, prefix, *others)


@worlds_in_turn
@pytest.mark.parametrize("is_empty", [True, False])
@pytest.mark.parametrize("way", ["load", "load_pretrained", "load_pretrained first", "state dict"])
@pytest.mark.parametrize(("world_size", "stage"), [(1, 3), (3, 0), (3, 3)])
def test_buffers_that_their_module_sizes_are_loaded_before_its_first_forward(
    tmp_path, world_size, stage, way, is_empty
):
    x = torch.randn(5, 8, generator=torch.Generator().manual_seed(0))

    def body(rank: int) -> None:
        module = seeded(Sized, is_empty)
        onefold.shard(module, stage=stage)
        wanted, path = module(x).detach(), tmp_path / "saved"
        (onefold.save if way == "load" else onefold.save_pretrained)(
            *((path, module) if way == "load" else (module, path))
        )
        state = onefold.full_state_dict(module, rank0_only=False)
        again = seeded(Sized, is_empty, seed=1)
        if way == "load_pretrained first":
            onefold.load_pretrained(again, path)
        onefold.shard(again, stage=stage)
        if way == "load":
            onefold.load(path, again)
        elif way == "load_pretrained":
            onefold.load_pretrained(again, path)
        elif way == "state dict":
            again.load_state_dict(state)
        assert torch.equal(again.seen, state["seen"])
        assert torch.equal(again(x), wanted)

    run_ranks(world_size, body)


def test_a_buffer_of_another_size_is_refused_where_its_module_cannot_size_it(tmp_path):
    onefold.save(tmp_path / "saved", onefold.shard(nn.BatchNorm1d(4, affine=False)))
    other = onefold.shard(nn.BatchNorm1d(5, affine=False))
    other.running_mean.fill_(3)
    with pytest.raises(CheckpointError, match=r"running_mean: \[5\] in the module, \[4\]"):
        onefold.load(tmp_path / "saved", other)
    assert torch.equal(other.running_mean, torch.full((5,), 3.0))


def test_buffers_that_differ_between_ranks_come_back_to_their_ranks(tmp_path):
    def body(rank, loads):
        module = seeded(Noisy)
        onefold.shard(module, stage=3)
        if loads:
            onefold.load(tmp_path / "a", module)
        else:
            module.norm.running_mean.fill_(rank + 1)
            onefold.save(tmp_path / "a", module)
        return module.norm.running_mean.clone()

    run_ranks(2, body, False)
    assert [mean[0].item() for mean in run_ranks(2, body, True)] == [1, 2]
    assert [mean[0].item() for mean in run_ranks(3, body, True)] == [
        1,
        2,
        1,
    ]  # a new rank: rank 0's


def test_each_rank_gets_its_own_extra_and_new_ranks_get_one_in_turn(tmp_path):
    def body(rank, loads):
        module = seeded(Model)
        onefold.shard(module, stage=3)
        if loads:
            return onefold.load(tmp_path / "a", module)
        onefold.save(tmp_path / "a", module, extra={"rank": rank})
        return None

    run_ranks(2, body, False)
    assert run_ranks(3, body, True) == [{"rank": 0}, {"rank": 1}, {"rank": 0}]


def test_the_step_count_of_the_report_goes_on(tmp_path):
    start(3).train(BATCHES[:2]).save(tmp_path / "a")
    assert onefold.report(start(3).load(tmp_path / "a").module).steps == 2


class Scaled(Model):
    """With parameters without rows, which every rank steps for itself."""

    def __init__(self) -> None:
        super().__init__(1)
        self.scale = nn.Parameter(torch.tensor(1.0))
        self.shift = nn.Parameter(torch.tensor(0.1))

    def forward(self, tokens: Tensor) -> Tensor:
        return super().forward(tokens) * self.scale + self.shift


@again_but("0-AdamW", "3-SGD")
@worlds_in_turn
@pytest.mark.parametrize("kind", ["AdamW", "NAdam", "ASGD", "SGD"])
@pytest.mark.parametrize("stage", [0, 3])
def test_parameters_without_rows_resume_with_their_numbers(tmp_path, stage, kind):
    def save(rank):
        run = start(stage, build=Scaled, optimizer=getattr(torch.optim, kind)).train(BATCHES[:2])
        return run.save(tmp_path / "a").train(BATCHES[2:]).state()

    def load(rank):
        run = start(stage, build=Scaled, optimizer=getattr(torch.optim, kind), seed=3)
        return run.load(tmp_path / "a").train(BATCHES[2:]).state()

    wanted = run_ranks(2, save)[0]
    assert_equal_states(run_ranks(2, load)[0], wanted)


def test_numbers_of_numpy_are_saved_as_numbers_and_what_cannot_be_read_is_refused(tmp_path):
    import numpy

    def body(rank):
        run = start(3).train(BATCHES[:1])
        run.optimizer.param_groups[0]["lr"] = numpy.float64(0.125)
        run.save(tmp_path / "a")
        again = start(3, seed=2).load(tmp_path / "a")
        assert again.optimizer.param_groups[0]["lr"] == 0.125
        assert type(again.optimizer.param_groups[0]["lr"]) is float
        run.optimizer.param_groups[0]["nested"] = {"warmup": [1, 2], "kind": "cosine"}
        run.save(tmp_path / "b")
        again.load(tmp_path / "b")
        nested = {"warmup": [1, 2], "kind": "cosine"}
        assert again.optimizer.param_groups[0]["nested"] == nested
        run.optimizer.param_groups[0]["path"] = Path("somewhere")
        with pytest.raises(CheckpointError, match=r"optim\.param_groups"):
            run.save(tmp_path / "c")

    run_ranks(2, body)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a", "b"]


def test_extra_comes_back_in_the_types_that_went_in_or_is_refused_by_its_place(tmp_path):
    """MultiStepLR keeps its milestones in a Counter, and needs one hours after a resume."""
    kept = {
        "counter": Counter({2: 1, 3: 2}),
        "ordered": OrderedDict(b=1, a=[OrderedDict(), (1, b"x")]),
        "others": [torch.Size([2]), {1, 2}, torch.float16, 1 + 2j, None],
    }
    refused = {
        "defaultdict": defaultdict(list),
        "deque": deque([1]),
        "Pair": namedtuple("Pair", "a b")(1, 2),
        "Table": type("Table", (dict,), {})(),
    }
    module = onefold.shard(seeded(lambda: nn.Linear(2, 2)), stage=3)
    onefold.save(tmp_path / "kept", module, extra=kept)
    again = onefold.load(tmp_path / "kept", module)
    assert again == kept
    assert repr(again) == repr(kept)
    for kind, value in refused.items():
        with pytest.raises(CheckpointError, match=rf"a {kind} in extra\['a'\]\[0\].*\n?.*hint:"):
            onefold.save(tmp_path / kind, module, extra={"a": [value]})


def test_every_schedule_of_torch_goes_on_from_extra(tmp_path):
    rates = torch.optim.lr_scheduler
    kinds = {
        "MultiStepLR": lambda o: rates.SequentialLR(
            o, [rates.LinearLR(o, 0.1, total_iters=3), rates.MultiStepLR(o, [1, 2])], [3]
        ),
        "ChainedScheduler": lambda o: rates.ChainedScheduler(
            [rates.ExponentialLR(o, 0.9), rates.MultiStepLR(o, [4])]
        ),
        "OneCycleLR": lambda o: rates.OneCycleLR(o, 0.1, 9),
        "CyclicLR": lambda o: rates.CyclicLR(o, 0.01, 0.1, 2),
        "CosineAnnealingWarmRestarts": lambda o: rates.CosineAnnealingWarmRestarts(o, 3),
        "LambdaLR": lambda o: rates.LambdaLR(o, lambda epoch: 0.9**epoch),
        "PolynomialLR": lambda o: rates.PolynomialLR(o, 7),
    }
    module = onefold.shard(seeded(lambda: nn.Linear(2, 2)), stage=3)

    def ready(make):
        optimizer = torch.optim.SGD(module.parameters(), 0.1, momentum=0.9)
        return optimizer, make(optimizer)

    def followed(optimizer, schedule, count):
        found = []
        for _ in range(count):
            optimizer.step()
            schedule.step()
            found.append(optimizer.param_groups[0]["lr"])
        return found

    for name, make in kinds.items():
        first = ready(make)
        followed(*first, 2)
        extra = {"schedule": first[1]}
        onefold.save(tmp_path / name, module, first[0], extra=extra)
        optimizer, schedule = ready(make)
        schedule.load_state_dict(onefold.load(tmp_path / name, module, optimizer)["schedule"])
        assert followed(optimizer, schedule, 5) == followed(*first, 5)


def test_a_save_that_goes_on_is_not_taken_for_one_that_was_cut_off(tmp_path):
    """Two modules may save beside each other, both deleting what is old."""
    from onefold.checkpoint.directory import Draft, prune

    alive = Draft(tmp_path / "other")
    alive.begin()
    (tmp_path / ".cut-off.writing").mkdir()
    run = start(3).train(BATCHES[:1]).save(tmp_path / "a", keep=1)
    assert alive.folder.exists()
    assert not (tmp_path / ".cut-off.writing").exists()
    with pytest.raises(CheckpointError, match="nobody to be writing"):
        run.save(tmp_path / "other")
    alive.abandon()
    run.save(tmp_path / "other")
    (tmp_path / "latest").symlink_to(tmp_path / "a")
    prune(tmp_path / "other", keep=1)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["latest", "other"]


def test_saving_changes_nothing(tmp_path):
    """A run that saves after every step is bitwise the run that does not."""

    def body(rank, saves):
        run = start(3, dtype=torch.bfloat16)
        for i, batch in enumerate(BATCHES):
            run.train([batch])
            if saves:
                run.save(tmp_path / f"{i}", wait=i % 2 == 0)
        return run.losses, run.state()

    for (losses, state), (others, other) in zip(
        run_ranks(2, body, False), run_ranks(2, body, True), strict=True
    ):
        assert losses == others
        assert_equal_states(other, state)


def test_loading_needs_no_second_copy_of_the_moments(tmp_path):
    """States are read to where they are stepped: the next step takes the tensors as they lie."""
    start(3).train(BATCHES[:1]).save(tmp_path / "a")
    run = start(3, seed=2).load(tmp_path / "a")
    before = {p: e["exp_avg"]._local_tensor.data_ptr() if hasattr(e["exp_avg"], "_local_tensor")
              else e["exp_avg"].data_ptr() for p, e in run.optimizer.state.items()}  # fmt: skip
    run.train(BATCHES[1:2])
    for p, entry in run.optimizer.state.items():
        assert getattr(entry["exp_avg"], "_local_tensor", entry["exp_avg"]).data_ptr() == before[p]


@pytest.mark.parametrize("kind", ["AdamW", "Adagrad", "Muon"])
def test_old_states_are_freed_before_new_ones_take_memory(tmp_path, monkeypatch, kind):
    module = seeded(lambda: nn.Sequential(nn.Linear(6, 10, bias=False), nn.Linear(10, 5, False)))
    optimizer = getattr(torch.optim, kind)(module.parameters(), lr=1e-2)
    onefold.shard(module, optimizer, stage=3)
    for _ in range(2):
        module(torch.ones(4, 6)).square().mean().backward()
        optimizer.step()
    onefold.save(tmp_path / "a", module, optimizer)
    values = [v for entry in optimizer.state.values() for v in entry.values()]
    locals_ = [getattr(v, "_local_tensor", v) for v in values if isinstance(v, Tensor) and v.ndim]
    old = [StorageWeakRef(tensor.untyped_storage()) for tensor in locals_]
    assert old
    del values, locals_
    alive = list[bool]()
    read = Targets._state_target

    def note(*args: Any) -> Any:
        alive.extend(not storage.expired() for storage in old)
        return read(*args)

    monkeypatch.setattr(Targets, "_state_target", note)
    onefold.load(tmp_path / "a", module, optimizer)
    assert alive
    assert not any(alive)


def test_a_tensor_of_pieces_in_a_param_group_comes_back_and_a_partial_sum_is_refused(tmp_path):
    def body(rank: int) -> tuple[Tensor, Tensor]:
        module = seeded(lambda: nn.Linear(3, 2))
        optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
        onefold.shard(module, optimizer, stage=3)
        mesh, group = DeviceMesh("cpu", [0, 1]), optimizer.param_groups[0]
        own = torch.arange(3 - rank) + 3 * rank  # 3 rows on rank 0, 2 on rank 1
        group["scales"] = DTensor.from_local(own, mesh, [Shard(0)], shape=(5,), stride=(1,))
        onefold.save(tmp_path / "a", module, optimizer)
        kept = group["scales"]
        group["scales"] = DTensor.from_local(own[:2], mesh, [Partial()])
        with pytest.raises(StateError, match=r"ranks hold its values, got .*Partial"):
            onefold.save(tmp_path / "b", module, optimizer)
        group["scales"] = kept.zero_()
        onefold.load(tmp_path / "a", module, optimizer)
        assert group["scales"] is kept
        group["scales"] = torch.zeros(5, dtype=torch.int64)
        onefold.load(tmp_path / "a", module, optimizer)
        return kept.to_local(), group["scales"]

    for rank, (own, whole) in enumerate(run_ranks(2, body)):
        assert torch.equal(whole, torch.arange(5))
        assert torch.equal(own, whole.split(3)[rank])


def accumulate(run: Run, micro_batches: list[Tensor], *, ends: bool) -> None:
    """Micro-batches of one step, up to its end or not."""
    rank, world = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    for i, batch in enumerate(micro_batches):
        is_last = ends and i + 1 == len(micro_batches)
        with nullcontext() if is_last else onefold.accumulate(run.module):
            (next_token_loss(run.module, batch.chunk(world)[rank]) / 4).backward()
    if ends:
        nn.utils.clip_grad_norm_(run.module.parameters(), 1.0)
        run.optimizer.step()
        run.optimizer.zero_grad()


BETWEEN = [(world, stage, None) for world in (1, 2, 3) for stage in STAGES] + [
    (1, 3, torch.bfloat16), (2, 0, torch.bfloat16), (2, 2, torch.bfloat16),
    (3, 1, torch.bfloat16), (3, 3, torch.bfloat16),
]  # fmt: skip


@again_but("1-0-None", "3-1-None", "1-3-dtype12")
@worlds_in_turn
@pytest.mark.parametrize(("world", "stage", "dtype"), BETWEEN)
def test_a_save_between_micro_batches_goes_on_there(tmp_path, world, stage, dtype):
    """Gradients so far are part of the run: the step ends with the bits it would have had.

    In fp32 also at a stage that shards what this one keeps, or the reverse, and at another world
    size and stage in turn.
    """

    def save(rank):
        run = start(stage, dtype=dtype).train(BATCHES[:1])
        accumulate(run, BATCHES[:2], ends=False)
        run.save(tmp_path / "saved")
        accumulate(run, BATCHES[2:], ends=True)
        return run.state()

    def load(rank, other_stage):
        run = start(other_stage, dtype=dtype, seed=3)
        accumulate(run, BATCHES[:1], ends=False)  # whose gradients go
        run.load(tmp_path / "saved")
        accumulate(run, BATCHES[2:], ends=True)
        return run.state()

    wanted = run_ranks(world, save)[0]
    for got in run_ranks(world, load, stage):
        assert_equal_states(got, wanted)
    elsewhere = [(world, 0 if stage == 3 else 3), (1 + world % 3, (stage + world) % len(STAGES))]
    for other_world, other in elsewhere if dtype is None else []:
        for got in run_ranks(other_world, load, other):
            for name, value in wanted.items():
                torch.testing.assert_close(got[name], value, rtol=1e-5, atol=1e-6, msg=name)


@again_but("3")
@pytest.mark.parametrize("stage", [0, 1, 3])
def test_what_a_failed_backward_has_left_is_not_saved(tmp_path, stage):
    """Ranks train other layers, so some have nothing of a unit to send."""

    class Either(nn.Module):
        def __init__(self):
            super().__init__()
            self.one, self.two = nn.Linear(8, 8), nn.Linear(8, 8)

        def forward(self, x):
            return self.one(x) if x.detach().sum() > 0 else self.two(x)

    def fail(grad):
        raise ZeroDivisionError

    def sharded():
        module = seeded(lambda: nn.Sequential(Either(), nn.Linear(8, 8)))
        optimizer = torch.optim.SGD(module.parameters())
        return onefold.shard(module, optimizer, stage=stage), optimizer

    def body(rank):
        run, other = sharded(), sharded()
        failing = torch.full((2, 8), 1.0 - 2 * rank).requires_grad_()
        failing.register_hook(fail)
        with pytest.raises(ZeroDivisionError):
            run[0](failing).sum().backward()
        run[0].zero_grad()
        onefold.save(tmp_path / "run", *run)
        onefold.load(tmp_path / "run", *other)
        for module, _ in (run, other):
            module(torch.full((2, 8), 1.0)).sum().backward()
        return [[p.grad for p in module.parameters()] for module, _ in (run, other)]

    assert_same_gradients(run_ranks(2, body))


def assert_same_gradients(ranks):
    for wanted, got in ranks:
        assert [g is None for g in got] == [g is None for g in wanted]
        for a, b in zip(wanted, got, strict=True):
            assert a is None or torch.equal(*(getattr(g, "_local_tensor", g) for g in (a, b)))


@again_but("3")
@pytest.mark.parametrize("stage", [0, 1, 3])
def test_a_load_after_a_failed_backward_keeps_the_gradients_of_the_checkpoint(tmp_path, stage):
    def fail(grad):
        raise ZeroDivisionError

    def body(rank, fails):
        module = seeded(lambda: nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)))
        optimizer = torch.optim.SGD(module.parameters())
        onefold.shard(module, optimizer, stage=stage)
        rows = torch.full((2, 8), 1.0 + rank)
        with onefold.accumulate(module):
            module(rows).sum().backward()
        onefold.save(tmp_path / str(fails), module, optimizer)
        if fails:
            failing = rows.clone().requires_grad_()
            failing.register_hook(fail)
            with pytest.raises(ZeroDivisionError):
                module(failing).sum().backward()
        onefold.load(tmp_path / str(fails), module, optimizer)
        module(rows).sum().backward()
        return [p.grad for p in module.parameters()]

    assert_same_gradients(zip(run_ranks(2, body, False), run_ranks(2, body, True), strict=True))


def test_gradients_that_have_been_stepped_are_not_saved(tmp_path):
    def body(rank):
        run = start(3)
        next_token_loss(run.module, BATCHES[0]).backward()
        run.save(tmp_path / "before")
        run.optimizer.step()
        run.save(tmp_path / "after")

    run_ranks(2, body)
    for name, has_gradients in (("before", True), ("after", False)):
        names = open_source(find(tmp_path / name)[0]).tensors
        assert any(name.startswith("grad.") for name in names) == has_gradients


AFTER_STEP = [
    (world, stage, offload)
    for world in (1, 2)
    for stage in (0, 1, 3)
    for offload in (None, "optimizer", "cpu")
    if offload is None or stage > (0 if offload == "optimizer" else 2)
]


@again_but("1-1-None-True", "1-3-optimizer-False", "2-1-optimizer-True", "2-3-cpu-False")
@worlds_in_turn
@pytest.mark.parametrize("keeps", [False, True])
@pytest.mark.parametrize(("world", "stage", "offload"), AFTER_STEP)
def test_a_load_brings_back_gradients_since_the_last_step_and_no_others(
    tmp_path, world, stage, offload, keeps
):
    """As in a new process: those that a step has used are None, also where the run kept them."""

    def body(rank):
        run = start(stage, offload=offload)
        trained = [p for p in run.module.parameters() if p.requires_grad]

        def backward(number):
            next_token_loss(run.module, BATCHES[number].chunk(world)[rank]).backward()

        backward(0)
        run.optimizer.step()
        if not keeps:
            run.optimizer.zero_grad()
        run.save(tmp_path / "stepped").load(tmp_path / "stepped")
        assert all(p.grad is None for p in trained)
        backward(1)
        wanted = [whole(p.grad) for p in trained]
        run.save(tmp_path / "since")
        backward(2)
        run.load(tmp_path / "since")
        assert all(torch.equal(whole(p.grad), g) for p, g in zip(trained, wanted, strict=True))
        run.load(tmp_path / "stepped")
        assert all(p.grad is None for p in trained)

    run_ranks(world, body)


# what ranks read and write


def test_every_rank_writes_its_own_pieces_once(tmp_path):
    """The files together hold each byte once, and no rank writes much more than its share."""

    def body(rank):
        start(3, build=lambda: Model(3)).train(BATCHES[:1]).save(tmp_path / "a")

    run_ranks(4, body)
    numel = sum(p.numel() for p in Model(3).parameters())
    sizes = [path.stat().st_size for path in (tmp_path / "a").glob("*.safetensors")]
    assert len(sizes) == 4
    assert max(sizes) - min(sizes) < 0.1 * max(sizes)
    saved = open_source(find(tmp_path / "a")[0]).tensors.items()
    stored = sum(
        prod(piece.sizes) * tensor.dtype.itemsize
        for name, tensor in saved
        for piece in tensor.pieces
        if not name.startswith("rank.")
    )
    steps = len(list(Model(3).parameters())) * 4  # one step count a parameter
    assert stored == 3 * 4 * numel + steps


def test_a_rank_reads_no_more_than_its_rows_and_block_ends(tmp_path, monkeypatch):
    """Half the ranks hold twice the rows, and read the bytes of those rows and no others."""
    from onefold.checkpoint import checked_files

    width = 2048
    build = lambda: nn.Sequential(*(nn.Linear(width, width, bias=False) for _ in range(2)))

    def body(rank, stage, loads):
        module = seeded(build)
        onefold.shard(module, stage=stage)
        if loads:
            onefold.load(tmp_path / "a", module)
        else:
            onefold.save(tmp_path / "a", module)

    run_ranks(4, body, 3, False)
    read: list[int] = []
    real = checked_files.os.preadv
    monkeypatch.setattr(checked_files.os, "preadv", lambda *a: read.append(real(*a)) or read[-1])
    run_ranks(2, body, 3, True)
    whole_model = 2 * width * width * 4
    assert whole_model <= sum(read) <= whole_model * 1.3  # of both ranks together
    read.clear()
    run_ranks(2, body, 0, True)
    assert 2 * whole_model <= sum(read) <= 2 * whole_model * 1.3


@again_but("3")
@pytest.mark.parametrize("world", [1, 3])
def test_files_of_many_chunks_come_back_from_any_cut(tmp_path, world, monkeypatch):
    """Past the page cache and read ahead, with archives' headers across chunks; and without."""
    from onefold.checkpoint import direct_io
    from onefold.tier import disk as files

    build = lambda: nn.ModuleList(nn.Linear(511, 1 + 97 * i) for i in range(18))

    def save(rank, name, wait):
        module = seeded(build)
        onefold.shard(module, stage=3)
        onefold.save(tmp_path / name, module, wait=wait).wait()
        with onefold.unsharded(module):
            return [p.detach().clone() for p in module.parameters()]

    def load(rank, name):
        module = seeded(build, seed=4)
        onefold.shard(module, stage=1)
        onefold.load(tmp_path / name, module)
        with onefold.unsharded(module):
            return [p.detach().clone() for p in module.parameters()]

    wanted = run_ranks(world, save, "direct", True)[0]
    assert sum(p.nbytes for p in wanted) > 14 * direct_io.READ_CHUNK_NBYTES
    run_ranks(world, save, "cached", False)
    monkeypatch.setattr(files, "_O_DIRECT", 0)
    run_ranks(world, save, "without", True)
    for name in ("direct", "cached", "without"):
        if name == "direct":
            monkeypatch.undo()
        for other in (1, 2, 3) if name == "direct" else (2,):
            for got in run_ranks(other, load, name):
                for a, b in zip(got, wanted, strict=True):
                    assert torch.equal(a, b)


# bad input


def refused(path: Path, match: str, *, stage: int = 3, world: int = 2, **options: Any) -> None:
    """Loading raises on every rank, and changes nothing."""

    def body(rank):
        run = start(stage, **options)
        before = run.state()
        with pytest.raises(CheckpointError, match=match):
            run.load(path)
        assert_equal_states(run.state(), before)
        run.train(BATCHES[:1])

    run_ranks(world, body)


@pytest.fixture
def saved(tmp_path):
    run_ranks(2, lambda rank: start(3).train(BATCHES[:1]).save(tmp_path / "runs" / "saved"))
    return tmp_path / "runs" / "saved"


def test_a_directory_without_a_checkpoint_is_refused(tmp_path):
    (tmp_path / "empty").mkdir()
    (tmp_path / "file").write_text("no checkpoint")
    for name, got in (("empty", "no checkpoint in it"), ("file", "a file"), ("gone", "nothing")):
        refused(tmp_path / name, got)


@worlds_in_turn
@pytest.mark.parametrize("world", [1, 3])
@pytest.mark.parametrize("held", ["nothing", "no entry", "a draft", "a broken checkpoint"])
def test_a_run_starts_anew_where_there_is_no_complete_checkpoint(tmp_path, world, held):
    runs = tmp_path / "runs"
    if held != "nothing":
        runs.mkdir()
    if held == "a draft":
        (runs / ".step-1.writing").mkdir()
        (runs / ".step-1.writing" / "rank-00000.safetensors").write_bytes(b"half")
    if held == "a broken checkpoint":
        start(3).save(runs / "step-1")
        (runs / "step-1" / "manifest.json").unlink()

    def body(rank):
        run = start(3).train(BATCHES[:1])
        before = run.state()
        extra = onefold.load(runs, run.module, run.optimizer, missing_ok=True)
        assert_equal_states(run.state(), before)
        return extra, run.train(BATCHES[1:2]).losses

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        assert onefold.latest(runs) is None
        results = run_ranks(world, body)
    said = [str(warning.message) for warning in caught]
    if held == "a broken checkpoint":
        assert [line for line in said if "passed over step-1" in line] == said != []
    else:
        assert said == []
    assert [extra for extra, _ in results] == [{}] * world
    plain = run_ranks(world, lambda rank: start(3).train(BATCHES[:2]).losses)
    assert [losses for _, losses in results] == plain


def test_the_latest_is_the_newest_complete_checkpoint_which_missing_ok_loads_too(tmp_path):
    def save(rank):
        run = start(3)
        for step in (1, 2, 3):
            run.train([BATCHES[step]]).save(tmp_path / f"step-{step}")

    run_ranks(3, save)
    (tmp_path / "step-3" / "rank-00001.safetensors").unlink()
    assert onefold.latest(tmp_path) == tmp_path / "step-2"
    assert onefold.latest(tmp_path / "step-1") == tmp_path / "step-1"
    assert onefold.latest(tmp_path / "step-3") is None

    def load(rank):
        run = start(3)
        return onefold.load(tmp_path, run.module, run.optimizer, missing_ok=True)["step"]

    with pytest.warns(UserWarning, match="loaded step-2, passed over step-3"):
        assert run_ranks(3, load) == [2, 2, 2]


def test_a_file_in_the_place_of_a_directory_and_ranks_that_ask_differently_are_refused(tmp_path):
    (tmp_path / "file").write_text("no checkpoint")
    with pytest.raises(CheckpointError, match="a file"):
        onefold.latest(tmp_path / "file")

    def body(rank):
        run = start(3)
        with pytest.raises(CheckpointError, match="a file"):
            onefold.load(tmp_path / "file", run.module, run.optimizer, missing_ok=True)
        with pytest.raises(CheckpointError, match="missing_ok=True"):
            onefold.load(tmp_path / "gone", run.module, run.optimizer, missing_ok=rank != 1)
        run.train(BATCHES[:1])

    run_ranks(3, body)


def test_a_newer_format_is_refused(saved, monkeypatch):
    from onefold.checkpoint.directory import FORMAT, read_manifest

    found = read_manifest(saved)
    object.__setattr__(found, "format", FORMAT + 1)
    (saved / "manifest.json").write_bytes(found.encode())
    refused(saved, "format 2")


def test_all_mismatches_come_in_one_message(saved):
    def other():
        module = Model(3, tied=False)
        module.norm = nn.LayerNorm(16, bias=False)
        module.embed = nn.Embedding(51, 16)
        return module

    def body(rank):
        run = start(3, build=other)
        with pytest.raises(CheckpointError) as caught:
            run.load(saved)
        return str(caught.value)

    for message in run_ranks(2, body):
        assert "embed.weight: [51, 16] in the module, [50, 16] in the checkpoint" in message
        assert "blocks.2.up.weight: [33, 16] in the module, not in the checkpoint" in message
        assert "norm.bias: in the checkpoint, not in the module" in message


def test_another_optimizer_is_refused(saved):
    told = r"SGD of 2 param groups to load, .*AdamW of 2 param groups in the checkpoint"
    refused(saved, told, optimizer=torch.optim.SGD)


def test_another_number_of_param_groups_is_refused(saved):
    def body(rank):
        module = seeded(tied_and_frozen)
        optimizer = torch.optim.AdamW(module.parameters())
        onefold.shard(module, optimizer, stage=3)
        with pytest.raises(CheckpointError, match=r"of 1 param group to load, .* of 2 param"):
            onefold.load(saved, module, optimizer)

    run_ranks(2, body)


def test_groups_of_other_parameters_are_refused(saved):
    def body(rank):
        module = seeded(tied_and_frozen)
        params = list(module.parameters())
        optimizer = torch.optim.AdamW([{"params": params[:3]}, {"params": params[3:]}])
        onefold.shard(module, optimizer, stage=3)
        with pytest.raises(CheckpointError, match=r"in param group \d of the checkpoint alone"):
            onefold.load(saved, module, optimizer)

    run_ranks(2, body)


def test_an_optimizer_that_was_not_saved_is_refused(tmp_path):
    def body(rank):
        run = start(3)
        onefold.save(tmp_path / "weights", run.module)
        with pytest.raises(CheckpointError, match="an optimizer to load, none in the checkpoint"):
            run.load(tmp_path / "weights")
        onefold.load(tmp_path / "weights", run.module)

    run_ranks(2, body)


def test_an_existing_target_is_refused_and_untouched(saved):
    before = {path.name: path.read_bytes() for path in saved.iterdir()}

    def body(rank):
        with pytest.raises(CheckpointError, match="not to exist yet"):
            start(3).save(saved)

    run_ranks(2, body)
    assert {path.name: path.read_bytes() for path in saved.iterdir()} == before


def test_a_target_that_cannot_be_written_is_refused(tmp_path):
    (tmp_path / "file").write_text("")

    def body(rank):
        with pytest.raises(CheckpointError, match="to write checkpoints in"):
            start(3).save(tmp_path / "file" / "saved")

    run_ranks(2, body)


def test_ranks_that_pass_different_directories_are_refused(tmp_path):
    def body(rank):
        run = start(3)
        with pytest.raises(CheckpointError, match="the same directory, wait and keep"):
            run.save(tmp_path / f"rank{rank}")
        with pytest.raises(CheckpointError, match="the same directory, wait and keep"):
            run.save(tmp_path / "a", wait=rank == 0)
        run.train(BATCHES[:1])

    run_ranks(2, body)
    assert list(tmp_path.iterdir()) == []


def test_ranks_that_load_from_different_directories_are_refused(saved):
    def body(rank):
        run = start(3)
        with pytest.raises(CheckpointError, match="the same directory on every rank"):
            run.load(saved if rank else saved.parent)
        run.train(BATCHES[:1])

    run_ranks(2, body)


def test_a_mistake_on_one_rank_does_not_leave_the_others_waiting(tmp_path):
    class Broken:
        def state_dict(self) -> object:
            raise ZeroDivisionError("a bug of the user's")

    def body(rank):
        run = start(3)
        error = CheckpointError if rank == 0 else ZeroDivisionError
        with pytest.raises(error, match="a bug of the user's"):
            onefold.save(tmp_path / "a", run.module, extra=Broken() if rank == 1 else None)
        run.train(BATCHES[:1])

    run_ranks(2, body)
    assert list(tmp_path.iterdir()) == []


def test_what_cannot_be_loaded_is_not_saved(tmp_path):
    class Odd:
        pass

    def body(rank):
        run = start(3)
        with pytest.raises(CheckpointError, match="extra"):
            onefold.save(tmp_path / "a", run.module, extra=Odd() if rank == 1 else None)
        with pytest.raises(CheckpointError, match="optimizer to be a torch"):
            onefold.save(tmp_path / "a", run.module, run.schedule)
        with pytest.raises(CheckpointError, match="keep to be None or at least 1"):
            run.save(tmp_path / "a", keep=0)
        foreign = torch.optim.SGD([nn.Parameter(torch.ones(2))], lr=1)
        with pytest.raises(CheckpointError, match="hold this module's parameters alone"):
            onefold.save(tmp_path / "a", run.module, foreign)

    run_ranks(2, body)
    assert list(tmp_path.iterdir()) == []


def test_a_module_that_is_not_sharded_is_refused(tmp_path):
    for act in (onefold.save, onefold.load):
        with pytest.raises(onefold.StateError, match=r"that onefold\.shard has sharded"):
            act(tmp_path / "a", Model())


def test_a_buffer_that_is_not_contiguous_comes_back_in_its_order(tmp_path):
    def built(fill):
        module = nn.Linear(3, 2)
        module.register_buffer("turned", fill.t())
        return onefold.shard(module)

    def body(rank):
        onefold.save(tmp_path / "a", built(torch.arange(12.0).view(3, 4)))
        for loaded in (built(torch.zeros(3, 4)), onefold.shard(built_contiguous())):
            onefold.load(tmp_path / "a", loaded)
            assert torch.equal(loaded.turned, torch.arange(12.0).view(3, 4).t())

    def built_contiguous():
        module = nn.Linear(3, 2)
        module.register_buffer("turned", torch.zeros(4, 3))
        return module

    run_ranks(2, body)


# damage

DAMAGES = {
    "truncated": lambda data: data[: len(data) // 2],
    "one byte short": lambda data: data[:-1],
    "longer": lambda data: data + b"\0",
    "zero-filled": lambda data: bytes(len(data)),
    "a bit flipped early": lambda data: _flipped(data, len(data) // 5),
    "a bit flipped late": lambda data: _flipped(data, len(data) * 4 // 5),
    "the first bit flipped": lambda data: _flipped(data, 0),
    "the last bit flipped": lambda data: _flipped(data, len(data) - 1),
    "empty": lambda data: b"",
    "deleted": None,
}


def _flipped(data: bytes, index: int) -> bytes:
    return data[:index] + bytes([data[index] ^ 1]) + data[index + 1 :]


@again_but("truncated", "zero-filled", "the first bit flipped", "deleted")
@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_file_is_an_error_that_names_it(saved, damage):
    """Whatever happens to whichever file: never a silent load, on any rank."""

    def body(rank, name):
        run = start(3, seed=8)
        with pytest.raises(CheckpointError, match=name):
            run.load(saved)

    for path in sorted(saved.iterdir()):
        data = path.read_bytes()
        change = DAMAGES[damage]
        path.unlink() if change is None else path.write_bytes(change(data))
        run_ranks(2, body, path.name.replace(".", r"\."))
        path.write_bytes(data)
    run_ranks(2, lambda rank: start(3).load(saved))


def test_the_newest_complete_checkpoint_is_taken_and_the_others_are_named(tmp_path):
    def save(rank):
        run = start(3)
        for i in range(4):
            run.train([BATCHES[i]]).save(tmp_path / f"step-{i + 1}")
        return run.losses

    losses = run_ranks(2, save)[0]
    (tmp_path / "step-4" / "manifest.json").unlink()
    data = tmp_path / "step-3" / "rank-00001.safetensors"
    data.write_bytes(_flipped(data.read_bytes(), 5000))
    (tmp_path / ".step-5.writing").mkdir()

    def load(rank):
        return start(3).load(tmp_path).train(BATCHES[2:]).losses

    with pytest.warns(
        UserWarning, match=r"loaded step-2, passed over step-4: .*manifest.*step-3: "
    ):
        results = run_ranks(2, load)
    assert results[0] == losses[2:]


def test_loading_never_runs_code(saved, tmp_path):
    """A pickle that would call something is refused, in the metadata and in an object."""

    class Call:
        def __reduce__(self):
            return (print, ("code was run",))

    foreign = tmp_path / "foreign"
    foreign.mkdir()
    (foreign / ".metadata").write_bytes(pickle.dumps(Call()))
    with pytest.raises(CheckpointError, match=r"reference to builtins\.print"):
        open_source(find(foreign, PEERS)[0])
    # some Pythons store an enum's member as a getattr of its class: it is read, and not called
    member = b"cbuiltins\ngetattr\n(cbuiltins\nint\nX\3\0\0\0reltR."
    read = read_pickle(member, {"builtins.getattr", "builtins.int"}, "a member")
    assert read.kind == "builtins.getattr"
    file = io.BytesIO()
    torch.save(Call(), file)
    with pytest.raises(CheckpointError, match="to hold tensors, numbers"):
        read_object(file.getvalue(), "extra")


# keeping


def test_old_checkpoints_go_when_the_next_is_complete(tmp_path):
    def body(rank):
        run = start(3)
        kept = []
        for i in range(4):
            run.train([BATCHES[i]]).save(tmp_path / f"step-{i + 1}", keep=2, wait=i % 2 == 0)
            onefold.load(tmp_path, run.module)  # waits for the save in the background
            kept.append(sorted(path.name for path in tmp_path.iterdir()))
            dist.barrier()
        return kept

    steps = ["step-1", "step-2", "step-3", "step-4"]
    for kept in run_ranks(2, body):
        assert kept == [steps[:1], steps[:2], steps[1:3], steps[2:]]


# in the background


def test_a_background_save_is_complete_once_its_ticket_is(tmp_path):
    def body(rank):
        run = start(3).train(BATCHES[:2])
        before = run.state()
        ticket = onefold.save(tmp_path / "a", run.module, run.optimizer, wait=False)
        run.train(BATCHES[2:])
        ticket.wait()
        assert ticket.done
        other = start(3, seed=3)
        onefold.load(tmp_path / "a", other.module, other.optimizer)
        assert_equal_states(other.state(), before)

    run_ranks(3, body)


def test_a_background_save_that_fails_is_told_at_the_next_call_and_training_goes_on(
    tmp_path, monkeypatch
):
    from onefold.checkpoint import checked_files

    real, is_failing = checked_files.os.fsync, [True]

    def fsync(fd: int) -> None:
        if is_failing[0]:
            raise OSError(5, "Input/output error")
        real(fd)

    monkeypatch.setattr(checked_files.os, "fsync", fsync)

    def body(rank):
        run = start(3).train(BATCHES[:1])
        onefold.save(tmp_path / "a", run.module, run.optimizer, wait=False)
        run.train(BATCHES[1:2])
        with pytest.raises(CheckpointError, match="Input/output error"):
            run.save(tmp_path / "b")
        is_failing[0] = False
        dist.barrier()
        run.train(BATCHES[2:3]).save(tmp_path / "c")
        run.load(tmp_path / "c")

    run_ranks(2, body)
    assert [path.name for path in tmp_path.iterdir() if path.name[0] != "."] == ["c"]


@again_but("rename")
@pytest.mark.parametrize("call", ["write", "fsync", "rename"])
def test_an_error_of_the_disk_leaves_the_old_checkpoint_and_the_run(tmp_path, monkeypatch, call):
    """ENOSPC or EIO at any call: a clear error on every rank, nothing left, training goes on."""
    from onefold.checkpoint import checked_files

    def body(rank):
        run = start(3).train(BATCHES[:1]).save(tmp_path / "old")
        dist.barrier()
        if rank == 0:
            failing = lambda *a, **k: (_ for _ in ()).throw(OSError(28, "No space left on device"))
            if call == "rename":
                monkeypatch.setattr(Path, "rename", failing)
            else:
                monkeypatch.setattr(checked_files.os, call, failing)
        dist.barrier()
        with pytest.raises(CheckpointError, match="No space left on device"):
            run.save(tmp_path / "new")
        dist.barrier()
        if rank == 0:
            monkeypatch.undo()
        dist.barrier()
        run.train(BATCHES[1:2]).load(tmp_path / "old")
        run.save(tmp_path / "new")

    run_ranks(2, body)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["new", "old"]


def test_a_disk_that_is_full_leaves_the_old_checkpoint_and_the_run(tmp_path):
    """A real one: a file system of 2 MB, which the run's third checkpoint does not fit into."""
    small = tmp_path / "small"
    small.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=2m", "tmpfs", str(small)], capture_output=True
    )
    if mounted.returncode:
        pytest.skip("this user may not mount a file system")

    def body(rank):
        run = start(3).train(BATCHES[:1]).save(small / "1").save(small / "2")
        dist.barrier()
        nbytes = sum(path.stat().st_size for path in (small / "1").iterdir())
        if rank == 0:  # room for the tensors, which is checked before, but not for the rest
            used = os.statvfs(small)
            (small / "other").write_bytes(bytes(used.f_bavail * used.f_frsize - nbytes * 7 // 8))
        dist.barrier()
        for wait in (True, False):
            with pytest.raises(CheckpointError, match="No space left on device"):
                onefold.save(small / "3", run.module, run.optimizer, wait=wait).wait()
            dist.barrier()
        if rank == 0:
            free = os.statvfs(small)
            (small / "more").write_bytes(bytes(free.f_bavail * free.f_frsize))
        dist.barrier()
        with pytest.raises(CheckpointError, match="free bytes for checkpoint"):
            run.save(small / "3")
        run.train(BATCHES[1:2]).load(small)
        dist.barrier()
        if rank == 0:
            (small / "other").unlink()
        dist.barrier()
        run.save(small / "3")

    try:
        run_ranks(2, body)
        assert sorted(path.name for path in small.glob("[0-9]")) == ["1", "2", "3"]
    finally:
        subprocess.run(["umount", str(small)], check=True)


def test_a_file_that_may_not_grow_fails_a_save_past_the_page_cache(tmp_path):
    """The error of a disk request that a thread made reaches the caller."""
    run = start(3, build=lambda: nn.Linear(1024, 6000, bias=False), optimizer=torch.optim.SGD)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (9 << 20, before[1]))
    try:
        for wait in (True, False):
            with pytest.raises(CheckpointError, match="File too large"):
                onefold.save(tmp_path / "a", run.module, wait=wait).wait()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert list(tmp_path.iterdir()) == []
    onefold.save(tmp_path / "a", run.module)


# other readers and writers


def test_torch_reads_what_we_write_into_an_fsdp_module_and_the_reverse(tmp_path):
    """Plain `torch.distributed.checkpoint`, FSDP2 and its state dicts, tied weights included."""
    run_processes(2, with_fsdp, tmp_path)


def with_fsdp(rank: int, path: Path) -> None:
    from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
    from torch.distributed.fsdp import fully_shard

    def fsdp(seed: int) -> tuple[nn.Module, torch.optim.Optimizer]:
        module = seeded(lambda: Model(2), seed=seed)
        for block in module.blocks:
            fully_shard(block)
        fully_shard(module)
        return module, torch.optim.AdamW(module.parameters(), lr=1e-2)

    def step(module, optimizer, batch):
        next_token_loss(module, batch.chunk(2)[rank]).backward()
        optimizer.step()
        optimizer.zero_grad()

    def ours(seed: int) -> tuple[nn.Module, torch.optim.Optimizer]:
        module = seeded(lambda: Model(2), seed=seed)
        optimizer = torch.optim.AdamW(module.parameters(), lr=1e-2)
        return onefold.shard(module, optimizer, stage=3), optimizer

    def weights(module: nn.Module) -> dict[str, Tensor]:
        return {name: whole(p.detach()) for name, p in module.named_parameters()}

    mine, my_optimizer = ours(0)
    step(mine, my_optimizer, BATCHES[0])
    onefold.save(path / "ours", mine, my_optimizer)
    if rank == 0:
        export_dcp(path / "ours", path / "exported", dtype=None)
    dist.barrier()
    theirs, their_optimizer = fsdp(1)
    step(theirs, their_optimizer, BATCHES[3])  # so that there are states to load into
    model, optim = get_state_dict(theirs, their_optimizer)
    state = {"model": model, "optim": optim}
    dcp.load(state, checkpoint_id=path / "exported")
    set_state_dict(
        theirs, their_optimizer, model_state_dict=state["model"], optim_state_dict=state["optim"]
    )
    for name, weight in weights(mine).items():
        assert torch.equal(weights(theirs)[name], weight), name
    step(mine, my_optimizer, BATCHES[1])
    step(theirs, their_optimizer, BATCHES[1])
    for name, weight in weights(mine).items():
        torch.testing.assert_close(weights(theirs)[name], weight, msg=name)

    model, optim = get_state_dict(theirs, their_optimizer)
    dcp.save({"model": model, "optim": optim}, checkpoint_id=path / "theirs")
    again, optimizer = ours(2)
    assert onefold.load(path / "theirs", again, optimizer) == {}
    for name, weight in weights(theirs).items():
        assert torch.equal(weights(again)[name], weight), name
    step(again, optimizer, BATCHES[2])
    step(theirs, their_optimizer, BATCHES[2])
    for name, weight in weights(theirs).items():
        torch.testing.assert_close(weights(again)[name], weight, msg=name)


def test_a_plain_state_dict_of_torch_loads(tmp_path):
    """`dcp.save(module.state_dict())`: names without a prefix, no optimizer."""
    module = seeded(lambda: Model(2, tied=True))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.save(module.state_dict(), checkpoint_id=tmp_path / "plain")
    wanted = {name: p.detach().clone() for name, p in module.named_parameters()}

    def body(rank):
        other = seeded(lambda: Model(2, tied=True), seed=9)
        onefold.shard(other, stage=3)
        onefold.load(tmp_path / "plain", other)
        with onefold.unsharded(other):
            return {name: p.detach().clone() for name, p in other.named_parameters()}

    for got in run_ranks(3, body):
        assert_equal_states(got, wanted)


def test_tied_weights_lie_once_and_go_by_all_their_names(tmp_path):
    def body(rank):
        module = seeded(lambda: Model(2, tied=True))
        onefold.shard(module, stage=3)
        onefold.save(tmp_path / "a", module)

    run_ranks(2, body)
    names = [n for f in (tmp_path / "a").glob("*.safetensors") for n in load_file(f)]
    assert names.count("model.embed.weight") == 2  # a piece a rank
    assert "model.head.weight" not in names
    said = json.loads((tmp_path / "a" / "rank-00000.json").read_text())
    assert said["aliases"] == {"model.head.weight": "model.embed.weight"}
    export_dcp(tmp_path / "a", tmp_path / "dcp", dtype=None)
    places = dcp.FileSystemReader(tmp_path / "dcp").read_metadata().storage_data
    shared = [
        {(i.relative_path, i.offset) for index, i in places.items() if index.fqn == name}
        for name in ("model.embed.weight", "model.head.weight")
    ]
    assert shared[0] == shared[1] != set()
    plain = seeded(lambda: Model(2, tied=True), seed=4)
    state = {"model": plain.state_dict()}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.load(state, checkpoint_id=tmp_path / "dcp")
    assert torch.equal(
        state["model"]["head.weight"], seeded(lambda: Model(2, tied=True)).embed.weight
    )


class Counting(torch.optim.SGD):
    """Keeps a count that belongs to no parameter, as MADGRAD does."""

    def step(self, closure=None):
        count = self.state.get("k", torch.zeros(1, dtype=torch.long))
        self.state["k"] = count + 1
        return super().step(closure)


@again_but("3")
@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_state_of_an_optimizer_that_belongs_to_no_parameter_is_kept(world_size, tmp_path):
    def started():
        module = seeded(Model)
        optimizer = Counting(module.parameters(), lr=0.1, momentum=0.9)
        onefold.shard(module, optimizer, stage=0)
        return module, optimizer

    def save(rank):
        module, optimizer = started()
        for batch in token_batches(2):
            next_token_loss(module, batch).backward()
            optimizer.step()
            optimizer.zero_grad()
        onefold.save(tmp_path / "run", module, optimizer)

    def load(rank):
        module, optimizer = started()
        onefold.load(tmp_path / "run", module, optimizer)
        assert optimizer.state["k"].tolist() == [2]
        next_token_loss(module, token_batches(1)[0]).backward()
        optimizer.step()
        assert optimizer.state["k"].tolist() == [3]

    run_ranks(2, save)
    run_ranks(world_size, load)


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_a_checkpoint_of_an_earlier_version_loads(world_size, tmp_path):
    """Two ranks saved it at stage 3 after two steps, before companions were saved."""
    with tarfile.open(Path(__file__).parent / "data" / "saved_by_two_ranks.tar.xz") as archive:
        archive.extractall(tmp_path, filter="data")

    def body(rank):
        layers = {"a": nn.Linear(3, 4, bias=False), "b": nn.Linear(4, 2, bias=False)}
        module = nn.Sequential(OrderedDict(layers))
        optimizer = torch.optim.AdamW(module.parameters(), lr=0.01)
        onefold.shard(module, optimizer, stage=3)
        extra = onefold.load(tmp_path / "ck1", module, optimizer)
        assert extra == {"step": 2, "rank": rank % 2}
        assert onefold.report(module).steps == 2
        state = optimizer.state[module.a.weight]
        assert state["step"] == 2
        assert state["exp_avg"].full_tensor().abs().sum() > 0
        return onefold.full_state_dict(module, rank0_only=False)

    plain = nn.Sequential(OrderedDict(a=nn.Linear(3, 4, bias=False), b=nn.Linear(4, 2, bias=False)))
    with torch.no_grad():
        for index, weight in enumerate(plain.parameters()):
            weight.copy_(torch.arange(weight.numel()).view_as(weight) / 8 - index)
    optimizer = torch.optim.AdamW(plain.parameters(), lr=0.01)
    for _ in range(2):
        (sum(plain(torch.full((2, 3), 0.5 * rank)).sum() for rank in (1, 2)) / 2).backward()
        optimizer.step()
        optimizer.zero_grad()
    for values in run_ranks(world_size, body):
        for name, weight in plain.named_parameters():
            torch.testing.assert_close(values[name], weight.detach(), rtol=1e-6, atol=1e-6)


def test_an_optimizer_in_the_place_of_the_module_is_refused_by_the_order_of_arguments(tmp_path):
    module = onefold.shard(nn.Linear(2, 2), stage=3)
    optimizer = torch.optim.SGD(module.parameters())
    for call in (onefold.save, onefold.load):
        with pytest.raises(onefold.ConfigError, match=r"got a SGD\nhint: .*path, module, optimi"):
            call(tmp_path, optimizer, module)
