"""The strategy of `lightning.pytorch.Trainer`, and how both strategies shard a module.

Lightning's DDP strategy starts processes, knows ranks and reduces metrics. This one replaces what
it does to the module, the optimizers and the checkpoints.
"""

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from copy import deepcopy
from inspect import signature
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from lightning.fabric.plugins import CheckpointIO
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import BaseFinetuning, StochasticWeightAveraging, WeightAveraging
from lightning.pytorch.core.optimizer import _MockOptimizer
from lightning.pytorch.strategies import DDPStrategy
from lightning.pytorch.trainer.states import TrainerFn
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.optim import Optimizer

from onefold import config
from onefold.adapters.lightning import checkpoint_io as checkpoints
from onefold.api import accumulate, report, shard
from onefold.config import Precision, PrecisionChoice, StageChoice
from onefold.engine.joining import bind
from onefold.engine.registry import engine_of, is_sharded
from onefold.errors import ConfigError
from onefold.pages import page
from onefold.recording.third_step import ThirdStep
from onefold.tier import accelerator
from onefold.wire import launcher
from onefold.wire.ranks import MeshChoice
from onefold.wire_config import wire_of

_PURE_BF16 = Precision(master=torch.bfloat16)

PRECISIONS: dict[tuple[str, str], PrecisionChoice] = {
    ("Precision", "32-true"): None,
    ("MixedPrecision", "bf16-mixed"): None,  # fp32 weights; the plugin's autocast casts
    ("HalfPrecision", "bf16-true"): _PURE_BF16,  # the optimizer steps bf16, as Lightning has it
}
"""By class and word of Lightning's precision plugin: the precision that computes the same."""


class Sharding:
    """The arguments of `onefold.shard` that a strategy takes, checked at once."""

    def __init__(self, *, stage: StageChoice = 3, **choices: Any) -> None:
        signature(shard).bind(None, None, **choices)  # `TypeError` for a name that it does not have
        self._stage: StageChoice = stage
        self._choices = choices
        self._precision: PrecisionChoice = choices.pop("precision", None)
        row = config.stage_of(3 if stage == "auto" else stage)
        config.check_offload(config.offload_of(choices.get("offload")), row)
        wire_of(choices.get("wire"))
        if config.precision_of(self._precision).compute is torch.float16:
            wanted = "a precision that needs no loss scale, as Lightning's knows one rank alone"
            raise ConfigError(wanted, f"precision={self._precision!r}", hint='precision="bf16"')

    def precision_with(self, plugin: Any) -> PrecisionChoice:
        """Return the precision that computes as Lightning's plugin does.

        Raises `ConfigError` for a plugin of another library, and for two choices.
        """
        known = (type(plugin).__name__, str(plugin.precision))
        if known not in PRECISIONS:
            words = ", ".join(repr(word) for _, word in PRECISIONS)
            wanted = f"Lightning's precision to be one of {words}"
            hint = 'Strategy(precision="bf16") computes in bf16 and keeps fp32 masters'
            raise ConfigError(wanted, f"{known[0]} with precision={known[1]!r}", hint=hint)
        if self._precision is None:
            return PRECISIONS[known]
        if known[1] != "32-true":
            got = f"precision={known[1]!r} of Lightning and {self._precision!r} of the strategy"
            raise ConfigError("one choice of precision", got, hint="leave one of them out")
        return self._precision

    def apply(
        self, strategy: Any, module: nn.Module, optimizers: Sequence[Optimizer], plugin: Any
    ) -> None:
        """Shard a module and its optimizers; one that is sharded already gets the optimizers.

        `strategy` knows devices and nodes, `plugin` is its precision.
        """
        _check_launcher()
        precision = self.precision_with(plugin)
        if not is_sharded(module):
            # where `shard` would not see Lightning's choice of device and nodes
            kind, nodes = strategy.root_device.type, strategy.num_nodes
            mesh: MeshChoice = None
            if self._choices.get("wire") is not None and nodes > 1:
                mesh = init_device_mesh(kind, (nodes, strategy.num_processes))
            elif kind == "cpu" and accelerator.kind() is not None:
                mesh = init_device_mesh("cpu", (nodes * strategy.num_processes,))
            choices: dict[str, Any] = {"mesh": mesh, "precision": precision, **self._choices}
            shard(module, list(optimizers) or None, stage=self._stage, **choices)
            return
        engine = engine_of(module)
        number = engine.recipe.stage.number
        if optimizers and self._stage not in ("auto", number):
            wanted = f"a module that is not sharded, or at stage {self._stage}"
            hint = "build the module again and load its checkpoint, or keep the stage"
            raise ConfigError(wanted, f"a {type(module).__name__} at stage {number}", hint=hint)
        for optimizer in optimizers:
            bind(optimizer, engine)


def _check_launcher() -> None:
    """Raise `ConfigError` if Lightning has missed that a launcher started several ranks."""
    ranks, launched = dist.get_world_size(), launcher.world_size()
    if "RANK" in os.environ and ranks < launched:  # Lightning's own launcher sets no RANK
        wanted = f"Lightning to train on the {launched} ranks of WORLD_SIZE"
        hint = "start it with torchrun, or give Trainer(plugins=) the environment of the "
        hint += "launcher, such as lightning.pytorch.plugins.environments.KubeflowEnvironment()"
        raise ConfigError(wanted, f"a process group of {ranks}", hint=hint)


def share_buffers(module: nn.Module) -> None:
    """Give every rank the buffers of rank 0, one message a dtype, as DDP does before a forward."""
    group = engine_of(module).group
    by_dtype: dict[torch.dtype, list[Tensor]] = {}
    for buffer in module.buffers() if group.world_size > 1 else ():
        by_dtype.setdefault(buffer.dtype, []).append(buffer.detach())
    for buffers in by_dtype.values():
        flat = torch.cat([buffer.reshape(-1) for buffer in buffers])
        group.agree(("buffers", flat.nbytes), "buffers of rank 0", flat)
        group.wait(group.broadcast(flat, 0), "buffers of rank 0")
        if group.rank > 0:
            parts = flat.split([buffer.numel() for buffer in buffers])
            for buffer, part in zip(buffers, parts, strict=True):
                buffer.copy_(part.view_as(buffer))


class TrainerStrategy(DDPStrategy):
    """Shards the LightningModule before the loop of a Trainer starts."""

    sharding: Sharding
    recorded = ThirdStep(None)
    _reads_file = False  # the last checkpoint was a single file of Lightning
    _logged_step = 0  # of the last numbers in the loggers

    @property
    def _module(self) -> LightningModule:
        assert self.lightning_module is not None, "a Trainer connects its module first"
        return self.lightning_module

    def _real_optimizers(self) -> list[Optimizer]:
        return [o for o in self.optimizers if not isinstance(o, _MockOptimizer)]

    # set up

    def _configure_launcher(self) -> None:
        self.sharding.precision_with(self.precision_plugin)
        super()._configure_launcher()

    @contextmanager
    def tensor_init_context(self, empty_init: bool | None = None) -> Iterator[None]:
        """With `empty_init`, build on `meta`: `shard` gives each unit its values."""
        device = torch.device("meta") if empty_init else nullcontext()
        with device, self.precision_plugin.tensor_init_context():
            yield

    def setup(self, trainer: Trainer) -> None:
        """Build the optimizers and shard the module, once; later calls keep it as it is."""
        assert self.accelerator is not None, "a Trainer sets the accelerator first"
        self.accelerator.setup(trainer)
        module, optimizers = self._module, []
        fits = trainer.state.fn == TrainerFn.FITTING
        if fits:
            _refuse_copies(trainer)
        if not is_sharded(module):
            if fits and self._layer_sync:
                self._layer_sync.apply(module)
            self.precision_plugin.convert_module(module)
        if fits:
            self._reset_optimizers_and_schedulers()
            self.setup_optimizers(trainer)
            optimizers = self._real_optimizers()
        self.sharding.apply(self, module, optimizers, self.precision_plugin)
        self.setup_precision_plugin()

    def model_to_device(self) -> None:
        """Leave the module where it is: `shard` moves it, unit by unit."""

    # steps

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        """Run the step inside the module's own forward, unless the step runs backward itself."""
        with self.precision_plugin.train_step_context():
            if not self._module.automatic_optimization:
                share_buffers(self._module)
                return self._module.training_step(*args, **kwargs)
            return self._in_forward("training_step", args, kwargs)

    def validation_step(self, *args: Any, **kwargs: Any) -> Any:
        with self.precision_plugin.val_step_context():
            return self._in_forward("validation_step", args, kwargs)

    def test_step(self, *args: Any, **kwargs: Any) -> Any:
        with self.precision_plugin.test_step_context():
            return self._in_forward("test_step", args, kwargs)

    def predict_step(self, *args: Any, **kwargs: Any) -> Any:
        with self.precision_plugin.predict_step_context():
            return self._in_forward("predict_step", args, kwargs)

    def _in_forward(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call a method of the module as its forward: hooks see it, arguments stay uncast."""
        module = self._module
        share_buffers(module)
        own = module.__dict__.get("forward")

        def once() -> Any:
            restore()
            return getattr(module, name)(*args, **kwargs)

        def restore() -> None:
            module.__dict__.pop("forward", None)
            if own is not None:
                module.__dict__["forward"] = own

        module.__dict__["forward"] = once
        try:
            return module()
        except BaseException:
            restore()
            raise

    @contextmanager
    def block_backward_sync(self) -> Iterator[None]:
        """Run a micro-batch that is not the last of a step."""
        with accumulate(self._module):
            yield

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        """Log memory, bytes sent and waits of the steps before, as often as Lightning logs."""
        super().on_train_batch_start(batch, batch_idx)
        trainer: Any = self._module.trainer
        step = trainer.global_step
        if step > self._logged_step and step % trainer.log_every_n_steps == 0:
            self._logged_step = step
            scalars = report(self._module).scalars()
            numbers = {f"onefold_{name}": number for name, number in scalars.items()}
            for logger in trainer.loggers:
                logger.log_metrics(numbers, step=step)
        self.recorded.begin(self._module, step)

    def optimizer_step(self, *args: Any, **kwargs: Any) -> Any:
        """Take a step; if it was recorded, write its page."""
        result = super().optimizer_step(*args, **kwargs)
        self.recorded.end()
        return result

    # checkpoints

    @property
    def checkpoint_io(self) -> CheckpointIO:
        """The reader of single files; directories need none."""
        return super().checkpoint_io

    @checkpoint_io.setter
    def checkpoint_io(self, io: CheckpointIO) -> None:
        wanted = "no CheckpointIO plugin, as every rank writes its own part"
        raise ConfigError(wanted, f"a {type(io).__name__}", hint="leave the plugin out")

    @property
    def restore_checkpoint_after_setup(self) -> bool:
        """Ranks read their own rows, once the module is sharded."""
        return True

    @property
    def lightning_restore_optimizer(self) -> bool:
        """A single file's optimizer states are restored by Lightning."""
        return self._reads_file

    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """Return nothing: `save_checkpoint` saves the states of all ranks."""
        return {}

    def save_checkpoint(
        self, checkpoint: dict[str, Any], filepath: str | Path, storage_options: Any = None
    ) -> None:
        """Save a directory that loads at any number of ranks and stage. A collective."""
        if storage_options is not None:
            hint = "save to a local directory"
            raise ConfigError("no storage_options", storage_options, hint=hint)
        rest = {k: v for k, v in checkpoint.items() if k not in ("state_dict", "optimizer_states")}
        optimizers = self._real_optimizers() if "optimizer_states" in checkpoint else []
        checkpoints.save_folder(Path(self.broadcast(filepath)), self._module, optimizers, rest)

    def load_checkpoint(
        self, checkpoint_path: str | Path, weights_only: bool | None = None
    ) -> dict[str, Any]:
        """Load a directory of `save_checkpoint`, or read a single file of Lightning."""
        path = Path(self.broadcast(checkpoint_path))
        self._reads_file = path.is_file()
        if self._reads_file:
            return super().load_checkpoint(path, weights_only=weights_only)
        fits = self._module.trainer.state.fn == TrainerFn.FITTING
        optimizers = self._real_optimizers() if fits else []
        rest = checkpoints.load_folder(
            path, self._module, optimizers, weights_only=weights_only,
            prepare=self._restore_groups if fits else lambda _: None,
        )  # fmt: skip
        return rest | {"state_dict": self._module.state_dict()}  # hooks of the module look at it

    def _restore_groups(self, rest: dict[str, Any]) -> None:
        """Let callbacks that thaw parts rebuild the param groups of the run that was saved.

        Where ranks load after `setup`, Lightning restores callbacks too late for that.
        """
        trainer, states = self._module.trainer, rest.get("callbacks", {})
        for callback in trainer.callbacks:  # type: ignore[attr-defined]
            if isinstance(callback, BaseFinetuning) and callback.state_key in states:
                callback.load_state_dict(deepcopy(states[callback.state_key]))
                callback.on_fit_start(trainer, self._module)

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        """Load the weights of a single file; those of a directory are there already."""
        if self._reads_file:
            super().load_model_state_dict(checkpoint, strict)

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        """Load the optimizer states of a single file; each rank keeps its own rows."""
        for optimizer, state in zip(self.optimizers, checkpoint["optimizer_states"], strict=False):
            optimizer.load_state_dict(state)

    # the end

    def on_exception(self, exception: BaseException) -> None:
        """Name the rank that failed: the others only see that it is gone."""
        self.recorded.close()
        exception.add_note(f"raised on rank {self.global_rank} of {self.world_size}")

    def teardown(self) -> None:
        """Leave the module sharded: it can be fitted, tested and saved again."""
        assert self.cluster_environment is not None, "a Trainer sets it first"
        assert self.accelerator is not None, "a Trainer sets it first"
        self.cluster_environment.teardown()
        self.precision_plugin.teardown()
        self.accelerator.teardown()
        self.checkpoint_io.teardown()


def _refuse_copies(trainer: Trainer) -> None:
    """Raise `ConfigError` for callbacks that average weights in a copy of the whole module."""
    for callback in trainer.callbacks:  # type: ignore[attr-defined]
        if isinstance(callback, (StochasticWeightAveraging, WeightAveraging)):
            wanted = "callbacks that keep no copy of the module"
            hint = "onefold.ema(module, decay=...) averages sharded weights: see "
            hint += page("docs/guides/ema.md")
            raise ConfigError(wanted, f"a {type(callback).__name__}", hint=hint)
