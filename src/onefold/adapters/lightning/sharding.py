"""The core of both strategies: the arguments of `onefold.shard`, and Lightning's precision."""

from __future__ import annotations

import os
from collections.abc import Sequence
from inspect import signature
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.optim import Optimizer

from onefold import config
from onefold.api import shard
from onefold.config import Precision, PrecisionChoice, StageChoice
from onefold.engine.joining import bind
from onefold.engine.registry import engine_of, is_sharded
from onefold.errors import ConfigError
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
        signature(shard).bind(None, **choices)  # `TypeError` for a name that it does not have
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
            raise ConfigError(
                "one choice of precision",
                f"precision={known[1]!r} of Lightning and precision={self._precision!r} of the "
                "strategy",
                hint="leave one of them out",
            )
        return self._precision

    def apply(
        self, strategy: Any, module: nn.Module, optimizers: Sequence[Optimizer], plugin: Any
    ) -> None:
        """Shard a module and its optimizers; one that is sharded already gets the optimizers.

        `strategy` knows devices and nodes, `plugin` is its precision.
        """
        _check_ranks()
        precision = self.precision_with(plugin)
        if not is_sharded(module):
            # where `shard` would not see Lightning's choice of device and nodes
            kind, nodes = strategy.root_device.type, strategy.num_nodes
            mesh: MeshChoice = None
            if self._choices.get("wire") is not None and nodes > 1:
                mesh = init_device_mesh(kind, (nodes, strategy.num_processes))
            elif kind == "cpu" and torch.accelerator.is_available():
                mesh = init_device_mesh("cpu", (nodes * strategy.num_processes,))
            choices: dict[str, Any] = {"mesh": mesh, "precision": precision, **self._choices}
            shard(module, list(optimizers) or None, stage=self._stage, **choices)
            return
        engine = engine_of(module)
        number = engine.recipe.stage.number
        if optimizers and self._stage not in ("auto", number):
            wanted = f"a module that is not sharded, or at stage {self._stage}"
            hint = "build the module anew and load its checkpoint, or keep the stage"
            raise ConfigError(wanted, f"a {type(module).__name__} at stage {number}", hint=hint)
        for optimizer in optimizers:
            bind(optimizer, engine)


def _check_ranks() -> None:
    """Raise `ConfigError` if Lightning has missed that a launcher started several ranks."""
    ranks, launched = dist.get_world_size(), launcher.world_size()
    if "RANK" in os.environ and ranks < launched:  # Lightning's own launcher sets no RANK
        raise ConfigError(
            f"Lightning to train on the {launched} ranks of WORLD_SIZE",
            f"a process group of {ranks}",
            hint="start it with torchrun, or give Trainer(plugins=) the environment of the "
            "launcher, such as lightning.pytorch.plugins.environments.KubeflowEnvironment()",
        )


def share_buffers(module: nn.Module) -> None:
    """Give every rank the buffers of rank 0, one message a dtype, as DDP does before a forward."""
    group = engine_of(module).group
    by_dtype: dict[torch.dtype, list[Tensor]] = {}
    for buffer in module.buffers() if group.world_size > 1 else ():
        by_dtype.setdefault(buffer.dtype, []).append(buffer.detach())
    for buffers in by_dtype.values():
        flat = torch.cat([buffer.reshape(-1) for buffer in buffers])
        group.broadcast(flat, 0).wait()
        if group.rank > 0:
            parts = flat.split([buffer.numel() for buffer in buffers])
            for buffer, part in zip(buffers, parts, strict=True):
                buffer.copy_(part.view_as(buffer))
