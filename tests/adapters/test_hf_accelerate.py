"""A raw Accelerate loop trains a sharded model as it trains one under DDP."""

from __future__ import annotations

import copy
import os
import pickle
import re
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.algorithms import Join
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import onefold
from onefold.hf import adopt, adopt_frozen
from tests.house.test_examples import alone as alone_in_one_process
from tests.house.test_examples import numbers, under_torchrun
from tests.support.hf_ranks import run_forks
from tests.support.rows import again_but

accelerate = pytest.importorskip("accelerate")

pytestmark = [
    pytest.mark.process,
    pytest.mark.filterwarnings("ignore:.*barrier.*:UserWarning"),
]
STAGES = (0, 1, 2, 3)
ROWS = 27  # the last batches are smaller, and one is repeated


class Net(nn.Module):
    """A tied head, and an order of layers that no container gives."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(12, 8)
        self.mix = nn.Linear(8, 8)
        self.head = nn.Linear(8, 12, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(F.gelu(self.mix(self.embed(tokens))))


def build() -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = Net()
    return model, torch.optim.AdamW(model.parameters(), lr=1e-2)


def loader() -> DataLoader:
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(0, 12, (ROWS, 5), generator=generator)
    return DataLoader(TensorDataset(tokens, tokens.roll(1, 1)), batch_size=4)


class Loop:
    """What a user's script has: an accelerator and the objects that it prepared."""

    def __init__(self, stage: int | None, steps: int = 2, **options: Any) -> None:
        precision = options.pop("mixed_precision", None)
        plugin = accelerate.utils.GradientAccumulationPlugin(
            num_steps=steps, sync_each_batch=options.pop("sync_each_batch", False)
        )
        self.accelerator = accelerate.Accelerator(
            cpu=True, gradient_accumulation_plugin=plugin, mixed_precision=precision
        )
        self.plain, optimizer = build()
        if stage is not None:
            found = adopt(self.accelerator, self.plain, optimizer, stage=stage, **options)
            assert found[0] is self.plain
            assert found[1].optimizer is optimizer
        scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, 0.1, 1.0, 10)
        self.model, self.optimizer, self.loader, self.scheduler = self.accelerator.prepare(
            self.plain, optimizer, loader(), scheduler
        )
        if stage is not None:
            assert self.model is self.plain
            assert self.optimizer is found[1]
            assert len(self.accelerator._optimizers) == len(self.accelerator._models) == 1
            assert self.accelerator.unwrap_model(self.model) is self.plain

    def epoch(self) -> list[float]:
        """Losses and gradient norms, in order."""
        told = []
        for tokens, labels in self.loader:
            with self.accelerator.accumulate(self.model):
                loss = F.cross_entropy(self.model(tokens).flatten(0, 1), labels.flatten())
                self.accelerator.backward(loss)
                if self.accelerator.sync_gradients:
                    norm = self.accelerator.clip_grad_norm_(self.model.parameters(), 0.1)
                    told.append(float(norm))
                self.optimizer.step()
                self.scheduler.step()
                self.optimizer.zero_grad()
            told += self.accelerator.gather_for_metrics(loss.detach()[None]).tolist()
        return told

    def weights(self) -> dict[str, Tensor]:
        if self.model is self.plain:
            return onefold.full_state_dict(self.plain, rank0_only=False)
        return {name: value.clone() for name, value in self.plain.state_dict().items()}


def assert_close(found: tuple[list[float], dict[str, Tensor]], wanted: Any) -> None:
    assert found[0] == pytest.approx(wanted[0], rel=1e-6)
    assert found[1].keys() == wanted[1].keys()
    for name, value in wanted[1].items():
        assert (found[1][name] - value).norm() <= 5e-5 * value.norm(), name


def every_stage(rank: int) -> dict[Any, Any]:
    found = {}
    stages = STAGES if torch.distributed.get_world_size() == 2 else (0, 3)
    for stage, syncs in ((None, False), *((each, False) for each in stages), (0, True), (3, True)):
        loop = Loop(stage, sync_each_batch=syncs)
        found[stage, syncs] = (loop.epoch() + loop.epoch(), loop.weights())
        loop.accelerator.free_memory()
    return found


def reductions(rank: int) -> list[tuple[int, int]]:
    """Reductions of the last step at stages 1 and 2, and units."""
    counts = []
    for stage in (1, 2):
        loop = Loop(stage)
        loop.epoch()
        report = onefold.report(loop.plain)
        counts.append((report.last_step["reduce_scatter"].calls, len(report.units)))
        loop.accelerator.free_memory()
    return counts


def test_stage_1_reduces_once_a_step_of_accelerate_and_stage_2_each_micro_batch():
    for (once, units), (twice, _) in run_forks(2, reductions):
        assert (once, twice) == (units, 2 * units)


@again_but("3")
@pytest.mark.parametrize("world_size", [2, 3])
def test_losses_norms_and_weights_are_those_of_ddp_at_every_stage(world_size):
    """With `sync_each_batch`, too, which reduces every micro-batch."""
    for found in run_forks(world_size, every_stage):
        assert found.keys() >= {(None, False), (0, False), (3, True)}
        for each in found.values():
            assert_close(each, found[None, False])


# saved states


def keep_all(models: list[nn.Module], weights: list[Any], folder: str) -> None:
    """A user's hook, registered after `adopt`, works on all models."""
    assert len(models) == len(weights) == 1


def take_out(models: list[nn.Module], *_: object) -> None:
    """A user's hook that has loaded the models itself, in its own way."""
    with torch.no_grad():
        for parameter in models.pop().parameters():
            parameter.zero_()


def save(rank: int, folder: Path, stage: int) -> Any:
    loop = Loop(stage)
    loop.epoch()
    loop.accelerator.save_state(str(folder))
    loop.epoch()
    loop.accelerator.register_save_state_pre_hook(keep_all)
    loop.accelerator.register_save_state_pre_hook(take_out).remove()
    loop.accelerator.save_state(str(folder))  # over the one before
    saved = loop.weights()
    return saved, loop.epoch(), loop.weights()


def resume(rank: int, folder: Path, stage: int) -> Any:
    loop = Loop(stage)
    loop.accelerator.register_load_state_pre_hook(take_out)
    loop.accelerator.load_state(str(folder))
    return loop.weights(), loop.epoch(), loop.weights()


def test_a_run_goes_on_from_its_state_at_another_stage_and_world_size(tmp_path):
    before = run_forks(2, save, tmp_path, 3)
    files = {path.name for path in tmp_path.iterdir()}
    assert not any(name.startswith("model") for name in files), "weights are saved once, as shards"
    assert (tmp_path / "optimizer.bin").stat().st_size < 2000, "hyper-parameters alone"
    assert [path.name for path in (tmp_path / "onefold" / "0").iterdir()] == ["save-00000002"]
    same = run_forks(2, resume, tmp_path, 3)
    for found, wanted in zip(same, before, strict=True):
        assert found[1] == wanted[1], "bitwise at the same world size"
        assert all(torch.equal(found[2][name], wanted[2][name]) for name in wanted[2])
    for found, wanted in zip(run_forks(2, resume, tmp_path, 1), before, strict=True):
        assert_close(found[1:], wanted[1:])
    for found in run_forks(3, resume, tmp_path, 2):
        assert all(torch.equal(found[0][name], before[0][0][name]) for name in found[0])


# files for other programs


def export(rank: int, folder: Path) -> None:
    loop = Loop(3)
    loop.epoch()
    wanted = loop.weights()
    found = loop.accelerator.get_state_dict(loop.model)
    assert found.keys() == (wanted.keys() if rank == 0 else set())
    for name, value in found.items():
        assert type(value) is Tensor
        assert torch.equal(value, wanted[name]), name
    loop.accelerator.save_model(loop.model, folder / "safe")
    loop.accelerator.save_model(loop.model, folder / "pickled", safe_serialization=False)
    loop.accelerator.wait_for_everyone()
    for saved in ("safe", "pickled"):
        plain = build()[0]
        accelerate.load_checkpoint_in_model(plain, folder / saved)
        for name, value in plain.state_dict().items():
            assert torch.equal(value, wanted[name]), name
    other = nn.Linear(2, 2)  # a model that is not sharded is none of our business
    assert loop.accelerator.get_state_dict(other).keys() == {"weight", "bias"}


def test_files_of_unsharded_weights_are_those_of_one_process(tmp_path):
    run_forks(2, export, tmp_path)


def alone(rank: int, folder: Path) -> None:
    """Rank 0 makes calls that all ranks have to make; rank 1 waits, as it does for a barrier."""
    loop = Loop(3, timeout=60)
    loop.epoch()
    calls = [
        lambda: loop.accelerator.get_state_dict(loop.model),
        lambda: loop.accelerator.save_state(str(folder / "state")),
    ]
    if rank == 0:
        for call in calls:
            with pytest.raises(onefold.WireError, match="ranks that wait for one another"):
                call()
    loop.accelerator.wait_for_everyone()


def test_a_call_on_one_rank_alone_is_an_error_within_seconds(tmp_path):
    run_forks(2, alone, tmp_path)


# precision


def in_bf16(rank: int) -> dict[Any, Any]:
    found = {}
    for stage in (None, 0, 2, 3):
        loop = Loop(stage, mixed_precision="bf16")
        assert loop.model(torch.tensor([[1, 2]])).dtype == torch.float32
        found[stage] = (loop.epoch(), loop.weights())
        loop.accelerator.free_memory()
    loop = Loop(3, mixed_precision="bf16", precision="bf16")
    assert loop.model(torch.tensor([[1, 2]])).dtype == torch.float32
    found["narrow"] = (loop.epoch(), loop.weights())
    return found


def test_mixed_precision_is_the_autocast_of_ddp_or_weights_of_that_dtype():
    for found in run_forks(2, in_bf16):
        for stage in (0, 2, 3):
            assert found[stage][0] == pytest.approx(found[None][0], rel=1e-6)
        assert found["narrow"][0] != found[None][0]
        assert found["narrow"][0] == pytest.approx(found[None][0], rel=2e-2)


def scaled(rank: int) -> tuple[list[bool], dict[str, Tensor]]:
    """A loss of one rank overflows once."""
    accelerator = accelerate.Accelerator(cpu=True)
    accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=4.0)  # as on a GPU with fp16
    model, optimizer = build()
    adopt(accelerator, model, optimizer)
    assert isinstance(accelerator.scaler, onefold.GradScaler)
    model, optimizer = accelerator.prepare(model, optimizer)
    skipped = []
    for step in range(3):
        loss = model(torch.tensor([[1, 2, 3]])).square().mean()
        accelerator.backward(loss * (float("inf") if rank == 1 and step == 1 else 1.0))
        optimizer.step()
        skipped.append(optimizer.step_was_skipped)
        optimizer.zero_grad()
    return skipped, onefold.full_state_dict(model, rank0_only=False)


def test_all_ranks_skip_a_step_that_overflows_on_one():
    for skipped, weights in run_forks(2, scaled):
        assert skipped == [False, True, False]
        assert all(value.isfinite().all() for value in weights.values())


# bad input


def refused(match: str, **options: Any) -> None:
    with pytest.raises(onefold.ConfigError, match=match):
        Loop(3, **options)
    accelerate.state.AcceleratorState._reset_state(True)


def bad_input(rank: int) -> None:
    refused("precision to mean the same as mixed_precision='bf16'", mixed_precision="bf16",
            precision="fp16")  # fmt: skip
    refused("'fp16', which Accelerate ignores there .an argument", mixed_precision="fp16")
    os.environ["ACCELERATE_MIXED_PRECISION"] = "no"  # as `accelerate launch` sets it
    refused("'fp16', which Accelerate ignores there .an argument", mixed_precision="fp16")
    os.environ["ACCELERATE_MIXED_PRECISION"] = "fp16"
    refused("the environment variable ACCELERATE_MIXED_PRECISION=fp16")
    del os.environ["ACCELERATE_MIXED_PRECISION"]
    os.environ["ACCELERATE_DYNAMO_BACKEND"] = "EAGER"
    refused("dynamo_backend=EAGER .the environment variable ACCELERATE_DYNAMO_BACKEND=EAGER")
    del os.environ["ACCELERATE_DYNAMO_BACKEND"]
    accelerator = accelerate.Accelerator(cpu=True)
    model = adopt(accelerator, *build())[0]  # Accelerate itself joins on GPUs only
    for copier in (pickle.dumps, copy.deepcopy):
        with pytest.raises(onefold.StateError, match="to copy or pickle"):
            copier(model)
    with pytest.raises(onefold.StateError, match="as many batches"), Join([model]):  # type: ignore[list-item]
        pass
    with pytest.raises(onefold.ConfigError, match="adopt_frozen"):
        adopt(build()[0], None)
    model, optimizer = build()
    prepared = accelerator.prepare(optimizer)
    with pytest.raises(onefold.ConfigError, match=r"before accelerator\.prepare"):
        adopt(accelerator, model, prepared)
    model.hf_device_map = {"embed": 0, "mix": "cpu"}
    for call in (lambda: adopt(accelerator, model, optimizer), lambda: adopt_frozen(model)):
        with pytest.raises(onefold.ConfigError, match="device_map spread over 0, cpu"):
            call()
    with pytest.raises(onefold.ConfigError, match="DistributedDataParallel"):
        adopt(accelerator, nn.parallel.DistributedDataParallel(build()[0]))
    accelerate.state.AcceleratorState._reset_state(True)
    plugin = accelerate.FullyShardedDataParallelPlugin(fsdp_version=2)
    accelerator = accelerate.Accelerator(cpu=True, fsdp_plugin=plugin)
    with pytest.raises(
        onefold.ConfigError, match=r"FSDP as well, from the env.*ACCELERATE_USE_FSDP"
    ):
        adopt(accelerator, *build())


def prepared_by_adopt(rank: int) -> list[int]:
    accelerator = accelerate.Accelerator(cpu=True, gradient_accumulation_steps=2)
    model, optimizer = adopt(accelerator, *build())
    steps: list[int] = []
    for index, (tokens, labels) in enumerate(accelerator.prepare(loader())):
        with accelerator.accumulate(model):
            accelerator.backward(F.cross_entropy(model(tokens).flatten(0, 1), labels.flatten()))
            optimizer.step()
            optimizer.zero_grad()
        if not optimizer.step_was_skipped and accelerator.sync_gradients:
            steps.append(index)
    assert onefold.report(model).steps == len(steps)
    return steps


def test_the_optimizer_that_adopt_returns_steps_once_in_all_micro_batches_of_a_step():
    """One that nobody prepared stepped in every micro-batch, in silence."""
    first, second = run_forks(2, prepared_by_adopt)
    assert first == second
    assert 1 in first
    assert 0 not in first


def test_what_cannot_work_is_refused_by_name():
    run_forks(2, bad_input)


# optimizers and frozen models


def states_stay(rank: int) -> None:
    """State that is there before `prepare` is neither copied nor moved by it."""
    accelerator = accelerate.Accelerator(cpu=True)
    model, optimizer = build()
    model(torch.tensor([[1, 2, 3]])).square().mean().backward()
    optimizer.step()
    adopt(accelerator, model, optimizer, offload="optimizer")
    before = {id(v) for entry in optimizer.state.values() for v in entry.values()}
    assert before
    prepared = accelerator.prepare(optimizer)
    after = {id(v) for entry in prepared.state.values() for v in entry.values()}
    assert after == before
    assert len(prepared.state_dict()["state"]) == len(optimizer.state)


def _rows(rank: int, world_size: int) -> list[Any]:
    """Rows that this rank gets of two epochs, of a third from a position, and what is refused."""
    accelerator = accelerate.Accelerator(cpu=True)
    data = [(i, torch.full((2,), i / 23)) for i in range(23)]
    shares = [1.0, 3.0, 2.0][:world_size]
    sampler = onefold.mixed.RowSampler(data, rows=6, shares=shares, seed=4)
    plain = DataLoader(data, batch_sampler=sampler)
    prepared = accelerator.prepare(plain)
    assert len(prepared) == len(plain) == len(sampler) == 4
    found = []
    for epoch in range(2):
        sampler.set_epoch(epoch)
        alone = [ids.tolist() for ids, _ in plain]
        assert [ids.tolist() for ids, _ in prepared] == alone
        found.append(list(chain(*alone)))
    assert sampler.state_dict()["next_row"] == 23
    rest = accelerator.skip_first_batches(prepared, 1)
    assert [ids.tolist() for ids, _ in rest] == alone[1:]
    sampler.load_state_dict(sampler.state_dict(batches=2))
    prepared.set_epoch(1)
    found.append(list(chain(*(ids.tolist() for ids, _ in prepared))))
    if rank == 0 and world_size > 1:
        whole = accelerate.data_loader.prepare_data_loader(plain, dispatch_batches=True,
                                                           put_on_device=True)  # fmt: skip
        with pytest.raises(onefold.ConfigError, match="dispatch_batches=False"):
            next(iter(whole))
    return found


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_a_prepared_loader_deals_each_row_of_a_row_sampler_once(world_size):
    for epoch, parts in enumerate(zip(*run_forks(world_size, _rows, world_size), strict=True)):
        rows = sorted(row for part in parts for row in part)
        assert len(set(rows)) == len(rows) == (23 if epoch < 2 else 23 - 12)


def _in_an_epoch(rank: int, folder: Path) -> dict[str, Tensor]:
    """Train with dropout on six batches; a run that finds a state goes on where it was saved."""
    accelerator = accelerate.Accelerator(cpu=True)
    torch.manual_seed(rank)
    model = nn.Sequential(Net(), nn.Dropout(0.5))
    model, optimizer = adopt(accelerator, model, torch.optim.AdamW(model.parameters()), stage=3)
    data = [torch.arange(4) + i % 7 for i in range(24)]
    rows = accelerator.prepare(DataLoader(data, batch_size=2, generator=torch.Generator()))
    done = 0
    if folder.exists():
        accelerator.load_state(folder)
        done = 3
    for tokens in accelerator.skip_first_batches(rows, done):
        accelerator.backward(model(tokens).square().mean())
        optimizer.step()
        optimizer.zero_grad()
        done += 1
        if done == 3:
            accelerator.save_state(folder)
    assert done == len(rows)
    return onefold.full_state_dict(model, rank0_only=False)


@pytest.mark.parametrize("world_size", [1, 3])
def test_dropout_goes_on_in_an_epoch_where_the_loader_has_a_generator(world_size, tmp_path):
    whole, again = (run_forks(world_size, _in_an_epoch, tmp_path / "state")[0] for _ in range(2))
    for name, weight in whole.items():
        assert torch.equal(weight, again[name]), name


def test_preparing_an_optimizer_moves_no_state():
    run_forks(2, states_stay)


def with_a_teacher(rank: int, folder: Path) -> Any:
    """Distillation: a frozen model beside the trained one; saves and loads pass it over."""
    found = []
    for sharded in (False, True):
        accelerator = accelerate.Accelerator(cpu=True)
        model, optimizer = build()
        torch.manual_seed(7)
        teacher = Net().requires_grad_(False)
        if sharded:
            adopt(accelerator, model, optimizer, stage=3)
            assert adopt_frozen(teacher) is teacher
            assert accelerator.prepare(teacher) is teacher
        model, optimizer = accelerator.prepare(model, optimizer)
        tokens = torch.tensor([[1, 2, 3, 4 + rank]])
        told = []
        for step in range(4):
            if sharded and step == 2:
                accelerator.save_state(str(folder))
                accelerator.load_state(str(folder))
            with torch.no_grad():
                aim = teacher(tokens)
            loss = F.mse_loss(model(tokens), aim)
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            told.append(float(loss))
        found.append(told)
        accelerator.free_memory()
    return found


def test_a_frozen_model_trains_another_and_is_not_saved(tmp_path):
    for plain, sharded in run_forks(2, with_a_teacher, tmp_path):
        assert sharded == pytest.approx(plain, rel=1e-6)
    assert [path.name for path in (tmp_path / "onefold").iterdir()] == ["0"]


# models of transformers


def publish(rank: int, folder: Path) -> None:
    """As the scripts of transformers' examples do at their end, on every rank."""
    import transformers

    accelerator = accelerate.Accelerator(cpu=True, project_dir=str(folder))
    torch.manual_seed(0)
    config = transformers.GPT2Config(vocab_size=20, n_embd=16, n_layer=1, n_head=2, n_positions=8)
    model = transformers.GPT2LMHeadModel(config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    adopt(accelerator, model, optimizer)
    model, optimizer = accelerator.prepare(model, optimizer)
    tokens = torch.tensor([[1, 2, 3, 4 + rank]])
    accelerator.backward(model(input_ids=tokens, labels=tokens).loss)
    optimizer.step()
    wanted = onefold.full_state_dict(model, rank0_only=False)
    plain = accelerator.unwrap_model(model)
    options = {"is_main_process": accelerator.is_main_process, "save_function": accelerator.save}
    plain.save_pretrained(folder / "a", state_dict=accelerator.get_state_dict(model), **options)
    plain.save_pretrained(folder / "b", **options)
    accelerator.wait_for_everyone()
    for name in ("a", "b"):
        found = transformers.GPT2LMHeadModel.from_pretrained(folder / name).state_dict()
        assert all(torch.equal(found[key], wanted[key]) for key in wanted), name


def test_save_pretrained_on_every_rank_writes_files_of_one_process(tmp_path):
    pytest.importorskip("transformers")
    run_forks(2, publish, tmp_path)


def test_the_example_goes_on_from_its_saved_state():
    pytest.importorskip("transformers")
    for printed in (
        alone_in_one_process("accelerate_loop.py"),
        under_torchrun("accelerate_loop.py"),
    ):
        (line,) = re.findall("loss .* then .*", printed)
        first, last, again = numbers(line)
        assert last == again < first
