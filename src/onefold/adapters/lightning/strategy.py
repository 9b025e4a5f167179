"""`onefold.lightning.Strategy`: one name for Trainer and for Fabric, whose strategy is here.

Lightning has two kinds of strategies, whose methods have the same names and other arguments. The
object is a Trainer's. It becomes a Fabric's when Fabric, and Fabric alone, sets its precision.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack, nullcontext
from os import PathLike
from pathlib import Path
from typing import Any, Literal

import torch
from lightning.fabric.plugins.collectives.torch_collective import default_pg_timeout
from lightning.fabric.strategies import DDPStrategy
from lightning.fabric.strategies.strategy import _BackwardSyncControl
from lightning.fabric.utilities.types import _Stateful
from torch import nn
from torch.optim import Optimizer

from onefold.adapters.lightning import checkpoint_io as checkpoints
from onefold.adapters.lightning.trainer import Sharding, TrainerStrategy, share_buffers
from onefold.api import accumulate
from onefold.config import StageChoice
from onefold.engine.registry import is_sharded
from onefold.errors import CheckpointError, ConfigError, StateError
from onefold.recording.third_step import ThirdStep
from onefold.versions import warn_if_untested
from onefold.wire.ranks import as_timeout


class FabricStrategy(DDPStrategy):
    """Shards a module in `fabric.setup`."""

    sharding: Sharding

    def _configure_launcher(self) -> None:
        self.sharding.precision_with(self.precision)
        self._backward_sync_control = AccumulationControl()
        super()._configure_launcher()

    # set up

    def module_init_context(self, empty_init: bool | None = None) -> AbstractContextManager[Any]:
        """With `empty_init`, build on `meta`: `shard` gives each unit its values."""
        stack = ExitStack()
        if empty_init:
            stack.enter_context(torch.device("meta"))
        stack.enter_context(self.precision.module_init_context())
        return stack

    def module_to_device(self, module: nn.Module) -> None:
        """Leave the module where it is: `shard` moves it, unit by unit."""

    def setup_module(self, module: nn.Module) -> nn.Module:  # type: ignore[override]
        """Shard the module; optimizers may be built on it afterwards."""
        return self._sharded(module, [])

    def setup_module_and_optimizers(
        self, module: nn.Module, optimizers: list[Optimizer], scheduler: Any = None
    ) -> tuple[nn.Module, list[Optimizer], Any]:
        """Shard the module and its optimizers, which stay the same objects."""
        return self._sharded(module, optimizers), optimizers, scheduler

    def _sharded(self, module: nn.Module, optimizers: list[Optimizer]) -> nn.Module:
        is_new = not is_sharded(module)
        self.sharding.apply(self, module, optimizers, self.precision)
        if is_new:
            module.register_forward_pre_hook(lambda module, _: share_buffers(module))
        return module

    # checkpoints

    def save_checkpoint(
        self, path: str | Path, state: dict[str, Any], storage_options: Any = None,
        filter: dict[str, Callable[[str, Any], bool]] | None = None,
    ) -> None:  # fmt: skip
        """Save a directory that loads at any number of ranks and stage. A collective.

        `state`: the module that was set up, its optimizers, and other state, by name.
        """
        if storage_options is not None or filter is not None:
            got = "storage_options" if storage_options is not None else "filter"
            raise CheckpointError("neither storage_options nor filter", got, hint="leave it out")
        module, optimizers, others = _split_state(state)
        rest = {k: v.state_dict() if isinstance(v, _Stateful) else v for k, v in others.items()}
        checkpoints.save_folder(Path(self.broadcast(path)), module, optimizers, rest)

    def load_checkpoint(
        self, path: str | Path, state: Any = None, strict: bool = True,
        weights_only: bool | None = None,
    ) -> dict[str, Any]:  # fmt: skip
        """Load a directory of `save_checkpoint`, or a single file, into `state`, in place.

        Returns: the entries that `state` did not name.
        """
        path = Path(self.broadcast(path))
        if path.is_file():
            return super().load_checkpoint(path, state, strict, weights_only)
        named = {"module": state} if isinstance(state, nn.Module) else state or {}
        module, optimizers, others = _split_state(named)
        rest = checkpoints.load_folder(path, module, optimizers, weights_only=weights_only)
        if isinstance(state, nn.Module):
            return {}
        missing = [name for name in others if name not in rest]
        if missing and strict:
            hint = "strict=False loads the others"
            raise CheckpointError(f"entries {missing} in {str(path)!r}", list(rest), hint=hint)
        for name, value in others.items():
            if name in rest and isinstance(value, _Stateful):
                value.load_state_dict(rest.pop(name))
            elif name in rest:
                state[name] = rest.pop(name)
        return rest


class AccumulationControl(_BackwardSyncControl):
    """`fabric.no_backward_sync`: micro-batches that are not the last of a step."""

    def no_backward_sync(self, module: nn.Module, enabled: bool) -> AbstractContextManager[Any]:
        return accumulate(module) if enabled else nullcontext()


def _split_state(state: dict[str, Any]) -> tuple[nn.Module, list[Optimizer], dict[str, Any]]:
    """Split a state into the sharded module, its optimizers, and the others."""
    modules = [v for v in state.values() if isinstance(v, nn.Module) and is_sharded(v)]
    if len(modules) != 1:
        wanted = "one module of fabric.setup in the state"
        hint = "save and load each module, and its optimizers, in a directory of its own"
        raise StateError(wanted, f"{len(modules)} in {list(state)}", hint=hint)
    optimizers = [v for v in state.values() if isinstance(v, Optimizer)]
    known = {id(modules[0]), *map(id, optimizers)}
    return modules[0], optimizers, {k: v for k, v in state.items() if id(v) not in known}


class Strategy(TrainerStrategy, FabricStrategy):  # pyright: ignore
    """Shard the module that a Trainer fits, or that Fabric sets up.

    Args:
        stage: as in `onefold.shard`.
        start_method: how Lightning starts local processes: "popen" runs the script again, "fork"
            works in notebooks. Without meaning under torchrun.
        process_group_backend: None takes gloo on CPUs and nccl on GPUs.
        record: a folder for a page about the third step of a Trainer, as `onefold.record` writes
            it; rank 0 records and writes. A loop of Fabric calls `onefold.record` itself.
        choices: the other arguments of `onefold.shard`. None for `precision` takes Lightning's, if
            that is not "32-true". With `wire` each of Lightning's nodes is one. `timeout` is
            Lightning's by default, 30 minutes.

    Raises:
        ConfigError: a choice that cannot work, when the strategy, or the Trainer, is built.

    Example:
        >>> trainer = lightning.pytorch.Trainer(strategy=onefold.lightning.Strategy(stage=3))
        >>> trainer.fit(module, loader)
    """

    def __init__(
        self,
        stage: StageChoice = 3,
        *,
        start_method: Literal["popen", "spawn", "fork", "forkserver"] = "popen",
        process_group_backend: str | None = None,
        record: str | PathLike[str] | None = None,
        **choices: Any,
    ) -> None:
        warn_if_untested("lightning")
        self.sharding = Sharding(stage=stage, **choices)
        self.recorded = ThirdStep(record)
        self._refuses_fabric = record is not None
        for kind in (TrainerStrategy, FabricStrategy):
            kind.__init__(
                self,
                timeout=as_timeout(choices.get("timeout")) or default_pg_timeout,
                start_method=start_method,
                process_group_backend=process_group_backend,
            )

    @property
    def precision(self) -> Any:
        """The precision plugin of Fabric; a Trainer's is `precision_plugin`."""
        return super().precision

    @precision.setter
    def precision(self, precision: Any) -> None:
        self._precision = precision
        if precision is None:
            return
        if type(self) is not Strategy:
            wanted = "onefold.lightning.Strategy itself for Fabric"
            hint = "derive from onefold.adapters.lightning.strategy.FabricStrategy as well"
            raise ConfigError(wanted, f"its subclass {type(self).__name__}", hint=hint)
        if self._refuses_fabric:
            hint = "`with onefold.record(module) as recording:` around a step of your loop"
            raise ConfigError("no record= with Fabric", "a folder", hint=hint)
        self.__class__ = FabricStrategy  # pyright: ignore
