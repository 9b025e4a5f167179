"""Lightning's Trainer and Fabric, as they come, with our strategy: equal to their own DDP."""

from __future__ import annotations

import inspect
import os
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import onefold
from onefold.engine.registry import engine_of
from tests.support.ranks import run_processes, run_ranks
from tests.support.rows import again_but

pl = pytest.importorskip("lightning.pytorch")

from lightning.fabric import Fabric  # noqa: E402
from lightning.pytorch.callbacks import (  # noqa: E402
    BackboneFinetuning,
    EarlyStopping,
    ModelCheckpoint,
    OnExceptionCheckpoint,
    StochasticWeightAveraging,
    WeightAveraging,
)
from lightning.pytorch.loggers.logger import DummyLogger  # noqa: E402
from lightning.pytorch.plugins import AsyncCheckpointIO, MixedPrecision  # noqa: E402
from lightning.pytorch.plugins.precision import FSDPPrecision  # noqa: E402
from lightning.pytorch.strategies import DDPStrategy  # noqa: E402
from lightning.pytorch.utilities import grad_norm  # noqa: E402

from onefold.adapters.lightning.strategy import FabricStrategy  # noqa: E402
from onefold.adapters.lightning.trainer import Sharding  # noqa: E402
from onefold.lightning import Strategy, as_file  # noqa: E402

pytestmark = pytest.mark.process
WIDTH, ROWS = 8, 48
QUIET = {
    "accelerator": "cpu", "logger": False, "enable_progress_bar": False,
    "enable_model_summary": False, "enable_checkpointing": False,
}  # fmt: skip


def rows() -> TensorDataset:
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(ROWS, WIDTH, generator=generator)
    return TensorDataset(x, x.roll(1, 1) ** 2)


def loader(batch_size: int = 4) -> DataLoader:
    return DataLoader(rows(), batch_size=batch_size)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 2 * WIDTH)
        self.down = nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Net(pl.LightningModule):
    """Blocks, a parameter of its own that the steps use, and a buffer."""

    def __init__(self, num_blocks: int = 3) -> None:
        super().__init__()
        self.num_blocks = num_blocks
        self.losses: list[float] = []
        self.seen: list[float] = []
        if num_blocks:
            self.build()

    def build(self) -> None:
        self.blocks = nn.ModuleList(Block() for _ in range(self.num_blocks))
        self.scale = nn.Parameter(torch.full((WIDTH,), 0.5))
        self.register_buffer("offset", torch.zeros(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x + self.offset

    def loss(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        x, y = batch
        return F.mse_loss(self(x) * self.scale, y)

    def training_step(self, batch: tuple[Tensor, Tensor], index: int) -> Tensor:
        loss = self.loss(batch)
        self.losses.append(loss.item())
        self.log("loss", loss, sync_dist=True)
        return loss

    def validation_step(self, batch: tuple[Tensor, Tensor], index: int) -> None:
        self.log("val", self.loss(batch), sync_dist=True)

    def on_validation_epoch_end(self) -> None:
        self.seen.append(float(self.trainer.callback_metrics["val"]))

    def test_step(self, batch: tuple[Tensor, Tensor], index: int) -> None:
        self.log("test", self.loss(batch), sync_dist=True)

    def predict_step(self, batch: tuple[Tensor, Tensor], index: int) -> Tensor:
        return self(batch[0]) * self.scale

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2)
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + 0.2 * step))
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


class Fused(Net):
    """Its bf16 weights are rounded once a step, as Onefold's are, and not after each operation."""

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=1e-2, fused=True)


class Normed(Net):
    """Batch norms, whose buffers DDP takes from rank 0, frozen weights, and norms of gradients."""

    def build(self) -> None:
        super().build()
        self.norm, self.frozen = nn.BatchNorm1d(WIDTH), nn.Linear(WIDTH, WIDTH)
        self.frozen.requires_grad_(False)
        self.save_hyperparameters()
        self.norms: list[float] = []

    def forward(self, x: Tensor) -> Tensor:
        return self.frozen(super().forward(self.norm(x)))

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.norms += [float(value) for value in grad_norm(self, 2).values()]


class Late(Net):
    """Built in `configure_model`, where `meta` is the device."""

    def __init__(self, num_blocks: int = 2) -> None:
        super().__init__(0)
        self.num_blocks = num_blocks

    def configure_model(self) -> None:
        if not hasattr(self, "blocks"):
            with torch.device("meta"):
                self.build()

    def reset_parameters(self) -> None:
        nn.init.constant_(self.scale, 0.5)
        nn.init.zeros_(self.offset)


class Game(pl.LightningModule):
    """Two models and two optimizers, by hand."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.maker = nn.Sequential(nn.Linear(WIDTH, 16), nn.ReLU(), nn.Linear(16, WIDTH))
        self.critic = nn.Sequential(nn.Linear(WIDTH, 16), nn.ReLU(), nn.Linear(16, 1))
        self.bias = nn.Parameter(torch.zeros(WIDTH))
        self.losses: list[float] = []

    def training_step(self, batch: tuple[Tensor, Tensor], index: int) -> None:
        x, real = batch
        first, second = self.optimizers()
        fake = self.maker(x) + self.bias
        for optimizer, loss_of in (
            (
                second,
                lambda: F.softplus(self.critic(fake.detach())) + F.softplus(-self.critic(real)),
            ),
            (first, lambda: F.softplus(-self.critic(fake))),
        ):
            self.toggle_optimizer(optimizer)
            loss = loss_of().mean()
            self.manual_backward(loss)
            self.clip_gradients(optimizer, gradient_clip_val=0.5, gradient_clip_algorithm="norm")
            optimizer.step()
            optimizer.zero_grad()
            self.untoggle_optimizer(optimizer)
            self.losses.append(loss.item())

    def configure_optimizers(self) -> Any:
        made = [*self.maker.parameters(), self.bias]
        return torch.optim.Adam(made, lr=1e-2), torch.optim.Adam(self.critic.parameters(), lr=1e-2)


# running


def as_under_torchrun(rank: int, world_size: int, body: Callable[[], None]) -> None:
    os.environ.update(
        RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world_size), GROUP_RANK="0",
        LOCAL_WORLD_SIZE=str(world_size), MASTER_ADDR="localhost", MASTER_PORT="0",
        TORCHELASTIC_RUN_ID="test",
    )  # fmt: skip
    warnings.filterwarnings("ignore", module="lightning")
    warnings.filterwarnings("ignore", message=".*does not have many workers.*")
    warnings.filterwarnings("ignore", category=DeprecationWarning)
    body()


def on_ranks(world_size: int, body: Callable[..., None], *args: Any) -> None:
    run_processes(world_size, _rank, world_size, body, args)


def _rank(rank: int, world_size: int, body: Callable[..., None], args: Any) -> None:
    as_under_torchrun(rank, world_size, lambda: body(*args))


def ddp() -> DDPStrategy:
    return DDPStrategy(process_group_backend="gloo")


def trainer(strategy: Any, **options: Any) -> Any:
    return pl.Trainer(**QUIET | {"devices": dist.get_world_size(), "strategy": strategy} | options)


def made(kind: Callable[[], Any] = Net) -> Any:
    torch.manual_seed(0)
    return kind()


def weights(module: nn.Module) -> dict[str, Tensor]:
    """Unsharded values, of any module."""
    if isinstance(getattr(module, "module", None), nn.Module):
        module = module.module
    values = module.state_dict()
    full = {n: v.full_tensor() if hasattr(v, "full_tensor") else v for n, v in values.items()}
    return {name: value.detach().clone() for name, value in full.items()}


def fitted(strategy: Any, kind: Callable[[], Any] = Net, **options: Any) -> Any:
    module = made(kind)
    data = [loader()] if kind is Game else [loader(), loader(8)]
    trainer(strategy, max_epochs=1, **options).fit(module, *data)
    return module


def assert_equal_runs(run: Any, wanted: Any, relative: float = 1e-6, apart: float = 5e-5) -> None:
    assert run.losses == pytest.approx(wanted.losses, rel=relative)
    assert len(run.losses) > 2
    mine, theirs = weights(run), weights(wanted)
    assert mine.keys() == theirs.keys()
    for name, value in theirs.items():
        distance = (mine[name].float() - value.float()).norm()
        assert distance <= apart * value.float().norm() + 1e-7, name


# the same as DDP


def _parity(stages: list[int], options: dict[str, Any]) -> None:
    wanted = fitted(ddp(), **options)
    for stage in stages:
        run = fitted(Strategy(stage=stage), **options)
        assert_equal_runs(run, wanted)
        assert run.seen == pytest.approx(wanted.seen, rel=1e-6)
        assert engine_of(run).recipe.stage.number == stage


CLIPPED = {"gradient_clip_val": 0.3, "accumulate_grad_batches": 2}


@again_but("2-stages0-options0", "3-stages2-options2", "1-stages3-options3")
@pytest.mark.parametrize(
    ("world_size", "stages", "options"),
    [
        (2, [0, 1, 2, 3], CLIPPED),
        (2, [0, 3], {"gradient_clip_val": 0.01, "gradient_clip_algorithm": "value"}),
        (3, [3], CLIPPED),
        (1, [3], CLIPPED),
    ],
)
def test_losses_weights_and_validation_are_those_of_ddp(world_size, stages, options):
    on_ranks(world_size, _parity, stages, options)


def _reductions() -> None:
    for stage, times in ((1, 1), (2, 2)):
        options = {"accumulate_grad_batches": 2, "limit_train_batches": 2, "limit_val_batches": 0}
        report = onefold.report(fitted(Strategy(stage=stage), **options))
        assert report.last_step["reduce_scatter"].calls == times * len(report.units)


def test_stage_1_reduces_once_a_step_of_lightning_and_stage_2_each_micro_batch():
    on_ranks(2, _reductions)


def _two_optimizers() -> None:
    wanted = fitted(ddp_with_unused(), Game)
    for stage in (0, 2, 3):
        assert_equal_runs(fitted(Strategy(stage=stage), Game), wanted)


def ddp_with_unused() -> DDPStrategy:
    return DDPStrategy(process_group_backend="gloo", find_unused_parameters=True)


def _normed() -> None:
    wanted, run = fitted(ddp(), Normed), fitted(Strategy(), Normed)
    assert_equal_runs(run, wanted)
    assert run.seen == pytest.approx(wanted.seen, rel=1e-6)
    assert run.norms == pytest.approx(wanted.norms, rel=1e-5)
    assert len(run.norms) > len(list(run.parameters()))


def test_buffers_and_norms_of_gradients_are_those_of_ddp():
    on_ranks(2, _normed)


def test_manual_optimization_with_two_optimizers_is_that_of_ddp():
    on_ranks(2, _two_optimizers)


def _evaluates() -> None:
    module, other = fitted(ddp()), fitted(Strategy())
    found = []
    for strategy, each in ((ddp(), module), (Strategy(), other)):
        one = trainer(strategy)
        tested = one.test(each, loader(), verbose=False)
        validated = one.validate(each, loader(), verbose=False)
        predicted = torch.cat(one.predict(each, loader()))
        found.append((tested, validated, predicted))
    for mine, theirs in zip(found[1][:2], found[0][:2], strict=True):
        assert mine[0] == pytest.approx(theirs[0], rel=1e-5)
    torch.testing.assert_close(found[1][2], found[0][2], rtol=1e-4, atol=1e-5)
    fresh = made()  # a module that was never fitted
    assert torch.cat(trainer(Strategy()).predict(fresh, loader())).shape == (ROWS // 2, WIDTH)


def test_test_validate_and_predict_are_those_of_ddp():
    on_ranks(2, _evaluates)


def _fits_again() -> None:
    runs = []
    for strategy in (ddp, Strategy):
        module = made()
        one = trainer(strategy(), max_epochs=1)
        one.fit(module, loader())
        one.validate(module, loader(), verbose=False)
        trainer(strategy(), max_epochs=1).fit(module, loader())
        runs.append(module)
    assert_equal_runs(runs[1], runs[0])
    with pytest.raises(onefold.ConfigError, match="at stage 2, got a Net at stage 3"):
        trainer(Strategy(stage=2), max_epochs=1).fit(runs[1], loader())


def test_a_module_can_be_fitted_again():
    on_ranks(2, _fits_again)


# precision


def _precisions() -> None:
    for word, relative, apart in (("bf16-true", 1e-6, 1e-6), ("bf16-mixed", 1e-6, 5e-5)):
        wanted = fitted(ddp(), Fused, precision=word)
        run = fitted(Strategy(stage=3), Fused, precision=word)
        assert_equal_runs(run, wanted, relative, apart)
        dtypes = {p.dtype for p in run.parameters()}
        assert dtypes == {p.dtype for p in wanted.parameters()}
    run = fitted(Strategy(stage=3, precision="bf16"))
    assert {p.dtype for p in run.parameters()} == {torch.float32}
    assert engine_of(run).context.compute is torch.bfloat16


def test_precisions_of_lightning_compute_what_ddp_does():
    on_ranks(2, _precisions)


def _packed(kind: str) -> None:
    """Adapters on a base that bitsandbytes has packed."""
    from tests.unit import test_quantized as packed

    class Packed(pl.LightningModule):
        def __init__(self, kind: str) -> None:
            super().__init__()
            self.net, self.losses = packed.quantized(kind), []

        def training_step(self, batch: list[Tensor], index: int) -> Tensor:
            loss = self.net(batch[0]).square().mean()
            self.losses.append(loss.item())
            return loss

        def configure_optimizers(self) -> Any:
            return torch.optim.AdamW(packed.adapters(self.net), lr=1e-2, fused=True)

    values = torch.randn(24, packed.WIDTH, generator=torch.Generator().manual_seed(1))
    data = DataLoader(TensorDataset(values), batch_size=2)
    plain, sharded = Packed(kind), Packed(kind)
    for module, strategy in ((plain, ddp()), (sharded, Strategy(stage=3, offload="cpu"))):
        trainer(strategy, max_epochs=1).fit(module, data)
    assert len(sharded.losses) == 24 // 2 // dist.get_world_size()
    assert sharded.losses == pytest.approx(plain.losses, rel=1e-6)
    pairs = zip(packed.adapters(sharded.net), packed.adapters(plain.net), strict=True)
    for ours, theirs in pairs:
        assert (ours.full_tensor() - theirs).norm() <= 5e-5 * theirs.norm()


@pytest.mark.again(
    "tests/unit/test_quantized.py::test_a_quantized_base_trains_with_the_bits_of_one_process"
)
@pytest.mark.parametrize(("world_size", "kind"), [(2, "int8"), (3, "nf4")])
def test_adapters_on_a_packed_base_are_fitted_as_under_ddp(world_size, kind):
    pytest.importorskip("bitsandbytes")
    pytest.importorskip("peft")
    on_ranks(world_size, _packed, kind)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"precision": "16-true"}, "HalfPrecision with precision='16-true'"),
        ({"precision": "64-true"}, "DoublePrecision"),
        ({"plugins": MixedPrecision("16-mixed", "cpu")}, "16-mixed"),
        ({"plugins": FSDPPrecision("bf16-true")}, "FSDPPrecision"),
        ({"plugins": AsyncCheckpointIO()}, "no CheckpointIO plugin, .* got a AsyncCheckpointIO"),
    ],
)
def test_what_cannot_be_honoured_is_refused_when_the_trainer_is_built(options, message):
    with pytest.raises(onefold.ConfigError, match=message):
        pl.Trainer(**QUIET, devices=2, strategy=Strategy(), **options)


def test_two_choices_of_precision_are_refused():
    with pytest.raises(onefold.ConfigError, match=r"one choice of precision.*'bf16-true'"):
        pl.Trainer(**QUIET, devices=2, strategy=Strategy(precision="bf16"), precision="bf16-true")
    with pytest.raises(onefold.ConfigError, match="no loss scale"):
        Strategy(precision="fp16")


@pytest.mark.parametrize("bad", [{"stage": 4}, {"offload": "cup"}, {"wire": "zero+"}])
def test_bad_arguments_are_errors_of_the_strategy(bad):
    with pytest.raises(onefold.ConfigError):
        Strategy(**bad)


def test_a_misspelt_argument_is_an_error_of_the_strategy():
    with pytest.raises(TypeError, match="unexpected keyword argument 'ofload'"):
        Strategy(ofload="cpu")


@pytest.mark.parametrize("framework", [pl.Trainer, Fabric])
def test_a_strategy_given_twice_is_refused_by_lightning(framework):
    options = {"devices": 1, "accelerator": "cpu"}
    options |= QUIET if framework is pl.Trainer else {}
    strategy = Strategy()
    framework(strategy=strategy, **options)
    with pytest.raises(Exception, match=r"set through both strategy class|parallel_devices set"):
        framework(strategy=strategy, **options)


class Wrapped(Net):
    def configure_model(self) -> None:
        self.blocks[0] = nn.parallel.DistributedDataParallel(self.blocks[0])


def _wrapped() -> None:
    with pytest.raises(onefold.ConfigError, match="one of DistributedDataParallel") as caught:
        fitted(Strategy(), Wrapped)
    assert f"raised on rank {dist.get_rank()} of 2" in caught.value.__notes__
    for callback in (StochasticWeightAveraging(0.1), WeightAveraging()):
        words = rf"{type(callback).__name__}\nhint: onefold.ema"
        with pytest.raises(onefold.ConfigError, match=words):
            fitted(Strategy(), callbacks=[callback])


def test_a_module_that_is_wrapped_or_averaged_in_a_copy_is_refused_on_every_rank():
    on_ranks(2, _wrapped)


# meta


def _late() -> None:
    run = fitted(Strategy(stage=3), Late)
    assert all(math_is_sound(value) for value in weights(run).values())
    assert run.losses[-1] < run.losses[0]
    one = trainer(Strategy(), max_epochs=1)
    with one.init_module(empty_init=True):
        module = Net()
    assert module.scale.is_meta


def math_is_sound(value: Tensor) -> bool:
    return not value.is_meta and bool(value.isfinite().all())


def test_a_module_built_on_meta_trains():
    on_ranks(2, _late)


# checkpoints


def saving(folder: Path, **options: Any) -> ModelCheckpoint:
    return ModelCheckpoint(folder, "{epoch}", enable_version_counter=False, **options)


def _saves(folder: Path) -> None:
    callback = saving(folder, monitor="val", save_top_k=2, save_last=True)
    options = {"enable_checkpointing": True, "callbacks": [callback]}
    module = made()
    trainer(Strategy(stage=3), max_epochs=4, **options).fit(module, loader(), loader(8))
    if dist.get_rank() == 0:
        assert len(list(folder.glob("epoch=*.ckpt"))) == 2
        assert not list(folder.glob(".*")), "drafts are left"
        assert (folder / "last.ckpt").is_dir()
    best = made()
    one = trainer(Strategy(stage=1))
    found = one.validate(best, loader(8), ckpt_path=callback.best_model_path, verbose=False)
    assert found[0]["val"] == pytest.approx(float(callback.best_model_score), rel=1e-5)
    stopper = EarlyStopping("val", min_delta=1e9, patience=1)
    module = made()
    trainer(Strategy(stage=3), max_epochs=9, callbacks=[stopper]).fit(module, loader(), loader(8))
    assert len(module.losses) == 2 * len(loader()) // 2


@pytest.mark.again(
    "tests/adapters/test_lightning.py::test_a_run_resumes_at_any_stage_and_number_of_ranks_and_from_a_single_file"
)
def test_model_checkpoint_keeps_the_best_and_the_last(tmp_path):
    on_ranks(2, _saves, tmp_path)


def _begins(folder: Path) -> None:
    """One run without a stop, and one that stops after its first epoch, by DDP as well."""
    straight = made()
    trainer(Strategy(stage=3), max_epochs=2).fit(straight, loader())
    torch.save(weights(straight), folder / f"straight.{dist.get_rank()}")
    stopped = made()
    one = trainer(Strategy(stage=3), max_epochs=1)
    one.fit(stopped, loader())
    one.save_checkpoint(folder / "half.ckpt")
    one.save_checkpoint(folder / "half.ckpt")  # replaces it
    one.save_checkpoint(folder / "weights.ckpt", weights_only=True)
    plain = made()
    one = trainer(ddp(), max_epochs=1)
    one.fit(plain, loader())
    one.save_checkpoint(folder / "plain.ckpt")
    assert (folder / "plain.ckpt").is_file()
    assert (folder / "half.ckpt").is_dir()
    for stage in (3, 1):
        _resumes(folder, "half.ckpt", stage, apart=0.0)
    _resumes(folder, "plain.ckpt", 3, apart=5e-5)
    with pytest.raises((onefold.CheckpointError, KeyError)):
        _resumes(folder, "weights.ckpt", 3, apart=0.0)
    with pytest.raises(onefold.CheckpointError, match="nothing there"):
        _resumes(folder, "none.ckpt", 3, apart=0.0)


def _resumes(folder: Path, name: str, stage: int, apart: float) -> None:
    wanted = torch.load(folder / "straight.0")
    module = made()
    with torch.no_grad():
        module.scale.fill_(9)  # values that the checkpoint replaces
    batches = loader() if dist.get_world_size() == 2 else loader(8 // dist.get_world_size())
    one = trainer(Strategy(stage=stage), max_epochs=2)
    one.fit(module, batches, ckpt_path=folder / name)
    assert one.current_epoch == 2
    for key, value in weights(module).items():
        assert (value - wanted[key]).norm() <= apart * value.norm(), (key, name, stage)


def test_a_run_resumes_at_any_stage_and_number_of_ranks_and_from_a_single_file(tmp_path):
    """Bitwise at the same number of ranks; at others, on the same global batches."""
    on_ranks(2, _begins, tmp_path)
    on_ranks(1, _resumes, tmp_path, "half.ckpt", 2, 5e-5)


class Tied(Normed):
    """Two modules share a weight."""

    def build(self) -> None:
        super().build()
        self.twin = nn.Linear(WIDTH, WIDTH, bias=False)
        self.twin.weight = self.frozen.weight


def _writes(folder: Path) -> None:
    run = fitted(Strategy(stage=3), Tied, limit_train_batches=2)
    run.trainer.save_checkpoint(folder / "a.ckpt")
    torch.save(weights(run), folder / "wanted")


def test_load_from_checkpoint_reads_a_directory_as_a_file(tmp_path):
    on_ranks(2, _writes, tmp_path)
    wanted = torch.load(tmp_path / "wanted")
    with as_file(tmp_path / "a.ckpt", weights_only=False) as file:
        opened = Tied.load_from_checkpoint(file, weights_only=False, num_blocks=3)
    found = opened.state_dict()
    assert found.keys() == wanted.keys()
    assert all(torch.equal(found[name], value) for name, value in wanted.items())
    assert opened.twin.weight is opened.frozen.weight
    with pytest.raises(onefold.CheckpointError, match="nothing there"):
        as_file(tmp_path / "none.ckpt")
    with pytest.raises(IsADirectoryError):  # a class method, which no strategy sees
        Tied.load_from_checkpoint(tmp_path / "a.ckpt")


class Unwritable(Net):
    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        if self.num_blocks == 2:
            checkpoint["function"] = lambda: None


def _fails_to_save(folder: Path) -> None:
    module = made(Unwritable)
    one = trainer(Strategy(), max_epochs=1, limit_train_batches=1)
    one.fit(module, loader())
    one.save_checkpoint(folder / "a.ckpt")
    module.num_blocks = 2
    for name in ("a.ckpt", "b.ckpt"):
        with pytest.raises(Exception, match="lambda"):  # of pickle on rank 0, ours on the other
            one.save_checkpoint(folder / name)
    assert sorted(path.name for path in folder.iterdir()) == ["a.ckpt"]
    trainer(Strategy()).validate(made(), loader(), ckpt_path=folder / "a.ckpt", verbose=False)
    dist.barrier()
    if dist.get_rank() == 0:  # as a kill between two renames leaves it
        (folder / "a.ckpt").rename(folder / ".a.ckpt.new")
    dist.barrier()
    trainer(Strategy()).validate(made(), loader(), ckpt_path=folder / "a.ckpt", verbose=False)


def test_a_checkpoint_is_complete_or_absent(tmp_path):
    on_ranks(2, _fails_to_save, tmp_path)


class Breaks(Net):
    def training_step(self, batch: tuple[Tensor, Tensor], index: int) -> Tensor:
        if index == 2 and len(self.losses) == 2:
            raise ValueError("a bad row")
        return super().training_step(batch, index)


def _breaks(folder: Path) -> None:
    resumed = {}
    for name, strategy in (("ddp", ddp), ("ours", Strategy)):
        callback = OnExceptionCheckpoint(folder, name)
        options = {"enable_checkpointing": True, "callbacks": [callback]}
        with pytest.raises(ValueError, match="a bad row") as caught:
            trainer(strategy(), max_epochs=1, **options).fit(made(Breaks), loader())
        resumed[name] = made()
        path = folder / f"{name}.ckpt"
        trainer(strategy(), max_epochs=1).fit(resumed[name], loader(), ckpt_path=path)
    assert caught.value.__notes__ == [f"raised on rank {dist.get_rank()} of 2"]
    assert_equal_runs(resumed["ours"], resumed["ddp"])


def test_an_exception_names_the_rank_and_the_run_resumes_from_there(tmp_path):
    on_ranks(2, _breaks, tmp_path)


class BreaksOnOne(Net):
    def training_step(self, batch: tuple[Tensor, Tensor], index: int) -> Tensor:
        if index == 2 and dist.get_rank() == 1:
            raise ValueError("a bad row of rank 1")
        return super().training_step(batch, index)


def _breaks_on_one() -> None:
    """The other rank waits for a message until the timeout, and says for which."""
    kind = ValueError if dist.get_rank() == 1 else onefold.WireError
    with pytest.raises(kind, match=r"a bad row|unit '"):
        fitted(Strategy(timeout=3), BreaksOnOne)
    os._exit(0)


def test_an_exception_on_one_rank_ends_the_others():
    on_ranks(2, _breaks_on_one)


# Fabric


def fabric_run(strategy: Any, *, jointly: bool = True, **options: Any) -> tuple[Any, Any, Any]:
    fabric = Fabric(accelerator="cpu", devices=dist.get_world_size(), strategy=strategy, **options)
    fabric.launch()
    module = made()
    if jointly:
        model, optimizer = fabric.setup(module, torch.optim.AdamW(module.parameters(), lr=1e-2))
    else:
        model = fabric.setup_module(module)
        optimizer = fabric.setup_optimizers(torch.optim.AdamW(model.parameters(), lr=1e-2))
    batches = fabric.setup_dataloaders(loader())
    for index, (x, y) in enumerate(batches):
        with fabric.no_backward_sync(model, enabled=index % 2 == 0):
            loss = F.mse_loss(model(x), y) / 2
            fabric.backward(loss)
        module.losses.append(loss.item())
        if index % 2:
            fabric.clip_gradients(model, optimizer, max_norm=0.3)
            fabric.clip_gradients(model, optimizer, clip_val=0.05)
            optimizer.step()
            optimizer.zero_grad()
    return fabric, model, optimizer


def fabric_ddp() -> Any:
    from lightning.fabric.strategies import DDPStrategy as FabricDDP

    return FabricDDP(process_group_backend="gloo", find_unused_parameters=True)


def _fabric(folder: Path) -> None:
    wanted = fabric_run(fabric_ddp())[1].module
    for stage, jointly in ((0, True), (3, True), (3, False)):
        strategy = Strategy(stage=stage)
        fabric, model, optimizer = fabric_run(strategy, jointly=jointly)
        assert isinstance(strategy, FabricStrategy)
        assert_equal_runs(model.module, wanted)
    state = {"model": model, "optimizer": optimizer, "step": 7}
    fabric.save(folder / "state", state)
    fabric.save(folder / "state", state)
    other, loaded, fresh = fabric_run(Strategy(stage=2))
    state = {"model": loaded, "optimizer": fresh, "step": 0}
    assert other.load(folder / "state", state) == {}
    assert state["step"] == 7
    for name, value in weights(model.module).items():
        assert torch.equal(weights(loaded.module)[name], value)
    options = {"precision": "bf16-true"}  # DDP sums micro-batches in bf16, ours in fp32
    narrow, wanted = (fabric_run(s, **options)[1].module for s in (Strategy(), fabric_ddp()))
    assert_equal_runs(narrow, wanted, 1e-2, 1e-2)
    assert {p.dtype for p in narrow.parameters()} == {torch.bfloat16}
    with pytest.raises(onefold.StateError, match="one module of"):
        other.save(folder / "none", {"step": 1})
    with pytest.raises(onefold.CheckpointError, match="filter"):
        other.save(folder / "none", state, filter={"model": lambda *_: True})


def test_fabric_trains_saves_and_loads_as_with_ddp(tmp_path):
    on_ranks(2, _fabric, tmp_path)


def _fabric_game() -> None:
    runs = []
    for strategy in (fabric_ddp, Strategy):
        fabric = Fabric(accelerator="cpu", devices=2, strategy=strategy())
        fabric.launch()
        game = made(Game)
        make, first = fabric.setup(game.maker, torch.optim.Adam(game.maker.parameters(), lr=1e-2))
        judge, second = fabric.setup(
            game.critic, torch.optim.Adam(game.critic.parameters(), lr=1e-2)
        )
        for x, real in fabric.setup_dataloaders(loader()):
            fake = make(x)
            loss = F.softplus(judge(fake.detach())).mean() + F.softplus(-judge(real)).mean()
            fabric.backward(loss)
            second.step()
            second.zero_grad()
            loss = F.softplus(-judge(fake)).mean()
            fabric.backward(loss)
            first.step()
            first.zero_grad()
            second.zero_grad()
            game.losses.append(loss.item())
        runs.append(game)
    for part in ("maker", "critic"):
        runs[0].losses, runs[1].losses = runs[0].losses, runs[1].losses
        wanted, run = getattr(runs[0], part), getattr(runs[1], part)
        for name, value in weights(wanted).items():
            torch.testing.assert_close(weights(run)[name], value, rtol=5e-5, atol=1e-6)
    assert runs[1].losses == pytest.approx(runs[0].losses, rel=1e-6)


def test_two_modules_of_fabric_train_as_with_ddp():
    on_ranks(2, _fabric_game)


# names of Lightning that we rely on


def test_lightning_has_the_private_names_that_the_strategy_overrides_or_reads():
    """If one is gone, read Lightning's DDPStrategy again: a method of ours is never called."""
    from lightning.fabric.strategies import DDPStrategy as FabricDDP
    from lightning.fabric.strategies.strategy import _BackwardSyncControl
    from lightning.fabric.utilities.types import _Stateful
    from lightning.pytorch.core.optimizer import _MockOptimizer

    assert issubclass(_MockOptimizer, torch.optim.Optimizer)
    for kind in (DDPStrategy, FabricDDP):
        assert "_configure_launcher" in vars(kind), "precision is checked there"
    assert FabricDDP()._backward_sync_control is not None, "no_backward_sync calls it"
    assert inspect.isabstract(_BackwardSyncControl)
    assert DDPStrategy()._layer_sync is None, "sync_batchnorm sets it"
    assert callable(DDPStrategy._reset_optimizers_and_schedulers)
    assert isinstance(torch.optim.SGD([torch.zeros(1)]), _Stateful)
    assert not isinstance(3, _Stateful)


def _logs() -> None:
    class Dashboard(DummyLogger):
        def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
            logged.update({step: metrics} if "onefold_peak_bytes" in metrics else {})

    logged: dict[Any, dict[str, float]] = {}
    fitted(Strategy(), logger=Dashboard(), log_every_n_steps=2)
    assert sorted(logged) == [2, 4]
    for numbers in logged.values():
        assert numbers["onefold_peak_bytes"] > numbers["onefold_sent_bytes"] > 0
    assert 0 < logged[4]["onefold_waiting_share"] <= 1


def test_loggers_get_memory_bytes_sent_and_waits():
    on_ranks(2, _logs)


def test_the_room_does_not_hide_the_library():
    import lightning

    import onefold.lightning as ours

    assert lightning.__file__ != ours.__file__
    assert ours.__all__ == ["Strategy", "as_file"]
    assert onefold.lightning is ours


def test_ranks_of_a_launcher_that_lightning_does_not_know_never_train_apart(monkeypatch):
    for name, value in {"RANK": "0", "WORLD_SIZE": "3"}.items():
        monkeypatch.setenv(name, value)

    def body(rank):
        with pytest.raises(onefold.ConfigError, match=r"3 ranks of WORLD_SIZE, got .* group of 2"):
            Sharding().apply(None, nn.Linear(4, 4), [], None)

    run_ranks(2, body)


class Thawing(Net):
    """A net whose backbone is trained from the second epoch on."""

    def __init__(self) -> None:
        super().__init__(2)
        self.backbone = self.blocks

    def configure_optimizers(self):
        return torch.optim.AdamW([self.scale], lr=1e-2)


def _resumes_past_a_thaw(folder: Path) -> None:
    runs = []
    for name, strategy in (("ddp", ddp), *((str(s), partial(Strategy, stage=s)) for s in (0, 3))):
        losses = list[float]()
        for epochs, path in ((2, None), (3, folder / name / "last.ckpt")):
            thaw = BackboneFinetuning(1, backbone_initial_ratio_lr=0.5, verbose=False)
            saved = saving(folder / name / str(epochs) if path else folder / name, save_last=True)
            options = {"enable_checkpointing": True, "callbacks": [thaw, saved]}
            module = made(Thawing)
            one = trainer(strategy(), max_epochs=epochs, num_sanity_val_steps=0, **options)
            one.fit(module, loader(), loader(8), ckpt_path=path)
            losses += module.losses
        assert len(one.optimizers[0].param_groups) == 2
        runs.append(losses)
    for losses in runs[1:]:
        torch.testing.assert_close(losses, runs[0], rtol=1e-5, atol=0)


def test_a_run_is_resumed_past_the_epoch_that_thawed_its_backbone_as_by_lightning(tmp_path):
    """Its callback rebuilds the param groups; lightning 2.6 leaves the backbone frozen then."""
    on_ranks(1, _resumes_past_a_thaw, tmp_path)
