"""Train PyTorch models that do not fit on one GPU: ZeRO 1-3 in one line, the loop unchanged.

    import onefold
    onefold.shard(model, optimizer, stage=3)

Names are resolved on first use, so importing this package costs nothing and starts nothing.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # `as`: type checkers take these names for public ones
    from onefold.adapters.deepspeed.convert import from_deepspeed as from_deepspeed
    from onefold.api import accumulate as accumulate
    from onefold.api import report as report
    from onefold.api import shard as shard
    from onefold.api import stream as stream
    from onefold.api import unsharded as unsharded
    from onefold.axes.clipping import clip_grad_norm_ as clip_grad_norm_
    from onefold.axes.pipelines.drive import pipeline as pipeline
    from onefold.axes.sequence.splitting import split_sequence as split_sequence
    from onefold.checkpoint.pretrained import full_state_dict as full_state_dict
    from onefold.checkpoint.pretrained import load_pretrained as load_pretrained
    from onefold.checkpoint.pretrained import save_pretrained as save_pretrained
    from onefold.checkpoint.save import save as save
    from onefold.config import Offload as Offload
    from onefold.config import Precision as Precision
    from onefold.engine.behaviour import declare as declare
    from onefold.engine.ema import ema as ema
    from onefold.engine.precision import GradScaler as GradScaler
    from onefold.errors import CheckpointError as CheckpointError
    from onefold.errors import ConfigError as ConfigError
    from onefold.errors import OnefoldError as OnefoldError
    from onefold.errors import StateError as StateError
    from onefold.errors import TierError as TierError
    from onefold.errors import WireError as WireError
    from onefold.inference.stream import generating as generating
    from onefold.layered.accumulate import accumulate_layers as accumulate_layers
    from onefold.mixed.sampler import weigh as weigh
    from onefold.outer.islands import islands as islands
    from onefold.planner.planning import plan as plan
    from onefold.recording.recorder import record as record
    from onefold.resume import latest as latest
    from onefold.resume import load as load
    from onefold.wire_config import Wire as Wire

__version__ = "0.2.0"

_HOMES = {
    "onefold.adapters.deepspeed.convert": "from_deepspeed",
    "onefold.api": "accumulate report shard stream unsharded",
    "onefold.axes.clipping": "clip_grad_norm_",
    "onefold.axes.pipelines.drive": "pipeline",
    "onefold.axes.sequence.splitting": "split_sequence",
    "onefold.checkpoint.pretrained": "full_state_dict load_pretrained save_pretrained",
    "onefold.checkpoint.save": "save",
    "onefold.config": "Offload Precision",
    "onefold.engine.behaviour": "declare",
    "onefold.engine.ema": "ema",
    "onefold.engine.precision": "GradScaler",
    "onefold.errors": "CheckpointError ConfigError OnefoldError StateError TierError WireError",
    "onefold.inference.stream": "generating",
    "onefold.layered.accumulate": "accumulate_layers",
    "onefold.mixed.sampler": "weigh",
    "onefold.outer.islands": "islands",
    "onefold.planner.planning": "plan",
    "onefold.recording.recorder": "record",
    "onefold.resume": "latest load",
    "onefold.wire_config": "Wire",
}
"""The public names of each module."""

_MODULES = {name: module for module, names in _HOMES.items() for name in names.split()}

_ROOMS = {
    "experts": "onefold.axes.experts",
    "hf": "onefold.hf",
    "lightning": "onefold.lightning",
    "mixed": "onefold.mixed",
}
"""Imported on first use: `onefold.hf.Callback` after `import onefold`."""

__all__ = sorted(_MODULES)  # pyright: ignore[reportUnsupportedDunderAll]


def __getattr__(name: str) -> Any:
    if name in _ROOMS:
        return import_module(_ROOMS[name])
    if name not in _MODULES:
        raise AttributeError(f"module 'onefold' has no attribute {name!r}")
    import_module("onefold.versions").check_torch()
    return getattr(import_module(_MODULES[name]), name)


def __dir__() -> list[str]:
    return [*__all__, "__version__"]
