"""The strategy of `lightning.fabric.Fabric`."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack, nullcontext
from pathlib import Path
from typing import Any

import torch
from lightning.fabric.strategies import DDPStrategy
from lightning.fabric.strategies.strategy import _BackwardSyncControl
from lightning.fabric.utilities.types import _Stateful
from torch import nn
from torch.optim import Optimizer

from onefold.adapters.lightning import checkpoint_io as checkpoints
from onefold.adapters.lightning.sharding import Sharding, share_buffers
from onefold.api import accumulate
from onefold.engine.registry import is_sharded
from onefold.errors import CheckpointError, StateError


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
        mesh = self.sharding.mesh(self.root_device, self.num_nodes, self.num_processes)
        is_new = not is_sharded(module)
        self.sharding.apply(module, optimizers, self.precision, mesh)
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
        module, optimizers, others = _parts(state)
        rest = {k: v.state_dict() if isinstance(v, _Stateful) else v for k, v in others.items()}
        checkpoints.write(Path(self.broadcast(path)), module, optimizers, rest)

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
        module, optimizers, others = _parts(named)
        rest = checkpoints.read(path, module, optimizers, weights_only=weights_only)
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


def _parts(state: dict[str, Any]) -> tuple[nn.Module, list[Optimizer], dict[str, Any]]:
    """Split a state into the sharded module, its optimizers, and the others."""
    modules = [v for v in state.values() if isinstance(v, nn.Module) and is_sharded(v)]
    if len(modules) != 1:
        raise StateError(
            "one module of fabric.setup in the state",
            f"{len(modules)} in {list(state)}",
            hint="save and load each module, and its optimizers, in a directory of its own",
        )
    optimizers = [v for v in state.values() if isinstance(v, Optimizer)]
    known = {id(modules[0]), *map(id, optimizers)}
    return modules[0], optimizers, {k: v for k, v in state.items() if id(v) not in known}
