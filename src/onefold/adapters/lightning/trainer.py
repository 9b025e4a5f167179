"""The strategy of `lightning.pytorch.Trainer`.

Lightning's DDP strategy starts processes, knows ranks and reduces metrics. This one replaces what
it does to the module, the optimizers and the checkpoints.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
from lightning.fabric.plugins import CheckpointIO
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import StochasticWeightAveraging, WeightAveraging
from lightning.pytorch.core.optimizer import _MockOptimizer
from lightning.pytorch.strategies import DDPStrategy
from lightning.pytorch.trainer.states import TrainerFn
from torch.optim import Optimizer

from onefold.adapters.lightning import checkpoint_io as checkpoints
from onefold.adapters.lightning.sharding import Sharding, share_buffers
from onefold.api import accumulate
from onefold.engine.registry import is_sharded
from onefold.errors import ConfigError


class TrainerStrategy(DDPStrategy):
    """Shards the LightningModule before the loop of a Trainer starts."""

    sharding: Sharding
    _reads_file = False  # the last checkpoint was a single file of Lightning

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
        checkpoints.write(Path(self.broadcast(filepath)), self._module, optimizers, rest)

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
        rest = checkpoints.read(path, self._module, optimizers, weights_only=weights_only)
        return rest | {"state_dict": self._module.state_dict()}  # hooks of the module look at it

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
            raise ConfigError(
                "callbacks that keep no copy of the module",
                f"a {type(callback).__name__}",
                hint="onefold.ema(module, decay=...) averages sharded weights: see "
                "docs/guides/ema.md",
            )
